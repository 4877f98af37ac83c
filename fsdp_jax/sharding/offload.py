"""What is kept in host memory while it is not used: the policy, as data."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from jax.sharding import Mesh

from fsdp_jax.errors import ArgumentError
from fsdp_jax.host_memory import HOST


def is_names(names: Any) -> bool:
    """Returns whether a value is a collection of non-empty names, and not a single one."""
    is_sequence = isinstance(names, Collection) and not isinstance(names, str)
    return is_sequence and all(isinstance(name, str) and name for name in names)


def is_count(value: Any, least: int = 1) -> bool:
    """Returns whether a value is an integer, of Python or NumPy, and at least `least`."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return bool(is_int and value >= least)


@dataclass(frozen=True)
class Offload:
    """What is kept in host memory; PyTorch's `CPUOffloadPolicy`, DeepSpeed's ZeRO-Offload.

    Nothing is computed on the host. What is there is brought to the device in parts, used or
    updated there, and sent back. Arrays of the state with fewer elements in a layer than
    `min_size`, and stacks of vectors, stay on the device.

    Attributes:
        params: parameters are kept on the host: the master weights, and a copy in the compute dtype
            from which a unit fetches its shards each time it gathers them.
        optimizer: optimizer state is kept on the host: True for all of it, or a fraction of its
            bytes, 0 to 1, of which the largest arrays are taken first.
        activations: what the forward pass saves for the backward pass is kept on the host: True for
            the inputs of the units, or names given by `jax.ad_checkpoint.checkpoint_name`.
        in_flight: groups of state that are on the device at once for their update, at least 1. The
            transfers of one overlap the update of another, for the bytes of one more.
        group_bytes: of a group, on each device: some layers of an array, or several small arrays.
            An array that cannot be updated layer by layer is a group by itself, of any size.
    """

    params: bool = False
    optimizer: bool | float = False
    activations: bool | tuple[str, ...] = False
    in_flight: int = 2
    group_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        if not isinstance(self.params, bool):
            raise ArgumentError(
                "offload of parameters is all or none",
                where="offload.params",
                got=self.params,
                fix="Offload(params=True)",
            )
        is_number = isinstance(self.optimizer, bool | int | float | np.number)
        if not (is_number and 0 <= float(self.optimizer) <= 1):
            raise ArgumentError(
                "not a fraction",
                where="offload.optimizer",
                expected="True, or a number from 0 to 1",
                got=self.optimizer,
                fix="0.5 keeps half of it on the host",
            )
        if not isinstance(self.activations, bool):
            if not is_names(self.activations):
                raise ArgumentError(
                    "neither True nor names of activations",
                    where="offload.activations",
                    got=self.activations,
                    fix='Offload(activations=("attention",)), for checkpoint_name(x, "attention")',
                )
            object.__setattr__(self, "activations", tuple(self.activations))
        for name in ("in_flight", "group_bytes"):
            value = getattr(self, name)
            if not is_count(value):
                raise ArgumentError(
                    f"{name} is a whole number, at least 1", where=f"offload.{name}", got=value
                )

    @property
    def fraction(self) -> float:
        """The fraction of the optimizer state's bytes that is kept on the host."""
        return float(self.optimizer)

    @property
    def state(self) -> bool:
        """Whether any of the state is kept on the host between steps."""
        return self.params or self.fraction > 0


NO_OFFLOAD = Offload()


def check_host_memory(offload: Offload, mesh: Mesh) -> None:
    """Raises ValueError where something is offloaded, and devices cannot reach host memory."""
    if not (offload.state or offload.activations):
        return
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    # GPUs that are only compiled for report no memories.
    if kinds and HOST not in kinds:
        raise ArgumentError(
            f"these devices cannot reach host memory of the kind '{HOST}'",
            where="offload",
            got=f"{device.device_kind}, with {', '.join(kinds)}",
            fix="leave offload out; remat, accumulation= and more devices save memory too",
        )


def worth_sending(shape: Sequence[int], stacked: int, min_size: int) -> bool:
    """Returns whether an array, `stacked` of whose dims stack layers, may be kept in host memory.

    Not one with fewer elements in a layer than `min_size`: to send it would take longer than it
    saves. Nor a stack of vectors: XLA:TPU cannot fetch one row of such a stack in 16 bits.
    """
    layer = shape[stacked:]
    return prod(layer) >= max(min_size, 2) and not (stacked and len(layer) < 2)
