"""Models written for JAX's Explicit mesh axes: `reshard`, `out_sharding`, and what is refused.

Compiles steps of small models and compares their losses with one device: that a reshard along
another axis changes no number, a trace does not show.
"""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp
from fsdp_jax.contract.contract import check_contract
from fsdp_jax.planner import parse_topology
from fsdp_jax.sharding.mesh import mesh_axes, split_data
from fsdp_jax.step import xla_options
from fsdp_jax.testing import certify
from fsdp_jax.tree import flatten, unflatten

pytestmark = pytest.mark.releases
DATA, TENSOR = "fsdp", "tp"
WIDTH, VOCABULARY, ROWS, LENGTH = 16, 32, 16, 6


class Layer(nnx.Module):
    """A block in the style of published models: weights and activations name mesh axes."""

    def __init__(self, data, tensor, *, rngs):
        self.rows = P(data, None, tensor)
        up, down = {"out_sharding": P(data, tensor)}, {"out_sharding": P(tensor, data)}
        scale = {"out_sharding": P(None)}
        self.norm = nnx.RMSNorm(WIDTH, scale_metadata=scale, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, kernel_metadata=up, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, kernel_metadata=down, rngs=rngs)

    def __call__(self, x):
        h = nnx.silu(self.up(self.norm(x), out_sharding=self.rows))
        return x + self.down(h, out_sharding=self.rows)


class Explicit(nnx.Module):
    """A model whose lookup, blocks and head name mesh axes in the explicit style."""

    layer_class = Layer

    def __init__(self, data=DATA, tensor=None, *, rngs):
        self.rows = P(data, None, tensor)
        init = nnx.initializers.normal(0.1)
        self.table = nnx.Param(
            init(rngs.params(), (VOCABULARY, WIDTH)), out_sharding=P(tensor, data)
        )
        self.layers = nnx.List([self.layer_class(data, tensor, rngs=rngs) for _ in range(2)])
        self.head = nnx.Param(
            nnx.with_partitioning(init, (data, tensor))(rngs.params(), (WIDTH, VOCABULARY))
        )

    def __call__(self, tokens):
        x = self.table[...].at[tokens].get(out_sharding=self.rows)
        for layer in self.layers:
            x = layer(x)
        x = reshard(x, P(self.rows[0])) if self.rows[0] else x
        return jnp.einsum("btd,dv->btv", x, self.head[...], out_sharding=self.rows)


class Made(Explicit):
    """Its constructor names an axis too, and a scan and a branch run reshard."""

    def __init__(self, data=DATA, *, rngs):
        super().__init__(data, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((VOCABULARY,), out_sharding=P(data)))

    def __call__(self, tokens):
        logits = super().__call__(tokens) + self.bias[...][None, None]

        def turn(x, _):
            return reshard(x * 1.01, self.rows), None

        logits, _ = jax.lax.scan(turn, logits, None, length=2)
        halved = lambda x: reshard(x / 2, self.rows)  # noqa: E731
        return jax.lax.cond(logits.sum() > 0, halved, lambda x: x, logits)


class LinenLayer(nn.Module):
    data: str = DATA

    @nn.compact
    def __call__(self, x):
        rows = P(self.data)
        init = nn.with_partitioning(nn.initializers.normal(0.1), (self.data, None))
        kernel = self.param("kernel", init, (WIDTH, WIDTH))
        x = reshard(x, rows)
        return x + jnp.tanh(jnp.einsum("btd,de->bte", x, kernel, out_sharding=rows))


class LinenExplicit(nn.Module):
    data: str = DATA

    @nn.compact
    def __call__(self, tokens):
        init = nn.initializers.normal(0.1)
        table = self.param("table", init, (VOCABULARY, WIDTH))
        x = table.at[tokens].get(out_sharding=P(self.data))
        for _ in range(2):
            x = LinenLayer(self.data)(x)
        return x @ self.param("head", init, (WIDTH, VOCABULARY))


