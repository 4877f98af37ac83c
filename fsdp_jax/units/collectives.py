"""How one parameter is all-gathered for compute, and how its gradient is reduced.

[Note: one parameter in a step]
A parameter is stored sharded, in its own dtype. Before the model computes with it, it is

1. cast to the compute dtype *on the shard*,
2. gathered.

The derivative casts the gradient to the reduce dtype, reduces and scatters it, and casts it to the
parameter's dtype. `ParamComm` defines the mesh axes, its `GatherTransform` the casts.

[Note: annotated or explicit] `make_train_step(local_batch=...)` chooses. `annotated` uses sharding
constraints, between which XLA inserts the collectives; the model sees the global batch, and
computes the batch statistics that one device would compute. The cast is pinned to the shard and
fenced by an optimization barrier: with neither, XLA moves it past the gather and the weights are
sent in float32, at twice the bytes. (XLA:CPU does so all the same: it computes in float32.)
`explicit` uses collectives inside `shard_map`; the model sees its local batch. Only it can leave a
gradient unreduced (`no_sync`), reduce it in another dtype than it was computed in, scatter it
padded, or send it in int8.

[Note: one primitive] In every trace a gather is one equation, `GATHER`, which holds its
`ParamComm`. Code that follows traces (checkpoint policies, prefetch, checks) finds gathers by it.
The equation runs a small program, which was traced when it was bound: the casts and collectives
above.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax.host_memory import is_on_host, to_device
from fsdp_jax.program.equations import is_own, own_batched, own_comm, own_operand, scopes_of
from fsdp_jax.sharding.explicit_style import constrain
from fsdp_jax.sharding.padding import padded_shape, unpad
from fsdp_jax.units import float8
from fsdp_jax.units.annotated import Annotated
from fsdp_jax.units.comm import Mode, ParamComm
from fsdp_jax.units.explicit import Explicit
from fsdp_jax.units.gather_transform import GatherTransform

# Named scopes with the parameter's path: the contract finds them in the compiled text.
SITE = "fsdp.gather[{}]"
REDUCED = "fsdp.reduce[{}]"
FLOAT8 = "fsdp.float8["  # and the path: names a gathered parameter whose matmuls run in float8
REDUCE_SCOPE = re.compile(re.escape(REDUCED).replace(re.escape("{}"), "(.*?)"))  # in a name stack


class Collectives(Protocol):
    """The three collectives of a parameter; each mode lowers them differently.

    `spec`: that of the array, or of a slice of a stack, as `ParamComm.sliced_spec` returns it.
    """

    def gather(self, comm: ParamComm, shard: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Gathers an array, sharded by `spec`, along the batch axes."""

    def scatter(self, comm: ParamComm, gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Sums a gradient along the batch axes in `spec`, and shards it by `spec`."""

    def pin(self, comm: ParamComm, shard: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Pins the memory layout of a device's part of an array, to the order of its dims."""

    def sum_over_replicas(self, comm: ParamComm, shard: jax.Array) -> jax.Array:
        """Sums the result of `scatter` along the other batch axes."""


COLLECTIVES: dict[Mode, Collectives] = {"annotated": Annotated(), "explicit": Explicit()}


# The primitive

GATHER = jex.Primitive("fsdp_gather")
GATHER.multiple_results = True
"""`GATHER(parameter)` or `GATHER(parameter, slot)`: the parameter, unsharded, in the compute dtype.

It returns a list of one. If `comm.multiplied_as_sent`, two more results follow for the operands
`stored` and `whole` below: the parameter's float8 values, as bytes, and their scale, a scalar. Only
the first result has a derivative.
`slot` is zeros that receive the gradient where the parameter cannot: if it is in host memory, or if
the gradient is not reduced yet.
Parameters:

- comm: the `ParamComm`.
- operand: the kind of the first operand, by which the program is chosen, as below.
- batched: leading dims that a `vmap` over parameters added.
- program: the jaxpr that computes it.

| operand | bound by | is | the program | its transpose |
|---|---|---|---|---|
| stored | `gather` | what the step holds of the parameter | casts and gathers | none |
| prepared | `gather_prepared` | the same, with `Prepared.shared` | casts, gathers as sent | none |
| whole | `gather_whole` | a whole array in its place (`shard_reads`) | is replaced | none |
| tangent | the derivative of `stored` | a tangent of the parameter, or slot | gathers | reduces |
| whole_tangent | that of `whole` | a tangent of the whole array | casts, gathers | `cotangent` |
| cotangent | its transpose | a gradient by the whole array | casts | `whole_tangent` |
"""
Operand = Literal["stored", "prepared", "whole", "tangent", "whole_tangent", "cotangent"]
_TANGENTS: dict[Operand, Operand] = {"stored": "tangent", "whole": "whole_tangent"}


class Prepared(NamedTuple):
    """A shard or, once it is gathered, the whole parameter as it was sent.

    `shared`: what its format must know of all shards, such as a scale, computed ahead.
    """

    array: jax.Array
    shared: jax.Array


def shared_of_stack(comm: ParamComm, stack: jax.Array) -> jax.Array | None:
    """Computes `Prepared.shared` of each layer of a stack, by one collective for all: [layers].

    None where the format needs nothing.
    """
    spec = comm.sliced_spec(comm.shard_spec, stack.ndim - 1)
    own_part = comm.axes.batch_spec_axes(spec) if comm.mode == "explicit" else ()
    with jax.named_scope(SITE.format(comm.path)):
        return jax.vmap(lambda shard: comm.transform.shared(shard, own_part))(stack)


def gather_prepared(comm: ParamComm, shard: Prepared) -> Prepared:
    """Gathers a parameter in the format that it is sent in, for `converted`; no derivative."""
    return Prepared(_bind(shard, comm, "prepared")[0], shard.shared)


def converted(comm: ParamComm, gathered: Prepared) -> list[jax.Array]:
    """Converts what `gather_prepared` returns to the results of `gather_results`."""
    with jax.named_scope(SITE.format(comm.path)):
        whole = comm.transform.after_gather(*gathered)
        if not comm.multiplied_as_sent:
            return [whole]
        return [whole, float8.as_bytes(gathered.array), gathered.shared]


def gather(comm: ParamComm, value: jax.Array, slot: jax.Array | None = None) -> jax.Array:
    """Gathers a parameter in the compute dtype; its derivative reduces the gradient.

    With `slot` the gradient becomes the cotangent of `slot` instead of `value`. It is local to the
    device if reduction is deferred, otherwise reduced.
    """
    return gather_results(comm, value, slot)[0]


def gather_results(
    comm: ParamComm, value: jax.Array, slot: jax.Array | None = None
) -> list[jax.Array]:
    """Gathers a parameter, as `gather` does, and returns all results of the primitive."""
    is_stored = comm.is_quantized and value.dtype == comm.transform.wire
    if slot is None and comm.mode == "annotated" and not (is_stored or _may_be(comm, value)):
        return [_cast_replaced(comm, value)]
    operands = (value,) if slot is None else (value, slot)
    return _bind(operands, comm, "stored")


def gather_whole(comm: ParamComm, whole: jax.Array) -> jax.Array:
    """Gathers a parameter in the compute dtype, in a trace with full-shape parameters."""
    if not _may_be(comm, whole):
        return _cast_replaced(comm, whole)
    return _bind((whole,), comm, "whole")[0]


def _may_be(comm: ParamComm, array: jax.Array) -> bool:
    """Tells whether an array has a shape and dtype that a step holds the parameter in.

    Or a layer of its stack. Any other is one that the model computed and put in its place.
    """
    compute, removed = comm.transform.compute, comm.ndim - array.ndim
    # A wider float comes from arithmetic with wider arrays, such as adapters.
    is_wider = jnp.promote_types(array.dtype, compute) == array.dtype
    if array.dtype not in (comm.transform.param, compute) and not is_wider:
        return False
    if comm.fits(array.shape) or removed not in range(max(comm.ndim, 1)):
        return comm.fits(array.shape)
    spec = PartitionSpec(*[*comm.shard_spec, *[None] * comm.ndim][removed : comm.ndim])
    return array.shape == padded_shape(comm.own_shape(array.ndim), spec, comm.mesh)


def _cast_replaced(comm: ParamComm, array: jax.Array) -> jax.Array:
    """Casts an array in a parameter's place, unless the model chose a dtype for it."""
    return array.astype(comm.transform.compute) if array.dtype == comm.transform.param else array


def path_of_gather(eqn: jex.JaxprEqn) -> str | None:
    """Finds the path of the parameter that an equation gathers; None for another equation."""
    gathers = is_own(eqn, GATHER) and own_operand(eqn) in ("stored", "prepared", "whole")
    return own_comm(eqn).path if gathers else None


def is_gathering(eqn: jex.JaxprEqn) -> bool:
    """Tells whether an equation is part of a gather, or of what `converted` does after it."""
    return SITE.partition("{}")[0] in scopes_of(eqn)


def is_multiplied_as_sent(eqn: jex.JaxprEqn) -> bool:
    """Tells whether an equation is a gather with the parameter's float8 values in its results."""
    return is_own(eqn, GATHER) and len(eqn.outvars) > 1  # others have one result


def path_of_movable(eqn: jex.JaxprEqn) -> str | None:
    """Finds the parameter that an equation gathers from what the step holds of it; else None.

    A gather of an array that the model computed, or mapped over, reads that array and has to stay.
    """
    moves = is_own(eqn, GATHER) and own_operand(eqn) == "stored" and not own_batched(eqn)
    return own_comm(eqn).path if moves else None


def path_of_gradient(eqn: jex.JaxprEqn) -> str | None:
    """Finds the parameter that a trace with whole parameters differentiates by, in an equation."""
    is_gradient = is_own(eqn, GATHER) and own_operand(eqn) == "cotangent"
    return own_comm(eqn).path if is_gradient else None


def _bind(operands: Any, comm: ParamComm, operand: Operand, batched: int = 0) -> list[jax.Array]:
    """Binds the primitive and traces its program, here, where the mesh axes are known."""
    program = _program_of(comm, operand, batched).trace(*operands).jaxpr
    return GATHER.bind(*operands, comm=comm, operand=operand, batched=batched, program=program)


@lru_cache(maxsize=4096)
def _program_of(comm: ParamComm, operand: Operand, batched: int) -> Any:
    """Makes the jitted function of the operands.

    It is kept, so that jax finds its trace where the backward pass gathers again.
    """
    return jax.jit(over_leading_dims(partial(_PROGRAMS[operand], comm), batched))


def _run(*operands: jax.Array, program: jex.ClosedJaxpr, **_: Any) -> list[jax.Array]:
    """Runs the program of an equation."""
    return jex.jaxpr_as_fun(program)(*operands)


def results_of(comm: ParamComm, whole: jax.Array) -> list[jax.Array]:
    """Makes the results of `GATHER` from a parameter that is already whole."""
    if not comm.multiplied_as_sent:
        return [whole]
    shared: Any = comm.transform.shared(whole)
    return [whole, float8.as_bytes(comm.transform.before_gather(whole, shared)), shared]


def _gather_replaced(comm: ParamComm, whole: jax.Array) -> list[jax.Array]:
    """Gathers an array that the model computed and put in a parameter's place."""
    if _needs_no_gather(comm):
        return results_of(comm, whole.astype(comm.transform.compute))
    return _stored_results(comm, whole, comm.transform)


def _gather_whole_tangent(comm: ParamComm, tangent: jax.Array) -> list[jax.Array]:
    """Gathers a tangent of such an array, for derivatives in forward mode: never in float8."""
    if _needs_no_gather(comm):
        return [tangent.astype(comm.transform.compute)]
    return [gather_stored(comm, tangent, casts=True)]


def _needs_no_gather(comm: ParamComm) -> bool:
    """Tells whether an array that replaces the parameter is cast alone.

    With local batches every device has all of it; of a quantized parameter XLA chooses where it is.
    """
    return comm.mode == "explicit" or comm.is_quantized


def _gather_tangent(comm: ParamComm, tangent: jax.Array) -> list[jax.Array]:
    """Gathers a tangent of a parameter, for derivatives in forward mode: never in float8.

    The tangent of a slot for a deferred reduction already has the gathered shape.
    """
    if comm.deferred:
        return [tangent.astype(comm.transform.compute)]
    return [gather_stored(comm, tangent, casts=True)]


def _gather_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    """The JVP of a gather, which uses the tangent of the last operand."""
    assert params["operand"] != "prepared", params["comm"].path
    results, tangent = GATHER.bind(*primals, **params), tangents[-1]
    of_results: list[Any] = [ad.Zero(jax.typeof(each).to_tangent_aval()) for each in results]
    if type(tangent) is not ad.Zero:
        operand = _TANGENTS.get(params["operand"], params["operand"])
        [of_results[0]] = _bind((tangent,), params["comm"], operand, params["batched"])
    return results, of_results


def _reduce_cotangent(
    cotangents: Any, tangent: Any, *, comm: ParamComm, operand: Operand, batched: int, program: Any
) -> list[Any]:
    """The transpose of a gather: reduces the gradient of a parameter."""
    [cotangent] = cotangents
    if type(cotangent) is ad.Zero:
        return [None]
    if operand in ("whole_tangent", "cotangent"):
        other: Operand = "cotangent" if operand == "whole_tangent" else "whole_tangent"
        return _bind((cotangent,), comm, other, batched)
    gradient = over_leading_dims(partial(gradient_of, comm), batched)(cotangent)
    return [gradient.astype(tangent.aval.dtype)]


def _gather_batched(
    operands: Any, dims: Any, *, comm: ParamComm, operand: Operand, batched: int, program: Any
) -> tuple[Any, list[int]]:
    """Gathers a stack of parameters, inside a `vmap` over them."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    stacks = [batching.bdim_at_front(x, d, size) for x, d in zip(operands, dims, strict=True)]
    results = _bind(stacks, comm, operand, batched + 1)
    return results, [0] * len(results)


GATHER.def_abstract_eval(lambda *_, program, **__: program.out_avals)
GATHER.def_impl(_run)
mlir.register_lowering(GATHER, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_transposes[GATHER] = _reduce_cotangent
ad.primitive_jvps[GATHER] = _gather_jvp
batching.primitive_batchers[GATHER] = _gather_batched


def over_leading_dims(fn: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Maps `fn` over this many leading dims of its arrays."""
    for _ in range(count):
        fn = jax.vmap(fn)
    return fn


# The programs that it runs, and its transpose


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PartialSums:
    """An unreduced gradient, with annotations; see the note in `prefetch.partial_sums`.

    Attributes:
        stack: [*sizes of mesh axes, *shape of the gradient], sharded by those mesh axes along its
            first dims, over which it is still to be summed: all batch axes, or after `scatter` the
            axes that it left.

    """

    stack: jax.Array


Unreduced = jax.Array | PartialSums


def gradient_of(comm: ParamComm, cotangent: Unreduced) -> jax.Array:
    """Reduces a parameter's gradient, given the cotangent of the gathered parameter.

    If reduction is deferred, the gradient is that cotangent, local to the device.
    """
    if not comm.deferred:
        return reduce(comm, cotangent)
    assert not isinstance(cotangent, PartialSums), comm.path
    return cotangent


def _gather_as_sent(comm: ParamComm, shard: jax.Array, shared: jax.Array) -> list[jax.Array]:
    """Gathers a layer of a stack in the format that it is sent in."""
    spec = comm.sliced_spec(comm.shard_spec, shard.ndim)
    with jax.named_scope(SITE.format(comm.path)):
        shard = comm.transform.before_gather(shard, shared)
        if comm.axes.batch_spec_axes(spec):
            shard = COLLECTIVES[comm.mode].gather(comm, shard, spec)
        return [unpad(shard, comm.own_shape(shard.ndim))]


def gather_stored(comm: ParamComm, value: jax.Array, *, casts: bool = False) -> jax.Array:
    """Gathers what a step holds of a parameter, in the compute dtype.

    `casts`: by casts only, in place of the format that the parameter is sent in.
    """
    transform = comm.transform
    if casts:
        transform = GatherTransform(transform.param, transform.compute, transform.reduce)
    return _stored_results(comm, value, transform)[0]


def _stored_results(
    comm: ParamComm, value: jax.Array, transform: GatherTransform
) -> list[jax.Array]:
    """Gathers what a step holds of a parameter, by `transform`: the results of `GATHER`."""
    spec = comm.sliced_spec(comm.shard_spec, value.ndim)
    as_sent = transform is comm.transform and comm.multiplied_as_sent
    with jax.named_scope(SITE.format(comm.path)):
        value = fetch(comm, value)
        along = comm.axes.batch_spec_axes(spec)
        own_part = along if comm.mode == "explicit" else ()
        shared: Any = transform.shared(value, own_part)
        value = transform.before_gather(value, shared)
        if along:
            value = COLLECTIVES[comm.mode].gather(comm, value, spec)
        results = [transform.after_gather(value, shared)]
        if as_sent:
            results.append(float8.as_bytes(value))
        results = [unpad(each, comm.own_shape(each.ndim)) for each in results]
        # A layer that stays gathered goes into a stack. By default XLA gives that the memory layout
        # of the collective, and transposes all of it for the backward pass.
        if comm.kept and value.ndim < comm.ndim:
            whole_spec = comm.axes.model_spec(spec)
            results = [COLLECTIVES[comm.mode].pin(comm, each, whole_spec) for each in results]
        return [*results, shared] if as_sent else results


_PROGRAMS: dict[Operand, Callable[..., list[jax.Array]]] = {
    "stored": lambda comm, value, *slot: _stored_results(comm, value, comm.transform),
    "prepared": _gather_as_sent,
    "whole": _gather_replaced,
    "tangent": _gather_tangent,
    "whole_tangent": _gather_whole_tangent,
    "cotangent": lambda comm, gradient: [gradient.astype(comm.transform.param)],
}
"""Of the `ParamComm` and the operands: the results."""


def fetch(comm: ParamComm, value: jax.Array) -> jax.Array:
    """Brings a parameter's shard to device memory; returns it unchanged if it is there."""
    if comm.on_host and is_on_host(jax.typeof(value)):
        with jax.named_scope(SITE.format(comm.path)):
            return to_device(value)
    return value


def reduce(comm: ParamComm, gradient: Unreduced) -> jax.Array:
    """Sums a gradient over the batch axes in the reduce dtype, and scatters it.

    `gradient` has the gathered shape; the result is sharded by `grad_spec`, in the parameter's
    dtype.
    """
    return reduce_over_replicas(comm, scatter(comm, gradient))


def scatter(comm: ParamComm, gradient: Unreduced) -> Unreduced:
    """Does the first part of `reduce`: sums along the axes that shard the gradient, and scatters.

    The result is in the reduce dtype. With annotations this sums along all batch axes, except for
    partial sums.
    """
    with jax.named_scope(REDUCED.format(comm.path)):
        if isinstance(gradient, PartialSums):
            return _scatter_partial_sums(comm, gradient)
        spec = comm.sliced_spec(comm.grad_spec, gradient.ndim)
        gradient = comm.transform.before_reduce(gradient)
        return COLLECTIVES[comm.mode].scatter(comm, gradient, spec)


def reduce_over_replicas(comm: ParamComm, shard: Unreduced) -> jax.Array:
    """Does the second part of `reduce`: sums the result of `scatter` along the other batch axes."""
    with jax.named_scope(REDUCED.format(comm.path)):
        if isinstance(shard, PartialSums):
            total = lax.reduce_sum(shard.stack, tuple(range(len(comm.other_axes))))
            spec = comm.sliced_spec(comm.grad_spec, total.ndim)
            total = constrain(total, NamedSharding(comm.mesh, spec))
        else:
            total = COLLECTIVES[comm.mode].sum_over_replicas(comm, shard)
        return comm.transform.after_reduce(total)


def _scatter_partial_sums(comm: ParamComm, gradient: PartialSums) -> PartialSums:
    """Sums a gradient along the axes that shard it, and scatters it, with annotations.

    The sum is in the gradient's dtype, as XLA reduces a matmul's result: `jnp.sum` would send
    float32.
    """
    stack, axes = comm.transform.before_reduce(gradient.stack), comm.axes.batch
    spec = comm.sliced_spec(comm.grad_spec, stack.ndim - len(axes))
    summed = [dim for dim, axis in enumerate(axes) if axis not in comm.other_axes]
    stack = lax.reduce_sum(stack, tuple(summed))
    sharding = NamedSharding(comm.mesh, PartitionSpec(*comm.other_axes, *spec))
    return PartialSums(constrain(stack, sharding))
