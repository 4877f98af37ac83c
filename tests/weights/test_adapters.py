"""LoRA adapters in PEFT's files, both ways: names, transposes, scales, and what does not fit."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusals import refused
from safetensors.numpy import load_file, save_file
from tiny import FAMILIES, spec

import fsdp_jax
from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.lora import Adapters, join_lora, split_lora, with_lora
from fsdp_jax.models.flops import parameter_shapes
from fsdp_jax.sharding.padding import Padded
from fsdp_jax.tree import flatten, unflatten
from fsdp_jax.weights import (
    export_adapters,
    from_arrays,
    import_adapters,
    read_adapters,
    table_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning")

RANK, SCALE = 4, 2.0
PREFIX = "base_model.model."
# Our module -> theirs in block 1, and the order of their weight: [out, in], or Conv1D's [in, out].
THEIRS = {
    "gpt2": {
        "blocks/attn/qkv": "transformer.h.1.attn.c_attn",
        "blocks/attn/out": "transformer.h.1.attn.c_proj",
    },
    "llama": {
        "blocks/attn/k": "model.layers.1.self_attn.k_proj",
        "blocks/mlp/down": "model.layers.1.mlp.down_proj",
    },
    "t5": {
        "encoder/blocks/attn/q": "encoder.block.1.layer.0.SelfAttention.q",
        "decoder/blocks/cross/o": "decoder.block.1.layer.1.EncDecAttention.o",
    },
    "vit": {"blocks/mlp/down": "vit.layers.1.mlp.fc2"},
    "cait": {"blocks/attn/qkv": "blocks.1.attn.qkv"},
}


def adapters_of(name, modules, *, scanned=True, blocks=None, seed=0):
    """(config, {path: array}) of random adapters beside kernels; of some blocks only, if given."""
    model, config = FAMILIES[name]
    config = dataclasses.replace(config, scan_layers=scanned)
    shapes = parameter_shapes(model, config)
    draw = np.random.default_rng(seed)
    leaves = {}
    for module in modules:
        *stack, inputs, outputs = shapes[f"{module}/kernel"]
        own = {"kernel": (inputs, outputs), "lora_a": (inputs, RANK), "lora_b": (RANK, outputs)}
        for leaf, shape in own.items():
            array = draw.normal(size=(*stack, *shape)).astype(np.float32)
            if scanned or not stack:
                leaves[f"{module}/{leaf}"] = array
                continue
            before, _, after = module.partition("blocks/")
            for block in blocks or range(stack[0]):
                leaves[f"{before}blocks/{block}/{after}/{leaf}"] = array[block]
    return config, leaves


def lora_of(leaves):
    return {path: leaf for path, leaf in leaves.items() if "/lora_" in path}


def target_of(leaves):
    """Targets whose last dim is sharded, of the adapters among leaves."""
    mesh = jax.make_mesh((8,), ("data",))
    specs = {
        path: spec(leaf.shape, "float32", ("data",) if leaf.shape[0] % 8 == 0 else (), mesh)
        for path, leaf in lora_of(leaves).items()
    }
    return unflatten(specs)


def found_by_peft(settings, config):
    """Names of the family's modules that PEFT adapts: those that end with a target."""
    table = table_of(config)
    names = [table.module_of(name) for name in table.names()]
    ends = settings["target_modules"]
    return {n for n in names if any(n == end or n.endswith(f".{end}") for end in ends)}


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("name", THEIRS)
def test_adapters_are_written_and_read(tmp_path, name, scanned):
    config, leaves = adapters_of(name, THEIRS[name], scanned=scanned)
    folder = tmp_path / "adapters"
    source = from_arrays(unflatten(leaves))
    done = export_adapters(source, config, folder, scale=SCALE, base="org/base")
    assert done.files == ("adapter_model.safetensors",)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == done.tensors
    # Transposed, whatever the order of the weight; layer by layer.
    for ours, theirs in THEIRS[name].items():
        for own, lora in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
            path = f"{ours}/{own}" if scanned else f"{ours.replace('blocks/', 'blocks/1/')}/{own}"
            array = leaves[path][1] if scanned and "blocks" in ours else leaves[path]
            np.testing.assert_array_equal(tensors[f"{PREFIX}{theirs}.{lora}.weight"], array.T)
    # The configuration makes PEFT adapt these modules and no others, with this scale.
    settings = json.loads((folder / "adapter_config.json").read_text())
    adapted = {re.sub(r"\.lora_[AB]\.weight$", "", key.removeprefix(PREFIX)) for key in tensors}
    assert found_by_peft(settings, config) == adapted
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (RANK, 8, "LORA")
    assert settings["base_model_name_or_path"] == "org/base"
    assert settings["fan_in_fan_out"] == (name == "gpt2")
    # Read again: the settings, and every bit.
    found = read_adapters(folder, config)
    assert (found.rank, found.alpha, found.scale) == (RANK, 8.0, SCALE)
    make = with_lora(
        lambda rngs: FAMILIES[name][0](config, rngs=rngs), rank=RANK, targets=found.targets
    )
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    paths = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))}
    assert {path for path in paths if "/lora_" in path} == set(lora_of(leaves))
    read = flatten(import_adapters(folder, target_of(leaves), config, scale=SCALE))
    assert read.keys() == lora_of(leaves).keys()
    for path, array in read.items():
        np.testing.assert_array_equal(np.asarray(array), leaves[path])


