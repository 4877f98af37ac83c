"""The cross-entropy of an output head, without ever holding all of its logits.

The vocabulary is cut into chunks. The forward goes through them and keeps the sum of the
exponentials (Milakov and Gimelshein, arXiv:1805.02867); the backward makes their logits again, for
one product of the head more. Cut along the vocabulary, not the sequence, a chunk's gradient of the
head is complete, so that nothing of the head's size is summed.

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
) -> jax.Array:
    """`cross_entropy` of the logits x @ weights, float32 [B, T], made for `chunk` tokens of the
    vocabulary at a time.

    `weights` are [D, V] (dim 1) or [V, D] (dim 0); what lies beyond vocab_size is no token's. No
    more than [B, T, chunk] of logits is ever held, in float32. Where a target is not one of 0 to
    vocab_size-1 the loss is NaN. Raises ValueError for a chunk below 1.
    """
    if chunk < 1:
        raise ValueError(f"a loss chunk is at least 1 token of the vocabulary, got {chunk}")
    valid_BT = (targets_BT >= 0) & (targets_BT < vocab_size)
    cut = _Cut(dim, vocab_size, min(chunk, vocab_size))
    # On each device's rows: partitioned by XLA, every chunk's gradient of the weights would be
    # reduced by itself.
    losses_BT = on_local_rows(partial(_losses, cut), replicated=(0,))(weights, x_BTD, targets_BT)
    return jnp.where(valid_BT, losses_BT, jnp.nan)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How the weights are cut: along `dim`, `size` tokens a chunk; the last chunk reaches back into
    the one before.
    """

    dim: int
    vocab_size: int
    size: int

    @property
    def numbers(self) -> Any:
        """Of the chunks."""
        return np.arange(-(-self.vocab_size // self.size))

    def start(self, number: jax.Array) -> jax.Array:
        """The first token of a chunk."""
        return jnp.minimum(number * self.size, self.vocab_size - self.size)

    def new(self, number: jax.Array) -> jax.Array:
        """Which of a chunk's tokens were in none before, bool [C]."""
        return self.start(number) + jnp.arange(self.size) >= number * self.size

    def chunk(self, weights: jax.Array, number: jax.Array) -> jax.Array:
        """[D, C] or [C, D]."""
        return jax.lax.dynamic_slice_in_dim(weights, self.start(number), self.size, self.dim)

    def product(self, text: str, *operands: jax.Array) -> jax.Array:
        """An einsum in float32, where `dc` stands for a chunk of the weights as it lies."""
        text = text if self.dim else text.replace("dc", "cd")
        return jnp.einsum(text, *operands, preferred_element_type=jnp.float32)

    def logits(
        self, weights: jax.Array, x_BTD: jax.Array, targets_BT: jax.Array, number: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(logits of a chunk, float32 [B, T, C]; which are a target's). One that was in a chunk
        before is -inf.
        """
        new = self.new(number)[None, None]
        token = (self.start(number) + jnp.arange(self.size))[None, None]
        logits = self.product("btd,dc->btc", x_BTD, self.chunk(weights, number))
        return jnp.where(new, logits, -jnp.inf), new & (token == targets_BT[..., None])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(cut: _Cut, weights: jax.Array, x_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
    return _forward(cut, weights, x_BTD, targets_BT)[0]


def _forward(
    cut: _Cut, weights: jax.Array, x_BTD: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, Any]:
    def add(carry: Any, number: jax.Array) -> tuple[Any, None]:
        largest, total, picked = carry
        logits, is_target = cut.logits(weights, x_BTD, targets_BT, number)
        above = jnp.maximum(largest, logits.max(-1))
        total = total * jnp.exp(largest - above) + jnp.exp(logits - above[..., None]).sum(-1)
        return (above, total, picked + jnp.where(is_target, logits, 0.0).sum(-1)), None

    # not zeros: in a mesh's manual mode these vary over devices as the logits do
    nothing = 0.0 * x_BTD[..., 0].astype(jnp.float32)
    (largest, total, picked), _ = jax.lax.scan(
        add, (nothing - jnp.inf, nothing, nothing), cut.numbers
    )
    log_total = largest + jnp.log(total)
    return log_total - picked, (weights, x_BTD, targets_BT, log_total)


def _backward(cut: _Cut, kept: Any, cotangent_BT: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    weights, x_BTD, targets_BT, log_total = kept

    def add(carry: Any, number: jax.Array) -> tuple[Any, None]:
        of_weights, of_x = carry
        logits, is_target = cut.logits(weights, x_BTD, targets_BT, number)
        probability = jnp.exp(logits - log_total[..., None])
        of_logits = (cotangent_BT[..., None] * (probability - is_target)).astype(weights.dtype)
        of_x += cut.product("btc,dc->btd", of_logits, cut.chunk(weights, number))
        made = cut.product("btd,btc->dc", x_BTD, of_logits).astype(weights.dtype)
        # what a chunk shares with the one before is complete already
        is_new = cut.new(number)[None] if cut.dim else cut.new(number)[:, None]
        made = jnp.where(is_new, made, cut.chunk(of_weights, number))
        return (
            jax.lax.dynamic_update_slice_in_dim(of_weights, made, cut.start(number), cut.dim),
            of_x,
        ), None

    nothing = (jnp.zeros_like(weights), jnp.zeros_like(x_BTD, jnp.float32))
    (of_weights, of_x), _ = jax.lax.scan(add, nothing, cut.numbers)
    return of_weights, of_x.astype(x_BTD.dtype), None


_losses.defvjp(_forward, _backward)
