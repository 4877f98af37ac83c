"""Instructions: templates, masks, packing that loses and mixes nothing, and the set that comes
along.
"""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_jax.data.files import Skipped
from fsdp_jax.data.instructions import (
    InstructionRecord,
    PackedInstructions,
    EncodedInstruction,
    TextToText,
    check_too_long,
    digest_of,
    encode_pairs,
    load_instructions,
    pack,
)
from fsdp_jax.data.loader import eval_batches
from fsdp_jax.data.tokenizer import Bytes
from fsdp_jax.errors import ConfigError

few = settings(max_examples=150, deadline=None)

SIZES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), min_size=1, max_size=25)


def pairs_of(sizes):
    """Pairs whose tokens tell the example, the place in it, and whether it is an answer: all
    different, none 0.
    """
    found = []
    for number, (prompt, answer) in enumerate(sizes, 1):
        tokens = 1000 * number + np.arange(prompt + answer, dtype=np.int32)
        tokens[prompt:] += 500
        found.append(EncodedInstruction(tokens[:prompt], tokens[prompt:]))
    return found


def rows_of(examples):
    return [examples[index] for index in range(len(examples))]


def whole(pair):
    return [*pair.prompt.tolist(), *pair.answer.tolist()]


def test_the_templates_are_alpacas():
    assert InstructionRecord("Add {a}.", "", "x").prompt == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd {a}.\n\n### Response:"
    )
    assert InstructionRecord("Add.", "1 {input}", "x").prompt == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 {input}\n\n### Response:"
    )


def test_prompts_and_answers_are_encoded_apart_and_answers_end(bpe):
    instructions = [
        InstructionRecord("Say hi.", "", "hi"),
        InstructionRecord("Copy.", "river", "river"),
    ]
    for tokenizer in (Bytes(), bpe):
        for pair, each in zip(encode_pairs(instructions, tokenizer), instructions, strict=True):
            np.testing.assert_array_equal(pair.prompt, tokenizer.encode(each.prompt))
            np.testing.assert_array_equal(
                pair.answer, [*tokenizer.encode(each.output), tokenizer.end]
            )


def test_a_tokenizer_without_an_end_is_refused():
    class Endless(Bytes):
        end = None

    with pytest.raises(ConfigError, match=r"no end-of-text token(?s:.*)eos_token"):
        encode_pairs([InstructionRecord("a", "", "b")], Endless())


