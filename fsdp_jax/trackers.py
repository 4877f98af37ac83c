"""Sends the numbers of a run to TensorBoard, Weights & Biases and trackio."""

import abc
import contextlib
import html
import json
import math
import numbers
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from fsdp_jax.errors import ConfigError, MissingPackageError, extra, message
from fsdp_jax.io.atomic import UNFINISHED, write_durably

__all__ = ["Tracker", "TrackerOptions", "Trackers"]

STEP = "step"


@dataclass(frozen=True)
class TrackerOptions:
    """Where the numbers of a run are sent, beside its own files."""

    tensorboard: bool = False  # Write event files, in the folder `tensorboard` of the run.
    wandb: str | None = None  # Project of Weights & Biases. WANDB_MODE=offline sends nothing.
    trackio: str | None = None  # Project of trackio.
    name: str | None = None  # Name of the run there; default: that of its directory.


class Tracker(Protocol):
    """Takes the numbers of steps. Any error ends the tracker, and not the run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of a step, by name; the numbers of a step may come in several calls."""

    def close(self) -> None:
        """Sends what is left."""


@dataclass(frozen=True)
class Attached:
    """What a tracker shows beside the numbers of a run."""

    name: str  # of the run
    folder: Path  # of the trackers' own files
    step: int  # the last step done where the run resumes
    config: Mapping[str, Any]
    texts: Mapping[str, str]  # title -> text


