"""`prefetch="auto"`, the default: what it means where, and models that cannot be traced with it.

That it is the program of `pre`, or of `none`, is seen in the trace. Two steps are compiled, for
the values of a derivative that reads constants.
"""

import functools
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import gpt

import fsdp_jax as fsdp
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import Block
from fsdp_jax.prefetch.rewrite import call_prefetched
from fsdp_jax.step import xla_options
from fsdp_jax.step.xla_options import prefetches_by_default
from fsdp_jax.tree import flatten

TOKENS = {"tokens": np.arange(16 * 9, dtype=np.int32).reshape(16, 9) % 32}


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    """The step takes the CPU for a GPU, on which `auto` is `pre`."""
    monkeypatch.setattr(xla_options, "GPU", ("cpu",))


def sharded(model=None, strategy="full_shard", units=(Block,), **settings):
    make, mesh = model or gpt(True), fsdp.make_mesh(data=8)
    return fsdp.fully_shard(make, optax.adam(1e-2), mesh, strategy, units, min_size=8, **settings)


def train(model, loss, batch, **settings):
    """Trains two steps: (the losses, the parameters)."""
    step, state, losses = model.make_train_step(loss, **settings), model.init(0), []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, flatten(state.params)


def weighted(model, batch):
    """A loss whose custom derivative closes over an array of the batch."""
    tokens = batch["tokens"]
    weights = (tokens[:, 1:] % 3).astype(jnp.float32)

    @jax.custom_vjp
    def weigh(losses):
        return losses * weights

    weigh.defvjp(lambda losses: (losses * weights, None), lambda _, g: (g * weights,))
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return weigh(losses).sum(), weights.sum()


def test_auto_is_pre_on_gpus_where_units_are_gathered():
    for platform, strategy, expected in (
        ("gpu", "full_shard", True),
        ("cuda", "hybrid_shard", True),
        ("gpu", "shard_grad_op", False),  # gathers once a step
        ("tpu", "full_shard", False),
        ("cpu", "full_shard", False),
    ):
        device = SimpleNamespace(platform=platform)
        axes = SimpleNamespace(explicit_axes=())
        layout = SimpleNamespace(mesh=SimpleNamespace(devices=np.array([device] * 8)), axes=axes)
        own = sharded(strategy=strategy).make_train_step(next_token_loss).plan
        plan = SimpleNamespace(layout=layout, per_unit=own.per_unit)
        assert prefetches_by_default(plan) == expected, (platform, strategy)
        axes.explicit_axes = ("data",)
        assert not prefetches_by_default(plan)


def traced(model, loss=next_token_loss, batch=TOKENS, **settings):
    """A step, and its program as text."""
    step = model.make_train_step(loss, **settings)
    return step, str(step.trace(batch))


