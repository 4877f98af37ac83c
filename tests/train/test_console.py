"""What a run prints: one line a step on a terminal of any width, and whole lines in a pipe."""

import io

import pytest

from fsdp_jax.train.console import Screen, sparkline
from fsdp_jax.train.metrics import StepRecord

RECORD = StepRecord(
    step=20,
    loss=3.25,
    grad_norm=0.997,
    learning_rate=5e-3,
    tokens=40960,
    step_time_s=0.164,
    data_wait_s=0.004,
    host_s=0.01,
    host_memory_bytes=1 << 30,
    tokens_per_s=12460.0,
    tflops_per_device=0.004,
    mfu=None,
    memory_valley_bytes=None,
    memory_peak_bytes=None,
    skipped_steps=0,
    checkpoint_blocked_s=None,
    time="2026-01-01T00:00:00.000+00:00",
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(monkeypatch, stream, width=80, **changes):
    """The lines of a screen of this width that shows a step."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout", stream)
    record = StepRecord(**vars(RECORD) | changes)
    Screen(600, quiet=False).show_step(record, log=True, more={})
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize(
    "changes",
    [{}, {"mfu": 0.453, "memory_peak_bytes": 14 << 30, "slowest_process": 511, "skipped_steps": 3}],
)
def test_a_step_is_one_line_on_a_terminal(monkeypatch, width, changes):
    if changes:
        changes = changes | {"slowest_data_wait_s": 0.1}
    (line,) = printed(monkeypatch, Terminal(), width, **changes)
    assert len(line) <= width
    assert line.startswith("step  20/600  loss 3.2500")
    if width >= 80:
        assert "12,460 tok/s" in line
        assert ("mfu 45.3%" in line) == bool(changes)


def test_a_line_in_a_pipe_has_all(monkeypatch):
    (line,) = printed(monkeypatch, io.StringIO(), 40)
    parts = ("grad 0.997", "lr 5.0e-03", "0.164 s", "data 2%", "eta 0:01:35")
    assert [part for part in parts if part not in line] == []
    assert "TFLOP" not in line  # nobody knows the peak of a CPU
    (line,) = printed(monkeypatch, io.StringIO(), 40, memory_peak_bytes=1 << 30)
    assert "0.004 TFLOP/s/dev" in line


def test_the_terminal_of_a_scheduler_is_a_log(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    in_pipe = printed(monkeypatch, io.StringIO(), 40)
    assert printed(monkeypatch, Terminal(), 40) == in_pipe


def test_rows_wrap_at_words_on_a_terminal_alone(monkeypatch):
    rows = {"state": "762 KiB of state per device", "batch": "32 examples"}
    for stream, expected in (
        (
            Terminal(),
            ["state  762 KiB of", "       state per", "       device", "batch  32 examples"],
        ),
        (io.StringIO(), ["state:       762 KiB of state per device", "batch:       32 examples"]),
    ):
        monkeypatch.setenv("COLUMNS", "20")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr("sys.stdout", stream)
        Screen(1, quiet=False).say_rows(rows)
        shown = stream.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
        assert [line.rstrip() for line in shown.splitlines()] == expected


def test_sparkline():
    assert sparkline([8.0, 1.0, float("nan"), 4.0, 1.0]) == "█▁▄▁"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([float("inf")]) == ""
