"""Optimizers and schedules by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fsdp_jax import optim
from fsdp_jax.data.checks import ignored_key_error
from fsdp_jax.limits import KeyNote, NonNegative, NonNegativeFloat, Range
from fsdp_jax.tree import PyTree

BLOCK = 4096  # updates whose learning rates are evaluated at once
B2 = 0.95  # language models train more steadily with it than with optax's 0.999


@dataclass(frozen=True)
class Optimizer:
    """An optimizer that a configuration names, and the keys that it applies."""

    make: Callable[[optax.Schedule, float], optax.GradientTransformation]  # (learning rate, decay)
    with_decay: str = ""  # where it applies no `weight_decay`: another that does
    moments: bool = False  # `moments` may be stored in fewer bits, by `optim.adamw`


OPTIMIZERS = {
    "adamw": Optimizer(lambda lr, decay: optax.adamw(lr, b2=B2, weight_decay=decay), moments=True),
    "adam": Optimizer(lambda lr, _: optax.adam(lr, b2=B2), "adamw", moments=True),
    "sgd": Optimizer(lambda lr, _: optax.sgd(lr, momentum=0.9), "lion"),
    "lion": Optimizer(lambda lr, decay: optax.lion(lr, weight_decay=decay)),
    "adafactor": Optimizer(lambda lr, decay: optax.adafactor(lr, weight_decay_rate=decay or None)),
    "muon": Optimizer(
        lambda lr, decay: optim.muon(
            lr,
            weight_decay=decay,
            # the root mean square of AdamW's updates, so that its learning rates may be kept
            consistent_rms=0.2,
            adam_b2=B2,
            adam_weight_decay=decay,
            dtype=jnp.bfloat16,
        )
    ),
}
SCHEDULES: dict[str, Callable[[float, int], optax.Schedule]] = {
    "constant": lambda peak, steps: optax.constant_schedule(peak),
    "cosine": lambda peak, steps: optax.cosine_decay_schedule(peak, steps, alpha=0.1),
    "linear": lambda peak, steps: optax.linear_schedule(peak, peak / 10, steps),
}
"""After the warm-up: (peak, steps of the decay) -> the schedule."""
OptimizerName = Literal[*OPTIMIZERS]  # type: ignore[valid-type]
ScheduleName = Literal[*SCHEDULES]  # type: ignore[valid-type]


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate."""

    # Optimizer. adam and adamw use b2 = 0.95, sgd momentum 0.9. muon is for the kernels of hidden
    # layers, in bfloat16, with updates as large as AdamW's, which updates the other parameters.
    name: OptimizerName = "adamw"
    # Peak learning rate.
    learning_rate: Annotated[NonNegativeFloat, KeyNote(("lr", "learning_rate"))] = 3e-4
    # Learning rate after the warm-up: constant, or decayed to a tenth of the peak.
    schedule: ScheduleName = "cosine"
    warmup_steps: NonNegative = 0  # Steps of linear warm-up from zero.
    # Stored moments of adam and adamw; default: as the parameters. int8: in blocks with a scale.
    moments: optim.Moments | None = None
    # Decoupled weight decay; not of adam and sgd.
    weight_decay: Annotated[NonNegativeFloat, KeyNote(("weight_decay",))] = 0.0
    clip: float | None = 1.0  # Largest global gradient norm; None: no clipping.
    # Decay of an average of the parameters, such as 0.9999, which evaluations measure too and
    # `fsdp-jax export --weights ema` writes; default: no average.
    ema: Annotated[float, Range(0, 1)] | None = None


def make_schedule(settings: OptimizerConfig, steps: int) -> optax.Schedule:
    """Makes the schedule, optimizer updates so far -> learning rate: linear warm-up, then decay."""
    peak, warmup = settings.learning_rate, settings.warmup_steps
    after_warmup = SCHEDULES[settings.schedule](peak, max(1, steps - warmup))
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
    # one program in place of one for each operation, which a restart would wait for
    rates = jax.jit(jax.vmap(schedule))

    @lru_cache(maxsize=1)
    def rates_from(first: int) -> np.ndarray:
        return np.asarray(rates(jnp.arange(first, first + BLOCK)))

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
    optimizer = OPTIMIZERS[name]
    if decay and optimizer.with_decay:
        got = f"{decay} with {name}, which has none"
        fix = f"set it to 0, or use {optimizer.with_decay}"
        raise ignored_key_error("optimizer.weight_decay", got, fix)
    if settings.moments is not None and not optimizer.moments:
        usable = " or ".join(sorted(name for name, each in OPTIMIZERS.items() if each.moments))
        got, fix = f"{settings.moments} with {name}", f"leave it out, or use {usable}"
        raise ignored_key_error("optimizer.moments", got, fix)
    if settings.moments is not None:  # without decay these are Adam's updates
        tx = optim.adamw(schedule, b2=B2, weight_decay=decay, moments=settings.moments)
    else:
        tx = optimizer.make(schedule, decay)
    return tx if settings.ema is None else optax.chain(tx, optim.params_ema(settings.ema))
