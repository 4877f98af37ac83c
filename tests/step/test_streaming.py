"""State in host memory: updated in groups, to the bits that it has without offload.

Steps are compiled and run with and without offload: what XLA does with the groups, and the order
of the transfers, shows in bits alone. What is grouped and refused is read from traces.
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import CASES, covering_params, gpt, make_model, on_eight, optimizer
from refusals import not_refused, refused
from small import SMALL, by_hand, small

import fsdp_jax as fsdp
from fsdp_jax import optim
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.host_memory import HOST
from fsdp_jax.step import streaming
from fsdp_jax.step.streaming import _in_turns
from fsdp_jax.step.traced_update import TracedUpdate
from fsdp_jax.tree import flatten

pytestmark = pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning")
BF16 = fsdp.Precision(compute="bfloat16")
FLOAT8 = fsdp.Precision(compute="bfloat16", gather="float8_e4m3fn")
ALL = fsdp.Offload(params=True, optimizer=True)
OFFLOADS = {
    "all": ALL,
    "optimizer": fsdp.Offload(optimizer=True),
    "params": fsdp.Offload(params=True),
    "half": fsdp.Offload(optimizer=0.5),
}
WAYS = {
    "global": {},
    "accumulated": {"accumulation": 2, "clip": 0.05},
    "local": {"local_batch": True},
    "deferred": {"local_batch": True, "accumulation": 2, "deferred_reduction": True},
}
# More layers than are fetched before the loop and by its last iterations.
MODELS = {"small": SMALL, "five layers": small(5), **CASES}
PRECISIONS = {"float32": None, "bfloat16": BF16, "float8": FLOAT8}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Several groups, of models whose state would be one."""
    monkeypatch.setattr(streaming, "GROUP_BYTES", 256)


def shard(name="small", strategy="full_shard", tx=None, data=8, replica=1, **settings):
    case = MODELS[name]
    mesh = fsdp.make_mesh(data=data, replica=replica, allow_fewer=True)
    settings = {"min_size": 16, **settings}
    return fsdp.fully_shard(
        make_model(case), tx or optimizer(), mesh, strategy, case.units, **case.inputs, **settings
    )


def train(sharded, name="small", steps=2, **way):
    """(losses and norms, final state, how it was streamed) of a run."""
    case = MODELS[name]
    step = sharded.make_train_step(case.loss, **way)
    state = sharded.init(0)
    losses = []
    for number in range(steps):
        state, metrics = step(state, case.batch(number))
        losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return losses, state, step.report.streaming


def report_of(sharded):
    """How the state of a step is streamed, by its trace."""
    step = sharded.make_train_step(SMALL.loss)
    step.lower(SMALL.batch(0))
    return step.report.streaming


def arrays(tree):
    return {path: np.asarray(x, np.float32) for path, x in flatten(tree).items()}


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


def possible(strategy, name, way, offload, precision, prefetch):
    local = way in ("local", "deferred")
    prefetches = prefetch == "none" or fsdp.STRATEGIES[strategy].gathers_per_unit
    return prefetches and not (local and "batchnorm" in name)


AXES = [
    list(fsdp.STRATEGIES),
    list(CASES),
    list(WAYS),
    list(OFFLOADS),
    list(PRECISIONS),
    ["none", "pre", "post"],
]
QUICK = [
    ("hybrid_shard_zero2", "five layers", "accumulated", "all", "bfloat16", "none"),
    ("full_shard", "five layers", "local", "all", "float32", "pre"),
    ("hybrid_shard", "five layers", "deferred", "half", "bfloat16", "post"),
    ("zero1", "small", "accumulated", "optimizer", "float32", "none"),
    ("shard_grad_op", "small", "global", "params", "float8", "none"),
]


