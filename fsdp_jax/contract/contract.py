"""The contract: compares the traffic that a step declares with the compiled program's.

In a step with explicit collectives, to send an activation is a violation. With sharding annotations
XLA may send activations where they are less than the parameter, and the contract holds while at
most 1.02 times the declared bytes are sent and the dtypes are those declared.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from fsdp_jax.contract.attribution import by_user_axes
from fsdp_jax.contract.by_parameter import bars_by_parameter
from fsdp_jax.contract.expected import ExpectedTraffic, expected_traffic, reduces_everywhere
from fsdp_jax.contract.placements import placement_rules, replicated_parameters
from fsdp_jax.contract.violations import Violation, traffic_violations, undeclared_axis_violations
from fsdp_jax.errors import ArgumentError, MissingPackageError, human_bytes
from fsdp_jax.hlo.collectives import Collective, read_collectives
from fsdp_jax.hlo.partitioner_log import Rematerialization, collect_rematerializations
from fsdp_jax.sharding.layout import Layout, Leaf
from fsdp_jax.sharding.mesh import MeshAxes
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.step.step_plan import StepPlan
from fsdp_jax.step.traced_checks import params_read_outside
from fsdp_jax.tables import html_table, shortened, text_table
from fsdp_jax.tree import PyTree
from fsdp_jax.views.bars import Bars

COLUMNS = ("op", "dtype", "axis", "times", "sent per step", "hidden", "for")


@dataclass(frozen=True)
class Contract:
    """The verdict on a compiled step.

    `print(contract)` shows the collectives. A notebook, and a file by `save`, show what each
    parameter sends, as `print(contract.by_parameter())` does.

    Attributes:
        expected: the traffic that each parameter declares.
        collectives: those of the program.
        violations: differences between the two, the most bytes first.
        unread: parts of the program that could not be read; where there are any, the contract does
            not hold.
        choices: with sharding annotations, a line on what XLA sends in place of declared traffic,
            within the limit.
        note: further lines, such as on differences that the platform hides.
        layout: of the state.
        others: the leaves of the parameters of other models of the step, by path in its trace.

    """

    expected: Sequence[ExpectedTraffic]
    collectives: Sequence[Collective]
    violations: Sequence[Violation]
    layout: Layout = field(repr=False)
    unread: Sequence[str] = ()
    choices: Sequence[str] = ()
    note: str = ""
    others: Mapping[str, Leaf] = field(default_factory=dict, repr=False)

    @property
    def axes(self) -> MeshAxes:
        """The mesh, and the roles of its axes."""
        return self.layout.axes

    @property
    def holds(self) -> bool:
        """Whether the program sends the declared traffic, and at most 1.02 times its bytes."""
        return not self.violations and not self.unread

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes that a device sends per step, except along the model's own mesh axes."""
        own, _ = by_user_axes(self.collectives, self.axes)
        return sum(each.bytes for each in own)

    @cached_property
    def model_bytes(self) -> int:
        """Bytes that a device sends per step along the model's own mesh axes alone."""
        _, model = by_user_axes(self.collectives, self.axes)
        return sum(each.bytes for each in model)

    @cached_property
    def wire_bytes_limit(self) -> int:
        """Bytes per device and step that the strategy declares; the contract allows 2% more."""
        return sum(each.bytes for each in self.expected)

    def rows(self) -> list[dict[str, Any]]:
        """Lists the collectives as `inspect --json` does; equal ones share a row."""
        totals: dict[tuple[str, ...], Counter[str]] = {}
        own, model = by_user_axes(self.collectives, self.axes)
        for each in sorted(own + model, key=lambda c: -c.bytes):
            where = ", ".join(dict.fromkeys(path for path in each.paths if path)) or "-"
            total = totals.setdefault((each.op, each.dtype, each.axis, where), Counter())
            total.update(count=each.count, bytes=each.bytes, overlapped_bytes=each.hidden)
        rows: list[dict[str, Any]] = [
            {"op": op, "dtype": dtype, "axis": axis, **total, "where": where}
            for (op, dtype, axis, where), total in totals.items()
        ]
        return sorted(rows, key=lambda row: -row["bytes"])

    def to_json(self) -> dict[str, Any]:
        """Converts the contract to the fields of `inspect --json` with a topology.

        `model_bytes` is there where the mesh has axes of the model's own.
        """
        fields: dict[str, Any] = {
            "collectives": self.rows(),
            "contract": {
                "holds": self.holds,
                "expected": _summed_rows(vars(each) for each in self.expected),
                "found": _summed_rows(self.rows()),
                "violations": [str(violation) for violation in self.violations] + list(self.unread),
                "choices": list(self.choices),
            },
            "wire_bytes": self.wire_bytes,
            "wire_bytes_limit": self.wire_bytes_limit,
        }
        if self.axes.model:
            fields["model_bytes"] = self.model_bytes
        return fields

    def by_parameter(self) -> Bars:
        """Shows what each parameter sends along each mesh axis: a bar, with a mark at the declared.

        `print` it, or `.save("contract.html")`; notebooks show it.
        """
        verdict, *lines = self._verdict().splitlines()
        hidden = sum(each.hidden for each in self.collectives)
        total = sum(each.bytes for each in self.collectives)
        cards = [
            ("contract", "holds" if self.holds else "does not hold", ""),
            ("sent per step", human_bytes(self.wire_bytes), "by a device"),
            ("declared", human_bytes(self.wire_bytes_limit), f"{self._ratio():.3f} of it is sent"),
        ]
        if self.axes.mesh.devices.flat[0].platform != "cpu" and total:
            note = f"{hidden / total:.0%}, while a kernel runs"
            cards.append(("hidden", human_bytes(hidden), note))
        return bars_by_parameter(
            self.axes,
            {**self.layout.by_path, **self.others},
            self.expected,
            self.collectives,
            self.violations,
            summary=verdict,
            cards=cards,
            notes=[line.strip() for line in lines],
        )

    def save(self, path: str | Path) -> None:
        """Writes `by_parameter` to a file: a page for `.html`, text for `.txt`."""
        self.by_parameter().save(path)

    def _repr_html_(self) -> str:
        try:
            return self.by_parameter()._repr_html_()
        except MissingPackageError as error:  # a notebook without templates has the table
            caption = f"for bars by parameter: {error.fix}"
            table = html_table(COLUMNS, self._table_cells(), caption=caption)
            return f"{table}<pre>{escape(self._verdict())}</pre>"

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        table = "nothing is sent"
        if self.collectives:
            table = text_table(COLUMNS, self._table_cells(), right=COLUMNS[3:6])
        return f"{table}\n{self._verdict()}"

    def _table_cells(self) -> list[tuple[str, ...]]:
        """Formats the cells of the table: for each of `rows`, one for each of `COLUMNS`."""
        cells: list[tuple[str, ...]] = []
        for row in self.rows():
            sizes = human_bytes(row["bytes"]), human_bytes(row["overlapped_bytes"])
            what = row["op"], row["dtype"], row["axis"], str(row["count"])
            cells.append((*what, *sizes, shortened(row["where"], 60)))
        return cells

    def _ratio(self) -> float:
        """Computes the bytes sent over those declared; 1 where none are declared."""
        if not self.wire_bytes_limit:
            return 1.0
        return self.wire_bytes / self.wire_bytes_limit

    def _verdict(self) -> str:
        """Formats the bytes sent and declared, and a line for each violation, choice and note."""
        verdict = f"a device sends {human_bytes(self.wire_bytes)} per step; "
        verdict += f"declared {human_bytes(self.wire_bytes_limit)} ({self._ratio():.3f}); "
        verdict += f"the contract {'holds' if self.holds else 'DOES NOT HOLD'}"
        if self.axes.model_shards > 1:
            along = "+".join(self.axes.model)
            verdict += f"; along '{along}' the model itself sends {human_bytes(self.model_bytes)}"
        lines = [
            verdict,
            *(f"  {violation}" for violation in self.violations),
            *(f"  not judged: {line}" for line in self.unread),
            *(f"  {choice}" for choice in self.choices),
        ]
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)


