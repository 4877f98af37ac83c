"""Saves the checkpoints of a run: when one is due, and what keeps one from being written."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from fsdp_jax.api import Sharded
from fsdp_jax.checkpoint import CheckpointError, CheckpointStore
from fsdp_jax.checkpoint.arrays import leaves_of, not_finite
from fsdp_jax.data import Loader
from fsdp_jax.launch import is_lead
from fsdp_jax.processes import raise_together
from fsdp_jax.sharding.padding import Padded
from fsdp_jax.step.compiled_step import NonFiniteError
from fsdp_jax.step.state import TrainState
from fsdp_jax.train.config import CheckpointConfig
from fsdp_jax.train.resume import Resumer


@dataclass
class Progress:
    """How far a run has come: its state, and the counters that go with it."""

    state: TrainState
    resumed: int | None = None  # the step that the run resumed from
    held_out_loss: float | None = None  # the last one that was measured
    returns: dict[int, int] = field(default_factory=dict)  # step -> times that it went back to it
    steps: int = field(init=False)  # that are done
    skipped: int = field(init=False)  # steps whose update was not applied
    skipped_in_a_row: int = field(init=False)

    def __post_init__(self) -> None:
        self.take(self.state)

    def take(self, state: TrainState) -> None:
        """Takes over a state, and the counters of its steps."""
        self.state = state
        self.steps = int(state.step)
        self.skipped = int(state.skipped)
        self.skipped_in_a_row = int(state.skipped_in_a_row)


@dataclass
class Saving:
    """The checkpoints of a run, and what is known of the last save."""

    store: CheckpointStore
    settings: CheckpointConfig
    metadata: dict[str, Any]  # of each checkpoint
    say: Callable[[str], None]
    step: int | None = None  # the last saved step
    time: float = field(default_factory=time.monotonic)  # of the last save
    failed: bool = False  # the last save, in the background
    postponed: bool = False  # because steps were being skipped
    not_finite_at_start: frozenset[str] = frozenset()  # paths of the state
    blocked_seconds: float | None = None  # that the last save took, until it is told

    @property
    def resumer(self) -> Resumer:
        """What chooses and restores a checkpoint of the store."""
        return Resumer(self.store, self.settings, self.say)

    def note_start(self, sharded: Sharded, state: TrainState) -> None:
        """Notes what is not finite before the first step: it may stay so, as a mask of -inf."""
        self.not_finite_at_start = frozenset(not_finite(_checkpoint_leaves(sharded, state)))
        if self.not_finite_at_start:
            paths = ", ".join(sorted(self.not_finite_at_start))
            self.say(f"warning: the state is infinite or NaN before the first step: {paths}")

    def timed_save_is_due(self) -> bool:
        """Returns True once, in process 0 alone, when `every_minutes` have passed since a save."""
        minutes = self.settings.every_minutes
        if not is_lead() or minutes is None or time.monotonic() - self.time < 60 * minutes:
            return False
        self.time = time.monotonic()  # the agreed answer comes a step later
        return True

    def save(
        self, progress: Progress, sharded: Sharded, loader: Loader, started: float, *, ends: bool
    ) -> None:
        """Saves the state, unless this step is saved already, or a bad state might replace a good.

        While steps are skipped nothing is saved; where the run `ends` the state before them is, but
        no older step is deleted. A state that is not finite is never saved: if the run ends with
        it, NonFiniteError is raised. `started`: when the training began to wait for this.
        """
        step = progress.steps
        if step == self.step:
            return
        skipping = progress.skipped_in_a_row
        if skipping and not ends:
            if not self.postponed:
                why = f"steps skipped in a row: {skipping}; the next one that is applied is saved"
                self.say(f"step {step} is not saved: {why}")
            self.postponed = True
            return
        self.postponed = False
        spoiled = not_finite(_checkpoint_leaves(sharded, progress.state))
        spoiled = sorted({*spoiled} - self.not_finite_at_start)
        if spoiled:
            what = f"step {step} is not saved: its state is infinite or NaN"
            where, fix = ", ".join(spoiled), "resume from an older step; none was deleted"
            if ends:
                raise NonFiniteError(what, where=where, fix=fix)
            self.say(f"warning: {what}: {where}")
            return
        self.store.save(
            step,
            sharded.to_checkpoint(progress.state),
            data=loader.get_state(),
            metadata=self.metadata,
            finite=True,
            delete_older=not skipping,
        )
        self.blocked_seconds = time.perf_counter() - started
        self.step = step
        self.time = time.monotonic()

    def check_previous(self, instead: str) -> None:
        """Waits for the last save; tells what happens `instead` if it failed, once."""
        failed_before, self.failed = self.failed, True
        try:
            with raise_together(
                CheckpointError("a checkpoint was not written, in another process")
            ):
                self.store.wait()
            self.failed = False
        except CheckpointError as error:
            if failed_before:
                raise
            self.say(f"warning: step {self.step} was not saved; {instead}\n{error}")
            self.step = None


def _checkpoint_leaves(sharded: Sharded, state: TrainState) -> dict[str, jax.Array | Padded]:
    """Returns {path: array} of the state as a checkpoint has it."""
    return leaves_of(sharded.to_checkpoint(state))
