"""The checkpoints of a run: which one it resumes from, when one is due, and which are not saved."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

import jax
import numpy as np

from fsdp_jax.api import Sharded
from fsdp_jax.checkpoint import CheckpointError, CheckpointStore, DamageError
from fsdp_jax.checkpoint.arrays import leaves_of, not_finite
from fsdp_jax.checkpoint.memory_copies import MemoryCopies, MemoryCopy
from fsdp_jax.data import Loader
from fsdp_jax.errors import ConfigError, DirectoryLostError, human_bytes
from fsdp_jax.io.array_specs import describe_array
from fsdp_jax.launch import barrier, is_lead
from fsdp_jax.processes import gather_from_processes, raise_together
from fsdp_jax.sharding.padding import Padded
from fsdp_jax.step.compiled_step import NonFiniteError
from fsdp_jax.step.state import LOSS_SCALE, RECENT_LOSSES, TrainState
from fsdp_jax.train.config import CheckpointConfig
from fsdp_jax.train.initial_weights import HAS_STATE, IS_IMPORT
from fsdp_jax.train.renamed_keys import as_config_errors

# Fields of the state that not every run has: name -> what it is.
OPTIONAL_FIELDS = {LOSS_SCALE: "loss scale", RECENT_LOSSES: "window of recent losses"}
# Metadata that a checkpoint must share with the run: name -> (what it is, fix).
MUST_MATCH = {
    "corpus": ("the corpus", "restore the text it was trained on"),
    "tokenizer": ("the tokenizer", "use the tokenizer it was trained with"),
    "lora_scale": ("LoRA's scale", "set lora.alpha and lora.rank as they were"),
}
_JUMP = 0.01  # of the learning rate at a resume, relative, that is told
NEED_NOT_MATCH = ("config", "strategy", "mesh")


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from."""

    step: int
    aside: dict[int, str]  # steps to rename once the checkpoint is restored -> why


