"""Activations on the host, in the programs of accelerators: the memory spaces are theirs."""

import jax
import jax.numpy as jnp
import optax
import pytest
from reference import gpt

import fsdp_jax as fsdp
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import Block
from fsdp_jax.planner import Topology, fake_devices, parse_topology
from fsdp_jax.step.traced_checks import warn_of_missed_optimizations

LAYERS, ROWS, LENGTH, WIDTH = 4, 2, 128, 256
TOKENS = {"tokens": jax.ShapeDtypeStruct((8 * ROWS, LENGTH + 1), jnp.int32)}


def make_step(topology, scan, devices=Topology.devices, **settings):
    sizes = {"sequence_length": LENGTH, "layers": LAYERS, "width": WIDTH}
    mesh = fsdp.make_mesh(devices=devices(parse_topology(topology)))
    sharded = fsdp.fully_shard(
        gpt(scan, **sizes),
        optax.sgd(0.1),
        mesh,
        "full_shard",
        units=[Block],
        remat="full",
        precision=fsdp.Precision(compute="bfloat16"),
        **settings,
    )
    return sharded.make_train_step(next_token_loss, local_batch=True)


@pytest.mark.needs_plugin
@pytest.mark.parametrize(
    ("topology", "scan", "prefetch", "on_host"),
    [
        # the last block's are read at once
        pytest.param("h100:8", True, "pre", LAYERS - 1, marks=pytest.mark.long),
        ("v5e:2x4", True, "none", LAYERS),
    ],
)
def test_the_inputs_of_the_blocks_are_in_host_memory(topology, scan, prefetch, on_host):
    step = make_step(topology, scan, prefetch=prefetch, offload=fsdp.Offload(activations=True))
    program = step.compile(TOKENS)
    assert "S(5)" in program.as_text()
    assert "byte_stride" not in program.as_text(), "read back in the wrong order"
    on_host *= ROWS * LENGTH * WIDTH * 2
    assert program.memory_analysis().host_temp_size_in_bytes == on_host


@pytest.mark.long
@pytest.mark.needs_plugin
def test_parameters_in_host_memory_are_read_in_backward_order():
    step = make_step("h100:8", True, offload=fsdp.Offload(params=True, optimizer=True))
    program = step.compile(TOKENS)
    layout = step.plan.layout
    stats = program.memory_analysis()
    assert stats.host_argument_size_in_bytes == layout.per_device(host=True)
    assert stats.host_temp_size_in_bytes == 0
    assert "byte_stride" not in program.as_text(), "read in the wrong order"


def test_unrolled_blocks_on_gpus_warn():
    offload = fsdp.Offload(activation_names=("mlp",))
    step = make_step("h100:8", False, fake_devices, offload=offload)
    with pytest.warns(fsdp.SlowerWarning, match=r"unrolled.*blocks/0.*scan_layers"):
        warn_of_missed_optimizations(step.plan, step._trace(TOKENS))
