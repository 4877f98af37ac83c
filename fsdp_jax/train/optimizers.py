"""Optimizers and schedules by name."""

import optax

from fsdp_jax.errors import ConfigError, message
from fsdp_jax.train.config import OptimizerConfig


def make_schedule(settings: OptimizerConfig, steps: int) -> optax.Schedule:
    """Optimizer updates so far -> learning rate: up from zero, then as the schedule says until the
    last step.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps
    rest = max(1, steps - warmup)
    after = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=0.1),
        "linear": optax.linear_schedule(peak, peak / 10, rest),
    }[settings.schedule]
    if not warmup:
        return after
    # the first update is not wasted on a rate of zero
    return optax.join_schedules(
        [optax.linear_schedule(peak / warmup, peak, warmup - 1 or 1), after], [warmup]
    )


def make_optimizer(
    settings: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """The optax transformation of that name."""
    decay = settings.weight_decay
    if decay and settings.name in ("adam", "sgd"):
        fix = "set it to 0, or use adamw" if settings.name == "adam" else "set it to 0, or use lion"
        got = f"{decay} with {settings.name}, which has none"
        raise ConfigError(
            message(
                "weight decay would be ignored", where="optimizer.weight_decay", got=got, fix=fix
            )
        )
    if settings.name == "adafactor":
        return optax.adafactor(schedule, weight_decay_rate=decay or None)
    if settings.name == "sgd":
        return optax.sgd(schedule, momentum=0.9)
    if settings.name == "lion":
        return optax.lion(schedule, weight_decay=decay)
    # Language models train more steadily with a shorter memory of squared gradients than optax's
    # 0.999.
    return (
        optax.adam(schedule, b2=0.95)
        if settings.name == "adam"
        else optax.adamw(schedule, b2=0.95, weight_decay=decay)
    )
