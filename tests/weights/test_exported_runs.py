"""Runs that are imported and exported: adapters merged exactly, how text ends, and an import that
was killed.

jax compiles the casts and merges of arrays, and an `init` on seven devices: the bytes of files are
compared, which a trace does not have.
"""

import functools
import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import not_refused, refused
from safetensors.numpy import load_file, save_file
from test_adapters import adapters_of
from tiny import FAMILIES, assert_bits, expected, folder_of, laid_out, target_of

import fsdp_jax
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.cli.main import main
from fsdp_jax.data import load_tokenizer, train_bpe
from fsdp_jax.data.options import DataOptions
from fsdp_jax.errors import ConfigError
from fsdp_jax.lora import Adapters, with_lora
from fsdp_jax.sharding.padding import Padded
from fsdp_jax.train import huggingface
from fsdp_jax.train.build import build
from fsdp_jax.train.config import Config, ModelConfig, TrainConfig
from fsdp_jax.train.console import banner, closing_summary
from fsdp_jax.train.huggingface import (
    export_huggingface,
    import_huggingface,
    write_config_and_tokenizer,
)
from fsdp_jax.train.initial_weights import initial_params
from fsdp_jax.tree import flatten, unflatten
from fsdp_jax.weights import export, export_adapters, from_arrays, import_weights, token_ids

pytestmark = pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning")

LAYERS, WIDTH, HIDDEN, RANK, SCALE = 3, 32, 48, 4, 0.02  # of the small Llama, and of its adapters


def adapted_run(run, *, scan_layers=True):
    """(kernels [I, O], adapters) by layer and name, of a run with frozen bfloat16 kernels."""
    path, _ = folder_of("llama", run.parent / "theirs")
    config, _ = laid_out("llama", scan_layers=scan_layers)
    params = flatten(
        import_weights(path, target_of("llama", "bfloat16", scan_layers=scan_layers), config)
    )
    draw, added = np.random.default_rng(0), {}
    for at in sorted(
        path.removesuffix("/kernel")
        for path in params
        if path.endswith(("q/kernel", "down/kernel"))
    ):
        *stack, inputs, outputs = params[f"{at}/kernel"].shape
        added[f"{at}/lora_a"] = draw.normal(size=(*stack, inputs, RANK)).astype(np.float32)
        added[f"{at}/lora_b"] = draw.normal(size=(*stack, RANK, outputs)).astype(np.float32)
    tree = unflatten(params | {path: jnp.asarray(value) for path, value in added.items()})
    with CheckpointStore(run / "checkpoints") as store:
        store.save(7, {"params": tree}, data={}, metadata={"lora_scale": SCALE})
    write_config_and_tokenizer(run, config, None)
    return params, added


@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.long)])
def test_adapters_of_kernels_in_bfloat16_are_not_rounded_away(tmp_path, scan_layers):
    params, added = adapted_run(tmp_path / "run", scan_layers=scan_layers)
    outs = {dtype: tmp_path / str(dtype) for dtype in ("float32", "bfloat16", None)}
    for dtype, out in outs.items():
        export_huggingface(tmp_path / "run", out, step=None, dtype=dtype)
    found = {dtype: load_file(out / "model.safetensors") for dtype, out in outs.items()}
    lost = 0
    for layer in range(LAYERS):
        for ours, theirs in (("attn/q", "self_attn.q_proj"), ("mlp/down", "mlp.down_proj")):
            at = f"blocks/{ours}" if scan_layers else f"blocks/{layer}/{ours}"
            kernel, a, b = (
                np.asarray((params | added)[f"{at}/{name}"]).astype(np.float64)
                for name in ("kernel", "lora_a", "lora_b")
            )
            kernel, a, b = (x[layer] if scan_layers else x for x in (kernel, a, b))
            exact, name = kernel + SCALE * a @ b, f"model.layers.{layer}.{theirs}.weight"
            np.testing.assert_allclose(found["float32"][name].T, exact, rtol=1e-6, atol=1e-6)
            for dtype in ("bfloat16", None):  # rounded once, from the same numbers
                np.testing.assert_array_equal(
                    found[dtype][name], found["float32"][name].astype(jnp.bfloat16)
                )
            lost += np.sum(kernel == found[None][name].astype(np.float32).T)
    assert lost > 100, "what bfloat16 cannot hold"


