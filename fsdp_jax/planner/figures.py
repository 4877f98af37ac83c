"""The figures of a plan: what a step takes on hardware that need not be there, as numbers, rows and
text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fsdp_jax.errors import human_bytes
from fsdp_jax.planner.compiled.peak_memory import KINDS, Buffer
from fsdp_jax.planner.compiled.timeline import Event
from fsdp_jax.tables import text_table

Basis = Literal["compiled", "analytic"]

BUFFERS = 12
"""Largest arrays that are printed."""
MOST = 0.75
"""Of a GPU's memory, what jax takes unless it is told otherwise."""


@dataclass(frozen=True)
class Time:
    """Seconds of a step. `step_s` is the sum of `compute_s`, `memory_s` and `exposed_s`.

    Attributes:
        compute_s: that matrix products take.
        memory_s: that device memory takes, in what it bounds.
        collective_s: that links are busy, beside the others or not.
        exposed_s: that the device waits for them.

    """

    compute_s: float
    memory_s: float
    collective_s: float
    exposed_s: float
    step_s: float


@dataclass(frozen=True)
class Fix:
    """A change that takes less memory.

    Attributes:
        change: what to set, as on the command line, or in words where there is no key yet.
        saves_bytes: at the peak of a device, predicted.
        peak_bytes: that is left then.
        fits: whether that is little enough.
        costs: what it costs.
        available: whether this release can do it.

    """

    change: str
    saves_bytes: int
    peak_bytes: int
    fits: bool
    costs: str
    available: bool = True


@dataclass(frozen=True)
class Figures:
    """What a step takes.

    Attributes:
        topology: as written.
        mesh: sizes of `replica` and `data`.
        parameters: of the model.
        valley_bytes: of state on a device between steps.
        peak_bytes: that a device takes at most; what the driver and the network library keep is not
            in it.
        host_bytes: of the host's memory, for each device.
        capacity_bytes: of a device.
        usable_bytes: of it, less what the driver and the network library keep.
        breakdown: bytes at the peak by what they are for; their sum is `peak_bytes`.
        buffers: arrays at the peak, largest first; none where the plan is analytic.
        collectives: rows as of `inspect --json`.
        wire_bytes: that a device sends per step.
        wire_bytes_limit: that the strategy must send.
        exposed_bytes: of those sent, what the device waits for.
        time: None where XLA refuses to compile.
        tokens_per_s_per_device: None where the number of tokens is not known.
        mfu: model FLOPs over the peak rate; see `convention`.
        hfu: FLOPs that the program computes, recomputation and all, over the peak rate.
        convention: how model FLOPs are counted.
        compile_s: that compiling took when it was done.
        basis: where each figure comes from.
        notes: what a reader must know.
        fixes: what would make it smaller, most first.
        events: of one layer, or of the step where nothing loops.

    """

    topology: str
    strategy: str
    mesh: Mapping[str, int]
    devices: int
    parameters: int
    valley_bytes: int
    peak_bytes: int
    host_bytes: int
    capacity_bytes: int
    usable_bytes: int
    breakdown: Mapping[str, int]
    buffers: Sequence[Buffer]
    collectives: Sequence[Mapping[str, Any]]
    wire_bytes: int
    wire_bytes_limit: int
    exposed_bytes: int
    time: Time | None
    tokens_per_s_per_device: float | None
    mfu: float | None
    hfu: float | None
    convention: str
    compile_s: float | None
    basis: Mapping[str, Basis]
    notes: Sequence[str] = ()
    fixes: Sequence[Fix] = ()
    events: Sequence[Event] = field(default=(), repr=False)

    @property
    def fits(self) -> bool:
        """Whether a device has the memory."""
        return self.peak_bytes <= self.usable_bytes

    def to_json(self) -> dict[str, Any]:
        """The fields of `plan --json`."""
        plain = asdict(self) | {"fits": self.fits}
        plain["buffers"] = [asdict(one) for one in self.buffers[:BUFFERS]]
        del plain["events"]
        return plain

    def summary(self) -> str:
        """One line: where, whether it fits, and how fast."""
        mesh = " x ".join(f"{name}={size}" for name, size in self.mesh.items())
        verdict = "fits" if self.fits else "DOES NOT FIT"
        peak, usable = human_bytes(self.peak_bytes), human_bytes(self.usable_bytes)
        speed = f", {_seconds(self.time.step_s)} a step" if self.time else ""
        return f"{self.strategy} on {self.topology} ({mesh}): {verdict}, {peak} of {usable} at the peak{speed}"

    def memory_rows(self) -> list[tuple[str, str, str]]:
        """(what for, bytes, share of the peak)."""
        return [
            (
                kind,
                human_bytes(self.breakdown[kind]),
                f"{100 * self.breakdown[kind] / max(self.peak_bytes, 1):.0f}%",
            )
            for kind in KINDS
        ]

    def buffer_rows(self) -> list[tuple[str, str, str, str]]:
        """(bytes, what for, array, of what) of the largest arrays; those of one shape and purpose
        share a row.
        """
        groups: dict[tuple[str, str], list[Buffer]] = {}
        for one in self.buffers:
            groups.setdefault((one.kind, one.array), []).append(one)
        rows = []
        for (kind, array), members in sorted(
            groups.items(), key=lambda item: -sum(one.bytes for one in item[1])
        ):
            names = list(dict.fromkeys(one.path or one.operation for one in members))
            name = names[0] + (f" (+{len(names) - 1})" if len(names) > 1 else "")
            count = f"{len(members)} x " if len(members) > 1 else ""
            rows.append(
                (human_bytes(sum(one.bytes for one in members)), kind, f"{count}{array}", name)
            )
        return rows[:BUFFERS]

    def time_rows(self) -> list[tuple[str, str, str]]:
        """(what, seconds, share of the step)."""
        if self.time is None:
            return []
        parts = [
            ("products", self.time.compute_s),
            ("memory", self.time.memory_s),
            ("waiting for collectives", self.time.exposed_s),
        ]
        rows = [(name, _seconds(s), f"{100 * s / self.time.step_s:.0f}%") for name, s in parts]
        return [*rows, ("collectives, hidden or not", _seconds(self.time.collective_s), "")]

    def speed(self) -> str:
        """Tokens and utilization, with their convention."""
        said = []
        if self.tokens_per_s_per_device is not None:
            said.append(f"{self.tokens_per_s_per_device:.0f} tokens/s a device")
        if self.mfu is not None:
            said.append(f"MFU {100 * self.mfu:.1f}% ({self.convention})")
        if self.hfu is not None:
            said.append(f"HFU {100 * self.hfu:.1f}% (every product of the program)")
        return ", ".join(said)

    def fix_rows(self) -> list[tuple[str, str, str, str, str]]:
        """(change, bytes saved, peak after, whether that fits, cost)."""
        return [
            (
                one.change if one.available else f"{one.change} (not in this release)",
                human_bytes(one.saves_bytes),
                human_bytes(one.peak_bytes),
                "yes" if one.fits else "no",
                one.costs,
            )
            for one in self.fixes
        ]

    def __str__(self) -> str:
        blocks = [self.summary()]
        valley = f"{human_bytes(self.valley_bytes)} of it is state, held between steps"
        blocks.append(
            f"{valley}\n{text_table(('at the peak', 'bytes', 'share'), self.memory_rows(), right=('bytes', 'share'))}"
        )
        if self.buffers:
            largest = ("largest at the peak", "for", "array", "of")
            blocks.append(text_table(largest, self.buffer_rows(), right=largest[:1]))
        if self.time:
            step = ("a step", "takes", "share")
            blocks.append(
                f"{text_table(step, self.time_rows(), right=step[1:])}\n{self.speed()}".rstrip()
            )
        blocks.append(self.wire())
        if self.fixes:
            fixes = ("to take less (analytic)", "saves", "peak", "fits", "costs")
            blocks.append(text_table(fixes, self.fix_rows(), right=fixes[1:3]))
        blocks.append("\n".join([*self.notes, self.bases()]))
        return "\n\n".join(block for block in blocks if block)

    def wire(self) -> str:
        """What is sent, in one line."""
        if not self.wire_bytes_limit:
            return "nothing is sent"
        ratio = self.wire_bytes / self.wire_bytes_limit
        return (
            f"a device sends {human_bytes(self.wire_bytes)} a step ({ratio:.3f} of what {self.strategy} declares), "
            f"and waits for {human_bytes(self.exposed_bytes)} of them"
        )

    def bases(self) -> str:
        """Which figures are compiled and which are analytic."""
        kinds = {
            kind: [name for name, of in self.basis.items() if of == kind]
            for kind in ("compiled", "analytic")
        }
        return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"


