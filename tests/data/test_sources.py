"""`open_examples`: each kind of data, for both forms of models, and what is refused."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from collected import collected
from corpora import documents_of
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import fields, refused

from fsdp_jax.cli.main import main
from fsdp_jax.data import DataOptions, make_loader, open_examples, sources
from fsdp_jax.data.documents import open_documents, split_documents
from fsdp_jax.data.instructions import PROMPT, InstructionRecord
from fsdp_jax.data.options import KINDS
from fsdp_jax.data.sources import split_indices
from fsdp_jax.data.tokenize_shards import tokenize
from fsdp_jax.data.tokenizer import END, ByteTokenizer
from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.train.typed_keys import field_comments


def load(kind, *, sequence_length=16, **options):
    return open_examples(DataOptions(kind=kind, sequence_length=sequence_length, **options))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Text files, which no test changes."""
    texts = tmp_path_factory.mktemp("corpus") / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number:02}.txt").write_text(f"document {number} " * 20)
    (texts / "20.jsonl").write_text('{"text": ""}\n')
    return texts


@pytest.fixture(scope="session")
def tokens(folder, bpe, tmp_path_factory):
    """The shards of `folder`, which no test changes."""
    shards = tmp_path_factory.mktemp("shards")
    tokenize(split_documents(open_documents(folder), held_out=0.1), bpe, shards, shard_tokens=500)
    return str(shards)


def rows(examples):
    return [examples[index] for index in range(len(examples))]


def test_embedded_text():
    data = load("embedded", sequence_length=128, vocab_size=256)
    assert len(data.train) > 10 * len(data.held_out) > 0
    assert set(data.train[0]) == {"tokens"}
    assert "-stdlib: " in data.description
    assert "(tokenizer bytes); skipped or repaired: " in data.description


def test_text_in_windows_with_documents_joined_or_apart(folder):
    options = {"path": str(folder), "sequence_length": 32, "held_out": 0.1}
    joined = load("text", **options)
    lengths = [len(f"document {number} " * 20) + 1 for number in range(20)]
    held_out = lengths[9] + lengths[19]
    assert joined.description == (
        f"texts: 20 documents, {sum(lengths) - held_out:,} training tokens and {held_out} held out "
        "(tokenizer bytes); skipped or repaired: 1 empty"
    )
    assert joined.tokenizer.decode(joined.held_out[0]["tokens"]).startswith("document 9 ")
    apart = load("text", packing=True, **options)
    assert set(apart.held_out[0]) == {"tokens", "segments", "positions", "mask"}
    assert apart.digest == joined.digest
    np.testing.assert_array_equal(apart.train[3]["tokens"], joined.train[3]["tokens"])


PACKED = [name for name, kind in KINDS.items() if kind.packs or "packing" in kind.keys]


@settings(max_examples=10, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=8, max_size=20),
    length=st.integers(12, 15),
)
def test_no_context_of_a_target_crosses_a_document(tmp_path_factory, sizes, length):
    """Of any kind of data whose rows hold several documents; the bytes tell their document."""
    texts = [chr(97 + number) * (prompt + answer) for number, (prompt, answer) in enumerate(sizes)]
    records = [
        InstructionRecord(text[:prompt], "", text[prompt:], is_prompt=True)
        for text, (prompt, _) in zip(texts, sizes, strict=True)
    ]
    shards = tmp_path_factory.mktemp("shards")
    tokenize(split_documents(documents_of(texts), held_out=0), ByteTokenizer(), shards)
    opened = ("embedded_documents", "open_documents", "dataset_documents")
    with collected() as case, pytest.MonkeyPatch.context() as patched:
        for name in opened:
            patched.setattr(sources, name, lambda *_, **__: documents_of(texts))
        patched.setattr(sources, "load_instructions", lambda *_, **__: records)
        for kind in PACKED:
            path = None if kind == "embedded" else str(shards)
            packing = not KINDS[kind].packs
            options = {"path": path, "packing": packing, "held_out": 0, "sequence_length": length}
            with case(kind):
                for row in rows(load(kind, **options).train):
                    check_contexts(row)


def check_contexts(row):
    """The tokens that a target is predicted from are there, and are of the target's document."""
    tokens, segments = row["tokens"], row["segments"]
    # the end-of-text token is of the document before it
    document = np.where(tokens == 0, np.roll(tokens, 1), tokens)
    for at in np.flatnonzero(row["mask"]):
        context = np.flatnonzero(segments[: at + 1] == segments[at])
        assert segments[at] > 0
        assert set(document[context]) == {document[at + 1]}


