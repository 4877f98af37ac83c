"""Any number of devices: what they do not divide is stored padded, and trains as on one device.

Compiles steps, evaluations and initializations on 3, 5, 6 and 7 devices: that padding never gets
into a number shows in numbers alone. Where it is stored, and what is refused, the layout tells.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from reference import (
    Case,
    LinenTransformer,
    check,
    covering_params,
    gpt,
    linen_loss,
    losses_of,
    squares,
    train,
    train_unsharded,
)
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax import optim
from fsdp_jax.contract.contract import check_contract
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import Block
from fsdp_jax.testing import certify
from fsdp_jax.tree import flatten

ROWS = 420  # divisible by 2 microbatches on any number of devices
STEPS = 4


class ManyRows(Case):
    def batch(self, step, rows=ROWS):
        return super().batch(step, rows)


CASES = {
    "scanned": ManyRows(gpt(True, width=22), next_token_loss, (Block,)),
    "unrolled": ManyRows(gpt(False, width=22), next_token_loss, (Block,)),
    "linen": ManyRows(LinenTransformer(), linen_loss, ("LinenBlock",)),
}


def lion():
    """Lion, but for biases: a key's has no gradient, of whose rounding Lion would take the sign."""

    def labels(params):
        name = jax.tree_util.keystr
        return jax.tree_util.tree_map_with_path(lambda path, _: "bias" in name(path), params)

    return optax.partition({True: optax.adam(1e-3, eps=1e-6), False: optax.lion(1e-4)}, labels)


OPTIMIZERS = {
    "adam": lambda: optax.adamw(1e-3, eps=1e-6),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "muon": lambda: optax.contrib.muon(1e-3, adam_b1=0.9, eps=1e-6),
    "lion": lion,
}
SETTINGS = {
    "default": {},
    "accumulated": {"accumulation": 2, "clip": 0.5},
    "offload": {"offload": fsdp.Offload(params=True, optimizer=True)},
    "local": {"local_batch": True},
    "prefetch": {"local_batch": True, "prefetch": "pre"},
    "deferred": {"local_batch": True, "accumulation": 2, "deferred": True, "clip": 0.5},
}


