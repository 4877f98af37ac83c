"""Going back after a spike of the loss: the data that follows, whatever is saved or interrupted.

The runs share one compiled step of their own: what is compared is what they have trained.
"""

import signal
from itertools import product

import numpy as np
import pytest
from runs import losses, records

from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.checkpoint.arrays import leaves_of
from fsdp_jax.data import Loader
from fsdp_jax.train.loop import Training
from fsdp_jax.train.metrics import JsonLines

SPIKE = 12  # the step that has the first odd batch, which is number 11
STEPS = 16


@pytest.fixture
def spiking(run, tmp_path, monkeypatch):
    """Trains with batches of noise, which are spikes of the loss; returns (code, parameters).

    `batches`: the numbers of these in the stream of data. `interrupt`: (n, what is called once the
    n-th line of metrics is written since the start).
    """
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be " * 2000)
    deliver, write, finish = Loader.__next__, JsonLines.write, Training._finish
    noise, lines, parameters, plan = set(), [], {}, {}

    def noisy(loader):
        number = loader.get_state()["position"]["next_index"]
        batch = deliver(loader)
        if number not in noise:
            return batch
        return {name: np.full_like(values, 200) for name, values in batch.items()}

    def counting(file, record):
        write(file, record)
        if "grad_norm" in record:
            lines.append(record["step"])
            if len(lines) == plan.get("line"):
                plan["what"]()

    def keeping(training, **how):
        leaves = leaves_of(training.progress.state.params)
        parameters.update({path: np.asarray(leaf) for path, leaf in leaves.items()})
        return finish(training, **how)

    monkeypatch.setattr(Loader, "__next__", noisy)
    monkeypatch.setattr(JsonLines, "write", counting)
    monkeypatch.setattr(Training, "_finish", keeping)
    words = [
        *("--data.kind", "text", "--data.path", str(text)),
        *("--train.spike", "back", "--train.spike_window", "8", "--train.spike_threshold", "0.5"),
        *("--train.eval_batches", "1"),
        *("--train.steps", str(STEPS), "--model.layers", "1", "--model.width", "32"),
        *("--train.eval_every", "None"),
    ]

    def start(name, *more, batches=(SPIKE - 1,), interrupt=None):
        noise.clear(), lines.clear(), parameters.clear(), plan.clear()
        noise.update(batches)
        if interrupt is not None:
            plan["line"], plan["what"] = interrupt
        return run(name, *words, *more), dict(parameters)

    return start


def stop():
    signal.raise_signal(signal.SIGTERM)


def crash():
    raise RuntimeError("the machine is gone")


def end_of(run, name):
    """Reads what a run has written: losses of all steps, evaluations, position in the data."""
    directory = run.directory / name
    evaluations = [
        (record["step"], record["held_out_loss"]) for record in records(directory, "evals.jsonl")
    ]
    store = CheckpointStore(directory / "checkpoints")
    return losses(directory), evaluations, store.record(STEPS)["data"]["position"]["next_index"]


def assert_equal(parameters, expected):
    assert expected.keys() == parameters.keys() != set()
    for path, value in expected.items():
        np.testing.assert_array_equal(parameters[path], value, err_msg=path)


# The 12th line of metrics is that of the spike; the 13th follows the return. As a line is written,
# the step after it is under way: that step is saved.
INTERRUPTS = [(10, stop), (12, stop), (13, stop), (14, crash)]
EVALUATIONS = [None, 12, 3]  # none, at the spike, others


