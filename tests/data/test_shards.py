"""Token shards: the same bytes however often the writing was stopped, read without reading all of
them.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_jax.data.documents import Documents, split_documents
from fsdp_jax.data.shard_writer import plan_of, tokenize
from fsdp_jax.data.shards import PARTS, TokenShards
from fsdp_jax.data.tokenizer import Bytes, HuggingFace, train_bpe
from fsdp_jax.data.windows import Windows, stream_of
from fsdp_jax.errors import ConfigError

few = settings(max_examples=20, deadline=None)
SHARD = 100  # tokens: several documents
MIB = 1 << (20 if sys.platform == "darwin" else 10)  # in the units of ru_maxrss


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def split(documents):
    return split_documents(documents, held_out=0.1)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request, bpe):
    return Bytes() if request.param == "bytes" else bpe


@pytest.fixture
def written(split, tokenizer, tmp_path):
    tokenize(split, tokenizer, tmp_path / "whole", shard_tokens=SHARD)
    return tmp_path / "whole"


def test_shards_hold_the_stream_that_memory_would(split, tokenizer, written):
    shards = TokenShards.open(written)
    assert sum(shard.part == "train" for shard in shards.manifest.shards) > 3
    for part in PARTS:
        expected = stream_of(split.read(part), tokenizer)
        tokens, starts = shards.tokens(part), shards.starts(part)
        np.testing.assert_array_equal(tokens[:], expected.tokens)
        np.testing.assert_array_equal(starts, expected.starts)
        apart, memory = (
            Windows(t, sequence_length=7, starts=starts) for t in (tokens, expected.tokens)
        )
        for index in range(len(memory)):
            for name, array in memory[index].items():
                np.testing.assert_array_equal(apart[index][name], array)
                assert apart[index][name].dtype == array.dtype
        assert shards.manifest.tokens(part) == len(expected.tokens)
        assert shards.manifest.documents(part) == len(expected.starts)
    assert shards.tokenizer.digest == tokenizer.digest
    assert shards.tokenizer.end == tokenizer.end


def test_the_manifest_says_what_there_is(split, written, tokenizer):
    body = json.loads((written / "manifest.json").read_text())
    found = TokenShards.open(written)
    assert body["plan"]["corpus"] == split.survey.digest
    assert body["plan"]["documents"] == split.survey.documents == 40
    assert body["plan"]["tokenizer_digest"] == tokenizer.digest
    assert body["plan"]["dtype"] == "<u2"
    assert body["sums"]["held_out"]["documents"] == 4
    assert body["largest"] == max(int(found.tokens(part)[:].max()) for part in PARTS)
    names = {
        f"{shard['name']}{suffix}"
        for shard in body["shards"]
        for suffix in (".tokens", ".documents")
    }
    assert set(contents(written)) == names | {"manifest.json"} | set(tokenizer.files)


@few
@given(data=st.data(), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_any_slice_is_read_across_shards(tmp_path_factory, data, lengths):
    texts = ["x" * (n - 1) + "y" for n in lengths]
    folder = tmp_path_factory.mktemp("slices")
    split = split_documents(Documents("t", lambda skipped: iter(texts)), held_out=0)
    tokenize(split, Bytes(), folder, shard_tokens=7)
    tokens, expected = TokenShards.open(folder).tokens("train"), stream_of(texts, Bytes()).tokens
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


@pytest.mark.parametrize("after", [0, 1, 5, 17, 30, 36, 39])
def test_after_a_failure_anywhere_the_same_bytes_come_out(split, bpe, tmp_path, monkeypatch, after):
    monkeypatch.setattr("fsdp_jax.data.tokenizer.BATCH", 1)  # each document is a batch of its own
    tokenize(split, bpe, tmp_path / "whole", shard_tokens=SHARD)
    folder = tmp_path / "stopped"
    with pytest.raises(RuntimeError, match="pulled the plug"):
        tokenize(split, Failing(bpe, after), folder, shard_tokens=SHARD)
    with pytest.raises(ConfigError, match=r"no finished token shards(?s:.*)run it again"):
        TokenShards.open(folder)
    done = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tokens")}
    tokenize(split, bpe, folder, shard_tokens=SHARD)
    assert contents(folder) == contents(tmp_path / "whole")
    again = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tokens")}
    assert done.items() <= again.items()  # whole shards are not written again
    assert bool(done) == (after >= 5)


@pytest.mark.parametrize("done", [True, False])
def test_after_a_failure_at_any_rename_the_same_bytes_come_out(bpe, tmp_path, monkeypatch, done):
    """Whether it fails just before a file gets its name, or just after."""
    split = split_documents(
        Documents("t", lambda skipped: iter(["one text", "another", "third"] * 4)), held_out=0.25
    )
    tokenize(split, bpe, tmp_path / "whole", shard_tokens=40)
    rename, left = Path.rename, 0

    def fail(path, target):
        nonlocal left
        left -= 1
        if left != 0 or done:
            rename(path, target)
        if left == 0:
            raise OSError("no power")

    for number in range(1, 100):
        folder, left = tmp_path / f"stopped{number}", number
        monkeypatch.setattr(Path, "rename", fail)
        try:
            tokenize(split, bpe, folder, shard_tokens=40)
        except OSError as error:
            assert str(error) == "no power"  # noqa: PT017
        else:
            break  # there are not so many
        monkeypatch.undo()
        tokenize(split, bpe, folder, shard_tokens=40)
        assert contents(folder) == contents(tmp_path / "whole")
    shards = len(list((tmp_path / "whole").glob("*.tokens")))
    assert number - 1 == 2 * shards + 3 > 5  # progress, tokenizer and manifest


PROGRAM = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from conftest import TEXTS
from fsdp_jax.data.documents import Documents, split_documents
from fsdp_jax.data.shard_writer import tokenize
from fsdp_jax.data.tokenizer import Bytes

def say(line):
    if line.startswith("train-00003"):
        os.kill(os.getpid(), signal.SIGKILL)

tokenize(split_documents(Documents("texts", lambda skipped: iter(TEXTS)), held_out=0.1), Bytes(), {to!r},
         shard_tokens=100, say=say)
"""


