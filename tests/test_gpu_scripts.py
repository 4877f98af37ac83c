"""`scripts/gpu`: from end to end at toy size, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts/gpu"


@pytest.mark.parametrize(
    ("script", "bench"),
    [("kernels", "gpu_kernels"), pytest.param("plan", "gpu_plan", marks=pytest.mark.long)],
)
def test_a_script_prints_its_table_and_keeps_its_record(script, bench, tmp_path):
    record = tmp_path / "record.json"
    command = [sys.executable, SCRIPTS / f"{script}.py", "--toy", "--json", record]
    one_device = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one_device)
    assert done.returncode == 0, done.stderr
    kept = json.loads(record.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == kept
    assert kept["bench"] == bench
    assert kept["rows"]
    assert kept["environment"]["device"]