# A checkpoint is due at the spike, or not.
@pytest.mark.parametrize(
    "every",
    [pytest.param(4, marks=pytest.mark.long), pytest.param(5, marks=pytest.mark.exhaustive)],
)
def test_evaluations_saves_and_interrupts_do_not_change_a_run(spiking, run, every):
    # Without an interrupt: evaluations change nothing, and the spike costs its batch alone.
    first, ends = None, {}
    for eval_every in EVALUATIONS:
        words = (f"--checkpoint.every {every}", f"--train.eval_every {eval_every}")
        code, parameters = spiking(f"{eval_every}", *words)
        assert code == 0
        first = first or parameters
        assert_equal(parameters, first)
        ends[eval_every] = end_of(run, f"{eval_every}")
        assert ends[eval_every][2] == SPIKE + STEPS - (SPIKE - 1) // every * every
    assert ends[None][0] == ends[12][0] == ends[3][0]
    # Interrupted, and continued by the same command. The two tests have all pairs.
    for (i, eval_every), (j, interrupt) in product(enumerate(EVALUATIONS), enumerate(INTERRUPTS)):
        if (i + j) % 2 == every % 2:
            name, words = f"{i}-{j}", (f"--checkpoint.every {every}", "--checkpoint.keep 1")
            words = (*words, f"--train.eval_every {eval_every}")
            assert spiking(name, *words, interrupt=interrupt)[0] == (75 if j < 3 else 1)
            code, parameters = spiking(name, *words)
            assert code == 0
            assert_equal(parameters, first)
            assert end_of(run, name) == ends[eval_every]


@pytest.mark.long
def test_a_run_stopped_then_killed_after_going_back_ends_alike(spiking, run):
    words = ("--checkpoint.every 4", "--checkpoint.keep 1")
    code, expected = spiking("whole", *words)
    assert code == 0
    assert spiking("broken", *words, interrupt=(10, stop))[0] == 75
    folder = run.directory / "broken" / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"8", "11"}
    # Step 12 is the first line now: step 11, which no uninterrupted run has, is set aside.
    assert spiking("broken", *words, interrupt=(3, crash))[0] == 1
    assert {path.name for path in folder.iterdir()} == {"8", "11.superseded"}
    code, parameters = spiking("broken", *words)
    assert code == 0
    assert_equal(parameters, expected)
    assert end_of(run, "broken") == end_of(run, "whole")


@pytest.mark.long
@pytest.mark.parametrize(
    ("batches", "position"),
    [
        ((11, 12), 21),  # twice in a row, to step 8
        ((14,), 19),  # as the last step is under way
        ((15,), 20),  # the last step
    ],
)
def test_a_spike_costs_its_batch_and_no_other(spiking, run, batches, position):
    assert spiking("run", "--checkpoint.every 4", batches=batches)[0] == 0
    rows, _, end = end_of(run, "run")
    assert [step for step, *_ in rows] == list(range(1, STEPS + 1))
    assert end == position


@pytest.mark.long
def test_microbatches_are_read_again_too(spiking, run):
    words = ("--train.accumulation 2", "--train.global_batch_size 16", "--checkpoint.every 5")
    code, expected = spiking("none", *words)
    assert code == 0
    code, parameters = spiking("at", *words, "--train.eval_every 12")
    assert code == 0
    assert_equal(parameters, expected)
    assert end_of(run, "at")[2] == SPIKE + STEPS - 10


@pytest.mark.long
def test_returns_are_counted_though_the_run_is_stopped(spiking, run, capsys):
    batches, every = (11, 12, 14, 17), "--checkpoint.every 4"
    assert spiking("whole", every, batches=batches)[0] == 1
    assert "the run went back to step 8 3 times" in capsys.readouterr().err
    # The 15th line is the third spike: step 9 follows, and is saved.
    assert spiking("stopped", every, batches=batches, interrupt=(15, stop))[0] == 75
    assert spiking("stopped", every, batches=batches)[0] == 1
    assert "the run went back to step 8 3 times" in capsys.readouterr().err
    assert losses(run.directory / "stopped") == losses(run.directory / "whole")


@pytest.mark.long
def test_a_save_at_a_signal_is_no_checkpoint_to_go_back_to(spiking, capsys):
    # Without the signal there would be none at step 12.
    assert spiking("run", "--checkpoint.every 100", interrupt=(10, stop))[0] == 75
    assert spiking("run", "--checkpoint.every 100")[0] == 0
    assert "there is no checkpoint to go back to" in capsys.readouterr().out
    # The step that was asked for is one; without a schedule, all are.
    for name, more in [("stated", "--checkpoint.step 11"), ("none", "--checkpoint.every None")]:
        assert spiking(name, "--checkpoint.every 100", interrupt=(10, stop))[0] == 75
        assert spiking(name, "--checkpoint.every 100", more)[0] == 0
        assert "back to step 11, and on" in capsys.readouterr().out
