"""Initial values of Linen models are those of Flax's own `init`, also where they read inputs.

Compiles initializations of small models: that values are equal is not seen in a trace.
"""

import re
import zlib
from contextlib import nullcontext
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from processes import run_cluster
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.step import state
from fsdp_jax.tree import flatten

pytestmark = pytest.mark.releases

RNG = np.random.default_rng(0)
X = RNG.normal(3.0, 2.0, size=(16, 8)).astype(np.float32)
SCALE = RNG.normal(size=(1, 8)).astype(np.float32)


class ActNorm(nn.Module):
    """Normalizes by the statistics of its first batch; has a scale of the inputs and a count."""

    @nn.compact
    def __call__(self, x, scale=None):
        mean = self.param("mean", lambda key: x.mean(0, keepdims=True))
        std = self.param("std", lambda key: x.std(0, keepdims=True) + 1e-6)
        first = self.variable("batch_stats", "first", lambda: x[:1] if scale is None else scale * 1)
        return (x - mean) / std + 0 * first.value


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return ActNorm(name="norm")(nn.Dense(8)(x)), None


class Flow(nn.Module):
    kind: str = "unrolled"

    @nn.compact
    def __call__(self, x):
        layer = {"remat": nn.remat(Layer), "jit": nn.jit(Layer)}.get(self.kind, Layer)
        if self.kind == "scanned":
            body = nn.scan(
                Layer,
                variable_axes={"params": 0, "batch_stats": 0},
                split_rngs={"params": True},
                length=2,
            )
            return body(name="layers")(x, None)[0]
        for number in range(2):
            x, _ = layer(name=f"layer_{number}")(x)
        return x


def loss(model, batch):
    y = model(batch["x"])
    return (y**2).sum(), y.size


def shard(module, inputs, strategy="full_shard", **settings):
    mesh = fsdp.make_mesh(data=4, replica=2)
    settings = {"units": "model", "min_size": 8} | settings
    return fsdp.fully_shard(module, optax.sgd(0.1), mesh, strategy, inputs=inputs, **settings)


def by_flax(module, *inputs):
    """The variables that `module.init` makes with the keys of `init(0)`."""
    key, _ = jax.random.split(jax.random.key(0))
    params_key, dropout_key = jax.random.split(key, 2)
    rngs = {"params": params_key, "dropout": dropout_key}
    init = jax.jit(module.init, static_argnums=3) if len(inputs) > 2 else jax.jit(module.init)
    variables = init(rngs, *inputs)
    return flatten(variables["params"]), flatten(variables.get("batch_stats", {}))


def by_us(sharded):
    state = sharded.init(0)
    return flatten(state.params), flatten(state.model_state.get("batch_stats", {}))


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for path, value in theirs.items():
            np.testing.assert_allclose(ours[path], value, rtol=1e-5, atol=1e-5, err_msg=path)


KINDS = ["unrolled", "scanned", "remat", "jit"]


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_initial_values_depend_on_are_used(kind):
    as_array = np.asarray if kind in KINDS[::2] else jnp.asarray
    sharded = shard(Flow(kind), (as_array(X),), units=[Layer])
    expected = by_flax(Flow(kind), X)
    assert_same(by_us(sharded), expected)
    std = expected[0]["layers/norm/std" if kind == "scanned" else "layer_0/norm/std"]
    assert np.asarray(std).min() > 0.1, "a batch of zeros has none"


def test_a_step_starts_from_such_values():
    sharded = shard(Flow(), (X,), units=[Layer])
    with_mean_one = float(sharded.make_train_step(loss)(sharded.init(0), {"x": X})[1]["loss"])
    assert with_mean_one == pytest.approx(1.0, rel=1e-3)


def test_they_are_used_on_another_mesh_and_by_every_strategy():
    sharded = shard(Flow(), {"x": X})
    there = sharded.on(fsdp.make_mesh(data=2, devices=jax.devices()[:2]), strategy="zero1")
    assert_same(by_us(there), by_us(sharded))
    assert_same(by_us(there), by_flax(Flow(), X))


