"""Rows of tokens made of encoded instructions: whole ones packed, or inputs and targets apart."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from fsdp_jax.data.checks import check_positive
from fsdp_jax.data.examples import Row, Settings, text_to_text_row
from fsdp_jax.data.files import Skipped
from fsdp_jax.data.instructions import EncodedInstruction
from fsdp_jax.data.options import TooLong
from fsdp_jax.errors import ConfigError

# Reasons, in `Skipped`.
TRUNCATED = "truncated"
TOO_LONG = "too long"


class PackedInstructions:
    """Random access to rows of T+1 tokens with whole instructions in them; see `pack_rows`.

    Of a longer instruction the answer is truncated, where `too_long` says so and the prompt fits;
    any other is left out. `skipped` counts both. Raises ConfigError if none is left.
    """

    def __init__(
        self,
        encoded: Sequence[EncodedInstruction],
        *,
        sequence_length: int,
        too_long: TooLong = "truncate",
        skipped: Skipped,
    ) -> None:
        check_positive("data.sequence_length", sequence_length)
        capacity = sequence_length + 1
        # whole instructions, truncated answers, or neither
        self.encoded: list[EncodedInstruction] = []
        for each in encoded:
            if len(each) <= capacity:
                self.encoded.append(each)
            elif too_long == "truncate" and len(each.prompt) < capacity:
                skipped[TRUNCATED] += 1
                self.encoded.append(each.truncate(capacity))
            else:
                skipped[TOO_LONG] += 1
        if not self.encoded:
            raise _none_fits_error([len(each) - 1 for each in encoded], sequence_length)
        self.sequence_length = sequence_length
        self.rows = pack_rows([len(each) for each in self.encoded], capacity)
        totals = _instruction_totals(self.encoded)
        self.settings: Settings = {"sequence_length": sequence_length, **totals}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        """Makes `tokens`, int32 [T+1]; `segments`, `positions`, int32 [T]; `mask`, float32 [T].

        Segments count examples from 1; padding is segment 0 and token 0. Positions start at 0 in
        each example. The mask is 1 where the target is a token of an answer, but for the first
        token of an example, which nothing in it precedes.
        """
        # one array for each name, T+1 long; the instructions are written into them side by side
        length = self.sequence_length
        tokens, segments, positions = (np.zeros(length + 1, np.int32) for _ in range(3))
        is_answer = np.zeros(length + 1, np.float32)
        first = 0
        for segment, number in enumerate(self.rows[index], 1):
            example = self.encoded[number]
            last = first + len(example)
            tokens[first:last] = np.concatenate([example.prompt, example.answer])
            segments[first:last] = segment
            positions[first:last] = np.arange(len(example))
            counted = 1 if example.counted is None else example.counted
            is_answer[first + len(example.prompt) : last] = counted
            is_answer[first] = 0  # without a prompt it would be predicted from another example
            first = last
        # the model reads tokens 0 to T-1, and predicts tokens 1 to T
        return {
            "tokens": tokens,
            "segments": segments[:-1],
            "positions": positions[:-1],
            "mask": is_answer[1:],
        }


class TextToText:
    """Random access to rows of one instruction each, for models with an encoder.

    The inputs are the prompt, which ends in the end-of-text token as T5's do; the targets are the
    answer. `too_long` and `skipped`: see `PackedInstructions`; prompts are truncated too.
    """

    def __init__(
        self,
        encoded: Sequence[EncodedInstruction],
        *,
        inputs_length: int,
        targets_length: int,
        too_long: TooLong = "truncate",
        skipped: Skipped,
    ) -> None:
        check_positive("data.sequence_length", inputs_length)
        check_positive("data.target_length", targets_length)
        self.lengths = (inputs_length, targets_length)
        # a truncated prompt loses its end, and the token with it
        self.encoded: list[EncodedInstruction] = []
        for each in encoded:
            prompt = np.concatenate([each.prompt, each.answer[-1:]])  # the end-of-text token
            answer = each.answer
            if len(prompt) > inputs_length or len(answer) > targets_length:
                if too_long == "skip":
                    skipped[TOO_LONG] += 1
                    continue
                skipped[TRUNCATED] += 1
            truncated = EncodedInstruction(prompt[:inputs_length], answer[:targets_length])
            self.encoded.append(truncated)
        if not self.encoded:
            raise _none_fits_error([len(each.prompt) + 1 for each in encoded], inputs_length)
        self.settings: Settings = {
            "inputs_length": inputs_length,
            "targets_length": targets_length,
            **_instruction_totals(self.encoded),
        }

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> Row:
        """Returns a `text_to_text_row`."""
        example = self.encoded[index]
        return text_to_text_row(example.prompt, example.answer, self.lengths)


def pack_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs indices of `lengths` into rows of at most `capacity`: best fit decreasing.

    The index of the longest comes first in a row, and the rows are sorted by it: by index, not by
    length, so that the first rows are like all others. The same lengths give the same rows. No
    length may exceed `capacity`.
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (free capacity, row), sorted
    # from the longest to the shortest, equal ones by index: the order decides on the rows
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        assert length <= capacity, "longer ones were truncated or skipped"
        # The fullest row that has enough space left, or a new one.
        fitting = bisect_left(spaces, (length, -1))
        if fitting < len(spaces):
            free, row = spaces.pop(fitting)
        else:
            free, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if free > length:
            insort(spaces, (free - length, row))
    return sorted(rows)


def _instruction_totals(encoded: Sequence[EncodedInstruction]) -> dict[str, int]:
    """Counts the instructions and their tokens, for `settings`."""
    return {"instructions": len(encoded), "instruction_tokens": sum(map(len, encoded))}


def _none_fits_error(needed: Sequence[int], length: int) -> ConfigError:
    """Makes the error for a sequence length that is too short for every instruction."""
    what = "no instruction fits a row"
    shortest = min(needed, default=1)
    expected = f"at least {shortest}, for the shortest of {len(needed)}"
    return ConfigError(what, where="data.sequence_length", expected=expected, got=length)
