"""A step leaves the classes of NNX modules as they are, and keeps what a unit's methods write."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import on_eight

from fsdp_jax.program.equations import all_eqns
from fsdp_jax.program.primitives import CHECKPOINT, primitive_of

WIDTH = 16
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
TAGS = []


class Tagged(nnx.Module):
    """Fills a registry, and requires an argument of its subclasses."""

    def __init_subclass__(cls, *, tag, **kwargs):
        super().__init_subclass__(**kwargs)
        TAGS.append(tag)


class Block(Tagged, tag="block"):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.scale = nnx.Param(jnp.ones((WIDTH, 8)))

    def __call__(self, x):
        return self.linear(x) * self.scale[...].mean()


class Derived(Block, tag="derived"):
    def __call__(self, x):
        return super().__call__(x) + 1


class Writing(Block, tag="writing"):
    """Normalizes its kernel, and scales another parameter, each time it is called."""

    def __call__(self, x):
        kernel = self.linear.kernel
        kernel[...] = kernel[...] / jnp.linalg.norm(kernel[...])
        self.scale.set_value(self.scale[...] * 1.1)
        return super().__call__(x)


class Replacing(Block, tag="replacing"):
    def __call__(self, x):
        self.scale = nnx.Param(self.scale[...] * 1.1)
        return super().__call__(x)


class Jitted(Block, tag="jitted"):
    @nnx.jit
    def __call__(self, x):
        return super().__call__(x)


class Stack(nnx.Module):
    """Chooses its code by the exact class of its blocks, and calls each of them twice."""

    def __init__(self, kind, rngs):
        self.kind = kind
        self.blocks = nnx.List([kind(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in (*self.blocks, *self.blocks):
            x = x + (block(x) if type(block) is self.kind else 100.0)
        return x


def loss(model, x):
    y = model(x)
    penalty = sum((b.scale[...] ** 1.1).sum() + b.linear.kernel[...].sum() for b in model.blocks)
    return (y**2).sum() + penalty * len(x), len(x)


def stack(kind, **settings):
    units = settings.pop("units", ["Block"])
    return on_eight(
        lambda rngs: Stack(kind, rngs), optax.sgd(1.0), units=units, min_size=1, **settings
    )


CASES = [
    *itertools.product([Derived, Writing, Replacing], ["full_shard", "shard_grad_op"], [False]),
    *itertools.product([Writing], ["full_shard", "shard_grad_op"], [True]),
]


@pytest.mark.parametrize(("kind", "strategy", "local_batch"), CASES)
def test_a_step_computes_what_the_model_computes_alone(kind, strategy, local_batch):
    """Whatever a unit's method writes to a parameter is read by what comes after it."""
    tags = list(TAGS)
    sharded = stack(kind, strategy=strategy)
    state = sharded.init(0)
    model = sharded.model(state)
    expected, gradient = nnx.value_and_grad(lambda model: loss(model, X)[0] / len(X))(model)
    before = jax.tree.map(np.array, state.params)
    state, metrics = sharded.make_train_step(loss, local_batch=local_batch)(state, X)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    updates = jax.tree.map(lambda old, new: old - np.array(new), before, state.params)
    for got, wanted in zip(jax.tree.leaves(updates), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert tags == TAGS


def test_a_parameter_that_is_not_written_does_not_leave_the_checkpoint():
    """`nnx.jit` returns new arrays for all Variables that pass through it."""
    shapes = ((WIDTH, WIDTH), (WIDTH, 8))
    for kind, expected in ((Jitted, 0), (Writing, 2)):
        program = stack(kind).make_eval_step(loss).trace(X).jaxpr
        calls = [eqn for eqn in all_eqns(program) if primitive_of(eqn) is CHECKPOINT]
        assert len(calls) == 4
        for call in calls:
            assert sum(v.aval.shape in shapes for v in call.outvars) == expected, kind


def test_steps_are_traced_in_several_threads_at_once():
    attributes = dict(vars(Derived)), dict(vars(Block))
    steps = [stack(Derived).make_train_step(loss) for _ in range(4)]
    texts = []
    threads = [
        threading.Thread(target=lambda step=step: texts.append(str(step.trace(X).jaxpr)))
        for step in steps
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4
    assert all(text.count("fsdp_gather") == texts[0].count("fsdp_gather") > 0 for text in texts)
    assert (dict(vars(Derived)), dict(vars(Block))) == attributes


def test_an_error_in_a_trace_restores_the_classes():
    attributes = dict(vars(Block))

    def failing(model, x):
        assert dict(vars(Block)) != attributes
        raise RuntimeError("as asked")

    with pytest.raises(RuntimeError, match="as asked"):
        stack(Derived).make_train_step(failing).trace(X)
    assert dict(vars(Block)) == attributes
