"""The policy, as data, for keeping state and activations in host memory while not in use."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from jax.sharding import Mesh

from fsdp_jax.errors import ArgumentError
from fsdp_jax.host_memory import HOST
from fsdp_jax.limits import NonNegativeFloat, check_fields


def activation_names(names: Any, where: str, fix: str) -> tuple[str, ...]:
    """Checks names of activations, a collection and not a single one; returns them as a tuple.

    `where`: the argument that has them; `fix`: how they are written; both for the ValueError.
    """
    is_collection = isinstance(names, Collection) and not isinstance(names, str)
    if not is_collection or not all(isinstance(name, str) and name for name in names):
        raise ArgumentError("no names of activations", where=where, got=names, fix=fix)
    return tuple(names)


def is_count(value: Any, least: int = 1) -> bool:
    """Tells whether a value is an integer, of Python or NumPy, and at least `least`."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return bool(is_int and value >= least)


@dataclass(frozen=True)
class Offload:
    """What is kept in host memory; PyTorch's `CPUOffloadPolicy`, DeepSpeed's ZeRO-Offload.

    Nothing is computed on the host. What is there is brought to the device in parts, used or
    updated there, and sent back. Arrays of the state with fewer elements in a layer than
    `min_size`, and stacks of vectors, stay on the device. The transfers of a group overlap the
    update of another, for the bytes of one more; a group is some layers of an array, or several
    small arrays. An array that cannot be updated layer by layer is a group by itself, of any size.

    Raises:
        ValueError: a value of another type or out of range.

    """

    # Parameters: the master weights, and a copy in the compute dtype that units fetch from.
    params: bool = False
    # Optimizer state: true, or a fraction of its bytes, of which the largest arrays come first.
    optimizer: NonNegativeFloat | bool = 0.0
    # Activations that the backward pass reads: the inputs of the units.
    activations: bool = False
    # In place of the units' inputs, activations of these names: qkv, attention, attention_out, mlp.
    activation_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        is_number = isinstance(self.optimizer, bool | int | float | np.number | np.bool)
        if not (is_number and 0 <= float(self.optimizer) <= 1):
            raise ArgumentError(
                "not a fraction",
                where="offload.optimizer",
                expected="True, or a number from 0 to 1",
                got=self.optimizer,
                fix="0.5 keeps half of it on the host",
            )
        object.__setattr__(self, "optimizer", float(self.optimizer))
        check_fields(self, "offload")
        # Activations: by name, or the inputs of all units, but not both.
        fix = 'activation_names=("attention",), for checkpoint_name(x, "attention")'
        names = activation_names(self.activation_names, "offload.activation_names", fix)
        object.__setattr__(self, "activation_names", names)
        if self.activations and self.activation_names:
            raise ArgumentError(
                "either the inputs of the units are offloaded, or activations by name",
                where="offload.activation_names",
                got=", ".join(self.activation_names),
                fix="leave one of them out",
            )

    @property
    def state(self) -> bool:
        """Whether any of the state is kept on the host between steps."""
        return self.params or self.optimizer > 0

    @property
    def saves_activations(self) -> bool:
        """Whether what the forward pass saves for the backward pass is kept on the host."""
        return self.activations or bool(self.activation_names)


NO_OFFLOAD = Offload()


def check_host_memory(offload: Offload, mesh: Mesh) -> None:
    """Raises ValueError where something is offloaded, and devices cannot reach host memory."""
    if not (offload.state or offload.saves_activations):
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
    """Decides whether an array, `stacked` of whose dims stack layers, may be kept in host memory.

    Not one with fewer elements in a layer than `min_size`: to send it would take longer than it
    saves. Nor a stack of vectors: XLA:TPU cannot fetch one row of such a stack in 16 bits.
    """
    layer = shape[stacked:]
    return prod(layer) >= max(min_size, 2) and not (stacked and len(layer) < 2)
