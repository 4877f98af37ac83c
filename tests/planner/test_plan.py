"""Plans: their figures, text and JSON, fixes and notes."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from pages import Outline
from stored_steps import Layer, Model, cross_entropy

import fsdp_jax as fsdp
from fsdp_jax.errors import human_bytes
from fsdp_jax.models import GPT, Block, next_token_loss, preset
from fsdp_jax.planner import (
    Fix,
    Plan,
    Work,
    analytic_plan,
    compiled_plan,
    fake_devices,
    parse_topology,
    plan_html,
    plans_table,
)
from fsdp_jax.planner.compiled.program import CompiledProgram
from fsdp_jax.planner.estimates import _kernel_notes
from fsdp_jax.planner.fixes import (
    LOSS_CHUNK,
    describe_best_fix,
    propose_faster,
    propose_fixes,
)
from fsdp_jax.planner.machines.roofline import Matmul
from fsdp_jax.planner.settings import StepSettings
from fsdp_jax.sharding.offload import Offload

LOSS = cross_entropy
BFLOAT16 = fsdp.Precision(compute="bfloat16")


def batch(rows, tokens=64):
    return {"tokens": jax.ShapeDtypeStruct((rows, tokens + 1), "int32")}


def sharded(devices=None, config=None, replica=1, width=64, **arguments):
    """Stacked layers without attention, whose trace takes a fraction of a GPT's; one if asked."""
    arguments = {
        "strategy": "full_shard",
        "units": [Block if config else Layer],
        "precision": BFLOAT16,
        "remat": "full",
    } | arguments
    mesh = fsdp.make_mesh(-1, replica, devices=devices)
    make = (lambda rngs: GPT(config, rngs=rngs)) if config else partial(Model, width)
    return fsdp.fully_shard(lambda rngs: make(rngs=rngs), optax.adamw(1e-3), mesh, **arguments)


def make_step(settings, devices, width=64, rows=32):
    model = sharded(
        devices,
        replica=settings.replica,
        width=width,
        strategy=settings.strategy,
        remat=settings.remat,
        prefetch=settings.prefetch,
        offload=settings.offload,
        keep_gathered=settings.keep_gathered,
    )
    return model.make_train_step(LOSS, accumulation=settings.accumulation, local_batch=True), batch(
        rows
    )


@pytest.fixture(scope="module")
def plan():
    work = Work(tokens=8 * 64, flops=1e9, convention="by hand", vocab=256)
    return sharded().plan("h100:8", LOSS, batch(8), work=work, analytic=True)


def test_every_figure_has_a_basis(plan):
    fields = plan.to_json()
    assert json.loads(json.dumps(fields))["breakdown"] == plan.breakdown
    assert plan.basis["peak_bytes"] == plan.basis["time"] == "analytic"


def test_the_parts_add_up(plan):
    assert sum(plan.breakdown.values()) == plan.peak_bytes
    parts = plan.time.compute_s + plan.time.memory_s + plan.time.exposed_s
    assert parts == pytest.approx(plan.time.step_s)
    assert plan.valley_bytes == sharded().layout.per_device() == sum(plan.valley.values())
    between, peak = plan.memory().bars
    assert (between.total, peak.total) == (plan.valley_bytes, plan.peak_bytes)
    assert between.parts["optimizer"] == sharded().layout.per_device("optimizer")
    assert {between.expected, peak.expected} == {plan.usable_bytes}
    Outline(plan.memory().page())
    assert plan.breakdown["optimizer"] == sharded().layout.per_device("optimizer")


def test_speed_is_tokens_and_flops_over_the_time_of_a_step(plan):
    assert plan.tokens_per_s_per_device == pytest.approx(64 / plan.time.step_s)
    assert plan.mfu == pytest.approx(1e9 / plan.time.step_s / 8 / 989.4e12)


