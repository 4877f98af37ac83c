"""Llamas that PyTorch trained and saved by torch.distributed.checkpoint train on here as there."""

import jax
import numpy as np
import optax
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import import_dcp
from fsdp_jax.models import Llama, LlamaConfig, next_token_loss
from fsdp_jax.weights import foreign_names

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
CONFIG = LlamaConfig(
    vocab_size=64, sequence_length=16, layers=2, width=32, heads=4, kv_heads=2, hidden=48
)
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 17)).astype(np.int32)
STEPS = 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_of_transformers_trains_on(tied, tmp_path):
    """With the state of AdamW, flat as torchtitan saves it; a tied head is in the file twice."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    model = LlamaForCausalLM(TheirConfig(**SIZES, **heads, tie_word_embeddings=tied))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    tokens = torch.from_numpy(TOKENS.astype(np.int64))

    def step():
        logits = model(tokens[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step(), step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "train_state": {"step": torch.tensor(2, dtype=torch.int32)},
    }
    dcp.save(state, checkpoint_id=tmp_path / "2", no_dist=True)
    expected = [step() for _ in range(STEPS)]

    config = CONFIG if not tied else LlamaConfig(**vars(CONFIG) | {"tie_head": True})
    sharded = fsdp.fully_shard(
        lambda rngs: Llama(config, rngs=rngs),
        optax.adamw(0.01, weight_decay=0.1),
        fsdp.make_mesh(data=8, devices=jax.devices()[:8]),
    )
    fresh = sharded.to_checkpoint(sharded.init(seed=1))
    names = foreign_names("huggingface", config)
    ours = sharded.from_checkpoint(import_dcp(tmp_path / "2", fresh, rename=names))
    assert int(ours.step) == 2
    train = sharded.make_train_step(next_token_loss)
    losses = []
    for _ in expected:
        ours, metrics = train(ours, {"tokens": TOKENS})
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
