"""Other models in a step: gathered by their own units, without a gradient, untouched.

Steps are compared with plain Flax and optax on one device. What a trace or the plan shows is not
compiled.
"""

import dataclasses
import functools
import re
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusals import not_refused
from small import in_the_same_memory

import fsdp_jax as fsdp
from fsdp_jax.certify.certificate import CertifyError
from fsdp_jax.contract.expected import expected_traffic
from fsdp_jax.optim import params_ema
from fsdp_jax.sharding.quantized import QuantizedBase
from fsdp_jax.step.traced_checks import _gathers
from fsdp_jax.tree import flatten

ROWS, WIDTH = 56, 12


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.up = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.up(x))


class Net(nnx.Module):
    """Two blocks, with the paths of `LinenNet` in its own family."""

    def __init__(self, rngs, width=WIDTH, out=WIDTH):
        self.enter = nnx.Linear(WIDTH, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(2)])
        self.leave = nnx.Linear(width, out, rngs=rngs)

    def __call__(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class LinenBlock(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return x + jnp.tanh(nn.Dense(self.width, name="up")(x))


class LinenNet(nn.Module):
    width: int = WIDTH
    out: int = WIDTH

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width, name="enter")(x)
        for number in range(2):
            x = LinenBlock(self.width, name=f"block_{number}")(x)
        return nn.Dense(self.out, name="leave")(x)


def shard(family, tx=None, devices=4, width=WIDTH, out=WIDTH, **settings):
    mesh = fsdp.make_mesh(devices=jax.devices()[:devices])
    settings = {"min_size": 8, **settings}
    if family == "nnx":
        make, settings["units"] = lambda rngs: Net(rngs, width, out), settings.get("units", [Block])
        return fsdp.fully_shard(make, tx or optax.identity(), mesh, **settings)
    settings = {"units": [LinenBlock], "inputs": (jnp.zeros((1, WIDTH)),), **settings}
    return fsdp.fully_shard(LinenNet(width, out), tx or optax.identity(), mesh, **settings)


def plain(sharded, state):
    """The model on one device, by Flax alone: (its parameters, a function of them and x)."""
    model = sharded.model(state)
    if isinstance(model, nnx.Module):
        graph, params = nnx.split(model)
        run = lambda params, x: nnx.merge(graph, params)(x)  # noqa: E731
    else:
        module, params = model.unbind()
        run = module.apply
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params), run


def same(sharded, state, params):
    found, _ = plain(sharded, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, params)


def batch(seed=0):
    x, y = np.random.default_rng(seed).normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    of_gan = {"noise": x, "images": y}
    return {"x": x, "y": y, **of_gan, "pair": np.arange(2 * ROWS).reshape(ROWS, 2) % WIDTH}


def distill(model, batch, teacher):
    wanted = jax.nn.softmax(teacher(batch["x"]))
    losses = -(wanted * jax.nn.log_softmax(model(batch["x"]))).sum(-1)
    return losses.sum(), losses.size


def prefer(model, batch, reference):
    """The loss of DPO, of pairs of classes for each row."""
    of = lambda logits: jnp.take_along_axis(jax.nn.log_softmax(logits), batch["pair"], 1)  # noqa: E731
    more = of(model(batch["x"])) - of(reference(batch["x"]))
    losses = -jax.nn.log_sigmoid(0.5 * (more[:, 0] - more[:, 1]))
    return losses.sum(), losses.size


def trained_by_hand(loss, model, tx, batches, **others):
    """(parameters, losses) after a step on each batch; `model`, `others`: as `plain` returns."""
    params, run = model
    fixed = {name: functools.partial(fn, values) for name, (values, fn) in others.items()}

    @jax.jit
    def step(params, opt_state, batch):
        def mean(params):
            total, count = loss(functools.partial(run, params), batch, **fixed)
            return total / count

        value, gradients = jax.value_and_grad(mean)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state, losses = tx.init(params), []
    for each in batches:
        params, opt_state, value = step(params, opt_state, each)
        losses.append(float(value))
    return params, losses


