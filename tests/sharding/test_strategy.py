"""Strategies: the ZeRO table, names and aliases, and the questions that other packages ask."""

import re
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from for_each import for_each
from jax.sharding import Mesh, PartitionSpec
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax import processes
from fsdp_jax.planner import fake_devices, parse_topology
from fsdp_jax.sharding.mesh import make_mesh, mesh_axes
from fsdp_jax.sharding.rules import Placement
from fsdp_jax.sharding.strategy import STRATEGIES, get_strategy
from fsdp_jax.train.config import Config
from fsdp_jax.train.typed_keys import field_comments

pytestmark = pytest.mark.releases

ROOT = Path(fsdp.__file__).parents[1]
README = re.findall(
    r"^\| `(\w+)`(?: \((.*?)\))? \| (4P\S*) \| (8P\S*) \|", (ROOT / "README.md").read_text(), re.M
)


def test_the_documentation_has_every_strategy_with_its_aliases():
    """In README's table, with the bytes; in the docstring of `fully_shard` and in `--help`."""
    documented = {
        name: (tuple(re.findall(r"\w+", aliases)), params, optimizer)
        for name, aliases, params, optimizer in README
    }
    expected = {}
    for name, strategy in STRATEGIES.items():
        params = "4P/n" if strategy.shards_params else "4P"
        optimizer = "8P/n" if strategy.shards_optimizer else "8P"
        if strategy.updates_over_replicas:
            optimizer = "8P/(n·replicas)"
        expected[name] = (strategy.aliases, params, optimizer)
    assert documented == expected
    named = [
        name + f" ({', '.join(row.aliases)})" * bool(row.aliases)
        for name, row in STRATEGIES.items()
    ]
    assert field_comments(Config)["strategy"] == ", ".join(named) + "."
    for name in STRATEGIES:
        assert f"`{name}`," in fsdp.fully_shard.__doc__, name


def test_questions_follow_from_the_table():
    for strategy in STRATEGIES.values():
        assert get_strategy(strategy.name) is strategy
        assert strategy.summary
        assert strategy.gathers_params == strategy.shards_params, "what is sharded is gathered"
        assert strategy.gathers_per_unit == (strategy.gather == "unit")
        assert strategy.gathers_updates == (strategy.name == "zero1")
        assert not strategy.updates_over_replicas or strategy.hybrid


@for_each("spelt", [str.lower, str.upper, str.title])
def test_names_and_aliases_in_any_case(spelt):
    for name, strategy in STRATEGIES.items():
        for word in (name, *strategy.aliases):
            assert get_strategy(spelt(word)) is strategy


def test_a_strategy_may_be_passed_in_place_of_its_name():
    strategy = STRATEGIES["zero1"]
    assert get_strategy(strategy) is strategy


@for_each(
    ("word", "meant"),
    [
        ("full_shart", "full_shard"),
        ("FULL-SHARD", "full_shard"),
        ("zero4", "zero"),
        ("_HYBRID_SHARD_ZERO2", "hybrid"),
    ],
)
def test_unknown_names_propose_the_nearest(word, meant):
    with refused(f"unknown strategy '{word}'", fix=f"did you mean '{meant}"):
        get_strategy(word)


def test_names_like_nothing_list_all():
    with pytest.raises(ValueError, match=r"one of: ddp, fsdp, full_shard, hfsdp, hsdp.*zero3"):
        get_strategy("qqqqqqqq")


@for_each(
    ("data", "replica", "everywhere", "hybrid"),
    [
        (8, 1, ("data",), ("data",)),
        (4, 2, ("replica", "data"), ("data",)),
        (1, 8, ("replica",), ("data",)),
        (1, 1, ("data",), ("data",)),
    ],
)
def test_axes_that_state_is_sharded_along(data, replica, everywhere, hybrid):
    axes = mesh_axes(make_mesh(data, replica, allow_fewer=True))
    for strategy in STRATEGIES.values():
        assert strategy.shard_axes(axes) == (hybrid if strategy.hybrid else everywhere)


def test_a_strategy_places_parameters_and_gradients():
    placement = Placement(PartitionSpec("data"), "rule", "first rule that matches", 8)
    replicated = Placement(PartitionSpec(), "rule", "zero1 replicates it")
    axes = mesh_axes(make_mesh())
    zero1, full_shard = STRATEGIES["zero1"], STRATEGIES["full_shard"]
    assert (
        full_shard.param_placement(placement, axes)
        is full_shard.grad_placement(placement, axes)
        is placement
    )
    assert zero1.param_placement(placement, axes) == replicated
    assert zero1.param_placement(placement, axes, has_copy=True) is zero1.grad_placement(
        placement, axes
    )


