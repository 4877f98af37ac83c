"""Token shards: the same bytes however often writing stopped, and files that change while read."""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from collected import collected
from corpora import TEXTS, documents_of
from flips import flip_byte
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from fsdp_jax.data import tokenize_shards
from fsdp_jax.data.documents import split_documents
from fsdp_jax.data.shard_manifest import PARTS
from fsdp_jax.data.shards import TokenShards
from fsdp_jax.data.tokenize_shards import read_plan, tokenize
from fsdp_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
from fsdp_jax.data.windows import Windows, encode_stream
from fsdp_jax.errors import ConfigError, DamageError, DirectoryLostError
from fsdp_jax.io.digests import sealed_text

SHARD = 100  # tokens: several documents
MIB = 1 << (20 if sys.platform == "darwin" else 10)  # in the units of ru_maxrss


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def times(folder, pattern="*"):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob(pattern)}


@pytest.fixture(scope="session")
def split(documents):
    return split_documents(documents, held_out=0.1)


@pytest.fixture(scope="session", params=["bytes", "bpe"])
def tokenizer(request, bpe):
    return ByteTokenizer() if request.param == "bytes" else bpe


@pytest.fixture(scope="session")
def written(split, tokenizer, tmp_path_factory):
    """Finished shards, which no test changes."""
    folder = tmp_path_factory.mktemp("written")
    tokenize(split, tokenizer, folder, shard_tokens=SHARD)
    return folder


@pytest.fixture(scope="session")
def by_bpe(split, bpe, tmp_path_factory):
    """Finished shards of `bpe`, which no test changes."""
    folder = tmp_path_factory.mktemp("by_bpe")
    tokenize(split, bpe, folder, shard_tokens=SHARD)
    return folder


@pytest.fixture
def copied(by_bpe, tmp_path):
    """A copy of finished shards to change."""
    return shutil.copytree(by_bpe, tmp_path / "copied")


def test_shards_hold_the_same_stream_as_memory(split, tokenizer, written):
    shards = TokenShards.open(written)
    assert sum(shard.part == "train" for shard in shards.manifest.shards) > 3
    for part in PARTS:
        expected = encode_stream(split.read(part), tokenizer)
        tokens, starts = shards.tokens(part), shards.starts(part)
        np.testing.assert_array_equal(tokens[:], expected.tokens)
        np.testing.assert_array_equal(starts, expected.starts)
        from_disk = Windows(tokens, sequence_length=7, starts=starts)
        from_memory = Windows(expected.tokens, sequence_length=7, starts=starts)
        for index in range(len(from_memory)):
            for name, array in from_memory[index].items():
                np.testing.assert_array_equal(from_disk[index][name], array)
                assert from_disk[index][name].dtype == array.dtype
        assert shards.manifest.tokens(part) == len(expected.tokens)
        assert shards.manifest.documents(part) == len(expected.starts)
    assert shards.tokenizer.digest == tokenizer.digest
    assert shards.tokenizer.end == tokenizer.end


def test_the_manifest_describes_the_folder(split, written, tokenizer):
    body = json.loads((written / "manifest.json").read_text())
    shards = TokenShards.open(written)
    assert body["plan"]["corpus"] == split.survey.digest
    assert body["plan"]["documents"] == split.survey.documents == 40
    assert body["plan"]["tokenizer_digest"] == tokenizer.digest
    assert body["plan"]["dtype"] == "<u2"
    assert body["sums"]["held_out"]["documents"] == 4
    assert body["largest"] == max(int(shards.tokens(part)[:].max()) for part in PARTS)
    names = {
        f"{shard['name']}{suffix}"
        for shard in body["shards"]
        for suffix in (".tokens", ".documents")
    }
    assert set(contents(written)) == names | {"manifest.json"} | set(tokenizer.files)


@settings(max_examples=10, deadline=None)
@given(data=st.data(), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_any_slice_is_read_across_shards(tmp_path_factory, data, lengths):
    texts = ["x" * (n - 1) + "y" for n in lengths]
    folder = tmp_path_factory.mktemp("slices")
    split = split_documents(documents_of(texts), held_out=0)
    tokenize(split, ByteTokenizer(), folder, shard_tokens=7)
    tokens, expected = (
        TokenShards.open(folder).tokens("train"),
        encode_stream(texts, ByteTokenizer()).tokens,
    )
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(0, len(expected) + 3))
    np.testing.assert_array_equal(tokens[start:stop], expected[start:stop])
    assert len(tokens) == len(expected)
    assert tokens[start:stop].dtype == np.int32


