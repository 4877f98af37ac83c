"""The FSDP unit: gathers its parameters, runs and drops them, in the forward and backward passes.

[Note: Shards] A model that is about to run holds a `Shard` (an array and its ParamComm) in place of
each parameter of a unit, and the unit's call turns its own Shards into arrays. A Shard is a pytree
node, so it passes through `scan`, `vmap` and `jit` of the model's own; it is not an array, so
reading it outside its unit is an error that names the path, never a silent float32 gather.

[Note: dropping the gathered copy] A unit runs under `jax.checkpoint`. With `remat='none'` its
policy saves everything except what the gather made: a shard that is fetched from the host, the
barrier, the constraints, any mere rearrangement (reshape, transpose, slice, concatenate: nearly
free to do again), and casts of an array as large as a parameter (an activation's cast is worth
saving: it is smaller than what it is made from). So the backward pass gathers again, whether or not
activations are recomputed. What a model computes from a weight by arithmetic, such as `w * scale`,
is an activation like any other and is saved. The other policies, of `units.remat` or of the user's,
decide about all that is left: about what the gather made they are not asked.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn

import jax
import jax.extend.core as jex
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies

from fsdp_jax.errors import message
from fsdp_jax.sharding.mesh import shards_of
from fsdp_jax.tree import PyTree
from fsdp_jax.units.collectives import FLOAT8, ParamComm, gather, gather_together
from fsdp_jax.units.remat import INPUT, SAVED, Activations, Policy

ROOT = ""  # path of the unit that is the whole model


class UnitError(ValueError, AttributeError):
    """A parameter was read where it is not gathered."""


@jax.tree_util.register_dataclass
@dataclass(eq=False, repr=False)
class Shard:
    """A sharded parameter, in the place where its unit will read it."""

    value: Any  # the local shard in mode `manual`, the sharded global array in mode `annotate`
    comm: ParamComm = field(metadata={"static": True})
    # Zeros whose cotangent is the gradient, where that is not the cotangent of `value`: of the
    # gathered shape where reduction is deferred, of the shard's where `value` is in host memory.
    slot: Any = None
    # With local batches, an array of random keys, with which nothing can be computed: a loss that
    # reads the leaves of the tree (a penalty on all parameters) is an error, not silently wrong.
    guard: Any = None

    def gather(self) -> jax.Array:
        """Returns the unsharded parameter in the compute dtype."""
        if self.comm.already_gathered:
            return self.value
        return gather(self.comm, self.value, self.slot)

    def _refuse(self, *_: Any) -> NoReturn:
        """Raises UnitError: the parameter is read where it is not gathered."""
        where, expected = self.comm.path, f"unit '{self.comm.unit}'"
        what = "a parameter was read outside its unit"
        fix = "make the module that reads it the unit, leave this one out of units, "
        fix += "or units='model'"
        raise UnitError(message(what, where=where, expected=expected, fix=fix))

    __jax_array__ = __getitem__ = __neg__ = __abs__ = __pow__ = __rpow__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = _refuse

    def __repr__(self) -> str:
        # jax.numpy prints this in its error about an argument that is not an array
        path, unit = self.comm.path, self.comm.unit
        return f"<parameter '{path}', gathered only inside its unit '{unit}': read it there>"

    def __getattr__(self, name: str) -> Any:
        # Attributes of arrays (shape, dtype, T, astype) raise UnitError. Protocols that JAX and NNX
        # probe for are absent, as on any object.
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()


def is_shard(leaf: Any) -> bool:
    """Returns whether a leaf is a parameter that its unit has yet to gather."""
    return isinstance(leaf, Shard)


def all_shards(tree: PyTree) -> list[Shard]:
    """Returns the Shards in a tree, of whatever unit."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_shard) if is_shard(leaf)]


def shards_in(tree: PyTree, unit: str) -> list[Shard]:
    """Returns the Shards in a tree that this unit gathers."""
    return [shard for shard in all_shards(tree) if shard.comm.unit == unit]


def gathered(tree: PyTree, unit: str) -> PyTree:
    """Returns the tree with the Shards of this unit replaced by gathered arrays.

    Those of units inside it stay Shards.
    """
    shards = shards_in(tree, unit)
    if all(shard.comm.mode == "annotate" and not shard.comm.already_gathered for shard in shards):
        comms = [shard.comm for shard in shards]
        values, slots = [shard.value for shard in shards], [shard.slot for shard in shards]
        arrays = gather_together(comms, values, slots)
    else:
        arrays = [shard.gather() for shard in shards]
    named = (_name_for_float8(shard.comm, x) for shard, x in zip(shards, arrays, strict=True))
    return jax.tree.map(
        lambda leaf: next(named) if is_shard(leaf) and leaf.comm.unit == unit else leaf,
        tree,
        is_leaf=is_shard,
    )


