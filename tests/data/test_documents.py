"""Documents: what is read and in which order, what is held out, and every fault with its place."""

import bz2
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import sys
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from collected import collected
from corpora import documents_of
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import fields, refused

from fsdp_jax.data.documents import (
    dataset_documents,
    embedded_documents,
    open_documents,
    split_documents,
    survey,
)
from fsdp_jax.data.files import EMBEDDED_LIMIT, Skipped
from fsdp_jax.data.images import load_images
from fsdp_jax.data.instructions import load_instructions
from fsdp_jax.data.records import read_dataset
from fsdp_jax.data.tokenizer import load_tokenizer
from fsdp_jax.errors import ConfigError, DamageError, MissingPackageError


def read(documents):
    skipped = Skipped()
    texts = list(documents.read(skipped))
    return texts, {reason: count for reason, count in skipped.items() if count}


def test_the_embedded_text_is_library_source_and_deterministic():
    found = survey(embedded_documents())
    assert found == survey(embedded_documents())
    assert 0.5 * EMBEDDED_LIMIT < found.characters <= EMBEDDED_LIMIT
    assert found.documents > 100
    assert "def " in next(embedded_documents().read(Skipped()))


def test_a_file_is_a_document_whatever_its_name(tmp_path):
    (tmp_path / "notes").write_bytes(b"one\r\ntwo")
    assert read(open_documents(tmp_path / "notes")) == (["one\r\ntwo"], {})


def test_a_folder_is_its_files_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "deep.md").write_text("deep")
    (tmp_path / "c.jsonl").write_text('{"text": "one", "id": 1}\n\n{"id": 2, "text": "tw\\u00f6"}')
    (tmp_path / "d.json").write_text('\ufeff[{"text": "three"}, {"text": ""}]')
    (tmp_path / "weights.bin").write_bytes(b"\xff")
    (tmp_path / "e.txt").write_text(" \n")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / "loop").symlink_to(tmp_path)
    texts, skipped = read(open_documents(tmp_path))
    assert texts == ["deep", "text", "one", "twö", "three"]
    counted = {"empty": 2, "hidden or linked": 2, "blank lines": 1, "not read (*.bin)": 1}
    assert skipped == counted
    said = "1 blank lines, 2 empty, 2 hidden or linked, 1 not read (*.bin)"
    assert str(Skipped(skipped)) == said


def test_records_are_read_from_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "1\\n2"}\r\n{"text": "3"}')
    assert read(open_documents(tmp_path))[0] == ["1\n2", "3"]
    (tmp_path / "a.jsonl").write_text('{"body": "yes", "text": "no"}\n')
    assert read(open_documents(tmp_path, field="body")) == (["yes"], {})


LINES = b'{"text": "one"}\n{"text": "two"}\n'
LIST = b'[{"text": "one"},\n {"text": "two"}]'


def zstandard(content):
    import pyarrow

    return pyarrow.compress(content, codec="zstd", asbytes=True)


