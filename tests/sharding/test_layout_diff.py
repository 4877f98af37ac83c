"""What two layouts place otherwise: on absent machines, from layouts and from their JSON."""

import json

import jax
import numpy as np
import optax
from flax import nnx
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.planner import fake_devices, parse_topology
from fsdp_jax.sharding.report import layout_json

D, F = 256, 1024


class Block(nnx.Module):
    """Kernels with the names that MaxText and Levanter give their dims."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        for name, shape, names in (
            ("up", (D, F), ("embed", "mlp")),
            ("down", (F, D), ("mlp", "embed")),
            ("heads", (D, 8, 32), ("embed", "heads", "kv")),
        ):
            kernel = nnx.Param(init(rngs.params(), shape), out_sharding=names, eager_sharding=False)
            setattr(self, name, kernel)


def layout(axes, *, devices="h100:2x8", **settings):
    mesh = jax.sharding.Mesh(
        np.array(fake_devices(parse_topology(devices))).reshape(4, 4), ("data", "model")
    )
    given = {"logical_axes": axes, "data": "data", "min_size": 1} | settings
    return fsdp.fully_shard(
        lambda rngs: Block(rngs), optax.sgd(0.1, momentum=0.9), mesh, **given
    ).layout


ONE = {"embed": "data", "mlp": "model", "heads": "model", "kv": None}
THREE = {"embed": ("data", "model"), "mlp": None, "heads": None, "kv": None}


def test_a_rule_that_names_more_axes_shows_what_it_places_otherwise():
    """As marin#1903: an axis list that is too long moves the model's axis to another dim."""
    first, second = layout(ONE), layout(THREE)
    diff = fsdp.diff_layouts(first, second)
    texts = {(leaf.part, leaf.path): leaf.changes for leaf in diff.leaves}
    changed = ("spec P('data', 'model') -> P(('data', 'model'))",)
    assert texts["params", "up"] == changed
    assert texts["params", "down"] == ("spec P('model', 'data') -> P(None, ('data', 'model'))",)
    assert {leaf.part for leaf in diff.leaves} == {"params", "optimizer"}
    assert diff.totals["params"] == (first.per_device("params"), second.per_device("params"))
    assert all(leaf.more_bytes == 0 for leaf in diff.leaves)
    assert "logical axes ('embed', 'mlp')" in next(x for x in diff.leaves if x.path == "up").reason
    text = str(diff)
    assert changed[0] in text
    assert "no difference" not in text


def test_what_is_replicated_counts_its_bytes():
    first, second = layout(ONE), layout(ONE, rules=[("up", ())])
    diff = fsdp.diff_layouts(first, second)
    up = {leaf.part: leaf for leaf in diff.leaves}["params"]
    assert up.path == "up"
    assert up.more_bytes == D * F * 4 * 15 // 16
    assert up.reason.startswith("annotation: logical axes")
    assert up.reason.endswith("-> up: first rule that matches")
    assert diff.totals["params"][1] - diff.totals["params"][0] == up.more_bytes
    # From JSON, in the other direction, and through JSON.
    back = fsdp.diff_layouts(json.loads(json.dumps(layout_json(second))), first)
    assert [leaf.more_bytes for leaf in back.leaves] == [-x.more_bytes for x in diff.leaves]
    assert json.loads(json.dumps(diff.to_json()))["leaves"][0]["path"]


def test_an_array_that_only_one_has():
    adam = fsdp.fully_shard(lambda rngs: Block(rngs), optax.adam(0.1), fsdp.make_mesh(), min_size=1)
    sgd = adam.on(fsdp.make_mesh(), tx=optax.sgd(0.1))
    diff = fsdp.diff_layouts(adam.layout, sgd.layout)
    assert {leaf.changes for leaf in diff.leaves} == {("only in the first",)}
    assert {leaf.part for leaf in diff.leaves} == {"optimizer"}
    assert "-> nothing" not in str(diff)
    same = fsdp.diff_layouts(adam.layout, adam.layout)
    assert same.is_empty
    assert str(same) == "no difference: full_shard on replica=1 x data=8"
    with refused("not a layout", where="second", got="dict"):
        fsdp.diff_layouts(adam.layout, {})


def test_a_damaged_layout_is_refused():
    whole = layout_json(layout(ONE))
    leaf = whole["leaves"][0]
    damages = (
        {"leaves": [{}]},
        {"leaves": 3},
        {"leaves": [leaf | {"spec": 1}]},
        {"leaves": [leaf | {"spec": ["data"]}]},
        {"leaves": [leaf | {"bytes_per_device": None}]},
        {"totals": {"params": 4}},
        {"totals": {"params": {"bytes_per_device": "4"}}},
        {"mesh": None},
    )
    for damage in damages:
        with refused("damaged", where="first"):
            fsdp.diff_layouts(whole | damage, whole)
