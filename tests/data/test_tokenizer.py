"""Tokenizers: text comes back, special tokens in a text are text, and vocabularies are checked."""

import errno
import hashlib
import json
import sys

import numpy as np
import pytest
import tokenizers
from collected import collected
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import fields, refused

from fsdp_jax.data.instructions import InstructionRecord, encode_instructions
from fsdp_jax.data.tokenizer import (
    END,
    FILE,
    SETTINGS,
    ByteTokenizer,
    HuggingFaceTokenizer,
    check_vocabulary,
    encode_documents,
    load_tokenizer,
    token_dtype,
    train_bpe,
)
from fsdp_jax.errors import ConfigError, DamageError, MissingPackageError

few = settings(max_examples=20, deadline=None)
WORDS = {"?": 0, "a": 1, "b": 2}


def word_level(vocabulary, special=()):
    """Returns the bytes of a tokenizer.json whose tokens are whole words."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": number, "content": word, "special": True, **flags} for word, number in special]
    unused = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    body = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary | dict(special), "unk_token": "?"},
        **dict.fromkeys(unused),
    }
    return json.dumps(body).encode()


@few
@given(text=st.text())
def test_bytes_are_decoded_to_the_same_text(text):
    tokens = ByteTokenizer().encode(text)
    assert (tokens.dtype, len(tokens)) == (np.int32, len(text.encode()))
    assert ByteTokenizer().decode(tokens) == text


@few
@given(texts=st.lists(st.text()))
def test_bpe_is_decoded_to_the_same_text_alone_and_in_batches(bpe, texts):
    assert [bpe.decode(tokens) for tokens in bpe.encode_batch(texts)] == texts
    for text, tokens in zip(texts, bpe.encode_batch(texts), strict=True):
        np.testing.assert_array_equal(tokens, bpe.encode(text))
        assert tokens.dtype == np.int32


def test_ids_that_are_not_text_are_replaced(bpe):
    assert (
        ByteTokenizer().decode(np.array([104, 105, 0xFF, 256, -1], np.int32)) == "hi" + 3 * "\ufffd"
    )
    tokens = np.concatenate([bpe.encode("hi"), [5000, -1], bpe.encode("ho")])
    assert bpe.decode(tokens) == "hi\ufffd\ufffdho"


def test_the_spelling_of_the_end_of_text_token_is_text(bpe):
    assert bpe.end == 0
    assert bpe.end not in bpe.encode(f"one{END}two")
    assert bpe.decode(np.array([bpe.end])) == END
    assert bpe.decode(bpe.encode(END)) == END


def test_special_tokens_that_a_text_spells_are_tokens_where_they_are_asked_for(bpe):
    model = tokenizers.Tokenizer.from_str(bpe.files[FILE].decode())
    model.add_special_tokens(["<begin>"])
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", 300)]
    )
    tokenizer = HuggingFaceTokenizer(model.to_str().encode(), name="with a begin token")
    assert tokenizer.special_tokens == (END, "<begin>")
    assert tokenizer.end_spelling == END
    word = bpe.encode("word").tolist()
    texts = ["word", f"<begin>word{END}", f"word{END}word", END]
    pieces = [each.tolist() for each in encode_documents(texts, tokenizer, special=True)]
    once = [300, *word, 0]
    assert pieces == [once, once, [300, *word, 0, *word, 0], [300, 0]]
    (rendered,) = encode_instructions(
        [InstructionRecord(f"<begin>word{END}", "", f"word{END}", is_prompt=True)],
        tokenizer,
        special=True,
    )
    assert rendered.prompt.tolist() == [300, *word, 0]
    assert rendered.answer.tolist() == [*word, 0]
    # no spelling of the bytes' end
    assert ByteTokenizer().special_tokens == ()
    (zero,) = encode_documents(["a\0"], ByteTokenizer())
    assert zero.tolist() == [97, 0, 0]


def test_each_document_is_followed_by_the_end_token(bpe):
    pieces = list(encode_documents(["ab", "", "c"], ByteTokenizer()))
    assert [piece.tolist() for piece in pieces] == [[97, 98, 0], [0], [99, 0]]
    assert all(piece[-1] == bpe.end for piece in encode_documents(["ab", "c"], bpe))
    endless = HuggingFaceTokenizer(word_level(WORDS), name="words")
    assert endless.end is None
    pieces = list(encode_documents(["a b", "b"], endless))
    assert [piece.tolist() for piece in pieces] == [[1, 2], [2]]


def test_tokens_do_not_depend_on_the_encoding_batch(bpe, monkeypatch):
    texts = [f"text {number} " * 20 for number in range(30)]
    expected = [piece.tolist() for piece in encode_documents(texts, bpe)]
    monkeypatch.setattr("fsdp_jax.data.tokenizer.BATCH", 500)
    assert [piece.tolist() for piece in encode_documents(texts, bpe)] == expected


def test_training_stops_at_the_vocabulary_or_without_pairs(bpe):
    assert bpe.vocab_size == 300
    assert len(bpe.encode("The house number")) < len("The house number")
    assert train_bpe(["abcdefg"], 1000).vocab_size == 257


def test_a_file_or_its_folder_is_loaded(bpe, tmp_path):
    for name, content in bpe.files.items():
        (tmp_path / name).write_bytes(content)
    digest = hashlib.sha256(bpe.files[FILE] + b'{"begin": [], "end": 0}').hexdigest()
    for path in (tmp_path, tmp_path / FILE):
        loaded = load_tokenizer(path)
        assert loaded.digest == bpe.digest == digest
        np.testing.assert_array_equal(loaded.encode("The river"), bpe.encode("The river"))
    assert load_tokenizer("bytes").name == "bytes"


def test_the_settings_state_the_end_token():
    content = word_level(WORDS, [("</s>", 3), ("<stop>", 4)])
    plain = HuggingFaceTokenizer(content, name="words")
    unstated = HuggingFaceTokenizer(
        content, name="words", beside={SETTINGS: b'{"eos_token": null}'}
    )
    assert plain.end == unstated.end == 3
    assert plain.digest == unstated.digest
    for stated in ("<stop>", {"content": "<stop>"}):
        config = json.dumps({"eos_token": stated}).encode()
        tokenizer = HuggingFaceTokenizer(content, name="words", beside={SETTINGS: config})
        assert tokenizer.end == 4
        assert tokenizer.files == {FILE: content, SETTINGS: config}
        assert tokenizer.digest != plain.digest


def test_sentinels_are_ordered_and_ids_may_have_gaps():
    content = word_level(WORDS, [("<extra_id_1>", 3), ("<extra_id_0>", 4)])
    assert HuggingFaceTokenizer(content, name="words").sentinels == (4, 3)
    assert ByteTokenizer().sentinels == ()
    with_gap = HuggingFaceTokenizer(word_level({"?": 0, "a": 7}), name="words")
    assert with_gap.vocab_size == 8
    assert with_gap.decode(np.array([7, 3])) == "a\ufffd"


def test_vocabulary_sizes_are_checked_and_choose_the_dtype(bpe):
    check_vocabulary(ByteTokenizer(), 256)
    check_vocabulary(bpe, 300)
    check_vocabulary(255, 256)
    assert token_dtype(1 << 16) == np.uint16
    assert token_dtype((1 << 16) + 1) == np.uint32


def load_words(content, settings=None):
    beside = {} if settings is None else {SETTINGS: settings}
    return HuggingFaceTokenizer(content, name="broken", beside=beside)


def test_invalid_tokenizers_are_refused(tmp_path):
    cases = [
        (
            lambda path: check_vocabulary(ByteTokenizer(), 255),
            {"where": "model.vocab_size", "expected": "at least 256", "got": "tokenizer bytes"},
        ),
        (
            lambda path: check_vocabulary(300, 300),
            {"expected": "at least 301", "got": "in the tokens", "fix": "set it to 384"},
        ),
        (
            lambda path: load_tokenizer(path / "nowhere"),
            {"what": "no such tokenizer", "where": "data.tokenizer", "got": "nowhere"},
        ),
        (
            lambda path: load_tokenizer(path),
            {"what": "no such tokenizer", "expected": "tokenizer.json"},
        ),
        (
            lambda path: load_words(b"{}"),
            {"error": DamageError, "what": "not a tokenizer", "where": "broken"},
        ),
        (
            lambda path: load_words(b"\xff"),
            {"error": DamageError, "what": "not a tokenizer", "where": "broken"},
        ),
        (
            lambda path: load_words(word_level(WORDS), b'{"eos_token": "x"}'),
            {"what": "no id", "got": "x"},
        ),
        (
            lambda path: load_words(word_level(WORDS), b"["),
            {"error": DamageError, "what": "settings", "where": "broken: tokenizer_config.json"},
        ),
        (lambda path: train_bpe(["a"], 256), {"what": "too small", "expected": "at least 257"}),
    ]
    with collected() as case:
        for call, says in cases:
            with case(says), refused(**{"error": ConfigError} | fields(says)):
                call(tmp_path)


PANICS = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}


def test_a_panic_of_the_package_is_damage(capfd):
    """It derives from BaseException, and the package prints it."""
    content = json.loads(word_level(WORDS))
    content["post_processor"] = PANICS
    load_words(json.dumps(content).encode())
    content["post_processor"] = PANICS | {
        "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}}]
    }
    with refused("not a tokenizer", error=DamageError, where="broken"):
        load_words(json.dumps(content).encode())
    assert capfd.readouterr().err == ""


def hostile(**parts):
    return json.dumps(json.loads(word_level(WORDS)) | parts).encode()


def test_a_pattern_that_backtracks_without_end_is_damage(capfd):
    """The package panics once a search has tried ten million ways."""
    pattern = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated"}
    slow = load_words(hostile(pre_tokenizer=pattern | {"invert": False}))
    for encode in (slow.encode, lambda text: slow.encode_batch([text, text])):
        with refused("not a tokenizer", error=DamageError, got="retry-limit"):
            encode("x" * 60)
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_needs_no_stderr_and_no_room(monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", None)
        without_stderr = load_words(word_level(WORDS))
    monkeypatch.setattr("fsdp_jax.data.tokenizer._scratch_file", full)
    without_room = load_words(word_level(WORDS))
    assert without_stderr.digest == without_room.digest


def test_a_text_that_a_tokenizer_cannot_encode_is_damage():
    tokenizer = load_words(word_level({"a": 0}))  # without the token for unknown words
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with refused("not a tokenizer", error=DamageError, got="Missing [UNK]"):
            encode("b")


@pytest.mark.parametrize("target", ["nothing", "tokenizer_config.json"])
def test_settings_that_are_a_link_to_nothing_are_damage(target, tmp_path):
    (tmp_path / FILE).write_bytes(word_level(WORDS))
    (tmp_path / SETTINGS).symlink_to(target)
    with refused("cannot be read", error=DamageError, got="tokenizer_config.json"):
        load_tokenizer(tmp_path)


def test_ids_that_no_array_holds_are_refused():
    with refused("too large", error=DamageError, expected="less than 2**31", got="4294967295"):
        load_words(word_level({"a": 0, "b": 2**32 - 1}))


def test_an_end_of_text_that_is_no_token_is_refused():
    with collected() as case:
        for stated in ['["</s>"]', "3", '{"content": {}}', "true"]:
            expected = "a token of tokenizer.json"
            with case(stated), refused("no id", error=ConfigError, expected=expected):
                load_words(word_level(WORDS), b'{"eos_token": %s}' % stated.encode())


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / FILE).write_text("{}")
    for call in (lambda: load_tokenizer(tmp_path), lambda: train_bpe(["a"], 300)):
        with refused(error=MissingPackageError, fix="pip install 'fsdp_jax[hf]'"):
            call()


def test_the_prefix_of_a_template_precedes_each_text(bpe):
    model = tokenizers.Tokenizer.from_str(bpe.files[FILE].decode())
    # a token before a text, as Llama's, and one after it, as BERT's, which is not used
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"<begin> $A {END}", special_tokens=[("<begin>", 7), (END, bpe.end)]
    )
    tokenizer = HuggingFaceTokenizer(model.to_str().encode(), name="with a template")
    assert tokenizer.begin == (7,)
    assert 7 not in tokenizer.encode("to be")
    pieces = list(encode_documents(["to be", "or not"], tokenizer))
    assert [piece[0] for piece in pieces] == [7, 7]
    (encoded,) = encode_instructions([InstructionRecord("say it", "", "to be")], tokenizer)
    assert encoded.prompt[0] == 7
    assert 7 not in encoded.answer
    assert ByteTokenizer().begin == ()
