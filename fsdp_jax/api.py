"""The one sentence people write: `fully_shard(model, optimizer, mesh, strategy, units)`."""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from fsdp_jax.errors import did_you_mean, message
from fsdp_jax.prefetch.rewrite import Prefetch
from fsdp_jax.sharding.layout import COPIES, Layout, make_layout
from fsdp_jax.sharding.mesh import (
    DATA,
    REPLICA,
    axes_of,
    check_mesh,
    data_axes,
    make_mesh,
    replicated,
    shape_of,
    split_data,
)
from fsdp_jax.sharding.precision import AS_MADE, Precision
from fsdp_jax.sharding.rules import MIN_SIZE, Axis, Placement, Rule, Rules, stacked_dims
from fsdp_jax.sharding.strategy import Strategy, get_strategy
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.step.state import (
    TrainState,
    abstract_rest,
    abstract_state,
    check_given,
    init_state,
    make_copies,
    state_shardings,
)
from fsdp_jax.step.train_step import StepPlan, forward, sum_and_count, train_step
from fsdp_jax.tree import PyTree, flatten, unflatten
from fsdp_jax.units.auto_wrap import Units, choose_units
from fsdp_jax.units.collectives import GatherTransform, Mode, ParamComm
from fsdp_jax.units.model import Boundary, LossFn, Model
from fsdp_jax.units.unit import ROOT, Remat
from fsdp_jax.validation import (
    adapt,
    check_arguments,
    check_patterns,
    check_plan,
    check_train_step,
    check_trained,
)

if TYPE_CHECKING:
    from fsdp_jax.planner import Plan, Work


def fully_shard(
    model: Callable[[nnx.Rngs], nnx.Module] | nn.Module,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    strategy: str | Strategy = "full_shard",
    units: Units = "model",
    *,
    inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    precision: Precision | None = None,
    remat: Remat = "none",
    prefetch: Prefetch = "none",
    rules: Sequence[Rule] = (),
    logical_axes: Mapping[str, Axis] | None = None,
    min_size: int = MIN_SIZE,
    strict: bool = False,
    stacked: Sequence[str] | None = None,
    frozen: Sequence[str] = (),
) -> "Sharded":
    """Lays out a model's training state over a mesh. Nothing is allocated.

    Args:
        model: `make_model(rngs) -> nnx.Module`, or a `linen.Module` together with `inputs`.
        tx: any optax transformation.
        mesh: from `make_mesh`.
        strategy: `no_shard`, `zero1`, `shard_grad_op`, `full_shard`, `hybrid_shard`,
            `hybrid_shard_zero2`, or an alias.
        units: what is gathered together: module classes, a least number of parameters, `scan` (the
            body of a layer scan) or `model`.
        inputs: example inputs of a Linen model, arrays or shapes: a tuple, or a dict by name.
        precision: dtypes; where absent, those that the model makes its parameters in.
        remat: `none` saves a unit's activations, `full` recomputes the unit in the backward.
        prefetch: `pre` gathers the next unit while one computes, and reduces gradients meanwhile,
            for one more unit in memory; `post` gathers in the backward as one has computed; `none`
            leaves it to XLA.
        rules: ordered (pattern, spec); see `fsdp_jax.sharding.rules`.
        logical_axes: logical name -> mesh axis, for rules and for Flax's annotations.
        min_size: elements below which a parameter stays replicated.
        strict: every parameter must be matched by a rule or an annotation.
        stacked: path patterns of parameters whose first dim stacks layers; found by their shapes
            where absent.
        frozen: path patterns of parameters that are not trained: no gradient, no optimizer state,
            still sharded.

    Raises:
        ValueError: what does not fit, with the path, what was expected, what was found, and the
            fix.

    """
    check_arguments(tx, mesh, units, precision, remat, prefetch)
    adapter, mesh, strategy = (
        adapt(model, inputs),
        split_data(check_mesh(mesh)),
        get_strategy(strategy),
    )
    precision = precision or AS_MADE
    settings = Rules(
        tuple(rules),
        _in_parts(logical_axes or {}, mesh),
        min_size,
        strict,
        strategy.shard_axes(mesh),
    )
    made = flatten(adapter.params)
    shapes = {path: tuple(leaf.shape) for path, leaf in made.items()}
    depth = stacked_dims(shapes) if stacked is None else _matching(stacked, shapes, "stacked")
    held = _matching(frozen, shapes, "frozen")
    placements = settings.place(adapter.params, mesh, stacked=depth)
    strategy.check_placements(placements)
    dtypes = {
        path: precision.storage_dtype(leaf.dtype, path not in held) for path, leaf in made.items()
    }
    resting = {path: jax.ShapeDtypeStruct(leaf.shape, dtypes[path]) for path, leaf in made.items()}
    sizes = {path: prod(shape[depth.get(path, 0) :]) for path, shape in shapes.items()}
    owners = choose_units(adapter.modules, units, sizes, depth, remat)
    trained = {path: leaf for path, leaf in resting.items() if path not in held}
    check_trained(trained)
    copies = _copies(strategy, placements, trained, precision, _kept(adapter, precision))
    layout = make_layout(
        unflatten(resting),
        placements,
        abstract_rest(adapter, unflatten(copies)),
        tx,
        mesh,
        strategy,
        settings,
        stacked=depth,
        frozen=held,
        copied=copies,
    )
    arguments = {
        "model": model,
        "tx": tx,
        "strategy": strategy,
        "units": units,
        "inputs": inputs,
        "precision": precision,
        "remat": remat,
        "prefetch": prefetch,
        "rules": rules,
        "logical_axes": logical_axes,
        "min_size": min_size,
        "strict": strict,
        "stacked": stacked,
        "frozen": frozen,
    }
    return Sharded(adapter, tx, layout, precision, remat, prefetch, owners, arguments)


