"""The check that a new state stays finite: the same result, no matmul and no memory more."""

import re
from collections import Counter
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
from fsdp_jax.program.equations import all_eqns
from fsdp_jax.step.finite import checked_update, stays_finite
from fsdp_jax.train.build import build
from fsdp_jax.train.config_file import load_config

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


# Multiplications of arrays that element-wise updates of a matrix and a vector need at least.
DOUBLED = dict.fromkeys(OPTIMIZERS, 2) | {"adamw": 12, "lamb": 12, "accumulated": 0, "adafactor": 0}


MESH = jax.make_mesh((8,), ("data",))
ROWS, COLUMNS = (NamedSharding(MESH, spec) for spec in (P("data"), P(None, "data")))


def stored(state, sharding=ROWS):
    """How each array is sharded: all alike."""
    return [SimpleNamespace(grad_sharding=sharding) for _ in jax.tree.leaves(state)]


def update_of(tx):
    def update(state, gradients, scalars):
        params, state = state
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return update


def start(tx):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(4, 8)), "b": rng.normal(size=8), "s": rng.normal(size=())}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    return (params, tx.init(params)), jax.tree.map(jnp.cos, params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_has_its_bits_and_the_check_its_answer(name):
    tx = OPTIMIZERS[name]()
    state, gradients = start(tx)
    update, leaves = update_of(tx), stored(state)
    checked = jax.jit(lambda *args: checked_update(update, *args, None, leaves))
    plain = jax.jit(lambda *args: update(*args, None))

    new, finite = checked(state, gradients)
    jax.tree.map(np.testing.assert_array_equal, new, plain(state, gradients))
    assert finite
    # One number of one gradient.
    for path in gradients:
        bad = gradients | {path: gradients[path].at[...].multiply(jnp.nan)}
        new, finite = checked(state, bad)
        expected = plain(state, bad)
        jax.tree.map(np.testing.assert_array_equal, new, expected)
        assert bool(finite) == bool(stays_finite(state, expected)) is False


def scale(logarithm):
    """2**logarithm, which XLA computes as it compiles, and JAX does not."""
    return jnp.exp2(jnp.sqrt(jnp.float32(logarithm**2)))


@pytest.mark.parametrize(
    "update",
    [
        lambda x, g, s: x + (g * scale(70)) * scale(70),
        lambda x, g, s: x + (g * scale(70)) * scale(70) * scale(-70),
        lambda x, g, s: x + jnp.full(64, s * 2.0**70) * np.float32(2.0**70) * np.float32(2.0**-60),
        lambda x, g, s: x + (g * s) * np.float32(2.0**70) * np.float32(2.0**70),
    ],
)
def test_what_is_checked_is_what_is_written(update):
    """XLA multiplies constants first, which may overflow where JAX's order does not."""
    x, g, s = jnp.ones(64), jnp.full(64, 2.0**-30), jnp.float32(2.0**-30)
    leaves = stored([x])

    @jax.jit
    def checked(x, g, s):
        return checked_update(lambda x, g, s: [update(*x, *g, s)], [x], [g], s, leaves)

    (new,), finite = checked(x, g, s)
    assert bool(finite) == bool(jnp.isfinite(new).all())


SMALL_FLOATS = [
    *("bfloat16", "float16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
]


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_every_small_float_that_is_not_finite_is_found(dtype):
    dtype = jnp.dtype(dtype)
    bits = np.arange(1 << 8 * dtype.itemsize, dtype=f"uint{8 * dtype.itemsize}")
    numbers = bits.view(dtype)
    with np.errstate(invalid="ignore"):  # NaN that NumPy would warn of
        expected = np.isfinite(numbers)
    found = jax.vmap(stays_finite)(jnp.zeros_like(numbers), jnp.asarray(numbers))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.needs_plugin
@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "bf16"), ("float8_e4m3fn", "f8e4m3fn")])
def test_small_floats_are_rounded_for_the_check_as_they_are_written(dtype, name):
    """XLA:GPU asked the float32 before it is rounded, which overflows later: 3.4e38, or 500."""
    mesh = Mesh(np.array(parse_topology("h100:8").devices()).ravel(), ("data",))
    sharding = NamedSharding(mesh, P("data"))
    x, g = (jax.ShapeDtypeStruct((1024,), kind, sharding=sharding) for kind in (dtype, "float32"))

    def update(state, gradients, scale):
        (x,), (g,) = state, gradients
        return [(x.astype(jnp.float32) - scale * g).astype(x.dtype)]

    @jax.jit
    def step(x, g, scale):
        (new,), finite = checked_update(update, [x], [g], scale, stored([x], sharding))
        return jnp.where(finite, new, x)

    program = step.lower(x, g, jax.ShapeDtypeStruct((), jnp.float32)).compile().as_text()
    roundings = re.findall(rf"= {name}\[\d+\]\S* convert\(", program)
    assert len(roundings) >= 2, "the check, and the write"


