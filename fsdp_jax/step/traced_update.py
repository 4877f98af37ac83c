"""The traced update of an optimizer: what each result depends on, and whether layers are apart.

`streaming` updates parts of the state by it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.extend.core as jex

from fsdp_jax.prefetch.gather_sites import (
    evaluate_unchanged,
    inner_jaxprs,
    inputs_of,
    is_checkpoint,
    is_transparent,
    reads,
    scope_of,
    values_of,
)
from fsdp_jax.sharding.layout import Leaf
from fsdp_jax.tree import suffixes

Arrays = dict[str, jax.Array]
Update = Callable[[Arrays, Arrays, Any], Arrays]
"""(state by name, gradients by name of the parameter, scalars) -> new state by name."""
# Elements up to which a value that depends on nothing in host memory is computed once, before.
SCALAR = 1
# Elements up to which state in device memory that belongs to no parameter may be read by all.
_SMALL = 256
_ELEMENTWISE = {
    *("abs", "add", "add_any", "and", "atan2", "bitcast_convert_type", "cbrt", "ceil", "clamp"),
    *("convert_element_type", "shift_right_logical"),
    *("copy", "cos", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt"),
    *("integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul"),
    *("ne", "neg", "nextafter", "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "sign"),
    *("sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"),
}
_SIZES = {"shape", "new_sizes"}  # parameters of equations that tell the sizes of their results
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}


class TracedUpdate:
    """The traced update, and which arrays each of its values depends on.

    Attributes:
        outputs: name -> variable of the new array.

    """

    def __init__(
        self,
        update: Update,
        state: Arrays,
        gradients: Arrays,
        scalars: Any,
        leaves: Mapping[str, Leaf],
        rows: Mapping[str, int] | None = None,
    ) -> None:
        self.update, self.leaves = update, leaves
        self._given = state, gradients, scalars
        self.state_names, self.gradient_names = sorted(state), sorted(gradients)

        def abstract(name: str, array: Any) -> jax.ShapeDtypeStruct:
            shape = array.shape
            if rows and name in rows:
                shape = (rows[name], *shape[1:])
            return jax.ShapeDtypeStruct(shape, array.dtype)

        shapes = [{name: abstract(name, x) for name, x in part.items()} for part in self._given[:2]]
        traced = jax.make_jaxpr(_without_calls(update), return_shape=True)
        self.closed, out = traced(*shapes, scalars)
        self.jaxpr = self.closed.jaxpr
        self.outputs = dict(zip(sorted(out), self.jaxpr.outvars, strict=True))
        names = [*self.state_names, *self.gradient_names]
        self.inputs = dict(zip(self.jaxpr.invars, names, strict=False))
        self.is_gradient = set(self.jaxpr.invars[len(state) : len(names)])

    def resized(self, rows: Mapping[str, int]) -> "TracedUpdate | None":
        """Returns the update traced for arrays of so many rows, by name.

        None if they differ in more than that: the update looks at sizes.
        """
        try:
            other = TracedUpdate(self.update, *self._given, self.leaves, rows)
        except Exception:  # whatever an optimizer raises for a size that it does not expect
            return None
        return other if self.same_program(other, list(rows)) else None

    @cached_property
    def depends_on(self) -> dict[Any, frozenset[str]]:
        """Variable -> names of the state that it depends on, leaving out what is shared."""
        found: dict[Any, frozenset[str]] = {}
        for variable, name in self.inputs.items():
            if variable not in self.is_gradient and not self._is_shared(name):
                found[variable] = frozenset([name])
        for eqn in self.jaxpr.eqns:
            sources = [found[v] for v in reads(eqn) if v in found]
            if sources:
                found |= dict.fromkeys(eqn.outvars, frozenset().union(*sources))
        return found

    def _is_shared(self, name: str) -> bool:
        """Whether all may read it as it was: counts, random keys, the coefficients of Muon."""
        leaf = self.leaves[name]
        of_none = leaf.part == "optimizer" and self._params.isdisjoint(suffixes(leaf.path))
        return not leaf.on_host and prod(leaf.shape) <= (_SMALL if of_none else SCALAR)

    @cached_property
    def _params(self) -> set[str]:
        return {leaf.path for leaf in self.leaves.values() if leaf.part == "params"}

    @cached_property
    def before(self) -> list[Any]:
        """Scalars that depend on no array of the state: they are computed once, before."""
        return [
            v
            for eqn in self.jaxpr.eqns
            for v in eqn.outvars
            if v not in self.depends_on and prod(_shape(v)) <= SCALAR
        ]

    def run_before(self, state: Arrays, gradients: Arrays, scalars: Any) -> dict[Any, Any]:
        """Returns the values of constants, scalars, and of what is computed from them before."""
        n_arrays = len(self.inputs)
        env = dict(zip(self.jaxpr.constvars, self.closed.consts, strict=True))
        env |= zip(self.jaxpr.invars[n_arrays:], jax.tree.leaves(scalars), strict=True)
        arrays = {v: self._array(v, state, gradients) for v in self.inputs}
        env |= {
            v: x
            for v, x in arrays.items()
            if v not in self.depends_on and (v not in self.is_gradient or x.size <= SCALAR)
        }
        read = {v for eqn in self.jaxpr.eqns for v in reads(eqn)} | set(self.jaxpr.outvars)
        wanted = [v for v in self.before if v in read]
        on_device = {
            v: x for v, x in arrays.items() if v in self.is_gradient or v not in self.depends_on
        }
        return env | self._evaluate(wanted, env | on_device)

    def _array(self, variable: Any, state: Arrays, gradients: Arrays) -> Any:
        name = self.inputs[variable]
        return gradients[name] if variable in self.is_gradient else state[name]

    def run(
        self,
        names: Sequence[str],
        env: Mapping[Any, Any],
        state: Arrays,
        gradients: Arrays,
    ) -> Arrays:
        """Returns the new arrays of these names.

        Args:
            names: of the state.
            env: what `run_before` returned, or `translated` of it.
            state: arrays in device memory, at least those that these depend on.
            gradients: those of the parameters among them.

        """
        arrays = {
            v: (gradients if v in self.is_gradient else state)[name]
            for v, name in self.inputs.items()
            if name in (gradients if v in self.is_gradient else state)
        }
        variables = [self.outputs[name] for name in names]
        values = self._evaluate(variables, {**env, **arrays})
        return {
            name: v.val if isinstance(v, jex.Literal) else values[v]
            for name, v in zip(names, variables, strict=True)
        }

    def needed(self, wanted: Sequence[Any], known: Any) -> list[jex.JaxprEqn]:
        """Returns the equations that compute these variables from the known ones, in order."""
        missing = {v for v in wanted if not isinstance(v, jex.Literal) and v not in known}
        eqns = []
        for eqn in reversed(self.jaxpr.eqns):
            if not missing.isdisjoint(eqn.outvars):
                eqns.append(eqn)
                missing |= {v for v in reads(eqn) if v not in known}
        return eqns[::-1]

    def _evaluate(self, wanted: Sequence[Any], known: Mapping[Any, Any]) -> dict[Any, Any]:
        env = dict(known)
        evaluate_unchanged(self.jaxpr, self.needed(wanted, known), env)
        return {v: env[v] for v in wanted if not isinstance(v, jex.Literal)}

    def same_program(self, other: "TracedUpdate", names: Sequence[str]) -> bool:
        """Returns whether another trace computes these outputs alike, apart from the rows."""
        if [eqn.primitive for eqn in self.jaxpr.eqns] != [e.primitive for e in other.jaxpr.eqns]:
            return False
        known = {*inputs_of(self.jaxpr), *self.before}
        outputs = [self.outputs[name] for name in names]
        others = [other.outputs[name] for name in names]
        needed = {id(eqn) for eqn in self.needed(outputs, known)}
        return _same_equations(self.jaxpr, other.jaxpr, outputs, others, needed)

    def translated(self, env: Mapping[Any, Any], other: "TracedUpdate") -> dict[Any, Any]:
        """Returns `env` for the variables of another trace with the same equations."""
        pairs = zip(_variables(self.jaxpr), _variables(other.jaxpr), strict=True)
        return {b: env[a] for a, b in pairs if a in env}


def _variables(jaxpr: jex.Jaxpr) -> list[Any]:
    """Returns all variables of a jaxpr, in the order of the program."""
    return [*inputs_of(jaxpr), *(v for eqn in jaxpr.eqns for v in eqn.outvars)]


def _same_equations(
    a: jex.Jaxpr,
    b: jex.Jaxpr,
    outputs_of_a: Sequence[Any],
    outputs_of_b: Sequence[Any],
    compared: set[int] | None = None,
) -> bool:
    """Returns whether two jaxprs of the same primitives differ in the first dim's size alone.

    A size may stand in a literal, in a parameter of an equation or in a branch of the traced
    function: what is computed for fewer rows is then something else.

    Args:
        a: one of them.
        b: the other.
        outputs_of_a: variables of it that are compared.
        outputs_of_b: those of the other.
        compared: ids of the equations of `a` that are compared; all of them if None.

    """
    places = {v: place for each in (a, b) for place, v in enumerate(_variables(each))}

    def same_operand(v: Any, w: Any) -> bool:
        if isinstance(v, jex.Literal) or isinstance(w, jex.Literal):
            both = isinstance(v, jex.Literal) and isinstance(w, jex.Literal)
            return both and v.aval.dtype == w.aval.dtype and bool(v.val == w.val)
        return places[v] == places[w] and _shape(v)[1:] == _shape(w)[1:]

    def form(eqn: jex.JaxprEqn) -> tuple[Any, ...]:
        """Returns what must be equal, apart from operands and inner jaxprs."""
        jaxprs = jex.Jaxpr, jex.ClosedJaxpr
        fixed = {
            key: value
            for key, value in eqn.params.items()
            if key not in _SIZES and not isinstance(value, jaxprs)
        }
        avals: list[Any] = [v.aval for v in eqn.outvars]
        return eqn.primitive, fixed, [(aval.shape[1:], aval.dtype) for aval in avals]

    def same(eqn: jex.JaxprEqn, other: jex.JaxprEqn) -> bool:
        inner = list(zip(inner_jaxprs(eqn), inner_jaxprs(other), strict=True))
        return (
            form(eqn) == form(other)
            and all(map(same_operand, eqn.invars, other.invars))
            and all(_same_equations(x, y, x.outvars, y.outvars) for x, y in inner)
        )

    if len(a.eqns) != len(b.eqns):
        return False
    pairs = zip(a.eqns, b.eqns, strict=True)
    return all(map(same_operand, outputs_of_a, outputs_of_b)) and all(
        same(eqn, other) for eqn, other in pairs if compared is None or id(eqn) in compared
    )


def _without_calls(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` with the equations of its inner `jit`s among its own.

    As one equation, such as optax's bias correction of the whole tree, each result of a call would
    count as depending on all that the call reads.
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        outputs = _run_without_calls(closed.jaxpr, [*closed.consts, *jax.tree.leaves(args)])
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return run


def _run_without_calls(jaxpr: jex.Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a jaxpr, given its constants and arguments."""
    env = dict(zip(inputs_of(jaxpr), args, strict=True))
    others: list[jex.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if is_checkpoint(eqn) or not is_transparent(eqn):
            others.append(eqn)
            continue
        evaluate_unchanged(jaxpr, others, env)
        others = []
        (inner,) = inner_jaxprs(eqn)
        consts = getattr(eqn.params.get("jaxpr"), "consts", ())
        with scope_of(eqn):
            outputs = _run_without_calls(inner, [*consts, *values_of(env, eqn.invars)])
        env.update(zip(eqn.outvars, outputs, strict=True))
    evaluate_unchanged(jaxpr, others, env)
    return values_of(env, jaxpr.outvars)


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)


