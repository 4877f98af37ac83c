"""Sharded steps and the unsharded control, compared number by number.

[Note: how a step is compared] The control is a run on one device in plain JAX (`unsharded.py`) from
the same starting values. In each step the loss, its count, the gradient norm and every gradient of
the sharded step are compared with the control's own. Then both optimizers take the gradients that
the sharded step found, and the parameters are compared at the end. Were each optimizer given its
own gradients, rounding would decide: Adam makes a step of the learning rate of a gradient of 1e-9.

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
from fsdp_jax.certify.unsharded import Arrays, Measured, Unsharded
from fsdp_jax.errors import message
from fsdp_jax.sharding.mesh import make_mesh, shape_of
from fsdp_jax.sharding.rules import ReplicationWarning
from fsdp_jax.sharding.strategy import get_strategy
from fsdp_jax.step.state import TrainState
from fsdp_jax.tree import PyTree, flatten

FLOOR = 0.01  # of the largest value in any array: below it, an array's own rounding is not worth a failure


class _Recorded(NamedTuple):
    gradients: Any


def _recording(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer, whose state shows the gradients that it was given last."""
    record = optax.GradientTransformation(
        lambda params: _Recorded(jax.tree.map(jnp.zeros_like, params)),
        lambda updates, state, params=None: (updates, _Recorded(updates)),
    )
    return optax.chain(record, tx)


class _RefusedError(Exception):
    """The step cannot be made with local batches, or the loss cannot be traced."""


@contextmanager
def _refusals(setting: Setting) -> Iterator[None]:
    """By default any error is the caller's own; with local batches it is an answer."""
    try:
        yield
    except Exception as error:
        if setting.local_batch:
            raise _RefusedError from error
        raise


def _one_line(error: BaseException | None) -> str:
    """An error's message without what jax puts below it."""
    lines = [" ".join(line.split()) for line in str(error).partition("\n-----")[0].splitlines()]
    return "; ".join(filter(None, lines)) or type(error).__name__


