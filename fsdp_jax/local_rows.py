"""Keeps the rows of a batch on their devices while XLA partitions a step.

With sharding annotations XLA chooses how activations are sharded. It cannot partition a kernel that
it does not know (a Pallas call): it gathers the whole batch on every device for it. It also reduces
some gradients at full size, such as a lookup's, and may communicate activations in place of
weights. `on_local_rows` runs a function on each device's rows, and `pin_rows` keeps activations
sharded along the batch. Neither changes a result, but for the rows that `row_per_device` asks for.
Outside a step on several devices both do nothing.
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

from fsdp_jax.errors import ArgumentError, SlowerWarning
from fsdp_jax.sharding.explicit_style import as_seen, constrain
from fsdp_jax.sharding.mesh import spec_axes
from fsdp_jax.tree import PyTree


@dataclass(frozen=True)
class BatchSplit:
    """The sharding of the batch of the step that is being traced."""

    mesh: Mesh
    axes: tuple[str, ...]  # those that shard dim 0 of the batch
    rows: int | None  # of the global microbatch; None where arguments are not of the batch

    @property
    def shards(self) -> int:
        """The number of shards of the batch."""
        return prod(self.mesh.shape[axis] for axis in self.axes)


_SPLIT: ContextVar[BatchSplit | None] = ContextVar("fsdp_jax_batch_split", default=None)


@contextmanager
def batch_split(
    mesh: Mesh | None, axes: tuple[str, ...] = (), rows: int | None = None
) -> Iterator[None]:
    """Sets the sharding of the batch, while a step on the global batch is traced.

    `axes`: those that shard dim 0; `rows`: of the global microbatch. Without a mesh, the batch is
    not sharded.
    """
    split = None
    if mesh is not None and mesh.size > 1:
        split = BatchSplit(mesh, axes, rows)
    token = _SPLIT.set(split)
    try:
        yield
    finally:
        _SPLIT.reset(token)


def rows_of_batch() -> int | None:
    """Tells how many rows the global microbatch of the step has that is being traced.

    None outside such a step, on one device, and where arguments are not of the batch.
    """
    split = _SPLIT.get()
    return split.rows if split else None


def on_local_rows(
    fn: Callable[..., Any], *, replicated: Collection[int] = (), row_per_device: bool = False
) -> Callable[..., Any]:
    """Wraps `fn` to run on each device's own rows, where XLA partitions it badly or not at all.

    For example, a Pallas kernel: `attention = on_local_rows(my_kernel)`.

    Args:
        fn: a function of positional arrays (or trees of them) that treats rows alike: dim 0 of
            every argument and result is the batch, and a row of a result comes from the same rows
            of the arguments. Of that, only dim 0 of each result is checked; a function that mixes
            rows computes something else on several devices.
        replicated: positions of the arguments that have no rows, such as a table; they are
            replicated on every device, and their gradients are summed over devices. An array that
            is not named is taken to have rows.
        row_per_device: results are [1, ...] and the same for all rows, such as a bias. Each device
            computes its own, so that they are [devices, ...] in a step on several devices.

    When traced, an argument without dims, and a result whose dim 0 is not a device's rows, are a
    ValueError. If the number of rows is not divisible by the number of devices, XLA partitions
    `fn`, with a SlowerWarning.

    Example:
        >>> normalize = fsdp.on_local_rows(lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True))
        >>> normalize(jnp.ones((16, 4))).shape
        (16, 4)
    """
    # Checked here, where the traceback shows the user's line, and not as a step is traced.
    where = f"on_local_rows({getattr(fn, '__name__', fn)})"
    are_numbers = isinstance(replicated, Collection) and all(isinstance(n, int) for n in replicated)
    if not are_numbers:
        raise ArgumentError(
            "not positions of arguments", where=where, got=replicated, fix="replicated=(1,)"
        )

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        split = _SPLIT.get()
        if split is None:
            return fn(*args)
        rows = _row_counts(args, replicated, where)
        devices = split.shards
        if any(count % devices for count in rows):
            # The rows of the step's batch are divisible: these are other arrays.
            if split.rows is not None:
                counts = " and ".join(map(str, sorted(rows)))
                warnings.warn(
                    f"{where}: all rows run on every device, for {counts} rows are not divisible "
                    f"by {devices}",
                    SlowerWarning,
                    stacklevel=2,
                )
            return fn(*args)
        # On each device, its rows of the arguments; those without rows as a whole.
        by_rows = as_seen(NamedSharding(split.mesh, PartitionSpec(split.axes)))
        specs = tuple(
            PartitionSpec() if number in replicated else by_rows.spec for number in range(len(args))
        )
        expected = {1} if row_per_device else {count // devices for count in rows}
        local = _on_one_device(fn, expected, where)
        sharded = jax.shard_map(
            local,
            mesh=by_rows.mesh,
            in_specs=specs,
            out_specs=by_rows.spec,
            axis_names=set(spec_axes(by_rows.spec)),  # along others, XLA partitions `fn`
            check_vma=False,
        )
        return sharded(*args)

    return run


def _row_counts(args: tuple[Any, ...], replicated: Collection[int], where: str) -> set[int]:
    """Collects the sizes of dim 0 of the arguments with rows; `where`: the function, for errors.

    Raises ValueError where an argument has no dims, or `replicated` names one that is not there.
    """
    if any(number >= len(args) for number in replicated):
        raise ArgumentError(
            "no such argument",
            where=where,
            expected=f"numbers below {len(args)}, the arguments",
            got=f"replicated={replicated}",
        )
    with_rows = [arg for number, arg in enumerate(args) if number not in replicated]
    leaves = jax.tree.leaves(with_rows)
    if any(not jnp.ndim(leaf) for leaf in leaves):
        raise ArgumentError(
            "an argument without rows",
            where=where,
            expected="arrays [rows, ...]",
            fix="name its number in replicated, or close over it",
        )
    return {leaf.shape[0] for leaf in leaves}


def _on_one_device(fn: Callable[..., Any], rows: set[int], where: str) -> Callable[..., Any]:
    """Wraps `fn` to run as on one device: inside, no batch split is set.

    The wrapped function raises ValueError where dim 0 of a result is not one of `rows`.
    """

    def run(*args: Any) -> Any:
        """Calls `fn`, and checks the rows of its results."""
        with batch_split(None):
            out = fn(*args)
        for leaf in jax.tree.leaves(out):
            if not jnp.ndim(leaf) or leaf.shape[0] not in rows:
                raise ArgumentError(
                    "a result without the rows of the arguments",
                    where=where,
                    expected=f"dim 0 of {' or '.join(map(str, sorted(rows)))}",
                    got=jnp.shape(leaf),
                    fix=(
                        "keep the rows in dim 0 of every result, and sum over them outside; "
                        "row_per_device=True if each is [1, ...], the same for all rows"
                    ),
                )
        return out

    return run


def traced_with_model_axes() -> bool:
    """Tells whether a step is being traced on a mesh with axes that do not shard the batch."""
    split = _SPLIT.get()
    return split is not None and split.shards < split.mesh.size


def pin_rows(tree: PyTree) -> PyTree:
    """Keeps activations, arrays whose dim 0 is the batch's rows, sharded over the batch axes."""
    split = _SPLIT.get()
    if split is None or split.rows is None:
        return tree

    def pin(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.ndim < 2 or x.shape[0] != split.rows:
            return x
        spec = PartitionSpec(split.axes, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
        return constrain(x, NamedSharding(split.mesh, spec))

    return jax.tree.map(pin, tree)
