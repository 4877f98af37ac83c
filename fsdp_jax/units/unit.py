"""The FSDP unit: cast, fence, gather, run, drop, gather again.

[Note: Shards] A model that is about to run holds a `Shard` (value and ParamComm) in place of each
parameter of a unit, and the unit's call turns its own Shards into arrays. A Shard is a pytree node,
so it passes through `scan`, `vmap` and `jit` of the model's own; it is no array, so reading it
outside its unit is an error that names the path, never a silent float32 gather.

[Note: dropping the gathered copy] A unit runs under `jax.checkpoint`. With `remat='none'` its
policy saves everything except what the gather made: the barrier, the constraints, any mere
rearrangement (reshape, transpose, slice, concatenate: nearly free to do again), and casts of an
array as large as a parameter (an activation's cast is worth keeping: it is smaller than what it is
made from). So the backward gathers again, whether or not activations are recomputed. What a model
computes from a weight by arithmetic, such as `w * scale`, is an activation like any other and is
saved.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_policies

from fsdp_jax.errors import SlowerWarning, did_you_mean, message
from fsdp_jax.sharding.mesh import shards_of
from fsdp_jax.tree import PyTree, prefixes
from fsdp_jax.units.collectives import ParamComm, gather, gather_annotated

Remat = Literal["none", "full"]
ROOT = ""  # the unit of what belongs to no other: gathered as the model is entered


class UnitError(ValueError, AttributeError):
    """A parameter was read where it is not gathered."""


@jax.tree_util.register_pytree_with_keys_class
class Shard:
    """A parameter at rest, in the place where its unit will look for it.

    `pending` is there where reduction is deferred: zeros of the gathered shape; their cotangent is
    the local gradient. `guard` is there with local batches: an array of random keys, with which
    nothing can be computed, so that a loss that reads the leaves of the tree (a penalty on all
    parameters, say) is an error instead of silently wrong.
    """

    def __init__(self, value: Any, comm: ParamComm, pending: Any = None, guard: Any = None) -> None:
        self.value, self.comm, self.pending, self.guard = value, comm, pending, guard

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], ParamComm]:
        """Arrays under their names; the ParamComm is static."""
        key = jax.tree_util.GetAttrKey
        children = (
            (key("value"), self.value),
            (key("pending"), self.pending),
            (key("guard"), self.guard),
        )
        return children, self.comm

    @classmethod
    def tree_unflatten(cls, comm: ParamComm, children: Sequence[Any]) -> "Shard":
        """The inverse, around whatever a transformation made of the arrays."""
        return cls(children[0], comm, children[1], children[2])

    def gather(self) -> jax.Array:
        """The whole parameter in the compute dtype."""
        return (
            self.value
            if self.comm.already_gathered
            else gather(self.comm, self.value, self.pending)
        )

    def _outside(self) -> "UnitError":
        comm = self.comm
        fix = "make the module that reads it the unit, or leave this one out of units"
        what = "a parameter was read outside its unit"
        return UnitError(message(what, where=comm.path, expected=f"unit '{comm.unit}'", fix=fix))

    def _refuse(self, *_: Any) -> Any:
        raise self._outside()

    __jax_array__ = __getitem__ = __neg__ = __abs__ = __pow__ = __rpow__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = _refuse

    def __repr__(self) -> str:
        # jax.numpy shows what it cannot take
        comm = self.comm
        return (
            f"<parameter '{comm.path}', gathered only inside its unit '{comm.unit}': read it there>"
        )

    def __getattr__(self, name: str) -> Any:
        # What an array would have: shape, dtype, T, astype. Protocols that JAX and NNX look for are
        # simply not there.
        raise AttributeError(name) if name.startswith("_") else self._outside()


def is_shard(leaf: Any) -> bool:
    """Whether a leaf waits for its unit."""
    return isinstance(leaf, Shard)


def all_shards(tree: PyTree) -> list[Shard]:
    """The parameters in a tree that wait for a unit, this one or one inside it."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_shard) if is_shard(leaf)]


def shards_in(tree: PyTree, unit: str) -> list[Shard]:
    """The parameters in a tree that this unit gathers."""
    return [shard for shard in all_shards(tree) if shard.comm.unit == unit]