def test_a_format_is_told_by_content_and_by_a_suffix_in_any_case(tmp_path):
    cases = [
        *((name, LINES) for name in ("a.jsonl", "A.JSONL", "a.ndjson", "a.Json", "lines", "a.dat")),
        *((name, LIST) for name in ("a.json", "a.JSON", "a.jsonl")),
        ("a.jsonl", b"\xef\xbb\xbf" + LINES),
        ("a.jsonl", b"\xef\xbb\xbf\n" + LINES),
        ("lines", b"\xef\xbb\xbf" + LINES),
        ("a.json", b"\xef\xbb\xbf \n" + LIST),
        *((f"a.jsonl{name}", pack(LINES)) for name, pack in PACKED.items()),
        ("a.JSON.GZ", gzip.compress(LIST)),
        ("a.gz", gzip.compress(LINES)),
        ("a.jsonl", gzip.compress(LINES)),  # whose suffix was lost
        ("a.jsonl.gz", LINES),  # unpacked on its way
        ("a.jsonl.gz", gzip.compress(LINES[:16]) + gzip.compress(LINES[16:])),
    ]
    with collected() as case:
        for number, (name, content) in enumerate(cases):
            folder = tmp_path / str(number)
            folder.mkdir()
            with case((name, content)):
                (folder / name).write_bytes(content)
                texts, skipped = read(open_documents(folder / name))
                assert texts == ["one", "two"]
                assert skipped.keys() <= {"blank lines"}
    (tmp_path / "a.TXT").write_bytes(b"\xef\xbb\xbf" + LINES)
    assert read(open_documents(tmp_path / "a.TXT"))[0] == [LINES.decode()]
    records = b'{"prompt": "a", "completion": "b"}\n'
    for name in ("a.JSONL", "a.ndjson.gz", "lines"):
        (tmp_path / name).write_bytes(gzip.compress(records))
        assert len(load_instructions(str(tmp_path / name), Skipped())) == 1


PACKED = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard,
}


def test_what_is_not_read_of_a_folder_is_counted_or_refused(tmp_path):
    (tmp_path / "README.md").write_text("of the data")
    for number in range(3):
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "rows.Parquet").write_bytes(b"PAR1")
    (tmp_path / "LICENSE").write_text("mine")
    (tmp_path / "__pycache__").mkdir()
    for number in range(9):
        (tmp_path / "__pycache__" / f"{number}.pyc").write_bytes(b"")
    texts, skipped = read(open_documents(tmp_path))
    assert texts == 3 * ["one", "two"] + ["of the data"]
    assert skipped == {"not read (*.parquet)": 1, "not read (*, no suffix)": 1}
    for number in range(3):
        (tmp_path / f"{number}.parquet").write_bytes(b"PAR1")
    got = "4 read, 1 not read (*, no suffix), 4 not read (*.parquet)"
    with refused("most files", error=ConfigError, got=got, fix="data.kind to datasets"):
        open_documents(tmp_path)


def test_what_is_no_text_by_its_content_is_refused_whatever_data_invalid_says(tmp_path):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a.jsonl"))
    cases = [
        (b"PAR1rows", {"got": "a parquet table", "fix": "data.kind to datasets"}),
        (b"PK\3\4", "a zip archive"),
        (b"%PDF-1.4", "a PDF"),
        (archive.getvalue(), "a tar archive"),
    ]
    (tmp_path / "a.CSV.gz").write_bytes(gzip.compress(b"text\none\n"))
    with refused("is not text", error=ConfigError, got="a table", fix="data.kind to datasets"):
        read(open_documents(tmp_path / "a.CSV.gz"))
    (tmp_path / "a.CSV.gz").unlink()
    damage = {"error": DamageError, "what": "a compressed file is damaged", "where": "./a.jsonl"}
    cases += [(pack(LINES * 99)[:-12], damage) for pack in PACKED.values()]
    with collected() as case:
        for content, says in cases:
            (tmp_path / "a.jsonl").write_bytes(content)
            for invalid in ("error", "replace", "skip"):
                with case((content, invalid)):
                    said = {"error": ConfigError} | fields(says, tmp_path)
                    with refused(**said):
                        read(open_documents(tmp_path, invalid=invalid))


