"""The losses of the model families: sums of cross-entropies in nats, and the weights they are over.

A sum and a count are returned apart, so that sums over microbatches and devices are divided once.

Shapes: B batch, S input sequence, T (target) sequence, V vocab.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Batch = Mapping[str, jax.Array]


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Computes the negative log likelihood in nats, float32 [B, T], in float32.

    Where a target is not one of 0 to V-1 the loss is NaN.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    V = logits_BTV.shape[-1]
    # Not take_along_axis: its gradient scatters into a float32 [B, T, V] of zeros. This one fuses
    # with the softmax's, and no float32 logits are stored.
    token_BTV = jax.lax.broadcasted_iota(targets_BT.dtype, logits_BTV.shape, 2)
    target_logits_BT = jnp.where(token_BTV == targets_BT[..., None], logits_BTV, 0.0).sum(-1)
    loss_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_logits_BT
    return jnp.where((targets_BT >= 0) & (targets_BT < V), loss_BT, jnp.nan)


def next_token_loss(
    model: Any, batch: Batch, *, train: bool = False, chunk: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes (sum of the cross-entropy in nats, number of targets), both float32 scalars.

    Args:
        model: a causal language model; with `chunk` one that has `losses`.
        batch: `tokens`, int32 [B, T+1]; optionally `mask`, [B, T], the weight of each target (1 if
            absent; where it is 0 the target may be any number); for packed documents `segments` and
            `positions`, int32 [B, T].
        train: applies dropout.
        chunk: vocabulary chunk size for the loss; logits are recomputed in the backward pass.
    """
    tokens = (batch["tokens"][:, :-1], batch["tokens"][:, 1:])
    settings = {name: batch[name] for name in ("segments", "positions") if name in batch}
    return _text_loss(model, tokens, batch, chunk, deterministic=not train, **settings)


def text_to_text_loss(
    model: Any, batch: Batch, *, train: bool = False, chunk: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes (sum of the cross-entropy in nats, number of targets), both float32 scalars.

    The decoder reads the targets shifted right, after a 0; a negative target is read as 0, padding.

    Args:
        model: an encoder-decoder; with `chunk` one that has `losses`.
        batch: `inputs`, int32 [B, S], and `targets`, int32 [B, T]; optionally `inputs_mask`,
            [B, S], 1 for a token and 0 for padding, and `mask`, as for `next_token_loss`.
        train: applies dropout.
        chunk: as for `next_token_loss`.
    """
    targets_BT = batch["targets"]
    shifted_BT = jnp.pad(jnp.maximum(targets_BT, 0)[:, :-1], ((0, 0), (1, 0)))
    settings = {"inputs_mask": batch.get("inputs_mask"), "deterministic": not train}
    return _text_loss(model, (batch["inputs"], shifted_BT, targets_BT), batch, chunk, **settings)


def classification_loss(
    model: Callable[..., jax.Array], batch: Batch, *, train: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Computes (sum of the cross-entropy in nats, number of images), both float32 scalars.

    Args:
        model: a classifier of images.
        batch: `images` [B, H, W, 3], passed to the model as they are, and `labels`, int32 [B];
            optionally `mask`, [B], the weight of each image (1 if absent; where it is 0 the label
            may be any number).
        train: applies dropout.
    """
    logits_BC = model(batch["images"], deterministic=not train)
    loss_B = cross_entropy(logits_BC[:, None], batch["labels"][:, None])[:, 0]
    return masked_sum(loss_B, batch.get("mask"))


def masked_sum(losses: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Sums losses times mask, and the mask, both float32; masked losses may be NaN."""
    weight = jnp.ones_like(losses) if mask is None else mask.astype(jnp.float32)
    # not the product alone: NaN times 0 is NaN
    return jnp.where(weight == 0, 0.0, losses * weight).sum(), weight.sum()


def _text_loss(
    model: Any, tokens: tuple[jax.Array, ...], batch: Batch, chunk: int | None, **settings: Any
) -> tuple[jax.Array, jax.Array]:
    """Computes (sum of the cross-entropy, sum of the batch's mask) of a model of text.

    `tokens`: the inputs of the model, and then the targets. `settings`: the model's keywords.
    """
    *inputs, targets_BT = tokens
    if chunk is None:
        loss_BT = cross_entropy(model(*inputs, **settings), targets_BT)
    else:
        loss_BT = model.losses(*tokens, chunk=chunk, **settings)
    return masked_sum(loss_BT, batch.get("mask"))
