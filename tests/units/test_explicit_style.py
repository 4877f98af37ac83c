"""Models written for JAX's Explicit mesh axes: `reshard`, `out_sharding`, and what is refused."""

import contextlib
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, reshard

import fsdp_jax as fsdp

STRATEGIES = (
    *("no_shard", "zero1", "shard_grad_op"),
    *("full_shard", "hybrid_shard", "hybrid_shard_zero2"),
)
DATA, TENSOR = "fsdp", "tp"
WIDTH, VOCABULARY, ROWS, LENGTH = 16, 32, 16, 6


class Layer(nnx.Module):
    """A block in the style of published models: weights and activations name mesh axes."""

    def __init__(self, data, tensor, *, rngs):
        self.rows = P(data, None, tensor)
        up, down = {"out_sharding": P(data, tensor)}, {"out_sharding": P(tensor, data)}
        scale = {"out_sharding": P(None)}
        self.norm = nnx.RMSNorm(WIDTH, scale_metadata=scale, rngs=rngs)
        self.up = nnx.Linear(
            WIDTH, 2 * WIDTH, use_bias=False, kernel_metadata=up, rngs=rngs
        )
        self.down = nnx.Linear(
            2 * WIDTH, WIDTH, use_bias=False, kernel_metadata=down, rngs=rngs
        )

    def __call__(self, x):
        h = nnx.silu(self.up(self.norm(x), out_sharding=self.rows))
        return x + self.down(h, out_sharding=self.rows)


class Explicit(nnx.Module):
    """A model whose lookup, blocks and head name mesh axes in the explicit style."""

    layer_class = Layer

    def __init__(self, data=DATA, tensor=None, *, rngs):
        self.rows = P(data, None, tensor)
        init = nnx.initializers.normal(0.1)
        self.table = nnx.Param(init(rngs.params(), (VOCABULARY, WIDTH)), sharding=P(tensor, data))
        self.layers = nnx.List([self.layer_class(data, tensor, rngs=rngs) for _ in range(2)])
        self.head = nnx.Param(
            nnx.with_partitioning(init, (data, tensor))(rngs.params(), (WIDTH, VOCABULARY))
        )

    def __call__(self, tokens):
        x = self.table[...].at[tokens].get(out_sharding=self.rows)
        for layer in self.layers:
            x = layer(x)
        x = reshard(x, P(self.rows[0]))
        return jnp.einsum("btd,dv->btv", x, self.head[...], out_sharding=self.rows)


class LinenLayer(nn.Module):
    data: str = DATA

    @nn.compact
    def __call__(self, x):
        rows = P(self.data)
        init = nn.with_partitioning(nn.initializers.normal(0.1), (self.data, None))
        kernel = self.param("kernel", init, (WIDTH, WIDTH))
        x = reshard(x, rows)
        return x + jnp.tanh(jnp.einsum("btd,de->bte", x, kernel, out_sharding=rows))


class LinenExplicit(nn.Module):
    data: str = DATA

    @nn.compact
    def __call__(self, tokens):
        init = nn.initializers.normal(0.1)
        table = self.param("table", init, (VOCABULARY, WIDTH))
        x = table.at[tokens].get(out_sharding=P(self.data))
        for _ in range(2):
            x = LinenLayer(self.data)(x)
        return x @ self.param("head", init, (WIDTH, VOCABULARY))


def loss(model, batch):
    logits = model(batch[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return losses.sum(), losses.size


def batches():
    random = np.random.default_rng(0)
    return [
        random.integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32) for _ in range(3)
    ]


def make(cls=Explicit, **axes):
    if issubclass(cls, nn.Module):
        return cls(**axes)
    return lambda rngs: cls(**axes, rngs=rngs)


def shard(mesh, model, strategy="full_shard", **settings):
    if isinstance(model, nn.Module):
        settings["inputs"] = (jax.ShapeDtypeStruct((1, LENGTH), jnp.int32),)
    return fsdp.fully_shard(model, optax.adam(1e-2), mesh, strategy, min_size=1, **settings)


def losses_of(sharded, loss=loss, **settings):
    step, state = sharded.make_train_step(loss, **settings), sharded.init(0)
    losses = []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


@cache
def on_one_device(cls=Explicit):
    """The same model without annotations, in a loop of plain JAX."""
    mesh = fsdp.make_mesh(1, allow_fewer=True)
    return losses_of(shard(mesh, make(cls, data=None), "no_shard", units="model"))


def mesh_of(shape=(8,), names=(DATA,), kinds=AxisType.Explicit):
    kinds = kinds if isinstance(kinds, tuple) else (kinds,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=kinds)