def test_the_text_has_the_main_figures_and_says_what_does_not_fit(plan):
    shown = str(plan)
    words = ("full_shard on h100:8", "fits", "activations", "exposed communication", "by hand")
    assert [word for word in (*words, "analytic: ") if word not in shown] == []
    small = Plan(**{**vars(plan), "usable_bytes": plan.peak_bytes - 1})
    assert not small.fits
    assert "DOES NOT FIT" in str(small)


def test_what_is_assumed_of_kernels_is_told():
    """Attention's masks, and kernels that are not read; a plan without them says nothing."""
    first = Matmul(1, 8, 8, 8, "float32", keys=4, assumed="mha_forward")
    own = Matmul(1, 8, 8, 8, "float32", assumed="mine")
    assert _kernel_notes([first, own, replace(own, assumed="")], {"b", "a"}) == [
        "kernels whose matmuls are unknown, counted by their memory alone: a, b",
        "attention kernels, counted as causal whatever their mask: mha_forward",
        "kernels of your own, counted by the matmuls of every step of their grid: mine",
    ]

    def loss(model, batch):
        total, count, *rest = LOSS(model, batch)
        same = jax.ShapeDtypeStruct((), jnp.float32)
        return total + jax.ffi.ffi_call("mine", same)(jax.lax.stop_gradient(total)), count, *rest

    silent, noted = (
        sharded().plan("h100:8", f, batch(8), analytic=True).notes for f in (LOSS, loss)
    )
    assert not any("kernel" in note for note in silent)
    assert "kernels whose matmuls are unknown, counted by their memory alone: mine" in noted


