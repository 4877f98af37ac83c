"""Units that stay gathered are gathered once, and compute what they compute without.

How often a parameter is gathered is read in the trace; what is sent is the contract's to check.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import LinenTransformer, by_path, covering_params, linen_loss, on_eight, traffic
from refusals import not_refused

import fsdp_jax as fsdp
from fsdp_jax.contract.expected import expected_traffic
from fsdp_jax.testing import assert_contract, mesh_of

LAYERS = 4


class Block(nnx.Module):
    def __init__(self, width=16, *, rngs):
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Stack(nnx.Module):
    """Blocks in a list, or stacked and run by a scan, which may also run them backwards."""

    def __init__(self, scan, layers=LAYERS, *, backwards=False, remat=False, rngs):
        self.embed = nnx.Linear(16, 16, rngs=rngs)
        self.scan, self.backwards, self.remat = scan, backwards, remat
        if scan:
            self.blocks = nnx.vmap(lambda rngs: Block(rngs=rngs))(rngs.split(layers))
        else:
            self.blocks = nnx.List(Block(rngs=rngs) for _ in range(layers))

    def __call__(self, x):
        x = self.embed(x)
        call = lambda block, x: block(x)  # noqa: E731
        if self.remat:
            call = nnx.remat(call)
        if self.scan:
            run = nnx.scan(call, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, reverse=self.backwards)
            return run(self.blocks, x)
        for block in self.blocks:
            x = call(block, x)
        return x


def loss_fn(model, batch):
    return (model(batch["x"]) ** 2).sum(), batch["x"].shape[0]


ROWS = {"x": np.linspace(-1, 1, 56 * 16, dtype=np.float32).reshape(56, 16)}


def stack(scan=True, mesh=None, strategy="full_shard", model=None, **settings):
    make = model or partial(Stack, scan)
    return fsdp.fully_shard(
        lambda rngs: make(rngs=rngs),
        optax.adam(1e-2),
        mesh or fsdp.make_mesh(data=8),
        strategy,
        **{"units": [Block], "min_size": 8} | settings,
    )


def gathers(sharded, scan):
    """How often the kernel of each block is gathered in a step with local batches."""
    found = traffic(sharded, sharded.make_train_step(loss_fn, local_batch=True), ROWS)
    paths = ["blocks"] if scan else [f"blocks/{i}" for i in range(LAYERS)]
    reduced = [found["reduce_scatter", f"{path}/up/kernel"] for path in paths]
    assert sum(reduced) == LAYERS
    return [found["all_gather", f"{path}/up/kernel"] for path in paths]


def trained(sharded, steps=2, **settings):
    """Parameters after some steps, by path, without padding."""
    step, state = sharded.make_train_step(loss_fn, **settings), sharded.init(0)
    for _ in range(steps):
        state, _ = step(state, ROWS)
    return by_path(jax.tree.map(np.asarray, sharded.to_checkpoint(state).params))


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("scan", "prefetch", "remat", "expected"),
    [
        (True, "none", "full", [6]),
        (False, "pre", "none", [2, 2, 1, 1]),
        pytest.param(True, "pre", "none", [6], marks=LONG),
        pytest.param(True, "post", "full", [6], marks=LONG),
        pytest.param(False, "none", "full", [2, 2, 1, 1], marks=LONG),
        pytest.param(False, "post", "none", [2, 2, 1, 1], marks=LONG),
    ],
)
def test_the_last_units_are_gathered_once(scan, prefetch, remat, expected):
    sharded = stack(scan, keep_gathered=2, prefetch=prefetch, remat=remat)
    assert gathers(sharded, scan) == expected


@pytest.mark.parametrize(
    ("scan", "prefetch", "local_batch", "keep"),
    [
        (True, "none", False, 2),
        pytest.param(True, "none", True, 1, marks=LONG),
        pytest.param(True, "pre", False, 2, marks=LONG),
        pytest.param(True, "post", True, 3, marks=LONG),
        pytest.param(False, "pre", False, 2, marks=LONG),
    ],
)
def test_units_stay_gathered_bit_for_bit(scan, prefetch, local_batch, keep):
    """XLA may fuse a layer that is outside of its loop, and round otherwise; not one so small."""
    settings = {"prefetch": prefetch, "remat": "full"}
    without = trained(stack(scan, **settings), local_batch=local_batch)
    kept = trained(stack(scan, keep_gathered=keep, **settings), local_batch=local_batch)
    assert all(np.array_equal(kept[path], value) for path, value in without.items())


AXES = [
    [True, False],  # stacked
    ["none", "post", "pre"],
    ["none", "full", "selective"],
    ["full_shard", "hybrid_shard", "hybrid_shard_optimizer"],
    [False, True],  # local batches
    [1, 2, LAYERS],  # units that stay gathered
    [1, 7, 4],  # devices
]


@pytest.mark.parametrize(
    ("scan", "prefetch", "remat", "strategy", "local_batch", "keep", "devices"),
    covering_params(AXES, first=[(True, "pre", "none", "hybrid_shard", True, 1, 4)], quick=1),
)
def test_results_are_those_of_one_device(
    scan, prefetch, remat, strategy, local_batch, keep, devices
):
    replica = 2 if "hybrid" in strategy and devices == 4 else 1
    mesh = fsdp.make_mesh(data=devices // replica, replica=replica, devices=jax.devices()[:devices])
    settings = {"prefetch": prefetch, "remat": remat, "keep_gathered": keep}
    found = trained(stack(scan, mesh, strategy, **settings), local_batch=local_batch)
    expected = _by_hand(scan)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=2e-5, atol=2e-6, err_msg=path)


def _by_hand(scan, steps=2):
    """Plain Flax and optax on one device, from the same initial values."""
    start = stack(scan, fsdp.make_mesh(data=1, devices=jax.devices()[:1])).init(0)
    graphdef, params = nnx.split(Stack(scan, rngs=nnx.Rngs(0)))
    values, tx = by_path(start.params), optax.adam(1e-2)
    flat = [("/".join(map(str, path)), leaf) for path, leaf in nnx.to_flat_state(params)]
    arrays = {path: jnp.asarray(values[path]) for path, _ in flat}
    structure = jax.tree.structure(params)

    def loss(arrays):
        leaves = [arrays[path] for path, _ in flat]
        total, count = loss_fn(nnx.merge(graphdef, jax.tree.unflatten(structure, leaves)), ROWS)
        return total / count

    state = tx.init(arrays)
    for _ in range(steps):
        updates, state = tx.update(jax.jit(jax.grad(loss))(arrays), state, arrays)
        arrays = optax.apply_updates(arrays, updates)
    return arrays


@pytest.mark.long
def test_a_scan_that_runs_backwards_keeps_the_layers_that_run_last():
    backwards = partial(Stack, True, backwards=True)
    without = trained(stack(model=backwards))
    kept = stack(model=backwards, keep_gathered=2)
    assert gathers(kept, scan=True) == [6]
    found = trained(kept)
    assert all(np.array_equal(found[path], value) for path, value in without.items())


@pytest.mark.long
def test_a_linen_scan_keeps_its_last_layers():
    model, tokens = LinenTransformer(layers=4), jnp.zeros((1, 8), jnp.int32)
    batch = {"tokens": np.arange(16 * 9, dtype=np.int32).reshape(16, 9) % 32}
    found = []
    for keep in (0, 2):
        sharded = on_eight(model, units=["LinenBlock"], inputs=(tokens,), keep_gathered=keep)
        state, _ = sharded.make_train_step(linen_loss)(sharded.init(0), batch)
        found.append(by_path(state.params))
    assert all(np.array_equal(found[1][path], value) for path, value in found[0].items())


def sent(sharded, role="gather", **settings):
    plan = sharded.make_train_step(loss_fn, **settings).plan
    rows = [each for each in expected_traffic(plan) if each.path.startswith("blocks")]
    return sum(each.bytes for each in rows if each.role == role)


def test_what_is_declared_falls_in_proportion_to_what_is_kept():
    gathered = [sent(stack(keep_gathered=keep), accumulation=3) for keep in range(LAYERS + 1)]
    once = gathered[-1]
    assert gathered == [once * (2 * LAYERS - keep) // LAYERS for keep in range(LAYERS + 1)]
    unrolled = [sent(stack(False, keep_gathered=keep), accumulation=3) for keep in (0, 3)]
    assert unrolled == [gathered[0], gathered[3]]


def test_units_are_chosen_by_number_bytes_class_or_path():
    """A block's copies take 4 bytes for each of 2 x 16 x 32 + 48 elements: 4.19 KiB."""
    one = 4 * (2 * 16 * 32 + 48)
    budgets = {f"{one}B": 1, f"{2 * one + 1}B": 2, "9KB": 2, "1GiB": LAYERS}
    for scan in (True, False):
        for budget, count in budgets.items():
            by_bytes = stack(scan, keep_gathered=budget)
            by_number = stack(scan, keep_gathered=count)
            assert by_bytes.layout.units == by_number.layout.units, budget
    assert "the last 2 of 4 layers of 'blocks', 8.38 KiB a device" in (
        stack(keep_gathered=2).layout.units
    )
    assert "2 units to 'blocks/3', 8.38 KiB" in stack(False, keep_gathered=2).layout.units
    for named in ([Block], ["Block"], ["blocks"]):
        assert "all 4 layers of 'blocks'" in stack(keep_gathered=named).layout.units
    plan = stack(False, keep_gathered=["blocks/1"]).make_train_step(loss_fn).plan
    kept = {comm.unit for comm in plan.comms.values() if comm.keeps}
    assert kept == {"blocks/1"}
    # Units of one scan take turns, so that the last two are of the last layer. The embedding
    # is first, although its name is last.
    pairs = stack(units=[nnx.Linear], keep_gathered=3).make_train_step(loss_fn).plan
    layers = {path: comm.keeps for path, comm in pairs.comms.items() if "kernel" in path}
    assert layers == {"blocks/down/kernel": 1, "blocks/up/kernel": 2, "embed/kernel": 0}


