"""A model of few operations, for what does not depend on the model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from reference import Case

WIDTH = 16


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Stack(nnx.Module):
    """Matrices and vectors, alone and stacked by layers."""

    def __init__(self, rngs, layers=2):
        self.enter = nnx.Linear(8, WIDTH, rngs=rngs)
        self.blocks = nnx.vmap(Layer)(rngs.split(layers))
        self.leave = nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x):
        scan = nnx.scan(
            lambda layer, x: (layer(x), None), in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0)
        )
        return self.leave(scan(self.blocks, self.enter(x))[0])


def by_hand(params, x):
    """The model in NumPy; `params`: its parameters as nested mappings."""
    linear = lambda p, x: x @ np.asarray(p["kernel"]) + np.asarray(p["bias"])  # noqa: E731
    x, up = linear(params["enter"], x), params["blocks"]["up"]
    for n, down in enumerate(np.asarray(params["blocks"]["down"]["kernel"])):
        hidden = x @ np.asarray(up["kernel"])[n] + np.asarray(up["bias"])[n]
        x = x + np.tanh(hidden) @ down
    return linear(params["leave"], x)


def in_the_same_memory(x):
    """Another array, as `jax.device_put` makes it where it need not copy."""
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def loss(model, batch):
    """Squared errors, of rows that weigh differently: a mean of means would show."""
    errors = (model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2
    return (errors.sum(-1) * batch["weight"]).sum(), batch["weight"].sum()


@dataclasses.dataclass(frozen=True)
class Rows(Case):
    def batch(self, step, rows=32):
        x, y = np.random.default_rng(step).normal(size=(2, rows, 8)).astype(np.float32)
        return {"x": x, "y": y, "weight": np.arange(rows, dtype=np.float32) % 5 / 4}


def small(layers=2):
    return Rows(lambda rngs: Stack(rngs, layers), loss, (Layer,))


SMALL = small()