def operations(fn, *args):
    return Counter(eqn.primitive.name for eqn in all_eqns(jax.make_jaxpr(fn)(*args).jaxpr))


def evaluated(update, state, gradients, leaves):
    """How often each operation of an update is evaluated, the check itself left out."""

    def once(state, gradients):
        new = update(state, gradients, None)
        return new, stays_finite(state, new)

    def checked(state, gradients):
        return checked_update(update, state, gradients, None, leaves)

    before, after = (operations(fn, state, gradients) for fn in (once, checked))
    return {name: count - before[name] for name, count in after.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_element_wise_updates_alone_are_computed_twice(name):
    tx = OPTIMIZERS[name]()
    state, gradients = start(tx)
    more = evaluated(update_of(tx), state, gradients, stored(state))
    for primitive in ("dot_general", "reduce_sum", "reduce_max", "while", "scan", "cond", "pow"):
        assert not more.get(primitive), primitive
    assert more["optimization_barrier"] == 1
    assert more["mul"] >= DOUBLED[name], more


def replicated(x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P()))


@pytest.mark.parametrize(
    ("update", "shardings"),
    [
        (lambda x, m, g: (x + g * m, m), [ROWS, COLUMNS]),
        (lambda x, m, g: (x + replicated(g * 0.9), m), [ROWS, ROWS]),
        (lambda x, m, g: (x, replicated(m * 0.9 + g)), [ROWS, ROWS]),
        (lambda x, m, g: (x + (m := m * 0.9 + g), m), [ROWS, COLUMNS]),
    ],
)
def test_nothing_is_gathered_twice(update, shardings):
    """Arrays of different shardings are left to XLA."""
    x = jnp.ones((8, 8))
    leaves = [SimpleNamespace(grad_sharding=each) for each in shardings]
    more = evaluated(lambda state, grads, _: update(*state, *grads), (x, x), (x,), leaves)
    assert {name for name, count in more.items() if count} <= {"optimization_barrier", "jit"}


@pytest.mark.long
@pytest.mark.needs_plugin
def test_no_new_state_is_kept_for_the_check():
    """XLA:GPU kept 1.1 GiB of it, of layers that are many and large."""
    settings = ["--prefetch", "pre", "--train.local_batch", "True", "--mesh.replica", "1"]
    settings += ["--model.attention", "blockwise", "--train.accumulation", "1"]
    settings += ["--train.deferred_reduction", "False", "--train.global_batch_size", "8"]
    run = build(
        load_config(CONFIGS / "llama2_7b.yaml", settings), parse_topology("h100:8").devices()
    )
    program = run.step.compile(run.batch).as_text()
    results = re.findall(r"= (\(.*?\)) fusion\(", program)
    checks = [each for each in results if "pred[" in each]
    assert len(checks) > 4
    stacks = re.compile(r"(f32|bf16)\[32,\d+,\d+\]")  # [layers, ...]
    assert not [each for each in checks if stacks.search(each)]
