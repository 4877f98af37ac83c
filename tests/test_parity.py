"""Every strategy, mesh, accumulation and kind of model against an unsharded run written by hand.

The whole product has 288 members. Each pair of values from any two of the four axes is run at least once (asserted
below), and full_shard, the default, with every mesh and every accumulation.
"""

import dataclasses
import itertools

import pytest
from reference import CASES, STEPS, check, control, train

import fsdp_jax as fsdp

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning")]

MESHES = [(1, 1), (1, 8), (2, 4), (4, 2)]
ACCUMULATIONS = [(1, False), (4, False), (4, True)]
STRATEGIES = list(fsdp.STRATEGIES)


def pruned():
    cases = set()
    for i, strategy in enumerate(STRATEGIES):
        for j, mesh in enumerate(MESHES):
            model = list(CASES)[(i + j) % 4]
            cases.add((strategy, mesh, ACCUMULATIONS[(i + i // 4 + j) % 3], model))
    for mesh, accumulation in itertools.product(MESHES, ACCUMULATIONS):
        cases.add(("full_shard", mesh, accumulation, "nnx-gpt-scanned"))
    for model, accumulation in itertools.product(CASES, ACCUMULATIONS):
        cases.add(("hybrid_shard", (2, 4), accumulation, model))
    return sorted(cases)


def test_no_pair_is_left_out():
    axes = [STRATEGIES, MESHES, ACCUMULATIONS, list(CASES)]
    for a, b in itertools.combinations(range(4), 2):
        missing = set(itertools.product(axes[a], axes[b])) - {(case[a], case[b]) for case in pruned()}
        assert not missing


def run(name, mesh, strategy, **settings):
    replica, data = mesh
    mesh = fsdp.make_mesh(data=data, replica=replica, allow_fewer=True)
    return train(CASES[name], mesh, strategy, **settings)[0]


@pytest.mark.parametrize(("strategy", "mesh", "accumulation", "model"), pruned())
def test_strategy_trains_as_one_device_does(strategy, mesh, accumulation, model):
    count, deferred = accumulation
    found = train_quietly(model, mesh, strategy, count, deferred)
    check(found, control(model, count))


def train_quietly(model, mesh, strategy, count, deferred):
    """Batch statistics need the whole batch: there deferring is refused, and its cost stated."""
    if deferred and "batchnorm" in model and mesh != (1, 1):
        with pytest.warns(
            fsdp.SlowerWarning, match=r"'norm/.*' *.*reduced after each of 4 microbatches, up to .*iB each"
        ):
            return run(model, mesh, strategy, accumulation=count, deferred=deferred)
    return run(model, mesh, strategy, accumulation=count, deferred=deferred)


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize("reduce", [None, "float32"])
def test_bfloat16_compute_stays_near(model, reduce):
    """bfloat16 has 8 bits of mantissa: losses within 2%, parameters within 2 learning rates a step of float32's."""
    precision = fsdp.Precision(compute="bfloat16", reduce=reduce, output="float32")
    if reduce and "batchnorm" in model:
        with pytest.warns(fsdp.SlowerWarning, match="reduced in bfloat16, not float32"):
            found = run(model, (2, 4), "full_shard", precision=precision)
    else:
        found = run(model, (2, 4), "full_shard", precision=precision)
    check(found, control(model, 1), loss=2e-2, params=2e-3 * STEPS)


@pytest.mark.parametrize("strategy", ["no_shard", "shard_grad_op", "full_shard"])
@pytest.mark.parametrize("model", ["nnx-gpt-scanned", "linen-transformer"])
def test_recomputing_changes_nothing(strategy, model):
    check(run(model, (1, 8), strategy, remat="full"), control(model, 1))


def test_clipping_is_by_the_global_norm():
    found = run("nnx-gpt-scanned", (2, 4), "full_shard", clip=0.05)
    check(found, control("nnx-gpt-scanned", 1, clip=0.05))
    assert abs(found[0][-1] - control("nnx-gpt-scanned", 1)[0][-1]) > 1e-6


@pytest.mark.parametrize("units", ["model", "scan", 1000, ["Block", "SelfAttention", "MLP"]], ids=str)
def test_units_change_what_is_gathered_not_what_is_computed(units):
    case = dataclasses.replace(CASES["nnx-gpt-scanned"], units=units)
    found, _ = train(case, fsdp.make_mesh(data=8), local_batch=None)
    check(found, control("nnx-gpt-scanned", 1))