FAULTS = [
    (
        "a.jsonl",
        b'{"text": "x"}\n{"text": \n',
        {"error": DamageError, "what": "not JSON", "where": "./a.jsonl, line 2"},
    ),
    (
        "a.jsonl",
        b'{"text": "x"}\n[1]\n',
        {
            "error": DamageError,
            "what": "not an object",
            "where": "./a.jsonl, line 2",
            "got": "a list",
        },
    ),
    (
        "a.jsonl",
        b'{"txt": "x"}\n',
        {"what": "lacks a field", "where": "./a.jsonl, line 1", "got": "'txt'", "fix": "did you"},
    ),
    (
        "a.jsonl",
        b'{"text": null}\n',
        {"what": "not text", "where": "./a.jsonl, line 1, field 'text'", "got": "null"},
    ),
    ("a.jsonl", b'{"text": 7}\n', "a number"),
    ("a.jsonl", b"{}\n", "an empty object"),
    (
        "a.jsonl",
        b'{"text": "x"}\n{"text": "\xff"}\n',
        {
            "error": DamageError,
            "what": "not UTF-8",
            "where": "./a.jsonl, line 2",
            "got": "0xff at offset 24",
        },
    ),
    (
        "a.jsonl",
        b'{"text": "a\\ud800"}\n',
        {
            "error": DamageError,
            "what": "not UTF-8",
            "where": "./a.jsonl, line 1, field 'text'",
            "expected": "text",
            "got": "U+D800, at character 1",
            "fix": "repair the record: it has half of a surrogate pair; or set data.invalid",
        },
    ),
    (
        "a.jsonl",
        b"[" * 100_000,
        {"error": DamageError, "what": "not JSON", "where": "./a.jsonl, line 1"},
    ),
    (
        "a.json",
        b'[\n{"text": "x"},\n{]',
        {"error": DamageError, "what": "not JSON", "where": "./a.json, line 3"},
    ),
    (
        "a.json",
        b'{\n"text": "x"}',
        {"error": DamageError, "where": "./a.json, line 1", "expected": "one list of objects, or"},
    ),
    ("a.json", b'[{"text": "x"}, {}]', {"where": "./a.json, record 2"}),
    (
        "a.txt",
        b"abc\xe9",
        {
            "error": DamageError,
            "what": "not UTF-8",
            "where": "./a.txt",
            "got": "byte 0xe9 at offset 3",
            "fix": "data.invalid",
        },
    ),
]


def test_faults_are_reported_with_their_place(tmp_path):
    with collected() as case:
        for number, (name, content, says) in enumerate(FAULTS):
            folder = tmp_path / str(number)
            folder.mkdir()
            with case(content):
                (folder / name).write_bytes(content)
                with refused(**{"error": ConfigError} | fields(says, folder)):
                    read(open_documents(folder))


@pytest.mark.parametrize(
    ("invalid", "expected"),
    [
        ("replace", (["abc\ufffd", "\ufffd", "x\ufffd", "ok"], {"with invalid UTF-8 replaced": 3})),
        ("skip", (["ok"], {"not UTF-8": 3})),
    ],
)
def test_text_that_is_not_utf8_is_repaired_or_skipped(tmp_path, invalid, expected):
    (tmp_path / "a.txt").write_bytes(b"abc\xe9")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\xff"}\n{"text": "x\\ud800"}\n{"text": "ok"}\n')
    assert read(open_documents(tmp_path, invalid=invalid)) == expected


def test_missing_empty_and_unreadable_corpora_are_refused(tmp_path, monkeypatch):
    with refused("does not exist", error=ConfigError, where="data.path", got="nowhere"):
        open_documents(tmp_path / "nowhere")
    (tmp_path / ".hidden.txt").write_text("hidden")
    endings, got = "*.json, *.jsonl, *.ndjson, *.md", "1 hidden or linked"
    with refused("is empty", error=ConfigError, expected=endings, got=got):
        open_documents(tmp_path)
    (tmp_path / "blank.txt").write_text(" ")
    documents = open_documents(tmp_path)
    with refused("is empty", error=ConfigError, got="1 empty, 1 hidden or linked skipped"):
        survey(documents)
    with refused(error=ConfigError, expected="error, replace, skip"):
        open_documents(tmp_path, invalid="maybe")

    def refuse(path):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr("fsdp_jax.data.files.open_regular", refuse)
    with refused("cannot be read", error=ConfigError, where=str(tmp_path / "blank.txt"), got="no"):
        read(documents)


