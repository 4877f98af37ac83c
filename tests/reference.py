"""What the tests compare the library with: small models, and unsharded training written by hand.

Nothing in the control comes from the library's core but the models' initial values. Below it are
the same run by the library, and a count of what a traced step gathers and reduces.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fsdp_jax as fsdp
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import GPT, Block, preset
from fsdp_jax.step.train_step import train_step

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
    layers: int = 2
    block: type[nn.Module] = LinenBlock

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16)(tokens)
        if self.scan:
            lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            layers = nn.scan(self.block, length=self.layers, **lifted)
            x, _ = layers(16)(x, None)
        else:
            for i in range(self.layers):
                x, _ = self.block(16, name=f"layer_{i}")(x)
        return nn.Dense(32)(nn.LayerNorm()(x))


class CNN(nnx.Module):
    norm_class = nnx.BatchNorm

    def __init__(self, *, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = self.norm_class(8, rngs=rngs)
        self.wide = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.norm(self.conv(images)))
        return self.head(nnx.relu(self.wide(x)).mean((1, 2)))


class Chain(nnx.Module):
    """Modules one after another."""

    def __init__(self, layers):
        self.layers = nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def gpt(scan: bool, **overrides: Any) -> Callable[[nnx.Rngs], GPT]:
    sizes = {"vocab_size": 32, "sequence_length": 8, "layers": 2, "width": 16, "heads": 2}
    config = preset("tiny", scan_layers=scan, **sizes | overrides)
    return lambda rngs: GPT(config, rngs=rngs)


def linen_loss(model, batch):
    logits = model(batch["tokens"][:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return losses.sum(), losses.size


def image_loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["x"]).astype(jnp.float32), batch["y"]
    )
    return losses.sum(), losses.size


def squares(model, batch):
    return jnp.sum(jnp.square(model(batch["x"]))), len(batch["x"])


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its loss, its units, and batches of 32 rows."""

    model: Any
    loss: Callable[..., Any]
    units: Any
    image: bool = False

    @property
    def inputs(self) -> dict[str, Any]:
        is_linen = isinstance(self.model, nn.Module)
        return {"inputs": (jnp.zeros((1, 8), jnp.int32),)} if is_linen else {}

    def batch(self, step: int, rows: int = 32) -> dict[str, np.ndarray]:
        random = np.random.default_rng(step)
        if self.image:
            labels = random.integers(0, 8, rows).astype(np.int32)
            images = random.normal(size=(rows, 6, 6, 3)) + labels[:, None, None, None]
            return {"x": images.astype(np.float32), "y": labels}
        tokens = random.integers(0, 32, (rows, 9)).astype(np.int32)
        # Uneven masks: a mean of means would show.
        mask = (np.arange(8)[None] < random.integers(1, 9, (rows, 1))).astype(np.float32)
        masked = self.loss is next_token_loss
        return {"tokens": tokens, "mask": mask} if masked else {"tokens": tokens}


CASES = {
    "nnx-gpt-scanned": Case(gpt(True), next_token_loss, (Block,)),
    "nnx-gpt-unrolled": Case(gpt(False), next_token_loss, (Block,)),
    "linen-transformer": Case(LinenTransformer(), linen_loss, ("LinenBlock",)),
    "nnx-cnn-batchnorm": Case(CNN, image_loss, (nnx.Conv,), image=True),
}


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-3, eps=1e-6)


def make_model(case: Case) -> Any:
    """The model as `fully_shard` takes it: a function of rngs, or a Linen module."""
    return (lambda rngs: case.model(rngs=rngs)) if isinstance(case.model, type) else case.model


def on_eight(
    model: Any,
    tx: optax.GradientTransformation | None = None,
    *,
    units: Any = "auto",
    min_size: int = 8,
    **settings: Any,
) -> fsdp.Sharded:
    """What trains a model on the eight devices, by default with SGD; an NNX class is made."""
    make = (lambda rngs: model(rngs=rngs)) if isinstance(model, type) else model
    mesh = fsdp.make_mesh(data=8)
    return fsdp.fully_shard(
        make, tx or optax.sgd(0.1), mesh, units=units, min_size=min_size, **settings
    )


Run = tuple[list[float], dict[str, np.ndarray]]
"""(losses, final parameters by path)"""