def _in_parts(logical_axes: Mapping[str, Axis], mesh: Mesh) -> dict[str, Axis]:
    """Logical axes for a mesh whose `data` is several axes: rules go on saying `data`."""
    parts = data_axes(mesh)
    if DATA in mesh.axis_names or not parts:
        return dict(logical_axes)
    expanded: dict[str, Axis] = {DATA: parts}
    for name, entry in logical_axes.items():
        expanded[name] = (
            tuple(part for axis in axes_of(entry) for part in (parts if axis == DATA else (axis,)))
            or None
        )
    return expanded


def _kept(model: Model, precision: Precision) -> set[str]:
    """Paths of parameters that are gathered in float32."""
    classes = {kind.__name__ for m in model.modules for kind in m.kind.__mro__}
    check_patterns(precision, classes, flatten(model.params))
    by_class = {
        path
        for m in model.modules
        for path in m.direct
        if precision.keeps(kind.__name__ for kind in m.kind.__mro__)
    }
    return by_class | {path for path in flatten(model.params) if precision.keeps((path,))}


def _copies(
    strategy: Strategy,
    placements: Mapping[str, Placement],
    resting: Mapping[str, Any],
    precision: Precision,
    kept: Container[str],
) -> dict[str, jax.ShapeDtypeStruct]:
    """What is computed with where it rests whole in another dtype than the master, which is then
    sharded.
    """
    if not strategy.gathers_updates:
        return {}
    computed = {
        path: precision.comm_dtypes(path in kept, leaf.dtype)[0] for path, leaf in resting.items()
    }
    return {
        path: jax.ShapeDtypeStruct(leaf.shape, computed[path])
        for path, leaf in resting.items()
        if placements[path].spec and computed[path] != leaf.dtype
    }


def _matching(patterns: Sequence[str], paths: Mapping[str, Any], where: str) -> dict[str, int]:
    """{path: 1} for what any pattern matches; every pattern must match something."""
    if isinstance(patterns, str):  # its letters would each be a pattern
        raise ValueError(message("not a sequence of patterns", where=where, fix=f"({patterns!r},)"))
    for pattern in patterns:
        if not any(re.search(pattern, path) for path in paths):
            fix = did_you_mean(pattern, paths)
            raise ValueError(
                message(f"pattern '{pattern}' matches no parameter", where=where, fix=fix)
            )
    return {path: 1 for path in paths if any(re.search(pattern, path) for pattern in patterns)}


def _hops(mesh: Mesh) -> bool:
    """Whether to go along one axis at a time, as a TPU must. NCCL does a whole mesh at once, over
    any network.
    """
    platform = mesh.devices.flat[0].platform
    return platform == "tpu" or (platform == "cpu" and len(data_axes(mesh)) > 1)


