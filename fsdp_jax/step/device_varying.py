"""Which values of a traced `shard_map` program differ between devices, and what must not depend on
them.

A value *varies* along a mesh axis if devices along it may hold different values (JAX calls these
axes `vma`). Two things go wrong without a message where a value varies: a branch or loop that it
decides, with a collective inside (some devices wait for others that never come), and model state
that is declared the same on all devices. Both are refused.

Why not `shard_map(check_vma=True)`: it refuses models whose own scans start from `jnp.zeros`, and
it does not look at branches. An operation that this module does not know is taken to vary wherever
any of its operands does.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax.extend.core as jex

from fsdp_jax.compat import scan_arguments
from fsdp_jax.errors import message
from fsdp_jax.sharding.mesh import axes_of

Axes = frozenset[str]
NONE: Axes = frozenset()
_IGNORED: ContextVar[Axes] = ContextVar("fsdp_jax_axes_of_one_device", default=NONE)

SAME_AFTER = {"all_gather", "psum", "psum_invariant", "pmax", "pmin", "all_gather_invariant"}
"""Collectives whose result is the same along their axes."""

DIFFERENT_AFTER = {
    "reduce_scatter",
    "psum_scatter",
    "ppermute",
    "all_to_all",
    "ragged_all_to_all",
    "axis_index",
}
"""Collectives whose result varies along their axes."""

MUTATING = {"new_ref", "ref", "get", "swap", "addupdate", "freeze"}
"""Operations on mutable arrays."""


def varying_outputs(jaxpr: jex.Jaxpr, varying: Sequence[Axes]) -> list[Axes]:
    """The axes along which each output varies, given those of each input (constants come first).

    Raises:
        ValueError: a branch or loop that varies has a collective inside.

    """
    env: dict[Any, Axes] = dict(zip([*jaxpr.constvars, *jaxpr.invars], varying, strict=True))

    def read(variable: Any) -> Axes:
        return NONE if isinstance(variable, jex.Literal) else env[variable]

    for eqn in jaxpr.eqns:
        outputs = _outputs_of(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _outputs_of(eqn: jex.JaxprEqn, varying: list[Axes]) -> list[Axes]:
    name, either = eqn.primitive.name, NONE.union(*varying)
    if name in MUTATING:
        what, fix = (
            "a mutable array (jax.new_ref) cannot be followed from device to device",
            "leave local_batch out",
        )
        raise ValueError(message(what, where=str(eqn.source_info.name_stack) or name, fix=fix))
    if name in SAME_AFTER and eqn.params.get("axis_index_groups") is None:
        return [axes - collective_axes(eqn) for axes in varying] or [NONE]
    if name in SAME_AFTER | DIFFERENT_AFTER:
        return [either | collective_axes(eqn) for _ in eqn.outvars]
    if name == "cond":
        return _cond(eqn, varying)
    if name == "while":
        return _while(eqn, varying)
    if name == "scan":
        return _scan(eqn, varying)
    inner = list(jex.jaxprs_in_params(eqn.params))
    if len(inner) == 1 and len(inner[0].invars) == len(varying):  # jit, checkpoint and other calls
        consts = [NONE for _ in inner[0].constvars]
        return varying_outputs(inner[0], [*consts, *varying])
    return [either for _ in eqn.outvars]


def _cond(eqn: jex.JaxprEqn, varying: list[Axes]) -> list[Axes]:
    decides, operands = varying[0], varying[1:]
    _refuse_collectives(eqn, decides, eqn.params["branches"], "branch")
    outputs = [decides for _ in eqn.outvars]
    for branch in eqn.params["branches"]:
        found = varying_outputs(branch.jaxpr, [*(NONE for _ in branch.consts), *operands])
        outputs = [a | b for a, b in zip(outputs, found, strict=True)]
    return outputs


def _while(eqn: jex.JaxprEqn, varying: list[Axes]) -> list[Axes]:
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_cond, of_body, carry = (
        varying[:n_cond],
        varying[n_cond : n_cond + n_body],
        varying[n_cond + n_body :],
    )

    def turn(carry: list[Axes]) -> list[Axes]:
        (decides,) = varying_outputs(cond.jaxpr, [*(NONE for _ in cond.consts), *of_cond, *carry])
        _refuse_collectives(eqn, decides, [cond, body], "loop")
        found = varying_outputs(body.jaxpr, [*(NONE for _ in body.consts), *of_body, *carry])
        return [axes | decides for axes in found]

    return _fixed_point(turn, carry)


def _scan(eqn: jex.JaxprEqn, varying: list[Axes]) -> list[Axes]:
    body = eqn.params["jaxpr"]
    consts, carry, xs = scan_arguments(eqn.params, varying)

    def turn(carry: list[Axes]) -> list[Axes]:
        return varying_outputs(body.jaxpr, [*(NONE for _ in body.consts), *consts, *carry, *xs])

    carry = _fixed_point(lambda carry: turn(carry)[: len(carry)], carry)
    return [*carry, *turn(carry)[len(carry) :]]


def _fixed_point(turn: Callable[[list[Axes]], list[Axes]], carry: list[Axes]) -> list[Axes]:
    """What a loop carries, after as many turns as change anything: at most one for each axis and
    value.
    """
    while True:
        after = [a | b for a, b in zip(carry, turn(carry), strict=True)]
        if after == carry:
            return carry
        carry = after


def collective_axes(eqn: jex.JaxprEqn) -> Axes:
    """The mesh axes that a collective goes along; empty for any other operation."""
    if eqn.primitive.name not in SAME_AFTER | DIFFERENT_AFTER:
        return NONE
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    return frozenset(axis for axis in axes_of(axes) if isinstance(axis, str)) - _IGNORED.get()


def _collectives(jaxpr: jex.Jaxpr) -> Iterable[jex.JaxprEqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "axis_index" and collective_axes(eqn):
            yield eqn
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from _collectives(inner)


def _refuse_collectives(
    eqn: jex.JaxprEqn, decides: Axes, programs: Sequence[Any], kind: str
) -> None:
    """Raises ValueError for a collective in what devices may run differently."""
    inside = (each for program in programs for each in _collectives(program.jaxpr))
    waited = (
        next((each for each in inside if collective_axes(each) & decides), None)
        if decides
        else None
    )
    if waited is not None:
        raise ValueError(
            message(
                f"devices may take this {kind} differently, and it has a collective inside",
                where=str(waited.source_info.name_stack)
                or f"{waited.primitive.name} in a `{eqn.primitive.name}`",
                expected="a condition that is the same on every device: not computed from the batch, nor from "
                "random numbers, which are each device's own",
                fix="leave local_batch out; or compute both sides and select with jnp.where",
            )
        )


@contextmanager
def _ignoring(axes: Axes) -> Iterator[None]:
    token = _IGNORED.set(axes)
    try:
        yield
    finally:
        _IGNORED.reset(token)


def check_local_program(program: jex.Jaxpr, state: Sequence[str]) -> None:
    """Holds the `shard_map` of a step with local batches to what all devices must agree on.

    Args:
        program: of the step, with one `shard_map` in it whose last outputs are the model's state.
        state: their paths.

    Raises:
        ValueError: the new state is computed from a device's own rows, or devices may disagree on
            what to run.

    """
    eqn = _shard_maps(program)[0]  # an optimizer may have others, after it
    specs = eqn.params["in_specs"]
    inputs = [frozenset(axis for entry in spec for axis in axes_of(entry)) for spec in specs]
    # Along an axis of one device nothing varies; the step names such axes too.
    single = frozenset(axis for axis, size in eqn.params["mesh"].shape.items() if size == 1)
    with _ignoring(single):
        outputs = varying_outputs(eqn.params["jaxpr"], [axes - single for axes in inputs])
    for path, axes in zip(state, outputs[len(outputs) - len(state) :], strict=True):
        if axes:
            raise ValueError(
                message(
                    "the model's state is computed from the batch, of which a device sees its own rows alone",
                    where=path,
                    expected="state that is the same on every device",
                    got=f"a value that differs along {' and '.join(sorted(axes))}",
                    fix="leave local_batch out: without it, batch statistics are those of the global batch",
                )
            )


def _shard_maps(jaxpr: jex.Jaxpr) -> list[jex.JaxprEqn]:
    """The outermost ones: kernels may have others inside."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            found.append(eqn)
        else:
            inner: Iterable[jex.Jaxpr] = jex.jaxprs_in_params(eqn.params)
            found += [each for part in inner for each in _shard_maps(part)]
    return found