def check_contract(step: CompiledStep, batch: PyTree) -> Contract:
    """Compiles a step for its mesh and compares the program's traffic with the declared.

    Args:
        step: from `Sharded.make_train_step`; the devices of its mesh need not exist.
        batch: arrays or shapes [global rows, ...].

    Raises:
        ValueError: something else than such a step.

    """
    if not isinstance(step, CompiledStep):
        raise ArgumentError(
            "not a step that the library compiles, as that of `pure_step` is not",
            where="step",
            expected="CompiledStep",
            got=type(step).__name__,
            fix="pass sharded.make_train_step(loss_fn, ...), with the settings of the other",
        )
    with collect_rematerializations() as repeated:
        compiled = step.compile(batch)
    outside = params_read_outside(step.plan, step.microbatch(batch))
    return check_program(step.plan, compiled.as_text(), repeated, outside)


def check_program(
    plan: StepPlan,
    text: str,
    repeated: Iterable[Rematerialization] = (),
    outside: Mapping[str, str] | None = None,
) -> Contract:
    """Compares the traffic of a compiled program with what its step's plan declares.

    `text`: `compiled.as_text()`; `repeated`: what XLA's partitioner reported while it compiled;
    `outside`: what `params_read_outside` returned.
    """
    outside = outside or {}
    axes = plan.layout.axes
    annotated = not plan.local_batch
    program = read_collectives(text, axes.mesh.shape)
    expected = expected_traffic(plan)
    # The bytes, by parameter and by axis. Those of the model along axes of its own are not
    # declared.
    collectives, _ = by_user_axes(program.collectives, axes)
    traffic, choices = traffic_violations(
        expected,
        collectives,
        plan.traced,
        annotated=annotated,
        rules=placement_rules(plan),
    )
    traffic += undeclared_axis_violations(expected, collectives)
    # Placements that cost memory or traffic, whether or not the bytes differ from the declared.
    cause = "XLA found no way between two shardings but to gather all of it "
    cause += "(involuntary full rematerialization)"
    violations = [
        *traffic,
        *replicated_parameters(plan),
        *(
            Violation(each.path, f"{each.shape} is replicated at {each.op_name}", 0, cause)
            for each in repeated
        ),
    ]
    violations = [_explained_by_reads(violation, outside) for violation in violations]
    # What the user should know to judge them.
    notes = [*_note_on_reads(outside), *_note_on_padding(plan, expected)]
    if traffic and annotated:
        notes.append(
            "with sharding annotations, XLA chooses what is sent; local_batch=True makes the "
            "collectives explicit"
        )
    if axes.mesh.devices.flat[0].platform == "cpu":
        notes.append(
            "XLA:CPU sends bfloat16 as float32 and float8 as float16, and reduces annotated "
            "gradients unsharded; compile for a topology to see what an accelerator sends"
        )
    violations.sort(key=lambda violation: -violation.bytes)
    others = {path: leaf for path, (comm, leaf) in plan.traced.items() if comm.model}
    return Contract(
        expected=expected,
        collectives=program.collectives,
        violations=violations,
        layout=plan.layout,
        unread=program.unread,
        choices=choices,
        note="\n".join(notes),
        others=others,
    )