def test_target_modules_are_the_shortest_ends(tmp_path):
    """That name no other module: `c_proj` is in GPT-2's attention and in its MLP."""
    cases = [
        ("gpt2", ["blocks/attn/qkv", "blocks/attn/out"], ["attn.c_proj", "c_attn"]),
        ("gpt2", ["blocks/attn/out", "blocks/mlp/down"], ["c_proj"]),
        ("vit", ["blocks/mlp/down"], ["fc2"]),
        ("llama", ["blocks/attn/q", "head"], ["lm_head", "q_proj"]),
    ]
    for number, (name, modules, expected) in enumerate(cases):
        config, leaves = adapters_of(name, modules)
        folder = tmp_path / str(number)
        export_adapters(from_arrays(unflatten(leaves)), config, folder, scale=SCALE)
        settings = json.loads((folder / "adapter_config.json").read_text())
        assert settings["target_modules"] == expected
        assert len(found_by_peft(settings, config)) == 3 * len(modules) - 2 * ("head" in modules)


def test_padded_shards(tmp_path):
    """On seven devices every matrix is padded; what is read back goes into the state."""
    model, config = FAMILIES["gpt2"]
    adapted = with_lora(lambda rngs: model(config, rngs=rngs), rank=RANK, alpha=3, targets=("qkv",))
    mesh = fsdp_jax.make_mesh(data=7, devices=jax.devices()[:7])
    settings = {"frozen": adapted.frozen, "min_size": 1}
    sharded = fsdp_jax.fully_shard(adapted, optax.sgd(0.1), mesh, units="model", **settings)
    state = sharded.init(0)
    params = sharded.to_checkpoint(state).params
    base, lora = split_lora(params)
    assert any(isinstance(leaf, Padded) for leaf in jax.tree.leaves(lora))
    folder, scale = tmp_path / "adapters", adapted.scale
    export_adapters(from_arrays(params), config, folder, scale=scale)
    assert json.loads((folder / "adapter_config.json").read_text())["lora_alpha"] == 3
    changed(folder, tensors=lambda tensors: {k: v + np.float32(1) for k, v in tensors.items()})
    target = split_lora(sharded.checkpoint_target().params)[1]
    state = sharded.init(
        params=join_lora(base, import_adapters(folder, target, config, scale=scale))
    )
    after = flatten(sharded.to_checkpoint(state).params)
    for path, before in flatten(params).items():
        added = np.float32("/lora_" in path)
        np.testing.assert_array_equal(np.asarray(after[path]), np.asarray(before) + added)


def test_columns_of_a_head_beyond_the_vocabulary_are_not_written(tmp_path):
    config, leaves = adapters_of("gpt2-untied", ["head"])
    export_adapters(from_arrays(unflatten(leaves)), config, tmp_path / "a", scale=SCALE)
    tensor = load_file(tmp_path / "a" / "adapter_model.safetensors")[
        f"{PREFIX}lm_head.lora_B.weight"
    ]
    np.testing.assert_array_equal(tensor, leaves["head/lora_b"][:, :93].T)
    read = import_adapters(tmp_path / "a", target_of(leaves), config, scale=SCALE)
    found = np.asarray(read["head"]["lora_b"])
    np.testing.assert_array_equal(found[:, :93], tensor.T)
    assert not found[:, 93:].any()


