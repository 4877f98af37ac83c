"""A step that hangs, and the steps that do not."""

import re

from processes import PATIENCE, start

HANG = """
import time
from fsdp_jax.launch import StepTimeout
with StepTimeout(0.5) as timeout:
    def hang():
        time.sleep(60)
    timeout.restart()
    hang()
"""


def test_a_step_that_takes_too_long_ends_the_process():
    process = start(HANG, JAX_PLATFORMS="cpu")
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 69, error
    assert re.search(r"line 6 in hang\n(.*\n)*error: no step was done in 0\.5 s\n", error)


UNWATCHED = """
import time
from fsdp_jax.launch import StepTimeout
with StepTimeout(0.01) as first, StepTimeout(None) as never:
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
