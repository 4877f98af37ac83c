"""The layout states the bytes per device by the arithmetic of ZeRO, and real arrays have them.

Compiles the initialization of a tiny model for each strategy, for these real arrays.
"""

import dataclasses
import warnings

import jax
import optax
import pytest
from flax import nnx
from for_each import for_each

import fsdp_jax
from fsdp_jax import Precision, make_mesh
from fsdp_jax.sharding.layout import COLUMNS
from fsdp_jax.sharding.strategy import STRATEGIES, get_strategy
from fsdp_jax.tables import html_table, text_table

pytestmark = pytest.mark.releases

WIDTH = 16
P = 2 * WIDTH * WIDTH + 2 * WIDTH  # parameters: two kernels, two biases
MESHES = {"1x8": (1, 8), "2x4": (2, 4), "4x2": (4, 2), "1x1": (1, 1)}
COUNT = 4  # bytes of Adam's step counter, replicated on every device


class Tiny(nnx.Module):
    """Two layers, every dim of which is divisible by eight."""

    def __init__(self, rngs: nnx.Rngs, width: int = WIDTH):
        self.one = nnx.Linear(width, width, rngs=rngs)
        self.two = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return self.two(nnx.relu(self.one(x)))


def shard(strategy="full_shard", mesh=(1, 8), width=WIDTH, **settings):
    replica, data = mesh
    settings = {"min_size": 1} | settings
    devices = make_mesh(data, replica, allow_fewer=True)
    return fsdp_jax.fully_shard(
        lambda rngs: Tiny(rngs, width), optax.adam(1e-3), devices, strategy, **settings
    )


def bytes_on_devices(tree) -> list[int]:
    """Bytes of a tree's arrays on each device that holds any."""
    total: dict[int, int] = {}
    for array in jax.tree.leaves(tree):
        for piece in array.addressable_shards:
            total[piece.device.id] = total.get(piece.device.id, 0) + piece.data.nbytes
    return list(total.values())


# ZeRO's arithmetic


@for_each("mesh", MESHES.values())
@for_each("strategy", STRATEGIES)
def test_bytes_per_device(strategy, mesh):
    replica, data = mesh
    row = STRATEGIES[strategy]
    # into how many parts the strategy splits what it shards
    n = 1 if not row.shards_optimizer else data if row.hybrid else replica * data
    updated = replica * data if row.updates_over_replicas else n
    params = 4 * P // n if row.shards_params else 4 * P
    adam = 8 * P // updated + COUNT

    sharded = shard(strategy, mesh)
    layout = sharded.layout
    assert layout.per_device("params") == params
    assert layout.per_device("optimizer") == adam
    assert (layout.total("params"), layout.total("optimizer")) == (4 * P, 8 * P + COUNT)

    if mesh == (2, 4):
        state = sharded.init(0)
        assert bytes_on_devices(state.params) == [params] * (replica * data)
        assert bytes_on_devices(state.opt_state) == [adam] * (replica * data)


@for_each("strategy", ["no_shard", "zero1", "full_shard"])
def test_parameters_stored_in_bfloat16_take_two_bytes(strategy):
    sharded = shard(strategy, precision=Precision(param="bfloat16", compute="bfloat16"))
    params = 2 * P // (8 if get_strategy(strategy).shards_params else 1)
    adam = 4 * P // (8 if get_strategy(strategy).shards_optimizer else 1) + COUNT
    assert (sharded.layout.per_device("params"), sharded.layout.per_device("optimizer")) == (
        params,
        adam,
    )
    state = sharded.init(0)
    assert bytes_on_devices(state.params) == [params] * 8
    assert bytes_on_devices(state.opt_state) == [adam] * 8


def test_parts_add_up():
    layout = shard("zero1", (2, 4)).layout
    parts = ("params", "optimizer", "other")
    assert layout.per_device() == sum(layout.per_device(part) for part in parts)
    assert layout.total() == sum(leaf.bytes for leaf in layout)


