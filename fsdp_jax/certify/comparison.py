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
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from fsdp_jax.api import Sharded, fully_shard
from fsdp_jax.certify.causes import Evidence, likely_cause
from fsdp_jax.certify.certificate import Failure, Row, Setting, Tolerance, tolerance_of
from fsdp_jax.certify.unsharded import Arrays, Measured, Unsharded, as_float64
from fsdp_jax.errors import message
from fsdp_jax.sharding.mesh import make_mesh, mesh_axes
from fsdp_jax.sharding.rules import ReplicationWarning
from fsdp_jax.sharding.strategy import get_strategy
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.step.loss import OWN
from fsdp_jax.step.state import LOSS_SCALE, TrainState
from fsdp_jax.tree import PyTree, flatten
from fsdp_jax.units.linen import LinenModel

# Fraction of the largest value in any array, added to an array's own largest value: below it, the
# array's rounding is not a failure.
FLOOR = 0.01


class _Recorded(NamedTuple):
    gradients: Any


def _recording(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the same optimizer, whose state shows the gradients that it was given last."""
    record = optax.GradientTransformation(
        lambda params: _Recorded(jax.tree.map(jnp.zeros_like, params)),
        lambda updates, state, params=None: (updates, _Recorded(updates)),
    )
    return optax.chain(record, tx)


class _RefusedError(Exception):
    """The step cannot be made with local batches, or the loss cannot be traced."""


@contextmanager
def _refusals(setting: Setting) -> Iterator[None]:
    """Raises _RefusedError for any error with local batches; by default it is the caller's own."""
    try:
        yield
    except Exception as error:
        if setting.local_batch:
            raise _RefusedError from error
        raise


def _one_line(error: BaseException | None) -> str:
    """Returns an error's message without what jax adds below it."""
    lines = [" ".join(line.split()) for line in str(error).partition("\n-----")[0].splitlines()]
    return "; ".join(filter(None, lines)) or type(error).__name__


class _Difference(NamedTuple):
    """The largest relative difference among some arrays.

    Attributes:
        size: relative; infinite where a value is NaN.
        path: of the array that differs most; empty for numbers.
        failed: how many arrays differ by more than the limit.
        limit: the tolerance.

    """

    size: float
    path: str
    failed: int
    limit: float


_Differences = dict[str, _Difference]  # by the column of the table


@dataclass
class Comparison:
    """The control, and the sharded steps that are compared with it.

    Attributes:
        arguments: of `fully_shard`, beside model, optimizer, mesh and strategy.
        tolerance: None until the first setting has run, where the dtypes decide.

    """

    model: Any
    loss_fn: Callable[..., Any]
    batch: PyTree
    tx: optax.GradientTransformation
    arguments: dict[str, Any]
    devices: list[jax.Device]
    mesh: Mesh | None
    steps: int
    seed: int
    tolerance: Tolerance | None
    _start: TrainState | None = field(default=None)
    _control: Unsharded | None = field(default=None)
    _random: tuple[bool, bool] | None = field(default=None)

    def row(self, setting: Setting, before: Sequence[Row]) -> Row:
        """Runs one setting. `before`: rows of settings that ran earlier."""
        alone = replace(setting, accumulation=1, deferred_reduction=False)
        mesh = self._mesh_of(setting.strategy)
        evidence = Evidence(
            setting=setting,
            sizes={"devices": len(self.devices), **mesh_axes(mesh).shape},
            holds_alone=any(row.setting == alone and row.holds for row in before),
            holds_local=any(row.setting.local_batch and row.holds for row in before),
        )
        try:
            differences = self._run(setting, mesh, evidence)
        except _RefusedError as refused:
            cause = f"refused with local batches: {_one_line(refused.__cause__)}"
            return Row(setting, {}, (Failure(setting, "error", "", 0, math.inf, 0.0, cause),))
        broken = {name: each for name, each in differences.items() if each.failed}
        if setting.local_batch and broken:
            is_random, draws = self._randomness()
            evidence = replace(evidence, is_random=is_random, draws=draws)
        failures = []
        for name, (size, path, failed, limit) in broken.items():
            cause = likely_cause(evidence, name, path, broken)
            failures.append(Failure(setting, name, path, failed - 1, size, limit, cause))
        largest = {name: (each.size, each.path) for name, each in differences.items()}
        return Row(setting, largest, tuple(failures))

    def _mesh_of(self, strategy: str) -> Mesh:
        if self.mesh is not None:
            return self.mesh
        replica = 2 if get_strategy(strategy).hybrid and len(self.devices) % 2 == 0 else 1
        return make_mesh(-1, replica, devices=self.devices)

    def _sharded(self, setting: Setting, mesh: Mesh) -> Sharded:
        arguments = dict(self.arguments)
        if not setting.local_batch:  # these need explicit collectives
            arguments["prefetch"] = "none"
            arguments["precision"] = replace(arguments["precision"], reduce=None)
        tx = _recording(self.tx)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReplicationWarning)  # of bytes; here numbers count
            sharded = fully_shard(self.model, tx, mesh, setting.strategy, **arguments)
        if self.tolerance is None:
            stored = {leaf.dtype.name for leaf in sharded.layout.by_path.values()}
            self.tolerance = tolerance_of(sharded.precision, stored)
        return sharded

    def _run(self, setting: Setting, mesh: Mesh, evidence: Evidence) -> _Differences:
        """Returns the largest differences over all steps; adds the first step to the evidence."""
        sharded = self._sharded(setting, mesh)
        with _refusals(setting):
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
        initial = {path: as_float64(value) for path, value in params.items()}
        opt_state = None
        differences: _Differences = {}
        for number in range(self.steps):
            # Before the control, so that a mistake in the loss has the library's message.
            with _refusals(setting):
                state, metrics = step(state, batch)
            control = self._unsharded(step)
            if opt_state is None:
                opt_state = control.start(params)
            expected = control.measure(
                params, model_state, batch, self._start.rng, number, setting.accumulation
            )
            _check_finite(expected, number)
            recorded = flatten(state.opt_state[0].gradients)
            gradients = {path: as_float64(value) for path, value in recorded.items()}
            numbers = {name: float(metrics.pop(name)) for name in OWN}
            metrics.pop(LOSS_SCALE, None)
            own = {name: as_float64(value) for name, value in metrics.items()}
            evidence.add(expected, numbers, gradients)
            _keep_largest(differences, self._compare(expected, numbers, gradients, state))
            if own:
                _keep_largest(differences, {"metrics": self._compare_metrics(own, expected)})
            params, opt_state = control.update(params, opt_state, gradients, expected.loss)
            model_state = expected.model_state
        final = {path: as_float64(value) for path, value in params.items()}
        measured = {path: as_float64(value) for path, value in flatten(state.params).items()}
        scales = {
            path: np.abs(value - initial[path]).max() + FLOOR * np.abs(value).max()
            for path, value in final.items()
        }
        limit = self.tolerance.parameter
        _keep_largest(differences, {"parameters": _largest(measured, final, scales, limit)})
        return differences

    def _initial_state(self, sharded: Sharded) -> TrainState:
        """Returns the initial state: drawn for the first layout, copied for later ones."""
        if self._start is None:
            state = sharded.init(self.seed)
            one_device = SingleDeviceSharding(self.devices[0])
            saved = sharded.to_checkpoint(state)
            self._start = jax.tree.map(lambda leaf: _copied(leaf, one_device), saved)
            return state
        target = sharded.checkpoint_target()
        copied = jax.tree.map(lambda leaf, to: _copied(leaf, to.sharding), self._start, target)
        return sharded.from_checkpoint(copied)

    def _unsharded(self, step: CompiledStep) -> Unsharded:
        if self._control is None:
            leaves = step.plan.layout.by_path
            trained = frozenset(path for path, leaf in leaves.items() if leaf.trainable)
            compute = {path: comm.transform.compute for path, comm in step.plan.comms.items()}
            model = step.plan.model
            streams = model.demands.streams if isinstance(model, LinenModel) else ()
            self._control = Unsharded(
                self.model, self.loss_fn, self.tx, trained, compute, streams, model.axis_names
            )
        return self._control

    def _compare(
        self,
        expected: Measured,
        metrics: Mapping[str, float],
        gradients: Mapping[str, np.ndarray],
        state: TrainState,
    ) -> _Differences:
        """Returns the differences of one step."""
        tolerance = self.tolerance
        assert tolerance is not None
        numbers = {
            "loss": (metrics["loss"], expected.loss, tolerance.loss),
            "count": (metrics["count"], expected.count, tolerance.loss),
            "gradient norm": (metrics["grad_norm"], expected.grad_norm, tolerance.grad_norm),
        }
        differences: _Differences = {}
        for name, (measured, wanted, limit) in numbers.items():
            # Below 0.1 a loss is a difference of larger numbers, or nearly learned.
            size = abs(measured - wanted) / max(abs(wanted), 0.1 if name == "loss" else 1e-30)
            differences[name] = _Difference(size, "", int(not size <= limit), limit)
        largest = max((np.abs(value).max() for value in expected.gradients.values()), default=0.0)
        scales = {
            path: np.abs(value).max() + FLOOR * largest
            for path, value in expected.gradients.items()
        }
        limit = tolerance.gradient
        differences["gradients"] = _largest(gradients, expected.gradients, scales, limit)
        differences["model state"] = _state_difference(state, expected.model_state, limit)
        return differences

    def _compare_metrics(self, own: Mapping[str, np.ndarray], expected: Measured) -> _Difference:
        """Returns the largest difference of the user's own metrics; NaN of a zero count is one."""
        assert self.tolerance is not None
        scales = {
            name: max(np.abs(np.nan_to_num(value)).max(initial=0.0), 0.1)
            for name, value in expected.metrics.items()
        }
        both = {name: np.isnan(own[name]) & np.isnan(x) for name, x in expected.metrics.items()}
        measured, wanted = (
            {name: np.where(both[name], 0.0, metrics[name]) for name in both}
            for metrics in (own, expected.metrics)
        )
        return _largest(measured, wanted, scales, self.tolerance.loss)

    def _randomness(self) -> tuple[bool, bool]:
        """Returns whether the loss depends on its random streams, and whether it draws at all."""
        if self._random is None:
            assert self._start is not None
            assert self._control is not None
            params, model_state = flatten(self._start.params), flatten(self._start.model_state)
            start = (params, model_state, self.batch, self._start.rng)
            self._random = (self._control.is_random(*start), self._control.draws(*start))
        return self._random


