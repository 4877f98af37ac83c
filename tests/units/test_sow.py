"""What a model sows reaches the loss, with gradients; a stream that it draws from is given.

Compiles small steps, whose losses and gradients are compared with plain Flax: a trace has none.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.testing import certify

BATCH = {"x": np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)}
INPUTS = (jax.ShapeDtypeStruct((1, 8), jnp.float32),)
STACKED = {"split_rngs": {"params": True, "noise": True}, "length": 2}
SOWN = {"losses": 0, "intermediates": 0}


class Block(nn.Module):
    noise: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        y = jnp.tanh(nn.Dense(8)(x))
        if self.noise:
            y += jax.random.normal(self.make_rng("noise"), y.shape)
        self.sow("losses", "squares", (y**2).sum())
        self.sow("intermediates", "y", y)
        return x + y, None


KINDS = {"": Block, "remat": nn.remat(Block), "jit": nn.jit(Block)}


class Model(nn.Module):
    """Two blocks; `wrap` says how they are called, `passed` what a scan passes on."""

    wrap: str = ""
    noise: bool = False
    passed: tuple[str, ...] = ("losses", "intermediates")

    @nn.compact
    def __call__(self, x):
        if self.wrap == "scan":
            axes = {"params": 0} | dict.fromkeys(self.passed, 0)
            x, _ = nn.scan(Block, variable_axes=axes, **STACKED)(self.noise)(x, None)
        elif self.wrap == "shared":
            block = Block(self.noise)
            x = block(block(x)[0])[0]
        else:
            for number in range(2):
                x, _ = KINDS[self.wrap](self.noise, name=f"block_{number}")(x)
        # A sum over calls, not a tuple of them.
        self.sow("losses", "total", x.sum(), lambda a, b: a + b, lambda: jnp.zeros(()))
        return nn.Dense(8)(x)


def of_sown(y, variables):
    auxiliary = sum(jnp.sum(each) for each in jax.tree.leaves(variables["losses"]))
    values = [jnp.sum(each) for each in jax.tree.leaves(variables["intermediates"])]
    return (y**2).sum() + 0.1 * auxiliary, y.shape[0], {"sown": (len(values) * 1.0, None)}


def loss(model, batch):
    y = model(batch["x"])
    return of_sown(y, model.variables)


def shard(model, units=(Block,), **settings):
    inputs = {"inputs": INPUTS} if isinstance(model, nn.Module) else {}
    mesh, tx = fsdp.make_mesh(data=8), optax.sgd(0.1)
    return fsdp.fully_shard(model, tx, mesh, units=units, min_size=8, **inputs, **settings)


class Reading(Model):
    def of_variables(self):
        return self.variables.get("losses", {})

    def of_get_variable(self):
        return self.get_variable("losses", "total")

    def of_has_variable(self):
        return float(self.has_variable("losses", "total"))


READS = {
    "in a method": lambda model: model.of_variables(),
    "a variable in a method": lambda model: model.of_get_variable(),
    "a variable": lambda model: model.get_variable("losses", "total"),
    "whether there is one": lambda model: model.of_has_variable(),
}


def test_what_is_sown_is_there_wherever_the_model_is_asked():
    def auxiliary(model, batch):
        y = model(batch["x"])
        sums = {
            name: sum(jnp.sum(each) for each in jax.tree.leaves(read(model)))
            for name, read in READS.items()
        }
        metrics = {name: (value, None) for name, value in sums.items()}
        return (y**2).sum() + sum(sums.values()), y.shape[0], metrics

    sharded = shard(Reading())
    state = sharded.init(0)
    variables = {"params": jax.device_get(state.params)}
    plain = jax.jit(
        lambda variables, batch: Reading().apply(
            variables, batch, method=lambda model, batch: auxiliary(model, batch), mutable="losses"
        )[0]
    )
    total, _, expected = plain(variables, BATCH)
    _, metrics = sharded.make_train_step(auxiliary)(state, BATCH)
    np.testing.assert_allclose(metrics["loss"] * 32, total, rtol=1e-5)
    for name, (value, _) in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


LOCAL = {"local_batch": True, "accumulation": 2}


@partial(jax.jit, static_argnums=0)
def loss_and_norm(model, params):
    def total(params):
        y, sown = model.apply({"params": params}, BATCH["x"], mutable=["losses", "intermediates"])
        return of_sown(y, sown)[0] / 32

    value, gradients = jax.value_and_grad(total)(params)
    return value, optax.tree.norm(gradients)


def control(model, state):
    """The loss and the gradient norm of one device, in plain Flax."""
    value, norm = loss_and_norm(model, jax.tree.map(np.asarray, state.params))
    return float(value), float(norm)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("wrap", "settings"),
    [
        ("shared", {}),
        ("scan", {"prefetch": "pre"} | LOCAL),
        pytest.param("", {"units": "model"} | LOCAL, marks=LONG),
        pytest.param("remat", {"prefetch": "pre"} | LOCAL, marks=LONG),
        pytest.param("jit", {}, marks=LONG),
    ],
)
@pytest.mark.filterwarnings("ignore::fsdp_jax.SlowerWarning")  # nothing to prefetch
def test_what_a_linen_model_sows_reaches_the_loss(wrap, settings):
    settings = dict(settings)
    fixed = {name: settings.pop(name) for name in ("units", "prefetch") if name in settings}
    sharded = shard(Model(wrap), **fixed)
    state = sharded.init(0)
    assert state.model_state == {}, "what is sown is no state"
    expected = control(Model(wrap), state)
    step = sharded.make_train_step(loss, **settings)
    for _ in range(2):
        state, metrics = step(state, BATCH)
        found = float(metrics["loss"]), float(metrics["grad_norm"])
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        expected = control(Model(wrap), state)
    values = 1 if wrap == "scan" else 2  # stacked
    calls = 1 if not settings else 16  # microbatches x devices
    assert float(metrics["sown"]) == values * calls, "none is left of an earlier call"


def test_an_evaluation_reads_what_is_sown():
    sharded = shard(Model("scan"))
    state = sharded.init(0)
    total, count, _ = sharded.make_eval_step(loss)(state, BATCH)
    np.testing.assert_allclose(total / count, control(Model("scan"), state)[0], rtol=1e-5)


class Asking(nn.Module):
    """Computes something else where a collection is mutable."""

    @nn.compact
    def __call__(self, x):
        self.sow("losses", "sum", x.sum())
        wanted = self.is_mutable_collection("debug")
        if wanted:
            self.sow("debug", "sum", x.sum())
        return nn.Dense(8)(x) * (2.0 if wanted else 1.0)


def test_only_collections_that_this_loss_reads_are_mutable():
    sharded = shard(Asking(), units="model")
    state = sharded.init(0)

    def value_of(*read):
        def loss(model, batch):
            y = model(batch["x"])
            for name in read:
                jax.tree.map(jnp.sum, model.variables[name])
            return (y**2).sum(), 1

        return float(sharded.make_eval_step(loss)(state, BATCH)[0])

    without = value_of()
    np.testing.assert_allclose(value_of("debug"), 4 * without, rtol=1e-5)
    assert value_of() == without, "of a loss, whatever was traced before it"
    assert value_of("params") == without
    assert value_of("params", "losses") == without


def penalty(model, batch):
    model(batch["x"])
    return (model.variables["params"]["Dense_0"]["kernel"] ** 2).sum(), 1


READ = {
    "item": lambda losses: losses["ScanBlock_0"],
    "leaves": lambda losses: sum(jax.tree.leaves(losses)),
    "values": lambda losses: sum(losses.values()),
    "get": lambda losses: losses.get("total", 0.0),
    "if": lambda losses: 1.0 if losses else 0.0,
}


def test_a_value_that_a_scan_does_not_pass_on_is_refused():
    """Where it is read, in any way."""
    sharded = shard(Model("scan", passed=("intermediates",)))
    what = "sows into 'losses' does not reach"
    for read in READ.values():

        def reads(model, batch, read=read):
            y = model(batch["x"])
            return y.sum() + read(model.variables.get("losses", {})), 1

        with refused(what, where="ScanBlock_0", fix="'losses': 0}"):
            sharded.make_train_step(reads).trace(BATCH)
    sharded.make_train_step(penalty).trace(BATCH)  # which reads something else


class Guarded(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = Block()(x)[0]
        if self.is_mutable_collection("intermediates"):
            self.sow("intermediates", "large", (y > 0).sum())
        return y


def test_a_model_that_asks_whether_it_shall_sow_is_told_so():
    def guarded(model, batch):
        y = model(batch["x"])
        return y.sum(), 1, {"large": model.variables["intermediates"]["large"][0]}

    sharded = shard(Guarded())
    _, metrics = sharded.make_train_step(guarded, accumulation=2)(sharded.init(0), BATCH)
    assert float(metrics["large"]) > 0


def test_all_variables_are_read_as_one_tree():
    def of_all(model, batch):
        y = model(batch["x"])
        rest = {name: each for name, each in model.variables.items() if name != "params"}
        again = model.apply(model.variables, batch["x"])
        return (again**2).sum(), len(y), {"sown": (1.0 * len(jax.tree.leaves(rest)), None)}

    sharded = shard(Model("remat"))
    _, metrics = sharded.make_train_step(of_all)(sharded.init(0), BATCH)
    assert float(metrics["sown"]) == 5


class Late(nn.Module):
    """Makes state that it did not make as it was initialized."""

    @nn.compact
    def __call__(self, x):
        made = self.variable("stats", "first", lambda: jnp.zeros(()))
        if not self.is_initializing():
            self.variable("stats", "second", lambda: jnp.zeros(()))
        return nn.Dense(8)(x) + made.value


def test_state_that_is_made_in_a_step_is_an_error():
    step = shard(Late(), units="model").make_train_step(lambda m, b: (m(b["x"]).sum(), 1))
    with refused("makes new state in a step", where="stats/second"):
        step.trace(BATCH)


class Counting(nn.Module):
    @nn.compact
    def __call__(self, x):
        calls = self.variable("counters", "calls", lambda: jnp.zeros(()))
        calls.value += 1
        return nn.Dense(8)(x)


class Averaged(nn.Module):
    """Averages over the batch where its statistics are mutable, as published models do."""

    @nn.compact
    def __call__(self, x):
        trains = self.is_mutable_collection("batch_stats")
        x = nn.BatchNorm(use_running_average=not trains)(x)
        return nn.Dense(8)(x)


def test_an_evaluation_uses_the_running_average():
    def of_output(model, batch):
        return (model(batch["x"]) ** 2).sum(), 1

    sharded = shard(Averaged(), units="model")
    state, _ = sharded.make_train_step(of_output)(sharded.init(0), BATCH)
    variables = jax.tree.map(np.asarray, {"params": state.params, **state.model_state})
    plain = np.asarray(jax.jit(Averaged().apply)(variables, BATCH["x"]))
    total, _ = sharded.make_eval_step(of_output)(state, BATCH)
    np.testing.assert_allclose(total, (plain**2).sum(), rtol=1e-5)
    applied = sharded.apply(lambda model, x: model(x))(state, BATCH["x"])
    np.testing.assert_allclose(applied, plain, rtol=1e-5, atol=1e-6)


def test_an_evaluation_that_updates_state_says_so():
    sharded = shard(Counting(), units="model")
    with refused("updates its state in inference", fix="train=False"):
        sharded.make_eval_step(lambda m, b: (m(b["x"]).sum(), 1)).lower(BATCH)


# Random streams


@pytest.mark.long
def test_a_model_draws_from_any_stream_that_it_names():
    settings = {"strategies": ["full_shard"], "accumulation": [2], "steps": 2, "offloaded": False}
    certificate = certify(
        Model("scan", True), loss, BATCH, units=[Block], inputs=INPUTS, **settings
    )
    (row,) = certificate.rows
    assert {"metrics", "loss", "gradients"} < row.differences.keys()
    assert "| metrics" in str(certificate).replace("  ", "| ")


class Noise(nn.Module):
    """Noise of a scan's layers, side by side; drawn only when it is trained."""

    @nn.compact
    def __call__(self, x, train=False):
        def draw(module, carry, _):
            return carry, jax.random.normal(module.make_rng("noise"), ())

        scale = self.param("scale", nn.initializers.ones, (8, 8))
        if not train:
            return x @ scale
        _, drawn = nn.scan(draw, **STACKED)(self, 0.0, None)
        return x @ scale + drawn.sum(), drawn


