"""Span corruption, T5's training objective (Raffel et al., 2020, section 3.1.4).

A share `noise` of each chunk of text is removed, in spans of `mean_span` tokens on average. The
inputs have a sentinel in place of each span; the targets are the sentinels, each followed by the
tokens it replaces. Both end in the end-of-text token, if the tokenizer has one.

Shapes: S inputs, T targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdp_jax.data.checks import check_positive, config_error
from fsdp_jax.data.examples import Row, Settings, Tokens, length_mask, pad, uniforms
from fsdp_jax.data.tokenizer import Tokenizer

SEQUENCE_LENGTH = "data.sequence_length"


@dataclass(frozen=True)
class CorruptionSizes:
    """Sizes of one corrupted chunk.

    Attributes:
        chunk: tokens of text.
        removed: tokens removed from it.
        spans: how many spans they form.
        targets: the length of the targets.

    """

    chunk: int
    removed: int
    spans: int
    targets: int


def corruption_sizes(
    inputs_length: int, *, end: int | None, noise: float = 0.15, mean_span: float = 3.0
) -> CorruptionSizes:
    """Returns the sizes of the longest chunk whose corrupted inputs fit `inputs_length`.

    Raises ConfigError if no chunk fits.
    """
    sizes = None
    extra = end is not None
    chunk = 2
    while True:
        removed = min(max(round(chunk * noise), 1), chunk - 1)
        spans = min(max(round(removed / mean_span), 1), removed, chunk - removed)
        if chunk - removed + spans + extra > inputs_length:
            break
        sizes = CorruptionSizes(chunk, removed, spans, targets=removed + spans + extra)
        chunk += 1
    if sizes is None:
        _check_at_least(2 + extra, inputs_length, "The inputs are too short.", SEQUENCE_LENGTH)
    assert sizes is not None
    return sizes


class SpanCorruption:
    """Random access to corrupted chunks of a token stream, which do not overlap.

    The removed spans depend on `seed` and the row's index alone, so every epoch has the same.

    Args:
        tokens: the stream.
        inputs_length: S.
        targets_length: T; the `targets` of `corruption_sizes`, or more.
        sentinels: ids for the spans, in order; see `sentinels_of`.
        end: the end-of-text token.
        seed: of the spans.
        noise: share of the tokens that is removed.
        mean_span: tokens of a span, on average.

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
        noise: float = 0.15,
        mean_span: float = 3.0,
    ) -> None:
        check_positive(SEQUENCE_LENGTH, inputs_length)
        if not (0 < noise < 1 and mean_span >= 1):
            what = "No spans can be removed from the text."
            expected = "noise between 0 and 1, a mean span of at least 1"
            got = f"noise {noise}, mean span {mean_span}"
            raise config_error(what, expected=expected, got=got)
        # Inputs, targets, sentinels and corpus must be long enough for the spans.
        sizes = corruption_sizes(inputs_length, end=end, noise=noise, mean_span=mean_span)
        what = "The targets are too short."
        _check_at_least(sizes.targets, targets_length, what, "data.target_length")
        what = "There are too few sentinels."
        fix = (
            f"leave {sizes.spans} ids of the model's vocabulary beyond the tokenizer's, "
            "or use a tokenizer that has them"
        )
        _check_at_least(sizes.spans, len(sentinels), what, "model.vocab_size", fix)
        what = "The corpus is shorter than one sequence."
        _check_at_least(sizes.chunk, len(tokens), what, SEQUENCE_LENGTH)
        # What a saved position depends on is in `settings`.
        self.sizes = sizes
        self.tokens = tokens
        self.end = end
        self.seed = seed
        self.inputs_length = inputs_length
        self.targets_length = targets_length
        self.sentinels = np.asarray(sentinels[: sizes.spans], np.int32)
        self.settings: Settings = {
            "inputs_length": inputs_length,
            "targets_length": targets_length,
            "corpus_tokens": len(tokens),
            "noise": noise,
            "mean_span": mean_span,
            "corruption_seed": seed,
            "first_sentinel": int(self.sentinels[0]),
        }

    def __len__(self) -> int:
        return len(self.tokens) // self.sizes.chunk

    def __getitem__(self, index: int) -> Row:
        """Returns `inputs`, `inputs_mask`, int32 [S]; `targets`, int32 [T], `mask`, float32 [T].

        Raises ConfigError if the text contains a sentinel.
        """
        sizes = self.sizes
        first = int(index) * sizes.chunk
        text = np.asarray(self.tokens[first : first + sizes.chunk]).astype(np.int32)
        if np.isin(text, self.sentinels).any():
            what = "The text contains a sentinel."
            where = f"tokens {first} to {first + sizes.chunk}"
            got = f"one of the ids {self.sentinels.tolist()}"
            fix = "use sentinels that no text is encoded to"
            raise config_error(what, where=where, got=got, fix=fix)
        # Kept and removed runs alternate, starting with a kept one.
        random = uniforms(self.seed, int(index), sizes.chunk)
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
        return {
            "inputs": pad(inputs, self.inputs_length),
            "inputs_mask": length_mask(len(inputs), self.inputs_length, np.int32),
            "targets": pad(targets, self.targets_length),
            "mask": length_mask(len(targets), self.targets_length),
        }


def sentinels_of(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Returns the tokenizer's sentinels, or the model's ids beyond the tokenizer's, descending."""
    return list(tokenizer.sentinels or range(vocab_size - 1, tokenizer.vocab_size - 1, -1))


def _random_lengths(total: int, parts: int, random: np.ndarray) -> np.ndarray:
    """Splits `total` into `parts` lengths of at least 1, uniformly; `random` is float64 [total]."""
    cuts = np.sort(np.argsort(random[: total - 1], kind="stable")[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def _check_at_least(needed: int, got: int, what: str, where: str, fix: str = "") -> None:
    if got < needed:
        raise config_error(what, where=where, expected=f"at least {needed}", got=got, fix=fix)
