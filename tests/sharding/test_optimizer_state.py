"""The state of any optax transformation is sharded from the start, and its updates are the same.

Compiles one program of all optimizers, sharded and not: updates have values, traces have none.
"""

from functools import partial
from math import prod

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from for_each import for_each
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P
from refusals import refused

from fsdp_jax.sharding.layout import Layout, make_layout
from fsdp_jax.sharding.mesh import axes_of, make_mesh, mesh_axes
from fsdp_jax.sharding.optimizer_state import optimizer_specs
from fsdp_jax.sharding.param_leaves import stacked_dims
from fsdp_jax.sharding.rules import Rules, partition_specs
from fsdp_jax.sharding.strategy import get_strategy
from fsdp_jax.tree import flatten, unflatten

pytestmark = pytest.mark.releases

MIN_SIZE = 64
SHAPES = {
    "embed/kernel": (64, 48),
    "blocks/kernel": (4, 32, 40),
    "blocks/scale": (4, 64),
    "head/bias": (64,),
}
LABELS = {
    "embed": {"kernel": "slow"},
    "blocks": {"kernel": "fast", "scale": "slow"},
    "head": {"bias": "slow"},
}


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "adam, bfloat16 momentum": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "adamw": optax.adamw(1e-2),
    "sgd": optax.sgd(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "lion": optax.lion(1e-2),
    "adafactor": optax.adafactor(1e-2),
    "adafactor, factored": optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9),
    "sm3": optax.sm3(1e-2),
    "lbfgs": optax.lbfgs(1e-2, memory_size=3, linesearch=None),
    "muon": optax.contrib.muon(1e-2),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2), optax.ema(0.9)),
    "masked": optax.masked(optax.adam(1e-2), matrices),
    "multi_transform": optax.multi_transform(
        {"slow": optax.adam(1e-3), "fast": optax.lion(1e-2)}, LABELS
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "schedule_free": optax.contrib.schedule_free(optax.sgd(1e-2), 1e-2),
    "prodigy": optax.contrib.prodigy(),
    "galore": optax.contrib.galore(1e-2, rank=8),
    "flatten": optax.flatten(optax.adam(1e-2)),
}
EACH = for_each("name", OPTIMIZERS)
SLOW = ["galore", "lbfgs"]  # to compile


