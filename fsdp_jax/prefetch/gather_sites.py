"""Finds where a traced program gathers parameters.

Gathers are found by the name that `units.collectives.gather` leaves in the program.
"""

from typing import Any

import jax.extend.core as jex

from fsdp_jax.jaxprs import eqns_inside, inner_program, inputs_of, is_transparent, scan_arguments
from fsdp_jax.units.collectives import site_of


def paths_in(eqn: jex.JaxprEqn) -> list[str]:
    """Returns the parameters that are gathered somewhere inside, in the order of the program."""
    paths = map(site_of, (eqn, *eqns_inside(eqn)))
    return list(dict.fromkeys(path for path in paths if path))


def unit_sites(eqn: jex.JaxprEqn) -> dict[str, tuple[int, ...]]:
    """Returns {path: numbers of the arguments that a unit gathers it from}; empty for no unit."""
    if site_of(eqn) or not is_transparent(eqn):
        return {}
    inner, _ = inner_program(eqn)
    return _movable_gathers(inner, len(inputs_of(inner)) - len(eqn.invars))


def scanned_sites(eqn: jex.JaxprEqn) -> dict[str, tuple[int, ...]]:
    """Returns {path: numbers of the sliced arguments that a scan over layers gathers it from}.

    Empty for all else: an iteration over layers gathers from its own slices alone.
    """
    if eqn.primitive.name != "scan" or eqn.params["length"] < 2:
        return {}
    body, _ = inner_program(eqn)
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
                inner, _ = inner_program(eqn)
                arguments = inputs_of(inner)[-len(sources) :]
                pairs = zip(arguments, sources, strict=True)
                if not visit(inner, {v: number for v, number in pairs if number is not None}):
                    return False
            else:
                return False
        return True

    inputs = inputs_of(jaxpr)[first:]
    return sites if visit(jaxpr, {v: number for number, v in enumerate(inputs)}) else {}
