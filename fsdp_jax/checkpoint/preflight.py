"""Plans a restore from the manifest alone: differences, bytes to read, and memory."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax.checkpoint.arrays import OPT_STATE, require_shardings, saved_spec
from fsdp_jax.errors import ArgumentError, first_lines, human_bytes
from fsdp_jax.io.array_specs import array_bytes, describe_array, is_prng_key, parse_description
from fsdp_jax.io.boxes import box_of_index, box_sizes, full_box, intersect
from fsdp_jax.sharding.padding import as_stored, stored_shape

READ_AHEAD = 256 << 20  # bytes read into host memory at a time
SHOWN = 40  # differences listed before the rest is only counted
DTYPE_ONLY = " (dtype only)"
AVERAGE = "an average of the parameters"
PADDED = " (as it is stored: saved without to_checkpoint)"


@dataclass(frozen=True)
class Preflight:
    """The plan of restoring one step into one layout.

    Attributes:
        where: the checkpoint.
        differences: one line per path that does not fit: missing, extra, of another shape or dtype.
        casts: one line per path that is read as another floating dtype, which `allow_cast` allows.
        read_bytes: bytes that this process reads from disk, at most: a part is read together with
            all saved shards that it overlaps.
        device_bytes: bytes of the restored state, on each of this process's devices.
        host_bytes: the most host memory that reading takes beside the state itself.

    """

    where: Path
    differences: tuple[str, ...]
    casts: tuple[str, ...]
    read_bytes: int
    device_bytes: int
    host_bytes: int

    def require_fit(self, *, by: str = "allow_cast=True") -> None:
        """Raises ValueError with every difference; `by`: the user's setting that allows a cast."""
        if not self.differences:
            return
        # The fix: where only dtypes or padding differ, there are plainer ones.
        fix = (
            "use the model, optimizer and precision that wrote it (a run's config.yaml says which),"
            " or start elsewhere"
        )
        if all(line.endswith(DTYPE_ONLY) for line in self.differences):
            fix = f"{by}, which rounds where the new dtype is narrower; or {fix}"
        if any(line.endswith(AVERAGE) for line in self.differences):
            fix = "keep it: optimizer.ema as it was, or optax.chain(tx, optim.params_ema(decay)); "
            fix += "or start another run from exported weights"
        if any(line.endswith(PADDED) for line in self.differences):
            fix = "save sharded.to_checkpoint(state); this step goes into sharded.abstract_state() "
            fix += "on as many devices as saved it"
        count = f"{len(self.differences)} differing paths"
        raise ArgumentError(
            "the checkpoint does not fit this run",
            where=str(self.where),
            expected="the state of this run's model and optimizer",
            got=first_lines([count, *self.differences], SHOWN + 1),
            fix=fix,
        )

    def __str__(self) -> str:
        summary = (
            f"{self.where}: reads {human_bytes(self.read_bytes)}, "
            f"with at most {human_bytes(self.host_bytes)} of host memory at a time, "
            f"into {human_bytes(self.device_bytes)} per device"
        )
        differences = [f"  differs: {line}" for line in self.differences]
        casts = [f"  cast: {line}" for line in self.casts]
        return "\n".join([summary, *differences, *casts])


