"""The door to all data: each kind, for both forms of models, and what does not go together."""

import json
import re

import numpy as np
import pytest

from fsdp_jax.data import make_loader
from fsdp_jax.data.documents import open_documents, split_documents
from fsdp_jax.data.instructions import PROMPT
from fsdp_jax.data.shard_writer import tokenize
from fsdp_jax.data.sources import held_out_indices, open_examples
from fsdp_jax.errors import ConfigError


@pytest.fixture
def folder(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number:02}.txt").write_text(f"document {number} " * 20)
    (texts / "20.jsonl").write_text('{"text": ""}\n')
    return texts


@pytest.fixture
def tokens(folder, bpe, tmp_path):
    tokenize(
        split_documents(open_documents(folder), held_out=0.1),
        bpe,
        tmp_path / "tokens",
        shard_tokens=500,
    )
    return tmp_path / "tokens"


def rows(examples):
    return [examples[index] for index in range(len(examples))]


def test_embedded_text():
    found = open_examples("embedded", sequence_length=128, vocab_size=256)
    assert len(found.train) > 10 * len(found.held_out) > 0
    assert set(found.train[0]) == {"tokens"}
    assert "-stdlib: " in found.description
    assert "(tokenizer bytes); passed over or mended: " in found.description


def test_text_in_windows_and_apart(folder):
    found = open_examples("text", path=str(folder), sequence_length=32, held_out=0.1)
    total, held = (
        sum(len(f"document {n} " * 20) + 1 for n in numbers) for numbers in (range(20), (9, 19))
    )
    assert found.description == (
        f"texts: 20 documents, {total - held:,} tokens to learn from and {held} held out (tokenizer bytes)"
        "; passed over or mended: 1 empty"
    )
    assert found.tokenizer.decode(found.held_out[0]["tokens"]).startswith("document 9 ")
    apart = open_examples("text", path=str(folder), sequence_length=32, held_out=0.1, apart=True)
    assert set(apart.held_out[0]) == {"tokens", "segments", "positions", "mask"}
    assert apart.digest == found.digest
    np.testing.assert_array_equal(apart.train[3]["tokens"], found.train[3]["tokens"])


def test_tokens_are_what_the_text_would_be(folder, tokens, bpe):
    file = tokens / "tokenizer.json"
    options = {"sequence_length": 16, "apart": True, "vocab_size": 300}
    text = open_examples("text", path=str(folder), tokenizer=str(file), held_out=0.1, **options)
    shards = open_examples("tokens", path=str(tokens), **options)
    assert shards.digest == text.digest
    assert shards.tokenizer.digest == text.tokenizer.digest == bpe.digest
    assert shards.description == text.description.replace(str(file), "bpe")
    for one, other in ((shards.train, text.train), (shards.held_out, text.held_out)):
        assert one.settings == other.settings
        for row, same in zip(rows(one), rows(other), strict=True):
            for name in row:
                np.testing.assert_array_equal(row[name], same[name])
    loader = make_loader(shards.train, global_batch_size=4, seed=1)
    loader.set_state(make_loader(text.train, global_batch_size=4, seed=1).get_state())


def test_text_for_models_with_an_encoder(folder, tokens):
    for kind, path, more in (("text", folder, {"held_out": 0.1}), ("tokens", tokens, {})):
        found = open_examples(
            kind, path=str(path), sequence_length=48, targets_length=24, vocab_size=400, **more
        )
        assert set(found.train[0]) == {"inputs", "inputs_mask", "targets", "mask"}
        assert 399 in found.train[0]["inputs"]
        assert len(found.held_out) > 0
    with pytest.raises(ConfigError, match="too few sentinels"):
        open_examples(
            "text", path=str(folder), sequence_length=48, targets_length=24, vocab_size=256
        )


