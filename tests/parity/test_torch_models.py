"""The models of `scripts/gpu/torch_models.py` against ours: the same loss and gradients."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from fsdp_jax.models import GPT, GPTConfig, Llama, LlamaConfig, next_token_loss
from fsdp_jax.models.llama import RopeScaling, rotary_frequencies
from fsdp_jax.tree import flatten

sys.path.append(str(Path(__file__).parents[2] / "scripts/gpu"))
import torch_models

SIZES = {"vocab_size": 512, "sequence_length": 64, "layers": 2, "width": 64}
GROUPS = {"attn": ("qkv", "out", "q", "k", "v", "o"), "mlp": ("gate", "up", "down")}


def gpt():
    config = GPTConfig(heads=2, **SIZES)
    return GPT(config, rngs=nnx.Rngs(0)), torch_models.GPT(512, 64, 2, 64, 2)


def llama():
    config = LlamaConfig(
        heads=4,
        kv_heads=2,
        hidden=96,
        tie_head=True,
        rope_scaling=RopeScaling(factor=32.0),
        **SIZES,
    )
    frequency = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    theirs = torch_models.Llama(config, np.array(frequency))
    return Llama(config, rngs=nnx.Rngs(0)), theirs


def of_ours(arrays, name):
    """The array of ours for a parameter of theirs."""
    *path, kind = name.split(".")
    if path[0] == "last_norm":
        path = ["ln_f" if "ln_f/scale" in arrays else "norm"]
    layer = None
    if path[0] == "blocks":
        layer = int(path.pop(1))
        path[1:1] = [group for group, names in GROUPS.items() if path[1] in names]
    leaves = ("bias",) if kind == "bias" else ("scale", "embedding", "kernel")
    found = next(at for leaf in leaves if (at := "/".join([*path, leaf])) in arrays)
    array = arrays[found] if layer is None else arrays[found][layer]
    return np.array(array.T if found.endswith("kernel") else array)


@pytest.mark.parametrize("models", [gpt, llama])
def test_loss_and_gradients_are_ours(models):
    ours, theirs = models()
    tokens = np.random.default_rng(0).integers(0, 512, (3, 65)).astype(np.int32)
    structure, params = nnx.split(ours, nnx.Param)

    def loss(params):
        total, count = next_token_loss(nnx.merge(structure, params), {"tokens": jnp.array(tokens)})
        return total / count

    value, grads = jax.value_and_grad(loss)(params)
    params, grads = (flatten(nnx.to_pure_dict(tree)) for tree in (params, grads))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.from_numpy(of_ours(params, name)))
    other = theirs(torch.from_numpy(tokens.astype(np.int64)))
    other.backward()
    assert float(other.detach()) == pytest.approx(float(value), rel=1e-6)
    named = dict(theirs.named_parameters())
    assert sum(x.numel() for x in named.values()) == sum(x.size for x in params.values())
    for name, parameter in named.items():
        np.testing.assert_allclose(parameter.grad.numpy(), of_ours(grads, name), atol=1e-6)
