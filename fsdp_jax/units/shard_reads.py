"""Traces a model with whole parameters where a step holds shards, or arrays in host memory.

With local batches a device holds its shard of a parameter, which no loss may compute with: a
penalty on it would be wrong without a message. A parameter in host memory cannot be computed with
at all. Yet what a model reads outside its units shall be an array like any other, with its whole
shape. So the model is traced with whole arrays that have no values yet, in which a unit's gather is
one equation, `GATHER`. Then the trace is followed: through scans over layers, checkpoints, calls
and branches, to the gathers, which are given the shards. Every other use of a parameter is found
that way, whatever Python did to get there:

- with local batches it is an error that names the parameter and the line that uses it;
- in host memory, the parameter is fetched for that use, and its gradient is added to the unit's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import flax
import jax
import jax.extend.core as jex
from jax import lax
from jax.extend.source_info_util import summarize
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

import fsdp_jax.errors
from fsdp_jax.errors import message
from fsdp_jax.host_memory import to_device
from fsdp_jax.jaxprs import (
    all_eqns,
    call_as_checkpoint,
    evaluate_unchanged,
    inner_program,
    inputs_of,
    is_transparent,
    named_scope_of,
    reads,
    reevaluate_scan,
    scan_arguments,
    values_of,
)
from fsdp_jax.sharding.explicit_style import constrain
from fsdp_jax.sharding.padding import unpad
from fsdp_jax.units.collectives import (
    ParamComm,
    gather,
    gather_without_vjp,
    over_leading_dims,
)

GATHER = jex.Primitive("fsdp_gather")
GRADIENT = jex.Primitive("fsdp_gradient")  # by a gathered parameter, where the loss takes one
# Folders of code that is not the user's.
_LIBRARIES = tuple(
    str(Path(str(module.__file__)).parent) for module in (jax, flax, fsdp_jax.errors)
)


def gather_in_trace(comm: ParamComm, whole: jax.Array) -> jax.Array:
    """Gathers a parameter in a trace with whole parameters, in the compute dtype."""
    gathered: jax.Array = GATHER.bind(whole, comm=comm, batched=0)
    return gathered


def _gather_array(whole: jax.Array, *, comm: ParamComm, batched: int) -> jax.Array:
    """Gathers an array that a model has put in place of a parameter; it computed it itself."""
    if comm.mode == "manual":  # not from shards: every device has all of it
        return whole.astype(comm.transform.compute)
    gather = partial(gather_without_vjp, replace(comm, on_host=False))
    return over_leading_dims(gather, batched)(whole)


def _cast_gradient(cotangent: jax.Array, *, comm: ParamComm) -> jax.Array:
    """Casts a gradient by a gathered parameter to the dtype of the parameter."""
    return cotangent.astype(comm.transform.param)


def _batched(args: Any, dims: Any, *, comm: ParamComm, batched: int) -> tuple[jax.Array, int]:
    """Gathers a stack of parameters, inside a `vmap` over it."""
    stack = jax.numpy.moveaxis(args[0], dims[0], 0)
    return GATHER.bind(stack, comm=comm, batched=batched + 1), 0


GATHER.def_abstract_eval(lambda whole, *, comm, batched: whole.update(dtype=comm.transform.compute))
GATHER.def_impl(jax.jit(_gather_array, static_argnames=("comm", "batched")))
mlir.register_lowering(GATHER, mlir.lower_fun(_gather_array, multiple_results=False))
ad.deflinear2(GATHER, lambda cotangent, _, *, comm, batched: [GRADIENT.bind(cotangent, comm=comm)])
batching.primitive_batchers[GATHER] = _batched
GRADIENT.def_abstract_eval(lambda x, *, comm: x.update(dtype=comm.transform.param))
GRADIENT.def_impl(jax.jit(_cast_gradient, static_argnames="comm"))
mlir.register_lowering(GRADIENT, mlir.lower_fun(_cast_gradient, multiple_results=False))
ad.deflinear2(GRADIENT, lambda cotangent, _, *, comm: [cotangent.astype(comm.transform.compute)])
batching.defvectorized(GRADIENT)


@jax.tree_util.register_dataclass
@dataclass(eq=False)
class Shard:
    """What a step holds of a parameter, from which its unit gathers it.

    Attributes:
        value: a device's shard with local batches, an array in host memory, or, where a parameter
            is gathered once for the step, the gathered array.
        slot: zeros whose cotangent is the gradient, where that is not the cotangent of `value`: of
            the gathered shape where reduction is deferred, of the shard's where `value` is in host
            memory.
        stored: the parameter in host memory as it is stored, where `value` is a copy of it in the
            compute dtype; None if `value` is the parameter.

    """

    value: Any
    comm: ParamComm = field(metadata={"static": True})
    slot: Any = None
    stored: Any = None

    @property
    def whole(self) -> jax.ShapeDtypeStruct:
        """The parameter as a model sees it: its whole shape, in the dtype that it is stored in."""
        return jax.ShapeDtypeStruct(self.comm.shape, self.comm.transform.param)

    def gather(self) -> jax.Array:
        """Gathers the parameter in the compute dtype; its VJP reduces the gradient."""
        if self.comm.already_gathered:
            return self.value
        return gather(self.comm, self.value, self.slot)

    def fetch(self) -> jax.Array:
        """Brings a parameter in host memory to the devices, sharded; the slot gets its gradient."""
        assert self.comm.on_host, self.comm.path
        host = self.value if self.stored is None else self.stored
        if self.slot is None:
            return self._to_device(host)

        @jax.custom_vjp
        def fetch(host: jax.Array, slot: jax.Array) -> jax.Array:
            del slot
            return self._to_device(host)

        def backward(_: None, cotangent: jax.Array) -> tuple[None, jax.Array]:
            return None, cotangent.astype(slot_dtype)

        slot_dtype = self.slot.dtype
        fetch.defvjp(lambda host, slot: (fetch(host, slot), None), backward)
        return fetch(host, self.slot)

    def _to_device(self, host: jax.Array) -> jax.Array:
        """Brings an array to the devices, sharded, in the parameter's own shape."""
        comm = self.comm
        own = unpad(to_device(host), comm.own_shape(host.ndim))
        if own.shape == host.shape:
            return own
        return constrain(own, NamedSharding(comm.mesh, comm.sliced_spec(comm.param_spec, own.ndim)))