def test_token_shards_give_the_same_examples_as_the_text(folder, tokens, bpe):
    file = f"{tokens}/tokenizer.json"
    options = {"packing": True, "vocab_size": 300}
    text = load("text", path=str(folder), tokenizer=file, held_out=0.1, **options)
    shards = load("tokens", path=tokens, **options)
    assert shards.digest == text.digest
    assert shards.tokenizer.digest == text.tokenizer.digest == bpe.digest
    assert shards.description == text.description.replace(file, "bpe")
    for one, other in ((shards.train, text.train), (shards.held_out, text.held_out)):
        assert one.settings == other.settings
        for row, expected in zip(rows(one), rows(other), strict=True):
            for name in row:
                np.testing.assert_array_equal(row[name], expected[name])
    loader = make_loader(shards.train, global_batch_size=4, seed=1)
    loader.set_state(make_loader(text.train, global_batch_size=4, seed=1).get_state())


def test_text_for_models_with_an_encoder(folder, tokens):
    lengths = {"sequence_length": 48, "target_length": 24}
    text = {"path": str(folder), "held_out": 0.1}
    for kind, options in (("text", text), ("tokens", {"path": tokens})):
        data = load(kind, vocab_size=400, **lengths, **options)
        assert set(data.train[0]) == {"inputs", "inputs_mask", "targets", "mask"}
        assert 399 in data.train[0]["inputs"]
        assert len(data.held_out) > 0
    with refused("too few sentinels", error=ConfigError):
        load("text", vocab_size=256, **lengths, **text)


def test_special_tokens_that_a_text_spells_are_counted_and_parsed(tmp_path, bpe):
    (tmp_path / "tokenizer.json").write_bytes(bpe.files["tokenizer.json"])
    (tmp_path / "a.txt").write_text(END.join(f"document {number} is here" for number in range(9)))
    options = {"path": str(tmp_path / "a.txt"), "tokenizer": str(tmp_path), "held_out": 0}
    text = load("text", **options)
    assert "1 documents" in text.description
    assert "8 spellings of special tokens read as text (special_tokens)" in text.description
    assert (np.concatenate([row["tokens"] for row in rows(text.train)]) == bpe.end).sum() == 0
    tokens = load("text", special_tokens="tokens", **options)
    assert "9 documents" in tokens.description
    assert "8 spellings of special tokens read as tokens (special_tokens)" in tokens.description
    expected = np.concatenate(
        [[*bpe.encode(f"document {number} is here"), bpe.end] for number in range(9)]
    )
    found = np.concatenate([row["tokens"][:-1] for row in rows(tokens.train)])
    np.testing.assert_array_equal(found, expected[: len(found)])
    # one document, of which nothing is split off, differs by its tokens
    (tmp_path / "a.txt").write_text(f"document {END}" + "is here " * 50)
    assert len({load("text", special_tokens=how, **options).digest for how in HOWS}) == 2
    # as shards, and a folder of the others
    to = tmp_path / "shards"
    words = ["tokenize", options["path"], "--to", str(to), "--held-out", "0"]
    words += ["--tokenizer", options["tokenizer"]]
    assert main([*words, "--special-tokens", "tokens"]) == 0
    shards = load("tokens", path=str(to))
    assert shards.digest == load("text", special_tokens="tokens", **options).digest
    assert "read as tokens" in shards.description
    assert main(words) == 2
    # and instructions
    records = [{"prompt": f"say{END}", "completion": f"it{END}"}] * 3
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    options["path"] = str(tmp_path / "a.jsonl")
    found = {how: load("instructions", special_tokens=how, **options) for how in HOWS}
    assert all(
        f"6 spellings of special tokens read as {how}" in found[how].description for how in HOWS
    )
    assert found["text"].digest != found["tokens"].digest
    example = found["tokens"].train.encoded[0]
    assert example.prompt.tolist() == [*bpe.encode("say"), bpe.end]
    assert example.answer.tolist() == [*bpe.encode("it"), bpe.end]
    fields = {"where": "data.special_tokens", "got": "bytes"}
    with refused("no special tokens", error=ConfigError, **fields):
        load("embedded", special_tokens="tokens")