def test_adapters_are_merged_one_layer_at_a_time(tmp_path, monkeypatch):
    adapted_run(tmp_path / "run")
    shapes, reads, merge, read = [], [], export.merge, export.read_params

    def counted(kernel, *adapters, **scale):
        shapes.append((kernel.dtype.name, kernel.shape))
        return merge(kernel, *adapters, **scale)

    monkeypatch.setattr(export, "merge", counted)
    monkeypatch.setattr(
        export, "read_params", lambda *given: (reads.extend(given[2]), read(*given))[1]
    )
    export_huggingface(tmp_path / "run", tmp_path / "out", step=7, dtype="float32")
    assert sorted(shapes) == LAYERS * [("float32", (1, WIDTH, WIDTH))] + LAYERS * [
        ("float32", (1, HIDDEN, WIDTH))
    ]
    assert sum("lora" in path for path in reads) == 4, "each is read once"


def test_a_run_with_adapters_starts_one_with_the_same(tmp_path):
    """From its kernels and its adapters; what differs is named, and so is what was there."""
    params, added = adapted_run(tmp_path / "run")
    model, config = FAMILIES["llama"]

    def start(rank=RANK, targets=("q$", "down$"), alpha=RANK * SCALE, base=None):
        adapters = Adapters(rank=rank, alpha=alpha, targets=targets, base=base)
        make = lambda rngs: model(config, rngs=rngs)  # noqa: E731
        frozen = ()
        if rank is not None:
            make = with_lora(make, rank=rank, alpha=alpha, targets=targets)
            frozen = make.frozen
        sharded = fsdp_jax.fully_shard(
            make,
            optax.sgd(0.1),
            fsdp_jax.make_mesh(data=8),
            units=["LlamaBlock"],
            min_size=1,
            frozen=frozen,
            base=adapters.quantized,
        )
        return initial_params(str(tmp_path / "run"), sharded, config, adapters=adapters)

    found = flatten(start())
    assert found.keys() == (params | added).keys()
    for path, value in added.items():
        np.testing.assert_array_equal(np.asarray(found[path]), value)
    same = "lora.rank and lora.targets as they were there, with lora.base null"
    cases = {
        "another rank": (lambda: start(rank=2, alpha=2 * SCALE), {"fix": same}),
        "fewer targets": (lambda: start(targets=("q$",)), {"got": "down/lora_a: unknown"}),
        "more targets": (
            lambda: start(targets=("q$", "down$", "up$")),
            {"got": "up/lora_a: missing"},
        ),
        "none": (lambda: start(rank=None, targets=(), alpha=None), {"fix": same}),
        "another scale": (
            lambda: start(alpha=1.0),
            {"expected": "lora_scale 0.02", "got": "lora_scale 0.25", "fix": "lora.alpha"},
        ),
    }
    assert not_refused(cases) == {}

    # Adapters of a quantized base; the format that was there is named.
    coded = flatten(start(base="int8"))
    assert coded.keys() == found.keys()
    with CheckpointStore(tmp_path / "run" / "checkpoints") as store:
        store.save(8, {"params": unflatten(coded)}, data={}, metadata={"lora_scale": SCALE})
    assert flatten(start(base="int8")).keys() == found.keys()
    cases = {
        "another format": (lambda: start(base="nf4"), {"fix": "with lora.base int8 and"}),
        "no format": (start, {"got": "expected float32", "fix": "with lora.base int8 and"}),
    }
    assert not_refused(cases) == {}


@pytest.fixture
def theirs(tmp_path):
    """A GPT-2 with a tokenizer whose settings name the token that ends a text."""
    folder, _ = folder_of("gpt2", tmp_path / "theirs")
    content = json.loads(train_bpe(["hello there, hello here"] * 9, 300).files["tokenizer.json"])
    for token, name in ((1, "<s>"), (2, "</s>")):
        content["added_tokens"].append(
            {**content["added_tokens"][0], "id": 400 + token, "content": name}
        )
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return folder


