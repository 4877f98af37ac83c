"""Memory at the peak: shared memory, what each array is for, and the sums of a compiled step."""

from types import SimpleNamespace

import optax
import pytest
from flax import nnx
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.hlo.parser import parse_program
from fsdp_jax.planner.compiled.buffer_assignment import LiveBuffer, MemoryReport, read_memory_report
from fsdp_jax.planner.compiled.peak_memory import peak_memory

USAGE = """Memory Space: default (color=0)
Total bytes: 1000 (1KiB)

Memory Space: host (color=5)
Total bytes: 70 (70B)
"""
LIVE = """HloLiveRange (max 9):
  BufferLiveRange:
    p{}:0-9
    gathered{}:1-2
    early{}:2-4
    late{1,0}:4-6
    away{}:4-6
    local{}:0-9
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 100, page 0, parameter 6, shape |f32[25]| at ShapeIndex {}, maybe-live-out:
 value: <1 p @0> (size=100,offset=0): f32[25]{0}
allocation 1: size 800, preallocated-temp:
 value: <2 gathered @0> (size=400,offset=400): bf16[200]{0}
 value: <3 early @0> (size=400,offset=0): f32[100]{0}
 value: <4 late{1,0} (phi) @0> (size=500,offset=0): f32[125]{0:T(128)}
allocation 2: size 4000, color 5, preallocated-temp:
 value: <5 away @5> (size=4000,offset=0): f32[1000]{0:S(5)}
allocation 3: size 900, thread-local:
 value: <6 local @0> (size=900,offset=0): f32[225]{0}
"""

PROGRAM = """HloModule step, is_scheduled=true, num_partitions=8

%cast (a: f32[8,64]) -> bf16[8,64] {
  %a = f32[8,64]{1,0} parameter(0)
  ROOT %cast.1 = bf16[8,64]{1,0} convert(%a)
}

%wrapped_slice_computation.3 (b: f32[8,64], at: s32[]) -> f32[1,64] {
  %b = f32[8,64]{1,0:S(5)} parameter(0)
  %at = s32[] parameter(1)
  ROOT %row = f32[1,64]{1,0} dynamic-slice(%b, %at, %at), dynamic_slice_sizes={1,64}
}

%body (state: (f32[4,64,64], f32[4,2,64], f32[64,64])) -> (f32[4,64,64], f32[4,2,64], f32[64,64]) {
  %state = (f32[4,64,64]{2,1,0}, f32[4,2,64]{2,1,0}, f32[64,64]{1,0}) parameter(0)
  %gradients = f32[4,64,64]{2,1,0} get-tuple-element(%state), index=0
  %saved = f32[4,2,64]{2,1,0} get-tuple-element(%state), index=1
  %next = f32[64,64]{1,0} get-tuple-element(%state), index=2
  %zero = s32[] constant(0)
  %scattered = f32[1,64,64]{2,1,0} reduce-scatter(%next), dimensions={0}, to_apply=%sum,\
 metadata={op_name="jit(f)/transpose(jvp())/while/body/fsdp.reduce[up/kernel]/psum"}
  %stacked = f32[4,64,64]{2,1,0} dynamic-update-slice(%gradients, %scattered, %zero),\
 metadata={op_name="jit(f)/transpose(jvp())/while/body/dynamic_update_slice"}
  %hidden = f32[1,2,64]{2,1,0} tanh(%saved), metadata={op_name="jit(f)/jvp(mlp)/while/body/tanh"}
  %kept = f32[4,2,64]{2,1,0} dynamic-update-slice(%saved, %hidden, %zero),\
 metadata={op_name="jit(f)/jvp()/while/body/dynamic_update_slice"}
  %product = f32[64,64]{1,0} multiply(%next, %next),\
 metadata={op_name="jit(f)/transpose(jvp(mlp))/while/body/dot_general"}
  ROOT %out = (f32[4,64,64]{2,1,0}, f32[4,2,64]{2,1,0}, f32[64,64]{1,0})\
 tuple(%stacked, %kept, %product)
}

%more (state.1: (f32[4,64,64], f32[4,2,64], f32[64,64])) -> pred[] {
  %state.1 = (f32[4,64,64]{2,1,0}, f32[4,2,64]{2,1,0}, f32[64,64]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (w: f32[8,64]) -> f32[8,64] {
  %w = f32[8,64]{1,0} parameter(1), metadata={op_name="state.params[\\'up\\'][\\'kernel\\']"}
  %m = f32[8,64]{1,0} parameter(2),\
 metadata={op_name="state.opt_state[0].mu[\\'up\\'][\\'kernel\\']"}
  %half = bf16[8,64]{1,0} fusion(%w), kind=kLoop, calls=%cast
  %whole = bf16[64,64]{1,0} all-gather(%half), dimensions={0}
  %mask = pred[64]{0} compare(%w, %w), direction=LT
  %plain = f32[2,64]{1,0} tanh(%whole), metadata={op_name="jit(f)/jvp(mlp)/tanh"}
  %zeros = f32[4,64,64]{2,1,0} broadcast(%w)
  %nothing = f32[4,2,64]{2,1,0} broadcast(%w)
  %first = f32[64,64]{1,0} multiply(%whole, %whole),\
 metadata={op_name="jit(f)/transpose(jvp(mlp))/dot_general"}
  %start = (f32[4,64,64]{2,1,0}, f32[4,2,64]{2,1,0}, f32[64,64]{1,0})\
 tuple(%zeros, %nothing, %first)
  %loop = (f32[4,64,64]{2,1,0}, f32[4,2,64]{2,1,0}, f32[64,64]{1,0})\
 while(%start), condition=%more, body=%body
  %zero.1 = s32[] constant(0)
  %fetch = ((f32[8,64]{1,0:S(5)}, s32[]), f32[1,64]{1,0}, u32[]) fusion-start(%m, %zero.1),\
 kind=kLoop, calls=%wrapped_slice_computation.3
  %update = f32[8,64]{1,0} multiply(%w, %m), metadata={op_name="jit(f)/mul"}
  %other = f32[8,64]{1,0} negate(%m), metadata={op_name="jit(f)/neg"}
  ROOT %result = f32[8,64]{1,0} add(%w, %update)
}
"""