@pytest.mark.parametrize(
    ("strategy", "name", "way", "offload", "precision", "prefetch"),
    QUICK + covering_params(AXES, possible=possible, quick=0),
)
def test_offload_changes_no_bit(strategy, name, way, offload, precision, prefetch):
    settings = {"precision": PRECISIONS[precision], "prefetch": prefetch}
    replica = {"data": 4, "replica": 2} if "hybrid" in strategy else {}
    without = shard(name, strategy, **settings, **replica)
    offloaded = shard(name, strategy, offload=OFFLOADS[offload], **settings, **replica)
    losses, state, _ = train(without, name, **WAYS[way])
    found, found_state, _ = train(offloaded, name, **WAYS[way])
    assert found == losses
    check_equal(arrays(found_state.params), arrays(state.params))
    check_equal(arrays(found_state.opt_state), arrays(state.opt_state))
    kinds = {leaf.path: leaf.sharding.memory_kind for leaf in offloaded.layout}
    stored = flatten(jax.tree.map(lambda x: x.sharding.memory_kind, found_state.params))
    assert HOST in kinds.values()
    for path, kind in stored.items():
        assert (kind == HOST) == offloaded.layout.by_path[path].on_host


def test_both_directions_of_the_link_are_busy_in_each_turn():
    assert _in_turns([1, 2, 3, 4], [5, 6]) == [([1, 2], [5]), ([3, 4], [6])]
    assert _in_turns([1], [2, 3, 4]) == [([1], [2, 3, 4])]
    assert _in_turns([1, 2], []) == [([1, 2], [])]


# Optimizers


def after_momentum(change, init=lambda params: optax.EmptyState()):
    """SGD with momentum, whose updates `change` then changes as a tree."""
    changed = optax.GradientTransformation(init, lambda u, s, params=None: (change(u), s))
    return optax.chain(optax.trace(0.9), changed, optax.scale(-1e-2))


def looks_at_the_layers(u):
    """By a literal, a branch and an error: it is traced once, some layers run what was traced."""
    assert u.ndim < 3 or u.shape[0] == 2, "the model has two layers"
    return jax.jit(lambda u: u * 2 if u.shape[0] > 1 else u * 3)(u / u.shape[0])


def reads_another(updates):
    """An update of a parameter by the gradient of another."""
    updates = jax.tree.map(lambda x: x, updates)
    up = updates["blocks"]["up"]
    up["kernel"] = up["kernel"] + up["bias"][:, None]
    return updates


OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2),
    "clip, schedule, mask and averages": optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.adamw(
            optax.cosine_decay_schedule(1e-3, 10),
            mask=lambda tree: jax.tree.map(lambda x: x.ndim > 2, tree),
        ),
        optax.ema(0.9),
    ),
    "shared coefficients": optax.contrib.muon(1e-3),
    "reads another gradient": optax.chain(
        optax.stateless(lambda updates, params: reads_another(updates)), optax.adam(1e-3)
    ),
    "looks at the layers, begins with the parameters": after_momentum(
        lambda updates: jax.tree.map(looks_at_the_layers, updates),
        lambda params: jax.tree.map(lambda p: 2 * p, params),
    ),
}
MOVED_WHOLE = ("adafactor", "lamb", "reads another gradient")
MORE = ("adafactor", "lamb")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.long] * (x in MORE)) for x in OPTIMIZERS]
)
def test_other_optimizers_are_streamed_to_the_same_bits(name):
    """What an update computes from all layers moves them whole."""
    tx = OPTIMIZERS[name]
    settings = {"tx": tx, "min_size": 1 if name == "reads another gradient" else 16}
    _, expected, _ = train(shard(**settings))
    _, found, report = train(shard(**settings, offload=ALL))
    check_equal(arrays(found.params), arrays(expected.params))
    check_equal(arrays(found.opt_state), arrays(expected.opt_state))
    assert ("blocks/up/kernel" in report.moved_whole) == (name in MOVED_WHOLE)


def test_a_jit_inside_the_optimizer_joins_no_parameters():
    adam = optax.adamw(1e-3)
    jitted = optax.GradientTransformation(adam.init, jax.jit(adam.update))
    reports = [report_of(shard(tx=tx, offload=ALL)) for tx in (adam, jitted)]
    assert vars(reports[0]) == vars(reports[1])
    assert reports[0].groups > report_of(shard(tx=optax.lamb(1e-2), offload=ALL)).groups > 1
    assert "blocks/up/kernel" not in reports[0].moved_whole


