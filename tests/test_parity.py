"""Every strategy, mesh, accumulation and kind of model against an unsharded run written by hand.

The whole product has 288 members. Each pair of values from any two of the four axes is run at least once (asserted
below), and full_shard, the default, with every mesh and every accumulation.
"""

import dataclasses
import itertools
from typing import NamedTuple

import pytest
from reference import CASES, STEPS, check, control, train

import fsdp_jax as fsdp

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning")]

MESHES = [(1, 1), (1, 8), (2, 4), (4, 2)]
STRATEGIES = list(fsdp.STRATEGIES)


class Way(NamedTuple):
    """How a step runs: on the global batch or on local ones, in so many microbatches."""

    local_batch: bool
    accumulation: int
    deferred: bool = False


WAYS = [Way(False, 1), Way(False, 4), Way(True, 1), Way(True, 4), Way(True, 4, True)]


def possible(model, way):
    """Batch statistics are of the global batch."""
    return not (way.local_batch and "batchnorm" in model)


def pruned():
    cases = set()
    for i, strategy in enumerate(STRATEGIES):
        for j, mesh in enumerate(MESHES):
            model = list(CASES)[(i + j) % 4]
            cases.add((strategy, mesh, WAYS[(i + i // 4 + j) % 5], model))
        for way in WAYS:
            cases.add((strategy, MESHES[1 + i % 3], way, list(CASES)[i % 4]))
    for mesh, way in itertools.product(MESHES, WAYS):
        cases.add(("full_shard", mesh, way, "nnx-gpt-scanned"))
    for model, way in itertools.product(CASES, WAYS):
        cases.add(("hybrid_shard", (2, 4), way, model))
    for strategy, mesh, way, model in list(cases):
        if not possible(model, way):
            cases -= {(strategy, mesh, way, model)}
            cases |= {(strategy, mesh, way, "nnx-gpt-scanned"), (strategy, mesh, Way(False, way.accumulation), model)}
    return sorted(cases)


def test_no_pair_is_left_out():
    axes = [STRATEGIES, MESHES, WAYS, list(CASES)]
    for a, b in itertools.combinations(range(4), 2):
        pairs = set(itertools.product(axes[a], axes[b]))
        missing = pairs - {(case[a], case[b]) for case in pruned()}
        assert not {pair for pair in missing if (a, b) != (2, 3) or possible(pair[1], pair[0])}


def run(name, mesh, strategy, **settings):
    replica, data = mesh
    mesh = fsdp.make_mesh(data=data, replica=replica, allow_fewer=True)
    return train(CASES[name], mesh, strategy, **settings)[0]


@pytest.mark.parametrize(("strategy", "mesh", "way", "model"), pruned())
def test_strategy_trains_as_one_device_does(strategy, mesh, way, model):
    found = run(model, mesh, strategy, **way._asdict())
    check(found, control(model, way.accumulation))


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize("reduce", [None, "float32"])
def test_bfloat16_compute_stays_near(model, reduce):
    """bfloat16 has 8 bits of mantissa: losses within 2%, parameters within 2 learning rates a step of float32's."""
    precision = fsdp.Precision(compute="bfloat16", reduce=reduce, output="float32")
    local_batch = reduce is not None and "batchnorm" not in model
    if reduce and not local_batch:
        precision = dataclasses.replace(precision, reduce=None)
    found = run(model, (2, 4), "full_shard", precision=precision, local_batch=local_batch)
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
    found, _ = train(case, fsdp.make_mesh(data=8))
    check(found, control("nnx-gpt-scanned", 1))
