"""The pure training step: accumulate, reduce, clip, update or skip; compiled once with pinned
shardings and donation.

[Note: what is differentiated] Four ways to get the same sum of gradients differ in when parameters
are gathered and when gradients are reduced:

| gathered | reduced | differentiated | after each microbatch | at the end |
|---|---|---|---|---|
| per unit | each microbatch | the shards; the units' custom VJP reduces | | |
| per unit | deferred | `pending` zeros, full size and local | | reduce |
| once | each microbatch | the gathered copies | reduce | |
| once | deferred | the gathered copies, local | | reduce |

Deferred reduction is what PyTorch calls `no_sync`: one reduction per optimizer step, for gradients
of full size on every device. Microbatches are summed in float32 at least, and cast to the reduce
dtype once, as they are reduced.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from fsdp_jax.errors import message
from fsdp_jax.local_rows import batch_split
from fsdp_jax.prefetch.rewrite import Prefetch, PrefetchReport, prefetched
from fsdp_jax.sharding.layout import COPIES, Layout
from fsdp_jax.sharding.mesh import batch_axes
from fsdp_jax.step.state import TrainState
from fsdp_jax.tree import PyTree, flatten, map_with_path, unflatten
from fsdp_jax.units.collectives import ParamComm, fetch, gather, reduce
from fsdp_jax.units.model import Boundary, LossFn, Model
from fsdp_jax.units.unit import ROOT, Remat, Shard, UnitError, run_unit


@dataclass(frozen=True)
class StepPlan:
    """All that a step is made from.

    Attributes:
        comms: path -> how that parameter travels.
        boundaries: module path -> what happens there.
        loss_fn: `(model, batch) -> (sum, count)`.
        remat: of the whole model, where that is the unit.
        accumulation: microbatches per step.
        deferred: reduce once, after the last of them.
        clip: largest global norm of the gradient; None leaves it.
        prefetch: when the next unit is gathered.
        report: which gathers that moved, once the step is traced.
        local_batch: each device runs the loss on its own rows, inside `shard_map` with explicit
            collectives; otherwise the loss sees the global batch, and XLA inserts the collectives.

    """

    model: Model
    layout: Layout
    tx: optax.GradientTransformation
    comms: dict[str, ParamComm]
    boundaries: dict[str, Boundary]
    loss_fn: LossFn
    remat: Remat = "none"
    accumulation: int = 1
    deferred: bool = False
    clip: float | None = None
    prefetch: Prefetch = "none"
    report: PrefetchReport = field(default_factory=PrefetchReport, repr=False)
    local_batch: bool = False

    @property
    def per_unit(self) -> bool:
        """Whether parameters are gathered unit by unit, and not once for the step."""
        return self.layout.strategy.gathers_per_unit


def train_step(
    plan: StepPlan, state: TrainState, batch: PyTree
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step. `batch`: leaves [accumulation, microbatch, ...], the second dim over all
    mesh axes.

    Metrics, all float32 or int32 scalars: loss (sum / count), grad_norm (before clipping), count,
    skipped, skipped_in_a_row. Where the loss or a gradient is not finite nothing but the counters
    changes.
    """
    with _split(plan, jax.tree.leaves(batch)[0].shape[1]):
        gradients, (total, count), model_state = _gradients(plan, state, batch)
    loss = total / count
    norm = (
        optax.tree.norm(jax.tree.map(lambda g: jnp.abs(g).astype(jnp.float32), gradients)) / count
    )
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    clip = 1.0 if plan.clip is None else jnp.minimum(1.0, plan.clip / jnp.maximum(norm, 1e-12))
    gradients = jax.tree.map(
        lambda g: (g * (clip / count)).astype(g.dtype), gradients
    )  # scaled in float32
    params, opt_state = _update(plan, state, gradients, loss)
    kept = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (params, _copies(plan, params), opt_state, model_state),
        (state.params, state.copies, state.opt_state, state.model_state),
    )
    skipped = state.skipped + jnp.where(finite, 0, 1)
    in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
    params, copies, opt_state, model_state = kept
    new = TrainState(
        state.step + 1, params, copies, opt_state, model_state, state.rng, skipped, in_a_row
    )
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "count": count,
        "skipped": skipped,
        "skipped_in_a_row": in_a_row,
    }
    return new, metrics


