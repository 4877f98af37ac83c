"""`fully_shard(model, optimizer, mesh, strategy, units)` and the `Sharded` model it returns."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import flax.linen as nn
import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from fsdp_jax.arguments import (
    Arguments,
    check_arguments,
    lay_out_state,
    trace_and_place,
    warn_of_one_unit,
    warn_of_settings_without_effect,
)
from fsdp_jax.compat.compilation_cache import without_cache_on_cpus
from fsdp_jax.compat.error_texts import is_out_of_memory
from fsdp_jax.errors import ArgumentError, SlowerWarning, human_bytes
from fsdp_jax.prefetch.rewrite import Prefetch
from fsdp_jax.processes import warn_if_alone
from fsdp_jax.sharding.explicit_style import trace_as_asked
from fsdp_jax.sharding.layout import MODEL_STATE, Layout, Leaf
from fsdp_jax.sharding.logical_axes import LogicalAxes
from fsdp_jax.sharding.mesh import MeshAxes, as_ambient, mesh_like, replicated, shards_of
from fsdp_jax.sharding.offload import NO_OFFLOAD, Offload
from fsdp_jax.sharding.padding import mark_padded
from fsdp_jax.sharding.path_rules import Rule
from fsdp_jax.sharding.precision import AS_MADE, Precision
from fsdp_jax.sharding.quantized import QuantizedBase
from fsdp_jax.sharding.rules import LARGE_BYTES, MIN_SIZE, ReplicationWarning
from fsdp_jax.sharding.strategy import STRATEGIES, Strategy
from fsdp_jax.step.average import Weights, check_weights, with_weights
from fsdp_jax.step.batch import BatchPlacement
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.step.complete_state import complete_state
from fsdp_jax.step.loss import as_loss, takes_key
from fsdp_jax.step.loss_spikes import LossSpikes
from fsdp_jax.step.others import check_other_states, check_others, plan_other, require_by_name
from fsdp_jax.step.state import (
    TrainState,
    as_seed,
    check_given_params,
    check_state,
    init_state,
    require_held,
    require_like,
    require_train_state,
    state_like,
)
from fsdp_jax.step.step_plan import (
    OtherModel,
    StepPlan,
    check_local_batch,
    check_train_step,
)
from fsdp_jax.step.traced_checks import check_traced, warn_of_missed_optimizations
from fsdp_jax.step.train_step import forward, train_step
from fsdp_jax.step.xla_options import compiled_by_caller, offload_options, with_prefetch
from fsdp_jax.tree import PyTree, flatten, nest_like
from fsdp_jax.units.auto_wrap import Units
from fsdp_jax.units.comm import Mode
from fsdp_jax.units.find_units import FoundUnits, find_units
from fsdp_jax.units.keep_gathered import KeepGathered
from fsdp_jax.units.model import LossFn, Model
from fsdp_jax.units.param_comms import (
    make_boundaries,
    param_comms,
)
from fsdp_jax.units.remat import Remat, activations_of
from fsdp_jax.views.bars import Bars

if TYPE_CHECKING:
    from fsdp_jax.certify.certificate import Certificate, Tolerance
    from fsdp_jax.planner import Plan, Work
    from fsdp_jax.planner.out_of_memory import MemoryExplanation


def fully_shard(
    model: Callable[[nnx.Rngs], nnx.Module] | nn.Module,
    tx: optax.GradientTransformation,
    mesh: Mesh | MeshAxes,
    strategy: str | Strategy = "full_shard",
    units: Units = "auto",
    *,
    data: str | Sequence[str] | None = None,
    replica: str | Sequence[str] | None = None,
    inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    precision: Precision | None = None,
    remat: Remat = "none",
    prefetch: Prefetch = "auto",
    keep_gathered: KeepGathered = (),
    offload: Offload | None = None,
    loss_spikes: LossSpikes | None = None,
    rules: Sequence[Rule] = (),
    logical_axes: LogicalAxes | None = None,
    min_size: int = MIN_SIZE,
    strict: bool = False,
    stacked: Sequence[str] | None = None,
    frozen: Sequence[str] = (),
    base: QuantizedBase | None = None,
) -> "Sharded":
    """Lays out a model's training state over a mesh. Allocates nothing.

    The model:
        model: `make_model(rngs) -> nnx.Module`, or a `linen.Module` together with `inputs`.
        inputs: example inputs of a Linen model, arrays or shapes: a tuple, or a dict by name.
            Arrays are used as Flax's own `init` uses them. If an initial value depends on an
            input's values, passing only its shape is an error.
        tx: any optax transformation.

    What to shard and how:
        mesh: from `make_mesh`, or any other. Axes that are neither `data` nor `replica` are the
            model's own, such as one of tensor parallelism: its annotations along them are kept, and
            the part of an array that they leave on a device is sharded along `data`.
        data: the mesh axis, or axes, to shard state and batch along; by default `data`, `fsdp`, or
            the only axis.
        replica: the mesh axis that hybrid strategies replicate state along; by default `replica`,
            if the mesh has it.
        strategy: `no_shard`, `zero1`, `shard_grad_op`, `full_shard`, `hybrid_shard`,
            `hybrid_shard_zero2`, `hybrid_shard_optimizer`, or an alias.
        rules: ordered (pattern, spec) for parameters by path; see `fsdp_jax.sharding.rules`.
            Without a rule, the largest dim divisible by the number of devices is sharded.
        logical_axes: logical name -> mesh axis, for rules and for Flax's annotations; a dict, or a
            table of pairs like Flax's `logical_axis_rules`.
        min_size: parameters with fewer elements per layer stay replicated.
        strict: raise an error, rather than warn, unless a rule or an annotation matches every
            parameter, and every matmul with a parameter runs in the compute dtype.
        frozen: path patterns of parameters that are not trained: no gradient, no optimizer state,
            still sharded. Any path of a shared parameter matches, here and in all patterns.
        base: stores the frozen kernels of units in 4 or 8 bits, as QLoRA does.

    How units are formed:
        units: a unit's parameters are gathered together, and dropped after use. Module classes or
            their names, a least number of parameters, `scan` (the body of a layer scan) or `model`
            (all at once). The default is the repeated blocks, which `print(sharded.layout)` names,
            or the whole model if there are none.
        stacked: path patterns of parameters whose first dim stacks layers; by default those that
            the model makes inside `scan` or `vmap` of NNX or Linen. Name those that it makes whole,
            such as `nnx.Param(init(key, (layers, 64, 64)))` for a scan.

    Precision:
        precision: dtypes to store, compute and reduce in; by default those in which the model makes
            its parameters. Float inputs of the model, and of the units that you name, are cast.

    Memory against time:
        remat: `none` saves a unit's activations, `full` recomputes the unit in the backward pass,
            `selective` saves matmuls and attention, `dots` matmuls with weights; a policy of
            `jax.checkpoint` chooses, and a `RematPolicy` adds names, or recomputes every k-th unit.
            Gathered parameters are saved only where `keep_gathered` says so.
        prefetch: `pre` gathers the next unit while the current one computes, and reduces gradients
            meanwhile, with one more unit in memory; `post` gathers the next unit of the backward
            pass after the current one has computed; `none` leaves it to XLA. `auto`, the default,
            is `pre` on GPUs, and `none` elsewhere and if the model or loss cannot be traced with
            prefetch.
        keep_gathered: units whose gathered parameters stay from the forward pass to the backward
            pass, in place of being gathered again: a number of units from the end, of which a layer
            of a scan is one; bytes of a device as text, "2GiB", that the last units may take; or a
            list of classes, their names or paths of units. None by default.
        offload: state and activations to keep in host memory while unused; none by default.
        loss_spikes: how spikes of the loss are detected, by recent losses that the state keeps;
            None does not detect them.

    Raises:
        ValueError: arguments that do not fit, with the path, what was expected, what was found, and
            the fix.

    Warns:
        SlowerWarning: a large model is gathered at once because no block is found; a hybrid
            strategy has one replica on several hosts; a setting has no effect together with the
            others.

    Example; the docstrings of this package use its names:
        >>> class MLP(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.hidden = nnx.Linear(64, 256, rngs=rngs)
        ...         self.out = nnx.Linear(256, 8, rngs=rngs)
        ...     def __call__(self, x):
        ...         return self.out(nnx.relu(self.hidden(x)))
        >>> def loss_fn(model, batch):
        ...     losses = (model(batch["x"]) - batch["y"]) ** 2
        ...     return losses.sum(), losses.size
        >>> batch = {"x": np.ones((16, 64), np.float32), "y": np.ones((16, 8), np.float32)}
        >>> mesh = fsdp.make_mesh()  # here of 8 devices
        >>> sharded = fsdp.fully_shard(lambda rngs: MLP(rngs), optax.adamw(1e-3), mesh)
        >>> state = sharded.init(seed=0)
        >>> state.params["hidden"]["kernel"].sharding.shard_shape((64, 256))
        (64, 32)

    """
    # All arguments in one place: `Sharded.on` lays the model out again with some of them changed.
    if precision is None:
        precision = AS_MADE
    if offload is None:
        offload = NO_OFFLOAD
    given = Arguments(
        model=model,
        tx=tx,
        mesh=mesh,
        strategy=strategy,
        units=units,
        data=data,
        replica=replica,
        inputs=inputs,
        precision=precision,
        remat=remat,
        prefetch=prefetch,
        keep_gathered=keep_gathered,
        offload=offload,
        loss_spikes=loss_spikes,
        rules=rules,
        logical_axes=logical_axes,
        min_size=min_size,
        strict=strict,
        stacked=stacked,
        frozen=frozen,
        base=base,
    )

    # One stage after another: what needs no model, the arrays, the units, the state.
    axes = check_arguments(given)
    placed = trace_and_place(given, axes)
    found = find_units(placed, units, precision, given.policy, offload, base, keep_gathered)
    layout, fitted = lay_out_state(given, placed, found)
    warn_of_settings_without_effect(given, placed, found)
    warn_of_one_unit(given, placed.model, layout, found)
    return Sharded(given, layout, _model=placed.model, _found=found, _tx=fitted)


@dataclass(frozen=True)
class Sharded:
    """A model laid out over a mesh: what `fully_shard` returns.

    Attributes:
        arguments: of `fully_shard`.
        layout: how every array is sharded, and why.
        as_on_gpus: whether `prefetch="auto"` means the same as on GPUs; for `certify`, on CPUs.

    """

    arguments: Arguments = field(repr=False)
    layout: Layout
    _model: Model = field(repr=False)
    _found: FoundUnits = field(repr=False)
    _tx: optax.GradientTransformationExtraArgs = field(repr=False)
    as_on_gpus: bool = field(default=False, repr=False)

    @property
    def units(self) -> dict[str, str | None]:
        """Parameter path -> path of the unit that gathers it.

        None if it is gathered when the model is entered.
        """
        return self._found.owners

    def on(self, mesh: Mesh | MeshAxes, **changes: Any) -> "Sharded":
        """Lays the model out on another mesh, with the given arguments of `fully_shard` changed.

        Example:
            >>> sharded.on(mesh, strategy="zero1").layout.strategy.name
            'zero1'
        """
        return fully_shard(**{**vars(self.arguments), "mesh": mesh, **changes})

    def compare_strategies(
        self, strategies: Sequence[str | Strategy] = tuple(STRATEGIES), *, accumulation: int = 1
    ) -> Bars:
        """Compares strategies: the bytes of this model on a device, and those sent per step.

        Nothing is compiled. On a mesh without replicas, hybrid strategies equal the others.

        Args:
            strategies: names, or Strategy objects from your own table; all by default.
            accumulation: microbatches per optimizer step; each may gather and reduce.

        Raises:
            ValueError: a strategy that the rules or the mesh do not allow.

        Example:
            >>> bars = sharded.compare_strategies(["zero1", "full_shard"])

        """
        # Imported here: those who only train never load it.
        from fsdp_jax.contract.strategies import strategy_bars

        with warnings.catch_warnings():
            # `fully_shard` has warned of this model already
            warnings.simplefilter("ignore", ReplicationWarning)
            warnings.simplefilter("ignore", SlowerWarning)
            others = [self.on(self.arguments.mesh, strategy=each) for each in strategies]
        plans = [
            each._step_plan(_no_loss, accumulation=accumulation, trains=True) for each in others
        ]
        return strategy_bars(plans)

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
        """Estimates a training step on a machine that need not be present: memory, traffic, time.

        Args:
            topology: `h100:8`, `h100:64x8`, `v5e:16x16`, ...; `fsdp_jax.planner.choose_platforms()`
                must be called before jax starts, or JAX_PLATFORMS=cpu be set.
            loss_fn: as `make_train_step` takes it.
            batch: arrays or shapes [global rows, ...] of all its devices.
            replica: number of replicas there, for hybrid strategies; None keeps that of this mesh.
                The model's own mesh axes keep their sizes.
            work: tokens and FLOPs of a step, for tokens per second and MFU.
            analytic: estimate from the traced step, without a compiler; memory and compute are
                estimated for `local_batch=True`.
            cache: store the compiled program, and reuse it.
            settings: of `make_train_step`: accumulation, clip, ...

        Raises:
            ValueError: arguments that do not go together; a topology that does not exist, or
                whose compiler is missing.

        Example:
            >>> plan = sharded.plan("h100:8", loss_fn, batch, analytic=True)
            >>> plan.fits
            True

        """
        # imported here: those who only train never load the planner
        from fsdp_jax import planner

        axes = self.layout.axes
        planner.check_plan(topology, batch, axes, work, analytic=analytic)
        machine = planner.parse_topology(topology)
        devices = planner.fake_devices(machine) if analytic else machine.devices()
        if replica is None:
            replica = shards_of(axes.mesh, axes.replica) if self.layout.strategy.hybrid else 1
        mesh = mesh_like(axes, devices, replica)
        sharded = self.on(mesh)
        others = settings.get("others") or {}
        if others:
            settings["others"] = {
                name: other.on(mesh) if isinstance(other, Sharded) else other
                for name, other in others.items()
            }
        step, work = sharded.make_train_step(loss_fn, **settings), work or planner.Work()
        if analytic:
            return planner.analytic_plan(step, batch, machine, work)
        folder = planner.cache_folder() if cache else None
        return planner.compiled_plan(step, batch, machine, work, folder)

    def certify(
        self,
        loss_fn: LossFn,
        batch: Any,
        *,
        strategies: Sequence[str | Strategy] | None = None,
        accumulation: Sequence[int] = (1, 4),
        local_batch: bool = False,
        offloaded: bool = True,
        trials: int = 6,
        batches: Sequence[Any] = (),
        steps: int = 3,
        seed: int = 0,
        tolerance: "Tolerance | None" = None,
        others: "Mapping[str, Other] | None" = None,
    ) -> "Certificate":
        """Trains a few steps with every strategy, and compares each with plain JAX on one device.

        Units, precision, rules, remat, offload and prefetch are those of this model; `auto` means
        the same as on GPUs. Without local batches, gradients are reduced in the compute dtype. The
        loss scale is fixed, parameters are rounded to nearest, and spikes of the loss are not
        skipped. Every program is compiled and run, here and on one device: for a large model, shard
        a small version of it. A hybrid strategy runs with 2 replicas if the mesh has none.

        Args:
            loss_fn: as `make_train_step` takes it; its metrics are compared too.
            batch: arrays [rows, ...]; the number of rows must be divisible by devices x the largest
                accumulation.
            strategies: those to run; None runs this model's, then all others that the model and
                the mesh allow.
            accumulation: numbers of microbatches to run.
            local_batch: also run each with `local_batch=True`, once more with `deferred_reduction`,
                and once with one row on each device. This checks the promise of `local_batch=True`
                that the loss is a sum over examples.
            offloaded: also run the first setting with parameters and optimizer state in host
                memory; or, if this model is offloaded, without. The certificate lists settings that
                the devices or the model refuse.
            trials: how many batches to make from the rows of `batch`: in another order, and so that
                different devices get unlike rows. `seed` draws them.
            batches: additional batches, with the shapes of `batch`.
            steps: number of steps on `batch`; each of the other batches gets one step, from the
                initial values.
            seed: for the initial values and the trials.
            tolerance: largest differences allowed; None chooses them by the dtypes. bfloat16 and
                float16 are compared loosely, see `fsdp_jax.certify.certificate.tolerance_of`.
            others: as `make_train_step` takes them; their states are drawn, from seed + 1 on.

        Returns:
            The table of differences, all within the tolerance.

        Raises:
            CertifyError: an AssertionError that names setting, array, difference, batch and likely
                cause. Its `certificate` has everything.
            ValueError: a batch that cannot be split evenly, a mesh of one device, devices of other
                processes, a loss that is not finite on one device.

        Example:
            >>> certificate = sharded.certify(loss_fn, batch, accumulation=[1], trials=0, steps=1)

        """
        # Imported here: those who only train never load it.
        from fsdp_jax.certify.certify_sharded import CertifySettings, certify_sharded

        settings = CertifySettings(
            strategies=strategies,
            accumulation=accumulation,
            local_batch=local_batch,
            offloaded=offloaded,
            trials=trials,
            batches=batches,
            steps=steps,
            seed=seed,
            tolerance=tolerance,
            others=others,
        )
        return certify_sharded(self, loss_fn, batch, settings)

    def init(self, seed: int | jax.Array = 0, params: PyTree | None = None) -> TrainState:
        """Makes a fresh state, every array on the devices that hold it.

        Args:
            seed: of the random parameters and streams, or a key of JAX; `s` and `jax.random.key(s)`
                give the same state. An NNX model is made with
                `nnx.Rngs(jax.random.split(jax.random.key(s))[0])`.
            params: parameters to use instead of random ones, nested or by path, as in
                `to_checkpoint(state).params`. The state takes ownership of arrays whose
                sharding is equivalent to that in `checkpoint_target().params` (on a mesh of one
                device: of any jax.Array there): its first step donates them. It copies others to
                their devices, and those that another state in use holds.

        Raises:
            ValueError: one of `params` does not fit, or was donated; neither a seed nor one key.

        Warns:
            UserWarning: `fsdp-jax launch` or JAX_NUM_PROCESSES started the process as one of
                several, but it has not joined them.

        Example:
            >>> state = sharded.init(seed=0)
            >>> tuned = sharded.init(params={"out/bias": np.zeros(8, np.float32)})

        """
        warn_if_alone()
        given = check_given_params(params or {}, self.layout)
        seed_or_data = as_seed(seed)
        made_with = self.arguments
        with self.layout.axes.ambient():
            return init_state(
                self._model,
                self._tx,
                self.layout,
                seed_or_data,
                given,
                scaling=made_with.precision.scaling,
                spikes=made_with.loss_spikes,
            )

    def abstract_state(self) -> TrainState:
        """Lists shapes, dtypes and shardings of the arrays that a step takes, as they are stored.

        An array none of whose dims is divisible is stored padded: `layout` shows it.

        Example:
            >>> sharded.abstract_state().params["out"]["kernel"].shape
            (256, 8)
        """
        return state_like(self.layout, lambda leaf: leaf.stored)

    def state_shardings(self) -> TrainState:
        """Lists a NamedSharding for every array of the state, as `in_shardings` takes them.

        Example:
            >>> sharded.state_shardings().params["hidden"]["kernel"].shard_shape((64, 256))
            (64, 32)
        """
        return state_like(self.layout, lambda leaf: leaf.sharding)

    def to_checkpoint(self, state: TrainState) -> TrainState:
        """Selects what to save of a state: all but `copies`, which another layout may not have.

        An array that is stored padded becomes a `Padded`: `np.asarray` of it, and the checkpoint,
        have the array's own shape. Raises ValueError for a state that was donated.

        Example:
            >>> saved = sharded.to_checkpoint(state)
        """
        require_held(state)
        own = self.checkpoint_target()
        return jax.tree.map(mark_padded, replace(state, copies={}), own)

    def checkpoint_target(self) -> TrainState:
        """Lists shapes, dtypes and shardings to restore any checkpoint into.

        The shapes are the model's own. An array that its sharding does not divide is restored as a
        `Padded`.

        Example:
            >>> sharded.checkpoint_target().params["out"]["kernel"].shape
            (256, 8)
        """
        return replace(state_like(self.layout, lambda leaf: leaf.own), copies={})

    def from_checkpoint(self, saved: TrainState) -> TrainState:
        """Completes a state that was restored into `checkpoint_target`.

        A loss scale and recent losses that this run does not use are left out. If the checkpoint
        lacks them, or has losses for a window of another size, they start anew. A loss scale that
        is fixed here is as configured, and another one inside its own limits. If it lacks the
        average of `optim.params_ema`, the average starts from the parameters.

        Warns:
            UserWarning: the average starts from the parameters.

        Example:
            >>> state = sharded.from_checkpoint(sharded.to_checkpoint(state))
        """
        made_with = self.arguments
        return complete_state(
            self.layout, saved, made_with.precision.scaling, made_with.loss_spikes
        )

    def make_train_step(
        self,
        loss_fn: LossFn,
        *,
        accumulation: int = 1,
        deferred_reduction: bool = False,
        local_batch: bool = False,
        clip: float | None = None,
        abort_after: int | None = 10,
        others: "Mapping[str, Other] | None" = None,
    ) -> CompiledStep:
        """Makes the training step: `state, metrics = step(state, batch)`.

        Args:
            loss_fn: `(model, batch) -> (summed loss, count)`, or `(summed loss, count, metrics)`;
                microbatches are weighted by their counts. See below.
            accumulation: microbatches per optimizer step; the batch is cut into that many.
            deferred_reduction: reduce gradients once, after the last microbatch (PyTorch's
                `no_sync`): less communication, and every device holds gradients of full size until
                then. Needs `local_batch`; changes nothing with one microbatch.
            local_batch: your promise that `loss_fn` is a sum over examples, so that each device may
                run it on its own rows, with explicit collectives. Statistics over the batch
                (contrastive or load-balancing terms) and penalties on parameters are not such sums;
                `Sharded.certify` checks a loss. Without the promise the loss sees the
                global batch, as on one device, and XLA inserts the collectives.
            clip: largest global norm of the gradient.
            abort_after: raise after this many steps in a row were skipped because their loss,
                gradients or new state were not finite; None never raises.
            others: {name: what another `fully_shard` returned, on the same mesh}: models that the
                loss gets as keyword arguments, in inference mode, and whose states each call of the
                step takes: `loss_fn(model, batch, teacher)`, `step(state, batch,
                teacher=teacher_state)`. They are gathered by their own units, have no gradient, and
                nothing of their states is donated. "ema" in place of a Sharded is the average of
                this state's own parameters that `optim.params_ema` keeps.

        Your own metrics, a dict of name -> value, nested or not, are returned in `metrics` together
        with the step's, in float32, or in the loss's dtype if that is wider. They follow the
        convention of the loss: a value is a sum over the microbatch, a number or an array that is
        summed by its elements. It is added up over microbatches and devices, and divided by the
        count of the loss; `(value, count)` is divided by its own count (NaN for that metric if it
        is zero); `(value, None)` is reported as the sum.

        A loss with a third required parameter, `loss_fn(model, batch, key)`, is called with a
        random key: another one in each microbatch of each step, the same ones in a resumed run.
        With `local_batch` each device has different keys; on the global batch the key is the one
        that a single device would have.

        Raises:
            ValueError: arguments out of range, or that need `local_batch`; a loss that takes other
                arguments; when the step is compiled, a loss that returns something else, and a
                model or loss that cannot run with local batches.

        Warns:
            SlowerWarning: when the step is compiled: gathers that the `prefetch` you asked for
                could not move; a model that cannot be traced with the prefetch of `auto`.

        Example:
            >>> step = sharded.make_train_step(loss_fn, accumulation=2, clip=1.0)
            >>> state, metrics = step(state, batch)  # donates the old state
            >>> print(metrics["count"])
            128.0

        """
        check_train_step(
            self.layout,
            self.arguments.precision,
            accumulation=accumulation,
            deferred=deferred_reduction,
            local_batch=local_batch,
            clip=clip,
            abort_after=abort_after,
        )
        # On one device there is nothing to communicate, and so nothing to defer.
        local_batch = local_batch and self.layout.axes.batch_shards > 1
        plan = self._step_plan(
            as_loss(loss_fn),
            others=self._plan_others(others or {}, local_batch=local_batch),
            takes_key=takes_key(loss_fn, [*(others or {})]),
            accumulation=accumulation,
            deferred=deferred_reduction and local_batch and accumulation > 1,
            clip=clip,
            local_batch=local_batch,
            trains=True,
        )
        plan = with_prefetch(plan, self.arguments.prefetch, as_on_gpus=self.as_on_gpus)
        # It compiles at the first call, when the shapes of a batch are known.
        step = CompiledStep(train_step, plan, trains=True, abort_after=abort_after)
        arguments = {
            "accumulation": accumulation,
            "deferred_reduction": deferred_reduction,
            "local_batch": local_batch,
            "clip": clip,
            "abort_after": abort_after,
            "others": others,
        }
        step.origin = self, loss_fn, arguments
        return step

    def pure_step(
        self, loss_fn: LossFn, **settings: Any
    ) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
        """Makes the training step as a function to trace in your own `jax.jit`.

        `state, metrics = pure_step(state, batch)`, also inside a `lax.scan` over steps. Pass
        `state_shardings()` as the state's `in_shardings` and `out_shardings`, and donate it; a
        batch has arrays [global rows, ...]. Nothing aborts: check
        `metrics["skipped_in_a_row"]`. Nothing refuses a state that was donated before: on several
        devices XLA then ends the process. `prefetch="auto"` is `none` here. On several CPU devices,
        compile it without jax's persistent cache: see docs/design/xla-cpu-waits.md.

        Args:
            loss_fn: as `make_train_step` takes it.
            settings: those of `make_train_step`, except `abort_after`.

        Raises:
            ValueError: as `make_train_step` does; rows that cannot be split evenly.

        Example:
            >>> step = jax.jit(sharded.pure_step(loss_fn), donate_argnums=0)
            >>> state, metrics = step(state, batch)

        """
        compiled = self.make_train_step(loss_fn, abort_after=None, **settings)
        plan = compiled_by_caller(compiled.plan.without_chosen_prefetch())
        placement = BatchPlacement(self.layout.axes, plan.accumulation)
        shardings, expected = self.state_shardings(), self.abstract_state()

        def step(
            state: TrainState, batch: PyTree, *more: Any, **others: TrainState
        ) -> tuple[TrainState, dict[str, jax.Array]]:
            require_by_name(plan, more)
            fix = "step(state, batch), with state = sharded.init() to begin"
            require_train_state(state, self.layout, where="state", fix=fix)
            require_like(expected, state)
            of_others = check_other_states(plan, state, others, donates=False)
            with self.layout.axes.ambient():
                cut = placement.cut(batch)
                jitted, traced = _jit_and_trace(train_step, plan, state, cut, of_others)
                check_traced(plan, traced)
                (state, metrics), _ = jitted(state, cut, of_others)
                return jax.lax.with_sharding_constraint(state, shardings), metrics

        return step

    def make_eval_step(
        self,
        loss_fn: LossFn,
        *,
        weights: Weights = "params",
        others: "Mapping[str, Other] | None" = None,
    ) -> CompiledStep:
        """Makes `step(state, batch) -> (sum, count)` in inference mode; nothing is donated.

        A loss with metrics gives `(sum, count, metrics)`, where metrics are `{path: (sum, count)}`,
        count None for one that is reported as a sum: `jax.tree.map(operator.add, a, b)` adds two
        batches. A loss that takes a key gets the same one in every call. `weights`: "ema" evaluates
        with the average that `optim.params_ema` keeps, in the parameters' dtypes. `others`: as for
        `make_train_step`.

        Example:
            >>> total, count = sharded.make_eval_step(loss_fn)(state, batch)
            >>> int(count)
            128
        """
        check_weights(weights, self.layout)
        loss = as_loss(loss_fn, trains=False)

        def without_empty_metrics(*args: Any, **others: Any) -> Any:
            sums = loss(*args, **others)
            if sums.metrics:
                return tuple(sums)
            return sums.total, sums.counted

        def evaluate(plan: StepPlan, state: TrainState, batch: Any, *passed: Any) -> Any:
            rows = jax.tree.leaves(batch)[0].shape[1]
            state = with_weights(plan.layout, state, weights)
            return forward(plan, state, jax.tree.map(lambda x: x[0], batch), rows, *passed)

        plan = self._step_plan(
            without_empty_metrics,
            others=self._plan_others(others or {}),
            takes_key=takes_key(loss_fn, [*(others or {})]),
        )
        return CompiledStep(evaluate, plan, trains=False)

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles `fn(model, *args)` in inference mode, to call as `apply(fn)(state, *args)`.

        Its results are replicated. A random key is one of `args`. It may be traced, by `jax.jit`
        or `jax.grad`. Calling it raises ValueError for a state that was donated.

        Example:
            >>> predict = sharded.apply(lambda model, x: model(x))
            >>> predict(state, batch["x"]).shape
            (16, 8)
        """
        plan = self._step_plan(lambda model, args: fn(model, *args))
        outputs, expected = replicated(self.layout.mesh), self.abstract_state()

        def traced(state: TrainState, *args: Any) -> Any:
            """Runs `fn`; warns of units that it gathers in its own loop."""
            require_like(expected, state)
            inner, program = _jit_and_trace(forward, plan, state, args)
            warn_of_missed_optimizations(plan, program)
            results, _ = inner(state, args)
            return results

        options = offload_options(plan)
        run = jax.jit(traced, out_shardings=outputs, compiler_options=options)

        def apply(state: TrainState, *args: Any) -> Any:
            check_state(state, self.layout)
            with self.layout.axes.ambient(), without_cache_on_cpus(self.layout.mesh):
                results = run(state, *args)
            return as_ambient(results)

        return apply

    def averaged(self, state: TrainState) -> TrainState:
        """Makes a state whose parameters are the average that `optim.params_ema` keeps.

        They have the parameters' dtypes and shardings. All other arrays are those of `state`, so
        that only one of the two can be trained further. Raises ValueError if the optimizer keeps no
        average.

        Example:
            >>> tx = optax.chain(optax.adamw(1e-3), fsdp.optim.params_ema(0.999))
            >>> with_average = sharded.on(mesh, tx=tx)
            >>> best = with_average.averaged(with_average.init(seed=0))
        """
        check_state(state, self.layout)
        check_weights("ema", self.layout)

        with self.layout.axes.ambient():
            trained, copies = self._average_as_params(state)
        params = nest_like(self.layout.params, flatten(state.params) | flatten(trained))
        return replace(state, params=params, copies=copies)

    @functools.cached_property
    def _average_as_params(self) -> Callable[[TrainState], tuple[PyTree, PyTree]]:
        """The compiled function of a state to the average, as trained parameters and copies."""
        shardings, trainable = self.state_shardings(), self.layout.trainable

        def convert(state: TrainState) -> tuple[PyTree, PyTree]:
            new = with_weights(self.layout, state, "ema")
            return trainable(new.params), new.copies

        return jax.jit(convert, out_shardings=(trainable(shardings.params), shardings.copies))

    def model(self, state: TrainState, *, weights: Weights = "params") -> Any:
        """Builds the model of sharded arrays: an NNX module, or a bound Linen module.

        Parameters in host memory are copied to the devices. An array that is stored padded is cut
        to its own shape. jax shards only along divisible dims, so every device gets all of it;
        inside `apply` it stays sharded. A quantized one is dequantized. `weights`: as for
        `make_eval_step`.

        Raises:
            ValueError: the state was donated to a step.

        Warns:
            ReplicationWarning: this takes 64 MiB or more on every device.

        Example:
            >>> sharded.model(state).out.bias.shape
            (8,)

        """
        check_state(state, self.layout)
        check_weights(weights, self.layout)
        if weights == "ema":
            state = self.averaged(state)

        def fetched(leaf: Leaf, x: jax.Array) -> jax.Array:
            return jax.device_put(x, leaf.on_device) if leaf.on_host else x

        tree = self.layout.params, self.layout.other[MODEL_STATE]
        leaves, treedef = jax.tree.flatten(tree)
        arrays = list(map(fetched, leaves, jax.tree.leaves((state.params, state.model_state))))
        padded = [n for n, leaf in enumerate(leaves) if leaf.is_padded or leaf.blocks]
        if padded:
            chosen = [leaves[number] for number in padded]
            _warn_of_whole_arrays(chosen)
            shardings = [leaf.model_sharding for leaf in chosen]
            load = functools.partial(jax.tree.map, Leaf.load, chosen)
            cut = jax.jit(load, out_shardings=shardings)
            for number, array in zip(padded, cut([arrays[n] for n in padded]), strict=True):
                arrays[number] = array
        return self._model.build(*jax.tree.unflatten(treedef, arrays))

    def _plan_others(
        self, others: "Mapping[str, Other]", *, local_batch: bool = False
    ) -> dict[str, OtherModel]:
        """Plans the other models of a step: {name: its model, layout and communication}."""
        check_others(others, self.layout, lambda other: isinstance(other, Sharded))
        planned = {}
        for name, other in others.items():
            sharded = self if isinstance(other, str) else other
            if local_batch:
                check_local_batch(sharded.layout)
            plan = sharded._step_plan(_no_loss, local_batch=local_batch)
            planned[name] = plan_other(name, plan, averages=sharded is not other)
        return planned

    def _step_plan(
        self,
        fn: LossFn,
        *,
        local_batch: bool = False,
        deferred: bool = False,
        accumulation: int = 1,
        trains: bool = False,
        **settings: Any,
    ) -> StepPlan:
        """Makes the plan of a step with this loss; `settings` are fields of `StepPlan`."""
        given, found = self.arguments, self._found
        mode: Mode = "annotated"
        units = found.owners
        if local_batch:
            mode, units = "explicit", found.local_owners
        comms = param_comms(
            self._model,
            self.layout,
            given.precision,
            units,
            mode,
            kept=found.kept.layers if trains else {},
            deferred=deferred,
            microbatches=accumulation,
        )
        # Where units begin and end in the model.
        boundaries = make_boundaries(
            self._model, given.precision, units, found.activations, chosen=given.units != "auto"
        )
        # The activations to save where the whole model is the unit.
        whole_model, _ = activations_of(given.policy, given.offload)
        return StepPlan(
            model=self._model,
            layout=self.layout,
            precision=given.precision,
            tx=self._tx,
            comms=comms,
            boundaries=boundaries,
            loss_fn=fn,
            activations=whole_model,
            spikes=given.loss_spikes,
            offload=given.offload,
            strict=given.strict,
            local_batch=local_batch,
            deferred=deferred,
            accumulation=accumulation,
            **settings,
        )


Other = Sharded | Literal["ema"]
"""Another model of a step: a sharded one, or the average of the model itself."""


def explain_memory(
    step: CompiledStep,
    batch: Any,
    error: BaseException | None = None,
    *,
    topology: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> "MemoryExplanation":
    """Explains why a step runs out of memory; `print` it.

    It names the dozen largest arrays at the peak, each with its parameter or module and its line in
    the model, and what the device has. Where the machine is one that can be planned for, it also
    advises the settings of least cost that fit, each compiled; that takes minutes.

    Args:
        step: from `make_train_step`, which was refused or has failed; also before its first call.
        batch: as the step takes it, or shapes [global rows, ...].
        error: the exception of the step; None before a call.
        topology: the machine to compile for, `h100:8`, `v5e:16x16`, ...; None: the step's own.
        say: receives the progress, a line at a time, such as `print`.

    Raises:
        ValueError: anything else than such a step; a batch that it does not take; an error of
            something else than memory; a topology that does not exist.

    Example:
        >>> step = sharded.make_train_step(loss_fn)
        >>> try:
        ...     state, metrics = step(state, batch)
        ... except jax.errors.JaxRuntimeError as error:
        ...     print(fsdp.explain_memory(step, batch, error))
        ...     raise

    """
    # imported here: those who only train never load the planner
    from fsdp_jax.planner.machines.topology import check_not_virtual, parse_topology
    from fsdp_jax.planner.out_of_memory import explain_out_of_memory
    from fsdp_jax.planner.remaking import remaking_of_step

    if not isinstance(step, CompiledStep) or step.origin is None:
        raise ArgumentError(
            "not a training step of this library",
            where="explain_memory",
            expected="what sharded.make_train_step(loss_fn) returned",
            got=type(step).__name__,
            fix="fsdp_jax.step_memory(compiled) shows the memory of any compiled program",
        )
    if error is not None and not (isinstance(error, Exception) and is_out_of_memory(error)):
        raise ArgumentError(
            "this error is not one of memory",
            where="error",
            expected="XLA's RESOURCE_EXHAUSTED, or None",
            got=error,
            fix="raise it; without an error, the memory of the step is explained",
        )
    machine = None
    if topology is not None:
        machine = parse_topology(topology)
        check_not_virtual(machine.hardware, topology)
    shapes = step.global_shapes(batch)
    remaking = remaking_of_step(*step.origin, shapes)
    return explain_out_of_memory(step, shapes, error, remaking=remaking, topology=machine, say=say)


def _no_loss(*_: Any) -> Any:
    """Stands for the loss of a step that is never traced."""
    raise AssertionError


def _warn_of_whole_arrays(padded: Sequence[Leaf]) -> None:
    """Warns of arrays that every device gets in full, because their padding is cut off."""
    more = sum(leaf.bytes - leaf.bytes_per_device for leaf in padded)
    if more >= LARGE_BYTES:
        text = f"model(state) has {len(padded)} arrays in full on every device, "
        text += f"{human_bytes(more)} more than the state: no dim of them is divisible; in "
        text += "sharded.apply(fn)(state) they stay sharded"
        warnings.warn(text, ReplicationWarning, stacklevel=3)


def _jit_and_trace(fn: Callable[..., Any], plan: StepPlan, *args: Any) -> tuple[Any, Any]:
    """Traces `fn(plan, ...)`: (the jitted function, its trace, a `jax.stages.Traced`).

    The plan's axes are those that the model asks for.
    """

    def trace(axes: MeshAxes) -> tuple[Any, Any]:
        jitted = jax.jit(functools.partial(fn, plan.with_axes(axes)))
        return jitted, jitted.trace(*args)

    return trace_as_asked(plan.layout.axes, trace, local_batch=plan.local_batch)
