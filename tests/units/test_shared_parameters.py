"""A parameter that modules share goes by any of its paths, in every argument with patterns.

Compiles one step of a tiny model, whose frozen parameters have to stay.
"""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.tree import flatten

pytestmark = pytest.mark.releases

BATCH = {"x": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)}


class Tied(nnx.Module):
    """`head/kernel` is `embed/kernel`; `twin` is `middle`."""

    def __init__(self, rngs):
        self.embed, self.head, self.middle = (nnx.Linear(8, 8, rngs=rngs) for _ in range(3))
        self.head.kernel = self.embed.kernel
        self.twin = self.middle

    def __call__(self, x):
        return self.head(self.twin(self.middle(self.embed(x))))


def shard(**settings):
    mesh = fsdp.make_mesh(data=8)
    settings = {"units": "model", "min_size": 8} | settings
    return fsdp.fully_shard(lambda rngs: Tied(rngs), optax.sgd(0.1), mesh, **settings)


def test_a_parameter_is_frozen_by_any_of_its_paths():
    """Of what is frozen the optimizer has no state; one step shows that it stays."""
    for pattern, frozen in (
        ("head/kernel", {"embed/kernel"}),
        ("twin/bias", {"middle/bias"}),
        ("^head/", {"embed/kernel", "head/bias"}),
    ):
        sharded = shard(frozen=[pattern])
        trainable = {path for path, leaf in sharded.layout.by_path.items() if leaf.trainable}
        assert sharded.layout.by_path.keys() - trainable == frozen
    state = sharded.init(0)
    before = flatten(jax.device_get(state.params))
    step = sharded.make_train_step(lambda model, batch: ((model(batch["x"]) ** 2).sum(), 8))
    after = flatten(jax.device_get(step(state, BATCH)[0].params))
    assert {path for path in before if (before[path] == after[path]).all()} == frozen


def test_the_first_rule_that_matches_any_of_its_paths_places_it():
    rules = [("head/kernel", (None, "fsdp")), ("kernel", ("fsdp",)), (".*", None)]
    layout = shard(rules=rules).layout
    assert layout.by_path["embed/kernel"].spec == P(None, "data")
    assert layout.by_path["middle/kernel"].spec == P("data")


def test_a_rule_that_is_shadowed_at_all_paths_is_refused():
    with pytest.raises(ValueError, match=r"shadowed rule: rule 'head/kernel'.*'embed/kernel'"):
        shard(rules=[("kernel", ("fsdp",)), ("head/kernel", (None, "fsdp"))])


def test_stacked_and_kept_parameters_go_by_any_path():
    precision = fsdp.Precision(compute="bfloat16", keep_float32=("head/kernel",))
    sharded = shard(precision=precision, stacked=["twin/kernel"])
    stacked = {path for path, leaf in sharded.layout.by_path.items() if leaf.stacked}
    assert stacked == {"middle/kernel"}
    plan = sharded.make_train_step(lambda model, batch: (model(batch["x"]).sum(), 8)).plan
    dtypes = {path: str(comm.transform.compute) for path, comm in plan.comms.items()}
    assert (dtypes["embed/kernel"], dtypes["middle/kernel"]) == ("float32", "bfloat16")


def test_a_pattern_that_matches_no_path_is_refused():
    with refused("'heads/kernel' matches no parameter", fix="'head/kernel'"):
        shard(frozen=["heads/kernel"])
