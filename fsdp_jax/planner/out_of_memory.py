"""Explains a step that runs out of memory: what holds it, what the device has, and what fits.

The step is compiled once more with XLA's memory reports, which tell of each array at the peak. Of a
known machine its absent double is compiled for, so that the devices of the run, which are full, and
its other processes are not needed.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, Literal

import jax

from fsdp_jax.compat.error_texts import in_one_line, refused_bytes, requested_bytes
from fsdp_jax.errors import OutOfMemoryError, human_bytes
from fsdp_jax.hlo.parser import parse_program, shapes_of
from fsdp_jax.hlo.source_frames import SourceFrames
from fsdp_jax.io.array_specs import is_prng_key
from fsdp_jax.planner.compiled.peak_memory import Buffer, PeakMemory, peak_memory, steady_state
from fsdp_jax.planner.compiled.program import compile_reported
from fsdp_jax.planner.estimates import compiled_plan
from fsdp_jax.planner.fixes import Advice, compiled_fixes
from fsdp_jax.planner.machines.chips import hardware_of
from fsdp_jax.planner.machines.topology import Topology, topology_of_mesh
from fsdp_jax.planner.plan import Plan, group_texts, largest_groups
from fsdp_jax.planner.remaking import Remaking
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.tables import text_table
from fsdp_jax.tree import SEPARATOR, PyTree

When = Literal["compile", "run", "plan"]
PLACES: dict[When, str] = {
    "compile": "as the step was compiled, before it ran",
    "run": "while the step ran, or its state was made",
    "plan": "the plan of the step, before the run",
}
WORDS = {"params": "state: params", "optimizer": "state: optimizer"}
WORDS |= {"gathered": "gathered weights", "other": "temporaries"}
_FITS_ALONE = (
    "the step alone fits: what ran beside it, such as an evaluation, or memory in pieces too small "
    "to use, took the rest"
)
_BESIDE = (
    "free arrays that are not the step's, such as an older state; evaluate fewer rows at a time"
)
LATER = "live at another time"
_STATS = ("bytes_limit", "bytes_in_use", "peak_bytes_in_use", "largest_free_block_bytes")
_UNKNOWN = "`fsdp-jax plan CONFIG --topology T`, or sharded.plan(T, ...), tells what fits a machine"
_NOTHING = "no setting that was tried fits: a smaller batch, shorter sequences, a smaller model"


@dataclass(frozen=True, repr=False)
class MemoryExplanation:
    """Why a step runs out of memory; `print` it.

    Attributes:
        when: XLA refused to `compile` it, it failed as it `run`, or its `plan` says so.
        reason: XLA's own error, in a line.
        peak_bytes: that the compiled step takes of a device; None where it could not be compiled.
        limit_bytes: that a device has for it; None where it does not tell.
        requested_bytes: of the allocation that failed while it ran; None if not told.
        elsewhere_bytes: of a device, held by live arrays beside the state.
        device: its kind, and what its allocator reports.
        breakdown: bytes at the peak by kind.
        buffers: arrays at the peak, the largest first.
        idle: arrays of other times, for which XLA keeps memory that is free at the peak.
        advice: changes that fit, each compiled, the one of least cost first.
        notes: what a reader must know.

    """

    when: When
    reason: str
    peak_bytes: int | None
    limit_bytes: int | None
    requested_bytes: int | None
    elsewhere_bytes: int
    device: Mapping[str, Any]
    breakdown: Mapping[str, int]
    buffers: Sequence[Buffer]
    idle: Sequence[Buffer] = ()
    advice: Sequence[Advice] = ()
    notes: Sequence[str] = ()

    @property
    def named_share(self) -> float:
        """The share of the bytes at the peak whose parameter or module is known."""
        named = sum(buffer.bytes for buffer in (*self.buffers, *self.idle) if buffer.path)
        return named / self.peak_bytes if self.peak_bytes else 0.0

    @property
    def fits(self) -> bool:
        """Whether the step alone fits, so that something else takes the memory."""
        if self.peak_bytes is None or self.limit_bytes is None:
            return False
        return self.peak_bytes <= self.limit_bytes

    def _groups(self) -> list[tuple[list[Buffer], bool]]:
        """Lists the dozen largest groups of like arrays, and whether each is one of idle ones."""
        idle = {id(buffer) for buffer in self.idle}
        groups = largest_groups(
            (*self.buffers, *self.idle),
            lambda one: (one.kind, one.array, one.line, id(one) in idle),
        )
        return [(members, id(members[0]) in idle) for members in groups]

    def _shares(self) -> dict[str, int]:
        """Counts the bytes at the peak by kind, those kept for other times apart."""
        idle = sum(buffer.bytes for buffer in self.idle)
        shares = {WORDS.get(kind, kind): size for kind, size in self.breakdown.items()}
        if idle:
            shares[WORDS["other"]] -= idle
            shares[f"kept for arrays that are {LATER}"] = idle
        return shares

    def error(self) -> OutOfMemoryError:
        """Makes the error to raise, whose text is the explanation."""
        what = "out of memory"
        if self.when == "plan" and self.fits:
            what = "not out of memory"
        elif self.when == "plan" and self.limit_bytes is None:
            what = "whether it runs out of memory is not known"
        if self.peak_bytes is not None:
            what += f": the step takes {human_bytes(self.peak_bytes)} of a {self.device['kind']}"
        if self.limit_bytes is not None:
            what += f", which has {human_bytes(self.limit_bytes)}"
        return OutOfMemoryError(
            what,
            where=PLACES[self.when],
            got=self.reason,
            fix=self._fix(),
            details=self.details(),
            step_fits=self.fits,
        )

    def _fix(self) -> str:
        """Formats the first advice, or what to do without one."""
        if self.advice:
            first = self.advice[0]
            takes = f"which takes {human_bytes(first.peak_bytes)}"
            return ", ".join(filter(None, (first.change, takes, _slower(first))))
        if self.limit_bytes is None:
            return _UNKNOWN
        if not self.fits:
            return _NOTHING
        return "" if self.when == "plan" else _BESIDE

    def details(self) -> str:
        """Formats the tables below the error: arrays, shares, and what fits."""
        rows = []
        for members, is_idle in self._groups():
            size, array, first = group_texts(members)
            kind = _word(members[0])
            if is_idle:
                kind += f" ({LATER})"
            rows.append((size, kind, array, first, members[0].line))
        blocks = []
        if rows:
            largest = "largest at the peak"
            columns = (largest, "for", "array", "of", "line")
            blocks.append(text_table(columns, rows, right=(largest,)))
        shares = [
            f"{kind} {human_bytes(size)}"
            for kind, size in sorted(self._shares().items(), key=lambda pair: -pair[1])
            if size > 0
        ]
        at_peak = "at the peak" if self.peak_bytes is not None else "between steps"
        lines = [f"{at_peak}: {', '.join(shares)}"]
        reported = [
            f"{name.replace('_', ' ')} {human_bytes(size)}"
            for name, size in self.device.items()
            if isinstance(size, int)
        ]
        if reported:
            lines.append(f"the device: {', '.join(reported)}")
        if self.elsewhere_bytes:
            held = human_bytes(self.elsewhere_bytes)
            lines.append(f"live arrays beside the state hold {held} of a device")
        lines += self.notes
        blocks.append("\n".join(textwrap.fill(line, 98) for line in lines))
        if self.advice:
            fits = [
                (each.change, human_bytes(each.peak_bytes), _slower(each), each.costs)
                for each in self.advice
            ]
            blocks.append(text_table(("fits, compiled", "peak", "a step", "costs"), fits))
        return "\n\n".join(blocks)

    def to_json(self) -> dict[str, Any]:
        """Converts to the fields of `oom.json`, of JSON's types."""
        # Of the settings of an advice, those that it changes.
        advice = [
            asdict(each) | {"settings": {} if each.settings is None else each.settings.keys()}
            for each in self.advice
        ]
        return {
            "when": self.when,
            "reason": self.reason,
            "peak_bytes": self.peak_bytes,
            "limit_bytes": self.limit_bytes,
            "requested_bytes": self.requested_bytes,
            "elsewhere_bytes": self.elsewhere_bytes,
            "device": dict(self.device),
            "breakdown": self._shares(),
            "named_share": round(self.named_share, 4),
            "buffers": [_group_json(members) | {"idle": idle} for members, idle in self._groups()],
            "advice": advice,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return str(self.error())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.error().what}>"


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device.

    Attributes:
        kind: of the device.
        limit: bytes that jax may take of it; None where neither it nor the planner tells.
        reported: what its allocator reports, by name.
        elsewhere: bytes that live arrays beside the state hold.

    """

    kind: str
    limit: int | None
    reported: Mapping[str, int] = field(default_factory=dict)
    elsewhere: int = 0

    @property
    def free(self) -> int | None:
        """The bytes that the step may take."""
        return None if self.limit is None else self.limit - self.elsewhere


def explain_out_of_memory(
    step: CompiledStep,
    batch: PyTree,
    error: BaseException | None = None,
    *,
    remaking: Remaking,
    topology: Topology | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> MemoryExplanation:
    """Explains why a step runs out of memory, or would.

    Args:
        step: that was refused, or failed.
        batch: arrays or shapes [global rows, ...].
        error: of XLA; None before a run.
        remaking: how the step is made with other settings.
        topology: of another machine; None: the step's own devices.
        say: receives the progress, a line at a time.

    Raises:
        ValueError, JaxRuntimeError: the step cannot be made or compiled for `topology`. Of its own
            devices the explanation has a note of that.

    """
    say("out of memory: compiling the step once more, to see what holds it")
    notes: list[str] = []
    plan: Plan | None = None
    if topology is not None:
        plan = _plan_as_it_is(topology, remaking)
    else:
        topology = topology_of_mesh(step.plan.layout.mesh)
        if topology is not None:
            with _noting(f"not planned for {topology.name}", notes):
                plan = _plan_as_it_is(topology, remaking)
    device = _device_memory(step, topology)
    peak = _memory_fields(plan) if plan is not None else _compiled_memory(step, batch, notes)
    of_error: dict[str, Any] = {"when": "plan", "reason": "", "requested_bytes": None}
    if error is not None:
        of_error = {
            "when": "run" if refused_bytes(error) is None else "compile",
            "reason": in_one_line(error),
            "requested_bytes": requested_bytes(error),
        }
    explanation = MemoryExplanation(
        **of_error,
        **peak,
        limit_bytes=device.limit,
        elsewhere_bytes=device.elsewhere,
        device={"kind": device.kind, **device.reported},
        notes=tuple(notes),
    )
    if error is not None and explanation.fits:
        explanation = replace(explanation, notes=(*notes, _FITS_ALONE))
    is_in_need = error is not None or not explanation.fits
    if plan is None or topology is None or device.limit is None or not is_in_need:
        return explanation
    return replace(explanation, advice=_advise(plan, device, topology, remaking, say))


def _device_memory(step: CompiledStep, topology: Topology | None) -> DeviceMemory:
    """Finds the memory of a step's device, of this process, or of another machine's."""
    devices = list(step.plan.layout.mesh.devices.flat)
    own = [each for each in devices if each.process_index == jax.process_index()] or devices
    if topology is not None and topology.hardware is not hardware_of(own[0].device_kind):
        return DeviceMemory(topology.hardware.name, topology.hardware.usable_bytes)  # absent
    reported = _allocator_report(own[0])
    limit = reported.get("bytes_limit")
    if limit is None and topology is not None:
        limit = topology.hardware.usable_bytes
    elsewhere = _live_bytes(own[0]) - step.plan.layout.per_device()
    return DeviceMemory(str(own[0].device_kind), limit, reported, max(0, elsewhere))


def _allocator_report(device: Any) -> dict[str, int]:
    """Reads what the allocator of a device reports; nothing of one that is compiled for alone."""
    try:
        stats = device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError, AttributeError, ValueError):
        return {}
    return {name: int(stats[name]) for name in _STATS if name in stats}


def _live_bytes(device: Any) -> int:
    """Counts the bytes of a device that live arrays take."""
    total = 0
    for array in jax.live_arrays():
        is_here = not array.is_deleted() and device in array.sharding.device_set
        if is_here and not is_prng_key(array) and array.sharding.memory_kind != "pinned_host":
            total += prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return total


def _plan_as_it_is(topology: Topology, remaking: Remaking) -> Plan:
    """Plans the step as it is, compiled for a machine."""
    made, shapes = remaking.make_step(remaking.settings, topology.devices())
    return compiled_plan(made, shapes, topology, remaking.work, None)


@contextmanager
def _noting(what: str, notes: list[str]) -> Iterator[None]:
    """Notes that a step could not be made or compiled, where the block raises that."""
    try:
        yield
    except (ValueError, jax.errors.JaxRuntimeError) as failure:
        notes.append(f"{what}: {in_one_line(failure)}")


def _compiled_memory(step: CompiledStep, batch: PyTree, notes: list[str]) -> dict[str, Any]:
    """Finds the memory at the peak as the step's own compiler tells; else that of the state."""
    # A GPU's compiler asks the other processes of the run, which may not come.
    if jax.process_count() == 1 or step.plan.layout.mesh.devices.flat[0].platform != "gpu":
        with _noting("not compiled again", notes):
            program = compile_reported(step.lower(batch), step.plan)
            if program.report is not None:
                module, frames = parse_program(program.text), SourceFrames(program.text)
                return _memory_fields(peak_memory(step.plan, module, program.report, frames))
    notes.append("the arrays of the step are unknown: this is the state alone")
    state = dict[str, int](steady_state(step.plan).items())
    return {"peak_bytes": None, "breakdown": state, "buffers": ()}


