"""Instructions with their answers, in the format of Alpaca (Taori et al., 2023): records of
`instruction`, `input` (optional) and `output`.

Decoder-only models read prompt and answer as one row, several of them packed into it; models with
an encoder read the prompt there and write the answer. Only what is answered counts in the loss.

Shapes: T sequence, S inputs.
"""

import hashlib
import json
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from fsdp_jax.data.examples import Row, Settings, padded, real
from fsdp_jax.data.files import Skipped, unreadable
from fsdp_jax.data.records import (
    Invalid,
    Record,
    check_invalid,
    field_of,
    is_json,
    read_dataset,
    read_json,
    would_be_ignored,
)
from fsdp_jax.data.tokenizer import Tokenizer
from fsdp_jax.data.windows import check_positive
from fsdp_jax.errors import ConfigError, message

PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
"""Alpaca's templates, to the letter."""

SHIPPED = "instructions.jsonl"
TooLong = Literal["truncate", "skip"]
"""What becomes of an example that no row can hold: its end is cut off, or it is passed over. Both are counted."""

NO_ANSWER, CUT, LONG = "without an answer", "truncated", "too long"


@dataclass(frozen=True)
class InstructionRecord:
    """An instruction and its answer; `input` is "" where there is none."""

    instruction: str
    input: str
    output: str

    @property
    def prompt(self) -> str:
        """What the model reads before it answers."""
        template = PROMPT_WITH_INPUT if self.input else PROMPT
        return template.format(instruction=self.instruction, input=self.input)


@dataclass(frozen=True, eq=False)
class EncodedInstruction:
    """Token ids, int32, one dimension: of a prompt, and of its answer with the end-of-text token."""

    prompt: np.ndarray
    answer: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def load_instructions(
    path: str | None, skipped: Skipped, *, split: str = "train", invalid: Invalid = "error"
) -> list[InstructionRecord]:
    """The records of a `.json` or `.jsonl`, of a Hugging Face dataset's split, or, for None, the
    set that comes along.

    One with nothing in `output` is passed over and counted. `invalid` says what becomes of text
    that is not UTF-8; what is skipped is the record. Raises ConfigError, with file and line, at a
    record that is none, and where there is none at all.
    """
    check_invalid(invalid)
    if split != "train" and (path is None or is_json(path)):
        raise would_be_ignored("split", split)
    if path is None:
        with resources.as_file(resources.files("fsdp_jax.data").joinpath(SHIPPED)) as file:
            records = list(read_json(file, invalid=invalid, skipped=skipped))
    elif is_json(path):
        file = Path(path).expanduser()
        if not file.is_file():
            raise unreadable(file, FileNotFoundError("no such file"))
        records = list(read_json(file, invalid=invalid, skipped=skipped))
    else:
        records = list(read_dataset(path, split))
    read = (_instruction(where, record, invalid, skipped) for where, record in records)
    found = [each for each in read if each is not None]
    kept = [each for each in found if each.output.strip()]
    skipped[NO_ANSWER] += len(found) - len(kept)
    if not kept:
        got = f"{len(records)} records" + (f" ({skipped})" if skipped.total() else "")
        what, expected = "There are no instructions.", "at least one record with an output"
        raise ConfigError(message(what, where=path or SHIPPED, expected=expected, got=got))
    return kept


def _instruction(
    where: str, record: Record, invalid: Invalid, skipped: Skipped
) -> InstructionRecord | None:
    """None where one of its fields is passed over."""
    without = record | (
        {} if record.get("input") is not None else {"input": ""}
    )  # datasets fill in None
    texts = []
    for name in ("instruction", "input", "output"):
        text = field_of(without, name, where, invalid=invalid, skipped=skipped)
        if text is None:
            return None  # counted once, whatever the other fields are
        texts.append(text)
    return InstructionRecord(*texts)


def digest_of(instructions: Iterable[InstructionRecord]) -> str:
    """SHA-256, in hexadecimal, of the records in order."""
    digest = hashlib.sha256()
    for each in instructions:
        digest.update(json.dumps([each.instruction, each.input, each.output]).encode() + b"\n")
    return digest.hexdigest()


def encode_pairs(
    instructions: Sequence[InstructionRecord], tokenizer: Tokenizer
) -> list[EncodedInstruction]:
    """Prompts and answers, encoded apart, so that where one ends does not depend on the other.

    Raises ConfigError where the tokenizer has no end-of-text token: no answer would ever end.
    """
    if tokenizer.end is None:
        what, fix = (
            "The tokenizer has no end-of-text token.",
            "name one as eos_token in its tokenizer_config.json",
        )
        raise ConfigError(message(what, where="data.tokenizer", got=tokenizer.name, fix=fix))
    begin, end = np.array(tokenizer.begin, np.int32), np.array([tokenizer.end], np.int32)
    prompts = tokenizer.encode_batch([each.prompt for each in instructions])
    answers = tokenizer.encode_batch([each.output for each in instructions])
    found = zip(prompts, answers, strict=True)
    return [
        EncodedInstruction(np.concatenate([begin, prompt]), np.concatenate([answer, end]))
        for prompt, answer in found
    ]


