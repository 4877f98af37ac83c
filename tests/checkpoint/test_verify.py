"""Output and exit codes of `fsdp-jax verify` and `fsdp-jax export`."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from collected import collected
from flips import flip_byte
from safetensors import safe_open

from fsdp_jax.checkpoint import CheckpointStore, verify
from fsdp_jax.cli.main import main


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """The output of a run with two steps, an unfinished one and a foreign directory."""
    root = tmp_path_factory.mktemp("intact")
    rows = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P("data"))
    state = {"params": {"w": jax.device_put(np.arange(64, dtype=np.float32).reshape(16, 4), rows)}}
    with CheckpointStore(root / "checkpoints") as store:
        for step in (2, 10):
            store.save(step, state, data={}, metadata={}, finite=True)
    (root / "checkpoints" / "12.unsealed").mkdir()
    (root / "checkpoints" / "99").mkdir()
    return root


@pytest.fixture
def run(intact, tmp_path):
    """A copy to change."""
    return shutil.copytree(intact, tmp_path / "run")


def test_verify_of_a_good_run(run, capsys):
    assert main(["verify", str(run)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown[3:5]] == [["2", "good"], ["10", "good"]]
    assert shown[5:] == ["not a checkpoint: 12.unsealed", "not a checkpoint: 99"]


def test_verify_of_a_damaged_run(run, capsys):
    file = max(
        (path for path in (run / "checkpoints" / "10").rglob("*") if path.is_file()),
        key=lambda p: p.name,
    )
    flip_byte(file)
    assert main(["verify", str(run), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["good"], [step["good"] for step in found["steps"]]) == (False, [True, False])
    name = file.relative_to(run / "checkpoints" / "10").as_posix()
    assert found["steps"][1]["problems"][0].startswith(name)
    assert main(["verify", str(run)]) == 3
    shown = capsys.readouterr().out
    assert "10    DAMAGED" in shown
    assert f"step 10: {name}:" in shown
    assert main(["export", str(run), "--to", str(run / "weights")]) == 3
    assert name in capsys.readouterr().err
    assert main(["export", str(run), "--to", str(run / "weights"), "--step", "2"]) == 0


def test_a_step_that_is_deleted_during_verify_is_not_damaged(run, capsys, monkeypatch):
    check = verify.check_files

    def deleted_by_its_run(path):
        if path.name == "2":
            path.rename(path.with_name("2.deleting"))
        return check(path)

    monkeypatch.setattr(verify, "check_files", deleted_by_its_run)
    assert main(["verify", str(run)]) == 0
    assert "DAMAGED" not in capsys.readouterr().out


def test_export_of_the_newest_step(run, capsys):
    command = ["export", str(run), "--to", str(run / "weights"), "--dtype", "bfloat16"]
    assert main([*command, "--format=gguf"]) == 2
    assert main(command) == 0
    assert "1 tensors of step 10, 128 B in 1 files" in capsys.readouterr().out
    with safe_open(run / "weights" / "model.safetensors", framework="numpy") as opened:
        assert opened.get_tensor("w").dtype == jax.numpy.bfloat16
    assert main(["export", str(run), "--to", str(run / "same"), "--dtype", "same"]) == 0
    with safe_open(run / "same" / "model.safetensors", framework="numpy") as opened:
        assert opened.get_tensor("w").dtype == "float32"


def test_mistakes_on_the_command_line(run, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cases = [
        (["verify"], "RUN is one path"),
        (["verify", "a", "b"], r"RUN is one path[^$]*got: +a b"),
        (["verify", "/nowhere"], "no checkpoint there"),
        (["verify", "RUN/checkpoints/10"], r"no checkpoint there[^$]*fix: +pass \S+\n$"),
        (["export", "RUN"], r"expected: --to DIR"),
        (["export", "RUN", "--to", "w", "--format", "pickle"], r"unknown value[^$]*safetensors"),
        (["export", "RUN", "--to", "w", "--step", "two"], "a whole number"),
        (["export", "RUN", "--to", "w", "--step", "3"], r"no such step[^$]*one of \[2, 10\]"),
        (["export", "RUN", "--to", "w", "--dtype", "int4"], "not a dtype to export"),
        (["export", "RUN", "--to", "RUN"], "there already"),
        (["export", "RUN", "--to"], "--to: expected one argument"),
    ]
    with collected() as case:
        for arguments, expected in cases:
            with case(arguments):
                assert main([each.replace("RUN", str(run)) for each in arguments]) == 2
                error = capsys.readouterr().err
                assert re.search(expected, error), error


def test_help_names_the_arguments(capsys):
    for command in ("verify", "export"):
        assert main([command, "--help"]) == 0
        assert f"fsdp-jax {command} RUN" in capsys.readouterr().out
