"""What the core asks of a model, whichever library it is written in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fsdp_jax.local_rows import pin_rows
from fsdp_jax.tree import PyTree
from fsdp_jax.units.auto_wrap import ModuleInfo
from fsdp_jax.units.unit import Remat

LossFn = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Boundary:
    """What happens as a call enters and leaves a module.

    Attributes:
        unit: the unit's path where the module is one: it gathers its parameters for the duration.
        remat: of the unit.
        cast_in: float inputs take this dtype.
        cast_out: float outputs take this dtype.
        pin: activations that enter or leave stay split along the batch; see `rows.py`.

    """

    unit: str | None = None
    remat: Remat = "none"
    cast_in: np.dtype | None = None
    cast_out: np.dtype | None = None
    pin: bool = False

    def entering(self, arguments: PyTree) -> PyTree:
        """A call's arguments, cast and split along the batch."""
        arguments = cast_floats(arguments, self.cast_in)
        return pin_rows(arguments) if self.pin else arguments

    def leaving(self, results: PyTree) -> PyTree:
        """A call's results, likewise."""
        results = cast_floats(results, self.cast_out)
        return pin_rows(results) if self.pin else results


class Model(Protocol):
    """An adapter: `NnxModel` or `LinenModel`.

    Attributes:
        params: abstract parameters, nested dicts with string keys; leaves may carry partitioning
            metadata.
        rest: abstract other state of the model: batch statistics, random streams.
        modules: what it is made of, parents before children.

    """

    params: PyTree
    rest: PyTree
    modules: Sequence[ModuleInfo]

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """(params, rest), concrete; called inside jit."""
        ...

    def build(self, params: PyTree, rest: PyTree) -> Any:
        """What the user's own code knows as the model, with these values."""
        ...

    def run(
        self,
        fn: LossFn,
        params: PyTree,
        rest: PyTree,
        batch: PyTree,
        key: jax.Array,
        boundaries: dict[str, Boundary],
        *,
        training: bool,
        device: jax.Array | None,
    ) -> tuple[Any, PyTree]:
        """(`fn(model, batch)`, the rest afterwards).

        Args:
            fn: the user's function of model and batch.
            params: nested dicts of arrays, or of Shards that units gather.
            rest: as `init` made it.
            batch: one microbatch.
            key: for the random streams of this call.
            boundaries: module path -> what happens there.
            training: whether dropout and batch statistics are live, where the library has a switch
                for it.
            device: number of the device where each sees its own part of the batch; None where all
                see the whole.

        """
        ...


def cast_floats(tree: PyTree, dtype: np.dtype | None) -> PyTree:
    """Float arrays in another dtype; everything else as it is."""
    if dtype is None:
        return tree
    return jax.tree.map(
        lambda x: (
            x.astype(dtype)
            if isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)
            else x
        ),
        tree,
    )


def split_arrays(
    tree: PyTree, is_node: Callable[[Any], bool] = lambda _: False
) -> tuple[list[Any], list[Any], Callable[[Sequence[Any], Sequence[Any]], PyTree]]:
    """(arrays, nodes, rebuild): what a checkpoint may trace, what it may not, and how to put them
    together again.

    Everything else (flags, strings, functions) stays where it was, so that `if deterministic:` goes
    on working.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_node)
    kinds = [
        "node" if is_node(x) else "array" if isinstance(x, jax.Array | np.ndarray) else "static"
        for x in leaves
    ]
    arrays = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind == "array"]
    nodes = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind == "node"]

    def rebuild(arrays: Sequence[Any], nodes: Sequence[Any]) -> PyTree:
        sources = {"array": iter(arrays), "node": iter(nodes)}
        filled = [
            leaf if kind == "static" else next(sources[kind])
            for leaf, kind in zip(leaves, kinds, strict=True)
        ]
        return jax.tree.unflatten(treedef, filled)

    return arrays, nodes, rebuild
