"""A parameter that is read outside its unit means what it means on one device.

By default, all ways of `ways_to_read` are added to one loss; each is a metric of its own besides,
so that a value that differs has a name. These steps are compiled: a trace has no values. With local
batches each way is traced alone: it is refused by the path of the parameter, or its loss equals
that of one device.
"""

import contextlib
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import ways_to_read as ways
from flax import nnx
from reference import Case, losses_of, on_eight, train_unsharded
from refusals import refused
from ways_to_read import LINEN_WAYS, NNX_WAYS, REFUSED_WAYS, UNROLLED_WAYS, LinenNet, Net

import fsdp_jax as fsdp
from fsdp_jax.contract.contract import check_contract
from fsdp_jax.testing import certify

STEPS = 3
ROWS = 16


class ReadCase(Case):
    """A case whose batches are rows of numbers."""

    def batch(self, step, rows=ROWS):
        x = np.random.default_rng(step).normal(size=(rows, ways.WIDTH))
        return {"x": x.astype(np.float32)}

    @property
    def inputs(self):
        is_linen = isinstance(self.model, LinenNet)
        return {"inputs": (jnp.zeros((1, ways.WIDTH)),)} if is_linen else {}


@pytest.fixture(autouse=True)
def _bias_is_added_to_rows():
    with jax.numpy_rank_promotion("allow"):
        yield


def nnx_net(scanned):
    return cache(lambda scanned: lambda rngs: Net(rngs, scanned))(scanned)


def table(framework, scanned):
    if framework == "linen":
        return LINEN_WAYS
    return NNX_WAYS if scanned else NNX_WAYS | UNROLLED_WAYS


def model_of(framework, scanned):
    return LinenNet(scanned, reads=True) if framework == "linen" else nnx_net(scanned)


def values_of_ways(chosen, model, batch):
    return {name: jnp.float32(way(model, batch["x"])) for name, way in chosen.items()}


@cache
def loss_of(framework, scanned):
    """(the loss with all ways added, for one device; the same with each as a metric)"""
    chosen = table(framework, scanned)

    def with_metrics(model, batch):
        values = values_of_ways(chosen, model, batch)
        own = jnp.sum(jnp.square(model(batch["x"])))
        total = own + 0.01 * sum(values.values())
        return total, ROWS, {name: (value, None) for name, value in values.items()}

    return lambda model, batch: with_metrics(model, batch)[:2], with_metrics


UNITS = {"nnx": (ways.Block,), "linen": ("LinenBlock",)}
STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "hybrid_shard")


