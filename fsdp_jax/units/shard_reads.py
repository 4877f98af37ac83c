"""Traces a model with full-shape parameters if a step holds shards, or arrays in host memory.

With local batches a device holds its shard of a parameter. No loss may compute with a shard: a
penalty on it would be wrong without a message. And nothing can compute with a parameter in host
memory. Yet code outside a unit must still see an ordinary array of full shape. So the model is
traced with abstract full-shape arrays, in which a unit's gather is one equation, `GATHER`. This
module then follows the trace through scans over layers, checkpoints, calls and branches to the
gathers, and gives them the shards. It finds every other use of a parameter that way, whatever
Python did to get there:

- with local batches such a use is an error that names the parameter and the line;
- in host memory, the parameter is fetched for that use, and its gradient is added to the unit's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import NamedSharding

from fsdp_jax.errors import ArgumentError
from fsdp_jax.host_memory import to_device
from fsdp_jax.program.dataflow import NONE, DataFlow, Labels
from fsdp_jax.program.equations import (
    all_eqns,
    body_of,
    branches_of,
    is_branch,
    is_transparent,
    own_comm,
    split_scan,
)
from fsdp_jax.program.evaluate import evaluate_inside, evaluate_replaced, evaluate_unchanged
from fsdp_jax.program.primitives import SCAN, primitive_of
from fsdp_jax.sharding.explicit_style import constrain
from fsdp_jax.sharding.padding import unpad
from fsdp_jax.units.collectives import gather_results, path_of_gather, path_of_gradient, results_of
from fsdp_jax.units.comm import ParamComm
from fsdp_jax.units.gather_transform import QuantizedGather
from fsdp_jax.units.source_lines import source_line


@jax.tree_util.register_dataclass
@dataclass(eq=False)
class Held:
    """What a step holds of a parameter, from which its unit gathers it.

    Attributes:
        value: a device's shard with local batches, an array in host memory, or, if the parameter is
            gathered once for the step, the gathered array.
        slot: zeros whose cotangent is the gradient, if that is not the cotangent of `value`. It has
            the gathered shape if reduction is deferred, and the shard's if `value` is in host
            memory.
        stored: the parameter as it is stored in host memory, if `value` is a copy of it in the
            compute dtype; None if `value` is the parameter.

    """

    value: Any
    comm: ParamComm = field(metadata={"static": True})
    slot: Any = None
    stored: Any = None

    @property
    def whole(self) -> jax.ShapeDtypeStruct:
        """The parameter as a model sees it: its full shape, in its storage dtype."""
        return jax.ShapeDtypeStruct(self.comm.shape, self.comm.transform.param)

    def gather(self) -> list[jax.Array]:
        """Gathers the parameter: the results of `GATHER`; its VJP reduces the gradient."""
        if self.comm.already_gathered:
            return [self.value]
        return gather_results(self.comm, self.value, self.slot)

    def fetch(self) -> jax.Array:
        """Brings a parameter in host memory to the devices, sharded; the slot gets its gradient.

        A parameter on the devices is returned unchanged.
        """
        if not self.comm.on_host:
            assert self.comm.mode == "annotated", self.comm.path
            return self._own(self.value) if self.comm.is_quantized else self.value
        host = self.value if self.stored is None else self.stored
        if self.slot is None:
            return self._to_device(host)

        @jax.custom_vjp
        def fetch(host: jax.Array, slot: jax.Array) -> jax.Array:
            return self._to_device(host)

        def backward(_: None, cotangent: jax.Array) -> tuple[None, jax.Array]:
            return None, cotangent.astype(slot_dtype)

        slot_dtype = self.slot.dtype
        fetch.defvjp(lambda host, slot: (fetch(host, slot), None), backward)
        return fetch(host, self.slot)

    def _to_device(self, host: jax.Array) -> jax.Array:
        """Brings an array to the devices, sharded, cut to the parameter's own shape."""
        return self._own(to_device(host))

    def _own(self, stored: jax.Array) -> jax.Array:
        """Cuts an array to the parameter's own shape, sharded; dequantizes it first."""
        comm = self.comm
        if isinstance(comm.transform, QuantizedGather):
            stored = comm.transform.blocks.decode(stored)
        own = unpad(stored, comm.own_shape(stored.ndim))
        if own.shape == stored.shape and not comm.is_quantized:
            return own
        return constrain(own, NamedSharding(comm.mesh, comm.sliced_spec(comm.shard_spec, own.ndim)))


