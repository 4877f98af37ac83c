"""Keeping the rows of a batch on their devices while XLA partitions a step.

Under annotations XLA chooses where activations go. It cannot partition a kernel that it does not know (a Pallas call):
it gathers the whole batch on every device for it. It also reduces some gradients at full size, such as a lookup's, and
may move activations in place of weights. `on_local_rows` runs a function on each device's rows, and `pin_rows` keeps
activations split along the batch. Neither changes a result. Outside a step on several devices both do nothing.
"""

import functools
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax.errors import SlowerWarning, message
from fsdp_jax.tree import PyTree


@dataclass(frozen=True)
class BatchSplit:
    """How the batch of the step that is being traced lies on its devices.

    Attributes:
        axes: mesh axes that dim 0 of the batch is split over.
        rows: of the global microbatch; None where arguments are no batch.

    """

    mesh: Mesh
    axes: tuple[str, ...]
    rows: int | None


_SPLIT: ContextVar[BatchSplit | None] = ContextVar("fsdp_jax_batch_split", default=None)


@contextmanager
def batch_split(mesh: Mesh, axes: tuple[str, ...], rows: int | None) -> Iterator[None]:
    """For the length of a trace on the global batch."""
    token = _SPLIT.set(BatchSplit(mesh, axes, rows) if mesh.size > 1 else None)
    try:
        yield
    finally:
        _SPLIT.reset(token)


def on_local_rows(fn: Callable[..., Any], *, replicated: Collection[int] = ()) -> Callable[..., Any]:
    """`fn`, run on each device's own rows where XLA would partition it badly or not at all.

    For a Pallas kernel, say: `attention = on_local_rows(my_kernel)`.

    Args:
        fn: a function of positional arrays (or trees of them) that treats rows alike: dim 0 of every argument and
            result is the batch, and a row of a result comes from the same rows of the arguments. That is your promise.
        replicated: numbers of the arguments that have no rows, such as a table; they are whole on every device, and
            their gradients are summed over devices.

    Warns:
        SlowerWarning: when traced, that the rows do not divide by the devices, so that XLA partitions `fn`.

    """

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        split = _SPLIT.get()
        if split is None:
            return fn(*args)
        devices = prod(split.mesh.shape[axis] for axis in split.axes)
        split_args = [x for i, arg in enumerate(args) if i not in replicated for x in jax.tree.leaves(arg)]
        if any(not jnp.ndim(x) for x in split_args):
            name = getattr(fn, "__name__", str(fn))
            what, fix = "an argument without rows", "name its number in replicated, or close over it"
            raise ValueError(message(what, where=f"on_local_rows({name})", expected="arrays [rows, ...]", fix=fix))
        rows = {x.shape[0] for x in split_args}
        if any(count % devices for count in rows):
            if split.rows is not None:  # a step's rows divide: these are others
                name = getattr(fn, "__name__", str(fn))
                said = f"{name} runs on all of its rows on every device: {sorted(rows)} do not divide by {devices}"
                warnings.warn(said, SlowerWarning, stacklevel=2)
            return fn(*args)
        by_rows = PartitionSpec(split.axes)
        specs = tuple(PartitionSpec() if i in replicated else by_rows for i in range(len(args)))
        return jax.shard_map(_alone(fn), mesh=split.mesh, in_specs=specs, out_specs=by_rows, check_vma=False)(*args)

    return run


def _alone(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with nothing left to split: inside, a device has its own rows alone."""

    def run(*args: Any) -> Any:
        token = _SPLIT.set(None)
        try:
            return fn(*args)
        finally:
            _SPLIT.reset(token)

    return run


def pin_rows(tree: PyTree) -> PyTree:
    """Keeps activations, arrays whose dim 0 is the batch's rows, split over the batch axes."""
    split = _SPLIT.get()
    if split is None or split.rows is None:
        return tree

    def pin(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.ndim < 2 or x.shape[0] != split.rows:
            return x
        spec = PartitionSpec(split.axes, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
        return jax.lax.with_sharding_constraint(x, NamedSharding(split.mesh, spec))

    return jax.tree.map(pin, tree)
