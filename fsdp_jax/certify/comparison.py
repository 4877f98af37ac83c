"""Compares sharded steps with the unsharded control, number by number.

[Note: how a step is compared] The control is a run on one device in plain JAX (`unsharded.py`) from
the same initial values. In each step the loss, its count, the gradient norm and every gradient of
the sharded step are compared with the control's own. Then both optimizers are given the gradients
of the sharded step, and the parameters are compared at the end. Were each optimizer given its own
gradients, rounding would decide: Adam makes a step of the learning rate of a gradient of 1e-9.

Differences are relative: the largest difference in an array, over the array's largest value plus 1%
of the largest value in any array. Those of parameters are over the largest change in that parameter
plus 1% of its largest value.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from fsdp_jax.api import Sharded, fully_shard
from fsdp_jax.certify.causes import Evidence, likely_cause
from fsdp_jax.certify.certificate import (
    Certificate,
    CertifyError,
    Failure,
    Row,
    Setting,
    Tolerance,
    tolerance_of,
)
from fsdp_jax.certify.unsharded import UnshardedRun, UnshardedStep, as_float64
from fsdp_jax.errors import message
from fsdp_jax.io.array_specs import is_prng_key
from fsdp_jax.sharding.mesh import make_mesh, mesh_axes
from fsdp_jax.sharding.precision import AS_MADE, Precision
from fsdp_jax.sharding.rules import ReplicationWarning
from fsdp_jax.sharding.strategy import STRATEGIES, get_strategy
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.step.state import TrainState
from fsdp_jax.tree import PyTree, flatten
from fsdp_jax.units.auto_wrap import Units
from fsdp_jax.units.linen import LinenModel

# Fraction of the largest value in any array, added to an array's own largest value: below it, the
# array's rounding is not a failure.
FLOOR = 0.01
SCALE = 256.0  # of the loss, where it is scaled: gradients of a small model stay in float16
GRADIENTS = "certified_gradients"  # in the optimizer's state: those that it was given last


class _RefusedError(Exception):
    """The step cannot be made with local batches, or the loss cannot be traced."""


@contextmanager
def _refusals_of_local_batch(setting: Setting) -> Iterator[None]:
    """Turns any error of a setting with local batches into _RefusedError; others stay as raised."""
    try:
        yield
    except Exception as error:
        if setting.local_batch:
            raise _RefusedError from error
        raise


def _one_line(error: BaseException | None) -> str:
    """Returns an error's message in one line, without what jax adds below it."""
    lines = [" ".join(line.split()) for line in str(error).partition("\n-----")[0].splitlines()]
    return "; ".join(filter(None, lines)) or type(error).__name__


class _Difference(NamedTuple):
    """The largest relative difference among some arrays."""

    size: float  # infinite where a value is NaN
    path: str  # of the array that differs most; empty for numbers
    failed: int  # how many arrays differ by more than the limit
    limit: float


_Differences = dict[str, _Difference]  # by the column of the table