@pytest.mark.parametrize("local_batch", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_default_on_a_gpu_is_the_program_of_pre(cpu_as_gpu, local_batch):
    step, program = traced(sharded(), local_batch=local_batch)
    assert step.plan.prefetch == "pre"
    assert any("blocks" in path for path in step.report.prefetch.prefetched)
    assert program == traced(sharded(prefetch="pre"), local_batch=local_batch)[1]


def test_the_default_warns_of_nothing_that_it_cannot_move(cpu_as_gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = sharded(units="model").make_train_step(next_token_loss)
        step.lower(TOKENS)
    assert not step.report.prefetch.prefetched
    asked = sharded(units="model", prefetch="pre").make_train_step(next_token_loss)
    with pytest.warns(fsdp.SlowerWarning, match="no unit follows another"):
        asked.lower(TOKENS)


def test_a_loss_that_cannot_be_traced_with_it_is_trained_without(cpu_as_gpu):
    with pytest.raises(ValueError, match=r"another trace\n.*test_auto.*weighted(.*\n)+.*argument"):
        traced(sharded(prefetch="pre"), weighted)
    with pytest.warns(fsdp.SlowerWarning, match="prefetch: .* cannot be traced with it .*'none'"):
        step, program = traced(sharded(), weighted)
    assert step.plan.prefetch == "none"
    assert step.report.prefetch.prefetched == set()
    assert program == traced(sharded(prefetch="none"), weighted)[1]


@pytest.mark.long
def test_certify_compares_what_it_is_on_gpus(monkeypatch):
    compared = set()
    traced = call_prefetched

    def noted(fn, comms, when, *args):
        compared.add(when)
        return traced(fn, comms, when, *args)

    monkeypatch.setattr("fsdp_jax.step.train_step.call_prefetched", noted)
    few = {"strategies": ["full_shard"], "accumulation": [1], "trials": 1, "steps": 1}
    sharded().certify(next_token_loss, TOKENS, **few, offloaded=False)
    assert compared == {"pre"}


def test_a_warning_that_is_an_error_is_raised_at_each_call(cpu_as_gpu):
    model = sharded()
    step, state = model.make_train_step(weighted), model.init(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(fsdp.SlowerWarning, match="cannot be traced with it"):
                step(state, TOKENS)
    assert step.plan.prefetch == "pre"


TABLE = np.linspace(0.5, 1.5, 16, dtype=np.float32)[None]


@jax.custom_vjp
def scaled(x):
    """A function whose own derivative reads a constant of the module."""
    return x * TABLE


scaled.defvjp(lambda x: (x * TABLE, None), lambda _, g: (g * TABLE,))


class Scaled(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return x + scaled(jnp.tanh(self.linear(x)))


class Stack(nnx.Module):
    def __init__(self, scan, *, rngs):
        self.scan = scan
        if scan:
            self.blocks = nnx.vmap(lambda rngs: Scaled(rngs=rngs))(rngs.split(3))
        else:
            self.blocks = nnx.List(Scaled(rngs=rngs) for _ in range(3))

    def __call__(self, x):
        if self.scan:
            run = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return run(self.blocks, x)
        for block in self.blocks:
            x = block(x)
        return x


def squares(model, batch):
    return (model(batch["x"]) ** 2).sum(), batch["x"].shape[0]


ROWS = {"x": np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)}


def scaled_stack(scan, prefetch):
    return sharded(lambda rngs: Stack(scan, rngs=rngs), units=(Scaled,), prefetch=prefetch)


@pytest.mark.parametrize(
    ("scan", "local_batch"), [(True, False), (False, True), (True, True), (False, False)]
)
def test_a_derivative_that_reads_constants_is_moved(cpu_as_gpu, scan, local_batch):
    step, _ = traced(scaled_stack(scan, "auto"), squares, ROWS, local_batch=local_batch)
    assert len(step.report.prefetch.prefetched) == (2 if scan else 6)


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_moved_derivative_of_constants_has_the_same_results(scan):
    found, expected = (
        train(scaled_stack(scan, prefetch), squares, ROWS, local_batch=True)
        for prefetch in ("pre", "none")
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for path, value in expected[1].items():
        np.testing.assert_allclose(found[1][path], value, rtol=1e-4, atol=1e-5, err_msg=path)


def test_a_parameter_is_listed_once_where_one_gather_moves():
    def penalized(model, batch):
        total, pull_back = jax.vjp(lambda x: model(x).sum(), batch["x"])
        return total**2 + (pull_back(jnp.ones(()))[0] ** 2).sum(), batch["x"].shape[0]

    step = scaled_stack(False, "pre").make_train_step(penalized)
    with pytest.warns(fsdp.SlowerWarning, match="6 parameters are gathered where they are used"):
        step.lower(ROWS)
    report = step.report.prefetch
    assert len(report.moved) == 3
    assert len(report.not_prefetched) == 6
    assert report.prefetched == set()


def test_an_error_of_the_model_itself_is_raised_once(cpu_as_gpu):
    def loss(model, batch):
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels") as caught:
        sharded().make_train_step(loss).trace(TOKENS)
    assert caught.value.__context__ is None


def test_a_mistake_in_one_batch_does_not_cost_the_prefetch(cpu_as_gpu):
    step = sharded().make_train_step(next_token_loss)
    for wrong in ({"text": TOKENS["tokens"]}, {"tokens": TOKENS["tokens"][:, 0]}):
        with pytest.raises((KeyError, IndexError)):
            step.trace(wrong)
    step.trace(TOKENS)
    assert step.plan.prefetch == "pre"
    assert step.report.prefetch.prefetched


@pytest.mark.parametrize(
    "settings",
    [
        {"local_batch": True},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"accumulation": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_an_array_that_a_cache_keeps_for_the_next_trace_is_named(settings):
    @functools.cache
    def scale():
        return jnp.linspace(1.0, 2.0, 8)

    def loss(model, batch):
        total, count = next_token_loss(model, batch)[:2]
        return total * scale().mean(), count

    step = sharded(prefetch="none").make_train_step(loss, **settings)
    step.trace(TOKENS)
    twice = {"tokens": np.tile(TOKENS["tokens"], (2, 1))}
    with pytest.raises(
        ValueError, match=r"another trace\n.*test_auto(.*\n)+.* a cache .*\n.*NumPy"
    ):
        step.trace(twice)


def test_a_step_that_the_user_compiles_has_no_prefetch(cpu_as_gpu):
    model = sharded()
    step = jax.jit(model.pure_step(next_token_loss))
    text = str(jax.make_jaxpr(step)(model.abstract_state(), TOKENS))
    asked = sharded(prefetch="pre")
    moved = str(jax.make_jaxpr(asked.pure_step(next_token_loss))(asked.abstract_state(), TOKENS))
    none = sharded(prefetch="none")
    plain = str(jax.make_jaxpr(none.pure_step(next_token_loss))(none.abstract_state(), TOKENS))
    assert text.count("custom_vjp_call") == plain.count("custom_vjp_call")
    assert len(moved) != len(plain)
