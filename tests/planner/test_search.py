"""Searches: what is estimated, what is skipped, what is compiled, what wins."""

from dataclasses import replace
from itertools import pairwise

import pytest
from refusals import refused
from test_html import GIB
from test_html import PLAN as DRAWN

from fsdp_jax.errors import ConfigError, FitError
from fsdp_jax.planner import HARDWARE, Time, Work, parse_topology
from fsdp_jax.planner import search as search_module
from fsdp_jax.planner.search import (
    Candidate,
    Search,
    candidate_settings,
    topologies_by_size,
)
from fsdp_jax.planner.settings import StepSettings
from fsdp_jax.sharding.offload import Offload

PLAN = replace(
    DRAWN,
    usable_bytes=77 * GIB,
    fixes=(),
    notes=(),
    events=(),
    basis={"peak_bytes": "analytic"},
)


def planned(peak, seconds, wire=1):
    return replace(PLAN, peak_bytes=peak, wire_bytes=wire, time=Time(seconds, 0, 0, 0, seconds))


def plan_by_formula(settings, rows, devices):
    """Returns a plan by a formula: remat saves activations and costs a third more time."""
    sharded = {"no_shard": 1, "zero1": 2}.get(settings.strategy, devices // settings.replica)
    activations = rows // devices // settings.accumulation * (1 if settings.remat == "full" else 4)
    seconds = (
        (4 if settings.remat == "full" else 3)
        + 0.1 * settings.accumulation
        - (0.5 if settings.prefetch == "pre" else 0)
    )
    return planned((64 // sharded + activations) * GIB, seconds, wire=settings.accumulation)


@pytest.fixture
def formula(monkeypatch):
    """Replaces plans by a formula; returns `make_step` and the list of what is compiled."""
    compiled = []

    def make_step(settings, devices):
        return (settings, len(devices)), None

    def analytic_plan(step, batch, topology, work):
        return plan_by_formula(step[0], 64, step[1])

    def compiled_plan(step, batch, topology, work, cache):
        compiled.append(step[0])
        return replace(plan_by_formula(step[0], 64, step[1]), basis={"peak_bytes": "compiled"})

    monkeypatch.setattr(search_module, "analytic_plan", analytic_plan)
    monkeypatch.setattr(search_module, "compiled_plan", compiled_plan)
    monkeypatch.setattr(search_module.Topology, "devices", lambda self: [None] * self.size)
    return make_step, compiled


def search_h100s(formula, rows=64, progress=lambda line: None):
    make_step, _ = formula
    return Search(make_step, rows, Work(), None, progress).run(parse_topology("h100:8"))


def smallest(formula, rows=64, progress=lambda line: None, devices=None):
    """Returns the name of the smallest machine of H100s."""
    search = Search(formula[0], rows, Work(), None, progress)
    return search.smallest_topology(HARDWARE["h100"], devices).name


def test_the_fastest_that_fits_is_compiled_and_wins(formula):
    (_, compiled), lines = formula, []
    result = search_h100s(formula, progress=lines.append)
    assert lines[0].startswith("1 of ")
    assert sum(line.startswith("compiling") for line in lines) == search_module.FINALISTS
    assert len(compiled) == search_module.FINALISTS == len(result.compiled)
    assert result.best.plan.fits
    everything = [
        Candidate(k, plan_by_formula(k, 64, 8))
        for k in candidate_settings(parse_topology("h100:8"), 64)
    ]
    assert result.best.seconds == min(one.seconds for one in everything if one.plan.fits)
    assert str(result.best.settings) in str(result)


def test_the_pareto_front_has_no_candidate_that_another_beats(formula):
    for one in search_h100s(formula).pareto():
        for other in candidate_settings(parse_topology("h100:8"), 64):
            plan = plan_by_formula(other, 64, 8)
            better = plan.time.step_s < one.seconds and plan.peak_bytes < one.plan.peak_bytes
            assert not (better and plan.wire_bytes < one.plan.wire_bytes and plan.fits)


def test_compiled_candidates_that_do_not_fit_are_shown(formula, monkeypatch):
    def compiled_plan(step, batch, topology, work, cache):
        plan = plan_by_formula(step[0], 64, step[1])
        peak = (
            500 * GIB if step[0].remat == "none" and step[0].prefetch == "pre" else plan.peak_bytes
        )
        return replace(plan, peak_bytes=peak, basis={"peak_bytes": "compiled"})

    monkeypatch.setattr(search_module, "compiled_plan", compiled_plan)
    result = search_h100s(formula)
    assert result.unfit
    assert str(result).count("does not fit") == len(result.unfit)
    assert "does not fit" in str(result)
    assert result.best.plan.fits


def test_one_microbatch_is_tried_even_if_several_do_not_fit(formula, monkeypatch):
    def analytic_plan(step, batch, topology, work):
        return planned((60 if step[0].accumulation == 1 else 500) * GIB, 1.0)

    monkeypatch.setattr(search_module, "analytic_plan", analytic_plan)
    monkeypatch.setattr(
        search_module,
        "compiled_plan",
        lambda step, *_: replace(PLAN, basis={"peak_bytes": "compiled"}),
    )
    assert search_h100s(formula).best.settings.accumulation == 1


def test_settings_that_cannot_be_built_are_skipped(formula, monkeypatch):
    def analytic_plan(step, batch, topology, work):
        if step[0].strategy != "zero1":
            raise ValueError("no such optimizer")
        return plan_by_formula(step[0], 64, step[1])

    monkeypatch.setattr(search_module, "analytic_plan", analytic_plan)
    assert search_h100s(formula).best.settings.strategy == "zero1"
    monkeypatch.setattr(
        search_module,
        "analytic_plan",
        lambda *_: (_ for _ in ()).throw(ValueError("no such optimizer")),
    )
    with pytest.raises(ConfigError, match="no such optimizer"):
        search_h100s(formula)


def test_hopeless_settings_are_not_estimated(formula, monkeypatch):
    """If the leanest is far too large, the rest of its kind is not traced."""
    tried = []
    monkeypatch.setattr(
        search_module,
        "analytic_plan",
        lambda step, *_: tried.append(step[0]) or planned(500 * GIB, 1.0),
    )
    with refused("h100:8", error=FitError, where="search", got="500 GiB at least"):
        search_h100s(formula)
    assert len(tried) <= 3 * len({(k.strategy, k.replica) for k in tried})


def test_the_fastest_that_waits_is_compiled_with_units_that_stay_gathered(formula, monkeypatch):
    """Of 77 GiB 7 are in use; so many units stay gathered that a tenth is free."""
    compiled = []

    def compiled_plan(step, *_):
        compiled.append(step[0])
        plan = planned(7 * GIB, 2.0 if step[0].keep_gathered else 3.0)
        return replace(plan, time=replace(plan.time, exposed_s=1.0))

    monkeypatch.setattr(search_module, "analytic_plan", lambda *_: planned(7 * GIB, 1.0))
    monkeypatch.setattr(search_module, "candidate_settings", lambda *_: [StepSettings("fsdp")])
    monkeypatch.setattr(search_module, "compiled_plan", compiled_plan)
    best = search_h100s(formula).best
    assert "--keep_gathered.budget 62GiB" in best.settings.flags()
    assert [settings.keep_gathered for settings in compiled] == [(), "62GiB"]
    assert best.cells()["kept"] == "62GiB"


def test_offload_is_tried_where_it_would_be_faster(formula, monkeypatch):
    """Without remat a step is fastest and too large; the optimizer's state is what is too much."""
    tried = []

    def analytic_plan(step, batch, topology, work):
        settings = step[0]
        tried.append(settings)
        sizes = {"optimizer": 60 * GIB, "activations": 40 * GIB}
        if settings.remat == "full":
            sizes["activations"] = 5 * GIB
        if settings.offload.state:
            sizes["optimizer"] = 0
        seconds = {"none": 3.0, "selective": 3.6, "full": 4.0}[settings.remat]
        seconds += 0.5 * settings.offload.state
        plan = planned(sum(sizes.values()), seconds)
        return replace(plan, breakdown=sizes)

    monkeypatch.setattr(search_module, "analytic_plan", analytic_plan)
    monkeypatch.setattr(
        search_module, "compiled_plan", lambda step, *rest: analytic_plan(step, *rest[:3])
    )
    best = search_h100s(formula).best.settings
    assert (best.remat, best.offload) == ("none", Offload(optimizer=True))
    assert "--offload.optimizer 1" in best.flags()
    offloaded = [settings for settings in tried if settings.offload != Offload()]
    assert all(settings.remat != "full" for settings in offloaded), "those fit without"
    # activations alone save too little, which needs no estimate
    assert {settings.offload for settings in offloaded} == {Offload(optimizer=True)}


def test_a_batch_that_does_not_divide(formula):
    with pytest.raises(ConfigError, match="a multiple of 8"):
        search_h100s(formula, rows=12)


def test_candidates_depend_on_the_batch_and_the_machine():
    result = list(candidate_settings(parse_topology("h100:4x8"), 64))
    assert len(set(result)) == len(result)
    assert {k.accumulation for k in result} == {1, 2}
    assert {k.replica for k in result if k.strategy.startswith("hybrid")} == {2, 4}
    assert {k.strategy for k in candidate_settings(parse_topology("h100:1"), 4)} == {"no_shard"}
    assert not [
        k
        for k in candidate_settings(parse_topology("h100:8"), 64)
        if k.strategy.startswith("hybrid")
    ]


def test_the_smallest_machine_is_the_first_that_fits(formula, monkeypatch):
    def analytic_plan(step, batch, topology, work):
        return planned(640 * GIB // topology.size, 1.0)

    monkeypatch.setattr(search_module, "analytic_plan", analytic_plan)
    lines = []
    assert smallest(formula, progress=lines.append) == "h100:8"
    assert [line.split(":")[1] for line in lines] == ["1", "2", "4", "8"]


def test_the_smallest_machine_may_need_few_microbatches(formula, monkeypatch):
    """Accumulated gradients use memory too: with many parameters, microbatches save nothing."""

    def analytic_plan(step, batch, topology, work):
        return planned((70 + 10 * step[0].accumulation) * GIB, 1.0)

    monkeypatch.setattr(search_module, "analytic_plan", analytic_plan)
    assert smallest(formula) == "h100:1"


def test_batches_that_fit_no_machine(formula, monkeypatch):
    def analytic_plan(step, batch, topology, work):
        return planned(640 * GIB // topology.size, 1.0)

    monkeypatch.setattr(search_module, "analytic_plan", analytic_plan)
    assert smallest(formula, devices=32) == "h100:4x8"
    with refused(error=FitError, where="devices"):
        smallest(formula, rows=4)
    with refused(error=ConfigError, where="devices", expected="7 h100"):
        smallest(formula, devices=7)


@pytest.mark.parametrize(
    "chip", [chip for chip in HARDWARE.values() if chip.platform != "cpu"], ids=lambda c: c.name
)
def test_machines_of_a_chip_double_in_size(chip):
    sizes = [topology.size for topology in topologies_by_size(chip)]
    assert sizes == sorted(set(sizes))
    assert len(sizes) > 5
    assert all(big == 2 * small for small, big in pairwise(sizes))


def test_settings_are_configuration_keys():
    assert StepSettings("zero1", loss_chunk=9).flags(since=StepSettings("zero1")) == [
        "--train.loss_chunk 9"
    ]
    assert str(StepSettings("zero1", remat="full")) == (
        "--strategy zero1 --mesh.replica 1 --remat full --prefetch none --train.accumulation 1"
    )
