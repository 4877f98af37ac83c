"""What jax's devices tell beyond their documented attributes, and what jax asks of a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_jax.host_memory import HOST


def slice_index(device: Any) -> int:
    """Reads the number of the device's TPU slice; 0 where there are none."""
    return getattr(device, "slice_index", None) or 0


def torus_coordinates(device: Any) -> tuple[int, ...]:
    """Reads (slice, coordinates in the torus, core) of a TPU core."""
    return (slice_index(device), *device.coords, device.core_on_chip)


class FakeMemory(str):
    """A memory of a device, as a str of its kind: jax compares memories with names of kinds."""

    kind = property(str)


@dataclass(frozen=True, order=True)
class FakeClient:
    """What jax asks of a device's client: which process this one is."""

    def process_index(self) -> int:
        """Returns the first process, so that the first host's devices count as local."""
        return 0


@dataclass(frozen=True, order=True)
class FakeDevice:
    """What jax and `make_mesh` ask of a device before anything is compiled. It holds no arrays."""

    id: int
    process_index: int
    platform: str
    device_kind: str
    slice_index: int = 0
    coords: tuple[int, ...] = ()  # of a TPU, in the torus
    core_on_chip: int = 0
    compute_capability: str = ""  # of an NVIDIA GPU, such as 9.0
    client: FakeClient = FakeClient()

    def default_memory(self) -> FakeMemory:
        """Returns the device's own memory."""
        return FakeMemory("device")

    def addressable_memories(self) -> Sequence[FakeMemory]:
        """Returns the device's own memory, and its host's that it can read and write."""
        return [self.default_memory(), FakeMemory(HOST)]
