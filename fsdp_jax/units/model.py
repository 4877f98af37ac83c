"""What the library asks of a model, whether it is written in NNX or in Linen."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fsdp_jax.local_rows import pin_rows
from fsdp_jax.tree import PyTree
from fsdp_jax.units.auto_wrap import ModuleInfo
from fsdp_jax.units.remat import SAVED, Activations

LossFn = Callable[..., Any]
"""(model, batch), or (model, batch, random key) -> (sum, count), or (sum, count, metrics)"""


@dataclass(frozen=True)
class Boundary:
    """What happens as a call enters and leaves a module.

    Attributes:
        unit: the unit's path if the module is one; its parameters, if it has some, are gathered
            during the call.
        activations: what becomes of the unit's.
        cast_in: dtype that float inputs are cast to; None leaves them.
        cast_out: dtype that float outputs are cast to; None leaves them.
        pin: inputs and outputs stay sharded along the batch; see `fsdp_jax.local_rows`.

    """

    unit: str | None = None
    activations: Activations = SAVED
    cast_in: np.dtype | None = None
    cast_out: np.dtype | None = None
    pin: bool = False

    def entering(self, arguments: PyTree) -> PyTree:
        """Returns a call's arguments, cast and pinned."""
        return self._crossing(arguments, self.cast_in)

    def leaving(self, results: PyTree) -> PyTree:
        """Returns a call's results, cast and pinned."""
        return self._crossing(results, self.cast_out)

    def _crossing(self, tree: PyTree, dtype: np.dtype | None) -> PyTree:
        # Objects pass as they are: a call that draws from `nnx.Rngs` must count in the caller's.
        arrays, nodes, rebuild = split_arrays(tree)
        arrays = cast_floats(arrays, dtype)
        return rebuild(pin_rows(arrays) if self.pin else arrays, nodes)


class Model(Protocol):
    """An adapter: `NnxModel` or `LinenModel`.

    Attributes:
        params: abstract parameters, nested dicts with string keys; leaves may carry partitioning
            metadata.
        rest: abstract other state of the model: batch statistics, random streams.
        boxed_rest: the same; leaves may carry partitioning metadata.
        modules: of the model, parents before children.
        axis_names: of axes that its modules average statistics over, such as BatchNorm's.

    """

    params: PyTree
    rest: PyTree
    boxed_rest: PyTree
    modules: Sequence[ModuleInfo]
    axis_names: frozenset[str]

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Returns (params, rest), concrete; called inside jit."""
        ...

    def build(self, params: PyTree, rest: PyTree) -> Any:
        """Returns the model as the user's own code calls it, with these values."""
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
        """Returns (`fn(model, batch)`, the updated rest).

        Args:
            fn: the user's function of model and batch.
            params: nested dicts of arrays, or of Shards that units gather.
            rest: as `init` made it.
            batch: one microbatch.
            key: for the random streams of this call.
            boundaries: module path -> what happens there.
            training: whether dropout and batch statistics are active, where the library has a
                switch for it.
            device: index of the device if each runs on its own rows; None on the global batch.

        """
        ...


def axis_names_of(module: Any) -> set[str]:
    """Returns the names in a module's `axis_name`, as Flax's norms have one."""
    names = getattr(module, "axis_name", None)
    names = names if isinstance(names, tuple | list) else (names,)
    return {name for name in names if isinstance(name, str)}


def along_one(names: Collection[str], run: Callable[[], Any]) -> Any:
    """Returns `run()` with each name bound to an axis of one.

    A norm with `axis_name` averages the statistics of devices that each have rows of their own.
    Here its statistics are of the global batch already: the mean over one.
    """
    for name in names:
        run = jax.vmap(run, in_axes=(), out_axes=None, axis_name=name, axis_size=1)
    return run()


def is_array(x: Any) -> bool:
    """Returns whether x is an array of JAX or NumPy."""
    return isinstance(x, jax.Array | np.ndarray)


def cast_floats(tree: PyTree, dtype: np.dtype | None) -> PyTree:
    """Returns the tree with its float arrays in another dtype; None leaves them."""
    if dtype is None:
        return tree

    def cast(x: Any) -> Any:
        return x.astype(dtype) if is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def is_node(x: Any) -> bool:
    """Returns whether x is an object that a call may write to: a module, variable or `nnx.Rngs`."""
    return isinstance(x, nnx.Pytree | nnx.Variable | nn.Module | nn.Variable)


def split_arrays(
    tree: PyTree,
) -> tuple[list[Any], list[Any], Callable[[Sequence[Any], Sequence[Any]], PyTree]]:
    """Returns (arrays, nodes, rebuild): what a checkpoint may trace, what it may not, the inverse.

    All other leaves (flags, strings, functions) stay static, so that `if deterministic:` works.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_node)
    nodes = [leaf for leaf in leaves if is_node(leaf)]
    arrays = [leaf for leaf in leaves if is_array(leaf) and not is_node(leaf)]

    def rebuild(new_arrays: Sequence[Any], new_nodes: Sequence[Any]) -> PyTree:
        next_array, next_node = iter(new_arrays), iter(new_nodes)

        def new(leaf: Any) -> Any:
            if is_node(leaf):
                return next(next_node)
            return next(next_array) if is_array(leaf) else leaf

        return jax.tree.unflatten(treedef, [new(leaf) for leaf in leaves])

    return arrays, nodes, rebuild