class Failing:
    """A tokenizer that fails at its n-th batch."""

    def __init__(self, tokenizer, after):
        self.tokenizer, self.left = tokenizer, after

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def encode_batch(self, texts):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("pulled the plug")
        return self.tokenizer.encode_batch(texts)


@pytest.mark.parametrize("after", [0, 5, 30, 39])
def test_a_run_resumed_after_a_failed_document_writes_the_same(
    split, bpe, by_bpe, tmp_path, monkeypatch, after
):
    monkeypatch.setattr("fsdp_jax.data.tokenizer.BATCH", 1)  # each document is a batch of its own
    with pytest.raises(RuntimeError, match="pulled the plug"):
        tokenize(split, Failing(bpe, after), tmp_path, shard_tokens=SHARD)
    with refused("no finished token shards", error=ConfigError, fix="run it again"):
        TokenShards.open(tmp_path)
    done = times(tmp_path, "*.tokens")
    tokenize(split, bpe, tmp_path, shard_tokens=SHARD)
    assert contents(tmp_path) == contents(by_bpe)
    assert done.items() <= times(tmp_path, "*.tokens").items()  # complete shards are kept
    assert bool(done) == (after >= 5)


@pytest.mark.parametrize("renamed", [True, False])
def test_a_run_resumed_after_a_failed_rename_writes_the_same(bpe, tmp_path, monkeypatch, renamed):
    """Every rename fails once, before or after it takes place."""
    texts = ["one text", "another", "third"] * 4
    split = split_documents(documents_of(texts), held_out=0.25)
    expected = tmp_path / "expected"
    tokenize(split, bpe, expected, shard_tokens=40)
    rename = Path.rename
    left = 0

    def fail(path, target):
        nonlocal left
        left -= 1
        if left != 0 or renamed:
            rename(path, target)
        if left == 0:
            raise OSError("no power")

    # the first progress, tokenizer, manifest; two files and the progress after each shard
    renames = 3 + 3 * len(list(expected.glob("*.tokens")))
    assert renames > 5
    for number in range(1, renames + 1):
        folder = tmp_path / f"stopped{number}"
        left = number
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", fail)
            with pytest.raises(OSError, match="no power"):
                tokenize(split, bpe, folder, shard_tokens=40)
        tokenize(split, bpe, folder, shard_tokens=40)
        assert contents(folder) == contents(expected)
    left = renames + 1
    monkeypatch.setattr(Path, "rename", fail)
    tokenize(split, bpe, tmp_path / "complete", shard_tokens=40)
    assert left == 1, "there are no more renames"


PROGRAM = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from corpora import TEXTS, documents_of
from fsdp_jax.data import tokenize_shards
from fsdp_jax.data.documents import split_documents
from fsdp_jax.data.tokenize_shards import tokenize
from fsdp_jax.data.tokenizer import train_bpe

def say(line):
    if line.startswith("train-00003"):
        os.kill(os.getpid(), signal.SIGKILL)

