"""One parameter's gather and reduction: a transform of another kind needs no change elsewhere.

Compiles the gather of one array: a format of its own rounds, which a trace does not show.
"""

import re
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.sharding.mesh import mesh_axes, split_data
from fsdp_jax.sharding.precision import GATHER_FORMATS
from fsdp_jax.units.collectives import (
    Prepared,
    converted,
    gather,
    gather_prepared,
    reduce,
    shared_of_stack,
)
from fsdp_jax.units.comm import ParamComm
from fsdp_jax.units.gather_transform import TRANSFORMS, GatherTransform

pytestmark = pytest.mark.releases


@dataclass(frozen=True)
class Int8Gather(GatherTransform):
    """Gathers a parameter as int8 with one scale, as fp8 would be."""

    format = "int8"

    def shared(self, shard, axes=()):
        largest = jnp.abs(shard).max()
        return (lax.pmax(largest, axes) if axes else largest) / 127

    def before_gather(self, shard, scale):
        return jnp.round(shard / scale).astype(jnp.int8)

    def after_gather(self, gathered, scale):
        return gathered.astype(self.compute) * scale


def test_every_format_has_a_transform_that_sends_its_dtype():
    float32 = np.dtype("float32")
    sent = {name: kind(float32, float32, float32).wire for name, kind in TRANSFORMS.items()}
    assert sent == {None: float32} | {name: jnp.dtype(name) for name in GATHER_FORMATS}