@dataclass
class Comparison:
    """The control, and the sharded steps that are compared with it."""

    model: Any
    loss_fn: Callable[[Any, Any], Any]
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
    _drawn: tuple[bool, bool] | None = field(default=None)

    def row(self, setting: Setting, before: Sequence[Row]) -> Row:
        """Runs one setting. `before`: rows of settings that came earlier."""
        alone = replace(setting, accumulation=1, deferred_reduction=False)
        evidence = Evidence(
            sizes=self._sizes(setting),
            local_batch=setting.local_batch,
            one_row=setting.one_row,
            accumulation=setting.accumulation,
            holds_alone=any(row.setting == alone and row.holds for row in before),
            holds_local=any(row.setting.local_batch and row.holds for row in before),
        )
        try:
            return self._compare(setting, evidence)
        except _RefusedError as refused:
            cause = f"refused with local batches: {_one_line(refused.__cause__)}"
            failure = Failure(setting, "error", "", 0, math.inf, 0.0, cause)
            return Row(setting, {}, (failure,))

    def _sizes(self, setting: Setting) -> dict[str, int]:
        return {"devices": len(self.devices), **shape_of(self._mesh_of(setting.strategy))}

    def _mesh_of(self, strategy: str) -> Mesh:
        if self.mesh is not None:
            return self.mesh
        replica = 2 if get_strategy(strategy).hybrid and len(self.devices) % 2 == 0 else 1
        return make_mesh(-1, replica, devices=self.devices)

    def _sharded(self, setting: Setting) -> Sharded:
        arguments = dict(self.arguments)
        if not setting.local_batch:  # what only explicit collectives serve
            arguments["prefetch"] = "none"
            arguments["precision"] = replace(arguments["precision"], reduce=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReplicationWarning)  # of bytes; here only numbers count
            sharded = fully_shard(
                self.model,
                _recording(self.tx),
                self._mesh_of(setting.strategy),
                setting.strategy,
                **arguments,
            )
        if self.tolerance is None:
            stored = {leaf.dtype.name for leaf in sharded.layout.by_path.values()}
            self.tolerance = tolerance_of(sharded.precision, stored)
        return sharded

    def _compare(self, setting: Setting, evidence: Evidence) -> Row:
        sharded = self._sharded(setting)
        with _refusals(setting):
            step = sharded.train_step(
                self.loss_fn,
                accumulation=setting.accumulation,
                deferred_reduction=setting.deferred_reduction,
                local_batch=setting.local_batch,
                abort_after=None,
            )
        batch = jax.tree.map(lambda leaf: leaf[: setting.rows], self.batch)
        state = self._placed(sharded)
        assert self._start is not None
        params, rest = flatten(self._start.params), flatten(self._start.model_state)
        first = {path: _wide(value) for path, value in params.items()}
        opt_state = None
        differences: dict[str, tuple[float, str, int, float]] = {}
        for number in range(self.steps):
            with _refusals(
                setting
            ):  # before the control, so that a mistake in the loss has the library's message
                state, metrics = step(state, batch)
            control = self._controlled(sharded, step.plan)
            opt_state = control.start(params) if opt_state is None else opt_state
            expected = control.measure(
                params, rest, batch, self._start.rng, number, setting.accumulation
            )
            self._check_finite(expected, number)
            gradients = {
                path: _wide(value) for path, value in flatten(state.opt_state[0].gradients).items()
            }
            metrics = {name: float(value) for name, value in metrics.items()}
            evidence.add(expected, metrics, gradients)
            _worst(differences, self._step_differences(expected, metrics, gradients, state))
            params, opt_state = control.update(params, opt_state, gradients, expected.loss)
            rest = expected.rest
        moved = {path: _wide(value) for path, value in params.items()}
        found = {path: _wide(value) for path, value in flatten(state.params).items()}
        assert self.tolerance is not None
        sizes = {
            p: np.abs(moved[p] - first[p]).max() + FLOOR * np.abs(moved[p]).max() for p in moved
        }
        _worst(differences, {"parameters": _largest(found, moved, sizes, self.tolerance.parameter)})
        assert self._control is not None
        return self._judged(setting, evidence, differences, self._control)

    def _placed(self, sharded: Sharded) -> TrainState:
        """A fresh state; the first is drawn, and later layouts take its values."""
        if self._start is None:
            state = sharded.init(self.seed)
            whole = SingleDeviceSharding(self.devices[0])
            self._start = jax.tree.map(
                lambda leaf: _copied(leaf, whole), sharded.to_checkpoint(state)
            )
            return state
        target = sharded.checkpoint_target()
        return sharded.from_checkpoint(
            jax.tree.map(lambda leaf, to: _copied(leaf, to.sharding), self._start, target)
        )

    def _controlled(self, sharded: Sharded, plan: Any) -> Unsharded:
        if self._control is None:
            leaves = sharded.layout.by_path
            trained = frozenset(path for path, leaf in leaves.items() if leaf.trainable)
            compute = {path: comm.transform.compute for path, comm in plan.comms.items()}
            self._control = Unsharded(self.model, self.loss_fn, self.tx, trained, compute)
        return self._control

    def _check_finite(self, expected: Measured, number: int) -> None:
        # The step squares gradients in float32.
        if not math.isfinite(expected.loss) or not expected.grad_norm**2 < np.finfo(np.float32).max:
            got = f"loss {expected.loss}, gradient norm {expected.grad_norm} in step {number + 1}"
            fix = "a smaller learning rate, fewer steps, or another batch"
            raise ValueError(message("not finite on one device", where="certify", got=got, fix=fix))

    def _step_differences(
        self,
        expected: Measured,
        metrics: Mapping[str, float],
        gradients: Mapping[str, np.ndarray],
        state: TrainState,
    ) -> dict[str, tuple[float, str, int, float]]:
        at = self.tolerance
        assert at is not None
        largest = max((np.abs(value).max() for value in expected.gradients.values()), default=0.0)
        sizes = {
            path: np.abs(value).max() + FLOOR * largest
            for path, value in expected.gradients.items()
        }
        numbers = {
            "loss": (metrics["loss"], expected.loss, at.loss),
            "count": (metrics["count"], expected.count, at.loss),
            "gradient norm": (metrics["grad_norm"], expected.grad_norm, at.grad_norm),
        }
        differences = {}
        for name, (found, wanted, limit) in numbers.items():
            # Below 0.1 a loss is a difference of larger numbers, or nearly learned.
            difference = abs(found - wanted) / max(abs(wanted), 0.1 if name == "loss" else 1e-30)
            differences[name] = (difference, "", int(not difference <= limit), limit)
        differences["gradients"] = _largest(gradients, expected.gradients, sizes, at.gradient)
        differences["model state"] = _state_differences(state, expected.rest, at.gradient)
        return differences

    def _judged(
        self,
        setting: Setting,
        evidence: Evidence,
        differences: Mapping[str, tuple[float, str, int, float]],
        control: Unsharded,
    ) -> Row:
        broken = {name: found for name, found in differences.items() if found[2]}
        if setting.local_batch and broken:
            evidence = replace(evidence, drawn=self._draws(control))
        failures = []
        for name, (difference, path, count, limit) in broken.items():
            cause = likely_cause(evidence, name, path, set(broken))
            failures.append(Failure(setting, name, path, count - 1, difference, limit, cause))
        worst = {name: (difference, path) for name, (difference, path, _, _) in differences.items()}
        return Row(setting, worst, tuple(failures))

    def _draws(self, control: Unsharded) -> tuple[bool, bool]:
        """Whether the loss is random by its streams, and whether it draws at all."""
        if self._drawn is None:
            assert self._start is not None
            start = (
                flatten(self._start.params),
                flatten(self._start.model_state),
                self.batch,
                self._start.rng,
            )
            self._drawn = (control.is_random(*start), control.draws(*start))
        return self._drawn