def loss(model, batch):
    logits = model(batch[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return losses.sum(), losses.size


def batches():
    random = np.random.default_rng(0)
    return [random.integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32) for _ in range(3)]


def make(cls=Explicit, **axes):
    return cls(**axes) if issubclass(cls, nn.Module) else lambda rngs: cls(**axes, rngs=rngs)


def optimizer():
    return optax.adam(1e-2)


def shard(mesh, model=None, strategy="full_shard", **settings):
    model = model or make()
    if isinstance(model, nn.Module):
        settings["inputs"] = (jax.ShapeDtypeStruct((1, LENGTH), jnp.int32),)
    return fsdp.fully_shard(model, optimizer(), mesh, strategy, min_size=1, **settings)


def losses_of(sharded, loss=loss, **settings):
    step, state = sharded.make_train_step(loss, **settings), sharded.init(0)
    losses = []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def mesh_of(shape=(8,), names=(DATA,), kinds=AxisType.Explicit):
    kinds = kinds if isinstance(kinds, tuple) else (kinds,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=kinds)


@cache
def on_one_device(cls=Explicit):
    """Losses in plain JAX, under a mesh of one device, as the model's author would train it."""
    sharded = shard(mesh_of(), make(cls))
    start = {path: np.asarray(x) for path, x in flatten(sharded.init(0).params).items()}
    mesh = jax.make_mesh((1,), (DATA,), devices=jax.devices()[:1])
    with jax.set_mesh(mesh), jax.remove_size_one_mesh_axis_from_type(True):
        mean = mean_of(cls, start)

        @jax.jit
        def step(carry, batch):
            params, opt_state = carry
            value, gradients = jax.value_and_grad(mean)(params, batch)
            updates, opt_state = optimizer().update(gradients, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), value

        carry, losses = (start, jax.jit(optimizer().init)(start)), []
        for batch in batches():
            carry, value = step(carry, batch)
            losses.append(float(value))
    return losses


def mean_of(cls, start):
    """The mean loss as a function of {path: parameter}."""
    if issubclass(cls, nn.Module):

        def apply(params, tokens):
            return cls().apply({"params": unflatten(params)}, tokens)
    else:
        graph, state = nnx.split(cls(rngs=nnx.Rngs(0)))
        paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
        structure = jax.tree.structure(state)

        def apply(params, tokens):
            leaves = [params[path] for path in paths]
            return nnx.merge(graph, jax.tree.unflatten(structure, leaves))(tokens)

    def mean(params, batch):
        total, count = loss(lambda tokens: apply(params, tokens), batch)
        return total / count

    return mean


LONG = pytest.mark.long


# Each way to gather: per unit, once a step, never.
@pytest.mark.parametrize(
    "strategy",
    ["hybrid_shard", *(pytest.param(name, marks=LONG) for name in ("shard_grad_op", "zero1"))],
)
def test_it_trains_as_one_device(strategy):
    mesh = mesh_of((2, 4), ("replica", DATA))
    with jax.set_mesh(mesh):
        losses = losses_of(shard(mesh, strategy=strategy))
    np.testing.assert_allclose(losses, on_one_device(), rtol=1e-5)


MESHES = {
    "explicit": mesh_of(),
    "auto": mesh_of(kinds=AxisType.Auto),
    "explicit, two axes": mesh_of((4, 2), (DATA, TENSOR)),
    "data auto, tensor explicit": mesh_of(
        (4, 2), (DATA, TENSOR), (AxisType.Auto, AxisType.Explicit)
    ),
}


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (Made, "explicit, two axes"),
        pytest.param(Made, "auto", marks=LONG),
        pytest.param(LinenExplicit, "data auto, tensor explicit", marks=LONG),
    ],
)
@pytest.mark.filterwarnings("ignore:no parameter is sharded along the mesh axis")
def test_any_mesh_trains_as_one_device(cls, kind):
    mesh = MESHES[kind]
    with jax.set_mesh(mesh):
        losses = losses_of(shard(mesh, make(cls)))
    np.testing.assert_allclose(losses, on_one_device(cls), rtol=1e-5)


@pytest.mark.parametrize("split", [pytest.param(False, marks=LONG), True])
def test_a_mesh_need_not_be_set_and_its_axis_may_be_split(split):
    model = make(data="data")
    mesh = split_data(mesh_axes(fsdp.make_mesh()), (2, 4)) if split else fsdp.make_mesh()
    np.testing.assert_allclose(losses_of(shard(mesh, model)), on_one_device(), rtol=1e-5)


