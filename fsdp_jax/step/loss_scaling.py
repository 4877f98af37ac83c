"""Dynamic loss scaling: the state of the scale, and its update in a step.

[Note: the mean over rows] A step differentiates the sum of the loss, and the reduction adds up the
devices. In float16, whose largest number is 65504, a sum over a large batch would overflow at any
scale. So the loss is multiplied by the scale over the number of rows of the global batch, rounded
up to a power of two, which no rounding notices.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax.sharding.precision import LossScale

Scale = dict[str, Any]
"""`scale`, float32 [], and `good_steps` since it changed, int32 []; empty without scaling."""


def start_scale(scaling: LossScale | None) -> Scale:
    """Makes the state of the loss scale before the first step; empty without scaling."""
    if scaling is None:
        return {}
    return {"scale": jnp.float32(scaling.initial), "good_steps": jnp.int32(0)}


def within_limits(scaling: LossScale | None, scale: Scale) -> Scale:
    """Moves a restored scale inside the limits of this run's; one that stays is as configured."""
    if scaling is None or not scale:
        return scale
    largest = jnp.finfo(jnp.float32).max
    # What never grows was never above its first value, and what never falls never below it.
    least = scaling.initial if scaling.backoff == 1 else scaling.minimum
    most = scaling.initial if scaling.growth == 1 else largest
    return {**scale, "scale": jnp.clip(scale["scale"], least, most)}


def loss_factor(scale: Scale, rows: int) -> jax.Array | None:
    """Computes the factor of the summed loss; None without scaling.

    `rows`: of the global batch, of all microbatches.
    """
    if not scale:
        return None
    return scale["scale"] * 2.0 ** -(rows - 1).bit_length()


def next_scale(scaling: LossScale, scale: Scale, finite: jax.Array) -> Scale:
    """Updates the scale's state after a step whose loss and gradients were `finite` or not."""
    good_steps = jnp.where(finite, scale["good_steps"] + 1, 0)
    grows = good_steps >= scaling.growth_interval
    largest = jnp.finfo(jnp.float32).max
    grown = jnp.minimum(scale["scale"] * jnp.where(grows, scaling.growth, 1.0), largest)
    return {
        "scale": jnp.where(finite, grown, _backed_off(scaling, scale)),
        "good_steps": jnp.where(grows, 0, good_steps),
    }


def _backed_off(scaling: LossScale, scale: Scale) -> jax.Array:
    """Lowers the scale, as after one more step whose gradients are not finite."""
    return jnp.maximum(scale["scale"] * scaling.backoff, scaling.minimum)


def counts_as_skipped(scaling: LossScale | None, scale: Scale) -> jax.Array | int:
    """Counts a skipped step towards an abort: 1, or 0 where the scale still falls."""
    if scaling is None:
        return 1
    return (_backed_off(scaling, scale) >= scale["scale"]).astype(jnp.int32)
