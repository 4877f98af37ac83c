"""What the tests hold the library against: small models of four kinds, and training written out by hand, unsharded.

Nothing here comes from the library's core but the models' starting values.
"""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import GPT, Block, preset

STEPS = 10


class LinenBlock(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        h = nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(h), None


class LinenTransformer(nn.Module):
    scan: bool = True

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16)(tokens)
        if self.scan:
            layers = nn.scan(LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            x, _ = layers(16)(x, None)
        else:
            for i in range(2):
                x, _ = LinenBlock(16, name=f"layer_{i}")(x)
        return nn.Dense(32)(nn.LayerNorm()(x))


class CNN(nnx.Module):
    def __init__(self, *, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.wide = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.norm(self.conv(images)))
        return self.head(nnx.relu(self.wide(x)).mean((1, 2)))


def gpt(scan: bool, **overrides: Any) -> Callable[[nnx.Rngs], GPT]:
    config = preset(
        "tiny", vocab_size=32, sequence_length=8, layers=2, width=16, heads=2, scan_layers=scan, **overrides
    )
    return lambda rngs: GPT(config, rngs=rngs)


def linen_loss(model, batch):
    logits = model(batch["tokens"][:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return losses.sum(), losses.size


def image_loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]).astype(jnp.float32), batch["y"])
    return losses.sum(), losses.size


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its loss, its units, and batches of 32 rows."""

    model: Any
    loss: Callable[..., Any]
    units: Any
    image: bool = False

    @property
    def inputs(self) -> dict[str, Any]:
        return {"inputs": (jnp.zeros((1, 8), jnp.int32),)} if isinstance(self.model, nn.Module) else {}

    def batch(self, step: int, rows: int = 32) -> dict[str, np.ndarray]:
        random = np.random.default_rng(step)
        if self.image:
            labels = random.integers(0, 8, rows).astype(np.int32)
            images = random.normal(size=(rows, 6, 6, 3)) + labels[:, None, None, None]
            return {"x": images.astype(np.float32), "y": labels}
        tokens = random.integers(0, 32, (rows, 9)).astype(np.int32)
        # Uneven masks: a mean of means would show.
        mask = (np.arange(8)[None] < random.integers(1, 9, (rows, 1))).astype(np.float32)
        return {"tokens": tokens, "mask": mask} if self.loss is next_token_loss else {"tokens": tokens}


CASES = {
    "nnx-gpt-scanned": Case(gpt(True), next_token_loss, (Block,)),
    "nnx-gpt-unrolled": Case(gpt(False), next_token_loss, (Block,)),
    "linen-transformer": Case(LinenTransformer(), linen_loss, ("LinenBlock",)),
    "nnx-cnn-batchnorm": Case(CNN, image_loss, (nnx.Conv,), image=True),
}


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-3, eps=1e-6)


def make_model(case: Case) -> Any:
    """`fully_shard` wants a function of rngs."""
    return (lambda rngs: CNN(rngs=rngs)) if case.model is CNN else case.model


@cache
def control(name: str, accumulation: int, clip: float | None = None) -> tuple[list[float], dict[str, np.ndarray]]:
    """(losses, final parameters by path) of a run on one device, in plain JAX, microbatch after microbatch."""
    case = CASES[name]
    params, rest, apply = _start(case)
    tx = optimizer()
    opt_state = tx.init(params)

    @jax.jit
    def gradients(params, rest, batch):
        def loss(params):
            (total, count), after = apply(params, rest, batch)
            return total, (count, after)

        (total, (count, after)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return grads, total, count, after

    @jax.jit
    def update(params, opt_state, grads, count):
        grads = jax.tree.map(lambda g: g / count, grads)
        if clip is not None:
            scale = jnp.minimum(1.0, clip / optax.tree.norm(grads))
            grads = jax.tree.map(lambda g: g * scale, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    losses = []
    for step in range(STEPS):
        sums = None
        for part in microbatches(case.batch(step), accumulation):
            grads, total, count, rest = gradients(params, rest, part)
            found = (grads, total, jnp.float32(count))
            sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
        grads, total, count = sums
        losses.append(float(total / count))
        params, opt_state = update(params, opt_state, grads, count)
    return losses, by_path(params)


def microbatches(batch: dict[str, np.ndarray], accumulation: int) -> list[dict[str, np.ndarray]]:
    return [{key: np.split(value, accumulation)[i] for key, value in batch.items()} for i in range(accumulation)]


def _start(case: Case) -> tuple[Any, Any, Callable[..., Any]]:
    """(params, rest, apply) with the values that `fully_shard(...).init(seed=0)` starts from, made unsharded."""
    key, _ = jax.random.split(jax.random.key(0))
    if isinstance(case.model, nn.Module):
        params_key, dropout_key = jax.random.split(key, 2)
        variables = case.model.init({"params": params_key, "dropout": dropout_key}, *case.inputs["inputs"])

        def apply_linen(params, rest, batch):
            bound = case.model.bind({"params": params})
            return case.loss(bound, batch), rest

        return variables["params"], {}, apply_linen
    graphdef, params, rest = nnx.split(make_model(case)(nnx.Rngs(key)), nnx.Param, ...)

    def apply_nnx(params, rest, batch):
        model = nnx.merge(graphdef, params, rest, copy=True)
        out = case.loss(model, batch)
        return out, nnx.state(model, nnx.Not(nnx.Param))

    return params, rest, apply_nnx


def by_path(params: Any) -> dict[str, np.ndarray]:
    """{slash-joined path: array}, for NNX states and nested dicts alike."""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    keys = {jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): leaf for path, leaf in flat}
    return {path: np.asarray(leaf, np.float32) for path, leaf in keys.items()}
