"""Numbers that an update would make infinite or NaN are kept, in one pass over the state.

Updates of three small arrays are compiled and run; how XLA:GPU reads the state is read from
programs that are compiled for one.
"""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fsdp_jax import optim
from fsdp_jax.planner import parse_topology
from fsdp_jax.step import finite as checks
from fsdp_jax.step.finite import keep_finite
from fsdp_jax.train.build import build
from fsdp_jax.train.config_file import load_config
from fsdp_jax.tree import flatten

CONFIGS = Path(__file__).parents[2] / "configs"


def leaves_out_floats():
    """An optimizer with a state of no array, of a mask with infinities, and of an integer."""

    def update(gradients, state, params):
        return jax.tree.map(lambda g: -0.1 * g, gradients), {**state, "scale": 0.0}

    def init(params):
        mask = jnp.array([0.0, -jnp.inf])
        return {"scale": jnp.zeros(()), "mask": mask, "count": jnp.int32(0)}

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adamw": lambda: optax.adamw(0.1),
    "adamw int8": lambda: optim.adamw(0.1, moments="int8", block=8),
    "muon": lambda: optax.contrib.muon(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "accumulated": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "infinities": leaves_out_floats,
}


def leaves_of(state):
    """How each array is sharded, all alike: (parameters, optimizer state)."""

    def leaves(part, tree):
        return [
            SimpleNamespace(path=path, part=part, shape=np.shape(x), update_spec=P("data"))
            for path, x in flatten(tree).items()
        ]

    return [*leaves("params", state[0]), *leaves("optimizer", state[1])]


def start(tx):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(64, 64)), "b": rng.normal(size=8), "s": rng.normal(size=())}
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    state = params, jax.jit(tx.init)(params)
    return jax.device_get(state), jax.tree.map(np.cos, params)


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch):
    """Tells apart what is kept of parameters of any size as of small, or of large ones."""
    set_size(monkeypatch, request.param)
    return request.param


def set_size(monkeypatch, size):
    if size == "large":
        monkeypatch.setattr(checks, "MANY", 0)


def kept(old, new, leaves=()):
    """`keep_finite`, compiled."""
    return jax.jit(partial(keep_finite, leaves=leaves))(old, new)


# Each with one of the sizes.
@pytest.mark.parametrize(
    ("name", "size"), list(zip(OPTIMIZERS, ["small", "large"] * 4, strict=True))
)
def test_what_is_finite_is_updated_and_what_is_not_is_kept(name, size, monkeypatch):
    set_size(monkeypatch, size)
    tx = OPTIMIZERS[name]()
    state, gradients = start(tx)

    def update(state, gradients):
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def step(state, gradients):
        return keep_finite(state, update(state, gradients), leaves_of(state))

    step, plain = jax.jit(step), jax.jit(update)
    new, finite = step(state, gradients)
    assert finite
    jax.tree.map(np.testing.assert_array_equal, new, plain(state, gradients))
    # One number of one gradient.
    for path in gradients:
        spoiled = np.array(gradients[path])
        spoiled[(0,) * spoiled.ndim] = np.nan
        bad = gradients | {path: spoiled}
        new, finite = step(state, bad)
        assert not finite
        raw = plain(state, bad)
        for old, after, other in zip(*map(jax.tree.leaves, (state, new, raw)), strict=True):
            assert not (np.isfinite(old) & ~np.isfinite(after)).any()
            expected = np.where(np.isfinite(other), after, old)
            np.testing.assert_array_equal(after, expected)


@pytest.mark.usefixtures("size")
def test_a_parameter_and_its_moments_are_kept_together():
    tx = optax.adam(lambda count: jnp.inf)
    state, gradients = start(tx)
    gradients["w"][0] = 0.0  # times infinity: NaN

    @jax.jit
    def update(gradients, state):
        updates, raw = tx.update(gradients, state[1], state[0])
        return optax.apply_updates(state[0], updates), raw

    new = update(gradients, state)
    found, finite = kept(state, new, leaves_of(state))
    assert not finite
    for path, old in flatten(state).items():
        if not path.endswith("count"):
            np.testing.assert_array_equal(flatten(found)[path], old, err_msg=path)
    # Of another sharding, a moment is kept where it is not finite itself.
    leaves = leaves_of(state)
    for leaf in leaves[3:]:
        leaf.update_spec = P()
    found, finite = kept(state, new, leaves)
    assert not finite
    jax.tree.map(np.testing.assert_array_equal, found, (state[0], new[1]))


def floats(*numbers):
    return np.array(numbers, np.float32)


