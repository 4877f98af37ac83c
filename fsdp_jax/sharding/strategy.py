"""The strategies as data: what is sharded, along which axes, and when parameters are gathered.

The steps, layouts and contracts ask a `Strategy` questions, and the tests, benchmarks and pictures
enumerate the table: a new strategy is one row of it.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fsdp_jax.compat.jax_devices import slice_index
from fsdp_jax.errors import ArgumentError, SlowerWarning, did_you_mean
from fsdp_jax.processes import host_of
from fsdp_jax.sharding.mesh import (
    MeshAxes,
    axes_of,
    entry_of,
    shard_axes,
    shards_of,
    spec_axes,
    spec_of,
)
from fsdp_jax.sharding.rules import Placement


@dataclass(frozen=True)
class Strategy:
    """One row of the ZeRO table.

    Parameters are gathered once per `step`, per `unit` in forward and again in backward, or `never`
    before the forward pass (`zero1` gathers the updated ones).
    """

    name: str
    summary: str  # one line for tables and help
    aliases: tuple[str, ...] = ()
    shards_params: bool = True  # between steps
    shards_optimizer: bool = True  # and gradients are reduce-scattered
    gather: Literal["never", "step", "unit"] = "unit"
    hybrid: bool = False  # shards along the data axes alone, replicates along those of replicas
    # A hybrid strategy that shards the optimizer state along the replica axes too: each replica
    # updates its part of a shard, and gathers the others' after the update.
    updates_over_replicas: bool = False

    @property
    def gathers_params(self) -> bool:
        """Whether the model is run with gathered parameters, instead of replicated ones."""
        return self.gather != "never"

    @property
    def gathers_per_unit(self) -> bool:
        """Whether parameters are gathered unit by unit, instead of once per step."""
        return self.gather == "unit"

    @property
    def gathers_updates(self) -> bool:
        """Whether parameters are replicated and updated in shards, which are then gathered."""
        return self.shards_optimizer and not self.gathers_params

    def shard_axes(self, axes: MeshAxes) -> tuple[str, ...]:
        """Selects the mesh axes that state is sharded along.

        Axes of size one are left out, unless there are no others.
        """
        return shard_axes(axes.mesh, axes.data, () if self.hybrid else axes.replica)

    def param_placement(
        self, placement: Placement, axes: MeshAxes, *, has_copy: bool = False
    ) -> Placement:
        """Decides how a parameter is stored between steps, given the placement by the rules.

        `has_copy`: the step computes with a replicated copy of it, so that itself it is sharded.
        """
        return placement if self.shards_params or has_copy else self._replicated(placement, axes)

    def grad_placement(self, placement: Placement, axes: MeshAxes) -> Placement:
        """Decides how a parameter's gradient is reduced.

        `placement`: of the parameter, by the rules.
        """
        return placement if self.shards_optimizer else self._replicated(placement, axes)

    def update_placement(
        self, placement: Placement, axes: MeshAxes, shape: Sequence[int], stacked: int
    ) -> Placement:
        """Decides how the optimizer updates a parameter, which is how its state is sharded.

        `placement`: of the parameter, by the rules; `shape`: its own; `stacked`: its leading dims
        that stack layers.
        """
        if self.updates_over_replicas:
            return _over_replicas(placement, axes, shape, stacked)
        return self.grad_placement(placement, axes)

    def _replicated(self, placement: Placement, axes: MeshAxes) -> Placement:
        """Drops the batch axes from the placement; the model's own axes stay."""
        reason = f"{self.name} replicates it"
        spec = axes.model_spec(placement.spec)
        if spec:
            reason += f" along {axes.user_name(axes.batch)}"
        return replace(placement, spec=spec, reason=reason, missed_shards=1)

    def check_placements(self, placements: Mapping[str, Placement], axes: MeshAxes) -> None:
        """Raises ValueError where a hybrid strategy's placement shards along a replica axis."""
        for path, placement in placements.items():
            replicas = sorted(set(spec_axes(placement.spec)) & set(axes.replica))
            if self.hybrid and replicas:
                raise ArgumentError(
                    f"{self.name} replicates along '{replicas[0]}'",
                    where=f"{path}, by {placement.rule}",
                    got=placement.spec,
                    fix=f"use 'fsdp' or '{axes.user_data[0]}', or strategy full_shard",
                )

    def warn_of_one_replica(self, axes: MeshAxes) -> None:
        """Warns where a hybrid strategy has one replica, which shards over several hosts."""
        # The model's own axes may cross hosts: gathers do not go along them.
        row = tuple(slice(None) if a in axes.data else 0 for a in axes.mesh.axis_names)
        devices, kind = list(axes.mesh.devices[row].flat), "hosts"
        hosts = len(set(map(slice_index, devices)))
        if devices[0].platform == "tpu":  # a slice has fast links between its hosts
            kind = "TPU slices"
        elif hosts == 1:
            hosts = len(set(map(host_of, devices)))
        if self.hybrid and shards_of(axes.mesh, axes.replica) == 1 and hosts > 1:
            same, often = "full_shard", "for each unit in forward and backward"
            if not self.gathers_per_unit:
                same, often = "shard_grad_op", "in each step"
            text = f"{self.name} with one replica is {same}: parameters are gathered over the "
            text += f"network between {hosts} {kind}, {often}; make_mesh(replica={hosts}) "
            text += "(mesh.replica in a configuration) gathers them within one, and keeps "
            text += f"{hosts} times the state on each device; strategy='{same}' says that one "
            text += "replica is meant"
            warnings.warn(text, SlowerWarning, stacklevel=4)  # the caller of fully_shard


