"""The units that are chosen when the user names none, and the steps that cannot run by them.

Compiles small steps: that units change no loss is compared with the whole model as the unit, and
once with one device.
"""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import CASES, Case, Chain, check, gpt, on_eight, squares, train, train_unsharded
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.tree import flatten
from fsdp_jax.units.auto_wrap import choose_units
from fsdp_jax.units.nnx import NnxModel

ROWS = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}


class Block(nnx.Module):
    def __init__(self, rngs, width=8):
        self.up, self.down = nnx.Linear(8, width, rngs=rngs), nnx.Linear(width, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))

    def _hidden(self, x):
        return self.up(x)


class Counting(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return super().__call__(x)


class Blocks(Chain):
    def __init__(self, rngs, block=Block, count=3):
        super().__init__([block(rngs) for _ in range(count)])


class Net(nnx.Module):
    """A model of blocks, run as `forward` says."""

    def __init__(self, rngs, forward=None, inner=Blocks):
        self.body, self.head = inner(rngs), nnx.Linear(8, 8, rngs=rngs)
        self.forward = forward

    def __call__(self, x):
        x = self.body(x) if self.forward is None else self.forward(self.body.layers, x)
        return self.head(x)


class Experts(nnx.Module):
    """A block most of whose parameters are in its experts."""

    def __init__(self, rngs):
        self.mix, self.experts = nnx.Linear(8, 8, rngs=rngs), Blocks(rngs, partial(Block, width=32))

    def __call__(self, x):
        return self.experts(self.mix(x))


class Stages(nnx.Module):
    """Three stages of blocks, one of which has most of them."""

    def __init__(self, rngs):
        self.stages = nnx.List([Blocks(rngs, count=count) for count in (2, 2, 9)])


class Towers(nnx.Module):
    def __init__(self, rngs):
        self.text, self.image = Blocks(rngs), Blocks(rngs)


class EncoderDecoder(nnx.Module):
    def __init__(self, rngs):
        self.encoder, self.decoder = Blocks(rngs, count=2), Blocks(rngs, Experts, 2)


class Shared(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Block(rngs)] * 3)


UNITS = [
    (gpt(False), {"blocks/0", "blocks/1"}),
    (gpt(True), {"blocks"}),
    (EncoderDecoder, {f"{part}/layers/{i}" for part in ("encoder", "decoder") for i in (0, 1)}),
    (lambda rngs: Blocks(rngs, Experts), {"layers/0", "layers/1", "layers/2"}),
    (lambda rngs: Blocks(rngs, Experts, 2), {"layers/0", "layers/1"}),
    (Stages, {"stages/0", "stages/1", *(f"stages/2/layers/{i}" for i in range(9))}),
    (Towers, {f"{tower}/layers/{i}" for tower in ("text", "image") for i in range(3)}),
    (Block, {"up", "down"}),
    (Shared, {""}),
    (lambda rngs: nnx.Linear(8, 8, rngs=rngs), {""}),
]


def test_the_outermost_repeated_modules_are_the_units():
    chosen = []
    for model, _ in UNITS:
        adapter = NnxModel(model)
        shapes = {path: leaf.shape for path, leaf in flatten(adapter.params).items()}
        owners = choose_units(adapter.modules, "auto", shapes, adapter.stacked)
        chosen.append({unit for unit in owners.values() if unit is not None})
    assert chosen == [units for _, units in UNITS]


def make_step(make_model, units=None, loss=squares, local_batch=False):
    settings = {} if units is None else {"units": units}
    sharded = on_eight(lambda rngs: make_model(rngs), optax.adam(1e-2), **settings)
    return sharded, sharded.make_train_step(loss, local_batch=local_batch)


def steps(*args, **settings):
    """(losses of two steps, how the step is gathered)"""
    sharded, step = make_step(*args, **settings)
    state = sharded.init(0)
    state, first = step(state, ROWS)
    _, second = step(state, ROWS)
    return [float(first["loss"]), float(second["loss"])], step.plan.layout.units


