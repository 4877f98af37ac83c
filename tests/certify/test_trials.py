"""The batches that a step is compared on: which rows each device gets."""

import jax
import numpy as np
import pytest
from refusals import refused

from fsdp_jax.certify.trials import make_trials

LABELS = np.array([2, 0, 1, 3, 0, 2, 2, 1] * 4, np.int32)
BATCH = {"x": np.random.default_rng(0).normal(size=(32, 3)), "y": LABELS, "row": np.arange(32)}


def rows_of(trial, rows=32, shards=8, accumulation=1):
    """The rows of each device: [accumulation, shards, rows of a device]."""
    taken = trial.taken(rows, shards, accumulation)
    np.testing.assert_array_equal(taken["y"], LABELS[taken["row"]])  # leaves stay together
    np.testing.assert_array_equal(taken["x"], BATCH["x"][taken["row"]])
    return taken["row"].reshape(accumulation, shards, -1)


def made(number=6, seed=0, others=(), batch=BATCH):
    return make_trials(batch, others, number, seed, 8)


def test_the_first_is_the_given_one_and_names_tell_the_others():
    given, by_label, permuted, by_row, drawn, by_x, rolled = made()
    np.testing.assert_array_equal(rows_of(given).ravel(), np.arange(32))
    assert [trial.given for trial in made()] == [True] + [False] * 6
    names = [trial.name for trial in (by_label, by_row, by_x)]
    assert names == [
        f"its rows sorted by {leaf}, one for each device" for leaf in ("y", "row", "x")
    ]
    assert sorted(rows_of(permuted).ravel()) == list(range(32))
    assert drawn.name == "its rows drawn, one for each device"
    np.testing.assert_array_equal(rows_of(rolled).ravel(), np.roll(np.arange(32), 2))


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("shards", [2, 8])
def test_a_device_has_copies_of_one_row_unlike_others(shards, accumulation):
    _, by_label, _, _, drawn, *_ = made()
    for trial in (by_label, drawn):
        rows = rows_of(trial, shards=shards, accumulation=accumulation)
        assert (rows == rows[..., :1]).all()
        assert len(np.unique(rows)) == shards * accumulation
    labels = LABELS[rows_of(by_label, shards=shards, accumulation=accumulation)[..., 0]]
    for of_microbatch in labels:
        assert len(set(of_microbatch)) == min(shards, 4), "each microbatch has all kinds of rows"


def test_one_row_on_each_device_is_of_the_whole_batch():
    given, by_label, *_ = made()
    assert rows_of(given, rows=8).ravel().tolist() == list(range(8))
    assert set(LABELS[rows_of(by_label, rows=8).ravel()]) == {0, 1, 2, 3}
    assert rows_of(by_label, rows=8).max() > 8


def test_trials_are_the_same_for_a_seed_and_differ_in_turns():
    def orders(seed):
        return [trial.order.tolist() for trial in made(12, seed)]

    assert orders(0) == orders(0)
    assert orders(0) != orders(1)
    names = [trial.name for trial in made(12)]
    assert len(set(names)) == 13
    assert sum("sorted" in name for name in names) == 3, "once for each leaf"


def test_rows_that_are_all_equal_or_no_numbers_can_be_sorted_too():
    same = {"x": np.ones((8, 2), bool), "none": np.zeros((8, 0))}
    assert len(make_trials(same, (), 4, 0, 8)) == 5
    odd = {"x": np.full(8, np.nan, np.float16), "c": np.arange(8) * 1j, "inf": np.full(8, np.inf)}
    taken = make_trials(odd, (), 4, 0, 8)[1].taken(8, 8, 1)
    assert jax.tree.map(np.shape, taken) == {"x": (8,), "c": (8,), "inf": (8,)}


def test_other_batches_of_the_user_follow_the_first():
    other = {**BATCH, "y": LABELS + 1}
    _, second, *_ = made(others=[other])
    assert (second.name, second.given) == ("batches[0]", True)
    np.testing.assert_array_equal(second.taken(32, 8, 1)["y"], LABELS + 1)


@pytest.mark.parametrize(
    "other",
    [
        {**BATCH, "y": LABELS[:16]},
        {**BATCH, "y": LABELS.astype(np.int64)},
        {"x": BATCH["x"]},
        [BATCH["x"], LABELS],
    ],
)
def test_a_batch_unlike_the_first_is_refused(other):
    with refused("a batch unlike the first", where="batches[0]"):
        made(others=[other])