@dataclass(frozen=True)
class Resumer:
    """Chooses, checks and restores a checkpoint of `store` as `settings` ask; `say` is the log."""

    store: CheckpointStore
    settings: CheckpointConfig
    say: Callable[[str], None]

    def choose(self) -> ResumePoint | None:
        """Finds the checkpoint to resume from, or None if there is none yet. Renames nothing.

        Raises ConfigError if the stated step does not exist, or another directory has the name of a
        later one, and DamageError if the newest is damaged and the policy is to stop, or all are.
        """
        # A stated step must exist; once a run has resumed from it, the newest step is taken.
        steps = self.store.steps()
        where = str(self.store.directory)
        stated = None if self._already_resumed(steps) else self.settings.step
        if stated is not None and stated not in steps:
            fix = f"one of {steps}"
            if not steps:
                fix = "leave checkpoint.step out: there is no checkpoint yet"
            where = f"checkpoint.step, in {where}"
            raise ConfigError("no such step", where=where, got=stated, fix=fix)

        # The newest good step is taken, or the stated one.
        if steps:
            return self._newest_good(steps if stated is None else [stated], stated)
        self.check_foreign_entries(0)
        return None

    def choose_after_spike(self) -> ResumePoint | None:
        """Finds the checkpoint to go back to after a spike, or None if there is none.

        It is verified, as when a run resumes. Renames nothing. Raises DamageError as `choose` does.
        """
        steps = self.scheduled_steps()
        return self._newest_good(steps, None) if steps else None

    def scheduled_steps(self) -> list[int]:
        """Lists the steps that a spike may take the run back to, ascending.

        They are multiples of `every`, and the stated step. A save at a signal is none: a run that
        was stopped goes back to the step that it would have gone back to otherwise. Without
        `every` they are all steps.
        """
        every, stated = self.settings.every, self.settings.step
        steps = self.store.steps()
        return [step for step in steps if every is None or not step % every or step == stated]

    def returns(self, step: int) -> dict[int, int]:
        """Reads {step: times that spikes took the run back to it} of the run that saved a step.

        Raises DamageError for what no save writes.
        """
        saved = self.store.record(step)["metadata"].get("returns", {})
        try:
            return {int(other): index(times) for other, times in saved.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise DamageError(
                "a checkpoint is damaged",
                where=f"{self.store.path(step)}, metadata, returns",
                expected="numbers of steps, with how often a run went back to each",
                got=saved,
            ) from error

    def check_metadata(self, step: int, metadata: dict[str, Any]) -> dict[str, Any] | None:
        """Compares a step's metadata with the run's, and returns its data position.

        None for an imported state: it was trained elsewhere, and the data begins at its start.

        Raises ConfigError for imported weights, other data, another tokenizer or LoRA scale.
        """
        # Imported weights are no run: they have no optimizer state.
        record = self.store.record(step)
        saved = record["metadata"]
        where = str(self.store.path(step))
        must_match = MUST_MATCH
        if HAS_STATE in saved:
            must_match = {"lora_scale": MUST_MATCH["lora_scale"]}
        elif IS_IMPORT in saved:
            raise ConfigError(
                "imported weights, not a run that can be resumed",
                where=where,
                got=saved[IS_IMPORT],
                fix="set model.weights to that directory, and `output` to another",
            )
        # Some metadata must match, other metadata may differ and is only noted.
        for name, (what, fix) in must_match.items():
            if saved.get(name) != metadata[name]:
                what = f"{what} has changed since the checkpoint"
                fix = f"{fix}, or choose another `output`"
                raise ConfigError(
                    what,
                    where=where,
                    expected=f"{name} {saved.get(name)}",
                    got=f"{name} {metadata[name]}",
                    fix=fix,
                )
        if HAS_STATE in saved:
            self.say(f"step {step} was imported from {saved[IS_IMPORT]}: its data starts anew")
            return None
        changed = [name for name in NEED_NOT_MATCH if saved.get(name) != metadata[name]]
        if changed:
            self.say(f"note: {', '.join(changed)} changed since the checkpoint at step {step}")
        return record["data"]

    def restore(self, point: ResumePoint, sharded: Sharded) -> TrainState:
        """Reads a checkpoint's state, sharded as this run is; then renames the steps in `aside`.

        Raises ConfigError, and renames none, if the checkpoint does not fit the run.
        """
        step = point.step
        target = sharded.checkpoint_target()
        allow_cast = self.settings.allow_cast
        plan = self.store.preflight(step, target, allow_cast=allow_cast)
        with as_config_errors():
            plan.require_fit(by="--checkpoint.allow_cast True")
        self.say(str(plan))
        saved, *_ = self.store.restore(step, target, allow_cast=allow_cast, verify=False)
        state = sharded.from_checkpoint(saved)
        self._note_options(saved, state)
        if int(state.step) != step:  # the manifest was written by another program
            raise DamageError(
                "a checkpoint is damaged",
                where=f"{self.store.path(step)}, step",
                expected=step,
                got=int(state.step),
            )

        # Last: where a checkpoint is refused, all stay as they were. None is deleted.
        for other, why in point.aside.items():
            if is_lead():
                self.say(f"step {other} is set aside as {self.store.set_aside(other, why).name}")
        if point.aside:
            barrier("set aside")
        return state

    def _note_options(self, saved: TrainState, state: TrainState) -> None:
        """Says which loss scale and recent losses of a checkpoint this run does not take over."""
        for name, what in OPTIONAL_FIELDS.items():
            before, after = (
                jax.tree.map(describe_array, getattr(each, name)) for each in (saved, state)
            )
            if before and not after:
                self.say(f"note: the checkpoint has {what}, which this run leaves out")
            elif after and before != after:
                self.say(f"note: the checkpoint has no {what} of this run's; it starts anew")
        if saved.loss_scale and state.loss_scale:
            before, after = (float(each.loss_scale["scale"]) for each in (saved, state))
            if before != after:
                what = (
                    f"note: the loss scale is {after:g}, by precision.loss_scale; the checkpoint "
                )
                self.say(f"{what}has {before:g}")

    def note_learning_rate(self, step: int, rate: float) -> None:
        """Says where the learning rate jumps: that of the next update, and as saved with a step."""
        saved = self.store.record(step)["metadata"].get("learning_rate")
        if isinstance(saved, int | float) and not math.isclose(saved, rate, rel_tol=_JUMP):
            what = f"note: the learning rate goes on at {rate:.3g}; it would have been {saved:.3g} "
            self.say(f"{what}with the schedule of the checkpoint")

    def _newest_good(self, candidates: list[int], stated: int | None) -> ResumePoint:
        """Finds the newest of these steps that is good; damaged and later ones are to be renamed.

        `stated` is `checkpoint.step`, None where the newest step is to be taken. Raises DamageError
        if the policy is to stop at a damaged one, or all are.
        """
        damaged: list[int] = []
        for step in sorted(candidates, reverse=True):
            if self._is_good(step, stated):
                self.check_foreign_entries(step)
                later = [other for other in self.store.steps() if other > step]
                aside = dict.fromkeys(later, "superseded") | dict.fromkeys(damaged, "damaged")
                return ResumePoint(step, aside)
            damaged.append(step)
        raise DamageError(
            "every checkpoint is damaged",
            where=str(self.store.directory),
            got=f"steps {damaged}",
            fix="restore one from elsewhere, or choose another `output`",
        )

    def _already_resumed(self, steps: list[int]) -> bool:
        """Tells whether an earlier run has resumed from the stated step, and saved the newest."""
        stated = self.settings.step
        later = [step for step in steps if stated is not None and step > stated]
        if not later:
            return False
        try:
            return self.store.record(later[-1])["metadata"].get("stated") == stated
        except DamageError:  # its origin is unknown, so resume from the stated step
            return False

    def _is_good(self, step: int, stated: int | None) -> bool:
        """Tells whether a step is undamaged; raises DamageError if no other may replace it.

        `stated` is `checkpoint.step`, None where the newest step is to be taken.
        """
        # Check all files, or the manifest alone, and that the state was finite when it was saved.
        verify = self.settings.verify
        if not verify:
            self.say(f"step {step} is not verified (checkpoint.verify)")
        checked = self.store.check(step) if verify else self.store.check_manifest(step)
        if checked.good and self.store.record(step).get("finite") is False:
            checked = replace(checked, problems=("its state is infinite or NaN somewhere",))
        if checked.good:
            if verify:
                size, seconds = human_bytes(checked.size), checked.seconds
                self.say(
                    f"step {step} is undamaged: {checked.files} files, {size}, "
                    f"read in {seconds:.1f} s"
                )
            return True
        # Damaged: an error, or the caller tries an older step.
        if self.settings.damaged == "stop" or stated is not None:
            older = "resume from an older step with --checkpoint.damaged previous"
            other = older if stated is None else "choose another step"
            raise DamageError(
                "a checkpoint is damaged",
                where=str(self.store.path(step)),
                got=checked.summary(),
                fix=f"restore its files, or {other}",
            )
        self.say(f"step {step} is damaged, trying the one before: {checked.summary()}")
        return False

    def check_foreign_entries(self, step: int) -> None:
        """Says which entries are named like a step but are no checkpoint.

        Raises ConfigError if one has a later number than `step`: the run would save over it.
        """
        foreign = self.store.foreign()
        later = [str(self.store.path(number)) for number in foreign if number > step]
        if later:
            raise ConfigError(
                "something else has the name of a later step",
                where=", ".join(later),
                expected="a checkpoint",
                fix="remove or rename it",
            )
        for number in foreign:
            self.say(f"note: {self.store.path(number)} holds no checkpoint; it is left alone")


@dataclass
class Progress:
    """How far a run has come: its state, and the counters that go with it."""

    state: TrainState
    resumed: int | None = None  # the step that the run resumed from
    returns: dict[int, int] = field(default_factory=dict)  # step -> times that it went back to it
    steps: int = field(init=False)  # that are done
    skipped_in_a_row: int = field(init=False)

    def __post_init__(self) -> None:
        self.take(self.state)

    def take(self, state: TrainState) -> None:
        """Takes over a state, and the counters of its steps."""
        self.state = state
        self.steps = int(state.step)
        self.skipped_in_a_row = int(state.skipped_in_a_row)


@dataclass
class Saving:
    """The checkpoints of a run, and the outcome of the last save."""

    resumer: Resumer
    metadata: dict[str, Any]  # of each checkpoint
    goes_back: bool = False  # after a spike, to a step that is therefore not deleted
    saved: int | None = None  # the last saved step
    saved_at: float = field(default_factory=time.monotonic)
    failed: bool = False  # the last save, in the background
    postponed: bool = False  # because steps were being skipped
    not_finite_at_start: frozenset[str] = frozenset()  # paths of the state
    copies: MemoryCopies | None = None  # of the newest state, in the hosts' memory
    unused_copies: bool = False  # those in memory are of a state that the run did not start from
    blocked_seconds: float | None = None  # that the last save took, until it is told

    def note_start(self, sharded: Sharded, state: TrainState) -> None:
        """Notes arrays not finite before the first step: they may stay so, as a mask of -inf."""
        self.not_finite_at_start = frozenset(not_finite(_checkpoint_leaves(sharded, state)))
        if self.not_finite_at_start:
            what = "warning: the state is infinite or NaN before the first step"
            self.resumer.say(f"{what}: {', '.join(sorted(self.not_finite_at_start))}")

    def timed_save_is_due(self) -> bool:
        """Returns True once, in process 0 alone, when `every_minutes` have passed since a save."""
        minutes = self.resumer.settings.every_minutes
        if not is_lead() or minutes is None or time.monotonic() - self.saved_at < 60 * minutes:
            return False
        self.saved_at = time.monotonic()  # the agreed answer comes a step later
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
        if step == self.saved:
            return
        # Skipped steps in a row may be the start of a divergence: wait for one that is applied.
        skipping = progress.skipped_in_a_row
        if skipping and not ends:
            if not self.postponed:
                why = f"steps skipped in a row: {skipping}; the next one that is applied is saved"
                self.resumer.say(f"step {step} is not saved: {why}")
            self.postponed = True
            return
        self.postponed = False
        # Never save a state that has become infinite or NaN.
        spoiled = not_finite(_checkpoint_leaves(sharded, progress.state))
        spoiled = sorted({*spoiled} - self.not_finite_at_start)
        if spoiled:
            what = f"step {step} is not saved: its state is infinite or NaN"
            where, fix = ", ".join(spoiled), "resume from an older step; none was deleted"
            if ends:
                raise NonFiniteError(what, where=where, fix=fix)
            self.resumer.say(f"warning: {what}: {where}")
            return
        # Where saves are asynchronous, the training waits only until the arrays are copied.
        self.resumer.store.save(
            step,
            sharded.to_checkpoint(progress.state),
            data=loader.get_state(),
            metadata=self.metadata | {"returns": progress.returns},
            finite=True,
            delete_older=not skipping,
            keep_too=self.resumer.scheduled_steps()[-1:] if self.goes_back else (),
        )
        self.blocked_seconds = time.perf_counter() - started
        waited = f"training waited {self.blocked_seconds:.1f} s"
        self.resumer.say(f"saving step {step} ({waited})")
        self.saved = step
        self.saved_at = time.monotonic()

    def find_copy(self) -> MemoryCopy | None:
        """Finds the copy in memory to resume from: not older than the disk's newest checkpoint.

        Says why if there is none. The copies stay until the run has a state from elsewhere.
        """
        if self.copies is None:
            return None
        copy, problems = self.copies.newest()
        say, store = self.resumer.say, self.resumer.store
        latest = max(gather_from_processes(np.array(store.latest() or 0, np.int32)).ravel())
        if problems:
            say(f"note: of the copies in memory, {problems}")
        why = ""
        if copy is None:
            why = "there is no usable copy of the state in memory"
        elif self.resumer.settings.step is not None:
            why = f"the copies in memory, of step {copy.step}, are not used: checkpoint.step is set"
        elif copy.step < latest:
            why = f"the copies in memory are of step {copy.step}, and step {latest} is saved"
        elif not self.copies.fetch(copy):
            why = f"the copy of step {copy.step} did not arrive from a neighbour"
        if copy is None or why:
            if latest or copy is not None:  # a new run has nothing to tell
                say(f"{why}; reading the disk")
            self.unused_copies = True
            return None
        if copy.step == latest:
            self.saved = copy.step
        self.resumer.check_foreign_entries(copy.step)
        return copy

    def restore_copy(self, copy: MemoryCopy) -> tuple[TrainState, dict[str, Any], dict[int, int]]:
        """Reads (state, data position, returns) of a copy in memory."""
        assert self.copies is not None
        state, data, metadata = self.copies.restore(copy)
        whose = ""
        if copy.missing:
            whose = f", process {', '.join(map(str, copy.missing))} from its neighbour's"
        self.resumer.say(f"step {copy.step} is restored from the copies in memory{whose}")
        return state, data, {int(step): times for step, times in metadata["returns"].items()}

    def copy_to_memory(self, progress: Progress, sharded: Sharded, loader: Loader) -> None:
        """Copies the state to memory, unless steps are being skipped or it is not finite."""
        if self.copies is None or progress.skipped_in_a_row:
            return
        spoiled = not_finite(_checkpoint_leaves(sharded, progress.state))
        if {*spoiled} <= self.not_finite_at_start:
            if self.unused_copies:  # memory may not hold them too
                self.remove_copies()
            more = {"returns": progress.returns}
            self.copies.save(progress.steps, progress.state, loader.get_state(), more)

    def remove_copies(self) -> None:
        """Removes the copies in memory: a newer state is on disk, or this one is given up."""
        if self.copies is not None:
            self.copies.remove()
            self.unused_copies = False

    def check_previous(self, instead: str) -> None:
        """Waits for the last save; tells what happens `instead` if it failed, once."""
        failed_before, self.failed = self.failed, True
        try:
            with raise_together(
                CheckpointError("a checkpoint was not written, in another process")
            ):
                self.resumer.store.wait()
            self.failed = False
        except CheckpointError as error:
            if failed_before or isinstance(error, DirectoryLostError):
                raise
            self.resumer.say(f"warning: step {self.saved} was not saved; {instead}\n{error}")
            self.saved = None


def _checkpoint_leaves(sharded: Sharded, state: TrainState) -> dict[str, jax.Array | Padded]:
    """Lists {path: array} of the state as a checkpoint has it."""
    return leaves_of(sharded.to_checkpoint(state))
