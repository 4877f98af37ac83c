"""Which checkpoint a run goes on from: the newest that is as it was written, or a stated other one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_jax.api import Sharded
from fsdp_jax.checkpoint import CheckpointStore, DamageError
from fsdp_jax.errors import ConfigError, human_bytes, message
from fsdp_jax.launch import barrier
from fsdp_jax.step.state import TrainState

Damaged = Literal["stop", "previous"]
Say = Callable[[str], None]

MUST_MATCH = {
    "corpus": ("the corpus has changed since the checkpoint", "restore the text it was trained on"),
    "tokenizer": (
        "the tokenizer has changed since the checkpoint",
        "use the tokenizer it was trained with",
    ),
    "lora_scale": (
        "LoRA's scale has changed since the checkpoint",
        "set lora.alpha and lora.rank as they were",
    ),
}
"""What a checkpoint's metadata must have in common with the run: name -> (what is wrong otherwise, the fix)."""

MAY_DIFFER = ("config", "strategy", "mesh")


@dataclass(frozen=True)
class Chosen:
    """The step to go on from.

    Attributes:
        aside: steps that are renamed once nothing can be refused any more -> why.
        stated: the step that `checkpoint.step` named, and that this run has gone on from; None
            where it named none.

    """

    step: int
    aside: dict[int, str]
    stated: int | None


@dataclass(frozen=True)
class Resuming:
    """How to choose and what to accept; `CheckpointConfig` says what each means.

    Attributes:
        lead: whether this process renames what is set aside.

    """

    store: CheckpointStore
    say: Say
    lead: bool
    step: int | None = None
    damaged: Damaged = "stop"
    verify: bool = True
    allow_cast: bool = False

    def choose(self) -> Chosen | None:
        """The step to go on from; None where there is none yet. Changes nothing.

        Raises:
            ConfigError: the stated step is not there, or something else is where a later one will
                be.
            DamageError: the newest is damaged and the policy is to stop, or none is good.

        """
        found = self.store.steps()
        stated = None if self.step is None or self._gone_on(found) else self.step
        if stated is not None and stated not in found:
            fix = (
                f"one of {found}"
                if found
                else "leave checkpoint.step out: there is no checkpoint yet"
            )
            where = str(self.store.directory)
            raise ConfigError(
                message(
                    "no such step", where=f"checkpoint.step, in {where}", got=self.step, fix=fix
                )
            )
        bad: list[int] = []
        for step in sorted(found, reverse=True) if stated is None else [stated]:
            if self._is_good(step, stated):
                aside = dict.fromkeys(bad, "damaged")
                aside |= dict.fromkeys(
                    [later for later in found if stated is not None and later > step], "superseded"
                )
                self._check_foreign(step)
                return Chosen(step, aside, self.step)
            bad.append(step)
        if bad:
            fix = "restore one from elsewhere, or choose another `output`"
            where = str(self.store.directory)
            raise DamageError(
                message(
                    "no checkpoint is as it was written", where=where, got=f"steps {bad}", fix=fix
                )
            )
        self._check_foreign(0)
        self.say(f"no checkpoint in {self.store.directory}: starting afresh")
        return None

    def check(self, step: int, metadata: dict[str, Any]) -> dict[str, Any]:
        """The data position of a chosen step. Raises ConfigError if it is of another corpus or
        tokenizer.
        """
        record = self.store.record(step)
        saved = record["metadata"]
        if "imported" in saved:
            what, where = "imported weights, not a run that could go on", str(self.store.path(step))
            fix = "set model.weights to that directory, and `output` to another"
            raise ConfigError(message(what, where=where, got=saved["imported"], fix=fix))
        for name, (what, fix) in MUST_MATCH.items():
            if saved.get(name) != metadata[name]:
                where, fix = str(self.store.path(step)), f"{fix}, or choose another `output`"
                expected, got = f"{name} {saved.get(name)}", f"{name} {metadata[name]}"
                raise ConfigError(message(what, where=where, expected=expected, got=got, fix=fix))
        changed = [name for name in MAY_DIFFER if saved.get(name) != metadata[name]]
        if changed:
            self.say(f"note: {', '.join(changed)} changed since the checkpoint at step {step}")
        return record["data"]

    def restore(self, step: int, sharded: Sharded) -> TrainState:
        """The state of a chosen step. Raises ConfigError, before any array is read, with every path
        that differs.
        """
        target = sharded.checkpoint_target()
        plan = self.store.preflight(step, target, allow_cast=self.allow_cast)
        try:
            plan.require_fit(by="--checkpoint.allow_cast True")
        except ValueError as refusal:
            raise ConfigError(str(refusal)) from refusal
        self.say(str(plan))
        saved, *_ = self.store.restore(step, target, allow_cast=self.allow_cast, verify=False)
        return sharded.from_checkpoint(saved)

    def set_aside(self, chosen: Chosen) -> None:
        """Renames what a choice leaves behind; nothing is deleted."""
        for step, why in chosen.aside.items():
            if self.lead:
                self.say(f"step {step} is set aside as {self.store.set_aside(step, why).name}")
        if chosen.aside:
            barrier("set aside")

    def _gone_on(self, found: list[int]) -> bool:
        """Whether the newest step already comes of the stated one: the same command, run again,
        goes on from there.
        """
        later = [step for step in found if self.step is not None and step > self.step]
        try:
            return (
                bool(later) and self.store.record(later[-1])["metadata"].get("stated") == self.step
            )
        except DamageError:  # whose it was cannot be told; the stated step is asked for
            return False

    def _is_good(self, step: int, stated: int | None) -> bool:
        """Whether a step is as it was written. Raises DamageError where it is not, and another must
        not be taken.
        """
        if self.verify:
            checked = self.store.check(step)
        else:
            checked = self.store.check_manifest(step)
            self.say(f"step {step} is not verified (checkpoint.verify)")
        if not checked.good:
            fix = (
                "restore its files, or resume from an older step with --checkpoint.damaged previous"
            )
            if stated is not None:
                fix = "restore its files, or choose another step"
            if self.damaged == "stop" or stated is not None:
                where = str(self.store.path(step))
                raise DamageError(
                    message("a checkpoint is damaged", where=where, got=checked.summary(), fix=fix)
                )
            self.say(f"step {step} is damaged, trying the one before: {checked.summary()}")
        elif self.verify:
            size = human_bytes(checked.size)
            self.say(
                f"step {step} is as it was written: {checked.files} files, {size}, read in {checked.seconds:.1f} s"
            )
        return checked.good

    def _check_foreign(self, step: int) -> None:
        """Directories that are named like steps: those behind are left alone, one ahead would end
        the run there.
        """
        foreign = self.store.foreign()
        ahead = [str(self.store.path(number)) for number in foreign if number > step]
        if ahead:
            what, fix = "something else is where a later step will be", "remove or rename it"
            raise ConfigError(
                message(what, where=", ".join(ahead), expected="a checkpoint", fix=fix)
            )
        for number in foreign:
            self.say(f"note: {self.store.path(number)} holds no checkpoint; it is left alone")
