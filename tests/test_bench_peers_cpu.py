"""`scripts/bench_peers_cpu.py` from end to end at toy size, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts/bench_peers_cpu.py"


@pytest.mark.exhaustive
def test_peers_of_jax_have_a_row_each_and_the_same_losses(tmp_path):
    peers, record = ["by hand", "ours, devices", "ours, processes"], tmp_path / "record.json"
    command = [sys.executable, SCRIPT, "--model", "toy", "--ranks", "2", "--rounds", "1"]
    command += ["--steps", "1", "--checked", "3", "--json", record, "--only", *peers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(record.read_text())[0]["rows"]
    assert [row["peer"] for row in rows] == peers, done.stderr
    assert all(len(row["losses"]) == 3 and row["loss_difference"] < 1e-5 for row in rows)
