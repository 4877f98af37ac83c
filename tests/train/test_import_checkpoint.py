"""`fsdp-jax import --from orbax`, `dcp` and `levanter`: other programs' checkpoints become runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dcp_files import write_dcp
from flax import nnx
from levanter_files import write_levanter
from orbax.checkpoint import v1
from runs import losses

from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.checkpoint.export import read_params, saved_params
from fsdp_jax.cli.main import main
from fsdp_jax.io.array_specs import parse_description
from fsdp_jax.models import FAMILIES
from fsdp_jax.models.flops import parameter_shapes
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
    steps = tmp_path / "steps"
    for step in ("step-3", "step-20"):
        write_dcp(steps / step, {"a": np.ones(2, np.float32)}, ranks=1)
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
            "not one distributed checkpoint of PyTorch",
        ),
        (
            main(["import", str(steps), "--from", "dcp", "--to", "x", *config]),
            f"fix:      one of them: {steps / 'step-20'}",
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


LLAMA = """
model: {family: llama, layers: 2, width: 16, heads: 4, vocab_size: 64}
data: {sequence_length: 16}
"""
# Ours -> torchtitan's, of a layer.
TORCHTITAN = {
    "attn_norm/scale": "attention_norm",
    **{f"attn/{name}/kernel": f"attention.w{name}" for name in "qkvo"},
    "mlp_norm/scale": "ffn_norm",
    **{"mlp/gate/kernel": "feed_forward.w1", "mlp/down/kernel": "feed_forward.w2"},
    "mlp/up/kernel": "feed_forward.w3",
}


def as_torchtitan(params, heads):
    """Converts parameters of ours, or their moments, to torchtitan's tensors."""
    found = {}
    for path, x in params.items():
        if not path.startswith("blocks/"):
            name = {"embed": "tok_embeddings", "norm": "norm", "head": "output"}[path.split("/")[0]]
            found[f"{name}.weight"] = x if name != "output" else x.T
            continue
        inner = path.removeprefix("blocks/")
        for block, layer in enumerate(x):
            weight = layer.T if layer.ndim == 2 else layer
            if inner in heads:  # halves that are rotated become neighbours
                halves = weight.reshape(heads[inner], 2, -1, weight.shape[1])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
            found[f"layers.{block}.{TORCHTITAN[inner]}.weight"] = weight
    return {name: np.ascontiguousarray(x) for name, x in found.items()}


HEADS = {"attn/q/kernel": 4, "attn/k/kernel": 2}


@pytest.fixture
def llama(tmp_path):
    """Random parameters of a small Llama, by path."""
    (tmp_path / "run.yaml").write_text(LLAMA)
    settings = load_config(tmp_path / "run.yaml")
    config = make_model_config(settings.model, settings.data)
    numbers = np.random.default_rng(0)
    shapes = parameter_shapes(FAMILIES["llama"].model, config)
    return {path: numbers.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}


