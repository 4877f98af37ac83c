"""Two hosts that are network namespaces: a killed process, a stopped one, a link that is cut."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "torture_hosts.py"


@pytest.mark.exhaustive
def test_a_fault_between_two_hosts_ends_both_and_the_run_resumes(tmp_path):
    words = ("--trials", "3", "--seed", "1", "--directory", str(tmp_path))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    if done.returncode == 2:  # not root, or a container without the right
        assert done.stdout.startswith("no network namespaces can be made here")
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads(done.stdout.splitlines()[-1])["trials"]
    assert {trial["kind"] for trial in trials} == {"kill", "stop", "link"}
    assert [trial["problems"] for trial in trials] == [[], [], []]