def _memory_fields(memory: Plan | PeakMemory) -> dict[str, Any]:
    """Selects the fields that a plan and the memory at a peak share."""
    names = ("peak_bytes", "breakdown", "buffers", "idle")
    return {name: getattr(memory, name) for name in names}


def _advise(
    plan: Plan,
    device: DeviceMemory,
    topology: Topology,
    remaking: Remaking,
    say: Callable[[str], None],
) -> tuple[Advice, ...]:
    """Finds what makes a step fit, or, where it fits alone, what leaves more for the rest."""
    assert device.free is not None, "without a limit nothing is known to fit"
    # no more than now, even if that fits: something else ran out of memory
    limit = min(device.free, topology.hardware.usable_bytes, plan.peak_bytes - 1)
    settings = compiled_fixes(plan, remaking, topology, limit=limit, say=say)
    return (*larger_share(plan.peak_bytes, device, topology), *settings)


def larger_share(peak: int, device: DeviceMemory, topology: Topology) -> list[Advice]:
    """Advises to let jax take more of a GPU, where the step fits the GPU but not jax's share."""
    chip = topology.hardware
    if chip.platform != "cuda" or "bytes_limit" not in device.reported or not chip.memory_bytes:
        return []
    assert device.free is not None, "the allocator reports a limit"
    if not device.free < peak <= chip.usable_bytes - device.elsewhere:
        return []
    share = chip.usable_bytes / chip.memory_bytes
    return [Advice(f"XLA_PYTHON_CLIENT_MEM_FRACTION={share:.2f}", peak, 0.0, "nothing")]


def _slower(advice: Advice) -> str:
    """Formats how much longer a step takes with a change."""
    if advice.slower is None:
        return ""
    percent = round(100 * advice.slower)
    if percent == 0:
        return "as fast"
    return f"{abs(percent)}% {'slower' if percent > 0 else 'faster'}"


def _word(buffer: Buffer) -> str:
    """Names what an array is for."""
    if buffer.path.startswith(f"batch{SEPARATOR}"):
        return "batch"
    return WORDS.get(buffer.kind, buffer.kind)


def _group_json(members: Sequence[Buffer]) -> dict[str, Any]:
    """Converts a group of arrays of one shape, dtype, kind and line."""
    first = members[0]
    (shape,) = shapes_of(first.array)
    return {
        "bytes": sum(one.bytes for one in members),
        "count": len(members),
        "kind": _word(first),
        "shape": list(shape.dims),
        "dtype": first.array.partition("[")[0],
        "paths": list(dict.fromkeys(one.path for one in members if one.path)),
        "line": first.line,
        "operation": first.operation,
    }
