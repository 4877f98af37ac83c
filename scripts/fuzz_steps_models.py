"""Models in NNX and Linen, losses, batches and optimizers of fuzz_steps.py, as a case says."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from fuzz_steps_cases import Loss, Net
from jax.tree_util import keystr, tree_map_with_path

import fsdp_jax as fsdp

Batch = dict[str, np.ndarray]
EPSILON = 1e-3  # of norms: a small variance amplifies rounding


# NNX


def _nnx_norm(net: Net, rngs: nnx.Rngs) -> Any:
    kinds = {"layer": nnx.LayerNorm, "rms": nnx.RMSNorm, "batch": nnx.BatchNorm}
    return None if net.norm == "none" else kinds[net.norm](net.width, epsilon=EPSILON, rngs=rngs)


class Block(nnx.Module):
    """Adds to its input, [B, T, D], a function of it."""

    def __init__(self, net: Net, *, rngs: nnx.Rngs) -> None:
        D = net.width
        settings: dict[str, Any] = {"use_bias": net.bias, "rngs": rngs}
        self.norm = _nnx_norm(net, rngs)
        self.kind = net.block
        if net.block == "attention":
            self.mix: Any = nnx.MultiHeadAttention(2, D, decode=False, **settings)
        if net.block == "conv":
            self.mix = nnx.Conv(D, D, (3,), **settings)
        self.up = nnx.Linear(D, net.hidden, **settings)
        self.down = nnx.Linear(net.hidden, D, **settings)
        self.dropout = nnx.Dropout(net.dropout, rngs=rngs) if net.dropout else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]."""
        h = x if self.norm is None else self.norm(x).astype(x.dtype)
        if self.kind != "mlp":
            h = h + self.mix(h)
        h = self.down(nnx.gelu(self.up(h)))
        return x + (h if self.dropout is None else self.dropout(h))