@pytest.mark.long
def test_what_a_step_does_around_the_model_works_with_it():
    losses = losses_of(shard(mesh_of(), units=[Layer], remat="full"), accumulation=2)
    np.testing.assert_allclose(losses, on_one_device(), rtol=1e-5)


def test_prefetch_leaves_such_a_model_as_it_is_and_says_so():
    step = shard(mesh_of(), units=[Layer], prefetch="pre").make_train_step(loss)
    with pytest.warns(fsdp.SlowerWarning, match="the model names Explicit mesh axes"):
        step.lower(batches()[0])
    assert step.report.prefetch.prefetched == set()


def test_on_a_gpu_the_default_is_no_prefetch_for_such_a_model(monkeypatch):
    monkeypatch.setattr(xla_options, "GPU", ("cpu",))
    step = shard(mesh_of(), units=[Layer]).make_train_step(loss)
    assert step.plan.prefetch == "pre"
    step.lower(next(iter(batches())))
    assert step.plan.prefetch == "none"
    assert step.plan.layout.axes.explicit_axes
    assert not any(comm.traced_whole for comm in step.plan.comms.values())


def test_a_lost_annotation_along_the_models_axis_is_reported():
    mesh = mesh_of((4, 2), (DATA, TENSOR))
    with jax.set_mesh(mesh):
        sharded = shard(mesh, make(tensor=TENSOR))
        with pytest.warns(fsdp.SlowerWarning, match=rf"'{TENSOR}' are not kept(.*)style.py, line"):
            sharded.make_train_step(loss).lower(batches()[0])
    assert sharded.layout.by_path["head"].spec == P(DATA, TENSOR)


class BothStyles(Explicit):
    """Along one axis it calls `with_sharding_constraint`, along the other `reshard`."""

    def __call__(self, tokens):
        x = jax.lax.with_sharding_constraint(self.table[...][tokens], P(DATA))
        return reshard(x, P(None, None, TENSOR)) @ self.head[...]


def test_constraints_hold_along_axes_not_named_as_explicit():
    mesh = mesh_of((4, 2), (DATA, TENSOR))
    with jax.set_mesh(mesh):
        step = shard(mesh, make(BothStyles, tensor=TENSOR)).make_train_step(loss)
        with pytest.warns(fsdp.SlowerWarning, match=f"'{TENSOR}' are not kept"):
            program = str(step.trace(batches()[0]))
    assert step.plan.layout.axes.explicit_axes == (TENSOR,)
    assert "sharding_constraint" in program
    assert "fsdp_devices" not in program


def test_a_model_without_annotations_is_traced_on_the_steps_mesh():
    mesh = mesh_of()
    calls = []

    def counted(model, batch):
        calls.append(jax.sharding.get_abstract_mesh())
        return loss(lambda tokens: model.table[...][tokens] @ model.head[...], batch)

    with jax.set_mesh(mesh):
        step = shard(mesh).make_train_step(counted)
        step.trace(batches()[0])
    assert step.plan.layout.axes.explicit_axes == ()
    assert {seen.axis_types for seen in calls} == {(AxisType.Auto,)}


@pytest.mark.usefixtures("without_cache")
def test_steps_of_every_kind_see_the_same_model():
    mesh, batch = mesh_of(), batches()[0]
    with jax.set_mesh(mesh):
        sharded = shard(mesh)
        state = sharded.init(0)
        total, count = sharded.make_eval_step(loss)(state, batch)
        apply = sharded.apply(lambda model, tokens: model(tokens))
        logits = apply(state, batch[:, :-1])
        of_logits, _ = loss(lambda _: logits, batch)
        shardings = sharded.state_shardings()
        step = jax.jit(
            lambda state, batches: jax.lax.scan(sharded.pure_step(loss), state, batches),
            in_shardings=(shardings, None),
            out_shardings=(shardings, None),
        )
        _, metrics = step(state, np.stack(batches()))
    np.testing.assert_allclose(metrics["loss"], on_one_device(), rtol=1e-5)
    np.testing.assert_allclose(total / count, on_one_device()[0], rtol=1e-5)
    np.testing.assert_allclose(of_logits, total, rtol=1e-5)


