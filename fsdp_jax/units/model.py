"""What the library needs from a model, whether it is written in NNX or in Linen."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fsdp_jax.errors import ArgumentError
from fsdp_jax.local_rows import pin_rows
from fsdp_jax.tree import PyTree
from fsdp_jax.units.auto_wrap import ModuleInfo
from fsdp_jax.units.comm import ParamComm
from fsdp_jax.units.objects import arrays_in_objects, is_node, refuse_hidden_arrays, take_apart
from fsdp_jax.units.remat import SAVED, Activations

LossFn = Callable[..., Any]
"""(model, batch), or (model, batch, random key) -> (sum, count), or (sum, count, metrics)

Other models of the step are keyword arguments.
"""


@dataclass(frozen=True)
class Boundary:
    """What happens as a call enters and leaves a module."""

    unit: str | None = None  # its path if it is a unit: parameters are gathered during the call
    activations: Activations = SAVED  # what becomes of the unit's
    cast_in: np.dtype | None = None  # dtype that float inputs are cast to; None leaves them
    cast_out: np.dtype | None = None  # the same of float outputs
    pin: bool = False  # both stay sharded along the batch; see `fsdp_jax.local_rows`

    def entering(self, arguments: PyTree) -> PyTree:
        """Casts and pins a call's arguments."""
        return self._crossing(arguments, self.cast_in)

    def leaving(self, results: PyTree) -> PyTree:
        """Casts and pins a call's results."""
        return self._crossing(results, self.cast_out)

    def _crossing(self, tree: PyTree, dtype: np.dtype | None) -> PyTree:
        """Casts the float arrays of a tree to `dtype`, and pins them to the batch's rows."""
        # Flax objects pass unchanged: a call that draws from `nnx.Rngs` must count in the caller's
        # object.
        arrays, nodes, rebuild = split_arrays(tree)
        if dtype is not None:
            arrays = [
                x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arrays
            ]
        return rebuild(pin_rows(arrays) if self.pin else arrays, nodes)


@dataclass(frozen=True)
class ModelCall:
    """The arguments of one run of a model."""

    params: PyTree  # nested dicts of arrays
    rest: PyTree  # as `Model.init` made it
    batch: PyTree  # one microbatch
    key: jax.Array  # for the random streams of this call
    boundaries: Mapping[str, Boundary]  # module path -> what happens there
    comms: Mapping[str, ParamComm]  # path of a parameter -> how its unit gathers it
    training: bool  # dropout and batch statistics are active, where the library has a switch
    device: jax.Array | None  # its index if each runs on its own rows; None on the global batch


