"""Detection of a loss that is far above those of the steps before: its state, and the decision.

A loss is a spike if it exceeds the median of the window by `threshold` times the estimate of a
standard deviation from the median absolute deviation, MAD / 0.6745 (the robust z-score of Iglewicz
and Hoaglin, "How to Detect and Handle Outliers", 1993). A spike in the window hardly moves either.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from fsdp_jax.errors import ArgumentError, ReadableError
from fsdp_jax.limits import NonNegativeFloat, Range, check_fields


class LossSpikeError(ReadableError, ArithmeticError):
    """The loss has spikes again and again, although the run went back each time."""


RecentLosses = dict[str, Any]
"""`losses`, float32 [window], a ring; `count`, int32 [], of all added; empty without detection."""

NORMAL = 0.6745  # MAD over the standard deviation, of normally distributed numbers
SMALLEST = 1e-3  # smallest deviation, relative to the median: equal losses have none


@dataclass(frozen=True)
class LossSpikes:
    """Detects spikes of the loss, which the step reports as `loss_z_score`.

    A loss is compared with the latest finite ones; none is a spike before there are so many.

    Raises:
        ValueError: a value out of range.

    """

    # Number of losses that one is compared with.
    window: Annotated[int, Range(8, 2**16)] = 64
    # Robust z-score (Iglewicz and Hoaglin, 1993) above which a loss is a spike.
    threshold: NonNegativeFloat = 8.0
    skip: bool = False  # Skip the update of such a step, and count it in `skipped`.

    def __post_init__(self) -> None:
        check_fields(self, "loss_spikes")
        if not 0 < self.threshold < float("inf"):
            raise ArgumentError(
                "nothing, or everything, would be a spike",
                where="loss_spikes.threshold",
                expected="a positive number",
                got=self.threshold,
            )


def start_losses(spikes: LossSpikes | None) -> RecentLosses:
    """Makes the recent losses before the first step: none yet. Empty without detection."""
    if spikes is None:
        return {}
    return {"losses": jnp.zeros(spikes.window, jnp.float32), "count": jnp.int32(0)}


def z_score(recent: RecentLosses, loss: jax.Array) -> jax.Array:
    """Computes the robust z-score of a loss among the recent ones, float32 [].

    0 until the window is full, and for a loss that is not finite: its step is skipped, which is not
    the same as a spike.
    """
    losses = recent["losses"]
    loss = loss.astype(losses.dtype)
    median = jnp.median(losses)
    deviation = jnp.median(jnp.abs(losses - median)) / NORMAL
    deviation = jnp.maximum(deviation, SMALLEST * jnp.abs(median))
    deviation = jnp.maximum(deviation, jnp.finfo(jnp.float32).tiny)
    known = (recent["count"] >= losses.size) & jnp.isfinite(loss)
    return jnp.where(known, (loss - median) / deviation, 0.0)


def add_loss(recent: RecentLosses, loss: jax.Array) -> RecentLosses:
    """Adds a step's loss to the recent ones; a loss that is not finite is left out.

    Spikes are added: where the loss stays at a higher level, half a window later it is none.
    """
    losses, count = recent["losses"], recent["count"]
    loss = loss.astype(losses.dtype)
    finite = jnp.isfinite(loss)
    added = losses.at[count % losses.size].set(jnp.where(finite, loss, 0.0))
    return {
        "losses": jnp.where(finite, added, losses),
        "count": jnp.where(finite, count + 1, count),
    }