def _working(state: TrainState) -> PyTree:
    """The parameters that the model is run with: copies where there are some."""
    return unflatten(flatten(state.params) | flatten(state.copies))


def _copies(plan: StepPlan, params: PyTree) -> PyTree:
    """Whole copies of updated parameters, gathered in the compute dtype."""
    leaves, flat = plan.layout.by_path, flatten(params)

    def copy(path: str, _: Any) -> jax.Array:
        # the optimizer works outside `shard_map`, and this follows it
        return fetch(
            replace(
                plan.comms[path], param_spec=leaves[path].spec, mode="annotate", per_axis=False
            ),
            flat[path],
        )

    return map_with_path(copy, plan.layout.other[COPIES])


def _update(
    plan: StepPlan, state: TrainState, gradients: PyTree, loss: jax.Array
) -> tuple[PyTree, PyTree]:
    """The optimizer on its own shards; under zero1 these are slices of replicated parameters."""
    by_path = plan.layout.by_path

    def pinned(path: str, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, by_path[path].grad_sharding)

    params = map_with_path(pinned, plan.layout.trainable(state.params))
    tx = optax.with_extra_args_support(plan.tx)
    try:
        updates, opt_state = tx.update(
            gradients, state.opt_state, params, value=loss, grad=gradients
        )
    except TypeError as error:
        if "value_fn" not in str(error):
            raise
        fix = "turn its line search off, as in optax.lbfgs(learning_rate, linesearch=None)"
        raise ValueError(
            message("the optimizer wants to evaluate the loss again", where="optimizer", fix=fix)
        ) from error
    updated = flatten(map_with_path(pinned, optax.apply_updates(params, updates)))
    return unflatten(
        {path: updated.get(path, old) for path, old in flatten(state.params).items()}
    ), opt_state


def _gradients(plan: StepPlan, state: TrainState, batch: PyTree) -> tuple[PyTree, Any, PyTree]:
    """(gradients of the summed loss, (sum, count), model state), reduced over the whole mesh."""
    params = _working(state)
    if not plan.local_batch:
        return _accumulate(plan, params, state.model_state, state.rng, state.step, batch, None)
    mesh, by_path = plan.layout.mesh, plan.layout.by_path
    axes = batch_axes(mesh)

    def local(params: PyTree, rest: PyTree, rng: jax.Array, step: jax.Array, batch: PyTree) -> Any:
        grads, sums, rest = _accumulate(plan, params, rest, rng, step, batch, lax.axis_index(axes))
        return grads, lax.psum(sums, axes), rest

    whole = PartitionSpec()
    specs = map_with_path(lambda path, _: plan.comms[path].param_spec, plan.layout.params)
    work = map_with_path(
        lambda path, _: by_path[path].grad_spec, plan.layout.trainable(plan.layout.params)
    )
    return jax.shard_map(
        local,
        mesh=mesh,
        check_vma=False,
        in_specs=(specs, whole, whole, whole, PartitionSpec(None, axes)),
        out_specs=(work, whole, whole),
    )(params, state.model_state, state.rng, state.step, batch)


