"""The cross-entropy of an output head, without holding all of its logits at once.

The vocabulary is split into chunks. The forward pass goes through them and accumulates the sum of
the exponentials (Milakov and Gimelshein, arXiv:1805.02867); the backward pass recomputes their
logits, at the cost of one more matmul of the head. As the split is along the vocabulary, not the
sequence, a chunk's gradient of the head is complete, and nothing of the head's size is summed.

Shapes: B batch, T sequence, D width, V vocab, C chunk.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fsdp_jax.local_rows import on_local_rows


def chunked_losses(
    x_BTD: jax.Array,
    weights: jax.Array,
    targets_BT: jax.Array,
    *,
    dim: int,
    vocab_size: int,
    chunk: int,
    dtype: Any = None,
) -> jax.Array:
    """Computes `cross_entropy` of the logits x @ weights, float32 [B, T], chunk by chunk.

    No more than [B, T, chunk] of logits is ever held, in float32. Where a target is not one of 0 to
    vocab_size-1, int32, the loss is NaN. A chunk below 1 is a ValueError.

    `weights`: [D, V] (dim 1) or [V, D] (dim 0); tokens from `vocab_size` on are padding. `dtype` is
    that of the matmul; None follows `x_BTD`, the input of the head, and the weights.
    """
    if chunk < 1:
        raise ValueError(f"a loss chunk is at least 1 token of the vocabulary, got {chunk}")
    dtype = dtype or jnp.result_type(x_BTD, weights)
    x_BTD, weights = x_BTD.astype(dtype), weights.astype(dtype)
    valid_BT = (targets_BT >= 0) & (targets_BT < vocab_size)
    chunks = _Chunks(dim, vocab_size, min(chunk, vocab_size))
    # On each device's rows: partitioned by XLA, every chunk's gradient of the weights would be
    # reduced separately.
    losses = on_local_rows(partial(_losses_by_chunk, chunks), replicated=(0,))
    return jnp.where(valid_BT, losses(weights, x_BTD, targets_BT), jnp.nan)


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """The chunks of `size` tokens along `dim` of the weights; the last overlaps the one before."""

    dim: int
    vocab_size: int
    size: int

    @property
    def numbers(self) -> Any:
        """The numbers of the chunks, from 0, to scan over: int [chunks]."""
        return np.arange(-(-self.vocab_size // self.size))

    def first_token(self, number: jax.Array) -> jax.Array:
        """Computes the first token of a chunk."""
        return jnp.minimum(number * self.size, self.vocab_size - self.size)

    def is_new(self, number: jax.Array) -> jax.Array:
        """Tells which of a chunk's tokens were in no chunk before, bool [C]."""
        return self.first_token(number) + jnp.arange(self.size) >= number * self.size

    def slice(self, weights: jax.Array, number: jax.Array) -> jax.Array:
        """Slices a chunk of the weights, [D, C] or [C, D]."""
        return jax.lax.dynamic_slice_in_dim(weights, self.first_token(number), self.size, self.dim)

    def einsum(self, equation: str, *operands: jax.Array) -> jax.Array:
        """Computes an einsum in float32; `dc` stands for a chunk of the weights in either order."""
        if self.dim == 0:  # the weights are [V, D]
            equation = equation.replace("dc", "cd")
        return jnp.einsum(equation, *operands, preferred_element_type=jnp.float32)

    def logits(
        self, weights: jax.Array, x_BTD: jax.Array, targets_BT: jax.Array, number: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the logits of a chunk, float32, and which are a target's, bool, both [B, T, C].

        A token that was in a chunk before has -inf.
        """
        is_new = self.is_new(number)[None, None]
        token = (self.first_token(number) + jnp.arange(self.size))[None, None]
        logits = self.einsum("btd,dc->btc", x_BTD, self.slice(weights, number))
        return jnp.where(is_new, logits, -jnp.inf), is_new & (token == targets_BT[..., None])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses_by_chunk(
    chunks: _Chunks, weights: jax.Array, x_BTD: jax.Array, targets_BT: jax.Array
) -> jax.Array:
    """Computes `chunked_losses` of one device's rows, with a backward pass of its own."""
    return _losses_forward(chunks, weights, x_BTD, targets_BT)[0]


def _losses_forward(
    chunks: _Chunks, weights: jax.Array, x_BTD: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, Any]:
    """Computes the losses, float32 [B, T], and what `_losses_backward` needs, chunk by chunk."""

    def accumulate(carry: Any, number: jax.Array) -> tuple[Any, None]:
        """Adds a chunk to the running maximum, sum of exponentials and logit of the target."""
        maximum, total, target_logit = carry
        logits, is_target = chunks.logits(weights, x_BTD, targets_BT, number)
        # a larger maximum rescales the sum so far, so that no exponential overflows
        new_maximum = jnp.maximum(maximum, logits.max(-1))
        total = total * jnp.exp(maximum - new_maximum)
        total = total + jnp.exp(logits - new_maximum[..., None]).sum(-1)
        target_logit = target_logit + jnp.where(is_target, logits, 0.0).sum(-1)
        return (new_maximum, total, target_logit), None

    # not zeros: in a mesh's manual mode these vary over devices as the logits do
    zeros = 0.0 * x_BTD[..., 0].astype(jnp.float32)
    start = (zeros - jnp.inf, zeros, zeros)
    (maximum, total, target_logit), _ = jax.lax.scan(accumulate, start, chunks.numbers)
    log_total = maximum + jnp.log(total)
    return log_total - target_logit, (weights, x_BTD, targets_BT, log_total)


def _losses_backward(
    chunks: _Chunks, residuals: Any, cotangent_BT: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    """Computes the gradients of weights, x_BTD and targets (None), from recomputed logits."""
    weights, x_BTD, targets_BT, log_total = residuals

    def accumulate(carry: Any, number: jax.Array) -> tuple[Any, None]:
        """Adds a chunk's gradients to the weights' and to x_BTD's, which is float32."""
        weights_grad, x_grad = carry
        # the gradient of this chunk's logits
        logits, is_target = chunks.logits(weights, x_BTD, targets_BT, number)
        probability = jnp.exp(logits - log_total[..., None])
        logits_grad = (cotangent_BT[..., None] * (probability - is_target)).astype(weights.dtype)
        # the gradients of its inputs
        x_grad += chunks.einsum("btc,dc->btd", logits_grad, chunks.slice(weights, number))
        chunk_grad = chunks.einsum("btd,btc->dc", x_BTD, logits_grad).astype(weights.dtype)
        # where this chunk overlaps the one before, the gradient is complete already
        is_new = jnp.expand_dims(chunks.is_new(number), 1 - chunks.dim)
        chunk_grad = jnp.where(is_new, chunk_grad, chunks.slice(weights_grad, number))
        weights_grad = jax.lax.dynamic_update_slice_in_dim(
            weights_grad, chunk_grad, chunks.first_token(number), chunks.dim
        )
        return (weights_grad, x_grad), None

    start = (jnp.zeros_like(weights), jnp.zeros_like(x_BTD, jnp.float32))
    (weights_grad, x_grad), _ = jax.lax.scan(accumulate, start, chunks.numbers)
    return weights_grad, x_grad.astype(x_BTD.dtype), None


_losses_by_chunk.defvjp(_losses_forward, _losses_backward)
