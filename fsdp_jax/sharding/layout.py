"""The waist: where every array of the training state lies, and why. What is above takes a Layout,
no ambient mesh.
"""

import warnings
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax.errors import human_bytes
from fsdp_jax.sharding.mesh import known_spec, shape_of, shards_of
from fsdp_jax.sharding.optimizer_state import optimizer_placements
from fsdp_jax.sharding.rules import Placement, ReplicationWarning, Rules
from fsdp_jax.sharding.strategy import Strategy
from fsdp_jax.tables import html_table, text_table
from fsdp_jax.tree import SEPARATOR, PyTree, flatten, map_with_path, unflatten

COLUMNS = ("part", "path", "shape", "dtype", "spec", "per device", "rule", "reason")
COPIES = "copies"  # the part of the rest that holds them
Part = Literal["params", "optimizer", "other"]


@dataclass(frozen=True)
class Leaf:
    """One array of the state: where it lies at rest, by which rule, for which reason.

    Attributes:
        spec: at rest.
        grad_spec: for a parameter, how its gradient is reduced and the optimizer works on it; sharded
            under `zero1` too.
        undivided: the parts it would have if a dim divided; 1 where it is as the strategy wants it.

    """

    path: str
    part: Part
    shape: tuple[int, ...]
    dtype: np.dtype
    spec: PartitionSpec
    grad_spec: PartitionSpec
    rule: str
    reason: str
    mesh: Mesh
    trainable: bool = True
    stacked: int = 0
    undivided: int = 1

    @property
    def sharding(self) -> NamedSharding:
        """At rest."""
        return NamedSharding(self.mesh, self.spec)

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    @property
    def bytes(self) -> int:
        """Of the whole array."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def bytes_per_device(self) -> int:
        """At rest, on each device."""
        return self.bytes // prod(shards_of(self.mesh, entry) for entry in self.spec)

    @property
    def wasted(self) -> int:
        """Bytes on each device that are there because no dim divides."""
        return self.bytes - self.bytes // self.undivided

    @property
    def replicated(self) -> bool:
        """Whole on every device."""
        return self.bytes_per_device == self.bytes


@dataclass(frozen=True)
class Layout:
    """Every leaf of the state: parameters, optimizer state, and the rest. `print(layout)` shows it.

    Attributes:
        params: nested dicts of Leaf, in the model's own paths.
        optimizer: the optax state's tree, of Leaf.
        other: what else a step carries: model state such as batch statistics, counters, random
            keys.

    """

    mesh: Mesh
    strategy: Strategy
    params: PyTree
    optimizer: PyTree
    other: PyTree

    def __iter__(self) -> Iterator[Leaf]:
        return iter(jax.tree.leaves((self.params, self.optimizer, self.other)))

    @cached_property
    def by_path(self) -> dict[str, Leaf]:
        """{path: Leaf} of the parameters."""
        return flatten(self.params)

    def total(self, part: Part | None = None) -> int:
        """Bytes of the state, counted once."""
        return sum(leaf.bytes for leaf in self if part in (None, leaf.part))

    def per_device(self, part: Part | None = None) -> int:
        """Bytes of the state on each device at rest."""
        return sum(leaf.bytes_per_device for leaf in self if part in (None, leaf.part))

    def trainable(self, tree: PyTree) -> PyTree:
        """The part of a tree of parameters that is trained."""
        return unflatten(
            {path: leaf for path, leaf in flatten(tree).items() if self.by_path[path].trainable}
        )

    def rows(self) -> list[tuple[str, ...]]:
        """A row per leaf; within each part, what takes most of a device first."""
        order = {"params": 0, "optimizer": 1, "other": 2}
        leaves = sorted(
            self, key=lambda leaf: (order[leaf.part], -leaf.bytes_per_device, leaf.path)
        )
        return [
            (
                leaf.part,
                leaf.path,
                str(leaf.shape).replace(" ", ""),
                str(leaf.dtype),
                str(known_spec(self.mesh, leaf.spec)).replace("PartitionSpec", "P"),
                human_bytes(leaf.bytes_per_device),
                leaf.rule,
                f"{leaf.reason}, {human_bytes(leaf.wasted)} more on every device"
                if leaf.wasted
                else leaf.reason,
            )
            for leaf in leaves
        ]

    def summary(self) -> str:
        """One line: strategy, mesh, bytes per device against replicated."""
        mesh = " x ".join(f"{name}={size}" for name, size in shape_of(self.mesh).items())
        held, whole = self.per_device(), self.total()
        return (
            f"{self.strategy.name} on {mesh}: {human_bytes(held)} of state per device "
            f"({human_bytes(whole)} replicated, {whole / max(held, 1):.2f}x)"
        )

    def __str__(self) -> str:
        return f"{self.summary()}\n{text_table(COLUMNS, self.rows())}"

    def __repr__(self) -> str:
        return f"<Layout: {self.summary()}>"

    def _repr_html_(self) -> str:
        return html_table(COLUMNS, self.rows(), caption=self.summary())


def make_layout(
    params: PyTree,
    placements: dict[str, Placement],
    other: PyTree,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    strategy: Strategy,
    rules: Rules,
    *,
    stacked: dict[str, int],
    trainable: Callable[[str], bool],
    copied: Container[str] = (),
) -> Layout:
    """Lays out a state that exists only as shapes.

    Args:
        params: abstract parameters as they rest, nested dicts.
        placements: path -> where the rules put it.
        other: abstract rest of the state.
        tx: the optimizer.
        mesh: checked by the caller.
        strategy: what is sharded.
        rules: their heuristic, for optimizer state that follows no parameter.
        stacked: path -> leading dims that stack layers.
        trainable: path -> whether it gets gradients and optimizer state.
        copied: paths of parameters that are sharded at rest though the strategy replicates them,
            since `other` holds a whole copy to compute with.

    Warns:
        ReplicationWarning: large leaves that stay whole because no dim divides, with the bytes it
            costs.

    """
    whole = {
        p: replace(at, spec=PartitionSpec(), reason=f"{strategy.name} replicates it", undivided=1)
        for p, at in placements.items()
    }
    rest = {
        p: at if strategy.shards_params or p in copied else whole[p] for p, at in placements.items()
    }
    work = placements if strategy.shards_optimizer else whole

    def param(path: str, leaf: Any) -> Leaf:
        return _leaf(
            "params",
            path,
            leaf,
            mesh,
            rest[path],
            work[path].spec,
            trainable(path),
            stacked.get(path, 0),
        )

    laid = map_with_path(param, params)
    trained = {
        p: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for p, leaf in flatten(laid).items()
        if leaf.trainable
    }
    abstract, placed = optimizer_placements(
        tx, unflatten(trained), {p: work[p] for p in trained}, rules, mesh
    )

    def plain(part: Part) -> Callable[..., Leaf]:
        return lambda path, leaf, at: _leaf(part, path, leaf, mesh, at, at.spec)

    def small(path: str, _: Any) -> Placement:
        copy = path.startswith(COPIES + SEPARATOR)
        return Placement(
            PartitionSpec(),
            "state",
            f"what {strategy.name} computes with" if copy else "small state is replicated",
        )

    layout = Layout(
        mesh,
        strategy,
        laid,
        map_with_path(plain("optimizer"), abstract, placed),
        map_with_path(plain("other"), other, map_with_path(small, other)),
    )
    _warn_of_waste(layout)
    return layout


def _leaf(
    part: Part,
    path: str,
    leaf: Any,
    mesh: Mesh,
    at: Placement,
    grad_spec: PartitionSpec,
    trainable: bool = True,
    stacked: int = 0,
) -> Leaf:
    shape = tuple(leaf.shape)
    return Leaf(
        path,
        part,
        shape,
        leaf.dtype,
        at.spec,
        grad_spec,
        at.rule,
        at.reason,
        mesh,
        trainable,
        stacked,
        at.undivided,
    )


def _warn_of_waste(layout: Layout) -> None:
    wasted = [leaf for leaf in layout if leaf.wasted]
    if wasted:
        largest = max(wasted, key=lambda leaf: leaf.wasted)
        total = human_bytes(sum(leaf.wasted for leaf in wasted))
        warnings.warn(
            f"{len(wasted)} arrays stay replicated, {total} more on every device than if they were sharded; "
            f"the largest is {largest.part} '{largest.path}' {largest.shape}: {largest.reason}",
            ReplicationWarning,
            stacklevel=4,  # the caller of fully_shard
        )
