"""A compiled Llama on absent GPUs: its matmuls, memory and schedule, against arithmetic."""

import jax
import jax.numpy as jnp
import optax
import pytest

import fsdp_jax as fsdp
from fsdp_jax.hlo.collectives import read_collectives
from fsdp_jax.hlo.compilation_cache import without_compilation_cache
from fsdp_jax.hlo.parser import parse_program
from fsdp_jax.models import llama, next_token_loss
from fsdp_jax.planner import HARDWARE
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


@pytest.mark.needs_plugin
def test_a_compiled_llama_has_the_computed_matmuls_traffic_and_memory(tmp_path):
    """One test, since compiling takes most of its time."""
    mesh = mesh_of("h100:8")
    sharded, step, compiled = compiled_llama(LLAMA, mesh, DEVICE_ROWS, tmp_path, remat="none")
    module = parse_program(compiled.as_text())
    collectives = read_collectives(compiled.as_text(), mesh.shape).collectives
    simulated = ScheduleSimulator(module, collectives, mesh, HARDWARE["h100"]).simulate_step()
    check_matmuls(simulated)
    check_traffic(simulated)
    check_memory(step, sharded.layout, compiled, tmp_path)


@pytest.mark.long
@pytest.mark.needs_plugin
def test_a_small_llama_that_is_recomputed_has_the_computed_memory(tmp_path):
    """Its units are recomputed in the backward pass, and small parameters are sharded."""
    sizes = {"layers": 2, "width": 256, "heads": 2, "kv_heads": 2, "hidden": 768}
    config = llama.preset("llama-tiny", vocab_size=384, sequence_length=64, **sizes)
    sharded, step, compiled = compiled_llama(
        config, mesh_of("h100:8"), 1, tmp_path, remat="full", min_size=64
    )
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
