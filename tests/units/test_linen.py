"""Linen modules as units, with wrapped methods and classes; mistakes in place of a model.

Compiles small models and compares two steps with one device: a unit that ran twice, or outside its
transform, would change numbers. What is gathered and cast is read in the trace.
"""

import contextlib
import functools
import re
import warnings
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from reference import Case, check, linen_loss, on_eight, traffic, train, train_unsharded

import fsdp_jax as fsdp
from fsdp_jax.program.equations import all_eqns

pytestmark = pytest.mark.releases

TOKENS = jax.ShapeDtypeStruct((1, 8), jnp.int32)
STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
SHARED = {"variable_axes": {"params": None}, "split_rngs": {"params": False}}


def layer(module, x):
    """Uses a parameter of its own, modules inside, and another method of the same module."""
    scale = module.param("scale", nn.initializers.ones, (x.shape[-1],))
    h = nn.gelu(nn.Dense(module.widened(x))(nn.LayerNorm()(x)))
    return x + jnp.einsum("...d,d->...d", nn.Dense(x.shape[-1])(h), scale)


class Plain(nn.Module):
    def widened(self, x):
        return 2 * x.shape[-1]

    @nn.compact
    def __call__(self, x):
        return layer(self, x)


class Rematted(Plain):
    @nn.remat
    @nn.compact
    def __call__(self, x):
        return layer(self, x)


class Jitted(Plain):
    @nn.jit
    @nn.compact
    def __call__(self, x):
        return layer(self, x)


class MappedOverRows(Plain):
    @functools.partial(nn.vmap, **SHARED)
    @nn.compact
    def __call__(self, x):
        return layer(self, x)


class Ensemble(Plain):
    """Three layers side by side."""

    @functools.partial(nn.vmap, in_axes=None, axis_size=3, **STACKED)
    @nn.compact
    def __call__(self, x):
        return layer(self, x)


class Scanned(Plain):
    """Three layers in a row."""

    @functools.partial(nn.scan, length=3, **STACKED)
    @nn.compact
    def __call__(self, x, _):
        return layer(self, x), None


class ScannedOverTime(Plain):
    @functools.partial(
        nn.scan, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
    )
    @nn.compact
    def __call__(self, carry, x):
        return carry + layer(self, x), carry


CALLS = {
    Ensemble: lambda layer, x: layer(x).mean(0),
    Scanned: lambda layer, x: layer(x, None)[0],
    ScannedOverTime: lambda layer, x: layer(jnp.zeros_like(x[:, 0]), x)[1],
}
METHODS = [Plain, Rematted, Jitted, MappedOverRows, *CALLS]
CLASSES = {
    "remat": lambda kind: nn.remat(kind),
    "jit": lambda kind: nn.jit(kind),
    "vmap": lambda kind: nn.vmap(kind, **SHARED),
    "ensemble": lambda kind: nn.vmap(kind, in_axes=None, axis_size=3, **STACKED),
    "jit of remat": lambda kind: nn.jit(nn.remat(kind)),
}


@functools.cache
def wrapped(name, kind):
    """Wraps a class once, as at the top of a file: `nn.jit` caches its traces by class."""
    return CLASSES[name](kind)


class Model(nn.Module):
    """A model of two layers; `wrap` names the transform of their class."""

    kind: type[nn.Module]
    wrap: str = ""
    scan: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16)(tokens)
        kind = wrapped(self.wrap, self.kind) if self.wrap else self.kind
        call = CALLS.get(
            Ensemble if self.wrap == "ensemble" else self.kind, lambda layer, x: layer(x)
        )
        if self.scan:
            body = nn.scan(lambda module, x, _: (call(module, x), None), length=2, **STACKED)
            x, _ = body(kind(name="layers"), x, None)
        else:
            for i in range(2):
                x = call(kind(name=f"layer_{i}"), x)
        return nn.Dense(32)(nn.LayerNorm()(x))


def case(model: nn.Module, units: Any = (Plain,)) -> Case:
    return Case(model, linen_loss, units)