def _over_replicas(
    placement: Placement, axes: MeshAxes, shape: Sequence[int], stacked: int
) -> Placement:
    """Adds the replica axes to a placement, so that they split the device's own shard.

    They go behind the data axes of the last dim that those shard, or where that would pad, to the
    largest other dim that they divide; what is replicated stays so.
    """
    entries = [*placement.spec, *[None] * (len(shape) - len(placement.spec))]
    sharded = [dim for dim, entry in enumerate(entries) if set(axes_of(entry)) & set(axes.data)]
    replicas = tuple(axis for axis in axes.replica if axes.mesh.shape[axis] > 1)
    if not sharded or not replicas:
        return placement

    def divides(dim: int) -> bool:
        """Tells whether the replica axes divide what the others leave of a dim."""
        return shape[dim] % shards_of(axes.mesh, (*axes_of(entries[dim]), *replicas)) == 0

    # A padded dim has other shards than the parameter's: its gradient would be sent to fit them.
    chosen = sharded[-1]
    if not divides(chosen):
        others = [dim for dim in range(stacked, len(shape)) if divides(dim)]
        chosen = max(others, key=lambda dim: shape[dim], default=chosen)
    entries[chosen] = entry_of((*axes_of(entries[chosen]), *replicas))
    reason = f"{placement.reason}; updated in parts along {axes.user_name(replicas)}"
    return replace(placement, spec=spec_of(entries), reason=reason)


_TABLE = (
    Strategy(
        "no_shard",
        "everything replicated",
        ("ddp", "zero0"),
        shards_params=False,
        shards_optimizer=False,
        gather="never",
    ),
    Strategy("zero1", "optimizer state sharded", shards_params=False, gather="never"),
    Strategy("shard_grad_op", "all sharded, gathered once per step", ("zero2",), gather="step"),
    Strategy("full_shard", "all sharded, gathered unit by unit", ("zero3", "fsdp")),
    Strategy(
        "hybrid_shard", "full_shard over data, replicated over replica", ("hsdp",), hybrid=True
    ),
    Strategy(
        "hybrid_shard_zero2",
        "shard_grad_op over data, replicated over replica",
        gather="step",
        hybrid=True,
    ),
    Strategy(
        "hybrid_shard_optimizer",
        "hybrid_shard, with optimizer state sharded over data and replica",
        ("hfsdp",),
        hybrid=True,
        updates_over_replicas=True,
    ),
)
STRATEGIES = {strategy.name: strategy for strategy in _TABLE}
_BY_NAME = {name: strategy for strategy in _TABLE for name in (strategy.name, *strategy.aliases)}


def get_strategy(name: str | Strategy) -> Strategy:
    """Finds the strategy of that name or alias, in any case: `full_shard`, `ZERO3`, `fsdp`.

    Raises ValueError for another name, and proposes the nearest.
    """
    if isinstance(name, Strategy):
        return name
    if str(name).lower() in _BY_NAME:
        return _BY_NAME[str(name).lower()]
    raise ArgumentError(
        f"unknown strategy '{name}'",
        where="strategy",
        expected=", ".join(STRATEGIES),
        fix=did_you_mean(str(name), _BY_NAME),
    )