class Small(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 64, use_bias=False, rngs=rngs)


def write(folder, usage=USAGE, live=LIVE, assignment=ASSIGNMENT):
    for name, text in {
        "memory-usage-report": usage,
        "live-range": live,
        "buffer-assignment": assignment,
    }.items():
        (folder / f"module_0001.jit_step-{name}.txt").write_text(text)
    return folder


def test_shared_memory_counts_once_at_the_peak(tmp_path):
    report = read_memory_report(write(tmp_path))
    assert report.spaces == {"default": 1000, "host": 70}
    # instruction 4 seems to hold 1000 bytes, but `late` takes the memory of `early`; 2 holds 900
    assert {(one.name, one.bytes, one.parameter) for one in report.live} == {
        ("p", 100, 6),
        ("early", 400, None),
        ("gathered", 400, None),
    }


def test_the_gpu_compilers_name_of_host_memory_is_read(tmp_path):
    usage = USAGE.replace("Space: host", "Space: cmem")
    assert read_memory_report(write(tmp_path, usage)).spaces == {"default": 1000, "host": 70}


def test_tuple_elements_and_partly_shared_memory(tmp_path):
    only_late = LIVE.replace("    gathered{}:1-2\n", "")
    report = read_memory_report(write(tmp_path, live=only_late))
    assert report.live == [
        LiveBuffer("p", (), 100, "f32[25]", 6),
        LiveBuffer("late", (1, 0), 500, "f32[125]", None),
    ]


def test_a_folder_without_reports_or_with_two_is_refused(tmp_path):
    with refused(where=str(tmp_path), got="none", fix="xla_dump_to"):
        read_memory_report(tmp_path)
    write(tmp_path)
    (tmp_path / "module_0002.jit_other-live-range.txt").write_text(LIVE)
    with refused(where=str(tmp_path), got="module_0002"):
        read_memory_report(tmp_path)


def test_reports_in_another_format_are_refused(tmp_path):
    with refused("unknown format", where=str(tmp_path)):
        read_memory_report(write(tmp_path, assignment="allocations: none\n"))


@pytest.fixture(scope="module")
def plan():
    mesh = fsdp.make_mesh(data=8)
    sharded = fsdp.fully_shard(lambda rngs: Small(rngs), optax.adam(1e-3), mesh, min_size=1)
    return SimpleNamespace(layout=sharded.layout, others={}, local_batch=True, deferred=False)


def kind_and_path(plan, name, array, element=(), parameter=None):
    report = MemoryReport({"default": 10}, [LiveBuffer(name, element, 10, array, parameter)])
    (buffer,) = peak_memory(plan, parse_program(PROGRAM), report).buffers
    return buffer.kind, buffer.path