class Mixed(Stack):
    """Large blocks behind small ones, which the default of `min_size` replicates."""

    def __init__(self, *, rngs):
        super().__init__(False, rngs=rngs)
        large, small = (lambda: Block(16, rngs=rngs)), (lambda: nnx.Linear(16, 16, rngs=rngs))
        self.blocks = nnx.List([large(), large(), small(), small()])


def test_units_that_are_not_sharded_are_neither_counted_nor_kept():
    """A kernel of a block has 512 elements, one of a Linear 256."""
    choose = partial(stack, model=Mixed, units=[Block, nnx.Linear])
    one = "gathered until the backward pass: 'blocks/1/down', 2 KiB a device"
    for keep in (1, "3KiB", ["blocks/1/down", "blocks/3"]):
        sharded = choose(keep_gathered=keep, min_size=300)
        assert sharded.layout.units.endswith(one), keep
        plan = sharded.make_train_step(loss_fn).plan
        assert sum(comm.kept_bytes for comm in plan.comms.values()) == 4 * 512
    budget = {"what": "no unit's gathered", "expected": "2 KiB, of 'blocks/1/down'"}
    cases = {
        "budget": (partial(choose, keep_gathered="1KiB", min_size=300), budget),
        "number": (partial(choose, keep_gathered=5, min_size=300), {"expected": "at most 4"}),
        "class": (partial(choose, keep_gathered=["Liner"], min_size=600), {"fix": "'Linear'"}),
    }
    assert not_refused(cases) == {}
    for keep in (1, "1KiB", ["blocks/1/down"]):
        with pytest.warns(fsdp.SlowerWarning, match="has no effect: nothing of these units is sh"):
            sharded = choose(keep_gathered=keep, min_size=600)
        assert "gathered until" not in sharded.layout.units
    choose(mesh=fsdp.make_mesh(devices=jax.devices()[:1]), keep_gathered=1)


