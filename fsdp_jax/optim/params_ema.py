"""An exponential moving average of the parameters, as optimizer state.

It is the last transformation of a chain: `optax.chain(optax.adamw(3e-4), params_ema(0.9999))`. Its
state is a tree like the parameters, so that it is sharded, padded, offloaded, saved and restored as
other optimizer state is, and a step that is skipped leaves it as it was.
"""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fsdp_jax.errors import ArgumentError, did_you_mean
from fsdp_jax.sharding.rounding import path_seed, round_stochastically
from fsdp_jax.tree import PyTree, map_with_path

AverageDtype = Literal["float32", "bfloat16"]


class ParamsEmaState(NamedTuple):
    """The state of `params_ema`."""

    count: jax.Array  # type: ignore[assignment]  # int32, updates so far; hides tuple.count
    average: PyTree  # of each trained parameter, in its shape


def params_ema(
    decay: float, *, every: int = 1, warmup: int = 0, dtype: AverageDtype = "float32"
) -> optax.GradientTransformation:
    """Averages the parameters; put it last in a chain. The updates pass through unchanged.

    After an update the average is `d * average + (1 - d) * parameters`, in float32 at least. It
    starts as the initial parameters. The parameters are those before they are rounded to their own
    dtype.

    Args:
        decay: d, from 0 up to 1.
        every: updates from one averaging to the next; d is per averaging.
        warmup: in averaging n = 0, 1, ... d is at most (1 + n) / (warmup + n), as with
            `num_updates` of TensorFlow's `ExponentialMovingAverage`, which has 10; 0 for a constant
            d.
        dtype: of the stored average; bfloat16 is rounded stochastically. Parameters wider than
            float32 are averaged in their own dtype.

    Raises:
        ValueError: an argument out of range.

    Example:
        >>> tx = optax.chain(optax.adamw(3e-4), fsdp.optim.params_ema(0.9999, warmup=10))
    """
    _check_arguments(decay, every, warmup, dtype)

    def stored(path: str, average: jax.Array, count: jax.Array) -> jax.Array:
        """Converts an average to the dtype that is stored."""
        if dtype == "bfloat16" and average.dtype == jnp.float32:
            # The count is the second number: as the first, which is combined with an element's
            # place, it would repeat the noise of one element at another's next averaging.
            seed = path_seed((jnp.uint32(0), count.astype(jnp.uint32)), path)
            return round_stochastically(average, seed)
        return average

    def init(params: PyTree) -> ParamsEmaState:
        def start(path: str, param: jax.Array) -> jax.Array:
            return stored(path, jnp.asarray(param, _wide(param)), count)

        count = jnp.zeros((), jnp.int32)
        return ParamsEmaState(count, map_with_path(start, params))

    def update(
        updates: PyTree, state: ParamsEmaState, params: PyTree = None
    ) -> tuple[PyTree, ParamsEmaState]:
        if params is None:
            raise ArgumentError("params_ema averages the parameters", where="params", got=None)
        count = state.count + 1
        averagings = jnp.maximum(count // every - 1, 0).astype(jnp.float32)
        d = jnp.float32(decay)
        if warmup:
            d = jnp.minimum(d, (1 + averagings) / (warmup + averagings))

        def mean(path: str, average: jax.Array, param: jax.Array, update: jax.Array) -> jax.Array:
            wide = _wide(param)
            old = average.astype(wide)
            new = old + (1 - d).astype(wide) * (param.astype(wide) + update.astype(wide) - old)
            return lax.select(count % every == 0, stored(path, new, count), average)

        return updates, ParamsEmaState(count, map_with_path(mean, state.average, params, updates))

    return optax.GradientTransformation(init, update)


def find_average(opt_state: PyTree) -> PyTree:
    """Finds the average in the state of an optimizer; None if there is none, or several."""
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=_is_average) if _is_average(x)]
    return found[0].average if len(found) == 1 else None


def require_average_last(opt_state: PyTree) -> None:
    """Raises ArgumentError for an average in a chain whose later members change the updates.

    It would average parameters that the model never has.
    """

    def is_chain(x: Any) -> bool:
        return type(x) is tuple

    for chain in filter(is_chain, jax.tree.leaves(opt_state, is_leaf=is_chain)):
        for number, member in enumerate(chain):
            require_average_last(member)
            leaves = jax.tree.leaves(member, is_leaf=_is_average)
            if number < len(chain) - 1 and any(map(_is_average, leaves)):
                raise ArgumentError(
                    "params_ema is not the last of its chain",
                    where="tx",
                    expected="the updates as they are added to the parameters",
                    got=f"{len(chain) - 1 - number} more after it",
                    fix="optax.chain(tx, fsdp_jax.optim.params_ema(0.9999))",
                )


def _is_average(x: Any) -> bool:
    return isinstance(x, ParamsEmaState)


def _wide(param: Any) -> Any:
    """Returns the dtype to compute the average of a parameter in: float32 at least."""
    return jnp.promote_types(param.dtype, jnp.float32)


def _check_arguments(decay: float, every: int, warmup: int, dtype: str) -> None:
    if dtype not in get_args(AverageDtype):
        raise ArgumentError(
            f"unknown dtype '{dtype}'",
            where="dtype",
            fix=did_you_mean(str(dtype), get_args(AverageDtype)),
        )
    if not 0 <= decay < 1:
        expected = "a number from 0 up to 1, which excludes 1"
        raise ArgumentError("no decay", where="decay", expected=expected, got=decay)
    for name, value, least in (("every", every, 1), ("warmup", warmup, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            expected = f"an int, at least {least}"
            raise ArgumentError("out of range", where=name, expected=expected, got=value)
