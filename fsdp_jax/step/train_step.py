"""The pure training step: accumulate, reduce, clip, update or skip.

It is compiled once, with pinned shardings and donation.

docs/design/communication.md follows one parameter through a step, function by function.

[Note: what is differentiated] The strategy says whether units gather (`full_shard` and hybrids of
it) or the step does, once. Five ways to get the same sum of gradients differ in that, and in when
gradients are reduced:

| gathered | reduced | the loss is differentiated by | who reduces |
|---|---|---|---|
| per unit | each microbatch | the parameters | the transpose of the gather |
| per unit, from host memory | each microbatch | zeros, sharded as the gradient | the same |
| per unit | deferred | zeros of full size, local to the device | the step, at the end |
| once | each microbatch | the gathered copies | the step, after each microbatch |
| once | deferred | the gathered copies, local to the device | the step, at the end |

Deferred reduction is what PyTorch calls `no_sync`: one reduction per optimizer step, for gradients
of full size on every device. Units cast their gradients to the reduce dtype in each microbatch.
Microbatches are summed in float32 at least; where reduction is deferred, the sum is cast to the
reduce dtype as it is reduced.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from fsdp_jax.compat import error_texts
from fsdp_jax.errors import ArgumentError
from fsdp_jax.local_rows import batch_split
from fsdp_jax.prefetch.rewrite import Prefetch, PrefetchReport, call_prefetched
from fsdp_jax.sharding.explicit_style import in_model_view
from fsdp_jax.sharding.layout import Leaf
from fsdp_jax.sharding.padding import unpad
from fsdp_jax.step import loss_scaling, loss_spikes
from fsdp_jax.step.finite import keep_finite
from fsdp_jax.step.float8_matmuls import with_float8_matmuls
from fsdp_jax.step.loss import LossSums, averaged
from fsdp_jax.step.others import (
    OtherArrays,
    OtherInputs,
    call_with_others,
    other_inputs,
    specs_of_inputs,
)
from fsdp_jax.step.state import LOSS_SCALE, TrainState, pad_state, unpad_state
from fsdp_jax.step.step_plan import NOTHING_MOVED, StepPlan, StepReport
from fsdp_jax.step.update import choose, mean_and_clipped, update_or_keep
from fsdp_jax.tree import PyTree, array_text, flatten, map_with_path, nest_like, replace_leaves
from fsdp_jax.units.collectives import gather, reduce
from fsdp_jax.units.model import ModelCall, bind_axis_names
from fsdp_jax.units.shard_reads import Held, call_with_shards
from fsdp_jax.units.unit import ROOT, call_checkpointed, checkpoint_settings, gather_unit

_EVALUATION = 2**32 - 1  # folded into the key of the run; steps count from 0
LOSS_Z_SCORE = "loss_z_score"  # a metric of steps that detect spikes
_LOSS = 2  # folded into the key of a microbatch; 1 is Linen's stream "dropout"


class _Inputs(NamedTuple):
    """Inputs of the loss other than the parameters."""

    model_state: PyTree
    rng: jax.Array  # the key of the run
    step: jax.Array
    factor: jax.Array | None  # of the loss, before it is differentiated
    batch: PyTree  # leaves [accumulation, microbatch, ...]
    others: dict[str, OtherInputs]  # of the other models, by name


class _Computed(NamedTuple):
    """The loss and its derivative, summed over microbatches and reduced over devices."""

    gradients: PyTree  # of the trained parameters, nested or by path
    sums: LossSums
    model_state: PyTree  # afterwards
    report: PrefetchReport


def train_step(
    plan: StepPlan,
    stored: TrainState,
    batch: PyTree,
    others: Mapping[str, OtherArrays] = MappingProxyType({}),
) -> tuple[tuple[TrainState, dict[str, jax.Array]], StepReport]:
    """Computes one optimizer step: ((new state, metrics), report of the trace).

    Metrics, all int32 or float scalars: loss (sum / count), grad_norm (before clipping), count,
    skipped, skipped_in_a_row; loss_scale (of this step) if there is one; loss_z_score if spikes are
    detected; and those of the loss, see `step.loss`. Floats are float32, or of the model's dtype if
    that is wider. If the loss, the gradients or the new model state are not finite, the step is
    skipped: only the counters, the scale and the recent losses of the state change. A step also
    counts as skipped if some numbers of the state are kept so that they stay finite.

    `stored`: the state as it is stored; `batch`: leaves [accumulation, microbatch, ...], the second
    dim over all mesh axes; `others`: arrays of the other models' states, as they are stored.
    """
    # Cut padded arrays to their own shapes; explicit collectives take the stored shards.
    state = unpad_state(plan.layout, stored)
    with_shards = state
    if plan.local_batch:
        with_shards = replace(state, params=stored.params, copies=stored.copies)

    # Differentiate the loss, scaled if there is a scale, and divide the gradients by its count.
    microbatches, rows = jax.tree.leaves(batch)[0].shape[:2]
    factor = loss_scaling.loss_factor(state.loss_scale, microbatches * rows)
    of_others = other_inputs(plan, stored, others)
    with tell_batch_split(plan, rows):
        computed = _gradients_of_loss(plan, with_shards, batch, factor, of_others)
    count = computed.sums.counted
    # A negative one would train uphill: the step is skipped, as with a count of zero.
    divisor = jnp.where(count < 0, jnp.nan, count)
    loss = computed.sums.total / divisor
    if factor is not None:
        divisor *= factor
    gradients, norm = mean_and_clipped(computed.gradients, divisor, plan.clip)

    # Skip the step if its loss, gradients or model state are not finite, or on a spike.
    own: dict[str, jax.Array] = {}
    recent = state.recent_losses
    is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    applies = is_finite
    if plan.spikes is not None:
        own[LOSS_Z_SCORE] = loss_spikes.z_score(recent, loss)
        recent = loss_spikes.add_loss(recent, loss)
        if plan.spikes.skip:
            applies = is_finite & (own[LOSS_Z_SCORE] <= plan.spikes.threshold)
    _, stays_finite = keep_finite(state.model_state, computed.model_state)
    applies &= stays_finite
    updated = update_or_keep(plan, state, gradients, loss, applies)
    is_applied = applies & updated.is_finite
    model_state = choose(is_applied, computed.model_state, state.model_state)

    # Count the step as skipped if it was, and choose the next scale of the loss.
    scaling, scale = plan.precision.scaling, state.loss_scale
    skipped = state.skipped + jnp.where(is_applied, 0, 1)
    counts = loss_scaling.counts_as_skipped(scaling, scale)
    # The scale falls only where the gradients were not finite; other skips count at any scale.
    counts = jnp.where(is_finite, 1, counts)
    in_a_row = jnp.where(is_applied, 0, state.skipped_in_a_row + counts)
    own |= {"loss": loss, "grad_norm": norm, "count": count}
    own |= {"skipped": skipped, "skipped_in_a_row": in_a_row}
    if scaling is not None:
        own[LOSS_SCALE] = scale["scale"]
        scale = loss_scaling.next_scale(scaling, scale, is_finite)

    # The new state, as it is stored.
    new = replace(
        state,
        step=state.step + 1,
        params=updated.params,
        copies=updated.copies,
        opt_state=updated.opt_state,
        model_state=model_state,
        skipped=skipped,
        skipped_in_a_row=in_a_row,
        loss_scale=scale,
        recent_losses=recent,
    )
    metrics = own | averaged(computed.sums.metrics)
    report = StepReport(prefetch=computed.report, streaming=updated.report)
    return (pad_state(plan.layout, new), metrics), report


def forward(
    plan: StepPlan,
    state: TrainState,
    batch: PyTree,
    rows: int | None = None,
    others: Mapping[str, OtherArrays] = MappingProxyType({}),
) -> tuple[Any, StepReport]:
    """Computes the plan's function, a loss or that of `apply`, in inference mode.

    There are no gradients, and no state is kept. Like `train_step` it also returns a report. A
    function that takes a key gets the same one each time, which no training step uses. `rows`: of
    the batch; None for `apply`, whose function takes anything. `others`: as for `train_step`.
    """
    of_others = other_inputs(plan, state, others)
    state = unpad_state(plan.layout, state)
    params = _gathered_if_once(plan, _params_to_compute_with(state))
    params_of_others = _params_of_others(plan, of_others, _others_gathered_once(plan, of_others))
    with tell_batch_split(plan, rows):
        out, _ = run_model(
            plan,
            _params_of_model(plan, state.params, params, {}) | params_of_others,
            state.model_state,
            batch,
            jax.random.fold_in(state.rng, _EVALUATION),
            others={name: each.model_state for name, each in of_others.items()},
            training=False,
            device=None,
        )
    return out, NOTHING_MOVED


def tell_batch_split(plan: StepPlan, rows: int | None) -> AbstractContextManager[None]:
    """Makes a context in which `local_rows` knows how the batch of a traced step is sharded."""
    if plan.local_batch:
        return nullcontext()
    axes = plan.layout.axes
    return batch_split(axes.mesh, axes.batch, rows)


# Parameters


def _params_to_compute_with(state: TrainState) -> PyTree:
    """Selects the parameters that the model computes with: copies, if the state has them."""
    return replace_leaves(state.params, state.copies)


def _gathered_if_once(plan: StepPlan, params: PyTree) -> dict[str, jax.Array]:
    """Flattens parameters by path, and gathers them where the strategy does so once per step."""
    once = {path for path, comm in plan.comms.items() if comm.already_gathered}
    flat = flatten(params)
    return {path: gather(plan.comms[path], x) if path in once else x for path, x in flat.items()}


def _params_of_model(
    plan: StepPlan,
    stored: PyTree,
    params: dict[str, jax.Array],
    variables: dict[str, jax.Array],
) -> dict[str, jax.Array | Held]:
    """Builds {path: input of the model}.

    | the parameter is of no unit | the gathered array |
    | local batches, or in host memory and not gathered yet | a `Held`, which its unit gathers |
    | else | the array: gathered if the step gathers once, otherwise sharded |

    `stored`: the parameters of the state; `params`: as `_gathered_if_once` returns them;
    `variables`: what is differentiated, by path.
    """
    stored = flatten(stored)  # none with local batches, where nothing is read outside units

    def param(path: str, value: jax.Array) -> jax.Array | Held:
        """Returns a parameter as the model is built around it."""
        comm, slot = plan.comms[path], None
        if not comm.already_gathered and (comm.deferred or comm.on_host):
            slot = variables.get(path)
        else:
            value = variables.get(path, value)
        if comm.unit is None:
            return value if comm.already_gathered else gather(comm, value, slot)
        if not comm.traced_whole:
            return value
        is_copy = comm.on_host and path in stored and stored[path] is not value
        return Held(value, comm, slot, stored[path] if is_copy else None)

    return {path: param(path, value) for path, value in params.items()}


def _others_gathered_once(
    plan: StepPlan, others: Mapping[str, OtherInputs]
) -> dict[str, dict[str, jax.Array]]:
    """Does the work of `_gathered_if_once` for other models: {name: parameters by path}."""
    return {
        name: _gathered_if_once(plan.others[name].plan, each.params)
        for name, each in others.items()
    }


def _params_of_others(
    plan: StepPlan,
    others: Mapping[str, OtherInputs],
    params: Mapping[str, dict[str, jax.Array]],
) -> dict[str, jax.Array | Held]:
    """Builds {path in traces: input of the model} for other models; none is differentiated.

    `params`: as `_others_gathered_once` returns them.
    """
    inputs = {}
    for name, each in others.items():
        other = plan.others[name].plan
        for path, x in _params_of_model(other, each.stored, params[name], {}).items():
            inputs[other.comms[path].path] = x
    return inputs


# Gradients


def _gradients_of_loss(
    plan: StepPlan,
    state: TrainState,
    batch: PyTree,
    factor: jax.Array | None,
    others: dict[str, OtherInputs],
) -> _Computed:
    """Differentiates the summed loss, multiplied by `factor`."""
    params = _params_to_compute_with(state)
    inputs = _Inputs(state.model_state, state.rng, state.step, factor, batch, others)
    if not plan.local_batch:
        return _accumulate(plan, params, state.params, inputs, device=None)

    # Each device runs on its own rows. Units reduce gradients on the way; sums are reduced here.
    mesh, by_path = plan.layout.mesh, plan.layout.by_path
    axes = plan.layout.axes.batch

    def local(
        params: PyTree, inputs: _Inputs, batch: PyTree, others: dict[str, OtherInputs]
    ) -> tuple[PyTree, _Computed]:
        """Returns (gradients, the rest): the gradients are sharded, the rest replicated."""
        own = inputs._replace(batch=batch, others=others)
        computed = _accumulate(plan, params, {}, own, device=lax.axis_index(axes))
        sums = lax.psum(computed.sums, axes)
        return computed.gradients, computed._replace(gradients=(), sums=sums)

    # Specs of the `shard_map`: stored shards in, gradients out as they are scattered.
    replicated = PartitionSpec()
    trainable = plan.layout.trainable(plan.layout.params)
    param_specs = map_with_path(lambda path, _: plan.comms[path].shard_spec, plan.layout.params)
    grad_specs = map_with_path(lambda path, _: by_path[path].grad_spec, trainable)
    gradients, computed = jax.shard_map(
        local,
        mesh=mesh,
        check_vma=False,
        in_specs=(param_specs, replicated, PartitionSpec(None, axes), specs_of_inputs(plan)),
        out_specs=(grad_specs, replicated),
    )(params, inputs._replace(batch=(), others={}), batch, others)
    cut = map_with_path(lambda path, g: _own_gradient(by_path[path], g), gradients)
    return computed._replace(gradients=cut)


def _own_gradient(leaf: Leaf, padded: jax.Array) -> jax.Array:
    """Cuts a gradient that was scattered with padding to the shape of its parameter."""
    if padded.shape == leaf.shape:
        return padded
    return lax.with_sharding_constraint(unpad(padded, leaf.shape), leaf.grad_sharding)


def _accumulate(
    plan: StepPlan, params: PyTree, stored: PyTree, inputs: _Inputs, *, device: Any
) -> _Computed:
    """Computes the sums over microbatches for `_gradients_of_loss`; see the note.

    `stored`: the parameters of the state, of which `params` may be copies; {} with local batches.
    `device`: number of the device with local batches, otherwise None.
    """
    # What is differentiated: the parameters, or zeros instead of them.
    flat = _gathered_if_once(plan, params)
    flat_others = _others_gathered_once(plan, inputs.others)
    variables = {path: _differentiated_by(plan, path, flat[path]) for path in plan.trained}

    def loss(
        variables: dict[str, jax.Array], model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> Any:
        """Computes (the sum to differentiate, (sums, new model state)) of one microbatch."""
        model_params = _params_of_model(plan, stored, flat, variables)
        model_params |= _params_of_others(plan, inputs.others, flat_others)
        sums, new_state = run_model(
            plan,
            model_params,
            model_state,
            batch,
            key,
            others={name: each.model_state for name, each in inputs.others.items()},
            training=True,
            device=device,
        )
        total = sums.total
        if inputs.factor is not None:
            total *= inputs.factor
        return total, (sums, new_state)

    # With Explicit axes, layers are traced in the model's view of the mesh; gathers do not move.
    when: Prefetch = "none"
    if plan.per_unit and not plan.layout.axes.explicit_axes:
        when = plan.prefetch

    def loss_and_report(*args: Any) -> Any:
        """Returns (the sum to differentiate, (sums, new model state, report)) of a microbatch."""
        comms = {path: comm for path, (comm, _) in plan.traced.items()}
        (total, rest), report = call_prefetched(loss, comms, when, *args)
        return total, (*rest, report)

    def pin(path: str, gradient: jax.Array) -> jax.Array:
        sharding = plan.layout.by_path[path].grad_sharding
        return lax.with_sharding_constraint(gradient, sharding)

    # One microbatch: its sums, and its gradients, which are reduced here unless that happens
    # elsewhere.
    def microbatch(model_state: PyTree, batch: PyTree, index: Any) -> _Computed:
        """Differentiates one microbatch; reduces unless units or a later reduction do it."""
        # No key is used twice, even if accumulation changes.
        key = jax.random.fold_in(jax.random.fold_in(inputs.rng, inputs.step), index)
        gradients, (sums, new_state, report) = jax.grad(loss_and_report, has_aux=True)(
            variables, model_state, batch, key
        )
        _check_model_state(model_state, new_state)
        if not (plan.per_unit or plan.deferred):
            gradients = _reduce_gradients(plan, gradients)
        elif not plan.local_batch:  # that of a read outside its unit is not sharded otherwise
            gradients = {path: pin(path, g) for path, g in gradients.items()}
        return _Computed(gradients, sums, new_state, report)

    # Add up, reduce the gradients that are reduced at the end, and cast for the optimizer.
    summed = _sum_microbatches(plan, microbatch, inputs.model_state, inputs.batch)
    gradients = summed.gradients
    if plan.deferred:
        gradients = _reduce_gradients(plan, gradients)
    dtypes = {path: plan.comms[path].transform.param for path in gradients}
    if plan.precision.stochastic_rounding:
        dtypes = {path: jnp.promote_types(dtype, jnp.float32) for path, dtype in dtypes.items()}
    cast = {path: g.astype(dtypes[path]) for path, g in gradients.items()}
    return summed._replace(gradients=nest_like(plan.layout.params, cast))


def _sum_microbatches(
    plan: StepPlan, microbatch: Callable[..., _Computed], model_state: PyTree, batch: PyTree
) -> _Computed:
    """Adds up the results of `microbatch(model_state, batch, index)` over all microbatches.

    Gradients, by path, are summed in float32 at least, the other sums in their own dtypes.
    """
    if plan.accumulation == 1:
        first = jax.tree.map(lambda x: x[0], batch)
        return microbatch(model_state, first, 0)

    def add(carry: Any, batch_and_index: Any) -> Any:
        """Adds a microbatch's gradients to the carry, (totals, model state); returns the rest."""
        totals, model_state = carry
        one = microbatch(model_state, *batch_and_index)
        totals = jax.tree.map(lambda total, x: total + x.astype(total.dtype), totals, one.gradients)
        return (totals, one.model_state), (one.sums, one.report)

    dtypes = {path: plan.comms[path].transform.param for path in plan.trained}
    zeros = {
        path: _zero_gradient(plan, path, jnp.promote_types(dtype, jnp.float32))
        for path, dtype in dtypes.items()
    }
    microbatches = (batch, jnp.arange(plan.accumulation))
    (gradients, model_state), (each, report) = lax.scan(add, (zeros, model_state), microbatches)
    # Stack them: their dtypes, and which metrics there are, are known only once the loss is traced.
    sums = jax.tree.map(lambda x: x.sum(0), each)
    return _Computed(gradients, sums, model_state, report)


