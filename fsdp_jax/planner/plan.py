"""A plan: what one training step needs on a machine, as numbers, table rows and text."""

import textwrap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from fsdp_jax.errors import human_bytes
from fsdp_jax.planner.compiled.peak_memory import KINDS, Buffer
from fsdp_jax.planner.compiled.timeline import Event
from fsdp_jax.planner.html import render_fragment, render_page, seconds_text
from fsdp_jax.planner.memory_cliff import MemoryCliff
from fsdp_jax.planner.settings import differing_settings, setting_text
from fsdp_jax.planner.timeline_view import Timeline
from fsdp_jax.tables import text_table
from fsdp_jax.views.bars import BarRow, Bars, Kind

Basis = Literal["compiled", "analytic"]

# State first, in the colours of the page.
MEMORY_KINDS = (
    *(Kind("params", 0), Kind("optimizer", 1), Kind("gradients", 3), Kind("activations", 2)),
    *(Kind("gathered", 4), Kind("other", None)),
)
SHOWN_BUFFERS = 12  # how many of the largest arrays are printed


@dataclass(frozen=True)
class Time:
    """Seconds of a step: the sum of `compute_s`, `memory_s`, `exposed_s` and `host_exposed_s`.

    Attributes:
        compute_s: in kernels bound by matmuls.
        memory_s: in kernels bound by device memory.
        collective_s: that links are busy, overlapped with compute or not.
        exposed_s: that the device waits for collectives.
        step_s: the sum.
        host_s: that the links to the host are busy, of both directions, overlapped or not.
        host_exposed_s: that the device waits for transfers from and to the host.

    """

    compute_s: float
    memory_s: float
    collective_s: float
    exposed_s: float
    step_s: float
    host_s: float = 0.0
    host_exposed_s: float = 0.0


@dataclass(frozen=True)
class Fix:
    """A change that lowers peak memory.

    Attributes:
        change: what to set, as on the command line.
        saves_bytes: predicted saving at the peak of a device.
        peak_bytes: predicted peak with the change.
        costs: the price of the change.
        step_s: predicted seconds of a step with the change; None where they are not known.

    """

    change: str
    saves_bytes: int
    peak_bytes: int
    fits: bool
    costs: str
    step_s: float | None = None


