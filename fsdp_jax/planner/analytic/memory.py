"""What a step takes on one device, from its traced program alone: peak memory, matrix products,
memory traffic.

Neither a compiler nor devices are needed: a step traced on `stand_ins(topology)` is enough.

[Note: what is stored] XLA fuses elementwise operations into what reads them: their results never
reach memory; what they are made from lives until then. So a value is *stored* if XLA runs what
makes it as a kernel of its own (products, collectives, reductions, loops), or if such a kernel
reads it; then all others read it from memory too, for XLA fuses into all readers or none. Any other
value is *fused* and stands for the stored ones behind it. A stored value takes memory from the
operation that makes it to the last that reads it; a constant, from the first that reads it.

What is updated in place takes no second buffer: slices written into an array, scatters, what a loop
carries. What a loop stacks is there from its start. The new state takes the place of the donated
old one; the optimizer is fused.

[Note: the order of the program]
It is that of the trace, but for what XLA is seen to do to it on GPUs:

- It schedules from the end. What no loop and no gather waits for runs behind the last of them:
  gradients of weights behind the loop over the chunks of attention, a tied embedding's behind that
  over layers. Their operands live on.
- A loop of one turn is no loop, so the above holds for what is inside it too.
- A collective wants its dim outermost. What is scattered along another is copied, unless a product
  made it, which can write it so. As collectives are combined, all copies are made before the first
  is sent.

Left out are padding, gaps between buffers in the heap, copies that XLA makes of its own accord, and
the code.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax.extend.core as jex

from fsdp_jax.compat import scan_arguments
from fsdp_jax.errors import message
from fsdp_jax.planner.analytic.matmuls import products_of
from fsdp_jax.planner.machines.matmul import Product
from fsdp_jax.sharding.layout import COPIES, Layout
from fsdp_jax.sharding.mesh import batch_shards, shards_of
from fsdp_jax.step.train_step import StepPlan
from fsdp_jax.tree import SEPARATOR
from fsdp_jax.units.collectives import SITE

PARTS = ("params", "gradients", "optimizer", "activations", "gathered", "other")

_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "shard_map"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call"}
_ALIASES = (
    "reshape",
    "squeeze",
    "expand_dims",
    "transpose",
    "layout_constraint",
    "optimization_barrier",
)
_REDUCTIONS = (
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "argmax",
    "argmin",
)
_KERNELS = """all_gather all_to_all cholesky conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum custom_call
    dot_general eigh ffi_call fft gather lu pallas_call ppermute qr ragged_all_to_all ragged_dot_general reduce_scatter
    select_and_scatter_add sort svd top_k triangular_solve"""
_SLICES = ("slice", "dynamic_slice", "split", "gather")  # read as much as they give
_UPDATES = (
    "dynamic_update_slice",
    "scatter",
    "scatter-add",
    "psum",
)  # in place of their first operand
_KINDS = {
    **dict.fromkeys(_ALIASES, "alias"),
    **dict.fromkeys(_REDUCTIONS, "reduction"),
    **dict.fromkeys(_UPDATES, "update"),
    **dict.fromkeys(_KERNELS.split(), "kernel"),
    **dict.fromkeys(("scan", "while", "cond"), "loop"),
}
_COPY = "copy for a collective"


@dataclass(frozen=True)
class Estimate:
    """What one device needs for one step.

    Attributes:
        peak_bytes: the most that is held at once, the state included.
        breakdown: bytes of it for each of `PARTS`, at that time.
        products: matrix products, loops counted (one turn of those of unknown length); no
            convolutions.
        traffic_bytes: read from and written to the device's memory.

    """

    peak_bytes: int
    breakdown: dict[str, int]
    products: tuple[Product, ...]
    traffic_bytes: int


def estimate(plan: StepPlan, jaxpr: jex.ClosedJaxpr) -> Estimate:
    """Reads the traced step of a settled plan.

    Raises:
        ValueError: the step is partitioned by annotations, so that its trace does not have a
            device's own shapes.

    """
    layout = plan.layout
    if not plan.local_batch and layout.mesh.size > 1:
        what = "only a step whose devices see their own part of the batch can be estimated"
        fix = "compile for a topology, or train_step(local_batch=True)"
        raise ValueError(message(what, where="local_batch", got=False, fix=fix))
    shapes, outer = _Shapes(layout), jaxpr.jaxpr
    reader = _Reader(shapes.bytes_outside, shapes.part_of)
    new = reader.run(outer, [_given(shapes.bytes_outside(v.aval)) for v in outer.invars])
    program = _Program(new, [], [], reader.ops)  # the new state takes the place of the old one
    program.settle()
    life = _Life(program)
    held = life.peak()
    for leaf in layout:
        held["params" if leaf.path.startswith(COPIES + SEPARATOR) else leaf.part] += (
            leaf.bytes_per_device
        )
    batch = outer.invars[sum(1 for _ in layout) :]  # the state comes first
    held["other"] += sum(_bytes(v.aval) for v in batch) // batch_shards(layout.mesh)
    times: Counter[Product] = Counter()
    for product in program.products():
        times[replace(product, times=1)] += product.times
    products = tuple(replace(product, times=count) for product, count in times.items())
    return Estimate(held.total(), {part: held[part] for part in PARTS}, products, life.traffic)


class _Shapes:
    """What the shape of a value says about it."""

    def __init__(self, layout: Layout) -> None:
        self.shards: dict[tuple[int, ...], int] = {}
        self.gradients: set[tuple[int, ...]] = set()
        for leaf in layout:
            parts = [shards_of(leaf.mesh, entry) for entry in leaf.grad_spec]
            self.shards[leaf.shape] = max(self.shards.get(leaf.shape, 1), prod(parts))
            if leaf.part == "params":
                local = (
                    *(n // k for n, k in zip(leaf.shape, parts, strict=False)),
                    *leaf.shape[len(parts) :],
                )
                self.gradients |= {
                    shape[n:] for shape in (local, leaf.shape) for n in (0, leaf.stacked)
                }

    def bytes_outside(self, aval: Any) -> int:
        """Of a value of the optimizer, whose shape is global: it is sharded as the state of its
        shape is.
        """
        return _bytes(aval) // self.shards.get(getattr(aval, "shape", ()), 1)

    def part_of(self, eqn: jex.JaxprEqn, aval: Any) -> str:
        """Of `PARTS`, where it is not of the state."""
        scope = str(eqn.source_info.name_stack)
        if eqn.primitive.name == "all_gather" or (
            SITE.split("{}")[0] in scope and "transpose(" not in scope
        ):
            return "gathered"
        return "gradients" if getattr(aval, "shape", ()) in self.gradients else "activations"


def _bytes(aval: Any) -> int:
    return prod(getattr(aval, "shape", ())) * int(
        getattr(getattr(aval, "dtype", None), "itemsize", 0)
    )


@dataclass(eq=False)
class _Value:
    """A value on one device.

    Attributes:
        held: its memory is counted elsewhere: in the state, or around the loop that it is read in.
        live: something needs it.
        stored: see the note.
        constant: equal for equal constants, of which XLA keeps one; None for what depends on an
            input.
        maker: the operation that it comes from, whatever its shape has since become.
        behind: the stored values that it is read from, and the bytes that are read of each.

    """

    bytes: int
    part: str = "activations"
    held: bool = False
    live: bool = False
    stored: bool = False
    constant: Any = None
    maker: str = ""
    behind: "dict[_Value, int]" = field(default_factory=dict)


def _given(size: int, part: str = "activations", constant: Any = None) -> _Value:
    value = _Value(size, part, held=True, stored=True, constant=constant)
    value.behind = {value: size}
    return value


@dataclass(eq=False)
class _Op:
    """An operation. `carried` pairs what a loop starts from, or an update writes to, with what
    takes its place.
    """

    kind: str
    name: str
    ins: Sequence[_Value]
    outs: Sequence[_Value]
    carried: "Sequence[tuple[_Value, _Value]]" = ()
    bodies: "Sequence[_Program]" = ()
    turns: int = 1
    products: Sequence[Product] = ()
    live: bool = False


@dataclass
class _Program:
    """Operations in order; `results` are written to where they belong, `carry_out` stays until the
    end.
    """

    results: Sequence[_Value]
    carry_in: Sequence[_Value]
    carry_out: Sequence[_Value]
    ops: list[_Op]

    def settle(self) -> None:
        """Decides what is stored, and the order; see the notes."""
        for x in (*self.results, *self.carry_out):
            x.live, x.stored = True, x.stored or x in self.carry_out
        for op in reversed(self.ops):
            op.live = any(x.live for x in op.outs)
            for body in op.bodies:
                body.settle()
            for n, x in enumerate(op.ins if op.live else ()):
                x.live = True
                x.stored |= op.kind in ("kernel", "loop") or (op.kind == "update" and n == 0)
                x.stored |= op.kind == "alias" and op.outs[n].stored
            for x in op.outs:
                x.stored |= op.kind not in ("fused", "alias")
        self.ops = self._sunk()
        for copy in [
            op for op in reversed(self.ops) if op.name == _COPY
        ]:  # comes directly behind what it copies
            self.ops.remove(copy)
            self.ops.insert(
                next((n + 1 for n, op in enumerate(self.ops) if copy.ins[0] in op.outs), 0), copy
            )

    def _sunk(self) -> list[_Op]:
        loops = [n for n, op in enumerate(self.ops) if op.live and op.kind == "loop"]
        last = loops[-1] if loops else -1
        awaited, stay = set(self.results), set()
        for n, op in reversed(list(enumerate(self.ops))):
            anchor = op.live and (op.kind == "loop" or op.name == "all_gather")
            if anchor or (n <= last and any(x in awaited for x in op.outs)):
                awaited.update(op.ins)
                stay.add(op)
        before = self.ops[: last + 1]
        return (
            [op for op in before if op in stay]
            + [op for op in before if op not in stay]
            + self.ops[last + 1 :]
        )

    def products(self) -> Iterable[Product]:
        """Of the operations that are needed."""
        for op in self.ops:
            if op.live:
                yield from op.products
                for product in (product for body in op.bodies for product in body.products()):
                    yield replace(product, times=product.times * op.turns)


class _Reader:
    """Makes a jaxpr into operations; what is only called is inlined."""

    def __init__(self, size: Callable[[Any], int], part: Callable[[Any, Any], str]) -> None:
        self.size, self.part = size, part
        self.ops: list[_Op] = []

    def run(self, jaxpr: jex.Jaxpr, args: Sequence[_Value]) -> list[_Value]:
        """Appends to `ops`."""
        closed = [_given(_bytes(v.aval)) for v in jaxpr.constvars]
        env: dict[Any, _Value] = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*closed, *args), strict=True)
        )

        def value(atom: Any) -> _Value:
            is_literal = isinstance(atom, jex.Literal)
            return _given(0, constant=(str(atom.val), str(atom.aval))) if is_literal else env[atom]

        for eqn in jaxpr.eqns:
            env.update(
                zip(eqn.outvars, self._eqn(eqn, [value(atom) for atom in eqn.invars]), strict=True)
            )
        return [value(atom) for atom in jaxpr.outvars]

    def _eqn(self, eqn: jex.JaxprEqn, ins: list[_Value]) -> list[_Value]:
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            (inner, *_) = jex.jaxprs_in_params(params)
            outside, self.size = (
                self.size,
                _bytes if name == "shard_map" else self.size,
            )  # there, shapes are a device's
            outs = self.run(inner, ins)
            self.size = outside
            return outs
        if name == "scan" and params["length"] == 1:
            consts, carry, xs = scan_arguments(params, ins)
            slices = [
                self._append("alias", "squeeze", [x], [_Value(x.bytes, x.part)])[0] for x in xs
            ]
            return self.run(params["jaxpr"].jaxpr, [*consts, *carry, *slices])
        if (
            name == "reduce_scatter"
            and params["scatter_dimension"]
            and ins[0].maker != "dot_general"
        ):
            ins = self._append("kernel", _COPY, ins, [_Value(ins[0].bytes, ins[0].part)])
        outs = [_Value(self.size(v.aval), self.part(eqn, v.aval)) for v in eqn.outvars]
        kind = _KINDS.get(name, "fused")
        if kind in ("fused", "alias") and all(x.constant is not None for x in ins):
            for n, out in enumerate(outs):
                out.constant = (
                    name,
                    n,
                    str(eqn.outvars[n].aval),
                    str(params),
                    *(x.constant for x in ins),
                )
        self._append(kind, name, ins, outs)
        self.ops[-1].products = tuple(products_of(eqn))
        if kind == "loop":
            self._enter(eqn, self.ops[-1])
        return outs

    def _append(self, kind: str, name: str, ins: list[_Value], outs: list[_Value]) -> list[_Value]:
        self.ops.append(
            _Op(
                kind,
                name,
                ins,
                outs,
                list(zip(ins, outs, strict=False)) if kind == "update" else [],
            )
        )
        for n, out in enumerate(outs):
            out.maker = ins[n].maker if kind == "alias" else name
        return outs

    def _enter(self, eqn: jex.JaxprEqn, op: _Op) -> None:
        """Gives a loop its bodies; of what chooses or ends by a condition each is run once, on what
        is held outside.
        """
        if op.name != "scan":
            inner = jex.jaxprs_in_params(eqn.params)
            op.bodies = [
                self._body(body, [_given(_bytes(v.aval)) for v in body.invars]) for body in inner
            ]
            return
        body = eqn.params["jaxpr"].jaxpr
        consts, carry, xs = scan_arguments(eqn.params, list(zip(body.invars, op.ins, strict=True)))
        carry_in = [
            _Value(self.size(v.aval), out.part) for (v, _), out in zip(carry, op.outs, strict=False)
        ]
        inputs = [*(_given(self.size(v.aval), x.part) for v, x in consts), *carry_in]
        op.bodies = [
            self._body(body, inputs, carry_in, [(self.size(v.aval), x.part) for v, x in xs])
        ]
        op.carried = list(zip((x for _, x in carry), op.outs, strict=False))
        op.turns = eqn.params["length"]

    def _body(
        self, body: jex.Jaxpr, inputs: list[_Value], carry: Sequence[_Value] = (), xs: Any = ()
    ) -> _Program:
        reader = _Reader(self.size, self.part)
        for size, part in xs:  # a slice of what is held outside, fused like any other
            inputs = inputs + reader._append("fused", "slice", [_given(size)], [_Value(size, part)])
        results = reader.run(body, inputs)
        return _Program(results[len(carry) :], carry, results[: len(carry)], reader.ops)


class _Life:
    """From when to when each stored value of a settled program is there, and the `traffic` in
    bytes.
    """

    def __init__(self, program: _Program) -> None:
        self.program, self.traffic, self.end = program, 0, len(program.ops)
        self.first: dict[_Value, int] = {}
        self.last: dict[_Value, int] = {}
        self.constants: dict[Any, _Value] = {}
        self.inside: dict[int, list[_Life]] = {}
        for x in program.carry_in:
            self._own(x, -1)
        for at, op in enumerate(program.ops):
            if op.live:
                self._step(at, op)
        for x in program.carry_out:
            self._read(x, self.end)
        self.traffic += sum(self._read(x, self.end) + x.bytes for x in program.results)

    def _own(self, x: _Value, at: int) -> None:
        x.behind = {x: x.bytes}
        self.first[x] = self.last[x] = at

    def _read(self, x: _Value, at: int) -> int:
        for source in (source for source in x.behind if not source.held):
            self.first.setdefault(source, at)
            self.last[source] = at
        return sum(x.behind.values())

    def _step(self, at: int, op: _Op) -> None:
        if op.kind == "alias":
            for x, out in zip(op.ins, op.outs, strict=False):
                out.behind = x.behind
        elif op.kind == "fused" and not any(out.stored for out in op.outs):
            behind = {source: size for x in op.ins for source, size in x.behind.items()}
            for out in op.outs:
                limit = out.bytes if op.name in _SLICES else max(behind.values(), default=0)
                out.behind = {source: min(size, limit) for source, size in behind.items()}
        elif op.kind == "fused" and op.outs[0].constant is not None:
            for out in op.outs:  # made where it is first read
                out.behind = {self.constants.setdefault(out.constant, out): out.bytes}
        else:
            self._run(at, op)

    def _run(self, at: int, op: _Op) -> None:
        fresh = {
            x for x, _ in op.carried if x.constant is not None
        }  # made in the place of what is carried
        reads = [self._read(x, at) for x in op.ins if x not in fresh]
        targets = {out: x for x, out in op.carried if x not in fresh}
        for out in op.outs:
            place = list(targets[out].behind) if out in targets else []
            if len(place) == 1 and place[0] in self.first:
                out.behind = {place[0]: out.bytes}
                self.last[place[0]] = at
            else:
                self._own(out, at)
        if op.kind == "loop":
            self.inside[at] = [_Life(body) for body in op.bodies]
            self.traffic += op.turns * sum(life.traffic for life in self.inside[at])
        elif op.kind == "update" and op.name != "psum":
            self.traffic += 2 * sum(x.bytes for x in op.ins[1:])
        else:
            self.traffic += sum(reads) + sum(out.bytes for out in op.outs)

    def peak(self) -> Counter[str]:
        """Bytes by part when there are most."""
        changes: dict[int, list[tuple[str, int]]] = {at: [] for at in range(-1, self.end + 2)}
        for x, at in self.first.items():
            changes[at].append((x.part, x.bytes))
            changes[self.last[x] + 1].append((x.part, -x.bytes))
        live, most = Counter[str](), Counter[str]()
        for at in range(-1, self.end + 1):
            for part, size in changes[at]:
                live[part] += size
            for now in [
                live,
                *(self._around(at, live) + life.peak() for life in self.inside.get(at, [])),
            ]:
                most = Counter(now) if now.total() > most.total() else most
        return most

    def _around(self, at: int, live: Counter[str]) -> Counter[str]:
        """What is there beside a loop's body: what the loop carries is the body's."""
        places = {place for _, out in self.program.ops[at].carried for place in out.behind}
        return live - sum((Counter({x.part: x.bytes}) for x in places), Counter())
