"""Windows of a stream of tokens: documents joined end to end and cut into rows, nothing padded,
nothing left out.

Shapes: T sequence.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fsdp_jax.data.examples import Row, Settings, Tokens
from fsdp_jax.data.tokenizer import Tokenizer, encoded, token_dtype
from fsdp_jax.errors import ConfigError, message


@dataclass(frozen=True, eq=False)
class Stream:
    """Documents joined end to end.

    Attributes:
        tokens: ids, one dimension; in memory or on the disk.
        starts: int64 [documents], where each begins in `tokens`, not decreasing, the first at 0.

    """

    tokens: Tokens
    starts: np.ndarray


def stream_of(texts: Iterable[str], tokenizer: Tokenizer) -> Stream:
    """Encodes all of `texts`, each with its end-of-text token, into memory."""
    dtype = token_dtype(tokenizer.vocab_size)
    pieces = [piece.astype(dtype) for piece in encoded(texts, tokenizer)]
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    tokens = np.concatenate([np.zeros(0, dtype), *pieces])
    tokens.flags.writeable = False
    return Stream(tokens, np.cumsum(lengths) - lengths)


class Windows:
    """Random access to windows of T+1 tokens, each starting at the last token of the one before.

    Every token is predicted once per epoch; what is left at the end, less than T tokens, is not
    used. With `starts`, documents are kept apart: none sees another, and the target that would
    cross into the next one does not count. Raises ConfigError where the stream is shorter than one
    window.
    """

    def __init__(self, tokens: Tokens, *, sequence_length: int, starts: np.ndarray | None = None):
        check_positive("data.sequence_length", sequence_length)
        if len(tokens) < sequence_length + 1:
            raise ConfigError(
                message(
                    "The corpus is shorter than one sequence.",
                    where="data.sequence_length",
                    expected=f"at least {sequence_length + 1} tokens (sequence length {sequence_length}, and one more)",
                    got=f"a corpus of {len(tokens)} tokens",
                    fix="shorten data.sequence_length or use more text",
                )
            )
        self.tokens, self.starts = tokens, starts
        self.sequence_length = sequence_length
        self.settings: Settings = {
            "sequence_length": sequence_length,
            "corpus_tokens": len(tokens),
            **({} if starts is None else {"segments": True}),
        }

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> Row:
        """`tokens`, int32 [T+1]; with `starts` also `segments` and `positions`, int32 [T], and
        `mask`, float32 [T].

        Segments are numbered from 1 in each row. Positions are counted from where the document
        begins, or the row.
        """
        first = int(index) * self.sequence_length
        tokens = np.asarray(self.tokens[first : first + self.sequence_length + 1]).astype(np.int32)
        if self.starts is None:
            return {"tokens": tokens}
        places = np.arange(first, first + self.sequence_length + 1)
        document = np.searchsorted(self.starts, places, side="right") - 1
        begins = np.maximum(self.starts[document], first)
        return {
            "tokens": tokens,
            "segments": (document - document[0] + 1)[:-1].astype(np.int32),
            "positions": (places - begins)[:-1].astype(np.int32),
            "mask": (document[1:] == document[:-1]).astype(np.float32),
        }


def check_positive(where: str, value: int) -> None:
    """Raises ConfigError where a size is less than 1."""
    if value < 1:
        raise ConfigError(
            message("A size is not positive.", where=where, expected="at least 1", got=value)
        )