@dataclass
class Comparison:
    """Compares sharded steps, setting after setting, with the control: a run on one device."""

    model: Any
    loss_fn: Callable[..., Any]
    batch: PyTree
    tx: optax.GradientTransformation
    settings: dict[str, Any]  # of `fully_shard`, beside model, optimizer, mesh and strategy
    devices: list[jax.Device]
    mesh: Mesh | None
    steps: int
    seed: int
    tolerance: Tolerance | None  # if None, the dtypes decide as the first setting runs
    _start: TrainState | None = None
    _control: UnshardedRun | None = None

    def compare_setting(self, setting: Setting, before: Sequence[Row]) -> Row:
        """Runs one setting and returns its row; `before`: rows of settings that ran earlier."""
        alone = replace(setting, accumulation=1, deferred_reduction=False)
        mesh = self._mesh_for(setting.strategy)
        evidence = Evidence(
            setting=setting,
            sizes={"devices": len(self.devices), **mesh_axes(mesh).shape},
            holds_alone=any(row.setting == alone and row.holds for row in before),
            holds_local=any(row.setting.local_batch and row.holds for row in before),
        )
        try:
            differences = self._train_and_compare(setting, mesh, evidence)
        except _RefusedError as refused:
            cause = f"refused with local batches: {_one_line(refused.__cause__)}"
            return Row(setting, {}, (Failure(setting, "error", "", 0, math.inf, 0.0, cause),))
        broken = {name: each for name, each in differences.items() if each.failed}
        if setting.local_batch and broken:
            is_random, draws = self._randomness
            evidence = replace(evidence, is_random=is_random, draws=draws)
        failures = []
        for name, (size, path, failed, limit) in broken.items():
            cause = likely_cause(evidence, name, path, broken)
            failures.append(Failure(setting, name, path, failed - 1, size, limit, cause))
        largest = {name: (each.size, each.path) for name, each in differences.items()}
        return Row(setting, largest, tuple(failures))

    def _mesh_for(self, strategy: str) -> Mesh:
        """Returns the user's mesh, or one of all devices; for hybrid strategies with 2 replicas."""
        if self.mesh is not None:
            return self.mesh
        replica = 2 if get_strategy(strategy).hybrid and len(self.devices) % 2 == 0 else 1
        return make_mesh(-1, replica, devices=self.devices)

    def _shard_model(self, setting: Setting, mesh: Mesh) -> Sharded:
        """Returns the sharded model; its optimizer's state also has the gradients.

        Sets the tolerance if there is none yet.
        """
        settings = dict(self.settings)
        if not setting.local_batch:  # these need explicit collectives
            settings["prefetch"] = "none"
            settings["precision"] = replace(settings["precision"], reduce=None)
        tx = optax.chain(optax.snapshot(GRADIENTS, lambda updates: updates), self.tx)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReplicationWarning)  # of bytes; here numbers count
            sharded = fully_shard(self.model, tx, mesh, setting.strategy, **settings)
        if self.tolerance is None:
            stored = {leaf.dtype.name for leaf in sharded.layout.by_path.values()}
            self.tolerance = tolerance_of(sharded.precision, stored)
        return sharded

    def _train_and_compare(self, setting: Setting, mesh: Mesh, evidence: Evidence) -> _Differences:
        """Trains sharded and on one device; returns the largest differences over all steps.

        Adds what the first step tells to the evidence.
        """
        sharded = self._shard_model(setting, mesh)
        with _refusals_of_local_batch(setting):
            step = sharded.make_train_step(
                self.loss_fn,
                accumulation=setting.accumulation,
                deferred_reduction=setting.deferred_reduction,
                local_batch=setting.local_batch,
                abort_after=None,
            )
        batch = jax.tree.map(lambda leaf: leaf[: setting.rows], self.batch)
        state = self._initial_state(sharded)
        assert self._start is not None
        assert self.tolerance is not None
        params, model_state = flatten(self._start.params), flatten(self._start.model_state)
        control = self._control_for(step)
        opt_state = control.init_optimizer(params)
        differences: _Differences = {}
        for number in range(self.steps):
            # Before the control, so that a mistake in the loss has the library's message.
            with _refusals_of_local_batch(setting):
                state, metrics = step(state, batch)
            expected = control.evaluate(
                params, model_state, batch, self._start.rng, number, setting.accumulation
            )
            _check_finite(expected, number)
            gradients = _to_float64(flatten(optax.tree.get(state.opt_state, GRADIENTS)))
            metrics = _to_float64(metrics)
            evidence.add_step(expected, metrics, gradients)
            for name, each in self._compare_step(expected, metrics, gradients, state).items():
                differences[name] = max(differences.get(name, each), each, key=lambda x: x.size)
            params, opt_state = control.update(params, opt_state, gradients, expected.loss)
            model_state = expected.model_state
        final, initial = _to_float64(params), _to_float64(flatten(self._start.params))
        measured, limit = _to_float64(flatten(state.params)), self.tolerance.parameter
        differences["parameters"] = _max_difference(
            measured,
            final,
            limit,
            lambda path, x: _max_abs(x - initial[path]) + FLOOR * _max_abs(x),
        )
        return differences

    def _initial_state(self, sharded: Sharded) -> TrainState:
        """Returns the initial state: drawn for the first layout, copied for later ones."""
        if self._start is None:
            state = sharded.init(self.seed)
            one_device = SingleDeviceSharding(self.devices[0])
            saved = sharded.to_checkpoint(state)
            self._start = jax.tree.map(lambda leaf: _copy_to(leaf, one_device), saved)
            return state
        target = sharded.checkpoint_target()
        copied = jax.tree.map(lambda leaf, to: _copy_to(leaf, to.sharding), self._start, target)
        return sharded.from_checkpoint(copied)

    def _control_for(self, step: CompiledStep) -> UnshardedRun:
        """Returns the run on one device, made for the first setting and kept for the others."""
        if self._control is None:
            leaves = step.plan.layout.by_path
            trained = frozenset(path for path, leaf in leaves.items() if leaf.trainable)
            compute = {path: comm.transform.compute for path, comm in step.plan.comms.items()}
            model = step.plan.model
            streams = model.demands.streams if isinstance(model, LinenModel) else ()
            self._control = UnshardedRun(
                self.model, self.loss_fn, self.tx, trained, compute, streams, model.axis_names
            )
        return self._control

    def _compare_step(
        self,
        expected: UnshardedStep,
        metrics: Mapping[str, np.ndarray],
        gradients: Mapping[str, np.ndarray],
        state: TrainState,
    ) -> _Differences:
        """Returns the differences of one step, by what is compared.

        `metrics`, `gradients` and `state` are those of the sharded step.
        """
        assert self.tolerance is not None
        tolerance = self.tolerance
        floor = FLOOR * max(map(_max_abs, expected.gradients.values()), default=0.0)
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
        if expected.metrics:
            # Both are NaN where the count is zero.
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
        params, model_state = flatten(self._start.params), flatten(self._start.model_state)
        return self._control.randomness(params, model_state, self.batch, self._start.rng)


