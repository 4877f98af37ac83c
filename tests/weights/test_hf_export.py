"""Weights under foreign names: from arrays and from checkpoints, whole and read by the library of
the format.

jax compiles the slices and casts of arrays, and an `init` on seven devices: the bytes of files are
compared, which a trace does not have.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusals import refused
from safetensors import safe_open
from tiny import FAMILIES, SCANNED_OR_NOT, assert_bits, folder_of, laid_out, target_of

import fsdp_jax
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.io.safetensors import INDEX
from fsdp_jax.lora import join_lora, merge, merged_paths, split_lora, with_lora
from fsdp_jax.sharding.padding import Padded
from fsdp_jax.tree import flatten, unflatten
from fsdp_jax.weights import (
    export_weights,
    from_arrays,
    from_store,
    import_weights,
    read_config,
    token_ids,
)

pytestmark = pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning")


def read(folder):
    """Every tensor, by the library that defines the format."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def imported(name, folder, **more):
    """(config, params, their tensors) of a family."""
    path, tensors = folder_of(name, folder)
    config, _ = laid_out(name, **more)
    target = target_of(name, **more)
    return config, import_weights(path, target, config), tensors


@pytest.mark.parametrize(("name", "scan_layers"), SCANNED_OR_NOT)
def test_imported_and_exported_weights_are_bitwise_equal(tmp_path, name, scan_layers):
    config, params, tensors = imported(name, tmp_path / "in", scan_layers=scan_layers)
    done = export_weights(from_arrays(params), config, tmp_path / "out")
    assert_bits(read(tmp_path / "out"), tensors)
    assert (done.tensors, done.size) == (
        len(tensors),
        sum(value.nbytes for value in tensors.values()),
    )
    assert done.files == ("model.safetensors",)
    again = read_config(tmp_path / "out", scan_layers=scan_layers)
    if hasattr(again, "layer_scale"):
        assert again.layer_scale == config.initial_scale
        again = dataclasses.replace(again, layer_scale=None)
    assert again == config
    target = target_of(name, scan_layers=scan_layers)
    assert_bits(
        flatten(import_weights(tmp_path / "out", target, again)),
        {path: np.asarray(leaf) for path, leaf in flatten(params).items()},
    )


def test_weights_in_host_memory_are_exported(tmp_path):
    config, params, tensors = imported(next(iter(FAMILIES)), tmp_path / "in")
    on_host = jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), params
    )
    export_weights(from_arrays(on_host), config, tmp_path / "out")
    assert_bits(read(tmp_path / "out"), tensors)


