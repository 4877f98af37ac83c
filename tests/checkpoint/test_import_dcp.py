"""A checkpoint that FSDP2 wrote on eight ranks, read into seven devices without PyTorch.

`tests/parity/fsdp2_checkpoint.py` wrote it.
"""

import functools
import json
import os
import random
import re
import shutil
import tarfile
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dcp_files import write_dcp
from flax import nnx
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import import_dcp, import_orbax
from fsdp_jax.checkpoint.torch_distributed import open_torch
from fsdp_jax.errors import ConfigError, DamageError, ReadableError
from fsdp_jax.io.inert_pickle import read_pickle
from fsdp_jax.tree import flatten


class Model(nnx.Module):
    def __init__(self, rngs):
        self.wide = nnx.Linear(14, 21, rngs=rngs)
        self.out = nnx.Linear(21, 5, use_bias=False, rngs=rngs)


def loss_fn(model, batch):
    errors = (model.out(jnp.tanh(model.wide(batch["x"]))) - batch["y"]) ** 2
    return errors.sum(), errors.size


# The page's own example.
PAGE = Path(__file__).parents[2] / "docs" / "bring-your-checkpoints.md"
(EXAMPLE,) = re.findall(
    r"```python\n(.*?)```",
    PAGE.read_text().partition("### From PyTorch")[2].partition("\n## ")[0],
    re.S,
)
NAMES, _, STATE = EXAMPLE.partition("fresh = ")
FOUND: dict = {}
exec(NAMES, FOUND)
rename = FOUND["rename"]


@functools.cache
def sharded():
    tx = optax.adamw(0.01, weight_decay=0.1)
    mesh = fsdp.make_mesh(data=7, devices=jax.devices()[:7])
    return fsdp.fully_shard(lambda rngs: Model(rngs), tx, mesh, "full_shard", min_size=4)


@pytest.fixture
def theirs(tmp_path):
    with tarfile.open(Path(__file__).with_name("fsdp2.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "checkpoint", json.loads((tmp_path / "expected.json").read_text())


def test_a_checkpoint_of_fsdp2_trains_on(theirs):
    """Parameters and AdamW's state bitwise, and the losses of PyTorch."""
    folder, expected = theirs
    fresh = sharded().to_checkpoint(sharded().init(seed=1))
    read = import_dcp(folder, fresh, rename=rename)
    adam = read.opt_state[0]
    assert (int(read.step), int(adam.count)) == (2, 2)
    parts = {"": read.params, ".exp_avg": adam.mu, ".exp_avg_sq": adam.nu}
    for what, part in parts.items():
        for path, leaf in flatten(part).items():
            name = {"wide": "0", "out": "2"}[path.split("/")[0]]
            name += ".bias" if path.endswith("bias") else ".weight"
            value = np.asarray(expected[name + what], np.float32).T
            np.testing.assert_array_equal(np.asarray(leaf), value, err_msg=path)
    x = (np.arange(56 * 14, dtype=np.float32) % 13 / 13).reshape(56, 14)
    y = (np.arange(56 * 5, dtype=np.float32) % 7 / 7).reshape(56, 5)
    state = sharded().from_checkpoint(read)
    step = sharded().make_train_step(loss_fn)
    losses = []
    for _ in expected["losses"]:
        state, metrics = step(state, {"x": x, "y": y})
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-5)


def test_what_does_not_fit_is_named(theirs):
    folder, _ = theirs
    target = sharded().checkpoint_target().params
    with refused(error=ConfigError, got="wide/kernel: missing in the checkpoint") as caught:
        import_dcp(folder, target)
    assert "theirs model.0.bias: of no parameter" in caught.value.got
    with refused(error=ConfigError, got="expected [21, 5], got float32[21, 14]"):
        import_dcp(folder, target, rename=lambda *_: "0.weight", ignore=["*"])
    read = import_dcp(folder, target, rename=rename, skip=["out/*"])
    assert set(flatten(read)) == {"wide/bias", "wide/kernel"}
    with refused(error=ConfigError, got="PyTorch's distributed checkpoint", fix="import_dcp"):
        import_orbax(folder, target)
    with refused(error=ConfigError, got="a folder of something else"):
        import_dcp(folder.parent, target)


def test_parts_that_overlap_are_damage(tmp_path):
    """They have as many elements as the tensor, and leave some of it out."""
    target = sharded().checkpoint_target().params["out"]
    tensors = {"kernel": np.ones(target["kernel"].shape, np.float32)}
    write_dcp(tmp_path / "whole", tensors, ranks=3)
    assert import_dcp(tmp_path / "whole", {"kernel": target["kernel"]})
    write_dcp(tmp_path / "overlapping", tensors, ranks=3, overlap=1)
    with refused(error=DamageError, got="parts of kernel that are not all of it"):
        import_dcp(tmp_path / "overlapping", {"kernel": target["kernel"]})


def test_a_model_and_its_optimizer_may_be_in_folders_of_their_own(theirs, tmp_path):
    """As Accelerate writes them; of two steps one has to be named."""
    folder, _ = theirs
    with ExitStack() as files:
        arrays = {name: np.asarray(each) for name, each in open_torch(folder, files)[1].items()}
    model = {name: each for name, each in arrays.items() if name.startswith("model.")}
    rest = {name: each for name, each in arrays.items() if name not in model}
    both = tmp_path / "both"
    write_dcp(both / "pytorch_model_fsdp_0", model, ranks=2)
    write_dcp(both / "optimizer_0", rest, ranks=2)
    expected, found = (
        flatten(import_dcp(each, sharded().to_checkpoint(sharded().init(0)), rename=rename))
        for each in (folder, both)
    )
    for path in expected:
        if path != "rng":
            np.testing.assert_array_equal(found[path], expected[path], err_msg=path)
    write_dcp(tmp_path / "both" / "last", model, ranks=1)
    with refused(error=ConfigError, where=str(both)):
        import_dcp(both, sharded().checkpoint_target().params, rename=rename)


def test_no_input_runs_code_or_ends_in_a_traceback(theirs, tmp_path):
    """Bytes that are cut, flipped and put in, in pickles and archives; names that would run."""
    folder, _ = theirs
    target = sharded().checkpoint_target().params
    draw = random.Random(0)
    part = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    found = []
    for path in (folder / ".metadata", part):
        content = path.read_bytes()
        for _ in range(60):
            at = draw.randrange(len(content))
            broken = {
                0: content[:at],
                1: content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :],
                2: content[:at] + draw.randbytes(3) + content[at:],
            }[draw.randrange(3)]
            path.write_bytes(broken)
            try:
                import_dcp(folder, target, rename=rename)
            except ReadableError as error:
                found.append(type(error))
        path.write_bytes(content)
    assert found.count(DamageError) > 60
    ran = tmp_path / "ran"
    code = f"cos\nmkdir\n(V{ran}\ntR.".encode()
    assert read_pickle(code).name == "os.mkdir"
    for path in (folder / ".metadata", part):
        content = path.read_bytes()
        path.write_bytes(code)
        with pytest.raises(DamageError):
            import_dcp(folder, target, rename=rename)
        path.write_bytes(content)
    assert not ran.exists()
    shutil.rmtree(tmp_path / "checkpoint")
    folder.mkdir()
    os.mkfifo(folder / ".metadata")
    with pytest.raises(DamageError):
        import_dcp(folder, target, rename=rename)