def _check_finite(expected: UnshardedStep, number: int) -> None:
    """Raises ValueError where the control is not finite; `number`: the step's, from 0.

    The sharded step squares gradients in float32.
    """
    largest = np.finfo(np.float32).max
    if not math.isfinite(expected.loss) or not expected.grad_norm**2 < largest:
        got = f"loss {expected.loss}, gradient norm {expected.grad_norm} in step {number + 1}"
        fix = "a smaller learning rate, fewer steps, or another batch"
        raise ValueError(message("not finite on one device", where="certify", got=got, fix=fix))


def _max_difference(
    measured: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    limit: float,
    scale: Callable[[str, np.ndarray], float],
) -> _Difference:
    """Returns the largest difference among arrays by path, and how many exceed the limit.

    Each is relative to what `scale` returns for the path and the expected array.
    """
    assert measured.keys() == expected.keys(), (sorted(measured), sorted(expected))
    sizes = {}
    for path, value in expected.items():
        size = _max_abs(measured[path] - value) / max(scale(path, value), 1e-30)
        sizes[path] = math.inf if math.isnan(size) else size
    largest = max(sizes, key=sizes.__getitem__, default="")
    size = sizes.get(largest, 0.0)
    failed = sum(each > limit for each in sizes.values())
    return _Difference(size, largest if size else "", failed, limit)


def _scale_at_least(least: float) -> Callable[[str, np.ndarray], float]:
    """Returns a scale for `_max_difference`: an array's largest magnitude, or `least`."""
    return lambda _, value: max(_max_abs(np.nan_to_num(value)), least)


def _max_abs(value: np.ndarray) -> float:
    return float(np.abs(value).max(initial=0.0))


