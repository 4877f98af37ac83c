"""Compares sharded steps with the unsharded control, number by number.

[Note: how a step is compared] The control is a run on one device in plain JAX (`unsharded.py`) from
the same initial values, which are first compared with those that the model's own library makes.
In each step the loss, its count, the gradient norm and every gradient of the sharded step are
compared with the control's own. Then both optimizers are given the gradients of the sharded step,
and the parameters are compared. Given its own gradients, each optimizer would magnify rounding:
Adam's step is as large as the learning rate for a gradient of 1e-9 too. All of this is done on
several batches, see `trials.py`.

Differences are relative: the largest difference in an array, over the array's largest value plus 1%
of the largest value in any array. Those of parameters are over the largest change in that parameter
plus 1% of its largest value.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from fsdp_jax.certify.causes import Evidence, likely_cause
from fsdp_jax.certify.certificate import (
    INITIAL,
    Failure,
    Row,
    Setting,
    Tolerance,
    tolerance_of,
)
from fsdp_jax.certify.trials import Trial
from fsdp_jax.certify.unsharded import (
    OtherOnOneDevice,
    UnshardedRun,
    UnshardedStep,
    arrays_of_model,
    as_float64,
    mesh_of_one,
)
from fsdp_jax.compat.error_texts import in_one_line
from fsdp_jax.errors import ArgumentError, SlowerWarning
from fsdp_jax.io.array_specs import is_prng_key
from fsdp_jax.optim.fitting import fit_optimizer
from fsdp_jax.optim.params_ema import find_average
from fsdp_jax.sharding.mesh import MeshAxes, mesh_like, shards_of
from fsdp_jax.sharding.offload import NO_OFFLOAD, Offload
from fsdp_jax.sharding.padding import Padded, mark_padded, pad
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.sharding.quantized import Blocks
from fsdp_jax.sharding.rules import ReplicationWarning
from fsdp_jax.sharding.strategy import Strategy
from fsdp_jax.step.average import by_parameter
from fsdp_jax.step.compiled_step import CompiledStep, SkippedStepWarning
from fsdp_jax.step.state import TrainState, state_like
from fsdp_jax.step.traced_checks import params_read_outside
from fsdp_jax.tree import PyTree, flatten
from fsdp_jax.units.linen import LinenModel

# Fraction of the largest value in any array, added to an array's own largest value: below it, the
# array's rounding is not a failure.
FLOOR = 0.01
SCALE = 256.0  # of the loss, where it is scaled: gradients of a small model stay in float16
GRADIENTS = "certified_gradients"  # key in the optimizer's state of the gradients it was given last
ON_HOST = Offload(params=True, optimizer=True)  # tried for a model that is not offloaded


class _RefusedError(Exception):
    """The step cannot be made with local batches, or the loss cannot be traced."""


@contextmanager
def _refusals_of_local_batch(setting: Setting) -> Iterator[None]:
    """Converts any error of a setting with local batches to _RefusedError; others pass."""
    try:
        yield
    except Exception as error:
        if setting.local_batch:
            raise _RefusedError from error
        raise


class _Difference(NamedTuple):
    """The largest relative difference among some arrays."""

    size: float  # infinite where a value is NaN
    path: str  # of the array that differs most; empty for numbers
    failed: int  # how many arrays differ by more than the limit
    limit: float
    batch: str = ""  # name of the batch that it was found on


_Differences = dict[str, _Difference]  # by the column of the table


@dataclass
class Comparison:
    """Compares sharded steps, setting after setting, with the control: a run on one device."""

    sharded: Any  # the `Sharded` that trains; `api` imports this package
    loss_fn: Callable[..., Any]
    trials: Sequence[Trial]
    strategies: Mapping[str, Strategy]
    asked: Collection[str]  # names of the strategies that the user wants
    steps: int
    seed: int
    tolerance: Tolerance | None  # if None, the dtypes decide as the first setting runs
    others: Mapping[str, Any] = field(default_factory=dict)  # as `make_train_step` takes them
    left_out: list[str] = field(default_factory=list)  # lines: not compared, and why
    _start: TrainState | None = None
    _control: UnshardedRun | None = None
    # The states of other models: of the setting that runs, and as they were drawn.
    _of_others: dict[str, TrainState] = field(default_factory=dict)
    _starts_of_others: dict[str, TrainState] = field(default_factory=dict)

    def compare_setting(self, setting: Setting, before: Sequence[Row]) -> Row | None:
        """Runs one setting and returns its row; `before`: rows of settings that ran earlier.

        Returns None where the devices or the model refuse a setting that was not asked for.
        """
        offloads = self.sharded.arguments.offload != NO_OFFLOAD
        try:
            sharded = self._shard_model(setting)
            # Offload that moves nothing would be the same setting again.
            none_on_host = not any(leaf.on_host for leaf in sharded.layout)
            if setting.offload and not offloads and none_on_host:
                what = f"{setting}: no array is worth sending to host memory (min_size)"
                self.left_out.append(what)
                return None
            return self._compare_sharded(sharded, setting, before)
        except _RefusedError as refused:
            cause = f"refused with local batches: {in_one_line(refused.__cause__)}"
            return Row(setting, {}, (Failure(setting, "error", "", 0, math.inf, 0.0, cause),))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            if setting.offload == offloads and setting.strategy in self.asked:
                raise
            self.left_out.append(f"{setting}: {in_one_line(error)}")
            return None

    def _compare_sharded(self, sharded: Any, setting: Setting, before: Sequence[Row]) -> Row:
        """Trains and compares a setting, for which `sharded` is laid out; infers causes."""
        # The earlier settings that hold narrow down the cause.
        alone = replace(setting, accumulation=1, deferred_reduction=False)
        evidence = Evidence(
            setting=setting,
            sizes={"devices": sharded.layout.mesh.size, **sharded.layout.axes.shape},
            holds_alone=any(row.setting == alone and row.holds for row in before),
            holds_local=any(row.setting.local_batch and row.holds for row in before),
            # Of the two settings that differ in offload alone, the one without comes first.
            holds_resident=any(not row.setting.offload and row.holds for row in before[:1]),
        )
        step = self._make_step(sharded, setting)
        differences = self._train_and_compare(sharded, step, evidence)
        # More facts, which take time to find, only where a difference is to be explained.
        broken = {name: each for name, each in differences.items() if each.failed}
        if setting.local_batch and broken:
            is_random, draws = self._randomness
            evidence = replace(evidence, is_random=is_random, draws=draws)
        if broken:
            microbatch = step.microbatch(self.trials[0].batch)
            outside = params_read_outside(step.plan, microbatch)
            evidence = replace(evidence, read_outside=outside)
        failures = []
        for name, (size, path, failed, limit, batch) in broken.items():
            cause = likely_cause(evidence, name, path)
            failures.append(Failure(setting, name, path, failed - 1, size, limit, cause, batch))
        largest = {name: (each.size, each.path) for name, each in differences.items()}
        return Row(setting, largest, tuple(failures))

    def _mesh_for(self, strategy: Strategy) -> Mesh | MeshAxes:
        """Takes the user's mesh; for a hybrid strategy one with 2 replicas, if it has none."""
        axes: MeshAxes = self.sharded.layout.axes
        given: Mesh | MeshAxes = self.sharded.arguments.mesh
        has_replicas = shards_of(axes.mesh, axes.replica) > 1
        if not strategy.hybrid or has_replicas or axes.shape[axes.user_data[0]] % 2:
            return given
        return mesh_like(axes, list(axes.mesh.devices.flat), 2)

    def _shard_model(self, setting: Setting) -> Any:
        """Lays out the model for a setting, with the gradients in its optimizer's state too.

        Sets the tolerance if there is none yet.
        """
        strategy, own = self.strategies[setting.strategy], self.sharded.arguments
        changes = {
            "strategy": strategy,
            "tx": optax.chain(optax.snapshot(GRADIENTS, lambda updates: updates), own.tx),
            "precision": _comparable_precision(own.precision),
            "offload": NO_OFFLOAD,
            "loss_spikes": None,  # the control skips no step
        }
        if setting.offload:
            changes["offload"] = own.offload
            if own.offload == NO_OFFLOAD:
                changes["offload"] = ON_HOST
        if not setting.local_batch:  # a dtype of its own to reduce in needs explicit collectives
            comparable = _comparable_precision(own.precision)
            changes["precision"] = replace(comparable, reduce=None, scatter=None)
        with warnings.catch_warnings():
            # Warnings of bytes and time were shown as the user laid out the model; here only
            # numbers count.
            for category in (ReplicationWarning, SlowerWarning):
                warnings.simplefilter("ignore", category)
            sharded = self.sharded.on(self._mesh_for(strategy), **changes)
        sharded = replace(sharded, as_on_gpus=True)
        if self.tolerance is None:
            stored = {leaf.dtype.name for leaf in sharded.layout.by_path.values()}
            # Of the model's own precision: int8 gradients are of settings that come later.
            self.tolerance = tolerance_of(_comparable_precision(own.precision), stored)
        return sharded

    def _make_step(self, sharded: Any, setting: Setting) -> CompiledStep:
        """Makes the step of a setting."""
        with _refusals_of_local_batch(setting):
            return sharded.make_train_step(
                self.loss_fn,
                accumulation=setting.accumulation,
                deferred_reduction=setting.deferred_reduction,
                local_batch=setting.local_batch,
                abort_after=None,
                others=self._others_on(sharded),
            )

    def _others_on(self, sharded: Any) -> dict[str, Any]:
        """Lays the other models of the loss out over the mesh of a setting."""
        with warnings.catch_warnings():
            for category in (ReplicationWarning, SlowerWarning):
                warnings.simplefilter("ignore", category)
            return {
                name: other if isinstance(other, str) else other.on(sharded.arguments.mesh)
                for name, other in self.others.items()
            }

    def _states_of_others(self, sharded: Any) -> dict[str, TrainState]:
        """Makes the states of the other models: drawn for the first layout, then copied."""
        states, starts = {}, self._starts_of_others
        for number, (name, other) in enumerate(self._others_on(sharded).items(), 1):
            if isinstance(other, str):
                continue
            if name in starts:
                states[name] = _state_from(other, starts[name])
            else:
                states[name] = other.init(self.seed + number)
                starts[name] = _on_one_device(other, states[name])
        return states

    def _train_and_compare(
        self, sharded: Any, step: CompiledStep, evidence: Evidence
    ) -> _Differences:
        """Trains sharded and on one device; returns the largest differences over all batches.

        Adds the facts of the first step that differs to the evidence.
        """
        # The initial values are compared once: later settings start from copies of them.
        setting, drawn = evidence.setting, self._start is None
        if self._start is None:
            # Kept in whole arrays on one device, for the control and for other layouts.
            start = sharded.init(self.seed)
            self._start = _on_one_device(sharded, start)
        else:
            start = _state_from(sharded, self._start)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, start)
        self._of_others = self._states_of_others(sharded)
        control = self._control_for(step)
        differences: _Differences = {}
        if drawn:
            differences[INITIAL] = self._compare_initial(control)
        shards = sharded.layout.axes.batch_shards
        for trial in self.trials:
            batch = trial.taken(setting.rows, shards, setting.accumulation)
            state = jax.device_put(start, shardings, may_alias=False)  # steps donate theirs
            for name, each in self._compare_trial(step, state, trial, batch, evidence).items():
                found = each._replace(batch=trial.name)
                differences[name] = max(differences.get(name, found), found, key=lambda x: x.size)
        return differences

    def _compare_trial(
        self,
        step: CompiledStep,
        state: TrainState,
        trial: Trial,
        batch: PyTree,
        evidence: Evidence,
    ) -> _Differences:
        """Trains on one batch from the initial state; returns the largest differences.

        The first batch is trained on for all steps. On others one step is enough: later ones would
        differ by rounding where training diverges.
        """
        assert self._start is not None
        control, accumulation = self._control_for(step), evidence.setting.accumulation
        params = self._as_model_arrays(self._start.params)
        model_state = flatten(self._start.model_state)
        opt_state = control.init_optimizer(params)
        differences: _Differences = {}
        for number in range(self.steps if trial is self.trials[0] else 1):
            # The sharded step runs before the control, so that a mistake in the loss has the
            # library's message. A skipped step shows in the numbers.
            told = warnings.catch_warnings(action="ignore", category=SkippedStepWarning)
            with _refusals_of_local_batch(evidence.setting), told:
                state, metrics = step(state, batch, **self._of_others)
            own = state_like(step.plan.layout, lambda leaf: leaf.own)
            found = jax.tree.map(mark_padded, state, own)
            # The control's loss and gradients, on its own parameters.
            with mesh_of_one(step.plan.layout.axes):
                expected = control.evaluate(
                    params,
                    model_state,
                    batch,
                    self._start.rng,
                    number,
                    accumulation,
                    by_parameter(step.plan.layout, find_average(opt_state)),
                )
            if not self._is_finite(expected, trial, number):
                break
            # The control's update, with the gradients of the sharded step: see the note.
            gradients = _to_float64(flatten(optax.tree.get(found.opt_state, GRADIENTS)))
            metrics = _to_float64(metrics)
            with mesh_of_one(step.plan.layout.axes):
                params, opt_state = control.update(params, opt_state, gradients, expected.loss)
            model_state = expected.model_state
            # The differences of this step, of which the largest of all steps are kept.
            here = self._compare_step(expected, metrics, gradients, found)
            here["parameters"] = self._compare_updated(self._as_model_arrays(found.params), params)
            averages = [find_average(each) for each in (found.opt_state, opt_state)]
            # One in bfloat16 is rounded at random, by the bits of the number.
            if {x.dtype for x in jax.tree.leaves(averages)} - {jnp.dtype(jnp.bfloat16)}:
                own_layout = step.plan.layout
                here["average"] = self._compare_updated(
                    *(by_parameter(own_layout, each) for each in averages)
                )
            if not evidence.broken:  # what later steps show follows from it
                evidence.add_step(expected, metrics, gradients)
                evidence.broken = frozenset(name for name, each in here.items() if each.failed)
            for name, each in here.items():
                differences[name] = max(differences.get(name, each), each, key=lambda x: x.size)
        return differences

    def _is_finite(self, expected: UnshardedStep, trial: Trial, number: int) -> bool:
        """Tells whether one device gives finite numbers; `number`: the step's, from 0.

        Raises ValueError if not, on a batch of the user's: nothing can be compared. Other batches
        are left out.
        """
        largest = np.finfo(np.float32).max  # the sharded step squares gradients in float32
        if math.isfinite(expected.loss) and expected.grad_norm**2 < largest:
            return True
        if trial.given:
            raise ArgumentError(
                "not finite on one device",
                where="certify",
                got=f"loss {expected.loss}, gradient norm {expected.grad_norm} in step "
                f"{number + 1}",
                fix="a smaller learning rate, fewer steps, or another batch",
            )
        self.left_out.append(f"{trial.name}: not finite on one device")
        return False

    def _compare_initial(self, control: UnshardedRun) -> _Difference:
        """Compares the initial state with the one that the model's own library makes."""
        assert self._start is not None
        assert self.tolerance is not None
        start = self._as_model_arrays(self._start.params) | flatten(self._start.model_state)
        # PRNG keys are left out: they are no numbers.
        numbers = {path: x for path, x in start.items() if jnp.issubdtype(x.dtype, jnp.number)}
        expected = {path: control.initial[path].astype(x.dtype) for path, x in numbers.items()}
        expected |= {
            path: jnp.asarray(blocks.to_host(np.asarray(blocks.encode(expected[path]))))
            for path, blocks in self._blocks.items()
        }
        control.initial = {}  # not needed any more
        return _max_difference(
            _to_float64(numbers),
            _to_float64(expected),
            self.tolerance.gradient,
            lambda _, x: _max_abs(x) + 1e-6,
        )

    def _compare_updated(self, found: PyTree, expected: PyTree) -> _Difference:
        """Compares the parameters after a step, or their average, with those of the control."""
        assert self._start is not None
        assert self.tolerance is not None
        initial = _to_float64(self._as_model_arrays(self._start.params))
        return _max_difference(
            _to_float64(flatten(found)),
            _to_float64(flatten(expected)),
            self.tolerance.parameter,
            lambda path, x: _max_abs(x - initial[path]) + FLOOR * _max_abs(x),
        )

    @property
    def _blocks(self) -> dict[str, Blocks]:
        """How the quantized parameters are stored, by path."""
        leaves = self.sharded.layout.by_path
        return {path: leaf.blocks for path, leaf in leaves.items() if leaf.blocks}

    def _as_model_arrays(self, params: PyTree) -> dict[str, Any]:
        """Flattens parameters, quantized ones dequantized: what the control computes with."""
        flat = flatten(params)
        return flat | {
            path: jnp.asarray(blocks.to_host(np.asarray(flat[path])))
            for path, blocks in self._blocks.items()
        }

    def _control_for(self, step: CompiledStep) -> UnshardedRun:
        """Makes the run on one device for the first setting, and keeps it for the others."""
        if self._control is None:
            # The plan knows more than the arguments: which parameters are frozen, the compute dtype
            # of each, the streams that a Linen model draws from.
            trained = step.plan.layout.trainable(step.plan.layout.params)
            compute = {path: comm.transform.compute for path, comm in step.plan.comms.items()}
            model = step.plan.model
            streams = model.demands.streams if isinstance(model, LinenModel) else ()
            with mesh_of_one(step.plan.layout.axes):
                init_key, _ = jax.random.split(jax.random.key(self.seed))  # as `Sharded.init` does
                self._control = UnshardedRun(
                    model=self.sharded.arguments.model,
                    loss_fn=self.loss_fn,
                    tx=fit_optimizer(self.sharded.arguments.tx, trained),
                    trained=trained,
                    compute=compute,
                    streams=streams,
                    axis_names=model.axis_names,
                    key=init_key,
                    inputs=self.sharded.arguments.inputs,
                    others=self._others_of_control(step),
                )
        return self._control

    def _others_of_control(self, step: CompiledStep) -> dict[str, OtherOnOneDevice]:
        """Makes the other models of the loss on one device, with the values of their states."""
        found = {}
        for name, other in self.others.items():
            sharded, arrays = self.sharded, None
            if not isinstance(other, str):
                sharded = other.on(step.plan.layout.mesh)
                one_device = SingleDeviceSharding(step.plan.layout.mesh.devices.flat[0])
                whole = arrays_of_model(sharded.model(self._of_others[name]))
                arrays = jax.tree.map(lambda x: _copy_to(x, one_device), whole)  # noqa: B023
            plan = step.plan.others[name].plan
            found[name] = OtherOnOneDevice(
                model=sharded.arguments.model,
                compute={path: comm.transform.compute for path, comm in plan.comms.items()},
                axis_names=plan.model.axis_names,
                arrays=arrays,
            )
        return found

    def _compare_step(
        self,
        expected: UnshardedStep,
        metrics: Mapping[str, np.ndarray],
        gradients: Mapping[str, np.ndarray],
        state: TrainState,
    ) -> _Differences:
        """Compares one step with the control's, by the columns of the table.

        `metrics`, `gradients` and `state` are those of the sharded step.
        """
        assert self.tolerance is not None
        tolerance = self.tolerance
        floor = FLOOR * max(map(_max_abs, expected.gradients.values()), default=0.0)
        # Single numbers: (measured, expected, limit, least scale).
        numbers = {
            # Below 0.1 a loss is a difference of larger numbers, or nearly learned.
            "loss": (metrics["loss"], expected.loss, tolerance.loss, 0.1),
            "count": (metrics["count"], expected.count, tolerance.loss, 0.0),
            "gradient norm": (metrics["grad_norm"], expected.grad_norm, tolerance.grad_norm, 0.0),
        }
        differences = {
            name: _max_difference({"": x}, {"": np.array(wanted)}, limit, _scale_at_least(least))
            for name, (x, wanted, limit, least) in numbers.items()
        }
        # Arrays by path. Of the model's other state the numbers, not its keys.
        differences["gradients"] = _max_difference(
            gradients, expected.gradients, tolerance.gradient, lambda _, x: _max_abs(x) + floor
        )
        model_state = _to_float64(
            {p: x for p, x in expected.model_state.items() if jnp.issubdtype(x.dtype, jnp.number)}
        )
        measured = flatten(state.model_state)
        differences["model state"] = _max_difference(
            _to_float64({path: measured[path] for path in model_state}),
            model_state,
            tolerance.gradient,
            lambda _, x: _max_abs(x) + 1e-6,
        )
        # Metrics of the user's own, which may be NaN in both where the count is zero.
        if expected.metrics:
            nan = {
                name: np.isnan(metrics[name]) & np.isnan(x) for name, x in expected.metrics.items()
            }
            own, wanted = (
                {name: np.where(nan[name], 0.0, each[name]) for name in nan}
                for each in (metrics, expected.metrics)
            )
            differences["metrics"] = _max_difference(
                own, wanted, tolerance.loss, _scale_at_least(0.1)
            )
        return differences

    @cached_property
    def _randomness(self) -> tuple[bool, bool]:
        """Whether the loss depends on its random streams, and whether it draws any numbers."""
        assert self._start is not None
        assert self._control is not None
        params = self._as_model_arrays(self._start.params)
        model_state = flatten(self._start.model_state)
        batch = self.trials[0].batch
        return self._control.randomness(params, model_state, batch, self._start.rng)


