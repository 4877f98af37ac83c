"""Adam whose moments are stored in 8 bits, in bfloat16 or in float32.

[Note: 8 bits] A moment is stored as codes of the parameter's own shape, and a float32 scale for
each block of them, the largest magnitude in it (arXiv:2110.02861). Codes are dense near zero, since
a parameter with a small gradient moves as far as others: the first moment is `scale * (c / 127)^3`,
the second `scale * (c / 255)^4`. The second is never stored as zero where it was not zero, since
the update divides by it: linear codes, which round small ones to zero, make updates 268 times too
large.

[Note: rounding] Moments are rounded stochastically (`sharding.rounding`), each step by a seed that
is drawn from the count: with the count itself as the seed a step would draw the numbers of the step
before, in another order.
Rounded to nearest, a moment would not change where a step changes it by less than half of the
distance of two numbers: with b2 = 0.999 the second moment never falls, and updates become too small
by the factor by which gradients become smaller; the first moment of a parameter that gets no more
gradients never vanishes.

[Note: blocks and shards] Codes are sharded as their parameter. Blocks lie along a dim that is
unlikely to be sharded, one of the last two, so that a block is on one device for any number of
devices. Where there is no such dim they lie along the largest, and are short. The choice depends on
the shape alone, so that a checkpoint can be restored on any number of devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fsdp_jax.errors import ArgumentError, did_you_mean
from fsdp_jax.sharding.rounding import (
    Seed,
    path_seed,
    random_bits,
    round_stochastically,
    step_seed,
)
from fsdp_jax.tree import PyTree

Moments = Literal["float32", "bfloat16", "int8"]
SMALL = 4096  # elements below which moments stay float32
SHORTEST = 8  # elements of a block, at least


class StoredAdamState(NamedTuple):
    """The state of `scale_by_adam` with moments that are not float32; `count`: updates so far."""

    count: jax.Array  # type: ignore[assignment]  # int32; hides tuple.count
    mu: PyTree  # the first moment or its codes, int8, of each parameter's shape
    nu: PyTree  # the second, or its codes, uint8
    mu_scale: PyTree  # float32, of the first moment's blocks; None for parameters without blocks
    nu_scale: PyTree  # of the second's


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    weight_decay: float = 1e-4,
    mask: Any = None,
    nesterov: bool = False,
    moments: Moments = "int8",
    block: int = 64,
) -> optax.GradientTransformation:
    """Makes `optax.adamw` with moments stored as int8, or as `moments` says: `scale_by_adam`."""
    return optax.chain(
        scale_by_adam(b1, b2, eps, eps_root, nesterov=nesterov, moments=moments, block=block),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    nesterov: bool = False,
    moments: Moments = "int8",
    block: int = 64,
) -> optax.GradientTransformation:
    """Makes `optax.adam` with moments stored as int8, or as `moments` says: `scale_by_adam`."""
    return optax.chain(
        scale_by_adam(b1, b2, eps, eps_root, nesterov=nesterov, moments=moments, block=block),
        optax.scale_by_learning_rate(learning_rate),
    )


def scale_by_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    nesterov: bool = False,
    moments: Moments = "int8",
    block: int = 64,
) -> optax.GradientTransformation:
    """Makes `optax.scale_by_adam`, computed in float32, with its moments stored otherwise.

    Bytes for each parameter: float32 8, bfloat16 4, int8 2.125 with blocks of 64. In int8 mode,
    parameters with less than 4096 elements, and those with no dim to divide into blocks, have
    float32 moments.

    Args:
        b1: decay of the first moment.
        b2: decay of the second. In bfloat16 updates differ from float32's by 0.6% with 0.95, by
            2.2% with 0.999.
        eps: added to the root of the second moment.
        eps_root: added to the second moment.
        nesterov: as for optax.
        moments: `float32`, `bfloat16` or `int8`.
        block: elements of a block at most, a power of two.

    Raises ValueError for another name, or a block that is no power of two of 8 or more.
    """
    if moments not in get_args(Moments):
        raise ArgumentError(
            f"unknown dtype '{moments}'",
            where="moments",
            fix=did_you_mean(str(moments), get_args(Moments)),
        )
    expected = f"a power of two, {SHORTEST} or more"
    if not isinstance(block, int):
        raise ArgumentError(
            "not a block",
            where="block",
            expected=expected,
            got=f"a {type(block).__name__}",
            fix='optax.inject_hyperparams(..., static_args="block"): the state has its shape',
        )
    if block < SHORTEST or block & (block - 1):
        raise ArgumentError("not a block", where="block", expected=expected, got=block)
    # Optax's own arithmetic, on moments that are decoded before and encoded after each update.
    inner = optax.scale_by_adam(b1, b2, eps, eps_root, nesterov=nesterov)
    if moments == "float32":
        return in_float32(inner)

    def init(params: PyTree) -> StoredAdamState:
        zero = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
        return stored(optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zero, zero))

    def stored(state: optax.ScaleByAdamState) -> StoredAdamState:
        size = 0
        if moments == "int8":
            size = block
        # Each moment and step has a seed of its own.
        mu, mu_scale = _encode_moment(state.mu, FIRST, size, _seed_of(1, state.count))
        nu, nu_scale = _encode_moment(state.nu, SECOND, size, _seed_of(2, state.count))
        return StoredAdamState(state.count, mu, nu, mu_scale, nu_scale)

    def update(
        updates: PyTree, state: StoredAdamState, params: PyTree = None
    ) -> tuple[PyTree, StoredAdamState]:
        mu = _decode_moment(state.mu, state.mu_scale, FIRST)
        nu = _decode_moment(state.nu, state.nu_scale, SECOND)
        wide = optax.tree.cast(updates, jnp.float32)
        wide, new = inner.update(wide, optax.ScaleByAdamState(state.count, mu, nu), params)
        return wide, stored(new)

    return optax.GradientTransformation(init, update)


def _seed_of(moment: int, count: jax.Array) -> Seed:
    """Derives the seed by which a moment, 1 or 2, is rounded in the update of this count."""
    return step_seed(jax.random.key(moment, impl="threefry2x32"), count)


def in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to make its state, and to compute, in float32; its updates are float32."""
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> PyTree:
        return inner.init(optax.tree.cast(params, jnp.float32))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: object) -> PyTree:
        updates, params = optax.tree.cast((updates, params), jnp.float32)
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _encode_moment(
    tree: PyTree, code: "MomentCode", block: int, seed: Seed
) -> tuple[PyTree, PyTree]:
    """Converts a float32 moment to (codes, scales), two trees like it.

    Without blocks (`block` 0) the codes are bfloat16 numbers, and there are no scales. Small
    parameters stay float32.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    codes: list[jax.Array] = []
    scales: list[jax.Array | None] = []
    for path, leaf in leaves:
        # Parameters of the same shape must not be rounded alike.
        own = path_seed(seed, jax.tree_util.keystr(path))
        encoded: jax.Array = leaf
        scale: jax.Array | None = None
        if not block:
            encoded = round_stochastically(leaf, own)
        elif blocks := choose_blocks(leaf.shape, block):
            encoded, scale = code.encode(leaf, *blocks, own)
        codes.append(encoded)
        scales.append(scale)
    return jax.tree.unflatten(structure, codes), jax.tree.unflatten(structure, scales)


def _decode_moment(codes: PyTree, scales: PyTree, code: "MomentCode") -> PyTree:
    """Computes the float32 moment of `_encode_moment`'s codes and scales."""

    def decode(leaf: jax.Array, scale: jax.Array | None) -> jax.Array:
        if scale is None:
            return leaf.astype(jnp.float32)
        return code.decode(leaf, scale)

    return jax.tree.map(decode, codes, scales)


