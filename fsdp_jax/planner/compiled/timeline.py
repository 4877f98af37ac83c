"""Simulates the schedule of a compiled step in lanes: compute, links, copies, and the host's.

Each instruction takes the longer of its matmuls and its memory traffic. A collective starts where
the schedule starts it and the link is free; its `done` waits for its end, and that wait is exposed.
So does a transfer between device and host memory, whose two directions do not share their link.
A loop is simulated once and multiplied by its trips; collectives in flight before the loop use the
link while the loop's own leave it free.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from jax.sharding import Mesh

from fsdp_jax.hlo.collectives import Collective
from fsdp_jax.hlo.op_names import stripped
from fsdp_jax.hlo.parser import Computation, Instruction, Module
from fsdp_jax.planner.compiled.cost import CostModel, InstructionCost
from fsdp_jax.planner.machines.hardware import Hardware
from fsdp_jax.planner.machines.network import Network
from fsdp_jax.planner.machines.roofline import Matmul, Roofline

COMPUTE, LINK, COPY = "compute", "link", "copy"
FROM_HOST, TO_HOST = "from host", "to host"

ON_CHIP: Mapping[str, frozenset[int]] = {"tpu": frozenset(range(1, 5)) | {6}}
"""XLA's memory spaces, by platform, that are not device memory; 5 is the host's everywhere."""


@dataclass(frozen=True)
class Event:
    """An interval of one lane, in seconds from the start of its computation."""

    lane: str
    start: float
    end: float
    label: str


@dataclass(frozen=True)
class SimulatedTime:
    """The time and traffic of one computation, run once.

    Attributes:
        seconds: from start to end.
        compute: of these, in instructions bound by matmuls.
        memory: of these, in instructions bound by device memory.
        exposed: of these, waiting for collectives.
        host_exposed: of these, waiting for transfers from and to the host.
        collective: that links were busy, overlapped or not.
        host: that the links to the host were busy, overlapped or not; the sum of both directions.
        exposed_bytes: of the bytes sent, the part of each collective that was waited for.
        from_host: bytes that came from host memory.
        to_host: bytes that went to host memory.
        traffic: bytes of device memory.
        matmuls: with how often each was run.
        events: of its own instructions.
        unknown: kernels whose matmuls are not counted.

    """

    seconds: float = 0.0
    compute: float = 0.0
    memory: float = 0.0
    exposed: float = 0.0
    host_exposed: float = 0.0
    collective: float = 0.0
    host: float = 0.0
    exposed_bytes: float = 0.0
    from_host: float = 0.0
    to_host: float = 0.0
    traffic: int = 0
    matmuls: Mapping[Matmul, int] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    unknown: frozenset[str] = frozenset()


class ScheduleSimulator:
    """Simulates a program on the devices of a mesh."""

    def __init__(
        self, module: Module, collectives: Iterable[Collective], mesh: Mesh, chip: Hardware
    ) -> None:
        self.module = module
        self.network = Network(mesh, chip)
        self.roofline = Roofline(chip)
        self.costs = CostModel(module, ON_CHIP.get(chip.platform, frozenset()))
        # by the computation and the instruction that start them
        self.started: dict[tuple[str, str], list[Collective]] = {}
        for new in collectives:
            same_start = self.started.setdefault((new.within, new.begins), [])
            if all((new.name, new.dtype) != (other.name, other.dtype) for other in same_start):
                same_start.append(new)
        self.loops: dict[str, tuple[int, SimulatedTime]] = {}
        self.simulate = cache(self._simulate)

    def step(self) -> SimulatedTime:
        """Simulates the program, from its entry."""
        return self.simulate(self.module.entry, ())

    def layer(self) -> SimulatedTime:
        """Returns the body of the loop that takes longest in total; the step if nothing loops."""
        step = self.step()
        loops = [(trips * body.seconds, body) for trips, body in self.loops.values() if trips > 1]
        return max(loops, key=lambda loop: loop[0])[1] if loops else step

    def _simulate(self, name: str, known: tuple[tuple[int, int], ...]) -> SimulatedTime:
        run = _ComputationRun(self, self.module[name], dict(known))
        for instruction in run.within.instructions:
            run.execute(instruction)
        return run.result()


_WAITS = {LINK: "exposed", COPY: "memory", FROM_HOST: "host_exposed", TO_HOST: "host_exposed"}
"""What waiting for a lane counts as."""

_TOTALS = (
    *("compute", "memory", "exposed", "host_exposed", "collective", "host"),
    *("exposed_bytes", "from_host", "to_host"),
)


class _Pending(NamedTuple):
    """A transfer that a `done` waits for."""

    lane: str
    ready: float
    seconds: float
    sent: int


class _ComputationRun:
    """The state of one computation while it is simulated."""

    def __init__(
        self, simulator: ScheduleSimulator, within: Computation, known: Mapping[int, int]
    ) -> None:
        self.simulator = simulator
        self.within = within
        self.known = known  # scalars that the computation is given, by index
        self.clock = 0.0
        # when each lane is free
        self.free = {LINK: 0.0, COPY: 0.0, FROM_HOST: 0.0, TO_HOST: 0.0}
        self.pending: dict[str, list[_Pending]] = {}  # by the instruction that waits
        self.totals = dict.fromkeys(_TOTALS, 0.0)
        self.traffic = 0
        self.matmuls: dict[Matmul, int] = {}
        self.events: list[Event] = []
        self.unknown: set[str] = set()

    def execute(self, instruction: Instruction) -> None:
        """Advances the clock by one instruction."""
        for collective in self.simulator.started.get((self.within.name, instruction.name), ()):
            self._start(collective)
        if instruction.opcode == "while":
            self._loop(instruction)
        elif instruction.opcode in ("conditional", "call"):
            self._call(instruction)
        elif transfer := self.simulator.costs.async_host_transfer(self.within, instruction):
            done = self._done(instruction) or instruction
            self._transfer(*transfer, waits=done.name, label=_label(instruction))
        elif moved := self.simulator.costs.async_bytes(instruction):
            self._copy(instruction, moved)
        else:
            self._compute(instruction, self.simulator.costs.cost(self.within, instruction))
        self._wait(instruction.name)

    def result(self) -> SimulatedTime:
        """Returns what the computation took."""
        return SimulatedTime(
            self.clock,
            **self.totals,
            traffic=self.traffic,
            matmuls=self.matmuls,
            events=tuple(self.events),
            unknown=frozenset(self.unknown),
        )

    def _start(self, collective: Collective) -> None:
        sent = collective.bytes // max(collective.count, 1)
        seconds = self.simulator.network.seconds(collective.op, sent, collective.axis)
        start = max(self.clock, self.free[LINK])
        end = start + seconds
        self.free[LINK] = end
        self.totals["collective"] += seconds
        self.pending.setdefault(collective.ends, []).append(_Pending(LINK, end, seconds, sent))
        paths = ", ".join(dict.fromkeys(path for path in collective.paths if path)) or "-"
        self.events.append(Event(LINK, start, end, f"{collective.op} {paths}"))

    def _wait(self, name: str) -> None:
        for lane, ready, seconds, sent in self.pending.pop(name, ()):
            late = max(0.0, ready - self.clock)
            self.totals[_WAITS[lane]] += late
            if sent and seconds:
                self.totals["exposed_bytes"] += sent * min(1.0, late / seconds)
            self.clock += late

    def _copy(self, instruction: Instruction, moved: int) -> None:
        """Starts an asynchronous copy, as a TPU uses to prefetch."""
        seconds = moved / self.simulator.roofline.memory_rate
        end = max(self.clock, self.free[COPY]) + seconds
        self.free[COPY] = end
        self.traffic += moved
        if done := self._done(instruction):
            self.pending.setdefault(done.name, []).append(_Pending(COPY, end, seconds, 0))

    def _done(self, start: Instruction) -> Instruction | None:
        """Returns the instruction that waits for an asynchronous one."""
        users = self.within.users.get(start.name, ())
        return next((user for user in users if user.opcode.endswith("-done")), None)

    def _transfer(self, from_host: int, to_host: int, *, waits: str, label: str) -> None:
        """Starts transfers of so many bytes from and to the host."""
        for lane, size in ((FROM_HOST, from_host), (TO_HOST, to_host)):
            if not size:
                continue
            seconds = size / self.simulator.roofline.host_rate
            start = max(self.clock, self.free[lane])
            self.free[lane] = end = start + seconds
            self.totals["host"] += seconds
            self.totals["from_host" if lane == FROM_HOST else "to_host"] += size
            self.pending.setdefault(waits, []).append(_Pending(lane, end, seconds, 0))
            self.events.append(Event(lane, start, end, label))

    def _compute(self, instruction: Instruction, cost: InstructionCost) -> None:
        if cost.unknown:
            self.unknown.add(cost.unknown)
        # what reads host memory itself starts the transfer, and waits for what it does not hide
        self._transfer(
            cost.from_host, cost.to_host, waits=instruction.name, label=_label(instruction)
        )
        if not cost.bytes and not cost.matmuls:
            return
        roofline = self.simulator.roofline
        compute = sum(roofline.seconds(matmul) for matmul in cost.matmuls)
        memory = cost.bytes / roofline.memory_rate
        seconds = max(compute, memory) + roofline.efficiency.launch
        self.totals["compute" if compute >= memory else "memory"] += seconds
        self._advance(seconds, _label(instruction))
        self.traffic += cost.bytes
        for matmul in cost.matmuls:
            self.matmuls[matmul] = self.matmuls.get(matmul, 0) + matmul.times

    def _advance(self, seconds: float, label: str) -> None:
        self.events.append(Event(COMPUTE, self.clock, self.clock + seconds, label))
        self.clock += seconds

    def _loop(self, loop: Instruction) -> None:
        module = self.simulator.module
        _, body = module.parts(loop)
        trips = module.trips(self.within, loop, self.known)
        if trips is None:
            trips = 1
        known = tuple(module.constants(self.within, loop, self.known).items())
        result = self.simulator.simulate(body.name, known)
        trips_before, _ = self.simulator.loops.get(body.name, (0, result))
        self.simulator.loops[body.name] = (trips_before + trips, result)
        self._add(result, trips, f"{trips} x {stripped(loop.op_name) or body.name}")

    def _call(self, call: Instruction) -> None:
        """Runs what is called; of a conditional, the branch that takes longest."""
        branches = [self.simulator.simulate(name, ()) for name in call.calls]
        if branches:
            longest = max(branches, key=lambda branch: branch.seconds)
            self._add(longest, 1, stripped(call.op_name) or call.name)

    def _add(self, result: SimulatedTime, times: int, label: str) -> None:
        """Adds a computation that runs `times` times here."""
        link_seconds = times * result.collective
        self._delay_pending(link_seconds, times * result.seconds - link_seconds)
        for name in self.totals:
            self.totals[name] += times * getattr(result, name)
        self._advance(times * result.seconds, label)
        self.traffic += times * result.traffic
        self.unknown |= result.unknown
        for matmul, count in result.matmuls.items():
            self.matmuls[matmul] = self.matmuls.get(matmul, 0) + times * count

    def _delay_pending(self, link_seconds: float, free_seconds: float) -> None:
        """Delays transfers in flight by the link time of the computation that is called now.

        Args:
            link_seconds: seconds of its own collectives.
            free_seconds: seconds in which they leave the link free.

        """
        free_until = self.clock + free_seconds
        for name, transfers in self.pending.items():
            self.pending[name] = [
                transfer._replace(ready=transfer.ready + link_seconds)
                if transfer.lane == LINK and transfer.ready > free_until
                else transfer
                for transfer in transfers
            ]
        if self.free[LINK] > free_until:
            self.free[LINK] += link_seconds


def _label(instruction: Instruction) -> str:
    return stripped(instruction.op_name) or instruction.name
