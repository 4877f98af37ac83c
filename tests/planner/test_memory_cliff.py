"""What XLA gave up for want of memory, read from handwritten programs and from a compiled one."""

from dataclasses import replace

import pytest

from fsdp_jax.hlo.collectives import read_collectives
from fsdp_jax.hlo.parser import parse_program
from fsdp_jax.planner import HARDWARE, Work, analytic_plan, compiled_plan, parse_topology
from fsdp_jax.planner.memory_cliff import GPU_BASE, GPU_SLOP, memory_cliff, scheduler_memory_limit
from fsdp_jax.train.build import build
from fsdp_jax.train.config_file import load_config

GIB = 2**30
GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
LOOP = """HloModule m, is_scheduled=true, num_partitions=8

%fused (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64]{1,0} parameter(0)
  ROOT %inner.remat = f32[64,64]{1,0} tanh(%p)
}

%more (s: (f32[64,64])) -> pred[] {
  %s = (f32[64,64]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%body (t: (f32[64,64])) -> (f32[64,64]) {
  %t = (f32[64,64]{1,0}) parameter(0)
  %x = f32[64,64]{1,0} get-tuple-element(%t), index=0
START  %product = f32[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
DONE  %again = f32[64,64]{1,0} fusion(%product), kind=kLoop, calls=%fused
REMAT  ROOT %out = (f32[64,64]{1,0}) tuple(%again)
}

ENTRY %main (x: f32[64,64]) -> (f32[64,64]) {
  %x = f32[64,64]{1,0} parameter(0)
  %h = f32[1024,1024]{1,0:S(5)} parameter(1)
  %in = (f32[64,64]{1,0}) tuple(%x)
  ROOT %w = (f32[64,64]{1,0}) while(%in), condition=%more, body=%body,\
 backend_config={"known_trip_count":{"n":"4"}}
}
"""
START = f"  %s = (f32[64,64], f32[512,64]) all-gather-start(%x), {GROUPS}\n"
DONE = "  %d = f32[512,64]{1,0} all-gather-done(%s)\n"


def cliff_of(remat="", peak=0, limit=0, *, hidden=True):
    start, done = (START, DONE) if hidden else ("", START + DONE)
    text = LOOP.replace("START", start).replace("DONE", done).replace("REMAT", remat)
    collectives = read_collectives(text, {"data": 8}).collectives
    return memory_cliff(parse_program(text), collectives, peak, limit)


def test_a_program_that_gave_up_nothing_has_no_cliff():
    assert cliff_of() is None
    assert cliff_of(peak=GIB, limit=2 * GIB, hidden=False) is None, "exposed for another reason"
    assert cliff_of(peak=3 * GIB, limit=2 * GIB) is None, "above the limit, and all is hidden"


@pytest.mark.parametrize(
    "name", ["dot.5.remat", "dot.remat2", "dot.5.remat.1", "a.remat_compressed"]
)
def test_results_that_xla_computes_again_are_counted(name):
    line = f"  %{name} = f32[64,64]{{1,0}} multiply(%product, %product)\n"
    cliff = cliff_of(line)
    assert (cliff.rematerialized, cliff.rematerialized_bytes) == (1, 4 * 64 * 64)
    assert cliff.free_bytes == 4 * 64 * 64
    assert "XLA computes 1 results again (16 KiB)" in str(cliff)
    assert "exposed" not in str(cliff)


@pytest.mark.parametrize(
    "line",
    [
        "  %bitcast.remat.3 = f32[64,64]{1,0} bitcast(%product)\n",  # no work
        "  %remat.3 = f32[64,64]{1,0} tanh(%product)\n",  # named so by a user
        "  %rematted.3 = f32[64,64]{1,0} tanh(%product)\n",
    ],
)
def test_other_instructions_are_not_counted(line):
    assert cliff_of(line) is None


def test_exposed_collectives_above_the_limit_are_a_cliff():
    cliff = cliff_of(peak=3 * GIB, limit=2 * GIB, hidden=False)
    assert (cliff.exposed_share, cliff.free_bytes) == (1.0, GIB)
    lever = replace(cliff, lever="--remat full, which frees 4 GiB")
    assert str(lever) == (
        "memory cliff: 100% of what is sent beside compute is exposed, above the 2 GiB that XLA's"
        " scheduler plans with; free up to 1 GiB, at the least cost with"
        " --remat full, which frees 4 GiB"
    )


def test_the_limit_is_what_xla_plans_with():
    module = parse_program(LOOP.replace("START", "").replace("DONE", "").replace("REMAT", ""))
    inputs = 4 * 64 * 64  # of those in device memory
    h100 = HARDWARE["h100"]
    base = GPU_BASE * h100.memory_bytes
    assert scheduler_memory_limit(h100, module) == int(inputs + GPU_SLOP * (base - inputs))
    assert scheduler_memory_limit(h100, module, GIB) == int(inputs + GPU_SLOP * (GIB - inputs))
    assert scheduler_memory_limit(HARDWARE["v5e"], module) == 15.75 * GIB


@pytest.mark.exhaustive
@pytest.mark.needs_plugin
def test_a_gpu_with_too_little_memory_has_a_cliff(tmp_path):
    """The same step, compiled for GPUs of 3 GiB and of 0.9 GiB."""
    words = "--model.preset llama-tiny --model.layers 8 --model.width 1024 --model.heads 8"
    words += " --model.vocab_size 8192 --data.sequence_length 2048 --remat none"
    words += " --train.global_batch_size 16"
    config = load_config("configs/llama2_7b.yaml", words.split())
    plans = []
    for gib in (3, 0.9):
        machine = parse_topology("h100:8")
        chip = replace(machine.hardware, memory_bytes=int(gib * GIB))
        machine = replace(machine, hardware=chip)
        run = build(config, machine.devices())
        plans.append(compiled_plan(run.step, run.batch, machine, Work(), None))
    ample, short = plans
    assert ample.cliff is None
    assert short.cliff.rematerialized > 10
    assert short.cliff.free_bytes > short.peak_bytes - 0.9 * GIB
    assert short.time.exposed_s > ample.time.exposed_s
    assert "memory cliff: XLA computes" in str(short)
    assert short.to_json()["cliff"]["rematerialized"] == short.cliff.rematerialized
    assert analytic_plan(run.step, run.batch, machine, Work()).cliff is None, "it has no program"