def test_weights_are_imported_on_seven_devices_too(theirs, tmp_path, monkeypatch):
    """The run has the arrays in their own shapes: it is the one that eight devices import."""
    printed, files = [], []
    shard = functools.partial(fsdp_jax.fully_shard, min_size=1)
    monkeypatch.setattr(huggingface, "fully_shard", shard)
    for devices in (7, 8):
        mesh = fsdp_jax.make_mesh(data=devices, devices=jax.devices()[:devices])
        monkeypatch.setattr(huggingface, "make_mesh", lambda mesh=mesh: mesh)
        run, out = tmp_path / f"run{devices}", tmp_path / f"out{devices}"
        printed.append(import_huggingface(theirs, run, dtype="float32").partition(", in /")[0])
        export_huggingface(run, out, step=None, dtype="float32")
        files.append((out / "model.safetensors").read_bytes())
    assert printed[0] == printed[1]
    assert files[0] == files[1]

    # A new run on seven devices starts from it.
    model, config = FAMILIES["gpt2"]
    mesh = fsdp_jax.make_mesh(data=7, devices=jax.devices()[:7])
    sharded = shard(lambda rngs: model(config, rngs=rngs), optax.sgd(0.1), mesh)
    params = initial_params(str(tmp_path / "run8"), sharded, config)
    started = flatten(sharded.to_checkpoint(sharded.init(params=params)).params)
    assert any(isinstance(leaf, Padded) for leaf in started.values())
    wanted = expected(config, started, load_file(theirs / "model.safetensors"))
    assert_bits(started, wanted)


