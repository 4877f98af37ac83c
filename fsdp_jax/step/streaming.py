"""Updates state that is in host memory: brought to the device in groups, updated and sent back.

[Note: groups] The optimizer's update is traced once, for the whole tree. In the traced program it
shows which arrays of the state each result depends on: those that depend on one another, such as a
parameter and its moments, form a part, and a part is updated without the others. Parts are joined
to groups of about `Offload.group_bytes`. A part of stacked layers is updated some layers at a time,
in a loop, if each layer's results depend on that layer alone; the update is then traced again for
arrays of so many layers. XLA streams from host memory along the first dim.

[Note: order] `in_flight` groups are on the device at once: while one is updated, the next is
fetched. A fetch waits for the update of the group `in_flight` before it, by a barrier. Within a
loop the groups of one layer follow each other in a ring, so that no buffer is read and written at
once: XLA would copy it, in host memory. So a loop with a single group fetches and sends in turn.

A global norm of the gradients, learning rates and counts depend on nothing in host memory: they are
computed before, once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from fsdp_jax.errors import human_bytes, message
from fsdp_jax.prefetch.gather_sites import (
    ends_of,
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
from fsdp_jax.sharding.offload import Offload
from fsdp_jax.tree import suffixes

Arrays = dict[str, jax.Array]


@dataclass
class StreamReport:
    """How state in host memory is updated, once the step is traced.

    Attributes:
        groups: fetches in a step.
        staging_bytes: most bytes on each device, of the groups in flight and of one update that is
            sent back.
        moved_whole: path -> bytes on each device, of parameters that cannot be updated layer by
            layer and that with their state are larger than `Offload.group_bytes`.

    """

    groups: int = 0
    staging_bytes: int = 0
    moved_whole: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.groups:
            return "no state is streamed from host memory"
        text = f"state streamed from host memory in {self.groups} groups, "
        text += f"at most {human_bytes(self.staging_bytes)} of them on each device at once"
        if self.moved_whole:
            largest = max(self.moved_whole, key=lambda path: self.moved_whole[path])
            text += f"; the largest that is moved whole is '{largest}', "
            text += human_bytes(self.moved_whole[largest])
        return text


Update = Callable[[Arrays, Arrays, Any], Arrays]
"""(state by name, gradients by name of the parameter, scalars) -> new state by name."""
# Elements up to which a value that depends on nothing in host memory is computed once, before.
_SCALAR = 1
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


def streamed(
    update: Update,
    state: Arrays,
    gradients: Arrays,
    scalars: Any,
    leaves: Mapping[str, Leaf],
    offload: Offload,
    report: StreamReport,
) -> Arrays:
    """Returns `update(state, gradients, scalars)`; arrays in host memory are updated in groups.

    Args:
        update: a pure function, which sees all arrays in device memory.
        state: of the optimizer and the parameters that it updates, and copies of these, by name.
        gradients: in device memory, by names of `state`.
        scalars: a pytree of what else it reads, in device memory.
        leaves: name -> how that array of the state is stored.
        offload: how many groups of which size.
        report: filled in.

    Raises:
        ValueError: an optimizer whose update of one parameter reads the state of another.

    """
    traced = _Traced(update, state, gradients, scalars, leaves)
    parts = _parts(traced)
    env = traced.run_before(state, gradients, scalars)
    # What is in device memory alone is updated as without offload.
    in_groups = {name for part in parts for name in part.names}
    beside = [name for name in traced.outputs if name not in in_groups]
    new = traced.run(beside, env, state, gradients)
    # The others in loops over layers, or whole.
    by_layers: dict[int, list[_Part]] = {}
    for part in parts:
        by_layers.setdefault(part.layers, []).append(part)
    stacks = [_Stack(traced, each, n, env, offload) for n, each in sorted(by_layers.items())]
    for stack in stacks[::-1]:
        buffers = {name: state[name] for part in stack.parts for name in part.names}
        run = stack.run if stack.length > 1 else stack.run_whole
        new |= run(buffers, gradients)
    _fill(report, stacks, offload)
    return new


def _fill(report: StreamReport, stacks: Sequence["_Stack"], offload: Offload) -> None:
    sizes = [size for stack in stacks for size in stack.group_sizes]
    report.groups = sum(len(stack.groups) * stack.length for stack in stacks)
    in_flight = sum(sorted(sizes, reverse=True)[: offload.in_flight])
    report.staging_bytes = in_flight + max(sizes, default=0)
    report.moved_whole = {
        stack.traced.leaves[part.names[0]].path: part.bytes_per_layer * stack.rows
        for stack in stacks
        for part in stack.parts
        if stack.length == 1 and part.bytes_per_layer * stack.rows > offload.group_bytes
    }


class _Traced:
    """The traced update, and which arrays each of its values depends on.

    Attributes:
        outputs: name -> variable of the new array.
        host_inputs: variable -> the names in host memory, or beside one there, that it depends on.

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

    def resized(self, rows: Mapping[str, int]) -> "_Traced | None":
        """Returns the update traced for arrays of so many rows, by name.

        None if they differ in more than that: the update looks at sizes.
        """
        try:
            other = _Traced(self.update, *self._given, self.leaves, rows)
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
        return not leaf.on_host and prod(leaf.shape) <= (_SMALL if of_none else _SCALAR)

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
            if v not in self.depends_on and prod(_shape(v)) <= _SCALAR
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
            if v not in self.depends_on and (v not in self.is_gradient or x.size <= _SCALAR)
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
        eqns = self.needed(wanted, known)
        invars, defined = ends_of(eqns)
        outvars = [v for v in dict.fromkeys(wanted) if not isinstance(v, jex.Literal)]
        computed = [v for v in outvars if v not in known]
        assert set(computed) <= set(defined), "every output is computed, or known"
        debug = self.jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        program = self.jaxpr.replace(
            constvars=[], invars=invars, outvars=computed, eqns=eqns, debug_info=debug
        )
        values = jex.jaxpr_as_fun(jex.ClosedJaxpr(program, ()))(*[known[v] for v in invars])
        return {v: known[v] for v in outvars if v in known} | dict(
            zip(computed, values, strict=True)
        )

    def same_program(self, other: "_Traced", names: Sequence[str]) -> bool:
        """Returns whether another trace computes these outputs alike, apart from the rows."""
        if [eqn.primitive for eqn in self.jaxpr.eqns] != [e.primitive for e in other.jaxpr.eqns]:
            return False
        known = {*inputs_of(self.jaxpr), *self.before}
        outputs = [self.outputs[name] for name in names]
        others = [other.outputs[name] for name in names]
        needed = {id(eqn) for eqn in self.needed(outputs, known)}
        return _same_equations(self.jaxpr, other.jaxpr, outputs, others, needed)

    def translated(self, env: Mapping[Any, Any], other: "_Traced") -> dict[Any, Any]:
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


