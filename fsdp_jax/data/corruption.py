"""Span corruption, the objective that T5 was trained with (Raffel et al., 2020, section 3.1.4).

Of each stretch of text, `noise` of the tokens are taken out in spans of `mean_span` tokens on
average. In the inputs a sentinel stands for each span; the targets are the sentinels, each followed
by what it stands for. Both end in the end-of-text token, where there is one.

Shapes: S inputs, T targets.
"""

from collections.abc import Sequence

import numpy as np

from fsdp_jax.data.examples import Row, Settings, Tokens, padded, real, uniforms
from fsdp_jax.data.tokenizer import Tokenizer
from fsdp_jax.data.windows import check_positive
from fsdp_jax.errors import ConfigError, message


class SpanCorruption:
    """Random access to corrupted stretches of a stream of tokens, which do not overlap.

    The stretches are as long as fills the inputs. Which spans are taken depends on `seed` and the
    row's number alone, so it is the same in every epoch.

    Args:
        tokens: the stream.
        inputs_length: S.
        targets_length: T; what `targets_needed` says, or more.
        sentinels: ids for the spans, in their order; see `sentinels_of`.
        end: the end-of-text token.
        seed: of the spans.
        noise: share of the tokens that are taken out.
        mean_span: tokens of a span.

    Raises ConfigError where the lengths, sentinels and text do not go together.

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
        check_positive("data.sequence_length", inputs_length)
        if not (0 < noise < 1 and mean_span >= 1):
            what, got = (
                "Nothing can be taken out of the text.",
                f"noise {noise}, mean span {mean_span}",
            )
            raise ConfigError(
                message(what, expected="noise between 0 and 1, a mean span of at least 1", got=got)
            )
        self.stretch, self.noisy, self.spans = _sizes(
            inputs_length, noise, mean_span, end is not None
        )
        needed = targets_needed(inputs_length, end=end, noise=noise, mean_span=mean_span)
        _check("The targets are too short.", "data.target_length", needed, targets_length)
        fix = f"leave {self.spans} ids of the model's vocabulary beyond the tokenizer's, or use a tokenizer that has them"
        _check("There are too few sentinels.", "model.vocab_size", self.spans, len(sentinels), fix)
        _check(
            "The corpus is shorter than one sequence.",
            "data.sequence_length",
            self.stretch,
            len(tokens),
        )
        self.tokens, self.end, self.seed = tokens, end, seed
        self.inputs_length, self.targets_length = inputs_length, targets_length
        self.sentinels = np.asarray(sentinels[: self.spans], np.int32)
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
        return len(self.tokens) // self.stretch

    def __getitem__(self, index: int) -> Row:
        """`inputs`, `inputs_mask`, int32 [S]; `targets`, int32 [T], and `mask`, float32 [T].

        Raises ConfigError where the text holds a sentinel.
        """
        first = int(index) * self.stretch
        text = np.asarray(self.tokens[first : first + self.stretch]).astype(np.int32)
        if np.isin(text, self.sentinels).any():
            what, got = "The text holds a sentinel.", f"one of the ids {self.sentinels.tolist()}"
            where = f"tokens {first} to {first + self.stretch}"
            raise ConfigError(
                message(what, where=where, got=got, fix="use sentinels that no text is encoded to")
            )
        chance = uniforms(self.seed, int(index), self.stretch)
        kept = _lengths(self.stretch - self.noisy, self.spans, chance[: self.stretch - self.noisy])
        taken = _lengths(self.noisy, self.spans, chance[self.stretch - self.noisy :])
        out = np.repeat(np.tile([False, True], self.spans), np.stack([kept, taken], axis=1).ravel())
        end = np.array([] if self.end is None else [self.end], np.int32)
        inputs = np.concatenate([np.insert(text[~out], np.cumsum(kept), self.sentinels), end])
        targets = np.concatenate(
            [np.insert(text[out], np.cumsum(taken) - taken, self.sentinels), end]
        )
        return {
            "inputs": padded(inputs, self.inputs_length),
            "inputs_mask": real(len(inputs), self.inputs_length, np.int32),
            "targets": padded(targets, self.targets_length),
            "mask": real(len(targets), self.targets_length),
        }


def targets_needed(
    inputs_length: int, *, end: int | None, noise: float = 0.15, mean_span: float = 3.0
) -> int:
    """The length of the targets that go with such inputs. Raises ConfigError where no text fits the
    inputs.
    """
    _, noisy, spans = _sizes(inputs_length, noise, mean_span, end is not None)
    return noisy + spans + (end is not None)


def tokens_needed(
    inputs_length: int, *, end: int | None, noise: float = 0.15, mean_span: float = 3.0
) -> int:
    """The tokens of a stretch that fills such inputs. Raises ConfigError where no text fits them."""
    return _sizes(inputs_length, noise, mean_span, end is not None)[0]


def sentinels_of(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """The tokenizer's own sentinels; where it has none, the model's ids beyond the tokenizer's,
    from the top down.
    """
    return list(tokenizer.sentinels or range(vocab_size - 1, tokenizer.vocab_size - 1, -1))


def _sizes(inputs_length: int, noise: float, mean_span: float, end: bool) -> tuple[int, int, int]:
    """(tokens of a stretch, tokens taken out, spans) such that what is left, with sentinels, just
    fits the inputs.
    """

    def sizes(stretch: int) -> tuple[int, int, int]:
        noisy = min(max(round(stretch * noise), 1), stretch - 1)
        spans = min(max(round(noisy / mean_span), 1), noisy, stretch - noisy)
        return stretch, noisy, spans

    found = None
    stretch = 2
    while (tried := sizes(stretch))[0] - tried[1] + tried[2] + end <= inputs_length:
        found, stretch = tried, stretch + 1
    if found is None:
        _check("The inputs are too short.", "data.sequence_length", 2 + end, inputs_length)
    assert found is not None
    return found


def _lengths(total: int, parts: int, chance: np.ndarray) -> np.ndarray:
    """`total` in as many parts of at least 1, every way as likely as another; `chance` has `total`
    numbers.
    """
    cuts = np.sort(np.argsort(chance[: total - 1], kind="stable")[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def _check(what: str, where: str, needed: int, got: int, fix: str = "") -> None:
    if got < needed:
        raise ConfigError(
            message(what, where=where, expected=f"at least {needed}", got=got, fix=fix)
        )
