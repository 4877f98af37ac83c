"""Runs from the configuration to the summary: what they write, how they stop, resume and fail.

The runs share the compiled step of `conftest.py`; one has a loss of its own, one another strategy.
"""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import free_port
from runs import losses, records
from strangers import Flood

from fsdp_jax.cli import main as cli
from fsdp_jax.errors import ConfigError
from fsdp_jax.models import next_token_loss
from fsdp_jax.train import build, main, metrics
from fsdp_jax.train.loop import Training
from fsdp_jax.train.metrics import JsonLines, StepRecord

PATIENCE = 300  # seconds: a busy machine
FIELDS = (*StepRecord.__dataclass_fields__, "loss_z_score")


def stop_at(monkeypatch, step, number=signal.SIGINT):
    """Sends a signal while the metrics of this step are written."""
    write = JsonLines.write

    def interrupt(self, record):
        write(self, record)
        if record["step"] == step and "loss" in record:
            signal.raise_signal(number)

    monkeypatch.setattr(JsonLines, "write", interrupt)


def test_a_whole_run(run, finished, copied, capsys):
    shown = finished.with_name("log.txt").read_text()
    expected = [
        "versions:",
        "8 cpu on 1 host, mesh",
        "mesh replica=1 x data=8",
        "parameters:",
        "compiled in",
        "step 2/6",
        "step 4: held-out loss",
        "memory per device, full_shard",
        "goodput",
        "a sample",
    ]
    assert [part for part in expected if part not in shown] == []
    assert {path.name for path in finished.iterdir()} == {
        "config.json",
        "config.yaml",
        "metrics.jsonl",
        "evals.jsonl",
        "layout.json",
        "starts.jsonl",
        "checkpoints",
    }
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["2", "4", "6"]
    assert json.loads((finished / "layout.json").read_text())["strategy"] == "full_shard"
    assert [record["step"] for record in records(finished, "evals.jsonl")] == [0, 4, 6]

    # The same command again has nothing left to do.
    again = copied("again")
    evals = (again / "evals.jsonl").read_text().splitlines(keepends=True)
    (again / "evals.jsonl").write_text("".join(evals[:-1]))  # killed in its last evaluation
    assert run("again", "--train.sample", "20") == 0
    shown = capsys.readouterr().out
    assert "this run is complete: 6 steps are done; train.steps is 6" in shown
    assert "a sample" in shown
    assert len(records(again)) == 6
    assert [record["step"] for record in records(again, "evals.jsonl")] == [0, 4, 6]


@pytest.mark.long
def test_a_sample_in_mixed_precision(run, capsys):
    words = ("--train.steps", "1", "--train.sample", "20")
    assert run("mixed", *words, "--precision.compute", "bfloat16", "--model.dropout", "0.1") == 0
    assert "a sample" in capsys.readouterr().out


@pytest.mark.long
def test_a_run_tells_how_its_state_is_streamed(run, capsys):
    assert run("run", "--train.steps", "1", "--offload.optimizer", "1") == 0
    assert "\nstate streamed from host memory in " in capsys.readouterr().out
    assert run("run", "--train.steps", "2", "--offload.optimizer", "0.5") == 0
    shown = capsys.readouterr().out
    assert "offload.optimizer 1.0 -> 0.5" in shown
    assert "resumes at step 1" in shown


def test_an_exported_run_starts_another_where_it_ended(run, finished, tmp_path):
    words = ["export", str(finished), "--to", str(tmp_path / "out"), "--format", "huggingface"]
    assert cli.main(words) == 0
    sizes = "--model.layers None --model.width None --model.heads None"
    words = f"--model.weights {tmp_path / 'out'} {sizes} --data.tokenizer bytes --train.steps 1"
    assert run("again", words) == 0
    ended = records(finished, "evals.jsonl")[-1]["held_out_loss"]
    started = records(tmp_path / "again", "evals.jsonl")[0]["held_out_loss"]
    assert started == pytest.approx(ended, rel=1e-5)