@dataclass(frozen=True)
class _Part:
    """Arrays of the state whose updates depend on one another alone.

    Attributes:
        names: of the arrays.
        layers: if they are updated layer by layer, the number of these; otherwise 1.
        bytes_per_layer: of a layer, or of all, on each device.

    """

    names: tuple[str, ...]
    layers: int
    bytes_per_layer: int


def _parts(traced: _Traced) -> list[_Part]:
    """Returns the parts that have an array in host memory.

    Raises:
        ValueError: a part with several parameters.

    """
    # Join each result with what it depends on.
    parents: dict[str, str] = {}

    def root(name: str) -> str:
        while parents.setdefault(name, name) != name:
            name = parents[name]
        return name

    for name, variable in traced.outputs.items():
        depends = () if isinstance(variable, jex.Literal) else traced.depends_on.get(variable, ())
        for other in depends:
            parents[root(other)] = root(name)
    joined: dict[str, list[str]] = {}
    for name in traced.outputs:
        joined.setdefault(root(name), []).append(name)

    parts = []
    for names in joined.values():
        if not any(traced.leaves[name].on_host for name in names):
            continue
        _check_streams(names, traced.leaves)
        layers = _layers(traced, names)
        total = sum(traced.leaves[name].bytes_per_device for name in names)
        parts.append(_Part(tuple(names), layers, total // layers))
    return parts


def _check_streams(names: Sequence[str], leaves: Mapping[str, Leaf]) -> None:
    params = [name for name in names if leaves[name].part == "params"]
    if len(params) <= 1:
        return
    size = sum(leaves[name].bytes_per_device for name in names)
    what = "the optimizer cannot be streamed from host memory"
    expected = "an update of each parameter from its own state"
    got = f"'{leaves[params[0]].path}' and {len(params) - 1} others depend on one another, "
    got += f"{human_bytes(size)} on each device"
    fix = "clip the gradient by make_train_step(clip=) or before the moments, accumulate by "
    fix += "accumulation=, and leave out transformations of the whole tree such as "
    fix += "optax.apply_if_finite; or leave the optimizer state on the devices"
    raise ValueError(message(what, where="offload", expected=expected, got=got, fix=fix))


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)


def _layers(traced: _Traced, names: Sequence[str]) -> int:
    """Returns the number of layers that a part can be updated one by one; 1 if it cannot."""
    leaves = [traced.leaves[name] for name in names]
    stacked = {leaf.shape[0] for leaf in leaves if leaf.part == "params" and leaf.stacked}
    sizes = {leaf.shape[:1] for leaf in leaves}
    (size,) = sizes if len(sizes) == 1 else [()]
    if len(size) != 1 or stacked != set(size) or any(any(leaf.spec[:1]) for leaf in leaves):
        return 1
    layers = int(size[0])
    inputs = {v for v, name in traced.inputs.items() if name in names}
    known = inputs | set(traced.before) | set(traced.jaxpr.constvars)
    known |= set(traced.jaxpr.invars[len(traced.inputs) :])
    variables = [traced.outputs[name] for name in names]
    eqns = traced.needed(variables, known)
    return layers if _by_rows(eqns, inputs, variables, layers) else 1


def _by_rows(eqns: Sequence[jex.JaxprEqn], rows: set[Any], outputs: Sequence[Any], n: int) -> bool:
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
        small = all(prod(_shape(v)) <= _SCALAR or is_fine(v, uniform) for v in others)
        shapes = {_shape(v) for v in eqn.outvars}
        if not small:
            return False
        if not by_row:
            if any(prod(shape) > _SCALAR for shape in shapes):
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


@dataclass(frozen=True)
class _Stack:
    """Parts of the same number of layers, updated together in a loop, or whole.

    Attributes:
        traced: the update.
        parts: what is updated.
        layers: of each part; 1 if they are updated whole.
        env: scalars, as `_Traced.run_before` returned them.
        offload: the size of groups, and how many are on the device.

    """

    traced: _Traced
    parts: list[_Part]
    layers: int
    env: Mapping[Any, Any] = field(repr=False)
    offload: Offload

    @cached_property
    def orders(self) -> dict[str, tuple[int, ...]]:
        """Name -> order of the dims in memory, of arrays in host memory, on TPUs.

        In a loop XLA may prefer the order of the gradients, and would transpose the state before
        and after it, in host memory.
        """
        names = [name for part in self.parts for name in part.names]
        on_host = [name for name in names if self.traced.leaves[name].on_host]
        leaves = [self.traced.leaves[name] for name in on_host]
        device = leaves[0].mesh.devices.flat[0]
        # What only stands for a device has no compiler to ask; its step is traced, not compiled.
        if device.platform != "tpu" or not isinstance(device, jax.Device):
            return {}
        stored = tuple(leaf.abstract for leaf in leaves)
        compiled = jax.jit(lambda *arrays: arrays).lower(*stored).compile()
        formats = compiled.input_formats[0]
        return {
            name: each.layout.major_to_minor for name, each in zip(on_host, formats, strict=True)
        }

    @cached_property
    def groups(self) -> list[list[_Part]]:
        """The parts of each group: one, or several that together are small enough."""
        groups: list[list[_Part]] = []
        size = 0
        for part in self.parts:
            part_bytes = part.bytes_per_layer * self.rows
            if not groups or size + part_bytes > self.offload.group_bytes:
                groups.append([])
                size = 0
            groups[-1].append(part)
            size += part_bytes
        return groups

    @property
    def group_sizes(self) -> list[int]:
        """Bytes of each group on a device."""
        return [sum(part.bytes_per_layer for part in parts) * self.rows for parts in self.groups]

    @cached_property
    def names(self) -> list[list[str]]:
        """Names of each group's arrays."""
        return [[name for part in parts for name in part.names] for parts in self.groups]

    @property
    def rows(self) -> int:
        """Layers that are updated at a time: as many as leave the largest part within a group.

        All of them if the update looks at their number.
        """
        return self._fitting_rows if self.sliced else self.layers

    @cached_property
    def sliced(self) -> _Traced | None:
        """The update traced for the rows of an iteration; None if that would be another update."""
        rows = self._fitting_rows
        if rows == self.layers:
            return self.traced
        return self.traced.resized({name: rows for part in self.parts for name in part.names})

    @cached_property
    def _fitting_rows(self) -> int:
        largest = max(part.bytes_per_layer for part in self.parts)
        fit = max(1, self.offload.group_bytes // max(largest, 1))
        return max(k for k in range(1, self.layers + 1) if self.layers % k == 0 and k <= fit)

    @property
    def length(self) -> int:
        """Iterations of the loop."""
        return self.layers // self.rows

    def run_whole(self, buffers: Arrays, gradients: Arrays) -> Arrays:
        """Returns the new arrays, each updated whole."""
        new: Arrays = {}
        updated: list[Arrays] = []
        for number, names in enumerate(self.names):
            inputs = {name: buffers[name] for name in names}
            if number >= self.offload.in_flight:
                waits_for = updated[number - self.offload.in_flight]
                inputs, _ = lax.optimization_barrier((inputs, waits_for))
            on_device = {name: self._to_device(name, x) for name, x in inputs.items()}
            values = self.traced.run(names, self.env, on_device, gradients)
            updated.append(values)
            new |= {name: self._to_host(name, x) for name, x in values.items()}
        return new

    def run(self, buffers: Arrays, gradients: Arrays) -> Arrays:
        """Returns the new arrays, updated `rows` layers at a time."""
        sliced = self.sliced
        assert sliced is not None, "the loop has more than one iteration"
        env = self.traced.translated(self.env, sliced)
        groups = self.names
        ahead = min(self.offload.in_flight, len(groups)) - 1

        def fetch(buffers: Arrays, group: int, index: Any) -> Arrays:
            return {
                name: self._to_device(name, self._rows_of(buffers[name], index))
                for name in groups[group]
            }

        def iteration(carry: tuple[Arrays, list[Arrays]], index: Any) -> Any:
            buffers, fetched = carry
            for number, names in enumerate(groups):
                next_group, next_layer = (number + ahead) % len(groups), index
                if number + ahead >= len(groups):
                    next_layer = jnp.minimum(index + 1, self.length - 1)
                fetched = [*fetched, fetch(buffers, next_group, next_layer)]
                slices = {
                    name: self._rows_of(g, index) for name, g in _of(gradients, names).items()
                }
                values = sliced.run(names, env, fetched[0], slices)
                # The next fetch waits for this update.
                index, values = lax.optimization_barrier((index, values))
                buffers = buffers | {
                    name: self._set_rows(buffers[name], self._to_host(name, x), index)
                    for name, x in values.items()
                }
                fetched = fetched[1:]
            return (buffers, fetched), None

        start = buffers, [fetch(buffers, group, 0) for group in range(ahead)]
        (buffers, _), _ = lax.scan(iteration, start, jnp.arange(self.length))
        return buffers

    def _rows_of(self, array: jax.Array, index: Any) -> jax.Array:
        return lax.dynamic_slice_in_dim(array, index * self.rows, self.rows, 0)

    def _set_rows(self, array: jax.Array, values: jax.Array, index: Any) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(array, values, index * self.rows, 0)

    def _to_device(self, name: str, array: jax.Array) -> jax.Array:
        if not self.traced.leaves[name].on_host:
            return array
        array = jax.device_put(array, jax.memory.Space.Device)
        order = self.orders.get(name)
        return array if order is None else with_layout_constraint(array, Layout(order))

    def _to_host(self, name: str, array: jax.Array) -> jax.Array:
        on_host = self.traced.leaves[name].on_host
        return jax.device_put(array, jax.memory.Space.Host) if on_host else array


def _of(gradients: Arrays, names: Sequence[str]) -> Arrays:
    return {name: gradients[name] for name in names if name in gradients}
