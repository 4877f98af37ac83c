"""Implements `Sharded.certify`: checks its arguments, and compares one setting after another."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from fsdp_jax.certify.certificate import Certificate, CertifyError, Row, Setting, Tolerance
from fsdp_jax.certify.comparison import Comparison
from fsdp_jax.certify.trials import make_trials
from fsdp_jax.errors import ArgumentError
from fsdp_jax.sharding.mesh import MeshAxes
from fsdp_jax.sharding.offload import NO_OFFLOAD, is_count
from fsdp_jax.sharding.strategy import STRATEGIES, Strategy, get_strategy
from fsdp_jax.tree import PyTree, flatten


@dataclass(frozen=True)
class CertifySettings:
    """The arguments of `Sharded.certify` beside the loss and the batch; it documents them."""

    strategies: Sequence[str | Strategy] | None
    accumulation: Sequence[int]
    local_batch: bool
    offloaded: bool
    trials: int
    batches: Sequence[PyTree]
    steps: int
    seed: int
    tolerance: Tolerance | None
    others: Mapping[str, Any] | None = None


def certify_sharded(
    sharded: Any, loss_fn: Callable[..., Any], batch: PyTree, settings: CertifySettings
) -> Certificate:
    """Implements `Sharded.certify`."""
    shards = _check_devices(sharded.layout.axes)
    rows = _check_rows(batch, shards, settings.accumulation)
    trials = settings.trials
    if not is_count(trials, least=0):
        raise ArgumentError("trials is a whole number, 0 or more", where="trials", got=trials)
    # The strategies: those that are asked for, or the model's own before all others. Others may
    # not fit the model or the mesh, and are then left out.
    own = sharded.layout.strategy
    resolved = [get_strategy(each) for each in settings.strategies or ()]
    asked = [strategy.name for strategy in resolved] or [own.name]
    if not resolved:
        resolved = [own, *(each for each in STRATEGIES.values() if each.name != own.name)]
    comparison = Comparison(
        sharded=sharded,
        loss_fn=loss_fn,
        trials=make_trials(
            jax.tree.map(np.asarray, batch), settings.batches, trials, settings.seed, shards
        ),
        strategies={strategy.name: strategy for strategy in resolved},
        asked=asked,
        steps=settings.steps,
        seed=settings.seed,
        tolerance=settings.tolerance,
        others=settings.others or {},
    )
    offload = sharded.arguments.offload != NO_OFFLOAD
    compared = _settings_to_compare(
        list(comparison.strategies), settings, rows, shards, offload=offload
    )
    certificate = _compare_settings(comparison, compared)
    if not certificate.holds:
        raise CertifyError(certificate)
    return certificate


def _compare_settings(comparison: Comparison, settings: Iterable[Setting]) -> Certificate:
    """Runs the settings, and certifies those that the devices and the model do not refuse."""
    rows: list[Row] = []
    with jax.default_matmul_precision("highest"):  # GPUs and TPUs would round float32 to fewer bits
        for setting in settings:
            row = comparison.compare_setting(setting, rows)
            if row is not None:
                rows.append(row)
    assert comparison.tolerance is not None, "the first setting decides it"
    return Certificate(
        rows=tuple(rows),
        devices=comparison.sharded.layout.mesh.size,
        steps=comparison.steps,
        tolerance=comparison.tolerance,
        batches=tuple(trial.name for trial in comparison.trials),
        left_out=tuple(dict.fromkeys(comparison.left_out)),
    )


def _check_devices(axes: MeshAxes) -> int:
    """Counts the shards that a mesh splits a batch into.

    Raises ValueError for one device alone, on which nothing is sharded, and for devices that
    another process has, or no process: one can compile for a topology, but nothing runs there.
    """
    devices = list(axes.mesh.devices.flat)
    if len(devices) < 2:
        raise ArgumentError(
            "nothing is sharded on one device",
            where="certify",
            got=len(devices),
            fix="fsdp_jax.launch.use_virtual_devices(8), before jax starts",
        )
    # Devices of a topology have a platform that this process may not even have.
    try:
        local = set(jax.local_devices(backend=devices[0].platform))
    except RuntimeError:  # no such platform
        local = set()
    absent = [device for device in devices if device not in local]
    if absent:
        raise ArgumentError(
            "certify runs steps, and not all devices of the mesh are of this process",
            where="mesh",
            got=absent[0],
            fix=(
                "sharded.on(fsdp_jax.make_mesh(devices=jax.local_devices())).certify(loss_fn, "
                "batch)"
            ),
        )
    return axes.batch_shards


def _check_rows(batch: PyTree, shards: int, accumulation: Sequence[int]) -> int:
    """Counts the rows of the batch; raises ValueError if it cannot be split evenly."""
    shapes = {path: np.shape(leaf) for path, leaf in flatten(batch).items()}
    rows = {path: next(iter(shape), None) for path, shape in shapes.items()}
    # Every microbatch of the largest accumulation has a row for each shard, at least.
    parts = shards * max(accumulation)
    first = next(iter(rows.values()), None)
    if first is None or first % parts or len(set(rows.values())) > 1:
        raise ArgumentError(
            "the batch cannot be split evenly",
            where="batch",
            expected=f"a multiple of {parts} rows: {shards} devices x accumulation "
            f"{max(accumulation)}",
            got=rows,
            fix="pass more rows, or accumulation=(1,)",
        )
    return first


def _settings_to_compare(
    strategies: Sequence[str], asked: CertifySettings, rows: int, shards: int, *, offload: bool
) -> Iterator[Setting]:
    """Yields the settings that are run; simpler ones first, as causes are inferred from these.

    `rows`: of the global batch; `offload`: the model is offloaded.
    """
    accumulation = asked.accumulation
    first = Setting(strategies[0], accumulation[0], rows)
    if asked.offloaded and offload:
        yield first
    for strategy in strategies:
        for number in accumulation:
            yield Setting(strategy, number, rows, offload=offload)
    if asked.offloaded and not offload:
        yield replace(first, offload=True)
    if not asked.local_batch:
        return
    # Local batches, of which one row on each device is a case of its own.
    for strategy in strategies:
        local = Setting(strategy, max(accumulation), rows, local_batch=True, offload=offload)
        for number in accumulation:
            yield replace(local, accumulation=number)
        if max(accumulation) > 1:
            yield replace(local, deferred_reduction=True)
    if rows > shards:
        yield Setting(strategies[0], 1, shards, True, one_row=True, offload=offload)