def test_names_of_known_programs_need_no_file(llama, tmp_path, capsys):
    """Of torchtitan, by the command; a checkpoint without optimizer state is said to be one."""
    write_dcp(tmp_path / "dcp", as_torchtitan(llama, HEADS), ranks=3)
    words = ["--config", str(tmp_path / "run.yaml"), "--devices", "8", "--to"]
    command = ["import", str(tmp_path / "dcp"), "--from", "dcp", *words]
    assert main([*command, str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "names of torchtitan\nthe checkpoint has no optimizer state: a run starts with" in said
    found = saved_in(tmp_path / "run")
    assert found.keys() == llama.keys()
    for path, value in llama.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


def test_a_state_goes_on_at_its_step(llama, tmp_path, capsys):
    """The optimizer's state by the command, of Levanter; or the parameters alone, which is said."""
    theirs = {path.replace("blocks/", "layers/"): x for path, x in llama.items()}
    (tmp_path / "names.py").write_text(
        "def rename(path, saved):\n    return path.replace('blocks/', 'layers/')\n"
    )
    tree = unflatten(theirs)
    tx = optax.inject_hyperparams(optax.adamw)(1e-3)
    state = tx.init(tree)
    adam = state.inner_state[0]._replace(
        count=jnp.int32(7),
        mu=jax.tree.map(lambda x: x * 2, tree),
        nu=jax.tree.map(lambda x: x * x, tree),
    )
    state = state._replace(count=jnp.int32(7), inner_state=(adam, *state.inner_state[1:]))
    write_levanter(tmp_path / "step-7", {"model": tree, "opt_state": as_dicts(state), "step": 7})
    (tmp_path / "ema.yaml").write_text(LLAMA + "optimizer: {ema: 0.9}")
    words = ["--from", "levanter", "--config", str(tmp_path / "ema.yaml"), "--devices", "8"]
    words += ["--rename", str(tmp_path / "names.py"), "--except", "*norm/scale", "--to"]
    command = ["import", str(tmp_path / "step-7"), *words]
    assert main([*command, str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "with the optimizer's state of step 7: go on with fsdp-jax train" in said
    anew = ["blocks/attn_norm/scale", "blocks/mlp_norm/scale", "norm/scale"]
    assert said.split("initialized anew: ")[1].split()[:3] == anew
    assert "an average of the parameters (optimizer.ema) starts from them" in said
    with CheckpointStore(tmp_path / "run" / "checkpoints") as store:
        assert store.steps() == [7]
        leaves = store.record(7)["leaves"]
        moments = {x.rpartition("/mu/")[2]: x for x in leaves if "/mu/" in x}
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        counts = [path for path in leaves if path.endswith("/count")]
        wanted = {
            path: jax.ShapeDtypeStruct(shape, dtype, sharding=one)
            for path in (*moments.values(), *counts)
            for dtype, shape in [parse_description(leaves[path])]
        }
        found = store.read(7, wanted)
    assert moments.keys() == llama.keys()
    for path, at in moments.items():
        expected = llama[path] * (0 if path in anew else 2)
        np.testing.assert_array_equal(found[at], expected, err_msg=path)
    assert [int(found[path]) for path in counts] == [7, 7]

    assert main([*command, str(tmp_path / "weights"), "--weights-only"]) == 0
    assert "the optimizer's state is left out" in capsys.readouterr().out
    assert main([*command, str(tmp_path / "no"), "--dtype", "bfloat16"]) == 2
    assert "precision.param" in capsys.readouterr().err
    (tmp_path / "ema.yaml").write_text(LLAMA + "lora: {rank: 2, base: nf4}")
    assert main([*command, str(tmp_path / "no")]) == 2
    assert "--weights-only" in capsys.readouterr().err


def as_dicts(tree):
    """Named tuples and tuples as dicts, by the keys that Levanter gives them."""
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    elif isinstance(tree, tuple):
        tree = {str(number): each for number, each in enumerate(tree)}
    if isinstance(tree, dict):
        return {key: as_dicts(each) for key, each in tree.items()}
    return tree


@pytest.mark.long
def test_training_goes_on_with_the_same_losses(tmp_path, capsys):
    """A run of ours, as torchtitan would have saved it, trains on bit for bit from the import."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "corpus.txt").write_text("abcdefgh" * 4096)  # all batches are the same
    (tmp_path / "run.yaml").write_text(
        LLAMA.replace("vocab_size: 64", "vocab_size: 256").replace(
            "data: {", f"data: {{kind: text, path: {tmp_path / 'text' / 'corpus.txt'}, "
        )
        + "train: {steps: 4, global_batch_size: 8, devices: 8, eval_batches: 1, sample: 0}\n"
        "checkpoint: {every: 2}\noptimizer: {learning_rate: 0.01}\n"
    )
    run = str(tmp_path / "run.yaml")
    assert main(["train", run, "--output", str(tmp_path / "ours")]) == 0
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with CheckpointStore(tmp_path / "ours" / "checkpoints") as store:
        leaves = store.record(2)["leaves"]
        wanted = {
            path: jax.ShapeDtypeStruct(shape, dtype, sharding=one)
            for path, text in leaves.items()
            if path.startswith("params/") or "/mu/" in path or "/nu/" in path
            for dtype, shape in [parse_description(text)]
        }
        state = {path: np.asarray(x) for path, x in store.read(2, wanted).items()}
    tensors = {"train_state.step": np.asarray(2, np.int64)}
    for mark, what in (("params/", ""), ("/mu/", ".exp_avg"), ("/nu/", ".exp_avg_sq")):
        part = {path.rpartition(mark)[2]: x for path, x in state.items() if mark in path}
        for name, x in as_torchtitan(part, HEADS).items():
            tensors[f"optimizer.state.{name}{what}" if what else f"model.{name}"] = x
            if what == ".exp_avg":
                tensors[f"optimizer.state.{name}.step"] = np.asarray(2, np.float32)
    write_dcp(tmp_path / "dcp", tensors, ranks=3)
    words = ["--from", "dcp", "--config", run, "--devices", "8", "--to", str(tmp_path / "theirs")]
    assert main(["import", str(tmp_path / "dcp"), *words]) == 0
    capsys.readouterr()
    assert main(["train", run, "--output", str(tmp_path / "theirs")]) == 0
    assert "step 2 was imported from dcp: its data starts anew" in capsys.readouterr().out
    assert losses(tmp_path / "theirs") == losses(tmp_path / "ours")[2:]