def choose_blocks(shape: tuple[int, ...], block: int) -> tuple[int, int] | None:
    """Chooses (the dim that a parameter's blocks lie along, their size); None for no blocks.

    See the note on blocks and shards. `block`: the largest size, a power of two.
    """
    if prod(shape) < SMALL:
        return None
    divisible = [dim for dim, size in enumerate(shape) if size % SHORTEST == 0]
    if not divisible:
        return None
    # The largest dim is likely sharded: one of the last two others has the longest blocks.
    sharded = max(divisible, key=lambda dim: (shape[dim], -dim))
    others = []
    for dim in range(max(0, len(shape) - 2), len(shape)):
        # Dim 0 may stack layers, which are updated one by one.
        if dim != sharded and (dim or shape[0] >= 256):
            others.append((_block_size(shape[dim], block), -dim))
    size, dim = max(others, default=(0, 0))
    if size >= 2 * SHORTEST:
        return -dim, size
    # Short enough for a whole number of them in each of 16, or 8, shards.
    for shards in (16, 8, 1):
        if shape[sharded] % shards:
            continue
        size = _block_size(shape[sharded] // shards, block)
        if size >= SHORTEST:
            return sharded, size
    return None


def _block_size(dim: int, block: int) -> int:
    """Computes the largest power of two that divides the size of a dim, at most `block`."""
    return min(dim & -dim, block)


@dataclass(frozen=True)
class MomentCode:
    """Converts numbers of -1 to 1 to 8 bits, as codes of their roots, and back."""

    dtype: Any  # of the codes; where it is unsigned, only zero has the code zero
    largest: int  # code, that of 1
    root: Callable[[jax.Array], jax.Array]
    power: Callable[[jax.Array], jax.Array]  # the inverse of the root

    def encode(
        self, moment: jax.Array, dim: int, size: int, seed: Seed
    ) -> tuple[jax.Array, jax.Array]:
        """Converts a float32 moment to (codes of the same shape, scales float32).

        A number gets the code below or above at random, so that the mean of decoded numbers is
        exact. `dim`, `size`: the dim that blocks lie along, and their elements; each block has a
        scale.
        """
        # Numbers of -1 to 1, with the blocks of the dim apart.
        shape = moment.shape
        blocks = moment.reshape(*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :])
        scale = jnp.abs(blocks).max(dim + 1)
        blocks = blocks / _broadcast_scales(jnp.where(scale > 0, scale, 1), dim, blocks.shape)
        # Each lies between two codes, a share of the distance above the lower one.
        below = jnp.floor(self.root(blocks) * self.largest)
        low, high = self.power(below / self.largest), self.power((below + 1) / self.largest)
        share = (blocks - low) / (high - low)
        # Random numbers in [0, 1), of the moment's leading bits: the last ones may differ between
        # programs, such as with offload.
        leading = lax.bitcast_convert_type(moment, jnp.uint32) & jnp.uint32(0xFFFF0000)
        leading = lax.bitcast_convert_type(leading, jnp.float32)
        bits = random_bits(leading, seed) >> 8
        uniform = bits.astype(jnp.float32).reshape(blocks.shape) * 2.0**-24
        # With that share as probability, the upper code.
        codes = jnp.clip(below + jnp.where(uniform < share, 1, 0), -self.largest, self.largest)
        if jnp.issubdtype(self.dtype, jnp.unsignedinteger):
            codes = jnp.where(blocks > 0, jnp.maximum(codes, 1), 0)
        return codes.astype(self.dtype).reshape(shape), scale

    def decode(self, codes: jax.Array, scale: jax.Array) -> jax.Array:
        """Computes the float32 moment of codes and their scales."""
        values = self.power(codes.astype(jnp.float32) / self.largest)
        shape = values.shape
        # Blocks lie along the dim in which the scales are fewer.
        pairs = zip(shape, scale.shape, strict=True)
        dim = next((dim for dim, (size, count) in enumerate(pairs) if size != count), 0)
        count = scale.shape[dim]
        blocks = values.reshape(*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])
        return (blocks * _broadcast_scales(scale, dim, blocks.shape)).reshape(shape)


def _broadcast_scales(scale: jax.Array, dim: int, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts the scales of blocks to their elements.

    `shape`: with the blocks of dim `dim` apart, as dims (number of blocks, size).
    """
    return jnp.broadcast_to(jnp.expand_dims(scale, dim + 1), shape)


FIRST = MomentCode(jnp.int8, 127, jnp.cbrt, lambda root: root * root * root)
SECOND = MomentCode(
    jnp.uint8,
    255,
    lambda moment: jnp.sqrt(jnp.sqrt(moment)),
    lambda root: jnp.square(jnp.square(root)),
)