def plans_table(names: Sequence[str], plans: Sequence[Figures]) -> str:
    """Plans side by side, a row for each figure."""
    figures: list[tuple[str, list[str]]] = [
        ("topology", [one.topology for one in plans]),
        ("strategy", [one.strategy for one in plans]),
        ("fits", ["yes" if one.fits else "NO" for one in plans]),
        ("parameters", [f"{one.parameters / 1e9:.3g} B" for one in plans]),
        ("state between steps", [human_bytes(one.valley_bytes) for one in plans]),
        ("peak", [human_bytes(one.peak_bytes) for one in plans]),
        *((f"  {kind}", [human_bytes(one.breakdown[kind]) for one in plans]) for kind in KINDS),
        ("sent", [human_bytes(one.wire_bytes) for one in plans]),
        ("waited for", [human_bytes(one.exposed_bytes) for one in plans]),
        ("step", [_seconds(one.time.step_s) if one.time else "-" for one in plans]),
        ("  products", [_seconds(one.time.compute_s) if one.time else "-" for one in plans]),
        ("  memory", [_seconds(one.time.memory_s) if one.time else "-" for one in plans]),
        ("  waiting", [_seconds(one.time.exposed_s) if one.time else "-" for one in plans]),
        ("tokens/s a device", [_number(one.tokens_per_s_per_device) for one in plans]),
        ("MFU", [f"{100 * one.mfu:.1f}%" if one.mfu is not None else "-" for one in plans]),
        ("basis", [one.basis["peak_bytes"] for one in plans]),
    ]
    return text_table(("", *names), [(name, *cells) for name, cells in figures], right=names)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
