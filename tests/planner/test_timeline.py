"""Schedules simulated by hand: what is overlapped, what is exposed, and that the parts add up."""

import re
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from fsdp_jax.hlo.collectives import read_collectives
from fsdp_jax.hlo.parser import parse_program
from fsdp_jax.planner import fake_devices, parse_topology
from fsdp_jax.planner.compiled.timeline import COMPUTE, LINK, ScheduleSimulator, SimulatedTime
from fsdp_jax.planner.machines.hardware import Hardware
from fsdp_jax.planner.machines.network import Network
from fsdp_jax.planner.machines.roofline import Roofline
from fsdp_jax.sharding.mesh import make_mesh, mesh_axes, split_data

H100, V5P = "h100:8", "v5p:2x2x2"
ROWS = 2**20
SHARD, WHOLE = f"f32[{ROWS}]{{0}}", f"f32[{8 * ROWS}]{{0}}"
SENT = 7 * 4 * ROWS  # by a device that gathers it
GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"
START = f"  %{{0}} = ({SHARD}, {WHOLE}) all-gather-start(%{{1}}), {GROUPS}, dimensions={{{{0}}}}\n"
DONE = f"  %{{0}} = {WHOLE} all-gather-done(%{{1}})\n"
X = f"  %x = {SHARD} parameter(0)\n"


def mesh_and_chip(machine: str) -> tuple[Mesh, Hardware]:
    topology = parse_topology(machine)
    return make_mesh(devices=fake_devices(topology)), topology.hardware


def simulator(body: str, more: str = "", machine: str = H100) -> ScheduleSimulator:
    mesh, chip = mesh_and_chip(machine)
    head = f"HloModule m, is_scheduled=true, num_partitions={mesh.size}"
    text = f"{head}\n\n{more}\n\nENTRY %main (x: f32[8]) -> f32[] {{\n{body}}}\n"
    sent = read_collectives(text, mesh.shape).collectives
    return ScheduleSimulator(parse_program(text), sent, mesh, chip)


def simulate(body: str, more: str = "", machine: str = H100) -> SimulatedTime:
    result = simulator(body, more, machine).simulate_step()
    parts = result.compute + result.memory + result.exposed + result.host_exposed
    assert parts == pytest.approx(result.seconds)
    return result


def write(number: int, megabytes: int) -> str:
    """Returns an instruction that moves so much memory in total."""
    return f"  %a{number} = f32[{megabytes * 125_000}]{{0}} broadcast(%x)\n" * (megabytes > 0)


def write_seconds(megabytes: int, machine: str = H100) -> float:
    roofline = Roofline(parse_topology(machine).hardware)
    return 0.5e6 * megabytes / roofline.memory_rate + roofline.efficiency.launch


def gather_seconds(sent: int = SENT, machine: str = H100) -> float:
    return Network(*mesh_and_chip(machine)).seconds("all-gather", sent, "data")


def loop(body: str) -> str:
    """Returns the computations of the loop that `run` calls, over a tuple of a shard."""
    state = f"({SHARD})"
    return (
        f"%more (s: {state}) -> pred[] {{\n  %s = {state} parameter(0)\n"
        "  ROOT %yes = pred[] constant(true)\n}\n\n"
        f"%body (t: {state}) -> {state} {{\n  %t = {state} parameter(0)\n"
        f"  %x = {SHARD} get-tuple-element(%t), index=0\n{body}  ROOT %out = {state} tuple(%x)\n}}"
    )


def run(trips: int) -> str:
    config = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return (
        f"  %in = ({SHARD}) tuple(%x)\n"
        f"  %w = ({SHARD}) while(%in), condition=%more, body=%body, {config}\n"
    )


def test_a_gather_beside_enough_work_is_overlapped():
    result = simulate(X + START.format("s", "x") + write(0, 1000) + DONE.format("d", "s"))
    assert result.exposed == result.exposed_bytes == 0
    assert result.seconds == pytest.approx(write_seconds(1000))
    assert result.collective == pytest.approx(gather_seconds())
    assert [event.lane for event in result.events] == [LINK, COMPUTE]