@dataclass(frozen=True)
class Sharded:
    """A model laid out over a mesh: what `fully_shard` returns.

    Attributes:
        layout: where every array lies, and why.
        units: parameter path -> path of the unit that gathers it; None on entering the model.

    """

    _model: Model = field(repr=False)
    _tx: optax.GradientTransformation = field(repr=False)
    layout: Layout
    precision: Precision
    remat: Remat
    prefetch: Prefetch
    units: dict[str, str | None] = field(repr=False)
    _arguments: dict[str, Any] = field(repr=False)

    def on(self, mesh: Mesh, **changes: Any) -> "Sharded":
        """The same on another mesh, with other arguments of `fully_shard` where given."""
        return fully_shard(mesh=mesh, **(self._arguments | changes))

    def plan(
        self,
        topology: str,
        loss_fn: LossFn,
        batch: Any,
        *,
        replica: int | None = None,
        work: "Work | None" = None,
        analytic: bool = False,
        cache: bool = True,
        **settings: Any,
    ) -> "Plan":
        """What a training step takes on a machine that need not be there: memory, what is sent,
        time.

        Args:
            topology: `h100:8`, `h100:64x8`, `v5e:16x16`, ...; `fsdp_jax.planner.choose_platforms()`
                must have come before jax started, or JAX_PLATFORMS=cpu.
            loss_fn: as `train_step` takes it.
            batch: arrays or shapes [global rows, ...] of all its devices.
            replica: of the mesh there, for hybrid strategies; as in this mesh if None.
            work: tokens and FLOPs of a step, for tokens per second and MFU.
            analytic: estimate from the traced step, without a compiler, as if with
                `local_batch=True`.
            cache: keep the compiled program, and take it from there.
            settings: of `train_step`: accumulation, clip, ...

        Raises:
            ValueError: what does not fit together; a topology that does not exist, or without its
                compiler.

        """
        # imported here: those who only train never load the planner
        from fsdp_jax.planner import (
            Work,
            analytic_plan,
            cache_folder,
            compiled_plan,
            parse_topology,
            stand_ins,
        )

        check_plan(topology, batch)
        machine, kept = parse_topology(topology), shape_of(self.layout.mesh).get(REPLICA, 1)
        devices = stand_ins(machine) if analytic else machine.devices()
        replica = (kept if self.layout.strategy.hybrid else 1) if replica is None else replica
        there = self.on(make_mesh(-1, replica, devices=devices))
        if (
            analytic
        ):  # an estimate needs the shapes of one device, which an annotated program does not have
            step = there.train_step(loss_fn, **(settings | {"local_batch": True}))
            return analytic_plan(step, batch, machine, work or Work())
        step = there.train_step(loss_fn, **settings)
        return compiled_plan(
            step, batch, machine, work or Work(), cache_folder() if cache else None
        )

    def init(self, seed: int = 0, params: PyTree | None = None) -> TrainState:
        """A fresh state, every array made on the devices that hold it.

        `params`: those that shall not be random, as they lie in `checkpoint_target().params`
        (nested, or by path); the state takes the arrays over. Raises ValueError where one does not
        fit.
        """
        given = check_given(params or {}, self.layout)
        return init_state(self._model, self._tx, self.layout, seed, given)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state: the target of a restore."""
        return abstract_state(self.layout)

    def to_checkpoint(self, state: TrainState) -> TrainState:
        """What to save of a state: all but the copies that it computes with, which another layout
        may not have.
        """
        return replace(state, copies={})

    def checkpoint_target(self) -> TrainState:
        """Shapes, dtypes and shardings of `to_checkpoint`: what to restore a checkpoint into,
        whoever wrote it.
        """
        return replace(self.abstract_state(), copies={})

    def from_checkpoint(self, saved: TrainState) -> TrainState:
        """The state again from what was restored into `checkpoint_target`."""
        shardings = state_shardings(self.layout).copies
        make = jax.jit(lambda params: make_copies(self.layout, params), out_shardings=shardings)
        return replace(saved, copies=make(saved.params))

    def train_step(
        self,
        loss_fn: LossFn,
        *,
        accumulation: int = 1,
        deferred_reduction: bool = False,
        local_batch: bool = False,
        clip: float | None = None,
        abort_after: int | None = 10,
    ) -> CompiledStep:
        """The training step: `state, metrics = step(state, batch)`.

        Args:
            loss_fn: `(model, batch) -> (summed loss, count)`; microbatches are weighed by their
                counts.
            accumulation: microbatches per optimizer step; the batch is cut into that many.
            deferred_reduction: reduce gradients once, after the last microbatch (PyTorch's
                `no_sync`): less is sent, and every device holds gradients of full size until then.
                Needs `local_batch`.
            local_batch: your promise that `loss_fn` is a sum over examples, so that each device may
                run it on its own rows, with explicit collectives. Statistics over the batch
                (contrastive or load-balancing terms) and penalties on parameters are no such sums;
                `fsdp_jax.testing.certify` checks a loss. Without the promise the loss sees the
                global batch, as on one device, and XLA inserts the collectives.
            clip: largest global norm of the gradient.
            abort_after: raise after so many steps in a row whose gradients were not finite; None
                never does.

        Raises:
            ValueError: arguments out of range, or that need `local_batch`; when the step is
                compiled, a model or loss that cannot run with local batches.

        Warns:
            SlowerWarning: when the step is compiled, what `prefetch` could not move.

        """
        check_train_step(
            self.layout,
            self.precision,
            self.prefetch,
            accumulation=accumulation,
            deferred=deferred_reduction,
            local_batch=local_batch,
            clip=clip,
        )
        local_batch = local_batch and self.layout.mesh.size > 1
        plan = StepPlan(
            self._model,
            self.layout,
            self._tx,
            self._param_comms("manual" if local_batch else "annotate"),
            self._boundaries(),
            loss_fn,
            remat=self.remat,
            accumulation=accumulation,
            deferred=deferred_reduction and local_batch and accumulation > 1,
            clip=clip,
            prefetch=self.prefetch if local_batch else "none",
            local_batch=local_batch,
        )
        outputs = state_shardings(self.layout), replicated(self.layout.mesh)
        return CompiledStep(
            train_step, plan, self.abstract_state(), outputs, donate=True, abort_after=abort_after
        )

    def eval_step(self, loss_fn: LossFn) -> CompiledStep:
        """`step(state, batch) -> (sum, count)` with the model in inference mode; the state is kept."""
        plan = self._plain(lambda model, batch: sum_and_count(loss_fn(model, batch)))

        def run(plan: StepPlan, state: TrainState, batch: Any) -> Any:
            rows = jax.tree.leaves(batch)[0].shape[1]
            return forward(plan, state, jax.tree.map(lambda x: x[0], batch), rows)

        return CompiledStep(
            run,
            plan,
            self.abstract_state(),
            replicated(self.layout.mesh),
            donate=False,
            abort_after=None,
        )

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`apply(fn)(state, *args)` runs `fn(model, *args)` compiled, in inference mode; results
        are replicated.
        """
        whole = replicated(self.layout.mesh)
        plan = self._plain(lambda model, args: fn(model, *args))
        return jax.jit(lambda state, *args: forward(plan, state, args), out_shardings=whole)

    def model(self, state: TrainState) -> Any:
        """The user's own kind of model (NNX module, bound Linen module) around the sharded arrays."""
        return self._model.build(state.params, state.model_state)

    def _plain(self, fn: LossFn) -> StepPlan:
        """For running the model without training it."""
        return StepPlan(
            self._model,
            self.layout,
            self._tx,
            self._param_comms("annotate"),
            self._boundaries(),
            fn,
            remat=self.remat,
        )

    def _param_comms(self, mode: Mode) -> dict[str, ParamComm]:
        kept = _kept(self._model, self.precision)
        copies = flatten(self.layout.other[COPIES])
        comms = {}
        for path, leaf in self.layout.by_path.items():
            compute, reduced = self.precision.comm_dtypes(path in kept, leaf.dtype)
            comms[path] = ParamComm(
                path,
                self.units[path],
                len(leaf.shape),
                leaf.mesh,
                PartitionSpec() if path in copies else leaf.spec,
                leaf.grad_spec,
                GatherTransform(leaf.dtype, compute, reduced),
                mode,
                leaf.stacked,
                per_axis=mode == "manual" and _hops(leaf.mesh),
                trained=leaf.trainable and bool(jnp.issubdtype(leaf.dtype, jnp.floating)),
            )
        return comms

    def _boundaries(self) -> dict[str, Boundary]:
        """What happens at which module: units gather; where dtypes mix, inputs are cast and float32
        islands end.
        """
        compute, output = self.precision.cast_dtype, self.precision.output_dtype
        units = {unit for unit in self.units.values() if unit}
        kept = _kept(self._model, self.precision) if compute is not None else set()
        found = {}
        for module in self._model.modules:
            unit = module.path if module.path in units else None
            island = bool(module.direct & kept) or module.pinned
            root = module.path == ROOT
            boundary = Boundary(
                unit,
                self.remat if unit else "none",
                cast_in=compute
                if self.precision.cast_inputs and (unit is not None or root)
                else None,
                cast_out=output if root else compute if island else None,
                pin=root or unit is not None,
            )
            if boundary != Boundary():
                found[module.path] = boundary
        return found
