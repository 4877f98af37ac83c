"""The contract: what a step declares that it sends, held against what the compiled program sends.

Every byte of the program is given to the parameter that it serves: by the scope that the library puts around its
collectives, and where XLA has lost that, by the shape. What serves no parameter is an activation, and a violation.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import jax.numpy as jnp

from fsdp_jax.compiled import Step
from fsdp_jax.errors import human_bytes
from fsdp_jax.inspect.collectives import Collective, read_program
from fsdp_jax.inspect.expected import Expected, Role, axis_name, expected_of
from fsdp_jax.inspect.stderr import Rematerialization, rematerializations
from fsdp_jax.layout import Leaf
from fsdp_jax.mesh import data_axes
from fsdp_jax.rules import MIN_SIZE
from fsdp_jax.step import StepPlan
from fsdp_jax.table import text_table
from fsdp_jax.tree import PyTree

TOLERANCE = 1.02
SLACK = 4096
"""Bytes for the sums of loss, count and norms."""


@dataclass(frozen=True)
class Violation:
    """One thing that the program does and the layout does not declare.

    Attributes:
        path: of the parameter; empty for what serves none.
        what: in the user's terms.
        bytes: more per step on the wire than declared.
        cause: and fix.

    """

    path: str
    what: str
    bytes: int
    cause: str

    def __str__(self) -> str:
        cost = f": +{human_bytes(self.bytes)} per step" if self.bytes > 0 else ""
        return f"{self.path or 'no parameter'}: {self.what}{cost}; {self.cause}"


@dataclass(frozen=True)
class Contract:
    """The verdict on a compiled step. `print(contract)` shows it.

    Attributes:
        expected: what each parameter declares.
        collectives: what the program sends.
        violations: what differs, dearest first.
        unread: what the reader could not judge; where it is not empty the contract does not hold.
        note: what the platform hides.

    """

    expected: Sequence[Expected]
    collectives: Sequence[Collective]
    violations: Sequence[Violation]
    unread: Sequence[str] = ()
    note: str = ""
    parts: Sequence[str] = field(default=(), repr=False)

    @property
    def holds(self) -> bool:
        """Whether the program sends what is declared, and no more than 1.02 of it."""
        return not self.violations and not self.unread

    @cached_property
    def wire_bytes(self) -> int:
        """That a device sends per step."""
        return sum(each.bytes for each in self.collectives)

    @cached_property
    def wire_bytes_limit(self) -> int:
        """That a device must send per step, by the strategy's arithmetic."""
        return sum(each.bytes for each in self.expected)

    def rows(self) -> list[dict[str, Any]]:
        """The collectives as `inspect --json` has them; alike ones share a row."""
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for each in sorted(self.collectives, key=lambda c: -c.bytes):
            where = ", ".join(dict.fromkeys(path for path in each.paths if path)) or "-"
            axis = axis_name(each.axis.split("+"), self.parts)
            row = rows.setdefault((each.op, each.dtype, axis, where), {
                "op": each.op, "dtype": each.dtype, "axis": axis, "count": 0, "bytes": 0, "overlapped_bytes": 0,
                "where": where,
            })  # fmt: skip
            row["count"] += each.count
            row["bytes"] += each.bytes
            row["overlapped_bytes"] += each.hidden
        return sorted(rows.values(), key=lambda row: -row["bytes"])

    def to_json(self) -> dict[str, Any]:
        """The fields of `inspect --json` with a topology."""
        return {
            "collectives": self.rows(),
            "contract": {
                "holds": self.holds,
                "expected": _sums((e.op, e.dtype, e.axis, e.bytes) for e in self.expected),
                "found": _sums((row["op"], row["dtype"], row["axis"], row["bytes"]) for row in self.rows()),
                "violations": [str(violation) for violation in self.violations] + list(self.unread),
            },
            "wire_bytes": self.wire_bytes,
            "wire_bytes_limit": self.wire_bytes_limit,
        }

    def __str__(self) -> str:
        columns = ("op", "dtype", "axis", "times", "sent per step", "hidden", "for")
        rows = [
            (row["op"], row["dtype"], row["axis"], str(row["count"]), human_bytes(row["bytes"]),
             human_bytes(row["overlapped_bytes"]), row["where"] if len(row["where"]) < 60 else row["where"][:59] + "…")
            for row in self.rows()
        ]  # fmt: skip
        ratio = self.wire_bytes / self.wire_bytes_limit if self.wire_bytes_limit else 1.0
        lines = [
            text_table(columns, rows, right=columns[3:6]) if rows else "nothing is sent",
            f"a device sends {human_bytes(self.wire_bytes)} per step; declared {human_bytes(self.wire_bytes_limit)} "
            f"({ratio:.3f}); the contract {'holds' if self.holds else 'DOES NOT HOLD'}",
            *(f"  {violation}" for violation in self.violations),
            *(f"  not judged: {line}" for line in self.unread),
            *([self.note] if self.note else []),
        ]
        return "\n".join(lines)


