"""Checkpoints of MaxText, torchtitan, Levanter and transformers compute the same here as there.

The Llama of each program is written out in NumPy, with its own names, layouts, rotation and scale.
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from dcp_files import write_dcp
from flax import nnx
from levanter_files import write_levanter
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import import_dcp, import_levanter, import_orbax
from fsdp_jax.checkpoint.import_foreign import open_checkpoint
from fsdp_jax.errors import ConfigError
from fsdp_jax.models import FAMILIES, GPTConfig
from fsdp_jax.models.flops import parameter_shapes
from fsdp_jax.models.llama import Llama, LlamaConfig, RopeScaling, rotary_frequencies
from fsdp_jax.tree import flatten, unflatten
from fsdp_jax.weights import foreign_names, table_of
from fsdp_jax.weights.foreign_names import program_of

L, D, H, G, K, F, V = 3, 16, 4, 2, 4, 24, 32
CONFIG = LlamaConfig(
    vocab_size=V, sequence_length=8, layers=L, width=D, heads=H, kv_heads=G, hidden=F
)
SCALED = dataclasses.replace(CONFIG, rope_scaling=RopeScaling(factor=8.0, original_length=64))
TOKENS = np.arange(8) * 5 % V
NUMBERS = np.random.default_rng(0)


def normal(*shape):
    return NUMBERS.normal(size=shape).astype(np.float32) * 0.3


def rotated(x, config, interleaved):
    """Rotates pairs of [T, heads, K]: neighbours, or the same place of both halves."""
    angles = np.arange(len(x))[:, None, None] * np.asarray(
        rotary_frequencies(K, config.rope_theta, config.rope_scaling)
    )
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else np.split(x, 2, -1)
    turned = (
        first * np.cos(angles) - second * np.sin(angles),
        second * np.cos(angles) + first * np.sin(angles),
    )
    if interleaved:
        return np.stack(turned, -1).reshape(x.shape)
    return np.concatenate(turned, -1)


def forward(weights, config, *, interleaved, scale=K**-0.5):
    """Computes logits, with kernels [width, heads, K] and [heads, K, width]."""

    def norm(x, by):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * by

    x = weights["embed"][TOKENS]
    for layer in weights["layers"]:
        h = norm(x, layer["norm_1"])
        q, k, v = (np.einsum("td,dhk->thk", h, layer[name]) for name in "qkv")
        q, k = rotated(q, config, interleaved), rotated(k, config, interleaved)
        k, v = np.repeat(k, H // G, 1), np.repeat(v, H // G, 1)
        scores = np.einsum("thk,shk->hts", q, k) * scale
        scores = np.where(np.tril(np.ones((8, 8), bool)), scores, -np.inf)
        attention = np.exp(scores - scores.max(-1, keepdims=True))
        attention /= attention.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shk,hkd->td", attention, v, layer["o"])
        h = norm(x, layer["norm_2"])
        gate = h @ layer["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["up"])) @ layer["down"]
    return norm(x, weights["norm"]) @ weights["head"]


def maxtext(config, scanned):
    """MaxText's tree, and what its model computes."""
    shapes = {
        "pre_self_attention_layer_norm/scale": (D,),
        "post_self_attention_layer_norm/scale": (D,),
        "self_attention/query/kernel": (D, H, K),
        "self_attention/key/kernel": (D, G, K),
        "self_attention/value/kernel": (D, G, K),
        "self_attention/out/kernel": (H, K, D),
        "mlp/wi_0/kernel": (D, F),
        "mlp/wi_1/kernel": (D, F),
        "mlp/wo/kernel": (F, D),
    }
    layers = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(L)]
    flat = {
        "token_embedder/embedding": normal(V, D),
        "decoder/decoder_norm/scale": normal(D),
        "decoder/logits_dense/kernel": normal(D, V),
    }
    for name in shapes:
        if scanned:  # param_scan_axis: 1
            flat[f"decoder/layers/{name}"] = np.stack([each[name] for each in layers], 1)
        else:
            flat |= {f"decoder/layers_{i}/{name}": each[name] for i, each in enumerate(layers)}
    names = ("norm_1", "norm_2", "q", "k", "v", "o", "gate", "up", "down")
    weights = {
        "embed": flat["token_embedder/embedding"],
        "norm": flat["decoder/decoder_norm/scale"],
        "head": flat["decoder/logits_dense/kernel"],
        "layers": [dict(zip(names, each.values(), strict=True)) for each in layers],
    }
    interleaved = config.rope_scaling is not None  # rope_type: llama3.1
    return flat, forward(weights, config, interleaved=interleaved, scale=1.0)


