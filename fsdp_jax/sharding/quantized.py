"""Frozen parameters stored in 4 or 8 bits, as QLoRA's base: codes in blocks, each with a scale.

[Note: the stored array] A block is a run of `block` elements along one dim of the parameter. It is
stored as bytes one after another along that dim: its codes, then its scale. So the stored array is
one uint8 array, with as many dims as the parameter, and is sharded by the parameter's own
PartitionSpec. Shards hold whole blocks: where that dim is sharded, and its blocks are no multiple
of the shards, zero blocks are stored behind them. What a step gathers is this array.

With 8-bit scales, 4 blocks in a row are stored together, and no shard cuts these: their codes,
their scales as uint8, and the exponent of a power of two that the scales are multiples of. QLoRA's
double quantization has 256 blocks in a group, and counts through the flattened matrix, so shards
would cut its groups.

Formulas, for a block x, in float32: the scale is s = max|x| / m, and a code stands for x / s.

| format | m | code |
|---|---|---|
| nf4 | 1 | the nearest of 16 quantiles of a normal distribution (arXiv:2305.14314, appendix E) |
| int4, int8 | 7, 127 | round(x / s), to even where two are as near |
| float8 | 448 | x / s in float8_e4m3fn |

8-bit scales: u = the smallest power of two with round(s / u) <= 255 for all 4 blocks; s becomes
u * round(s / u), at least u if s > 0. The largest s is rounded by 1/256 at most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fsdp_jax.errors import ArgumentError

BaseFormat = Literal["nf4", "int4", "int8", "float8"]
ScaleDtype = Literal["float32", "bfloat16", "uint8"]

# The values of codes 0 to 15, as bitsandbytes has them: appendix E of arXiv:2305.14314.
NF4 = np.array(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    np.float32,
)
_LARGEST = {"nf4": 1.0, "int4": 7.0, "int8": 127.0, "float8": 448.0}  # m of the table above
_FLOAT8 = jnp.float8_e4m3fn
_GROUP = 4  # blocks whose 8-bit scales are multiples of one power of two
_NAN = 255  # in place of its exponent, which is 127 for 1


@dataclass(frozen=True)
class QuantizedBase:
    """Stores frozen kernels in 4 or 8 bits; a step gathers the codes and dequantizes them.

    The model computes with the dequantized kernels, which no pass keeps. Biases, norms, embedding
    tables, the head and trained parameters stay as they are.

    Attributes:
        format: `nf4`, `int4`, `int8` or `float8` (e4m3); see the note in `sharding.quantized`.
        block: elements that share a scale; an even number.
        scales: dtype of the scales. With blocks of 64 a kernel takes 0.5625 bytes an element in 4
            bits with float32 scales, 0.53125 with bfloat16, and 0.51953125 with uint8, quantized
            again as by QLoRA: these are rounded to 8 bits of the largest of 4 blocks in a row, and
            shards hold whole runs of 4 blocks (256 elements).
        kernels: path patterns of the kernels; empty for all frozen kernels of units.

    Raises:
        ValueError: an unknown format or dtype; a block that is no even number.

    Example:
        >>> fsdp.QuantizedBase("nf4").bytes_per_element
        0.5625

    """

    format: BaseFormat = "nf4"
    block: int = 64
    scales: ScaleDtype = "float32"
    kernels: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, value, known in (
            ("format", self.format, get_args(BaseFormat)),
            ("scales", self.scales, get_args(ScaleDtype)),
        ):
            if value not in known:
                raise ArgumentError(
                    f"unknown {name} of a base",
                    where=f"base.{name}",
                    expected=known,
                    got=value,
                    fix=repr(known[0]),
                )
        is_number = isinstance(self.block, int | np.integer)
        is_even = is_number and self.block > 0 and self.block % 2 == 0
        if not is_even or isinstance(self.block, bool):
            raise ArgumentError(
                "not an even number of elements", where="base.block", got=self.block, fix="64"
            )
        patterns = (self.kernels,) if isinstance(self.kernels, str) else self.kernels
        if not isinstance(patterns, Sequence):
            raise ArgumentError(
                "not patterns of paths",
                where="base.kernels",
                got=type(patterns).__name__,
                fix='kernels=("kernel",)',
            )
        object.__setattr__(self, "kernels", tuple(patterns))
        object.__setattr__(self, "block", int(self.block))

    @property
    def name(self) -> str:
        """The format, the block and the dtype of the scales in one word."""
        return f"{self.format}:{self.block}:{self.scales}"

    @property
    def group(self) -> int:
        """The number of blocks that are stored together."""
        return _GROUP if self.scales == "uint8" else 1

    @property
    def granule(self) -> int:
        """The elements that are stored together; a shard holds whole ones."""
        return self.group * self.block

    @property
    def code_bytes(self) -> int:
        """The bytes of a block's codes."""
        return self.block // 2 if self.format in ("nf4", "int4") else self.block

    @property
    def granule_bytes(self) -> int:
        """The bytes of a granule: its codes, their scales and, of 8-bit scales, their unit."""
        unit = 1 if self.scales == "uint8" else 0
        return self.group * (self.code_bytes + jnp.dtype(self.scales).itemsize) + unit

    @property
    def bytes_per_element(self) -> float:
        """The bytes that an element takes, scales included."""
        return self.granule_bytes / self.granule