def lay_out(
    tx, strategy="full_shard", *, data=4, replica=2, shapes=SHAPES, rules=(), frozen=()
) -> Layout:
    axes, strategy = mesh_axes(make_mesh(data, replica)), get_strategy(strategy)
    settings = Rules(rules, min_size=MIN_SIZE, axes=strategy.shard_axes(axes), pads=True)
    params = unflatten(
        {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
    )
    stacked = stacked_dims(shapes)
    placements = settings.place(params, axes.mesh, stacked=stacked)
    return make_layout(
        params, placements, {}, tx, axes, strategy, settings, stacked=stacked, frozen=frozen
    )


def some(layout: Layout, seed: int):
    """Real values of the parameters' shapes, in one place."""
    rng = np.random.default_rng(seed)
    return unflatten(
        {
            path: rng.normal(size=leaf.shape).astype(np.float32)
            for path, leaf in layout.by_path.items()
        }
    )


def shardings(tree):
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def grad_shardings(layout: Layout):
    """How the optimizer updates each parameter."""
    return jax.tree.map(lambda leaf: leaf.grad_sharding, layout.params)


def follows(path: str, shape: tuple[int, ...], shapes=SHAPES) -> bool:
    """Whether a leaf of the state has a parameter's shape as its last dims."""
    return any(path.endswith(name) and shape[-len(own) :] == own for name, own in shapes.items())


def assert_sharded_as(state, layout: Layout):
    for (path, array), leaf in zip(
        flatten(state).items(), jax.tree.leaves(layout.optimizer), strict=True
    ):
        assert array.sharding.is_equivalent_to(leaf.sharding, array.ndim), path
        assert (array.shape, array.dtype) == (leaf.shape, leaf.dtype), path


@EACH
@for_each("strategy", ["zero1", "shard_grad_op", "full_shard", "hybrid_shard"])
def test_nothing_large_is_replicated(name, strategy):
    layout = lay_out(OPTIMIZERS[name], strategy)
    axes = set(layout.strategy.shard_axes(layout.axes))
    for leaf in jax.tree.leaves(layout.optimizer):
        if follows(leaf.path, leaf.shape):
            assert {axis for entry in leaf.spec for axis in axes_of(entry)} == axes, leaf.path
        assert not leaf.is_replicated or prod(leaf.shape) < MIN_SIZE, leaf.path
        assert not leaf.wasted_bytes


@pytest.mark.parametrize(
    "names",
    [
        [name for name in OPTIMIZERS if name not in SLOW],
        pytest.param(SLOW, marks=pytest.mark.long, id="slow"),
    ],
    ids=["quick", "slow"],
)
def test_a_step_keeps_shardings_and_values(names):
    """One program with all optimizers, and the same without shardings."""
    txs = {name: OPTIMIZERS[name] for name in names}
    layouts = {name: lay_out(tx) for name, tx in txs.items()}
    (layout, *_) = layouts.values()
    params, grads, updated = some(layout, 0), some(layout, 1), grad_shardings(layout)
    where = {name: shardings(each.optimizer) for name, each in layouts.items()}

    def init(params):
        return {name: tx.init(params) for name, tx in txs.items()}

    def update(grads, states, params):
        both = {name: tx.update(grads, states[name], params) for name, tx in txs.items()}
        return {name: each[0] for name, each in both.items()}, {n: e[1] for n, e in both.items()}

    placed = jax.device_put(params, updated), jax.device_put(grads, updated)
    states = jax.jit(init, out_shardings=where)(placed[0])
    step = jax.jit(update, out_shardings=(dict.fromkeys(txs, updated), where))
    updates, after = step(placed[1], states, placed[0])
    _, again = step(placed[1], after, placed[0])
    for state in (states, after, again):
        for name, each in layouts.items():
            assert_sharded_as(state[name], each)

    expected = jax.jit(update)(grads, jax.jit(init)(params), params)
    for (path, ours), theirs in zip(
        flatten((updates, after)).items(), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(ours, np.float64),
            np.asarray(theirs, np.float64),
            rtol=2e-4,
            atol=2e-5,
            err_msg=path,
        )


@EACH
def test_no_shard_replicates_all(name):
    for leaf in lay_out(OPTIMIZERS[name], "no_shard"):
        assert leaf.spec == PartitionSpec()
        assert not leaf.wasted_bytes


def test_zero1_shards_the_optimizer_and_not_the_parameters():
    layout = lay_out(optax.adam(1e-2), "zero1", data=8, replica=1)
    assert all(leaf.is_replicated for leaf in jax.tree.leaves(layout.params))
    assert all(not leaf.is_replicated for leaf in jax.tree.leaves(layout.optimizer) if leaf.shape)
    assert (
        layout.per_device("optimizer") == (layout.total("optimizer") - 4) // 8 + 4
    )  # the count is replicated


def test_moments_are_sharded_as_a_rule_shards_their_parameter():
    layout = lay_out(optax.adam(1e-2), rules=[("embed/kernel", (None, "data")), ("bias", ())])
    moments = {leaf.path: leaf.spec for leaf in jax.tree.leaves(layout.optimizer)}
    assert (
        moments["0/mu/embed/kernel"] == moments["0/nu/embed/kernel"] == PartitionSpec(None, "data")
    )
    assert moments["0/mu/head/bias"] == PartitionSpec()


def test_the_longest_path_is_the_owner():
    shapes = {"kernel": (64, 8), "dense/kernel": (8, 64)}
    layout = lay_out(
        optax.lbfgs(1e-2, memory_size=3, linesearch=None), data=8, replica=1, shapes=shapes
    )
    specs = {leaf.path: leaf.spec for leaf in jax.tree.leaves(layout.optimizer)}
    assert specs["0/diff_params_memory/kernel"] == PartitionSpec(None, "data")
    assert specs["0/diff_params_memory/dense/kernel"] == PartitionSpec(None, None, "data")


@for_each(
    ("strategy", "copies"),
    [("full_shard", 3), ("shard_grad_op", 3), ("zero1", 2)],  # zero1 replicates the parameter
)
@for_each("shapes", [{"odd": (63, 65)}, {"odd": (63, 65), **SHAPES}])
def test_indivisible_arrays_are_padded_in_the_optimizer_too(strategy, copies, shapes):
    layout = lay_out(optax.adam(1e-2), strategy, shapes=shapes)
    odd = [leaf for leaf in layout if leaf.path.endswith("odd") and not leaf.is_replicated]
    assert [leaf.stored_shape for leaf in odd] == [(64, 65)] * copies
    assert not any(leaf.wasted_bytes for leaf in layout)


def test_flat_state_that_does_not_divide_is_padded():
    layout = lay_out(optax.flatten(optax.adam(1e-2)), shapes={"kernel": (64, 64), "bias": (3,)})
    flat = [leaf.stored_shape for leaf in layout if leaf.part == "optimizer" and leaf.shape]
    assert flat == [(4104,), (4104,)]


# For trainers of one's own


class Annotated(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("fsdp", None))
        return nn.Dense(32)(nn.Dense(64, kernel_init=init)(x))


def linen_variables():
    return jax.eval_shape(lambda: Annotated().init(jax.random.key(0), jnp.zeros((1, 64))))


def nnx_state():
    return nnx.eval_shape(lambda: nnx.state(nnx.Linear(64, 32, rngs=nnx.Rngs(0))))


PARAMS = {
    "linen": linen_variables,
    "linen unboxed": lambda: nn.meta.unbox(linen_variables()),
    "nnx": nnx_state,
    "nnx pure": lambda: nnx.to_pure_dict(nnx_state()),
    "a list": lambda: [jax.ShapeDtypeStruct((64, 32), jnp.float32)],
}
# of `multi_transform` the labels, of `flatten` the shape are those of other parameters
ANY_PARAMS = OPTIMIZERS | {
    "masked": optax.masked(optax.adam(1e-2), lambda params: jax.tree.map(lambda _: False, params)),
    "multi_transform": optax.multi_transform(
        {"all": optax.adam(1e-3)}, lambda params: jax.tree.map(lambda _: "all", params)
    ),
}


@for_each("kind", [AxisType.Auto, AxisType.Explicit])
@for_each("made_by", PARAMS)
def test_specs_have_the_tree_of_the_optimizers_state(made_by, kind):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,))
    params = PARAMS[made_by]()
    specs = partition_specs(params, mesh, min_size=MIN_SIZE)
    for name, tx in ANY_PARAMS.items():
        state_specs = optimizer_specs(tx, params, specs, mesh, min_size=MIN_SIZE)
        state = jax.eval_shape(tx.init, params)
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
        placed = jax.device_put(zeros, jax.tree.map(partial(NamedSharding, mesh), state_specs))
        assert jax.tree.structure(placed) == jax.tree.structure(state), name
        for array in jax.tree.leaves(placed):
            assert not array.is_fully_replicated or array.size < 8 * MIN_SIZE, name
        with jax.set_mesh(mesh):
            assert optimizer_specs(tx, params, specs, mesh, min_size=MIN_SIZE) == state_specs, name