def test_a_deleted_array_was_copied():
    x = jnp.asarray(X)
    sharded = shard(ActNorm(), (x,))
    x.delete()
    assert_same(by_us(sharded), by_flax(ActNorm(), X))


def test_shapes_that_initial_values_depend_on_are_refused():
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    given = {"got": "inputs[0], a ShapeDtypeStruct", "fix": "real arrays in inputs="}
    for kind in KINDS:
        with refused("only its shape is given", expected="an array", **given) as caught:
            shard(Flow(kind), (shape,))
        name = "layers" if kind == "scanned" else "layer_0"
        assert re.search(rf"{name}/norm/(first|mean)", caught.value.where), kind


def test_each_input_is_followed_on_its_own():
    shape = jax.ShapeDtypeStruct((1, 8), jnp.float32)
    with refused(where="batch_stats/first", got="inputs['scale']"):
        shard(ActNorm(), {"x": X, "scale": shape})
    with refused(got="inputs['x']") as caught:
        shard(ActNorm(), {"x": jax.ShapeDtypeStruct(X.shape, X.dtype), "scale": SCALE})
    assert caught.value.where.split() == ["mean", "std"]
    assert_same(by_us(shard(ActNorm(), {"x": X, "scale": SCALE})), by_flax(ActNorm(), X, SCALE))


class OfShapes(nn.Module):
    """Reads shapes, and values that no variable keeps; the flag is a scalar of NumPy."""

    @nn.compact
    def __call__(self, x, mask, train):
        bias = self.param("bias", lambda key: jnp.zeros_like(x[:1]) + x[:1] * 0)
        count = self.variable("cache", "count", lambda: jnp.full(mask.shape, x.ndim))
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x) + bias)
        return jnp.where(mask[:, None], x, 0.0) + count.value.sum()


def test_models_that_read_shapes_alone_take_either():
    x, mask = jax.ShapeDtypeStruct(X.shape, X.dtype), jax.ShapeDtypeStruct((16,), bool)
    expected = by_flax(OfShapes(), X, np.ones(16, bool), True)
    for inputs in ((X, np.ones(16, bool)), (x, mask), (X, mask)):
        sharded = shard(OfShapes(), (*inputs, np.bool_(True)))
        assert_same(by_us(sharded), expected)


def test_arrays_that_no_initial_value_reads_are_not_kept():
    huge = jax.device_put(np.zeros((4096, 8), np.float32), jax.devices()[3])
    sharded = shard(nn.Dense(8), (huge,))
    huge.delete()
    assert_same(by_us(sharded), by_flax(nn.Dense(8), X))


TWO = """
import flax.linen as nn, numpy as np, optax
import fsdp_jax as fsdp

class ActNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x / self.param("std", lambda key: x.std(0))

def init(x):
    sharded = fsdp.fully_shard(ActNorm(), optax.sgd(0.1), fsdp.make_mesh(), inputs=(x,), min_size=8)
    return sharded.init(0).params["std"]

x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
shards = init(x).addressable_shards
print("equal:", all(np.allclose(s.data, x.std(0)[s.index], rtol=1e-5) for s in shards))
try:
    init(x + process * x[::-1])
except ValueError as error:
    print("refused:", str(error).splitlines()[0])
leave_cluster()
"""


def test_inputs_of_another_process_are_compared(monkeypatch):
    """By a digest, of a mesh that has devices of all processes."""
    devices = np.array([SimpleNamespace(process_index=n) for n in range(2)])
    layout = SimpleNamespace(mesh=SimpleNamespace(devices=devices))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for other, outcome in (
        (X, nullcontext()),
        (X[::-1], refused("the processes passed different example inputs")),
    ):
        digest = zlib.crc32(np.ascontiguousarray(other).tobytes())

        def gathered(own, digest=digest):
            return np.stack([own, np.array([digest], np.uint32)])

        monkeypatch.setattr(state, "gather_from_processes", gathered)
        with outcome:
            state._check_inputs_of_processes({"0": X}, layout)


@pytest.mark.long
def test_processes_that_pass_different_inputs_are_refused():
    for out in run_cluster(TWO):
        assert "equal: True\n" in out
        assert "refused: the processes passed different example inputs" in out