def test_the_limit_is_the_traffic_of_the_strategy():
    """2 bytes of every gathered parameter, twice, and of every gradient: at most 6 P (n-1)/n."""
    result = sharded().plan("h100:8", LOSS, batch(8), analytic=True)
    gathered = [leaf for leaf in sharded().layout.by_path.values() if leaf.spec != PartitionSpec()]
    bound = sum(6 * leaf.bytes // 4 for leaf in gathered) * 7 // 8
    replicated = sum(
        2 * 2 * leaf.bytes // 4
        for leaf in sharded().layout.by_path.values()
        if leaf not in gathered
    )
    assert 0.6 * bound < result.wire_bytes_limit <= bound + replicated


MACHINES = ["h100:8", "v5e:4x4", "v5p:2x2x2", "v5e:4x4*2", "a100-80gb:2x8"]
EACH = list(zip(MACHINES, ["no_shard", "zero1", "shard_grad_op", *["full_shard"] * 2], strict=True))


@pytest.mark.parametrize(("topology", "strategy"), EACH)
def test_analytic_plans_of_every_strategy(topology, strategy):
    result = sharded(strategy=strategy).plan(topology, LOSS, batch(32), analytic=True)
    assert result.fits
    assert result.peak_bytes > result.valley_bytes > 0
    assert result.time.step_s > 0
    assert result.wire_bytes_limit > 0


def test_hybrid_strategies_keep_their_replicas():
    model = sharded(replica=2, strategy="hybrid_shard")
    assert model.plan("h100:8", LOSS, batch(8), analytic=True).mesh == {"replica": 2, "data": 4}
    assert model.plan("h100:2x8", LOSS, batch(16), replica=4, analytic=True).mesh == {
        "replica": 4,
        "data": 4,
    }


def test_replicated_state_takes_eight_times_as_much():
    replicated, parts = (
        sharded(strategy=name, min_size=0).plan("h100:8", LOSS, batch(8), analytic=True)
        for name in ("no_shard", "full_shard")
    )
    assert replicated.breakdown["optimizer"] == pytest.approx(
        8 * parts.breakdown["optimizer"], rel=0.02
    )


def test_fixes_are_differences_of_analytic_plans():
    topology, settings = parse_topology("h100:8"), StepSettings("no_shard", remat="none")
    build = partial(make_step, width=256, rows=128)
    before = analytic_plan(*build(settings, fake_devices(topology)), topology, Work())
    result = {fix.change: fix for fix in propose_fixes(before, settings, build, topology, Work())}
    together = "--strategy full_shard --remat full --train.accumulation 2"
    assert set(result) >= {
        "--remat full",
        "--strategy full_shard",
        "--train.accumulation 2",
        together,
    }
    changes = {
        "--remat full": StepSettings("no_shard", remat="full"),
        "--strategy full_shard": StepSettings("full_shard"),
        together: StepSettings("full_shard", remat="full", accumulation=2),
    }
    for change, changed in changes.items():
        after = analytic_plan(*build(changed, fake_devices(topology)), topology, Work())
        assert result[change].peak_bytes == after.peak_bytes
        assert result[change].saves_bytes == before.peak_bytes - after.peak_bytes > 0
        assert result[change].fits
    offload = result["--offload.optimizer 1"]
    # what is sent in groups is not all gone: arrays of few elements stay
    assert 0.9 < offload.saves_bytes / before.breakdown["optimizer"] <= 1
    assert offload.step_s > before.time.step_s
    larger = result["more devices: --topology h100:2x8"]
    halved = parse_topology("h100:2x8")
    assert (
        larger.peak_bytes
        == analytic_plan(*build(settings, fake_devices(halved)), halved, Work()).peak_bytes
    )
    peaks = [fix.peak_bytes for fix in result.values()]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize(("topology", "proposed"), [("h100:8", True), ("v5e:4x2", False)])
def test_no_prefetch_is_a_fix_only_where_auto_is_some(topology, proposed):
    machine, tried = parse_topology(topology), []

    def build(settings, devices):
        tried.append(settings.prefetch)
        if len(tried) > 1:
            raise ValueError
        return make_step(settings, devices)

    settings = StepSettings("full_shard", prefetch="auto")
    before = analytic_plan(*make_step(settings, fake_devices(machine)), machine, Work())
    assert not propose_fixes(before, settings, build, machine, Work())
    assert ("none" in tried) == proposed


def test_nothing_in_host_memory_is_faster():
    topology = parse_topology("h100:8")
    offload = Offload(optimizer=True)
    settings = StepSettings("full_shard", remat="full", prefetch="pre", offload=offload)
    build = partial(make_step, width=256)
    before = analytic_plan(*build(settings, fake_devices(topology)), topology, Work())
    before = replace(before, basis={**before.basis, "peak_bytes": "compiled"})
    faster = propose_faster(before, settings, build, topology, Work())
    [found] = [one for one in faster if one.change == "--offload.optimizer 0"]
    assert found.step_s < before.time.step_s
    assert found.peak_bytes > before.peak_bytes


def test_units_stay_gathered_where_a_step_waits_for_gathers_and_memory_is_left():
    topology = parse_topology("h100:8")
    settings = StepSettings("full_shard", remat="none", prefetch="none")
    build = partial(make_step, width=256)
    before = analytic_plan(*build(settings, fake_devices(topology)), topology, Work())
    faster = propose_faster(before, settings, build, topology, Work())
    [found] = [one for one in faster if "keep_gathered" in one.change]
    budget = found.change.removeprefix("--keep_gathered.budget ")
    assert found.change == f"--keep_gathered.budget {budget}"
    assert found.step_s < before.time.step_s
    assert before.peak_bytes < found.peak_bytes < before.usable_bytes
    # Where memory is short, leaving it out is a fix.
    tried = []

    def noted(settings, devices):
        tried.append(settings.keep_gathered)
        if len(tried) > 1:
            raise ValueError
        return build(settings, devices)

    propose_fixes(before, replace(settings, keep_gathered=budget), noted, topology, Work())
    assert tried[0] == budget
    assert () in tried


def test_the_lever_frees_enough_for_the_shortest_step():
    slow = Fix("slow", 50, 50, True, "", step_s=3.0)
    fast = Fix("fast", 40, 60, True, "", step_s=2.0)
    small = Fix("small", 10, 90, True, "", step_s=1.0)
    assert describe_best_fix([slow, fast, small], 30).startswith("fast, which frees 40 B")
    assert describe_best_fix([slow, fast, small], 5).startswith("small")
    assert describe_best_fix([slow, fast, small], 99).startswith("slow"), (
        "where none is enough, the largest"
    )
    assert describe_best_fix([], 5) == ""


@pytest.mark.parametrize("topology", ["h100:8", "v5e:4x2"])
def test_what_is_in_host_memory_is_estimated_without_a_compiler(topology):
    model = sharded(offload=Offload(params=True, optimizer=True), min_size=2)
    result = model.plan(topology, LOSS, batch(8), analytic=True)
    assert result.host_bytes == model.layout.per_device(host=True) > 0
    # of so small a state all is one group, and one more is sent back
    assert 0 < result.staging_bytes == result.to_json()["staging_bytes"]
    staged = f"{human_bytes(result.staging_bytes)} at once on the device for the update"
    assert staged in str(result)
    assert staged in plan_html(result)


def test_host_memory_is_apart_from_the_devices(plan):
    offloaded = sharded(offload=Offload(optimizer=True), min_size=2)
    result = offloaded.plan("h100:8", LOSS, batch(8), analytic=True)
    on_host = offloaded.layout.per_device(host=True)
    assert 0 < on_host == result.host_bytes
    assert result.valley_bytes == offloaded.layout.per_device()
    assert result.breakdown["optimizer"] < 0.01 * plan.breakdown["optimizer"]
    # every array comes and goes once
    assert result.from_host_bytes == result.to_host_bytes == on_host
    parts = (result.time.compute_s, result.time.memory_s, result.time.exposed_s)
    assert sum(parts) + result.time.host_exposed_s == pytest.approx(result.time.step_s)
    shown = str(result)
    assert f"host: {human_bytes(on_host)} a device, {human_bytes(8 * on_host)} of 2 TiB" in shown
    assert f"host transfers {human_bytes(2 * on_host)}" in shown
    assert "exposed host transfers" in shown
    assert "host transfers" in plan_html(result)
    assert "host transfers" not in str(plan), "nothing is said where nothing is there"
    small = Plan(**{**vars(result), "host_capacity_bytes": None})
    assert f"{human_bytes(8 * on_host)} a host" in str(small)


@pytest.mark.long
def test_a_fix_is_a_loss_in_chunks_of_a_large_vocabulary():
    topology, settings = parse_topology("h100:8"), StepSettings("full_shard")
    config = preset("tiny", layers=1, width=64, heads=4, vocab_size=2 * LOSS_CHUNK + 1)

    def build(settings, devices):
        model = sharded(devices, config)
        loss = partial(next_token_loss, train=True, chunk=settings.loss_chunk)
        return model.make_train_step(loss, local_batch=True), batch(128)

    work = Work(vocab=config.vocab_size)
    before = analytic_plan(*build(settings, fake_devices(topology)), topology, work)
    result = {fix.change: fix for fix in propose_fixes(before, settings, build, topology, work)}
    fix = result[f"--train.loss_chunk {LOSS_CHUNK}"]
    assert fix.saves_bytes > 0
    small = propose_fixes(before, settings, build, topology, Work(vocab=LOSS_CHUNK))
    assert not any("loss_chunk" in fix.change for fix in small)


def test_flags_name_what_is_switched_off_too():
    names = Offload(params=True, optimizer=True, activation_names=("mlp",))
    off, on = StepSettings("full_shard"), StepSettings("full_shard", offload=names)
    expected = ["--offload.params True", "--offload.optimizer 1", "--offload.activation_names mlp"]
    assert on.flags(since=off) == expected
    expected = ["--offload.params False", "--offload.optimizer 0", "--offload.activation_names"]
    assert off.flags(since=on) == expected
    assert off.flags(since=off) == []


def penalized(model, batch):
    """A loss that cannot run on local batches, so that its step cannot be estimated."""
    total, count = LOSS(model, batch)
    return total + sum(jnp.sum(x * x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))), count


