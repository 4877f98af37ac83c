"""Real runs and commands that are killed, starved of space and spoiled at random moments."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "torture_checkpoint.py"


# A kill at any operation on a file may meet any moment of a save; of all kinds, before a release.
@pytest.mark.parametrize(
    ("trials", "only"),
    [
        pytest.param(3, ["--only", "file"], marks=pytest.mark.long, id="file"),
        pytest.param(15, [], marks=pytest.mark.exhaustive, id="all"),
    ],
)
def test_a_run_killed_at_random_moments_loses_nothing(tmp_path, trials, only):
    words = ["--trials", str(trials), "--seed", "1", "--directory", str(tmp_path), *only]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = json.loads(done.stdout.splitlines()[-1])["kinds"]
    assert sum(kind["trials"] for kind in kinds.values()) == trials
    tried = [name for name, kind in kinds.items() if kind["trials"]]
    assert len(tried) == (1 if only else trials), tried
    wrong = ("lost", "differences", "good_lost", "failures")
    assert [kind[name] for kind in kinds.values() for name in wrong if kind[name]] == []
    notes = {name: count for kind in kinds.values() for name, count in kind["notes"].items()}
    assert notes["runs compared to the control run"] >= 1