HOWS = ("text", "tokens")


def test_nothing_is_held_out_of_too_little_text(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh" * 10)
    assert load("text", path=str(tmp_path)).held_out is None
    data = load("text", path=str(tmp_path), held_out=0)
    assert data.held_out is None
    assert data.tokenizer.decode(data.train[0]["tokens"]).startswith("abcdefgh")
    options = {"path": str(tmp_path), "target_length": 8, "vocab_size": 300}
    assert load("text", held_out=0.15, **options).held_out is None  # 13 tokens; inputs need 17
    assert load("text", held_out=0.2, **options).held_out is not None


def test_instructions():
    data = load("instructions", sequence_length=512)
    assert set(data.train[0]) == {"tokens", "segments", "positions", "mask"}
    assert data.held_out is not None
    start = "instructions: 211 instructions, 10 of them held out, the others in "
    assert data.description.startswith(start)
    assert "rows (tokenizer bytes)" in data.description
    assert data.tokenizer.decode(data.held_out[0]["tokens"]).startswith(PROMPT[:40])
    pairs = load("instructions", sequence_length=512, target_length=64)
    assert set(pairs.train[0]) == {"inputs", "inputs_mask", "targets", "mask"}
    assert pairs.digest == data.digest


def test_instructions_that_are_too_long_are_counted(tmp_path):
    records = [{"instruction": "a" * (150 * (n % 10 == 9)), "output": "b"} for n in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    options = {"path": str(tmp_path / "a.jsonl"), "held_out": 0.1}
    data = load("instructions", too_long="skip", sequence_length=200, **options)
    assert data.held_out is None
    assert "2 too long" in data.description
    with refused("no instruction fits", error=ConfigError, expected="at least 1"):
        load("instructions", sequence_length=20, **options)


def test_instructions_that_are_not_utf8_are_skipped_or_repaired(tmp_path):
    valid, invalid = (b'{"instruction": "%s", "output": "b"}' % text for text in (b"a", b"\xff"))
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*[valid] * 4, invalid]))
    options = {"path": str(tmp_path / "a.jsonl"), "sequence_length": 200}
    where = f"{tmp_path}/a.jsonl, line 5"
    with refused("not UTF-8", error=DamageError, where=where, fix="set data.invalid"):
        load("instructions", **options)
    skipped = load("instructions", invalid="skip", **options).description
    assert "4 instructions" in skipped
    assert skipped.endswith("; skipped or repaired: 1 not UTF-8")
    assert "5 instructions" in load("instructions", invalid="replace", **options).description


def test_datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    records = [{"body": f"text {number} " * 9} for number in range(30)]
    (tmp_path / "set" / "train.json").write_text("\n".join(map(json.dumps, records)))
    data = load("datasets", path=str(tmp_path / "set"), field="body")
    assert data.description.startswith("set (train): ")
    assert "30 documents" in data.description
    text = data.tokenizer.decode(np.concatenate([row["tokens"][:-1] for row in rows(data.train)]))
    assert text.startswith(records[0]["body"] + "\0" + records[1]["body"] + "\0")


def test_drawn_images():
    data = load("images", images=80, seed=3, classes=8)
    assert (len(data.train), len(data.held_out)) == (80, 4)
    assert "in 8 classes" in data.description
    assert data.tokenizer is None
    held_out = {row["images"].tobytes() for row in rows(data.held_out)}
    assert not held_out & {row["images"].tobytes() for row in rows(data.train)}
    assert data.digest != load("images", images=80, seed=4).digest
    assert data.digest != load("images", images=81, seed=3).digest
    where = "model.classes"
    with refused("too few classes", error=ConfigError, where=where, expected="at least 8"):
        load("images", classes=7)


def test_images_from_a_file(tmp_path):
    images = np.arange(40 * 12, dtype=np.uint16).astype(np.uint8).reshape(40, 2, 2, 3)
    path = str(tmp_path / "a.npz")
    np.savez(path, images=images, labels=np.arange(40) % 5)
    data = load("images", path=path)
    assert (len(data.train), len(data.held_out)) == (38, 2)
    np.testing.assert_array_equal(data.held_out[1]["images"], images[39])
    assert data.description == "a.npz: 38 images of 2x2 in 5 classes, and 2 held out"
    with refused("too few classes", error=ConfigError):
        load("images", path=path, classes=4)


