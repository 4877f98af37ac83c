"""Span corruption: inputs and targets together hold the text, and T5's sizes are reproduced."""

from functools import partial

import numpy as np
import pytest
from collected import collected
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import fields, refused

from fsdp_jax.data.span_corruption import NOISE, SpanCorruption, corruption_sizes, sentinels_of
from fsdp_jax.data.tokenizer import ByteTokenizer
from fsdp_jax.errors import ConfigError

TEXT = np.arange(2, 5002, dtype=np.uint16)
SENTINELS = list(range(60_000, 59_000, -1))


def corrupt(
    tokens=TEXT,
    *,
    inputs_length=50,
    targets_length=None,
    end=1,
    seed=3,
    sentinels=SENTINELS,
):
    if targets_length is None:
        targets_length = corruption_sizes(inputs_length, end=end).targets
    return SpanCorruption(
        tokens,
        inputs_length=inputs_length,
        targets_length=targets_length,
        sentinels=sentinels,
        end=end,
        seed=seed,
    )


def split_at_sentinels(tokens, end):
    """Returns {sentinel: the tokens after it}, in order; those before the first are under None."""
    parts = {None: []}
    key = None
    for token in tokens.tolist():
        if token >= 59_000:
            key = token
            parts[key] = []
        elif token != end:
            parts[key].append(token)
    return parts


@settings(max_examples=100, deadline=None)
@given(
    inputs_length=st.integers(4, 300),
    seed=st.integers(0, 2**32 - 1),
    end=st.none() | st.just(1),
    padding=st.integers(0, 5),
)
def test_inputs_and_targets_together_hold_the_text(inputs_length, seed, end, padding):
    options = {"inputs_length": inputs_length, "end": end}
    sizes = corruption_sizes(**options)
    examples = corrupt(targets_length=sizes.targets + padding, seed=seed, **options)
    index = seed % len(examples)
    row = examples[index]
    # masks and padding
    inputs = row["inputs"][: row["inputs_mask"].sum()]
    targets = row["targets"][: int(row["mask"].sum())]
    assert not row["inputs"][len(inputs) :].any()
    assert not row["targets"][len(targets) :].any()
    assert (row["inputs_mask"][: len(inputs)] == 1).all()
    assert (row["mask"][: len(targets)] == 1).all()
    if end is not None:
        assert inputs[-1] == targets[-1] == end
    # the same sentinels, in order, with nothing before the first of the targets
    kept, removed = split_at_sentinels(inputs, end), split_at_sentinels(targets, end)
    assert list(kept) == list(removed) == [None, *SENTINELS[: len(kept) - 1]]
    text = kept.pop(None)
    assert text
    assert removed.pop(None) == []
    # removed spans and kept text alternate
    for sentinel in kept:
        assert removed[sentinel]
        text += removed[sentinel] + kept[sentinel]
    assert text == TEXT[index * sizes.chunk : (index + 1) * sizes.chunk].tolist()
    assert len(targets) == sizes.targets
    assert sum(map(len, removed.values())) == sizes.removed
    assert sizes.removed == pytest.approx(NOISE * sizes.chunk, abs=1) or sizes.removed == 1


def test_sizes_and_dtypes_are_those_of_t5():
    sizes = corruption_sizes(512, end=1)
    assert (sizes.chunk, sizes.removed, sizes.spans, sizes.targets) == (568, 85, 28, 114)
    examples = corrupt(inputs_length=512)
    assert examples.sizes == sizes
    row = examples[0]
    assert (row["inputs_mask"].sum(), row["mask"].sum()) == (512, 114)
    dtypes = {"inputs": "int32", "inputs_mask": "int32", "targets": "int32", "mask": "float32"}
    assert {name: array.dtype.name for name, array in row.items()} == dtypes


def test_spans_depend_on_the_seed_and_the_row_alone():
    inputs = corrupt()[4]["inputs"]
    np.testing.assert_array_equal(inputs, corrupt()[4]["inputs"])
    assert (inputs != corrupt(seed=4)[4]["inputs"]).any()
    assert ((inputs >= 59_000) != (corrupt()[5]["inputs"] >= 59_000)).any()


def test_every_position_is_removed_about_as_often():
    examples = corrupt(np.tile(TEXT, 20), inputs_length=50)
    chunk = examples.sizes.chunk
    removed = np.zeros(chunk)
    for index in range(len(examples)):
        text = examples.tokens[index * chunk : (index + 1) * chunk]
        removed += ~np.isin(text, examples[index]["inputs"])
    rate = removed / len(examples)
    assert rate.mean() == pytest.approx(examples.sizes.removed / chunk)
    # as T5's, a text begins with a kept token and ends with a removed one
    assert (rate[0], rate[-1]) == (0, 1)
    assert rate[3:-6].min() > 0.05
    assert rate[3:-6].max() < 0.2


def test_sentinels_are_the_tokenizers_or_the_models_highest_ids():
    class WithSentinels(ByteTokenizer):
        sentinels = (255, 254)

    assert sentinels_of(WithSentinels(), 300) == [255, 254]
    assert sentinels_of(ByteTokenizer(), 260) == [259, 258, 257, 256]
    assert sentinels_of(ByteTokenizer(), 256) == []


def test_invalid_arguments_are_refused():
    cases = [
        (
            partial(corrupt, targets_length=10),
            {
                "what": "targets are too short",
                "where": "data.target_length",
                "expected": "at least 12",
            },
        ),
        (
            partial(corrupt, sentinels=SENTINELS[:2]),
            {"what": "too few sentinels", "where": "model.vocab_size", "expected": "at least 3"},
        ),
        (
            partial(corrupt, TEXT[:50]),
            {"what": "corpus is shorter", "expected": "at least 54", "got": "50"},
        ),
        (
            partial(corrupt, inputs_length=2, targets_length=9),
            {"what": "inputs are too short", "expected": "at least 3"},
        ),
        (partial(corrupt, inputs_length=0, targets_length=9), {"expected": "at least 1"}),
        (
            lambda: corrupt(np.full(99, SENTINELS[0]))[0],
            {"what": "contains a sentinel", "where": "tokens 0 to 54"},
        ),
    ]
    with collected() as case:
        for call, says in cases:
            with case(says), refused(error=ConfigError, **fields(says)):
                call()
