"""Hostile inputs are read or refused as documented, and the harness that says so can fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.mutations import dumps
from fuzz.planted import FAULTS
from fuzz.targets import TARGETS

TESTS = Path(__file__).parents[1]
INPUTS, SEED = 150, 16


def run(module, *arguments, folder):
    """The process and what it printed; workers are forked, so jax must not run in it yet."""
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("XLA_FLAGS", None)
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.long
def test_hostile_inputs_are_read_as_by_the_reference_or_refused(tmp_path):
    done = run("fuzz", "--inputs", INPUTS, "--seed", SEED, "--limit", 60, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["target"] for row in rows] == list(TARGETS)
    for row in rows:
        accepted, refused = int(row["accepted"]), int(row["refused: 2"]) + int(row["refused: 3"])
        assert accepted + refused == INPUTS
        assert accepted > INPUTS // 50, row
        assert refused > INPUTS // 20, row


@pytest.mark.long
def test_the_harness_reports_faults_planted_in_each_target(tmp_path):
    done = run("fuzz.planted", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    reported = {}
    for line in done.stdout.splitlines():
        reported |= json.loads(line)
    # An input that fails is reduced, is found again with the same seed, and is kept.
    assert reported.pop("reduced") == [["config.json: nothing in its place"]] * 2
    assert (tmp_path / "kept" / "folder").is_dir()
    assert not (tmp_path / "kept" / "folder" / "config.json").exists()
    assert reported.keys() == TARGETS.keys()
    for name, outcomes in reported.items():
        expected = list(FAULTS.values())[: len(outcomes)]
        assert [problem for problem, _ in outcomes] == expected, (name, outcomes)
    assert len(reported["config"]) == len(FAULTS)


def test_json_can_hold_what_python_cannot():
    tree = {"a": [1, None], "b": float("nan")}
    assert dumps(tree) == '{"a": [1, null], "b": NaN}'