@pytest.mark.long
def test_moments_in_8_bits_are_streamed_to_the_same_bits(monkeypatch):
    """Parameters of fewer than 4096 elements keep float32 moments: these are larger."""
    monkeypatch.setattr(streaming, "GROUP_BYTES", 2048)
    case = dataclasses.replace(CASES["nnx-gpt-scanned"], model=gpt(True, width=64))
    runs = []
    for offload in (None, ALL):
        sharded = on_eight(
            make_model(case),
            optim.adamw(1e-3, moments="int8"),
            units=case.units,
            min_size=16,
            offload=offload,
            precision=fsdp.Precision("bfloat16", "bfloat16", stochastic_rounding=True),
        )
        step, state = sharded.make_train_step(case.loss), sharded.init(0)
        for number in range(2):
            state, _ = step(state, case.batch(number))
        runs.append(arrays((state.params, state.opt_state)))
    assert {x.dtype.name for x in jax.tree.leaves(state.opt_state)} >= {"int8", "uint8"}
    check_equal(runs[1], runs[0])


def by_layers(update):
    """Whether a parameter [2, 4] that `update(param, gradient, scalar)` makes is by layers."""
    leaf = SimpleNamespace(path="w", shape=(2, 4), part="params", on_host=True)
    param = jax.ShapeDtypeStruct((2, 4), np.float32)
    scalar = jax.ShapeDtypeStruct((), np.float32)
    traced = TracedUpdate(
        lambda params, gradients, scalar: [update(*params, *gradients, scalar)],
        [param],
        [param],
        scalar,
        [leaf],
    )
    return traced.is_row_wise([0], 2)


def of_each_layer(numbers):
    return jax.lax.broadcast_in_dim(numbers, (2, 4), (0,))


def bits(scalar):
    """The upper and lower half of a number, [2]."""
    return jax.lax.bitcast_convert_type(scalar, jnp.uint16).astype(jnp.float32)


UPDATES = {
    "elementwise": (lambda p, g, s: jnp.where(s > 0, p - s * g, p), True),
    "number of layers": (lambda p, g, s: p - g / p.shape[0], True),
    "norm of the gradient": (lambda p, g, s: p - g / jnp.linalg.norm(g), True),
    "columns": (lambda p, g, s: p * jax.lax.broadcasted_iota(np.float32, (2, 4), 1), True),
    "rows": (lambda p, g, s: p * jax.lax.broadcasted_iota(np.float32, (2, 4), 0), False),
    "constant": (lambda p, g, s: p * np.arange(8, dtype=np.float32).reshape(2, 4), False),
    "bitcast": (lambda p, g, s: p - g * of_each_layer(bits(s)), False),
    "mean": (lambda p, g, s: p - (p - g).mean(0, keepdims=True), False),
    "cumulative sum": (lambda p, g, s: p - jnp.cumsum(g, 0), False),
    "sort": (lambda p, g, s: jnp.sort(p - g, 0), False),
    "merged dims": (lambda p, g, s: p - g.reshape(-1)[::-1].reshape(2, 4), False),
    "slice": (lambda p, g, s: p - g[:1], False),
    "lookup": (lambda p, g, s: p - g[np.array([1, 0])], False),
    "random": (lambda p, g, s: p - g * jax.random.normal(jax.random.key(0), (2, 4)), False),
    "while": (lambda p, g, s: jax.lax.while_loop(lambda x: x.sum() < s, lambda x: x + g, p), False),
    "call": (lambda p, g, s: jax.jit(lambda x: x - x.mean(0, keepdims=True))(p + g), False),
}


@pytest.mark.releases
def test_layers_are_updated_apart_only_where_they_are_independent():
    assert {name: by_layers(update) for name, (update, _) in UPDATES.items()} == {
        name: expected for name, (_, expected) in UPDATES.items()
    }


@pytest.mark.releases
def test_a_constant_that_is_a_literal_differs_by_layer():
    before = jax.config.values["jax_use_simplified_jaxpr_constants"]
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    try:
        assert not by_layers(UPDATES["constant"][0])
        assert by_layers(UPDATES["elementwise"][0])
    finally:
        jax.config.update("jax_use_simplified_jaxpr_constants", before)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(0.1)),
        optax.MultiSteps(optax.adamw(1e-3), 2),
        optax.apply_if_finite(optax.adamw(1e-3), 3),
    ],
    ids=["norm of updates", "multi-steps", "if finite"],
)
def test_an_optimizer_that_joins_parameters_cannot_be_streamed(tx):
    with refused("cannot be streamed from host memory", where="offload", got="depend on one"):
        report_of(shard(tx=tx, offload=ALL))


