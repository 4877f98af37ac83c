"""LoRA adapters against PEFT: it loads what we write, and merges to the same; we read its files."""

import jax
import numpy as np
import optax
import peft
import pytest
import torch
from families import FAMILIES
from safetensors.torch import load_file

import fsdp_jax as fsdp
from fsdp_jax.lora import join_lora, merge, merged_paths, split_lora, with_lora
from fsdp_jax.models.huggingface.vit import MODULES
from fsdp_jax.tree import flatten
from fsdp_jax.weights import (
    export_adapters,
    export_weights,
    from_arrays,
    import_adapters,
    import_weights,
    read_adapters,
    read_config,
)

pytestmark = pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied")

# Family -> our targets, and PEFT's of the same modules.
TARGETS = {
    "gpt2": (["attn/", "mlp/up$"], ["c_attn", "attn.c_proj", "c_fc"]),
    "llama-grouped": (["attn/", "mlp/"], "all-linear"),
    "t5-v1_1": (["attn/q$", "cross/v$", "mlp/"], None),
    "vit": (["attn/(q|v)$", "mlp/down$"], ["q_proj", "v_proj", "fc2"]),
}


def adapted_model(name, folder, **lora):
    """(sharded, state, config): the weights in a folder, with adapters of random values."""
    config = read_config(folder)
    family = FAMILIES[name].family
    adapted = with_lora(lambda rngs: family.model(config, rngs=rngs), **lora)
    sharded = fsdp.fully_shard(
        adapted, optax.sgd(0.1), fsdp.make_mesh(), units="model", frozen=adapted.frozen, min_size=1
    )
    target = sharded.checkpoint_target().params
    base, low_rank = split_lora(target)
    params = import_weights(folder, base, config)
    draw = np.random.default_rng(0)
    random = jax.tree.map(
        lambda leaf: jax.device_put(
            draw.normal(size=leaf.shape).astype(np.float32) / 8, leaf.sharding
        ),
        low_rank,
    )
    return sharded, join_lora(params, random), config, adapted


def merged_of(params, scale):
    """The parameters with the adapters merged, by `merge`."""
    leaves = flatten(params)
    merged = {
        path: leaves[parts[0]]
        if len(parts) == 1
        else merge(*(leaves[part] for part in parts), scale=scale)
        for path, parts in merged_paths(leaves).items()
    }
    base, _ = split_lora(params)
    return jax.tree.unflatten(jax.tree.structure(base), [merged[path] for path in flatten(base)])


def name_in_model(name):
    """The name of a file's tensor in the model: transformers 5 renames a ViT's as it loads them."""
    for stored, renamed in MODULES:
        name = name.replace(stored, renamed)
    return name


def state_of(model):
    """The tensors of a merged model under its own names."""
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", TARGETS)
def test_peft_merges_our_adapters_as_we_do(name, tmp_path):
    """In float32, each element within 1e-6; PEFT finds the same modules, and misses no tensor."""
    theirs = FAMILIES[name].make()
    theirs.save_pretrained(tmp_path / "base")
    targets, _ = TARGETS[name]
    _, params, config, adapted = adapted_model(
        name, tmp_path / "base", rank=4, alpha=6, targets=targets
    )
    export_adapters(from_arrays(params), config, tmp_path / "adapters", scale=adapted.scale)
    merged = merged_of(params, adapted.scale)
    export_weights(from_arrays(merged), config, tmp_path / "merged")
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters")
    found = {key for key in loaded.state_dict() if ".lora_" in key}
    written = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert len(found) == len(written), "PEFT adapts the same modules"
    state = state_of(loaded.merge_and_unload())
    base = load_file(tmp_path / "base" / "model.safetensors")
    changed = {key for key in ours if not torch.equal(ours[key], base[key])}
    assert len(changed) == len(written) // 2
    names = {key: name_in_model(key) for key in ours}
    for key, tensor in ours.items():
        found = state[names[key]]
        np.testing.assert_allclose(found, tensor.numpy(), rtol=0, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("rank_stabilized", [False, True])
@pytest.mark.parametrize("name", [name for name, (_, given) in TARGETS.items() if given])
def test_we_read_what_peft_saves(name, rank_stabilized, tmp_path):
    """The logits of our model with the adapters are those of PEFT's, and so are merged weights."""
    pair = FAMILIES[name]
    base = pair.make()
    base.save_pretrained(tmp_path / "base")
    _, target_modules = TARGETS[name]
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=target_modules,
        use_rslora=rank_stabilized,
        fan_in_fan_out=name == "gpt2",
        init_lora_weights=False,  # B is not zero
        task_type=None if name == "vit" else "CAUSAL_LM",
    )
    wrapped = peft.get_peft_model(base, config).eval()
    wrapped.save_pretrained(tmp_path / "adapters")
    # Read into shards.
    model_config = read_config(tmp_path / "base")
    found = read_adapters(tmp_path / "adapters", model_config)
    sharded, params, _, adapted = adapted_model(
        name, tmp_path / "base", rank=found.rank, alpha=found.alpha, targets=found.targets
    )
    _, low_rank = split_lora(sharded.checkpoint_target().params)
    base_params, _ = split_lora(params)
    read = import_adapters(tmp_path / "adapters", low_rank, model_config, scale=adapted.scale)
    state = sharded.init(params=join_lora(base_params, read))
    batch = pair.batch(0)
    with torch.no_grad():
        expected = pair.torch_logits(
            wrapped, {key: torch.from_numpy(value) for key, value in batch.items()}
        )
    logits = sharded.apply(pair.logits)(state, batch)
    np.testing.assert_allclose(np.asarray(logits), expected.numpy(), rtol=2e-4, atol=2e-4)
    merged = merged_of(join_lora(base_params, read), adapted.scale)
    export_weights(from_arrays(merged), model_config, tmp_path / "merged")
    theirs = state_of(wrapped.merge_and_unload())
    for key, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        found = theirs[name_in_model(key)]
        np.testing.assert_allclose(found, tensor.numpy(), rtol=0, atol=1e-6, err_msg=key)
