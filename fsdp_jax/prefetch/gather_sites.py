"""Evaluates parts of a traced program, and finds where it gathers parameters.

Gathers are found by the name that `units.collectives.gather` leaves in the program.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import jax
import jax.extend.core as jex

from fsdp_jax.compat import scan_arguments
from fsdp_jax.units.collectives import site_of

CALLS = ("jit", "pjit", "closed_call", "core_call")


def inner_jaxprs(eqn: jex.JaxprEqn) -> list[jex.Jaxpr]:
    """Returns the jaxprs that an equation runs."""
    return list(jex.jaxprs_in_params(eqn.params))


def all_eqns(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Yields the equations of a program, each before those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from all_eqns(inner)


def inputs_of(jaxpr: jex.Jaxpr) -> list[Any]:
    """Returns the variables that a jaxpr is given: constants, then arguments."""
    return [*jaxpr.constvars, *jaxpr.invars]


def reads(eqn: jex.JaxprEqn) -> list[Any]:
    """Returns the variables that an equation reads."""
    return without_literals(eqn.invars)


def without_literals(atoms: Sequence[Any]) -> list[Any]:
    """Returns the variables among variables and literals."""
    return [v for v in atoms if not isinstance(v, jex.Literal)]


def ends_of(eqns: Sequence[jex.JaxprEqn]) -> tuple[list[Any], list[Any]]:
    """Returns (variables read but not defined by these equations, variables defined)."""
    defined = {v: None for eqn in eqns for v in eqn.outvars if not isinstance(v, jex.DropVar)}
    read = {v: None for eqn in eqns for v in reads(eqn)}
    return [v for v in read if v not in defined], list(defined)


def values_of(env: Mapping[Any, Any], variables: Sequence[Any]) -> list[Any]:
    """Returns the values of variables and literals."""
    return [v.val if isinstance(v, jex.Literal) else env[v] for v in variables]


def evaluate_unchanged(
    jaxpr: jex.Jaxpr, eqns: Sequence[jex.JaxprEqn], env: MutableMapping[Any, Any]
) -> None:
    """Evaluates equations with the names and source lines that they were traced with."""
    invars, outvars = ends_of(eqns)
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
            with scope_of(eqn):
                values = call(eqn, values_of(env, eqn.invars))
            env.update(zip(eqn.outvars, values, strict=True))
    return values_of(env, jaxpr.outvars)


def inner_program(eqn: jex.JaxprEqn) -> tuple[jex.Jaxpr, Sequence[Any]]:
    """Returns the one jaxpr that a call runs, and its constants."""
    (inner,) = inner_jaxprs(eqn)
    return inner, getattr(eqn.params.get("jaxpr"), "consts", ())


def scope_of(eqn: jex.JaxprEqn) -> Any:
    """Returns a context with the scopes of the user's model around `eqn`, which profiles show."""
    names = str(eqn.source_info.name_stack)
    return jax.named_scope(names) if names else nullcontext()


def without_cotangent(jaxpr: jex.Jaxpr, differentiated: Sequence[bool]) -> set[Any]:
    """Returns the variables that no differentiated output of a jaxpr depends on."""
    outputs = zip(jaxpr.outvars, differentiated, strict=True)
    needed = set(without_literals([v for v, is_needed in outputs if is_needed]))
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(reads(eqn))
    return {v for eqn in jaxpr.eqns for v in eqn.outvars if v not in needed}


def paths_in(eqn: jex.JaxprEqn) -> list[str]:
    """Returns the parameters that are gathered somewhere inside, in the order of the program."""
    path = site_of(eqn)
    if path:
        return [path]
    inside = [path for jaxpr in inner_jaxprs(eqn) for each in jaxpr.eqns for path in paths_in(each)]
    return list(dict.fromkeys(inside))


def is_checkpoint(eqn: jex.JaxprEqn) -> bool:
    """Returns whether it is a `jax.checkpoint`, whatever this release of jax calls it."""
    return "prevent_cse" in eqn.params and "policy" in eqn.params


def is_transparent(eqn: jex.JaxprEqn) -> bool:
    """Returns whether it only runs the program inside, so that a gather may be moved out of it."""
    for name in ("in_shardings", "out_shardings"):
        if any(isinstance(each, jax.sharding.Sharding) for each in eqn.params.get(name, ())):
            return False  # a `jit` of the user's that pins how its arrays are sharded
    return eqn.primitive.name in CALLS or is_checkpoint(eqn)


def unit_sites(eqn: jex.JaxprEqn) -> dict[str, tuple[int, ...]]:
    """Returns {path: numbers of the arguments that a unit gathers it from}; empty for no unit."""
    if site_of(eqn) or not is_transparent(eqn):
        return {}
    (inner,) = inner_jaxprs(eqn)
    return _movable_gathers(inner, len(inputs_of(inner)) - len(eqn.invars))


def scanned_sites(eqn: jex.JaxprEqn) -> dict[str, tuple[int, ...]]:
    """Returns {path: numbers of the sliced arguments that a scan over layers gathers it from}.

    Empty for all else: an iteration over layers gathers from its own slices alone.
    """
    if eqn.primitive.name != "scan" or eqn.params["length"] < 2:
        return {}
    body = eqn.params["jaxpr"].jaxpr
    consts, carry, _ = scan_arguments(eqn.params, eqn.invars)
    return _movable_gathers(body, len(body.constvars) + len(consts) + len(carry))


def _movable_gathers(jaxpr: jex.Jaxpr, first: int) -> dict[str, tuple[int, ...]]:
    """Returns {path: numbers of the inputs that it is gathered from, counted from `first`}.

    Empty where some gather cannot be moved out: it is inside control flow, reads what the program
    computes or earlier inputs, or gathers the same parameter from two inputs.
    """
    sites: dict[str, tuple[int, ...]] = {}

    def visit(jaxpr: jex.Jaxpr, numbers: dict[Any, int]) -> bool:
        for eqn in jaxpr.eqns:
            if not paths_in(eqn):
                continue
            sources = [None if isinstance(v, jex.Literal) else numbers.get(v) for v in eqn.invars]
            path = site_of(eqn)
            if path:
                known = tuple(number for number in sources if number is not None)
                if len(known) < len(sources) or sites.setdefault(path, known) != known:
                    return False
            elif is_transparent(eqn):
                (inner,) = inner_jaxprs(eqn)
                arguments = inputs_of(inner)[-len(sources) :]
                pairs = zip(arguments, sources, strict=True)
                if not visit(inner, {v: number for v, number in pairs if number is not None}):
                    return False
            else:
                return False
        return True

    inputs = inputs_of(jaxpr)[first:]
    return sites if visit(jaxpr, {v: number for number, v in enumerate(inputs)}) else {}