LONG = pytest.mark.long
STEPS = [batch(seed) for seed in range(3)]
LOCAL = {"local_batch": True, "accumulation": 2}
MORE = {"nnx in nnx": ("nnx", "nnx", 4, {}), "linen in linen": ("linen", "linen", 7, LOCAL)}
MORE |= {f"{n} devices": ("linen", "nnx", n, {}) for n in (1, 7)}
ON_HOST = {"teacher": {"offload": fsdp.Offload(params=True), "strategy": "shard_grad_op"}}
MORE |= {"on the host": ("nnx", "linen", 7, ON_HOST)}
MORE |= {"on the host, local": ("linen", "nnx", 4, ON_HOST | LOCAL)}
MORE |= {"local": ("linen", "nnx", 4, LOCAL), "1 device, local": ("nnx", "linen", 1, LOCAL)}


@pytest.mark.parametrize(
    ("family", "other", "devices", "settings"),
    [
        pytest.param("nnx", "linen", 7, {}, id="nnx, a linen teacher"),
        *(pytest.param(*case, marks=LONG, id=name) for name, case in MORE.items()),
    ],
)
def test_a_teacher_of_another_family_and_size_teaches_as_on_one_device(
    family, other, devices, settings
):
    tx, settings = optax.adam(1e-2), dict(settings)
    student = shard(family, tx, devices)
    teacher = shard(other, None, devices, 2 * WIDTH, **settings.pop("teacher", {}))
    state, of_teacher = student.init(0), teacher.init(1)
    expected, losses = trained_by_hand(
        distill, plain(student, state), tx, STEPS, teacher=plain(teacher, of_teacher)
    )
    before = jax.tree.map(np.asarray, of_teacher.params)
    step = student.make_train_step(distill, others={"teacher": teacher}, **settings)
    for each, wanted in zip(STEPS, losses, strict=True):
        state, metrics = step(state, each, teacher=of_teacher)
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    same(student, state, expected)
    jax.tree.map(np.testing.assert_array_equal, of_teacher.params, before)


@pytest.mark.parametrize(
    ("devices", "settings"),
    [(4, LOCAL), *(pytest.param(n, {}, marks=LONG) for n in (1, 4, 7))],
)
def test_a_reference_in_4_bits_prefers_as_on_one_device(devices, settings):
    """The policy and the reference are of one class: their modules have the same paths."""
    tx = optax.adam(1e-2)
    policy = shard("linen", tx, devices)
    base = {"frozen": ("kernel",), "base": QuantizedBase("nf4")}
    reference = shard("linen", None, devices, **base)
    state, of_reference = policy.init(0), reference.init(1)
    expected, losses = trained_by_hand(
        prefer, plain(policy, state), tx, STEPS, reference=plain(reference, of_reference)
    )
    step = policy.make_train_step(prefer, others={"reference": reference}, **settings)
    for each, wanted in zip(STEPS, losses, strict=True):
        state, metrics = step(state, each, reference=of_reference)
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    same(policy, state, expected)


PAGE = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text()
(GAN,) = re.findall(r"```python\n(def fool_loss.*?)```", PAGE, re.S)


def fully_shard(model, *args):
    """As the page calls it, for models that are smaller than those that it means."""
    settings = {"units": [Block], "min_size": 8}
    if isinstance(model, nn.Module):
        settings |= {"units": [LinenBlock], "inputs": (jnp.zeros((1, WIDTH)),)}
    return fsdp.fully_shard(model, *args, **settings)


@pytest.mark.parametrize("devices", [4, pytest.param(1, marks=LONG), pytest.param(7, marks=LONG)])
def test_the_gan_of_the_page_trains_as_on_one_device(devices):
    """The generator's loss is differentiated through the critic, and not by its parameters."""
    tx, batches = optax.adam(3e-3), [batch(seed) for seed in range(20)]
    names = {"jax": jax, "optax": optax, "fsdp_jax": SimpleNamespace(fully_shard=fully_shard)}
    names |= {"mesh": fsdp.make_mesh(devices=jax.devices()[:devices]), "batches": batches}
    names |= {"make_generator": lambda rngs: Net(rngs), "make_critic": LinenNet(out=1)}
    exec(GAN.replace("2e-4", "3e-3"), names)
    fool, tell = names["fool_loss"], names["tell_loss"]
    made, told = names["generator"], names["critic"]
    (g, run_g), (c, run_c) = plain(made, made.init(0)), plain(told, told.init(1))

    @jax.jit
    def by_hand(g, g_opt, c, c_opt, batch):
        def loss_g(g):
            total, count = fool(functools.partial(run_g, g), batch, functools.partial(run_c, c))
            return total / count

        updates, g_opt = tx.update(jax.grad(loss_g)(g), g_opt, g)
        g = optax.apply_updates(g, updates)

        def loss_c(c):
            total, count = tell(functools.partial(run_c, c), batch, functools.partial(run_g, g))
            return total / count

        updates, c_opt = tx.update(jax.grad(loss_c)(c), c_opt, c)
        return g, g_opt, optax.apply_updates(c, updates), c_opt

    g_opt, c_opt = tx.init(g), tx.init(c)
    for each in batches:
        g, g_opt, c, c_opt = by_hand(g, g_opt, c, c_opt, each)
    same(made, names["of_generator"], g)
    same(told, names["of_critic"], c)
    others = {**names["fool"].plan.others, **names["tell"].plan.others}
    found = {name: other.in_backward for name, other in others.items()}
    assert found == {"critic": True, "generator": False}