class Model(Protocol):
    """An adapter: `NnxModel` or `LinenModel`."""

    params: PyTree  # abstract, nested dicts; leaves may carry partitioning metadata
    rest: PyTree  # abstract other state: batch statistics, random streams
    boxed_rest: PyTree  # the same; leaves may carry partitioning metadata
    modules: Sequence[ModuleInfo]  # parents before children
    aliases: Mapping[str, tuple[str, ...]]  # path of what is shared -> its paths in other modules
    stacked: Mapping[str, int]  # path of a parameter -> leading dims that Flax's scan or vmap added
    init_inputs: PyTree  # arrays that `init` takes: example inputs that initial values depend on
    axis_names: frozenset[str]  # that modules average statistics over, as BatchNorm does

    def init(self, key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        """Returns (params, rest), concrete; called inside jit. `inputs`: `init_inputs`."""

    def build(self, params: PyTree, rest: PyTree) -> Any:
        """Builds the model as the user's own code calls it, with these values."""

    def names_of_run(self) -> list[str]:
        """Makes names of mapped axes to bind around one run, and around those nested in it."""

    def run(self, fn: LossFn, call: ModelCall) -> tuple[Any, PyTree]:
        """Runs the model: (`fn(model, batch)`, the updated rest).

        Runs of other models may be nested in `fn`.
        """


@contextmanager
def unchanged_arguments(arguments: PyTree, where: str, *, objects: bool = False) -> Iterator[None]:
    """Raises ValueError if a call changes a list or dict among its arguments.

    The call gets copies, so the caller would not see the change. `where`: the module's path;
    `objects`: the same of an array that the call puts into another object, which is not copied:
    the array of a checkpoint's trace would stay in it.
    """

    def contents() -> tuple[Any, list[Any]]:
        leaves, structure = jax.tree.flatten(arguments, is_leaf=is_node)
        return structure, [*leaves, *(arrays_in_objects(leaves) if objects else ())]

    structure, leaves = contents()
    yield
    structure_after, leaves_after = contents()
    changed = structure != structure_after or len(leaves) != len(leaves_after)
    if changed or any(a is not b for a, b in zip(leaves, leaves_after, strict=True)):
        raise ArgumentError(
            "a module changes a list, a dict or another object among its arguments",
            where=where or "model",
            expected="a call that returns what it computes: a step sees no other effect of it",
            fix="return the value and put it into the list where the module is called; or `sow` it",
        )


def axis_names_of(module: Any) -> set[str]:
    """Lists the names in a module's `axis_name`, an attribute of Flax's norms."""
    # A module's own `__getattr__` may call its method, as that of `nnx.bridge.ToLinen` does.
    names = inspect.getattr_static(module, "axis_name", None)
    if isinstance(names, property):
        names = module.axis_name
    names = names if isinstance(names, tuple | list) else (names,)
    return {name for name in names if isinstance(name, str)}


def dtype_of(module: Any) -> np.dtype | None:
    """Reads a module's attribute `dtype`; None if there is none, or it follows the inputs."""
    dtype = getattr(module, "__dict__", {}).get("dtype")
    with suppress(TypeError):  # an attribute of that name that is no dtype
        return None if dtype is None else jnp.dtype(dtype)
    return None


def bind_axis_names(names: Collection[str], run: Callable[[], Any]) -> Any:
    """Calls `run()` with each name bound to a mapped axis of size one.

    A norm with `axis_name` averages its statistics over devices that each have different rows. Here
    its statistics are already those of the global batch, so it averages over one.
    """
    for name in names:
        run = jax.vmap(run, in_axes=(), out_axes=None, axis_name=name, axis_size=1)
    return run()


def as_arrays(tree: PyTree) -> PyTree:
    """Makes arrays of the Python and NumPy numbers among a model's initial values."""
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else jnp.asarray(np.asarray(x)), tree
    )


def split_arrays(
    tree: PyTree,
) -> tuple[list[Any], list[Any], Callable[[Sequence[Any], Sequence[Any]], PyTree]]:
    """Splits a call's arguments or results: (arrays, nodes, rebuild).

    A checkpoint may trace the arrays, but not the nodes, which are Flax objects. `rebuild(arrays,
    nodes)` makes the tree again. All other leaves (flags, strings, functions) stay static, so that
    `if deterministic:` works.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_node)
    nodes = {place: leaf for place, leaf in enumerate(leaves) if is_node(leaf)}
    arrays = {
        place: leaf
        for place, leaf in enumerate(leaves)
        if place not in nodes and isinstance(leaf, jax.Array | np.ndarray)
    }

    # `rebuild` may outlive the trace that these arrays are of: it holds only the other leaves.
    places = [*arrays, *nodes]
    static = {n: leaf for n, leaf in enumerate(leaves) if n not in nodes and n not in arrays}

    def rebuild(new_arrays: Sequence[Any], new_nodes: Sequence[Any]) -> PyTree:
        new = static | dict(zip(places, [*new_arrays, *new_nodes], strict=True))
        return jax.tree.unflatten(treedef, [new[n] for n in sorted(new)])

    return list(arrays.values()), list(nodes.values()), rebuild


def split_results(
    results: PyTree, unit: str, *, checkpointed: bool
) -> tuple[list[Any], list[Any], Callable[[Sequence[Any], Sequence[Any]], PyTree]]:
    """Splits what a unit's method returns, as `split_arrays` does; `checkpointed`: by a checkpoint.

    Then arrays inside objects that are not pytrees are found too. Raises ValueError for objects
    that hide theirs.
    """
    if checkpointed:
        results = take_apart(results)
        refuse_hidden_arrays(results, unit)
    return split_arrays(results)
