"""Simulates the schedule of a compiled step in lanes: compute, links, copies, and the host's.

Each instruction takes the longer of its matmuls and its memory traffic. A collective starts where
the schedule starts it and its links are free, on a torus those of the dims that its devices span;
its `done` waits for its end, and that wait is exposed. While a collective runs on a GPU, it takes
cores from the matmuls beside it. So does a transfer between device and host
memory, whose two directions do not share their link.
A loop is simulated once and multiplied by its trips; collectives in flight before the loop use the
link while the loop's own leave it free.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from jax.sharding import Mesh

from fsdp_jax.hlo.collectives import Collective
from fsdp_jax.hlo.kernels import kernel_label, pass_of
from fsdp_jax.hlo.op_names import strip_tracing
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
    """An interval in which a lane is busy, in seconds from the start of its computation."""

    lane: str
    start: float
    end: float
    label: str


@dataclass
class SimulatedTime:
    """The time and traffic of one computation, run once."""

    seconds: float = 0.0  # from start to end
    compute: float = 0.0  # of these, in instructions bound by matmuls
    memory: float = 0.0  # of these, in instructions bound by device memory
    exposed: float = 0.0  # of these, waiting for collectives
    host_exposed: float = 0.0  # of these, waiting for transfers from and to the host
    collective: float = 0.0  # that links were busy, overlapped or not
    host: float = 0.0  # that the links to the host were busy, the sum of both directions
    exposed_bytes: float = 0.0  # of the bytes sent, the part of each collective that was waited for
    from_host: float = 0.0  # bytes that came from host memory
    to_host: float = 0.0  # bytes that went to host memory
    traffic: int = 0  # bytes of device memory
    matmuls: Counter[Matmul] = field(default_factory=Counter)  # with how often each was run
    events: list[Event] = field(default_factory=list)  # of its own instructions
    unknown: set[str] = field(default_factory=set)  # kernels whose matmuls are not counted


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
        self.started: dict[tuple[str, str], dict[tuple[str, str], Collective]] = defaultdict(dict)
        for each in collectives:
            self.started[each.within, each.begins].setdefault((each.name, each.dtype), each)
        self.loops: dict[str, tuple[int, SimulatedTime]] = {}
        self.simulate = cache(self._simulate_computation)

    def simulate_step(self) -> SimulatedTime:
        """Simulates one step, the program from its entry: its time and traffic."""
        return self.simulate(self.module.entry, ())

    def simulate_layer(self) -> SimulatedTime:
        """Finds the time and traffic of a layer: of one trip of the longest loop in total.

        It is that of the step if nothing loops.
        """
        step = self.simulate_step()
        loops = [(trips * body.seconds, body) for trips, body in self.loops.values() if trips > 1]
        if not loops:
            return step
        return max(loops, key=lambda loop: loop[0])[1]

    def _simulate_computation(self, name: str, known: tuple[tuple[int, int], ...]) -> SimulatedTime:
        """Simulates a computation; `known`: (position, value) of scalars of its argument."""
        run = _ComputationRun(self, self.module[name], dict(known))
        for instruction in run.within.instructions:
            run.execute(instruction)
        return run.total


_WAITS = {LINK: "exposed", COPY: "memory", FROM_HOST: "host_exposed", TO_HOST: "host_exposed"}
"""What waiting for a lane counts as."""

_TOTALS = (
    *("compute", "memory", "exposed", "host_exposed", "collective", "host"),
    *("exposed_bytes", "from_host", "to_host", "traffic"),
)


class _Pending(NamedTuple):
    """A transfer that an instruction waits for."""

    lane: str
    ready: float  # when it ends
    seconds: float  # that it takes
    sent: int  # bytes, of a collective


class _ComputationRun:
    """Simulates one computation, given the known scalars of its argument, by position.

    Its clock is `total.seconds`.
    """

    def __init__(
        self, simulator: ScheduleSimulator, within: Computation, known: Mapping[int, int]
    ) -> None:
        self.simulator = simulator
        self.within = within
        self.known = known
        self.total = SimulatedTime()
        self.free: dict[tuple[str, int], float] = defaultdict(float)  # when each lane's parts are
        self.pending: dict[str, list[_Pending]] = {}  # by the instruction that waits

    def execute(self, instruction: Instruction) -> None:
        """Advances the clock by one instruction."""
        # collectives that start here, the instruction itself, and the transfers that it waits for
        key = (self.within.name, instruction.name)
        for collective in self.simulator.started.get(key, {}).values():
            self._start_collective(collective, pass_of(instruction.op_name))
        if instruction.opcode == "while":
            self._execute_loop(instruction)
        elif instruction.opcode in ("conditional", "call"):
            branches = [self.simulator.simulate(name, ()) for name in instruction.calls]
            if branches:  # of a conditional the longest
                longest = max(branches, key=lambda branch: branch.seconds)
                self._execute_simulated(longest, 1, self._label(instruction))
        else:
            self._execute_kernel(instruction, self.simulator.costs.cost(self.within, instruction))
        self._wait_at(instruction.name)

    def _start_collective(self, collective: Collective, of_pass: str) -> None:
        """Starts a collective on the link; the instruction that ends it will wait for it.

        `of_pass`: the pass that it is of, for its name.
        """
        sent = collective.bytes // max(collective.count, 1)
        seconds = self.simulator.network.seconds(collective.op, sent, collective.axis)
        self.total.collective += seconds
        links = self.simulator.network.links(collective.axis)
        start, end = self._occupy(LINK, seconds, collective.ends, sent, parts=links)
        paths = ", ".join(dict.fromkeys(path for path in collective.paths if path)) or "-"
        label = ", ".join(filter(None, (f"{collective.op} {paths}", of_pass)))
        self.total.events.append(Event(LINK, start, end, label))

    def _occupy(
        self,
        lane: str,
        seconds: float,
        waiter: str,
        sent: int = 0,
        parts: tuple[int, ...] = (0,),
    ) -> tuple[float, float]:
        """Uses a lane as soon as it is free; returns (start, end) in seconds.

        `waiter`: the name of the instruction that waits for the end; `sent`: bytes of a collective;
        `parts`: those of the lane that it uses, each of which may be busy for itself.
        """
        start = max(self.total.seconds, *(self.free[lane, part] for part in parts))
        end = start + seconds
        self.free.update(dict.fromkeys([(lane, part) for part in parts], end))
        self.pending.setdefault(waiter, []).append(_Pending(lane, end, seconds, sent))
        return start, end

    def _waiter_of(self, instruction: Instruction) -> str:
        """Names the instruction that waits for a started transfer: the `-done`, or itself."""
        return (self.within.done_of(instruction) or instruction).name

    def _wait_at(self, name: str) -> None:
        """Advances the clock until all is done that the named instruction waits for."""
        for lane, ready, seconds, sent in self.pending.pop(name, ()):
            # the wait that is left at this point of the schedule is exposed
            late = max(0.0, ready - self.total.seconds)
            self._add_to_total(_WAITS[lane], late)
            if sent and seconds:
                self.total.exposed_bytes += sent * min(1.0, late / seconds)
            self.total.seconds += late

    def _start_host_transfers(self, instruction: Instruction, from_host: int, to_host: int) -> None:
        """Starts transfers from and to the host, of the given bytes."""
        waiter = self._waiter_of(instruction)
        directions = ((FROM_HOST, "from_host", from_host), (TO_HOST, "to_host", to_host))
        for lane, field_name, size in directions:
            if not size:
                continue
            seconds = size / self.simulator.roofline.host_rate
            start, end = self._occupy(lane, seconds, waiter)
            self.total.host += seconds
            self._add_to_total(field_name, size)
            self.total.events.append(Event(lane, start, end, self._label(instruction)))

    def _execute_kernel(self, instruction: Instruction, cost: InstructionCost) -> None:
        """Advances the clock by the longer of matmuls and memory traffic, and by a kernel's launch.

        A copy that is started takes its own lane instead; transfers with the host start here too.
        """
        total, roofline = self.total, self.simulator.roofline
        if cost.unknown:
            total.unknown.add(cost.unknown)
        # a kernel that reads host memory itself starts the transfer, and waits for its exposed part
        self._start_host_transfers(instruction, cost.from_host, cost.to_host)
        if not cost.bytes and not cost.matmuls:
            return
        if instruction.opcode.endswith("-start"):  # a copy, as a TPU uses to prefetch
            self._occupy(COPY, cost.bytes / roofline.memory_rate, self._waiter_of(instruction))
            total.traffic += cost.bytes
            return
        # the roofline: matmuls and memory traffic overlap within a kernel
        compute = sum(roofline.seconds(matmul) for matmul in cost.matmuls)
        memory = cost.bytes / roofline.memory_rate
        seconds = max(compute, memory) + roofline.efficiency.launch
        if compute and roofline.efficiency.collective_cores:
            slowed = roofline.seconds_beside_collective
            beside = sum(slowed(matmul) for matmul in cost.matmuls)
            seconds = self._shared(seconds, max(beside, memory) + roofline.efficiency.launch)
        bound = "memory"
        if compute >= memory:
            bound = "compute"
        self._add_to_total(bound, seconds)
        self._advance(seconds, self._label(instruction, matmul=bool(cost.matmuls)))
        total.traffic += cost.bytes
        for matmul in cost.matmuls:
            total.matmuls[matmul] += matmul.times

    def _shared(self, alone: float, beside: float) -> float:
        """Computes the seconds of a kernel, of which a part may run beside collectives.

        `alone`, `beside`: its seconds if none does, or all of it.
        """
        busy = max((end for (lane, _), end in self.free.items() if lane == LINK), default=0.0)
        share = min(1.0, max(0.0, busy - self.total.seconds) / beside)
        return share * beside + (1 - share) * alone

    def _label(self, instruction: Instruction, *, matmul: bool = False) -> str:
        """Names an instruction: the parameter or the operation, and the pass."""
        return kernel_label(self.simulator.module, self.within, instruction, matmul=matmul)

    def _add_to_total(self, name: str, amount: float) -> None:
        """Adds to a field of `total`."""
        setattr(self.total, name, getattr(self.total, name) + amount)

    def _advance(self, seconds: float, label: str) -> None:
        """Advances the clock by an event in the compute lane."""
        start = self.total.seconds
        self.total.seconds += seconds
        self.total.events.append(Event(COMPUTE, start, self.total.seconds, label))

    def _execute_loop(self, instruction: Instruction) -> None:
        """Advances the clock by a loop; its body is simulated once, unknown trips count as one."""
        loops = self.simulator.loops
        loop = self.simulator.module.read_loop(self.within, instruction, self.known)
        trips = loop.trips
        if trips is None:
            trips = 1
        name = loop.body.name
        result = self.simulator.simulate(name, tuple(loop.constants.items()))
        # a body may be of several loops: their trips add up
        trips_before, _ = loops.get(name, (0, result))
        loops[name] = (trips_before + trips, result)
        label = f"{trips} x {strip_tracing(instruction.op_name) or name}"
        of_pass = pass_of(instruction.op_name)
        self._execute_simulated(result, trips, ", ".join(filter(None, (label, of_pass))))

    def _execute_simulated(self, result: SimulatedTime, times: int, label: str) -> None:
        """Advances the clock by `times` runs of a computation that has been simulated."""
        # collectives in flight share the link with the computation's own, which on a torus may take
        # more seconds in sum than it has
        link_seconds = times * min(result.collective, result.seconds)
        self._delay_pending(link_seconds, times * result.seconds - link_seconds)
        for name in _TOTALS:
            self._add_to_total(name, times * getattr(result, name))
        self._advance(times * result.seconds, label)
        self.total.unknown |= result.unknown
        for matmul, count in result.matmuls.items():
            self.total.matmuls[matmul] += times * count

    def _delay_pending(self, link_seconds: float, free_seconds: float) -> None:
        """Delays collectives in flight by those of the computation that is called now.

        `link_seconds`: that it uses the link; `free_seconds`: that it leaves the link free, within
        which they may end.
        """
        free_until = self.total.seconds + free_seconds
        for transfers in self.pending.values():
            for index, transfer in enumerate(transfers):
                if transfer.lane == LINK and transfer.ready > free_until:
                    transfers[index] = transfer._replace(ready=transfer.ready + link_seconds)
        for lane in self.free:
            if lane[0] == LINK and self.free[lane] > free_until:
                self.free[lane] += link_seconds
