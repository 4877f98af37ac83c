"""A state whose parameters are the average that `optim.params_ema` keeps."""

from dataclasses import replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from fsdp_jax.errors import ArgumentError, did_you_mean
from fsdp_jax.host_memory import to_device, to_host
from fsdp_jax.optim.params_ema import ParamsEmaState, find_average
from fsdp_jax.sharding.layout import COPIES, Layout, Leaf
from fsdp_jax.step.state import TrainState, make_copies, own_params
from fsdp_jax.tree import PyTree, flatten, map_with_path, nest_like, suffixes

Weights = Literal["params", "ema"]
"""The parameters of the model, or their average."""


def check_weights(weights: str, layout: Layout) -> None:
    """Raises ValueError for another name, or an average that the optimizer does not keep."""
    if weights not in get_args(Weights):
        raise ArgumentError(
            f"no weights of the name '{weights}'",
            where="weights",
            expected=" or ".join(get_args(Weights)),
            fix=did_you_mean(str(weights), get_args(Weights)),
        )
    if weights == "ema" and find_average(layout.optimizer) is None:
        raise ArgumentError(
            "the optimizer keeps no average of the parameters, or several",
            where="weights",
            got=weights,
            fix="optax.chain(tx, fsdp_jax.optim.params_ema(0.9999)), once around all parameters",
        )


def by_parameter(layout: Layout, average: PyTree) -> dict[str, Any]:
    """Lists {path of the parameter: its average}: an optimizer may see `params` around them."""
    return {
        next(end for end in suffixes(path) if end in layout.by_path): x
        for path, x in flatten(average).items()
    }


def without_average(opt_state: PyTree) -> list[PyTree]:
    """Lists the states that an optimizer has without `params_ema` at its end, which is one or two.

    `optax.chain(a, b, params_ema(...))` goes on from a state of `optax.chain(a, b)`, and
    `optax.chain(a, params_ema(...))` from one of `a` too. Empty for an optimizer without.
    """
    if not isinstance(opt_state, tuple) or not opt_state:
        return []
    if not isinstance(opt_state[-1], ParamsEmaState):
        return []
    rest = opt_state[:-1]
    return [rest, *rest] if len(rest) == 1 else [rest]


def start_average(layout: Layout, params: PyTree) -> ParamsEmaState:
    """Starts the average of an optimizer that ends with one, from stored parameters; in a jit."""
    own = flatten(own_params(layout, params))

    def start(path: str, leaf: Leaf) -> jax.Array:
        parameter = next(end for end in suffixes(path) if end in own)
        return leaf.pad(own[parameter].astype(leaf.dtype))

    average = map_with_path(start, layout.optimizer[-1].average)
    return ParamsEmaState(jnp.zeros((), jnp.int32), average)


def with_weights(layout: Layout, stored: TrainState, weights: Weights) -> TrainState:
    """Puts the average in the place of the trained parameters, in their dtypes; within a jit.

    `stored`: a state as it is stored, to which nothing happens with "params".
    """
    if weights == "params":
        return stored
    leaves = by_parameter(layout, find_average(layout.optimizer))
    averages = by_parameter(layout, find_average(stored.opt_state))

    def as_parameter(path: str, leaf: Leaf) -> jax.Array:
        """Converts an average, which may be sharded and padded otherwise, to the parameter."""
        average = averages[path]
        if leaves[path].on_host:
            average = to_device(average)
        value = leaf.pad(leaves[path].unpad(average).astype(leaf.dtype))
        value = lax.with_sharding_constraint(value, leaf.on_device)
        return to_host(value) if leaf.on_host else value

    trained = {path: as_parameter(path, layout.by_path[path]) for path in leaves}
    params = nest_like(layout.params, flatten(stored.params) | trained)

    def placed(leaf: Leaf, copy: jax.Array) -> jax.Array:
        copy = lax.with_sharding_constraint(copy, leaf.on_device)
        return to_host(copy) if leaf.on_host else copy

    copies = jax.tree.map(placed, layout.other[COPIES], make_copies(layout, params))
    return replace(stored, params=params, copies=copies)
