"""A Hugging Face folder that is trained with a learning rate of 0 is exported as it was.

Every file of it, byte for byte. A step of each family is compiled in `make test-long`.
"""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from family_cases import CASES, FIRST, wider_config_of
from safetensors.numpy import load_file, save_file

from fsdp_jax.cli.main import main
from fsdp_jax.data.tokenizer import load_tokenizer
from fsdp_jax.models.flops import parameter_shapes
from fsdp_jax.train.huggingface import import_huggingface, write_config_and_tokenizer
from fsdp_jax.weights import config_files, read_config, table_of

# Keys of published files that the package does not read, or reads and never changes.
COMMON = {
    "_name_or_path": "theirs",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "initializer_range": 0.01,
    "torch_dtype": "float32",
}
IDS = {"bos_token_id": 0, "eos_token_id": [0, 3, 2], "pad_token_id": 5}
NAMES = ["cat", "dog", "hen", "cow", "bee", "ant", "elk", "fox"]
OF_FAMILY = {
    "gpt": COMMON | IDS | {"resid_pdrop": 0.1, "task_specific_params": {"text-generation": {}}},
    "llama": COMMON | IDS | {"pretraining_tp": 1, "attention_dropout": 0.0},
    "t5": COMMON | {"eos_token_id": 2, "n_positions": 99, "output_past": True},
    "vit": COMMON
    | {"id2label": dict(zip("01234567", NAMES, strict=True)), "problem_type": None}
    | {"label2id": {name: number for number, name in enumerate(NAMES)}},
    "cait": {"pretrained_cfg": {"tag": "fb_dist_in1k", "crop_pct": 1.0, "num_classes": 8}},
}
DATA = "data: {kind: text, path: %s, sequence_length: 16, held_out: 0}"
OF_KIND = {
    "text": DATA,
    "text to text": DATA[:-1] + ", target_length: 8}",
    "images": "data: {kind: images, held_out: 0}",
}


def write_tokenizer(folder):
    """Words as tokens, with added ones, and the files that others write beside tokenizer.json."""
    words = {word: number for number, word in enumerate(["<s>", "?", "</s>", "<eom>", *"abcdefgh"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.add_special_tokens(["<s>", "</s>", "<eom>", *(f"<extra_id_{n}>" for n in range(8))])
    model.add_tokens(["added"])
    model.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 8, "legacy": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "added_tokens.json").write_text('{"added": 20}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "tokenizer.model").write_bytes(b"\x00sentences")


def write_theirs(name, folder):
    """Writes a small model of a family as others publish it; returns the family."""
    folder.mkdir()
    family, config = wider_config_of(name)
    if hasattr(config, "classes"):
        config = dataclasses.replace(config, classes=len(NAMES))  # of the drawn images
    shapes = parameter_shapes(family.model, config)
    leaves = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
    draw, tensors = np.random.default_rng(0), {}
    for mappings in table_of(config).mappings(leaves).values():
        for mapping in mappings:
            tensors[mapping.name] = draw.normal(size=mapping.shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file, content in config_files(config).items():
        found = json.loads(content)
        if file == "config.json":
            found |= OF_FAMILY[family.name]
        if file == "preprocessor_config.json":
            found |= {"resample": 3, "crop_pct": 0.9}
        (folder / file).write_text(json.dumps(found))
    if family.task.is_text:
        write_tokenizer(folder)
        generation = {"eos_token_id": [0, 3, 2], "temperature": 0.6, "top_p": 0.9}
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return family


def assert_equal_folders(found, theirs):
    names = {file.name for file in theirs.iterdir()}
    assert {file.name for file in found.iterdir()} == names
    for name in names - {"model.safetensors"}:
        assert (found / name).read_bytes() == (theirs / name).read_bytes(), name
    found, theirs = (load_file(each / "model.safetensors") for each in (found, theirs))
    assert found.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def export(run, to):
    assert main(["export", str(run), "--to", str(to), "--format", "huggingface"]) == 0
    return to


def test_weights_that_stop_at_other_ids_than_their_tokenizer_are_told(tmp_path):
    theirs = tmp_path / "theirs"
    write_theirs("llama", theirs)
    config = json.loads((theirs / "config.json").read_text()) | {"eos_token_id": [0, 3]}
    (theirs / "config.json").write_text(json.dumps(config))
    (tmp_path / "run").mkdir()
    with pytest.warns(UserWarning, match="may not stop where this model does") as warned:
        write_config_and_tokenizer(
            tmp_path / "run", read_config(theirs), load_tokenizer(theirs), like=theirs
        )
    assert "2, with which the tokenizer ends a text" in str(warned[0].message)
    assert (tmp_path / "run" / "config.json").read_text() == json.dumps(config)


def cases_but(*names):
    """All cases, those that are not named for long tests."""
    return [pytest.param(name, marks=[] if name in names else pytest.mark.long) for name in CASES]


@pytest.mark.parametrize("name", cases_but(*FIRST.values()))
def test_an_import_is_exported_as_it_was(name, tmp_path):
    """And so is a run from it, which writes its files as below."""
    theirs = tmp_path / "theirs"
    family = write_theirs(name, theirs)
    import_huggingface(theirs, tmp_path / "run", dtype="float32")
    assert_equal_folders(export(tmp_path / "run", tmp_path / "out"), theirs)
    # a run has its own lengths and layers
    config = read_config(theirs, scan_layers=False)
    if family.task.any_length:
        config = read_config(theirs, inputs_length=4, targets_length=4)
    tokenizer = load_tokenizer(theirs) if family.task.is_text else None
    write_config_and_tokenizer(tmp_path / "run", config, tokenizer, like=theirs)
    assert_equal_folders(export(tmp_path / "run", tmp_path / "again"), theirs)


@pytest.mark.parametrize("name", cases_but("llama"))
def test_a_run_with_a_learning_rate_of_0_is_exported_as_it_was(name, tmp_path):
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    family = write_theirs(name, theirs)
    (tmp_path / "text.txt").write_text("a b c d e f g h " * 40)
    data = OF_KIND[family.task.name].replace("%s", str(tmp_path / "text.txt"))
    (tmp_path / "run.yaml").write_text(
        f"model: {{family: {family.name}, weights: {theirs}}}\n{data}\n"
        "optimizer: {learning_rate: 0, weight_decay: 0, warmup_steps: 0}\n"
        "train: {steps: 1, global_batch_size: 8, devices: 8, sample: 0}\n"
    )
    assert main(["train", str(tmp_path / "run.yaml"), "--output", str(run)]) == 0
    assert_equal_folders(export(run, tmp_path / "out"), theirs)