@pytest.mark.parametrize(
    ("dtype", "in_host_memory"), [("float32", True), ("bfloat16", False), (None, False)]
)
def test_from_a_checkpoint_as_from_arrays(tmp_path, monkeypatch, dtype, in_host_memory):
    monkeypatch.setattr("fsdp_jax.weights.export.in_host_memory", lambda sharding: in_host_memory)
    config, params, tensors = imported("llama", tmp_path / "in")
    with CheckpointStore(tmp_path / "checkpoints") as store:
        store.save(5, {"params": params, "opt_state": {"mu": params}}, data={}, metadata={})
        store.wait()
        done = export_weights(
            from_store(store, 5), config, tmp_path / "out", dtype=dtype, file_bytes=20_000
        )
        with refused("no such step"):
            from_store(store, 6)
    live = export_weights(
        from_arrays(params), config, tmp_path / "live", dtype=dtype, file_bytes=20_000
    )
    wanted = {name: value.astype(jnp.dtype(dtype or "float32")) for name, value in tensors.items()}
    for out in (done, live):
        assert_bits(read(out.directory), wanted)
        index = json.loads((out.directory / INDEX).read_text())
        assert index["weight_map"].keys() == wanted.keys()
        assert set(index["weight_map"].values()) == set(out.files)
        assert len(out.files) > 2
        assert index["metadata"]["total_size"] == out.size
        assert json.loads((out.directory / "config.json").read_text())["torch_dtype"] == (
            dtype or "float32"
        )


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama", "vit"))]
)
def test_seven_devices_export_what_eight_do(tmp_path, name):
    folder, tensors = folder_of(name, tmp_path / "in")
    model, config = FAMILIES[name]
    mesh = fsdp_jax.make_mesh(data=7, devices=jax.devices()[:7])
    settings = {"units": "model", "min_size": 1}
    sharded = fsdp_jax.fully_shard(
        lambda rngs: model(config, rngs=rngs), optax.sgd(0.1), mesh, "full_shard", **settings
    )
    target = sharded.checkpoint_target().params
    state = sharded.init(params=import_weights(folder, target, config))
    params = sharded.to_checkpoint(state).params
    assert sum(isinstance(leaf, Padded) for leaf in jax.tree.leaves(params)) > 5
    with CheckpointStore(tmp_path / "checkpoints") as store:
        store.save(1, {"params": params}, data={}, metadata={})
        export_weights(from_store(store, 1), config, tmp_path / "stored")
    export_weights(from_arrays(params), config, tmp_path / "live")
    assert_bits(read(tmp_path / "live"), tensors)
    _, on_eight, _ = imported(name, tmp_path / "again")
    export_weights(from_arrays(on_eight), config, tmp_path / "eight")
    files = {
        each: (tmp_path / each / "model.safetensors").read_bytes()
        for each in ("stored", "live", "eight")
    }
    assert len(set(files.values())) == 1
    # The state's arrays themselves have rows that no tensor may get.
    fix = "sharded.to_checkpoint(state).params"
    with refused(error=ConfigError, got="expected [", fix=fix):
        export_weights(from_arrays(state.params), config, tmp_path / "padded")
    assert not (tmp_path / "padded").exists()


