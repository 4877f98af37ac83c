"""Compiled steps on absent chips: their matmuls, memory and schedule, against arithmetic.

Stored programs are read (`stored_steps.py`); CI compiles Llamas too, which have attention.
"""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from stored_steps import (
    LAYERS,
    STEPS,
    TOKENS,
    VOCABULARY,
    contract_of,
    plan_of,
    stored,
    traced,
)

import fsdp_jax as fsdp
from fsdp_jax.compat.compilation_cache import without_compilation_cache
from fsdp_jax.hlo.collectives import read_collectives
from fsdp_jax.hlo.parser import parse_program
from fsdp_jax.models import llama, next_token_loss
from fsdp_jax.planner import HARDWARE, Work
from fsdp_jax.planner.compiled.buffer_assignment import read_memory_report
from fsdp_jax.planner.compiled.peak_memory import peak_memory
from fsdp_jax.planner.compiled.timeline import ScheduleSimulator
from fsdp_jax.step.xla_options import compiler_options
from fsdp_jax.testing import mesh_of

pytestmark = pytest.mark.releases

LLAMA = llama.preset("llama2-7b", layers=2, sequence_length=512)
D, F, V, HEADS, HEAD_DIM = 4096, 11008, 32000, 32, 128
LAYER = 4 * D * D + 3 * D * F  # parameters of the matmuls of one layer
T = 512
DEVICE_ROWS = 2


@pytest.mark.parametrize("name", ["hybrid", "float8", "hybrid_v5p", "prefetch_v5e"])
def test_a_stored_step_has_the_computed_matmuls_and_memory(name):
    step, _, _ = traced(name)
    made = STEPS[name].make.keywords
    width, accumulation = made.get("width", 128), made.get("accumulation", 1)
    program = stored(name).program
    module, mesh, layout = parse_program(program.text), step.plan.layout.mesh, step.plan.layout
    collectives = read_collectives(program.text, mesh.shape).collectives
    chip = STEPS[name].machine().hardware
    simulated = ScheduleSimulator(module, collectives, mesh, chip).simulate_step()
    assert not simulated.unknown
    # forward, and backward twice; of a layer that is recomputed, the first of its two matmuls
    kernel = 2 * TOKENS * accumulation * 4 * width * width
    flops = 3 * (LAYERS * 2 * kernel + 2 * TOKENS * accumulation * width * VOCABULARY)
    again = made.get("remat") == "full"
    found = sum(matmul.flops * count for matmul, count in simulated.matmuls.items())
    assert found == flops + again * LAYERS * kernel
    assert simulated.compute + simulated.memory + simulated.exposed == pytest.approx(
        simulated.seconds
    )
    assert 0 < simulated.exposed <= simulated.collective < simulated.seconds
    memory = peak_memory(step.plan, module, program.report)
    assert sum(memory.breakdown.values()) == memory.peak_bytes
    live = sum(buffer.bytes for buffer in memory.buffers)
    state = {part: layout.per_device(part) for part in ("params", "optimizer")}
    if chip.platform == "tpu":  # it pads small arrays to full tiles, and keeps some on the chip
        assert all(size < memory.breakdown[part] < 1.5 * size for part, size in state.items())
        assert live <= program.report.spaces["default"]
        return
    assert memory.host_bytes == 0
    assert all(memory.breakdown[part] == size for part, size in state.items())
    assert live == pytest.approx(program.report.spaces["default"], rel=0.02)
    # of a shard in float32, p, g, m, v are read and p, m, v written; weights are read three times
    parameters = sum(math.prod(leaf.shape) for leaf in layout.by_path.values())
    assert simulated.traffic > 3 * 2 * parameters + 28 * parameters // mesh.shape["data"]


