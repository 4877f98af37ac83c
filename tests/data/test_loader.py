"""The loader: one stream whatever the processes, exact resumption, and refusals that say why."""

import gc
import itertools
import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_jax.data.images import DrawnImages
from fsdp_jax.data.instructions import PackedInstructions, EncodedInstruction, TextToText
from fsdp_jax.data.loader import eval_batches, make_loader
from fsdp_jax.data.windows import Windows
from fsdp_jax.errors import ConfigError

TOKENS = np.arange(200, dtype=np.uint8)
T = 4
WINDOWS = Windows(TOKENS, sequence_length=T)  # 49 of them
few = settings(max_examples=30, deadline=None)


def loader(tokens=TOKENS, *, batch=8, seed=3, sequence_length=T, **options):
    windows = Windows(tokens, sequence_length=sequence_length)
    return make_loader(windows, global_batch_size=batch, seed=seed, **options)


def firsts(batch) -> list[int]:
    """Each row's first token: which window it is, as the tokens are all different."""
    return batch["tokens"][:, 0].tolist()


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
def test_what_a_step_sees_does_not_depend_on_the_number_of_processes(
    processes, multiple, length, seed, shuffle
):
    options = {"batch": processes * multiple, "seed": seed, "shuffle": shuffle}
    alone = loader(TOKENS[:length], **options)
    together = [
        loader(TOKENS[:length], process_index=p, process_count=processes, **options)
        for p in range(processes)
    ]
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
        assert sorted(seen[epoch * windows : (epoch + 1) * windows]) == list(
            range(0, windows * T, T)
        )


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
    alone, others = (
        loader(),
        [loader(process_index=p, process_count=processes) for p in range(processes)],
    )
    next(alone)
    for part in others:
        part.set_state(alone.get_state())
    for _ in range(9):  # into the next epoch
        assert sorted(firsts(next(alone))) == sorted(
            first for part in others for first in firsts(next(part))
        )
    again = loader()
    again.set_state(others[0].get_state())
    assert firsts(next(again)) == firsts(next(alone))


def test_without_repetition_every_process_gets_the_same_whole_batches():
    streams = [
        list(loader(batch=6, process_index=p, process_count=3, repeat=False)) for p in range(3)
    ]
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
        (
            {"of": Windows(TOKENS, sequence_length=T, starts=np.array([0]))},
            "segments missing .saved.(?s:.*)segments True",
        ),
        (
            {"of": DrawnImages(64, seed=1)},
            "where: +images, first_image, image_seed, image_side, sequence_length, corpus_tokens",
        ),
    ],
)
def test_a_position_in_another_stream_is_refused(change, says):
    state = loader().get_state()
    other = (
        make_loader(change["of"], global_batch_size=8, seed=3)
        if "of" in change
        else loader(**change)
    )
    with pytest.raises(ConfigError, match=says):
        other.set_state(state)


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
    options = {"batch_size": batch_size, "limit": limit, "process_count": processes}
    rows = Windows(tokens, sequence_length=T)
    streams = [list(eval_batches(rows, process_index=p, **options)) for p in range(processes)]
    windows = (length - 1) // T
    batches = -(-windows // batch_size) if limit is None else min(limit, -(-windows // batch_size))
    assert [len(stream) for stream in streams] == [batches] * processes
    seen = []
    for batch in itertools.chain.from_iterable(streams):
        assert (batch["tokens"].shape, batch["tokens"].dtype) == ((multiple, T + 1), np.int32)
        assert (batch["mask"].shape, batch["mask"].dtype) == ((multiple, T), np.float32)
        real = batch["mask"].all(axis=1)
        assert not batch["mask"][~real].any()
        seen += batch["tokens"][real, 0].tolist()
    assert sorted(seen) == list(range(0, min(windows, batches * batch_size) * T, T))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: loader(TOKENS[:4]),
            r"shorter than one sequence(?s:.*)at least 5 tokens(?s:.*)a corpus of 4 tokens",
        ),
        (lambda: loader(TOKENS[:0]), "a corpus of 0 tokens"),
        (
            lambda: loader(batch=8, process_count=3),
            r"a multiple of 3 processes\n +got: +8\n +fix: +use 6",
        ),
        (lambda: loader(batch=0), "batch size(?s:.*)at least 1"),
        (lambda: loader(sequence_length=0), "data.sequence_length(?s:.*)at least 1"),
        (lambda: loader(process_count=2, process_index=2), "no such process(?s:.*)0 to 1"),
        (lambda: loader(seed=-1), "train.seed"),
        (lambda: loader(batch=50, repeat=False), "does not fill one batch(?s:.*)at most 49"),
        (lambda: eval_batches(WINDOWS, batch_size=3, process_count=2), "a multiple of 2 processes"),
    ],
)
def test_mistakes_are_explained(call, says):
    with pytest.raises(ConfigError, match=says):
        call()


def pairs(count):
    """Pairs of 3 to 7 tokens, all different."""
    return [
        EncodedInstruction(
            10 * n + np.arange(2 + n % 4, dtype=np.int32), 10 * n + np.array([8], np.int32)
        )
        for n in range(count)
    ]


KINDS = {
    "windows": WINDOWS,
    "apart": Windows(TOKENS, sequence_length=T, starts=np.array([0, 7, 30, 31, 100])),
    "packed": PackedInstructions(pairs(60), sequence_length=15),
    "text to text": TextToText(pairs(30), inputs_length=8, targets_length=2),
    "images": DrawnImages(40, seed=1),
}


