"""What a restore will do, from what was recorded alone: no array is read."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax.checkpoint.arrays import describe, stored
from fsdp_jax.errors import human_bytes, message

READ_AHEAD = 256 << 20  # bytes read into the host's memory at a time
SHOWN = 40  # differences listed before the rest is only counted


@dataclass(frozen=True)
class Preflight:
    """What restoring one step into one layout takes.

    Attributes:
        where: the checkpoint.
        differences: one line per path that does not fit: missing, extra, of another shape or dtype.
        casts: one line per path that is read as another floating dtype, which `allow_cast` allows.
        read_bytes: what this process reads from disk; more where its parts cut through those that were written.
        device_bytes: of the restored state, on each of this process's devices.
        host_bytes: the most host memory that reading takes beside the state itself.

    """

    where: Path
    differences: tuple[str, ...]
    casts: tuple[str, ...]
    read_bytes: int
    device_bytes: int
    host_bytes: int

    def require_fit(self) -> None:
        """Raises ValueError with every difference, path by path."""
        if not self.differences:
            return
        only_casts = all(line.endswith(CASTABLE) for line in self.differences)
        more = len(self.differences) - SHOWN
        lines = [*self.differences[:SHOWN], *([f"and {more} more"] if more > 0 else [])]
        fix = "use the configuration that wrote it, or another output directory"
        raise ValueError(
            message(
                "the checkpoint does not fit this run",
                where=str(self.where),
                expected="the state that the configuration describes",
                got="\n            ".join([f"{len(self.differences)} differing paths", *lines]),
                fix="allow_cast, which rounds where the new dtype is narrower; or " + fix if only_casts else fix,
            )
        )

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.where}: reads {human_bytes(self.read_bytes)}, at most {human_bytes(self.host_bytes)} of host "
                f"memory at a time, into {human_bytes(self.device_bytes)} on each device",
                *(f"  differs: {line}" for line in self.differences),
                *(f"  cast: {line}" for line in self.casts),
            ]
        )


CASTABLE = " (dtype only)"


def compare(where: Path, saved: dict[str, str], target: dict[str, Any], *, allow_cast: bool) -> Preflight:
    """What was saved, `path -> float32[8,4]`, against a target whose leaves have shardings.

    Raises ValueError for a target without shardings.
    """
    homeless = [path for path, leaf in target.items() if getattr(leaf, "sharding", None) is None]
    if homeless:
        raise ValueError(message("a target without shardings", where=str(where), got=", ".join(homeless[:SHOWN])))
    wanted = {path: describe(leaf) for path, leaf in target.items()}
    differences, casts = [], []
    for path in sorted(wanted.keys() | saved.keys()):
        expected, got = wanted.get(path, "nothing"), saved.get(path, "nothing")
        if expected == got:
            continue
        castable = _castable(expected, got)
        if castable and allow_cast:
            casts.append(f"{path}: {got} to {expected}")
        else:
            differences.append(f"{path}: expected {expected}, got {got}{CASTABLE if castable else ''}")
    leaves = [stored(leaf) for leaf in target.values() if leaf.size]
    return Preflight(
        where, tuple(differences), tuple(casts),
        read_bytes=sum(_read_bytes(leaf) for leaf in leaves),
        device_bytes=sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves),
        host_bytes=min(read_ahead(leaves), sum(_read_bytes(leaf) for leaf in leaves)),
    )  # fmt: skip


def read_ahead(leaves: list[jax.ShapeDtypeStruct]) -> int:
    """A bound on the host bytes in flight that lets the largest array through: it, and the part of it asked for."""
    return max(READ_AHEAD, *(2 * prod(leaf.shape) * leaf.dtype.itemsize + 1 for leaf in leaves), 1)


def _castable(expected: str, got: str) -> bool:
    """Whether only the dtype differs, and both are floating."""
    (wanted, _, shape), (found, _, saved_shape) = expected.partition("["), got.partition("[")
    return shape == saved_shape and all(_floating(name) for name in (wanted, found))


def _floating(name: str) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(name), jnp.floating))
    except TypeError:  # a PRNG key, or no dtype at all
        return False


def _read_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Each different part once, however many devices it goes to."""
    shape = tuple(leaf.shape)
    parts = {
        tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for index in leaf.sharding.addressable_devices_indices_map(shape).values()
    }
    return sum(prod(stop - start for start, stop in part) for part in parts) * leaf.dtype.itemsize