def call_with_shards(
    fn: Callable[..., Any], params: Mapping[str, jax.Array | Shard], *args: Any
) -> Any:
    """Calls `fn(params, *args)`, which sees a whole array for each Shard; see the module's note.

    Args:
        fn: a pure function of pytrees of arrays.
        params: by path; arrays stay as they are.
        args: pytrees of arrays.

    Raises:
        ValueError: with local batches, a parameter is used outside its unit.

    """
    whole = {path: x.whole if isinstance(x, Shard) else x for path, x in params.items()}
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(whole, *args)
    leaves = jax.tree.leaves((dict(params), args), is_leaf=_is_shard)
    inputs = [*closed.consts, *leaves]
    paths = [x.comm.path if isinstance(x, Shard) else None for x in inputs]
    outside = reads_outside_units(closed.jaxpr, paths)
    local = {x.comm.path for x in inputs if isinstance(x, Shard) and x.comm.mode == "manual"}
    for path in filter(local.__contains__, outside):
        raise _local_read_error(path, outside[path])
    for eqn in all_eqns(closed.jaxpr) if local else ():
        if eqn.primitive is GRADIENT:
            raise _local_read_error(eqn.params["comm"].path, source_line(eqn))
    # Only what is read outside its unit takes the stored array along, through scans too.
    inputs = [
        replace(x, stored=None) if isinstance(x, Shard) and x.comm.path not in outside else x
        for x in inputs
    ]
    outputs = [_to_array(x) for x in _evaluate(closed.jaxpr, inputs)]
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def _local_read_error(path: str, where: str) -> ValueError:
    """The error for a parameter that is used outside its unit with local batches."""
    what = (
        "with local_batch, a parameter is used outside its unit, as a penalty on it does, or the "
    )
    what += "loss differentiates by it"
    expected = "a loss that is a sum over examples: a device has its shard, and its rows, alone"
    fix = "leave local_batch out; of a penalty, let the optimizer do it, as "
    fix += "optax.add_decayed_weights does; of a tied weight, share the Variable, so that it is "
    fix += "gathered as the model is entered"
    text = message(what, where=path, expected=expected, got=f"used at {where}", fix=fix)
    return ValueError(text)


def _is_shard(x: Any) -> bool:
    """Returns whether a value of a program is a parameter that is yet to be gathered."""
    return isinstance(x, Shard)


def _to_array(x: Any) -> Any:
    """Returns a value that is used outside a unit: a parameter is fetched."""
    return x.fetch() if isinstance(x, Shard) else x


# Evaluating a trace with shards