def chain(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def twice_and_count(layers, x):
    """Reads what the blocks have counted in their attributes."""
    x = chain(layers, chain(layers, x))
    return x * sum(layer.calls for layer in layers)


def in_a_loop(layers, x):
    return jax.lax.scan(lambda x, _: (chain(layers, x), None), x, None, length=3)[0]


def in_a_branch(layers, x):
    branches = [lambda x, layer=layer: layer(x) for layer in layers[:2]]
    return jax.lax.cond(jnp.sum(x) > 0, *branches, layers[2](x))


def by_private_methods(layers, x):
    for layer in layers:
        x = layer._hidden(x)
    return x


def reads_weights(layers, x):
    return chain(layers, x) @ layers[0].up.kernel[...]


@pytest.mark.parametrize(
    ("forward", "local_batch"),
    [
        pytest.param(chain, True, marks=pytest.mark.long),
        pytest.param(
            twice_and_count,
            False,
            marks=[
                pytest.mark.long,
                # The counts are read in the same step: that they are not kept changes nothing.
                pytest.mark.filterwarnings("ignore:the step sets 'body/layers/./calls'"),
            ],
        ),
        pytest.param(in_a_branch, False, marks=pytest.mark.long),
        (by_private_methods, False),
        pytest.param(reads_weights, False, marks=pytest.mark.long),
    ],
)
def test_whatever_runs_with_the_whole_model_runs_by_default(forward, local_batch):
    block = Counting if forward is twice_and_count else Block
    model = partial(Net, forward=forward, inner=partial(Blocks, block=block))
    found, units = steps(model, local_batch=local_batch)
    expected, _ = steps(model, "model", local_batch=local_batch)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert "outermost repeated" in units


def test_blocks_in_a_loop_of_the_model_are_reported():
    model = partial(Net, forward=in_a_loop, inner=Blocks)
    with pytest.warns(fsdp.SlowerWarning, match=r"gathered 3 times.*inside a loop"):
        make_step(model)[1].lower(ROWS)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::fsdp_jax.SlowerWarning")
def test_blocks_in_a_loop_of_the_model_change_no_number():
    model = partial(Net, forward=in_a_loop, inner=Blocks)
    np.testing.assert_allclose(steps(model)[0], steps(model, "model")[0], rtol=1e-6)


def test_a_branch_that_devices_may_take_differently_is_refused():
    """One device would wait in a gather for others that never come."""
    model = partial(Net, forward=in_a_branch, inner=Blocks)
    with refused("devices may take this branch differently"):
        make_step(model, local_batch=True)[1].lower(ROWS)
    make_step(model, "model", local_batch=True)[1].lower(ROWS)


def test_an_error_of_the_loss_is_the_users_own():
    _, step = make_step(Net, loss=lambda model, batch: (model(batch["y"]).sum(), 16))
    with pytest.raises(KeyError, match="'y'"):
        step.lower(ROWS)


def test_a_weight_read_outside_its_block_is_refused_locally():
    """With the whole model as the unit, a penalty on it would count once per device."""
    model = partial(Net, forward=reads_weights, inner=partial(Blocks, block=Block))
    with pytest.raises(ValueError, match="used outside its unit") as caught:
        make_step(model, local_batch=True)[1].lower(ROWS)
    assert "leave local_batch out" in str(caught.value)
    assert "used at test_automatic_units.py:" in str(caught.value)


def test_generation_in_a_loop_says_that_it_gathers_in_every_turn():
    def generate(model, x):
        return jax.lax.fori_loop(0, 3, lambda _, x: model(x), x)

    def run(units):
        sharded = on_eight(Net, units=units)
        return sharded.apply(generate)(sharded.init(0), ROWS["x"])

    with pytest.warns(fsdp.SlowerWarning, match=r"'body/layers/0' is gathered 3 times"):
        found = run("auto")
    np.testing.assert_allclose(found, run("model"), rtol=1e-6)


@pytest.mark.long
def test_the_default_trains_as_one_device_does():
    case = CASES["nnx-gpt-unrolled"]
    automatic = Case(case.model, case.loss, "auto", case.image)
    found, step = train(automatic, fsdp.make_mesh(data=8), steps=3, accumulation=2)
    check(found, train_unsharded(case, 2, steps=3))
    assert "Block" in step.plan.layout.units


def test_units_that_nobody_chose_cast_nothing():
    """A residual stream in float32 stays so, as with the whole model as the unit; that is told."""
    seen, told = [], "4 of 6 weights run in a wider dtype(?s:.*)units that you name cast theirs"

    class Watched(Block):
        def __call__(self, x):
            seen.append(x.dtype)
            return super().__call__(x).astype(jnp.float32)

    for units, said in (
        ("auto", pytest.warns(fsdp.SlowerWarning, match=told)),
        ([Watched], nullcontext()),
    ):
        sharded = fsdp.fully_shard(
            lambda rngs: Blocks(rngs, Watched),
            optax.sgd(0.1),
            fsdp.make_mesh(data=8),
            units=units,
            precision=fsdp.Precision(compute="bfloat16"),
        )
        with said:
            sharded.make_train_step(squares).lower(ROWS)
    assert list(map(str, seen)) == ["bfloat16", "float32", "float32"] + ["bfloat16"] * 3


def test_the_layout_says_what_was_chosen():
    def layout(model, **settings):
        mesh = fsdp.make_mesh(data=8)
        return fsdp.fully_shard(lambda rngs: model(rngs), optax.sgd(0.1), mesh, **settings).layout

    last = str(layout(Net)).splitlines()[-1]
    assert last == "units: 3 of Block ('body/layers/0'): 86% of the parameters" + (
        " (the outermost repeated modules)"
    )
    assert str(layout(Net, units=[Block])).endswith("86% of the parameters")
    assert "units: the whole model (no repeated modules" in str(layout(Shared))
    assert "units:" not in str(layout(Net, strategy="zero1"))


class Wide(nnx.Module):
    def __init__(self, rngs):
        self.only = nnx.Linear(2048, 8192, use_bias=False, rngs=rngs)


def test_a_large_model_without_repeated_modules_is_reported():
    make = partial(fsdp.fully_shard, lambda rngs: Wide(rngs), optax.sgd(0.1))
    text = "the whole model is gathered at once, 64 MiB on every device: no repeated modules"
    with pytest.warns(fsdp.SlowerWarning, match=text):
        make(fsdp.make_mesh(data=8))
    # A warning would be an error.
    make(fsdp.make_mesh(data=8), units="model")
    make(fsdp.make_mesh(data=8), "zero2")
    make(fsdp.make_mesh(data=1, devices=jax.devices()[:1]))
    make(fsdp.make_mesh(data=8), precision=fsdp.Precision(compute="bfloat16"))