def compare_to_target(
    where: Path, record: dict[str, Any], target: dict[str, Any], *, allow_cast: bool
) -> Preflight:
    """Compares a step with a target, and plans its restore.

    `record` is the step's manifest, and `target` the leaves by path. Raises ValueError for leaves
    without shardings.
    """
    fix = "sharded.checkpoint_target(), or a sharding in each ShapeDtypeStruct"
    require_shardings(target, where=str(where), fix=fix)

    # Paths, shapes and dtypes. Parameters first: the optimizer's state repeats their differences.
    saved: dict[str, str] = record["leaves"]
    wanted = {path: describe_array(leaf) for path, leaf in target.items()}
    compared, average = _split_average(saved, wanted.keys())
    differences: list[str] = []
    if average:
        differences.append(f"{average}: expected nothing, got {AVERAGE}")
    casts: list[str] = []
    paths = wanted.keys() | compared.keys()
    for path in sorted(paths, key=lambda path: (not path.startswith("params/"), path)):
        expected, got = wanted.get(path, "nothing"), compared.get(path, "nothing")
        if expected == got:
            continue
        castable = _castable(expected, got)
        if castable and allow_cast:
            casts.append(f"{path}: {got} to {expected}")
            continue
        note = ""
        if castable:
            note = DTYPE_ONLY
        if path in wanted and got == describe_array(as_stored(target[path])):
            note = PADDED
        differences.append(f"{path}: expected {expected}, got {got}{note}")

    # Bytes, of the paths that both have.
    specs = {path: saved_spec(leaf) for path, leaf in target.items() if leaf.size}
    shards = {path: record["shards"][path] for path in specs if path in record["shards"]}
    requests = []
    for path, shard in shards.items():
        # The record names the dtype of PRNG keys, not that of their data, which is read.
        dtype = parse_description(saved[path])[0]
        if is_prng_key(target[path]):
            dtype = specs[path].dtype
        requests += _read_sizes(specs[path], shard, dtype)
    limit = read_ahead_bytes((specs[path], shard) for path, shard in shards.items())
    return Preflight(
        where,
        tuple(differences),
        tuple(casts),
        read_bytes=sum(read for read, _ in requests),
        device_bytes=sum(
            array_bytes(spec.sharding.shard_shape(stored_shape(spec)), spec.dtype)
            for spec in specs.values()
        ),
        host_bytes=min(limit, sum(read + kept for read, kept in requests)),
    )


def _split_average(saved: dict[str, str], wanted: Collection[str]) -> tuple[dict[str, str], str]:
    """Splits off what `params_ema` has saved for an optimizer that is wanted without it alone.

    Returns the other leaves, by the wanted paths, and the path of its state. Where that is not what
    differs: all leaves, and "". See `without_average` for the two states that it is added to.
    """
    own = {path for path in wanted if path.startswith(OPT_STATE)}
    averages = {path.partition("/average/")[0] for path in saved if "/average/" in path}
    for state in averages if len(averages) == 1 else ():
        rest = {path: text for path, text in saved.items() if not path.startswith(f"{state}/")}
        inner = {path.replace(f"{OPT_STATE}0/", OPT_STATE, 1): x for path, x in rest.items()}
        for leaves in (rest, inner):
            if {path for path in leaves if path.startswith(OPT_STATE)} == own:
                return leaves, state
    return saved, ""


def read_ahead_bytes(shards: Iterable[tuple[jax.ShapeDtypeStruct, Sequence[int]]]) -> int:
    """Limits the bytes to read concurrently: at least as many as the largest part takes.

    `shards` are pairs: the spec of an array to read, and the shape of the shards it was saved in.
    """
    single = [
        read + kept for spec, shard in shards for read, kept in _read_sizes(spec, shard, spec.dtype)
    ]
    # Times 4 for a cast: the saved dtype may be wider.
    return max([READ_AHEAD, *(4 * size + 1 for size in single)])


def _read_sizes(
    spec: jax.ShapeDtypeStruct, shard: Sequence[int], saved_dtype: Any
) -> list[tuple[int, int]]:
    """Counts (bytes read, bytes kept) of each distinct part that this process's devices hold.

    Arrays were written in parts of the shape `shard` or finer, and a part is read entirely, also
    where it ends behind the array. An array of another rank than the saved one is not read.
    """
    # Replicas on several devices are read once.
    shape = stored_shape(spec)
    if len(shape) != len(shard):
        return []
    indices = spec.sharding.addressable_devices_indices_map(shape).values()
    requests = []
    for box in {box_of_index(index, shape) for index in indices}:
        kept = array_bytes(box_sizes(box), spec.dtype)
        saved = intersect(box, full_box(spec.shape))
        if saved is None:  # nothing but the zeros behind the array
            requests.append((0, kept))
            continue
        # Out to the bounds of the saved shards that it overlaps.
        rounded = [
            -(-stop // step) * step - start // step * step
            for (start, stop), step in zip(saved, shard, strict=True)
        ]
        requests.append((array_bytes(rounded, saved_dtype), kept))
    return requests


def _castable(expected: str, got: str) -> bool:
    """Tells whether two texts of `describe_array` differ in floating-point dtypes only."""
    (wanted, shape), (saved, saved_shape) = parse_description(expected), parse_description(got)
    return shape == saved_shape and _is_floating(wanted) and _is_floating(saved)


def _is_floating(dtype: str) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:  # a PRNG key, or no dtype at all
        return False