def changed(folder, *, settings=None, tensors=lambda tensors: tensors):
    """Changes the files of a folder."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (settings or {})))
    file = folder / "adapter_model.safetensors"
    save_file(tensors(load_file(file)), file)


def written(folder, name="llama", modules=("blocks/attn/q",), **more):
    config, leaves = adapters_of(name, modules, **more)
    export_adapters(from_arrays(unflatten(leaves)), config, folder, scale=SCALE)
    return config, leaves


def test_rank_stabilized_scales(tmp_path):
    """lora_alpha / sqrt(r), here as alpha / rank."""
    config, leaves = written(tmp_path / "a")
    changed(tmp_path / "a", settings={"use_rslora": True})
    found = read_adapters(tmp_path / "a", config)
    assert found.scale == 8 / RANK**0.5
    import_adapters(tmp_path / "a", target_of(leaves), config, scale=found.scale)
    export_adapters(from_arrays(unflatten(leaves)), config, tmp_path / "b", scale=found.scale)
    assert read_adapters(tmp_path / "b", config).scale == found.scale


def test_names_without_the_prefix_of_a_head_and_harmless_keys(tmp_path):
    """As saved from the model without its head, by releases that write more keys."""
    config, leaves = written(tmp_path / "a")
    changed(
        tmp_path / "a",
        settings={"lora_dropout": 0.1, "task_type": "FEATURE_EXTRACTION", "new": None}
        | {"loftq_config": {"loftq_bits": 4}, "init_lora_weights": "gaussian"},
        tensors=lambda tensors: {
            name.replace("model.model.", "model."): each.astype(jnp.bfloat16)
            for name, each in tensors.items()
        },
    )
    read = flatten(import_adapters(tmp_path / "a", target_of(leaves), config, scale=SCALE))
    for path, array in read.items():
        rounded = leaves[path].astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(array), rounded)


# Keys of `adapter_config.json`, and what is said.
REFUSED = {
    "use_dora": (True, "use_dora: true is not implemented"),
    "modules_to_save": (["lm_head"], 'modules_to_save: ["lm_head"] is not implemented'),
    "rank_pattern": ({"q_proj": 8}, 'rank_pattern: {"q_proj": 8} is not implemented'),
    "alpha_pattern": ({"q_proj": 8}, 'alpha_pattern: {"q_proj": 8} is not implemented'),
    "bias": ("lora_only", 'bias: "lora_only" is not implemented'),
    "lora_bias": (True, "lora_bias: true is not implemented"),
    "init_lora_weights": ("pissa_niter_4", 'init_lora_weights: "pissa_niter_4" is not implemented'),
    "peft_type": ("LOHA", 'peft_type: "LOHA" is not implemented'),
    "trainable_token_indices": ([1], "trainable_token_indices: [1] is not implemented"),
    "a_key_of_the_future": (1, "a_key_of_the_future: 1 is not implemented"),
    "r": (0, "r: 0 is not a rank"),
    "lora_alpha": ("8", 'lora_alpha: "8" is not a number above 0'),
}


def test_what_is_not_implemented_is_refused_by_its_key(tmp_path):
    config, leaves = written(tmp_path / "a")
    where = str(tmp_path / "a" / "adapter_config.json")
    kept = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    for key, (value, said) in REFUSED.items():
        changed(tmp_path / "a", settings=kept | {key: value})
        what, fix = "adapters that are not supported", "merge_and_unload"
        with refused(what, error=ConfigError, where=where, got=said, fix=fix):
            read_adapters(tmp_path / "a", config)
        with refused(error=ConfigError, where=where, got=said):
            import_adapters(tmp_path / "a", target_of(leaves), config, scale=SCALE)
    changed(tmp_path / "a", settings=kept | {key: each for key, (each, _) in REFUSED.items()})
    with refused(error=ConfigError, got="use_dora"):
        read_adapters(tmp_path / "a", config)


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    config, leaves = written(tmp_path / "a")
    target = target_of(leaves)
    name = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"

    def read(folder="a", target=target, scale=SCALE, config=config):
        return import_adapters(tmp_path / folder, target, config, scale=scale)

    # Rank, scale, and other modules.
    fix = "read_adapters"
    with refused(
        "adapters of another scale", error=ConfigError, expected="1.0", got="2.0", fix=fix
    ):
        read(scale=1.0)
    double = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            tuple(2 * size if size == RANK else size for size in leaf.shape),
            leaf.dtype,
            sharding=leaf.sharding,
        ),
        target,
    )
    with refused("adapters of another rank", error=ConfigError, expected="8", got="4", fix=fix):
        read(target=double)
    _, others = adapters_of("llama", ("blocks/attn/v",))
    with refused(error=ConfigError, got="q_proj.lora_A.weight, F32[4, 32]: ours") as caught:
        read(target=target_of(others))
    assert "v_proj.lora_A.weight, ours blocks/attn/v/lora_a" in caught.value.got
    # Another part of the target, or all of it.
    base = {"blocks": {"attn": {"q": {"kernel": target["blocks"]["attn"]["q"]["lora_a"]}}}}
    with refused("no adapters in the target", error=ConfigError, got="q/kernel", fix="split_lora"):
        read(target=base)
    with refused(error=ConfigError, got="ours blocks/attn/q/kernel", fix="split_lora(target)"):
        read(target=join_lora(base, target))
    # A tensor under two names.
    twice = written(tmp_path / "twice")[1]
    changed(
        tmp_path / "twice",
        tensors=lambda tensors: tensors | {name.removeprefix(PREFIX): np.ones((4, 32), np.float32)},
    )
    with refused("two tensors of one adapter", error=ConfigError, got=f"{name} and model.layers"):
        read("twice", target_of(twice))
    # Tensors that are missing, misshapen, of no Linear, or of no adapter.
    changes = {
        "missing beside": lambda tensors: {k: v for k, v in tensors.items() if k != name},
        "1 of 3 blocks have no adapter, and the blocks are stacked": lambda tensors: {
            k: v for k, v in tensors.items() if ".0." not in k
        },
        "no Linear of ours is known for it": lambda tensors: (
            tensors | {f"{PREFIX}model.embed_tokens.lora_embedding_A": tensors[name]}
        ),
    }
    for number, (said, change) in enumerate(changes.items()):
        written(tmp_path / str(number))
        changed(tmp_path / str(number), tensors=change)
        fix = ("copy or download", "model.scan_layers: false", "merge_and_unload")[number]
        with refused("the weights do not fit the model", error=ConfigError, got=said, fix=fix):
            read_adapters(tmp_path / str(number), config)
        with refused("the weights do not fit the model", error=ConfigError):
            read(str(number))
    changed(tmp_path / "a", tensors=lambda tensors: tensors | {name: tensors[name][:, 1:].copy()})
    with refused(error=ConfigError, got="expected [4, 32], got F32[4, 31]"):
        read()
    # Files that are not there, or pickled.
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
    with refused("only pickled weights there", error=ConfigError, where=str(tmp_path / "a")):
        read()
    with refused("no adapters there", error=ConfigError, fix="fsdp-jax export RUN"):
        read("nowhere")
    (tmp_path / "a" / "adapter_config.json").write_text("{")
    with refused("no adapters there", error=DamageError):
        read()


def test_blocks_with_adapters_among_others(tmp_path):
    """In a list of blocks some may have none; PEFT finds those that do by their whole names."""
    config, leaves = written(tmp_path / "a", scanned=False, blocks=[1])
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["1.self_attn.q_proj"]
    assert read_adapters(tmp_path / "a", config).targets == (r"^blocks/1/attn/q$",)
    read = flatten(import_adapters(tmp_path / "a", target_of(leaves), config, scale=SCALE))
    for path, array in read.items():
        np.testing.assert_array_equal(np.asarray(array), leaves[path])


def test_what_cannot_be_written_is_refused(tmp_path):
    config, leaves = adapters_of("llama", ("blocks/attn/q", "head"))

    def export(leaves, config=config):
        export_adapters(from_arrays(unflatten(leaves)), config, tmp_path / "a", scale=SCALE)

    with refused("no adapters among the parameters", error=ConfigError, fix="export_weights"):
        export({"head/kernel": leaves["head/kernel"]})
    fewer = leaves | {"head/lora_a": leaves["head/lora_a"][:, :2]}
    fewer |= {"head/lora_b": leaves["head/lora_b"][:2]}
    with refused("of one rank", error=ConfigError, got="head/lora_a: rank 2", fix="merged"):
        export(fewer)
    foreign = {path.replace("head", "value_head"): leaf for path, leaf in leaves.items()}
    with refused(error=ConfigError, got="ours value_head/lora_a, float32[32,4]: PEFT's format has"):
        export(foreign)
    with refused(error=ConfigError, got="a block that the config does not have"):
        export(leaves, dataclasses.replace(config, layers=2))
    with refused(error=ConfigError, got="expected [4, 48], got [4, 32]"):
        export(leaves, dataclasses.replace(config, width=48))
    assert not (tmp_path / "a").exists()


def test_weights_and_adapters_are_joined(tmp_path):
    """The parts of `split_lora` make the whole again, with any keys."""
    tree = {"blocks": {0: {"q": {"kernel": 1, "lora_a": 2}}, 1: {"q": {"lora_b": 3}}}, "head": 4}
    assert join_lora(*split_lora(tree)) == tree
    assert Adapters(weights="folder").scale is None