def _differentiated_by(plan: StepPlan, path: str, param: jax.Array) -> jax.Array:
    """Chooses the array that the loss is differentiated by for a parameter; see the note."""
    comm = plan.comms[path]
    if plan.per_unit and comm.deferred:
        return jnp.zeros(plan.layout.by_path[path].shape, comm.transform.reduce)
    if plan.per_unit and comm.on_host:  # an array in host memory has no gradient
        return _zero_gradient(plan, path, comm.transform.param)
    return param


def _reduce_gradients(plan: StepPlan, gradients: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Reduces each gradient as its parameter's `ParamComm` says: {path: gradient}."""
    return {path: reduce(plan.comms[path], g) for path, g in gradients.items()}


def _check_model_state(before: PyTree, after: PyTree) -> None:
    """Raises ValueError if a step changes the structure, shapes or dtypes of the model's state.

    The next step could not take it.
    """
    expected = flatten(before)
    for path, new in flatten(after).items():
        if path not in expected:
            raise ArgumentError(
                "the model makes new state in a step",
                where=path,
                got=jnp.shape(new),
                fix="make it as the model is initialized; sow into a collection without variables",
            )
        old = expected[path]
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            what = "the model's state changes its shape or dtype in a step"
            was, got = map(array_text, (old, new))
            raise ArgumentError(
                what,
                where=path,
                expected=was,
                got=got,
                fix="cast what is written to the dtype that the model makes it in",
            )


def _zero_gradient(plan: StepPlan, path: str, dtype: np.dtype) -> jax.Array:
    """Makes zeros like a reduced gradient: the start of a sum, or a slot."""
    leaf = plan.layout.by_path[path]
    if plan.deferred:
        return jnp.zeros(leaf.shape, dtype)
    sharding = leaf.grad_sharding
    if plan.local_batch:
        return jnp.zeros(sharding.shard_shape(leaf.grad_shape), dtype)
    return lax.with_sharding_constraint(jnp.zeros(leaf.shape, dtype), sharding)


# The user's function


def run_model(
    plan: StepPlan,
    params: Mapping[str, jax.Array | Held],
    model_state: PyTree,
    batch: PyTree,
    key: jax.Array,
    *,
    others: Mapping[str, PyTree] = MappingProxyType({}),
    training: bool,
    device: Any,
) -> tuple[Any, PyTree]:
    """Runs the user's function on the model: (its result, the new model state).

    `params`: the results of `_params_of_model` and `_params_of_others`; `key`: of this microbatch;
    `others`: {name of another model: its other state}; `device`: as for `_accumulate`. The whole
    model may be a unit.
    """

    # The call of the user's function, with the model built around `params`.
    def call(params: dict[str, jax.Array], args: Any) -> tuple[Any, PyTree]:
        """Runs the function and the model; gathers nothing for the whole model."""
        model_state, batch, key, others = args
        # With local batches each device draws different keys.
        keys: tuple[jax.Array, ...] = ()
        if plan.takes_key:
            own = key if device is None else jax.random.fold_in(key, device)
            keys = (jax.random.fold_in(own, _LOSS),)

        def fn(model: Any, batch: Any) -> Any:
            loss = functools.partial(plan.loss_fn, model, batch, *keys)
            return call_with_others(plan, loss, params, others, key, device)

        inputs = ModelCall(
            params=nest_like(plan.layout.params, {path: params[path] for path in plan.comms}),
            rest=model_state,
            batch=batch,
            key=key,
            boundaries=plan.boundaries,
            comms=plan.comms,
            training=training,
            device=device,
        )
        run = functools.partial(plan.model.run, fn, inputs)
        # Names are bound around all models: Flax refuses a module inside another mapped axis.
        models = [plan.model, *(other.plan.model for other in plan.others.values())]
        names = [name for model in models for name in model.names_of_run()]
        if not plan.local_batch:
            names += sorted(frozenset().union(*(model.axis_names for model in models)))
        with _errors_of_loss(plan):
            return bind_axis_names(names, run)

    # The same, but first gather the parameters that no smaller unit owns.
    def run(params: dict[str, jax.Array], args: Any) -> tuple[Any, PyTree]:
        """Runs `call`, and first gathers the whole model's parameters if it is the unit."""
        own = [path for path, comm in plan.comms.items() if comm.unit == ROOT]
        comms = [plan.comms[path] for path in own]
        if not own:
            return call(params, args)

        def gathered_call(params: dict[str, jax.Array], args: Any) -> tuple[Any, PyTree]:
            gathered = gather_unit(comms, [params[path] for path in own])
            inputs = plan.activations.name_inputs(args)
            return call(params | dict(zip(own, gathered, strict=True)), inputs)

        values = [params[path] for path in own]
        settings = checkpoint_settings(comms, values, plan.activations)
        return call_checkpointed(gathered_call, settings, params, args)

    # Wrap the whole model: reads outside units, float8 matmuls, and the mesh that it sees.
    fn: Callable[..., Any] = run
    if any(isinstance(value, Held) for value in params.values()):
        fn = functools.partial(call_with_shards, run)
    if any(comm.float8_matmuls for comm, _ in plan.traced.values()):
        fn = with_float8_matmuls(fn)
    return in_model_view(plan.layout.axes, fn)(params, (model_state, batch, key, dict(others)))


@contextmanager
def _errors_of_loss(plan: StepPlan) -> Iterator[None]:
    """Replaces jax's errors about a loss that does not fit a step by errors with the fix."""
    try:
        yield
    except NameError as error:
        unbound = error_texts.UNBOUND_AXIS.found_in(error)
        if unbound is None:
            raise
        what = "the model or the loss averages over an axis that nothing binds"
        fix = "leave that collective out: the loss sees the global batch"
        if plan.local_batch:
            fix = "leave local_batch out: statistics are then of the global batch"
        raise ArgumentError(what, where="loss_fn", got=unbound[0], fix=fix) from error
    except (TypeError, ValueError) as error:
        if not error_texts.OF_KEYS.found_in(error) or not plan.takes_key:
            raise
        raise ArgumentError(
            "the loss computes with a random key",
            where="loss_fn",
            got=error_texts.first_line(error),
            fix=(
                "the third argument of a loss is a key, to draw from with jax.random; labels "
                "belong in the batch, {'x': x, 'y': y}"
            ),
        ) from error
