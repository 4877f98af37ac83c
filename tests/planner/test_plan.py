"""What a plan says, in text and JSON, and that it is of the step that was given."""

import json
from functools import partial

import jax
import optax
import pytest
from jax.sharding import PartitionSpec

import fsdp_jax as fsdp
from fsdp_jax.errors import ConfigError
from fsdp_jax.models import GPT, Block, next_token_loss, preset
from fsdp_jax.planner import (
    Plan,
    Work,
    analytic_plan,
    compiled_plan,
    fake_devices,
    parse_topology,
    plans_table,
)
from fsdp_jax.planner.compiled.peak_memory import Buffer
from fsdp_jax.planner.compiled.program import CompiledProgram
from fsdp_jax.planner.make_plan import logits_bytes
from fsdp_jax.planner.settings import StepSettings, fixes

pytestmark = pytest.mark.core

FIELDS = {  # of CLI.md
    "topology",
    "devices",
    "parameters",
    "valley_bytes",
    "peak_bytes",
    "host_bytes",
    "capacity_bytes",
    "fits",
    "breakdown",
    "collectives",
    "wire_bytes",
    "wire_bytes_limit",
    "exposed_bytes",
    "time",
    "tokens_per_s_per_device",
    "mfu",
    "compile_s",
    "basis",
}
CONFIG = preset("tiny", layers=2, width=64, heads=4)
TRAINS = partial(next_token_loss, train=True)
HALF = fsdp.Precision(compute="bfloat16")


def batch(rows, tokens=64):
    return {"tokens": jax.ShapeDtypeStruct((rows, tokens + 1), "int32")}


def sharded(devices=None, config=CONFIG, replica=1, **arguments):
    arguments = {
        "strategy": "full_shard",
        "units": [Block],
        "precision": HALF,
        "remat": "full",
    } | arguments
    mesh = fsdp.make_mesh(-1, replica, devices=devices)
    return fsdp.fully_shard(
        lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), mesh, **arguments
    )


def make(settings, devices, config=CONFIG, rows=32):
    there = sharded(
        devices,
        config,
        settings.replica,
        strategy=settings.strategy,
        remat=settings.remat,
        prefetch=settings.prefetch,
    )
    return there.train_step(TRAINS, accumulation=settings.accumulation, local_batch=True), batch(
        rows
    )


@pytest.fixture(scope="module")
def plan():
    work = Work(tokens=8 * 64, flops=1e9, convention="by hand", vocab=256)
    return sharded().plan("h100:8", TRAINS, batch(8), work=work, analytic=True)


def test_every_figure_says_what_it_rests_on(plan):
    said = plan.to_json()
    assert set(said) >= FIELDS
    assert json.loads(json.dumps(said))["breakdown"] == plan.breakdown
    assert plan.basis["peak_bytes"] == plan.basis["time"] == "analytic"


def test_the_parts_add_up(plan):
    assert sum(plan.breakdown.values()) == plan.peak_bytes
    parts = plan.time.compute_s + plan.time.memory_s + plan.time.exposed_s
    assert parts == pytest.approx(plan.time.step_s)
    assert plan.valley_bytes == sharded().layout.per_device()
    assert plan.breakdown["optimizer"] == sharded().layout.per_device("optimizer")


def test_speed_is_tokens_and_flops_over_the_time_of_a_step(plan):
    assert plan.tokens_per_s_per_device == pytest.approx(64 / plan.time.step_s)
    assert plan.mfu == pytest.approx(1e9 / plan.time.step_s / 8 / 989.4e12)


def test_text_shows_what_a_person_asks_for(plan):
    shown = str(plan)
    for word in (
        "full_shard on h100:8",
        "fits",
        "activations",
        "exposed communication",
        "by hand",
        "analytic: ",
    ):
        assert word in shown


def test_a_plan_that_does_not_fit_says_so(plan):
    small = Plan(**{**vars(plan), "usable_bytes": plan.peak_bytes - 1})
    assert not small.fits
    assert "DOES NOT FIT" in str(small)


def test_the_limit_is_what_the_strategy_must_send():
    """2 bytes of every parameter that is gathered, twice, and of every gradient: 6 P (n-1)/n at
    most.
    """
    found = sharded().plan("h100:8", TRAINS, batch(8), analytic=True)
    gathered = [leaf for leaf in sharded().layout.by_path.values() if leaf.spec != PartitionSpec()]
    bound = sum(6 * leaf.bytes // 4 for leaf in gathered) * 7 // 8
    whole = sum(
        2 * 2 * leaf.bytes // 4
        for leaf in sharded().layout.by_path.values()
        if leaf not in gathered
    )
    assert 0.6 * bound < found.wire_bytes_limit <= bound + whole


@pytest.mark.parametrize(
    "topology", ["h100:8", "v5e:4x4", "v5p:2x2x2", "v5e:4x4*2", "a100-80gb:2x8"]
)
@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "shard_grad_op", "full_shard"])
def test_analytic_plans_of_every_strategy(topology, strategy):
    found = sharded(strategy=strategy).plan(topology, TRAINS, batch(32), analytic=True)
    assert found.fits
    assert found.peak_bytes > found.valley_bytes > 0
    assert found.time.step_s > 0
    assert found.wire_bytes_limit > 0


def test_hybrid_strategies_keep_their_replicas():
    there = sharded(replica=2, strategy="hybrid_shard")
    assert there.plan("h100:8", TRAINS, batch(8), analytic=True).mesh == {"replica": 2, "data": 4}
    assert there.plan("h100:2x8", TRAINS, batch(16), replica=4, analytic=True).mesh == {
        "replica": 4,
        "data": 4,
    }


