"""Span corruption, T5's training objective (Raffel et al., 2020, section 3.1.4).

A share of each chunk of text is removed, in spans. The inputs have a sentinel in place of each
span; the targets are the sentinels, each followed by the tokens it replaces. Both end in the
end-of-text token, if the tokenizer has one.

Shapes: S inputs, T targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdp_jax.data.checks import check_positive
from fsdp_jax.data.examples import Row, Settings, Tokens, random_uniforms, text_to_text_row
from fsdp_jax.data.tokenizer import Tokenizer
from fsdp_jax.errors import ConfigError

NOISE = 0.15  # share of the tokens that is removed
MEAN_SPAN = 3.0  # tokens of a span, on average
SEQUENCE_LENGTH = "data.sequence_length"


@dataclass(frozen=True)
class CorruptionSizes:
    """Of a chunk of text, in tokens: its length, how many are removed, and the target's length."""

    chunk: int
    removed: int
    spans: int  # that the removed tokens form
    targets: int


def corruption_sizes(inputs_length: int, *, end: int | None) -> CorruptionSizes:
    """Returns the sizes of the longest chunk of text that, once corrupted, fits the inputs.

    `inputs_length`: in tokens. `end`: the end-of-text token, if there is one.
    Raises ConfigError if no chunk fits.
    """
    extra = end is not None
    _check_at_least(2 + extra, inputs_length, "the inputs are too short", SEQUENCE_LENGTH)

    def sizes_of(chunk: int) -> CorruptionSizes:
        removed = min(max(round(chunk * NOISE), 1), chunk - 1)
        spans = min(max(round(removed / MEAN_SPAN), 1), removed, chunk - removed)
        return CorruptionSizes(chunk, removed, spans, targets=removed + spans + extra)

    sizes = larger = sizes_of(2)
    while larger.chunk - larger.removed + larger.spans + extra <= inputs_length:
        sizes, larger = larger, sizes_of(larger.chunk + 1)
    return sizes


class SpanCorruption:
    """Random access to corrupted chunks of `tokens`, which do not overlap.

    The removed spans depend on `seed` and the row's index alone, so every epoch has the same.
    `sentinels` are ids for the spans, in order; see `sentinels_of`. `end` is the end-of-text token,
    None without one.

    Raises ConfigError if the lengths, sentinels and text do not fit together.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        inputs_length: int,
        targets_length: int,
        sentinels: Sequence[int],
        end: int | None,
        seed: int,
    ) -> None:
        check_positive(SEQUENCE_LENGTH, inputs_length)
        # Inputs, targets, sentinels and corpus must be long enough for the spans.
        sizes = corruption_sizes(inputs_length, end=end)
        what = "the targets are too short"
        _check_at_least(sizes.targets, targets_length, what, "data.target_length")
        what = "there are too few sentinels"
        fix = (
            f"leave {sizes.spans} ids of the model's vocabulary beyond the tokenizer's, "
            "or use a tokenizer that has them"
        )
        _check_at_least(sizes.spans, len(sentinels), what, "model.vocab_size", fix)
        what = "the corpus is shorter than one sequence"
        _check_at_least(sizes.chunk, len(tokens), what, SEQUENCE_LENGTH)
        self.sizes = sizes
        self.tokens = tokens
        self.end = end
        self.seed = seed
        self.lengths = (inputs_length, targets_length)
        self.sentinels = np.asarray(sentinels[: sizes.spans], np.int32)
        self.settings: Settings = {
            "inputs_length": inputs_length,
            "targets_length": targets_length,
            "corpus_tokens": len(tokens),
            "noise": NOISE,
            "mean_span": MEAN_SPAN,
            "corruption_seed": seed,
            "first_sentinel": int(self.sentinels[0]),
        }

    def __len__(self) -> int:
        return len(self.tokens) // self.sizes.chunk

    def __getitem__(self, index: int) -> Row:
        """Returns a `text_to_text_row`. Raises ConfigError if the text contains a sentinel."""
        sizes = self.sizes
        first = int(index) * sizes.chunk
        text = np.asarray(self.tokens[first : first + sizes.chunk]).astype(np.int32)
        if np.isin(text, self.sentinels).any():
            what = "the text contains a sentinel"
            where = f"tokens {first} to {first + sizes.chunk}"
            got = f"one of the ids {self.sentinels.tolist()}"
            fix = "use sentinels that no text is encoded to"
            raise ConfigError(what, where=where, got=got, fix=fix)
        # Kept and removed runs alternate, starting with a kept one.
        random = random_uniforms(self.seed, int(index), sizes.chunk)
        keep = sizes.chunk - sizes.removed
        kept = _random_lengths(keep, sizes.spans, random[:keep])
        removed = _random_lengths(sizes.removed, sizes.spans, random[keep:])
        runs = np.stack([kept, removed], axis=1).ravel()
        is_removed = np.repeat(np.tile([False, True], sizes.spans), runs)
        # A sentinel follows each kept run in the inputs and precedes each span in the targets.
        end = np.array([] if self.end is None else [self.end], np.int32)
        inputs = np.insert(text[~is_removed], np.cumsum(kept), self.sentinels)
        targets = np.insert(text[is_removed], np.cumsum(removed) - removed, self.sentinels)
        inputs = np.concatenate([inputs, end])
        targets = np.concatenate([targets, end])
        return text_to_text_row(inputs, targets, self.lengths)


def sentinels_of(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Returns the ids of sentinels: the tokenizer's own, or the model's beyond it, descending."""
    return list(tokenizer.sentinels or range(vocab_size - 1, tokenizer.vocab_size - 1, -1))


def _random_lengths(total: int, parts: int, random: np.ndarray) -> np.ndarray:
    """Splits `total` into `parts` lengths of at least 1, uniformly; `random` is float64 [total]."""
    cuts = np.sort(np.argsort(random[: total - 1], kind="stable")[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def _check_at_least(needed: int, got: int, what: str, where: str, fix: str = "") -> None:
    if got < needed:
        raise ConfigError(what, where=where, expected=f"at least {needed}", got=got, fix=fix)
