"""Reads the equations of traced programs: what they run, read and were traced with.

The functions that take an `Operation` also take what `jax.checkpoint` asks a policy about.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import jax
import jax.extend.core as jex

from fsdp_jax.program import primitives
from fsdp_jax.program.primitives import primitive_of

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """What `jax.checkpoint` asks a policy about: an operation without its results."""

    primitive: Any
    avals: Sequence[Any]
    params: Mapping[str, Any]

    def ask(self, policy: Callable[..., Any]) -> Any:
        """Asks another policy."""
        return policy(self.primitive, *self.avals, **self.params)


Operation = jex.JaxprEqn | Asked


def asked_of(eqn: jex.JaxprEqn) -> Asked:
    """Makes the question that a policy would be asked about an equation."""
    return Asked(eqn.primitive, [v.aval for v in eqn.invars], eqn.params)


# The variables of programs


def all_eqns(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Yields the equations of a program, each before those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from eqns_inside(eqn)


def eqns_inside(eqn: Operation) -> Iterator[jex.JaxprEqn]:
    """Yields the equations of the programs that an operation runs, at any depth."""
    for jaxpr in bodies(eqn):
        yield from all_eqns(jaxpr)


def inputs_of(jaxpr: jex.Jaxpr) -> list[Any]:
    """Lists the variables that a jaxpr is given: constants, then arguments."""
    return [*jaxpr.constvars, *jaxpr.invars]


def reads(eqn: jex.JaxprEqn) -> list[Any]:
    """Lists the variables that an equation reads."""
    return without_literals(eqn.invars)


def without_literals(atoms: Iterable[Any]) -> list[Any]:
    """Drops the literals from variables and literals."""
    return [v for v in atoms if not isinstance(v, jex.Literal)]


def values_of(env: Mapping[Any, Any], variables: Sequence[Any]) -> list[Any]:
    """Looks up the values of variables; literals hold their own."""
    return [v.val if isinstance(v, jex.Literal) else env[v] for v in variables]


def notes_of(notes: Mapping[Any, T], atoms: Sequence[Any]) -> list[T | None]:
    """Looks up the notes on variables; None for the others, and for literals."""
    return [None if isinstance(v, jex.Literal) else notes.get(v) for v in atoms]


def free_and_defined(eqns: Sequence[jex.JaxprEqn]) -> tuple[list[Any], list[Any]]:
    """Lists (variables that equations read and do not define, variables that they define)."""
    defined = {v: None for eqn in eqns for v in eqn.outvars if not isinstance(v, jex.DropVar)}
    read = {v: None for eqn in eqns for v in reads(eqn)}
    return [v for v in read if v not in defined], list(defined)


def equations_for(
    jaxpr: jex.Jaxpr, wanted: Iterable[Any], is_known: Callable[[Any], bool]
) -> list[jex.JaxprEqn]:
    """Selects the equations that compute some variables from the known ones, in order."""
    missing = {v for v in without_literals(wanted) if not is_known(v)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if not missing.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            missing |= {v for v in reads(eqn) if not is_known(v)}
    return eqns[::-1]


def without_cotangent(jaxpr: jex.Jaxpr, differentiated: Sequence[bool]) -> set[Any]:
    """Finds the variables that no derivative of an output is a function of.

    `differentiated`: of each output, whether it may have a cotangent.
    """
    found = _with_cotangent(jaxpr, differentiated)
    return {v for eqn in jaxpr.eqns for v in eqn.outvars if v not in found}


def differentiated_carry(scan: jex.JaxprEqn, differentiated: Sequence[bool]) -> list[bool]:
    """Finds which of a scan's carry may have a cotangent after some iteration.

    `differentiated`: of each result of the scan, whether it may have one.
    """
    body, _ = body_of(scan)
    _, carry, _ = split_scan(scan, body.invars)
    results, found = list(differentiated), list[bool]()
    # What is carried has one also where the next iteration's results depend on it.
    while results[: len(carry)] != found:
        found = results[: len(carry)]
        inside = _with_cotangent(body, results)
        results[: len(carry)] = [was or v in inside for was, v in zip(found, carry, strict=True)]
    return found


def _with_cotangent(jaxpr: jex.Jaxpr, differentiated: Sequence[bool]) -> set[Any]:
    """Finds the variables that may have a cotangent, inputs among them."""
    outputs = zip(jaxpr.outvars, differentiated, strict=True)
    found = {v for v in without_literals(v for v, may in outputs if may) if _is_differentiable(v)}
    for eqn in reversed(jaxpr.eqns):
        results = [v in found for v in eqn.outvars]
        mutates = any(primitive_of(each).mutates for each in (eqn, *eqns_inside(eqn)))
        mutates = mutates and bool(eqn.effects)  # a kernel's own are no effect
        if (any(results) or mutates) and not primitive_of(eqn).zero_derivative:
            pairs = zip(eqn.invars, _differentiated_operands(eqn, results), strict=True)
            operands = without_literals(v for v, may in pairs if may)
            found |= {v for v in operands if _is_differentiable(v)}
    return found


def _differentiated_operands(eqn: jex.JaxprEqn, results: Sequence[bool]) -> list[bool]:
    """Finds which operands may have a cotangent, given which results do."""
    kind = primitive_of(eqn)
    if kind is primitives.SCAN and trips_of(eqn):  # without any trip the carry is passed on
        carry = differentiated_carry(eqn, results)
        results = [*carry, *results[len(carry) :]]
    elif kind not in (primitives.JIT, primitives.CHECKPOINT, primitives.SHARD_MAP, primitives.COND):
        return [True] * len(eqn.invars)  # as far as is known
    inside = [(body.invars, _with_cotangent(body, results)) for body in bodies(eqn)]
    of_bodies = [[v in found for v in invars] for invars, found in inside]
    index = [False] * (kind is primitives.COND)  # of the branch
    return [*index, *map(any, zip(*of_bodies, strict=True))]


def _is_differentiable(v: Any) -> bool:
    """Tells whether a variable is of a dtype that jax differentiates."""
    dtype = getattr(v.aval, "dtype", None)
    return dtype is None or bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))


def scopes_of(eqn: jex.JaxprEqn) -> str:
    """Reads the named scopes that an equation was traced in, which profiles show."""
    return str(eqn.source_info.name_stack)


def named_scope_of(eqn: jex.JaxprEqn) -> Any:
    """Makes a context of the named scopes that an equation was traced in."""
    names = scopes_of(eqn)
    return jax.named_scope(names) if names else nullcontext()


# The programs that operations run


def bodies(eqn: Operation) -> list[jex.Jaxpr]:
    """Lists the programs that an operation runs."""
    return list(jex.jaxprs_in_params(eqn.params))


def body_of(eqn: jex.JaxprEqn) -> tuple[jex.Jaxpr, Sequence[Any]]:
    """Finds the one program that a call or a scan runs, and its constants."""
    (inner,) = bodies(eqn)
    return inner, getattr(eqn.params.get("jaxpr"), "consts", ())


def is_transparent(eqn: jex.JaxprEqn) -> bool:
    """Tells whether an equation only runs the program inside: a `jit`, or a `jax.checkpoint`.

    A gather may be moved out of it.
    """
    for name in ("in_shardings", "out_shardings"):
        if any(isinstance(each, jax.sharding.Sharding) for each in eqn.params.get(name, ())):
            return False  # a `jit` of the user's that pins how its arrays are sharded
    return primitive_of(eqn) in (primitives.JIT, primitives.CHECKPOINT)


def is_branch(eqn: jex.JaxprEqn) -> bool:
    """Tells whether an equation is a `cond` by a value, and not by the platform."""
    return primitive_of(eqn) is primitives.COND and "branches_platforms" not in eqn.params


def split_scan(eqn: jex.JaxprEqn, values: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Splits a scan's operands, or anything in their order, into (constants, carry, slices)."""
    params = eqn.params
    if "ft_in" in params:  # since jax 0.12 a tree says which operand is which
        consts, carry, xs = map(list, params["ft_in"].update(values).unpack())
        carry_out = params["ft_out"].unpack()[0]
        assert len(list(carry_out)) == len(carry), "a scan returns its carry"
        return consts, carry, xs
    consts, carry, xs = _split(values, params["num_consts"], params["num_carry"])
    return consts, carry, xs