def test_a_stream_that_only_training_names_is_split_over_layers():
    def noisy(model, batch):
        y, drawn = model(batch["x"], train=True)
        return (y**2).sum(), 1, {"drawn": (drawn, None)}

    sharded = shard(Noise(), units="model")
    state, metrics = sharded.make_train_step(noisy)(sharded.init(0), BATCH)
    first, second = metrics["drawn"]
    assert first != second
    _, again = sharded.make_train_step(noisy)(state, BATCH)
    assert not np.isin(again["drawn"], metrics["drawn"]).any(), "new in each step"


def test_an_evaluation_that_draws_says_how():
    sharded = shard(Model(noise=True))
    state = sharded.init(0)
    with refused("in inference mode", got="noise", fix="model.apply"):
        sharded.make_eval_step(loss).lower(BATCH)

    def given(model, batch, key):
        y = model.apply(model.variables, batch["x"], rngs={"noise": key})
        return (y**2).sum(), 32

    evaluate = sharded.make_eval_step(given)
    (total, count), again = (evaluate(state, BATCH) for _ in range(2))
    assert again == (total, count)
    step = sharded.make_train_step(given, local_batch=True)
    first, second = (step(sharded.init(0), BATCH)[1] for _ in range(2))
    assert float(first["loss"]) == float(second["loss"]) != float(total / count)
    assert float(first["grad_norm"]) > 0


