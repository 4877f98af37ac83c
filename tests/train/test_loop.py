"""Runs from the configuration to the last screen: what they write, how they stop, resume and fail."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from runs import losses, records

from fsdp_jax.train import metrics
from fsdp_jax.train.loop import Training
from fsdp_jax.train.metrics import FIELDS, JsonLines

PATIENCE = 300  # seconds: a busy machine


def stop_at(monkeypatch, step, number=signal.SIGINT):
    """A signal while this step's metrics are written."""
    write = JsonLines.write

    def interrupt(self, record):
        write(self, record)
        if record["step"] == step and "loss" in record:
            signal.raise_signal(number)

    monkeypatch.setattr(JsonLines, "write", interrupt)


def test_a_llama_trains(run):
    words = [
        "--model.family",
        "llama",
        "--model.preset",
        "llama-tiny",
        "--units.classes",
        "LlamaBlock",
    ]
    assert run("llama", *words, "--train.steps", "5", "--train.eval_every", "5") == 0
    rows = losses(run.directory / "llama")
    assert [step for step, *_ in rows] == [1, 2, 3, 4, 5]
    assert rows[-1][1] < rows[0][1]


def test_a_whole_run(run, tmp_path, capsys):
    assert run("whole", "--train.sample", "20") == 0
    shown = capsys.readouterr().out
    for part in ("versions:", "1 hosts x 8 cpu", "mesh replica=1 x data=8", "parameters:", "compiled in", "step 2/6",
                 "step 4: held-out loss", "memory per device, full_shard", "a sample"):  # fmt: skip
        assert part in shown
    output = tmp_path / "whole"
    found = {path.name for path in output.iterdir()}
    assert found == {
        "config.json",
        "config.yaml",
        "metrics.jsonl",
        "evals.jsonl",
        "layout.json",
        "checkpoints",
    }
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["4", "6"]
    assert json.loads((output / "layout.json").read_text())["strategy"] == "full_shard"
    assert [record["step"] for record in records(output, "evals.jsonl")] == [0, 4, 6]

    assert run("whole", "--train.sample", "20") == 0  # again: nothing is left to do
    shown = capsys.readouterr().out
    assert "this run is complete: 6 of 6 steps" in shown
    assert "a sample" in shown
    assert len(records(output)) == 6


@pytest.mark.long
def test_a_sample_in_mixed_precision(run, capsys):
    words = ("--train.steps", "1", "--train.sample", "20")
    assert run("mixed", *words, "--precision.compute", "bfloat16", "--model.dropout", "0.1") == 0
    assert "a sample" in capsys.readouterr().out