def fools(model, batch, critic):
    losses = jax.nn.softplus(-critic(model(batch["x"])))
    return losses.sum(), len(losses)


def to_average(model, batch, average):
    errors = model(batch["x"]) - batch["y"], model(batch["x"]) - average(batch["x"])
    losses = sum((each**2).sum(-1) for each in errors)
    return losses.sum(), losses.size


def test_the_average_of_the_model_itself_is_that_before_the_step():
    decay, tx = 0.5, optax.sgd(0.05)
    model = shard("linen", optax.chain(tx, params_ema(decay)), strategy="zero1")
    state = model.init(0)
    params, run = plain(model, state)
    average = params
    step = model.make_train_step(to_average, others={"average": "ema"})
    evaluate = model.make_eval_step(to_average, others={"average": "ema"})
    for each in STEPS:
        updated, (loss,) = trained_by_hand(
            to_average, (params, run), tx, [each], average=(average, run)
        )
        total, count = evaluate(state, each)
        state, metrics = step(state, each)
        found = float(metrics["loss"]), float(total) / float(count)
        np.testing.assert_allclose(found, loss, rtol=1e-5)
        params = updated
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, average, params)
    same(model, state, params)


# What a trace shows


def gathered(step):
    """{model: {path: how often a step gathers it}}, of its traced program."""
    found = {}
    for path, _, times in _gathers(step.trace(batch()).jaxpr, 1):
        comm, leaf = step.plan.traced[path]
        of_model = found.setdefault(comm.model, {})
        own = path.removeprefix(f"{comm.model}/")
        of_model[own] = of_model.get(own, 0) + times
        assert leaf.path == own
    return found


@pytest.mark.parametrize(
    ("family", "prefetch"),
    [
        ("nnx", "none"),
        ("linen", "pre"),
        *(pytest.param(*case, marks=LONG) for case in (("nnx", "pre"), ("linen", "none"))),
    ],
)
def test_units_gather_their_own_model_as_often_as_the_loss_needs(family, prefetch):
    """A teacher is gathered in forward alone, and ahead too: prefetch keeps the models apart."""
    model, other = shard(family, optax.sgd(0.1), prefetch=prefetch), shard(family, width=8)
    step = model.make_train_step(distill, others={"teacher": other})
    found = gathered(step)
    assert set(found) == {"", "teacher"}
    assert set(found["teacher"].values()) == {1}
    assert max(found[""].values()) == 2
    assert step.report.prefetch.not_prefetched == {}
    moved = {path.split("/")[0] for path in step.report.prefetch.moved}
    assert ("teacher" in moved) == (prefetch == "pre")
    through = model.make_train_step(fools, others={"critic": other})
    kernels = [n for path, n in gathered(through)["critic"].items() if path.endswith("up/kernel")]
    assert sum(kernels) == {"none": 4, "pre": 3}[prefetch], "the last one is kept"


def test_a_loss_may_apply_linen_models_by_their_variables():
    """As it must for random keys; each is taken for what its arrays are."""
    model, other = shard("linen", optax.sgd(0.1)), shard("linen")

    def loss(model, batch, key, teacher):
        applied = [
            each.apply(each.variables, batch["x"], rngs={"a": key}) for each in (model, teacher)
        ]
        return ((applied[0] - applied[1]) ** 2).sum(), ROWS

    found = gathered(model.make_train_step(loss, others={"teacher": other}))
    assert set(found["teacher"].values()) == {1}
    assert max(found[""].values()) == 2

    def hidden(model, batch, teacher):
        run = jax.jit(lambda variables, x: teacher.apply(variables, x))
        return (model(batch["x"]) - run(teacher.variables, batch["x"])).sum(), ROWS

    step = model.make_train_step(hidden, others={"teacher": other})
    fields = {"what": "applied inside a transform", "fix": "model(x) in place of"}
    assert not_refused({"jit": (lambda: step.trace(batch()), fields)}) == {}


