"""The bytes that each device holds of a state: `fsdp_jax.device_bytes`."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from fsdp_jax.errors import ArgumentError, human_bytes
from fsdp_jax.host_memory import HOST
from fsdp_jax.sharding.layout import Layout
from fsdp_jax.tree import PyTree
from fsdp_jax.views.bars import BarRow, Bars, Kind
from fsdp_jax.views.page import number_ranges

# The colours that these have in other views too.
COLORS = {"params": 0, "optimizer": 1, "opt_state": 1}
NAMED = 5  # entries of a state with a kind of bar of their own, the largest
REST = "the rest"


def device_bytes(state: PyTree | Layout) -> Bars:
    """Shows how many bytes each device holds: a bar for devices that hold as much.

    `print` it, or let a notebook show it. The bars are split by the entries of the state, as a
    TrainState has `params` and `opt_state`; what is in host memory is beside its device.

    Args:
        state: arrays, or shapes with shardings, in any pytree; or a layout.

    Raises:
        ValueError: no arrays, a traced or a donated one, or one without a sharding.

    Example:
        >>> print(fsdp.device_bytes(state))  # doctest: +ELLIPSIS
        8 devices hold 409 KiB, at most 51.1 KiB each
        ...

    """
    held: dict[int, Counter[str]] = defaultdict(Counter)
    sizes: Counter[str] = Counter()
    for name, array in _arrays(state):
        sharding = array.sharding
        size = prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
        if sharding.memory_kind == HOST:
            name += ", in host memory"
        for device in _devices(sharding):
            held[device][name] += size
            sizes[name] += size
    if not held:
        raise ArgumentError("there are no arrays to show", where="device_bytes", got=type(state))
    # The largest entries have kinds of their own; the others share one.
    names = [name for name, _ in sizes.most_common(NAMED)]
    others = (name for name in names if name not in COLORS)
    colors = COLORS | {name: color for color, name in enumerate(others, 2)}
    kinds = [Kind(name, colors[name]) for name in names] + [Kind(REST, None)]
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for device, parts in held.items():
        rest = parts.total() - sum(parts[name] for name in names)
        alike[*(parts[name] for name in names), rest].append(device)
    rows = [
        BarRow(
            f"device {number_ranges(devices)}",
            dict(zip([*names, REST], parts, strict=True)),
            cells=(str(len(devices)),),
        )
        for parts, devices in sorted(alike.items(), key=lambda each: min(each[1]))
    ]
    most = max(row.total for row in rows)
    total = human_bytes(sum(sizes.values()))
    summary = f"1 device holds {total}"
    if len(held) > 1:
        summary = f"{len(held)} devices hold {total}, at most {human_bytes(most)} each"
    return Bars(
        summary=summary,
        kinds=kinds,
        bars=rows,
        size="each",
        columns=("devices",),
    )


def _arrays(state: PyTree | Layout) -> Iterator[tuple[str, Any]]:
    """Yields (name of the entry, array or shape with a sharding) of all arrays."""
    if isinstance(state, Layout):
        for leaf in state:
            base = f" in {leaf.blocks.base.format}" if leaf.blocks else ""
            yield f"{leaf.part}{base}", leaf.stored
        return
    for path, leaf in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path[:1], simple=True) or "array"
        where = "device_bytes"
        if path:
            where = f"{where}, {jax.tree_util.keystr(path, simple=True, separator='/')}"
        if isinstance(leaf, jax.core.Tracer) or not isinstance(
            getattr(leaf, "sharding", None), Sharding
        ):
            raise ArgumentError(
                "not an array with a sharding",
                where=where,
                got=type(leaf).__name__,
                fix="pass arrays of jax, outside of jit, or a layout, such as sharded.layout",
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ArgumentError(
                "the array was donated",
                where=where,
                fix="pass the state that the step returned",
            )
        yield name, leaf


def _devices(sharding: Sharding) -> Iterator[int]:
    """Yields the ids of a sharding's devices; those of an abstract mesh are their places in it."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        yield from range(sharding.mesh.size)
    else:
        devices: set[Any] = sharding.device_set
        yield from (device.id for device in devices)
