"""Sends the numbers of a run to TensorBoard, Weights & Biases and trackio."""

import contextlib
import math
import numbers
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from fsdp_jax.errors import ConfigError, MissingPackageError, extra, message

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


class TensorBoard:
    """Writes event files; of steps that are done again, those of before are hidden."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], texts: Mapping[str, str], step: int
    ):
        with extra("tensorboard"):
            from tensorboardX import SummaryWriter
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)
        rows = "\n".join(f"| {key} | {value} |" for key, value in config.items())
        self._writer.add_text("config", f"| key | value |\n|---|---|\n{rows}", step)
        for title, text in texts.items():
            self._writer.add_text(title, f"```\n{text}\n```", step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class WandB:
    """Logs to a run of Weights & Biases, which a resumed run continues.

    `step` is the x axis of each curve. Steps that are done again are drawn again: points cannot be
    taken back.
    """

    def __init__(
        self,
        project: str,
        name: str,
        folder: Path,
        config: Mapping[str, Any],
        texts: Mapping[str, str],
    ):
        with extra("wandb"):
            import wandb
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / "wandb_id"
        if not known.exists():
            known.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            project=project,
            name=name,
            dir=str(folder),
            id=known.read_text(),
            resume="allow",
            config=dict(config),
            settings=wandb.Settings(console="off"),  # it would replace sys.stdout
        )
        self._run.define_metric("*", step_metric=STEP)
        for title, text in texts.items():
            self._run.config.update({title: text}, allow_val_change=True)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs numbers, with the step among them."""
        self._run.log({**values, STEP: step})

    def close(self) -> None:
        """Waits until all is sent."""
        self._run.finish()


class Trackio:
    """Logs to a run of trackio, which a resumed run continues."""

    def __init__(
        self, project: str, name: str, config: Mapping[str, Any], texts: Mapping[str, str]
    ):
        with extra("trackio"):
            import trackio
        self._run = trackio.init(
            project=project, name=name, resume="allow", config={**config, **texts}
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs numbers at a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Waits until all is sent."""
        self._run.finish()


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
        say: prints a line where a tracker fails; default: on stderr.

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
        self._say = say or _print_on_stderr
        self._trackers: dict[str, Tracker] = {}
        folder, config, texts = Path(folder), config or {}, texts or {}
        name = options.name or folder.resolve().name
        with self._starting("tensorboard"):
            if options.tensorboard:
                self._trackers["tensorboard"] = TensorBoard(
                    folder / "tensorboard", config, texts, step
                )
        with self._starting("wandb"):
            if options.wandb is not None:
                self._trackers["wandb"] = WandB(options.wandb, name, folder, config, texts)
        with self._starting("trackio"):
            if options.trackio is not None:
                self._trackers["trackio"] = Trackio(options.trackio, name, config, texts)

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
        """Sends the numbers of a step, by name; what is no finite number is left out.

        Arrays of one element are numbers, and are waited for.
        """
        finite = dict(_finite_numbers(values))
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


def _print_on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
