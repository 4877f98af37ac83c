"""Tokenizers: text comes back, special tokens in a text are text, and a vocabulary that does not
fit is refused.
"""

import builtins
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_jax.data.instructions import InstructionRecord, encode_pairs
from fsdp_jax.data.tokenizer import (
    END,
    FILE,
    SETTINGS,
    Bytes,
    HuggingFace,
    check_vocabulary,
    encoded,
    load_tokenizer,
    token_dtype,
    train_bpe,
)
from fsdp_jax.errors import ConfigError

few = settings(max_examples=50, deadline=None)


def word_level(vocabulary, special=()):
    """The bytes of a tokenizer.json that knows whole words."""
    added = [
        {"id": at, "content": word, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for word, at in special
    ]  # fmt: skip
    model = {"type": "WordLevel", "vocab": dict(vocabulary) | dict(special), "unk_token": "?"}
    split = {"type": "Whitespace"}
    body = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": split, "post_processor": None, "decoder": None, "model": model}  # fmt: skip
    return json.dumps(body).encode()


WORDS = [("?", 0), ("a", 1), ("b", 2)]


@few
@given(text=st.text())
def test_bytes_come_back(text):
    tokens = Bytes().encode(text)
    assert (tokens.dtype, len(tokens)) == (np.int32, len(text.encode()))
    assert Bytes().decode(tokens) == text


@few
@given(texts=st.lists(st.text()))
def test_byte_pairs_come_back_one_by_one_and_in_batches(bpe, texts):
    assert [bpe.decode(tokens) for tokens in bpe.encode_batch(texts)] == texts
    for text, tokens in zip(texts, bpe.encode_batch(texts), strict=True):
        np.testing.assert_array_equal(tokens, bpe.encode(text))
        assert tokens.dtype == np.int32


def test_what_is_no_text_or_no_token_is_replaced(bpe):
    assert Bytes().decode(np.array([104, 105, 0xFF, 256, -1], np.int32)) == "hi" + 3 * "\ufffd"
    tokens = np.concatenate([bpe.encode("hi"), [5000, -1], bpe.encode("ho")])
    assert bpe.decode(tokens) == "hi\ufffd\ufffdho"


def test_the_end_of_text_in_a_text_is_text(bpe):
    assert bpe.end == 0
    assert bpe.end not in bpe.encode(f"one{END}two")
    assert bpe.decode(np.array([bpe.end])) == END
    assert bpe.decode(bpe.encode(END)) == END


def test_each_text_is_followed_by_the_end(bpe):
    found = list(encoded(["ab", "", "c"], Bytes()))
    assert [each.tolist() for each in found] == [[97, 98, 0], [0], [99, 0]]
    assert all(each[-1] == bpe.end for each in encoded(["ab", "c"], bpe))
    endless = HuggingFace(word_level(WORDS), name="words")
    assert endless.end is None
    assert [each.tolist() for each in encoded(["a b", "b"], endless)] == [[1, 2], [2]]


def test_batches_of_texts_do_not_change_them(bpe, monkeypatch):
    texts = [f"text {number} " * 20 for number in range(30)]
    whole = [each.tolist() for each in encoded(texts, bpe)]
    monkeypatch.setattr("fsdp_jax.data.tokenizer.BATCH", 500)
    assert [each.tolist() for each in encoded(texts, bpe)] == whole


def test_the_same_text_trains_the_same_tokenizer_in_another_process(bpe):
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from conftest import TEXTS;"
        "from fsdp_jax.data.tokenizer import train_bpe; print(train_bpe(TEXTS, 300).digest)"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert done.stdout.strip() == bpe.digest


def test_training_stops_at_the_vocabulary_or_where_nothing_repeats(bpe):
    assert bpe.vocab_size == 300
    assert len(bpe.encode("The house number")) < len("The house number")
    assert train_bpe(["abcdefg"], 1000).vocab_size == 257


def test_a_file_or_its_folder_is_loaded_with_the_digest_of_its_bytes_and_its_end(bpe, tmp_path):
    for name, content in bpe.files.items():
        (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / FILE):
        loaded = load_tokenizer(path)
        expected = hashlib.sha256(bpe.files[FILE] + b'{"begin": [], "end": 0}').hexdigest()
        assert loaded.digest == bpe.digest == expected
        np.testing.assert_array_equal(loaded.encode("The river"), bpe.encode("The river"))
    assert load_tokenizer("bytes").name == "bytes"


def test_the_settings_beside_it_name_the_end_and_travel_with_it():
    content = word_level(WORDS, [("</s>", 3), ("<stop>", 4)])
    assert HuggingFace(content, name="words").end == 3
    for stated in ("<stop>", {"content": "<stop>"}):
        settings = json.dumps({"eos_token": stated}).encode()
        tokenizer = HuggingFace(content, name="words", settings=settings)
        assert tokenizer.end == 4
        assert tokenizer.files == {FILE: content, SETTINGS: settings}
    plain = HuggingFace(content, name="words")
    unsaid = HuggingFace(content, name="words", settings=b'{"eos_token": null}')
    assert unsaid.end == 3
    assert tokenizer.digest != plain.digest == unsaid.digest  # another end is another tokenizer


def test_t5s_sentinels_are_found_in_their_order():
    content = word_level(WORDS, [("<extra_id_1>", 3), ("<extra_id_0>", 4)])
    assert HuggingFace(content, name="words").sentinels == (4, 3)
    assert Bytes().sentinels == ()


def test_ids_may_have_holes():
    tokenizer = HuggingFace(word_level([("?", 0), ("a", 7)]), name="words")
    assert tokenizer.vocab_size == 8
    assert tokenizer.decode(np.array([7, 3])) == "a\ufffd"


def test_ids_are_stored_in_the_smaller_type_that_holds_them():
    assert token_dtype(1 << 16) == np.uint16
    assert token_dtype((1 << 16) + 1) == np.uint32


def test_a_vocabulary_that_fits_is_accepted(bpe):
    check_vocabulary(Bytes(), 256)
    check_vocabulary(bpe, 300)
    check_vocabulary(255, 256)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda path: check_vocabulary(Bytes(), 255),
            r"model\.vocab_size\n(?s:.*)at least 256\n(?s:.*)tokenizer bytes",
        ),
        (
            lambda path: check_vocabulary(300, 300),
            r"at least 301\n(?s:.*)in the tokens\n(?s:.*)set it to 384",
        ),
        (
            lambda path: load_tokenizer(path / "nowhere"),
            r"no such tokenizer(?s:.*)data\.tokenizer(?s:.*)nowhere",
        ),
        (lambda path: load_tokenizer(path), r"no such tokenizer(?s:.*)tokenizer\.json"),
        (lambda path: HuggingFace(b"{}", name="broken"), "Not a tokenizer(?s:.*)broken"),
        (lambda path: HuggingFace(b"\xff", name="broken"), "Not a tokenizer(?s:.*)broken"),
        (
            lambda path: HuggingFace(word_level(WORDS), name="w", settings=b'{"eos_token": "x"}'),
            "no id(?s:.*)got: +x",
        ),
        (
            lambda path: HuggingFace(word_level(WORDS), name="w", settings=b"["),
            "settings(?s:.*)tokenizer_config.json",
        ),
        (lambda path: train_bpe(["a"], 256), "too small(?s:.*)at least 257"),
    ],
)
def test_mistakes_are_explained(call, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        call(tmp_path)


def test_the_package_is_named_where_it_is_missing(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    (tmp_path / FILE).write_text("{}")
    for call in (lambda: load_tokenizer(tmp_path), lambda: train_bpe(["a"], 300)):
        with pytest.raises(ConfigError, match=r"fsdp_jax\[hf\]"):
            call()


@pytest.fixture
def with_a_template():
    """`<begin>` before a text, as Llama's does, and something after, as BERT's, which is not taken."""
    whole = tokenizers.Tokenizer.from_str(
        train_bpe(["to be, or not to be"] * 9, 270).files["tokenizer.json"].decode()
    )
    specials = [("<begin>", 7), (END, whole.token_to_id(END))]
    whole.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"<begin> $A {END}", special_tokens=specials
    )
    return HuggingFace(whole.to_str().encode(), name="with a template")


def test_what_a_tokenizer_puts_before_a_text_stands_before_each(with_a_template):
    tokenizer = with_a_template
    assert tokenizer.begin == (7,)
    assert 7 not in tokenizer.encode("to be")
    pieces = list(encoded(["to be", "or not"], tokenizer))
    assert [piece[0] for piece in pieces] == [7, 7]
    (pair,) = encode_pairs([InstructionRecord("say it", "", "to be")], tokenizer)
    assert pair.prompt[0] == 7
    assert 7 not in pair.answer
    assert Bytes().begin == ()
