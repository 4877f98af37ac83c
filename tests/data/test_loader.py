"""The loader: one stream for any number of processes, exact resumption, and reading ahead."""

import gc
import itertools
import json
import threading
import time
from functools import partial

import numpy as np
import pytest
from collected import collected
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from fsdp_jax.data.files import Skipped
from fsdp_jax.data.images import DrawnImages
from fsdp_jax.data.instruction_rows import PackedInstructions, TextToText
from fsdp_jax.data.instructions import EncodedInstruction
from fsdp_jax.data.loader import eval_batches, make_loader
from fsdp_jax.data.windows import Windows
from fsdp_jax.errors import ConfigError, DamageError

TOKENS = np.arange(200, dtype=np.uint8)
T = 4
WINDOWS = Windows(TOKENS, sequence_length=T)  # 49 of them
# Of few rows, grain's shuffle takes long: it draws until a number is one of them.
few = settings(max_examples=10, deadline=None)


def load(tokens=TOKENS, *, batch=8, seed=3, sequence_length=T, **options):
    windows = Windows(tokens, sequence_length=sequence_length)
    return make_loader(windows, global_batch_size=batch, seed=seed, **options)


def by_process(make, processes):
    return [make(process_index=p, process_count=processes) for p in range(processes)]


def firsts(batch) -> list[int]:
    """Returns each row's first token, which identifies the window: all tokens differ."""
    return batch["tokens"][:, 0].tolist()


def test_a_batch_is_int32_rows_of_a_token_more_than_the_sequence():
    batch = next(load(process_count=2))
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
def test_a_batch_does_not_depend_on_the_number_of_processes(
    processes, multiple, length, seed, shuffle
):
    make = partial(load, TOKENS[:length], batch=processes * multiple, seed=seed, shuffle=shuffle)
    single = make()
    loaders = by_process(make, processes)
    for _ in range(4):
        rows = [firsts(next(loader)) for loader in loaders]
        # process p's j-th row is row j * processes + p of the batch that one process would read
        assert [row[j] for j in range(multiple) for row in rows] == firsts(next(single))


