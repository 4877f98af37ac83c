"""A step that hangs, and the steps that do not."""

import re
import signal
import time

from processes import PATIENCE, start

HANG = """
import time
from fsdp_jax.launch import StepTimeout
with StepTimeout(0.5) as timeout:
    def hang():
        time.sleep(60)
    timeout.restart(7)
    hang()
"""


def test_a_step_that_takes_too_long_ends_the_process():
    process = start(HANG, JAX_PLATFORMS="cpu")
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 69, error
    assert error.startswith("the last step done is 7\n")
    assert re.search(r"line 6 in hang\n(.*\n)*error: no step was done in 0\.5 s\n", error)


UNWATCHED = """
import time
from fsdp_jax.launch import StepTimeout
with StepTimeout(0.01) as first, StepTimeout(0) as never:
    time.sleep(0.05)
    never.restart()
first.restart()
time.sleep(0.05)
print("went on")
"""


def test_nothing_is_watched_before_the_first_step_after_the_last_or_without_a_limit():
    process = start(UNWATCHED, JAX_PLATFORMS="cpu")
    output, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, error
    assert output == "went on\n"


AUTOMATIC = """
import time
from fsdp_jax.launch import StepTimeout, step_timeout
step_timeout.LEAST_SECONDS, step_timeout.TIMES_THE_MEDIAN = 0.2, 2
with StepTimeout() as timeout:
    time.sleep(0.6)  # the first step compiles
    for step in range(1, 4):
        timeout.restart(step)
        with timeout.paused():
            time.sleep(0.6)  # a save
    for step in range(4, 8):  # steps that are slow from the beginning
        time.sleep(0.05)
        timeout.restart(step)
    print("steps", flush=True)
    time.sleep(60)
"""


def test_the_automatic_limit_follows_the_steps_and_leaves_out_saves():
    process = start(AUTOMATIC, JAX_PLATFORMS="cpu")
    output, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 69, error
    assert output == "steps\n"
    assert error.startswith("the last step done is 7\n")
    expected = "2 times the median of the steps before, and at least 0 s"
    assert f"where:    cluster.step_timeout\n  expected: {expected}\n" in error
    assert "or 0 for no limit" in error


SUSPENDED = """
import os, signal, time
from fsdp_jax.launch import StepTimeout
with StepTimeout(3) as timeout:
    timeout.restart()
    print("ready", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.3)
print("went on")
"""


def test_time_in_which_the_process_is_stopped_does_not_count():
    process = start(SUSPENDED, JAX_PLATFORMS="cpu")
    assert process.stdout.readline() == "ready\n"
    time.sleep(4)
    process.send_signal(signal.SIGCONT)
    output, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, error
    assert output == "went on\n"
