"""Errors for common mistakes name the path, and a fix that works.

Steps of two small layers are compiled where the mistake is in a call, which only a call finds.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusals import not_refused, refused

import fsdp_jax as fsdp

BATCH = {"x": np.ones((8, 8), np.float32)}


class Unit(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32):
        self.kernel = nnx.Param(jnp.ones((8, 8), dtype))
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.linear(x) @ self.kernel[...].astype(x.dtype)


class Model(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32):
        self.a, self.b = Unit(rngs, dtype), Unit(rngs)

    def __call__(self, x):
        return self.b(self.a(x))


def shard(model=Model, units=(Unit,), **settings):
    mesh = fsdp.make_mesh(data=8)
    settings = {"units": units, "min_size": 8} | settings
    return fsdp.fully_shard(lambda rngs: model(rngs), optax.sgd(0.1), mesh, **settings)


def test_trained_parameters_that_are_not_real_are_refused():
    def model(rngs):
        return Model(rngs, jnp.int32)

    found = {"where": "a/kernel", "expected": "float", "fix": "frozen=['a/kernel']"}
    with refused("only parameters of real", got="int32", **found):
        shard(model)
    frozen = shard(model, frozen=["a/kernel"])
    _, metrics = frozen.make_train_step(loss_of_x)(frozen.init(0), BATCH)
    assert np.isfinite(float(metrics["loss"]))
    with refused("only parameters of real", got="complex64", **found):
        shard(lambda rngs: Model(rngs, jnp.complex64))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"prefetch": "post", "strategy": "zero1"},
            "prefetch='post' has no effect: 'zero1' does not gather parameters unit by unit; leave",
        ),
        ({"offload": fsdp.Offload(optimizer=True)}, "nothing in host memory: the optimizer has no"),
    ],
)
def test_a_setting_that_changes_nothing_beside_the_others_is_told(settings, text):
    with pytest.warns(fsdp.SlowerWarning, match=text) as told:
        shard(**settings)
    assert [warning.filename for warning in told] == [__file__]


def test_a_hybrid_strategy_that_shards_nothing_is_told():
    mesh = fsdp.make_mesh(data=1, replica=8)
    with pytest.warns(fsdp.SlowerWarning, match="data has size 1, and each of the 8 replicas"):
        fsdp.fully_shard(lambda rngs: Model(rngs), optax.sgd(0.1), mesh, "hybrid_shard")


def test_state_that_changes_its_dtype_is_refused():
    class Ema(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.mean = Model(rngs), nnx.BatchStat(jnp.zeros(8, jnp.bfloat16))

        def __call__(self, x):
            self.mean.set_value(0.9 * self.mean[...] + 0.1 * x.mean(0))
            return self.inner(x)

    step = shard(Ema).make_train_step(lambda model, batch: (model(batch["x"]).sum(), 8))
    what = "the model's state changes its shape or dtype"
    with refused(what, where="mean", expected="bfloat16[8]", got="float32[8]"):
        step.lower(BATCH)


def test_an_argument_without_rows_is_refused():
    wrapped = fsdp.on_local_rows(lambda x, scale: x * scale)
    step = shard().make_train_step(
        lambda model, batch: (wrapped(model(batch["x"]), jnp.float32(2)).sum(), 8)
    )
    with refused("an argument without rows", fix="replicated") as caught:
        step.lower(BATCH)
    assert "on_local_rows" in caught.value.where


def test_a_pattern_of_keep_float32_must_match():
    with pytest.raises(
        ValueError, match=r"'a/kernle' matches no parameter(.*\n)+.*keep_float32\n.*'a/kernel'"
    ):
        shard(precision=fsdp.Precision(compute="bfloat16", keep_float32=("[Nn]orm", "a/kernle")))


# Dtypes


@pytest.mark.parametrize("made", ["float32", "bfloat16"])
def test_parameters_keep_the_dtype_that_the_model_makes(made):
    sharded = shard(lambda rngs: Model(rngs, made))
    dtypes = {path: str(leaf.dtype) for path, leaf in sharded.layout.by_path.items()}
    assert dtypes["a/kernel"] == made
    assert dtypes["b/kernel"] == "float32"
    assert sharded.init(0).params["a"]["kernel"].dtype == made
    stored = shard(lambda rngs: Model(rngs, made), precision=fsdp.Precision()).layout.by_path[
        "a/kernel"
    ]
    assert stored.dtype == jnp.float32


def test_with_bfloat16_compute_losses_are_summed_in_float32():
    """8 rows of 1.01 are 8.08 in float32; bfloat16 has 8.0625 and 8.125."""

    def loss(model, batch):
        y = model(batch["x"])
        seen.append(y.dtype)
        return (0 * y + 1.01)[:, 0].sum(), 1

    seen = []
    sharded = shard(precision=fsdp.Precision(compute="bfloat16"))
    _, metrics = sharded.make_train_step(loss)(sharded.init(0), BATCH)
    assert float(metrics["loss"]) == pytest.approx(8.08, rel=1e-6)
    narrow = shard(precision=fsdp.Precision(compute="bfloat16", output="bfloat16"))
    narrow.make_train_step(loss).lower(BATCH)
    assert [str(dtype) for dtype in (seen[0], seen[-1])] == ["float32", "bfloat16"]


def test_virtual_devices_start_no_plugin_whose_hardware_is_absent(monkeypatch):
    from fsdp_jax.launch import cluster

    called = []
    monkeypatch.setattr(cluster, "choose_platforms", lambda: called.append(True))
    cluster.use_virtual_devices(jax.local_device_count())
    assert called


# Arguments that are mixed up


def loss_of_x(model, batch):
    return model(batch["x"]).sum(), 8


@pytest.mark.parametrize("other", ["another mesh", "another strategy", "another place"])
def test_a_state_that_is_laid_out_otherwise_is_named(other):
    one = shard(min_size=1)
    mesh = fsdp.make_mesh(data=4, replica=2)
    state = {
        "another mesh": lambda: one.on(mesh, strategy="hybrid_shard").init(0),
        "another strategy": lambda: one.on(fsdp.make_mesh(data=8), strategy="zero1").init(0),
        "another place": lambda: jax.device_put(one.init(0), jax.devices()[0]),
    }[other]()
    found = {"where": "params/a/kernel", "expected": "NamedSharding", "fix": "device_put"}
    step = one.make_train_step(loss_of_x)
    with refused("laid out otherwise", **found):
        step(state, BATCH)
    assert step.compiled is None
    step(one.init(0), BATCH)
    with refused("laid out otherwise", **found):
        step(state, BATCH)
    step(jax.device_put(state, one.state_shardings()), BATCH)


def test_a_state_on_other_devices_or_in_another_order_is_told():
    there = shard().on(fsdp.make_mesh(data=4, devices=jax.devices()[4:])).init(0)
    step = shard().on(fsdp.make_mesh(data=4, devices=jax.devices()[:4])).make_train_step(loss_of_x)
    with refused("laid out otherwise", got=", on other devices"):
        step(there, BATCH)
    mesh = jax.sharding.Mesh(np.array(jax.devices())[::-1].reshape(1, 8), ("replica", "data"))
    with refused("laid out otherwise", got="its devices in another order"):
        shard().make_train_step(loss_of_x)(shard().on(mesh).init(0), BATCH)


def test_arguments_in_the_place_of_others_are_told():
    sharded = shard()
    state, step = sharded.init(0), sharded.make_train_step(loss_of_x)
    mixed = {"what": "not a TrainState", "where": "state", "got": "dict"}
    numpy = dataclasses.replace(state, step=np.int32(0))
    examples = {"what": "NNX model takes no example inputs", "where": "inputs"}
    calls = {
        "an empty batch": (lambda: step.lower({}), {"what": "the batch is empty"}),
        "the batch first": (lambda: step(BATCH, state), mixed | {"fix": "step(state, batch)"}),
        "numpy": (
            lambda: step(numpy, BATCH),
            {"what": "not on devices", "where": "state/step", "fix": "device_put"},
        ),
        "lists": (
            lambda: step(state, {"x": [[1.0] * 8] * 8}),
            {"where": "batch/x/0/0", "fix": "numpy.asarray"},
        ),
        "inputs": (lambda: shard(inputs=(BATCH["x"],)), examples),
    }
    for sizes in ({"data": "8"}, {"data": 8.0}, {"replica": None}):
        whole = {"what": "whole numbers", "where": "mesh"}
        calls[str(sizes)] = (lambda sizes=sizes: fsdp.make_mesh(**sizes), whole)
    assert not_refused(calls) == {}


def test_what_jax_moves_itself_is_accepted():
    sharded, one_device = shard(), jax.devices()[0]
    state, step = sharded.init(0), sharded.make_train_step(loss_of_x)
    key = jax.device_put(state.rng, one_device)
    state, _ = step(dataclasses.replace(state, rng=key, step=jnp.int32(0)), BATCH)
    # An eval step does not read the optimizer's state.
    elsewhere = dataclasses.replace(state, opt_state=jax.device_put(state.opt_state, one_device))
    evaluate = sharded.make_eval_step(loss_of_x)
    assert evaluate(elsewhere, BATCH) == evaluate(state, BATCH)


def other_library(module, base=object):
    """A callable class as if it were defined in another library, and a user's subclass of it."""
    library_class = type("Module", (base,), {"__module__": module})
    return type("Mlp", (library_class,), {"__call__": lambda self, x: x})


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("equinox._module._module", "Equinox"),
        ("keras.src.models.model", "Keras"),
        ("haiku._src.module", "Haiku"),
        ("torch.nn.modules.module", "PyTorch"),
    ],
)
@pytest.mark.parametrize("instance", [True, False])
def test_models_of_other_libraries_are_named(module, name, instance):
    model = other_library(module)
    found = rf"a model of {name}, not of Flax\n.*model\n.*nnx.Rngs.*\n.*Mlp\n.*partition_specs\("
    with pytest.raises(ValueError, match=found):
        fsdp.fully_shard(model() if instance else model, optax.sgd(0.1), fsdp.make_mesh(data=8))


@pytest.mark.parametrize("kind", [nnx.Optimizer, nnx.ModelAndOptimizer])
def test_an_optimizer_of_flax_is_told_to_be_unwrapped(kind):
    optimizer = kind(Model(nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)
    what = "an optimizer around an optax transformation"
    with refused(what, where="tx", got=kind.__name__, fix="optimizer.tx"):
        fsdp.fully_shard(lambda rngs: Model(rngs), optimizer, fsdp.make_mesh(data=8))
    fsdp.fully_shard(lambda rngs: Model(rngs), optimizer.tx, fsdp.make_mesh(data=8))


def test_the_models_own_class_as_a_unit_is_told():
    def one(rngs):
        return nnx.Linear(8, 8, rngs=rngs)

    with refused("'Linear' is the class of the whole model", where="units"):
        shard(one, [nnx.Linear])
    what = "'Model' is the class of the whole model"
    with refused(what, where="units", fix="inside it: Linear, Unit"):
        shard(units=["Model"])
    assert "the whole model" in shard(one, "model").layout.units
