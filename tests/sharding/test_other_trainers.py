"""Trainers of other people's style, which take the rules, the lint and the optimizer's specs.

What a trainer adds for it ends with `# +`. The control is the same source without these lines. Both
are compiled and run: that the trainer's losses stay the same is the promise.
"""

import dataclasses
import inspect
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp

pytestmark = pytest.mark.releases

STEPS = 4
ROWS, LENGTH, VOCAB, WIDTH = 16, 16, 256, 128


def batches():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)] * STEPS


def next_token_loss(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# nanodo's style: a frozen config, Linen modules, functions closed over the model


@dataclasses.dataclass(frozen=True)
class DoConfig:
    D: int = WIDTH
    F: int = 4 * WIDTH
    N: int = 2
    V: int = VOCAB


class Mlp(nn.Module):
    cfg: DoConfig

    @nn.compact
    def __call__(self, x_BxLxD):
        x_BxLxF = nn.gelu(nn.Dense(self.cfg.F, use_bias=False)(x_BxLxD))
        return nn.Dense(self.cfg.D, use_bias=False)(x_BxLxF)


class TransformerDo(nn.Module):
    docfg: DoConfig

    def setup(self):
        cfg = self.docfg
        self.embed = nn.Embed(cfg.V, cfg.D)
        self.blocks = [Mlp(cfg) for _ in range(cfg.N)]
        self.norm = nn.LayerNorm(use_bias=False)

    def __call__(self, y_BxL):
        x = self.embed(y_BxL)
        for block in self.blocks:
            x = x + block(self.norm(x))
        return self.embed.attend(self.norm(x))


def nanodo():
    cfg = DoConfig()
    model = TransformerDo(cfg)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def init_train_state(rng):
        params = model.init(rng, jnp.zeros((1, LENGTH), jnp.int32))
        return {"params": params, "opt_state": tx.init(params), "step": jnp.array(0)}

    def train_step(state, in_BxL):
        def loss_fn(params):
            return next_token_loss(model.apply(params, in_BxL[:, :-1]), in_BxL)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))  # +
    params = jax.eval_shape(init_train_state, jax.random.key(0))["params"]  # +
    assert fsdp.lint(params, mesh) == []  # +
    specs = fsdp.partition_specs(params, mesh)  # +
    opt_specs = fsdp.optimizer_specs(tx, params, specs, mesh)  # +
    specs = {"params": specs, "opt_state": opt_specs, "step": P()}  # +
    shardings = jax.tree.map(partial(NamedSharding, mesh), specs)  # +
    init_train_state = jax.jit(init_train_state, out_shardings=shardings)  # +
    arguments = (shardings, NamedSharding(mesh, P("data")))  # +
    train_step = jax.jit(train_step, in_shardings=arguments, out_shardings=(shardings, None))  # +
    state = jax.jit(init_train_state)(jax.random.key(0))
    train_step = jax.jit(train_step, donate_argnums=0)
    losses = []
    for in_BxL in batches():
        state, loss = train_step(state, in_BxL)
        losses.append(loss)
    return losses, state["params"], state["opt_state"]


# The lm1b example of Flax: logical names, a table of rules in the config, get_partition_spec


AXIS_RULES = (
    ("activation_batch", "data"),
    ("vocab", "fsdp"),
    ("embed", "fsdp"),
    ("mlp", ("fsdp", "tensor")),
    ("mlp", "tensor"),
    ("expert", None),
)