def _to_float64(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {path: as_float64(value) for path, value in arrays.items()}


def _copy_to(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Copies an array through the host: steps donate theirs, so that no buffer may be shared."""
    if is_prng_key(array):
        data = _copy_to(jax.random.key_data(array), SingleDeviceSharding(jax.devices()[0]))
        keys = jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        return jax.device_put(keys, sharding)
    return jax.device_put(np.array(array), sharding)


def certify(
    model: Any,
    loss_fn: Callable[..., Any],
    batch: PyTree,
    *,
    tx: optax.GradientTransformation | None = None,
    units: Units = "model",
    inputs: tuple[Any, ...] | None = None,
    mesh: Mesh | None = None,
    precision: Precision | None = None,
    strategies: Sequence[str] = tuple(STRATEGIES),
    accumulation: Sequence[int] = (1, 4),
    local_batch: bool = False,
    steps: int = 3,
    seed: int = 0,
    min_size: int = 1,
    tolerance: Tolerance | None = None,
    **settings: Any,
) -> Certificate:
    """Trains a few steps with every strategy; compares each with the unsharded model on one device.

    Args:
        model: as `fully_shard` takes it.
        loss_fn: as `Sharded.make_train_step` takes it; its metrics are compared too.
        batch: arrays [rows, ...]; the number of rows must be divisible by devices x the largest
            accumulation.
        tx: the optimizer; `optax.sgd(0.1)` if None.
        units: as `fully_shard` takes them.
        inputs: example inputs of a Linen model.
        mesh: of at least two devices. If None, all of this process's: `data` alone, and for hybrid
            strategies a `replica` of 2.
        precision: dtypes; those that the model makes its parameters in if None. bfloat16 and
            float16 are compared loosely, see `tolerance_of`. A loss scale is one that stays, so
            that no step is skipped, and parameters are rounded to nearest.
        strategies: names of the strategies to run.
        accumulation: numbers of microbatches to run.
        local_batch: also run each with `local_batch=True`, once more with `deferred_reduction`, and
            once with one row on each device: whether the loss is the sum over examples that
            `local_batch=True` promises.
        steps: of each run.
        seed: of the initial values.
        min_size: elements below which a parameter stays replicated; 1, so that a small model is
            sharded at all.
        tolerance: largest differences; by the dtypes if None.
        settings: more of `fully_shard`: remat, prefetch (in runs with local_batch), rules, frozen,
            ...

    Returns:
        The table of differences, all within the tolerance.

    Raises:
        CertifyError: an AssertionError that names setting, array, difference and likely cause. Its
            `certificate` has everything.
        ValueError: a batch that cannot be split evenly, one device alone, a loss that is not
            finite on one device.

    """
    devices = list(jax.devices() if mesh is None else mesh.devices.flat)
    rows = _check_rows(batch, len(devices), accumulation)
    names = [get_strategy(name).name for name in strategies]
    precision = _comparable_precision(precision or AS_MADE)
    settings |= {"units": units, "inputs": inputs, "min_size": min_size, "precision": precision}
    comparison = Comparison(
        model=model,
        loss_fn=loss_fn,
        batch=jax.tree.map(np.asarray, batch),
        tx=optax.sgd(0.1) if tx is None else tx,
        settings=settings,
        devices=devices,
        mesh=mesh,
        steps=steps,
        seed=seed,
        tolerance=tolerance,
    )
    compared: list[Row] = []
    with jax.default_matmul_precision("highest"):  # GPUs and TPUs would round float32 to fewer bits
        for setting in _settings_to_compare(names, accumulation, rows, len(devices), local_batch):
            compared.append(comparison.compare_setting(setting, compared))
    assert comparison.tolerance is not None, "the first setting decides it"
    certificate = Certificate(tuple(compared), len(devices), steps, comparison.tolerance)
    if not certificate.holds:
        raise CertifyError(certificate)
    return certificate


def _comparable_precision(precision: Precision) -> Precision:
    """Returns the precision with what plain JAX can compute too.

    A loss scale becomes one that stays, and parameters are rounded to nearest.
    """
    if precision.scaling is not None:
        precision = replace(precision, loss_scale=SCALE)
    return replace(precision, stochastic_rounding=False)


def _check_rows(batch: PyTree, devices: int, accumulation: Sequence[int]) -> int:
    """Returns the number of rows of the batch; raises ValueError if it cannot be split evenly.

    Or if there is one device alone, on which nothing is sharded.
    """
    if devices < 2:
        what = "nothing is sharded on one device"
        fix = "fsdp_jax.launch.use_virtual_devices(8), before jax starts"
        raise ValueError(message(what, where="certify", got=devices, fix=fix))
    leaves = flatten(batch).items()
    rows = {path: np.shape(leaf)[0] if np.ndim(leaf) else None for path, leaf in leaves}
    parts = devices * max(accumulation)
    first = next(iter(rows.values()), None)
    if first is None or first % parts or len(set(rows.values())) > 1:
        what = "the batch cannot be split evenly"
        expected = f"a multiple of {parts} rows: {devices} devices "
        expected += f"x accumulation {max(accumulation)}"
        fix = "pass more rows, or accumulation=(1,)"
        raise ValueError(message(what, where="batch", expected=expected, got=rows, fix=fix))
    return first


def _settings_to_compare(
    strategies: Sequence[str],
    accumulation: Sequence[int],
    rows: int,
    devices: int,
    local_batch: bool,
) -> Iterator[Setting]:
    """Yields the settings that are run; simpler ones first, as causes are inferred from these.

    `rows`: of the global batch; `local_batch`: also those with local batches.
    """
    for strategy in strategies:
        for number in accumulation:
            yield Setting(strategy, number, rows)
    if not local_batch:
        return
    for strategy in strategies:
        for number in accumulation:
            yield Setting(strategy, number, rows, local_batch=True)
        if max(accumulation) > 1:
            yield Setting(
                strategy, max(accumulation), rows, local_batch=True, deferred_reduction=True
            )
    if rows > devices:
        yield Setting(strategies[0], 1, devices, local_batch=True, one_row=True)
