"""A real run, killed at moments that nobody has chosen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "torture_checkpoint.py"


@pytest.mark.long
def test_killed_again_and_again(tmp_path):
    words = [
        sys.executable,
        str(SCRIPT),
        "--trials",
        "10",
        "--seed",
        "1",
        "--directory",
        str(tmp_path),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["lost"], found["differences"]) == ([], [])
    assert sum(count for phase, count in found["kills"].items() if "end" not in phase) >= 8
    assert found["unsealed"] >= 1
    assert found["runs"] >= 1