def test_replicas_update_parts_of_each_shard():
    strategy, axes = STRATEGIES["hybrid_shard_optimizer"], mesh_axes(make_mesh(4, 2))
    for spec, shape, stacked, parts in (
        (("data",), (16,), 0, (("data", "replica"),)),
        ((None, "data", None), (3, 16, 2), 1, (None, ("data", "replica"))),
        ((), (16, 16), 0, ()),
        # Not padded where another dim can be split, but for one that stacks layers.
        (("data",), (12, 6, 10), 0, ("data", None, "replica")),
        ((None, "data"), (2, 12, 3), 1, (None, ("data", "replica"))),
    ):
        placement = Placement(PartitionSpec(*spec), "rule", "first rule that matches")
        assert strategy.param_placement(placement, axes) is placement
        assert strategy.grad_placement(placement, axes) is placement
        updated = strategy.update_placement(placement, axes, shape, stacked)
        assert updated.spec == PartitionSpec(*parts)
    # Of one replica there are no parts.
    whole = Placement(PartitionSpec("data"), "rule", "first rule that matches")
    assert strategy.update_placement(whole, mesh_axes(make_mesh(8)), (16,), 0) is whole


def test_hybrid_strategies_refuse_to_shard_along_replica():
    placements = {"up/kernel": Placement(PartitionSpec(None, ("replica", "data")), "up", "rule")}
    STRATEGIES["full_shard"].check_placements(placements, mesh_axes(make_mesh(4, 2)))
    with refused("replicates along 'replica'", where="up/kernel, by up"):
        STRATEGIES["hybrid_shard"].check_placements(placements, mesh_axes(make_mesh(4, 2)))


ONE_REPLICA = "^{} with one replica is {}: .* network between 2 {}, {}.*; make_mesh.replica=2"


@for_each(
    ("name", "same", "often"),
    [
        ("hsdp", "full_shard", "for each unit"),
        ("hybrid_shard_zero2", "shard_grad_op", "in each step"),
        ("hybrid_shard_optimizer", "full_shard", "for each unit"),
    ],
)
@for_each(("machine", "kind"), [("h100:2x4", "hosts"), ("v5e:2x2*2", "TPU slices")])
def test_one_replica_on_several_hosts_is_told_with_its_cost(name, same, often, machine, kind):
    devices = fake_devices(parse_topology(machine))
    text = ONE_REPLICA.format(get_strategy(name).name, same, kind, often)
    with pytest.warns(fsdp.SlowerWarning, match=text):
        get_strategy(name).warn_of_one_replica(mesh_axes(make_mesh(devices=devices)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_strategy(same).warn_of_one_replica(mesh_axes(make_mesh(devices=devices)))
        get_strategy(name).warn_of_one_replica(mesh_axes(make_mesh(replica=2, devices=devices)))


@for_each("machine", ["h100:8", "v5e:4x4"])
def test_one_replica_with_fast_links_alone_is_no_news(machine):
    axes = mesh_axes(make_mesh(devices=fake_devices(parse_topology(machine))))
    get_strategy("hybrid_shard").warn_of_one_replica(axes)


@for_each("shape", [(2, 4), (8, 1)])
def test_only_the_axes_of_gathers_cross_the_network(shape):
    """An axis of the model's own, such as one of pipeline stages, may."""
    devices = np.array(fake_devices(parse_topology("h100:2x4"))).reshape(shape)
    get_strategy("hybrid_shard").warn_of_one_replica(mesh_axes(Mesh(devices, ("stage", "data"))))


def test_processes_of_one_host_are_one_host(monkeypatch):
    axes = mesh_axes(make_mesh(devices=fake_devices(parse_topology("h100:2x4"))))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "_hosts", ["node1", "node1"])
    get_strategy("hybrid_shard").warn_of_one_replica(axes)
    monkeypatch.setattr(processes, "_hosts", ["node1", "node2"])
    with pytest.warns(fsdp.SlowerWarning, match="2 hosts"):
        get_strategy("hybrid_shard").warn_of_one_replica(axes)