def test_a_gather_takes_cores_from_the_matmuls_beside_it():
    sides = "".join(
        f"  %{side} = bf16[8192,8192] parameter({i})\n" for i, side in ((1, "l"), (2, "r"))
    )
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    dot = f"  %m = bf16[8192,8192] dot(%l, %r), {dims}\n"
    start, done = START.format("s", "x"), DONE.format("d", "s")

    def step(machine, *schedule):
        result = simulate(X + sides + "".join(schedule), machine=machine)
        assert result.exposed == 0
        return result.compute

    alone, beside = step(H100, dot), step(H100, start, dot, done)
    slowed = beside / alone - 1
    # the gather ends before the matmul does: 24 of 132 cores for a part of its time
    assert 0 < slowed < 24 / 108
    links = gather_seconds() / alone
    assert slowed == pytest.approx(links * 24 / 132, rel=0.2)
    # a TPU has other units for it
    assert step(V5P, start, dot, done) == step(V5P, dot)


def test_a_gather_is_exposed_as_long_as_it_outlasts_the_work():
    result = simulate(X + START.format("s", "x") + write(0, 100) + DONE.format("d", "s"))
    assert result.exposed == pytest.approx(gather_seconds() - write_seconds(100))
    assert result.exposed_bytes == pytest.approx(SENT * result.exposed / gather_seconds())
    assert result.seconds == pytest.approx(gather_seconds())
    assert result.memory == pytest.approx(write_seconds(100))


def test_a_gather_with_no_work_beside_it_is_fully_exposed():
    synchronous = simulate(f"{X}  %g = {WHOLE} all-gather(%x), {GROUPS}, dimensions={{0}}\n")
    beside_nothing = simulate(X + START.format("s", "x") + DONE.format("d", "s"))
    declared = simulate(
        X
        + START.format("s", "x")[:-1]
        + ', backend_config={"is_sync":true}\n'
        + DONE.format("d", "s")
    )
    for result in (synchronous, beside_nothing, declared):
        assert (
            result.seconds == result.exposed == result.collective == pytest.approx(gather_seconds())
        )
        assert result.exposed_bytes == SENT


def test_gathers_run_in_sequence():
    both = START.format("s", "x") + START.format("z", "x") + write(0, 100)
    result = simulate(X + both + DONE.format("d", "s") + DONE.format("e", "z"))
    assert result.seconds == pytest.approx(2 * gather_seconds())
    first, second = (event for event in result.events if event.lane == LINK)
    assert second.start == pytest.approx(first.end)


@pytest.mark.parametrize(
    ("axes", "at_once"), [(("data_1", "data_2"), True), (("data_1",) * 2, False)]
)
def test_gathers_along_two_dims_of_a_torus_run_at_once(axes, at_once):
    topology = parse_topology(V5P)
    mesh = split_data(mesh_axes(make_mesh(devices=fake_devices(topology)))).mesh
    groups = {"data_1": "{0,2},{1,3},{4,6},{5,7}", "data_2": "{0,1},{2,3},{4,5},{6,7}"}
    pair = f"f32[{2 * ROWS}]{{0}}"
    body = X
    for n, axis in enumerate(axes):
        body += f"  %s{n} = ({SHARD}, {pair}) all-gather-start(%x), "
        body += f"replica_groups={{{groups[axis]}}}, dimensions={{0}}\n"
    body += "".join(f"  %d{n} = {pair} all-gather-done(%s{n})\n" for n in range(2))
    text = "HloModule m, is_scheduled=true, num_partitions=8\n\n"
    text += f"ENTRY %main (x: f32[8]) -> f32[] {{\n{body}}}\n"
    sent = read_collectives(text, mesh.shape).collectives
    assert [one.axis for one in sent] == list(axes)
    result = ScheduleSimulator(parse_program(text), sent, mesh, topology.hardware).simulate_step()
    longest = result.collective if not at_once else max(e.end - e.start for e in result.events)
    assert result.seconds == result.exposed == pytest.approx(longest)


def test_a_matmul_takes_the_longer_of_compute_and_memory():
    def multiply(m: int, n: int) -> SimulatedTime:
        dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
        sides = f"  %l = f32[{m},4096] parameter(1)\n  %r = f32[4096,{n}] parameter(2)\n"
        return simulate(f"{X}{sides}  %d = f32[{m},{n}] dot(%l, %r), {dims}\n")

    square, thin = multiply(4096, 4096), multiply(65536, 8)
    assert square.compute == square.seconds > 0 == square.memory
    assert thin.memory == thin.seconds > 0 == thin.compute
    [(matmul, times)] = square.matmuls.items()
    assert (matmul.m, matmul.n, matmul.k, times) == (4096, 4096, 4096, 1)