def test_metrics(finished):
    measured = records(finished)
    assert [tuple(record) for record in measured] == [FIELDS] * 6
    assert [record["step"] for record in measured] == [1, 2, 3, 4, 5, 6]
    assert [record["tokens"] for record in measured] == [128, 256, 384, 512, 640, 768]
    # A tied head starts by repeating its input, which suits runs of spaces.
    assert 4.5 < measured[0]["loss"] < 5.6
    assert measured[0]["learning_rate"] == pytest.approx(1.5e-3)
    assert measured[1]["learning_rate"] == pytest.approx(3e-3)
    for record in measured:
        assert record["mfu"] is record["memory_peak_bytes"] is record["memory_valley_bytes"] is None
        assert record["skipped_steps"] == 0
        assert record["data_wait_s"] > 0
        assert record["tokens_per_s"] == pytest.approx(128 / record["step_time_s"])


def test_metrics_of_the_loss_are_logged_beside_the_others(run, tmp_path, capsys, monkeypatch):
    def with_metrics(model, batch, *, train=False):
        total, count = next_token_loss(model, batch, train=train)
        return total, count, {"rows": (len(batch["tokens"]), None), "none": (0.0, 0)}

    monkeypatch.setattr(build, "make_loss", lambda *_: with_metrics)
    assert run("more", "--train.steps", "2", "--train.accumulation", "1") == 0
    for record in records(tmp_path / "more"):
        assert tuple(record) == (*FIELDS, "metrics")
        assert record["metrics"] == {"none": None, "rows": 8.0}
    for record in records(tmp_path / "more", "evals.jsonl"):
        assert record["metrics"]["rows"] > 0
        assert record["held_out_loss"] > 0
    assert "  rows 8  " in capsys.readouterr().out


