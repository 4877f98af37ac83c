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

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_jax.errors import ConfigError, DamageError, first_lines
from fsdp_jax.io.array_specs import array_bytes
from fsdp_jax.io.boxes import Box, full_box
from fsdp_jax.io.json_text import parse_json
from fsdp_jax.io.safetensors import AGAIN, StoredTensor
from fsdp_jax.sharding.quantized import NF4

STATE = ".quant_state.bitsandbytes__"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
SHOWN = 10  # problems listed before the rest is only counted
_OF_8_BITS = ".SCB"  # the scales of `load_in_8bit`


@dataclass(frozen=True)
class BlockScales:
    """The scales of a weight's blocks, in the order of the file."""

    absmax: StoredTensor
    # Where `absmax` has codes: the scales of these, their values, block and offset.
    outer: StoredTensor | None = None
    table: np.ndarray | None = None
    outer_block: int = 1
    offset: float = 0.0

    def read(self, blocks: np.ndarray) -> np.ndarray:
        """Reads the scales of these blocks, float32; the first has the lowest number."""
        if not blocks.size:
            return np.empty(blocks.shape, np.float32)
        first, last = int(blocks.flat[0]), int(blocks.flat[-1]) + 1
        scales = self.absmax.read(((first, last),))
        if self.outer is not None and self.table is not None:
            lo, hi = first // self.outer_block, -(-last // self.outer_block)
            outer = self.outer.read(((lo, hi),))
            which = np.arange(first, last) // self.outer_block - lo
            scales = self.table[scales] * outer[which] + self.offset
        return scales[blocks - first]


