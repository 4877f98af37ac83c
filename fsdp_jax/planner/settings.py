"""Settings of a step that do not change what it computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_jax.prefetch.rewrite import Prefetch
from fsdp_jax.sharding.offload import NO_OFFLOAD, Offload
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.tree import PyTree
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
    """

    strategy: str
    replica: int = 1
    remat: RematName = "none"
    prefetch: Prefetch = "none"
    accumulation: int = 1
    loss_chunk: int | None = None
    offload: Offload = NO_OFFLOAD

    def keys(self) -> dict[str, str]:
        """Returns the settings by their configuration keys."""
        keys = {
            "strategy": self.strategy,
            "mesh.replica": str(self.replica),
            "remat": self.remat,
            "prefetch": self.prefetch,
            "train.accumulation": str(self.accumulation),
        }
        if self.loss_chunk is not None:
            keys["train.loss_chunk"] = str(self.loss_chunk)
        if self.offload.params:
            keys["offload.params"] = "True"
        if self.offload.optimizer:
            keys["offload.optimizer"] = f"{self.offload.optimizer:g}"
        if self.offload.activations:
            keys["offload.activations"] = "True"
        if self.offload.activation_names:
            keys["offload.activation_names"] = " ".join(self.offload.activation_names)
        return keys

    def flags(self, since: "StepSettings | None" = None) -> list[str]:
        """Returns the settings as command-line flags; only those that differ from `since`."""
        before = since.keys() if since else {}
        return [
            f"--{key} {value}" for key, value in self.keys().items() if before.get(key) != value
        ]

    def __str__(self) -> str:
        return " ".join(self.flags())


MakeStep = Callable[[StepSettings, Sequence[Any]], tuple[CompiledStep, PyTree]]
"""Returns a step with these settings on these devices, and the shapes of its global batch."""