@pytest.mark.parametrize(
    ("name", "array", "element", "expected"),
    [
        # a cast, inside a fusion, of a parameter
        (
            "half",
            "bf16[8,64]",
            (),
            ("gathered", "up/kernel"),
        ),
        ("whole", "bf16[64,64]", (), ("gathered", "up/kernel")),
        ("plain", "f32[2,64]", (), ("activations", "mlp")),
        ("mask", "pred[64]", (), ("other", "up")),
        # the body stacks what was reduced
        (
            "loop",
            "f32[4,64,64]",
            (0,),
            ("gradients", "up/kernel"),
        ),
        ("loop", "f32[4,2,64]", (1,), ("activations", "mlp")),
        ("loop", "f32[64,64]", (2,), ("gradients", "up/kernel")),  # reduced in the next round
        ("zeros", "f32[4,64,64]", (), ("gradients", "up/kernel")),  # by what the loop fills it with
        ("nothing", "f32[4,2,64]", (), ("activations", "mlp")),
        ("first", "f32[64,64]", (), ("gradients", "up/kernel")),  # reduced in the first round
        ("update", "f32[8,64]", (), ("gradients", "up/kernel")),  # as long as a shard
        ("gone", "f32[8,64]", (), ("other", "")),
        # what an asynchronous fusion brings from the host, which the text does not name
        ("wrapped_slice.3", "f32[1,64]", (), ("optimizer", "0/mu/up/kernel")),
        ("all_gather.60.1", "bf16[64,64]", (), ("gathered", "")),
        ("reduce-scatter.7", "f32[8,64]", (), ("gradients", "")),
    ],
)
def test_the_kind_and_path_of_an_array(plan, name, array, element, expected):
    assert kind_and_path(plan, name, array, element) == expected


def test_an_array_updated_in_place_keeps_its_kind(plan):
    assert kind_and_path(plan, "result", "f32[8,64]", parameter=1) == ("params", "up/kernel")
    kind, path = kind_and_path(plan, "update", "f32[8,64]", parameter=2)
    assert kind == "optimizer"
    assert path.endswith("mu/up/kernel")


@pytest.mark.parametrize(
    ("merged", "module"),
    [
        ("jit(f)/(jvp(mlp)/0/dot_general:jvp(mlp)/1/reduce_sum)", "mlp"),
        ("jit(f)/jvp(mlp)/tanh;mlp/mul", "mlp"),
        ("jit(f)/(jvp(mlp)/tanh:jvp(head)/tanh)", ""),
        ("jit(f)/(reduce_sum:jvp(mlp)/tanh)", "mlp"),
    ],
)
def test_operations_that_xla_merged_have_the_module_of_all(plan, merged, module):
    text = PROGRAM.replace("jit(f)/jvp(mlp)/tanh", merged).replace("tanh(%whole)", "tanh(%zero.1)")
    report = MemoryReport({"default": 10}, [LiveBuffer("plain", (), 10, "f32[2,64]", None)])
    (buffer,) = peak_memory(plan, parse_program(text), report).buffers
    assert (buffer.kind, buffer.path) == ("activations", module)


def test_an_inputs_memory_may_be_used_for_something_else(plan):
    assert kind_and_path(plan, "half", "bf16[8,64]", parameter=1) == ("gathered", "up/kernel")
    # of the same shape and dtype, but neither computed from the input nor a result of the step
    assert kind_and_path(plan, "other", "f32[8,64]", parameter=1) == ("gradients", "up/kernel")
    # a copy of the parameter, which has no memory of its own any more
    assert kind_and_path(plan, "w", "f32[8,64]") == ("params", "up/kernel")


def test_the_breakdown_adds_up_and_gaps_are_other(plan):
    alive = [
        LiveBuffer("whole", (), 8, "bf16[64,64]", None),
        LiveBuffer("w", (), 20, "f32[8,64]", 1),
        LiveBuffer("table", (), 4, "(pred[]", None),
    ]
    memory = peak_memory(
        plan, parse_program(PROGRAM), MemoryReport({"default": 100, "host": 7}, alive)
    )
    assert (memory.peak_bytes, memory.host_bytes) == (100, 7)
    assert {kind: size for kind, size in memory.breakdown.items() if size} == {
        "params": 20,
        "gathered": 8,
        "other": 72,
    }
    assert [buffer.bytes for buffer in memory.buffers] == [20, 8, 4]
    assert memory.buffers[2].array == "pred[]"
