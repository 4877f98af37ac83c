"""Real runs and commands that are killed, starved of space and spoiled at random moments."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "torture_checkpoint.py"


@pytest.mark.long
def test_a_run_that_is_killed_at_random_moments_loses_nothing(tmp_path):
    words = ("--trials", "15", "--seed", "1", "--directory", str(tmp_path))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = json.loads(done.stdout.splitlines()[-1])["kinds"]
    assert sum(kind["trials"] for kind in kinds.values()) == 15
    assert all(kind["trials"] for kind in kinds.values())
    wrong = ("lost", "differences", "good_lost", "failures")
    assert [kind[name] for kind in kinds.values() for name in wrong if kind[name]] == []
    notes = {name: count for kind in kinds.values() for name, count in kind["notes"].items()}
    assert notes["runs compared to the control run"] >= 1