def check_contract(step: Step, batch: PyTree) -> Contract:
    """Compiles a step for its mesh and holds the program to what the step declares.

    Args:
        step: from `Sharded.train_step`; its mesh may be of devices that are not there.
        batch: arrays or shapes [global rows, ...].

    """
    with rematerializations() as repeated:
        compiled = step.compile(batch)
    assert step.plan is not None
    return judge(step.plan, compiled.as_text(), repeated)


def judge(plan: StepPlan, text: str, repeated: Iterable[Rematerialization] = ()) -> Contract:
    """Holds a compiled program's text to a step's plan."""
    mesh = plan.layout.mesh
    program = read_program(text, mesh.shape)
    expected = expected_of(plan)
    parts = data_axes(mesh)
    violations = [*_judged(expected, program.collectives), *map(_replicated, _whole(plan)), *map(_repeated, repeated)]
    cpu = mesh.devices.flat[0].platform == "cpu"
    note = "XLA:CPU sends bfloat16 as float32; compile for a topology to see what an accelerator sends" if cpu else ""
    order = sorted(violations, key=lambda violation: -violation.bytes)
    return Contract(expected, program.collectives, order, program.unread, note, parts)


@dataclass
class _Served:
    """What serves one parameter, one way."""

    expected: list[Expected] = field(default_factory=list)
    found: list[tuple[str, str, int, bool]] = field(default_factory=list)  # op, dtype, bytes, sliced

    @property
    def budget(self) -> int:
        return sum(each.bytes for each in self.expected)

    def budget_of(self, op: str) -> int:
        """What it would send by this operation: an all-reduce in place of a reduce-scatter sends twice as much."""
        return sum(each.bytes * (2 if op == "all-reduce" != each.op else 1) for each in self.expected)

    @property
    def sent(self) -> int:
        return sum(sent for _, _, sent, _ in self.found)


def _judged(expected: Sequence[Expected], collectives: Sequence[Collective]) -> list[Violation]:
    served: dict[tuple[str, Role], _Served] = {}
    for each in expected:
        served.setdefault((each.path, each.role), _Served()).expected.append(each)
    paths = {each.path for each in expected}
    lost: list[tuple[Collective, tuple[int, ...], str, int]] = []
    flat: Counter[str] = Counter()
    for collective in collectives:
        flat.update({path: sent for shape, path, sent in _operands(collective) if len(shape) == 1})
    for collective in collectives:
        for shape, path, sent in _operands(collective):
            role: Role = "gather" if collective.op == "all-gather" else "reduce"
            # XLA sends small gradients as one flat array, under the name of one of them.
            several = collective.op == "all-reduce" and len(shape) == 1 and flat[path] > _most(served.get((path, role)))
            if path not in paths or (path, role) not in served or several:
                lost.append((collective, shape, path, sent))
                continue
            served[path, role].found.append((collective.op, collective.dtype, sent, collective.sliced))
    foreign, together = _matched(served, lost)
    small = [each for (_, role), each in served.items() if role == "reduce" and not each.found]
    if sum(each.budget for each in small) <= TOLERANCE * together + SLACK:
        for with_others in small:
            with_others.expected.clear()
    found = [v for (path, role), each in served.items() if each.expected for v in _violations(path, role, each)]
    return [*found, *foreign]


def _most(served: _Served | None) -> float:
    return TOLERANCE * served.budget_of("all-reduce") + SLACK if served else 0


