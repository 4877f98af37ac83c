"""Goodput from the files of runs that were stopped, killed and started again."""

import json

import pytest

from fsdp_jax.train.goodput import last_record, read_goodput


def at(seconds):
    return f"2026-01-01T00:{seconds // 60:02}:{seconds % 60:02}.000+00:00"


def write(folder, starts, steps):
    """Writes a run: starts (step, time, last step, its time), and steps {step: (end, seconds)}."""
    lines = [
        {"step": step, "time": at(time), "last_step": last, "last_time": ended and at(ended)}
        for step, time, last, ended in starts
    ]
    (folder / "starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [
        {"step": step, "time": at(end), "step_time_s": seconds}
        for step, (end, seconds) in steps.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_of_a_run_that_was_started_once(tmp_path):
    assert read_goodput(tmp_path) is None
    # Starts at 0, compiles until 10, an evaluation of 4 s after step 2.
    write(tmp_path, [(0, 0, None, None)], {1: (12, 2.0), 2: (14, 2.0), 3: (20, 2.0)})
    goodput = read_goodput(str(tmp_path))
    assert (goodput.wall_s, goodput.steps_s, goodput.starting_s) == (20, 6, 10)
    assert (goodput.other_s, goodput.repeated_s, goodput.down_s) == (4, 0, 0)
    assert goodput.goodput == pytest.approx(0.3)
    assert str(goodput) == (
        "goodput 30.0%: 6.0 s of 20.0 s in training steps; 10.0 s starting; "
        "4.0 s evaluating, saving and other"
    )
    assert last_record(tmp_path) == (3, at(20))


def test_a_line_that_was_written_late_counts_no_second_twice(tmp_path):
    # step 1 ended at 12; its line was written as step 2 had run
    write(tmp_path, [(0, 0, None, None)], {1: (16, 2.0), 2: (16, 4.0), 3: (18, 2.0)})
    goodput = read_goodput(tmp_path)
    assert (goodput.steps_s, goodput.starting_s, goodput.other_s) == (8, 10, 0)
    assert goodput.wall_s == 18


def test_steps_that_were_done_again_and_starts_that_did_nothing(tmp_path):
    steps = {1: (12, 2.0), 2: (14, 2.0), 3: (72, 2.0), 4: (74, 2.0)}
    starts = [
        (0, 0, None, None),
        (2, 30, 5, 20),  # killed at 20 after step 5; resumes from 2
        (2, 40, 2, 14),  # the start before did no step, and had dropped 3 to 5
        (2, 60, 3, 50),  # and the one before did step 3 by 50, which is done again
    ]
    write(tmp_path, starts, steps)
    goodput = read_goodput(tmp_path)
    assert goodput.starts == 4
    assert goodput.wall_s == 74
    assert goodput.steps_s == 8
    assert goodput.starting_s == 10 + 10
    assert goodput.down_s == 10 + 10 + 10
    assert goodput.repeated_s == 6 + 0 + 10
    assert goodput.repeated_steps == 3 + 0 + 1
    assert goodput.other_s == 0
    assert "; 30.0 s down (3 restarts); 16.0 s repeating 4 steps" in str(goodput)
    # Every second is counted once.
    spent = goodput.steps_s + goodput.starting_s + goodput.down_s + goodput.repeated_s
    assert spent == goodput.wall_s


def test_lines_that_cannot_be_read_are_left_out(tmp_path):
    write(tmp_path, [(0, 0, None, None)], {1: (12, 2.0)})
    for name in ("starts.jsonl", "metrics.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('[1]\n{"step": 2}\n{"step": 3, "time": null}\n{"torn')
    assert read_goodput(tmp_path).steps_s == 2