def test_a_batch_on_an_explicit_mesh_is_cut_into_microbatches():
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        sharded = shard(mesh)
        step = sharded.make_train_step(loss, accumulation=2)
        rows = jax.device_put(batches()[0], NamedSharding(mesh, P(DATA)))
        _, metrics = step(sharded.init(0), rows)
    np.testing.assert_allclose(metrics["loss"], on_one_device()[0], rtol=1e-5)


def constrained(model, batch):
    bare = lambda x: jax.lax.with_sharding_constraint(model(x), P(DATA))  # noqa: E731
    return loss(bare, batch)


def on_named_mesh(model, batch):
    return loss(lambda x: reshard(model(x), NamedSharding(mesh_of(), P(DATA))), batch)


def with_outer_array(model, batch):
    return loss(lambda x: model(x) @ OUTSIDE, batch)


def along_tensor(model, batch):
    return loss(lambda x: reshard(model(x), P(TENSOR)), batch)


def inside_shard_map(model, batch):
    inside = lambda x: reshard(x, P(DATA))  # noqa: E731
    return loss(lambda x: jax.shard_map(inside, in_specs=P(DATA), out_specs=P(DATA))(x), batch)


def grouped(model, batch):
    def fn(x):
        y = model(x)
        groups = jnp.full(2, LENGTH // 2)
        return jax.lax.ragged_dot(y[0], jnp.ones((2, VOCABULARY, 4)), groups).sum() + y

    return loss(fn, batch)


with jax.set_mesh(mesh_of()):
    OUTSIDE = jnp.eye(VOCABULARY)


@pytest.mark.parametrize(
    ("own", "settings", "what", "fix"),
    [
        (constrained, {}, "with_sharding_constraint along an Explicit axis", "reshard(x, P"),
        (on_named_mesh, {}, "a NamedSharding of another mesh", "PartitionSpec(...) in place"),
        (with_outer_array, {}, "an array or a NamedSharding of another mesh", "np.asarray(x)"),
        (along_tensor, {}, f"the mesh axis '{TENSOR}', which the mesh lacks", "of size 1"),
        (inside_shard_map, {}, "inside a shard_map over it", "leave the annotation out"),
        (grouped, {}, "jax has no rule for an operation there", "jax.sharding.auto_axes"),
        (loss, {"local_batch": True}, "with local batches", "leave local_batch out"),
    ],
)
def test_what_cannot_run_is_refused_with_its_place_and_the_fix(own, settings, what, fix):
    mesh = mesh_of()
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="expected: ") as caught:
        shard(mesh).make_train_step(own, **settings).trace(batches()[0])
    text = str(caught.value)
    assert what in text
    assert fix in text
    assert f"where:    {__file__}, line " in text


@pytest.mark.long
def test_certify_compares_with_one_device():
    mesh = mesh_of()
    batch = np.concatenate(batches()[:2])
    with jax.set_mesh(mesh):
        settings = {"strategies": ("full_shard",), "accumulation": (1,), "steps": 2, "trials": 1}
        assert certify(make(Made), loss, batch, mesh=mesh, **settings).holds


@pytest.mark.long
@pytest.mark.needs_plugin
def test_annotations_along_data_change_nothing_that_is_sent(monkeypatch):
    monkeypatch.setitem(globals(), "WIDTH", 512)
    devices = np.array(parse_topology("h100:8").devices())
    mesh = Mesh(devices, (DATA,), axis_types=(AxisType.Explicit,))

    class PlainLayer(Layer):
        def __call__(self, x):
            return x + self.down(nnx.silu(self.up(self.norm(x))))

    class Plain(Explicit):
        layer_class = PlainLayer

        def __call__(self, tokens):
            x = self.table[...][tokens]
            for layer in self.layers:
                x = layer(x)
            return x @ self.head[...]

    sent = {}
    for cls in (Explicit, Plain):
        sharded = shard(mesh, make(cls), units=[cls.layer_class], prefetch="none")
        step = sharded.make_train_step(loss)
        contract = check_contract(step, jax.ShapeDtypeStruct((16, 129), "int32"))
        assert contract.holds, str(contract)
        sent[cls] = contract.wire_bytes
    assert sent[Explicit] == sent[Plain] > 0