@pytest.mark.usefixtures("size")
def test_a_moment_alone_is_kept_with_its_parameter():
    old = {"w": floats(0, 0, 0, 0)}, {"mu": {"w": floats(0, 0, 0, 0)}}
    new = {"w": floats(1, 1, 1, 1)}, {"mu": {"w": floats(1, np.inf, 1, 1)}}
    found, finite = kept(old, new, leaves_of(old))
    assert not finite
    for x in jax.tree.leaves(found):
        np.testing.assert_array_equal(x, [1, 0, 1, 1])


def test_what_is_infinite_may_stay_so_or_become_finite():
    old = {"mask": floats(-np.inf, 0), "best": np.float32(np.inf), "n": np.int32(1)}
    new = {"mask": floats(-np.inf, 1), "best": 2.0, "n": np.int32(2)}
    found, finite = kept(old, new)
    assert finite
    jax.tree.map(np.testing.assert_array_equal, found, new)


def test_what_is_infinite_beside_its_moment_stays_so():
    old = {"w": floats(-np.inf, 0)}, {"mu": {"w": floats(0, 0)}}
    new = {"w": floats(np.nan, 1)}, {"mu": {"w": floats(1, 1)}}
    found, finite = kept(old, new, leaves_of(old))
    assert finite
    np.testing.assert_array_equal(found[0]["w"], [-np.inf, 1])
    np.testing.assert_array_equal(found[1]["mu"]["w"], [0, 1])
    new = {"w": floats(-np.inf, np.inf)}, {"mu": {"w": floats(1, 1)}}
    found, finite = kept(old, new, leaves_of(old))
    assert not finite
    jax.tree.map(np.testing.assert_array_equal, found, old)


SMALL_FLOATS = [
    *("bfloat16", "float16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
]


@pytest.mark.parametrize("moment", [False, True])
@pytest.mark.usefixtures("size")
def test_every_small_float_that_is_not_finite_is_found(moment):
    wrong = []
    for dtype in map(jnp.dtype, SMALL_FLOATS):
        bits = np.arange(1 << 8 * dtype.itemsize, dtype=f"uint{8 * dtype.itemsize}")
        numbers = bits.view(dtype)
        with np.errstate(invalid="ignore"):  # NaN that NumPy would warn of
            expected = np.isfinite(numbers)
        leaves = leaves_of(({"w": numbers[0]}, {"mu": {"w": numbers[0]}})) if moment else ()
        new = [numbers] * (1 + moment)
        check = jax.jit(jax.vmap(partial(keep_finite, leaves=leaves)))
        found, finite = check(jax.tree.map(np.zeros_like, new), new)
        if (finite != expected).any() or np.asarray(found[-1])[~expected].astype(np.float32).any():
            wrong.append(dtype.name)
    assert wrong == []


@pytest.mark.needs_plugin
@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "bf16"), ("float8_e4m3fn", "f8e4m3fn")])
def test_small_floats_are_checked_as_they_are_written(dtype, name):
    """XLA:GPU asked the float32 before it is rounded, which overflows later: 3.4e38, or 500."""
    mesh = Mesh(np.array(parse_topology("h100:8").devices()).ravel(), ("data",))
    sharding = NamedSharding(mesh, P("data"))
    x, g = (jax.ShapeDtypeStruct((1024,), kind, sharding=sharding) for kind in (dtype, "float32"))

    @jax.jit
    def step(x, g):
        return keep_finite([x], [(x.astype(jnp.float32) - g).astype(x.dtype)])

    program = step.lower(x, g).compile().as_text()
    rounded = re.findall(rf"(\S+) = {name}\[\d+\]\S* convert\(", program)
    bits = re.findall(r"= u\d+\[\d+\]\S* bitcast(?:-convert)?\((\S+)\)", program)
    assert set(bits) & set(rounded), program


@pytest.mark.needs_plugin
def test_the_state_is_read_once_and_no_mask_is_stored():
    """XLA:GPU kept 1.1 GiB, or read all of the state twice, for layers that are many and large."""
    settings = ["--prefetch", "pre", "--train.local_batch", "True"]
    settings += ["--mesh.replica", "1", "--train.deferred_reduction", "False"]
    settings += ["--model.attention", "blockwise", "--train.accumulation", "1"]
    settings += ["--train.global_batch_size", "8"]
    run = build(
        load_config(CONFIGS / "llama2_7b.yaml", settings), parse_topology("h100:8").devices()
    )
    compiled = run.step.compile(run.batch)
    results = re.findall(r"= (\(?.*?\)?) (?:fusion|copy)\(", compiled.as_text())
    stacks = [re.findall(r"(f32|pred)\[32,\d+,\d+\]", each) for each in results]
    assert not [each for each in stacks if "pred" in each]
    # A parameter and its two moments are written by one kernel.
    assert len([each for each in stacks if each == ["f32"] * 3]) == 7
    assert compiled.memory_analysis().peak_memory_in_bytes <= 15.27 * 2**30
