"""`scripts/bench_memory.py`: its rows are plans of configurations, and none is made up."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_jax.errors import ConfigError
from fsdp_jax.train.config_file import load_config

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_memory.py"
SPEC = importlib.util.spec_from_file_location("bench_memory", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench)


def test_a_row_has_the_figures_of_its_plan():
    row = bench.plan_one("gpt2_xl", "remat=none", "h100:8", 1, analytic=True)
    assert json.loads(json.dumps(row)) == row
    cells = dict(zip(bench.COLUMNS, bench.cells(row), strict=True))
    assert (cells["model"], cells["lever"], cells["fits"]) == ("gpt2_xl", "remat=none", "yes")
    # at least the forward and backward matmuls of 1.5 billion parameters, for 1024 tokens
    assert row["flops"] > 6 * 1.5e9 * 1024
    assert cells["TFLOP"] == f"{row['flops'] / 1e12:.3g}"
    assert cells["host"] == cells["to host"] == "0 B"
    assert cells["hidden"] == "-"


@pytest.mark.parametrize("lever", bench.LEVERS)
def test_a_lever_is_a_configuration_or_refused_by_name(lever):
    key = bench.LEVERS[lever].split()[0].removeprefix("--")
    refused = ""
    try:
        load_config(bench.CONFIGS / "gpt2_xl.yaml", bench.LEVERS[lever].split())
    except ConfigError as error:
        refused = str(error)
    assert refused == "" or key in refused


def test_a_lever_that_this_release_lacks_has_no_row(monkeypatch, capsys):
    why = "Traceback ...\nfsdp_jax.errors.ConfigError: unknown key 'offload.all'\n  fix: none"
    failed = subprocess.CompletedProcess([], 1, "", why)
    monkeypatch.setattr(bench.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(sys, "argv", ["bench", "--models", "gpt2_xl", "--levers", "offload=all"])
    assert bench.main() == 0
    shown = capsys.readouterr()
    assert "gpt2_xl, offload=all: no row: fsdp_jax.errors.ConfigError: unknown key" in shown.err
    assert "gpt2_xl" not in shown.out
