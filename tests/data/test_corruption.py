"""Span corruption: what is taken out is in the targets, and both together are the text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_jax.data.corruption import SpanCorruption, sentinels_of, targets_needed, tokens_needed
from fsdp_jax.data.tokenizer import Bytes
from fsdp_jax.errors import ConfigError

few = settings(max_examples=100, deadline=None)
TEXT = np.arange(2, 5002, dtype=np.uint16)
SENTINELS = list(range(60_000, 59_000, -1))


def corrupted(
    tokens=TEXT,
    *,
    inputs_length=50,
    targets_length=None,
    end=1,
    seed=3,
    sentinels=SENTINELS,
    **options,
):
    needed = (
        targets_needed(inputs_length, end=end, **options)
        if targets_length is None
        else targets_length
    )
    return SpanCorruption(
        tokens,
        inputs_length=inputs_length,
        targets_length=needed,
        sentinels=sentinels,
        end=end,
        seed=seed,
        **options,
    )


def spans(tokens, end):
    """{sentinel: the tokens behind it}, in order; those before the first are under None."""
    found, key = {None: []}, None
    for token in tokens.tolist():
        if token >= 59_000:
            key = token
            found[key] = []
        elif token != end:
            found[key].append(token)
    return found


@few
@given(
    inputs_length=st.integers(4, 300),
    seed=st.integers(0, 2**32 - 1),
    end=st.none() | st.just(1),
    noise=st.floats(0.05, 0.6),
    mean_span=st.floats(1, 6),
    spare=st.integers(0, 5),
)
def test_inputs_and_targets_together_are_the_text(
    inputs_length, seed, end, noise, mean_span, spare
):
    options = {"noise": noise, "mean_span": mean_span}
    needed = targets_needed(inputs_length, end=end, **options)
    examples = corrupted(
        inputs_length=inputs_length, targets_length=needed + spare, end=end, seed=seed, **options
    )  # fmt: skip
    index = seed % len(examples)
    row = examples[index]
    inputs = row["inputs"][: row["inputs_mask"].sum()]
    targets = row["targets"][: int(row["mask"].sum())]
    assert not row["inputs"][len(inputs) :].any()
    assert not row["targets"][len(targets) :].any()
    assert (row["inputs_mask"][: len(inputs)] == 1).all()
    assert (row["mask"][: len(targets)] == 1).all()
    if end is not None:
        assert inputs[-1] == targets[-1] == end
    kept, taken = spans(inputs, end), spans(targets, end)
    assert list(kept) == list(taken) == [None, *SENTINELS[: len(kept) - 1]]
    assert kept.pop(None)
    assert taken.pop(None) == []
    text = spans(inputs, end)[None]
    for sentinel in kept:
        assert taken[sentinel]
        text += taken[sentinel] + kept[sentinel]
    assert text == TEXT[index * examples.stretch : (index + 1) * examples.stretch].tolist()
    assert len(targets) == needed
    assert sum(map(len, taken.values())) == examples.noisy
    assert examples.noisy == pytest.approx(noise * examples.stretch, abs=1) or examples.noisy == 1


def test_the_sizes_are_t5s():
    examples = corrupted(inputs_length=512)
    assert (examples.stretch, examples.noisy, examples.spans) == (568, 85, 28)
    assert (tokens_needed(512, end=1), targets_needed(512, end=1)) == (
        568,
        114,
    )  # as T5 computes for 512 inputs
    row = examples[0]
    assert (row["inputs_mask"].sum(), row["mask"].sum()) == (512, 114)
    assert {name: array.dtype.name for name, array in row.items()} == {
        "inputs": "int32", "inputs_mask": "int32", "targets": "int32", "mask": "float32",
    }  # fmt: skip


def test_the_same_row_is_always_the_same_and_others_are_not():
    row, again, other, elsewhere = (
        corrupted()[4],
        corrupted()[4],
        corrupted(seed=4)[4],
        corrupted()[5],
    )
    np.testing.assert_array_equal(row["inputs"], again["inputs"])
    assert (row["inputs"] != other["inputs"]).any()
    assert ((row["inputs"] >= 59_000) != (elsewhere["inputs"] >= 59_000)).any()


def test_every_place_is_taken_out_about_as_often():
    examples = corrupted(np.tile(TEXT, 20), inputs_length=50)
    taken = np.zeros(examples.stretch)
    for index in range(len(examples)):
        start = index * examples.stretch
        gone = ~np.isin(
            examples.tokens[start : start + examples.stretch], examples[index]["inputs"]
        )
        taken += gone
    rate = taken / len(examples)
    assert rate.mean() == pytest.approx(examples.noisy / examples.stretch)
    assert (rate[0], rate[-1]) == (
        0,
        1,
    )  # a text begins with what is kept and ends with what is not, as T5's do
    assert rate[3:-6].min() > 0.05
    assert rate[3:-6].max() < 0.2


def test_sentinels_are_the_tokenizers_or_come_from_the_top_of_the_vocabulary():
    class Own(Bytes):
        sentinels = (255, 254)

    assert sentinels_of(Own(), 300) == [255, 254]
    assert sentinels_of(Bytes(), 260) == [259, 258, 257, 256]
    assert sentinels_of(Bytes(), 256) == []


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: corrupted(targets_length=10), r"are too short(?s:.*)data\.target_length\n +expected: +at least 12"),
        (lambda: corrupted(sentinels=SENTINELS[:2]), r"too few sentinels(?s:.*)vocab_size\n +expected: +at least 3"),
        (lambda: corrupted(TEXT[:50]), "corpus is shorter(?s:.*)at least 54(?s:.*)50"),
        (lambda: corrupted(inputs_length=2, targets_length=9), "inputs are too short(?s:.*)at least 3"),
        (lambda: corrupted(inputs_length=0, targets_length=9), "at least 1"),
        (lambda: corrupted(noise=0.0, targets_length=9), "Nothing can be taken out"),
        (lambda: corrupted(mean_span=0.5, targets_length=9), "Nothing can be taken out"),
        (lambda: corrupted(np.full(99, SENTINELS[0]))[0], "holds a sentinel(?s:.*)tokens 0 to 54"),
    ],
)  # fmt: skip
def test_mistakes_are_explained(call, says):
    with pytest.raises(ConfigError, match=says):
        call()