@pytest.mark.parametrize("trips", [0, 1, 7])
def test_a_loop_takes_its_body_times_its_trips(trips):
    body = START.format("s", "x") + write(0, 100) + DONE.format("d", "s")
    once, often = simulate(X + body), simulate(X + run(trips), loop(body))
    for name in ("seconds", "memory", "exposed", "collective", "traffic", "exposed_bytes"):
        assert getattr(often, name) == pytest.approx(trips * getattr(once, name)), name


def test_the_layer_is_the_loop_that_takes_longest():
    body = START.format("s", "x") + write(0, 100) + DONE.format("d", "s")
    looped = simulator(X + run(7) + write(9, 10), loop(body))
    assert looped.simulate_layer().seconds == pytest.approx(gather_seconds())
    assert looped.simulate_step().seconds == pytest.approx(7 * gather_seconds() + write_seconds(10))
    flat = simulator(X + body)
    assert flat.simulate_layer() is flat.simulate_step()


def test_a_gather_across_a_loop_uses_the_links_free_time():
    across = X + START.format("s0", "x") + run(4) + DONE.format("d0", "s0")
    quiet = simulate(across, loop(write(0, 1000)))
    assert quiet.exposed == 0
    # five gathers, one after the other
    busy = simulate(across, loop(START.format("s", "x") + DONE.format("d", "s")))
    assert busy.seconds == busy.exposed == busy.collective == pytest.approx(5 * gather_seconds())
    half = loop(START.format("s", "x") + write(0, 100) + DONE.format("d", "s") + write(1, 100))
    idle = 4 * write_seconds(100)  # in which the loop leaves the link free
    assert simulate(across, half).exposed == pytest.approx(
        4 * (gather_seconds() - write_seconds(100)) + max(0, gather_seconds() - idle)
    )


def test_an_inner_loops_trips_come_from_the_outer_one():
    inner = "(s32[], s32[])"
    more = f"""
%less (p: {inner}) -> pred[] {{
  %p = {inner} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %again = pred[] compare(%i, %n), direction=LT
}}

%inside (q: {inner}) -> {inner} {{
  %q = {inner} parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %n = s32[] get-tuple-element(%q), index=1
  %x = {SHARD} iota(), iota_dimension=0
{START.format("s", "x")}{DONE.format("d", "s")}  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = {inner} tuple(%next, %n)
}}

%always (u: (s32[])) -> pred[] {{
  %u = (s32[]) parameter(0)
  ROOT %yes = pred[] constant(true)
}}

%outside (v: (s32[])) -> (s32[]) {{
  %v = (s32[]) parameter(0)
  %m = s32[] get-tuple-element(%v), index=0
  %zero = s32[] constant(0)
  %in = {inner} tuple(%zero, %m)
  %w = {inner} while(%in), condition=%less, body=%inside
  ROOT %back = (s32[]) tuple(%m)
}}"""
    body = (
        f"{X}  %five = s32[] constant(5)\n  %in = (s32[]) tuple(%five)\n"
        "  %w = (s32[]) while(%in), condition=%always, body=%outside,"
        ' backend_config={"known_trip_count":{"n":"3"}}\n'
    )
    result = simulate(body, more)
    assert result.collective == pytest.approx(3 * 5 * gather_seconds())
    assert result.exposed_bytes == pytest.approx(3 * 5 * SENT)


def test_the_longer_branch_counts():
    branches = "\n\n".join(
        f"%{name} (x: {SHARD}) -> f32[] {{\n{X}{lines}}}"
        for name, lines in (("short", write(0, 10)), ("long", write(1, 90)))
    )
    lines = f"{X}  %p = s32[] parameter(1)\n"
    for call, megabytes in (
        ("conditional(%p, %x, %x), branch_computations={%short, %long}", 90),
        ("conditional(%p, %x, %x), branch_computations={%long, %short}", 90),
        ("call(%x), to_apply=%short", 10),
    ):
        assert simulate(f"{lines}  %c = f32[] {call}\n", branches).seconds == pytest.approx(
            write_seconds(megabytes)
        )