def test_gathers_are_declared_by_the_formula():
    """A device sends 3/4 of each parameter that 4 devices shard; in the backward pass once more."""
    model, other = shard("nnx", optax.sgd(0.1)), shard("linen", width=2 * WIDTH)

    def declared(loss, name, **settings):
        step = model.make_train_step(loss, others={name: other}, **settings)
        step.trace(batch())
        rows = [row for row in expected_traffic(step.plan) if row.path.startswith(f"{name}/")]
        assert {row.op for row in rows} == {"all-gather"}
        return sum(row.bytes for row in rows)

    in_units, at_once = 0, 0
    for path, leaf in other.layout.by_path.items():
        sent = leaf.bytes * 3 // 4 if any(leaf.spec) else 0
        if other.units[path]:
            in_units += sent
        else:
            at_once += sent
    assert declared(distill, "teacher") == in_units + at_once
    assert declared(distill, "teacher", accumulation=2) == 2 * (in_units + at_once)
    assert declared(fools, "critic") == 2 * in_units + at_once
    whole = shard("linen", width=2 * WIDTH, units="model")
    step = model.make_train_step(fools, others={"critic": whole})
    step.trace(batch())
    rows = [row for row in expected_traffic(step.plan) if row.path.startswith("critic/")]
    assert sum(row.bytes for row in rows) == in_units + at_once, "one unit is gathered once"


def test_a_plan_counts_the_memory_of_another_model():
    model, other = shard("nnx", optax.sgd(0.1), devices=8), shard("linen", width=4 * WIDTH)
    plans = [
        model.plan("h100:8", loss, batch(), analytic=True, **settings)
        for loss, settings in (
            (lambda model, batch: distill(model, batch, jnp.negative), {}),
            (distill, {"others": {"teacher": other}}),
        )
    ]
    alone, together = plans
    of_other = other.on(model.layout.mesh).layout.per_device("params")
    assert together.valley_bytes - alone.valley_bytes == of_other
    assert together.breakdown["params"] - alone.breakdown["params"] == of_other
    assert sum(together.breakdown.values()) == together.peak_bytes


def test_another_model_may_have_the_name_of_an_argument():
    """Those of the parameters that wrappers of the loss have, too."""
    model, other = shard("nnx", optax.chain(optax.sgd(0.1), params_ema(0.9))), shard("linen")
    found = []
    for name, each in (("model", other), ("key", other), ("batch", "ema"), ("self", "ema")):
        names = {"jnp": jnp}
        exec(f"def loss(m, x, {name}): return (m(x) - {name}(x)).sum(), len(x)", names)
        for make in (model.make_train_step, model.make_eval_step):
            step = make(names["loss"], others={name: each})
            step.trace(batch()["x"])
            found.append({comm.model for comm, _ in step.plan.traced.values()} == {"", name})
    assert all(found)


def test_a_pure_step_takes_other_states_too():
    model, other = shard("nnx", optax.sgd(0.1)), shard("linen")
    step = model.pure_step(distill, others={"teacher": other})
    shapes = model.abstract_state(), batch(), other.abstract_state()
    run = jax.make_jaxpr(lambda state, batch, teacher: step(state, batch, teacher=teacher))
    count = len(flatten(model.abstract_state()))
    assert len(run(*shapes).out_avals) == count + 5


@LONG
def test_a_loss_with_other_models_is_certified():
    """With a teacher and the average of the model itself; a mean over rows is found out."""

    def loss(model, batch, teacher, average):
        total, count = distill(model, batch, teacher)
        return total + to_average(model, batch, average)[0], count

    def devices_differ(model, batch, teacher, average):
        total, count = loss(model, batch, teacher, average)
        return total + teacher(batch["x"]).mean(), count

    model = shard("nnx", optax.chain(optax.sgd(0.05), params_ema(0.5)))
    others = {"teacher": shard("linen", width=8), "average": "ema"}
    rows = {name: x[:16] for name, x in batch().items()}
    few = {"strategies": ["full_shard"], "accumulation": [2], "trials": 0, "offloaded": False}
    certificate = model.certify(loss, rows, others=others, local_batch=True, **few)
    assert [row.holds for row in certificate.rows] == [True] * 4
    with pytest.raises(CertifyError, match="local_batch"):
        model.certify(devices_differ, rows, others=others, local_batch=True, **few)


