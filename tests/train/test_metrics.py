"""Files of metrics: a torn line, a damaged one, a full disk; the training goes on."""

import errno
import json
import sys
from io import FileIO

import pytest

from fsdp_jax.train import metrics
from fsdp_jax.train.config import OptimizerConfig
from fsdp_jax.train.console import Screen
from fsdp_jax.train.metrics import JsonLines, parse_lines
from fsdp_jax.train.optimizers import learning_rates, make_schedule


class SmallDisk(FileIO):
    """A file on a disk with room for so many bytes of it."""

    room = 0

    def write(self, content):
        room = self.room - self.seek(0, 2)
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(content[:room])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, steps, said=None, after=0):
    file = JsonLines(path, after=after, say=[].append if said is None else said.append)
    for step in steps:
        file.write({"step": step, "loss": float("nan"), "nested": {"x": [float("inf")]}})
    return file


def steps_of(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_record_is_on_disk_at_once_and_each_step_occurs_once(path):
    file = write(path, range(1, 8))
    expected = {"step": 7, "loss": None, "nested": {"x": [None]}}
    assert json.loads(path.read_text().splitlines()[-1]) == expected
    file.close()
    said = []
    write(path, (5, 6), said, after=4).close()
    assert steps_of(path) == [1, 2, 3, 4, 5, 6]
    assert said == []


@pytest.mark.parametrize(
    "torn", [b"{", b'{"step": 5, "lo', b'{"step": 5}', b"\0" * 200, b"[5]\n", b"[" * 9999]
)
def test_a_line_that_a_kill_cut_short_is_dropped_and_told(path, torn):
    write(path, range(1, 5)).close()
    path.write_bytes(path.read_bytes() + torn)
    said = []
    write(path, [5], said, after=4).close()
    assert steps_of(path) == [1, 2, 3, 4, 5]
    [told] = said
    assert "warning: 1 lines of metrics cannot be read\n" in told
    assert f"  where:    {path}\n  got:      line 5: " in told
    assert "1 at the end are dropped" in told


def test_a_damaged_line_in_the_middle_is_told_and_left(path):
    write(path, range(1, 5)).close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\xff\x1b" + lines[1], *lines[2:]]))
    said = []
    write(path, [5], said, after=4).close()
    assert "line 2: \\xff\\x1b" in said[0]
    assert "0 at the end are dropped, others left" in said[0]
    assert [step for step, *_ in parse_lines(path.read_bytes())] == [1, None, 3, 4, 5]


def test_a_full_disk_is_told_once_and_no_line_is_torn(path, monkeypatch):
    monkeypatch.setattr(metrics, "FileIO", SmallDisk)
    monkeypatch.setattr(SmallDisk, "room", 120)
    said = []
    file = write(path, range(1, 6), said)
    assert steps_of(path) == [1, 2]
    [told] = said
    assert told.startswith("warning: metrics are not written, but training goes on\n")
    assert "No space left on device" in told
    monkeypatch.setattr(SmallDisk, "room", 10**6)
    file.write({"step": 6})
    file.close()
    assert steps_of(path) == [1, 2, 6]
    assert "got:      3 records, of steps 3 to 5" in said[1]


def test_a_pipe_or_a_folder_in_place_of_the_file_is_told(path):
    path.mkdir()
    said = []
    write(path, [1], said).close()
    assert "a folder, not a file" in said[0]
    assert "1 records, of steps 1 to 1" in said[-1]
    path.rmdir()
    file = write(path, [])
    assert steps_of(path) == []
    file.close()


def test_a_link_in_place_of_the_file_is_told_and_not_followed(path, tmp_path):
    others = tmp_path / "others"
    for content in (b"", b"kept\n"):
        others.write_bytes(content)
        path.symlink_to(others)
        said = []
        write(path, [1], said).close()
        assert "a link, which could lead anywhere" in said[0]
        assert "fix:      move it away: later steps are written again" in said[0]
        assert others.read_bytes() == content
        path.unlink()


def test_a_line_ends_at_a_newline_alone(path):
    whole = b'{"step": 1,\r "text": "\xe2\x80\xa8\xc2\x85"}\n'
    path.write_bytes(whole)
    write(path, [2], after=1).close()
    assert path.read_bytes().startswith(whole)
    assert [step for step, *_ in parse_lines(path.read_bytes())] == [1, 2]


def test_learning_rates_are_evaluated_in_blocks():
    seen = []

    def schedule(update):
        seen.append(update.shape)
        return update * 0.5

    rate = learning_rates(schedule)
    updates = (0, 1, 4095, 4096, 2**31 - 128)
    assert [rate(update) for update in updates] == [update * 0.5 for update in updates]
    assert seen == [()], "traced once, for blocks"


def test_learning_rates_rise_and_decay_to_a_tenth():
    for schedule, half, last in (("constant", 1, 1), ("cosine", 0.55, 0.1), ("linear", 0.55, 0.1)):
        settings = OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule=schedule)
        rate = learning_rates(make_schedule(settings, 10))
        found = [rate(update) for update in (0, 1, 2, 6, 10)]
        assert found == pytest.approx([0.5, 1, 1, half, last]), schedule


def test_a_log_on_a_full_disk_is_lost_a_closed_one_ends_the_run(monkeypatch):
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    screen = Screen(3, quiet=False)
    screen.say("step 1")
    with pytest.raises(OSError, match="No space left"):
        full.close()
    with pytest.raises(ValueError, match="closed file"):
        screen.say("step 2")