def _name_for_float8(comm: ParamComm, array: jax.Array) -> jax.Array:
    """Returns a gathered parameter, named in the trace if its matmuls run in float8."""
    return checkpoint_name(array, f"{FLOAT8}{comm.path}]") if comm.float8_matmuls else array


def run_unit(
    fn: Callable[..., Any], tree: PyTree, args: Any, *, unit: str, activations: Activations
) -> Any:
    """Runs `fn(tree, args)` with the unit's parameters gathered in forward and again in backward.

    `fn` is a pure function; `tree` holds the unit's Shards and whatever else lives in the module.
    """
    settings = checkpoint_settings(all_shards(tree), activations)
    if settings is None:
        return fn(gathered(tree, unit), args)

    def run(tree: PyTree, args: Any) -> Any:
        return fn(gathered(tree, unit), activations.name_inputs(args))

    return jax.checkpoint(run, **settings)(tree, args)


def checkpoint_settings(shards: Sequence[Shard], activations: Activations) -> dict[str, Any] | None:
    """Returns arguments of `jax.checkpoint` for a unit with these Shards.

    None if it needs no checkpoint: nothing is gathered, nor recomputed or offloaded.
    """
    dropped = [shard for shard in shards if not shard.comm.already_gathered]
    if not dropped and activations == SAVED:
        return None
    if activations == Activations("full"):
        policy = checkpoint_policies.nothing_saveable
    else:
        policy = _recompute_gathers(dropped, activations.checkpoint_policy)
    # Inside a scan the loops of forward and backward cannot be merged, so the guard against merging
    # them is not needed.
    in_scan = any(shard.value.ndim < shard.comm.ndim for shard in shards)
    return {"policy": policy, "prevent_cse": not in_scan}


def _float8_dot(primitive: Any, params: dict[str, Any]) -> jex.JaxprEqn | None:
    """Returns the matmul inside a call of `float8.dot`, for policies; None for all else."""
    if not primitive.name.startswith("custom_vjp_call"):
        return None
    for eqn in (eqn for jaxpr in jex.jaxprs_in_params(params) for eqn in jaxpr.eqns):
        if eqn.primitive.name == "dot_general" and _is_float8(eqn.invars[0].aval):
            return eqn
    return None


def _is_float8(aval: Any) -> bool:
    """Returns whether the array that an abstract value stands for is in float8."""
    return str(aval.dtype).startswith("float8")


_GATHERING = {"device_put", "sharding_constraint", "optimization_barrier", "all_gather"}
_REARRANGING = {
    *("reshape", "transpose", "squeeze", "expand_dims", "slice", "split", "concatenate"),
    *("broadcast_in_dim", "copy", "copy_p"),
}


def _recompute_gathers(shards: Iterable[Shard], chosen: Policy) -> Policy:
    """Returns the policy `chosen`, but it saves nothing that is made in gathering these Shards.

    See the note on dropping the gathered copy.
    """
    sizes = set()
    shapes = set()
    for shard in shards:
        spec = shard.comm.sliced_spec(shard.comm.param_spec, shard.value.ndim)
        local = shard.comm.mode == "manual"
        parts = [shards_of(shard.comm.mesh, entry) if local else 1 for entry in spec]
        shape = tuple(size * count for size, count in zip(shard.value.shape, parts, strict=True))
        shapes.add(shape)
        sizes |= {shard.value.size, prod(shape)}

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        """Answers as `chosen`, but False (recompute) from a shard to its gathered, cast weight."""
        if primitive.name in _GATHERING or primitive.name in _REARRANGING:
            return False
        if avals and _is_float8(avals[0]):  # cast back, after the gather
            return False
        if primitive.name == "convert_element_type" and avals[0].size in sizes:
            return False
        is_named = primitive.name == "name" and params["name"] != INPUT
        if is_named and avals[0].shape in shapes:  # `checkpoint_name` of a weight
            return False
        if (dot := _float8_dot(primitive, params)) is not None:
            primitive, avals, params = dot.primitive, tuple(v.aval for v in dot.invars), dot.params
        answer = chosen(primitive, *avals, **params)
        if callable(answer):
            what = "the function makes a policy, and is none"
            fix = "call it: jax.checkpoint_policies.save_only_these_names('attention', ...)"
            raise ValueError(message(what, where="remat", got=chosen, fix=fix))
        return answer

    return policy