split = split_documents(documents_of(TEXTS), held_out=0.1)
tokenize(split, train_bpe(TEXTS, 300), {to!r}, shard_tokens=100, say=say)
"""


@pytest.mark.long
def test_after_a_kill_the_same_bytes_are_written(split, bpe, by_bpe, tmp_path):
    """By a tokenizer that another process has trained, with another seed of its hashes."""
    program = PROGRAM.format(tests=str(Path(__file__).parent), to=str(tmp_path))
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    killed = subprocess.run(
        [sys.executable, "-c", program], check=False, env=environment, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert {"lease.json", "progress.json", "train-00003.tokens"} <= set(contents(tmp_path))
    assert "manifest.json" not in contents(tmp_path)
    assert read_plan(tmp_path).tokenizer_digest == bpe.digest
    lines = []
    tokenize(split, bpe, tmp_path, shard_tokens=SHARD, say=lines.append)
    assert contents(tmp_path) == contents(by_bpe)
    assert "in 4 shards exist already" in lines[0]
    assert lines[1].startswith("train-00004: ")


def test_finished_shards_are_not_written_again(split, tokenizer, written):
    before = times(written)
    manifest = tokenize(split, tokenizer, written, shard_tokens=SHARD)
    assert manifest == TokenShards.open(written).manifest
    assert times(written) == before


@pytest.mark.parametrize("finished", [True, False])
def test_shards_of_another_plan_are_refused(split, documents, bpe, copied, finished):
    if not finished:
        manifest = json.loads((copied / "manifest.json").read_text())
        (copied / "progress.json").write_text(json.dumps(manifest["plan"]))
        (copied / "manifest.json").unlink()
    before = contents(copied)
    other_texts = split_documents(documents_of([*TEXTS[:-1], "!"]), held_out=0.1)
    changes = {
        "corpus": (other_texts, bpe, SHARD),
        "tokenizer_digest": (split, ByteTokenizer(), SHARD),
        "held_out": (split_documents(documents, held_out=0.2), bpe, SHARD),
        "shard_tokens": (split, bpe, SHARD + 1),
    }
    with collected() as case:
        for change, (changed_split, tokenizer, shard_tokens) in changes.items():
            with case(change):
                with refused("another corpus, tokenizer or setting", error=ConfigError) as caught:
                    tokenize(changed_split, tokenizer, copied, shard_tokens=shard_tokens)
                folder, _, names = caught.value.where.partition(": ")
                assert (folder, change in names) == (str(copied), True)
                assert contents(copied) == before


def test_a_folder_with_other_files_is_refused(split, tmp_path):
    (tmp_path / "thesis.txt").write_text("years")
    for target in (tmp_path, tmp_path / "thesis.txt"):
        with refused("holds other files", error=ConfigError, where="--to"):
            tokenize(split, ByteTokenizer(), target)
    assert contents(tmp_path) == {"thesis.txt": b"years"}


def test_a_second_writer_is_refused(split, tmp_path):
    lines = []

    def say(line):
        with refused("another run is writing", error=ConfigError):
            tokenize(split, ByteTokenizer(), tmp_path)
        lines.append(line)

    tokenize(split, ByteTokenizer(), tmp_path, say=say)
    assert len(lines) == 2


def test_damaged_progress_is_refused(split, tmp_path):
    (tmp_path / "progress.json").write_text("{")
    where, fix = str(tmp_path / "progress.json"), "remove the folder"
    with refused("cannot be read", error=DamageError, where=where, fix=fix):
        tokenize(split, ByteTokenizer(), tmp_path)


def test_ids_beyond_the_vocabulary_are_not_written(split, tmp_path):
    class TooSmall(ByteTokenizer):
        vocab_size = 100

    where, what = "document 0 of train-00000", "not in the vocabulary"
    with refused(what, error=ConfigError, where=where, expected="less than 100"):
        tokenize(split, TooSmall(), tmp_path)


def test_large_ids_take_four_bytes(tmp_path):
    class Large(ByteTokenizer):
        vocab_size = 1 << 17
        digest = "large"

        def encode(self, text):
            return super().encode(text) + (1 << 16)

    split = split_documents(documents_of(["ab"]), held_out=0)
    assert tokenize(split, Large(), tmp_path).largest == (1 << 16) + 98
    expected = np.array([65633, 65634, 0], "<u4").tobytes()
    assert (tmp_path / "train-00000.tokens").read_bytes() == expected


def test_a_single_document_is_cut_at_its_end(tmp_path):
    tokenize(
        split_documents(documents_of(["0123456789" * 10]), held_out=0.1), ByteTokenizer(), tmp_path
    )
    shards = TokenShards.open(tmp_path)
    assert [len(shards.tokens(part)) for part in PARTS] == [91, 11]


def test_a_truncated_or_missing_shard_is_named(copied):
    for suffix in (".tokens", ".documents"):
        file = copied / f"train-00001{suffix}"
        content = file.read_bytes()
        size = len(content)
        os.truncate(file, size - 1)
        expected, got = f"{size} bytes", f"{size - 1} bytes"
        with refused(error=DamageError, where=str(file), expected=expected, got=got):
            TokenShards.open(copied)
        file.unlink()
        with refused(error=DamageError, where=str(file), got="no file"):
            TokenShards.open(copied)
        file.write_bytes(content)


def as_of_an_older_release(folder):
    """Takes the digests out of a manifest."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["files"], body["digest"]
    (folder / "manifest.json").write_text(json.dumps(body, indent=1) + "\n")