@dataclass(frozen=True)
class Speedup:
    """A change that takes less time, in memory that is free.

    Attributes:
        change: what to set, as on the command line.
        step_s: predicted seconds of a step with the change.
        peak_bytes: predicted peak with the change.

    """

    change: str
    step_s: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """What a step needs on hardware that may be absent; `print(plan)` and notebooks show it.

    Attributes:
        mesh: sizes of `replica` and `data`.
        parameters: how many the model has.
        valley_bytes: steady-state memory: the state on a device between steps.
        peak_bytes: the most memory a device uses in a step, without what the driver and the
            network library reserve.
        host_bytes: host memory that the step uses, per device.
        host_devices: devices of one host, which share its memory.
        host_capacity_bytes: memory of a host in the vendor's reference system; None if unknown.
        from_host_bytes: that a device reads from host memory in a step.
        to_host_bytes: that a device writes to host memory in a step.
        staging_bytes: of the state in host memory, the part on a device at once for its update.
        capacity_bytes: memory of a device.
        usable_bytes: the capacity less what the driver and the network library reserve.
        breakdown: bytes at the peak by kind; their sum is `peak_bytes`.
        valley: bytes of steady-state memory by kind; their sum is `valley_bytes`.
        buffers: arrays at the peak, largest first; none if the plan is analytic.
        collectives: rows as in `inspect --json`.
        wire_bytes: bytes that a device sends per step.
        wire_bytes_limit: bytes that the strategy declares; the contract allows 2% more.
        exposed_bytes: of the bytes sent, those that the device waits for.
        time: None where XLA refuses to compile.
        tokens_per_s_per_device: None where the number of tokens is unknown.
        mfu: model FLOP/s over the peak rate; see `convention`.
        hfu: FLOP/s that the program computes, recomputation included, over the peak rate.
        convention: how model FLOPs are counted.
        compile_s: seconds of compilation, when it was done.
        basis: whether each figure is compiled or analytic.
        cliff: what XLA gave up for want of memory; None if the program shows nothing, or if the
            plan is analytic.
        notes: what a reader must know.
        fixes: what would lower the peak, the one of the lowest peak first.
        faster: what would shorten the step and fits, the fastest first; where much memory is free,
            a few changes are estimated.
        settings: keys of the configuration that was planned: those that say what it is, and the
            others that are not the default. Empty for a plan from Python.
        events: the timeline of one layer, or of the step where nothing loops.
        idle: arrays of other times, for which XLA keeps memory that no array takes at the peak.

    """

    topology: str
    strategy: str
    mesh: Mapping[str, int]
    devices: int
    parameters: int
    valley_bytes: int
    peak_bytes: int
    host_bytes: int = 0
    host_devices: int = 1
    host_capacity_bytes: int | None = None
    from_host_bytes: int = 0
    to_host_bytes: int = 0
    staging_bytes: int = 0
    capacity_bytes: int
    usable_bytes: int
    breakdown: Mapping[str, int]
    valley: Mapping[str, int]
    buffers: Sequence[Buffer] = ()
    collectives: Sequence[Mapping[str, Any]] = ()
    wire_bytes: int
    wire_bytes_limit: int
    exposed_bytes: int = 0
    time: Time | None = None
    tokens_per_s_per_device: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    convention: str
    compile_s: float | None = None
    basis: Mapping[str, Basis]
    cliff: MemoryCliff | None = None
    notes: Sequence[str] = ()
    fixes: Sequence[Fix] = ()
    faster: Sequence[Speedup] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Event] = field(default=(), repr=False)
    idle: Sequence[Buffer] = field(default=(), repr=False)

    @property
    def fits(self) -> bool:
        """Whether the peak fits into a device's usable memory."""
        return self.peak_bytes <= self.usable_bytes

    def to_json(self) -> dict[str, Any]:
        """Converts to the fields of `plan --json`, of JSON's types."""
        shown = list(self.buffers[:SHOWN_BUFFERS])
        fields = asdict(replace(self, buffers=shown, events=(), idle=()))
        del fields["events"], fields["idle"]
        fields["faster"] = list(fields["faster"])
        for key, value in self.settings.items():
            if isinstance(value, tuple):
                fields["settings"][key] = list(value)
        return fields | {"fits": self.fits}

    def summary(self) -> str:
        """Summarizes in one line: machine, whether the step fits, and how fast it is."""
        mesh = " x ".join(f"{name}={size}" for name, size in self.mesh.items())
        verdict = "fits" if self.fits else "DOES NOT FIT"
        peak, usable = human_bytes(self.peak_bytes), human_bytes(self.usable_bytes)
        where = f"{self.strategy} on {self.topology} ({mesh})"
        line = f"{where}: {verdict}, {peak} of {usable} at the peak"
        if self.time is not None:
            line += f", {seconds_text(self.time.step_s)} per step"
        return line

    def headline(self) -> Iterator[tuple[str, str, str]]:
        """Yields (name, value, note) of the most important figures, without absent ones."""
        # memory
        usable, capacity = human_bytes(self.usable_bytes), human_bytes(self.capacity_bytes)
        margin = human_bytes(abs(self.usable_bytes - self.peak_bytes))
        verdict, rest = ("fits", "to spare") if self.fits else ("does not fit", "too much")
        yield "verdict", verdict, f"{margin} {rest}"
        limits = f"of {usable} usable, {capacity} in all\n{self.basis.get('peak_bytes', '')}"
        yield "peak", human_bytes(self.peak_bytes), limits
        parameters = f"of state\n{self.parameters:,} parameters"
        yield "between steps", human_bytes(self.valley_bytes), parameters
        if self.host_bytes:
            yield "host memory", human_bytes(self.host_bytes), f"a device\n{self._host_share()}"
        if transfers := self.host_transfers():
            total = human_bytes(self.from_host_bytes + self.to_host_bytes)
            yield "host transfers", total, transfers.partition(", ")[2]
        # speed
        if self.time:
            yield "time per step", seconds_text(self.time.step_s), self.basis.get("time", "")
        if self.tokens_per_s_per_device is not None:
            speed = f"{self.tokens_per_s_per_device:,.0f}"
            yield "tokens/s per device", speed, f"times {self.devices} devices"
        if self.mfu is not None:
            yield "MFU", f"{self.mfu:.1%}", self.convention
        if self.hfu is not None:
            yield "HFU", f"{self.hfu:.1%}", "including recomputation"
        # communication
        if self.wire_bytes:
            exposed = f"{human_bytes(self.exposed_bytes)} of it exposed"
            yield "sent per step", human_bytes(self.wire_bytes), exposed

    def memory(self) -> Bars:
        """Shows a device's memory by purpose, between steps and at the peak.

        `print` it, let a notebook show it, or `.save("memory.html")`. The mark is the usable
        memory.
        """
        rows = (("between steps", self.valley), ("at the peak", self.breakdown))
        return Bars(
            summary=self.summary(),
            kinds=MEMORY_KINDS,
            bars=[
                # `other` is negative where an analytic estimate exceeds the peak that XLA reports
                BarRow(
                    name, {kind: max(0, size) for kind, size in sizes.items()}, self.usable_bytes
                )
                for name, sizes in rows
            ],
            size="in all",
            expected="usable",
            axes=self.mesh,
        )

    def timeline(self) -> Timeline:
        """Shows the timeline of one layer, or of the step where nothing loops.

        `print` it, let a notebook show it, or `.save("timeline.html")`. Analytic plans have none.
        """
        return Timeline(f"one layer of {self.summary()}", self.events, self.mesh)

    def memory_rows(self) -> list[tuple[str, str, str]]:
        """Lists (kind, bytes, share of the peak) for each kind of memory."""
        peak = max(self.peak_bytes, 1)
        sizes = {kind: self.breakdown[kind] for kind in KINDS}
        return [(kind, human_bytes(size), f"{size / peak:.0%}") for kind, size in sizes.items()]

    def buffer_rows(self) -> list[tuple[str, str, str, str]]:
        """Lists (bytes, kind, array, name) of the largest arrays; like ones share a row."""
        # arrays of one kind, shape and dtype, as the layers of a model have them
        rows: list[tuple[str, str, str, str]] = []
        for members in largest_groups(self.buffers, lambda one: (one.kind, one.array)):
            size, array, first = group_texts(members)
            rows.append((size, members[0].kind, array, first))
        return rows

    def time_rows(self) -> list[tuple[str, str, str]]:
        """Lists (part, seconds, share of the step); the last row is communication in total."""
        if self.time is None:
            return []
        parts = [
            ("matmuls", self.time.compute_s),
            ("memory", self.time.memory_s),
            ("exposed communication", self.time.exposed_s),
        ]
        if self.time.host_s:
            parts.append(("exposed host transfers", self.time.host_exposed_s))
        step = self.time.step_s
        rows = [(name, seconds_text(s), f"{s / step:.0%}") for name, s in parts]
        rows.append(("communication, overlapped or not", seconds_text(self.time.collective_s), ""))
        return rows

    def speed(self) -> str:
        """Formats tokens per second and utilization, with their convention."""
        parts = []
        if self.tokens_per_s_per_device is not None:
            parts.append(f"{self.tokens_per_s_per_device:.0f} tokens/s per device")
        if self.mfu is not None:
            convention = f" ({self.convention})" if self.convention else ""
            parts.append(f"MFU {self.mfu:.1%}{convention}")
        if self.hfu is not None:
            parts.append(f"HFU {self.hfu:.1%} (every matmul of the program)")
        return ", ".join(parts)

    def fix_rows(self) -> list[tuple[str, str, str, str, str]]:
        """Lists (change, bytes saved, peak after, whether that fits, cost) for each fix."""
        return [
            (
                fix.change,
                human_bytes(fix.saves_bytes),
                human_bytes(fix.peak_bytes),
                "yes" if fix.fits else "no",
                fix.costs,
            )
            for fix in self.fixes
        ]

    def faster_rows(self) -> list[tuple[str, str, str, str]]:
        """Lists (change, seconds of a step, those of this plan, peak) of each faster setting."""
        if self.time is None:
            return []
        now = seconds_text(self.time.step_s)
        return [
            (each.change, seconds_text(each.step_s), now, human_bytes(each.peak_bytes))
            for each in self.faster
        ]

    def setting_rows(self) -> list[tuple[str, str]]:
        """Lists (key, value) of what was planned."""
        return [(key, setting_text(value)) for key, value in self.settings.items()]

    def wire_summary(self) -> str:
        """Formats one line on the bytes that a device sends."""
        if not self.wire_bytes_limit:
            return "nothing is sent"
        ratio = self.wire_bytes / self.wire_bytes_limit
        return (
            f"a device sends {human_bytes(self.wire_bytes)} per step ({ratio:.3f} of what "
            f"{self.strategy} declares), of which {human_bytes(self.exposed_bytes)} are exposed"
        )

    def host_summary(self) -> str:
        """Formats one line on host memory; "" where none is used."""
        if not self.host_bytes:
            return ""
        return f"host: {human_bytes(self.host_bytes)} a device, {self._host_share()}"

    def _host_share(self) -> str:
        """Formats the bytes of a host's devices in its memory, its capacity, and those staged."""
        text = human_bytes(self.host_bytes * self.host_devices)
        if self.host_capacity_bytes is not None:
            text += f" of {human_bytes(self.host_capacity_bytes)}"
        text += " a host"
        if self.staging_bytes:
            text += f"; {human_bytes(self.staging_bytes)} at once on the device for the update"
        return text

    def host_transfers(self) -> str:
        """Formats one line on transfers between device and host; "" without any."""
        total = self.from_host_bytes + self.to_host_bytes
        if not total:
            return ""
        line = f"host transfers {human_bytes(total)}"
        if self.time is None or not self.time.host_s:
            return line
        hidden = 1 - self.time.host_exposed_s / self.time.host_s
        return f"{line}, {seconds_text(self.time.host_s)}, {max(0.0, hidden):.0%} hidden"

    def remarks(self) -> list[str]:
        """Lists the memory cliff, if there is one, and the notes."""
        if self.cliff is None:
            return list(self.notes)
        return [str(self.cliff), *self.notes]

    def basis_summary(self) -> str:
        """Lists the figures that are compiled, and those that are analytic."""
        kinds: tuple[Basis, ...] = ("compiled", "analytic")
        names = {kind: [name for name, of in self.basis.items() if of == kind] for kind in kinds}
        return "; ".join(f"{kind}: {', '.join(names[kind])}" for kind in kinds if names[kind])

    def __str__(self) -> str:
        steady_state = f"steady-state memory, between steps: {human_bytes(self.valley_bytes)}"
        memory = (steady_state, self.host_summary(), self.host_transfers())

        def table(*columns: str, rows: Sequence[Sequence[str]], right: Sequence[str]) -> str:
            if not rows:
                return ""
            return text_table(columns, rows, right=right)

        shares, largest = ("bytes", "share"), "largest at the peak"
        change = "to take less (analytic)", "saves", "peak", "fits", "costs"
        spare = human_bytes(max(0, self.usable_bytes - self.peak_bytes))
        faster = f"faster, as {spare} are free (analytic)", "a step", "now", "peak"
        planned = ", ".join(f"{key} {value}" for key, value in self.setting_rows())
        blocks = [
            self.summary(),
            textwrap.fill(f"planned: {planned}", 78, subsequent_indent="  ") if planned else "",
            "\n".join(line for line in memory if line),
            table("at the peak", *shares, rows=self.memory_rows(), right=shares),
            table(largest, "for", "array", "of", rows=self.buffer_rows(), right=(largest,)),
            table("a step", "takes", "share", rows=self.time_rows(), right=("takes", "share")),
            self.speed(),
            self.wire_summary(),
            table(*change, rows=self.fix_rows(), right=("saves", "peak")),
            table(*faster, rows=self.faster_rows(), right=faster[1:]),
            "\n".join([*self.remarks(), self.basis_summary()]),
        ]
        return "\n\n".join(block for block in blocks if block)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"

    def _repr_html_(self) -> str:
        return render_fragment(self)


