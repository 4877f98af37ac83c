"""Corpora: what is read, in which order, what is held out, and what is refused."""

import hashlib

import numpy as np
import pytest

from fsdp_jax.data.corpus import EMBEDDED_LIMIT, TEXT_SUFFIXES, decode, load_corpus
from fsdp_jax.errors import ConfigError


def test_the_embedded_corpus_is_library_source_and_always_the_same():
    corpus, again = load_corpus(None), load_corpus(None)
    total = len(corpus.train) + len(corpus.held_out)
    assert 0.5 * EMBEDDED_LIMIT < total <= EMBEDDED_LIMIT
    assert len(corpus.held_out) / total == pytest.approx(0.05, abs=0.04)
    assert corpus.train.dtype == corpus.held_out.dtype == np.uint8
    assert corpus.digest == again.digest
    assert corpus.files > 100
    assert corpus.name.endswith("-stdlib")
    assert "def " in decode(corpus.train[:100_000])


def test_a_file_is_its_bytes_and_its_tail_is_held_out(tmp_path):
    content = bytes(range(256)) * 4
    (tmp_path / "notes.bin").write_bytes(content)
    corpus = load_corpus(str(tmp_path / "notes.bin"), held_out=0.25)
    assert corpus.train.tobytes() == content[:768]
    assert corpus.held_out.tobytes() == content[768:]
    assert corpus.digest == hashlib.sha256(content).hexdigest()
    assert (corpus.name, corpus.files, corpus.skipped) == ("notes.bin", 1, 0)
    assert not corpus.train.flags.writeable


def test_a_folder_is_its_text_files_sorted_by_path(tmp_path):
    for i, suffix in enumerate(reversed(TEXT_SUFFIXES)):
        (tmp_path / f"{i}{suffix}").write_text(f"{i}")
    (tmp_path / "10").mkdir()
    (tmp_path / "10" / "deep.txt").write_text("deep")
    (tmp_path / "weights.bin").write_text("no text")
    corpus = load_corpus(str(tmp_path), held_out=0)
    assert decode(corpus.train) == "01deep234"  # "1.py" before "10/deep.txt": '.' sorts before '0'
    assert (corpus.files, corpus.skipped, len(corpus.held_out)) == (6, 0, 0)


def test_hidden_files_and_links_that_leave_the_folder_are_passed_over_and_counted(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir(), outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (inside / "a.txt").write_text("a")
    (inside / ".hidden.txt").write_text("hidden")
    (inside / ".git").mkdir()
    (inside / ".git" / "b.txt").write_text("b")
    (inside / "leaves.txt").symlink_to(outside / "secret.txt")
    (inside / "leads_out").symlink_to(outside)
    (inside / "loop").symlink_to(inside)
    (inside / "dangling.txt").symlink_to(inside / "nowhere.txt")
    (inside / "stays.txt").symlink_to(inside / "a.txt")
    corpus = load_corpus(str(inside), held_out=0)
    assert decode(corpus.train) == "aa"
    assert (corpus.files, corpus.skipped) == (2, 6)


def test_every_kth_file_is_held_out_where_there_are_enough(tmp_path):
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(f"{i}")
    corpus = load_corpus(str(tmp_path), held_out=0.25)
    assert (decode(corpus.train), decode(corpus.held_out)) == ("012456", "37")
    (tmp_path / "7.txt").unlink()
    corpus = load_corpus(str(tmp_path), held_out=0.25)
    assert (decode(corpus.train), decode(corpus.held_out)) == ("01234", "56")


def test_decode_replaces_what_is_not_text():
    assert decode(np.array([104, 105, 0xFF], np.int32)) == "hi\N{REPLACEMENT CHARACTER}"


def test_a_missing_path_is_explained(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist(?s:.*)where: +data\.path(?s:.*)nowhere(?s:.*)fix: "):
        load_corpus(str(tmp_path / "nowhere"))


def test_an_empty_corpus_is_explained(tmp_path):
    (tmp_path / ".hidden.txt").write_text("hidden")
    with pytest.raises(ConfigError, match=r"is empty(?s:.*)\*\.jsonl, \*\.md(?s:.*)1 hidden or linked"):
        load_corpus(str(tmp_path))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"is empty(?s:.*)at least one byte\n"):
        load_corpus(str(tmp_path / "empty.txt"))


@pytest.mark.parametrize("share", [-0.1, 0.6, float("nan")])
def test_a_share_that_cannot_be_held_out_is_refused(share):
    with pytest.raises(ConfigError, match=r"0 to 0\.5"):
        load_corpus(None, held_out=share)