class PackedInstructions:
    """Random access to rows of T+1 tokens into which whole examples are packed, by best fit; see
    `pack`.

    Raises ConfigError where not one example fits. `skipped` counts what was cut or passed over.
    """

    def __init__(
        self,
        pairs: Sequence[EncodedInstruction],
        *,
        sequence_length: int,
        too_long: TooLong = "truncate",
        skipped: Skipped | None = None,
    ) -> None:
        check_positive("data.sequence_length", sequence_length)
        room = sequence_length + 1
        fitting = (_fit(pair, room, too_long, skipped) for pair in pairs)
        self.pairs = [pair for pair in fitting if pair is not None]
        if not self.pairs:
            raise _none_fits(pairs, sequence_length, lambda pair: len(pair) - 1)
        self.sequence_length = sequence_length
        self.rows = pack([len(pair) for pair in self.pairs], room)
        self.settings: Settings = {"sequence_length": sequence_length, **_sums(self.pairs)}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        """`tokens`, int32 [T+1]; `segments` and `positions`, int32 [T]; `mask`, float32 [T].

        Segments are numbered from 1, padding is segment 0 and token 0. Positions start again with
        each example.
        """
        length = self.sequence_length
        tokens, segments, positions = (np.zeros(length + 1, np.int32) for _ in range(3))
        answered = np.zeros(length + 1, np.float32)
        first = 0
        for number, at in enumerate(self.rows[index], 1):
            pair = self.pairs[at]
            last = first + len(pair)
            tokens[first:last] = np.concatenate([pair.prompt, pair.answer])
            segments[first:last] = number
            positions[first:last] = np.arange(len(pair))
            answered[first + len(pair.prompt) : last] = 1
            first = last
        return {
            "tokens": tokens,
            "segments": segments[:-1],
            "positions": positions[:-1],
            "mask": answered[1:],
        }


class TextToText:
    """Random access to prompts and answers of fixed lengths, for models with an encoder.

    Prompts end in the end-of-text token too, as T5's inputs do. Raises ConfigError where not one
    example fits. `skipped` counts what was cut or passed over.
    """

    def __init__(
        self,
        pairs: Sequence[EncodedInstruction],
        *,
        inputs_length: int,
        targets_length: int,
        too_long: TooLong = "truncate",
        skipped: Skipped | None = None,
    ) -> None:
        check_positive("data.sequence_length", inputs_length)
        check_positive("data.target_length", targets_length)
        self.inputs_length, self.targets_length = inputs_length, targets_length
        self.pairs: list[EncodedInstruction] = []
        for pair in pairs:
            ended = EncodedInstruction(np.concatenate([pair.prompt, pair.answer[-1:]]), pair.answer)
            long = len(ended.prompt) > inputs_length or len(ended.answer) > targets_length
            if long and skipped is not None:
                skipped[CUT if too_long == "truncate" else LONG] += 1
            if not long or too_long == "truncate":
                self.pairs.append(
                    EncodedInstruction(ended.prompt[:inputs_length], ended.answer[:targets_length])
                )
        if not self.pairs:
            raise _none_fits(pairs, inputs_length, lambda pair: len(pair.prompt) + 1)
        lengths = {"inputs_length": inputs_length, "targets_length": targets_length}
        self.settings: Settings = {**lengths, **_sums(self.pairs)}

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Row:
        """`inputs`, `inputs_mask`, int32 [S]; `targets`, int32 [T], and `mask`, float32 [T];
        padding is 0.
        """
        pair = self.pairs[index]
        return {
            "inputs": padded(pair.prompt, self.inputs_length),
            "inputs_mask": real(len(pair.prompt), self.inputs_length, np.int32),
            "targets": padded(pair.answer, self.targets_length),
            "mask": real(len(pair.answer), self.targets_length),
        }


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Rows of indices such that the lengths of a row are at most `room` together, by best fit
    decreasing.

    Each index is in one row, the longest of a row stands first, and by it the rows are ordered: in
    the order of the indices, not of the lengths, so that the first rows are like all others. The
    same lengths give the same rows. No length may be more than `room`.
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (room that is left, row), sorted
    for at in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        assert lengths[at] <= room, "what is too long was cut or left out"
        found = bisect_left(spaces, (lengths[at], -1))
        left, row = spaces.pop(found) if found < len(spaces) else (room, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(at)
        if left - lengths[at]:
            insort(spaces, (left - lengths[at], row))
    return sorted(rows)


def check_too_long(too_long: str) -> None:
    """Raises ConfigError where it is not one of `TooLong`."""
    if too_long not in get_args(TooLong):
        expected = ", ".join(get_args(TooLong))
        raise ConfigError(
            message("No such choice.", where="data.too_long", expected=expected, got=too_long)
        )


def _sums(pairs: Sequence[EncodedInstruction]) -> dict[str, int]:
    return {"instructions": len(pairs), "instruction_tokens": sum(map(len, pairs))}


def _fit(
    pair: EncodedInstruction, room: int, too_long: TooLong, skipped: Skipped | None
) -> EncodedInstruction | None:
    """The example as a row can hold it; None where it cannot, or where nothing of the answer would
    be left.
    """
    if len(pair) <= room:
        return pair
    keep = too_long == "truncate" and len(pair.prompt) < room
    if skipped is not None:
        skipped[CUT if keep else LONG] += 1
    return EncodedInstruction(pair.prompt, pair.answer[: room - len(pair.prompt)]) if keep else None


def _none_fits(
    pairs: Sequence[EncodedInstruction], length: int, needs: Callable[[EncodedInstruction], int]
) -> ConfigError:
    shortest = min(map(needs, pairs), default=1)
    what, expected = (
        "No instruction fits a row.",
        f"at least {shortest}, what the shortest of {len(pairs)} needs",
    )
    return ConfigError(message(what, where="data.sequence_length", expected=expected, got=length))