def equal(one, other):
    assert list(one) == list(other)
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])
        assert array.dtype == other[name].dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 4), (4, 2)])
def test_every_kind_resumes_exactly_across_numbers_of_processes(kind, before, after):
    options = {"global_batch_size": 8, "seed": 5}
    alone = make_loader(KINDS[kind], **options)
    stopped = [
        make_loader(KINDS[kind], process_index=p, process_count=before, **options)
        for p in range(before)
    ]
    for _ in range(9):  # past an epoch
        next(alone), [next(one) for one in stopped]
    state = json.loads(json.dumps(stopped[-1].get_state()))
    assert state == alone.get_state()
    resumed = [
        make_loader(KINDS[kind], process_index=p, process_count=after, **options)
        for p in range(after)
    ]
    for one in resumed:
        one.set_state(state)
    for _ in range(4):
        parts, whole = [next(one) for one in resumed], next(alone)
        for p, part in enumerate(parts):
            equal(part, {name: array[p::after] for name, array in whole.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_evaluated_with_a_mask_that_counts_each_row_once(kind):
    examples = KINDS[kind]
    batches = list(eval_batches(examples, batch_size=16))
    assert len(batches) == -(-len(examples) // 16)
    assert (
        len({tuple((name, array.shape) for name, array in batch.items()) for batch in batches}) == 1
    )
    rows = [
        {name: array[at] for name, array in batch.items()} for batch in batches for at in range(16)
    ]
    for row, index in zip(rows, range(len(examples)), strict=False):
        expected = examples[index]
        whole = np.ones((T,) if kind == "windows" else (), np.float32)
        equal(
            {name: row[name] for name in [*expected, "mask"]},
            {**expected, "mask": expected.get("mask", whole)},
        )
    assert not any(row["mask"].any() for row in rows[len(examples) :])


class Counting:
    """Rows that note when they were read, and fail at one of them."""

    settings = {"rows": 100}  # noqa: RUF012

    def __init__(self, fail=None):
        self.read, self.fail = [], fail

    def __len__(self):
        return 100

    def __getitem__(self, index):
        self.read.append((int(index), threading.current_thread().name))
        if index == self.fail:
            self.fail = None  # once
            raise OSError("the disk is gone") from KeyError("cause")
        return {"tokens": np.array([index, 0])}


def ordered(examples, **options):
    return make_loader(examples, global_batch_size=1, seed=0, shuffle=False, **options)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "fsdp_jax reads ahead"]


def test_batches_are_read_ahead_in_a_thread_and_no_further():
    examples = Counting()
    with ordered(examples, ahead=2) as stream:
        time.sleep(0.02)
        assert examples.read == []  # not before it is asked for
        assert firsts(next(stream)) == [0]
        wait_for(lambda: len(examples.read) == 4)  # one taken, two waiting, one that waits for room
        time.sleep(0.05)
        assert [index for index, _ in examples.read] == [0, 1, 2, 3]
        assert {name for _, name in examples.read} == {"fsdp_jax reads ahead"}
        assert stream.get_state()["position"] == {
            "next_index": 1
        }  # what was delivered, not what was read


def test_without_reading_ahead_there_is_no_thread():
    examples = Counting()
    stream = ordered(examples, ahead=0)
    assert [firsts(next(stream)) for _ in range(3)] == [[0], [1], [2]]
    assert [name for _, name in examples.read] == ["MainThread"] * 3


def test_what_fails_in_the_thread_is_raised_where_it_belongs_and_can_be_tried_again():
    with ordered(Counting(fail=2)) as stream:
        assert [firsts(next(stream)) for _ in range(2)] == [[0], [1]]
        with pytest.raises(OSError, match="the disk is gone") as caught:
            next(stream)
        assert isinstance(caught.value.__cause__, KeyError)
        assert caught.value.__notes__ == ["(while batch 2 was read ahead)"]
        assert stream.get_state()["position"] == {"next_index": 2}
        assert [firsts(next(stream)) for _ in range(2)] == [[2], [3]]


def test_closing_ends_the_thread_and_going_on_is_possible():
    stream = ordered(Counting())
    assert firsts(next(stream)) == [0]
    thread = stream._reader._thread
    assert thread.is_alive()
    stream.close()
    stream.close()
    assert not thread.is_alive()
    assert firsts(next(stream)) == [1]
    stream.close()


def test_a_loader_that_is_dropped_ends_its_thread():
    stream = ordered(Counting())
    next(stream)
    thread = stream._reader._thread
    del stream
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_an_epoch_ends_with_the_thread():
    gc.collect()
    before = len(readers())
    with ordered(Counting(), repeat=False) as stream:
        assert [firsts(batch)[0] for batch in stream] == list(range(100))
        assert next(stream, None) is None
    assert len(readers()) <= before


def test_setting_the_position_drops_what_was_read():
    with ordered(Counting()) as stream:
        state = stream.get_state()
        for _ in range(5):
            next(stream)
        stream.set_state(state)
        assert firsts(next(stream)) == [0]


def test_a_position_that_was_saved_before_reading_ahead_is_understood():
    saved = {
        "position": {"next_index": 3},
        "settings": {"sequence_length": 4, "global_batch_size": 8, "seed": 3, "shuffle": True, "repeat": True,
                     "corpus_tokens": 200},
    }  # fmt: skip
    stream = loader()
    stream.set_state(saved)
    assert firsts(next(stream)) == firsts(list(itertools.islice(loader(), 4))[3])