def test_too_little_text_to_hold_out(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh" * 10)
    assert open_examples("text", path=str(tmp_path), sequence_length=16).held_out is None
    found = open_examples("text", path=str(tmp_path), sequence_length=16, held_out=0)
    assert found.held_out is None
    assert found.tokenizer.decode(found.train[0]["tokens"]).startswith("abcdefgh")
    little = {"path": str(tmp_path), "sequence_length": 16, "targets_length": 8, "vocab_size": 300}
    assert (
        open_examples("text", held_out=0.15, **little).held_out is None
    )  # 13 tokens; the inputs take 17
    assert open_examples("text", held_out=0.2, **little).held_out is not None


def test_instructions():
    found = open_examples("instructions", sequence_length=512)
    assert set(found.train[0]) == {"tokens", "segments", "positions", "mask"}
    assert found.held_out is not None
    assert found.description.startswith(
        "instructions: 211 instructions, 10 of them held out, the others in "
    )
    assert "rows (tokenizer bytes)" in found.description
    assert found.tokenizer.decode(found.held_out[0]["tokens"]).startswith(PROMPT[:40])
    pairs = open_examples("instructions", sequence_length=512, targets_length=64)
    assert set(pairs.train[0]) == {"inputs", "inputs_mask", "targets", "mask"}
    assert pairs.digest == found.digest


def test_instructions_that_are_too_long_are_counted(tmp_path):
    records = [{"instruction": "a" * (150 * (at % 10 == 9)), "output": "b"} for at in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    options = {"path": str(tmp_path / "a.jsonl"), "sequence_length": 200, "held_out": 0.1}
    found = open_examples("instructions", too_long="skip", **options)
    assert found.held_out is None
    assert "2 too long" in found.description
    with pytest.raises(ConfigError, match=r"No instruction fits(?s:.*)at least 1"):
        open_examples("instructions", **options | {"sequence_length": 20})


def test_datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    records = [{"body": f"text {number} " * 9} for number in range(30)]
    (tmp_path / "set" / "train.json").write_text("\n".join(map(json.dumps, records)))
    found = open_examples("datasets", path=str(tmp_path / "set"), field="body", sequence_length=16)
    assert found.description.startswith("set (train): ")
    assert "30 documents" in found.description
    text = found.tokenizer.decode(np.concatenate([row["tokens"][:-1] for row in rows(found.train)]))
    assert text.startswith(records[0]["body"] + "\0" + records[1]["body"] + "\0")


def test_drawn_images():
    found = open_examples("images", sequence_length=1, images=80, seed=3, classes=8)
    assert (len(found.train), len(found.held_out)) == (80, 4)
    assert "in 8 classes" in found.description
    assert found.tokenizer is None
    held = {row["images"].tobytes() for row in rows(found.held_out)}
    assert not held & {row["images"].tobytes() for row in rows(found.train)}
    assert found.digest != open_examples("images", sequence_length=1, images=80, seed=4).digest
    assert found.digest != open_examples("images", sequence_length=1, images=81, seed=3).digest
    with pytest.raises(
        ConfigError, match=r"too few classes(?s:.*)model\.classes\n +expected: +at least 8"
    ):
        open_examples("images", sequence_length=1, classes=7)


def test_images_from_a_file(tmp_path):
    images = np.arange(40 * 12, dtype=np.uint16).astype(np.uint8).reshape(40, 2, 2, 3)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(40) % 5)
    found = open_examples("images", path=str(tmp_path / "a.npz"), sequence_length=1)
    assert (len(found.train), len(found.held_out)) == (38, 2)
    np.testing.assert_array_equal(found.held_out[1]["images"], images[39])
    assert found.description == "a.npz: 38 images of 2x2 in 5 classes, and 2 held out"
    with pytest.raises(ConfigError, match="too few classes"):
        open_examples("images", path=str(tmp_path / "a.npz"), sequence_length=1, classes=4)


def test_every_kth_is_held_out_where_there_are_enough():
    assert [part.tolist() for part in held_out_indices(8, 0.25)] == [[0, 1, 2, 4, 5, 6], [3, 7]]
    assert [part.tolist() for part in held_out_indices(6, 0.25)] == [[0, 1, 2, 3], [4, 5]]
    assert [part.tolist() for part in held_out_indices(3, 0)] == [[0, 1, 2], []]


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("txt", {}, r"data\.kind(?s:.*)did you mean 'text'"),
        ("text", {}, r"kind and path do not go together(?s:.*)data\.path"),
        ("tokens", {}, "kind and path do not go together"),
        ("embedded", {"path": "x"}, r"do not go together(?s:.*)leave data\.path out"),
        ("embedded", {"held_out": 0.7}, r"0 to 0\.5"),
        ("embedded", {"vocab_size": 100}, r"model\.vocab_size(?s:.*)at least 256"),
        ("embedded", {"tokenizer": "nowhere"}, "no such tokenizer"),
        ("text", {"path": "nowhere"}, "does not exist"),
        ("tokens", {"path": "nowhere"}, "no finished token shards"),
        ("instructions", {"too_long": "wrap"}, "truncate, skip"),
        ("text", {"path": ".", "invalid": "maybe"}, "error, replace, skip"),
        ("embedded", {"sequence_length": 0}, "at least 1"),
        ("instructions", {"invalid": "maybe"}, "error, replace, skip"),
        (
            "images",
            {"seed": -1},
            r"seed is out of range(?s:.*)train\.seed\n +expected: +0 to 2\*\*32 - 1",
        ),
        ("embedded", {"seed": -1, "targets_length": 8}, r"seed is out of range"),
        ("embedded", {"seed": 2**32}, r"seed is out of range"),
    ],
)
def test_mistakes_are_explained(kind, options, says):
    with pytest.raises(ConfigError, match=says):
        open_examples(kind, **{"sequence_length": 16} | options)


