"""A run that averages its parameters evaluates and exports both."""

import numpy as np
import pytest
from runs import records
from safetensors.numpy import load_file

from fsdp_jax.cli.main import main


def exported(run, to, *arguments):
    assert main(["export", str(run), "--to", str(to), *arguments]) == 0
    return load_file(next(to.glob("*.safetensors")))


@pytest.mark.filterwarnings("default:the checkpoint has no average:UserWarning")
def test_a_resumed_run_averages_from_its_checkpoint(run, copied, tmp_path, capsys):
    """The average of decay 0.5 after two steps: (2 p2 + p1 + p0) / 4, where p0 is resumed from."""
    directory = copied("averaged")
    p0 = exported(directory, tmp_path / "p0")
    settings = ("--optimizer.ema", "0.5", "--checkpoint.every", "1")
    assert run("averaged", *settings, "--train.steps", "8") == 0
    shown = capsys.readouterr()
    assert "the checkpoint has no average of the parameters; it starts from them" in shown.err
    assert " of the averaged weights, over " in shown.out

    newest = records(directory, "evals.jsonl")[-1]
    assert newest["step"] == 8
    assert newest["held_out_loss"] != newest["held_out_loss_ema"] > 0

    p1, p2 = (exported(directory, tmp_path / f"p{n}", "--step", str(6 + n)) for n in (1, 2))
    average = exported(directory, tmp_path / "average", "--weights", "ema")
    for name in p0:
        expected = (2 * p2[name] + p1[name] + p0[name]) / 4
        np.testing.assert_allclose(average[name], expected, rtol=1e-5, atol=1e-7)

    assert main(["export", str(directory), "--to", str(tmp_path / "none"), "--step", "6",
                 "--weights", "ema"]) == 2  # fmt: skip
    assert "the checkpoint has no average of the parameters" in capsys.readouterr().err
    # The average cannot be left out, which the error names in a line.
    assert run("averaged", "--train.steps", "9") == 2
    said = capsys.readouterr().err
    assert "1 differing paths" in said
    assert "opt_state/1: expected nothing, got an average of the parameters" in said
    assert "optimizer.ema as it was" in said
