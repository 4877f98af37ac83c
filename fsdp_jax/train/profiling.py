"""Writes a profile of some steps: a trace for xprof and Perfetto, and what memory holds."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import jax

from fsdp_jax.checkpoint import Lease
from fsdp_jax.errors import message
from fsdp_jax.train.config import ProfileConfig

PROFILE = "profile"  # folder, in the directory of the run
MEMORY = "memory.prof"
TRACES = "**/*.xplane.pb"


class StepProfile:
    """Traces the steps that the configuration names. A profile that fails does not end the run."""

    def __init__(self, settings: ProfileConfig, lease: Lease, say: Callable[[str], None]):
        self._settings = settings
        self._lease = lease
        self._say = say
        self._is_tracing = False

    @property
    def _folder(self) -> Path:
        """The folder of this process: two of one host would write files of the same names."""
        folder = self._lease.anchor / PROFILE
        if jax.process_count() > 1:
            folder /= f"process-{jax.process_index()}"
        return folder

    def note_resume(self, done: int) -> None:
        """Says that there is no profile where the steps of it were done before this start."""
        start = self._settings.start
        if start is not None and start <= done:
            self._say(f"note: no profile: profile.start is {start}, and {done} steps are done")

    def begin(self, step: int) -> AbstractContextManager[object]:
        """Is called before a step is dispatched, inside the context that it returns.

        Starts the trace if it begins with this step. In a trace the step bears its number.
        """
        if step == self._settings.start and not self._is_tracing:
            self._try(self._start)
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def end(self, step: int) -> None:
        """Is called once a step is done; writes the trace if it ends with this step."""
        start = self._settings.start
        if start is not None and step >= start + self._settings.steps - 1:
            self.close()

    def close(self) -> None:
        """Writes the trace if there is one, as where a run stops before all steps are traced."""
        if self._is_tracing:
            self._is_tracing = False
            self._try(self._write)

    def _start(self) -> None:
        self._lease.require_held()
        jax.profiler.start_trace(self._folder)
        self._is_tracing = True

    def _write(self) -> None:
        jax.profiler.stop_trace()
        if self._settings.memory:
            jax.profiler.save_device_memory_profile(str(self._folder / MEMORY))
        shown = self._lease.readable(str(self._folder))
        if not any(self._folder.glob(TRACES)):
            raise OSError(f"no trace was written to {shown}")
        self._say(f"profile: {shown}: `xprof {shown}`, or its trace.json.gz at ui.perfetto.dev")

    def _try(self, action: Callable[[], None]) -> None:
        """Runs an action; where it fails, says so."""
        try:
            action()
        except Exception as error:  # the profiler's are of any type
            got = f"{type(error).__name__}: {error}"
            fix = "free some space, or leave out `profile.start`"
            self._say(str(message("warning: these steps have no profile", got=got, fix=fix)))
