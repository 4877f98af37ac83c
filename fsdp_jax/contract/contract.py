"""The contract: what a step declares that it sends, held against what the compiled program sends.

Every byte of the program is given to the parameter that it serves: by the scope that the library
puts around its collectives, and where XLA has lost that, by the shape. What serves no parameter is
an activation. In a step with explicit collectives that is a violation; by sharding annotations XLA
may send activations where they are less than the parameter, and the contract holds while the
declared bytes are not exceeded and the dtypes are those declared.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from math import prod
from typing import Any

from fsdp_jax.contract.attribution import Violation, judged, judged_by_sum, other_axes
from fsdp_jax.contract.expected import Expected, axis_name, expected_of
from fsdp_jax.errors import human_bytes
from fsdp_jax.hlo.collectives import Collective, read_program
from fsdp_jax.hlo.partitioner_log import Rematerialization, rematerializations
from fsdp_jax.sharding.layout import Leaf
from fsdp_jax.sharding.mesh import data_axes
from fsdp_jax.sharding.rules import MIN_SIZE
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.step.train_step import StepPlan
from fsdp_jax.tables import html_table, text_table
from fsdp_jax.tree import PyTree

COLUMNS = ("op", "dtype", "axis", "times", "sent per step", "hidden", "for")


@dataclass(frozen=True)
class Contract:
    """The verdict on a compiled step. `print(contract)` shows it.

    Attributes:
        expected: what each parameter declares.
        collectives: what the program sends.
        violations: what differs, dearest first.
        unread: what the reader could not judge; where it is not empty the contract does not hold.
        choices: by sharding annotations, what XLA sends in place of what is declared, within the
            limit.
        note: what the platform hides.

    """

    expected: Sequence[Expected]
    collectives: Sequence[Collective]
    violations: Sequence[Violation]
    unread: Sequence[str] = ()
    choices: Sequence[str] = ()
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
            row = rows.setdefault(
                (each.op, each.dtype, axis, where),
                {
                    "op": each.op,
                    "dtype": each.dtype,
                    "axis": axis,
                    "count": 0,
                    "bytes": 0,
                    "overlapped_bytes": 0,
                    "where": where,
                },
            )
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
                "found": _sums(
                    (row["op"], row["dtype"], row["axis"], row["bytes"]) for row in self.rows()
                ),
                "violations": [str(violation) for violation in self.violations] + list(self.unread),
                "choices": list(self.choices),
            },
            "wire_bytes": self.wire_bytes,
            "wire_bytes_limit": self.wire_bytes_limit,
        }

    def _repr_html_(self) -> str:
        *_, verdict = str(self).partition("a device sends ")
        return html_table(COLUMNS, self._cells()) + f"<pre>a device sends {escape(verdict)}</pre>"

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row["op"],
                row["dtype"],
                row["axis"],
                str(row["count"]),
                human_bytes(row["bytes"]),
                human_bytes(row["overlapped_bytes"]),
                row["where"] if len(row["where"]) < 60 else row["where"][:59] + "…",
            )
            for row in self.rows()
        ]

    def __str__(self) -> str:
        ratio = self.wire_bytes / self.wire_bytes_limit if self.wire_bytes_limit else 1.0
        lines = [
            text_table(COLUMNS, self._cells(), right=COLUMNS[3:6])
            if self.collectives
            else "nothing is sent",
            f"a device sends {human_bytes(self.wire_bytes)} per step; declared {human_bytes(self.wire_bytes_limit)} "
            f"({ratio:.3f}); the contract {'holds' if self.holds else 'DOES NOT HOLD'}",
            *(f"  {violation}" for violation in self.violations),
            *(f"  not judged: {line}" for line in self.unread),
            *(f"  {choice}" for choice in self.choices),
            *([self.note] if self.note else []),
        ]
        return "\n".join(lines)


def check_contract(step: CompiledStep, batch: PyTree) -> Contract:
    """Compiles a step for its mesh and holds the program to what the step declares.

    Args:
        step: from `Sharded.train_step`; its mesh may be of devices that are not there.
        batch: arrays or shapes [global rows, ...].

    """
    with rematerializations() as repeated:
        compiled = step.compile(batch)
    return judge(step.plan, compiled.as_text(), repeated)


def judge(plan: StepPlan, text: str, repeated: Iterable[Rematerialization] = ()) -> Contract:
    """Holds a compiled program's text to a step's plan."""
    mesh = plan.layout.mesh
    program = read_program(text, mesh.shape)
    expected = expected_of(plan)
    parts = data_axes(mesh)
    choices: list[str] = []
    if plan.local_batch:
        traffic = judged(expected, program.collectives, plan.layout.by_path)
    else:
        traffic, choices = judged_by_sum(expected, program.collectives, plan.layout.by_path)
    traffic += other_axes(expected, program.collectives, parts)
    violations = [*traffic, *map(_replicated, _whole(plan)), *map(_repeated, repeated)]
    cpu = mesh.devices.flat[0].platform == "cpu"
    note = ""
    if cpu:
        note = "XLA:CPU sends bfloat16 as float32, and reduces annotated gradients whole; compile for a topology to see "
        note += "what an accelerator sends"
    if traffic and not plan.local_batch:
        ours = "by sharding annotations, XLA chooses what is sent; train_step(local_batch=True) says it itself"
        note = f"{ours}\n{note}" if note else ours
    order = sorted(violations, key=lambda violation: -violation.bytes)
    return Contract(expected, program.collectives, order, program.unread, choices, note, parts)


def _whole(plan: StepPlan) -> list[Leaf]:
    """Parameters that the strategy would shard and that are whole on every device, small ones
    aside.
    """
    if not plan.layout.strategy.shards_optimizer or plan.layout.mesh.size == 1:
        return []
    size = {path: prod(leaf.shape[leaf.stacked :]) for path, leaf in plan.layout.by_path.items()}
    return [
        leaf
        for path, leaf in plan.layout.by_path.items()
        if not any(leaf.grad_spec) and size[path] >= MIN_SIZE
    ]


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
    return [
        {"op": op, "dtype": dtype, "axis": axis, "bytes": sent}
        for (op, dtype, axis), sent in sums.items()
    ]