def test_a_compiled_plan_is_that_of_its_program():
    work = Work(8 * TOKENS, 1e9, "by hand", VOCABULARY)
    plan = plan_of("prefetch_v5e", work)
    assert plan.basis["peak_bytes"] == plan.basis["time"] == "compiled"
    assert sum(plan.breakdown.values()) == plan.peak_bytes > plan.valley_bytes
    assert plan.wire_bytes <= 1.02 * plan.wire_bytes_limit
    assert plan.collectives == contract_of("prefetch_v5e").rows()
    assert plan.tokens_per_s_per_device == pytest.approx(TOKENS / plan.time.step_s)
    assert plan.cliff is None
    assert plan.events
    assert plan.buffers
    shown = str(plan)
    for word in ("full_shard on v5e:4x2", "largest at the peak", "by hand", "compiled: "):
        assert word in shown


@pytest.mark.needs_plugin
def test_a_compiled_llama_has_the_computed_figures(tmp_path):
    """One test, since compiling takes most of its time."""
    mesh = mesh_of("h100:8")
    sharded, step, compiled = compiled_llama(LLAMA, mesh, DEVICE_ROWS, tmp_path, remat="none")
    module = parse_program(compiled.as_text())
    collectives = read_collectives(compiled.as_text(), mesh.shape).collectives
    simulated = ScheduleSimulator(module, collectives, mesh, HARDWARE["h100"]).simulate_step()
    check_matmuls(simulated)
    check_traffic(simulated)
    check_memory(step, sharded.layout, compiled, tmp_path)


def compiled_llama(config, mesh, device_rows, folder, **settings):
    """(sharded model, step, compiled program), with XLA's reports in the folder."""
    sharded = fsdp.fully_shard(
        lambda rngs: llama.Llama(config, rngs=rngs),
        optax.adamw(1e-3),
        mesh,
        units=[llama.LlamaBlock],
        precision=fsdp.Precision(compute="bfloat16"),
        **settings,
    )
    step = sharded.make_train_step(next_token_loss, local_batch=True)
    tokens = jax.ShapeDtypeStruct((device_rows * mesh.size, config.sequence_length + 1), jnp.int32)
    options = compiler_options(step.plan, step.report.prefetch) | {"xla_dump_to": str(folder)}
    with without_compilation_cache():
        compiled = step.lower({"tokens": tokens}).compile(compiler_options=options)
    return sharded, step, compiled


def check_matmuls(simulated):
    # every parameter but the embedding and the norms is multiplied
    linear = 6 * DEVICE_ROWS * T * (2 * LAYER + D * V)
    # in both layers: queries by keys, the mask not skipped; forward, scores again, 4 derivatives
    scores = 2 * 2 * DEVICE_ROWS * HEADS * T * T * HEAD_DIM
    attention = (2 + 1 + 4) * scores
    flops = sum(matmul.flops * count for matmul, count in simulated.matmuls.items())
    assert flops == pytest.approx(linear + attention, rel=0.02)
    assert {matmul.dtype for matmul in simulated.matmuls} <= {"bfloat16", "float32"}
    assert not simulated.unknown


def check_traffic(simulated):
    # at least: three times all weights in bf16; of a shard in float32, p, g, m, v are read and
    # p, m, v written
    parameters = 2 * LAYER + 2 * D * V
    least = 3 * 2 * (2 * LAYER + D * V) + 28 * parameters // 8
    assert least < simulated.traffic < 4 * least
    parts = simulated.compute + simulated.memory + simulated.exposed
    assert parts == pytest.approx(simulated.seconds)
    assert 0 < simulated.exposed <= simulated.collective < simulated.seconds


def check_memory(step, layout, compiled, folder):
    memory = peak_memory(step.plan, parse_program(compiled.as_text()), read_memory_report(folder))
    assert memory.breakdown["params"] == layout.per_device("params")
    assert memory.breakdown["optimizer"] == layout.per_device("optimizer")
    assert sum(memory.breakdown.values()) == memory.peak_bytes
    assert memory.host_bytes == 0
    # at most all gathered parameters and all full gradients in bf16, and shards in float32
    full = layout.total("params") // 2
    copies = memory.breakdown["gathered"] + memory.breakdown["gradients"]
    assert 0 < copies < 2 * full + layout.per_device("params")
    live = sum(buffer.bytes for buffer in memory.buffers)
    assert live == pytest.approx(compiled.memory_analysis().peak_memory_in_bytes, rel=0.02)
