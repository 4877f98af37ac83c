"""Settings of a step that do not change its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_jax.prefetch.rewrite import Prefetch
from fsdp_jax.sharding.offload import NO_OFFLOAD, Offload
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.tree import PyTree
from fsdp_jax.units.keep_gathered import KeepGathered
from fsdp_jax.units.remat import RematName

OFFLOADS = (
    NO_OFFLOAD,
    Offload(optimizer=True),
    Offload(activations=True),
    Offload(params=True, optimizer=True),
)
"""What plans propose to keep in host memory."""
REMATS: tuple[RematName, ...] = ("full", "selective", "none")
"""Policies of rematerialization that plans propose, the one of least memory first."""


@dataclass(frozen=True)
class StepSettings:
    """Settings of a step with a given global batch; accumulation determines the microbatch.

    `loss_chunk` is the vocabulary chunk size of the loss; None leaves it as it is configured.
    `keep_gathered` is as `fully_shard` takes it.
    """

    strategy: str
    replica: int | None = 1  # None: as many as there are hosts
    remat: RematName = "none"
    prefetch: Prefetch = "none"
    accumulation: int = 1
    loss_chunk: int | None = None
    offload: Offload = NO_OFFLOAD
    keep_gathered: KeepGathered = ()

    def values(self) -> dict[str, Any]:
        """Lists the values of the configuration's keys."""
        values: dict[str, Any] = {
            "strategy": self.strategy,
            "mesh.replica": self.replica,
            "remat": self.remat,
            "prefetch": self.prefetch,
            "train.accumulation": self.accumulation,
            "train.loss_chunk": self.loss_chunk,
        }
        if self.loss_chunk is None:
            del values["train.loss_chunk"]
        keep = self.keep_gathered
        values |= {
            "keep_gathered.last": keep if isinstance(keep, int) else 0,
            "keep_gathered.budget": keep if isinstance(keep, str) else None,
            "keep_gathered.classes": () if isinstance(keep, int | str) else tuple(keep),
        }
        offload = ("params", "optimizer", "activations", "activation_names")
        return values | {f"offload.{name}": getattr(self.offload, name) for name in offload}

    def keys(self) -> dict[str, str]:
        """Formats the values of keys as text, without what is off."""
        shown = {key: value for key, value in self.values().items() if value not in (False, ())}
        if shown["keep_gathered.budget"] is None:
            del shown["keep_gathered.budget"]
        return {key: setting_text(value) for key, value in shown.items()}

    def flags(self, since: "StepSettings | None" = None) -> list[str]:
        """Formats the settings as command-line flags; only those that differ from `since`."""
        if since is None:
            return [f"--{key} {text}" for key, text in self.keys().items()]
        before = since.values()
        changed = {key: value for key, value in self.values().items() if before.get(key) != value}
        return [f"--{key} {setting_text(value)}".rstrip() for key, value in changed.items()]

    def __str__(self) -> str:
        return " ".join(self.flags())


def budget_text(free_bytes: float) -> str:
    """Formats bytes as a budget of `keep_gathered`, rounded down; "" for less than 1 MiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if free_bytes >= 4 * size or (size == 2**20 and free_bytes >= size):
            return f"{int(free_bytes // size)}{unit}"
    return ""


MakeStep = Callable[[StepSettings, Sequence[Any]], tuple[CompiledStep, PyTree]]
"""Makes a step with these settings on these devices, and the shapes of its global batch."""


def setting_text(value: Any) -> str:
    """Formats a value as a command line has it."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def differing_settings(plans: Sequence[Any]) -> list[tuple[str, ...]]:
    """Lists (key, its value in each plan) of the settings in which plans differ.

    A plan has the keys that are not the default, so that a key that it lacks has the default.
    """
    keys = dict.fromkeys(key for plan in plans for key in plan.settings)
    rows = [
        (key, *(setting_text(plan.settings.get(key, "default")) for plan in plans)) for key in keys
    ]
    return [row for row in rows if len(set(row[1:])) > 1]