def _evaluate(jaxpr: jex.Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr whose inputs (constants, then arguments) may be Shards.

    Its outputs may be Shards too, where it returns what it was given.
    """
    env = dict(zip(inputs_of(jaxpr), args, strict=True))
    unchanged: list[jex.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if not any(isinstance(env.get(v), Shard) for v in reads(eqn)):
            unchanged.append(eqn)
            continue
        evaluate_unchanged(jaxpr, unchanged, env)
        unchanged = []
        with named_scope_of(eqn):
            values = _evaluate_eqn(jaxpr, eqn, values_of(env, eqn.invars))
        env.update(zip(eqn.outvars, values, strict=True))
    evaluate_unchanged(jaxpr, unchanged, env)
    return values_of(env, jaxpr.outvars)


def _evaluate_eqn(jaxpr: jex.Jaxpr, eqn: jex.JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
    """Evaluates an equation of a jaxpr, some of whose operands are Shards."""
    name = eqn.primitive.name
    if eqn.primitive is GATHER:
        # The operand may be another parameter than the one that belongs there.
        return [args[0].gather().astype(eqn.params["comm"].transform.compute)]
    if name == "scan":
        return _evaluate_scan(eqn, args)
    if is_transparent(eqn):
        inner, consts = inner_program(eqn)
        return call_as_checkpoint(eqn, lambda *args: _evaluate(inner, [*consts, *args]), *args)
    if name == "cond" and eqn.params.get("branches_platforms") is None:
        index, *operands = args
        branches = [partial(_evaluate_branch, branch) for branch in eqn.params["branches"]]
        return list(lax.switch(_to_array(index), branches, *operands))
    arrays = zip(eqn.invars, map(_to_array, args), strict=True)
    env = {v: x for v, x in arrays if not isinstance(v, jex.Literal)}
    evaluate_unchanged(jaxpr, [eqn], env)
    return [env.get(v) for v in eqn.outvars]  # None for a result that nothing reads


def _evaluate_branch(branch: jex.ClosedJaxpr, *operands: Any) -> list[Any]:
    """Evaluates a branch of a `cond`, whose outputs are arrays."""
    return [_to_array(x) for x in _evaluate(branch.jaxpr, [*branch.consts, *operands])]


def _evaluate_scan(eqn: jex.JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Evaluates a scan: it slices Shards, and carries arrays."""
    consts, carry, xs = scan_arguments(eqn.params, args)
    for each in filter(_is_shard, xs):  # raises ValueError where the sliced dim is sharded
        each.comm.sliced_spec(each.comm.param_spec, each.value.ndim - 1)

    def evaluate(jaxpr: jex.Jaxpr, args: list[Any]) -> list[Any]:
        outputs = _evaluate(jaxpr, args)
        return [*map(_to_array, outputs[: len(carry)]), *outputs[len(carry) :]]

    return reevaluate_scan(eqn, [*consts, *map(_to_array, carry), *xs], evaluate)


# Finding what is read outside its unit


def reads_outside_units(jaxpr: jex.Jaxpr, paths: Sequence[str | None]) -> dict[str, str]:
    """Finds parameters that a trace with whole parameters uses outside their units.

    Args:
        jaxpr: of the trace, in which units gather by `GATHER`.
        paths: of the parameter that each input is (constants, then arguments); None for others.

    Returns:
        {path of a parameter: source line that uses it first}.

    """
    found: dict[str, str] = {}
    outputs = _follow(jaxpr, paths, found)
    for path in outputs:
        if path is not None:
            found.setdefault(path, "a result of the loss")
    return found


def _follow(
    jaxpr: jex.Jaxpr, paths: Sequence[str | None], found: dict[str, str]
) -> list[str | None]:
    """Returns the parameter that each output of a jaxpr is, if it is one; fills `found`."""
    env = {v: path for v, path in zip(inputs_of(jaxpr), paths, strict=True) if path is not None}

    def parameter(atom: Any) -> str | None:
        return None if isinstance(atom, jex.Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        operands = [parameter(v) for v in eqn.invars]
        if any(operands) and eqn.primitive is not GATHER:
            results = _follow_eqn(eqn, operands, found)
            env |= {v: path for v, path in zip(eqn.outvars, results, strict=True) if path}
    return [parameter(v) for v in jaxpr.outvars]


def _follow_eqn(
    eqn: jex.JaxprEqn, operands: list[str | None], found: dict[str, str]
) -> Sequence[str | None]:
    """Returns the parameter that each result of an equation is; fills `found`.

    The cases are those of `_evaluate_eqn`. `operands`: the parameter that each operand is.
    """

    def use(paths: Sequence[str | None]) -> None:
        for path in paths:
            if path is not None:
                found.setdefault(path, source_line(eqn))

    name = eqn.primitive.name
    if name == "scan":
        inner, closed_over = inner_program(eqn)
        consts, carry, xs = scan_arguments(eqn.params, operands)
        use(carry)
        paths = [*[None] * len(closed_over), *consts, *[None] * len(carry), *xs]
        results = _follow(inner, paths, found)
        use(results[: len(carry)])
        return [*[None] * len(carry), *results[len(carry) :]]
    if is_transparent(eqn):
        inner, closed_over = inner_program(eqn)
        return _follow(inner, [*[None] * len(closed_over), *operands], found)
    if name == "cond" and eqn.params.get("branches_platforms") is None:
        use(operands[:1])
        for branch in eqn.params["branches"]:
            paths = [*[None] * len(branch.consts), *operands[1:]]
            use(_follow(branch.jaxpr, paths, found))
    else:
        use(operands)
    return [None] * len(eqn.outvars)


def source_line(eqn: jex.JaxprEqn) -> str:
    """Returns the line of the user's code that made an equation: `model.py:12 (Net.__call__)`."""
    for frame in _frames(eqn):
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{Path(frame.file_name).name}:{frame.line_num} ({frame.function_name})"
    return summarize(eqn.source_info)


def _frames(eqn: jex.JaxprEqn) -> Iterator[Any]:
    """Yields the frames of the traceback of an equation, the innermost first."""
    traceback = eqn.source_info.traceback
    yield from () if traceback is None else traceback.frames
