"""Ends a run that hangs without an error, as in a collective that one device never enters."""

import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager

from fsdp_jax.errors import ProcessLostError
from fsdp_jax.launch.cluster import end_all_processes
from fsdp_jax.launch.watch import note_step

# The automatic limit: so many times the median of the newest steps, and never less than so many
# seconds. jax's own heartbeat ends a process that is stopped whole later than the least limit.
TIMES_THE_MEDIAN, LEAST_SECONDS, NEWEST = 20, 300.0, 100
LONGEST_TICK = 1.0  # seconds between two looks at the time


class StepTimeout(AbstractContextManager["StepTimeout"]):
    """Ends all processes, with exit code 69, if a step takes too long.

    Each process first prints the step that it has done last, and the stacks of its threads. Inside
    the `with` block `restart` is called for every step that is done, and the time of a step runs
    from one call to the next. The first step, which compiles, is not limited.

    The limit is `seconds`, with whatever is done between two steps; or, if it is None, 20 times the
    median of the 100 newest steps, at least 5 minutes, without the time in `paused` blocks; 0 is no
    limit. Time in which this process does not run at all does not count: stopped by a signal, or
    on a machine that sleeps.
    """

    def __init__(self, seconds: float | None = None):
        self._is_automatic = seconds is None
        self._limit = seconds or LEAST_SECONDS
        self._is_off = seconds == 0
        self._times: deque[float] = deque(maxlen=NEWEST)
        self._began = time.monotonic()  # the current step
        self._count = 0  # of calls, by which the thread sees that a step is done
        self._paused = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def restart(self, step: int | None = None) -> None:
        """Notes that a step is done, and its number; the first call starts the watch."""
        now = time.monotonic()
        self._times.append(now - self._began)
        self._began = now
        if self._is_automatic:
            median = statistics.median(self._times)
            self._limit = max(LEAST_SECONDS, TIMES_THE_MEDIAN * median)
        self._count += 1
        if step is not None:
            note_step(step)
        # a daemon: it must not keep a process alive whose main thread has ended
        if self._thread is None and not self._is_off:
            self._thread = threading.Thread(
                target=self._watch_steps, name="step-timeout", daemon=True
            )
            self._thread.start()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Runs a block that an automatic limit does not cover, such as a save; the step resumes."""
        began = time.monotonic()
        self._paused = self._is_automatic
        try:
            yield
        finally:
            self._began += time.monotonic() - began
            self._count += 1
            self._paused = False

    def __enter__(self) -> "StepTimeout":
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch_steps(self) -> None:
        """Runs in a thread until the `with` block ends; ends all processes where a step hangs."""
        count, waited, before = self._count, 0.0, time.monotonic()
        tick = min(LONGEST_TICK, self._limit / 10)
        while not self._over.wait(tick):
            now = time.monotonic()
            # A longer tick means that this thread did not run, and perhaps the whole process.
            waited += min(now - before, 2 * tick)
            before = now
            if self._count != count or self._paused:
                count, waited = self._count, 0.0
            elif waited >= self._limit:
                break
        else:
            return
        what = f"no step was done in {self._limit:.3g} s"
        expected = ""
        if self._is_automatic:
            expected = (
                f"{TIMES_THE_MEDIAN} times the median of the steps before, and at least "
                f"{LEAST_SECONDS:.0f} s"
            )
        fix = (
            "look at the stacks above of every process: where does each wait? If the step is slow, "
            "set cluster.step_timeout (in a script StepTimeout) to more seconds, or 0 for no limit"
        )
        where = "cluster.step_timeout"
        end_all_processes(ProcessLostError(what, where=where, expected=expected, fix=fix))
