"""`scripts/bench_scale.py` and `scripts/validate_plan.py`: from end to end at toy size."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def validate(monkeypatch):
    return load("validate_plan", monkeypatch)


def test_scaling_keeps_draws_and_reads_its_records(monkeypatch, tmp_path, capsys):
    bench = load("bench_scale", monkeypatch)
    figures = dict.fromkeys(("sent_bytes", "exposed_bytes", "peak_bytes", "step_s"), 1)
    figures |= {"parameters": 7, "ratio": 1.0, "fits": True, "build_cpu_s": 1, "compile_cpu_s": 2}
    monkeypatch.setattr(bench, "measure", lambda point: point._asdict() | figures)
    check_scaling(bench, tmp_path, capsys)


@pytest.mark.needs_plugin
def test_scaling_measures_compiled_steps(monkeypatch, tmp_path, capsys):
    model, chain = check_scaling(load("bench_scale", monkeypatch), tmp_path, capsys)
    # three kernels of 64 x 64 in float32, gathered twice at most and reduced once, over 2 devices
    assert chain["parameters"] == 3 * 64 * 64
    assert chain["sent_bytes"] / chain["ratio"] == pytest.approx(4 * 3 * 64 * 64, rel=0.01)
    for record in (model, chain):
        assert record["compile_cpu_s"] > record["step_s"] > 0


def check_scaling(bench, tmp_path, capsys):
    """Asserts that the records of its two toy steps are kept, shown and drawn; returns them."""
    kept, drawn = tmp_path / "scale.json", tmp_path / "scale.svg"
    assert bench.main(["--toy", "--json", str(kept), "--picture", str(drawn)]) == 0
    content = json.loads(kept.read_text())
    assert "jax" in content["environment"]["versions"]
    model, chain = content["records"]
    assert (model["axis"], chain["axis"]) == ("devices", "leaves")
    assert capsys.readouterr().out.startswith("| axis |")
    assert drawn.read_text().count('class="bar"') >= 2
    # the axes that are not run again are kept, and read
    assert bench.main(["--read", str(kept)]) == 0
    assert capsys.readouterr().out.count("toy") == 2
    return content["records"]


def test_at_least_half_of_the_published_runs_are_out_of_sample(validate):
    unused = [row for row in validate.ROWS if not row.fit]
    assert len(validate.ROWS) >= 30
    assert 2 * len(unused) >= len(validate.ROWS)
    assert {row.source for row in validate.ROWS} <= set(validate.SOURCES)
    # none is listed twice, once in each role
    labels = [(row.name, row.source, row.topology) for row in validate.ROWS]
    assert len(labels) == len(set(labels))


def test_a_run_that_does_not_fit_is_marked_and_counts_in_no_mean(validate, monkeypatch, capsys):
    planned = validate.Simulated(1.0, 90 * 2**30, 77 * 2**30)
    row = validate.ROWS[0]
    monkeypatch.setattr(validate, "simulate", lambda row: planned)
    [record] = validate.published([f"{row.name} {row.source} {row.topology}"])
    assert "does not fit: 90.0 GiB, not counted" in capsys.readouterr().err
    assert validate.summary([record]) == {
        "rows": 1, "counted": 0, "within": 0, "share": 1.0, "beyond": 0, "worst": 0.0, "means": {},
    }  # fmt: skip


def test_the_goal_is_missed_by_one_run_that_is_far_or_by_a_mean(validate):
    def result(*ratios):
        records = [{"fits": True, "chip": "h100", "ratio": ratio} for ratio in ratios]
        return validate.summary(records)

    assert validate.holds(result(1.1, 1 / 1.1))
    assert not validate.holds(result(1.25, 1 / 1.25))
    assert not validate.holds(result(1.1, 1.0))
    far = result(1.1, 1.0, 1.25)
    assert far["means"]["h100"] == pytest.approx((1.1 * 1.25) ** (1 / 3))
    # the goal and each role are rows of one table
    table = validate.goal_table({"fit": far | {"met": validate.holds(far)}}).splitlines()
    assert table[2] == "| *goal* | 90% | 0 | 20% | 1 ± 3% | |"
    assert table[3] == "| fit | 2 of 3 (67%) | 1 | 25.0% | h100 1.112 | missed |"


def test_a_fit_finds_the_constants_that_made_the_rows(validate, monkeypatch):
    """On steps that matmuls and attention fill: the constants come back."""

    def simulate(row, constants=None):
        constants = {"matmul": 0.6, "attention": 0.2} | (constants or {})
        share = int(row.model.split("--data.sequence_length ")[1].split()[0]) / 20_000
        seconds = 1 / constants["matmul"] + share / constants["attention"]
        return validate.Simulated(seconds, 0, 1)

    rows = [
        replace(row, tokens=row.tokens_of_step / simulate(row).seconds)
        for row in validate.ROWS
        if row.fit and row.kernel == "triton"
    ]
    monkeypatch.setattr(validate, "ROWS", rows)
    monkeypatch.setattr(validate, "simulate", simulate)
    found = validate.fitted("h100")
    assert found == pytest.approx({"matmul": 0.6, "triton": 0.2}, rel=1e-3)
