"""Evaluates traced programs again, with parts replaced."""

from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax

from fsdp_jax.program.equations import (
    barriers_of,
    body_of,
    branches_of,
    checkpoint_policy,
    free_and_defined,
    inputs_of,
    is_branch,
    is_transparent,
    named_scope_of,
    notes_of,
    recomputes,
    scan_arguments,
    split_scan,
    values_of,
)
from fsdp_jax.program.primitives import CHECKPOINT, SCAN, primitive_of

Evaluate = Callable[[jex.Jaxpr, list[Any]], Sequence[Any]]
"""(jaxpr, its constants and arguments) -> its outputs"""


def reevaluated(fn: Callable[..., Any], evaluate: Evaluate) -> Callable[..., Any]:
    """Makes a function of `fn` that is traced to a jaxpr, and evaluated by `evaluate`.

    `fn`: a pure function of pytrees of arrays.
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        outputs = evaluate(closed.jaxpr, [*closed.consts, *jax.tree.leaves(args)])
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return run


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


def evaluate_replaced(
    jaxpr: jex.Jaxpr,
    args: Sequence[Any],
    is_replaced: Callable[[jex.JaxprEqn, list[Any]], bool],
    replacement: Callable[[jex.JaxprEqn, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Computes the outputs of a jaxpr some of whose equations are replaced.

    Args:
        jaxpr: to evaluate.
        args: its constants and arguments.
        is_replaced: of an equation, and the values that it reads; None for those that equations
            which are not replaced have yet to compute. Asked in order, each when the replaced ones
            before it have run.
        replacement: (equation, values that it reads) -> its results.

    """
    env = dict(zip(inputs_of(jaxpr), args, strict=True))

    def is_replaced_in_env(eqn: jex.JaxprEqn) -> bool:
        return is_replaced(eqn, notes_of(env, eqn.invars))

    for replaced, eqns in groupby(jaxpr.eqns, key=is_replaced_in_env):
        if not replaced:
            evaluate_unchanged(jaxpr, list(eqns), env)
            continue
        for eqn in eqns:
            with named_scope_of(eqn):
                values = replacement(eqn, values_of(env, eqn.invars))
            env.update(zip(eqn.outvars, values, strict=True))
    return values_of(env, jaxpr.outvars)


def evaluate_inlined(jaxpr: jex.Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Computes the outputs of a jaxpr with what its calls and checkpoints run in their place.

    What a checkpoint computes again stays behind its barrier, where it has one.
    """

    def run(eqn: jex.JaxprEqn, operands: list[Any]) -> list[Any]:
        inner, closed_over = body_of(eqn)
        if primitive_of(eqn) is CHECKPOINT and recomputes(eqn):
            # One barrier for all: what is computed again waits for the cotangents too.
            guards = barriers_of(eqn)
            behind = [x for x, guard in zip(operands, guards, strict=True) if guard]
            passed = iter(lax.optimization_barrier(behind))
            operands = [
                next(passed) if guard else x for x, guard in zip(operands, guards, strict=True)
            ]
        return evaluate_inlined(inner, [*closed_over, *operands])

    return evaluate_replaced(jaxpr, args, lambda eqn, _: is_transparent(eqn), run)


def evaluate_inside(
    eqn: jex.JaxprEqn, args: Sequence[Any], evaluate: Callable[..., Sequence[Any]], *more: Any
) -> list[Any]:
    """Evaluates a call, a `jax.checkpoint`, a scan or a branch, with `evaluate` for what it runs.

    Args:
        eqn: the equation.
        args: the values that it reads.
        evaluate: (jaxpr, its constants and arguments, *more) -> its outputs.
        more: arrays that a checkpoint is given besides.

    """
    # A branch: each of the programs is evaluated as its operands are.
    if is_branch(eqn):

        def run(branch: jex.ClosedJaxpr, *operands: Any) -> list[Any]:
            return list(evaluate(branch.jaxpr, [*branch.consts, *operands], *more))

        branches = [partial(run, branch) for branch in branches_of(eqn)]
        return list(lax.switch(args[0], branches, *args[1:]))
    inner, closed_over = body_of(eqn)
    if primitive_of(eqn) is SCAN:
        # A scan: the body is evaluated in a scan with the same settings.
        consts, carry, xs = split_scan(eqn, args)

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = list(evaluate(inner, [*closed_over, *consts, *carry, *x], *more))
            return outputs[: len(carry)], outputs[len(carry) :]

        carry, ys = lax.scan(step, carry, xs, **scan_arguments(eqn))
        return [*carry, *ys]

    # A call, or a checkpoint, which keeps its policy.
    def call(*values: Any) -> list[Any]:
        operands, more = values[: len(args)], values[len(args) :]
        return list(evaluate(inner, [*closed_over, *operands], *more))

    if primitive_of(eqn) is not CHECKPOINT:
        return call(*args, *more)
    guards = barriers_of(eqn)
    prevent_cse = all(guards) or (any(guards) and (*guards, *[True] * len(more)))
    return jax.checkpoint(call, prevent_cse=prevent_cse, **checkpoint_policy(eqn))(*args, *more)