def test_shards_of_an_older_release_load_with_a_warning(copied):
    expected = TokenShards.open(copied).tokens("train")[:]
    as_of_an_older_release(copied)
    before = contents(copied)
    with pytest.warns(UserWarning, match=r"without digests, so damage goes unseen\n +where: .*\n"):
        shards = TokenShards.open(copied)
    assert shards.manifest.digest is None
    np.testing.assert_array_equal(shards.tokens("train")[:], expected)
    assert contents(copied) == before


def test_a_shard_that_is_cut_short_in_use_is_named(copied):
    """The process would be killed if the file was mapped."""
    file = copied / "train-00001.tokens"
    size = file.stat().st_size
    tokens = TokenShards.open(copied).tokens("train")
    tokens[:]
    os.truncate(file, 20)
    assert len(tokens[:100]) == 100
    expected, got = f"{size:,} bytes", "20 bytes: it was cut short"
    with refused(error=DamageError, where=str(file), expected=expected, got=got):
        tokens[:]


def test_shards_replaced_in_use_are_read_as_they_were_opened(copied):
    tokens = TokenShards.open(copied).tokens("train")
    expected = tokens[:]
    with (copied / "train-00000.tokens").open("ab") as file:
        file.write(b"more")
    (copied / "other").write_bytes(b"\1" * (copied / "train-00001.tokens").stat().st_size)
    (copied / "other").rename(copied / "train-00001.tokens")
    np.testing.assert_array_equal(tokens[:], expected)
    with refused(error=DamageError, where=str(copied / "train-00000.tokens")):
        TokenShards.open(copied)


def test_a_file_of_documents_that_is_cut_short_in_use_is_named(copied):
    shards = TokenShards.open(copied)
    file = copied / "train-00000.documents"
    size = file.stat().st_size
    for cut in (size - 8, size - 3, 0):
        os.truncate(file, cut)
        with pytest.raises(DamageError) as damage:
            shards.starts("train")
        assert (damage.value.where, damage.value.got) == (str(file), f"{cut:,} bytes")


def test_a_folder_that_is_lost_while_it_is_written_is_left_alone(split, tmp_path):
    folder, aside = tmp_path / "shards", tmp_path / "aside"

    def move(line):
        if line.startswith("train-00001"):
            folder.rename(aside)
            shutil.copytree(aside, folder)  # of another process, say
            before.update(contents(folder))

    before = {}
    with refused(error=DirectoryLostError, got=f"the run's own is at {aside}"):
        tokenize(split, ByteTokenizer(), folder, shard_tokens=SHARD, say=move)
    assert contents(folder) == before
    assert "train-00002.tokens" not in contents(aside)


def test_a_damaged_token_is_named_when_it_is_read(copied):
    as_of_an_older_release(copied)
    with (copied / "train-00001.tokens").open("r+b") as file:
        file.seek(2 * 5)
        file.write(b"\xff\xff")
    with pytest.warns(UserWarning, match="without digests"):
        tokens = TokenShards.open(copied).tokens("train")
    first = tokens.shards[0].tokens
    tokens[: first + 5]
    with refused(error=DamageError, where=f"{copied}/train-00001.tokens, token 5", got="id 65535"):
        tokens[first - 3 : first + 9]


def test_a_damaged_manifest_is_refused(tmp_path):
    manifest = tmp_path / "manifest.json"
    bodies = "[]", "{", "{}", '{"plan": {"format": 99}}', '{"plan": {"format": 1}, "shards": []}'
    with collected() as case:
        for body in bodies:
            manifest.write_text(body)
            with case(body), refused(error=DamageError, where=str(manifest), expected="a manifest"):
                TokenShards.open(tmp_path)


