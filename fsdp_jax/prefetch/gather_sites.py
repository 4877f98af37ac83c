"""Where a traced program gathers parameters, by the name that `travel.gather` leaves there."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex

from fsdp_jax.units.collectives import site_of

INLINED = ("jit", "pjit", "closed_call", "core_call")


def inner_of(eqn: jex.JaxprEqn) -> list[jex.Jaxpr]:
    """The programs that it runs."""
    return list(jex.jaxprs_in_params(eqn.params))


def paths_in(eqn: jex.JaxprEqn) -> list[str]:
    """Of the parameters that are gathered somewhere inside, in the order of the program."""
    path = site_of(eqn)
    inside = [path for jaxpr in inner_of(eqn) for inner in jaxpr.eqns for path in paths_in(inner)]
    return [path] if path else list(dict.fromkeys(inside))


def liftable(jaxpr: jex.Jaxpr) -> dict[str, tuple[int, ...]] | None:
    """{path: numbers of the arguments that it is gathered from}; None where some gather cannot be
    lifted out.
    """
    found: dict[str, tuple[int, ...]] = {}

    def visit(jaxpr: jex.Jaxpr, numbers: dict[Any, int]) -> bool:
        for eqn in jaxpr.eqns:
            if not paths_in(eqn):
                continue
            at = [None if isinstance(v, jex.Literal) else numbers.get(v) for v in eqn.invars]
            path = site_of(eqn)
            if path:
                if None in at or found.setdefault(path, tuple(at)) != tuple(at):  # type: ignore[arg-type]
                    return False
            elif is_transparent(eqn):
                (inner,) = inner_of(eqn)
                names = [*inner.constvars, *inner.invars][-len(at) :]
                if not visit(
                    inner, {v: n for v, n in zip(names, at, strict=True) if n is not None}
                ):
                    return False
            else:
                return False
        return True

    return found if visit(jaxpr, {v: n for n, v in enumerate(arguments(jaxpr))}) else None


def arguments(jaxpr: jex.Jaxpr) -> list[Any]:
    """Variables that are given: constants first."""
    return [*jaxpr.constvars, *jaxpr.invars]


def is_transparent(eqn: jex.JaxprEqn) -> bool:
    """Whether it only runs the program inside, so that a gather may be lifted out of it."""
    pinned = [
        each for name in ("in_shardings", "out_shardings") for each in eqn.params.get(name, ())
    ]
    if any(isinstance(each, jax.sharding.Sharding) for each in pinned):
        return False  # a `jit` of the user's that says where its arrays lie
    return eqn.primitive.name in INLINED or is_checkpoint(eqn)


def is_checkpoint(eqn: jex.JaxprEqn) -> bool:
    """Whether it is a `jax.checkpoint`, by whatever name this release has for it."""
    return "prevent_cse" in eqn.params and "policy" in eqn.params


def ends_of(eqns: Sequence[jex.JaxprEqn]) -> tuple[list[Any], list[Any]]:
    """(variables that come from before, variables that are made)."""
    made = {v: None for eqn in eqns for v in eqn.outvars if not isinstance(v, jex.DropVar)}
    used = {v: None for eqn in eqns for v in eqn.invars if not isinstance(v, jex.Literal)}
    return [v for v in used if v not in made], list(made)


def sites_of(unit: jex.JaxprEqn) -> dict[str, tuple[int, ...]]:
    """{path: numbers of the unit's arguments that it is gathered from}."""
    (inner,) = inner_of(unit)
    offset = len(arguments(inner)) - len(unit.invars)
    return {path: tuple(n - offset for n in at) for path, at in (liftable(inner) or {}).items()}
