"""What a restore will do, from what was recorded alone: no array is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax.checkpoint.arrays import stored
from fsdp_jax.errors import human_bytes, message
from fsdp_jax.io.array_specs import array_bytes, describe, is_prng_key, parse_description

READ_AHEAD = 256 << 20  # bytes read into the host's memory at a time
SHOWN = 40  # differences listed before the rest is only counted


@dataclass(frozen=True)
class Preflight:
    """What restoring one step into one layout takes.

    Attributes:
        where: the checkpoint.
        differences: one line per path that does not fit: missing, extra, of another shape or dtype.
        casts: one line per path that is read as another floating dtype, which `allow_cast` allows.
        read_bytes: what this process reads from disk, at most: a part is read with all of the
            shards it cuts through.
        device_bytes: of the restored state, on each of this process's devices.
        host_bytes: the most host memory that reading takes beside the state itself.

    """

    where: Path
    differences: tuple[str, ...]
    casts: tuple[str, ...]
    read_bytes: int
    device_bytes: int
    host_bytes: int

    def require_fit(self, *, by: str = "allow_cast=True") -> None:
        """Raises ValueError with every difference, path by path. `by`: how the caller's user allows
        a cast.
        """
        if not self.differences:
            return
        only_casts = all(line.endswith(CASTABLE) for line in self.differences)
        more = len(self.differences) - SHOWN
        lines = [*self.differences[:SHOWN], *([f"and {more} more"] if more > 0 else [])]
        fix = "use the model, optimizer and precision that wrote it (a run's config.yaml says which), or start elsewhere"
        raise ValueError(
            message(
                "the checkpoint does not fit this run",
                where=str(self.where),
                expected="the state of this run's model and optimizer",
                got="\n            ".join([f"{len(self.differences)} differing paths", *lines]),
                fix=f"{by}, which rounds where the new dtype is narrower; or {fix}"
                if only_casts
                else fix,
            )
        )

    def __str__(self) -> str:
        read, host, device = (
            human_bytes(size) for size in (self.read_bytes, self.host_bytes, self.device_bytes)
        )
        return "\n".join(
            [
                f"{self.where}: reads {read}, with at most {host} of host memory at a time, into {device} a device",
                *(f"  differs: {line}" for line in self.differences),
                *(f"  cast: {line}" for line in self.casts),
            ]
        )


CASTABLE = " (dtype only)"


def compare(
    where: Path, record: dict[str, Any], target: dict[str, Any], *, allow_cast: bool
) -> Preflight:
    """What was recorded of a save (`leaves`, `shards`) against a target whose leaves have
    shardings.

    Raises ValueError for a target without shardings.
    """
    homeless = [path for path, leaf in target.items() if getattr(leaf, "sharding", None) is None]
    if homeless:
        fix = "sharded.checkpoint_target(), or a sharding in each ShapeDtypeStruct"
        got = ", ".join(homeless[:SHOWN])
        raise ValueError(message("a target without shardings", where=str(where), got=got, fix=fix))
    saved, wanted = record["leaves"], {path: describe(leaf) for path, leaf in target.items()}
    differences, casts = [], []
    # parameters first: the optimizer's state repeats what differs there
    for path in sorted(
        wanted.keys() | saved.keys(), key=lambda path: (not path.startswith("params/"), path)
    ):
        expected, got = wanted.get(path, "nothing"), saved.get(path, "nothing")
        if expected == got:
            continue
        castable = _castable(expected, got)
        if castable and allow_cast:
            casts.append(f"{path}: {got} to {expected}")
        else:
            differences.append(
                f"{path}: expected {expected}, got {got}{CASTABLE if castable else ''}"
            )
    leaves = {path: stored(leaf) for path, leaf in target.items() if leaf.size}
    there = {
        path: leaf for path, leaf in leaves.items() if path in record["shards"] and path in saved
    }
    requests = [
        _request(
            leaf,
            record["shards"][path],
            leaf.dtype if is_prng_key(target[path]) else parse_description(saved[path])[0],
        )
        for path, leaf in there.items()
        if len(leaf.shape) == len(record["shards"][path])
    ]
    limit = read_ahead({leaf: record["shards"][path] for path, leaf in there.items()})
    return Preflight(
        where,
        tuple(differences),
        tuple(casts),
        read_bytes=sum(read for each in requests for read, _ in each),
        device_bytes=sum(
            array_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
            for leaf in leaves.values()
        ),
        host_bytes=min(limit, sum(read + kept for each in requests for read, kept in each)),
    )


def read_ahead(leaves: Mapping[jax.ShapeDtypeStruct, Sequence[int]]) -> int:
    """A bound on the host bytes in flight that lets the largest single part through.

    `leaves`: what is wanted -> the shape of the shards it was saved in.
    """
    single = [
        read + kept
        for leaf, shard in leaves.items()
        if len(leaf.shape) == len(shard)
        for read, kept in _request(leaf, shard, leaf.dtype)
    ]
    return max(
        [READ_AHEAD, *(4 * one + 1 for one in single)]
    )  # 4: bytes of a wider dtype that it may be cast from


def _request(leaf: jax.ShapeDtypeStruct, shard: Sequence[int], saved: Any) -> list[tuple[int, int]]:
    """(bytes read, bytes kept) of each different part that this process wants, however many devices
    it goes to.

    Arrays were written in parts of the shape `shard` or finer; a part is read with all that it cuts
    through.
    """
    shape = tuple(leaf.shape)
    parts = {
        tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for index in leaf.sharding.addressable_devices_indices_map(shape).values()
    }
    return [
        (
            array_bytes(
                (
                    min(-(-stop // step) * step, size) - start // step * step
                    for (start, stop), size, step in zip(part, shape, shard, strict=True)
                ),
                saved,
            ),
            array_bytes((stop - start for start, stop in part), leaf.dtype),
        )
        for part in parts
    ]


def _castable(expected: str, got: str) -> bool:
    """Whether only the dtype differs, and both are floating."""
    (wanted, _, shape), (found, _, saved_shape) = expected.partition("["), got.partition("[")
    return shape == saved_shape and all(_floating(name) for name in (wanted, found))


def _floating(name: str) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(name), jnp.floating))
    except TypeError:  # a PRNG key, or no dtype at all
        return False