def test_metrics(run, tmp_path):
    assert run("measured", "--train.steps", "3") == 0
    found = records(tmp_path / "measured")
    assert [tuple(record) for record in found] == [FIELDS] * 3
    assert [record["step"] for record in found] == [1, 2, 3]
    assert [record["tokens"] for record in found] == [128, 256, 384]
    assert (
        4.5 < found[0]["loss"] < 5.6
    )  # a tied head starts by repeating, which suits runs of spaces
    assert found[0]["learning_rate"] == pytest.approx(1.5e-3)
    assert found[1]["learning_rate"] == pytest.approx(3e-3)
    for record in found:
        assert record["mfu"] is record["memory_peak_bytes"] is record["memory_valley_bytes"] is None
        assert record["skipped_steps"] == 0
        assert record["data_wait_s"] > 0
        assert record["tokens_per_s"] == pytest.approx(128 / record["step_time_s"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    run, uninterrupted, tmp_path, capsys, monkeypatch, number
):
    with monkeypatch.context() as patched:
        stop_at(patched, 2, number)
        assert run("stopped") == 75
    assert "stopped by a signal; saved at step 3" in capsys.readouterr().out
    assert len(records(tmp_path / "stopped")) == 3
    with (tmp_path / "stopped" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 0}\n{"step": 5')  # beyond the checkpoint, and torn
    assert run("stopped") == 0
    assert "resumes at step 3" in capsys.readouterr().out
    assert losses(tmp_path / "stopped") == uninterrupted


@pytest.mark.parametrize(("step", "saved"), [(1, 2), (4, 4), (6, 6)])
def test_stopping_at_any_time(run, tmp_path, monkeypatch, step, saved):
    """Step 4 is saved and evaluated; step 6 is the last."""
    with monkeypatch.context() as patched:
        stop_at(patched, step)
        assert run("stopped") == 75
    assert (tmp_path / "stopped" / "checkpoints" / str(saved)).is_dir()
    assert run("stopped") == 0
    assert [record["step"] for record in records(tmp_path / "stopped")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("step", [0, 4])
def test_stopped_while_it_evaluates(run, monkeypatch, capsys, step):
    evaluate = Training._evaluate

    def interrupted(self):
        if self.at == step:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(self)

    monkeypatch.setattr(Training, "_evaluate", interrupted)
    assert run("stopped") == 75
    assert f"saved at step {step}" in capsys.readouterr().out


def test_too_little_held_out_text(run, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 20)
    assert run("short", "--data.kind", "text", "--data.path", str(text), "--train.steps", "1") == 0
    assert "no evaluation: what is held out is less than one example" in capsys.readouterr().out


def test_not_finite(run, tmp_path, capsys):
    words = ("--optimizer.learning_rate", "1e30", "--train.steps", "9", "--train.abort_after", "2")
    assert run("burst", *words) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: 2 steps in a row were not finite")
    assert "Traceback" not in error
    found = records(tmp_path / "burst")  # valid JSON, whatever the loss was
    assert found[-1]["loss"] is None
    assert found[-1]["skipped_steps"] > 0
    assert not (tmp_path / "burst" / "lease.json").exists()


def test_memory_where_the_backend_tells(monkeypatch):
    class Device:
        def __init__(self, held):
            self.held = held

        def memory_stats(self):
            return {"bytes_in_use": self.held, "peak_bytes_in_use": 2 * self.held}

    monkeypatch.setattr(metrics.jax, "local_devices", lambda: [Device(3), Device(5)])
    assert metrics.device_memory() == (5, 10)


@pytest.mark.parametrize(
    "words",
    [("--strategy", "no_shard"), ("--strategy", "hybrid_shard", "--mesh.replica", "2")],
)
def test_another_way_to_the_same_losses(run, uninterrupted, tmp_path, words):
    assert run("other", "--checkpoint.every", "None", *words) == 0
    found = [loss for _, loss, _ in losses(tmp_path / "other")]
    assert found == pytest.approx([loss for _, loss, _ in uninterrupted], rel=1e-5)


def command(run, name, *words, **environment):
    """Starts `train` in a fresh process, without the devices that this suite has forced."""
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    return subprocess.Popen(
        [sys.executable, "-m", "fsdp_jax", "train", str(run.config)]
        + ["--output", str(run.directory / name), *words],
        env={
            **os.environ,
            "XLA_FLAGS": flags,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*processes):
    """(exit code, output) of each."""
    try:
        return [
            (process.wait(), out)
            for process in processes
            for out in [process.communicate(timeout=PATIENCE)[0]]
        ]
    finally:
        for process in processes:
            process.kill()


def cluster(run, name, *words, own=((), ())):
    """Two processes of four devices each; `own`: words of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = (
        "--train.devices",
        "4",
        "--cluster.coordinator",
        f"127.0.0.1:{port}",
        "--cluster.processes",
        "2",
    )
    return [
        command(run, name, *words, *own[i], *flags, "--cluster.process", str(i)) for i in range(2)
    ]


@pytest.mark.long
def test_two_processes_train_like_one(run, uninterrupted, tmp_path):
    (first, shown), (second, silent) = finish(*cluster(run, "two"))
    assert (first, second) == (0, 0), shown + silent
    assert "2 hosts x 4 cpu" in shown
    assert "loss" not in silent
    for expected, found in zip(uninterrupted, losses(tmp_path / "two"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_what_one_process_cannot_read_ends_both(run, tmp_path):
    (tmp_path / "text.txt").write_text("to be, or not to be " * 100)
    paths = [("--data.path", str(tmp_path / name)) for name in ("text.txt", "gone.txt")]
    (first, told), (second, reason) = finish(*cluster(run, "two", "--data.kind", "text", own=paths))
    assert (first, second) == (2, 2), told + reason
    assert "the data could not be read, in another process" in told
    assert "gone.txt" in reason
    assert not (tmp_path / "two" / "checkpoints").exists()


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