class Lm1b(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        init = nn.initializers.xavier_uniform()
        named = nn.with_logical_partitioning
        embedding = named(nn.initializers.normal(0.02), ("vocab", "embed"))
        y = nn.Embed(VOCAB, WIDTH, embedding_init=embedding)(inputs)
        h = nn.Dense(4 * WIDTH, kernel_init=named(init, ("embed", "mlp")), name="wi")(y)
        y = y + nn.Dense(WIDTH, kernel_init=named(init, ("mlp", "embed")), name="wo")(nn.relu(h))
        return nn.Dense(VOCAB, kernel_init=named(init, ("embed", "vocab")), name="logits")(y)


def lm1b():
    model = Lm1b()
    tx = optax.adamw(1e-3, b1=0.9, b2=0.98)

    def init_fn(rng):
        params = model.init(rng, jnp.ones((1, LENGTH), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def train_step(state, inputs):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, inputs[:, :-1])
            return next_token_loss(logits, inputs)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)  # +
    shapes = jax.eval_shape(init_fn, jax.random.key(0))  # +
    assert fsdp.lint(shapes.params, mesh, logical_axes=AXIS_RULES, axes="fsdp") == []  # +
    specs = fsdp.partition_specs(shapes.params, mesh, logical_axes=AXIS_RULES, axes="fsdp")  # +
    opt_specs = fsdp.optimizer_specs(tx, shapes.params, specs, mesh, axes="fsdp")  # +
    state_specs = shapes.replace(step=P(), params=specs, opt_state=opt_specs)  # +
    shardings = jax.tree.map(partial(NamedSharding, mesh), state_specs)  # +
    arguments = (shardings, NamedSharding(mesh, P(("data", "fsdp"))))  # +
    init_fn = jax.jit(init_fn, out_shardings=shardings)  # +
    train_step = jax.jit(train_step, in_shardings=arguments, out_shardings=(shardings, None))  # +
    state = init_fn(jax.random.key(0))
    p_train_step = jax.jit(train_step, donate_argnums=0)
    losses = []
    for inputs in batches():
        state, loss = p_train_step(state, inputs)
        losses.append(loss)
    return losses, state.params, state.opt_state


# The loop of the NNX guides: nnx.jit, nnx.Optimizer


class Guide(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.embed.attend(x + self.dropout(self.down(nnx.gelu(self.up(x)))))


def guide():
    tx = optax.adamw(1e-3)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))  # +

    def create_model():
        model = Guide(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        params = nnx.state(model, nnx.Param)  # +
        assert fsdp.lint(params, mesh) == []  # +
        specs = fsdp.partition_specs(params, mesh)  # +
        opt_specs = fsdp.optimizer_specs(tx, params, specs, mesh)  # +
        shardings = jax.tree.map(partial(NamedSharding, mesh), (specs, opt_specs))  # +
        state = jax.lax.with_sharding_constraint((params, optimizer.opt_state), shardings)  # +
        nnx.update(model, state[0])  # +
        nnx.update(optimizer.opt_state, nnx.state(state[1]))  # +
        return model, optimizer

    @nnx.jit
    def train_step(model, optimizer, tokens):
        tokens = jax.lax.with_sharding_constraint(tokens, NamedSharding(mesh, P("fsdp")))  # +

        def loss_fn(model):
            return next_token_loss(model(tokens[:, :-1]), tokens)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    model, optimizer = nnx.jit(create_model)()
    losses = [train_step(model, optimizer, tokens) for tokens in batches()]
    return losses, nnx.state(model, nnx.Param), nnx.state(optimizer.opt_state)


def bytes_held(tree):
    """(bytes of the arrays, bytes of them on the first device)."""
    arrays = jax.tree.leaves(tree)
    first = [array.addressable_shards[0].data for array in arrays]
    return sum(array.nbytes for array in arrays), sum(array.nbytes for array in first)


@pytest.mark.parametrize("trainer", [nanodo, pytest.param(lm1b, marks=pytest.mark.long), guide])
def test_a_trainer_takes_the_rules_in_ten_lines(trainer):
    lines = inspect.getsource(trainer).splitlines()
    added = [line for line in lines if line.endswith("# +")]
    assert len(added) <= 10
    for name in ("lint(", "partition_specs(", "optimizer_specs(", "NamedSharding"):
        assert any(name in line for line in added)

    losses, *state = trainer()
    names = dict(globals())
    exec("\n".join(line for line in lines if line not in added), names)
    expected, *unsharded = names[trainer.__name__]()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < losses[0]
    shards = 4 if trainer is lm1b else 8
    for tree, control in zip(state, unsharded, strict=True):
        total, held = bytes_held(tree)
        assert bytes_held(control) == (total, total)
        assert held < 1.1 * total / shards