@pytest.fixture(scope="module")
def mesh():
    return fsdp.make_mesh(data=8)


def assert_trains_as_unsharded(mesh, case, **settings):
    run, step = train(case, mesh, steps=2, **settings)
    check(run, train_unsharded(case, steps=2))
    return step


class OneKernel(nn.Module):
    """A layer of one array, whose stack looks like any other array."""

    @nn.compact
    def __call__(self, x, _=None):
        return x + jnp.tanh(nn.Dense(16, use_bias=False)(x)), None


class Group(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.scan(OneKernel, length=2, **STACKED)()(x, None)


class Stack(nn.Module):
    body: type[nn.Module]

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16)(tokens)
        x, _ = nn.scan(self.body, length=3, **STACKED)()(x, None)
        return nn.Dense(32)(x)


@pytest.mark.parametrize(
    ("body", "local_batch"),
    [
        (Group, True),
        pytest.param(OneKernel, False, marks=pytest.mark.long),
    ],
)
def test_units_in_scans_gather_what_does_not_look_stacked(mesh, body, local_batch):
    stack = case(Stack(body), (OneKernel,))
    step = assert_trains_as_unsharded(mesh, stack, prefetch="pre", local_batch=local_batch)
    assert any("OneKernel" in path for path in step.report.prefetch.prefetched)


def test_a_scan_around_units_saves_no_gathered_parameters(mesh):
    """With `pre` the last layer's would be kept for the backward pass, once for each iteration."""
    stack = case(Stack(Group), (OneKernel,))
    sharded = fsdp.fully_shard(
        stack.model, optax.sgd(0.1), mesh, units=stack.units, min_size=8, prefetch="pre",
        **stack.inputs,
    )  # fmt: skip
    step = sharded.make_train_step(linen_loss, local_batch=True)
    (path,) = [path for path in sharded.layout.by_path if "OneKernel" in path]
    # 3 groups of 2 layers, in forward and in backward
    assert traffic(sharded, step, stack.batch(0))["all_gather", path] == 2 * 3 * 2


