"""Codes of bitsandbytes, as transformers saves them, against its own dequantization."""

import bitsandbytes
import numpy as np
import optax
import pytest
import torch
import transformers
from families import FAMILIES

import fsdp_jax as fsdp
from fsdp_jax.lora import split_lora, with_lora
from fsdp_jax.tree import flatten
from fsdp_jax.weights import import_weights, read_config, table_of

BLOCKS = {"gpt2": "Block", "llama-grouped": "LlamaBlock"}


def quantized(name, folder, *, nested):
    """The model of transformers with a family's weights in nf4, saved in a folder."""
    FAMILIES[name].make().save_pretrained(folder / "base")
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "base", quantization_config=settings, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(folder / "codes")
    return model


@pytest.mark.filterwarnings("ignore:codes in 4 bits are dequantized")  # of 96 inputs
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_codes_are_read_bit_for_bit(name, nested, tmp_path):
    """In codes the kernels are those that bitsandbytes dequantizes to float32; without, rounded."""
    model = quantized(name, tmp_path, nested=nested)
    config = read_config(tmp_path / "codes")
    family = FAMILIES[name].family
    adapted = with_lora(lambda rngs: family.model(config, rngs=rngs), rank=2, targets=["attn/"])
    modules = dict(model.named_modules())
    for base in (fsdp.QuantizedBase("nf4"), None):
        sharded = fsdp.fully_shard(
            adapted,
            optax.sgd(0.1),
            fsdp.make_mesh(),
            units=[BLOCKS[name]],
            frozen=adapted.frozen,
            base=base,
            min_size=1,
        )
        target, _ = split_lora(sharded.checkpoint_target().params)
        params = flatten(import_weights(tmp_path / "codes", target, config))
        compared = 0
        for path, leaf in flatten(target).items():
            blocks = getattr(leaf, "blocks", None)
            values = np.asarray(getattr(params[path], "array", params[path]))
            if blocks is not None:
                values = blocks.to_host(values)
            for layer, mapping in enumerate(table_of(config).mappings({path: values})[path]):
                module = modules[mapping.name.rpartition(".")[0]]
                own_blocks = blocks is None or blocks.dim == 1
                if not isinstance(module, bitsandbytes.nn.Linear4bit) or values.ndim != 3:
                    continue
                state = module.weight.quant_state
                state.dtype = torch.float32 if blocks is not None else torch.bfloat16
                # As one row: on CPUs 0.50 takes wrong scales where blocks go on from row to row.
                shape, state.shape = module.out_features, torch.Size((1, values[layer].size))
                expected = bitsandbytes.functional.dequantize_4bit(module.weight.data, state)
                expected = expected.float().numpy().reshape(shape, -1).T  # of Conv1D too
                if own_blocks:
                    np.testing.assert_array_equal(values[layer], expected)
                compared += own_blocks
        coded = [each for each in modules.values() if isinstance(each, bitsandbytes.nn.Linear4bit)]
        assert compared == len(coded) - 2 * (name == "llama-grouped" and base is not None)