def test_a_spec_for_a_subtree_stands_for_all_of_it():
    mesh = AbstractMesh((8,), ("fsdp",))
    params = {"a": {"b": jax.ShapeDtypeStruct((64, 32), jnp.float32)}}
    specs = optimizer_specs(optax.sgd(1e-2, momentum=0.9), params, {"a": P(None, "fsdp")}, mesh)
    assert specs[0].trace == {"a": {"b": P(None, "fsdp")}}


@for_each(
    ("specs", "text"),
    [
        ({}, "a parameter has no PartitionSpec"),
        ({"a": ("fsdp",)}, "a parameter has no PartitionSpec"),
        ({"a": P("tp")}, "the mesh has no axis 'tp'"),
    ],
)
def test_specs_that_are_not_of_the_parameters_are_refused(specs, text):
    mesh = AbstractMesh((8,), ("fsdp",))
    params = {"a": jax.ShapeDtypeStruct((64, 32), jnp.float32)}
    with refused(text, where="a"):
        optimizer_specs(optax.adam(1e-2), params, specs, mesh)


def test_what_is_no_transformation_is_refused():
    with refused("not an optax transformation", fix="optax.adamw(3e-4)"):
        optimizer_specs(optax.adamw, {}, {}, AbstractMesh((8,), ("fsdp",)))


def test_an_init_that_cannot_be_traced_sharded_is_named():
    """Its state goes by paths and sizes, and the reason says what was met."""

    def init(params):
        if any(any(leaf.sharding.spec) for leaf in map(jax.typeof, jax.tree.leaves(params))):
            raise RuntimeError("no shardings, please\nmore lines")
        return jax.tree.map(jnp.zeros_like, params)

    tx = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    leaf = lay_out(tx).optimizer["embed"]["kernel"]
    assert leaf.spec == lay_out(optax.trace(0.9)).optimizer.trace["embed"]["kernel"].spec
    met = "; tx.init cannot be traced sharded: RuntimeError: no shardings, please"
    assert leaf.reason == f"as parameter embed/kernel, by path and shape{met}"
    assert met in str(lay_out(tx))
    assert "cannot be traced" not in str(lay_out(optax.adam(1e-3)))
    flat = [leaf.reason for leaf in jax.tree.leaves(lay_out(OPTIMIZERS["flatten"]).optimizer)]
    assert all("; tx.init cannot be traced sharded: " in reason for reason in flat), flat