# NNX


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        y = jnp.tanh(self.linear(x))
        self.sow(nnx.Intermediate, "squares", (y**2).sum())
        return x + y


class NnxModel(nnx.Module):
    def __init__(self, scan, rngs):
        self.scan = scan
        if scan:
            self.blocks = nnx.vmap(NnxBlock, in_axes=0)(rngs.split(2))
        else:
            self.one, self.two = NnxBlock(rngs), NnxBlock(rngs)
        nnx.capture(self, nnx.Intermediate)(jnp.ones((1, 8)))
        self.sow(nnx.Intermediate, "made", jnp.ones(3))

    def __call__(self, x):
        if self.scan:
            call = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return call(self.blocks, x)
        return self.two(self.one(x))


def captured(model, batch):
    y, sown = nnx.capture(model, nnx.Intermediate)(batch["x"])
    return (y**2).sum() + sum(jnp.sum(each) for each in jax.tree.leaves(sown)), len(y)


def popped(model, batch):
    y = model(batch["x"])
    sown = jax.tree.leaves(nnx.pop(model, nnx.Intermediate))
    return (y**2).sum() + sum(jnp.sum(each) for each in sown), len(y)


def left(model, batch):
    y = model(batch["x"])
    sown = jax.tree.leaves(nnx.state(model, nnx.Intermediate))
    return (y**2).sum() + sum(jnp.sum(each) for each in sown), len(y)