def _check_finite(expected: Measured, number: int) -> None:
    """Raises ValueError where the control is not finite; the step squares gradients in float32."""
    largest = np.finfo(np.float32).max
    if not math.isfinite(expected.loss) or not expected.grad_norm**2 < largest:
        got = f"loss {expected.loss}, gradient norm {expected.grad_norm} in step {number + 1}"
        fix = "a smaller learning rate, fewer steps, or another batch"
        raise ValueError(message("not finite on one device", where="certify", got=got, fix=fix))


def _keep_largest(differences: _Differences, more: _Differences) -> None:
    """Keeps the larger of each difference; NaN is larger than any number."""
    for name, each in more.items():
        if name not in differences or not each.size <= differences[name].size:
            differences[name] = each


def _largest(
    measured: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    scales: Mapping[str, float],
    limit: float,
) -> _Difference:
    """Returns the largest difference, each relative to its scale."""
    assert measured.keys() == expected.keys(), (sorted(measured), sorted(expected))
    largest, largest_path = 0.0, ""
    failed = 0
    for path, value in expected.items():
        size = float(np.abs(measured[path] - value).max(initial=0.0) / max(scales[path], 1e-30))
        size = math.inf if math.isnan(size) else size
        failed += size > limit
        if size > largest:
            largest, largest_path = size, path
    return _Difference(largest, largest_path, failed, limit)


def _state_difference(state: TrainState, expected: Arrays, limit: float) -> _Difference:
    numbers = [path for path, x in expected.items() if jnp.issubdtype(x.dtype, jnp.number)]
    model_state = flatten(state.model_state)
    measured = {path: as_float64(model_state[path]) for path in numbers}
    wanted = {path: as_float64(expected[path]) for path in numbers}
    scales = {path: float(np.abs(value).max(initial=0.0)) + 1e-6 for path, value in wanted.items()}
    return _largest(measured, wanted, scales, limit)


def _copied(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Copies an array through the host: steps donate theirs, so that no buffer may be shared."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _copied(jax.random.key_data(array), SingleDeviceSharding(jax.devices()[0]))
        keys = jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        return jax.device_put(keys, sharding)
    return jax.device_put(np.array(array), sharding)
