"""Instructions: templates, masks, packing that loses and mixes nothing, and the shipped set."""

import json

import numpy as np
import pytest
from collected import collected
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import fields, refused

from fsdp_jax.data.files import Skipped
from fsdp_jax.data.instruction_rows import PackedInstructions, TextToText, pack_rows
from fsdp_jax.data.instructions import (
    EncodedInstruction,
    InstructionRecord,
    digest_instructions,
    encode_instructions,
    load_instructions,
)
from fsdp_jax.data.loader import eval_batches
from fsdp_jax.data.tokenizer import ByteTokenizer
from fsdp_jax.errors import ConfigError, DamageError

few = settings(max_examples=50, deadline=None)

SIZES = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8)), min_size=1, max_size=25)


def encoded_of(sizes):
    """Returns instructions with token 1000 * number + position, plus 500 in answers; none is 0."""
    encoded = []
    for number, (prompt, answer) in enumerate(sizes, 1):
        tokens = 1000 * number + np.arange(prompt + answer, dtype=np.int32)
        tokens[prompt:] += 500
        encoded.append(EncodedInstruction(tokens[:prompt], tokens[prompt:]))
    return encoded


def packed(encoded, length, **options):
    return PackedInstructions(encoded, sequence_length=length, **{"skipped": Skipped()} | options)


def text_to_text(encoded, **options):
    return TextToText(
        encoded, inputs_length=5, targets_length=4, **{"skipped": Skipped()} | options
    )


def rows_of(examples):
    return [examples[index] for index in range(len(examples))]


def tokens_of(each):
    return [*each.prompt.tolist(), *each.answer.tolist()]


