"""Which checkpoint a run goes on from: the newest that is as it was written, or a stated other one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_jax.api import Sharded
from fsdp_jax.checkpoint import Checked, CheckpointStore, DamageError
from fsdp_jax.errors import ConfigError, human_bytes, message
from fsdp_jax.launch import barrier
from fsdp_jax.state import TrainState

Damaged = Literal["stop", "previous"]
Say = Callable[[str], None]

MUST_MATCH = {
    "corpus": ("the corpus has changed since the checkpoint", "restore the text it was trained on"),
    "tokenizer": ("the tokenizer has changed since the checkpoint", "use the tokenizer it was trained with"),
}
"""What a checkpoint's metadata must have in common with the run: name -> (what is wrong otherwise, the fix)."""

MAY_DIFFER = ("config", "strategy", "mesh")


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

    def choose(self) -> int | None:
        """The step to go on from; None where there is none yet. Damaged ones are set aside where that is the policy.

        Raises:
            ConfigError: the stated step is not there.
            DamageError: the newest is damaged and the policy is to stop, or none is good.

        """
        for number in self.store.foreign():
            self.say(f"note: {self.store.path(number)} holds no checkpoint; it is left alone")
        found = self.store.steps()
        if self.step is not None and self.step not in found:
            fix = f"one of {found}" if found else "leave checkpoint.step out: there is no checkpoint yet"
            where = str(self.store.directory)
            raise ConfigError(message("no such step", where=f"checkpoint.step, in {where}", got=self.step, fix=fix))
        candidates = sorted(found, reverse=True) if self.step is None else [self.step]
        bad: list[int] = []
        for step in candidates:
            checked = self.store.check(step) if self.verify else None
            if checked is None or checked.good:
                self._tell(step, checked)
                self._set_aside(bad, "damaged")
                return step
            self._refuse_or_go_on(step, checked)
            bad.append(step)
        if bad:
            fix = "restore one from elsewhere, or choose another `output`"
            where = str(self.store.directory)
            raise DamageError(message("no checkpoint is as it was written", where=where, got=f"steps {bad}", fix=fix))
        self.say(f"no checkpoint in {self.store.directory}: starting afresh")
        return None

    def restore(self, step: int, sharded: Sharded, metadata: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        """(state, data position) of a chosen step.

        Raises:
            ConfigError: it is of another corpus or tokenizer, or of another state, with every path that differs.

        """
        self._check_metadata(step, self.store.record(step)["metadata"], metadata)
        target = sharded.checkpoint_target()
        plan = self.store.preflight(step, target, allow_cast=self.allow_cast)
        try:
            plan.require_fit()
        except ValueError as refusal:
            raise ConfigError(str(refusal).replace("allow_cast,", "--checkpoint.allow_cast True,")) from refusal
        self.say(str(plan))
        saved, position, _ = self.store.restore(step, target, allow_cast=self.allow_cast, verify=False)
        if self.step is not None:
            self._set_aside([later for later in self.store.steps() if later > step], "superseded")
        return sharded.from_checkpoint(saved), position

    def _tell(self, step: int, checked: Checked | None) -> None:
        if checked is None:
            self.say(f"step {step} is not verified (checkpoint.verify)")
            return
        size = human_bytes(checked.size)
        self.say(f"step {step} is as it was written: {checked.files} files, {size}, read in {checked.seconds:.1f} s")

    def _refuse_or_go_on(self, step: int, checked: Checked) -> None:
        fix = "restore its files, or resume from an older step with --checkpoint.damaged previous"
        if self.step is not None:
            fix = "restore its files, or choose another step"
        if self.damaged == "stop" or self.step is not None:
            where = str(self.store.path(step))
            raise DamageError(message("a checkpoint is damaged", where=where, got=checked.summary(), fix=fix))
        self.say(f"step {step} is damaged, trying the one before: {checked.summary()}")

    def _set_aside(self, steps: list[int], why: str) -> None:
        for step in steps:
            if self.lead:
                self.say(f"step {step} is set aside as {self.store.set_aside(step, why).name}")
        if steps:
            barrier(why)

    def _check_metadata(self, step: int, saved: dict[str, Any], run: dict[str, Any]) -> None:
        for name, (what, fix) in MUST_MATCH.items():
            if saved.get(name) != run[name]:
                was, now_is = f"digest {saved.get(name)}", f"digest {run[name]}"
                where, fix = str(self.store.path(step)), f"{fix}, or choose another `output`"
                raise ConfigError(message(what, where=where, expected=was, got=now_is, fix=fix))
        changed = [name for name in MAY_DIFFER if saved.get(name) != run[name]]
        if changed:
            self.say(f"note: {', '.join(changed)} changed since the checkpoint at step {step}")