@few
@given(windows=st.integers(1, 20), batch=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_every_epoch_has_every_window_once(windows, batch, seed):
    loader = load(TOKENS[: windows * T + 1], batch=batch, seed=seed)
    seen = list(itertools.islice(itertools.chain.from_iterable(map(firsts, loader)), 3 * windows))
    for epoch in range(3):
        rows = sorted(seen[epoch * windows : (epoch + 1) * windows])
        assert rows == list(range(0, windows * T, T))


def test_epochs_and_seeds_are_shuffled_differently():
    loader = load(batch=49)
    first, second = firsts(next(loader)), firsts(next(loader))
    other_seed = firsts(next(load(batch=49, seed=9)))
    assert len({tuple(first), tuple(second), tuple(other_seed)}) == 3
    assert firsts(next(load(batch=49))) == first
    assert firsts(next(load(batch=49, shuffle=False))) == sorted(first)


@few
@given(stop=st.integers(0, 9), shuffle=st.booleans(), process=st.integers(0, 1))
def test_resuming_at_any_step_equals_never_stopping(stop, shuffle, process):
    make = partial(load, shuffle=shuffle, process_index=process, process_count=2)
    uninterrupted = [firsts(batch) for batch in itertools.islice(make(), 12)]
    stopped = make()
    for _ in range(stop):
        next(stopped)
    state = json.loads(json.dumps(stopped.get_state()))
    resumed = make()
    next(resumed)  # the saved position replaces the one already reached
    resumed.set_state(state)
    batches = [firsts(batch) for batch in itertools.islice(resumed, 12 - stop)]
    assert batches == uninterrupted[stop:]


def test_without_repetition_processes_get_equally_many_batches():
    streams = [list(loader) for loader in by_process(partial(load, batch=6, repeat=False), 3)]
    assert [len(stream) for stream in streams] == [8, 8, 8]  # 49 windows: one is left out
    assert all(len(firsts(batch)) == 2 for stream in streams for batch in stream)
    assert len({first for stream in streams for batch in stream for first in firsts(batch)}) == 48


def test_a_position_in_another_stream_is_refused():
    apart = Windows(TOKENS, sequence_length=T, starts=np.array([0]))
    of_images = "images, first_image, image_seed, image_side, sequence_length, corpus_tokens"
    cases = [  # arguments of another loader, or its examples; `where`, `expected` and `got`
        ({"batch": 4}, "global_batch_size", "global_batch_size 8 (saved)", "global_batch_size 4"),
        ({"sequence_length": 5}, "sequence_length", "sequence_length 4 (saved)", ""),
        ({"seed": 4}, "seed", "seed 3 (saved)", ""),
        ({"shuffle": False}, "shuffle", "shuffle True (saved)", ""),
        ({"repeat": False}, "repeat", "repeat True (saved)", ""),
        ({"tokens": TOKENS[:-1]}, "corpus_tokens", "corpus_tokens 200 (saved)", ""),
        ({"batch": 4, "seed": 4}, "global_batch_size, seed", "", ""),
        (apart, "segments", "segments missing (saved)", "segments True"),
        (DrawnImages(64, seed=1), of_images, "", ""),
    ]
    state = load().get_state()
    with collected() as case:
        for change, where, expected, got in cases:
            if isinstance(change, dict):
                other = load(**change)
            else:
                other = make_loader(change, global_batch_size=8, seed=3)
            with case(change), refused(error=ConfigError, where=where, expected=expected, got=got):
                other.set_state(state)


def test_saved_states_are_validated_and_their_format_is_stable():
    with refused("another stream", error=ConfigError, expected="seed missing"):
        load().set_state({})
    saved = {
        "position": {"next_index": 3},
        "settings": {
            "sequence_length": 4,
            "global_batch_size": 8,
            "seed": 3,
            "shuffle": True,
            "repeat": True,
            "corpus_tokens": 200,
        },
    }
    loader = load()
    loader.set_state(saved)
    assert loader.get_state() == saved
    assert firsts(next(loader)) == firsts(list(itertools.islice(load(), 4))[3])


def test_a_position_that_is_none_is_refused():
    for position in (-1, "3", None, 2.0, 10**30):
        saved = load().get_state() | {"position": {"next_index": position}}
        with refused("position is none", error=DamageError, expected=" batches", got=str(position)):
            load().set_state(saved)
    with refused("digests are none", error=DamageError, where="data", got="7"):
        load().set_state(load().get_state() | {"data": 7})


def test_a_position_behind_the_data_is_refused():
    once = load(repeat=False)
    end = once.get_state() | {"position": {"next_index": 6}}
    once.set_state(end)
    assert list(once) == []
    with refused(error=DamageError, where="position", expected="0 to 6 batches", got="7"):
        once.set_state(end | {"position": {"next_index": 7}})


def test_a_position_in_other_data_is_refused():
    saved = load(identity={"corpus": "a", "shards": "b"}).get_state()
    assert saved["data"] == {"corpus": "a", "shards": "b"}
    for same in ({"corpus": "a", "shards": "b"}, {"corpus": "a"}, {}):  # older releases saved none
        load(identity=same).set_state(saved)
    saved_as = "shards digest b (saved)"
    with refused("other data", error=ConfigError, where="shards digest", expected=saved_as):
        load(identity={"corpus": "a", "shards": "c"}).set_state(saved)


@few
@given(
    processes=st.sampled_from([1, 2, 3]),
    multiple=st.integers(1, 4),
    length=st.integers(T + 1, 200),
    limit=st.none() | st.integers(1, 5),
)
def test_evaluation_sees_every_window_once(processes, multiple, length, limit):
    batch_size = processes * multiple
    examples = Windows(TOKENS[:length], sequence_length=T)
    make = partial(eval_batches, examples, batch_size=batch_size, limit=limit)
    streams = [list(batches) for batches in by_process(make, processes)]
    windows = (length - 1) // T
    batches = -(-windows // batch_size)
    if limit is not None:
        batches = min(limit, batches)
    assert [len(stream) for stream in streams] == [batches] * processes
    seen = []
    for batch in itertools.chain.from_iterable(streams):
        assert (batch["tokens"].shape, batch["tokens"].dtype) == ((multiple, T + 1), np.int32)
        assert (batch["mask"].shape, batch["mask"].dtype) == ((multiple, T), np.float32)
        real = batch["mask"].all(axis=1)
        assert not batch["mask"][~real].any()
        seen += batch["tokens"][real, 0].tolist()
    assert sorted(seen) == list(range(0, min(windows, batches * batch_size) * T, T))


def test_inconsistent_sizes_are_refused():
    batch_size, processes = "train.global_batch_size", "a multiple of 3 processes"
    too_short = {"what": "shorter than one sequence", "expected": "at least 5 tokens"}
    one_epoch = {"where": batch_size, "expected": "at most 49", "got": "50"}
    cases = [  # arguments of `load`, fields of the error
        ({"tokens": TOKENS[:4]}, {"got": "a corpus of 4 tokens", **too_short}),
        ({"tokens": TOKENS[:0]}, {"got": "a corpus of 0 tokens", **too_short}),
        (
            {"batch": 8, "process_count": 3},
            {"where": batch_size, "expected": processes, "got": "8", "fix": "use 6"},
        ),
        ({"batch": 0}, {"where": "the batch size", "expected": "at least 1"}),
        ({"sequence_length": 0}, {"where": "data.sequence_length", "expected": "at least 1"}),
        (
            {"process_count": 2, "process_index": 2},
            {"where": "process_index", "expected": "0 to 1", "got": "2"},
        ),
        ({"seed": -1}, {"where": "train.seed", "got": "-1"}),
        ({"batch": 50, "repeat": False}, one_epoch),
    ]
    with collected() as case:
        for arguments, fields in cases:
            with case(arguments), refused(error=ConfigError, **fields):
                load(**arguments)
        with case("evaluation"), refused(error=ConfigError, expected="a multiple of 2 processes"):
            eval_batches(WINDOWS, batch_size=3, process_count=2)


def encoded(count):
    """Instructions of 3 to 7 tokens, all different."""
    return [
        EncodedInstruction(
            10 * n + np.arange(2 + n % 4, dtype=np.int32), 10 * n + np.array([8], np.int32)
        )
        for n in range(count)
    ]


KINDS = {
    "windows": WINDOWS,
    "documents apart": Windows(TOKENS, sequence_length=T, starts=np.array([0, 7, 30, 31, 100])),
    "packed": PackedInstructions(encoded(60), sequence_length=15, skipped=Skipped()),
    "text to text": TextToText(encoded(30), inputs_length=8, targets_length=2, skipped=Skipped()),
    "images": DrawnImages(40, seed=1),
}


def assert_rows_equal(one, other):
    assert list(one) == list(other)
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])
        assert array.dtype == other[name].dtype


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("windows", 1, 4), ("windows", 2, 1), *((kind, 4, 2) for kind in KINDS)],
)
def test_every_kind_resumes_on_another_number_of_processes(kind, before, after):
    make = partial(make_loader, KINDS[kind], global_batch_size=8, seed=5)
    single = make()
    stopped = by_process(make, before)
    for _ in range(9):  # past an epoch
        for loader in (single, *stopped):
            next(loader)
    states = [json.loads(json.dumps(loader.get_state())) for loader in stopped]
    assert states == [single.get_state()] * before
    resumed = by_process(make, after)
    for loader in resumed:
        loader.set_state(states[0])
    for _ in range(4):
        whole = next(single)
        for p, loader in enumerate(resumed):
            expected = {name: array[p::after] for name, array in whole.items()}
            assert_rows_equal(next(loader), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_masks_count_each_row_once(kind):
    examples = KINDS[kind]
    batches = list(eval_batches(examples, batch_size=16))
    assert len(batches) == -(-len(examples) // 16)
    shapes = {tuple((name, array.shape) for name, array in batch.items()) for batch in batches}
    assert len(shapes) == 1
    rows = [
        {name: array[i] for name, array in batch.items()} for batch in batches for i in range(16)
    ]
    for row, index in zip(rows, range(len(examples)), strict=False):
        expected = examples[index]
        ones = np.ones((T,) if kind == "windows" else (), np.float32)
        assert_rows_equal(
            {name: row[name] for name in [*expected, "mask"]},
            {**expected, "mask": expected.get("mask", ones)},
        )
    assert not any(row["mask"].any() for row in rows[len(examples) :])


class Recording:
    """Rows that record when and in which thread they were read, and fail once at one of them."""

    settings = {"rows": 100}  # noqa: RUF012

    def __init__(self, fail=None):
        self.read, self.fail = [], fail

    def __len__(self):
        return 100

    def __getitem__(self, index):
        self.read.append((int(index), threading.current_thread()))
        if index == self.fail:
            self.fail = None  # once
            raise OSError("the disk is gone") from KeyError("cause")
        return {"tokens": np.array([index, 0])}


def in_order(examples, **options):
    return make_loader(examples, global_batch_size=1, seed=0, shuffle=False, **options)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)


def test_batches_are_read_ahead_in_one_thread_and_no_further():
    examples = Recording()
    with in_order(examples, ahead=2) as loader:
        time.sleep(0.02)
        assert examples.read == []  # not before the first is asked for
        assert firsts(next(loader)) == [0]
        wait_for(lambda: len(examples.read) == 3)  # one delivered, two waiting
        time.sleep(0.05)
        assert [index for index, _ in examples.read] == [0, 1, 2]
        (thread,) = {thread for _, thread in examples.read}
        assert thread is not threading.main_thread()
        # what was delivered, not what was read
        assert loader.get_state()["position"] == {"next_index": 1}


def test_without_reading_ahead_there_is_no_thread():
    examples = Recording()
    loader = in_order(examples, ahead=0)
    assert [firsts(next(loader)) for _ in range(3)] == [[0], [1], [2]]
    assert [thread for _, thread in examples.read] == [threading.main_thread()] * 3


def test_a_failed_read_is_raised_for_its_batch():
    for ahead in (0, 1, 2):
        with in_order(Recording(fail=2), ahead=ahead) as loader:
            assert [firsts(next(loader)) for _ in range(2)] == [[0], [1]]
            with pytest.raises(OSError, match="the disk is gone") as caught:
                next(loader)
            assert isinstance(caught.value.__cause__, KeyError)
            assert "(while reading batch 2)" in caught.value.__notes__
            assert loader.get_state()["position"] == {"next_index": 2}
            assert [firsts(next(loader)) for _ in range(2)] == [[2], [3]]


def test_closing_ends_the_thread_and_reading_can_continue():
    examples = Recording()
    loader = in_order(examples)
    assert firsts(next(loader)) == [0]
    thread = examples.read[0][1]
    assert thread.is_alive()
    loader.close()
    loader.close()
    wait_for(lambda: not thread.is_alive())
    assert firsts(next(loader)) == [1]
    loader.close()


class Blocking(Recording):
    """Rows of which those from 2 on are not read before `proceed` is set."""

    def __init__(self, fail=None):
        super().__init__(fail)
        self.reading, self.most, self.started, self.proceed = 0, 0, [], threading.Event()

    def __getitem__(self, index):
        self.reading += 1
        self.most = max(self.most, self.reading)
        self.started.append(int(index))
        try:
            if index > 1:
                self.proceed.wait(20)
            return super().__getitem__(index)
        finally:
            self.reading -= 1


@pytest.mark.parametrize("end", ["close", "set_state"])
def test_closing_waits_for_the_batch_that_is_read(end):
    examples = Blocking()
    loader = in_order(examples)
    assert [firsts(next(loader)) for _ in range(2)] == [[0], [1]]
    wait_for(lambda: examples.started[-1] == 2)
    state = loader.get_state()
    threading.Timer(0.1, examples.proceed.set).start()
    if end == "close":
        loader.close()
    else:
        loader.set_state(state)
    assert examples.proceed.is_set()
    assert examples.reading == 0
    read = list(examples.read)
    time.sleep(0.05)
    assert examples.read == read
    assert firsts(next(loader)) == [2]
    loader.close()
    assert examples.most == 1


def test_a_failed_read_is_repeated_after_the_reads_in_progress():
    examples = Blocking(fail=1)
    with in_order(examples) as loader:
        assert firsts(next(loader)) == [0]
        wait_for(lambda: examples.started[-1] == 2)  # 1 has failed
        threading.Timer(0.1, examples.proceed.set).start()
        with pytest.raises(OSError, match="the disk is gone"):
            next(loader)
        assert examples.reading == 0
        assert [firsts(next(loader)) for _ in range(2)] == [[1], [2]]
    assert examples.most == 1


def test_a_garbage_collected_loader_ends_its_thread():
    examples = Recording()
    loader = in_order(examples)
    next(loader)
    thread = examples.read[0][1]
    assert thread.is_alive()
    del loader
    gc.collect()
    wait_for(lambda: not thread.is_alive())
    assert not thread.is_alive()


def test_the_thread_ends_with_the_epoch():
    examples = Recording()
    loader = in_order(examples, repeat=False)
    assert [firsts(batch)[0] for batch in loader] == list(range(100))
    wait_for(lambda: not any(thread.is_alive() for _, thread in examples.read))
    assert next(loader, None) is None


def test_setting_the_position_discards_what_was_read_ahead():
    with in_order(Recording()) as loader:
        state = loader.get_state()
        for _ in range(5):
            next(loader)
        loader.set_state(state)
        assert firsts(next(loader)) == [0]