def test_every_flipped_bit_is_found_and_its_file_named(copied):
    numbers = random.Random(0)
    for path in sorted(copied.iterdir()):
        content = path.read_bytes()
        for _ in range(5):
            damaged = bytearray(content)
            damaged[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
            path.write_bytes(damaged)
            with refused(error=DamageError, where=str(path)):
                TokenShards.open(copied)
        path.write_bytes(content)
    TokenShards.open(copied)


def test_what_the_disk_changed_as_a_shard_was_written_is_found(split, tmp_path, monkeypatch):
    def spoiled(file):
        file.flush()
        os.pwrite(file.fileno(), b"\x01\x02", 0)

    monkeypatch.setattr(tokenize_shards, "fsync_file", spoiled)
    tokenize(split, ByteTokenizer(), tmp_path, shard_tokens=SHARD)
    with refused("not as it was written", error=DamageError, expected="xxh3"):
        TokenShards.open(tmp_path)


def test_large_shards_are_compared_in_the_background(copied, monkeypatch):
    monkeypatch.setattr("fsdp_jax.data.shards.AT_ONCE", 0)
    intact = TokenShards.open(copied)
    assert intact.check.wait(60)
    intact.check.raise_if_damaged()
    flip_byte(copied / "train-00002.tokens")
    shards = TokenShards.open(copied)
    shards.tokens("train")[:]  # training starts
    assert shards.check.wait(60)
    with refused(error=DamageError, where=str(copied / "train-00002.tokens")):
        shards.check.raise_if_damaged()
    flip_byte(copied / "tokenizer.json")  # read at once, so compared at once
    with refused(error=DamageError, where=str(copied / "tokenizer.json")):
        TokenShards.open(copied)


@pytest.mark.parametrize(
    ("finished", "name"), [(True, "train-00001.tokens"), (False, "held_out-00000.documents")]
)
def test_damaged_shards_are_written_again(split, bpe, by_bpe, copied, finished, name):
    if not finished:
        (copied / "manifest.json").rename(copied / "progress.json")
    flip_byte(copied / name)
    lines = []
    tokenize(split, bpe, copied, shard_tokens=SHARD, say=lines.append)
    assert contents(copied) == contents(by_bpe)
    shard = name.partition(".")[0]
    assert f"{shard} and all after it are written again, as it is damaged" in lines[0]
    assert name in lines[0]
    assert any(line.startswith("train: ") and "exist already" in line for line in lines)
    assert any(line.startswith(f"{shard}: ") for line in lines)
    assert not any(line.startswith("train-00000: ") for line in lines)


def test_a_damaged_tokenizer_beside_shards_is_written_again(split, bpe, by_bpe, copied):
    flip_byte(copied / "tokenizer.json")
    before = times(copied, "*.tokens")
    tokenize(split, bpe, copied, shard_tokens=SHARD)
    assert contents(copied) == contents(by_bpe)
    assert times(copied, "*.tokens") == before


def test_a_resumed_run_writes_the_manifest_of_an_unstopped_one(split, bpe, by_bpe, copied):
    """Its tokenizer is found under another name: in the folder itself."""
    (copied / "manifest.json").rename(copied / "progress.json")
    tokenize(split, load_tokenizer(copied), copied, shard_tokens=SHARD)
    assert contents(copied) == contents(by_bpe)


def test_a_stopped_run_of_an_older_release_starts_over(split, bpe, by_bpe, copied):
    plan = json.loads((copied / "manifest.json").read_text())["plan"]
    (copied / "progress.json").write_text(json.dumps(plan))
    (copied / "manifest.json").unlink()
    flip_byte(copied / "train-00000.tokens")
    tokenize(split, bpe, copied, shard_tokens=SHARD)
    assert contents(copied) == contents(by_bpe)


def changed(**values):
    def change(body, values=values):
        for key, value in values.items():
            *path, last = key.split("__")
            inner = body
            for name in path:
                inner = inner[int(name)] if isinstance(inner, list) else inner[name]
            inner[last] = value

    return change


def test_impossible_manifests_are_refused(copied):
    cases = [
        (changed(plan__vocab_size=-1), "impossible: .*vocab_size"),
        (changed(plan__vocab_size=1 << 60), "impossible: .*vocab_size"),
        (changed(plan__dtype="O"), "impossible: dtype"),
        (changed(plan__end=300_000), "impossible: end"),
        (changed(plan__held_out=7), "impossible: held_out"),
        (changed(plan__shard_tokens=True), r"TokenizePlan: .*another type: \['shard_tokens'\]"),
        (changed(plan__surprise=1), r"TokenizePlan: .*unknown.*\['surprise'\]"),
        (changed(plan=None), "no TokenizePlan"),
        (changed(shards=3), "no list of shards"),
        (changed(shards__0__tokens=-5), "impossible: tokens and documents"),
        (changed(shards__0__tokens=1.5), r"TokenShard: .*\['tokens'\]"),
        (changed(shards__0__documents=10**30), "the sums are not those"),
        (changed(shards__0__part="test"), r"TokenShard: .*\['part'\]"),
        (changed(shards__0__name="../../secret"), "not named in their order"),
        (changed(shards__0__name="train-00001"), "not named in their order"),
        (changed(largest="many"), "impossible: largest"),
        (changed(files={}), "the digests are not those of the shards"),
        (changed(files={"../../secret": {}}), "the digests are not those of the shards"),
        (changed(files=[1]), "the digests are not those of the shards"),
        (
            changed(**{"files__train-00000.tokens": 7}),
            "the digest of train-00000.tokens is not one",
        ),
    ]
    file = copied / "manifest.json"
    before = file.read_text()

    def check(text, says):
        file.write_text(text)
        with refused(error=DamageError, where=str(file)) as caught:
            TokenShards.open(copied)
        assert re.search(says, caught.value.got), caught.value.got

    with collected() as case:
        for change, says in cases:
            body = json.loads(before)
            change(body)
            with case(says):
                check(sealed_text(body), says)
            with case(f"{says}, unsealed"):
                check(json.dumps(body), "its own digest does not fit it")


def test_documents_out_of_order_are_refused(tmp_path):
    with collected() as case:
        for number, starts in enumerate(([1, 5], [0, -3], [0, 9, 4], [0, 10**15])):
            folder, texts = tmp_path / str(number), ["abcd"] * len(starts)
            tokenize(split_documents(documents_of(texts), held_out=0), ByteTokenizer(), folder)
            as_of_an_older_release(folder)
            file = folder / "train-00000.documents"
            file.write_bytes(np.array(starts, "<i8").tobytes())
            with pytest.warns(UserWarning, match="without digests"):
                shards = TokenShards.open(folder)
            expected = "documents in order, from token 0 to "
            with case(starts), refused(error=DamageError, where=str(file), expected=expected):
                shards.starts("train")


def test_pipes_in_place_of_shards_are_refused(copied):
    for name in ("train-00000.tokens", "train-00000.documents", "manifest.json"):
        kept = (copied / name).rename(copied / "kept")
        os.mkfifo(copied / name)
        with refused(error=DamageError, where=str(copied / name)):
            TokenShards.open(copied)
        kept.replace(copied / name)


def test_a_changed_tokenizer_is_refused(split, bpe, copied, tmp_path):
    (copied / "tokenizer.json").write_bytes(bpe.files["tokenizer.json"] + b"\n")
    with refused("not as it was written", error=DamageError, where=str(copied / "tokenizer.json")):
        TokenShards.open(copied)
    as_of_an_older_release(copied)
    with (
        pytest.warns(UserWarning, match="without digests"),
        refused("not the one that encoded", error=DamageError),
    ):
        _ = TokenShards.open(copied).tokenizer
    # another end-of-text token, stated beside the shards
    model = tokenizers.Tokenizer.from_str(bpe.files["tokenizer.json"].decode())
    model.add_special_tokens(["<stop>"])
    folder = tmp_path / "with_stop"
    tokenize(split, HuggingFaceTokenizer(model.to_str().encode(), name="with stop"), folder)
    assert TokenShards.open(folder).tokenizer.end == 0
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    with refused("not the one that encoded", error=DamageError):
        _ = TokenShards.open(folder).tokenizer


def test_the_plan_is_readable_during_and_after_writing(split, bpe, tmp_path):
    assert read_plan(tmp_path) is None
    plans = []
    tokenize(split, bpe, tmp_path, asked=1000, say=lambda _: plans.append(read_plan(tmp_path)))
    assert [plan.asked for plan in [*plans, read_plan(tmp_path)]] == [1000] * 3
    assert tokenize(split, bpe, tmp_path).plan.asked == 1000  # the same tokenizer, by its name


def test_reading_some_rows_does_not_read_the_whole_file(split, tmp_path):
    tokenize(split, ByteTokenizer(), tmp_path, shard_tokens=1 << 20)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    tokens = 1 << 30  # 2 GiB, a sparse file
    manifest["shards"][0]["tokens"] = tokens
    manifest["sums"]["train"]["tokens"] = tokens
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    as_of_an_older_release(tmp_path)
    os.truncate(tmp_path / "train-00000.tokens", 2 * tokens)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.warns(UserWarning, match="without digests"):
        windows = Windows(TokenShards.open(tmp_path).tokens("train"), sequence_length=128)
    rows = [windows[index]["tokens"] for index in range(0, len(windows), len(windows) // 50)]
    assert len(rows) > 50
    assert rows[0].any()
    assert not rows[-1].any()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * MIB