def tensors_of_torch(names, *, interleaved):
    """Tensors of a Llama of PyTorch, by the names of that program, and what it computes."""
    shapes = {
        **dict.fromkeys(("norm_1", "norm_2"), (D,)),
        **{"q": (H * K, D), "k": (G * K, D), "v": (G * K, D), "o": (D, H * K)},
        **{"gate": (F, D), "up": (F, D), "down": (D, F)},
    }
    flat = {names["embed"]: normal(V, D), names["norm"]: normal(D), names["head"]: normal(V, D)}
    layers = []
    for i in range(L):
        made = {name: normal(*shape) for name, shape in shapes.items()}
        flat |= {f"{names['layers']}.{i}.{names[name]}": each for name, each in made.items()}
        layer = {name: each.T for name, each in made.items()}
        for name in "qkv":
            layer[name] = layer[name].reshape(D, -1, K)
        layers.append(layer | {"o": layer["o"].reshape(H, K, D)})
    weights = {"embed": flat[names["embed"]], "norm": flat[names["norm"]], "layers": layers}
    weights["head"] = flat[names["head"]].T
    return flat, forward(weights, CONFIG, interleaved=interleaved)


TORCHTITAN = {
    **{"embed": "tok_embeddings.weight", "norm": "norm.weight", "head": "output.weight"},
    **{"layers": "layers", "norm_1": "attention_norm.weight", "norm_2": "ffn_norm.weight"},
    **{name: f"attention.w{name}.weight" for name in "qkvo"},
    **{"gate": "feed_forward.w1.weight", "up": "feed_forward.w3.weight"},
    "down": "feed_forward.w2.weight",
}
HUGGINGFACE = {
    **{"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"},
    **{"layers": "model.layers", "norm_1": "input_layernorm.weight"},
    "norm_2": "post_attention_layernorm.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}


def levanter(layers_are_stacked):
    """Levanter's tree: names of transformers, layers stacked, heads with dims of their own."""
    flat, logits = tensors_of_torch(HUGGINGFACE, interleaved=False)
    shapes = {"q": (G, H // G, K, D), "k": (G, K, D), "v": (G, K, D), "o": (D, H, K)}
    tree = {
        "embeddings/token_embeddings/weight": flat[HUGGINGFACE["embed"]],
        "transformer/norm/weight": flat[HUGGINGFACE["norm"]],
        "lm_head/weight": flat[HUGGINGFACE["head"]],
    }
    for name in TORCHTITAN.keys() - {"embed", "norm", "head", "layers"}:
        path = HUGGINGFACE[name].replace(".", "/")
        each = [flat[f"model.layers.{i}.{HUGGINGFACE[name]}"] for i in range(L)]
        each = [x.reshape(shapes.get(name, x.shape)) for x in each]
        if layers_are_stacked:
            tree[f"transformer/layers/stacked/{path}"] = np.stack(each)
        else:
            tree |= {f"transformer/layers/blocks/{i}/{path}": x for i, x in enumerate(each)}
    return tree, logits


def target_of(config):
    """The parameters of our model, in eight shards."""
    return (
        fsdp.fully_shard(
            lambda rngs: Llama(config, rngs=rngs),
            optax.identity(),
            fsdp.make_mesh(data=8),
            min_size=8,
        )
        .checkpoint_target()
        .params
    )


def logits_of(config, params):
    """What our model computes with imported parameters."""
    model = Llama(config, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    values = {path: np.asarray(leaf) for path, leaf in flatten(params).items()}
    nnx.replace_by_pure_dict(state, unflatten(values))
    nnx.update(model, state)
    return model(TOKENS[None])[0]


close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("config", [CONFIG, SCALED], ids=["halves", "interleaved"])
def test_maxtext(config, scanned, tmp_path):
    """Scanned layers or not, stacked here or not, both rotations, and the folded scale."""
    flat, logits = maxtext(config, scanned)
    tree = {"params": {"params": unflatten(flat)}, "step": 3}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "3", tree)
    stacked = dataclasses.replace(config, scan_layers=scanned)
    names = foreign_names("maxtext", stacked)
    read = import_orbax(tmp_path / "3", target_of(stacked), rename=names)
    close(logits_of(stacked, read), logits)
    # Blocks of our own number or stacked, from either form; and moments of what is multiplied.
    with open_checkpoint(tmp_path / "3", "orbax") as parts:
        saved = parts.of("params")
        assert program_of(saved, config) == "maxtext"
        whole = np.asarray(names("blocks/attn/q/kernel", saved))
        np.testing.assert_array_equal(names("blocks/1/attn/q/kernel", saved), whole[1])
        for moment, factor in ((1, 1 / K), (2, K**-1.5)):
            saved.moment = moment
            np.testing.assert_array_equal(names("blocks/attn/q/kernel", saved), whole * factor)
            saved.moment = 0


def test_torchtitan_and_transformers(tmp_path):
    """Meta's rotation of neighbours, and Hugging Face's of halves; tied copies are left out."""
    for number, (names, program) in enumerate(
        ((TORCHTITAN, "torchtitan"), (HUGGINGFACE, "huggingface"))
    ):
        flat, logits = tensors_of_torch(names, interleaved=program == "torchtitan")
        for prefix in ("", "model."):
            folder = tmp_path / f"{number}{prefix}"
            steps = {"train_state.step": np.asarray(7, np.int64)}
            write_dcp(folder, {prefix + name: x for name, x in flat.items()} | steps, ranks=3)
            with open_checkpoint(folder, "dcp") as parts:
                assert program_of(parts.of("params"), CONFIG) == program
                assert not parts.has_moments
            rename = foreign_names(program, CONFIG)
            close(logits_of(CONFIG, import_dcp(folder, target_of(CONFIG), rename=rename)), logits)


def test_levanter(tmp_path):
    """An array a folder, or a database; layers stacked or apart."""
    for database in (False, True):
        tree, logits = levanter(layers_are_stacked=database)
        folder = tmp_path / f"step-{database:d}"
        write_levanter(folder, {"model": unflatten(tree), "step": 1}, database=database)
        rename = foreign_names("levanter", CONFIG)
        read = import_levanter(folder, target_of(CONFIG), rename=rename)
        close(logits_of(CONFIG, read), logits)
        with open_checkpoint(folder, "levanter") as parts:
            assert program_of(parts.of("params"), CONFIG) == "levanter"
    with refused(error=ConfigError, got="step-1", fix=f"one of them: {folder}"):
        import_levanter(tmp_path, target_of(CONFIG))


def test_names_of_other_families(tmp_path):
    """A padded vocabulary and a tied head of GPT-2; what only Llama has a table for is said."""
    config = GPTConfig(vocab_size=30, sequence_length=8, layers=2, width=16, heads=2)
    family = FAMILIES["gpt"]
    shapes = parameter_shapes(family.model, config)
    leaves = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in shapes.items()}
    tensors = {
        place.name: normal(*place.shape)
        for each in table_of(config).mappings(leaves).values()
        for place in each
    }
    tied = {"lm_head.weight": tensors["transformer.wte.weight"]}
    write_dcp(tmp_path / "gpt", tensors | tied, ranks=2)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = unflatten(
        {
            path: jax.ShapeDtypeStruct(shape, "float32", sharding=device)
            for path, shape in shapes.items()
        }
    )
    read = flatten(
        import_dcp(tmp_path / "gpt", target, rename=foreign_names("huggingface", config))
    )
    table = np.asarray(read["embed/embedding"])
    assert len(table) > 30
    assert not table[30:].any()
    np.testing.assert_array_equal(table[:30], tensors["transformer.wte.weight"])
    c_attn = tensors["transformer.h.1.attn.c_attn.weight"]
    np.testing.assert_array_equal(read["blocks/attn/qkv/kernel"][1], c_attn)
    with refused(error=ConfigError, where="model.family", got="GPTConfig"):
        foreign_names("maxtext", config)
    assert program_of(["a/b"], config) is None
