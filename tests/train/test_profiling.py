"""A run's profile: the steps that it names are traced, and a profile that fails ends no run.

The runs share the compiled step of `conftest.py`.
"""

import gzip
import json

import jax
from refusals import refused
from runs import records

from fsdp_jax.errors import ConfigError
from fsdp_jax.train.config import Config, ProfileConfig, TrainConfig

QUIET = ("--train.eval_every", "None", "--checkpoint.every", "None")


def step_numbers(folder):
    """The numbers of the steps in a trace."""
    (file,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert "next batch" in names
    steps = [event["args"]["step_num"] for event in events if event.get("name") == "train"]
    return {int(number) for number in steps}


def test_the_steps_that_are_named_are_traced(run, capsys):
    profile = ("--profile.start", "3", "--profile.steps", "2", "--profile.memory", "true")
    assert run("traced", *QUIET, "--train.steps", "6", *profile) == 0
    folder = run.directory / "traced" / "profile"
    assert f"profile: {folder}: `xprof {folder}`" in capsys.readouterr().out
    # Step 5 is dispatched before step 4 has been waited for.
    assert step_numbers(folder) == {3, 4, 5}
    assert (folder / "memory.prof").stat().st_size > 0
    # A run that goes on after them says that it has none.
    assert run("traced", *QUIET, "--train.steps", "7", *profile) == 0
    said = capsys.readouterr().out
    assert "note: no profile: profile.start is 3, and 6 steps are done" in said


def test_a_profile_that_fails_does_not_end_the_run(run, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("another profile is under way")

    monkeypatch.setattr(jax.profiler, "start_trace", fail)
    assert run("untraced", *QUIET, "--train.steps", "4", "--profile.start", "2") == 0
    said = capsys.readouterr().out
    assert said.count("warning: these steps have no profile") == 1
    assert "got:      RuntimeError: another profile is under way" in said
    assert [record["step"] for record in records(run.directory / "untraced")] == [1, 2, 3, 4]


def test_a_profile_that_ends_after_the_last_step_is_refused():
    Config(profile=ProfileConfig(start=8, steps=3), train=TrainConfig(steps=10))
    with refused(error=ConfigError, where="profile.start", expected="at most 9 (train.steps)"):
        Config(profile=ProfileConfig(start=8, steps=3), train=TrainConfig(steps=9))