def _accumulate(
    plan: StepPlan,
    params: PyTree,
    rest: PyTree,
    rng: jax.Array,
    step: jax.Array,
    batch: PyTree,
    device: Any,
) -> tuple[PyTree, Any, PyTree]:
    """Sums over microbatches; see the note on what is differentiated."""
    flat = flatten(params)
    trained = [path for path, leaf in plan.layout.by_path.items() if leaf.trainable]
    held = (
        flat
        if plan.per_unit
        else {path: gather(plan.comms[path], value) for path, value in flat.items()}
    )
    leaves = plan.layout.by_path
    if plan.per_unit and plan.deferred:
        variables = {
            path: jnp.zeros(leaves[path].shape, plan.comms[path].transform.reduce)
            for path in trained
        }
    else:
        variables = {path: held[path] for path in trained}

    def loss(variables: dict[str, jax.Array], rest: PyTree, batch: PyTree, key: jax.Array) -> Any:
        out, after = _run(
            plan, _weights(plan, held, variables), rest, batch, key, training=True, device=device
        )
        total, count = sum_and_count(out)
        return total, (total, count, after)

    def microbatch(
        rest: PyTree, batch: PyTree, index: Any
    ) -> tuple[dict[str, jax.Array], Any, PyTree]:
        key = jax.random.fold_in(rng, step * plan.accumulation + index)
        ahead = plan.per_unit and plan.prefetch != "none"
        run = prefetched(loss, plan.comms, plan.prefetch, plan.report) if ahead else loss
        found, (total, count, after) = jax.grad(run, has_aux=True)(variables, rest, batch, key)
        _check_state(rest, after)
        if not (plan.per_unit or plan.deferred):
            found = {path: reduce(plan.comms[path], found[path]) for path in trained}
        return found, (total, count), after

    def add(carry: Any, batch_and_index: Any) -> Any:
        gradients, sums, rest = carry
        found, more, rest = microbatch(rest, *batch_and_index)
        gradients, sums = jax.tree.map(
            lambda total, x: total + x.astype(total.dtype), (gradients, sums), (found, more)
        )
        return (gradients, sums, rest), None

    if plan.accumulation == 1:
        gradients, sums, rest = microbatch(rest, jax.tree.map(lambda x: x[0], batch), 0)
    else:
        zeros = {path: _zeros(plan, path) for path in trained}
        start = zeros, (jnp.zeros(()), jnp.zeros(())), rest
        (gradients, sums, rest), _ = lax.scan(add, start, (batch, jnp.arange(plan.accumulation)))
    if plan.deferred:
        gradients = {path: reduce(plan.comms[path], g) for path, g in gradients.items()}
    return (
        unflatten(
            {path: g.astype(plan.comms[path].transform.param) for path, g in gradients.items()}
        ),
        sums,
        rest,
    )


def _check_state(before: PyTree, after: PyTree) -> None:
    """Raises ValueError where the model's new state has another shape or dtype: the next step could
    not take it.
    """
    wanted = flatten(before)
    for path, new in flatten(after).items():
        old = wanted[path]
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            expected, got = (f"{x.dtype}{list(x.shape)}" for x in (old, new))
            fix = "cast what is written to the dtype that the model makes it in"
            what = "the model's state changes its shape or dtype in a step"
            raise ValueError(message(what, where=path, expected=expected, got=got, fix=fix))


def _zeros(plan: StepPlan, path: str) -> jax.Array:
    """Where the gradients of microbatches are summed: sharded as they are reduced, in float32 at
    least.
    """
    leaf = plan.layout.by_path[path]
    dtype = jnp.promote_types(plan.comms[path].transform.param, jnp.float32)
    if plan.deferred:
        return jnp.zeros(leaf.shape, dtype)
    sharding = leaf.grad_sharding
    if plan.local_batch:
        return jnp.zeros(sharding.shard_shape(leaf.shape), dtype)
    return lax.with_sharding_constraint(jnp.zeros(leaf.shape, dtype), sharding)


def forward(plan: StepPlan, state: TrainState, batch: PyTree, rows: int | None = None) -> Any:
    """`loss_fn(model, batch)` in inference mode; nothing is differentiated and no state is kept.

    `rows`: of the batch; None where the function takes something else.
    """
    flat = flatten(_working(state))
    held = (
        flat
        if plan.per_unit
        else {path: gather(plan.comms[path], value) for path, value in flat.items()}
    )
    weights = _weights(plan, held, {})
    with _split(plan, rows):
        return _run(
            plan, weights, state.model_state, batch, state.rng, training=False, device=None
        )[0]