def test_a_row_with_two_examples():
    examples = PackedInstructions(pairs_of([(2, 2), (1, 2)]), sequence_length=8)
    assert len(examples) == 1
    row = examples[0]
    assert row["tokens"].tolist() == [1000, 1001, 1502, 1503, 2000, 2501, 2502, 0, 0]
    assert row["segments"].tolist() == [1, 1, 1, 1, 2, 2, 2, 0]
    assert row["positions"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert row["mask"].tolist() == [0, 1, 1, 0, 1, 1, 0, 0]
    assert {name: (array.dtype.name, len(array)) for name, array in row.items()} == {
        "tokens": ("int32", 9), "segments": ("int32", 8), "positions": ("int32", 8), "mask": ("float32", 8),
    }  # fmt: skip


@few
@given(sizes=SIZES, length=st.integers(19, 40))
def test_packing_loses_and_mixes_nothing(sizes, length):
    pairs, skipped = pairs_of(sizes), Skipped()
    examples = PackedInstructions(pairs, sequence_length=length, skipped=skipped)
    seen, answered = [], []
    for row in rows_of(examples):
        tokens, segments, positions, mask = (
            row[name] for name in ("tokens", "segments", "positions", "mask")
        )
        seen += tokens[tokens > 0].tolist()
        numbers = tokens[:-1] // 1000
        np.testing.assert_array_equal(numbers[:, None] == numbers, segments[:, None] == segments)
        np.testing.assert_array_equal(segments == 0, tokens[:-1] == 0)
        np.testing.assert_array_equal(positions, np.where(numbers > 0, tokens[:-1] % 500, 0))
        # what counts is an answer's token that its own example goes before
        counted = (tokens[1:] % 1000 >= 500) & (tokens[1:] // 1000 == numbers)
        np.testing.assert_array_equal(mask, counted)
        answered += tokens[1:][mask == 1].tolist()
    assert sorted(seen) == sorted(token for pair in pairs for token in whole(pair))
    assert sorted(answered) == sorted(token for pair in pairs for token in pair.answer.tolist())
    assert not skipped


@few
@given(sizes=SIZES, length=st.integers(1, 18), too_long=st.sampled_from(["truncate", "skip"]))
def test_what_is_too_long_is_cut_or_left_out_and_counted(sizes, length, too_long):
    pairs, skipped, room = pairs_of(sizes), Skipped(), length + 1
    expected = [whole(pair)[:room] for pair in pairs if len(pair) <= room]
    cut = [whole(pair)[:room] for pair in pairs if len(pair) > room > len(pair.prompt)]
    expected += cut if too_long == "truncate" else []
    if not expected:
        with pytest.raises(ConfigError, match=r"No instruction fits(?s:.*)data\.sequence_length"):
            PackedInstructions(pairs, sequence_length=length, too_long=too_long)
        return
    examples = PackedInstructions(pairs, sequence_length=length, too_long=too_long, skipped=skipped)
    tokens = np.concatenate([row["tokens"] for row in rows_of(examples)])
    assert sorted(tokens[tokens > 0].tolist()) == sorted(
        token for each in expected for token in each
    )
    truncated = len(cut) if too_long == "truncate" else 0
    assert skipped["truncated"] == truncated
    assert skipped["too long"] == len(pairs) - len(expected)


@few
@given(lengths=st.lists(st.integers(1, 20), max_size=60), room=st.integers(20, 50))
def test_rows_are_full_enough_and_hold_each_index_once(lengths, room):
    rows = pack(lengths, room)
    assert sorted(at for row in rows for at in row) == list(range(len(lengths)))
    filled = [sum(lengths[at] for at in row) for row in rows]
    assert all(0 < total <= room for total in filled)
    # the longest opens a row; the rows are in the order of what opens them
    assert all(lengths[row[0]] == max(lengths[at] for at in row) for row in rows)
    assert rows == sorted(rows)
    # best fit opens a row only for what fits no other: no two rows fit one
    assert all(a + b > room for at, a in enumerate(filled) for b in filled[at + 1 :])
    assert pack(lengths, room) == rows


def test_the_fullest_row_that_still_has_room_is_taken():
    assert pack([6, 5, 4, 3], 10) == [[0, 2], [1, 3]]
    assert pack([7, 5, 3], 10) == [[0, 2], [1]]


def test_the_first_rows_are_not_the_longest():
    assert pack([3, 7, 8, 9], 10) == [[1, 0], [2], [3]]
    rng = np.random.default_rng(0)
    examples = PackedInstructions(
        pairs_of([(1, int(n)) for n in rng.integers(1, 40, 400)]), sequence_length=40
    )
    (batch,) = eval_batches(examples, batch_size=len(examples) // 4, limit=1)
    longest = [max(len(examples.pairs[at]) for at in row) for row in examples.rows]
    first = longest[: len(batch["tokens"])]
    assert abs(np.mean(first) - np.mean(longest)) < 2
    assert not (np.diff(first) <= 0).all()


def test_text_to_text_pads_prompts_and_answers():
    examples = TextToText(pairs_of([(2, 3), (4, 1)]), inputs_length=5, targets_length=4)
    row = examples[0]
    assert row["inputs"].tolist() == [
        1000,
        1001,
        1504,
        0,
        0,
    ]  # the last token of the answer is the end
    assert row["inputs_mask"].tolist() == [1, 1, 1, 0, 0]
    assert row["targets"].tolist() == [1502, 1503, 1504, 0]
    assert row["mask"].tolist() == [1, 1, 1, 0]
    assert {name: array.dtype.name for name, array in row.items()} == {
        "inputs": "int32", "inputs_mask": "int32", "targets": "int32", "mask": "float32",
    }  # fmt: skip
    assert len(examples) == 2


def test_text_to_text_cuts_or_leaves_out_what_is_too_long():
    pairs, skipped = pairs_of([(2, 3), (9, 1), (1, 9)]), Skipped()
    cut = TextToText(pairs, inputs_length=5, targets_length=4, skipped=skipped)
    assert (len(cut), dict(skipped)) == (3, {"truncated": 2})
    assert cut[1]["inputs"].tolist() == pairs[1].prompt[:5].tolist()
    assert cut[2]["targets"].tolist() == pairs[2].answer[:4].tolist()
    skipped = Skipped()
    left = TextToText(pairs, inputs_length=5, targets_length=4, too_long="skip", skipped=skipped)
    assert (len(left), dict(skipped)) == (1, {"too long": 2})
    with pytest.raises(ConfigError, match="No instruction fits"):
        TextToText(pairs[1:], inputs_length=5, targets_length=4, too_long="skip")


def test_records_are_read_in_both_forms_and_without_input(tmp_path):
    records = [{"instruction": "a", "input": "b", "output": "c"}, {"instruction": "d", "output": "e", "id": 1},
               {"instruction": "f", "input": None, "output": "g"}, {"instruction": "h", "output": " "}]  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    for name in ("a.json", "a.jsonl"):
        skipped = Skipped()
        found = load_instructions(str(tmp_path / name), skipped)
        assert found == [
            InstructionRecord("a", "b", "c"),
            InstructionRecord("d", "", "e"),
            InstructionRecord("f", "", "g"),
        ]
        assert dict(skipped) == {"without an answer": 1}


def test_records_are_read_from_datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [
        {"instruction": "a", "input": None, "output": "b"},
        {"instruction": "c", "input": "d", "output": "e"},
    ]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert load_instructions(str(tmp_path / "saved"), Skipped()) == [
        InstructionRecord("a", "", "b"), InstructionRecord("c", "d", "e"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"instruction": "a"}', r"line 1\n +expected: +a field 'output'"),
        ('{"instruction": "a", "output": 5}', r"line 1, field 'output'\n(?s:.*)a number"),
        (
            '{"instruction": "a", "input": [], "output": "b"}',
            r"line 1, field 'input'\n(?s:.*)a list",
        ),
        (
            '{"instruction": "a", "output": ""}',
            r"no instructions(?s:.*)1 records \(1 without an answer\)",
        ),
        ("", "no instructions(?s:.*)0 records"),
        (
            '{"instruction": "\\ud800", "output": "a"}',
            r"not UTF-8(?s:.*)line 1, field 'instruction'",
        ),
    ],
)
def test_records_that_are_none_are_explained(tmp_path, content, says):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=says):
        load_instructions(str(tmp_path / "a.jsonl"), Skipped())


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_what_is_not_utf8_is_mended_or_passed_over_and_counted_once(tmp_path, ending):
    half = {"instruction": "a\ud800", "input": "\ud800", "output": "\ud800"}
    records = [half, {"instruction": "b", "output": "c"}]
    file = tmp_path / f"a.{ending}"
    file.write_text(
        json.dumps(records) if ending == "json" else "\n".join(map(json.dumps, records))
    )
    found, skipped = InstructionRecord("b", "", "c"), Skipped()
    assert load_instructions(str(file), skipped, invalid="skip") == [found]
    assert +skipped == {"not UTF-8": 1}
    mended = InstructionRecord("a\ufffd", "\ufffd", "\ufffd")
    assert load_instructions(str(file), skipped, invalid="replace") == [mended, found]
    with pytest.raises(ConfigError, match="error, replace, skip"):
        load_instructions(str(file), skipped, invalid="maybe")


def test_other_mistakes_are_explained(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read(?s:.*)nowhere\.json"):
        load_instructions(str(tmp_path / "nowhere.json"), Skipped())
    with pytest.raises(ConfigError, match=r"data\.too_long(?s:.*)truncate, skip"):
        check_too_long("wrap")


def test_the_set_that_comes_along_is_good_to_train_with():
    skipped = Skipped()
    found = load_instructions(None, skipped)
    assert len(found) >= 200
    assert not skipped.total()
    assert 0.2 < sum(bool(each.input) for each in found) / len(found) < 0.3
    assert len({(each.instruction, each.input) for each in found}) == len(found)
    assert all(
        text == text.strip()
        for each in found
        for text in (each.instruction, each.input, each.output)
    )
    assert digest_of(found) == digest_of(load_instructions(None, Skipped()))
    assert digest_of(found) != digest_of(found[::-1])


def test_what_can_be_computed_in_the_set_is_right():
    operations = {
        "plus": lambda a, b: a + b, "minus": lambda a, b: a - b, "times": lambda a, b: a * b,
        "divided": lambda a, b: a // b,
    }  # fmt: skip
    checked = 0
    for each in load_instructions(None, Skipped()):
        words = each.instruction.rstrip("?").split()
        if words[:2] == ["What", "is"] and len(words) in (5, 6) and words[3] in operations:
            assert each.output == str(operations[words[3]](int(words[2]), int(words[-1])))
            checked += 1
    assert checked == 16