# Steps that are not finite


@pytest.mark.releases
@pytest.mark.filterwarnings("ignore:step 2 was skipped:fsdp_jax.SkippedStepWarning")
@pytest.mark.parametrize("offload", ["all", pytest.param("params", marks=pytest.mark.long)])
def test_a_step_that_is_not_finite_spoils_no_state_in_host_memory(offload):
    tx = optax.adam(lambda count: jnp.where(count >= 1, jnp.inf, 1e-2))
    sharded = shard(offload=OFFLOADS[offload], tx=tx, precision=BF16)
    step, state = sharded.make_train_step(SMALL.loss, abort_after=2), sharded.init(0)

    def run(state, number, **poison):
        before = arrays((state.params, state.opt_state, state.copies))
        state, metrics = step(state, SMALL.batch(number) | poison)
        after = arrays((state.params, state.opt_state, state.copies))
        return state, int(metrics["skipped"]), before, after

    state, skipped, before, after = run(state, 0)
    assert skipped == 0
    state, skipped, before, after = run(state, 1, weight=np.full(32, np.inf, np.float32))
    assert skipped == 1
    check_equal(after, before)
    # Its update alone: all but the optimizer's counts, since the schedule goes on.
    state, skipped, before, after = run(state, 2)
    assert skipped == 2
    check_equal(after, {path: x + path.endswith("count") for path, x in before.items()})
    with pytest.raises(fsdp.NonFiniteError, match="2 steps in a row were skipped"):
        step.finish()


# Layouts


def test_a_fraction_takes_the_largest_arrays_first():
    everything = shard().layout.per_device()
    may_be = [leaf.path for leaf in shard(offload=ALL).layout if leaf.on_host]
    for fraction in (0.0, 1e-3, 0.2, 0.5, 0.77, 1.0):
        layout = shard(offload=fsdp.Offload(optimizer=fraction)).layout
        moments = {leaf.path: leaf for leaf in layout if leaf.part == "optimizer"}
        on_host = [leaf.bytes for leaf in moments.values() if leaf.on_host]
        beside = [
            leaf.bytes for path, leaf in moments.items() if path in may_be and not leaf.on_host
        ]
        wanted = fraction * sum(leaf.bytes for leaf in moments.values())
        assert min(on_host, default=0) >= max(beside, default=0) or not on_host
        assert sum(on_host) >= wanted or not beside
        assert sum(on_host) - min(on_host, default=0) <= wanted
        assert layout.per_device() + layout.per_device(host=True) == everything


def test_single_numbers_stay_on_the_devices():
    layout = shard(min_size=1, offload=ALL).layout
    assert not layout.optimizer[0].count.on_host
    assert layout.by_path["enter/bias"].on_host


def test_the_layout_tells_what_is_in_host_memory():
    layout = shard(offload=ALL, precision=BF16).layout
    assert "in host memory" in layout.summary()
    assert layout.per_device("optimizer") < layout.per_device("optimizer", host=True) / 5
    (line,) = [line for line in str(layout).splitlines() if " 0/mu/enter/kernel " in line]
    assert "optimizer  in host memory; " in line
    # A copy in the compute dtype travels to the units.
    assert str(layout.other["copies"]["enter"]["kernel"].dtype) == "bfloat16"


@pytest.mark.releases
@pytest.mark.long
def test_checkpoints_move_between_layouts_with_and_without_offload(tmp_path):
    source = shard(offload=ALL, precision=BF16)
    _, state, _ = train(source)
    store = CheckpointStore(tmp_path)
    store.save(2, source.to_checkpoint(state), data={}, metadata={})
    store.close()
    for target in (
        shard(strategy="zero1", data=4, precision=BF16),
        shard(strategy="hybrid_shard", data=2, replica=4, precision=BF16, offload=ALL),
    ):
        restored, _, _ = CheckpointStore(tmp_path).restore(2, target.checkpoint_target())
        restored = target.from_checkpoint(restored)
        check_equal(arrays(restored.params), arrays(state.params))
        check_equal(arrays(restored.opt_state), arrays(state.opt_state))
        _, metrics = target.make_train_step(SMALL.loss)(restored, SMALL.batch(5))
        assert np.isfinite(metrics["loss"])