def _worst(differences: dict[str, tuple[float, str, int, float]], more: Mapping[str, Any]) -> None:
    """Keeps the largest of each; what is not a number is larger than any."""
    for name, found in more.items():
        if name not in differences or not found[0] <= differences[name][0]:
            differences[name] = found


def _largest(
    found: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    sizes: Mapping[str, float],
    limit: float,
) -> tuple[float, str, int, float]:
    """(largest relative difference, its path, how many are above the limit, the limit)."""
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    worst = (0.0, "")
    above = 0
    for path, value in expected.items():
        difference = float(np.abs(found[path] - value).max(initial=0.0) / max(sizes[path], 1e-30))
        difference = math.inf if math.isnan(difference) else difference
        above += difference > limit
        if difference > worst[0]:
            worst = (difference, path)
    return (*worst, above, limit)


def _state_differences(
    state: TrainState, expected: Arrays, limit: float
) -> tuple[float, str, int, float]:
    found = flatten(state.model_state)
    numbers = {
        path: value for path, value in expected.items() if jnp.issubdtype(value.dtype, jnp.number)
    }
    wanted = {path: _wide(value) for path, value in numbers.items()}
    sizes = {path: float(np.abs(value).max(initial=0.0)) + 1e-6 for path, value in wanted.items()}
    return _largest({path: _wide(found[path]) for path in wanted}, wanted, sizes, limit)


def _wide(value: Any) -> np.ndarray:
    """A copy: the step takes the array over."""
    return np.array(value).astype(np.float64)


def _copied(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Through the host, so that no buffer is shared: steps take theirs over."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _copied(jax.random.key_data(array), SingleDeviceSharding(jax.devices()[0]))
        return jax.device_put(
            jax.random.wrap_key_data(data, impl=jax.random.key_impl(array)), sharding
        )
    return jax.device_put(np.array(array), sharding)