def gathered(tree: PyTree, unit: str) -> PyTree:
    """The tree with this unit's Shards turned into arrays; those of units inside it are left."""
    own = shards_in(tree, unit)
    if all(shard.comm.mode == "annotate" and not shard.comm.already_gathered for shard in own):
        arrays = iter(
            gather_annotated([shard.comm for shard in own], [shard.value for shard in own])
        )
    else:
        arrays = iter([shard.gather() for shard in own])
    return jax.tree.map(
        lambda leaf: next(arrays) if is_shard(leaf) and leaf.comm.unit == unit else leaf,
        tree,
        is_leaf=is_shard,
    )


def run_unit(fn: Callable[..., Any], tree: PyTree, args: Any, *, unit: str, remat: Remat) -> Any:
    """`fn(tree, args)` with the unit's parameters gathered for its duration, in forward and again
    in backward.

    Args:
        fn: pure function of its two arguments.
        tree: holds the unit's Shards, and whatever else lives in the module.
        args: pytree of arrays.
        unit: its path.
        remat: `none` saves activations, `full` recomputes the unit in the backward.

    """
    settings = checkpoint_settings(all_shards(tree), remat)
    if settings is None:
        return fn(gathered(tree, unit), args)
    return jax.checkpoint(lambda tree, args: fn(gathered(tree, unit), args), **settings)(tree, args)


def checkpoint_settings(shards: Sequence[Shard], remat: Remat) -> dict[str, Any] | None:
    """Arguments of `jax.checkpoint` for a unit with these parameters; None where there is nothing
    to drop.
    """
    travelling = [shard for shard in shards if not shard.comm.already_gathered]
    if not travelling and remat == "none":
        return None
    # Inside a scan the loops of forward and backward cannot be merged, so the guard against merging
    # them is not needed.
    in_scan = any(shard.value.ndim < shard.comm.ndim for shard in shards)
    policy = (
        checkpoint_policies.nothing_saveable if remat == "full" else _all_but_gathered(travelling)
    )
    return {"policy": policy, "prevent_cse": not in_scan}


_GATHERING = {"sharding_constraint", "optimization_barrier", "all_gather"}
_REARRANGING = {
    "reshape",
    "transpose",
    "squeeze",
    "expand_dims",
    "slice",
    "split",
    "concatenate",
    "broadcast_in_dim",
    "copy",
    "copy_p",
}


def _all_but_gathered(shards: Iterable[Shard]) -> Callable[..., bool]:
    """A checkpoint policy; see the note on dropping the gathered copy."""
    sizes = set()
    for shard in shards:
        spec = shard.comm.sliced(shard.comm.param_spec, shard.value.ndim)
        parts = (
            prod(shards_of(shard.comm.mesh, entry) for entry in spec)
            if shard.comm.mode == "manual"
            else 1
        )
        sizes |= {shard.value.size, shard.value.size * parts}

    def policy(primitive: Any, *avals: Any, **_: Any) -> bool:
        if primitive.name in _GATHERING or primitive.name in _REARRANGING:
            return False
        return not (primitive.name == "convert_element_type" and avals[0].size in sizes)

    return policy


@dataclass(frozen=True)
class ModuleInfo:
    """What choosing units needs to know of a module.

    Attributes:
        path: slash-joined; empty for the whole model. A module that is used in two places is listed
            twice.
        kind: its class.
        direct: paths of the parameters that are its own attributes; a tied one is listed by each
            module that has it.
        callable: whether it can be run at all; mere containers cannot.
        pinned: whether it computes in a dtype of its own, fixed when it was made.

    """

    path: str
    kind: type
    direct: frozenset[str]
    callable: bool
    pinned: bool = False


Units = Sequence[type | str] | int | Literal["scan", "model"]