def test_a_change_is_applied_to_each_tensor(tmp_path):
    """As adapters are merged; what is not to be exported is left out of the source."""
    config, params, tensors = imported("llama", tmp_path / "in")
    draw = np.random.default_rng(1)
    low = {
        "blocks/attn/q/lora_a": draw.normal(size=(3, 32, 4)),
        "blocks/attn/q/lora_b": draw.normal(size=(3, 4, 32)),
    }
    source = from_arrays(
        flatten(params) | {path: jnp.asarray(value, jnp.float32) for path, value in low.items()}
    )
    with refused(
        error=ConfigError,
        got="ours blocks/attn/q/lora_a, float32[3,32,4]: no tensor is known for it",
        fix="from_arrays(params, scale=adapted.scale), which merges adapters; or export_adapters",
    ):
        export_weights(source, config, tmp_path / "out")

    sizes = set()

    def merged(path, box, values):
        assert values.shape == tuple(hi - lo for lo, hi in box)
        if path != "blocks/attn/q/kernel":
            return values
        sizes.add(values.shape)
        (_, a), (_, b) = source.read(list(low))
        layer = slice(*box[0])
        return values + np.asarray(a[layer] @ b[layer])

    base = dataclasses.replace(
        source,
        leaves={path: leaf for path, leaf in source.leaves.items() if path not in low},
        change=merged,
    )
    export_weights(base, config, tmp_path / "out")
    assert sizes == {(1, 32, 32)}, "a layer at a time"
    found = read(tmp_path / "out")
    for at in range(3):
        name = f"model.layers.{at}.self_attn.q_proj.weight"
        added = (low["blocks/attn/q/lora_a"][at] @ low["blocks/attn/q/lora_b"][at]).T
        np.testing.assert_allclose(found.pop(name), tensors.pop(name) + added, rtol=1e-5, atol=1e-5)
    assert_bits(found, tensors)
    with refused(
        "keep the shape",
        error=ConfigError,
        where="blocks/attn/k/kernel",
        got="float32[1,32,16] to float32[32,16]",
    ):
        cut = dataclasses.replace(base, change=lambda path, box, values: values[0])
        export_weights(cut, config, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("base", [None, "nf4"])
def test_adapters_over_a_base_in_codes_are_merged_from_arrays(tmp_path, base):
    """On seven devices, where all is padded; as from a checkpoint, and as `merge` computes it."""
    model, config = FAMILIES["llama"]
    adapted = with_lora(lambda rngs: model(config, rngs=rngs), rank=4, alpha=8, targets=("attn/",))
    sharded = fsdp_jax.fully_shard(
        adapted,
        optax.sgd(0.1),
        fsdp_jax.make_mesh(data=7, devices=jax.devices()[:7]),
        units=["LlamaBlock"],
        frozen=adapted.frozen,
        base=base and fsdp_jax.QuantizedBase(base),
        min_size=1,
    )
    draw = np.random.default_rng(2)
    own, low = split_lora(sharded.to_checkpoint(sharded.init(0)).params)
    drawn = {
        path: draw.normal(size=leaf.shape).astype(np.float32) for path, leaf in flatten(low).items()
    }
    state = sharded.init(params=join_lora(own, unflatten(drawn)))
    params = sharded.to_checkpoint(state).params
    scale = adapted.scale
    export_weights(from_arrays(params, scale=scale), config, tmp_path / "live")
    with CheckpointStore(tmp_path / "checkpoints") as store:
        store.save(1, {"params": params}, data={}, metadata={})
        export_weights(from_store(store, 1, scale=scale), config, tmp_path / "stored")
    # The kernels that the model computes with, merged by hand.
    whole = flatten(nnx.to_pure_dict(nnx.state(sharded.model(state), nnx.Param)))
    merged = {
        path: whole[path]
        if len(parts) == 1
        else merge(*(np.asarray(whole[part]) for part in parts), scale=scale)
        for path, parts in merged_paths(whole).items()
    }
    export_weights(from_arrays(unflatten(merged)), config, tmp_path / "by_hand")
    found = read(tmp_path / "live")
    assert_bits(read(tmp_path / "stored"), found)
    for name, value in read(tmp_path / "by_hand").items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-6)
    # The base alone; adapters that nothing says how to merge; a scale without adapters.
    export_weights(from_arrays(split_lora(params)[0]), config, tmp_path / "base")
    alone = read(tmp_path / "base")
    assert {name for name in alone if not np.array_equal(alone[name], found[name])} == {
        name for name in alone if "self_attn" in name
    }
    with refused(error=ConfigError, fix="from_arrays(params, scale=adapted.scale)"):
        export_weights(from_arrays(params), config, tmp_path / "none")
    with refused("no adapters", error=ConfigError, where="scale", fix="leave scale out"):
        from_arrays(split_lora(params)[0], scale=scale)
    whole_target = sharded.checkpoint_target().params
    with refused(error=ConfigError, got="lora_a", fix="split_lora(target)"):
        import_weights(tmp_path / "base", whole_target, config)
    if base is not None:
        leaves = [flatten(params)[f"blocks/attn/q/{name}"] for name in ("kernel", "lora_a")]
        with refused("codes", error=ConfigError, where="merge", got="nf4:64", fix="from_arrays"):
            merge(*leaves, leaves[1], scale=scale)


def test_a_tokenizer_is_copied(tmp_path):
    config, params, _ = imported("gpt2", tmp_path / "in")
    (tmp_path / "tokenizer.json").write_text("{}")
    for at, given in enumerate((tmp_path, tmp_path / "tokenizer.json")):
        export_weights(from_arrays(params), config, tmp_path / f"out{at}", tokenizer=given)
        assert (tmp_path / f"out{at}" / "tokenizer.json").read_text() == "{}"
        assert not (tmp_path / f"out{at}" / "tokenizer_config.json").exists()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    for at, given in enumerate((tmp_path, tmp_path / "tokenizer.json")):
        export_weights(from_arrays(params), config, tmp_path / f"with{at}", tokenizer=given)
        assert (
            tmp_path / f"with{at}" / "tokenizer_config.json"
        ).read_text() == '{"eos_token": "</s>"}'
    with refused("no such tokenizer", error=ConfigError, where=str(tmp_path / "nowhere")):
        export_weights(
            from_arrays(params), config, tmp_path / "other", tokenizer=tmp_path / "nowhere"
        )