IGNORED = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")


@IGNORED
def test_what_an_nnx_model_sows_reaches_the_loss_and_is_no_state():
    sharded = shard(lambda rngs: NnxModel(True, rngs), [NnxBlock])
    state = sharded.init(0)
    assert jax.tree.leaves(state.model_state) == []
    graph, _ = nnx.split(sharded.model(state))
    params = nnx.state(sharded.model(state))
    total, count = jax.jit(lambda params: captured(nnx.merge(graph, params), BATCH))(params)
    _, metrics = sharded.make_train_step(captured, local_batch=True)(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], total / count, rtol=1e-5)


@IGNORED
@pytest.mark.long
@pytest.mark.parametrize("read", [captured, popped])
def test_what_an_nnx_model_sows_has_gradients(read):
    certify(
        lambda rngs: NnxModel(True, rngs),
        read,
        BATCH,
        units=[NnxBlock],
        strategies=["full_shard"],
        accumulation=[2],
        local_batch=True,
        offloaded=False,
        steps=2,
    )


@pytest.mark.parametrize("units", [[Block], pytest.param("model", marks=LONG)])
def test_what_flax_captures_in_a_unit_is_captured_once(units):
    def captured(model, batch):
        variables = {"params": model.variables["params"]}
        _, made = model.apply(variables, batch["x"], capture_intermediates=True, mutable=True)
        values = jax.tree.leaves(made["intermediates"])
        return sum(jnp.sum(x**2) for x in values), len(values)

    sharded = shard(Model(), units)
    state = sharded.init(0)
    variables = {"params": jax.device_get(state.params)}
    expected = jax.jit(lambda variables: captured(Model().bind(variables), BATCH))(variables)
    _, metrics = sharded.make_train_step(captured)(state, BATCH)
    assert int(metrics["count"]) == expected[1]
    np.testing.assert_allclose(metrics["loss"] * expected[1], expected[0], rtol=1e-5)