def largest_groups(
    buffers: Sequence[Buffer], key: Callable[[Buffer], Hashable]
) -> list[list[Buffer]]:
    """Groups arrays by a key, and returns the dozen groups of the most bytes."""
    groups: dict[Hashable, list[Buffer]] = {}
    for buffer in buffers:
        groups.setdefault(key(buffer), []).append(buffer)
    ordered = sorted(groups.values(), key=lambda group: -sum(one.bytes for one in group))
    return ordered[:SHOWN_BUFFERS]


def group_texts(members: Sequence[Buffer]) -> tuple[str, str, str]:
    """Formats (bytes, arrays, names) of a group of arrays of one shape and dtype."""
    first, *others = dict.fromkeys(buffer.path or buffer.operation for buffer in members)
    if others:
        first += f" (+{len(others)})"
    array = members[0].array
    if len(members) > 1:
        array = f"{len(members)} x {array}"
    return human_bytes(sum(one.bytes for one in members)), array, first


def plan_html(plan: Plan) -> str:
    """Renders the plan as a self-contained page."""
    return render_page(plan.summary(), [plan])


def compare_html(plans: Sequence[Plan], names: Sequence[str] = ()) -> str:
    """Renders plans side by side, their memory on one scale, each in full on a click.

    `names`: of the plans, such as their files; default: number, strategy and machine.

    Raises:
        ValueError: no plans.

    """
    if not plans:
        raise ValueError("no plans to compare")
    if not names:
        names = [
            f"{number}. {plan.strategy} on {plan.topology}" for number, plan in enumerate(plans, 1)
        ]
    return render_page(f"plans: {'; '.join(names)}", plans, list(names))