def test_every_kth_index_is_held_out_if_that_makes_two():
    assert [part.tolist() for part in split_indices(8, 0.25)] == [[0, 1, 2, 4, 5, 6], [3, 7]]
    assert [part.tolist() for part in split_indices(6, 0.25)] == [[0, 1, 2, 3], [4, 5]]
    assert [part.tolist() for part in split_indices(3, 0)] == [[0, 1, 2], []]


def test_invalid_options_are_refused():
    cases = [
        ("txt", {}, {"where": "data.kind", "fix": "did you mean 'text'"}),
        ("text", {}, {"what": "kind and path do not go together", "where": "data.path"}),
        ("tokens", {}, {"what": "kind and path do not go together"}),
        ("embedded", {"path": "x"}, {"what": "do not go together", "fix": "leave data.path out"}),
        (
            "embedded",
            {"vocab_size": 100},
            {"where": "model.vocab_size", "expected": "at least 256"},
        ),
        (
            "embedded",
            {"vocab_size": 100, "weights": "theirs"},
            {
                "where": "model.weights",
                "expected": "at least 256",
                "got": "100, and ids up to 255 in the tokenizer bytes; theirs",
                "fix": "set model.vocab_size to 256",
            },
        ),
        ("embedded", {"tokenizer": "nowhere"}, {"what": "no such tokenizer"}),
        (
            "instructions",
            {"too_long": "wrap"},
            {"where": "data.too_long", "expected": "truncate, skip"},
        ),
        (
            "images",
            {"seed": -1},
            {"what": "seed is out of range", "where": "train.seed", "expected": "0 to 2**32 - 1"},
        ),
        ("embedded", {"seed": -1, "target_length": 8}, {"what": "seed is out of range"}),
        ("embedded", {"target_length": 8, "packing": True}, {"what": "packing would be ignored"}),
        ("instructions", {"split": "test"}, {"what": "split would be ignored", "got": "test"}),
        (
            "instructions",
            {"split": "test", "path": "x.json"},
            {"what": "split would be ignored", "got": "test"},
        ),
    ]
    with collected() as case:
        for kind, options, says in cases:
            with case((kind, options)), refused(error=ConfigError, **fields(says)):
                load(kind, **options)


def test_options_that_differ_from_the_shards_are_refused(tokens):
    for options, says in (
        ({"tokenizer": "bytes"}, {"what": "of another tokenizer", "got": "bytes"}),
        ({"held_out": 0.2}, {"what": "split otherwise", "expected": "0.1", "got": "0.2"}),
        ({"vocab_size": 200}, {"where": "model.vocab_size", "got": "in the tokens"}),
    ):
        with refused(error=ConfigError, **fields(says)):
            load("tokens", path=tokens, **options)
    assert len(load("tokens", path=tokens, held_out=0.1, tokenizer=tokens).train) > 0


OTHER = {
    "field": "body",
    "invalid": "skip",
    "packing": True,
    "special_tokens": "tokens",
    "split": "test",
    "tokenizer": "t",
    "too_long": "skip",
}


def test_a_kind_is_described_with_its_keys():
    """In `--help` and on the page; keys that a kind lists are options."""
    page = (Path(__file__).parents[2] / "docs" / "models-and-data.md").read_text()
    names = {option.name for option in dataclasses.fields(DataOptions)}
    assert set(OTHER) == {key for kind in KINDS.values() for key in kind.keys}
    for name, kind in KINDS.items():
        assert re.search(rf"\b{name}: ", field_comments(DataOptions)["kind"]), name
        assert f"`{name}`" in page, name
        assert names.issuperset(kind.keys), name
        assert kind.tasks, name


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_a_kind_would_ignore_are_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    record = dict.fromkeys(("text", "body", "instruction", "output"), "a text") | {"input": ""}
    # an existing folder, or the hub would be asked for it; the cache is not in it
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "records.jsonl").write_text(json.dumps(record) + "\n")
    path = None if KINDS[kind].path == "unused" else str(tmp_path / "texts")
    for key, value in OTHER.items():
        told = None
        try:
            load(kind, path=path, **{key: value})
        except ConfigError as error:
            told = (error.what, error.where, error.got, error.fix)
        ignored = (f"{key} would be ignored", f"data.{key}", str(value), "leave it out")
        assert (told == ignored) == (key not in KINDS[kind].keys), key
