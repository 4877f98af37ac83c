"""Losses that compute with a unit's parameters themselves, against one device.

They map over parameters, write others in their place, or differentiate by them: the gathers of such
arrays are in the trace beside those of the stored parameters, and prefetch moves only the latter.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import Case, losses_of, train_unsharded

import fsdp_jax as fsdp

LAYERS, WIDTH = 3, 8


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(0.3 * jax.random.normal(rngs.params(), (WIDTH, WIDTH)))

    def __call__(self, x):
        return jnp.tanh(x @ self.kernel[...])


class Net(nnx.Module):
    def __init__(self, rngs, scanned):
        self.scanned = scanned
        self.head = nnx.Param(0.3 * jax.random.normal(rngs.params(), (WIDTH, WIDTH)))
        if scanned:
            keys = nnx.Rngs(params=jax.random.split(rngs.params(), LAYERS))
            self.blocks = nnx.vmap(Dense)(keys)
        else:
            self.blocks = nnx.List([Dense(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        if self.scanned:
            carry = nnx.scan(lambda x, b: b(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return carry(x, self.blocks) @ self.head[...]
        for block in self.blocks:
            x = block(x)
        return x @ self.head[...]


def mapped(model, x):
    """The model with several perturbed copies of its parameters at once."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def perturbed(scale):
        return nnx.merge(graph, jax.tree.map(lambda p: p * scale, params), rest)(x)

    return jax.vmap(perturbed)(jnp.linspace(0.5, 2.0, 5)).sum() + (model(x) ** 2).sum()


def written(model, x):
    """Units whose kernel is that of the head."""
    other = nnx.clone(model)
    kernel = model.head[...]
    if model.scanned:
        other.blocks.kernel[...] = jnp.broadcast_to(kernel, (LAYERS, WIDTH, WIDTH))
    else:
        other.blocks[1].kernel[...] = kernel.T
    return (other(x) ** 2).sum()


def penalized(model, x):
    """The norm of the gradient by the parameters, frozen ones too."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    gradients = jax.grad(lambda p: (nnx.merge(graph, p, rest)(x) ** 2).sum())(params)
    return sum((g**2).sum() for g in jax.tree.leaves(gradients))


class Rows(Case):
    def batch(self, step, rows=16):
        return {"x": np.random.default_rng(step).normal(size=(rows, WIDTH)).astype(np.float32)}


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("fn", "scanned", "settings"),
    [
        (mapped, True, {"prefetch": "pre"}),
        pytest.param(mapped, False, {"prefetch": "pre"}, marks=LONG),
        pytest.param(mapped, True, {"prefetch": "post"}, marks=LONG),
        pytest.param(mapped, True, {}, marks=LONG),
        (written, True, {"prefetch": "pre", "local_batch": True}),
        pytest.param(written, False, {"prefetch": "pre", "local_batch": True}, marks=LONG),
        pytest.param(written, True, {"offload": fsdp.Offload(params=True)}, marks=LONG),
        (penalized, True, {"prefetch": "pre", "frozen": ("blocks/*",)}),
        pytest.param(penalized, False, {"frozen": ("blocks/*",)}, marks=LONG),
    ],
)
def test_a_loss_may_compute_with_the_parameters_of_units(fn, scanned, settings):
    case = Rows(
        lambda rngs: Net(rngs, scanned), lambda m, b: (fn(m, b["x"]), len(b["x"])), (Dense,)
    )
    arguments = {name: value for name, value in settings.items() if name != "local_batch"}
    sharded = fsdp.fully_shard(
        case.model, optax.sgd(1e-2), fsdp.make_mesh(8), units=[Dense], min_size=8, **arguments
    )
    step = sharded.make_train_step(case.loss, local_batch="local_batch" in settings)
    frozen = "frozen" in settings
    steps = 1 if frozen else 2  # of one device, which freezes nothing, the first loss is the same
    unmoved = contextlib.nullcontext()
    if "prefetch" in settings and fn is not penalized:
        unmoved = pytest.warns(fsdp.SlowerWarning, match="or mapped over by `vmap`")
    with unmoved:
        found, _ = losses_of(step, sharded.init(0), map(case.batch, range(steps)))
    expected = train_unsharded(case, steps=steps, make_optimizer=lambda: optax.sgd(1e-2))[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def merged(model, x):
    """Frozen kernels with a trained array added to them in their place, as LoRA is merged."""
    model.blocks.kernel[...] = model.blocks.kernel[...] + 0.1 * model.head[...][None]
    return (model(x) ** 2).sum()


def widened(model, x):
    """Kernels of another shape in the place of the units' own."""
    kernel = model.blocks[0].kernel[...]
    model.blocks[0].kernel.set_value(jnp.concatenate([kernel, 2 * kernel], axis=1))
    return (model.blocks[0](x) ** 2).sum() + (model.head[...] ** 2).sum()


def by_hand_in_bfloat16(model, x):
    """Kernels in a dtype that the loss chooses: a unit computes in it."""
    block = model.blocks[0]
    block.kernel.set_value(block.kernel[...].astype(jnp.bfloat16))
    out = block(x.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    return jnp.sum(out.astype(jnp.float32) ** 2)


def checkpointed(model, x):
    """A checkpoint inside the scan over layers, which returns the parameters that it reads."""

    def layer(x, block):
        return nnx.remat(lambda block, x: block(x))(block, x)

    run = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return (run(x, model.blocks) ** 2).sum()


@pytest.mark.parametrize(
    ("fn", "scanned", "settings", "tolerance"),
    [
        (merged, True, {"prefetch": "pre"}, 1e-5),
        pytest.param(merged, True, {"prefetch": "post"}, 1e-5, marks=LONG),
        (widened, False, {}, 1e-5),
        pytest.param(widened, False, {"offload": fsdp.Offload(params=True)}, 1e-5, marks=LONG),
        (by_hand_in_bfloat16, False, {}, 2e-2),
        (checkpointed, True, {"local_batch": True}, 1e-5),
        pytest.param(checkpointed, True, {"offload": fsdp.Offload(params=True)}, 1e-5, marks=LONG),
    ],
)
def test_gradients_by_arrays_in_a_parameters_place(fn, scanned, settings, tolerance):
    frozen = ("^blocks/",) if fn is merged else ()
    arguments = {name: value for name, value in settings.items() if name != "local_batch"}
    sharded = fsdp.fully_shard(
        lambda rngs: Net(rngs, scanned),
        optax.sgd(1e-2),
        fsdp.make_mesh(8),
        units=[Dense],
        min_size=8,
        frozen=frozen,
        **arguments,
    )

    def loss(model, x):
        return fn(model, x), len(x)

    state = sharded.init(0)
    x = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
    own = Net(nnx.Rngs(jax.random.split(jax.random.key(0))[0]), scanned)
    graph, trained, rest = nnx.split(own, nnx.PathContains("head") if frozen else nnx.Param, ...)
    value, gradient = jax.value_and_grad(lambda p: fn(nnx.merge(graph, p, rest, copy=True), x))(
        trained
    )
    step = sharded.make_train_step(loss, local_batch="local_batch" in settings)
    _, metrics = step(state, x)
    np.testing.assert_allclose(metrics["loss"] * len(x), value, rtol=tolerance)
    np.testing.assert_allclose(
        metrics["grad_norm"] * len(x), optax.tree.norm(gradient), rtol=tolerance
    )