def test_frozen_parameters_cost_no_optimizer_state():
    sharded = shard(frozen=("one/",))
    layout, half = sharded.layout, P // 2
    assert layout.per_device("params") == 4 * P // 8
    assert layout.per_device("optimizer") == 8 * half // 8 + COUNT
    assert not any("one" in leaf.path for leaf in jax.tree.leaves(layout.optimizer))
    assert [path for path, leaf in layout.by_path.items() if leaf.trainable] == [
        "two/bias",
        "two/kernel",
    ]
    assert layout.trainable(layout.params).keys() == {"two"}
    state = sharded.init(0)
    assert bytes_on_devices(state.params) == [4 * P // 8] * 8
    assert bytes_on_devices(state.opt_state) == [8 * half // 8 + COUNT] * 8


# Warnings


def test_indivisible_arrays_are_padded_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layout = shard(width=9).layout
    assert layout.total("params") == 4 * 2 * (9 * 9 + 9)
    assert layout.per_device("params") == 4 * 2 * (16 * 9 + 16) // 8
    assert not any(leaf.wasted_bytes for leaf in layout)


@for_each(
    "settings",
    [{"strategy": "no_shard"}, {"min_size": 2**14}, {"mesh": (1, 1)}],
)
def test_nothing_warns_where_nothing_is_wasted(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layout = shard(width=9, **settings).layout
    assert layout.per_device() == layout.total()


# Tables and summaries


def test_rows_are_sorted_by_part_then_by_bytes():
    layout = shard("zero1").layout
    rows = layout.rows()
    assert len(rows) == len(list(layout))
    assert [row[0] for row in rows] == sorted(
        (row[0] for row in rows), key=["params", "optimizer", "other"].index
    )
    first = dict(zip(COLUMNS, rows[0], strict=True))
    assert first == {
        "part": "params",
        "path": "one/kernel",
        "shape": "(16,16)",
        "dtype": "float32",
        "spec": "P()",
        "per device": "1 KiB",
        "rule": "heuristic",
        "reason": "zero1 replicates it",
    }


def test_specs_of_parameters_and_gradients_follow_the_strategy():
    for strategy in STRATEGIES.values():
        for leaf in jax.tree.leaves(shard(strategy, (2, 4)).layout.params):
            assert bool(leaf.spec) is strategy.shards_params
            assert bool(leaf.grad_spec) is strategy.shards_optimizer
            assert leaf.stored.sharding == leaf.sharding
            assert leaf.is_replicated is not strategy.shards_params


def test_a_memory_kind_is_carried_by_the_sharding():
    leaf = dataclasses.replace(shard().layout.by_path["one/kernel"], memory_kind="pinned_host")
    assert leaf.sharding.memory_kind == leaf.stored.sharding.memory_kind == "pinned_host"
    assert leaf.grad_sharding.memory_kind is None or leaf.grad_sharding.memory_kind == "device"


def test_print_shows_the_sum_and_every_leaf():
    layout = shard(mesh=(2, 4)).layout
    first, header, rule, *rows, units = str(layout).splitlines()
    assert units == f"units: {layout.units}"
    assert first == layout.summary()
    assert first.startswith("full_shard on replica=2 x data=4: ")
    assert header.split("  ")[0] == "part"
    assert set(rule) == {"-", " "}
    assert len(rows) == len(list(layout))
    for leaf in layout:
        assert any(leaf.path in row for row in rows)


def test_the_summary_compares_with_replication():
    assert "1.00x" in shard("no_shard").layout.summary()
    assert shard("no_shard").layout.per_device() == shard("no_shard").layout.total()


def test_notebooks_get_escaped_html():
    html = shard(rules=[("(?P<x>one)/kernel", ("data",))]).layout._repr_html_()
    assert "(?P&lt;x&gt;one)/kernel" in html
    assert "<x>" not in html


def test_tables():
    assert text_table(("a", "bytes"), [("xyz", 1), ("x", 22)], right=("bytes",)) == (
        "a    bytes\n---  -----\nxyz      1\nx       22"
    )
    assert "<td style='text-align:left'>&lt;b&gt;</td>" in html_table(
        ("a",), [("<b>",)], caption="<&>"
    )
    assert "<caption>&lt;&amp;&gt;</caption>" in html_table(("a",), [], caption="<&>")


def test_a_layout_allocates_no_arrays():
    before = sum(array.nbytes for array in jax.live_arrays())
    layout = shard(width=4096).layout
    assert layout.total("params") > 100 * 2**20
    assert sum(array.nbytes for array in jax.live_arrays()) < before + 2**10
    assert all(isinstance(leaf.stored, jax.ShapeDtypeStruct) for leaf in layout)
