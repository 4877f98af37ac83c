"""Reads traced programs (jaxprs), and evaluates them again with parts replaced."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, TypeVar

import jax
import jax.extend.core as jex
from jax import lax

T = TypeVar("T")
CALLS = ("jit", "pjit", "closed_call", "core_call")
# What makes of an array the same array, rearranged or cast: its first operand.
REARRANGING = {
    *("reshape", "transpose", "squeeze", "broadcast_in_dim", "rev", "copy", "copy_p"),
    *("slice", "dynamic_slice", "split", "convert_element_type", "reduce_precision"),
    *("sharding_constraint", "layout_constraint", "name"),
}
Evaluate = Callable[[jex.Jaxpr, list[Any]], list[Any]]
"""(jaxpr, its constants and arguments) -> its outputs"""


def all_eqns(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Yields the equations of a program, each before those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from eqns_inside(eqn)


def eqns_inside(eqn: jex.JaxprEqn) -> Iterator[jex.JaxprEqn]:
    """Yields the equations of the programs that an equation runs, at any depth."""
    for jaxpr in jex.jaxprs_in_params(eqn.params):
        yield from all_eqns(jaxpr)


def inputs_of(jaxpr: jex.Jaxpr) -> list[Any]:
    """Returns the variables that a jaxpr is given: constants, then arguments."""
    return [*jaxpr.constvars, *jaxpr.invars]


def reads(eqn: jex.JaxprEqn) -> list[Any]:
    """Returns the variables that an equation reads."""
    return without_literals(eqn.invars)


def without_literals(atoms: Sequence[Any]) -> list[Any]:
    """Returns the variables among variables and literals."""
    return [v for v in atoms if not isinstance(v, jex.Literal)]


def free_and_defined(eqns: Sequence[jex.JaxprEqn]) -> tuple[list[Any], list[Any]]:
    """Returns (variables that equations read and do not define, variables that they define)."""
    defined = {v: None for eqn in eqns for v in eqn.outvars if not isinstance(v, jex.DropVar)}
    read = {v: None for eqn in eqns for v in reads(eqn)}
    return [v for v in read if v not in defined], list(defined)


def values_of(env: Mapping[Any, Any], variables: Sequence[Any]) -> list[Any]:
    """Returns the values of variables and literals."""
    return [v.val if isinstance(v, jex.Literal) else env[v] for v in variables]


def evaluate_unchanged(
    jaxpr: jex.Jaxpr, eqns: Sequence[jex.JaxprEqn], env: MutableMapping[Any, Any]
) -> None:
    """Evaluates some equations of a jaxpr as they were traced, and adds their results to `env`.

    `env`: {variable: value}. The names and source lines of the equations stay.
    """
    invars, outvars = free_and_defined(eqns)
    debug = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    part = jaxpr.replace(
        constvars=[], invars=invars, outvars=outvars, eqns=list(eqns), debug_info=debug
    )
    values = jex.jaxpr_as_fun(jex.ClosedJaxpr(part, ()))(*values_of(env, invars))
    env.update(zip(outvars, values, strict=True))


def evaluate_calls(
    jaxpr: jex.Jaxpr,
    args: Sequence[Any],
    is_call: Callable[[jex.JaxprEqn], bool],
    call: Callable[[jex.JaxprEqn, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Returns the outputs of a jaxpr whose calls are replaced, and the other equations are not.

    Args:
        jaxpr: to evaluate.
        args: its constants and arguments.
        is_call: of an equation; asked in order, each when those before the last call have run.
        call: (equation, values that it reads) -> its results.

    """
    env = dict(zip(inputs_of(jaxpr), args, strict=True))
    for replaced, eqns in groupby(jaxpr.eqns, key=is_call):
        if not replaced:
            evaluate_unchanged(jaxpr, list(eqns), env)
            continue
        for eqn in eqns:
            with named_scope_of(eqn):
                values = call(eqn, values_of(env, eqn.invars))
            env.update(zip(eqn.outvars, values, strict=True))
    return values_of(env, jaxpr.outvars)


