"""A proof, from the traced program, that what a function returns is a sum over the examples of its batch.

Only then may each device run it on its own part of the batch and the results be added. BatchNorm, contrastive losses,
`x.mean(0)` and a penalty on the parameters are no such sums, and nothing in their types says so.

[Note: two traces]
The function is traced on the whole batch and on one part of it, and the two programs are read side by side. A size that
differs marks the dim of the examples; a number that differs was computed from their count. By induction over the
program, each value of the whole batch is one of the kinds of `examples_rules.Kind`: the same for every part, the parts'
values one after the other, or the sum of the parts' values; or it is mixed, with the first operation that mixes it as
the reason. What is not proven is refused: a refusal says no more than that.

[Note: what is taken on trust]
Sums are those of real numbers; rounding differs. Random numbers are as good drawn part by part as at once. A part of
one row is judged by a part of two, since jax.numpy writes dims of size 1 in other ways: a function that chooses to do
something else with a single row deceives the proof. So does a derivative rule (`jax.custom_vjp`, `jax.custom_jvp`) that
mixes examples, unless the gradients are among the sums: then its program is read too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from fsdp_jax.errors import message
from fsdp_jax.examples_rules import CONSTANT, SUMS, Kind, Op, Pair, Value, apply, same
from fsdp_jax.jaxprs import scan_arguments
from fsdp_jax.tree import PyTree, path_of

CALLS = {
    **dict.fromkeys(("jit", "pjit", "checkpoint", "remat", "remat2"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}
"""Primitives that only run the program in this parameter."""

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "chex", "einops")
"""Packages whose lines are not the user's."""


@dataclass(frozen=True)
class Verdict:
    """Whether the proof was found; if not, one line on what stands in its way."""

    proven: bool
    reason: str = ""


def sums_over_examples(fn: Callable[..., Any], batch: PyTree, *others: PyTree, parts: int) -> Verdict:
    """Whether `fn` on the whole batch gives the sums of what it gives on each of `parts` equal parts.

    Nothing is computed: `fn` is traced twice.

    Args:
        fn: pure function `(batch, *others) -> (sums, rest)`, two pytrees of arrays. Proven is that each leaf of `sums`
            is a sum over examples, and that no leaf of `rest` depends on the batch. Gradients may be among the sums.
        batch: pytree of arrays or ShapeDtypeStructs, the examples along dim 0 of each.
        others: pytrees of arrays or ShapeDtypeStructs, the same for every part: parameters, state, random keys.
        parts: what the batch is divided by.

    Raises:
        ValueError: the leaves of `batch` have no common dim 0 that `parts` divides. And what `fn` raises on the batch.

    """
    leaves = _named(batch)
    sizes = {leaf.shape[0] if leaf.shape else 0 for _, leaf in leaves}
    rows = next(iter(sizes), 0)
    if len(sizes) != 1 or not rows or rows % parts:
        got = {path: tuple(leaf.shape) for path, leaf in leaves}
        fix = "give every leaf the examples along dim 0, in equal parts"
        raise ValueError(
            message("the batch cannot be divided", where="batch", expected=f"{parts} parts", got=got, fix=fix)
        )
    if parts == 1:
        return Verdict(True)
    part = max(2, rows // parts)
    try:
        whole, shapes = _trace(fn, part * parts, rows, batch, others)
        small, _ = _trace(fn, part, rows, batch, others)
        given = [Value(Kind.ROWS)] * len(leaves) + [Value(Kind.WHOLE)] * (len(whole.jaxpr.invars) - len(leaves))
        return _verdict(_Proof(parts).run(whole, small, given), *shapes)
    except _Differs as difference:
        return Verdict(False, str(difference))


class _Differs(Exception):  # noqa: N818 - an answer, not an error
    """The two programs cannot be read side by side, or not to the end."""


def _named(tree: PyTree) -> list[tuple[str, Any]]:
    return [(path_of(keys), leaf) for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _trace(
    fn: Callable[..., Any], count: int, rows: int, batch: PyTree, others: Sequence[PyTree]
) -> tuple[ClosedJaxpr, tuple[PyTree, PyTree]]:
    """(program, shapes of its results) for `count` examples, where the user has `rows`."""
    sized = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), batch)
    try:
        return jax.make_jaxpr(fn, return_shape=True)(sized, *others)
    except Exception as error:
        if count == rows:
            raise
        why = (str(error) or repr(error)).splitlines()[0]
        raise _Differs(f"cannot be traced with {count} examples: {why}") from error


def _verdict(found: Sequence[Value], sums: PyTree, rest: PyTree) -> Verdict:
    results = [(name, summed) for tree, summed in ((sums, True), (rest, False)) for name, _ in _named(tree)]
    for (name, summed), value in zip(results, found, strict=True):
        if value.kind in (SUMS if summed else CONSTANT):
            continue
        if value.kind is Kind.MIXED:
            return Verdict(False, value.reason)
        if not summed:
            return Verdict(False, f"'{name}' depends on the batch and is no sum that is returned")
        constant = value.kind in CONSTANT
        why = "does not depend on the batch: every device would add it" if constant else "is not summed over the batch"
        return Verdict(False, f"'{name}' {why}")
    return Verdict(True)