def mesh_of(devices, strategy="full_shard"):
    replica = 2 if fsdp.STRATEGIES[strategy].hybrid else 1
    return fsdp.make_mesh(devices // replica, replica, devices=jax.devices()[:devices])


def is_possible(devices, strategy, model, optimizer, setting):
    row = fsdp.STRATEGIES[strategy]
    even = devices % 2 == 0 or not row.hybrid
    return even and (row.gathers_per_unit or setting != "prefetch")


STRATEGIES = [name for name, row in fsdp.STRATEGIES.items() if row.shards_optimizer]
QUICK = [
    (7, "full_shard", "scanned", "adam", "prefetch"),
    (5, "zero1", "scanned", "adafactor", "offload"),
]


@pytest.mark.parametrize(
    ("devices", "strategy", "model", "optimizer", "setting"),
    covering_params(
        [(7, 6, 5, 3), STRATEGIES, CASES, OPTIMIZERS, SETTINGS],
        first=QUICK,
        possible=is_possible,
        name=lambda case: "-".join(map(str, case)),
        quick=len(QUICK),
    ),
)
def test_it_trains_as_on_one_device(devices, strategy, model, optimizer, setting):
    case, chosen = CASES[model], OPTIMIZERS[optimizer]
    settings = dict(SETTINGS[setting])
    own = {"steps": STEPS, "make_optimizer": chosen}
    found, step = train(case, mesh_of(devices, strategy), strategy, **own, **settings)
    assert any(leaf.grad_shape != leaf.shape for leaf in step.plan.layout)
    check(
        found, train_unsharded(case, settings.get("accumulation", 1), settings.get("clip"), **own)
    )


def run(sharded, steps, **settings):
    step = sharded.make_train_step(squares, **settings)
    return losses_of(step, sharded.init(0), (rows(n, WIDTH) for n in range(steps)))[0]


def test_moments_in_8_bits_are_padded_beside_their_blocks():
    tx = optim.adamw(1e-3, moments="int8", block=32)
    one, seven = (shard(devices, small, tx) for devices in (1, 7))
    assert any(leaf.is_padded and leaf.dtype == np.int8 for leaf in seven.layout)
    assert any(leaf.is_padded and "mu_scale" in leaf.path for leaf in seven.layout)
    np.testing.assert_allclose(run(seven, 4), run(one, 4), rtol=1e-4)


@pytest.mark.parametrize("local_batch", [pytest.param(False, marks=pytest.mark.long), True])
def test_kernels_gathered_in_float8_are_padded(local_batch):
    precision = fsdp.Precision(compute="bfloat16", gather="float8_e4m3fn")
    one, six = (
        shard(devices, small, units=[nnx.Linear], precision=precision) for devices in (1, 6)
    )
    assert six.layout.by_path["up/kernel"].is_padded
    found = run(six, 3, local_batch=local_batch)
    np.testing.assert_allclose(found, run(one, 3, local_batch=local_batch), rtol=2e-3)


def test_certify_agrees():
    certificate = certify(
        small,
        squares,
        rows(0, WIDTH, 14),
        mesh=mesh_of(7),
        strategies=("full_shard",),
        accumulation=(1,),
        tx=optax.adamw(1e-3, eps=1e-6),
        trials=1,
        min_size=8,
    )
    assert certificate.holds, str(certificate)


def test_an_evaluation_sees_the_models_own_shapes():
    def values(devices):
        sharded = shard(devices, small)
        evaluate = sharded.make_eval_step(squares)
        return [float(x) for x in evaluate(sharded.init(0), rows(0, WIDTH))]

    np.testing.assert_allclose(values(7), values(1), rtol=1e-5)


def test_the_contract_declares_what_xla_makes_of_such_a_gradient():
    def contract(local_batch):
        step = shard(6, small).make_train_step(squares, local_batch=local_batch)
        return check_contract(step, rows(0, WIDTH))

    annotated, explicit = contract(False), contract(True)
    ops = {each.op for each in annotated.expected if each.path == "up/kernel"}
    assert ops == {"all-gather", "all-reduce"}
    assert "no dim is divisible of 4 parameters, such as 'down/bias'" in annotated.note
    assert "local_batch=True" in annotated.note
    assert {e.op for e in explicit.expected if e.path == "up/kernel"} == {
        "all-gather",
        "reduce-scatter",
    }
    assert explicit.holds, explicit
    assert "divisible" not in explicit.note


# Bytes


class Wide(nnx.Module):
    """Dims as those of Llama: no device count but powers of two divides them."""

    def __init__(self, rngs, width=2752, outside=1024):
        self.up = nnx.Linear(outside, width, rngs=rngs)
        self.down = nnx.Linear(width, outside, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


WIDTH = 64


def small(rngs):
    """The same in small, for what is compiled."""
    return Wide(rngs, 172, WIDTH)


def shard(devices, model=Wide, tx=None, **settings):
    return fsdp.fully_shard(
        (lambda rngs: model(rngs)) if isinstance(model, type) else model,
        tx or optax.adamw(1e-3),
        mesh_of(devices),
        **{"min_size": 8, **settings},
    )


def test_each_device_stores_its_share():
    for devices in (3, 5, 6, 7):
        layout = shard(devices).layout
        large = [leaf for leaf in layout if math.prod(leaf.shape) >= 2**14]
        assert len(large) == 6  # two kernels, two moments of each
        stored = sum(leaf.bytes_per_device for leaf in large)
        assert stored <= 1.02 * sum(leaf.bytes for leaf in large) / devices, devices
    sharded = shard(7, small)
    params = jax.tree.leaves(sharded.init(0).params)
    on_first = sum(x.addressable_shards[0].data.nbytes for x in params)
    assert on_first == sharded.layout.per_device("params")


def test_the_layout_says_what_is_stored():
    layout = shard(6).layout
    leaf = layout.by_path["up/kernel"]
    assert leaf.shape == (1024, 2752)
    assert leaf.stored_shape == (1024, 2754)
    assert "stored as (1024,2754), 0.1% more; no dim is divisible by 6: dim 1 in 6" in str(layout)
    assert leaf.wasted_bytes == 0


def test_the_layer_dim_is_never_padded():
    layout = shard(7, gpt(True, width=22, layers=3), units=(Block,)).layout
    stacked = [leaf for leaf in layout.by_path.values() if leaf.stacked]
    assert stacked
    assert all(leaf.stored_shape[0] == 3 for leaf in stacked)
    assert any(leaf.is_padded for leaf in stacked)
    with pytest.raises(ValueError, match=r"splits dim 0 of \(\d+, .* in 7"):
        shard(7, gpt(True, width=22, layers=8), units=(Block,), rules=[("qkv/kernel", ("fsdp",))])


# What a user sees: the array's own shape


def test_an_array_has_its_own_shape_wherever_it_is_seen():
    sharded = shard(7, small)
    state = sharded.init(0)
    kernel = state.params["up"]["kernel"]
    assert kernel.shape == (70, 172) or kernel.shape == (64, 175)
    own = np.asarray(sharded.to_checkpoint(state).params["up"]["kernel"])
    assert sharded.checkpoint_target().params["up"]["kernel"].shape == own.shape == (64, 172)
    np.testing.assert_array_equal(sharded.model(state).up.kernel[...], own)
    seen = sharded.apply(lambda model: jnp.stack([*map(jnp.float32, model.up.kernel.shape)]))
    np.testing.assert_array_equal(seen(state), own.shape)
    norm = jax.jit(optax.tree.norm)(sharded.to_checkpoint(state).params["up"]["kernel"].array)
    np.testing.assert_allclose(norm, np.linalg.norm(own), rtol=1e-5)


def test_init_takes_what_to_checkpoint_and_other_devices_have():
    eight, six, seven = (shard(devices, small, optax.sgd(0.1)) for devices in (8, 6, 7))
    state = six.init(0)
    marked = six.to_checkpoint(state).params
    whole = jax.tree.map(np.asarray, marked)
    on_one = jax.tree.map(jnp.asarray, whole)
    of_seven = seven.to_checkpoint(seven.init(0, params=whole)).params
    on_eight = eight.to_checkpoint(eight.init(0, params=of_seven)).params
    for given in (whole, on_one, on_eight, of_seven, marked):
        found = six.init(1, params=given)
        for path, leaf in flatten(state.params).items():
            np.testing.assert_array_equal(flatten(found.params)[path], leaf)
            assert flatten(found.params)[path].sharding == leaf.sharding
    again = six.from_checkpoint(six.to_checkpoint(six.to_checkpoint(state)))
    np.testing.assert_array_equal(again.params["up"]["kernel"], state.params["up"]["kernel"])


def test_a_parameter_of_another_model_is_never_cut():
    with refused("does not fit", fix="those of a state may be padded"):
        shard(6).init(0, params={"up": {"kernel": np.ones((1024, 2754), np.float32)}})


def test_the_model_outside_of_a_step_warns_of_what_is_whole(monkeypatch):
    sharded = shard(7, small)
    monkeypatch.setattr("fsdp_jax.api.LARGE_BYTES", 2**10)
    with pytest.warns(fsdp.ReplicationWarning, match=r"arrays in full on every device, .* more"):
        model = sharded.model(sharded.init(0))
    assert model.up.kernel[...].sharding.is_fully_replicated


@pytest.mark.parametrize(
    ("shape", "tx"),
    [((4, 127, 300), optax.adafactor(1e-3)), ((1021, 1019), optim.adamw(1e-3, moments="int8"))],
)
def test_the_optimizer_is_given_the_arrays_own_shape(shape, tx):
    class Odd(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(shape))

    sharded = shard(8, Odd, tx)
    own = jax.tree.map(jnp.shape, jax.eval_shape(tx.init, {"w": jnp.ones(shape)}))
    assert jax.tree.map(lambda leaf: leaf.shape, sharded.layout.optimizer) == own
    sharded.init(0)


def test_random_keys_are_never_padded():
    class Keys(Wide):
        def __init__(self, rngs):
            super().__init__(rngs, 172, WIDTH)
            self.keys = nnx.Variable(jax.random.split(jax.random.key(0), 9))

    sharded = shard(8, Keys, rules=[("keys", ("fsdp",))])
    (leaf,) = [leaf for leaf in sharded.layout if leaf.path.endswith("keys")]
    assert "random keys cannot be padded" in leaf.reason
    sharded.to_checkpoint(sharded.init(0))


def test_initial_values_are_those_of_one_device():
    one, seven = shard(1, small), shard(7, small)
    expected = one.init(3).params
    found = seven.to_checkpoint(seven.init(3)).params
    for path, leaf in flatten(expected).items():
        np.testing.assert_array_equal(np.asarray(flatten(found)[path]), leaf)


# Rules and annotations


def test_a_rule_may_name_a_dim_that_is_not_divisible():
    layout = shard(6, rules=[("up/kernel", ("fsdp", None))]).layout
    assert layout.by_path["up/kernel"].stored_shape == (1026, 2752)


def test_a_rule_that_would_store_mostly_padding_is_refused():
    class Narrow(Wide):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.scale = nnx.Param(jnp.zeros((3, 512)))

    with pytest.raises(ValueError, match=r"splits dim 0 of \(3, 512\) in 8"):
        shard(8, Narrow, rules=[("scale", ("fsdp", None))])


def test_specs_for_other_trainers_say_what_padding_would_give():
    params = {"w": jax.ShapeDtypeStruct((1024, 2752), jnp.float32)}
    mesh = mesh_of(6)
    with pytest.warns(fsdp.ReplicationWarning, match=r"'w'(?s:.*)fully_shard pads"):
        assert fsdp.partition_specs(params, mesh) == {"w": P()}


def test_an_axis_of_the_models_own_divides_its_dims():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("data", "tensor"))
    rules = [("up/kernel", ("fsdp", "tensor")), ("down/kernel", ("tensor", "fsdp"))]
    sharded = fsdp.fully_shard(small, optax.adamw(1e-3), mesh, rules=rules, min_size=8)
    assert sharded.layout.by_path["up/kernel"].stored_shape == (66, 172)
    expected = run(shard(1, small), 2)
    np.testing.assert_allclose(run(sharded, 2), expected, rtol=1e-5)
    annotated = fsdp.fully_shard(
        lambda rngs: Annotated(rngs), optax.sgd(0.1), mesh, min_size=8
    ).layout.by_path["w"]
    assert annotated.spec == P("tensor", "data")
    assert annotated.stored_shape == (4096, 1002)
    odd = lambda rngs: Wide(rngs, 171, WIDTH)  # noqa: E731
    with pytest.raises(ValueError, match="indivisible dim: up/bias"):
        fsdp.fully_shard(odd, optax.sgd(0.1), mesh, rules=[("up/bias", ("tensor",))])


class Annotated(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.ones, ("tensor", None))
        self.w = nnx.Param(init(rngs(), (4096, 1000)))

    def __call__(self, x):
        return x @ self.w


def rows(number, width, count=42):
    return {"x": np.random.default_rng(number).normal(size=(count, width)).astype(np.float32)}