class Model(nnx.Module):
    """Blocks between an embedding, or a Linear, and a head."""

    def __init__(self, net: Net, *, rngs: nnx.Rngs) -> None:
        self.net = net
        if net.tokens:
            dtype = jnp.dtype(net.dtype or "float32")
            self.embed: Any = nnx.Embed(net.inputs, net.width, dtype=dtype, rngs=rngs)
        else:
            self.embed = nnx.Linear(net.inputs, net.width, use_bias=net.bias, rngs=rngs)
        positions = jax.random.normal(rngs.params(), (net.length, net.width))
        self.positions = nnx.Param(positions)
        self.scale = nnx.Param(jnp.ones(())) if net.scale else None
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32)) if net.calls else None
        if net.scan:
            split = nnx.split_rngs(splits=net.layers)
            make = nnx.vmap(lambda rngs: Block(net, rngs=rngs), in_axes=0, out_axes=0)
            self.blocks: Any = split(make)(rngs)
        elif net.shared:
            self.blocks = nnx.List([Block(net, rngs=rngs)] * 2)
        else:
            self.blocks = nnx.List([Block(net, rngs=rngs) for _ in range(net.layers)])
        if not net.tied:
            self.head = nnx.Linear(net.width, net.outputs, use_bias=net.bias, rngs=rngs)

    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Maps [B, T] or [B, T, F] to [B, T, outputs]."""
        del train  # the model itself knows
        if self.calls is not None:
            self.calls[...] += 1
        h = self.embed(x)
        h = h + self.positions[...].astype(h.dtype)[None]
        if self.scale is not None:
            h = h * self.scale[...].astype(h.dtype)
        if self.net.scan:
            run = nnx.scan(lambda block, h: block(h), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            h = run(self.blocks, h)
        else:
            for block in self.blocks:
                h = block(h)
        return self.embed.attend(h) if self.net.tied else self.head(h)


# Linen


class LinenBlock(nn.Module):
    """The same as `Block`; returns a pair, as `nn.scan` needs."""

    net: Net

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> Any:
        """Maps [B, T, D] to [B, T, D]."""
        net, h = self.net, x
        if net.norm == "batch":
            h = nn.BatchNorm(use_running_average=not train, epsilon=EPSILON, name="norm")(x)
        elif net.norm != "none":
            kind = nn.LayerNorm if net.norm == "layer" else nn.RMSNorm
            h = kind(epsilon=EPSILON, name="norm")(x)
        h = h.astype(x.dtype)
        if net.block == "attention":
            mix = nn.MultiHeadDotProductAttention(2, use_bias=net.bias, name="mix")
            h = h + mix(h)
        if net.block == "conv":
            h = h + nn.Conv(net.width, (3,), use_bias=net.bias, name="mix")(h)
        h = nn.gelu(nn.Dense(net.hidden, use_bias=net.bias, name="up")(h))
        h = nn.Dense(net.width, use_bias=net.bias, name="down")(h)
        if net.dropout:
            h = nn.Dropout(net.dropout)(h, deterministic=not train)
        return x + h.astype(x.dtype), None  # a scan keeps the dtype of what it carries


class LinenModel(nn.Module):
    """The same as `Model`."""

    net: Net

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Maps [B, T] or [B, T, F] to [B, T, outputs]."""
        net = self.net
        if net.tokens:
            dtype = None if net.dtype is None else jnp.dtype(net.dtype)
            embed: Any = nn.Embed(net.inputs, net.width, dtype=dtype, name="embed")
        else:
            embed = nn.Dense(net.width, use_bias=net.bias, name="embed")
        h = embed(x)
        normal = nn.initializers.normal(1.0)
        positions = self.param("positions", normal, (net.length, net.width))
        h = h + positions.astype(h.dtype)[None]
        if net.scale:
            h = h * self.param("scale", nn.initializers.ones, ()).astype(h.dtype)
        if net.calls:
            calls = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
            if train and not self.is_initializing():
                calls.value += 1
        if net.scan:
            scanned = nn.scan(
                LinenBlock,
                variable_axes={"params": 0, "batch_stats": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=net.layers,
            )
            h, _ = scanned(net, name="blocks")(h, train)
        elif net.shared:
            block = LinenBlock(net, name="blocks_0")
            for _ in range(2):
                h, _ = block(h, train)
        else:
            for number in range(net.layers):
                h, _ = LinenBlock(net, name=f"blocks_{number}")(h, train)
        if net.tied:
            return embed.attend(h)
        return nn.Dense(net.outputs, use_bias=net.bias, name="head")(h)


def make_model(net: Net) -> Any:
    """Makes what `fully_shard` takes: a function of rngs, or a Linen module."""
    if net.flax == "linen":
        return LinenModel(net)
    return lambda rngs: Model(net, rngs=rngs)


def example(net: Net) -> Any:
    """Makes an example input of a Linen model."""
    if net.tokens:
        return jnp.zeros((1, net.length), jnp.int32)
    return jnp.zeros((1, net.length, net.inputs), jnp.float32)


# Data and losses


def make_batch(net: Net, rows: int, seed: int) -> Batch:
    """Draws a batch; its masks are uneven, so that a mean of means would show."""
    generator = np.random.default_rng(seed)
    outputs = net.inputs if net.tied else net.outputs
    shape = rows, net.length
    if net.tokens:
        x = generator.integers(0, net.inputs, shape).astype(np.int32)
    else:
        x = generator.normal(size=(*shape, net.inputs)).astype(np.float32)
    kept = generator.integers(1, net.length + 1, (rows, 1))
    return {
        "x": x,
        "y": generator.normal(size=(*shape, outputs)).astype(np.float32),
        "mask": (np.arange(net.length)[None] < kept).astype(np.float32),
    }


def _squares(model: Any) -> jax.Array:
    """Adds up the squares of all parameters."""
    if isinstance(model, nn.Module):
        params = model.variables["params"]
    else:
        params = nnx.state(model, nnx.Param)
    return sum((jnp.sum(jnp.square(x)) for x in jax.tree.leaves(params)), jnp.zeros(()))


def make_loss(net: Net, loss: Loss, *, train: bool = True) -> Callable[..., Any]:
    """Makes `loss_fn(model, batch)`, or `loss_fn(model, batch, key)`."""

    def compute(model: Any, batch: Any, key: jax.Array | None) -> Any:
        mask = batch["mask"]
        if key is not None:  # some of the targets are left out
            mask = mask * jax.random.bernoulli(key, 0.75, mask.shape).astype(mask.dtype)
        predicted = model(batch["x"], train=train).astype(jnp.float32)
        errors = jnp.square(predicted - batch["y"]).mean(-1)
        total, count = (errors * mask).sum(), mask.sum() + 1e-3 * len(mask)
        if loss.penalty:
            total += 1e-2 * _squares(model) * count
        if loss.statistic:
            total += 0.1 * jnp.square(predicted.mean((0, 1))).sum() * count
        if not loss.metrics:
            return total, count
        sizes = jnp.abs(predicted)
        metrics = {
            "size": (sizes.mean(-1) * mask).sum(),
            "own": (sizes.sum(), sizes.size),
            "sums": {"bins": (sizes.sum((0, 1))[None], None), "weight": (mask.sum(), None)},
        }
        return total, count, metrics

    if loss.key:
        return lambda model, batch, key: compute(model, batch, key)
    return functools.partial(_without_key, compute)


def _without_key(compute: Callable[..., Any], model: Any, batch: Any) -> Any:
    return compute(model, batch, None)


# Optimizers: a gradient that vanishes but for rounding must not be scaled up, hence their `eps`.

LION = {"b1": 0.9, "b2": 0.99}
_NOT_TRAINED = "embed"


def name_of(path: Any) -> str:
    """Names a leaf, whatever the keys of its tree: `blocks/0/up/kernel`."""
    return keystr(path, simple=True, separator="/").removesuffix("/value")


def _is_kernel(params: Any) -> Any:
    return tree_map_with_path(lambda path, _: name_of(path).endswith("kernel"), params)


def _group(params: Any) -> Any:
    def group(path: Any, _: Any) -> str:
        name = name_of(path)
        if name.startswith(_NOT_TRAINED):
            return "none"
        return "kernel" if name.endswith("kernel") else "other"

    return tree_map_with_path(group, params)


def _matrices(params: Any) -> Any:
    """Numbers the dims of the kernels of hidden layers, for Muon; a dim before them stacks."""

    def numbers(path: Any, leaf: Any) -> Any:
        _, module, name = f"//{name_of(path)}".rsplit("/", 2)
        last = {"up": 2, "down": 2, "query": 3, "key": 3, "value": 3, "out": 3}.get(module)
        if name != "kernel" or last is None:
            return None
        dims = tuple(range(leaf.ndim - last, leaf.ndim))
        inputs = 2 if module == "out" else 1
        return optax.contrib.MuonDimensionNumbers(dims[:inputs], dims[inputs:])

    return tree_map_with_path(numbers, params)


def _schedule(step: Any) -> Any:
    return 1e-2 / (1.0 + step)


def make_optimizer(name: str, *, control: bool) -> Any:
    """Makes an optax transformation; only Muon is another for the control: optax's own."""
    adam = functools.partial(optax.adamw, eps=1e-2, b2=0.99)
    decayed = adam(1e-2, weight_decay=0.1, mask=_is_kernel)
    muon: Any = optax.contrib.muon if control else fsdp.optim.muon
    numbers = {"muon_weight_dimension_numbers": _matrices} if control else {}
    groups = {
        "kernel": optax.sgd(0.02, momentum=0.9),
        "other": adam(1e-2),
        "none": optax.set_to_zero(),
    }
    made: dict[str, Callable[[], Any]] = {
        "sgd": lambda: optax.sgd(0.02),
        "momentum": lambda: optax.sgd(0.02, momentum=0.9, nesterov=True),
        "adam": lambda: optax.adam(1e-2, eps=1e-2),
        "adamw-mask": lambda: decayed,
        "lion": lambda: optax.lion(1e-3, **LION),
        "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, eps=1e-3),
        "muon": lambda: muon(1e-2, eps=1e-2, weight_decay=0.1, **numbers),
        "multi-steps": lambda: optax.MultiSteps(adam(1e-2), 2).gradient_transformation(),
        "partition": lambda: optax.partition(groups, _group),
        "inject": lambda: optax.inject_hyperparams(adam)(_schedule, weight_decay=0.1),
        "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), decayed),
    }
    return made[name]()
