"""A step that hangs, and the steps that do not. Time passes as a test says, in no thread."""

import os
from types import SimpleNamespace

import pytest

from fsdp_jax.errors import ProcessLostError
from fsdp_jax.launch import StepTimeout, cluster, step_timeout


class Machine:
    """The clock and the threads of `step_timeout`.

    `run` does what its thread would do. At each of its looks at the time `plan` goes on by one
    `yield`; once it is at its end, whatever runs hangs.
    """

    def __init__(self):
        self.now, self.plan, self.is_over, self.run = 1000.0, iter(()), False, None

    def monotonic(self):
        return self.now

    def Event(self):  # noqa: N802
        return self

    def set(self):
        self.is_over = True

    def wait(self, seconds):
        self.now += seconds
        next(self.plan, None)
        return self.is_over

    def Thread(self, target, **_):  # noqa: N802
        self.run = target
        return SimpleNamespace(start=lambda: None)


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(step_timeout, "time", made)
    monkeypatch.setattr(step_timeout, "threading", made)
    return made


@pytest.fixture
def ended(monkeypatch):
    """The errors by which all processes would have ended."""
    errors = []
    monkeypatch.setattr(step_timeout, "end_all_processes", errors.append)
    return errors


def test_a_step_that_takes_too_long_ends_the_process(machine, ended):
    with StepTimeout(5) as timeout:
        machine.now += 1000  # the first step compiles
        timeout.restart(7)
        began = machine.now
        machine.run()
    (error,) = ended
    assert isinstance(error, ProcessLostError)
    assert (error.what, error.where) == ("no step was done in 5 s", "cluster.step_timeout")
    assert machine.now - began == pytest.approx(5, abs=1)


def test_the_end_tells_the_last_step_and_the_stacks(monkeypatch, capfd):
    codes = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "_exit", codes.append)
        with StepTimeout(0) as timeout:
            timeout.restart(7)
        cluster.end_all_processes(ProcessLostError("no step was done"))
    error = capfd.readouterr().err
    assert codes == [69]
    assert error.startswith("the last step done is 7\n")
    assert "in test_the_end_tells_the_last_step_and_the_stacks\n" in error
    assert error.endswith("error: no step was done\n")


def test_no_watch_before_the_first_step_or_after_the_last(machine, ended):
    with StepTimeout(1) as first, StepTimeout(0) as never:
        machine.now += 1000
        never.restart()
        assert machine.run is None
    first.restart()
    machine.run()
    assert ended == []


def test_the_automatic_limit_follows_the_steps_without_saves(machine, ended):
    def save(timeout):
        with timeout.paused():
            for _ in range(1000):
                yield

    with StepTimeout() as timeout:
        machine.now += 600  # the first step compiles
        for step in range(1, 4):
            timeout.restart(step)
            with timeout.paused():
                machine.now += 600  # a save
        for step in range(4, 10):  # steps that are slow from the beginning
            machine.now += 20
            timeout.restart(step)
        machine.plan, began = save(timeout), machine.now
        machine.run()
    (error,) = ended
    assert error.what == "no step was done in 400 s"
    assert error.expected == "20 times the median of the steps before, and at least 300 s"
    assert error.fix.endswith("or 0 for no limit")
    assert machine.now - began == pytest.approx(1000 + 400, abs=5)


def test_time_in_which_the_process_does_not_run_does_not_count(machine, ended):
    def stopped(timeout):
        machine.now += 1000
        yield
        timeout.__exit__()

    with StepTimeout(3) as timeout:
        timeout.restart()
        machine.plan = stopped(timeout)
        machine.run()
    assert ended == []