def test_the_digest_depends_on_where_documents_end():
    corpora = (["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"])
    assert len({survey(documents_of(texts)).digest for texts in corpora}) == 4
    content = b"\2\0\0\0\0\0\0\0ab\1\0\0\0\0\0\0\0c"
    assert survey(documents_of(["ab", "c"])).digest == hashlib.sha256(content).hexdigest()


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text(min_size=1), min_size=1, max_size=30), share=st.floats(0, 0.5))
def test_every_character_is_in_one_part(texts, share):
    split = split_documents(documents_of(texts), held_out=share)
    train, held_out = list(split.read("train")), list(split.read("held_out"))
    assert all(train)
    assert all(held_out)
    if split.whole:
        stride = round(min(1 / share, 1e9)) if share else len(texts) + 1
        assert held_out == texts[stride - 1 :: stride]
        assert train == [text for number, text in enumerate(texts, 1) if number % stride]
        assert len(held_out) != 1
    else:
        assert "".join(train + held_out) == "".join(texts)
        assert len("".join(held_out)) == pytest.approx(share * len("".join(texts)), abs=1)


@pytest.mark.parametrize("share", [0.5, 0.1])
@pytest.mark.parametrize("change", ["shorter", "longer", "another line"])
def test_a_text_that_changes_between_two_passes_is_damage(tmp_path, change, share):
    file = tmp_path / "a.jsonl"
    lines = [f'{{"text": "document {number}"}}\n' for number in range(6)]
    file.write_text("".join(lines))
    split = split_documents(open_documents(file), held_out=share)
    assert len("".join(list(split.read("train")) + list(split.read("held_out")))) == 60
    changed = {
        "shorter": lines[:4],
        "longer": [*lines, lines[0]],
        "another line": lines[:5] + lines[:1],
    }
    file.write_text("".join(changed[change]))
    with refused("the text has changed while it was read", error=DamageError) as damage:
        list(split.read("train"))
    assert damage.value.expected.startswith("6 documents, digest ")


def test_a_held_out_share_out_of_range_is_refused():
    with collected() as case:
        for share in [-0.1, 0.6, float("nan")]:
            fields = {"where": "data.held_out", "expected": "0 to 0.5"}
            with case(share), refused(error=ConfigError, **fields):
                split_documents(documents_of(["a"]), held_out=share)