@pytest.mark.parametrize(
    ("framework", "scanned", "units", "strategy", "offload"),
    [
        ("nnx", False, "auto", "full_shard", False),
        ("linen", True, "named", "hybrid_shard", True),
        pytest.param("nnx", True, "named", "shard_grad_op", True, marks=pytest.mark.long),
    ],
)
def test_by_default_every_way_is_that_of_one_device(framework, scanned, units, strategy, offload):
    plain, with_metrics = loss_of(framework, scanned)
    case = ReadCase(model_of(framework, scanned), plain, "auto")
    replica = 2 if strategy.startswith("hybrid") else 1
    sharded = fsdp.fully_shard(
        case.model,
        optax.adamw(1e-3, eps=1e-6),
        fsdp.make_mesh(data=8 // replica, replica=replica),
        strategy,
        "auto" if units == "auto" else UNITS[framework],
        min_size=8,
        offload=fsdp.Offload(params=True) if offload else None,
        **case.inputs,
    )
    step, state = sharded.make_train_step(with_metrics), sharded.init(0)
    found = []
    for number in range(STEPS):
        state, metrics = step(state, case.batch(number))
        found.append(float(metrics["loss"]))
        if number == 0:
            first = metrics
    expected, params = train_unsharded(case, steps=STEPS)
    for name, value in unsharded_ways(framework, scanned).items():
        np.testing.assert_allclose(float(first[name]), value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for path, leaf in fsdp.tree.flatten(state.params).items():
        np.testing.assert_allclose(leaf, params[path], rtol=1e-5, atol=1e-5, err_msg=path)


@cache
def unsharded_ways(framework, scanned):
    """{way: its value} with the initial parameters, on one device."""
    from reference import _start

    plain, _ = loss_of(framework, scanned)
    case = ReadCase(model_of(framework, scanned), plain, "auto")
    chosen = table(framework, scanned)
    only_values = lambda model, batch: values_of_ways(chosen, model, batch)  # noqa: E731
    params, rest, apply = _start(ReadCase(case.model, only_values, "auto"))
    values, _ = jax.jit(apply)(params, rest, case.batch(0))
    return {name: float(value) for name, value in values.items()}


def test_a_unit_that_changes_its_arguments_is_refused():
    """It is given copies: what it appends would be lost without a message."""
    batch = ReadCase(None, None, None).batch(0)
    sharded = fsdp.fully_shard(nnx_net(False), optax.sgd(0.1), fsdp.make_mesh(data=8), min_size=8)
    for way in REFUSED_WAYS.values():
        loss = lambda model, batch, way=way: (way(model, batch["x"]), ROWS)  # noqa: E731
        with refused("changes a list, a dict or another object among its arguments"):
            sharded.make_train_step(loss).trace(batch)
        sharded.on(fsdp.make_mesh(data=8), units="model").make_train_step(loss).trace(batch)


# What depends on shapes alone is the same on every device, and a second run of the model is a sum
# over examples; all others compute with a parameter.
OF_SHAPES = {"elements", "largest dim"}
SUMS = {*OF_SHAPES, "merged", "apply", "written"}


def local_step(framework, loss, strategy="full_shard", **settings):
    case = ReadCase(model_of_local(framework), loss, "auto")
    replica = 2 if strategy.startswith("hybrid") else 1
    sharded = fsdp.fully_shard(
        case.model,
        optax.adamw(1e-3, eps=1e-6),
        fsdp.make_mesh(data=8 // replica, replica=replica),
        strategy,
        min_size=8,
        **settings,
        **case.inputs,
    )
    return case, sharded, sharded.make_train_step(loss, local_batch=True)


def model_of_local(framework):
    return LinenNet() if framework == "linen" else nnx_net(False)


LOCAL_WAYS = [
    *[("nnx", name) for name in NNX_WAYS | UNROLLED_WAYS if name not in SUMS],
    *[("linen", name) for name in LINEN_WAYS if name not in {*SUMS, "get_variable"}],
]


@pytest.mark.parametrize(
    "part", [pytest.param(n, marks=[pytest.mark.long] * (n > 0)) for n in range(2)]
)
def test_with_local_batches_a_use_outside_the_unit_is_refused(part):
    """Every second way, by turns of the strategies."""
    for number, (framework, name) in enumerate(LOCAL_WAYS[part::2]):
        way = table(framework, False)[name]

        def loss(model, batch, way=way):
            return jnp.sum(model(batch["x"]) ** 2) + jnp.float32(way(model, batch["x"])), ROWS

        case, _, step = local_step(framework, loss, STRATEGIES[number % 4])
        with pytest.raises(ValueError, match="with local_batch, a parameter is used") as caught:
            step.trace(case.batch(0))
        assert "block" in str(caught.value), (framework, name, caught.value)
        assert "leave local_batch out" in str(caught.value)


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_with_local_batches_shapes_are_of_the_whole_parameter(framework):
    chosen = {name: way for name, way in table(framework, False).items() if name in SUMS}

    def loss(model, batch):
        x = batch["x"]
        scale = sum(chosen[name](model, x) for name in chosen.keys() & OF_SHAPES)
        total = sum(chosen[name](model, x) for name in chosen.keys() - OF_SHAPES)
        return jnp.sum(model(x) ** 2) * scale / 1e3 + total, len(x)

    case, sharded, step = local_step(framework, loss)
    losses, _ = losses_of(step, sharded.init(0), map(case.batch, range(2)))
    np.testing.assert_allclose(losses, train_unsharded(case, steps=2)[0], rtol=1e-5)


def test_a_parameter_in_a_step_is_an_array_of_its_stored_dtype():
    seen = {}

    def loss(model, batch):
        kernel = model.blocks[0].dense.kernel[...]
        seen["outside"] = isinstance(kernel, jax.Array), str(kernel.dtype), kernel.shape
        return jnp.sum(jnp.float32(model(batch["x"])) ** 2), ROWS

    class Watched(ways.Block):
        def __call__(self, x):
            seen["inside"] = str(self.dense.kernel.dtype)
            return super().__call__(x)

    for offload in (None, fsdp.Offload(params=True)):
        for local_batch in (False, True):
            sharded = on_eight(
                lambda rngs: Net(rngs, block=Watched),
                precision=fsdp.Precision(compute="bfloat16"),
                offload=offload,
            )
            step = sharded.make_train_step(loss, local_batch=local_batch)
            step.trace(ReadCase(None, None, None).batch(0))
            assert seen == {
                "outside": (True, "float32", (ways.WIDTH, ways.WIDTH)),
                "inside": "bfloat16",
            }


def test_the_contract_names_what_is_read_outside_its_unit():
    def loss(model, batch):
        x = model(batch["x"])
        return jnp.sum((x @ model.blocks[1].dense.kernel[...]) ** 2), ROWS

    sharded = fsdp.fully_shard(nnx_net(False), optax.sgd(0.1), fsdp.make_mesh(data=8), min_size=8)
    contract = check_contract(sharded.make_train_step(loss), ReadCase(None, None, None).batch(0))
    assert "'blocks/1/dense/kernel' at test_reads_outside_units.py:" in contract.note


@pytest.mark.long
def test_certify_agrees():
    plain, _ = loss_of("nnx", False)
    case = ReadCase(model_of("nnx", False), plain, "auto")
    settings = {"tx": optax.sgd(1e-3), "min_size": 8, "units": "auto", "local_batch": False}
    certificate = certify(
        case.model,
        plain,
        case.batch(0, 16),
        strategies=("full_shard",),
        accumulation=(1,),
        **settings,
        **case.inputs,
    )
    assert certificate.holds, str(certificate)


# What a review found


def adapted(model, x):
    """Parameters that are mapped over: one step of descent for each task, as in MAML."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def task(rate):
        scaled = jax.tree.map(lambda p: p * (1 + rate), params)
        return jnp.sum(jnp.square(nnx.merge(graphdef, scaled, rest, copy=True)(x)))

    return jnp.sum(jax.vmap(task)(0.1 * jnp.arange(4.0)))


@pytest.mark.parametrize("offload", [None, fsdp.Offload(params=True)])
def test_parameters_may_be_mapped_over(offload):
    case = ReadCase(nnx_net(False), lambda model, batch: (adapted(model, batch["x"]), ROWS), "auto")
    sharded = on_eight(case.model, optax.adamw(1e-3, eps=1e-6), offload=offload)
    step = sharded.make_train_step(case.loss)
    losses, _ = losses_of(step, sharded.init(0), map(case.batch, range(2)))
    np.testing.assert_allclose(losses, train_unsharded(case, steps=2)[0], rtol=1e-5)


def test_a_jitted_apply_of_the_users_is_traced_for_each_run():
    """jax would reuse the trace of the first, in which units gather in another dtype."""
    net = LinenNet()
    apply = jax.jit(lambda params, x: net.apply({"params": params}, x))

    def loss(model, batch):
        return jnp.sum(jnp.square(apply(model.variables["params"], batch["x"]))), ROWS

    def program(compute):
        sharded = on_eight(
            net,
            units=["LinenBlock"],
            inputs=(jnp.zeros((1, ways.WIDTH)),),
            precision=fsdp.Precision(compute=compute),
        )
        return str(sharded.make_train_step(loss).trace(ReadCase(None, None, None).batch(0)))

    assert "bf16" in program("bfloat16")
    assert "bf16" not in program("float32")


def test_another_models_modules_of_the_same_paths_are_no_units():
    """A teacher's weights are neither gathered nor rounded."""
    teacher = LinenNet()
    weights = teacher.init(jax.random.key(1), jnp.zeros((1, ways.WIDTH)))

    def loss(model, batch):
        seen.append(teacher.apply(weights, batch["x"]).dtype)
        return jnp.sum(jnp.square(jnp.float32(model(batch["x"])))), ROWS

    seen = []
    sharded = on_eight(
        LinenNet(),
        inputs=(jnp.zeros((1, ways.WIDTH)),),
        precision=fsdp.Precision(compute="bfloat16"),
    )
    sharded.make_train_step(loss).trace(ReadCase(None, None, None).batch(0))
    assert set(map(str, seen)) == {"float32"}


class Cached(nnx.Variable):
    pass


class Returning(ways.Block):
    def __call__(self, x):
        y = super().__call__(x)
        return Cached(y)


def test_a_unit_that_returns_a_variable_it_makes_is_refused():
    """It would run without gathering, in the dtype that its parameters are stored in."""
    loss = lambda model, batch: (jnp.sum(model.blocks[0](batch["x"])[...] ** 2), ROWS)  # noqa: E731
    sharded = on_eight(lambda rngs: Net(rngs, block=Returning))
    with refused("returns a module or a Variable that it makes"):
        sharded.make_train_step(loss).trace(ReadCase(None, None, None).batch(0))


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_unit_whose_parameters_were_replaced_is_told(strategy):
    def loss(model, batch):
        for block in model.blocks:
            block.gain, block.dense = nnx.Param(block.gain[...]), ways.Dense(nnx.Rngs(0))
        return model(batch["x"]).sum(), 8

    sharded = on_eight(nnx_net(False), strategy=strategy, units=[ways.Block], remat="full")
    step, warns = sharded.make_train_step(loss), contextlib.nullcontext()
    if strategy == "full_shard":
        warns = pytest.warns(
            fsdp.SlowerWarning, match=r"'blocks/.' gathers none .*kernel\[...\] = value"
        )
    with warns:
        step.trace({"x": np.ones((8, ways.WIDTH), np.float32)})


@pytest.mark.parametrize("scanned", [False, True])
def test_another_model_of_the_same_structure_is_no_unit(scanned):
    """Such as a reference model, of which nothing is sharded."""
    weights = nnx.state(nnx_net(scanned)(nnx.Rngs(1)), nnx.Param)

    def loss(model, batch):
        reference = nnx.clone(model)
        nnx.update(reference, weights)
        return (model(batch["x"]) - reference(batch["x"])).sum(), 8

    sharded = on_eight(nnx_net(scanned), units=[ways.Block])
    sharded.make_train_step(loss).trace({"x": np.ones((8, ways.WIDTH), np.float32)})