def plans_table(names: Sequence[str], plans: Sequence[Plan]) -> str:
    """Formats plans side by side as text, a row for each figure."""
    figures = [_figure_texts(plan).items() for plan in plans]
    # what differs between them, and below it what follows from that
    named = {name for figure in figures for name, _ in figure}
    rows = [row for row in differing_settings(plans) if row[0] not in named]
    rows += [(row[0][0], *(text for _, text in row)) for row in zip(*figures, strict=True)]
    return text_table(("", *names), rows, right=names)


def _figure_texts(plan: Plan) -> dict[str, str]:
    """Formats the figures of a plan in `plans_table`, by name; "-" for an absent one."""
    fields = {"step": "step_s", "  matmuls": "compute_s", "  memory": "memory_s"}
    fields |= {"  exposed": "exposed_s", "  host, exposed": "host_exposed_s"}
    times = dict.fromkeys(fields, "-")
    if plan.time is not None:
        times = {name: seconds_text(getattr(plan.time, each)) for name, each in fields.items()}
    tokens, mfu = plan.tokens_per_s_per_device, plan.mfu
    return {
        "topology": plan.topology,
        "strategy": plan.strategy,
        "fits": "yes" if plan.fits else "NO",
        "parameters": f"{plan.parameters / 1e9:.3g} B",
        "steady state": human_bytes(plan.valley_bytes),
        "peak": human_bytes(plan.peak_bytes),
        **{f"  {kind}": human_bytes(plan.breakdown[kind]) for kind in KINDS},
        "host memory": human_bytes(plan.host_bytes),
        "  staging": human_bytes(plan.staging_bytes),
        "sent": human_bytes(plan.wire_bytes),
        "exposed": human_bytes(plan.exposed_bytes),
        **times,
        "tokens/s per device": "-" if tokens is None else f"{tokens:.0f}",
        "MFU": "-" if mfu is None else f"{mfu:.1%}",
        "basis": plan.basis["peak_bytes"],
    }