def choose_units(
    modules: Sequence[ModuleInfo],
    units: Units,
    sizes: dict[str, int],
    stacked: dict[str, int],
    remat: Remat = "none",
) -> dict[str, str | None]:
    """{parameter path: unit path, or None for what is gathered on entering the model}.

    Args:
        modules: of the model, parents before children.
        units: module classes or their names; a number of parameters; `scan` for stacked layers;
            `model` for all.
        sizes: path -> elements of one layer.
        stacked: path -> leading dims that stack layers.
        remat: of the units; one that owns no parameters is not recomputed.

    A parameter belongs to the innermost unit around it. One that several units share, such as a
    tied embedding, is gathered once, on entering the model.

    Raises:
        ValueError: units that fit nothing.

    Warns:
        SlowerWarning: units that are not recomputed.

    """
    if units == "model":
        return dict.fromkeys(sizes, ROOT)
    inner = [module for module in modules if module.path and module.callable]
    subtrees = _subtrees(modules)
    if isinstance(units, int):
        chosen = _by_size(inner, subtrees, units, sizes)
    elif units == "scan":
        chosen = _stacks(inner, subtrees, stacked)
    else:
        chosen = _by_class(inner, subtrees, units)
    owners: dict[str, set[str | None]] = {path: set() for path in sizes}
    for module in modules:
        innermost = next((path for path in prefixes(module.path) if path in chosen), None)
        for path in module.direct:
            owners[path].add(innermost)
    found = {path: next(iter(units)) if len(units) == 1 else None for path, units in owners.items()}
    if remat != "none":
        _warn_of_idle(sorted(chosen.difference(found.values())), remat)
    return found


def _warn_of_idle(idle: Sequence[str], remat: Remat) -> None:
    """Names chosen units that recompute nothing, since they gather nothing."""
    if idle:
        warnings.warn(
            f"remat='{remat}' does nothing for {len(idle)} units, such as '{idle[0]}', and their activations are kept: "
            "a unit owns no parameters where units inside it own them all, or where several modules share them",
            SlowerWarning,
            stacklevel=4,
        )


Subtrees = Mapping[str, Set[str]]  # module path -> paths of the parameters in it, at any depth


def _subtrees(modules: Sequence[ModuleInfo]) -> Subtrees:
    found: dict[str, set[str]] = {}
    for module in modules:
        for path in prefixes(module.path):
            found.setdefault(path, set()).update(module.direct)
    return found


def _by_class(inner: Sequence[ModuleInfo], subtrees: Subtrees, units: Any) -> set[str]:
    """PyTorch's transformer_auto_wrap_policy."""
    chosen: set[str] = set()
    if isinstance(units, str):
        units = (units,)
    for unit in units:
        found = {
            m.path
            for m in inner
            if unit in m.kind.__mro__ or unit in (k.__name__ for k in m.kind.__mro__)
        }
        if not found:
            name = unit if isinstance(unit, str) else unit.__name__
            present = {module.kind.__name__ for module in inner if subtrees[module.path]}
            raise ValueError(
                message(
                    f"no module of class '{name}' in the model",
                    where="units",
                    fix=did_you_mean(name, present),
                )
            )
        chosen |= found
    return chosen


def _by_size(
    inner: Sequence[ModuleInfo], subtrees: Subtrees, least: int, sizes: dict[str, int]
) -> set[str]:
    """PyTorch's size_based_auto_wrap_policy: from the leaves up, what is not yet wrapped and is
    large enough.
    """
    chosen: set[str] = set()
    taken: set[str] = set()
    for module in reversed(inner):
        free = subtrees[module.path] - taken
        if sum(sizes[path] for path in free) >= least:
            chosen.add(module.path)
            taken |= free
    if not chosen:
        whole = max((sum(sizes[p] for p in subtrees[m.path]) for m in inner), default=0)
        fix = f"at most {whole}, the largest module's, or units='model'"
        raise ValueError(
            message(
                "no module has that many parameters", where="units.min_params", got=least, fix=fix
            )
        )
    return chosen


def _stacks(inner: Sequence[ModuleInfo], subtrees: Subtrees, stacked: dict[str, int]) -> set[str]:
    """The outermost modules all of whose parameters are stacked: the body of a layer scan."""
    whole = {
        m.path
        for m in inner
        if (paths := subtrees[m.path]) and all(stacked.get(path) for path in paths)
    }
    outermost = {path for path in whole if whole.isdisjoint(prefixes(path)[1:])}
    if not outermost:
        raise ValueError(
            message("no stacked layers in the model", where="units='scan'", fix="units=[YourBlock]")
        )
    return outermost