# What does not fit


def test_what_does_not_fit_is_refused():
    model, other = shard("nnx", optax.sgd(0.1)), shard("linen")
    half = shard("linen", devices=2)
    averaged = shard("nnx", optax.chain(optax.sgd(0.1), params_ema(0.9)))
    make = functools.partial(model.make_train_step, distill)
    step = make(others={"teacher": other})
    state, teacher = model.init(0), other.init(1)
    donated = other.init(1)
    for array in jax.tree.leaves(donated.params):
        array.delete()
    teacher.step.delete()  # what is not used of a state may have been donated
    both = dataclasses.replace(teacher, params=model.init(0).params)
    twin = model.make_train_step(distill, others={"teacher": model})
    moved = dataclasses.replace(state, params=jax.tree.map(in_the_same_memory, state.params))
    alone = model.make_train_step(lambda model, batch: 0)
    local = model.make_train_step(distill, local_batch=True)
    without = {"what": "third argument, 'teacher'", "fix": "others={'teacher': sharded_teacher}"}

    def of(**others):
        return lambda: make(others=others)

    def with_loss(loss):
        return lambda: model.make_train_step(loss, others={"teacher": other})

    calls = {
        "no dict": (lambda: make(others=[other]), {"where": "others"}),
        "a state": (of(teacher=teacher), {"what": "not a sharded", "fix": "fully_shard(teacher"}),
        "another name": (of(teacher="params"), {"expected": "ema", "got": "params"}),
        "no average": (of(teacher="ema"), {"what": "keeps no average", "where": "weights"}),
        "another mesh": (of(teacher=half), {"what": "another mesh", "got": "other devices"}),
        "an argument": (of(batch=other), {"where": "others['batch']", "fix": "teacher_state"}),
        "a module": (of(blocks=other), {"what": "name of a module"}),
        "no name": (lambda: make(others={"my teacher": other}), {"what": "no name of a parameter"}),
        "a loss": (with_loss(lambda model, batch: 0), {"expected": "teacher=teacher"}),
        "the model": (with_loss(lambda teacher, batch: 0), {"fix": "def loss_fn(model, batch, te"}),
        "a key last": (
            with_loss(lambda model, batch, teacher, key: 0),
            {"what": "a random key comes after"},
        ),
        "no state": (lambda: step(state, batch()), {"fix": "teacher=teacher_state"}),
        "a state more": (
            lambda: step(state, batch(), teacher=teacher, critic=teacher),
            {"got": "['critic', 'teacher']"},
        ),
        "parameters": (
            lambda: step(state, batch(), teacher=teacher.params),
            {"where": "teacher", "got": "dict"},
        ),
        "donated": (
            lambda: step(state, batch(), teacher=donated),
            {"what": "donated to an earlier step", "where": "teacher"},
        ),
        "another model's": (
            lambda: step(state, batch(), teacher=both),
            {"what": "a state of another model", "where": "teacher/params/block_0/up/bias"},
        ),
        "on the host": (
            lambda: step(state, batch(), teacher=jax.device_get(other.init(1))),
            {"what": "not on devices", "where": "teacher/params/block_0/up/bias"},
        ),
        "of the same memory": (
            lambda: twin(state, batch(), teacher=moved),
            {"what": "donates an array", "where": "teacher", "got": "params/blocks/0/up/bias"},
        ),
        "by its place": (
            lambda: step(state, batch(), teacher),
            {"where": "step", "got": "1 more, TrainState", "fix": "teacher=teacher_state"},
        ),
        "by its place, pure": (
            lambda: model.pure_step(distill, others={"teacher": other})(state, batch(), teacher),
            {"where": "step", "fix": "teacher=teacher_state"},
        ),
        "labels": (lambda: alone(state, batch(), 0), {"got": "1 more, int", "fix": "{'x': x, 'y'"}),
        "forgotten": (lambda: make().trace(batch()), without),
        "forgotten, local": (lambda: local.trace(batch()), without),
        "forgotten, evaluated": (lambda: model.make_eval_step(distill).trace(batch()), without),
        "forgotten, planned": (
            lambda: model.plan("h100:4", distill, batch(), analytic=True),
            without,
        ),
        "itself": (
            lambda: twin(state, batch(), teacher=state),
            {"what": "donates an array", "where": "teacher", "fix": "'teacher': 'ema'"},
        ),
    }
    assert not_refused(calls) == {}
    averaged.make_train_step(distill, others={"teacher": "ema"})