def _operands(collective: Collective) -> list[tuple[tuple[int, ...], str, int]]:
    """(shape, path, bytes) of each."""
    sizes = [prod(shape) for shape in collective.shapes]
    whole = max(sum(sizes), 1)
    return [
        (shape, path, collective.bytes * size // whole)
        for shape, path, size in zip(collective.shapes, collective.paths, sizes, strict=True)
    ]


def _matched(
    served: dict[tuple[str, Role], _Served], lost: Sequence[tuple[Collective, tuple[int, ...], str, int]]
) -> tuple[list[Violation], int]:
    """Gives what names no parameter to one of its shape that still lacks bytes.

    Returns what is left, as violations, and the bytes of small gradients that travelled together.
    """
    foreign: dict[tuple[str, str, str], int] = {}
    for collective, shape, name, sent in sorted(lost, key=lambda each: -each[3]):
        role: Role = "gather" if collective.op == "all-gather" else "reduce"
        keys = [
            key for key, each in served.items()
            if key[1] == role and each.sent + sent <= TOLERANCE * each.budget_of(collective.op) + SLACK
            and any(_alike(shape, other) for one in each.expected for other in one.shapes)
        ]  # fmt: skip
        if keys:
            served[keys[0]].found.append((collective.op, collective.dtype, sent, collective.sliced))
            continue
        text = f"{collective.dtype}{list(shape)} by {collective.op}"
        foreign[text, name, collective.op] = foreign.get((text, name, collective.op), 0) + sent
    # Gradients of small leaves travel together, as one array of no leaf's shape.
    small = sum(max(0, each.budget - each.sent) for (_, role), each in served.items() if role == "reduce")
    violations, together = [], 0
    for (text, name, op), sent in sorted(foreign.items(), key=lambda item: item[1]):
        if op == "all-reduce" and sent <= small + SLACK:
            small, together = small - sent, together + sent
            continue
        cause = "a sharded operand was not gathered where it is used, or the model mixes the examples of a batch"
        violations.append(Violation("", f"an activation travels, {text}{f' ({name})' if name else ''}", sent, cause))
    return violations, together


def _alike(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """The same array, transposed or flattened, with or without dims of one."""
    return sorted(size for size in shape if size > 1) == sorted(size for size in other if size > 1) or (
        prod(shape) == prod(other) and len(shape) == 1
    )


def _violations(path: str, role: Role, each: _Served) -> list[Violation]:
    """What one parameter's traffic differs in."""
    done = "gathered" if role == "gather" else "reduced"
    declared = jnp.dtype(each.expected[0].dtype)
    wide = [(dtype, sent) for _, dtype, sent, _ in each.found if jnp.dtype(dtype).itemsize > declared.itemsize]
    if wide:
        sent = sum(sent for _, sent in wide)
        more = sent - sent * declared.itemsize // jnp.dtype(wide[0][0]).itemsize
        cause = "the cast moved past the collective: keep the fence (an optimization barrier on the cast shard)"
        return [Violation(path, f"{done} in {wide[0][0]}, declared {declared}", more, cause)]
    scatter = sum(one.bytes for one in each.expected if one.op == "reduce-scatter")
    whole = sum(sent for op, _, sent, _ in each.found if op == "all-reduce")
    allowed = sum(one.bytes for one in each.expected if one.op == "all-reduce")
    if scatter and whole > TOLERANCE * allowed + SLACK:
        cause = "local batches (see local_batch) let it be scattered along each axis of the mesh"
        what = "reduced by an all-reduce of which each device keeps a part, declared a reduce-scatter"
        return [Violation(path, what, each.sent - each.budget, cause)]
    if each.sent > TOLERANCE * each.budget + SLACK:
        cause = "it is used outside its unit, or by more units than one"
        return [Violation(path, f"{done} more often than declared", each.sent - each.budget, cause)]
    if not each.found and each.budget > SLACK:
        cause = "XLA computes on the shards and sends activations; give the parameter to a unit"
        return [Violation(path, f"never {done}", 0, cause)]
    return []


def _whole(plan: StepPlan) -> list[Leaf]:
    """Parameters that the strategy would shard and that are whole on every device, small ones aside."""
    if not plan.layout.strategy.shards_optimizer or plan.layout.mesh.size == 1:
        return []
    size = {path: prod(leaf.shape[leaf.stacked :]) for path, leaf in plan.layout.by_path.items()}
    return [leaf for path, leaf in plan.layout.by_path.items() if not any(leaf.work) and size[path] >= MIN_SIZE]


def _replicated(leaf: Leaf) -> Violation:
    cost = human_bytes(leaf.bytes)
    why = f"by rule '{leaf.rule}'" if leaf.rule != "heuristic" else leaf.reason
    cause = f"its gradient is all-reduced and its state costs {cost} a copy; narrow the rule, or pad a dim"
    return Violation(leaf.path, f"whole on every device, {why}", 0, cause)


def _repeated(found: Rematerialization) -> Violation:
    cause = "XLA found no way between two shardings but to gather it whole (involuntary full rematerialization)"
    return Violation(found.path, f"{found.shape} is replicated at {found.op_name}", 0, cause)


def _sums(rows: Iterable[tuple[str, str, str, int]]) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str, str], int] = {}
    for op, dtype, axis, sent in rows:
        sums[op, dtype, axis] = sums.get((op, dtype, axis), 0) + sent
    return [{"op": op, "dtype": dtype, "axis": axis, "bytes": sent} for (op, dtype, axis), sent in sums.items()]
