"""Optimizers and schedules by name."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fsdp_jax import optim
from fsdp_jax.data.checks import ignored_key_error
from fsdp_jax.train.config import OptimizerConfig
from fsdp_jax.tree import PyTree

BLOCK = 4096  # updates whose learning rates are evaluated at once


def make_schedule(settings: OptimizerConfig, steps: int) -> optax.Schedule:
    """Makes the schedule, optimizer updates so far -> learning rate: linear warm-up, then decay."""
    peak, warmup = settings.learning_rate, settings.warmup_steps
    decay_steps = max(1, steps - warmup)
    after_warmup = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, decay_steps, alpha=0.1),
        "linear": optax.linear_schedule(peak, peak / 10, decay_steps),
    }[settings.schedule]
    if not warmup:
        return after_warmup
    # The first update is not wasted on a rate of zero.
    rise = optax.linear_schedule(peak / warmup, peak, warmup - 1 or 1)
    return optax.join_schedules([rise, after_warmup], [warmup])


def learning_rates(schedule: optax.Schedule) -> Callable[[int], float]:
    """Makes a function from the number of an update, from 0, to its learning rate.

    It evaluates the schedule for a block of updates at a time, as each evaluation waits behind the
    steps that are dispatched.
    """

    @lru_cache(maxsize=1)
    def rates_from(first: int) -> np.ndarray:
        return np.asarray(jax.vmap(schedule)(jnp.arange(first, first + BLOCK)))

    return lambda update: float(rates_from(update - update % BLOCK)[update % BLOCK])


def count_updates(opt_state: PyTree) -> jax.Array:
    """Copies the number of updates that the schedule has counted, int32 [].

    `opt_state`: of an optimizer of `make_optimizer`. The copy outlives a step that donates it.
    """

    def is_schedule(x: object) -> bool:
        return isinstance(x, optax.ScaleByScheduleState)

    states = jax.tree.leaves(opt_state, is_leaf=is_schedule)
    return jnp.copy(next(state.count for state in states if is_schedule(state)))


def make_optimizer(
    settings: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Makes the named optimizer of optax or `fsdp_jax.optim`, with the schedule's learning rate.

    Raises ConfigError for a key that it does not apply.
    """
    name, decay = settings.name, settings.weight_decay
    if decay and name in ("adam", "sgd"):
        got = f"{decay} with {name}, which has none"
        fix = f"set it to 0, or use {'adamw' if name == 'adam' else 'lion'}"
        raise ignored_key_error("optimizer.weight_decay", got, fix)
    if settings.moments is not None and name not in ("adam", "adamw"):
        got, fix = f"{settings.moments} with {name}", "leave it out, or use adam or adamw"
        raise ignored_key_error("optimizer.moments", got, fix)
    if name == "adafactor":
        return optax.adafactor(schedule, weight_decay_rate=decay or None)
    if name == "sgd":
        return optax.sgd(schedule, momentum=0.9)
    if name == "lion":
        return optax.lion(schedule, weight_decay=decay)
    if name == "muon":
        # 0.2 is the root mean square of AdamW's updates, so that its learning rates may be kept.
        return optim.muon(
            schedule,
            weight_decay=decay,
            consistent_rms=0.2,
            adam_b2=0.95,
            adam_weight_decay=decay,
            dtype=jnp.bfloat16,
        )
    # Language models train more steadily with b2 = 0.95 than with optax's 0.999.
    if settings.moments is not None:
        # Without decay these are Adam's updates.
        return optim.adamw(schedule, b2=0.95, weight_decay=decay, moments=settings.moments)
    if name == "adam":
        return optax.adam(schedule, b2=0.95)
    return optax.adamw(schedule, b2=0.95, weight_decay=decay)
