"""Completes a state that was restored from a checkpoint of another run or layout."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from fsdp_jax.io.array_specs import describe_array
from fsdp_jax.sharding.layout import Layout
from fsdp_jax.sharding.padding import stored_array
from fsdp_jax.sharding.precision import LossScale
from fsdp_jax.step.average import start_average, without_average
from fsdp_jax.step.loss_scaling import within_limits
from fsdp_jax.step.loss_spikes import LossSpikes
from fsdp_jax.step.state import (
    LOSS_SCALE,
    OPTIONAL,
    TrainState,
    check_base,
    make_copies,
    put,
    require_held,
    start_optional,
    state_like,
)
from fsdp_jax.tree import PyTree, map_with_path


def complete_state(
    layout: Layout, saved: TrainState, scaling: LossScale | None, spikes: LossSpikes | None
) -> TrainState:
    """Makes the state of a run out of a restored one: see `Sharded.from_checkpoint`.

    `saved`: restored into `checkpoint_target`; arrays may be `Padded`. `scaling`, `spikes`: of this
    run.
    """
    require_held(saved)
    saved = _as_stored(layout, saved)
    lacking = _lacks_average(layout, saved)

    def complete(params: PyTree, kept: dict[str, PyTree]) -> tuple[PyTree, ...]:
        optional = start_optional(scaling, spikes)
        for name, started in optional.items():
            specs = [jax.tree.map(describe_array, each) for each in (started, kept[name])]
            if specs[0] == specs[1]:
                optional[name] = kept[name]
        optional[LOSS_SCALE] = within_limits(scaling, optional[LOSS_SCALE])
        average = start_average(layout, params) if lacking is not None else None
        return make_copies(layout, params), optional, average

    shardings = state_like(layout, lambda leaf: leaf.sharding)
    of_optional = {name: getattr(shardings, name) for name in OPTIONAL}
    of_average = None if lacking is None else shardings.opt_state[-1]
    completed = jax.jit(complete, out_shardings=(shardings.copies, of_optional, of_average))
    with layout.axes.ambient():
        kept = {name: getattr(saved, name) for name in OPTIONAL}
        copies, optional, average = completed(saved.params, kept)
    opt_state = saved.opt_state if lacking is None else (*lacking, average)
    return replace(saved, copies=copies, opt_state=opt_state, **optional)


def _as_stored(layout: Layout, saved: TrainState) -> TrainState:
    """Pads arrays as the layout stores them, and checks the format of a quantized base."""
    blocks = {path: leaf for path, leaf in layout.by_path.items() if leaf.blocks}
    if saved.base:
        check_base(saved.base, layout.base, "saved")
    params = map_with_path(
        lambda path, x: put(x, blocks[path]) if path in blocks else x, saved.params
    )
    return jax.tree.map(stored_array, replace(saved, params=params, base=layout.base))


def _lacks_average(layout: Layout, saved: TrainState) -> Sequence[Any] | None:
    """Finds the states of the optimizer before its average, if `saved` has all but the average.

    None where the average is saved, or the optimizer keeps none. Warns that it starts anew.
    """
    structure: Any = jax.tree.structure(saved.opt_state)
    fits = [jax.tree.structure(each) == structure for each in without_average(layout.optimizer)]
    if not any(fits):
        return None
    what = "the checkpoint has no average of the parameters; it starts from them"
    warnings.warn(what, stacklevel=4)  # the caller of from_checkpoint
    return saved.opt_state if fits[0] else (saved.opt_state,)