def control(name: str, accumulation: int, clip: float | None = None) -> Run:
    """An unsharded run of one of the CASES."""
    return train_unsharded(CASES[name], accumulation, clip)


@cache
def train_unsharded(
    case: Case,
    accumulation: int = 1,
    clip: float | None = None,
    steps: int = STEPS,
    make_optimizer: Callable[[], optax.GradientTransformation] = optimizer,
) -> Run:
    """Trains on one device, in plain JAX, microbatch after microbatch."""
    params, rest, apply = _start(case)
    tx = make_optimizer()
    opt_state = jax.jit(tx.init)(params)

    @jax.jit
    def add_gradients(sums, params, rest, batch):
        def loss(params):
            (total, count), after = apply(params, rest, batch)
            return total, (jnp.float32(count), after)

        (total, (count, after)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(jnp.add, sums, (grads, total, count)), after

    @jax.jit
    def update(sums, params, opt_state):
        grads, total, count = sums
        grads = jax.tree.map(lambda g: g / count, grads)
        if clip is not None:
            scale = jnp.minimum(1.0, clip / optax.tree.norm(grads))
            grads = jax.tree.map(lambda g: g * scale, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, total / count

    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params), np.float32(0), np.float32(0)
    losses = []
    for step in range(steps):
        sums = zeros
        for part in microbatches(case.batch(step), accumulation):
            sums, rest = add_gradients(sums, params, rest, part)
        params, opt_state, loss = update(sums, params, opt_state)
        losses.append(float(loss))
    return losses, by_path(params)


def losses_of(step: Callable[..., Any], state: Any, batches: Iterable[Any]) -> tuple[Any, Any]:
    """(losses, the state in the end) of steps on batches."""
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


def microbatches(batch: dict[str, np.ndarray], accumulation: int) -> list[dict[str, np.ndarray]]:
    return [
        {key: np.split(value, accumulation)[i] for key, value in batch.items()}
        for i in range(accumulation)
    ]


def _start(case: Case) -> tuple[Any, Any, Callable[..., Any]]:
    """(params, rest, apply), unsharded, with the initial values of `fully_shard(...).init(0)`."""
    key, _ = jax.random.split(jax.random.key(0))
    if isinstance(case.model, nn.Module):

        @jax.jit
        def start_linen():
            params_key, dropout_key = jax.random.split(key, 2)
            keys = {"params": params_key, "dropout": dropout_key}
            variables = case.model.init(keys, *case.inputs["inputs"])
            return variables.pop("params"), variables

        def apply_linen(params, rest, batch):
            run = nn.apply(lambda model: case.loss(model, batch), case.model, mutable=list(rest))
            out, after = run({"params": params, **rest})
            return out, rest | after

        return *start_linen(), apply_linen
    make = make_model(case)
    start_nnx = lambda: nnx.split(make(nnx.Rngs(key)), nnx.Param, ...)  # noqa: E731
    graphdef, *_ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(key))), nnx.Param, ...)
    attributes = [getattr(attribute, "value", None) for _, attribute in graphdef.attributes]
    if any(isinstance(value, jax.core.Tracer) for value in attributes):
        graphdef, *start = start_nnx()  # nnx takes an array for state, a traced one not
    else:
        start = jax.jit(lambda: start_nnx()[1:])()

    def apply_nnx(params, rest, batch):
        model = nnx.merge(graphdef, params, rest, copy=True)
        out = case.loss(model, batch)
        return out, nnx.state(model, nnx.Not(nnx.Param))

    return *start, apply_nnx


def by_path(params: Any) -> dict[str, np.ndarray]:
    """{slash-joined path: array}, for NNX states and nested dicts alike."""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    keys = {
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): leaf
        for path, leaf in flat
    }
    return {path: np.asarray(leaf, np.float32) for path, leaf in keys.items()}


Choice = tuple[Hashable, ...]


def pairs_of(case: Choice) -> set[tuple[Hashable, ...]]:
    """The pairs of values of a member of a product, with their positions."""
    return {(a, b, case[a], case[b]) for a, b in itertools.combinations(range(len(case)), 2)}