def is_by_rows(
    eqns: Sequence[jex.JaxprEqn], rows: set[Any], outputs: Sequence[Any], n: int
) -> bool:
    """Returns whether row i of each output depends on row i of the inputs alone.

    What these equations do is known for certain primitives; others count as mixing rows.

    Args:
        eqns: in order.
        rows: the inputs whose first dim has `n` rows; all others are scalars.
        outputs: the variables in question.
        n: the number of rows.

    """
    rows = set(rows)
    uniform: set[Any] = set()  # large arrays with the same value in each row

    def is_fine(v: Any, of: set[Any]) -> bool:
        return not isinstance(v, jex.Literal) and v in of

    for eqn in eqns:
        name, params = eqn.primitive.name, eqn.params
        by_row = [v for v in eqn.invars if is_fine(v, rows)]
        others = [v for v in eqn.invars if not is_fine(v, rows)]
        small = all(prod(_shape(v)) <= SCALAR or is_fine(v, uniform) for v in others)
        shapes = {_shape(v) for v in eqn.outvars}
        if not small:
            return False
        if not by_row:
            if any(prod(shape) > SCALAR for shape in shapes):
                counts_rows = name == "iota" and params["dimension"] == 0
                if counts_rows or name not in ("broadcast_in_dim", "iota", *_ELEMENTWISE):
                    return False
                uniform |= set(eqn.outvars)
            continue
        if name in _ELEMENTWISE or name == "sharding_constraint":
            if any({_shape(v)} != shapes for v in by_row):
                return False
        elif name in _REDUCTIONS:
            if 0 in params["axes"]:
                return False
        elif name == "reshape":
            if params["dimensions"] is not None or _shape(by_row[0])[0] != n:
                return False
        elif name == "broadcast_in_dim":
            if params["broadcast_dimensions"][:1] != (0,):
                return False
        else:
            return False
        if any(not _shape(v) or _shape(v)[0] != n for v in eqn.outvars):
            return False
        rows |= set(eqn.outvars)
    return all(is_fine(v, rows) for v in outputs)
