"""A vocabulary larger than that of the weights: the rows that they lack are the mean of theirs."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from family_cases import wider_config_of
from tiny import saved, theirs

import fsdp_jax
from fsdp_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, extends, train_bpe
from fsdp_jax.errors import ConfigError
from fsdp_jax.sharding.quantized import QuantizedBase
from fsdp_jax.train.huggingface import import_huggingface
from fsdp_jax.train.initial_weights import initial_params
from fsdp_jax.tree import flatten
from fsdp_jax.weights import import_weights

GROWN = 7  # more tokens: a number that no device count divides


def sharded_of(name, config, devices=8, **more):
    model = wider_config_of(name)[0].model
    return fsdp_jax.fully_shard(
        lambda rngs: model(config, rngs=rngs),
        optax.sgd(0.1),
        fsdp_jax.make_mesh(data=devices, devices=jax.devices()[:devices]),
        "full_shard",
        min_size=1,
        **more,
    )


def case(name, folder, **fields):
    """(folder, its tensors, the configuration with more tokens) of a family."""
    _, config = wider_config_of(name)
    config = dataclasses.replace(config, **fields)
    leaves = flatten(sharded_of(name, config).checkpoint_target().params)
    tensors = theirs(config, leaves)
    larger = dataclasses.replace(config, vocab_size=config.vocab_size + GROWN)
    return saved(folder, config, tensors), tensors, config, larger


def check_rows(params, table, head, old):
    """Compares the embedding, and the head where there is one, with those of the weights."""
    found = {"embed/embedding": np.asarray(params["embed/embedding"])}
    expected = {"embed/embedding": table}
    if head is not None:
        found["head/kernel"] = np.asarray(params["head/kernel"]).T
        expected["head/kernel"] = head
    for path, rows in expected.items():
        np.testing.assert_array_equal(found[path][:old], rows[:old])
        mean = rows[:old].astype(np.float64).mean(0).astype(np.float32)
        new = found[path][old : old + GROWN]
        np.testing.assert_array_equal(new, np.broadcast_to(mean, new.shape))
        assert not found[path][old + GROWN :].any()


TABLES = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("name", "tied", "devices"),
    [
        ("gpt2", True, 8),
        ("gpt2", False, 1),
        ("llama", False, 7),
        ("llama", True, 4),
        ("t5", True, 8),
    ],
)
def test_a_folder_is_read_with_new_rows(tmp_path, name, tied, devices):
    folder, tensors, config, larger = case(name, tmp_path / "model", tie_head=tied)
    target = sharded_of(name, larger, devices).checkpoint_target().params
    old = config.vocab_size
    said = rf"the last {GROWN} rows of embed/embedding( and head/kernel)? are the mean of the "
    said += rf"others\n  where:    .*model\n  expected: {old + GROWN} tokens.*\n"
    said += rf"  got:      {old} tokens\n  fix:      .*with_lora\(trainable=\)"
    with pytest.warns(UserWarning, match=said) as caught:
        params = flatten(import_weights(folder, target, larger, budget=4096))
    assert caught[0].filename == __file__
    head = None if tied else tensors["lm_head.weight"]
    check_rows(params, tensors[TABLES.get(name, "shared.weight")], head, old)


def test_a_run_is_read_with_new_rows_frozen_and_quantized_too(tmp_path):
    """Of the run and of the folder that it is from alike; the export has the new vocabulary."""
    folder, tensors, config, larger = case("llama", tmp_path / "model", tie_head=False)
    import_huggingface(folder, tmp_path / "run", dtype="float32")
    frozen = sharded_of(
        "llama",
        larger,
        frozen=["^(?!norm)"],
        units=["LlamaBlock"],
        base=QuantizedBase("int8", block=8, kernels=("mlp", "head")),
    )
    found = []
    for weights in ("model", "run"):
        with pytest.warns(UserWarning, match="rows") as said:
            found.append(flatten(initial_params(str(tmp_path / weights), frozen, larger)))
        texts = [str(each.message) for each in said]
        assert any(
            "the new rows of embed/embedding and head/kernel never train" in t for t in texts
        )
    of_folder, of_run = ({p: np.asarray(x) for p, x in each.items()} for each in found)
    jax.tree.map(np.testing.assert_array_equal, of_folder, of_run)
    assert of_run["head/kernel"].dtype == np.uint8
    check_rows(of_run, tensors["model.embed_tokens.weight"], None, config.vocab_size)


def test_smaller_vocabularies_and_other_shapes_are_refused(tmp_path):
    folder, _, config, _ = case("llama", tmp_path / "model")
    for change in ({"vocab_size": config.vocab_size - 1}, {"width": 2 * config.width}):
        other = dataclasses.replace(config, **change)
        target = sharded_of("llama", other).checkpoint_target().params
        with pytest.raises(ConfigError, match="do not fit the model"):
            import_weights(folder, target, other)


def test_a_tokenizer_that_adds_tokens_extends_another(tmp_path):
    tokenizer = train_bpe(["Below is an instruction"] * 9, 300)
    content = json.loads(tokenizer.files["tokenizer.json"])
    token = content["added_tokens"][0]
    content["added_tokens"].append(token | {"id": 300, "content": "<new>"})
    more = HuggingFaceTokenizer(json.dumps(content).encode(), name="more")
    assert extends(more, tokenizer)
    assert not extends(tokenizer, more)
    assert not extends(train_bpe(["another text"] * 9, 300), tokenizer)
    assert not extends(ByteTokenizer(), tokenizer)