def test_tokens_that_were_made_otherwise_are_refused(tokens):
    with pytest.raises(
        ConfigError, match=r"of another tokenizer(?s:.*)expected: +(?s:.*)got: +bytes"
    ):
        open_examples("tokens", path=str(tokens), sequence_length=16, tokenizer="bytes")
    with pytest.raises(ConfigError, match=r"split otherwise(?s:.*)expected: +0\.1\n +got: +0\.2"):
        open_examples("tokens", path=str(tokens), sequence_length=16, held_out=0.2)
    with pytest.raises(ConfigError, match=r"model\.vocab_size(?s:.*)in the tokens"):
        open_examples("tokens", path=str(tokens), sequence_length=16, vocab_size=200)
    found = open_examples(
        "tokens", path=str(tokens), sequence_length=16, held_out=0.1, tokenizer=str(tokens)
    )
    assert len(found.train) > 0


OTHER = {
    "field": "body",
    "invalid": "skip",
    "apart": True,
    "split": "test",
    "tokenizer": "t",
    "too_long": "skip",
}
USES = {
    "embedded": {"apart", "tokenizer"},
    "text": {"apart", "tokenizer", "field", "invalid"},
    "tokens": {"apart", "tokenizer"},
    "datasets": {"apart", "tokenizer", "field", "invalid", "split"},
    "instructions": {"apart", "tokenizer", "invalid", "split", "too_long"},
    "images": set(),
}  # fmt: skip


@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize("option", OTHER)
def test_what_would_be_ignored_is_refused(tmp_path, monkeypatch, kind, option):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    record = {
        "text": "a text",
        "body": "another",
        "instruction": "say it",
        "input": "",
        "output": "it",
    }
    (tmp_path / "records.jsonl").write_text(
        json.dumps(record) + "\n"
    )  # here, or the hub would be asked for it
    path = None if kind in ("embedded", "images") else str(tmp_path)
    key = "packing" if option == "apart" else option
    refusal = rf"{key} would be ignored\n +where: +data\.{key}\n +got: +{OTHER[option]}\n +fix: +leave it out"
    try:
        open_examples(kind, path=path, sequence_length=16, **{option: OTHER[option]})
    except ConfigError as error:
        assert (re.match(refusal, str(error)) is None) == (option in USES[kind])  # noqa: PT017
    else:
        assert option in USES[kind]


def test_documents_apart_are_nothing_for_an_encoder():
    with pytest.raises(ConfigError, match="packing would be ignored"):
        open_examples("embedded", sequence_length=16, targets_length=8, apart=True)


@pytest.mark.parametrize("path", [None, "x.json"])
def test_a_split_of_what_is_no_dataset_would_be_ignored(path):
    with pytest.raises(ConfigError, match=r"split would be ignored(?s:.*)got: +test"):
        open_examples("instructions", path=path, sequence_length=16, split="test")


def test_what_is_not_utf8_is_passed_over_in_instructions_too(tmp_path):
    lines = [b'{"instruction": "a", "output": "b"}'] * 4 + [
        b'{"instruction": "\xff", "output": "c"}'
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    options = {"path": str(tmp_path / "a.jsonl"), "sequence_length": 200}
    with pytest.raises(ConfigError, match=r"not UTF-8(?s:.*)line 5(?s:.*)set data\.invalid"):
        open_examples("instructions", **options)
    assert (
        "4 instructions"
        in (found := open_examples("instructions", invalid="skip", **options)).description
    )
    assert found.description.endswith("; passed over or mended: 1 not UTF-8")
    assert (
        "5 instructions" in open_examples("instructions", invalid="replace", **options).description
    )