@pytest.mark.parametrize(("loss", "local_batch"), [(LOSS, True), (LOSS, False), (penalized, False)])
def test_the_peak_of_a_refused_step_is_what_xla_reports(loss, local_batch, monkeypatch):
    """Where there is no estimate, the layout and XLA's number are left."""
    refused = CompiledProgram("", None, 10**12, 1.0)

    def refuse(step, batch, topology, cache):
        step.trace(batch)
        return refused

    monkeypatch.setattr("fsdp_jax.planner.estimates.compile_step", refuse)
    topology = parse_topology("h100:8")
    step = sharded(fake_devices(topology)).make_train_step(loss, local_batch=local_batch)
    result = compiled_plan(step, batch(8), topology, Work(), None)
    assert not result.fits
    assert sum(result.breakdown.values()) == result.peak_bytes == 10**12
    assert result.breakdown["optimizer"] == sharded().layout.per_device("optimizer")
    assert "XLA refuses to compile it" in str(result)
    assert (result.time is None) == (loss is penalized)


def test_plans_have_notes():
    unrolled = sharded(config=preset("tiny", layers=2, width=64, heads=4, scan_layers=False))
    assert "no layers are stacked" in str(
        unrolled.plan("h100:8", next_token_loss, batch(8), analytic=True)
    )
    assert not sharded().plan("h100:8", LOSS, batch(8), analytic=True).notes
    with pytest.warns(fsdp.SlowerWarning, match="hybrid_shard with one replica is full_shard"):
        sharded(strategy="hybrid_shard").plan("h100:2x8", LOSS, batch(16), analytic=True)