def test_replicated_state_takes_eight_times_as_much():
    whole, parts = (
        sharded(strategy=name, min_size=0).plan("h100:8", TRAINS, batch(8), analytic=True)
        for name in ("no_shard", "full_shard")
    )
    assert whole.breakdown["optimizer"] == pytest.approx(8 * parts.breakdown["optimizer"], rel=0.02)


def test_virtual_devices_cannot_be_planned_for():
    with pytest.raises(ConfigError, match="no memory or speed of their own"):
        analytic_plan(
            sharded().train_step(TRAINS, local_batch=True),
            batch(8),
            parse_topology("cpu:8"),
            Work(),
        )


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="a multiple of 8 rows"):
        sharded().plan("h100:8", TRAINS, batch(9), analytic=True)


def test_fixes_are_what_turning_a_knob_saves():
    topology, settings = parse_topology("h100:8"), StepSettings("no_shard", remat="none")
    config = preset("tiny", layers=6, width=256, heads=4)
    build = partial(make, config=config, rows=128)
    before = analytic_plan(*build(settings, fake_devices(topology)), topology, Work())
    found = {fix.change: fix for fix in fixes(before, settings, build, topology, Work())}
    together = "--strategy full_shard --remat full --train.accumulation 2"
    assert set(found) >= {
        "--remat full",
        "--strategy full_shard",
        "--train.accumulation 2",
        together,
    }
    turns = {
        "--remat full": StepSettings("no_shard", remat="full"),
        "--strategy full_shard": StepSettings("full_shard"),
        together: StepSettings("full_shard", remat="full", accumulation=2),
    }
    for change, turned in turns.items():
        after = analytic_plan(*build(turned, fake_devices(topology)), topology, Work())
        assert found[change].peak_bytes == after.peak_bytes
        assert found[change].saves_bytes == before.peak_bytes - after.peak_bytes > 0
        assert found[change].fits
    away = found["optimizer state in the host's memory"]
    assert away.saves_bytes == before.breakdown["optimizer"]
    assert not away.available
    peaks = [fix.peak_bytes for fix in found.values() if fix.available]
    assert peaks == sorted(peaks)


def test_logits_are_known_by_the_vocabulary():
    arrays = [
        ("activations", "f32[2,64,256]"),
        ("activations", "bf16[2,256,64]"),
        ("params", "f32[64,256]"),
    ]
    buffers = [
        Buffer(number + 1, array, kind, "", "") for number, (kind, array) in enumerate(arrays)
    ]
    assert logits_bytes(buffers, 256) == 1


@pytest.mark.parametrize("asked", [True, False])
def test_a_refusal_keeps_what_xla_says(asked, monkeypatch):
    """By annotations there is no estimate: the layout and XLA's word are left."""
    refused = CompiledProgram("", None, 10**12, 1.0)

    def refuse(step, batch, topology, cache):
        step.trace(batch)
        return refused

    monkeypatch.setattr("fsdp_jax.planner.make_plan.compile_step", refuse)
    topology = parse_topology("h100:8")
    step = sharded(fake_devices(topology)).train_step(TRAINS, local_batch=asked)
    found = compiled_plan(step, batch(8), topology, Work(), None)
    assert not found.fits
    assert sum(found.breakdown.values()) == found.peak_bytes == 10**12
    assert found.breakdown["optimizer"] == sharded().layout.per_device("optimizer")
    assert "XLA refuses to compile it" in str(found)
    assert (found.time is None) == (asked is False)


def test_what_a_reader_must_know_is_noted():
    unrolled = sharded(config=preset("tiny", layers=2, width=64, heads=4, scan_layers=False))
    assert "no layers are stacked" in str(unrolled.plan("h100:8", TRAINS, batch(8), analytic=True))
    alone = sharded(strategy="hybrid_shard").plan("h100:2x8", TRAINS, batch(16), analytic=True)
    assert "hybrid with one replica shards over all devices" in str(alone)
    assert not sharded().plan("h100:8", TRAINS, batch(8), analytic=True).notes


@pytest.mark.parametrize(
    ("topology", "rows", "said"),
    [
        (TRAINS, batch(8), "not the name of a machine"),
        ("h100:8", {"tokens": 8}, "not arrays, nor their shapes"),
    ],
)
def test_arguments_in_the_wrong_place_are_named(topology, rows, said):
    with pytest.raises(ValueError, match=said):
        sharded().plan(topology, TRAINS, rows, analytic=True)


def test_plans_stand_side_by_side(plan):
    table = plans_table(["a.yaml", "b.yaml"], [plan, plan])
    assert "a.yaml" in table.splitlines()[0]
    peak = next(line for line in table.splitlines() if line.startswith("peak"))
    assert len(set(peak.split()[1:])) == 2  # the same figure and unit twice


@pytest.mark.needs_plugin
@pytest.mark.parametrize("topology", ["h100:8", "v5e:4x2"])
def test_the_compiled_plan_is_that_of_the_step(topology, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    work = Work(8 * 64, 1e9, "by hand", 256)
    there = sharded(prefetch="pre")
    first = there.plan(topology, TRAINS, batch(8), work=work, local_batch=True)
    assert first.basis["peak_bytes"] == first.basis["time"] == "compiled"
    assert sum(first.breakdown.values()) == first.peak_bytes > first.valley_bytes
    held, padded = (
        there.layout.per_device("optimizer"),
        topology.startswith("v5e"),
    )  # small arrays to whole tiles
    assert first.breakdown["optimizer"] > held if padded else first.breakdown["optimizer"] == held
    assert first.wire_bytes <= 1.02 * first.wire_bytes_limit
    assert first.events
    again = there.plan(topology, TRAINS, batch(8), work=work, local_batch=True)
    assert again == first  # from the cache: the seconds that compiling took are the same