def test_the_files_beside_the_weights_are_written_again(tmp_path):
    config, params, _ = imported("gpt2", tmp_path / "in")
    for name in ("generation_config.json", "tokenizer.json", "vocab.json", "notes.txt"):
        (tmp_path / "in" / name).write_text(f'{{"of": "{name}"}}')
    (tmp_path / "tokenizer.json").write_text("{}")
    weights = from_arrays(params)
    export_weights(weights, config, tmp_path / "out", dtype=None, like=tmp_path / "in")
    wanted = {file.name: file.read_bytes() for file in (tmp_path / "in").iterdir()}
    del wanted["notes.txt"]
    found = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    for files in (found, wanted):
        del files["model.safetensors"]
        files["config.json"] = json.loads(files["config.json"]) | {"torch_dtype": "float32"}
    assert found == wanted
    # another tokenizer replaces all of theirs
    more = {"like": tmp_path / "in", "tokenizer": tmp_path}
    export_weights(weights, config, tmp_path / "other", **more)
    names = {file.name for file in (tmp_path / "other").iterdir()}
    assert names == {"model.safetensors", *wanted} - {"vocab.json"}
    assert (tmp_path / "other" / "tokenizer.json").read_text() == "{}"
    (tmp_path / "in" / "merges.txt").mkdir()
    with refused("cannot be read", error=DamageError, where=str(tmp_path / "in" / "merges.txt")):
        export_weights(weights, config, tmp_path / "third", like=tmp_path / "in")


def test_token_ids_are_written(tmp_path):
    config, params, _ = imported("llama", tmp_path / "in")
    tokens = {"bos_token_id": 90, "eos_token_id": [91, 92]}
    export_weights(from_arrays(params), config, tmp_path / "out", tokens=tokens)
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: found[key] for key in found if key.endswith("token_id")} == tokens | {
        "pad_token_id": None
    }
    assert token_ids(tmp_path / "out") == tokens
    with refused(
        "not a valid token id", error=ConfigError, where="eos_id", expected="eos_token_id"
    ):
        export_weights(from_arrays(params), config, tmp_path / "other", tokens={"eos_id": 3})


def test_the_normalization_of_images_is_written(tmp_path):
    """As transformers' processors have it beside the model, and timm within its `config.json`."""
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    for name in ("vit", "cait"):
        config, params, _ = imported(name, tmp_path / f"{name}-in")
        config = dataclasses.replace(config, mean=mean, std=std)
        export_weights(from_arrays(params), config, tmp_path / name)
        again = read_config(tmp_path / name)
        assert (again.mean, again.std) == (mean, std)
    found = json.loads((tmp_path / "vit" / "preprocessor_config.json").read_text())
    assert (found["image_mean"], found["image_std"], found["size"]) == (
        [0.1, 0.2, 0.3],
        [0.4, 0.5, 0.6],
        {"height": 16, "width": 16},
    )
    found = json.loads((tmp_path / "cait" / "config.json").read_text())["pretrained_cfg"]
    assert (found["mean"], found["std"], found["input_size"]) == (
        [0.1, 0.2, 0.3],
        [0.4, 0.5, 0.6],
        [3, 16, 16],
    )


def test_unusable_exports_are_refused(tmp_path):
    config, params, _ = imported("gpt2", tmp_path / "in")
    leaves = flatten(params)
    part = {path: leaf for path, leaf in leaves.items() if path != "ln_f/bias"}
    with refused(error=ConfigError, got="ours ln_f/bias, theirs transformer.ln_f.bias: missing"):
        export_weights(from_arrays(part), config, tmp_path / "out")
    with refused(error=ConfigError, got="theirs transformer.h.3.ln_1.weight: missing"):
        export_weights(from_arrays(params), dataclasses.replace(config, layers=4), tmp_path / "out")
    with refused(
        error=ConfigError,
        got="theirs transformer.h.2.attn.c_proj.bias: a block that the config does not have",
    ):
        export_weights(from_arrays(params), dataclasses.replace(config, layers=2), tmp_path / "out")
    with refused("not a dtype to export", error=ConfigError, got="int8"):
        export_weights(from_arrays(params), config, tmp_path / "out", dtype="int8")
    with refused("there already", error=ConfigError):
        export_weights(from_arrays(params), config, tmp_path / "in")
    with refused("unknown kind", error=ConfigError, got="int"):
        export_weights(from_arrays(params), 3, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