def inner_program(eqn: jex.JaxprEqn) -> tuple[jex.Jaxpr, Sequence[Any]]:
    """Returns the one jaxpr that a call or a scan runs, and its constants."""
    (inner,) = jex.jaxprs_in_params(eqn.params)
    return inner, getattr(eqn.params.get("jaxpr"), "consts", ())


def named_scope_of(eqn: jex.JaxprEqn) -> Any:
    """Returns a context of the named scopes that `eqn` was traced in, which profiles show."""
    names = str(eqn.source_info.name_stack)
    return jax.named_scope(names) if names else nullcontext()


def scan_arguments(
    params: Mapping[str, Any], values: Sequence[T]
) -> tuple[list[T], list[T], list[T]]:
    """Returns (constants, carry, slices) of a `scan`'s operands, or of anything in their order."""
    if "ft_in" in params:  # since jax 0.12 a tree says which operand is which
        consts, carry, xs = map(list, params["ft_in"].update(values).unpack())
        carry_out = params["ft_out"].unpack()[0]
        assert len(list(carry_out)) == len(carry), "a scan returns its carry"
        return consts, carry, xs
    end_consts = params["num_consts"]
    end_carry = end_consts + params["num_carry"]
    return list(values[:end_consts]), list(values[end_consts:end_carry]), list(values[end_carry:])


def reevaluated(fn: Callable[..., Any], evaluate: Evaluate) -> Callable[..., Any]:
    """Returns `fn` as a function that is traced to a jaxpr, and evaluated by `evaluate`.

    `fn`: a pure function of pytrees of arrays.
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        outputs = evaluate(closed.jaxpr, [*closed.consts, *jax.tree.leaves(args)])
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return run


def call_as_checkpoint(eqn: jex.JaxprEqn, call: Callable[..., list[Any]], *args: Any) -> list[Any]:
    """Returns `call(*args)`, under `jax.checkpoint` with the settings of `eqn` if that is one."""
    if not is_checkpoint(eqn):
        return call(*args)
    settings = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    checkpointed: list[Any] = jax.checkpoint(call, **settings)(*args)
    return checkpointed


def reevaluate_scan(eqn: jex.JaxprEqn, args: Sequence[Any], evaluate: Evaluate) -> list[Any]:
    """Returns the results of the scan `eqn` given its operands; `evaluate` evaluates the body."""
    jaxpr, closed_over = inner_program(eqn)
    consts, carry, xs = scan_arguments(eqn.params, args)

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = evaluate(jaxpr, [*closed_over, *consts, *carry, *x])
        return outputs[: len(carry)], outputs[len(carry) :]

    settings = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(body, carry, xs, **settings)
    return [*carry, *ys]


def without_cotangent(jaxpr: jex.Jaxpr, differentiated: Sequence[bool]) -> set[Any]:
    """Returns the variables that no differentiated output of a jaxpr depends on.

    `differentiated`: of each output, whether it may have a cotangent.
    """
    outputs = zip(jaxpr.outvars, differentiated, strict=True)
    needed = set(without_literals([v for v, is_needed in outputs if is_needed]))
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(reads(eqn))
    return {v for eqn in jaxpr.eqns for v in eqn.outvars if v not in needed}


def is_checkpoint(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation is a `jax.checkpoint`, whatever this release of jax calls it."""
    return "prevent_cse" in eqn.params and "policy" in eqn.params


def is_transparent(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation only runs the program inside: a call, or a `jax.checkpoint`.

    A gather may be moved out of it.
    """
    for name in ("in_shardings", "out_shardings"):
        if any(isinstance(each, jax.sharding.Sharding) for each in eqn.params.get(name, ())):
            return False  # a `jit` of the user's that pins how its arrays are sharded
    return eqn.primitive.name in CALLS or is_checkpoint(eqn)