def test_a_stopped_run_resumes_as_if_it_had_not_stopped(
    run, uninterrupted, tmp_path, capsys, monkeypatch
):
    with monkeypatch.context() as patched:
        stop_at(patched, 2)
        assert run("stopped") == 75
    assert "stopped by a signal; saved at step 3" in capsys.readouterr().out
    assert len(records(tmp_path / "stopped")) == 3
    with (tmp_path / "stopped" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 0}\n{"step": 5')  # beyond the checkpoint, and torn
    assert run("stopped") == 0
    assert "resumes at step 3" in capsys.readouterr().out
    assert losses(tmp_path / "stopped") == uninterrupted


@pytest.mark.parametrize(("step", "number"), [(4, signal.SIGTERM), (6, signal.SIGINT)])
def test_stopping_at_any_time(run, uninterrupted, tmp_path, monkeypatch, step, number):
    """Step 4 is saved and evaluated; step 6 is the last."""
    with monkeypatch.context() as patched:
        stop_at(patched, step, number)
        assert run("stopped") == 75
    assert (tmp_path / "stopped" / "checkpoints" / str(step)).is_dir()
    assert run("stopped") == 0
    # A start that has nothing left to do is none.
    starts = [
        (each["step"], each["last_step"]) for each in records(tmp_path / "stopped", "starts.jsonl")
    ]
    assert starts == [(0, None), (4, 4)][: 2 - (step == 6)]
    assert losses(tmp_path / "stopped") == uninterrupted
    assert [each["step"] for each in records(tmp_path / "stopped", "evals.jsonl")] == [0, 4, 6]


@pytest.mark.parametrize("step", [0, 4])
def test_stopped_while_it_evaluates(run, tmp_path, monkeypatch, capsys, step):
    evaluate = Training._evaluate
    evals = tmp_path / "stopped" / "evals.jsonl"
    evals.parent.mkdir()
    evals.write_text('{"step": 0}\n')  # of a run that was killed before it saved

    def interrupted(self):
        if self.progress.steps == step:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(self)

    monkeypatch.setattr(Training, "_evaluate", interrupted)
    assert run("stopped") == 75
    assert f"saved at step {step}" in capsys.readouterr().out
    monkeypatch.undo()
    assert run("stopped") == 0
    assert [each["step"] for each in records(evals.parent, evals.name)] == [0, 4, 6]


def test_too_little_held_out_text(run, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 20)
    assert run("short", "--data.kind", "text", "--data.path", str(text), "--train.steps", "1") == 0
    assert "no evaluation: the held-out data is less than one example" in capsys.readouterr().out


def test_memory_where_the_backend_tells(monkeypatch):
    class Device:
        def __init__(self, in_use):
            self.in_use = in_use

        def memory_stats(self):
            return {"bytes_in_use": self.in_use, "peak_bytes_in_use": 2 * self.in_use}

    monkeypatch.setattr(metrics.jax, "local_devices", lambda: [Device(3), Device(5)])
    assert metrics.device_memory() == (5, 10)


HYBRID = ("--strategy", "hybrid_shard", "--mesh.replica", "2")


@pytest.mark.parametrize(
    "words", [("--strategy", "no_shard"), pytest.param(HYBRID, marks=pytest.mark.long)]
)
def test_other_strategies_have_the_same_losses(run, uninterrupted, tmp_path, words):
    assert run("other", "--checkpoint.every", "None", *words) == 0
    measured = [loss for _, loss, _ in losses(tmp_path / "other")]
    assert measured == pytest.approx([loss for _, loss, _ in uninterrupted], rel=1e-5)


def command(run, name, *overrides, fault="", **environment):
    """Starts the run in a fresh process, without the devices that this suite has forced.

    `fault`: what runs before it.
    """
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    program = f"{fault}\nimport sys\nfrom fsdp_jax.cli.main import main\nsys.exit(main())"
    train = [sys.executable, "-c", program, "train", str(run.config)]
    source = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [*train, "--output", str(run.directory / name), *overrides],
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": source, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*processes):
    """Returns (exit code, output) of each process."""
    try:
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
        return [(process.wait(), out) for process, out in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()


def cluster(run, name, *overrides, own=((), ()), faults=("", ""), port=None, **environment):
    """Starts two processes of four devices each.

    `own` has further overrides of each, `faults` what runs before it.
    """
    port = port or free_port()
    shared = f"--train.devices 4 --cluster.coordinator 127.0.0.1:{port} --cluster.processes 2"
    return [
        command(
            *(run, name, *overrides, *own[i], *shared.split(), f"--cluster.process={i}"),
            fault=faults[i],
            **environment,
        )
        for i in range(2)
    ]


# The last check of the lease comes late, when process 0 has no more to do.
SLOW_END = """
import time
from fsdp_jax.checkpoint import Lease
from fsdp_jax.train.loop import Training
finish, held = Training._finish, Lease.require_held
def slow(self):
    time.sleep(3)
    held(self)
def last(self, **settings):
    Lease.require_held = slow
    return finish(self, **settings)
Training._finish = last
"""


@pytest.mark.long
def test_two_processes_train_like_one(run, uninterrupted, tmp_path):
    (first, shown), (second, silent) = finish(*cluster(run, "two", faults=("", SLOW_END)))
    assert (first, second) == (0, 0), shown + silent
    assert "8 cpu on 1 host, in 2 processes, mesh" in shown
    assert "2 processes x 4 rows = 8 examples" in shown
    # Gloo prints on the descriptor of stdout
    assert "Gloo" not in shown + silent
    for process in range(2):
        assert "[Gloo]" in (tmp_path / "two" / f"process-{process}.log").read_text()
    assert "loss" not in silent
    measured = records(tmp_path / "two")
    assert measured[0]["slowest_process"] is not None
    assert {record["slowest_process"] for record in measured} <= {0, 1}
    last = measured[-1]
    assert last["slowest_host_s"] >= max(last["median_host_s"], last["slowest_data_wait_s"]) > 0
    assert last["most_host_memory_bytes"] > 100 << 20
    assert f"% (slowest: process {last['slowest_process']})" in shown
    for expected, row in zip(uninterrupted, losses(tmp_path / "two"), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


def test_processes_compare_what_decides_on_the_run(run, monkeypatch):
    joined = []

    def join(*processes, facts, **_):
        joined.append(facts)
        raise ConfigError("the processes disagree")

    monkeypatch.setattr(main, "join_cluster", join)
    for own in (
        (),
        ("--optimizer.learning_rate", "0.1", "--data.path", "x", "--cluster.timeout", "9"),
    ):
        assert run("two", *own) == 2
    first, second = joined
    assert [key for key in first if first[key] != second[key]] == ["optimizer.learning_rate"]
    assert not (run.directory / "two").exists()


@pytest.mark.exhaustive
def test_processes_of_other_text_are_refused_before_they_compile(run, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"to be, or not to {name} " * 100)
    own = [("--data.kind", "text", "--data.path", str(tmp_path / f"{name}.txt")) for name in "ab"]
    for code, shown in finish(*cluster(run, "two", own=own)):
        assert code == 2, shown
        assert "error: the processes disagree about the data\n  where:    data.path" in shown
        assert "compiled" not in shown
    assert not (tmp_path / "two").exists()


HANG = """
import time
from fsdp_jax.train.loop import Training
record = Training._record_step
def hang(self, pending):
    record(self, pending)
    time.sleep(600 * (pending.step == 5))
Training._record_step = hang
"""


@pytest.mark.exhaustive
def test_a_process_that_hangs_ends_all_with_their_stacks(run):
    words = ("--train.steps", "100000", "--cluster.step_timeout", "20")
    for code, shown in finish(*cluster(run, "two", *words, faults=("", HANG))):
        assert code == 69, shown
        assert ", line " in shown.partition("in _run_steps")[0]
        assert "no step was done in 20 s\n  where:    cluster.step_timeout" in shown
        assert re.search(r"the last step done is [56]\n", shown)


@pytest.mark.long
def test_a_signal_to_one_process_stops_both(run, tmp_path):
    processes = cluster(run, "two", "--train.steps", "100000")
    for line in processes[0].stdout:
        if line.startswith("step 4"):
            break
    processes[1].send_signal(signal.SIGTERM)
    (first, shown), (second, silent) = finish(*processes)
    assert (first, second) == (75, 75), shown + silent
    last = records(tmp_path / "two")[-1]["step"]
    assert f"saved at step {last}" in shown
    assert (tmp_path / "two" / "checkpoints" / str(last)).is_dir()


@pytest.mark.long
def test_a_second_interrupt_leaves_at_once(run):
    cold = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    process = command(run, "left", "--train.steps", "100000", **cold)
    for line in process.stdout:
        if line.startswith("devices:"):
            break  # it compiles now, which takes longer than the two signals
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # two alike may be delivered as one
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    assert process.returncode == 130
    process.stdout.close()


def test_metrics_that_cannot_be_written_do_not_stop_a_run(run, capsys):
    (run.directory / "run" / "metrics.jsonl").mkdir(parents=True)
    assert run("run", "--train.steps", "2") == 0
    shown = capsys.readouterr().out
    assert shown.count("warning: metrics are not written, but training goes on") == 1
    assert "a folder, not a file" in shown
    assert "2 records, of steps 1 to 2" in shown


def test_a_disk_that_is_full_at_the_start_is_told_with_the_file(run, capsys, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(main, "write_durably", full)
    assert run("run") == 1
    error = capsys.readouterr().err
    assert "error: the files of the run cannot be written\n" in error
    assert "run/config.yaml\n  got:      [Errno 28] No space left on device" in error


# As many descriptors as a process mostly has.
LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))"


@pytest.mark.exhaustive
def test_a_run_goes_on_and_saves_in_a_flood_of_strangers(run, tmp_path):
    """From before it joins to its end, 3,000 connections at a time; they do not read either."""
    secret = "the secret of a run in a flood"
    port = free_port()
    words = ("--train.steps", "12", "--checkpoint.every", "4", "--cluster.timeout", "120")
    with Flood(port, 3000, seconds=150) as flood:
        processes = cluster(
            *(run, "two", *words),
            faults=(LIMITED, LIMITED),
            port=port,
            FSDP_JAX_CLUSTER_SECRET=secret,
        )
        (first, shown), (second, silent) = finish(*processes)
    assert (first, second) == (0, 0), shown + silent
    assert flood.made > 3000
    steps = {path.name for path in (tmp_path / "two" / "checkpoints").iterdir()}
    assert steps == {"4", "8", "12"}
    assert cli.main(["verify", str(tmp_path / "two")]) == 0
    # The secret is nowhere in what the run prints and writes.
    texts = [shown, silent, *(file.read_text() for file in (tmp_path / "two").glob("*.*"))]
    assert len(texts) > 4
    assert not any(secret in text for text in texts)
