"""`fsdp-jax import --from orbax`: a checkpoint of another program becomes the weights of a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1

from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.checkpoint.export import read_params, saved_params
from fsdp_jax.cli.main import main
from fsdp_jax.models.gpt import GPT
from fsdp_jax.train.config_file import load_config
from fsdp_jax.train.model_config import make_model_config
from fsdp_jax.tree import flatten, unflatten
from fsdp_jax.weights import read_config

CONFIG = """
model: {layers: 2, width: 32, heads: 2, vocab_size: 64}
data: {sequence_length: 16}
"""
NAMES = """
def rename(path, saved):
    if path.startswith("blocks/"):
        return saved["stack/" + path.removeprefix("blocks/")].swapaxes(0, 1)
    return path
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A checkpoint with the layers along dim 1, the file of names, and the parameters as ours."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "names.py").write_text(NAMES)
    settings = load_config(folder / "run.yaml")
    config = make_model_config(settings.model, settings.data)
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    numbers = np.random.default_rng(0)
    params = {
        path: numbers.normal(size=leaf.shape).astype(leaf.dtype)
        for path, leaf in flatten(nnx.to_pure_dict(nnx.state(model, nnx.Param))).items()
    }
    stored = {
        path.replace("blocks/", "stack/"): jnp.asarray(
            x.swapaxes(0, 1) if path.startswith("blocks/") else x
        )
        for path, x in params.items()
    }
    v1.save(folder / "9", {"params": {"params": unflatten(stored)}, "step": 9})
    return folder, config, params


def imported(folder, to, *more):
    words = ["import", str(folder / "9"), "--from", "orbax", "--to", str(to), "--devices", "8"]
    return main([*words, *more])


def saved_in(run):
    with CheckpointStore(run / "checkpoints") as store:
        return dict(read_params(store, 0, saved_params(store, 0)))


def test_a_checkpoint_of_another_program_becomes_a_run(theirs, tmp_path, capsys):
    folder, config, params = theirs
    words = ["--config", str(folder / "run.yaml"), "--rename", str(folder / "names.py")]
    assert imported(folder, tmp_path / "run", *words) == 0
    assert f"for --model.weights {tmp_path / 'run'}" in capsys.readouterr().out
    found = saved_in(tmp_path / "run")
    assert found.keys() == params.keys()
    for path, value in params.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
    assert read_config(tmp_path / "run") == config

    # The final norm is initialized anew, and said.
    assert imported(folder, tmp_path / "other", *words, "--except", "ln_f/*") == 0
    said = capsys.readouterr().out
    assert "initialized anew: ln_f/bias\n" in said
    found = saved_in(tmp_path / "other")
    np.testing.assert_array_equal(found["ln_f/scale"], np.ones(32, np.float32))
    np.testing.assert_array_equal(found["embed/embedding"], params["embed/embedding"])
    assert jax.device_count() == 8


def test_what_cannot_be_imported_is_one_error(theirs, tmp_path, capsys):
    folder, _, _ = theirs
    config = ["--config", str(folder / "run.yaml")]
    (tmp_path / "empty.py").write_text("names = 3")
    cases = [
        (imported(folder, tmp_path / "run"), "--config is missing"),
        (imported(folder, tmp_path / "run", *config), "missing in the checkpoint"),
        (imported(folder, tmp_path / "run", *config, "--rename", "nowhere"), "no such file"),
        (
            imported(folder, tmp_path / "run", *config, "--rename", str(tmp_path / "empty.py")),
            "no function `rename`",
        ),
        (
            main(["import", str(folder / "9"), "--to", str(tmp_path / "run")]),
            "an orbax checkpoint of another program",
        ),
        (
            main(["import", str(folder), "--to", str(tmp_path / "run"), "--except", "ln_f/*"]),
            "except would be ignored",
        ),
        (
            main(["import", str(folder / "9"), "--from", "dcp", "--to", "x", *config]),
            "not a distributed checkpoint of PyTorch",
        ),
        (
            main(["export", str(folder / "9"), "--to", str(tmp_path / "out")]),
            "an orbax checkpoint of another program",
        ),
    ]
    said = capsys.readouterr().err
    assert [code for code, _ in cases] == [2] * len(cases), said
    blocks = said.split("error: ")[1:]
    assert [text for (_, text), block in zip(cases, blocks, strict=True) if text not in block] == []
    assert not (tmp_path / "run").exists()