class SentSteps:
    """The last step that was sent, by name of the number, in a file.

    W&B and trackio cannot take points back: a run that goes back to an earlier step, or resumes
    from one, sends the steps that it does again to neither.
    """

    def __init__(self, file: Path):
        self._file = file
        text = file.read_text() if file.exists() else ""
        self._last: dict[str, int] = json.loads(text or "{}")  # empty after a power failure

    @property
    def last(self) -> int:
        """The last step of which any number was sent; 0 if there is none."""
        return max(self._last.values(), default=0)

    def add(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Returns the values that were not sent at this step or a later one, and notes them."""
        new = {name: value for name, value in values.items() if step > self._last.get(name, -1)}
        self._last |= dict.fromkeys(new, step)
        # Renamed, not flushed to disk: complete after a kill, at little cost in each step.
        unfinished = self._file.with_name(self._file.name + UNFINISHED)
        unfinished.write_text(json.dumps(self._last))
        unfinished.replace(self._file)
        return new


class TensorBoard:
    """Writes event files. Where steps are done again, their earlier points are hidden."""

    def __init__(self, _: object, attached: Attached):
        step = attached.step
        with extra("tensorboard"):
            from tensorboardX import SummaryWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
        self._event, self._restart = Event, SessionLog(status=SessionLog.START)
        # By default a second start in the same second overwrites the file of the first.
        suffix = f".{time.time_ns()}"
        folder = str(attached.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=step + 1, filename_suffix=suffix)
        self._last = step
        rows = "\n".join(f"| {key} | {value} |" for key, value in attached.config.items())
        self._writer.add_text("config", f"| key | value |\n|---|---|\n{rows}", step)
        for title, text in attached.texts.items():
            self._writer.add_text(title, f"```\n{text}\n```", step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds scalars; if the run went back, first hides what is at this step and later."""
        if step < self._last:
            # As tensorboardX does at `purge_step`.
            hidden = self._event(step=step, session_log=self._restart)
            self._writer.file_writer.add_event(hidden)
        self._last = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class SendsOnce(abc.ABC):
    """A tracker whose runs continue when they are resumed, and get each step once."""

    _run: Any  # of the tracker's package
    sent: SentSteps

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Sends the numbers that were not sent before."""
        if new := self.sent.add(step, values):
            self._send(step, new)

    @abc.abstractmethod
    def _send(self, step: int, values: Mapping[str, float]) -> None:
        """Sends numbers of a step."""

    def close(self) -> None:
        """Waits until all is sent."""
        self._run.finish()


class WandB(SendsOnce):
    """Logs to a run of Weights & Biases. `step` is the x axis of each curve."""

    def __init__(self, project: str, attached: Attached):
        with extra("wandb"):
            import wandb
        known = attached.folder / "wandb_id"
        if not known.exists():
            write_durably(known, secrets.token_hex(4).encode())
        self._run = wandb.init(
            project=project,
            name=attached.name,
            dir=str(attached.folder),
            id=known.read_text(),
            resume="allow",
            config=dict(attached.config),
            settings=wandb.Settings(console="off"),  # it would replace sys.stdout
        )
        self._run.define_metric("*", step_metric=STEP)
        self.sent = SentSteps(attached.folder / "wandb_sent.json")
        for title, text in attached.texts.items():
            page = wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
            self._run.log({title: page})

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})


class Trackio(SendsOnce):
    """Logs to a run of trackio."""

    def __init__(self, project: str, attached: Attached):
        with extra("trackio"):
            import trackio
        config = {**attached.config, **attached.texts}
        self._run = trackio.init(project=project, name=attached.name, resume="allow", config=config)
        self.sent = SentSteps(attached.folder / "trackio_sent.json")

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(values, step=step)


TRACKERS: dict[str, Callable[[str, Attached], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}
"""The trackers by the fields of `TrackerOptions`, whose values each of them is called with."""


class Trackers:
    """The trackers that the options name, as one; use it in process 0 alone.

    `with Trackers(TrackerOptions(wandb="project"), "output/run") as trackers:`, and in the loop
    `trackers.log(step, metrics)`.

    Args:
        options: which trackers.
        folder: their files are here; the last part of it is the name of the run by default.
        config: of the run, by key; it is attached.
        texts: title -> text that is attached, such as the layout.
        step: the last step done where a run resumes.
        say: prints a line, where a tracker fails or does not get steps again; default: on stderr.

    Raises:
        MissingPackageError: a tracker's package is not installed.
        ConfigError: a tracker does not start, as for want of a login.

    """

    def __init__(
        self,
        options: TrackerOptions,
        folder: str | Path,
        config: Mapping[str, Any] | None = None,
        texts: Mapping[str, str] | None = None,
        *,
        step: int = 0,
        say: Callable[[str], None] | None = None,
    ):
        self._say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self._trackers: dict[str, Tracker] = {}
        folder = Path(folder)
        attached = Attached(
            options.name or folder.resolve().name, folder, step, config or {}, texts or {}
        )
        for name, kind in TRACKERS.items():
            chosen = getattr(options, name)
            if chosen is None or chosen is False:
                continue
            with self._starting(name):
                folder.mkdir(parents=True, exist_ok=True)
                self._trackers[name] = kind(chosen, attached)
        for name, tracker in self._trackers.items():
            last = tracker.sent.last if isinstance(tracker, SendsOnce) else step
            if last > step:
                self._say(f"note: {name} has steps up to {last}; they are not sent again")

    @contextlib.contextmanager
    def _starting(self, name: str) -> Iterator[None]:
        """Raises ConfigError for what a tracker raises as it starts; closes those before it."""
        try:
            yield
        except Exception as error:
            self.close()
            if isinstance(error, MissingPackageError):
                raise
            raise ConfigError(
                "the tracker does not start",
                where=f"track.{name}",
                got=f"{type(error).__name__}: {error}",
                fix="log in as its documentation says, or leave it out",
            ) from error

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Sends the numbers of a step, by name; leaves out `step` and what is not a finite number.

        Arrays of one element are numbers, and are waited for.
        """
        finite = dict(_finite_numbers(values))
        finite.pop(STEP, None)  # the x axis
        self._each(lambda tracker: tracker.log(step, finite))

    def close(self) -> None:
        """Sends what is left."""
        self._each(lambda tracker: tracker.close())
        self._trackers = {}

    def _each(self, action: Callable[[Tracker], None]) -> None:
        """Does the same with each tracker; one that fails is said, and left out from then on."""
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as error:
                del self._trackers[name]
                got = f"{type(error).__name__}: {error}"
                what = f"warning: {name} gets no more numbers of this run"
                self._say(str(message(what, got=got)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finite_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields what is a finite number; names of nested mappings are joined by `/`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{key}", each) for key, each in _finite_numbers(value))
            continue
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if is_number or getattr(value, "size", 0) == 1:
            with contextlib.suppress(TypeError, ValueError):  # such as a key of a random generator
                number = float(np.asarray(value).item())
                if math.isfinite(number):
                    yield name, number