@pytest.mark.parametrize("mode", ["annotated", "explicit"])
@pytest.mark.parametrize("kind", [Int8Gather, *map(TRANSFORMS.get, GATHER_FORMATS)])
def test_a_transform_may_gather_in_a_format_of_its_own(kind, mode):
    mesh = fsdp.make_mesh(data=8)
    float32 = np.dtype("float32")
    transform = kind(float32, float32, float32)
    comm = ParamComm("w", None, (16, 4), mesh_axes(mesh), P("data"), P("data"), transform, mode)

    def run(w):
        gathered, pullback = jax.vjp(lambda w: gather(comm, w), w)
        return gathered, pullback(jnp.ones_like(gathered))[0]

    if mode == "explicit":
        specs = P("data"), (P(), P("data"))
        run = jax.shard_map(run, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    w = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    sharded = jax.device_put(w, NamedSharding(mesh, P("data")))
    gathered, gradient = jax.jit(run)(sharded)
    np.testing.assert_allclose(gathered, w, atol=np.abs(w).max() / 16)
    assert np.abs(gathered - w).max() > 0
    # Each device's gradient counts with explicit collectives; the global one counts once.
    np.testing.assert_array_equal(gradient, np.full(w.shape, 8 if mode == "explicit" else 1))
    text = jax.jit(run).lower(sharded).as_text()
    operation = "all_gather" if mode == "explicit" else "optimization_barrier"
    assert re.search(rf"stablehlo.{operation}.*tensor<(2|16)x4x(i8|f8)", text)


@pytest.mark.parametrize("devices", [8, 5])
@pytest.mark.parametrize("mode", ["annotated", "explicit"])
def test_a_scale_that_was_computed_ahead_gathers_the_same_bits(mode, devices):
    """Of layers of zeros, the largest and smallest floats, infinities and NaNs too; padded on 5."""
    mesh = fsdp.make_mesh(data=devices, devices=jax.devices()[:devices])
    spec, float32 = P(None, "data"), np.dtype("float32")
    shape, compute = (8, 16, 4), jnp.dtype("bfloat16")
    transform = TRANSFORMS["float8_e4m3fn"](float32, compute, float32)
    comm = ParamComm("w", "", shape, mesh_axes(mesh), spec, spec, transform, mode, stacked=1)
    w = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    w[1] = 0
    w[2:5] *= np.array([1e38, 1e-38, 1e-30], np.float32)[:, None, None]
    w[5:8, 3, 2] = np.inf, -np.inf, np.nan

    def run(stack):
        shared = shared_of_stack(comm, stack)

        def layer(_, i):
            sent = gather_prepared(comm, Prepared(stack[i], shared[i]))
            return None, (converted(comm, sent)[0], gather(comm, stack[i]))

        return lax.scan(layer, None, jnp.arange(len(w)))[1]

    if mode == "explicit":
        run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
    padded = np.pad(w, [(0, 0), (0, -16 % devices), (0, 0)])
    ahead, alone = jax.jit(run)(jax.device_put(padded, NamedSharding(mesh, spec)))
    assert ahead.shape == shape
    np.testing.assert_array_equal(*(np.asarray(x).view(np.uint16) for x in (ahead, alone)))
    assert list(np.isfinite(ahead).all((1, 2))) == [True] * 5 + [False] * 3


@pytest.mark.parametrize(
    ("columns", "spec", "pinned"),
    [
        (24, P(None, "data"), True),
        (24, P("data"), False),  # the collective's own layout
        (20, P(None, "data"), False),  # 8 devices do not divide it
    ],
)
def test_a_device_pins_the_memory_layout_of_its_annotated_shard(columns, spec, pinned):
    """Else XLA transposes the whole stack of layers before the loop."""
    axes, float32 = mesh_axes(fsdp.make_mesh(data=8)), np.dtype("float32")
    casts = GatherTransform(float32, float32, float32)
    comm = ParamComm("w", None, (16, columns), axes, spec, spec, casts, "annotated", in_loop=True)
    on_torus = replace(comm, axes_at_once="one")  # there its compiler chooses
    alone = replace(comm, in_loop=False)  # there is no stack
    for each, expected in ((comm, pinned), (on_torus, False), (alone, False)):
        traced = jax.make_jaxpr(partial(gather, each))(jnp.zeros((16, columns)))
        assert ("layout_constraint" in str(traced)) == expected


def on_two_axes(**settings):
    """A stack of kernels along `data` and the model's own axis `tp`; it can be cut along both."""
    mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    spec, float32 = P(None, "tp", "data"), np.dtype("float32")
    transform = GatherTransform(float32, float32, float32)
    comm = ParamComm("w", "", (2, 8, 24), mesh_axes(mesh), spec, spec, transform, "annotated")
    return replace(comm, stacked=1, in_loop=True, **settings)


def test_a_layer_that_stays_gathered_is_pinned_where_the_models_axis_shards_it():
    """Pinned as a global array, XLA would gather it along that axis too."""
    comm = on_two_axes(keeps=2)
    traced = jax.make_jaxpr(partial(gather, comm))(jnp.zeros((8, 24)))
    [gathering] = traced.eqns
    eqns = gathering.params["program"].eqns
    assert [eqn.primitive.name for eqn in eqns][-2:] == ["sharding_constraint", "shard_map"]
    shards = jex.jaxprs_in_params(eqns[-1].params)
    assert [each.invars[0].aval.shape for each in shards] == [(4, 24)]


def test_a_unit_may_be_called_inside_a_shard_map_over_other_axes():
    """A shard_map inside of it has to take the mesh that is around it."""
    comm = replace(on_two_axes(), shard_spec=P(None, None, "data"))
    w = np.random.default_rng(0).normal(size=(8, 24)).astype(np.float32)

    def run(axis, spec):
        inside = lambda x: x @ gather(comm, w)  # noqa: E731
        mapped = jax.shard_map(
            inside, mesh=comm.mesh, in_specs=spec, out_specs=spec, axis_names={axis}
        )
        return jax.jit(mapped)(w.T)

    np.testing.assert_allclose(run("tp", P("tp")), w.T @ w, rtol=1e-5, atol=1e-5)
    with refused("a unit is called inside a shard_map over the axes", where="w"):
        run("data", P("data"))


@pytest.mark.parametrize("spec", [P(("data_0", "data_1")), P(None, ("data_0", "data_1"))])
def test_annotated_gradients_are_scattered_along_one_axis_after_another(spec):
    """As on the torus of a TPU, and not where the rows do not divide."""
    axes = split_data(mesh_axes(fsdp.make_mesh(data=8)), (2, 4))
    float32 = np.dtype("float32")
    casts = GatherTransform(float32, float32, float32)
    comm = ParamComm("w", None, (16, 24), axes, spec, spec, casts, "annotated", axes_at_once="one")
    sharding = NamedSharding(axes.mesh, spec)
    x = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    rows = jax.device_put(x, NamedSharding(axes.mesh, P(axes.data)))

    def gradient(w, x):
        return jax.grad(lambda w: (jnp.sin(x @ gather(comm, w)) ** 2).sum())(w)

    w = np.ones((16, 24), np.float32)
    jitted = jax.jit(gradient, out_shardings=sharding)
    expected = jax.grad(lambda w: (jnp.sin(x @ w) ** 2).sum())(w)
    found = jitted(jax.device_put(w, sharding), rows)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    constraints = [
        eqn for eqn in jitted.trace(w, x).jaxpr.eqns if eqn.primitive.name == "sharding_constraint"
    ]
    assert [eqn.outvars[0].aval.ndim for eqn in constraints] == [3, 3, 2]
    uneven = jax.jit(lambda g: reduce(replace(comm, shape=(15, 23)), g).sum())
    assert uneven(np.ones((15, 23), np.float32)) == 15 * 23
