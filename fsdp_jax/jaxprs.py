"""Reads traced programs (jaxprs), and evaluates them again with parts replaced."""

from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, TypeVar

import jax
import jax.extend.core as jex
from jax import lax

T = TypeVar("T")
Labels = frozenset[str]
NONE: Labels = frozenset()
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


def equations_for(
    jaxpr: jex.Jaxpr, wanted: Sequence[Any], known: Container[Any]
) -> list[jex.JaxprEqn]:
    """Returns the equations that compute some variables from the known ones, in order."""
    missing = {v for v in without_literals(wanted) if v not in known}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if not missing.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            missing |= {v for v in reads(eqn) if v not in known}
    return eqns[::-1]


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


class DataFlow:
    """Follows labels through a program: a value has those of all that it is computed from.

    What a branch or a loop computes also has the labels of its condition. Subclasses say which
    operations are different.
    """

    def outputs(self, jaxpr: jex.Jaxpr, inputs: Sequence[Labels]) -> list[Labels]:
        """Returns the labels of each output, given those of each argument."""
        env: dict[Any, Labels] = dict.fromkeys(jaxpr.constvars, NONE)
        env |= zip(jaxpr.invars, inputs, strict=True)

        def read(variable: Any) -> Labels:
            return NONE if isinstance(variable, jex.Literal) else env[variable]

        for eqn in jaxpr.eqns:
            results = self.results(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def results(self, eqn: jex.JaxprEqn, operands: list[Labels]) -> list[Labels]:
        """Returns the labels of each result of an equation, given those of each operand.

        An operation that is not known here has those of all operands.
        """
        control_flow = {"cond": self._cond, "while": self._while, "scan": self._scan}
        if eqn.primitive.name in control_flow:
            return control_flow[eqn.primitive.name](eqn, operands)
        inner = list(jex.jaxprs_in_params(eqn.params))
        if len(inner) == 1 and len(inner[0].invars) == len(
            operands
        ):  # jit, checkpoint, other calls
            return self.outputs(inner[0], operands)
        return [NONE.union(*operands) for _ in eqn.outvars]

    def check_condition(
        self, eqn: jex.JaxprEqn, condition: Labels, programs: Sequence[jex.Jaxpr], kind: str
    ) -> None:
        """Checks the labels of a condition, by which `programs` run; `kind`: "branch" or "loop"."""

    def _cond(self, eqn: jex.JaxprEqn, operands: list[Labels]) -> list[Labels]:
        """Returns the labels of each result of a `cond`: of any branch, and of the condition."""
        condition, operands = operands[0], operands[1:]
        branches = [branch.jaxpr for branch in eqn.params["branches"]]
        self.check_condition(eqn, condition, branches, "branch")
        of_branches = [self.outputs(branch, operands) for branch in branches]
        return [condition.union(*each) for each in zip(*of_branches, strict=True)]

    def _while(self, eqn: jex.JaxprEqn, operands: list[Labels]) -> list[Labels]:
        """Returns the labels of each carry of a `while` at its end, also those of its condition."""
        cond, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        body_start = eqn.params["cond_nconsts"]
        carry_start = body_start + eqn.params["body_nconsts"]
        cond_consts, body_consts = operands[:body_start], operands[body_start:carry_start]

        def iterate(carry: list[Labels]) -> list[Labels]:
            (condition,) = self.outputs(cond, [*cond_consts, *carry])
            self.check_condition(eqn, condition, [cond, body], "loop")
            return [labels | condition for labels in self.outputs(body, [*body_consts, *carry])]

        return _fixed_point(iterate, operands[carry_start:])

    def _scan(self, eqn: jex.JaxprEqn, operands: list[Labels]) -> list[Labels]:
        """Returns the labels of each carry of a `scan` at its end, and of each stacked output."""
        consts, carry, xs = scan_arguments(eqn.params, operands)

        def iterate(carry: list[Labels]) -> list[Labels]:
            return self.outputs(eqn.params["jaxpr"].jaxpr, [*consts, *carry, *xs])

        carry = _fixed_point(lambda carry: iterate(carry)[: len(carry)], carry)
        return [*carry, *iterate(carry)[len(carry) :]]


def _fixed_point(
    iterate: Callable[[list[Labels]], list[Labels]], carry: list[Labels]
) -> list[Labels]:
    """Returns the labels of a loop's carry after any number of iterations.

    `iterate`: the labels before an iteration -> those after it. At most one iteration for each
    label and value changes anything.
    """
    while True:
        after = [a | b for a, b in zip(carry, iterate(carry), strict=True)]
        if after == carry:
            return carry
        carry = after