def covering(
    axes: Sequence[Iterable[Hashable]],
    *,
    first: Sequence[Choice] = (),
    possible: Callable[..., bool] | None = None,
) -> list[Choice]:
    """Members of a product that together have every pair of values that a possible member has.

    Args:
        axes: the values of each.
        first: members to begin with.
        possible: which members of the product there are; all of them if None.

    """
    product = [case for case in itertools.product(*axes) if possible is None or possible(*case)]
    chosen = list(first)
    missing = set().union(*map(pairs_of, product)).difference(*map(pairs_of, chosen))
    while missing:
        chosen.append(max(product, key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen


def covering_params(
    axes: Sequence[Iterable[Hashable]],
    *,
    first: Sequence[Choice] = (),
    possible: Callable[..., bool] | None = None,
    name: Callable[[Choice], str] | None = None,
    quick: int | None = None,
) -> list[Any]:
    """The members of a covering, for `parametrize`, until there are two of three pairs.

    Those that bring no value of an axis are `long`, and so are all but the first `quick` if that is
    given.
    """
    cases = covering(axes, first=first, possible=possible)
    total = len(set().union(*map(pairs_of, cases)))
    pairs: set[Any] = set()
    values: set[tuple[int, Hashable]] = set()
    params = []
    for number, case in enumerate(cases):
        brings = not set(enumerate(case)) <= values
        in_each_run = brings if quick is None else number < quick
        if not in_each_run and len(pairs) * 3 >= total * 2:  # each brings few
            continue
        marks = [] if in_each_run else [pytest.mark.long]
        params.append(pytest.param(*case, marks=marks, id=name and name(case)))
        pairs |= pairs_of(case)
        values |= set(enumerate(case))
    return params


def train(
    case: Case,
    mesh: jax.sharding.Mesh,
    strategy: str = "full_shard",
    *,
    steps: int = STEPS,
    accumulation: int = 1,
    deferred: bool = False,
    local_batch: bool = False,
    clip: float | None = None,
    make_optimizer: Callable[[], optax.GradientTransformation] = optimizer,
    **settings: Any,
) -> tuple[Run, fsdp.CompiledStep]:
    """Trains by the library; returns the run and its step."""
    sharded = fsdp.fully_shard(
        make_model(case),
        make_optimizer(),
        mesh,
        strategy,
        case.units,
        min_size=8,
        **case.inputs,
        **settings,
    )
    step = sharded.make_train_step(
        case.loss,
        accumulation=accumulation,
        deferred_reduction=deferred,
        local_batch=local_batch,
        clip=clip,
    )
    losses, state = losses_of(step, sharded.init(seed=0), map(case.batch, range(steps)))
    return (losses, by_path(sharded.to_checkpoint(state).params)), step


def check(found: Run, expected: Run, *, loss: float = 1e-5, params: float = 1e-4) -> None:
    """Asserts equal losses and parameters, to these relative tolerances."""
    np.testing.assert_allclose(found[0], expected[0], rtol=loss)
    assert found[1].keys() == expected[1].keys()
    for path, value in expected[1].items():
        np.testing.assert_allclose(found[1][path], value, atol=params, rtol=params, err_msg=path)


def traffic(sharded: fsdp.Sharded, step: fsdp.CompiledStep, batch: Any) -> Counter[tuple[str, str]]:
    """{(operation, parameter): executions per step} of the traced step, before XLA changes it.

    Operations are JAX's names, of those that communicate and of the fence before an annotated
    gather. The parameter is that of the scope around it; "" where there is none.
    """
    step.lower(batch)
    k = step.plan.accumulation
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((k, x.shape[0] // k, *x.shape[1:]), x.dtype), batch
    )
    traced = jax.make_jaxpr(lambda state, batch: train_step(step.plan, state, batch))(
        sharded.abstract_state(), rows
    )
    found: Counter[tuple[str, str]] = Counter()

    def visit(jaxpr: jex.Jaxpr, times: int) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in (
                "all_gather",
                "reduce_scatter",
                "psum",
                "all_to_all",
                "optimization_barrier",
            ):
                scope = re.search(r"fsdp\.\w+\[(.*?)\]", str(eqn.source_info.name_stack))
                found[eqn.primitive.name, scope.group(1) if scope else ""] += times
            for inner in jex.jaxprs_in_params(eqn.params):
                visit(inner, times * eqn.params.get("length", 1))

    visit(traced.jaxpr, 1)
    return found
