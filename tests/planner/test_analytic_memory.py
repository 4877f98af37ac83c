"""Estimates from the trace: of small programs whose answer is known, and against the compiler."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from reference import Chain

import fsdp_jax as fsdp
from fsdp_jax.models.attention import make_attention
from fsdp_jax.planner import parse_topology
from fsdp_jax.planner.analytic.memory import StepEstimate, estimate_step
from fsdp_jax.planner.compiled.peak_memory import KINDS
from fsdp_jax.planner.machines.fake_devices import fake_devices
from fsdp_jax.planner.machines.roofline import Matmul
from fsdp_jax.sharding.mesh import mesh_axes
from fsdp_jax.sharding.offload import Offload
from fsdp_jax.train.build import build
from fsdp_jax.train.config_file import load_config

pytestmark = pytest.mark.releases

CONFIGS = Path(__file__).parents[2] / "configs"
SIDE = 64
UNIT = SIDE * SIDE * 4  # bytes of a square matrix
SQUARE = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)


class NoLayout:
    """A layout without a state: arguments of the program count as `other`."""

    axes = mesh_axes(fsdp.make_mesh(devices=jax.devices()[:1]))
    mesh = axes.mesh

    def __iter__(self):
        return iter(())


def estimate_of(fn, *shapes) -> StepEstimate:
    return estimate_step(
        SimpleNamespace(local_batch=False, layout=NoLayout(), others={}),
        jax.make_jaxpr(fn)(*shapes),
    )


def units(estimated: StepEstimate) -> float:
    """Returns the memory at the peak, without the arguments, in square matrices."""
    return estimated.breakdown["activations"] / UNIT


def test_elementwise_operations_are_fused_into_what_reads_them():
    estimated = estimate_of(lambda x: jnp.sum(jnp.exp(jnp.sin(x @ x)) * 2), SQUARE)
    assert units(estimated) == pytest.approx(1, abs=0.01)  # the product alone
    assert estimated.breakdown["other"] == UNIT


def test_an_operand_of_a_matmul_is_stored():
    def fn(x):
        a = x @ x
        b = jnp.sin(a)
        return jnp.sum(b @ b)

    # a and b, then b and the product
    assert units(estimate_of(fn, SQUARE)) == pytest.approx(2, abs=0.01)


def test_a_fused_value_keeps_its_sources_alive():
    def fn(x):
        a = x @ x
        late = jnp.sin(a)  # is computed at the end: a lives until then
        b = jnp.exp(x @ x.T)
        return jnp.sum(late * (b @ b))

    assert units(estimate_of(fn, SQUARE)) == pytest.approx(3, abs=0.01)


def test_a_loop_stacks_from_its_start_and_carries_in_place():
    def fn(x, w):
        def body(carry, _):
            return carry @ w, carry

        return jnp.sum(lax.scan(body, x, length=6)[1])

    estimated = estimate_of(fn, SQUARE, SQUARE)
    # the stack, what is carried, what comes next
    assert units(estimated) == pytest.approx(6 + 2, abs=0.01)
    assert estimated.matmuls == (Matmul(1, SIDE, SIDE, SIDE, "float32", times=6),)


def test_slices_are_written_in_place():
    def fn(x):
        def body(slots, number):
            return lax.dynamic_update_index_in_dim(slots, x @ x, number, 0), None

        return jnp.sum(lax.scan(body, jnp.zeros((5, SIDE, SIDE)), jnp.arange(5))[0])

    assert units(estimate_of(fn, SQUARE)) == pytest.approx(5 + 1, abs=0.01)


def test_equal_constants_are_stored_once():
    def fn(x):
        return jnp.sum(x @ jnp.ones((SIDE, SIDE)) + jnp.sin(x) @ jnp.ones((SIDE, SIDE)))

    # ones, the two products, the sine
    assert units(estimate_of(fn, SQUARE)) == pytest.approx(3 + 1, abs=0.01)


def test_operations_that_no_loop_depends_on_run_after_it():
    def fn(x, wide):
        a = x @ wide  # four matrices
        gradient = a @ a.T  # one
        end = lax.scan(lambda carry, _: (jnp.sin(carry) @ x, None), x * jnp.sum(a), length=4)[0]
        return jnp.sum(end), jnp.sum(gradient)

    estimated = estimate_of(fn, SQUARE, jax.ShapeDtypeStruct((SIDE, 4 * SIDE), jnp.float32))
    # the sine and what comes next; beside them what the gradient is made from, and not the gradient
    assert units(estimated) == pytest.approx(2 + 4, abs=0.01)


def test_a_loop_of_one_trip_is_inlined():
    def fn(x, trips):
        return jnp.sum(lax.scan(lambda carry, _: (carry @ x, None), x, length=trips)[0])

    once, twice = (estimate_of(lambda x, trips=trips: fn(x, trips), SQUARE) for trips in (1, 2))
    assert units(once) == pytest.approx(1, abs=0.01)  # the product
    assert units(twice) == pytest.approx(2, abs=0.01)  # and what is carried


def test_a_loop_of_no_trips_takes_no_memory():
    def fn(x, wide):
        def body(carry, _):
            return carry + wide @ (wide.T @ carry), jnp.sum(wide @ wide.T)

        end, none = lax.scan(body, x @ x, length=0)
        return jnp.sum(end @ x), none

    wide = jax.ShapeDtypeStruct((SIDE, 8 * SIDE), jnp.float32)
    assert units(estimate_of(fn, SQUARE, wide)) == pytest.approx(2, abs=0.01)


def test_matmuls_of_a_kernel_are_fused_and_counted_by_its_grid():
    def kernel(x, y, out):
        out[...] = jnp.dot(x[...], y[...])

    rows = pl.BlockSpec((16, SIDE), lambda i: (i, 0))
    full = pl.BlockSpec((SIDE, SIDE), lambda i: (0, 0))
    call = pl.pallas_call(
        kernel, grid=(4,), in_specs=[rows, full], out_specs=rows, out_shape=SQUARE
    )
    estimated = estimate_of(lambda x, y: jnp.sum(call(x, y)), SQUARE, SQUARE)
    of_block = Matmul(1, 16, SIDE, SIDE, "float32", times=4, fused=True, assumed="kernel")
    assert estimated.matmuls == (of_block,)
    assert estimated.uncounted == set()


def test_kernels_whose_matmuls_are_not_counted_are_named():
    image = jax.ShapeDtypeStruct((1, 8, 8, 4), jnp.float32)

    def fn(x, image):
        x = jax.ffi.ffi_call("mine", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        x = lax.ragged_dot(x, x[None], jnp.array([SIDE]))
        window = lax.conv_general_dilated(
            image,
            jnp.ones((2, 2, 4, 4)),
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        _ = jax.ffi.ffi_call("dead", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return jnp.sum(x) + jnp.sum(window)

    estimated = estimate_of(fn, SQUARE, image)
    assert estimated.uncounted == {"mine", "ragged_dot_general", "conv_general_dilated"}
    assert estimated.matmuls == ()


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_attention_kernels_are_counted_by_their_algorithm(platform):
    """Two matmuls forward, five more backward, half of each: loops end where the mask does."""
    attend = make_attention("flash", platform)
    heads = jax.ShapeDtypeStruct((2, 256, 4, 128), jnp.bfloat16)
    both = jax.grad(
        lambda *qkv: jnp.sum(attend(*qkv, is_causal=True).astype(jnp.float32)), argnums=(0, 1, 2)
    )
    estimated = estimate_of(lambda *qkv: both(*qkv), heads, heads, heads)
    flops = sum(matmul.flops * matmul.times for matmul in estimated.matmuls)
    assert flops == pytest.approx(7 * 2 * 2 * 4 * 128 * 256 * 128, rel=0.01)
    names = {"gpu": {"mha_forward", "mha_backward"}}.get(
        platform, {"splash_mha_fwd", "splash_mha_dkv", "splash_mha_dq"}
    )
    assert {matmul.assumed for matmul in estimated.matmuls} - {""} == names  # as causal


def test_batched_matmuls_and_their_dtype():
    left = jax.ShapeDtypeStruct((3, 5, 7), jnp.bfloat16)
    right = jax.ShapeDtypeStruct((3, 7, 11), jnp.bfloat16)
    estimated = estimate_of(lambda a, b: jnp.sum(jnp.einsum("bmk,bkn->bmn", a, b)), left, right)
    assert estimated.matmuls == (Matmul(3, 5, 11, 7, "bfloat16"),)


def test_dead_code_costs_nothing():
    def fn(x):
        _ = x @ x
        return jnp.sum(x)

    estimated = estimate_of(fn, SQUARE)
    assert estimated.matmuls == ()
    assert units(estimated) < 0.01
    assert estimated.traffic_bytes == pytest.approx(UNIT, abs=64)


def test_traffic_counts_fused_chains_once_and_loops_by_trips():
    once = estimate_of(lambda x: jnp.sum(jnp.sin(jnp.exp(x) * 2)), SQUARE)
    assert once.traffic_bytes == pytest.approx(UNIT, abs=64)
    looped = estimate_of(
        lambda x: jnp.sum(lax.scan(lambda c, _: (c @ x, None), x, length=10)[0]), SQUARE
    )
    # each reads two, writes one
    assert looped.traffic_bytes == pytest.approx(10 * 3 * UNIT + UNIT, abs=64)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 256, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(256, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


def model(rngs):
    return Chain([Block(rngs) for _ in range(3)])


def loss_fn(model, batch):
    return jnp.sum(model(batch["x"]) ** 2), jnp.float32(batch["x"].size)


@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "no_shard"])
def test_the_estimate_of_a_step_is_that_of_one_device(strategy):
    sharded = fsdp.fully_shard(
        model, optax.adam(1e-3), fsdp.make_mesh(8), strategy, [Block], min_size=1
    )
    batch = {"x": jax.ShapeDtypeStruct((32, 64), jnp.float32)}
    step = sharded.make_train_step(loss_fn, local_batch=True)
    jaxpr = step.trace(batch)
    estimated = estimate_step(step.plan, jaxpr)
    assert tuple(estimated.breakdown) == KINDS
    assert sum(estimated.breakdown.values()) == estimated.peak_bytes
    assert estimated.breakdown["params"] == sharded.layout.per_device("params")
    assert estimated.breakdown["optimizer"] == sharded.layout.per_device("optimizer")
    assert estimated.breakdown["other"] == sharded.layout.per_device("other") + 4 * 64 * 4
    # four rows a device; forward and both gradients of six products, but for the batch, which has
    # none
    assert (
        sum(matmul.times * matmul.flops for matmul in estimated.matmuls)
        == (6 * 3 - 1) * 2 * 4 * 64 * 256
    )
    assert (estimated.breakdown["gathered"] > 0) == (strategy == "full_shard")


def test_state_in_host_memory_travels_once_each_way():
    def estimated(**arguments):
        mesh = fsdp.make_mesh(devices=fake_devices(parse_topology("h100:8")))
        sharded = fsdp.fully_shard(make, optax.adam(1e-3), mesh, min_size=2, **arguments)
        step = sharded.make_train_step(loss_fn, local_batch=True)
        batch = {"x": jax.ShapeDtypeStruct((16, 64), jnp.float32)}
        jaxpr = step.trace(batch)
        return sharded.layout, estimate_step(step.plan, jaxpr)

    def make(rngs):
        return nnx.Linear(64, 4096, rngs=rngs)

    def loss_fn(model, batch):
        return (model(batch["x"]) ** 2).sum(), batch["x"].size

    _, on_device = estimated()
    layout, offloaded = estimated(offload=Offload(optimizer=True))
    moments = layout.per_device("optimizer", host=True)
    assert moments > 0.99 * on_device.breakdown["optimizer"]
    assert offloaded.breakdown["optimizer"] == layout.per_device("optimizer")
    assert offloaded.from_host_bytes == offloaded.to_host_bytes == moments
    assert offloaded.update_bytes == 2 * moments
    assert (on_device.from_host_bytes, on_device.to_host_bytes, on_device.host_bytes) == (0, 0, 0)


def test_what_a_loop_stacks_in_host_memory_is_host_memory():
    def step(x):
        def layer(x, _):
            return jnp.sin(x), jax.device_put(x, jax.memory.Space.Host)

        return lax.scan(layer, x, length=8)[1]

    result = estimate_of(step, SQUARE)
    assert result.host_bytes == result.to_host_bytes == 8 * UNIT
    assert result.from_host_bytes == 0
    assert result.peak_bytes <= 4 * UNIT


def test_an_annotated_step_is_estimated_as_on_local_batches():
    sharded = fsdp.fully_shard(model, optax.adam(1e-3), fsdp.make_mesh(8), units=[Block])
    batch = {"x": jax.ShapeDtypeStruct((32, 64), jnp.float32)}
    by_name = sharded.make_train_step(loss_fn, local_batch=True)
    annotated = sharded.make_train_step(loss_fn).with_local_batch()
    expected, found = (estimate_step(s.plan, s.trace(batch)) for s in (by_name, annotated))
    assert found == expected
    assert by_name.with_local_batch() is by_name


@pytest.mark.needs_plugin
@pytest.mark.parametrize("name", ["h100:2x8", "gb300:2x4", "v5p:4x4x4", "v5e:4x8*2", "tpu7x:2x4x4"])
def test_fake_devices_have_the_coordinates_of_the_real_ones(name):
    topology = parse_topology(name)

    def coordinates(device):
        chip = (tuple(device.coords), device.core_on_chip) if device.platform == "tpu" else ()
        return device.id, device.process_index, device.platform, device.device_kind, chip

    devices = sorted(topology.devices(), key=lambda device: device.id)
    assert [coordinates(fake) for fake in fake_devices(topology)] == [
        coordinates(device) for device in devices
    ]


@pytest.mark.long
@pytest.mark.needs_plugin
@pytest.mark.parametrize("kept", [0, 2, 3])
def test_the_estimated_peak_is_close_to_the_compiled_one(kept):
    settings = ["--model.layers", "5", "--data.sequence_length", "1024"]
    settings += ["--keep_gathered.last", str(kept)]
    run = build(
        load_config(CONFIGS / "llama2_7b.yaml", settings), parse_topology("h100:8").devices()
    )
    local = run.step.with_local_batch()
    estimated = estimate_step(local.plan, local.trace(run.batch))
    memory = run.step.compile(run.batch).memory_analysis()
    assert estimated.peak_bytes == pytest.approx(memory.peak_memory_in_bytes, rel=0.08)
