"""The loader: one stream whatever the processes, exact resumption, and refusals that say why."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_jax.data.loader import Windows, eval_batches, make_loader
from fsdp_jax.errors import ConfigError

TOKENS = np.arange(200, dtype=np.uint8)
T = 4  # 49 windows
few = settings(max_examples=30, deadline=None)


def loader(tokens=TOKENS, *, batch=8, seed=3, sequence_length=T, **options):
    return make_loader(tokens, sequence_length=sequence_length, global_batch_size=batch, seed=seed, **options)


def firsts(batch) -> list[int]:
    """Each row's first token: which window it is, as the tokens are all different."""
    return batch["tokens"][:, 0].tolist()


def test_windows_overlap_by_the_token_that_is_only_predicted():
    windows = Windows(TOKENS[:13], sequence_length=4)
    assert [windows[i]["tokens"].tolist() for i in range(len(windows))] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [8, 9, 10, 11, 12],
    ]
    assert len(Windows(TOKENS[:12], sequence_length=4)) == 2


def test_a_batch_is_int32_rows_of_one_token_more_than_the_sequence():
    batch = next(loader(process_count=2))
    assert set(batch) == {"tokens"}
    assert (batch["tokens"].shape, batch["tokens"].dtype) == ((4, T + 1), np.int32)
    np.testing.assert_array_equal(np.diff(batch["tokens"], axis=1), 1)


@few
@given(
    processes=st.sampled_from([1, 2, 3, 4, 6]),
    multiple=st.integers(1, 5),
    length=st.integers(T + 1, 200),
    seed=st.integers(0, 2**32 - 1),
    shuffle=st.booleans(),
)
def test_what_a_step_sees_does_not_depend_on_the_number_of_processes(processes, multiple, length, seed, shuffle):
    options = {"batch": processes * multiple, "seed": seed, "shuffle": shuffle}
    alone = loader(TOKENS[:length], **options)
    together = [loader(TOKENS[:length], process_index=p, process_count=processes, **options) for p in range(processes)]
    for _ in range(6):
        rows = [firsts(next(one)) for one in together]
        # process p's j-th row is row j * processes + p of the batch that one process would read
        assert [row[j] for j in range(multiple) for row in rows] == firsts(next(alone))


@few
@given(windows=st.integers(1, 49), batch=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_every_epoch_holds_every_window_once(windows, batch, seed):
    stream = loader(TOKENS[: windows * T + 1], batch=batch, seed=seed)
    seen = list(itertools.islice(itertools.chain.from_iterable(map(firsts, stream)), 3 * windows))
    for epoch in range(3):
        assert sorted(seen[epoch * windows : (epoch + 1) * windows]) == list(range(0, windows * T, T))


def test_epochs_and_seeds_are_shuffled_differently():
    def epoch(stream):
        return firsts(next(stream))

    stream = loader(batch=49)
    first, second = epoch(stream), epoch(stream)
    assert len({tuple(first), tuple(second), tuple(epoch(loader(batch=49, seed=9)))}) == 3
    assert epoch(loader(batch=49)) == first
    assert epoch(loader(batch=49, shuffle=False)) == sorted(first)


@few
@given(stop=st.integers(0, 20), shuffle=st.booleans(), process=st.integers(0, 1))
def test_resuming_at_any_step_equals_never_stopping(stop, shuffle, process):
    options = {"shuffle": shuffle, "process_index": process, "process_count": 2}
    whole = [firsts(batch) for batch in itertools.islice(loader(**options), 25)]
    stopped = loader(**options)
    for _ in range(stop):
        next(stopped)
    state = json.loads(json.dumps(stopped.get_state()))
    resumed = loader(**options)
    next(resumed)  # a position already taken is replaced
    resumed.set_state(state)
    assert [firsts(batch) for batch in itertools.islice(resumed, 25 - stop)] == whole[stop:]


def test_the_state_is_the_same_on_every_process():
    first, second = (loader(process_index=p, process_count=2) for p in range(2))
    next(first), next(second)
    assert first.get_state() == second.get_state()


@pytest.mark.parametrize("processes", [2, 4])
def test_a_position_does_not_depend_on_the_number_of_processes(processes):
    alone, others = loader(), [loader(process_index=p, process_count=processes) for p in range(processes)]
    next(alone)
    for part in others:
        part.set_state(alone.get_state())
    for _ in range(9):  # into the next epoch
        assert sorted(firsts(next(alone))) == sorted(first for part in others for first in firsts(next(part)))
    again = loader()
    again.set_state(others[0].get_state())
    assert firsts(next(again)) == firsts(next(alone))


def test_without_repetition_every_process_gets_the_same_whole_batches():
    streams = [list(loader(batch=6, process_index=p, process_count=3, repeat=False)) for p in range(3)]
    assert [len(stream) for stream in streams] == [8, 8, 8]  # 49 windows: one is left out
    assert all(len(firsts(batch)) == 2 for stream in streams for batch in stream)
    assert len({first for stream in streams for batch in stream for first in firsts(batch)}) == 48


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch": 4}, r"expected: +global_batch_size 8 .saved.\n +got: +global_batch_size 4"),
        ({"sequence_length": 5}, "sequence_length 4 .saved."),
        ({"seed": 4}, "seed 3 .saved."),
        ({"shuffle": False}, "shuffle True .saved."),
        ({"repeat": False}, "repeat True .saved."),
        ({"tokens": TOKENS[:-1]}, "corpus_tokens 200 .saved."),
        ({"batch": 4, "seed": 4}, "where: +global_batch_size, seed"),
    ],
)
def test_a_position_in_another_stream_is_refused(change, says):
    state = loader().get_state()
    with pytest.raises(ConfigError, match=says):
        loader(**change).set_state(state)


