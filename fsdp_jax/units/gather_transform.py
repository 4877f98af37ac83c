"""Operations on a parameter before and after its gather: casts, or another format to send."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from fsdp_jax.sharding.quantized import Blocks
from fsdp_jax.units import float8


@dataclass(frozen=True)
class GatherTransform:
    """Operations on a parameter around its gather, and on its gradient around its reduction.

    In this class they are casts. A subclass sends another format, like FSDP2's
    `fsdp_pre_all_gather` and `fsdp_post_all_gather`. `param_comms` gives each parameter a
    transform.
    """

    param: np.dtype  # of the stored parameter, and of the gradient that the optimizer gets
    compute: np.dtype  # of the gathered parameter
    reduce: np.dtype  # that the gradient is reduced in
    format: ClassVar[str | None] = None  # of `GATHER_FORMATS`; None: the compute dtype

    @property
    def wire(self) -> np.dtype:
        """The dtype that the gather sends."""
        return np.dtype(self.format or self.compute)

    def shared(self, shard: jax.Array, axes: Sequence[str] = ()) -> jax.Array | None:
        """Computes what the casts must know of all shards, such as a scale; None if nothing.

        `axes`: mesh axes along which each device holds a part, with local batches.
        """
        return None

    def before_gather(self, shard: jax.Array, shared: Any) -> jax.Array:
        """Makes the array to gather; `shared`: the value of that method."""
        return shard.astype(self.compute)

    def after_gather(self, gathered: jax.Array, shared: Any) -> jax.Array:
        """Converts the gathered array to the parameter in the compute dtype."""
        return gathered

    def before_reduce(self, gradient: jax.Array) -> jax.Array:
        """Converts the gradient to the array to reduce."""
        return gradient.astype(self.reduce)

    def after_reduce(self, gradient: jax.Array) -> jax.Array:
        """Converts the reduced gradient to the parameter's dtype."""
        return gradient.astype(self.param)


@dataclass(frozen=True)
class Float8Gather(GatherTransform):
    """Sends float8, and one scale for the whole parameter, which all its shards share.

    The gathered array is cast back to the compute dtype: the parameter, rounded to float8. Float8
    matmuls take the array as it arrives (`ParamComm.multiplied_as_sent`).
    """

    format = "float8_e4m3fn"

    def shared(self, shard: jax.Array, axes: Sequence[str] = ()) -> jax.Array:
        """Chooses the scale of the parameter."""
        return float8.scale_of(shard, float8.WEIGHT, axes)

    def before_gather(self, shard: jax.Array, shared: Any) -> jax.Array:
        """Quantizes the shard to float8, by the scale."""
        return float8.quantize(shard, float8.WEIGHT, shared)[0]

    def after_gather(self, gathered: jax.Array, shared: Any) -> jax.Array:
        """Multiplies by the scale: the parameter in the compute dtype."""
        return float8.dequantize(gathered, shared, self.compute)


@dataclass(frozen=True)
class QuantizedGather(GatherTransform):
    """Sends the stored bytes of a frozen parameter in 4 or 8 bits, and dequantizes what arrives."""

    blocks: Blocks

    @property
    def wire(self) -> np.dtype:
        """The dtype that the gather sends: bytes."""
        return np.dtype("uint8")

    def before_gather(self, shard: jax.Array, shared: Any) -> jax.Array:
        """Returns the stored bytes."""
        return shard

    def after_gather(self, gathered: jax.Array, shared: Any) -> jax.Array:
        """Dequantizes: the parameter in the compute dtype."""
        return self.blocks.decode(gathered).astype(self.compute)


TRANSFORMS = {each.format: each for each in (GatherTransform, Float8Gather)}
"""The transforms by `sharding.precision.GATHER_FORMATS`, for kernels of units; None for others."""