def while_parts(
    eqn: jex.JaxprEqn, operands: Sequence[T]
) -> tuple[tuple[jex.Jaxpr, list[T]], tuple[jex.Jaxpr, list[T]], list[T]]:
    """Splits a `while` and its operands: ((condition, constants), (body, constants), carry)."""
    params = eqn.params
    cond, body, carry = _split(operands, params["cond_nconsts"], params["body_nconsts"])
    return (params["cond_jaxpr"].jaxpr, cond), (params["body_jaxpr"].jaxpr, body), carry


def _split(values: Sequence[T], first: int, second: int) -> tuple[list[T], list[T], list[T]]:
    """Splits values in three: the first ones, the second ones, and all that are left."""
    end = first + second
    return list(values[:first]), list(values[first:end]), list(values[end:])


def trips_of(eqn: jex.JaxprEqn) -> int:
    """Counts the runs of a scan's body, or of a Pallas kernel; 1 where it is not known."""
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    trips: int = eqn.params.get("length", 1)
    return trips * prod(size for size in grid if isinstance(size, int))


# What operations were traced with


def _parameter(*names: str) -> Callable[[Operation], Any]:
    """Makes a function that reads a parameter of an operation: the first of `names`."""
    return lambda eqn: next((eqn.params[name] for name in names if name in eqn.params), None)


