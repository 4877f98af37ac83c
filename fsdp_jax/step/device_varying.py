"""Finds the values of a traced `shard_map` program that differ between devices.

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
    """Returns the axes along which each output varies, given those of each input, constants first.

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


def _varying_outputs(closed: jex.ClosedJaxpr, varying: Sequence[Axes]) -> list[Axes]:
    """As `varying_outputs`; a closed program's constants do not vary."""
    return varying_outputs(closed.jaxpr, [*(NONE for _ in closed.consts), *varying])


def _outputs_of(eqn: jex.JaxprEqn, varying: list[Axes]) -> list[Axes]:
    name = eqn.primitive.name
    any_operand = NONE.union(*varying)
    if name in MUTATING:
        what = "a mutable array (jax.new_ref) cannot be followed from device to device"
        where = str(eqn.source_info.name_stack) or name
        raise ValueError(message(what, where=where, fix="leave local_batch out"))
    if name in SAME_AFTER and eqn.params.get("axis_index_groups") is None:
        return [axes - collective_axes(eqn) for axes in varying] or [NONE]
    if name in SAME_AFTER | DIFFERENT_AFTER:
        return [any_operand | collective_axes(eqn) for _ in eqn.outvars]
    if name == "cond":
        return _cond(eqn, varying)
    if name == "while":
        return _while(eqn, varying)
    if name == "scan":
        return _scan(eqn, varying)
    inner = list(jex.jaxprs_in_params(eqn.params))
    if len(inner) == 1 and len(inner[0].invars) == len(varying):  # jit, checkpoint and other calls
        return varying_outputs(inner[0], [*(NONE for _ in inner[0].constvars), *varying])
    return [any_operand for _ in eqn.outvars]


def _cond(eqn: jex.JaxprEqn, varying: list[Axes]) -> list[Axes]:
    condition, operands = varying[0], varying[1:]
    _refuse_collectives(eqn, condition, eqn.params["branches"], "branch")
    outputs = [condition for _ in eqn.outvars]
    for branch in eqn.params["branches"]:
        of_branch = _varying_outputs(branch, operands)
        outputs = [a | b for a, b in zip(outputs, of_branch, strict=True)]
    return outputs


def _while(eqn: jex.JaxprEqn, varying: list[Axes]) -> list[Axes]:
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    body_start = eqn.params["cond_nconsts"]
    carry_start = body_start + eqn.params["body_nconsts"]
    cond_consts, body_consts = varying[:body_start], varying[body_start:carry_start]

    def iterate(carry: list[Axes]) -> list[Axes]:
        (condition,) = _varying_outputs(cond, [*cond_consts, *carry])
        _refuse_collectives(eqn, condition, [cond, body], "loop")
        return [axes | condition for axes in _varying_outputs(body, [*body_consts, *carry])]

    return _fixed_point(iterate, varying[carry_start:])


def _scan(eqn: jex.JaxprEqn, varying: list[Axes]) -> list[Axes]:
    consts, carry, xs = scan_arguments(eqn.params, varying)

    def iterate(carry: list[Axes]) -> list[Axes]:
        return _varying_outputs(eqn.params["jaxpr"], [*consts, *carry, *xs])

    carry = _fixed_point(lambda carry: iterate(carry)[: len(carry)], carry)
    return [*carry, *iterate(carry)[len(carry) :]]


def _fixed_point(iterate: Callable[[list[Axes]], list[Axes]], carry: list[Axes]) -> list[Axes]:
    """Returns the axes along which a loop's carry varies after any number of iterations.

    At most one iteration for each axis and value changes anything.
    """
    while True:
        after = [a | b for a, b in zip(carry, iterate(carry), strict=True)]
        if after == carry:
            return carry
        carry = after


def collective_axes(eqn: jex.JaxprEqn) -> Axes:
    """Returns the mesh axes of a collective; none for any other operation."""
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
    eqn: jex.JaxprEqn, condition: Axes, programs: Sequence[Any], kind: str
) -> None:
    """Raises ValueError for a collective along an axis on which devices may not all run it."""
    if not condition:
        return
    for program in programs:
        for collective in _collectives(program.jaxpr):
            if not collective_axes(collective) & condition:
                continue
            what = f"devices may take this {kind} differently, and it has a collective inside"
            where = str(collective.source_info.name_stack)
            where = where or f"{collective.primitive.name} in a `{eqn.primitive.name}`"
            expected = "a condition that is the same on every device: not computed from the batch, "
            expected += "nor from random numbers, which are each device's own"
            fix = "leave local_batch out; or compute both sides and select with jnp.where"
            raise ValueError(message(what, where=where, expected=expected, fix=fix))


@contextmanager
def _ignoring(axes: Axes) -> Iterator[None]:
    token = _IGNORED.set(axes)
    try:
        yield
    finally:
        _IGNORED.reset(token)


def check_local_program(program: jex.Jaxpr, state: Sequence[str]) -> None:
    """Checks what all devices must agree on in the `shard_map` of a step with local batches.

    Args:
        program: of the step, with one `shard_map` in it whose last outputs are the model's state.
        state: paths of the model's state.

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
            what = "the model's state is computed from the batch, "
            what += "of which a device sees its own rows alone"
            expected = "state that is the same on every device"
            got = f"a value that differs along {' and '.join(sorted(axes))}"
            fix = "leave local_batch out: without it, "
            fix += "batch statistics are those of the global batch"
            raise ValueError(message(what, where=path, expected=expected, got=got, fix=fix))


def _shard_maps(jaxpr: jex.Jaxpr) -> list[jex.JaxprEqn]:
    """Returns the outermost ones: kernels may have others inside."""
    shard_maps = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            shard_maps.append(eqn)
        else:
            inner: Iterable[jex.Jaxpr] = jex.jaxprs_in_params(eqn.params)
            shard_maps += [each for part in inner for each in _shard_maps(part)]
    return shard_maps