@pytest.mark.parametrize(
    ("topology", "rows", "work", "fields"),
    [
        (LOSS, batch(8), None, "not the name of a machine"),
        ("h100:8", {"tokens": 8}, None, "not arrays, nor their shapes"),
        ("h100:8", batch(8), 4096, "not what a step computes"),
    ],
)
def test_arguments_in_the_wrong_place_are_named(topology, rows, work, fields):
    with pytest.raises(ValueError, match=fields):
        sharded().plan(topology, LOSS, rows, work=work, analytic=True)


def test_plans_are_shown_side_by_side(plan):
    assert plans_table([], []).strip() == ""  # no plans, no figures
    table = plans_table(["a.yaml", "b.yaml"], [plan, plan])
    assert "a.yaml" in table.splitlines()[0]
    peak = next(line for line in table.splitlines() if line.startswith("peak"))
    assert len(set(peak.split()[1:])) == 2  # the same figure and unit twice


@pytest.mark.long
@pytest.mark.needs_plugin
def test_a_compiled_plan_reads_host_memory_from_the_program(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = {"width": 512, "prefetch": "pre"}
    offloaded = sharded(offload=Offload(optimizer=True), **arguments)
    on_device, result = (
        model.plan("h100:8", LOSS, batch(8), local_batch=True)
        for model in (sharded(**arguments), offloaded)
    )
    on_host = offloaded.layout.per_device(host=True)
    assert (on_device.host_bytes, on_device.from_host_bytes) == (0, 0)
    assert result.host_bytes == pytest.approx(on_host, rel=1e-3)
    assert result.from_host_bytes == pytest.approx(on_host, rel=0.02)
    assert result.to_host_bytes == pytest.approx(on_host, rel=0.02)
    # some parameters were moved by then, and their memory is used for something else
    assert result.breakdown["params"] == on_device.breakdown["params"]
    # so small a state is on the device whole while it is updated
    assert result.breakdown["optimizer"] > 0
    assert on_device.valley_bytes - result.valley_bytes == on_host
    assert 0 < result.time.host_exposed_s <= result.time.host_s