ROWS = [{"text": f"text {number}", "id": number} for number in range(5)] + [{"text": " ", "id": 5}]


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """Hugging Face's package, offline and with its cache in the test's folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return datasets


def test_datasets_are_read_from_files_and_folders(datasets, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / "train.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    saved = str(tmp_path / "saved")
    both = str(tmp_path / "both")
    with warnings.catch_warnings(action="ignore"):  # of the package, while the test prepares
        datasets.Dataset.from_list(ROWS).save_to_disk(saved)
        datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
        datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(both)
    expected = ([f"text {number}" for number in range(5)], {"empty": 1})
    for path in (file, folder, saved, tmp_path / "rows.parquet"):
        assert read(dataset_documents(str(path))) == expected
    assert len(read(dataset_documents(both, split="test"))[0]) == 5
    (tmp_path / "a.txt").write_text("a")
    for name, options, says in (
        (both, {}, {"where": "./both, split train", "got": "no split 'train'"}),
        (
            saved,
            {"field": "body"},
            {
                "where": "./saved, split train, row 1",
                "expected": "a field 'body'",
                "got": "'text', 'id'",
            },
        ),
        (
            saved,
            {"field": "id"},
            {"where": "./saved, split train, row 1, field 'id'", "got": "a number"},
        ),
        (
            str(file),
            {"split": "test"},
            {"what": "cannot be read", "where": "./folder/train.jsonl, split test"},
        ),
        (
            str(tmp_path / "a.txt"),
            {},
            {"what": "not a dataset", "expected": "*.jsonl, *.ndjson, *.parquet"},
        ),
    ):
        with refused(error=ConfigError, **fields(says, tmp_path)):
            read(dataset_documents(name, **options))


def test_bytes_in_a_dataset_are_repaired_or_skipped(datasets, tmp_path):
    import pyarrow

    offsets, content = np.array([0, 1, 4], np.int32), b"ab\xffc"
    buffers = [None, *map(pyarrow.py_buffer, (offsets, content))]
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    lists = pyarrow.ListArray.from_arrays(np.array([0, 1, 2], np.int32), texts)
    table = pyarrow.table({"text": texts, "lists": lists, "blob": pyarrow.array([b"one", b"\xfe"])})
    name = str(tmp_path / "saved")
    with warnings.catch_warnings(action="ignore"):
        datasets.Dataset(table).save_to_disk(name)
    where, got = f"{name}, split train, row 2, field 'text'", "byte 0xff at offset 1"
    with refused("not UTF-8", error=DamageError, where=where, got=got):
        read(dataset_documents(name))
    skipped = {"not UTF-8": 1}
    assert read(dataset_documents(name, invalid="skip")) == (["a"], skipped)
    assert read(dataset_documents(name, field="blob", invalid="skip")) == (["one"], skipped)
    repaired = {"with invalid UTF-8 replaced": 1}
    assert read(dataset_documents(name, invalid="replace")) == (["a", "b\ufffdc"], repaired)
    with refused(
        "not text", error=ConfigError, where=f"{tmp_path}/saved, split train, row 1, field 'lists'"
    ):
        read(dataset_documents(name, field="lists"))
    with refused(error=ConfigError, expected="error, replace, skip"):
        dataset_documents(name, invalid="maybe")


def test_the_error_of_a_dataset_file_is_shown(datasets, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "a\\ud800"}\n')
    with refused("cannot be read", error=ConfigError, got="surrogate"):
        read(dataset_documents(str(tmp_path / "a.jsonl")))


def test_an_unknown_dataset_is_refused(datasets, monkeypatch):
    def refuse(*_):
        raise AssertionError("the test would use the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    where = "nobody/nothing, split train"
    with refused("the dataset cannot be read", error=ConfigError, where=where):
        read(dataset_documents("nobody/nothing"))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(error=MissingPackageError, fix="pip install 'fsdp_jax[hf]'"):
        read(dataset_documents("anything"))


def test_pipes_and_devices_in_place_of_a_corpus_are_refused(tmp_path):
    """A reader that waits for a writer would wait forever."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero")):
        with refused("neither a file nor a folder", error=ConfigError, got=str(path)):
            open_documents(path)
    (tmp_path / "text.txt").write_text("text")
    skipped = Skipped()
    assert list(open_documents(tmp_path).read(skipped)) == ["text"]
    assert str(skipped) == "1 hidden or linked"
    with refused(error=ConfigError, got="a pipe, not a file"):
        load_instructions(str(tmp_path / "pipe.jsonl"), Skipped())
    with refused(error=DamageError, got="a pipe, not a file"):
        load_images(str(tmp_path / "pipe.jsonl"))
    with refused("tokenizer cannot be read", error=DamageError, got="a pipe, not a file"):
        load_tokenizer(tmp_path / "pipe.jsonl")
    with refused("not a dataset", error=ConfigError):
        list(read_dataset(str(tmp_path / "pipe.jsonl"), "train"))


def test_records_that_readers_disagree_on_are_refused(tmp_path):
    cases = [
        (b'{"text": "a", "text": "b"}', "the key 'text' twice in one object"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b'{"text": "a", "n": ' + b"[" * 10**5, "too many nested lists or objects"),
    ]
    where = f"{tmp_path}/a.jsonl, line 2"
    with collected() as case:
        for line, says in cases:
            with case(line):
                (tmp_path / "a.jsonl").write_bytes(b'{"text": "a", "n": NaN}\n' + line)
                with refused("not JSON", error=DamageError, where=where, got=says):
                    read(open_documents(tmp_path / "a.jsonl"))
