"""Batches of other shapes: one more compilation, which is told, up to a limit.

A step of one matmul is compiled for each shape, since the compiled programs are what is counted.
"""

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import multihost_utils
from processes import JOIN as JOIN_CLUSTER
from processes import PATIENCE, free_port, run_cluster, start
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.step import compiled_step

pytestmark = pytest.mark.releases


def model(rngs):
    return nnx.Linear(4, 8, rngs=rngs)


def loss(model, batch):
    y = model(batch["x"].astype(jnp.float32))
    return (y**2).sum(), y.size


def batch(length, rows=16, dtype=np.float32):
    x = np.random.default_rng(length).normal(size=(rows, length, 4))
    return {"x": x.astype(dtype)}


@pytest.fixture(scope="module")
def sharded():
    return fsdp.fully_shard(model, optax.sgd(0.1), fsdp.make_mesh(data=8), min_size=1)


def unsharded(batches):
    """Losses of one device, in plain JAX."""
    key, _ = jax.random.split(jax.random.key(0))
    graphdef, params = nnx.split(model(nnx.Rngs(key)))

    @jax.jit
    def train(params, x):
        mean = lambda params: loss(nnx.merge(graphdef, params), {"x": x})[0] / (x.size * 2)  # noqa: E731
        value, grads = jax.value_and_grad(mean)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    losses = []
    for each in batches:
        params, value = train(params, each["x"])
        losses.append(float(value))
    return losses


@pytest.mark.parametrize("settings", [{}, {"accumulation": 2, "local_batch": True}])
def test_each_new_shape_is_compiled_once_and_told(sharded, settings):
    step, state = sharded.make_train_step(loss, **settings), sharded.init(0)
    batches = [batch(4), batch(6), batch(4), batch(6), batch(6, rows=32)]
    losses, programs = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in batches:
            state, metrics = step(state, each)
            losses.append(float(metrics["loss"]))
            programs.append(step.compiled)
    np.testing.assert_allclose(losses, unsharded(batches), rtol=1e-5)
    assert [programs.index(each) for each in programs] == [0, 1, 0, 1, 4]
    texts = [str(each.message) for each in caught]
    assert {each.category for each in caught} == {fsdp.RecompileWarning}
    assert len(texts) == 2
    assert caught[0].filename == __file__
    if not settings:
        assert "batch/x float32[16, 4, 4] -> float32[16, 6, 4] (2 of at most 8 shapes)" in texts[0]
        assert "batch/x float32[16, 6, 4] -> float32[32, 6, 4] (3 of at most 8 shapes)" in texts[1]


@pytest.mark.filterwarnings("ignore:the step is compiled once more:fsdp_jax.RecompileWarning")
def test_a_shape_beyond_the_limit_is_an_error(sharded, monkeypatch):
    monkeypatch.setattr(compiled_step, "MOST_SHAPES", 2)
    step, state = sharded.make_train_step(loss), sharded.init(0)
    for length in (1, 2):
        state, _ = step(state, batch(length))
    change = "[16, 2, 4] -> float32[16, 3, 4]"
    with refused("for 2 shapes", where="batch", got=change, fix="pad to a few"):
        step(state, batch(3))
    step(state, batch(1))  # the state was not donated


def test_another_dtype_is_told_also_by_an_eval_step(sharded):
    evaluate, state = sharded.make_eval_step(loss), sharded.init(0)
    total, _ = evaluate(state, batch(2))
    with pytest.warns(fsdp.RecompileWarning, match=r"float32\[16, 2, 4\] -> float16\[16, 2, 4\]"):
        half, _ = evaluate(state, batch(2, dtype=np.float16))
    np.testing.assert_allclose(half, total, rtol=1e-2)
    with pytest.warns(fsdp.RecompileWarning, match=r"-> float32\[8, 2, 4\] \(3 of"):
        part, _ = evaluate(state, batch(2, rows=8))
    kernel, bias = (np.asarray(state.params[name]) for name in ("kernel", "bias"))
    expected = ((batch(2, rows=8)["x"] @ kernel + bias) ** 2).sum()
    np.testing.assert_allclose(part, expected, rtol=1e-5)


# Several processes: as one of two, then two real ones


@pytest.fixture
def one_of_two(sharded, monkeypatch):
    """A step that is compiled for one shape, in a process that then has another beside it."""
    step = sharded.make_train_step(loss)
    step(sharded.init(0), batch(2))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(step._placement, "processes", 2)
    return lambda length: step._check_shape_of_processes({"batch/x": f"float32[16, {length}, 4]"})


