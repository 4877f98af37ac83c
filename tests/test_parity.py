"""Every strategy, mesh, way to run a step and kind of model against an unsharded run by hand.

Compiles and runs a step for each combination: only numbers show that it computes what one device
does. Each pair of values from any two axes is in at least one of the combinations.
"""

import dataclasses
from typing import NamedTuple

import optax
import pytest
from reference import (
    CASES,
    STEPS,
    check,
    control,
    covering,
    covering_params,
    pairs_of,
    train,
    train_unsharded,
)

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
# In `make test`: each strategy, way, model and policy at least once, on 8 devices.
QUICK = [
    ("no_shard", (1, 8), Way(True, 4), "nnx-gpt-scanned", "none"),
    ("zero1", (4, 2), Way(True, 1), "linen-transformer", "none"),
    ("shard_grad_op", (1, 8), Way(False, 4), "nnx-cnn-batchnorm", "none"),
    ("full_shard", (1, 8), Way(False, 4), "nnx-gpt-unrolled", "none"),
    ("full_shard", (1, 8), Way(False, 1), "linen-transformer", "none"),
    ("full_shard", (2, 4), Way(True, 4, True), "nnx-gpt-scanned", "full"),
    ("hybrid_shard", (2, 4), Way(True, 1), "nnx-gpt-scanned", "full"),
    ("hybrid_shard_zero2", (4, 2), Way(False, 1), "nnx-gpt-unrolled", "full"),
    ("hybrid_shard_optimizer", (2, 4), Way(True, 4), "nnx-gpt-scanned", "none"),
]


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
    covering_params(AXES, first=QUICK, possible=possible, name=name_of, quick=len(QUICK)),
)
def test_every_strategy_matches_an_unsharded_run(strategy, mesh, way, model, remat):
    found = run(model, mesh, strategy, remat=remat, **way._asdict())
    check(found, control(model, way.accumulation))


@pytest.mark.parametrize(
    ("model", "reduce"),
    [
        pytest.param("nnx-gpt-scanned", "float32", marks=pytest.mark.long),
        ("linen-transformer", "float32"),
        pytest.param("nnx-cnn-batchnorm", None, marks=pytest.mark.long),
    ],
)
def test_bfloat16_compute_stays_close_to_float32(model, reduce):
    """bfloat16 has 8 bits: losses within 2%, parameters within 2 learning rates a step."""
    precision = fsdp.Precision(compute="bfloat16", reduce=reduce, output="float32")
    found = run(model, (2, 4), "full_shard", precision=precision, local_batch=reduce is not None)
    check(found, control(model, 1), loss=2e-2, params=2e-3 * STEPS)


def test_clipping_is_by_the_global_norm():
    """With SGD, whose step is as long as the gradients: Adam's hardly depends on their scale.

    The norm is 0.60 in the first step, and 0.30 in the second.
    """
    settings = {"clip": 0.45, "steps": 2, "make_optimizer": lambda: optax.sgd(1.0)}
    found = run("nnx-gpt-scanned", (2, 4), "full_shard", **settings)
    check(found, train_unsharded(CASES["nnx-gpt-scanned"], **settings))


@pytest.mark.parametrize(
    "units",
    [
        "model",
        pytest.param("scan", marks=pytest.mark.long),
        pytest.param(["Block", "SelfAttention", "MLP"], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_units_change_nothing_that_is_computed(units):
    case = dataclasses.replace(CASES["nnx-gpt-scanned"], units=units)
    found, _ = train(case, fsdp.make_mesh(data=8))
    check(found, control("nnx-gpt-scanned", 1))
