"""A real training run that is killed at random moments."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "torture_checkpoint.py"


@pytest.mark.long
def test_a_run_that_is_killed_at_random_moments_loses_nothing(tmp_path):
    command = [
        sys.executable,
        str(SCRIPT),
        "--trials",
        "10",
        "--seed",
        "1",
        "--directory",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["lost"], result["differences"]) == ([], [])
    assert sum(count for phase, count in result["kills"].items() if "end" not in phase) >= 8
    assert result["unsealed"] >= 1
    assert result["runs"] >= 1