def call_with_shards(
    fn: Callable[..., Any], params: Mapping[str, jax.Array | Held], *args: Any
) -> Any:
    """Calls `fn(params, *args)`, which sees a whole array for each Held; see the module's note.

    Args:
        fn: a pure function of pytrees of arrays.
        params: `Held`s and arrays, by path; arrays are passed unchanged.
        args: pytrees of arrays.

    Raises:
        ValueError: with local batches, a parameter is used outside its unit.

    """
    whole = {path: x.whole if isinstance(x, Held) else x for path, x in params.items()}
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(whole, *args)
    leaves = jax.tree.leaves((dict(params), args), is_leaf=_is_shard)
    paths = [x.comm.path if isinstance(x, Held) else None for x in leaves]
    outside = reads_outside_units(closed.jaxpr, paths)
    local = {x.comm.path for x in leaves if isinstance(x, Held) and x.comm.mode == "explicit"}
    for path in filter(local.__contains__, outside):
        raise _local_read_error(path, outside[path])
    for eqn in all_eqns(closed.jaxpr) if local else ():
        if differentiated := path_of_gradient(eqn):
            raise _local_read_error(differentiated, source_line(eqn.source_info))
    # Pass the stored array along, through scans too, only for parameters that are read outside
    # their units.
    leaves = [
        replace(x, stored=None) if isinstance(x, Held) and x.comm.path not in outside else x
        for x in leaves
    ]
    outputs = _evaluate_to_arrays(closed.jaxpr, [*closed.consts, *leaves])
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def _local_read_error(path: str, where: str) -> ArgumentError:
    """Makes the error for a parameter that is used outside its unit with local batches."""
    what = (
        "with local_batch, a parameter is used outside its unit, as a penalty on it does, or the "
    )
    what += "loss differentiates by it"
    expected = "a loss that is a sum over examples: a device has its shard, and its rows, alone"
    fix = "leave local_batch out; of a penalty, let the optimizer do it, as "
    fix += "optax.add_decayed_weights does; of a tied weight, share the Variable, so that it is "
    fix += "gathered as the model is entered; of a property of a Linen module, make it a method"
    return ArgumentError(what, where=path, expected=expected, got=f"used at {where}", fix=fix)


def _is_shard(x: Any) -> bool:
    """Tells whether a value of a program is a parameter that is yet to be gathered."""
    return isinstance(x, Held)


def _to_array(x: Any) -> Any:
    """Fetches a parameter that is used outside a unit; other values stay as they are."""
    return x.fetch() if isinstance(x, Held) else x


# Evaluating a trace with shards