def test_rows_of_a_process_beside_global_arrays_are_refused(sharded, monkeypatch):
    """Their microbatches are cut from other rows; as in two processes, by a patch of one."""
    step = sharded.make_train_step(loss, accumulation=2)
    monkeypatch.setattr(step._placement, "processes", 2)
    is_numpy = lambda leaf: isinstance(leaf, np.ndarray)  # noqa: E731
    monkeypatch.setattr(step._placement, "is_local", is_numpy)
    mixed = batch(3) | {"y": jnp.ones((16, 1))}
    with refused(where="batch", got="alone: x", fix="make_array_from_process_local_data"):
        step.put(mixed)


def test_a_shape_that_another_process_does_not_have_is_refused(one_of_two, monkeypatch):
    def gathered(change):
        gather = lambda own: np.stack([own, own + change])  # noqa: E731
        monkeypatch.setattr(multihost_utils, "process_allgather", gather)

    gathered(0)
    one_of_two(3)
    gathered(np.array([0, 1], np.uint32))
    got = "batch/x float32[16, 3, 4] in this process"
    with refused("batches of different shapes", where="batch", got=got, fix="the same shape"):
        one_of_two(3)


def test_a_process_that_waits_alone_with_a_new_shape_raises(one_of_two, monkeypatch):
    end = threading.Event()
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: end.wait() and own)
    monkeypatch.setattr(compiled_step, "AGREEMENT_SECONDS", 0.01)
    try:
        with refused("batches of different shapes", got="none of a new shape within 0.01 s"):
            one_of_two(3)
    finally:
        end.set()


TOGETHER = """
import sys, warnings
import numpy as np, optax
from flax import nnx
import fsdp_jax as fsdp
from fsdp_jax.step import compiled_step

warnings.simplefilter("ignore", fsdp.RecompileWarning)
sharded = fsdp.fully_shard(
    lambda rngs: nnx.Linear(4, 8, rngs=rngs), optax.sgd(0.1), fsdp.make_mesh(), min_size=1
)
loss = lambda model, batch: ((model(batch["x"]) ** 2).sum(), batch["x"].size)
rng = np.random.default_rng(process)
rows = lambda length: {"x": rng.normal(size=(8, length, 4)).astype(np.float32)}
step, state = sharded.make_train_step(loss), sharded.init(0)
for length in (3, 5, 3):
    state, metrics = step(state, rows(length))
    print("trained", length, float(metrics["loss"]), flush=True)
"""
DIFFERENT = """
# A shape that one of them knows, and shapes that are new to both.
for lengths in ((5, 6), (6, 7)):
    try:
        step(state, rows(lengths[process]))
    except ValueError as error:
        print("refused:", str(error).replace("\\n", " "), flush=True)
state, metrics = step(state, rows(5))
print("trained", 5, float(metrics["loss"]), flush=True)
"""
ALONE = """
compiled_step.AGREEMENT_SECONDS = 3.0
try:
    state, metrics = step(state, rows((4, 3)[process]))
    float(metrics["loss"])
except ValueError as error:
    print("refused:", str(error).replace("\\n", " "), flush=True)
    raise
"""


@pytest.mark.long
def test_processes_change_the_shape_together():
    outs = run_cluster(TOGETHER + DIFFERENT + "leave_cluster()")
    lines = [[x for x in out.splitlines() if x.startswith(("trained", "refused"))] for out in outs]
    assert [line.split()[:2] for line in lines[0]] == [
        *(["trained", "3"], ["trained", "5"], ["trained", "3"]),
        *(["refused:", "the"], ["refused:", "the"], ["trained", "5"]),
    ]
    assert [x for x in lines[0] if x[0] == "t"] == [x for x in lines[1] if x[0] == "t"]
    for mine, length in zip(lines, ("5, 4", "6, 4"), strict=True):
        assert "batches of different shapes" in mine[3]
        assert f"batch/x float32[16, {length}] in this process" in mine[3]


@pytest.mark.long
def test_a_process_that_alone_has_another_shape_ends_the_run():
    port = free_port()
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    run = [start(JOIN_CLUSTER + TOGETHER + ALONE, port, n, 2, **flags) for n in range(2)]
    try:
        outs = [each.communicate(timeout=PATIENCE) for each in run]
    finally:
        for each in run:
            each.kill()
    assert "batches of different shapes" in outs[0][0], outs
    assert "none of a new shape within 3 s" in outs[0][0]
    assert all(each.returncode not in (0, None) for each in run)