class Every(nn.Module):
    """A layer of each kind of wrapped method and class."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16)(tokens)
        for kind in METHODS[1:]:
            x = CALLS.get(kind, lambda layer, x: layer(x))(kind(), x)
        for wrap in CLASSES:
            call = CALLS[Ensemble] if wrap == "ensemble" else lambda layer, x: layer(x)
            x = call(wrapped(wrap, Plain)(name=wrap.replace(" ", "_")), x)
        return nn.Dense(32)(nn.LayerNorm()(x))


def test_a_unit_that_is_wrapped_runs_once(mesh):
    """With the whole model as the unit, as many matmuls are traced."""
    counts = {}
    for units in ("Plain",), "model":
        step = shard(mesh, Every(), units=units).make_eval_step(linen_loss)
        program = step.trace({"tokens": jax.ShapeDtypeStruct((8, 9), jnp.int32)})
        names = [eqn.primitive.name for eqn in all_eqns(program.jaxpr)]
        counts[units] = names.count("dot_general")
    assert counts[("Plain",)] == counts["model"] > 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:unit .* runs inside a loop:fsdp_jax.SlowerWarning")
def test_units_of_every_wrapped_kind_train_as_unsharded(mesh):
    assert_trains_as_unsharded(mesh, case(Every()), local_batch=True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:unit .* runs inside a loop:fsdp_jax.SlowerWarning")
def test_units_under_a_scan_train_as_unsharded_with_remat(mesh):
    assert_trains_as_unsharded(mesh, case(Model(Scanned, "")), remat="full")


def test_a_unit_is_gathered_inside_its_own_transform(mesh):
    sharded = shard(mesh, Model(Scanned))
    step = sharded.make_train_step(linen_loss, local_batch=True)
    counts = traffic(sharded, step, {"tokens": jax.ShapeDtypeStruct((8, 9), jnp.int32)})
    assert counts["all_gather", "layer_0/Dense_0/kernel"] == 3 * 2


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Plain()(nn.Dropout(0.5, deterministic=False)(x))


def test_a_unit_without_parameters_is_recomputed(mesh):
    settings = {"inputs": (jnp.ones((8, 16)),), "units": [Plain, nn.Dropout], "remat": "full"}
    step = shard(mesh, Dropping(), **settings).make_train_step(
        lambda model, batch: (model(batch["x"]).sum(), 8)
    )
    step.trace({"x": np.ones((8, 16), np.float32)})


@pytest.mark.long
def test_a_unit_may_take_another_module_as_argument(mesh):
    assert_trains_as_unsharded(mesh, case(Handing(), units=("Taking",)), local_batch=True)


class Taking(nn.Module):
    @nn.compact
    def __call__(self, x, other):
        return nn.Dense(16)(other(x))


class Handing(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16)(tokens)
        return nn.Dense(32)(Taking()(x, nn.Dense(16, name="shared")))


# nn.jit reuses traces


def shard(mesh, model, **settings):
    settings = {"units": ["Plain"], "inputs": (TOKENS,), "min_size": 8} | settings
    return fsdp.fully_shard(model, optax.adam(1e-3), mesh, **settings)


def traced(sharded, loss=linen_loss):
    step = sharded.make_train_step(loss, local_batch=True)
    step.trace({"tokens": jax.ShapeDtypeStruct((8, 9), jnp.int32)})
    return step


@pytest.mark.parametrize("model", [Model(Plain, "jit"), Model(Jitted)], ids=["class", "method"])
def test_norms_inside_jit_stay_in_float32_in_every_step(mesh, model):
    for _ in range(2):
        step = traced(shard(mesh, model, precision=fsdp.Precision(compute="bfloat16")))
        computed = {path: str(comm.transform.compute) for path, comm in step.plan.comms.items()}
        for i in range(2):
            assert computed[f"layer_{i}/LayerNorm_0/scale"] == "float32"
            assert computed[f"layer_{i}/Dense_0/kernel"] == "bfloat16"


def test_boundaries_inside_jit_are_not_reused_from_another_step(mesh):
    """Both models have the same parameters; only the dtypes of their outputs differ."""
    dtypes = []

    def loss(model, batch):
        logits = model(batch["tokens"])
        dtypes.append(str(logits.dtype))
        return logits.sum(), 1

    model = nn.jit(Model)(Plain)
    for output in ("float32", "bfloat16"):
        precision = fsdp.Precision(compute="bfloat16", output=output)
        traced(shard(mesh, model, units="model", precision=precision), loss)
    assert set(dtypes[: len(dtypes) // 2]) == {"float32"}
    assert set(dtypes[len(dtypes) // 2 :]) == {"bfloat16"}


def test_units_inside_jit_gather_in_every_step(mesh):
    sharded = shard(mesh, Model(Plain, "jit"))
    batch = {"tokens": jax.ShapeDtypeStruct((8, 9), jnp.int32)}
    for _ in range(2):
        counts = traffic(sharded, sharded.make_train_step(linen_loss, local_batch=True), batch)
        assert [counts["all_gather", f"layer_{i}/Dense_0/kernel"] for i in range(2)] == [2, 2]


class Helping(nn.Module):
    """Calls a method of its own, and one of a module that is bound to nothing."""

    seen: Any

    def setup(self):
        self.embed, self.head = nn.Embed(32, 16), nn.Dense(32)

    def hidden(self, tokens):
        return self.embed(tokens)

    def __call__(self, tokens):
        assert Plain(parent=None).widened(jnp.zeros((1, 4))) == 8
        hidden = self.hidden(tokens)
        self.seen(hidden.dtype)
        return self.head(hidden)


def test_methods_that_a_module_calls_on_itself_cross_no_boundary(mesh):
    """Its outputs are cast as the outermost call returns, not before."""
    seen = []
    precision = fsdp.Precision(compute="bfloat16", output="float32")
    traced(shard(mesh, Helping(seen.append), units="model", precision=precision))
    assert set(seen[1:]) == {jnp.dtype("bfloat16")}  # the first is of the example inputs


# Mistakes in place of a model


class Training(nn.Module):
    @nn.compact
    def __call__(self, tokens, *, train):
        return nn.Dense(32)(nn.Dropout(0.5, deterministic=not train)(nn.Embed(32, 16)(tokens)))


def training_loss(model, batch):
    return linen_loss(lambda tokens: model(tokens, train=False), batch)


def test_inputs_by_name(mesh):
    model = shard(mesh, Training(), units="model", inputs={"tokens": TOKENS, "train": True})
    step = model.make_train_step(training_loss)
    _, metrics = step(model.init(0), {"tokens": jnp.zeros((8, 9), jnp.int32)})
    assert jnp.isfinite(metrics["loss"])


NO_CALL = type("Silent", (nn.Module,), {})
TRAIN_STATE = TrainState.create(apply_fn=Plain().apply, params={}, tx=optax.sgd(1.0))
TO_NNX = nnx.bridge.ToNNX(Plain(), rngs=nnx.Rngs(0))
AROUND = SimpleNamespace(module=Plain())
MISTAKES = {  # model, inputs, then the parts of the message in order
    "a flag is missing": (
        *(Training(), (TOKENS,)),
        *("do not fit the model", "Training", r"train\)", "'train'", "inputs="),
    ),
    "of another name": (
        *(Training(), {"token": TOKENS, "train": True}),
        *("do not fit the model", "'tokens'", "inputs="),
    ),
    "a bare array": (
        *(Training(), TOKENS),
        *("not a tuple of arguments, nor a dict", "ShapeDtypeStruct", r"\(tokens,\)"),
    ),
    "no inputs": (Training(), None, "needs example inputs", "inputs="),
    "no __call__": (NO_CALL(), (), "no __call__", "Silent", "__call__"),
    "a class": (
        *(Training, (TOKENS,)),
        *("a class, not a model", "Training", r"Training\(.*\), and inputs="),
    ),
    "bound": (Training().bind({}), (TOKENS,), "bound to its variables", "Training", "unbind"),
    "ToNNX": (TO_NNX, None, "wrapped for NNX", "ToNNX", "the Linen module itself"),
    "ToLinen": (
        *(nnx.bridge.ToLinen(nnx.Linear), (TOKENS,)),
        *("wrapped for Linen", "ToLinen", "lambda rngs"),
    ),
    "a train state": (
        TRAIN_STATE,
        (TOKENS,),
        "a train state, not a model",
        "TrainState",
        "apply_fn",
    ),
    "an object around": (AROUND, None, "around a module", "SimpleNamespace", "its attribute"),
    "parameters": ({"kernel": 1}, None, "not a model", "dict", "lambda rngs"),
    "makes no NNX": (
        *(lambda rngs: Plain(), None),
        *("makes no NNX model", "Plain", "a Linen module is passed itself"),
    ),
}


def test_mistakes_in_place_of_a_model_are_named_with_the_fix(mesh):
    wrong = {}
    for mistake, (model, inputs, what, *texts) in MISTAKES.items():
        with pytest.raises(ValueError, match=r"\n") as caught:
            shard(mesh, model, inputs=inputs)
        if not re.search(what + r"\n(.*\n)*.*" + r"(.*\n)*.*".join(texts), str(caught.value)):
            wrong[mistake] = str(caught.value)
    assert wrong == {}


# Partitioning metadata


class Boxed(nn.Module):
    names: tuple[str, str]

    @nn.compact
    def __call__(self, x, _=None):
        init = nn.initializers.lecun_normal()
        up = nn.with_partitioning(init, self.names)
        down = self.param("down", nn.with_partitioning(init, self.names[::-1]), (16, x.shape[-1]))
        return x + jnp.tanh(nn.Dense(16, use_bias=False, kernel_init=up)(x)) @ down, None


class BoxedModel(nn.Module):
    names: tuple[str, str]
    scan: bool = False
    dim: int = 0  # that stacks layers

    @nn.compact
    def __call__(self, x):
        if self.scan:
            named = {nn.meta.PARTITION_NAME: "layers"}
            block = nn.scan(
                Boxed,
                variable_axes={"params": self.dim},
                split_rngs={"params": True},
                length=2,
                metadata_params=named,
            )
            return block(self.names)(x, None)[0]
        return Boxed(self.names)(Boxed(self.names)(x)[0])[0]


@pytest.mark.parametrize("dim", [0, 1])
def test_layers_that_a_unit_cannot_find_are_told(dim):
    batch = {"x": np.ones((8, 8), np.float32)}
    sharded = on_eight(BoxedModel((None, None), True, dim), inputs=(batch["x"],), units=["Boxed"])
    teacher, wide = BoxedModel((None, None), True), np.ones((8, 12), np.float32)
    weights = nn.unbox(jax.jit(teacher.init)(jax.random.key(0), wide))  # at the paths of the model

    def loss(model, batch):
        return model(batch["x"]).sum() - teacher.apply(weights, wide).sum(), 8

    step = sharded.make_train_step(loss)
    found = (
        "'ScanBoxed_0' gathers none of its parameters: 'Dense_0/kernel' is .8, 16. .* .8, 2, 16."
    )
    with pytest.warns(fsdp.SlowerWarning, match=found) if dim else contextlib.nullcontext():
        step.trace(batch)


LOGICAL = (("embed", "fsdp"), ("mlp", "tensor"), ("layers", None))


@pytest.mark.parametrize(
    ("axes", "names", "logical_axes", "scan"),
    [
        (("fsdp", "tensor"), ("embed", "mlp"), LOGICAL, True),
        pytest.param(("data", "tensor"), ("fsdp", "tensor"), (), True, marks=pytest.mark.long),
        pytest.param(("fsdp", "tensor"), ("fsdp", "tp"), (), False, marks=pytest.mark.long),
    ],
)
def test_a_partitioned_model_trains_on_a_mesh_without_its_axes(axes, names, logical_axes, scan):
    shape = (8,) if len(axes) == 1 else (4, 2)
    mesh = jax.make_mesh(shape, axes, (jax.sharding.AxisType.Auto,) * len(axes))
    batch = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}

    def loss(model, batch):
        return (model(batch["x"]) ** 2).sum(), 16

    model = BoxedModel(names, scan)
    settings = {"units": [Boxed], "inputs": (batch["x"],), "min_size": 8}
    settings |= {"logical_axes": logical_axes} if logical_axes else {}
    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names that the mesh lacks
        sharded = fsdp.fully_shard(model, optax.sgd(0.1), mesh, **settings)
        state = sharded.init(0)
        params = jax.tree.map(np.asarray, state.params)
        _, metrics = sharded.make_train_step(loss)(state, batch)
    plain = (np.asarray(jax.jit(model.apply)({"params": params}, batch["x"])) ** 2).sum() / 16
    np.testing.assert_allclose(metrics["loss"], plain, rtol=1e-5)


@pytest.mark.parametrize("units", [pytest.param("model", marks=pytest.mark.long), ("Dense",)])
def test_slashes_in_names_are_kept(units):
    """As `nn.WeightNorm` names what it adds: `Dense_0/kernel/scale`."""

    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.WeightNorm(nn.Dense(16))(nn.Dense(16)(x))

    def loss(model, batch):
        return jnp.sum(model(batch["x"]) ** 2), len(batch["x"])

    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    losses = []
    for devices in (1, 8):
        mesh = fsdp.make_mesh(data=devices, devices=jax.devices()[:devices])
        sharded = fsdp.fully_shard(
            Normed(), optax.sgd(1e-2), mesh, units=units, min_size=8, inputs=(x,)
        )
        state, step = sharded.init(0), sharded.make_train_step(loss)
        for _ in range(2):
            state, metrics = step(state, {"x": x})
        losses.append(float(metrics["loss"]))
        assert np.isfinite(jax.jit(sharded.model(state).__call__)(x)).all()
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