def test_a_prompt_and_its_completion_are_taken_as_they_are(tmp_path):
    path = tmp_path / "chats.jsonl"
    records = [{"prompt": "Q: 1+1?\n", "completion": "2"}, {"instruction": "Add.", "output": "3"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    first, second = load_instructions(str(path), Skipped())
    assert (first.prompt, first.output) == ("Q: 1+1?\n", "2")
    assert second.prompt.startswith("Below is an instruction")
    alike = InstructionRecord("Q: 1+1?\n", "", "2")
    assert digest_instructions([first]) != digest_instructions([alike])


def test_records_of_another_format_are_refused_by_their_fields(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"conversations": [{"from": "human", "value": "Hi"}], "id": 3}\n')
    where, got = f"{path}, line 1", "conversations, id"
    with refused("another format", error=ConfigError, where=where, expected="messages", got=got):
        load_instructions(str(path), Skipped())


def test_the_templates_are_alpacas():
    assert InstructionRecord("Add {a}.", "", "x").prompt == (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n"
        "### Instruction:\nAdd {a}.\n\n### Response:"
    )
    assert InstructionRecord("Add.", "1 {input}", "x").prompt == (
        "Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 {input}\n\n### Response:"
    )


def test_prompts_and_answers_are_encoded_separately(bpe):
    records = [InstructionRecord("Hi.", "", "hi"), InstructionRecord("Copy.", "river", "river")]
    for tokenizer in (ByteTokenizer(), bpe):
        encoded = encode_instructions(records, tokenizer)
        for each, record in zip(encoded, records, strict=True):
            np.testing.assert_array_equal(each.prompt, tokenizer.encode(record.prompt))
            answer = [*tokenizer.encode(record.output), tokenizer.end]
            np.testing.assert_array_equal(each.answer, answer)


def test_a_tokenizer_without_an_end_token_is_refused():
    class Endless(ByteTokenizer):
        end = None

    with refused("no end-of-text token", error=ConfigError, fix="eos_token"):
        encode_instructions([InstructionRecord("a", "", "b")], Endless())


def test_two_examples_in_one_row_have_their_own_segments():
    examples = packed(encoded_of([(2, 2), (1, 2)]), 8)
    assert len(examples) == 1
    row = examples[0]
    assert row["tokens"].tolist() == [1000, 1001, 1502, 1503, 2000, 2501, 2502, 0, 0]
    assert row["segments"].tolist() == [1, 1, 1, 1, 2, 2, 2, 0]
    assert row["positions"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert row["mask"].tolist() == [0, 1, 1, 0, 1, 1, 0, 0]
    assert {name: (array.dtype.name, len(array)) for name, array in row.items()} == {
        "tokens": ("int32", 9),
        "segments": ("int32", 8),
        "positions": ("int32", 8),
        "mask": ("float32", 8),
    }


@few
@given(sizes=SIZES, length=st.integers(19, 40))
def test_packing_loses_and_mixes_nothing(sizes, length):
    encoded, skipped = encoded_of(sizes), Skipped()
    examples = packed(encoded, length, skipped=skipped)
    seen, answers = [], []
    for row in rows_of(examples):
        tokens, segments, positions = row["tokens"], row["segments"], row["positions"]
        seen += tokens[tokens > 0].tolist()
        numbers = tokens[:-1] // 1000
        np.testing.assert_array_equal(numbers[:, None] == numbers, segments[:, None] == segments)
        np.testing.assert_array_equal(segments == 0, tokens[:-1] == 0)
        np.testing.assert_array_equal(positions, np.where(numbers > 0, tokens[:-1] % 500, 0))
        # targets that count are tokens of an answer, predicted from their own example
        counted = (tokens[1:] % 1000 >= 500) & (tokens[1:] // 1000 == numbers)
        np.testing.assert_array_equal(row["mask"], counted)
        answers += tokens[1:][row["mask"] == 1].tolist()
    assert sorted(seen) == sorted(token for each in encoded for token in tokens_of(each))
    # the first token of an answer without a prompt is predicted from nothing
    targets = [each.answer[len(each.prompt) == 0 :].tolist() for each in encoded]
    assert sorted(answers) == sorted(token for each in targets for token in each)
    assert not skipped


@few
@given(sizes=SIZES, length=st.integers(1, 18), too_long=st.sampled_from(["truncate", "skip"]))
def test_examples_that_are_too_long_are_truncated_or_skipped(sizes, length, too_long):
    encoded, skipped, capacity = encoded_of(sizes), Skipped(), length + 1
    expected = [tokens_of(each) for each in encoded if len(each) <= capacity]
    truncated = [
        tokens_of(each)[:capacity] for each in encoded if len(each) > capacity > len(each.prompt)
    ]
    if too_long == "skip":
        truncated = []
    expected += truncated
    if not expected:
        with refused("no instruction fits", error=ConfigError, where="data.sequence_length"):
            packed(encoded, length, too_long=too_long)
        return
    examples = packed(encoded, length, too_long=too_long, skipped=skipped)
    tokens = np.concatenate([row["tokens"] for row in rows_of(examples)])
    assert sorted(tokens[tokens > 0].tolist()) == sorted(np.concatenate(expected).tolist())
    assert skipped["truncated"] == len(truncated)
    assert skipped["too long"] == len(encoded) - len(expected)


@few
@given(lengths=st.lists(st.integers(1, 20), max_size=60), capacity=st.integers(20, 50))
def test_rows_are_full_enough_and_hold_each_index_once(lengths, capacity):
    rows = pack_rows(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert all(0 < total <= capacity for total in filled)
    # the longest index comes first in a row, and the rows are sorted by it
    assert all(lengths[row[0]] == max(lengths[index] for index in row) for row in rows)
    assert rows == sorted(rows)
    # best fit starts a row only for what fits no other: no two rows fit into one
    assert all(a + b > capacity for i, a in enumerate(filled) for b in filled[i + 1 :])
    assert pack_rows(lengths, capacity) == rows


def test_packing_takes_the_fullest_row_that_fits():
    assert pack_rows([6, 5, 4, 3], 10) == [[0, 2], [1, 3]]
    assert pack_rows([7, 5, 3], 10) == [[0, 2], [1]]
    assert pack_rows([3, 7, 8, 9], 10) == [[1, 0], [2], [3]]
    lengths = np.random.default_rng(0).integers(1, 40, 400)
    examples = packed(encoded_of([(1, int(length)) for length in lengths]), 40)
    (batch,) = eval_batches(examples, batch_size=len(examples) // 4, limit=1)
    longest = [max(len(examples.encoded[index]) for index in row) for row in examples.rows]
    first = longest[: len(batch["tokens"])]
    assert abs(np.mean(first) - np.mean(longest)) < 2
    assert not (np.diff(first) <= 0).all()


def test_text_to_text_pads_prompts_and_answers():
    examples = text_to_text(encoded_of([(2, 3), (4, 1)]))
    row = examples[0]
    # the last token of the answer is the end-of-text token
    assert row["inputs"].tolist() == [1000, 1001, 1504, 0, 0]
    assert row["inputs_mask"].tolist() == [1, 1, 1, 0, 0]
    assert row["targets"].tolist() == [1502, 1503, 1504, 0]
    assert row["mask"].tolist() == [1, 1, 1, 0]
    dtypes = {"inputs": "int32", "inputs_mask": "int32", "targets": "int32", "mask": "float32"}
    assert {name: array.dtype.name for name, array in row.items()} == dtypes
    assert len(examples) == 2


def test_text_to_text_truncates_or_skips_what_is_too_long():
    encoded, skipped = encoded_of([(2, 3), (9, 1), (1, 9)]), Skipped()
    truncated = text_to_text(encoded, skipped=skipped)
    assert (len(truncated), dict(skipped)) == (3, {"truncated": 2})
    assert truncated[1]["inputs"].tolist() == encoded[1].prompt[:5].tolist()
    assert truncated[2]["targets"].tolist() == encoded[2].answer[:4].tolist()
    skipped = Skipped()
    remaining = text_to_text(encoded, too_long="skip", skipped=skipped)
    assert (len(remaining), dict(skipped)) == (1, {"too long": 2})
    with refused("no instruction fits", error=ConfigError):
        text_to_text(encoded[1:], too_long="skip")


def test_records_are_read_from_both_json_formats(tmp_path):
    records = [
        {"instruction": "a", "input": "b", "output": "c"},
        {"instruction": "d", "output": "e", "id": 1},
        {"instruction": "f", "input": None, "output": "g"},
        {"instruction": "h", "output": " "},
    ]
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    for name in ("a.json", "a.jsonl"):
        skipped = Skipped()
        assert load_instructions(str(tmp_path / name), skipped) == [
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
    expected = [InstructionRecord("a", "", "b"), InstructionRecord("c", "d", "e")]
    assert load_instructions(str(tmp_path / "saved"), Skipped()) == expected


def test_malformed_records_are_refused(tmp_path):
    cases = [
        ('{"instruction": "a"}', {"where": "./a.jsonl, line 1", "expected": "a field 'output'"}),
        (
            '{"instruction": "a", "output": 5}',
            {"where": "./a.jsonl, line 1, field 'output'", "got": "a number"},
        ),
        (
            '{"instruction": "a", "input": [], "output": "b"}',
            {"where": "./a.jsonl, line 1, field 'input'", "got": "a list"},
        ),
        (
            '{"instruction": "a", "output": ""}',
            {"what": "no instructions", "got": "1 records (1 without an answer)"},
        ),
        ("", {"what": "no instructions", "got": "0 records"}),
        (
            '{"instruction": "\\ud800", "output": "a"}',
            {
                "error": DamageError,
                "what": "not UTF-8",
                "where": "./a.jsonl, line 1, field 'instruction'",
            },
        ),
    ]
    with collected() as case:
        for content, says in cases:
            with case(content):
                (tmp_path / "a.jsonl").write_text(content)
                with refused(**{"error": ConfigError} | fields(says, tmp_path)):
                    load_instructions(str(tmp_path / "a.jsonl"), Skipped())


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_records_that_are_not_utf8_are_repaired_or_skipped(tmp_path, ending):
    invalid = {"instruction": "a\ud800", "input": "\ud800", "output": "\ud800"}
    records = [invalid, {"instruction": "b", "output": "c"}]
    file = tmp_path / f"a.{ending}"
    if ending == "json":
        file.write_text(json.dumps(records))
    else:
        file.write_text("\n".join(map(json.dumps, records)))
    valid, skipped = InstructionRecord("b", "", "c"), Skipped()
    assert load_instructions(str(file), skipped, invalid="skip") == [valid]
    assert +skipped == {"not UTF-8": 1}
    repaired = InstructionRecord("a\ufffd", "\ufffd", "\ufffd")
    assert load_instructions(str(file), skipped, invalid="replace") == [repaired, valid]
    with refused(error=ConfigError, expected="error, replace, skip"):
        load_instructions(str(file), skipped, invalid="maybe")
    with refused("cannot be read", error=ConfigError, where=str(tmp_path / "nowhere.json")):
        load_instructions(str(tmp_path / "nowhere.json"), skipped)


def test_the_shipped_set_is_good_to_train_with():
    skipped = Skipped()
    records = load_instructions(None, skipped)
    assert len(records) >= 200
    assert not skipped.total()
    assert 0.2 < sum(bool(each.input) for each in records) / len(records) < 0.3
    assert len({(each.instruction, each.input) for each in records}) == len(records)
    texts = [text for each in records for text in (each.instruction, each.input, each.output)]
    assert all(text == text.strip() for text in texts)
    assert digest_instructions(records) == digest_instructions(load_instructions(None, Skipped()))
    assert digest_instructions(records) != digest_instructions(records[::-1])


def test_arithmetic_in_the_shipped_set_is_right():
    operations = {
        "plus": lambda a, b: a + b,
        "minus": lambda a, b: a - b,
        "times": lambda a, b: a * b,
        "divided": lambda a, b: a // b,
    }
    checked = 0
    for each in load_instructions(None, Skipped()):
        words = each.instruction.rstrip("?").split()
        if words[:2] == ["What", "is"] and len(words) in (5, 6) and words[3] in operations:
            assert each.output == str(operations[words[3]](int(words[2]), int(words[-1])))
            checked += 1
    assert checked == 16
