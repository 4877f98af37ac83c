"""Every strategy, mesh, way to run a step and kind of model against an unsharded run by hand.

Of the 708 possible combinations, each pair of values from any two axes is run at least
once, and in CI five of six pairs.
"""

import dataclasses
from typing import NamedTuple

import pytest
from reference import CASES, STEPS, check, control, covering, covering_params, pairs_of, train

import fsdp_jax as fsdp

pytestmark = [
    pytest.mark.releases,
    pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning"),
]

MESHES = [(2, 4), (1, 8), (4, 2), (1, 1)]


class Way(NamedTuple):
    """How a step runs: on the global batch or on local ones, in so many microbatches."""

    local_batch: bool
    accumulation: int
    deferred: bool = False


WAYS = [Way(False, 1), Way(False, 4), Way(True, 1), Way(True, 4), Way(True, 4, True)]
AXES = [list(fsdp.STRATEGIES), MESHES, WAYS, list(CASES), ["none", "full"]]


def possible(strategy, mesh, way, model, remat):
    """Whether a combination is valid: batch statistics need the global batch."""
    return not (way.local_batch and ("batchnorm" in model or mesh == (1, 1)))


def name_of(case):
    strategy, mesh, way, model, remat = case
    batch = "local" if way.local_batch else "global"
    deferred = "-deferred" if way.deferred else ""
    return (
        f"{strategy}-{mesh[0]}x{mesh[1]}-{batch}-{way.accumulation}{deferred}-{model}-remat_{remat}"
    )


def test_a_covering_has_every_possible_pair():
    axes = [[0, 1, 2], [0, 1], [0, 1]]
    found = covering(axes, first=[(2, 1, 1)], possible=lambda a, b, c: not a == b == 0)
    assert found[0] == (2, 1, 1)
    covered = set().union(*map(pairs_of, found))
    assert covered == {(0, 1, a, b) for a in range(3) for b in range(2) if a or b} | {
        (axis, 2, x, c) for axis in (0, 1) for x in axes[axis] for c in range(2)
    }


def run(name, mesh, strategy, **settings):
    replica, data = mesh
    mesh = fsdp.make_mesh(data=data, replica=replica, allow_fewer=True)
    return train(CASES[name], mesh, strategy, **settings)[0]


@pytest.mark.parametrize(
    ("strategy", "mesh", "way", "model", "remat"),
    covering_params(AXES, possible=possible, name=name_of),
)
def test_every_strategy_matches_an_unsharded_run(strategy, mesh, way, model, remat):
    found = run(model, mesh, strategy, remat=remat, **way._asdict())
    check(found, control(model, way.accumulation))


@pytest.mark.parametrize(
    ("model", "reduce"),
    [
        ("nnx-gpt-scanned", None),
        pytest.param("nnx-gpt-unrolled", "float32", marks=pytest.mark.long),
        ("linen-transformer", "float32"),
        ("nnx-cnn-batchnorm", None),
    ],
)
def test_bfloat16_compute_stays_close_to_float32(model, reduce):
    """bfloat16 has 8 bits: losses within 2%, parameters within 2 learning rates a step."""
    precision = fsdp.Precision(compute="bfloat16", reduce=reduce, output="float32")
    found = run(model, (2, 4), "full_shard", precision=precision, local_batch=reduce is not None)
    check(found, control(model, 1), loss=2e-2, params=2e-3 * STEPS)


def test_clipping_is_by_the_global_norm():
    found = run("nnx-gpt-scanned", (2, 4), "full_shard", clip=0.05)
    check(found, control("nnx-gpt-scanned", 1, clip=0.05))
    assert abs(found[0][-1] - control("nnx-gpt-scanned", 1)[0][-1]) > 1e-6


@pytest.mark.parametrize(
    "units", ["model", "scan", 1000, ["Block", "SelfAttention", "MLP"]], ids=str
)
def test_units_change_what_is_gathered_and_not_what_is_computed(units):
    case = dataclasses.replace(CASES["nnx-gpt-scanned"], units=units)
    found, _ = train(case, fsdp.make_mesh(data=8))
    check(found, control("nnx-gpt-scanned", 1))