def test_a_state_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="seed missing"):
        loader().set_state({})


@few
@given(
    processes=st.sampled_from([1, 2, 3]),
    multiple=st.integers(1, 4),
    length=st.integers(T + 1, 200),
    limit=st.none() | st.integers(1, 5),
)
def test_evaluation_sees_every_window_once_with_constant_shapes(processes, multiple, length, limit):
    batch_size, tokens = processes * multiple, TOKENS[:length]
    options = {"sequence_length": T, "batch_size": batch_size, "limit": limit, "process_count": processes}
    streams = [list(eval_batches(tokens, process_index=p, **options)) for p in range(processes)]
    windows = (length - 1) // T
    batches = -(-windows // batch_size) if limit is None else min(limit, -(-windows // batch_size))
    assert [len(stream) for stream in streams] == [batches] * processes
    seen = []
    for batch in itertools.chain.from_iterable(streams):
        assert (batch["tokens"].shape, batch["tokens"].dtype) == ((multiple, T + 1), np.int32)
        assert (batch["mask"].shape, batch["mask"].dtype) == ((multiple, T), np.float32)
        real = batch["mask"].all(axis=1)
        assert not batch["mask"][~real].any()
        assert not batch["tokens"][~real].any()
        seen += batch["tokens"][real, 0].tolist()
    assert sorted(seen) == list(range(0, min(windows, batches * batch_size) * T, T))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: loader(TOKENS[:4]), r"shorter than one sequence(?s:.*)at least 5 tokens(?s:.*)a corpus of 4 tokens"),
        (lambda: loader(TOKENS[:0]), "a corpus of 0 tokens"),
        (lambda: loader(batch=8, process_count=3), r"a multiple of 3 processes\n +got: +8\n +fix: +use 6"),
        (lambda: loader(batch=0), "batch size(?s:.*)at least 1"),
        (lambda: loader(sequence_length=0), "data.sequence_length(?s:.*)at least 1"),
        (lambda: loader(process_count=2, process_index=2), "no such process(?s:.*)0 to 1"),
        (lambda: loader(seed=-1), "train.seed"),
        (lambda: loader(batch=50, repeat=False), "does not fill one batch(?s:.*)at most 49"),
        (lambda: eval_batches(TOKENS, sequence_length=T, batch_size=3, process_count=2), "a multiple of 2 processes"),
        (lambda: eval_batches(TOKENS, sequence_length=200, batch_size=2), "at least 201 tokens(?s:.*)200 tokens"),
    ],
)
def test_mistakes_are_explained(call, says):
    with pytest.raises(ConfigError, match=says):
        call()
