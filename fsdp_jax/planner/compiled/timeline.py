"""A compiled step played through its schedule: one lane computes, one sends, and what waits is
exposed.

Each instruction takes the longer of its products and its bytes of memory. A collective starts where
the schedule starts it and the lane of its link is free; its done waits for its end. A loop is
played once and multiplied by its trips; what was on its way before has the link while the loop's
own collectives leave it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from fsdp_jax.hlo.collectives import Collective
from fsdp_jax.hlo.op_names import stripped
from fsdp_jax.hlo.parser import Computation, Instruction, Module
from fsdp_jax.planner.compiled.cost import Cost, Costs
from fsdp_jax.planner.machines.efficiency import Efficiency
from fsdp_jax.planner.machines.matmul import Product
from fsdp_jax.planner.machines.network import Network

COMPUTE, LINK, COPY = "compute", "link", "copy"


@dataclass(frozen=True)
class Event:
    """What one lane did, in seconds from the start of the computation that is shown."""

    lane: str
    start: float
    end: float
    label: str


@dataclass(frozen=True)
class Played:
    """What a computation took, once.

    Attributes:
        seconds: from start to end.
        compute: of it, in products.
        memory: of it, in what device memory bounds.
        exposed: of it, waiting for collectives.
        collective: that links were busy, beside the rest or not.
        traffic: bytes of device memory.
        products: with how often each was run.
        events: of its own instructions.
        unknown: kernels that were not counted.
        exposed_bytes: of what was sent, the part of each collective that was waited for.

    """

    seconds: float = 0.0
    compute: float = 0.0
    memory: float = 0.0
    exposed: float = 0.0
    collective: float = 0.0
    traffic: int = 0
    products: Mapping[Product, int] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    unknown: frozenset[str] = frozenset()
    exposed_bytes: float = 0.0


class Player:
    """Plays a program's schedule."""

    def __init__(
        self,
        module: Module,
        collectives: Iterable[Collective],
        network: Network,
        efficiency: Efficiency,
        on_chip: frozenset[int] = frozenset(),
    ):
        self.module, self.network, self.efficiency = module, network, efficiency
        self.costs = Costs(module, on_chip)
        self.starts: dict[tuple[str, str], list[Collective]] = {}
        for each in collectives:
            at = self.starts.setdefault((each.within, each.begins), [])
            if all(each.name != other.name or each.dtype != other.dtype for other in at):
                at.append(each)
        self.loops: dict[str, tuple[int, Played]] = {}
        self.play = cache(self._play)

    def whole(self) -> Played:
        """The program, from its entry."""
        return self.play(self.module.entry, ())

    def layer(self) -> Played:
        """The body of the loop that takes longest in all, whose events are those of one layer; all
        where none loops.
        """
        whole = self.whole()
        loops = [
            (trips * played.seconds, played) for trips, played in self.loops.values() if trips > 1
        ]
        return max(loops, key=lambda pair: pair[0])[1] if loops else whole

    def _play(self, name: str, known: tuple[tuple[int, int], ...]) -> Played:
        lane = _Lane(self, self.module[name], dict(known))
        for one in lane.within.instructions:
            lane.step(one)
        return lane.end()


class _Waiting(NamedTuple):
    """For what a `done` waits."""

    lane: str
    ready: float
    seconds: float
    sent: int