def test_bars_show_what_stays_gathered():
    (bar,) = stack(keep_gathered=2).compare_strategies(["full_shard"]).bars
    assert bar.parts["kept gathered"] == 2 * 4 * (2 * 16 * 32 + 48)


@pytest.mark.filterwarnings("ignore:prefetch:fsdp_jax.SlowerWarning")  # of the embedding
@pytest.mark.parametrize("prefetch", ["none", pytest.param("pre", marks=LONG)])
def test_several_units_of_a_layer_stay_gathered_in_other_numbers(prefetch):
    sharded = stack(units=[nnx.Linear], keep_gathered=3, prefetch=prefetch)
    found = traffic(sharded, sharded.make_train_step(loss_fn, local_batch=True), ROWS)
    assert found["all_gather", "blocks/down/kernel"] == 2 * LAYERS - 1
    assert found["all_gather", "blocks/up/kernel"] == 2 * LAYERS - 2


class Groups(nnx.Module):
    """Scans inside a scan: no scan runs the layers one by one."""

    def __init__(self, *, rngs):
        make = nnx.vmap(nnx.vmap(lambda rngs: Block(rngs=rngs)))
        self.blocks = make(rngs.split((3, 2)))

    def __call__(self, x):
        inner = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        run = nnx.scan(inner, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return run(self.blocks, x)


def test_what_cannot_stay_gathered_is_refused():
    def traced(**settings):
        return stack(**settings).make_train_step(loss_fn).lower(ROWS)

    own = {"model": partial(Stack, False, remat=True), "keep_gathered": 1}
    cases = {
        "class": (
            partial(stack, keep_gathered=["Blok"]),
            {"where": "keep_gathered", "got": "Blok", "expected": "Block", "fix": "'Block'"},
        ),
        "no unit": (
            partial(stack, keep_gathered=[nnx.Linear]),
            {"where": "keep_gathered", "got": "Linear", "fix": "units=[...]"},
        ),
        "number": (
            partial(stack, keep_gathered=LAYERS + 1),
            {"where": "keep_gathered", "expected": f"at most {LAYERS}"},
        ),
        "budget": (
            partial(stack, keep_gathered="1KiB"),
            {"where": "keep_gathered", "expected": "4.19 KiB, of 'blocks'", "got": "1KiB"},
        ),
        "text": (
            partial(stack, keep_gathered="Block"),
            {"where": "keep_gathered", "fix": "['Block'] for the units of that name"},
        ),
        "bool": (partial(stack, keep_gathered=True), {"where": "keep_gathered", "got": "True"}),
        "negative": (partial(stack, keep_gathered=-1), {"where": "keep_gathered", "got": "-1"}),
        "scans in a scan": (
            partial(traced, model=Groups, keep_gathered=1),
            {"where": "keep_gathered, unit 'blocks'", "got": "1", "fix": "['blocks']"},
        ),
        "a checkpoint of the model's": (
            partial(traced, **own),
            {"where": "keep_gathered, unit 'blocks/3'", "fix": "remat='full'"},
        ),
    }
    assert not_refused(cases) == {}


def test_an_evaluation_keeps_nothing():
    sharded = stack(keep_gathered=2)
    total, count = sharded.make_eval_step(loss_fn)(sharded.init(0), ROWS)
    assert np.isfinite(float(total))
    assert int(count) == len(ROWS["x"])


def test_with_a_strategy_that_gathers_once_it_has_no_effect():
    with pytest.warns(fsdp.SlowerWarning, match=r"keep_gathered=2 has no effect.*full_shard"):
        sharded = stack(strategy="shard_grad_op", keep_gathered=2)
    assert not any(comm.keeps for comm in sharded.make_train_step(loss_fn).plan.comms.values())


@pytest.mark.needs_plugin
@pytest.mark.long
@pytest.mark.parametrize(
    ("scan", "prefetch", "local_batch"),
    [(True, "pre", False), (True, "none", False), (False, "none", False), (True, "pre", True)],
)
def test_the_compiled_program_of_a_gpu_gathers_what_is_declared(scan, prefetch, local_batch):
    """XLA neither shards the copies that stay nor gathers again: 4 blocks of which 2 stay."""
    wide = partial(Stack, scan)
    sharded = stack(
        scan, mesh_of("h100:8"), model=wide, keep_gathered=2, prefetch=prefetch, remat="full"
    )
    step = sharded.make_train_step(loss_fn, local_batch=local_batch)
    contract = assert_contract(step, ROWS)
    without = stack(scan, mesh_of("h100:8"), prefetch=prefetch, remat="full")
    more = assert_contract(without.make_train_step(loss_fn, local_batch=local_batch), ROWS)
    assert contract.wire_bytes < more.wire_bytes