def _arguments(*names: str) -> Callable[[Operation], dict[str, Any]]:
    """Makes a function that reads the parameters of an operation with these names."""
    return lambda eqn: {name: eqn.params[name] for name in names}


checkpoint_policy = _arguments("policy")  # that `jax.checkpoint` was given
recomputes = _parameter("differentiated")  # whether a checkpoint runs in a backward pass
scan_arguments = _arguments("length", "reverse", "unroll")  # that `lax.scan` was given
shard_map_arguments = _arguments("mesh", "in_specs")  # `in_specs`: one for each argument
branches_of = _parameter("branches")  # of a `cond`, the jaxprs
function_name = _parameter("name")  # of the function that a call or a kernel was made of
ffi_target = _parameter("target_name")  # of a foreign function
dot_dimensions = _parameter("dimension_numbers")
out_sharding = _parameter("out_sharding")  # that the result of a `dot_general` was asked to have
summed_dims = _parameter("axes")  # of a sum
collective_axes = _parameter("axes", "axis_name")
collective_groups = _parameter("axis_index_groups")  # of devices along the axes
scattered_dim = _parameter("scatter_dimension")  # of a reduce-scatter; None for others
own_comm = _parameter("comm")  # of the package's own primitive
own_operand = _parameter("operand")
own_batched = _parameter("batched")  # leading dims of its operands that a `vmap` added


def kernel_name(eqn: jex.JaxprEqn) -> str:
    """Names a Pallas kernel: by the name that it was given, or by that of its function."""
    (body,) = bodies(eqn)
    return str(function_name(eqn) or body.debug_info.func_src_info.partition(" at ")[0])


def barriers_of(eqn: jex.JaxprEqn) -> tuple[bool, ...]:
    """Tells of each operand of a checkpoint whether a barrier guards what it computes again."""
    guards = eqn.params["prevent_cse"]  # since jax 0.10 perhaps one for each operand
    return guards if isinstance(guards, tuple) else (guards,) * len(eqn.invars)


def bind(eqn: jex.JaxprEqn, *operands: Any) -> list[Any]:
    """Runs an equation's primitive on other operands, and lists its results.

    Not for primitives of jax that run a program, such as `scan`.
    """
    results = eqn.primitive.bind(*operands, **eqn.params)
    return results if eqn.primitive.multiple_results else [results]


def parameter_text(eqn: Operation) -> str:
    """Formats the parameters of an operation as text, to tell it from others."""
    return str(eqn.params)


def is_own(eqn: jex.JaxprEqn, primitive: jex.Primitive) -> bool:
    """Tells whether an equation is of this one of the package's own primitives."""
    return eqn.primitive is primitive


def array_name(eqn: Operation) -> str | None:
    """Reads the name that `checkpoint_name` gives to an array; None for other operations."""
    return str(function_name(eqn)) if primitive_of(eqn) is primitives.NAME else None


def keeps_rows(eqn: jex.JaxprEqn, by_row: Sequence[Any]) -> bool:
    """Tells whether row i of each result depends on row i of the operands `by_row` alone.

    What equations do is known for certain primitives; others count as mixing rows.
    """
    primitive, params = primitive_of(eqn), eqn.params
    if primitive.elementwise or primitive is primitives.CONSTRAINT:
        shape = shape_of(eqn.outvars[0])
        # A bitcast to smaller elements makes a dim, which may have the size of the first.
        is_kept = any(shape_of(v) == shape for v in eqn.invars)
        return is_kept and all(shape_of(v) == shape for v in by_row)
    if primitive.reduces:
        return 0 not in params["axes"]
    if primitive is primitives.RESHAPE:
        return bool(by_row) and params["dimensions"] is None
    if primitive is primitives.BROADCAST:
        return not by_row or bool(params["broadcast_dimensions"][:1] == (0,))
    return primitive is primitives.IOTA and bool(params["dimension"] != 0)


def with_rows(eqn: jex.JaxprEqn, n: int, rows: int) -> jex.JaxprEqn:
    """Changes an equation whose results are [n, ...] to one whose results are [rows, ...]."""
    sizes = {name: eqn.params[name] for name in ("shape", "new_sizes") if name in eqn.params}
    changed = {name: (rows, *each[1:]) for name, each in sizes.items() if each[:1] == (n,)}
    return eqn.replace(params=eqn.params | changed) if changed else eqn


def shape_of(variable: Any) -> tuple[int, ...]:
    """Returns the shape of a variable of a jaxpr."""
    return tuple(variable.aval.shape)