def test_waiting_for_an_asynchronous_copy_counts_as_memory():
    fast = f"f32[{ROWS}]{{0:T(1024)S(1)}}"
    copy, done = (
        f"  %c = ({fast}, {SHARD}, u32[]) copy-start(%x)\n",
        f"  %d = {fast} copy-done(%c)\n",
    )
    alone, beside = (
        simulate(X + copy + done, machine=V5P),
        simulate(X + copy + write(0, 1000) + done, machine=V5P),
    )
    assert alone.memory == alone.seconds == pytest.approx(4 * ROWS / (2765e9 * 0.88))
    assert alone.exposed == beside.exposed == 0
    assert beside.seconds == pytest.approx(write_seconds(1000, V5P))
    assert (alone.traffic, beside.traffic) == (4 * ROWS, 4 * ROWS + 500_000_000)


HOST_SHARD = f"f32[4,{ROWS}]{{1,0:S(5)}}"
DEVICE_ROW = f"f32[1,{ROWS}]{{1,0}}"
ROW_SLICE = (
    f"%slice (p: {HOST_SHARD}, i: s32[]) -> {DEVICE_ROW} {{\n  %p = {HOST_SHARD} parameter(0)\n"
    f"  %i = s32[] parameter(1)\n"
    f"  ROOT %d = {DEVICE_ROW} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={{1,{ROWS}}}\n}}\n"
)
ON_HOST = f"  %h = {HOST_SHARD} parameter(1)\n  %i = s32[] constant(0)\n"
FETCHES = {  # as XLA prints them for a GPU, and for a TPU
    H100: f"  %f = (({HOST_SHARD}, s32[]), {DEVICE_ROW}, u32[])"
    " fusion-start(%h, %i), calls=%slice\n"
    f"  %g = {DEVICE_ROW} fusion-done(%f)\n",
    V5P: f"  %f = (({HOST_SHARD}, s32[], s32[]), {DEVICE_ROW}, u32[])"
    f" dynamic-slice-start(%h, %i, %i), dynamic_slice_sizes={{1,{ROWS}}}\n"
    f"  %g = {DEVICE_ROW} dynamic-slice-done(%f)\n",
}


def host_seconds(size: int, machine: str) -> float:
    return size / Roofline(parse_topology(machine).hardware).host_rate


@pytest.mark.parametrize("machine", [H100, V5P])
def test_a_fetch_from_the_host_waits_as_it_outlasts_the_work(machine):
    start, done = FETCHES[machine].splitlines(keepends=True)
    head = X + ON_HOST
    alone = simulate(head + start + done, ROW_SLICE, machine)
    beside = simulate(head + start + write(0, 400) + done, ROW_SLICE, machine)
    seconds = host_seconds(4 * ROWS, machine)
    assert alone.from_host == 4 * ROWS, "the slice, not the array"
    assert alone.traffic == alone.to_host == alone.exposed == 0
    assert alone.host == alone.host_exposed == alone.seconds == pytest.approx(seconds)
    hidden = min(seconds, write_seconds(400, machine))
    assert beside.host_exposed == pytest.approx(seconds - hidden)


def test_the_two_directions_of_the_link_to_the_host_run_at_once():
    row = f"  %r = {DEVICE_ROW} parameter(2)\n"
    send = (
        f"  %s = (({HOST_SHARD}, {DEVICE_ROW}, s32[], s32[]), {HOST_SHARD}, u32[])"
        " dynamic-update-slice-start(%h, %r, %i, %i)\n"
    )
    sent = f"  %t = {HOST_SHARD} dynamic-update-slice-done(%s)\n"
    start, done = FETCHES[V5P].splitlines(keepends=True)
    result = simulate(X + ON_HOST + row + start + send + done + sent, machine=V5P)
    assert (result.from_host, result.to_host) == (4 * ROWS, 4 * ROWS)
    assert result.host == pytest.approx(2 * result.seconds)
    assert result.seconds == pytest.approx(host_seconds(4 * ROWS, V5P))


def test_a_kernel_waits_for_the_host_memory_that_it_reads():
    read = f"  %g = {DEVICE_ROW} fusion(%h, %i), kind=kLoop, calls=%slice\n"
    result = simulate(X + ON_HOST + read, ROW_SLICE)
    assert result.traffic == 4 * ROWS + 4, "the slice that it writes, and the index"
    assert result.seconds == pytest.approx(host_seconds(4 * ROWS, H100))
    assert result.host_exposed == pytest.approx(result.seconds - result.memory)


def test_a_copy_within_host_memory_crosses_no_link():
    result = simulate(f"{X}{ON_HOST}  %k = {HOST_SHARD} copy(%h)\n")
    assert result.host == result.from_host == result.traffic == 0