def _max_difference(
    measured: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    limit: float,
    scale: Callable[[str, np.ndarray], float],
) -> _Difference:
    """Finds the largest difference among arrays by path, and counts those above the limit.

    Each is relative to `scale` of the path and the expected array.
    """
    assert measured.keys() == expected.keys(), (sorted(measured), sorted(expected))
    sizes = {}
    for path, value in expected.items():
        size = _max_abs(measured[path] - value) / max(scale(path, value), 1e-30)
        # A NaN would exceed no limit.
        if math.isnan(size):
            size = math.inf
        sizes[path] = size
    failed = sum(each > limit for each in sizes.values())
    largest = max(sizes, key=sizes.__getitem__, default="")
    if not sizes.get(largest):
        return _Difference(0.0, "", failed, limit)
    return _Difference(sizes[largest], largest, failed, limit)


def _scale_at_least(least: float) -> Callable[[str, np.ndarray], float]:
    """Makes a scale for `_max_difference`: an array's largest magnitude, or `least`."""
    return lambda _, value: max(_max_abs(np.nan_to_num(value)), least)


def _max_abs(value: np.ndarray) -> float:
    return float(np.abs(value).max(initial=0.0))


def _to_float64(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {path: as_float64(value) for path, value in arrays.items()}


def _on_one_device(sharded: Any, state: TrainState) -> TrainState:
    """Copies a state in whole arrays to one device, as a checkpoint would have it."""
    one_device = SingleDeviceSharding(sharded.layout.mesh.devices.flat[0])
    saved: TrainState = sharded.to_checkpoint(state)
    return jax.tree.map(lambda leaf: _copy_to(leaf, one_device), saved)


def _state_from(sharded: Any, saved: TrainState) -> TrainState:
    """Lays a state out for another layout; `saved`: as `_on_one_device` made it."""
    target = replace(sharded.abstract_state(), copies={})
    # A layout may store an array with padding.
    copies = jax.tree.map(lambda x, to: _copy_to(pad(x, to.shape), to.sharding), saved, target)
    return sharded.from_checkpoint(copies)


def _copy_to(array: jax.Array | Padded, sharding: Sharding) -> jax.Array:
    """Copies an array through the host: steps donate theirs, so that no buffer may be shared."""
    # Keys have no NumPy form: their data goes through the host.
    if isinstance(array, jax.Array) and is_prng_key(array):
        data = _copy_to(jax.random.key_data(array), SingleDeviceSharding(jax.devices()[0]))
        keys = jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        return jax.device_put(keys, sharding)
    return jax.device_put(np.array(array), sharding)


def _comparable_precision(precision: Precision) -> Precision:
    """Replaces the parts of a precision that plain JAX on one device does not compute.

    A loss scale becomes a constant one, and parameters are rounded to nearest.
    """
    if precision.scaling is not None:
        precision = replace(precision, loss_scale=SCALE)
    return replace(precision, stochastic_rounding=False)
