"""Windows of a token stream: documents are concatenated and cut into rows, without padding.

Shapes: T sequence.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp_jax.data.checks import check_positive
from fsdp_jax.data.examples import Row, Settings, Tokens, read_slices
from fsdp_jax.data.tokenizer import Tokenizer, encode_documents, token_dtype
from fsdp_jax.errors import ConfigError


@dataclass(frozen=True, eq=False)
class TokenStream:
    """The tokens of concatenated documents, in memory or on disk, and where each starts."""

    tokens: Tokens
    # int64 [documents], the index of each one's first token; None: they are not kept apart.
    starts: np.ndarray | None


def encode_stream(
    texts: Iterable[str], tokenizer: Tokenizer, *, special: bool = False
) -> TokenStream:
    """Encodes all of `texts` into memory; see `encode_documents`."""
    dtype = token_dtype(tokenizer.vocab_size)
    encoded = encode_documents(texts, tokenizer, special=special)
    pieces = [piece.astype(dtype) for piece in encoded]
    # an empty array first: there may be no pieces, and `concatenate` needs one
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    tokens = np.concatenate([np.zeros(0, dtype), *pieces])
    tokens.flags.writeable = False
    return TokenStream(tokens, np.cumsum(lengths) - lengths)


class Windows:
    """Random access to windows of T+1 tokens, each starting at the last token of the one before.

    Every token but the first is predicted once per epoch, except the last ones, fewer than T, which
    fill no window. With `starts`, the index of each document's first token, documents are kept
    apart: none attends to another, and a first token is not predicted from the one before it.

    Raises ConfigError if the stream is shorter than one window.
    """

    def __init__(self, tokens: Tokens, *, sequence_length: int, starts: np.ndarray | None = None):
        check_positive("data.sequence_length", sequence_length)
        needed = sequence_length + 1
        if len(tokens) < needed:
            what, where = "the corpus is shorter than one sequence", "data.sequence_length"
            expected = f"at least {needed} tokens (the sequence length and one more)"
            got = f"a corpus of {len(tokens)} tokens"
            fix = "shorten data.sequence_length or use more text"
            raise ConfigError(what, where=where, expected=expected, got=got, fix=fix)
        self.tokens = tokens
        self.starts = starts
        self.sequence_length = sequence_length
        settings = {"sequence_length": sequence_length, "corpus_tokens": len(tokens)}
        if starts is not None:
            settings["segments"] = True
        self.settings: Settings = settings

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> Row:
        """Returns `tokens`, int32 [T+1]; with `starts` also what keeps documents apart.

        That is `segments`, int32 [T], which count documents from 1 in each row, `positions`, int32
        [T], which count from the start of the document or of the row, and `mask`, float32 [T].
        """
        return {name: array[0] for name, array in self.read_rows([index]).items()}

    def read_rows(self, indices: Sequence[int]) -> Row:
        """Returns the rows of `indices`, {name: array [rows, ...]}; see `__getitem__`."""
        length = self.sequence_length + 1
        firsts = np.array(indices, np.int64) * self.sequence_length
        tokens = read_slices(self.tokens, firsts.tolist(), length)
        if self.starts is None:
            return {"tokens": tokens}
        # the document of each token, and where it begins, in the stream or with the window
        places = firsts[:, None] + np.arange(length)
        document = np.searchsorted(self.starts, places, side="right") - 1
        begins = np.maximum(self.starts[document], firsts[:, None])
        return {
            "tokens": tokens,
            "segments": (document - document[:, :1] + 1)[:, :-1].astype(np.int32),
            "positions": (places - begins)[:, :-1].astype(np.int32),
            "mask": (document[:, 1:] == document[:, :-1]).astype(np.float32),
        }