def test_an_empty_gather_costs_nothing():
    waits = (
        START.format("s", "x")
        + f"  %e = (f32[0]{{0}}, f32[0]{{0}}) all-gather-start(%z), {GROUPS}, dimensions={{0}}\n"
    )
    result = simulate(
        f"{X}  %z = f32[0]{{0}} parameter(1)\n{waits}  %n = f32[0]{{0}} all-gather-done(%e)\n"
        + DONE.format("d", "s")
    )
    assert result.memory == 0
    assert result.exposed == pytest.approx(gather_seconds())


def test_a_tpu_collective_spans_the_fusions_that_start_and_end_it():
    def fusion(name: str, target: str) -> str:
        chain = 'frontend_attributes={chain_id="7"}'
        gather = f"%g = {WHOLE} all-gather(%q), {GROUPS}, dimensions={{0}}, {chain}"
        call = f'ROOT %c = ({SHARD}, {WHOLE}) custom-call(%g), custom_call_target="{target}"'
        parameter = f"%q = {SHARD} parameter(0)"
        return f"%{name} (q: {SHARD}) -> {WHOLE} {{\n  {parameter}\n  {gather}\n  {call}\n}}"

    both = f"{fusion('begin', 'AsyncCollectiveStart')}\n\n{fusion('finish', 'AsyncCollectiveDone')}"
    near = SHARD.replace("{0}", "{0:S(1)}")
    start = f"  %s = ({near}, {near}) fusion(%y), kind=kCustom, calls=%begin\n"
    done = f"  %d = {near} fusion(%s), kind=kCustom, calls=%finish\n"
    y = f"  %y = {near} parameter(1)\n"
    link = gather_seconds(machine=V5P)
    alone = simulate(X + y + start + done, both, V5P)
    hidden = simulate(X + y + start + write(0, 9000) + done, both, V5P)
    assert alone.exposed == alone.seconds == pytest.approx(link)
    assert (hidden.exposed, hidden.collective) == (0, pytest.approx(link))


# Any schedule


@dataclass
class Schedule:
    """Instructions, the seconds they compute, and the number of gathers."""

    lines: str = ""
    seconds: float = 0.0
    gathers: int = 0


@st.composite
def schedules(draw) -> Schedule:
    """Draws work, gathers and their ends in any order in which a start precedes its done."""
    schedule, open_ = Schedule(), []
    for number in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["work", "start", "done"]))
        if kind == "work":
            megabytes = draw(st.integers(1, 400))
            schedule.lines += write(number, megabytes)
            schedule.seconds += write_seconds(megabytes)
        elif kind == "start":
            schedule.lines += START.format(f"s{number}", "x")
            schedule.gathers += 1
            open_.append(number)
        elif open_:
            last = open_.pop(draw(st.integers(0, len(open_) - 1)))
            schedule.lines += DONE.format(f"d{last}", f"s{last}")
    schedule.lines += "".join(DONE.format(f"d{last}", f"s{last}") for last in open_)
    return schedule


@settings(deadline=None)
@given(before=schedules(), inside=schedules(), trips=st.integers(0, 5), after=schedules())
def test_the_parts_of_any_schedule_add_up(before, inside, trips, after):
    marked = "".join(
        re.sub("%([ads])", rf"%{mark}\1", schedule.lines)
        for mark, schedule in (("b", before), ("c", after))
    )
    cut = len(before.lines.splitlines()) // 2
    entry = [line + "\n" for line in marked.splitlines()]
    result = simulator(
        X + "".join(entry[:cut]) + run(trips) + "".join(entry[cut:]), loop(inside.lines)
    ).simulate_step()
    gathers = before.gathers + after.gathers + trips * inside.gathers
    work = before.seconds + after.seconds + trips * inside.seconds
    small = 1e-9
    assert result.compute + result.memory + result.exposed == pytest.approx(result.seconds)
    assert result.memory == pytest.approx(work)
    assert result.collective == pytest.approx(gathers * gather_seconds())
    assert (
        max(work, result.collective) - small <= result.seconds <= work + result.collective + small
    )
    assert -small <= result.exposed <= result.collective + small
    assert -small <= result.exposed_bytes <= gathers * SENT + 1
    for lane in (LINK, COMPUTE):
        events = [event for event in result.events if event.lane == lane]
        assert all(event.end >= event.start >= 0 for event in events)
        if lane == COMPUTE:
            assert all(later.start >= earlier.end - small for earlier, later in pairwise(events))
