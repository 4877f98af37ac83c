"""An optimizer gets the tree of parameters that Flax shows, and the arguments that it takes.

Updates are computed eagerly, on vectors of three numbers, and compared with optax's own; one step
is compiled.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.traverse_util import flatten_dict, unflatten_dict
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.optim.fitting import fit_optimizer
from fsdp_jax.tree import flatten

FIRST, SECOND, HEAD = ("blocks", 0, "kernel"), ("blocks", 1, "kernel"), ("head", "kernel")
PARAMS = unflatten_dict({path: np.float32([1, 2, 3]) for path in (FIRST, SECOND, HEAD)})
LABELS = unflatten_dict({path: path == FIRST for path in (FIRST, SECOND, HEAD)})


def of_attributes(params):
    """Labels by the attributes that an `nnx.State` has."""
    return jax.tree.map(lambda x: x is params.blocks[0]["kernel"], params)


def of_flat_dict(params):
    return unflatten_dict({path: path == FIRST for path in flatten_dict(params)})


def of_keys(params):
    """Labels by path, as they are written for `nnx.Optimizer`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: [key.key for key in path] == [*FIRST], params
    )


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param(LABELS, id="abstract_state().params"),
        pytest.param(nnx.State(LABELS), id="nnx.State"),
        pytest.param(FrozenDict(LABELS), id="FrozenDict"),
        pytest.param({"params": LABELS}, id="Linen's variables"),
        pytest.param(FrozenDict({"params": LABELS}), id="Linen's frozen variables"),
        pytest.param(of_keys, id="a function of jax's paths"),
        pytest.param(lambda p: nnx.map_state(lambda path, _: path == FIRST, p), id="map_state"),
        pytest.param(of_attributes, id="attributes"),
        pytest.param(of_flat_dict, id="flatten_dict"),
    ],
)
@pytest.mark.parametrize("kind", ["mask", "labels"])
def test_masks_and_labels_in_the_trees_of_flax_choose_the_same_parameters(labels, kind):
    if kind == "mask":
        tx = optax.masked(optax.scale(0.0), labels)
    else:
        tx = optax.partition({True: optax.set_to_zero(), False: optax.identity()}, labels)
    fitted = fit_optimizer(tx, PARAMS)
    state = fitted.init(PARAMS)
    updates, after = fitted.update(PARAMS, state, PARAMS, value=1.0, grad=PARAMS)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    expected = unflatten_dict({FIRST: np.zeros(3), SECOND: [1, 2, 3], HEAD: [1, 2, 3]})
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


@pytest.mark.parametrize(
    "labels",
    [
        {"blocks": True},
        unflatten_dict({("blocks", "0"): True, ("head",): False}),
        lambda params: params["embed"],
    ],
)
def test_labels_of_another_tree_are_refused_with_the_tree_that_is_expected(labels):
    with refused("cannot be initialized", where="tx", expected="{'blocks': {0: {'kernel': ...}"):
        fit_optimizer(optax.masked(optax.sgd(0.1), labels), PARAMS)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.dense(x))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        return self.blocks[1](self.blocks[0](x))


def test_a_step_freezes_the_block_whose_number_a_label_has():
    def labels(params):
        flat = flatten_dict(params)
        frozen = {path: "frozen" for path in flat if path[:2] == ("blocks", 0)}
        return unflatten_dict(dict.fromkeys(flat, "trained") | frozen)

    tx = optax.partition({"frozen": optax.set_to_zero(), "trained": optax.sgd(0.1)}, labels)
    mesh = fsdp.make_mesh(data=8)
    sharded = fsdp.fully_shard(lambda rngs: Model(rngs), tx, mesh, min_size=8)
    state = sharded.init(0)
    before = jax.tree.map(np.asarray, state.params)
    step = sharded.make_train_step(lambda model, x: ((model(x) ** 2).sum(), len(x)))
    after, _ = step(state, np.ones((8, 8), np.float32))
    changed = jax.tree.map(lambda x, y: bool((x != y).any()), before, after.params)
    assert changed == {"blocks": {n: {"dense": {"bias": n == 1, "kernel": n == 1}} for n in (0, 1)}}


def test_parameters_have_the_keys_of_their_library():
    def params(model, **settings):
        mesh = fsdp.make_mesh(data=8)
        return fsdp.fully_shard(model, optax.sgd(0.1), mesh, **settings).abstract_state().params

    module = nn.Sequential([nn.WeightNorm(nn.Dense(8)), nn.Dense(8)])
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    assert jax.tree.structure(params(module, inputs=(x,))) == jax.tree.structure(shapes)
    flax_own = nnx.to_pure_dict(nnx.eval_shape(lambda: nnx.state(Model(nnx.Rngs(0)), nnx.Param)))
    assert jax.tree.structure(params(lambda rngs: Model(rngs))) == jax.tree.structure(flax_own)


def without_extra():
    """An update that takes no additional arguments, though its type says so."""
    return optax.GradientTransformationExtraArgs(
        lambda params: (), lambda g, state, params=None: (jax.tree.map(jnp.negative, g), state)
    )


def sam(**settings):
    return optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.5), **settings)


@pytest.mark.parametrize(
    "make",
    [
        sam,
        without_extra,
        lambda: optax.chain(optax.clip(1.0), sam()),
        lambda: optax.masked(without_extra(), LABELS),
        lambda: optax.inject_hyperparams(lambda rate: optax.chain(sam(), optax.scale(rate)))(0.1),
    ],
)
def test_an_update_gets_the_arguments_that_it_takes(make):
    fitted, own = fit_optimizer(make(), PARAMS), make()
    state, alone, expected = fitted.init(PARAMS), own.init(PARAMS), PARAMS
    params = PARAMS
    for _ in range(3):
        updates, state = fitted.update(params, state, params, value=1.0, grad=params)
        params = optax.apply_updates(params, updates)
        updates, alone = own.update(expected, alone, expected)
        expected = optax.apply_updates(expected, updates)
    for path, value in flatten(expected).items():
        np.testing.assert_allclose(flatten(params)[path], value, rtol=1e-6)


def test_an_update_that_needs_the_loss_gets_it():
    fitted = fit_optimizer(optax.polyak_sgd(), PARAMS)
    state = fitted.init(PARAMS)
    updates, _ = fitted.update(PARAMS, state, PARAMS, value=jnp.float32(2), grad=PARAMS)
    own = optax.polyak_sgd()
    expected, _ = own.update(PARAMS, own.init(PARAMS), PARAMS, value=jnp.float32(2))
    jax.tree.map(np.testing.assert_allclose, updates, expected)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5), {"got": "optax.lookahead"}),
        (lambda: optax.lbfgs(), {"what": "evaluate the loss again", "fix": "linesearch=None"}),
        (lambda: sam(opaque_mode=True), {"what": "evaluate the loss", "fix": "opaque_mode=False"}),
    ],
)
def test_optimizers_that_a_step_cannot_call_are_refused_by_name(make, fields):
    fitted = fit_optimizer(make(), PARAMS)
    with refused(**fields, where="optimizer"):
        fitted.update(PARAMS, fitted.init(PARAMS), PARAMS, value=1.0, grad=PARAMS)
