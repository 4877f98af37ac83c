"""Every family and kind of data by the command line: training, samples, refusals.

The one run of make test shares the compiled step of `conftest.py`; the families that train are
marked `long`.
"""

import re

import numpy as np
import pytest
from runs import losses, records

from fsdp_jax.cli.main import main
from fsdp_jax.data import load_tokenizer

NONE = "--model.layers 2 --model.width None --model.heads None"
T5 = f"--model.family t5 {NONE} --units.classes T5EncoderBlock T5DecoderBlock"


@pytest.mark.long
def test_a_t5_learns_to_answer(run, tmp_path, capsys):
    data = "--data.kind instructions --data.sequence_length 256 --data.target_length 64"
    assert run("t5", T5, data, "--train.steps 4 --train.sample 400 --prefetch pre") == 0
    found = [loss for _, loss, *_ in losses(tmp_path / "t5")]
    assert found[-1] < found[0]
    shown = capsys.readouterr().out
    assert "| -> " in shown
    assert records(tmp_path / "t5")[0]["tokens"] == 8 * (256 + 64)


@pytest.mark.long
def test_a_t5_trains_on_span_corruption(run, tmp_path):
    assert run("t5", T5, "--data.sequence_length 64 --data.target_length 32 --train.steps 2") == 0
    assert np.isfinite([loss for _, loss, *_ in losses(tmp_path / "t5")]).all()


@pytest.mark.long
def test_an_image_model_trains_and_takes_a_new_head(run, tmp_path, capsys):
    words = f"--model.family vit {NONE} --units.classes ViTBlock --data.kind images"
    settings = "--train.steps 4 --train.sample 1 --train.global_batch_size 16"
    assert run("vit", words, settings) == 0
    shown = capsys.readouterr().out
    # with a new head, from the run and from what is exported of it
    export = f"export {tmp_path / 'vit'} --to {tmp_path / 'out'} --format huggingface"
    assert main(export.split()) == 0
    for weights in ("vit", "out"):
        new = f"--model.weights {tmp_path / weights} --model.classes 9 --train.steps 1"
        layers = "--model.layers None --model.frozen ^(?!head)"
        assert run(f"new-{weights}", words, layers, new) == 0
    assert re.search(r"\| \d+ of 16 right", shown)
    assert "nats per image" in shown
    assert "drawn images: 50,000 of 32x32 in 8 classes" in shown


@pytest.mark.parametrize(("asked", "got"), [(260, 260), (1000, 266)])
def test_a_tokenizer_is_trained_once_and_of_one_size(tmp_path, capsys, asked, got):
    (tmp_path / "text.txt").write_text("to be, or not to be " * 100)
    words = f"tokenize {tmp_path / 'text.txt'} --to {tmp_path / 'shards'} --vocab-size".split()
    for _ in range(2):
        assert main([*words, str(asked)]) == 0
    shown, told = capsys.readouterr()
    assert shown.count(f"(tokenizer bpe, {got} tokens)") == 2
    assert told.count("training a tokenizer") == 1
    (tmp_path / "shards" / "tokenizer.json").write_text("{")  # the same one is trained again
    assert main([*words, str(asked)]) == 0
    assert capsys.readouterr().err.count("training a tokenizer") == 1
    assert load_tokenizer(tmp_path / "shards").vocab_size == got
    assert main([*words, str(asked - 1)]) == 2
    error = capsys.readouterr().err
    said = rf"where: +--vocab-size\n +expected: +{asked}, as was asked(?s:.*)got: +{asked - 1}\n"
    assert re.search(said, error)
    # the same one, by its name
    assert main([*words[:-1], "--tokenizer", str(tmp_path / "shards")]) == 0


def test_no_tokenizer_is_trained_for_shards_of_a_named_one(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("to be, or not to be " * 100)
    words = ["tokenize", str(tmp_path / "text.txt"), "--to", str(tmp_path / "shards")]
    assert main([*words, "--tokenizer", "bytes"]) == 0
    assert main([*words, "--vocab-size", "300"]) == 2
    error = capsys.readouterr().err
    assert re.search(
        r"where: +--vocab-size\n +expected: +--tokenizer, as it was made with one", error
    )
    assert "training" not in error


def test_ignored_options_of_tokenize_are_refused(tmp_path, capsys):
    for name, value in (("field", "body"), ("invalid", "skip")):
        line = f"tokenize embedded --to {tmp_path / 'shards'} --tokenizer bytes --{name} {value}"
        assert main(line.split()) == 2
        said = rf"{name} would be ignored\n +where: +--{name}\n +got: +{value}"
        assert re.search(said, capsys.readouterr().err)


IMAGES = "--model.family vit --data.kind images"


UNUSABLE = [
    ("--model.family vit", ["family and data do not go together", "set data.kind to images"]),
    ("--model.family t5 --model.attention flash", ["adds no bias", "blockwise or cudnn"]),
    ("--model.family cait --data.kind images --model.attention flash", ["mixes its heads"]),
    (f"{IMAGES} --model.attention flash", ["a class token more"]),
    ("--model.family t5 --data.packing True", ["packing would be ignored"]),
    (f"{IMAGES} --train.loss_chunk 9", ["loss_chunk would be ignored"]),
    (f"{IMAGES} --model.classes 5", ["too few classes", "at least 8"]),
]


def test_settings_that_a_family_cannot_use_are_refused(run, capsys):
    for words, said in UNUSABLE:
        assert run("wrong", NONE, "--units.classes --train.steps 1", words) == 2
        error = capsys.readouterr().err
        assert [part for part in said if part not in error] == [], words


UNREADABLE = [
    (b'{"text": "a"}\n{"text": \n', 3, ["corpus.jsonl", "line 2"]),
    (b'{"text": "a"}\n{"txt": "b"}\n', 2, ["line 2", "text"]),
    (b'{"text": "a\xff"}\n', 3, ["corpus.jsonl", "line 1", "UTF-8"]),
    (b'{"text": "   "}\n', 2, ["the corpus is empty", "1 empty"]),
]


def test_an_unreadable_corpus_is_refused(run, tmp_path, capsys):
    for content, code, said in UNREADABLE:
        (tmp_path / "corpus.jsonl").write_bytes(content)
        assert run("wrong", f"--data.kind text --data.path {tmp_path / 'corpus.jsonl'}") == code
        error = capsys.readouterr().err
        assert [part for part in said if part not in error] == [], content


def test_skipped_rows_are_counted(run, tmp_path, capsys):
    lines = [b'{"text": "%s"}' % (b"to be, or not to be " * 20)] * 4
    (tmp_path / "corpus.jsonl").write_bytes(
        b"\n".join([*lines, b'{"text": ""}', b'{"text": "\xff"}']) + b"\n"
    )
    words = f"--data.kind text --data.path {tmp_path / 'corpus.jsonl'} --data.invalid skip"
    assert run("counted", words, "--train.steps 1") == 0
    shown = capsys.readouterr().out
    assert re.search(r"skipped or repaired: .*1 empty", shown)
    assert "UTF-8" in shown


def test_images_of_another_size_are_refused(run, tmp_path, capsys):
    np.savez(
        tmp_path / "x.npz", images=np.zeros((64, 24, 24, 3), np.uint8), labels=np.arange(64) % 8
    )
    words = f"{IMAGES} --data.path {tmp_path / 'x.npz'}"
    assert run("wrong", NONE, "--units.classes ViTBlock", words) == 2
    error = capsys.readouterr().err
    assert "32x32x3" in error
    assert "24x24x3" in error