@pytest.mark.releases
def test_evaluation_and_the_model_read_parameters_from_host_memory():
    sharded, batch = shard(offload=ALL), SMALL.batch(0)
    state = sharded.init(0)
    assert sharded.layout.by_path["enter/kernel"].on_host
    without = shard()
    pairs = ((without, without.init(0)), (sharded, state))
    sums = [np.asarray(each.make_eval_step(SMALL.loss)(start, batch)) for each, start in pairs]
    np.testing.assert_array_equal(*sums)
    expected = by_hand(state.params, batch["x"])
    found = sharded.apply(lambda model, x: model(x))(state, batch["x"])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    model = sharded.model(state)
    np.testing.assert_allclose(model(batch["x"]), expected, rtol=1e-4, atol=1e-5)


def test_stacks_of_vectors_stay_on_the_device():
    """In 16 bits XLA:TPU cannot fetch one row of them."""
    for precision in (None, BF16):
        sharded = shard(offload=ALL, precision=precision)
        stacks = {path: leaf for path, leaf in sharded.layout.by_path.items() if leaf.stacked}
        on_host = {path: len(leaf.shape) > 2 for path, leaf in stacks.items()}
        assert set(on_host.values()) == {True, False}
        for leaf in sharded.layout:  # parameters, copies and moments
            path = next((path for path in stacks if leaf.path.endswith(path)), None)
            assert path is None or leaf.on_host == on_host[path], leaf.path


def test_of_arrays_of_one_shape_a_stack_is_told_by_its_path():
    class Both(nnx.Module):
        def __init__(self):
            self.matrix, self.stack = nnx.Param(jnp.ones((8, 64))), nnx.Param(jnp.ones((8, 64)))

    sharded = on_eight(
        lambda rngs: Both(),
        optax.adam(1e-3),
        units="model",
        stacked=["stack"],
        precision=BF16,
        offload=ALL,
        min_size=16,
    )
    on_host = {leaf.path: leaf.on_host for leaf in sharded.layout if leaf.shape == (8, 64)}
    assert len(on_host) == 7  # parameters, moments, and the copy of the matrix
    assert on_host == {path: path.endswith("matrix") for path in on_host}


def test_what_offload_cannot_mean_is_refused():
    fraction, names = {"what": "not a fraction"}, {"what": "no names of activations"}
    cases = [
        ({"optimizer": 1.5}, fraction),
        ({"optimizer": "all"}, fraction),
        ({"optimizer": float("nan")}, fraction),
        ({"params": 0.5}, {"what": "not a bool"}),
        ({"activations": ("attention",)}, {"what": "not a bool"}),
        ({"activations": None}, {"what": "not a bool"}),
        ({"activation_names": "attention"}, names),
        ({"activation_names": (1,)}, names),
        ({"activations": True, "activation_names": ("mlp",)}, {"what": "or activations by name"}),
    ]
    calls = {
        str(arguments): (lambda arguments=arguments: fsdp.Offload(**arguments), fields)
        for arguments, fields in cases
    }
    calls["no Offload"] = (lambda: shard(offload={"optimizer": True}), {"what": "not an Offload"})
    assert not_refused(calls) == {}


@pytest.mark.parametrize("min_size", [1, 3])
def test_what_all_updates_read_stays_on_the_device(min_size):
    """Muon's three coefficients, which all matrices would otherwise be updated with at once."""
    offload = fsdp.Offload(optimizer=True)
    sharded = shard(tx=optax.contrib.muon(1e-3), min_size=min_size, offload=offload)
    (coefficients,) = (
        leaf for leaf in jax.tree.leaves(sharded.layout.optimizer) if "ns_coeffs" in leaf.path
    )
    assert not coefficients.on_host
    assert report_of(sharded).groups > 1
