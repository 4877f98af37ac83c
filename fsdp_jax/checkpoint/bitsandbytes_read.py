"""Weights that bitsandbytes stored in 4 bits, as transformers saves them with `load_in_4bit`.

[Note: the format] A weight [O, I] is cut, row after row, into blocks of 64 elements (`blocksize`);
a block may go on in the next row. GPT-2's Conv1D, whose weight is [I, O], is transposed first. Of
`X.weight` a file has

| name | contents |
|---|---|
| `X.weight` | two codes in a byte, the first in its high bits; in any dtype (`quant_storage`) |
| `X.weight.quant_map` | the 16 values of codes |
| `X.weight.absmax` | the scales, float32 [blocks]; or codes of them, uint8 |
| `X.weight.nested_quant_map`, `.nested_absmax` | values of these, and scales of 256 of them |
| `X.weight.quant_state.bitsandbytes__nf4` | JSON in bytes: shape, dtype, `nested_offset`, ... |

Formulas: a value is quant_map[code] * scale, in float32, rounded to `dtype`; a scale is
nested_quant_map[code] * nested_absmax + nested_offset, in float32, rounded after each operation.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from fsdp_jax.errors import ConfigError, DamageError, first_lines
from fsdp_jax.io.boxes import Box, full_box
from fsdp_jax.io.json_text import parse_json
from fsdp_jax.io.safetensors import StoredTensor
from fsdp_jax.sharding.quantized import NF4

STATE = ".quant_state.bitsandbytes__"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
SHOWN = 10  # problems listed before the rest is only counted
_OF_8_BITS = ".SCB"  # the scales of `load_in_8bit`


@dataclass(frozen=True)
class CodedTensor(StoredTensor):
    """A weight in codes; `read` returns its values, or a part of what is stored.

    `shape` and `dtype` are of what is read; `file` and `offset` of the codes' bytes.
    """

    inputs: int  # I, the length of a row
    block: int
    absmax: StoredTensor
    nested: tuple[StoredTensor, np.ndarray, int, np.float32] | None  # absmax, map, block, offset
    part: Literal["values", "codes", "scales"] = "values"
    transposed: bool = False  # as it is read: [I, O]

    def __str__(self) -> str:
        return f"NF4{list(self.shape)}"

    @property
    def block_dim(self) -> int:
        """The dim that blocks run along."""
        return 0 if self.transposed else 1

    @property
    def has_whole_blocks(self) -> bool:
        """Whether a row has whole blocks."""
        return self.inputs % self.block == 0

    @property
    def transpose(self) -> "CodedTensor":
        """The same weight as [I, O]."""
        return replace(self, transposed=not self.transposed, shape=self.shape[::-1])

    @property
    def codes(self) -> "CodedTensor":
        """The codes, uint8 of the shape of the weight."""
        return replace(self, part="codes", dtype=np.dtype(np.uint8))

    @property
    def scales(self) -> "CodedTensor":
        """The scales, float32: one for each block of a row."""
        assert self.has_whole_blocks
        sizes = list(self.shape)
        sizes[self.block_dim] //= self.block
        return replace(self, part="scales", dtype=np.dtype(np.float32), shape=tuple(sizes))

    def contiguous_bytes(self, box: Box) -> int:
        """Counts the bytes of a box that are contiguous in the file."""
        if self.transposed:  # more of the last dim, as for short ones, is not contiguous either
            return sys.maxsize
        rows, columns = self._rows_and_columns(box)
        count = columns[1] - columns[0]
        if count == self.inputs:
            count *= rows[1] - rows[0]
        return count // 2

    def read(self, box: Box, scratch: np.ndarray | None = None) -> np.ndarray:
        """Reads a box of the values, codes or scales. Raises as `StoredTensor.read`."""
        del scratch  # a box is smaller in the file
        rows, columns = self._rows_and_columns(box)
        if self.part == "codes":
            found = self._read_codes(rows, columns)
        elif self.part == "scales":
            of_row = self.inputs // self.block
            found = self._read_scales(np.arange(*rows)[:, None] * of_row + np.arange(*columns))
        else:
            found = NF4[self._read_codes(rows, columns)]
            found *= self._scale_elements(rows, columns)
        found = found.astype(self.dtype, copy=False)
        return found.T if self.transposed else found

    def _rows_and_columns(self, box: Box) -> tuple[tuple[int, int], tuple[int, int]]:
        first, second = box
        return (second, first) if self.transposed else (first, second)

    def _read_codes(self, rows: tuple[int, int], columns: tuple[int, int]) -> np.ndarray:
        """Reads codes [rows, columns], one in a byte."""
        outputs = self.shape[1] if self.transposed else self.shape[0]
        stored = StoredTensor(
            self.name,
            self.path,
            self.file,
            self.offset,
            (outputs, self.inputs // 2),
            np.dtype(np.uint8),
        )
        lo, hi = columns[0] // 2, -(-columns[1] // 2)
        packed = stored.read((rows, (lo, hi)))
        codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(len(packed), -1)
        return codes[:, columns[0] - 2 * lo : columns[1] - 2 * lo]

    def _scale_elements(self, rows: tuple[int, int], columns: tuple[int, int]) -> np.ndarray:
        """Reads the scale of each element: float32 [rows, columns]."""
        if not self.has_whole_blocks:  # they go on from row to row
            elements = np.arange(*rows)[:, None] * self.inputs + np.arange(*columns)
            return self._read_scales(elements // self.block)
        lo, hi = columns[0] // self.block, -(-columns[1] // self.block)
        of_row = self.inputs // self.block
        scales = self._read_scales(np.arange(*rows)[:, None] * of_row + np.arange(lo, hi))
        first = lo * self.block
        return np.repeat(scales, self.block, axis=1)[:, columns[0] - first : columns[1] - first]

    def _read_scales(self, blocks: np.ndarray) -> np.ndarray:
        """Reads the scales of these blocks, float32; the first has the lowest number."""
        if not blocks.size:
            return np.empty(blocks.shape, np.float32)
        first, last = int(blocks.flat[0]), int(blocks.flat[-1]) + 1
        scales = self.absmax.read(((first, last),))
        if self.nested is not None:
            absmax, table, block, offset = self.nested
            outer = absmax.read(((first // block, -(-last // block)),))
            which = np.arange(first, last) // block - first // block
            scales = table[scales] * outer[which] + offset
        return scales[blocks - first]


def join_codes(tensors: Mapping[str, StoredTensor], where: Path) -> dict[str, StoredTensor]:
    """Replaces the parts of each weight in 4 bits by one `CodedTensor`.

    `where`: their folder. Raises ConfigError for other formats than nf4, each by name, DamageError
    for parts that do not fit together.
    """
    lines = [f"{name}: bitsandbytes' 8 bits" for name in tensors if name.endswith(_OF_8_BITS)]
    states = {name: name.partition(STATE) for name in tensors if STATE in name}
    found = dict(tensors)
    for name, (weight, _, form) in states.items():
        if form != "nf4":
            lines.append(f"{weight}: {form}")
            continue
        found[weight] = _coded(weight, name, tensors)
        for part in (name, *(f"{weight}.{part}" for part in PARTS)):
            found.pop(part, None)
    if lines:
        raise ConfigError(
            "codes in another format than nf4",
            where=str(where),
            got=first_lines(lines, SHOWN),
            fix="the weights that they were made from; or dequantize() with transformers",
        )
    return found


def _coded(weight: str, name: str, tensors: Mapping[str, StoredTensor]) -> CodedTensor:
    """Makes the tensor of a `weight` whose state is the tensor `name`."""
    state = tensors[name]
    try:
        content: Any = parse_json(state.read(full_box(state.shape)).tobytes().decode())
        outputs, inputs = content["shape"]
        block, dtype = content["blocksize"], jnp.dtype(content["dtype"])
        codes, absmax = tensors[weight], tensors[f"{weight}.absmax"]
        table = tensors[f"{weight}.quant_map"]
        nested = None
        if "nested_offset" in content:
            nested_map = tensors[f"{weight}.nested_quant_map"]
            nested = (
                tensors[f"{weight}.nested_absmax"],
                nested_map.read(full_box(nested_map.shape)).astype(np.float32),
                content["nested_blocksize"],
                np.float32(content["nested_offset"]),
            )
        count = -(-outputs * inputs // block)
        held = math.prod(codes.shape) * codes.dtype.itemsize
        problems = {
            "an odd number of inputs": inputs % 2 == 0,
            "values of codes that are not nf4's": np.array_equal(
                table.read(full_box(table.shape)), NF4
            ),
            f"{held} bytes of codes for {outputs} x {inputs}": held == outputs * inputs // 2,
            f"{absmax.shape} scales for {count} blocks": absmax.shape == (count,),
            f"scales in {absmax.dtype}": absmax.dtype
            == np.dtype(np.float32 if nested is None else np.uint8),
        }
        if nested is not None:
            outer = -(-count // nested[2])
            problems[f"{nested[0]} scales of scales"] = (
                nested[0].shape == (outer,) and nested[0].dtype == np.float32
            )
            problems[f"{len(nested[1])} values of scales"] = nested[1].shape == (256,)
        wrong = [problem for problem, holds in problems.items() if not holds]
        if wrong:
            raise ValueError("; ".join(wrong))
    except (KeyError, TypeError, ValueError) as error:
        raise DamageError(
            "a weight in 4 bits cannot be read",
            where=f"{state.path}, tensor {weight}",
            expected="the parts that bitsandbytes writes",
            got=error,
        ) from error
    return CodedTensor(
        weight,
        codes.path,
        codes.file,
        codes.offset,
        (outputs, inputs),
        dtype,
        inputs=inputs,
        block=block,
        absmax=absmax,
        nested=nested,
    )
