"""Ends a run that hangs without an error, as in a collective that one device never enters."""

import threading
from contextlib import AbstractContextManager

from fsdp_jax.errors import ProcessLostError
from fsdp_jax.launch.cluster import end_all_processes


class StepTimeout(AbstractContextManager["StepTimeout"]):
    """Ends all processes, with exit code 69, if a step takes more than `seconds`.

    Each process first prints the stacks of its threads. Inside the `with` block `restart` is called
    for every step that is done, and the time of a step runs from one call to the next, with any
    evaluation and save between them. It does not cover the first step, which compiles. If `seconds`
    is None, nothing is timed.
    """

    def __init__(self, seconds: float | None):
        self._seconds = seconds
        self._done = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    def restart(self) -> None:
        """Notes that a step is done; the first call starts the watch."""
        self._done.set()
        # a daemon: it must not keep a process alive whose main thread has ended
        if self._thread is None and self._seconds is not None:
            self._thread = threading.Thread(
                target=self._watch_steps, name="step-timeout", daemon=True
            )
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._done.set()

    def _watch_steps(self) -> None:
        """Runs in a thread until the `with` block ends; ends all processes where a step hangs."""
        # `wait` is false only when the time has passed without a step
        while self._done.wait(self._seconds):
            self._done.clear()
            if self._over:
                return
        what = f"no step was done in {self._seconds:g} s"
        where = "cluster.step_timeout"
        fix = "look at the stacks above of every process: where does each wait?"
        end_all_processes(ProcessLostError(what, where=where, fix=fix))