class _Lane:
    """One computation while it is played."""

    def __init__(self, player: Player, within: Computation, known: Mapping[int, int]):
        self.player, self.within, self.known = player, within, known
        self.clock = 0.0
        self.free = {LINK: 0.0, COPY: 0.0}
        self.waiting: dict[str, list[_Waiting]] = {}
        self.sums = {
            "compute": 0.0,
            "memory": 0.0,
            "exposed": 0.0,
            "collective": 0.0,
            "exposed_bytes": 0.0,
        }
        self.traffic = 0
        self.products: dict[Product, int] = {}
        self.events: list[Event] = []
        self.unknown: set[str] = set()

    def step(self, one: Instruction) -> None:
        for collective in self.player.starts.get((self.within.name, one.name), ()):
            self._start(collective)
        if one.opcode == "while":
            self._loop(one)
        elif one.opcode in ("conditional", "call"):
            self._called(one)
        elif moved := self.player.costs.started(one):
            self._copy(one, moved)
        else:
            self._run(one, self.player.costs.of(self.within, one))
        self._wait(one.name)

    def end(self) -> Played:
        return Played(
            self.clock,
            **self.sums,
            traffic=self.traffic,
            products=self.products,
            events=tuple(self.events),
            unknown=frozenset(self.unknown),
        )

    def _start(self, one: Collective) -> None:
        sent = one.bytes // max(one.count, 1)
        seconds = self.player.network.seconds(one.op, sent, one.axis)
        begin = max(self.clock, self.free[LINK])
        self.free[LINK] = begin + seconds
        self.sums["collective"] += seconds
        self.waiting.setdefault(one.ends, []).append(_Waiting(LINK, self.free[LINK], seconds, sent))
        what = ", ".join(dict.fromkeys(path for path in one.paths if path)) or "-"
        self.events.append(Event(LINK, begin, self.free[LINK], f"{one.op} {what}"))

    def _wait(self, name: str) -> None:
        for lane, ready, seconds, sent in self.waiting.pop(name, ()):
            late = max(0.0, ready - self.clock)
            self.sums["exposed" if lane == LINK else "memory"] += late
            if sent and seconds:
                self.sums["exposed_bytes"] += sent * min(1.0, late / seconds)
            self.clock += late

    def _copy(self, one: Instruction, moved: int) -> None:
        """A copy that others run beside, as a TPU fetches what comes next."""
        seconds = moved / self.player.efficiency.memory_rate
        begin = max(self.clock, self.free[COPY])
        self.free[COPY] = begin + seconds
        self.traffic += moved
        done = next(
            (
                user.name
                for user in self.within.users.get(one.name, ())
                if user.opcode.endswith("-done")
            ),
            None,
        )
        if done is not None:
            self.waiting.setdefault(done, []).append(_Waiting(COPY, self.free[COPY], seconds, 0))

    def _run(self, one: Instruction, cost: Cost) -> None:
        if cost.unknown:
            self.unknown.add(cost.unknown)
        if not cost.bytes and not cost.products:
            return
        efficiency = self.player.efficiency
        products = sum(efficiency.seconds(product) for product in cost.products)
        memory = cost.bytes / efficiency.memory_rate
        took = max(products, memory) + efficiency.constants.launch
        self.sums["compute" if products >= memory else "memory"] += took
        self.events.append(
            Event(COMPUTE, self.clock, self.clock + took, stripped(one.op_name) or one.name)
        )
        self.clock += took
        self.traffic += cost.bytes
        for product in cost.products:
            self.products[product] = self.products.get(product, 0) + product.times

    def _loop(self, one: Instruction) -> None:
        module = self.player.module
        _, body = module.parts(one)
        trips = module.trips(self.within, one, self.known)
        trips = 1 if trips is None else trips
        known = tuple(module.constants(self.within, one, self.known).items())
        played = self.player.play(body.name, known)
        before, _ = self.player.loops.get(body.name, (0, played))
        self.player.loops[body.name] = (before + trips, played)
        self._add(played, trips, f"{trips} x {stripped(one.op_name) or body.name}")

    def _called(self, one: Instruction) -> None:
        branches = [self.player.play(name, ()) for name in one.calls]
        if branches:
            self._add(
                max(branches, key=lambda played: played.seconds),
                1,
                stripped(one.op_name) or one.name,
            )

    def _add(self, played: Played, times: int, label: str) -> None:
        self._share(times * played.collective, times * (played.seconds - played.collective))
        for name in self.sums:
            self.sums[name] += times * getattr(played, name)
        self.events.append(Event(COMPUTE, self.clock, self.clock + times * played.seconds, label))
        self.clock += times * played.seconds
        self.traffic += times * played.traffic
        self.unknown |= played.unknown
        for product, count in played.products.items():
            self.products[product] = self.products.get(product, 0) + times * count

    def _share(self, taken: float, spare: float) -> None:
        """Puts off what is on its way, where the collectives of what is called now take the link
        from it.

        Args:
            taken: seconds of them.
            spare: seconds in which they leave the link free.

        """
        last = self.clock + spare
        for name, waiting in self.waiting.items():
            self.waiting[name] = [
                one._replace(ready=one.ready + taken)
                if one.lane == LINK and one.ready > last
                else one
                for one in waiting
            ]
        self.free[LINK] += taken if self.free[LINK] > last else 0.0