def _evaluate(jaxpr: jex.Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr whose inputs (constants, then arguments) may be `Held`s.

    An output may be one too, if the jaxpr returns an input unchanged.
    """

    def reads_shards(_: jex.JaxprEqn, values: list[Any]) -> bool:
        return any(map(_is_shard, values))

    return evaluate_replaced(jaxpr, args, reads_shards, partial(_evaluate_eqn, jaxpr))


def _evaluate_eqn(jaxpr: jex.Jaxpr, eqn: jex.JaxprEqn, args: list[Any]) -> Sequence[Any]:
    """Evaluates an equation of a jaxpr, some of whose operands are `Held`s."""
    if path_of_gather(eqn):
        comm, results = own_comm(eqn), args[0].gather()
        if args[0].comm.path == comm.path:
            assert len(results) == len(eqn.outvars), comm.path
            return results
        # A model may put another parameter's array in this one's place: the results are made of it.
        return results_of(comm, results[0].astype(comm.transform.compute))
    if primitive_of(eqn) is SCAN:
        return _evaluate_scan(eqn, args)
    if is_transparent(eqn):
        return evaluate_inside(eqn, args, _evaluate)
    if is_branch(eqn):
        index, *operands = args
        return evaluate_inside(eqn, [_to_array(index), *operands], _evaluate_to_arrays)
    arrays = zip(eqn.invars, map(_to_array, args), strict=True)
    env = {v: x for v, x in arrays if not isinstance(v, jex.Literal)}
    evaluate_unchanged(jaxpr, [eqn], env)
    return [env.get(v) for v in eqn.outvars]  # None for a result that nothing reads


def _evaluate_to_arrays(jaxpr: jex.Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr, and fetches those of its outputs that are `Held`s."""
    return [_to_array(x) for x in _evaluate(jaxpr, args)]


def _evaluate_scan(eqn: jex.JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Evaluates a scan: slices `Held`s among its xs, and turns others that it returns into arrays.

    Those are `Held`s in its carry, and the same one that each of its iterations returns.
    """
    consts, carry, xs = split_scan(eqn, args)
    shared = {each.comm.path for each in consts if _is_shard(each)}
    for each in filter(_is_shard, xs):  # raises ValueError where the sliced dim is sharded
        each.comm.sliced_spec(each.comm.shard_spec, each.value.ndim - 1)

    def evaluate(jaxpr: jex.Jaxpr, args: list[Any]) -> list[Any]:
        return [
            _to_array(x) if number < len(carry) or (_is_shard(x) and x.comm.path in shared) else x
            for number, x in enumerate(_evaluate(jaxpr, args))
        ]

    return evaluate_inside(eqn, [*consts, *map(_to_array, carry), *xs], evaluate)


# Finding parameters that are read outside their units


def reads_outside_units(jaxpr: jex.Jaxpr, paths: Sequence[str | None]) -> dict[str, str]:
    """Finds parameters that a trace with full-shape parameters uses outside their units.

    Args:
        jaxpr: that of the trace, in which units gather by `GATHER`.
        paths: for each argument the path of the parameter that it is, or None.

    Returns:
        {path of a parameter: source line that uses it first}.

    """
    reads = _OutsideReads({})
    labels = [frozenset({path}) if path is not None else NONE for path in paths]
    for path in chain.from_iterable(reads.outputs(jaxpr, labels)):
        reads.found.setdefault(path, "a result of the loss")
    return reads.found


@dataclass(frozen=True)
class _OutsideReads(DataFlow):
    """Follows which values are parameters, and records in `found` where each is first used.

    The cases are those of `_evaluate_eqn`.
    """

    found: dict[str, str]

    def results(self, eqn: jex.JaxprEqn, operands: list[Labels]) -> list[Labels]:
        """Finds, for each result of an equation, the parameter that it is."""

        def use(values: Sequence[Labels]) -> list[Labels]:
            """Records parameters that are used as arrays; the results have no labels."""
            for path in chain.from_iterable(values):
                self.found.setdefault(path, source_line(eqn.source_info))
            return [NONE] * len(values)

        # Units gather parameters, and scans and calls pass them on. All other operations, and the
        # carry of a scan, use them as arrays.
        if path_of_gather(eqn) or not any(operands):
            return [NONE] * len(eqn.outvars)
        if primitive_of(eqn) is SCAN:
            consts, carry, xs = split_scan(eqn, operands)
            results = self.outputs(body_of(eqn)[0], [*consts, *use(carry), *xs])
            shared = frozenset().union(*consts)
            ys = [use([y])[0] if y & shared else y for y in results[len(carry) :]]
            return [*use(results[: len(carry)]), *ys]
        if is_transparent(eqn):
            return self.outputs(body_of(eqn)[0], operands)
        if is_branch(eqn):
            use(operands[:1])
            for branch in branches_of(eqn):
                use(self.outputs(branch.jaxpr, operands[1:]))
        else:
            use(operands)
        return [NONE] * len(eqn.outvars)