def test_token_ids_are_exported_from_the_tokenizer(theirs, tmp_path):
    end = load_tokenizer(theirs).end
    assert end not in (None, 0)
    import_huggingface(theirs, tmp_path / "run", dtype="float32")
    export_huggingface(tmp_path / "run", tmp_path / "out", step=None, dtype="float32")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (found["eos_token_id"], found["bos_token_id"], found["pad_token_id"]) == (
        end,
        None,
        None,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (theirs / name).read_bytes()
    # a run of before, whose config.json says nothing: the tokenizer beside it does
    config = tmp_path / "run" / "config.json"
    config.write_text(
        json.dumps({k: v for k, v in json.loads(config.read_text()).items() if "token_id" not in k})
    )
    export_huggingface(tmp_path / "run", tmp_path / "again", step=None, dtype="float32")
    assert token_ids(tmp_path / "again") == {"eos_token_id": end}


def test_token_ids_of_an_imported_config_are_exported(theirs, tmp_path):
    config = json.loads((theirs / "config.json").read_text())
    tokens = {"bos_token_id": 90, "eos_token_id": [91, 92], "pad_token_id": 5}
    (theirs / "config.json").write_text(json.dumps(config | tokens))
    (theirs / "tokenizer.json").unlink()
    import_huggingface(theirs, tmp_path / "run", dtype="float32")
    export_huggingface(tmp_path / "run", tmp_path / "out", step=None, dtype="float32")
    assert token_ids(tmp_path / "out") == tokens


def test_image_models_have_no_token_ids(tmp_path):
    folder, _ = folder_of("vit", tmp_path / "theirs")
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    import_huggingface(folder, tmp_path / "run", dtype="float32")
    export_huggingface(tmp_path / "run", tmp_path / "out", step=None, dtype="float32")
    found = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    assert processor.items() <= found.items()
    assert "eos_token_id" not in json.loads((tmp_path / "out" / "config.json").read_text())


def killed(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["saving", "between", "writing"])
def test_a_killed_import_starts_over(theirs, tmp_path, monkeypatch, when):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        if when == "saving":
            patch.setattr(CheckpointStore, "_seal", killed)
        elif when == "between":
            patch.setattr(huggingface, "write_config_and_tokenizer", killed)
        else:
            patch.setattr(huggingface, "config_files", killed)
        with pytest.raises(KeyboardInterrupt):
            import_huggingface(theirs, run, dtype="float32")
    assert not (run / "config.json").exists()
    (run / "lease.json").write_text("{}")  # which a killed process leaves
    (run / "tokenizer.json.unfinished").write_text("{")
    import_huggingface(theirs, run, dtype="bfloat16")
    export_huggingface(run, tmp_path / "out", step=None, dtype=None)
    assert (
        load_file(tmp_path / "out" / "model.safetensors")["transformer.wte.weight"].dtype
        == jnp.bfloat16
    )
    with refused("is not empty", error=ConfigError, got="config.json"):
        import_huggingface(theirs, run, dtype="float32")


def test_an_import_replaces_no_other_files(theirs, tmp_path):
    for name in ("notes.txt", "config.json", "config.yaml"):
        run = tmp_path / f"run-{name}"
        run.mkdir()
        (run / name).write_text("{}")
        with refused("is not empty", error=ConfigError, where=str(run), got=name):
            import_huggingface(theirs, run, dtype="float32")
    with CheckpointStore(tmp_path / "own" / "checkpoints") as store:
        store.save(0, {"params": {"w": jax.device_put(1.0)}}, data={}, metadata={})
    with refused("is not empty", error=ConfigError, got="checkpoints"):
        import_huggingface(theirs, tmp_path / "own", dtype="float32")
    (tmp_path / "file").write_text("")
    with refused("not a directory", error=ConfigError):
        import_huggingface(theirs, tmp_path / "file", dtype="float32")


def test_an_import_of_weights_that_do_not_fit_saves_nothing(theirs, tmp_path):
    found = load_file(theirs / "model.safetensors")
    save_file(found | {"h.9.mystery": np.zeros(3)}, theirs / "model.safetensors")
    with refused(error=ConfigError, got="theirs h.9.mystery"):
        import_huggingface(theirs, tmp_path / "run", dtype="float32")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_unknown_dtype_is_refused_first(tmp_path, capsys):
    nowhere = tmp_path / "nowhere"
    with refused(error=ConfigError, where="--dtype", expected="float32", got="int8"):
        export_huggingface(nowhere, tmp_path / "out", step=None, dtype="int8")
    for dtype in ("int8", "float16"):
        assert main(["import", str(nowhere), "--to", str(tmp_path / "out"), "--dtype", dtype]) == 2
        error = capsys.readouterr().err
        assert f"'{dtype}'\n  where:    --dtype\n  expected: float32, bfloat16\n" in error


def test_the_home_directory_is_expanded(theirs, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "HOME", str(tmp_path))
    import_huggingface("~/theirs", "~/run", dtype="float32")
    export_huggingface("~/run", "~/out", step=None, dtype="float32")
    assert (tmp_path / "out" / "model.safetensors").exists()
    with refused("there already", error=ConfigError):
        export_huggingface("~/run", "~/out", step=None, dtype="float32")


def test_adapters_of_other_weights_are_shown_and_warned_of(tmp_path):
    """Added to weights into which they are merged already they would count twice."""
    theirs, _ = folder_of("llama", tmp_path / "theirs")
    merged, _ = folder_of("llama", tmp_path / "merged")
    import_huggingface(theirs, tmp_path / "imported", dtype="float32")
    (tmp_path / "moved").symlink_to(theirs)
    config, adapters = adapters_of("llama", ["blocks/attn/q"])
    source = from_arrays(unflatten(adapters))
    export_adapters(source, config, tmp_path / "adapters", scale=2.0, base=str(theirs))
    settings = Config(
        model=ModelConfig(family="llama", weights=str(theirs)),
        lora=Adapters(weights=str(tmp_path / "adapters"), base="nf4"),
        data=DataOptions(sequence_length=16),
        train=TrainConfig(global_batch_size=8),
    )
    run = build(settings)
    shown = banner(run, "", "", str(theirs), None)
    assert shown["adapters"] == f"{tmp_path}/adapters (rank 4, alpha 8, made for {theirs})"
    assert shown["base"] == "nf4, scales in float32"
    assert "adapters" not in banner(replace(run, adapters=Adapters()), "", "", None, None)
    layout, end = run.sharded.layout, Path("out")
    for adapted in (True, False):
        text = closing_summary(layout, "token", None, None, end, has_adapters=adapted)
        assert ("--to weights --format huggingface (merged) or peft" in text) == adapted
    own = replace(run.adapters, weights=None, base=None)
    shown = banner(replace(run, adapters=own), "", "", None, None)
    assert (shown["adapters"], "base" in shown) == ("rank 4, alpha 8", False)

    def start(weights):
        initial_params(str(weights), run.sharded, run.model_config, adapters=run.adapters)

    for weights in (theirs, tmp_path / "imported", tmp_path / "moved"):
        start(weights)  # without a warning
    with pytest.warns(UserWarning, match="made for other weights") as caught:
        start(merged)
    assert f"expected: model.weights {theirs}" in str(caught[0].message)
    path = tmp_path / "adapters" / "adapter_config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"base_model_name_or_path": "org/Theirs"}))
    with pytest.warns(UserWarning, match="made for other weights"):
        start(merged)
    path.write_text(json.dumps(content | {"base_model_name_or_path": "org/merged"}))
    start(merged)
    cached = tmp_path / "models--org--merged" / "snapshots"
    cached.mkdir(parents=True)
    (cached / "c0ffee").symlink_to(merged)
    start(cached / "c0ffee")