class Codes(StoredTensor):
    """The codes of a weight [O, I], one in a byte as they are read, two in the file."""

    def contiguous_bytes(self, box: Box) -> int:
        """Counts the bytes of a box that are contiguous in the file."""
        return super().contiguous_bytes(box) // 2

    def read(self, box: Box, scratch: np.ndarray | None = None) -> np.ndarray:
        """Reads the codes of a box. Raises as `StoredTensor.read`."""
        del scratch  # a box is smaller in the file
        rows, (first, last) = box
        lo, hi = first // 2, -(-last // 2)
        outputs, inputs = self.shape
        place = (self.name, self.path, self.file, self.offset)
        packed = StoredTensor(*place, (outputs, inputs // 2), self.dtype).read((rows, (lo, hi)))
        codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(len(packed), -1)
        return codes[:, first - 2 * lo : last - 2 * lo]


@dataclass(frozen=True)
class RowScales(StoredTensor):
    """The scales of a weight [O, I] whose rows have whole blocks: float32 [O, blocks of a row]."""

    of_blocks: BlockScales

    def contiguous_bytes(self, box: Box) -> int:
        """Counts a box as contiguous: what lies between its rows is read with them."""
        return sys.maxsize

    def read(self, box: Box, scratch: np.ndarray | None = None) -> np.ndarray:
        """Reads the scales of a box. Raises as `StoredTensor.read`."""
        rows, columns = box
        return self.of_blocks.read(np.arange(*rows)[:, None] * self.shape[1] + np.arange(*columns))


@dataclass(frozen=True)
class CodedTensor(StoredTensor):
    """A weight [O, I] in codes, of which `read` returns the values.

    `shape` and `dtype` are of the values; `file` and `offset` of the codes' bytes.
    """

    block: int
    of_blocks: BlockScales
    block_dim = 1  # that blocks run along

    def __str__(self) -> str:
        return f"NF4{list(self.shape)}"

    @property
    def has_whole_blocks(self) -> bool:
        """Whether a row has whole blocks."""
        return self.shape[1] % self.block == 0

    @property
    def codes(self) -> Codes:
        """The codes, uint8 of the shape of the weight."""
        place = (self.name, self.path, self.file, self.offset)
        return Codes(*place, self.shape, np.dtype(np.uint8))

    @property
    def scales(self) -> RowScales:
        """The scales, float32: one for each block of a row."""
        assert self.has_whole_blocks
        place = (self.name, self.path, self.file, self.offset)
        shape = self.shape[0], self.shape[1] // self.block
        return RowScales(*place, shape, np.dtype(np.float32), self.of_blocks)

    def contiguous_bytes(self, box: Box) -> int:
        """Counts the bytes of a box that are contiguous in the file."""
        return self.codes.contiguous_bytes(box)

    def read(self, box: Box, scratch: np.ndarray | None = None) -> np.ndarray:
        """Reads the values of a box. Raises as `StoredTensor.read`."""
        values = NF4[self.codes.read(box, scratch)]
        values *= self._scale_elements(box)
        return values.astype(self.dtype, copy=False)

    def _scale_elements(self, box: Box) -> np.ndarray:
        """Reads the scale of each element of a box, float32."""
        rows, (first, last) = box
        if not self.has_whole_blocks:  # they go on from row to row
            elements = np.arange(*rows)[:, None] * self.shape[1] + np.arange(first, last)
            return self.of_blocks.read(elements // self.block)
        lo, hi = first // self.block, -(-last // self.block)
        scales = np.repeat(self.scales.read((rows, (lo, hi))), self.block, axis=1)
        return scales[:, first - lo * self.block : last - lo * self.block]


def join_codes(tensors: Mapping[str, StoredTensor], where: Path) -> dict[str, StoredTensor]:
    """Replaces the parts of each weight in 4 bits by one `CodedTensor`.

    `where`: their folder. Raises ConfigError for what is not supported, each weight by name,
    DamageError for parts that do not fit together.
    """
    lines = [f"{name}: bitsandbytes' 8 bits" for name in tensors if name.endswith(_OF_8_BITS)]
    found = dict(tensors)
    for name, tensor in tensors.items():
        weight, is_state, form = name.partition(STATE)
        if not is_state:
            continue
        if form != "nf4":
            lines.append(f"{weight}: {form}")
            continue
        try:
            state = _read_state(tensor)
            if state.shape[1] % 2:  # two rows share a byte
                lines.append(f"{weight}: {state.shape[1]} inputs, an odd number")
                continue
            found[weight] = _coded(weight, state, tensors)
        except ValueError as error:
            raise DamageError(
                "a weight in 4 bits cannot be read",
                where=f"{tensor.path}, tensor {weight}",
                expected="the parts that bitsandbytes writes",
                got=error,
                fix=AGAIN,
            ) from error
        for part in (name, *(f"{weight}.{part}" for part in PARTS)):
            found.pop(part, None)
    if lines:
        raise ConfigError(
            "codes that are not supported",
            where=str(where),
            expected="nf4, of an even number of inputs",
            got=first_lines(lines, SHOWN),
            fix="the weights that they were made from; or dequantize() with transformers",
        )
    return found


@dataclass(frozen=True)
class _State:
    """What is said of a weight beside its codes."""

    shape: tuple[int, int]
    block: int
    dtype: str
    nested: tuple[int, float] | None  # the block and offset of scales that are codes


def _read_state(tensor: StoredTensor) -> _State:
    """Reads the JSON of a weight. Raises ValueError, with the key that it lacks or has wrongly."""
    content: Any = parse_json(tensor.read(full_box(tensor.shape)).tobytes().decode())
    if not isinstance(content, dict):
        raise ValueError(f"a state that is a {type(content).__name__}")

    def field(name: str, holds: Callable[[Any], bool]) -> Any:
        value = content.get(name)
        if not holds(value):
            raise ValueError(f"{name}: {json.dumps(value)}")
        return value

    def is_shape(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(map(_is_size, value))

    nested = None
    if "nested_offset" in content:
        offset = field("nested_offset", lambda value: type(value) in (int, float))
        nested = field("nested_blocksize", _is_size), offset
    return _State(
        shape=tuple(field("shape", is_shape)),
        block=field("blocksize", _is_size),
        dtype=field("dtype", ("float32", "bfloat16", "float16").__contains__),
        nested=nested,
    )


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _coded(weight: str, state: _State, tensors: Mapping[str, StoredTensor]) -> CodedTensor:
    """Makes the tensor of a `weight`. Raises ValueError for parts that do not fit its state."""

    def part(name: str, dtype: Any, *shape: int) -> StoredTensor:
        full = f"{weight}.{name}"
        if full not in tensors:
            raise ValueError(f"no {full}")
        tensor = tensors[full]
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise ValueError(f"{full}: {tensor}, not {np.dtype(dtype)}{list(shape)}")
        return tensor

    if weight not in tensors:
        raise ValueError(f"no {weight}")
    codes = tensors[weight]
    held, (outputs, inputs) = array_bytes(codes.shape, codes.dtype), state.shape
    if held != outputs * inputs // 2:
        raise ValueError(f"{held} bytes of codes for {outputs} x {inputs}")
    table = part("quant_map", np.float32, 16).read(((0, 16),))
    if not np.array_equal(table, NF4):
        raise ValueError("values of codes that are not nf4's")
    count = -(-outputs * inputs // state.block)
    if state.nested is None:
        scales = BlockScales(part("absmax", np.float32, count))
    else:
        block, offset = state.nested
        scales = BlockScales(
            part("absmax", np.uint8, count),
            part("nested_absmax", np.float32, -(-count // block)),
            part("nested_quant_map", np.float32, 256).read(((0, 256),)),
            block,
            offset,
        )
    place = (weight, codes.path, codes.file, codes.offset)
    return CodedTensor(*place, state.shape, np.dtype(state.dtype), state.block, scales)