class _Proof:
    """Reads two programs side by side."""

    def __init__(self, parts: int):
        self.parts = parts
        self.within: list[JaxprEqn] = []  # the equation being read, and those around it

    def run(self, whole: Jaxpr | ClosedJaxpr, part: Jaxpr | ClosedJaxpr, values: Sequence[Value]) -> list[Value]:
        """The kinds of a program's results, from those of its operands."""
        (whole, whole_consts), (part, part_consts) = _opened(whole), _opened(part)
        for ends in ("constvars", "invars", "outvars"):
            if len(getattr(whole, ends)) != len(getattr(part, ends)):
                raise _Differs("does something else with another number of examples" + self.here())
        known: dict[Var, Value] = {}
        twins: dict[Var, Var] = {}

        def write(variables: Sequence[Var], others: Sequence[Var], values: Sequence[Value]) -> None:
            known.update(zip(variables, values, strict=True))
            twins.update(zip(variables, others, strict=True))

        def read(atoms: Sequence[Any], others: Sequence[Any]) -> list[Value]:
            found = []
            for atom, other in zip(atoms, others, strict=True):
                if isinstance(atom, Literal) and isinstance(other, Literal):
                    found.append(self.constant(atom.val, other.val))
                elif isinstance(atom, Literal) or twins[atom] is not other:
                    raise _Differs("does something else with another number of examples" + self.here())
                else:
                    found.append(known[atom])
            return found

        constants = zip(whole_consts, part_consts, strict=True)
        write(whole.constvars, part.constvars, [self.constant(a, b) for a, b in constants])
        write(whole.invars, part.invars, values)
        for eqn, other in zip(whole.eqns, part.eqns, strict=False):
            if not _alike(eqn, other):
                raise _Differs("does something else with another number of examples" + self.here(eqn))
            write(eqn.outvars, other.outvars, self.equation(eqn, other, read(eqn.invars, other.invars)))
        if len(whole.eqns) != len(part.eqns):
            raise _Differs("does more for more examples" + self.here())
        return read(whole.outvars, part.outvars)

    def constant(self, whole: Any, part: Any) -> Value:
        """The kind of a number that stands in the program."""
        if whole is part and np.ndim(whole):
            return Value(Kind.WHOLE)
        if jnp.issubdtype(getattr(whole, "dtype", np.float32), dtypes.prng_key):
            whole, part = jax.random.key_data(whole), jax.random.key_data(part)
        a, b = np.asarray(whole), np.asarray(part)
        if a.shape != b.shape:
            return Value(Kind.MIXED, "reads constants by the position in the batch")
        if same(a, b):
            return Value(Kind.WHOLE if a.ndim or a != 0 else Kind.ZERO)
        if _times(self.parts, b, a):
            return Value(Kind.COUNT)
        divides = _times(self.parts, a, b)
        return Value(Kind.MIXED, f"{'divides by' if divides else 'computes with'} the number of examples")

    def equation(self, eqn: JaxprEqn, other: JaxprEqn, values: list[Value]) -> list[Value]:
        """The kinds of one equation's results; the first to mix examples is named."""
        rules = {"scan": self.scan, "while": self.while_loop, "cond": self.branches, **dict.fromkeys(CALLS, self.call)}
        self.within.append(eqn)
        found = rules.get(eqn.primitive.name, self.operation)(eqn, other, values)
        found = [
            replace(value, reason=value.reason + self.here())
            if value.kind is Kind.MIXED and not value.reason.endswith(")")
            else value
            for value in found
        ]
        self.within.pop()
        return found

    def here(self, *inner: JaxprEqn) -> str:
        """` (reduce_max at model.py:12)`: the operation, and the innermost line that is not a library's."""
        around = [*self.within, *inner]
        line = next(filter(None, map(_user_line, reversed(around))), "")
        return f" ({around[-1].primitive.name}{' at ' * bool(line)}{line})" if around else ""

    def call(self, eqn: JaxprEqn, other: JaxprEqn, values: list[Value]) -> list[Value]:
        """What the called program does."""
        inside = CALLS[eqn.primitive.name]
        return self.run(eqn.params[inside], other.params[inside], values)

    def operation(self, eqn: JaxprEqn, other: JaxprEqn, values: list[Value]) -> list[Value]:
        """One that the tables know, or nobody."""
        if eqn.effects and eqn.primitive.name not in ("debug_callback", "debug_print"):
            raise _Differs("has a side effect" + self.here())
        ins, outs = _pairs(eqn.invars, other.invars), _pairs(eqn.outvars, other.outvars)
        return apply(Op(eqn.primitive.name, eqn.params, other.params, values, ins, outs, self.parts))

    def settle(
        self, body: tuple[Any, Any], consts: Sequence[Value], carry: Sequence[Value], xs: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        """(carry, the other results) of a loop: what holds before and after every turn."""
        while True:
            after = self.run(*body, [*consts, *carry, *xs])
            joined = [join(a, b) for a, b in zip(carry, after[: len(carry)], strict=True)]
            if joined == list(carry):
                return joined, after[len(carry) :]
            carry = joined

    def scan(self, eqn: JaxprEqn, other: JaxprEqn, values: list[Value]) -> list[Value]:
        """Its kinds are the body's: the dim that is scanned is not that of the examples where the lengths agree."""
        p = eqn.params
        if p["length"] != other.params["length"] or p["reverse"] != other.params["reverse"]:
            return [Value(Kind.MIXED, "loops over the examples")] * len(eqn.outvars)
        consts, carry, xs = scan_arguments(p, values)
        carry, ys = self.settle((p["jaxpr"], other.params["jaxpr"]), consts, carry, xs)
        return [*carry, *ys]

    def while_loop(self, eqn: JaxprEqn, other: JaxprEqn, values: list[Value]) -> list[Value]:
        """The number of turns must not depend on the batch."""
        p, start = eqn.params, eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        tested, consts, carry = values[: p["cond_nconsts"]], values[p["cond_nconsts"] : start], values[start:]
        carry, _ = self.settle((p["body_jaxpr"], other.params["body_jaxpr"]), consts, carry, ())
        (again,) = self.run(p["cond_jaxpr"], other.params["cond_jaxpr"], [*tested, *carry])
        return carry if again.kind in CONSTANT else [_decides("how long to loop", again)] * len(eqn.outvars)

    def branches(self, eqn: JaxprEqn, other: JaxprEqn, values: list[Value]) -> list[Value]:
        """The choice must not depend on the batch."""
        if values[0].kind not in CONSTANT:
            return [_decides("which branch to take", values[0])] * len(eqn.outvars)
        pairs = zip(eqn.params["branches"], other.params["branches"], strict=True)
        results = [self.run(whole, part, values[1:]) for whole, part in pairs]
        return [reduce(join, found) for found in zip(*results, strict=True)]


JOINED = ((CONSTANT, Kind.WHOLE), (SUMS, Kind.SUM), ({Kind.ROWS, Kind.NEVER}, Kind.ROWS))


def join(a: Value, b: Value) -> Value:
    """The kind of a value that is sometimes `a` and sometimes `b`."""
    if a == b or Kind.MIXED in (a.kind, b.kind):
        return a if a.kind is Kind.MIXED or a == b else b
    together = next((kind for kinds, kind in JOINED if {a.kind, b.kind} <= kinds), None)
    change = "is a sum over the batch at one time and something else at another"
    return Value(together) if together else Value(Kind.MIXED, change)


def _decides(what: str, value: Value) -> Value:
    return value if value.kind is Kind.MIXED else Value(Kind.MIXED, f"lets the batch as a whole decide {what}")


def _opened(program: Jaxpr | ClosedJaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    return (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, ())


def _alike(eqn: JaxprEqn, other: JaxprEqn) -> bool:
    """Whether they are one operation, on and to values that differ in sizes alone."""
    atoms, others = [*eqn.invars, *eqn.outvars], [*other.invars, *other.outvars]
    if eqn.primitive is not other.primitive or len(atoms) != len(others):
        return False
    kinds = [
        [(getattr(a.aval, "dtype", None), getattr(a.aval, "ndim", None)) for a in side] for side in (atoms, others)
    ]
    return kinds[0] == kinds[1]


def _pairs(atoms: Sequence[Any], others: Sequence[Any]) -> list[Pair]:
    return [Pair(atom.aval, other.aval) for atom, other in zip(atoms, others, strict=True)]


def _times(factor: int, small: np.ndarray, large: np.ndarray) -> bool:
    """Whether `large` is `factor` times `small`: exactly where both are integers, else as floats round."""
    if np.iscomplexobj(small) or np.iscomplexobj(large):
        return False
    small, large = small.astype(np.float64), large.astype(np.float64)
    whole = np.all(small == np.round(small)) and np.all(large == np.round(large))
    return bool(np.allclose(small * factor, large, rtol=0.0 if whole else 1e-6, atol=0.0))


def _user_line(eqn: JaxprEqn) -> str:
    frames: Sequence[Any] = eqn.source_info.traceback.frames if eqn.source_info.traceback else []
    for frame in frames:
        parts = Path(frame.file_name).parts
        library = parts[parts.index("site-packages") + 1] if "site-packages" in parts else ""
        if library not in LIBRARIES and frame.file_name != __file__:
            return f"{Path(frame.file_name).name}:{frame.line_num}"
    return ""