def _explained_by_reads(violation: Violation, outside: Mapping[str, str]) -> Violation:
    """Replaces the cause of a violation where a parameter that is read outside its unit has it."""
    named = [path for path in outside if path in f"{violation.path} {violation.cause}"]
    if not named or violation.kind == "less":
        return violation
    cause = f"'{named[0]}' is read outside its unit, at {outside[named[0]]}: XLA gathers it there, "
    cause += "in the dtype that it is stored in; read it in a method of its unit, or leave the "
    cause += "module out of units"
    return replace(violation, cause=cause)


def _note_on_reads(outside: Mapping[str, str]) -> list[str]:
    """Formats a line on parameters that are read outside their units; none without any."""
    if not outside:
        return []
    path, where = next(iter(outside.items()))
    text = f"read outside its unit, so that XLA may gather it there: '{path}' at {where}"
    if len(outside) > 1:
        text += f" and {len(outside) - 1} more"
    return [text]


def _note_on_padding(plan: StepPlan, expected: Sequence[ExpectedTraffic]) -> list[str]:
    """Formats the contract's note on gradients that are reduced everywhere; none without any."""
    leaves = plan.layout.by_path
    # The first reduction of each; a hybrid strategy's second is along the replicas.
    first: dict[str, ExpectedTraffic] = {}
    for each in expected:
        if each.op == "all-reduce" and reduces_everywhere(plan, leaves[each.path]):
            first.setdefault(each.path, each)
    if not first:
        return []
    more = human_bytes(sum(each.bytes for each in first.values()) // 2)
    text = f"no dim is divisible of {len(first)} parameters, such as '{next(iter(first))}': XLA "
    text += f"all-reduces their gradients, {more} more per step than to scatter them, as "
    return [text + "local_batch=True does"]


def _summed_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds up the bytes of rows of the same op, dtype and axis."""
    sums = Counter[tuple[str, str, str]]()
    for row in rows:
        sums[row["op"], row["dtype"], row["axis"]] += row["bytes"]
    return [
        {"op": op, "dtype": dtype, "axis": axis, "bytes": sent}
        for (op, dtype, axis), sent in sums.items()
    ]