def test_after_a_kill_the_same_bytes_come_out(split, tmp_path):
    folder = tmp_path / "killed"
    program = PROGRAM.format(tests=str(Path(__file__).parent), to=str(folder))
    killed = subprocess.run(
        [sys.executable, "-c", program], check=False, env=os.environ, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert {"lease.json", "progress.json", "train-00003.tokens"} <= set(contents(folder))
    assert "manifest.json" not in contents(folder)
    lines = []
    tokenize(split, Bytes(), folder, shard_tokens=SHARD, say=lines.append)
    tokenize(split, Bytes(), tmp_path / "whole", shard_tokens=SHARD)
    assert contents(folder) == contents(tmp_path / "whole")
    assert "in 4 shards are there already" in lines[0]
    assert lines[1].startswith("train-00004: ")


def test_what_is_done_is_not_done_again(split, tokenizer, written):
    before = {path.name: path.stat().st_mtime_ns for path in written.iterdir()}
    manifest = tokenize(split, tokenizer, written, shard_tokens=SHARD)
    assert manifest == TokenShards.open(written).manifest
    assert {path.name: path.stat().st_mtime_ns for path in written.iterdir()} == before


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("change", ["corpus", "tokenizer_digest", "held_out", "shard_tokens"])
def test_another_corpus_tokenizer_or_setting_is_refused(
    split, documents, bpe, tmp_path, finished, change
):
    tokenize(split, bpe, tmp_path, shard_tokens=SHARD)
    if not finished:
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        (tmp_path / "progress.json").write_text(json.dumps(manifest["plan"]))
        (tmp_path / "manifest.json").unlink()
    before = contents(tmp_path)
    texts = [*documents.read(None)]
    other = {
        "corpus": (
            split_documents(Documents("texts", lambda _: iter([*texts[:-1], "!"])), held_out=0.1),
            bpe,
            SHARD,
        ),
        "tokenizer_digest": (split, Bytes(), SHARD),
        "held_out": (split_documents(documents, held_out=0.2), bpe, SHARD),
        "shard_tokens": (split, bpe, SHARD + 1),
    }[change]
    with pytest.raises(
        ConfigError, match=f"of another corpus, tokenizer or setting(?s:.*)where: .*: .*{change}"
    ):
        tokenize(*other[:2], tmp_path, shard_tokens=other[2])
    assert contents(tmp_path) == before


def test_a_folder_with_something_else_is_refused(split, tmp_path):
    (tmp_path / "thesis.txt").write_text("years")
    for target in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(ConfigError, match=r"holds something else(?s:.*)--to"):
            tokenize(split, Bytes(), target)
    assert contents(tmp_path) == {"thesis.txt": b"years"}


def test_a_second_writer_is_refused(split, tmp_path):
    def say(line):
        with pytest.raises(ConfigError, match="another run is writing"):
            tokenize(split, Bytes(), tmp_path)
        said.append(line)

    said = []
    tokenize(split, Bytes(), tmp_path, say=say)
    assert len(said) == 2


def test_broken_progress_is_refused(split, tmp_path):
    (tmp_path / "progress.json").write_text("{")
    with pytest.raises(
        ConfigError, match=r"cannot be read(?s:.*)progress\.json(?s:.*)remove the folder"
    ):
        tokenize(split, Bytes(), tmp_path)


def test_ids_beyond_the_vocabulary_are_not_written(split, tmp_path):
    class Lying(Bytes):
        vocab_size = 100

    with pytest.raises(
        ConfigError, match=r"no token(?s:.*)document 0 of train-00000(?s:.*)less than 100"
    ):
        tokenize(split, Lying(), tmp_path)


def test_large_ids_take_four_bytes(tmp_path):
    class Large(Bytes):
        vocab_size = 1 << 17
        digest = "large"

        def encode(self, text):
            return super().encode(text) + (1 << 16)

    split = split_documents(Documents("t", lambda skipped: iter(["ab"])), held_out=0)
    assert tokenize(split, Large(), tmp_path).largest == (1 << 16) + 98
    assert (tmp_path / "train-00000.tokens").read_bytes() == np.array(
        [65633, 65634, 0], "<u4"
    ).tobytes()


def test_little_text_is_cut_at_its_end(tmp_path):
    split = split_documents(Documents("t", lambda skipped: iter(["0123456789" * 10])), held_out=0.1)
    tokenize(split, Bytes(), tmp_path)
    shards = TokenShards.open(tmp_path)
    assert [len(shards.tokens(part)) for part in PARTS] == [91, 11]


@pytest.mark.parametrize("suffix", [".tokens", ".documents"])
def test_a_shard_that_is_cut_or_gone_is_named(written, suffix):
    file = written / f"train-00001{suffix}"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(
        ConfigError,
        match=rf"train-00001{suffix}\n +expected: +{size} bytes\n +got: +{size - 1} bytes",
    ):
        TokenShards.open(written)
    file.unlink()
    with pytest.raises(ConfigError, match=r"got: +no file"):
        TokenShards.open(written)


def test_a_damaged_token_is_named_where_it_is_read(written):
    with (written / "train-00001.tokens").open("r+b") as file:
        file.seek(2 * 5)
        file.write(b"\xff\xff")
    tokens = TokenShards.open(written).tokens("train")
    first = tokens.shards[0].tokens
    tokens[: first + 5]
    with pytest.raises(ConfigError, match=r"train-00001\.tokens, token 5\n(?s:.*)got: +id 65535"):
        tokens[first - 3 : first + 9]


@pytest.mark.parametrize(
    "body", ["[]", "{", "{}", '{"plan": {"format": 99}}', '{"plan": {"format": 1}, "shards": []}']
)
def test_a_broken_manifest_is_refused(tmp_path, body):
    (tmp_path / "manifest.json").write_text(body)
    with pytest.raises(ConfigError, match=r"manifest\.json\n +expected: +a manifest"):
        TokenShards.open(tmp_path)


def test_a_tokenizer_that_was_exchanged_is_refused(split, bpe, tmp_path):
    tokenize(split, bpe, tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(bpe.files["tokenizer.json"] + b"\n")
    with pytest.raises(ConfigError, match="not the one that encoded"):
        _ = TokenShards.open(tmp_path).tokenizer


def test_an_end_that_was_changed_beside_the_shards_is_refused(split, tmp_path):
    added = tokenizers.Tokenizer.from_str(
        train_bpe(["to be"] * 9, 260).files["tokenizer.json"].decode()
    )
    added.add_special_tokens(["<stop>"])
    tokenize(split, HuggingFace(added.to_str().encode(), name="added"), tmp_path)
    assert TokenShards.open(tmp_path).tokenizer.end == 0
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    with pytest.raises(ConfigError, match="not the one that encoded"):
        _ = TokenShards.open(tmp_path).tokenizer


def test_the_size_that_was_asked_for_is_found_before_and_after_it_is_done(split, bpe, tmp_path):
    assert plan_of(tmp_path) is None
    seen = []
    tokenize(split, bpe, tmp_path, asked=1000, say=lambda _: seen.append(plan_of(tmp_path)))
    assert [plan.asked for plan in [*seen, plan_of(tmp_path)]] == [1000] * 3
    assert tokenize(split, bpe, tmp_path).plan.asked == 1000  # the same tokenizer, by its name


def test_opening_and_reading_does_not_read_all_of_it(split, tmp_path):
    tokenize(split, Bytes(), tmp_path, shard_tokens=1 << 20)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    tokens = 1 << 30  # 2 GiB, of which the disk holds nothing
    manifest["shards"][0]["tokens"] = tokens
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    os.truncate(tmp_path / "train-00000.tokens", 2 * tokens)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    windows = Windows(TokenShards.open(tmp_path).tokens("train"), sequence_length=128)
    rows = [windows[index]["tokens"] for index in range(0, len(windows), len(windows) // 50)]
    assert len(rows) > 50
    assert rows[0].any()
    assert not rows[-1].any()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * MIB
