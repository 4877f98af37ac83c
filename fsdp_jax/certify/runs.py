"""`certify`: which settings are run and compared."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from fsdp_jax.certify.certificate import Certificate, CertifyError, Row, Setting, Tolerance
from fsdp_jax.certify.comparison import Comparison
from fsdp_jax.errors import message
from fsdp_jax.sharding.precision import AS_MADE, Precision
from fsdp_jax.sharding.strategy import STRATEGIES, get_strategy
from fsdp_jax.tree import PyTree, flatten
from fsdp_jax.units.auto_wrap import Units

SCALE = 256.0  # of the loss, where it is scaled: gradients of a small model stay in float16


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
    rows = _check(batch, len(devices), accumulation)
    names = [get_strategy(name).name for name in strategies]
    precision = _comparable(precision or AS_MADE)
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
        for setting in _settings(names, accumulation, rows, len(devices), local_batch):
            compared.append(comparison.row(setting, compared))
    assert comparison.tolerance is not None, "the first setting decides it"
    certificate = Certificate(tuple(compared), len(devices), steps, comparison.tolerance)
    if not certificate.holds:
        raise CertifyError(certificate)
    return certificate


def _comparable(precision: Precision) -> Precision:
    """Returns the precision without what one device in plain JAX does not do."""
    if precision.scaling is not None:
        precision = replace(precision, loss_scale=SCALE)
    return replace(precision, stochastic_rounding=False)


def _check(batch: PyTree, devices: int, accumulation: Sequence[int]) -> int:
    """Returns the rows of the batch; raises ValueError if they cannot be split evenly."""
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


def _settings(
    strategies: Sequence[str],
    accumulation: Sequence[int],
    rows: int,
    devices: int,
    local_batch: bool,
) -> Iterator[Setting]:
    """Yields the settings; simpler ones first, as causes are inferred from earlier rows."""
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
