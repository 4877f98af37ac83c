"""What a step carries from one call to the next, abstract and born sharded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fsdp_jax.errors import did_you_mean, message
from fsdp_jax.sharding.layout import COPIES, Layout
from fsdp_jax.tree import PyTree, flatten, unflatten
from fsdp_jax.units.model import Model


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a training run; a pytree.

    Attributes:
        step: int32, optimizer steps taken or skipped.
        params: nested dicts in the model's own paths.
        copies: whole copies in the compute dtype of parameters that are sharded, where the strategy
            computes with replicated ones (`zero1` in mixed precision); empty elsewhere.
        opt_state: of the optax transformation, for the trained parameters.
        model_state: the model's other state: batch statistics, random streams.
        rng: key that each step's randomness is folded from.
        skipped: int32, steps whose gradients were not finite.
        skipped_in_a_row: int32, the last of them without a good one between.

    """

    step: Any
    params: PyTree
    copies: PyTree
    opt_state: PyTree
    model_state: PyTree
    rng: Any
    skipped: Any
    skipped_in_a_row: Any


def abstract_rest(model: Model, copies: PyTree) -> PyTree:
    """Shapes of all that is neither parameter nor optimizer state. `copies`: of the parameters that
    have one.
    """
    counter = jax.ShapeDtypeStruct((), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return {
        "step": counter,
        "skipped": counter,
        "skipped_in_a_row": counter,
        "rng": key,
        "model_state": model.rest,
        COPIES: copies,
    }


def state_like(layout: Layout, leaf_to: Any) -> TrainState:
    """A TrainState with `leaf_to(Leaf)` in place of every array."""
    params, opt_state, other = (
        jax.tree.map(leaf_to, part) for part in (layout.params, layout.optimizer, layout.other)
    )
    return TrainState(params=params, opt_state=opt_state, **other)


def state_shardings(layout: Layout) -> TrainState:
    """A NamedSharding for every array of the state."""
    return state_like(layout, lambda leaf: leaf.sharding)


def abstract_state(layout: Layout) -> TrainState:
    """Shape, dtype and sharding of every array of the state."""
    return state_like(layout, lambda leaf: leaf.abstract)


def check_given(params: PyTree, layout: Layout) -> dict[str, jax.Array]:
    """{path: array} of parameters that someone else has filled. Raises ValueError where one is not
    as it will lie.
    """
    given, wanted = flatten(params), flatten(layout.params)
    for path, array in given.items():
        if path not in wanted:
            raise ValueError(
                message(
                    "no such parameter", where="params", got=path, fix=did_you_mean(path, wanted)
                )
            )
        leaf = wanted[path].abstract
        if not isinstance(array, jax.Array):
            fix = "read it into sharded.checkpoint_target().params"
            raise ValueError(
                message("not a jax.Array, on its devices", where=path, got=type(array), fix=fix)
            )
        fits = array.shape == leaf.shape and array.dtype == leaf.dtype
        if not fits or not array.sharding.is_equivalent_to(leaf.sharding, array.ndim):
            expected, got = (f"{x.dtype}{list(x.shape)}, {x.sharding}" for x in (leaf, array))
            fix = "read it into sharded.checkpoint_target().params"
            raise ValueError(
                message("a parameter does not fit", where=path, expected=expected, got=got, fix=fix)
            )
    return given


def make_copies(layout: Layout, params: PyTree) -> PyTree:
    """The copies that the layout has, cast from the parameters."""
    flat = flatten(params)
    return unflatten(
        {
            path: flat[path].astype(leaf.dtype)
            for path, leaf in flatten(layout.other[COPIES]).items()
        }
    )


def init_state(
    model: Model,
    tx: optax.GradientTransformation,
    layout: Layout,
    seed: int,
    given: Mapping[str, jax.Array],
) -> TrainState:
    """A state whose every array is made on the devices that hold it; no whole copy is ever made.

    `given`: parameters by path, as they shall be; only the others are drawn.

    Parameters come first and the optimizer after, so that what the random generator needs is gone
    when the optimizer's arrays are made.
    """
    shardings = state_shardings(layout)
    dtypes = {path: leaf.dtype for path, leaf in flatten(layout.params).items()}

    def params_and_rest(key: jax.Array) -> tuple[dict[str, jax.Array], PyTree]:
        params, rest = model.init(key)
        drawn = {path: x for path, x in flatten(params).items() if path not in given}
        return {path: x.astype(dtypes[path]) for path, x in drawn.items()}, rest

    key, run = jax.random.split(jax.random.key(seed))
    placed = {
        path: sharding for path, sharding in flatten(shardings.params).items() if path not in given
    }
    drawn, rest = jax.jit(params_and_rest, out_shardings=(placed, shardings.model_state))(key)
    params = unflatten(
        {path: given[path] if path in given else drawn[path] for path in flatten(shardings.params)}
    )
    copies = jax.jit(lambda params: make_copies(layout, params), out_shardings=shardings.copies)(
        params
    )
    opt_state = jax.jit(tx.init, out_shardings=shardings.opt_state)(layout.trainable(params))

    def counters(run: jax.Array) -> dict[str, jax.Array]:
        return {"rng": run} | {
            name: jnp.zeros((), jnp.int32) for name in ("step", "skipped", "skipped_in_a_row")
        }

    # Made inside jit: each has a buffer of its own, as donation wants.
    counted = {
        name: getattr(shardings, name) for name in ("rng", "step", "skipped", "skipped_in_a_row")
    }
    return TrainState(
        params=params,
        copies=copies,
        opt_state=opt_state,
        model_state=rest,
        **jax.jit(counters, out_shardings=counted)(run),
    )
