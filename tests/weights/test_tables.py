"""The tables: each parameter of ours is exactly one or several tensors of theirs, and none is left
on either side.
"""

import dataclasses
import functools
from math import prod

import pytest
from collected import collected

from fsdp_jax.models import FAMILIES, parameter_count
from fsdp_jax.models.families import family_of
from fsdp_jax.tree import flatten
from fsdp_jax.units.nnx import NnxModel
from fsdp_jax.weights import table_of

PRESETS = {name: config for family in FAMILIES.values() for name, config in family.presets.items()}


@functools.cache
def leaves_of(config):
    return flatten(NnxModel(lambda rngs: family_of(config).model(config, rngs=rngs)).params)


def unrolled(leaves):
    """The leaves of the same model with lists of blocks."""
    found = {}
    for path, leaf in leaves.items():
        before, stack, after = path.partition("blocks/")
        for at in range(leaf.shape[0]) if stack else [None]:
            name = f"{before}{stack}{at}/{after}" if stack else path
            found[name] = dataclasses.replace(leaf, shape=leaf.shape[1:]) if stack else leaf
    return found


@dataclasses.dataclass(frozen=True)
class Shape:
    shape: tuple


def shapes(leaves):
    return {path: Shape(tuple(leaf.shape)) for path, leaf in leaves.items()}


def check(config, leaves):
    table = table_of(config)
    mappings = table.mappings(leaves)
    assert all(mappings.values()), [path for path, each in mappings.items() if not each]
    names = [mapping.name for each in mappings.values() for mapping in each]
    assert len(names) == len(set(names))
    assert set(names) == set(table.names())
    assert not set(names) & set(table.aliases())
    assert not [name for name in names if table.is_ignored(name)]
    for path, each in mappings.items():
        for mapping in each:
            assert prod(mapping.size) == prod(mapping.shape)
            assert all(
                hi <= size for (_, hi), size in zip(mapping.box, leaves[path].shape, strict=True)
            )
        starts = {mapping.start for mapping in each}
        assert len(starts) == len(each), "mappings do not lie on each other"
    count = sum(prod(leaf.shape) for leaf in leaves.values())
    assert count == parameter_count(config)
    if hasattr(config, "pad_vocab_to"):  # they have no rows of padding
        count = parameter_count(dataclasses.replace(config, pad_vocab_to=1))
    held = sum(prod(mapping.shape) for each in mappings.values() for mapping in each)
    assert held == count


def check_preset(config):
    leaves = shapes(leaves_of(config))
    check(config, leaves)
    check(config, unrolled(leaves))


def test_every_parameter_and_tensor_of_these_presets_is_mapped():
    with collected() as case:
        for name in COUNTS:
            config = PRESETS[name]
            with case(name):
                check_preset(config)
            if hasattr(config, "tie_head"):
                other = dataclasses.replace(config, tie_head=not config.tie_head)
                with case(other):
                    check(other, shapes(leaves_of(other)))


@pytest.mark.long
def test_every_parameter_and_tensor_of_every_preset_is_mapped():
    with collected() as case:
        for name in PRESETS.keys() - COUNTS.keys():
            with case(name):
                check_preset(PRESETS[name])


def test_a_list_of_blocks_has_these_paths():
    """`unrolled` above has the paths of the models, and is much faster on the largest."""
    with collected() as case:
        for family in FAMILIES.values():
            config = next(iter(family.presets.values()))
            apart = dataclasses.replace(config, scan_layers=False)
            with case(config):
                assert shapes(leaves_of(apart)) == unrolled(shapes(leaves_of(config)))


# As published: the files' own numbers, less buffers.
COUNTS = {"gpt2": 148, "llama2-7b": 291, "llama3-8b": 291, "t5-small": 131, "t5-v1_1-base": 282}
COUNTS |= {"vit-b16": 200, "cait-m48-448": 908}
PUBLISHED = [
    ("gpt2", "transformer.wte.weight", (50257, 768)),
    ("gpt2", "transformer.h.11.attn.c_attn.weight", (768, 2304)),
    ("llama2-7b", "lm_head.weight", (32000, 4096)),
    ("llama2-7b", "model.layers.31.mlp.down_proj.weight", (4096, 11008)),
    ("llama3-8b", "model.embed_tokens.weight", (128256, 4096)),
    ("llama3-8b", "model.layers.0.self_attn.k_proj.weight", (1024, 4096)),
    ("t5-small", "shared.weight", (32128, 512)),
    ("t5-small", "decoder.block.5.layer.2.DenseReluDense.wi.weight", (2048, 512)),
    ("t5-small", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 8)),
    ("t5-v1_1-base", "lm_head.weight", (32128, 768)),
    ("t5-v1_1-base", "encoder.block.11.layer.1.DenseReluDense.wi_1.weight", (2048, 768)),
    ("vit-b16", "vit.embeddings.patch_embeddings.projection.weight", (768, 3, 16, 16)),
    ("vit-b16", "vit.embeddings.position_embeddings", (1, 197, 768)),
    ("vit-b16", "classifier.weight", (1000, 768)),
    ("cait-m48-448", "pos_embed", (1, 784, 768)),
    ("cait-m48-448", "blocks.47.attn.qkv.weight", (2304, 768)),
    ("cait-m48-448", "blocks_token_only.1.attn.q.weight", (768, 768)),
    ("cait-m48-448", "blocks.0.attn.proj_l.weight", (16, 16)),
]


def test_names_and_shapes_are_the_published_ones():
    with collected() as case:
        for name, count in COUNTS.items():
            config = PRESETS[name]
            mappings = table_of(config).mappings(leaves_of(config))
            found = {mapping.name: mapping.shape for each in mappings.values() for mapping in each}
            examples = {tensor: shape for preset, tensor, shape in PUBLISHED if preset == name}
            with case(name):
                assert len(found) == count
                assert examples
                assert {key: found[key] for key in examples} == examples


def test_an_unknown_leaf_has_no_tensor():
    table = table_of(PRESETS["gpt2"])
    leaves = {
        "blocks/attn/qkv/lora_a": Shape((12, 768, 8)),
        "embed/embedding": Shape((40_000, 768)),
    }
    assert table.mappings(leaves) == {
        "blocks/attn/qkv/lora_a": [],
        "embed/embedding": [],
    }  # fewer rows than they have