@dataclass(frozen=True)
class Blocks:
    """How one parameter is stored in blocks.

    Attributes:
        base: the format of a block.
        shape: of the parameter; inside a layer scan the leading dims are gone.
        dtype: of the parameter as the model sees it.
        dim: of the parameter, that the blocks run along.

    """

    base: QuantizedBase
    shape: tuple[int, ...]
    dtype: np.dtype
    dim: int

    @property
    def count(self) -> int:
        """The number of granules along `dim`; zeros fill the last one up."""
        return -(-self.shape[self.dim] // self.base.granule)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the uint8 array that holds the parameter, unpadded."""
        stored = self.count * self.base.granule_bytes
        return (*self.shape[: self.dim], stored, *self.shape[self.dim + 1 :])

    @property
    def granules(self) -> tuple[int, ...]:
        """For each dim of the parameter, the elements that a shard must not cut."""
        return tuple(self.base.granule if dim == self.dim else 1 for dim in range(len(self.shape)))

    @property
    def stored_granules(self) -> tuple[int, ...]:
        """For each dim of the stored array, the bytes that a shard must not cut."""
        return tuple(
            self.base.granule_bytes if dim == self.dim else 1 for dim in range(len(self.shape))
        )

    @property
    def name(self) -> str:
        """Says in one word what is stored: `nf4:64:float32:4096,11008:0`."""
        shape = ",".join(map(str, self.shape))
        return f"{self.base.name}:{shape}:{self.dim}"

    @classmethod
    def parse(cls, name: str, dtype: np.dtype) -> "Blocks":
        """Reads a `name`. Raises ValueError for any other text."""
        form, block, scales, shape, dim = name.split(":")
        base = QuantizedBase(cast(Any, form), int(block), cast(Any, scales))
        return cls(base, tuple(map(int, shape.split(","))), dtype, int(dim))

    @property
    def text(self) -> str:
        """Says what is stored, for a table."""
        shape = str(self.shape).replace(" ", "")
        base = self.base
        run = f"blocks of {base.block}"
        if base.group > 1:
            run = f"runs of {base.group} blocks of {base.block} with 8-bit scales"
        text = f"{base.format} of {self.dtype}{shape}, {run} along dim {self.dim}"
        elements = self.count * base.granule
        if elements > self.shape[self.dim]:
            text += f", filled up with zeros to {elements}"
        return text

    def model_box(self, box: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Converts a box of the stored array, of whole blocks, to the box of the parameter.

        It is cut to the parameter's shape, and empty where the box is of padding alone.
        """
        bounds = list(box)
        lo, hi = (edge // self.base.granule_bytes * self.base.granule for edge in box[self.dim])
        bounds[self.dim] = (lo, hi)
        return tuple(
            (min(lo, size), min(hi, size))
            for (lo, hi), size in zip(bounds, self.shape, strict=True)
        )

    def encode(self, array: jax.Array) -> jax.Array:
        """Quantizes the parameter, or any part of it that begins at a granule, to stored bytes.

        `array`: a float array with as many dims as the parameter. Returns uint8, unpadded.
        """
        base, dim = self.base, self.dim
        elements = -(-array.shape[dim] // base.granule) * base.granule
        # [..., blocks, block, ...] in float32; the last granule is filled up with zeros.
        behind = [(0, 0)] * array.ndim
        behind[dim] = (0, elements - array.shape[dim])
        padded = jnp.pad(array.astype(jnp.float32), behind)
        blocks = _split(padded, dim, elements // base.block)
        # The scale is rounded first, so that the codes are the nearest under it.
        largest = jnp.max(jnp.abs(blocks), axis=dim + 1)
        # A block with inf or nan becomes nan; XLA:CPU may lose a nan in a maximum.
        largest = jnp.where(jnp.isfinite(blocks).all(axis=dim + 1), largest, np.float32(np.nan))
        scales, exponents = self._stored_scales(largest / _LARGEST[base.format])
        divisor = jnp.expand_dims(_real_scales(scales, exponents, dim), dim + 1)
        # XLA divides by multiplying, and the inverse of a huge scale would be flushed to zero.
        shrink = jnp.where(divisor > 2.0**120, np.float32(2.0**-10), np.float32(1))
        scaled = (blocks * shrink) / jnp.where(divisor == 0, 1, divisor * shrink)
        return self.pack(_join(_codes(base, scaled), dim), scales, exponents)

    def _stored_scales(self, scales: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Rounds float32 scales: (those that are stored, exponents of the units of 8-bit ones)."""
        base, dim = self.base, self.dim
        # Those of the largest finite weights stay finite.
        if base.scales != "uint8":
            most = np.float32(jnp.finfo(base.scales).max)
            return jnp.where(scales > most, most, scales).astype(base.scales), None
        most = np.float32(255 * 2.0**120)
        scales = jnp.where(scales > most, most, scales)
        grouped = _split(scales, dim, scales.shape[dim] // base.group)
        # Of m * 2**k, 1 <= m < 2, the unit is 2**(k - 7), or twice that if 128 m rounds to 256.
        bits = lax.bitcast_convert_type(jnp.max(grouped, axis=dim + 1, keepdims=True), np.int32)
        exponents = (bits >> 23) - 7 + ((bits & 0x7FFFFF) >= 0x7F8000)
        exponents = jnp.maximum(exponents, 1).astype(jnp.uint8)
        is_lost = jnp.isnan(grouped).any(axis=dim + 1, keepdims=True)
        exponents = jnp.where(is_lost, np.uint8(_NAN), exponents)
        steps = jnp.round(grouped / _power_of_two(exponents))
        steps = jnp.clip(steps, jnp.where(grouped > 0, 1, 0), 255)
        return _join(steps.astype(jnp.uint8), dim), jnp.squeeze(exponents, dim + 1)

    def pack(
        self, codes: jax.Array, scales: jax.Array, exponents: jax.Array | None = None
    ) -> jax.Array:
        """Makes stored bytes of codes, one in a byte, and the scales of their blocks.

        `codes`: uint8, of whole granules of the parameter or of a part of it, int4 in two's
        complement. `scales`: in the dtype of the format, with the number of blocks in `dim`.
        `exponents`: of the units of 8-bit scales, uint8, with the number of granules in `dim`.
        """
        base, dim = self.base, self.dim
        blocks = _split(codes, dim, scales.shape[dim])
        if base.format in ("nf4", "int4"):  # a byte has one of each half of a block
            first, second = jnp.split(blocks, 2, dim + 1)
            blocks = (first & 15) | (second << 4)
        parts = [_join(blocks, dim), _as_bytes(scales, dim)]
        if exponents is not None:
            parts.append(exponents)
        granules = scales.shape[dim] // base.group
        split = [_split(part, dim, granules) for part in parts]
        return _join(jnp.concatenate(split, dim + 1), dim)

    def decode(self, stored: jax.Array) -> jax.Array:
        """Dequantizes stored bytes: the parameter, or the layers of it that `stored` has.

        `stored`: uint8, whole granules of the parameter or of a part of it; padding and filled up
        granules are not cut off. A layer scan may have sliced leading dims away.
        """
        base = self.base
        dim = self.dim - (len(self.shape) - stored.ndim)
        granules = _split(stored, dim, stored.shape[dim] // base.granule_bytes)
        # Cut each granule into the codes of its blocks, their scales, and what follows.
        code_bytes = base.group * base.code_bytes
        scale_bytes = base.group * jnp.dtype(base.scales).itemsize
        codes, scales, exponents = (
            _join(part, dim)
            for part in jnp.split(granules, (code_bytes, code_bytes + scale_bytes), dim + 1)
        )
        stored_scales = _from_bytes(scales, dim, jnp.dtype(base.scales))
        scale = _real_scales(stored_scales, exponents if exponents.size else None, dim)
        blocks = _split(codes, dim, scale.shape[dim])
        values = _values(base, blocks, dim + 1) * jnp.expand_dims(scale, dim + 1)
        return _join(values, dim).astype(self.dtype)

    def to_host(self, stored: np.ndarray) -> np.ndarray:
        """Dequantizes the whole parameter on the host."""
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            values = np.asarray(_decode(self, stored))
        return values[tuple(map(slice, self.shape))]


_decode = jax.jit(Blocks.decode, static_argnums=0)  # here, to compile each once


class QuantizedStruct(jax.ShapeDtypeStruct):  # type: ignore[misc]
    """Shape, dtype and sharding of stored bytes, and what they are.

    A leaf of `sharded.checkpoint_target()`; an import reads weights of `blocks.shape` into it.

    Attributes:
        blocks: how the parameter is stored.

    """

    def __init__(self, blocks: Blocks, sharding: jax.sharding.Sharding) -> None:
        super().__init__(blocks.stored_shape, np.uint8, sharding=sharding)
        self.blocks = blocks

    def update(self, **changes: Any) -> "QuantizedStruct":
        """Replaces the sharding; what is stored stays. Raises ValueError for other changes."""
        if changes.keys() - {"sharding"}:
            raise ArgumentError(
                "of a quantized parameter's struct only the sharding can be replaced",
                where="update",
                got=sorted(changes),
                fix="update(sharding=...)",
            )
        return QuantizedStruct(self.blocks, changes.get("sharding", self.sharding))

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.stored_as == getattr(other, "stored_as", "")

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.blocks))

    @property
    def stored_as(self) -> str:
        """What the bytes are, as a checkpoint records it."""
        return self.blocks.name


def as_model_arrays(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces quantized leaves by the shapes and dtypes that the model sees, by path."""
    return {
        path: jax.ShapeDtypeStruct(leaf.blocks.shape, leaf.blocks.dtype)
        if isinstance(leaf, QuantizedStruct)
        else leaf
        for path, leaf in leaves.items()
    }


def _split(array: jax.Array, dim: int, parts: int) -> jax.Array:
    """Splits a dim into (parts, the rest)."""
    shape = array.shape
    return array.reshape(*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])


def _join(array: jax.Array, dim: int) -> jax.Array:
    """Joins a dim and the next."""
    shape = array.shape
    return array.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])


def _real_scales(scales: jax.Array, exponents: jax.Array | None, dim: int) -> jax.Array:
    """Computes float32 scales of stored ones and, of 8-bit scales, the exponents of their units."""
    values = scales.astype(jnp.float32)
    if exponents is None:
        return values
    units = jnp.expand_dims(_power_of_two(exponents), dim + 1)
    return _join(_split(values, dim, exponents.shape[dim]) * units, dim)


def _power_of_two(exponents: jax.Array) -> jax.Array:
    """Computes 2 ** (exponents - 127) in float32; nan for `_NAN`."""
    powers = lax.bitcast_convert_type(exponents.astype(np.uint32) << 23, np.float32)
    return jnp.where(exponents == _NAN, np.float32(np.nan), powers)


def _as_bytes(array: jax.Array, dim: int) -> jax.Array:
    """Replaces the elements along a dim by their bytes."""
    if array.dtype == np.uint8:
        return array
    return _join(jnp.moveaxis(lax.bitcast_convert_type(array, jnp.uint8), -1, dim + 1), dim)


def _from_bytes(array: jax.Array, dim: int, dtype: np.dtype) -> jax.Array:
    """Replaces the bytes of elements along a dim by the elements."""
    if dtype == np.uint8:
        return array
    elements = _split(array, dim, array.shape[dim] // dtype.itemsize)
    return lax.bitcast_convert_type(jnp.moveaxis(elements, dim + 1, -1), dtype)


def _codes(base: QuantizedBase, scaled: jax.Array) -> jax.Array:
    """Makes the codes of scaled elements, one in a byte."""
    if base.format == "float8":
        return lax.bitcast_convert_type(scaled.astype(_FLOAT8), jnp.uint8)
    largest = _LARGEST[base.format]
    if base.format == "nf4":
        middles = (NF4[1:] + NF4[:-1]) / 2
        return jnp.asarray(sum((scaled > middle).astype(jnp.uint8) for middle in middles))
    return jnp.clip(jnp.round(scaled), -largest, largest).astype(jnp.int8).view(jnp.uint8)


def _values(base: QuantizedBase, codes: jax.Array, dim: int) -> jax.Array:
    """Computes the float32 values of a block's bytes, before they are scaled."""
    if base.format == "float8":
        return lax.bitcast_convert_type(codes, _FLOAT8).astype(jnp.float32)
    if base.format == "int8":
        return codes.view(jnp.int8).astype(jnp.float32)
    halves = jnp.concatenate([codes & 15, codes >> 4], dim)
    if base.format == "int4":  # in two's complement
        return ((halves ^ 8).astype(jnp.int8) - 8).astype(jnp.float32)
    # Selects by the four bits, not a lookup: it fuses with the matmul's operand on all chips.
    values: list[Any] = list(NF4)
    for bit in range(4):
        is_set = (halves >> bit) & 1 == 1
        values = [
            jnp.where(is_set, high, low)
            for low, high in zip(values[::2], values[1::2], strict=True)
        ]
    return jnp.asarray(values[0], jnp.float32)


def block_dim(shape: tuple[int, ...], stacked: int, granule: int) -> int:
    """Chooses the dim that blocks run along: the first of whole granules, after the stacked dims.

    Of a kernel [inputs, outputs] it is the inputs', as in the formats of bitsandbytes and qwix. If
    granules divide none, it is the largest.
    """
    dims = range(stacked, len(shape))
    whole = [dim for dim in dims if shape[dim] % granule == 0]
    return whole[0] if whole else max(dims, key=lambda dim: shape[dim])