def _split(plan: StepPlan, rows: int | None) -> AbstractContextManager[None]:
    """Where XLA partitions the step, the model may ask how its batch lies; see `rows.py`."""
    mesh = plan.layout.mesh
    return nullcontext() if plan.local_batch else batch_split(mesh, batch_axes(mesh), rows)


def _run(
    plan: StepPlan,
    weights: PyTree,
    rest: PyTree,
    batch: PyTree,
    key: jax.Array,
    *,
    training: bool,
    device: Any,
) -> tuple[Any, PyTree]:
    """The user's function on the model; the whole of it is a unit where the model is one."""

    def call(weights: PyTree, args: Any) -> tuple[Any, PyTree]:
        rest, batch, key = args
        try:
            return plan.model.run(
                plan.loss_fn,
                weights,
                rest,
                batch,
                key,
                plan.boundaries,
                training=training,
                device=device,
            )
        except TypeError as error:
            if not plan.local_batch or "key<" not in str(error):
                raise
            what = "the loss reads parameters outside their units, as a penalty on them does"
            expected = "a sum over examples: a device has its own shards alone, and would count whole ones once more"
            fix = "leave local_batch out, or let the optimizer do it, as optax.add_decayed_weights does"
            raise UnitError(message(what, where="loss_fn", expected=expected, fix=fix)) from error

    if not _is_unit(plan):
        return call(weights, (rest, batch, key))
    return run_unit(call, weights, (rest, batch, key), unit=ROOT, remat=plan.remat)


def _is_unit(plan: StepPlan) -> bool:
    return any(comm.unit == ROOT for comm in plan.comms.values())


def sum_and_count(out: Any) -> tuple[jax.Array, jax.Array]:
    """What a loss function returned, as float32 scalars.

    Raises:
        ValueError: anything else than a pair of scalars.

    """
    numbers = jax.Array, np.ndarray, np.generic, int, float
    if (
        isinstance(out, tuple)
        and len(out) == 2
        and all(isinstance(x, numbers) and jnp.ndim(x) == 0 for x in out)
    ):
        return jnp.asarray(out[0], jnp.float32), jnp.asarray(out[1], jnp.float32)
    fix = "return the summed loss and the number of tokens (or examples) in it; the step divides, over all microbatches"
    raise ValueError(
        message(
            "loss_fn returned something else",
            where="loss_fn",
            expected="(sum, count)",
            got=_kinds(out),
            fix=fix,
        )
    )


def _kinds(out: Any) -> str:
    """What was returned, in a word for each part: `(float32[8], dict)`."""
    if isinstance(out, tuple):
        return f"({', '.join(map(_kinds, out))})"
    return (
        f"{out.dtype}{list(out.shape)}"
        if isinstance(out, jax.Array | np.ndarray)
        else type(out).__name__
    )


def _weights(plan: StepPlan, held: dict[str, jax.Array], variables: dict[str, jax.Array]) -> PyTree:
    """What the model is built around: Shards where a unit gathers, arrays elsewhere."""

    def weight(path: str, value: jax.Array) -> Any:
        comm = (
            plan.comms[path] if plan.per_unit else replace(plan.comms[path], already_gathered=True)
        )
        deferred = plan.per_unit and plan.deferred
        shard = (
            Shard(value, comm, variables.get(path))
            if deferred
            else Shard(variables.get(path, value), comm)
        )
        if comm.unit is None:
            return shard.gather()
        if plan.local_batch:  # of the value's shape, so that scans and vmaps may slice both
            shard.guard = jnp.broadcast_to(jax.random.key(0), value.shape)
        return shard

    return unflatten({path: weight(path, value) for path, value in held.items()})
