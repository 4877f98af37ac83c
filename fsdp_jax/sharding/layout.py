"""The Layout: how every array of the training state is sharded, and why.

A step is built from a Layout, and never from the ambient mesh.
"""

import warnings
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax.errors import MissingPackageError, SlowerWarning, human_bytes
from fsdp_jax.host_memory import HOST
from fsdp_jax.sharding.mesh import MeshAxes, shards_of, spec_axes
from fsdp_jax.sharding.offload import NO_OFFLOAD, Offload, worth_sending
from fsdp_jax.sharding.optimizer_state import optimizer_placements
from fsdp_jax.sharding.padding import divisible_spec, pad, padded_shape, unpad
from fsdp_jax.sharding.quantized import Blocks, QuantizedStruct
from fsdp_jax.sharding.rules import LARGE_BYTES, MIN_SIZE, Placement, ReplicationWarning, Rules
from fsdp_jax.sharding.strategy import Strategy
from fsdp_jax.tables import html_table, text_table
from fsdp_jax.tree import SEPARATOR, PyTree, flatten, map_with_path, nest_like, suffixes
from fsdp_jax.views.layout_tree import LayoutTree, StateArray

COLUMNS = ("part", "path", "shape", "dtype", "spec", "per device", "rule", "reason")
# The entry of `Layout.other` with copies in the compute dtype: replicated under zero1, sharded
# where the master weights are in host memory.
COPIES = "copies"
MODEL_STATE = "model_state"  # the entry with the model's state that is no parameter
NOT_PLACED = "no rule or annotation places this state: replicated"
Part = Literal["params", "optimizer", "other"]
PARTS: tuple[Part, ...] = ("params", "optimizer", "other")


@dataclass(frozen=True)
class Leaf:
    """One array of the state: how it is sharded between steps, by which rule, and for which reason.

    For a parameter, `grad_spec` is how its gradient is reduced (sharded under `zero1` too), and
    `update_spec` how the optimizer updates it.
    """

    path: str
    part: Part
    shape: tuple[int, ...]
    dtype: np.dtype
    spec: PartitionSpec  # between steps
    grad_spec: PartitionSpec
    update_spec: PartitionSpec
    rule: str
    reason: str
    axes: MeshAxes
    trainable: bool = True
    stacked: int = 0
    missed_shards: int = 1  # as in `Placement`
    memory_kind: str | None = None  # between steps: `HOST`, or None for the device's memory
    # How it is stored in 4 or 8 bits: then `shape` and `dtype` are those of the stored bytes.
    blocks: Blocks | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh, of `axes`."""
        return self.axes.mesh

    @property
    def sharding(self) -> NamedSharding:
        """Its sharding between steps."""
        sharding = NamedSharding(self.axes.mesh, self.spec, memory_kind=self.memory_kind)
        if sharding.memory_kind == self.memory_kind or self.memory_kind is None:
            return sharding
        # GPUs that are only compiled for report no memories, and JAX silently drops the kind. A
        # mesh without devices keeps it.
        abstract = self.axes.mesh.abstract_mesh
        return NamedSharding(abstract, self.spec, memory_kind=self.memory_kind)

    @property
    def on_device(self) -> NamedSharding:
        """Its sharding between steps, but in device memory."""
        return NamedSharding(self.axes.mesh, self.spec)

    @property
    def divisible(self) -> NamedSharding:
        """Its sharding without padding: only along dims that are divisible."""
        return NamedSharding(self.mesh, divisible_spec(self.spec, self.shape, self.mesh))

    @property
    def model_sharding(self) -> NamedSharding:
        """The sharding of the array that the model sees: only along dims that are divisible."""
        return NamedSharding(self.mesh, divisible_spec(self.spec, self.model_shape, self.mesh))

    @property
    def grad_sharding(self) -> NamedSharding:
        """The sharding of its reduced gradient, in the device's memory."""
        return NamedSharding(self.axes.mesh, self.grad_spec)

    @property
    def update_sharding(self) -> NamedSharding:
        """The sharding by which the optimizer updates it, in the device's memory."""
        return NamedSharding(self.axes.mesh, self.update_spec)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in which it is stored: padded if its dims are not divisible."""
        return padded_shape(self.shape, self.spec, self.mesh, self._granules)

    @property
    def _granules(self) -> tuple[int, ...]:
        """For each dim, the elements that a shard must not cut."""
        return self.blocks.stored_granules if self.blocks else ()

    @property
    def model_shape(self) -> tuple[int, ...]:
        """The shape of the array that the model sees; `shape`, unless it is stored in blocks."""
        return self.blocks.shape if self.blocks else self.shape

    @property
    def is_padded(self) -> bool:
        """Whether its stored shape differs from its own."""
        return self.stored_shape != self.shape

    @property
    def grad_shape(self) -> tuple[int, ...]:
        """The shape to which its gradient is padded before it is scattered by `grad_spec`."""
        return padded_shape(self.shape, self.grad_spec, self.mesh, self._granules)

    @property
    def stored(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of the array that is stored."""
        return jax.ShapeDtypeStruct(self.stored_shape, self.dtype, sharding=self.sharding)

    @property
    def own(self) -> jax.ShapeDtypeStruct:
        """Its own shape, dtype and sharding; the sharding need not divide the shape."""
        if self.blocks:
            return QuantizedStruct(self.blocks, self.sharding)
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    @property
    def bytes(self) -> int:
        """Bytes of the unsharded array, without padding."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def on_host(self) -> bool:
        """Whether it is in host memory between steps."""
        return self.memory_kind == HOST

    @property
    def bytes_per_device(self) -> int:
        """Bytes of each device's part between steps, in device memory or in the host's."""
        stored = prod(self.stored_shape) * self.dtype.itemsize
        return stored // shards_of(self.axes.mesh, spec_axes(self.spec))

    @property
    def wasted_bytes(self) -> int:
        """Bytes on each device that sharding would save if its rule fitted."""
        return self.bytes - self.bytes // self.missed_shards

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds all of it."""
        return shards_of(self.axes.mesh, spec_axes(self.spec)) == 1

    @property
    def padding(self) -> str:
        """The padding added to its own elements, in words; empty if there is none."""
        if not self.is_padded:
            return ""
        more = prod(self.stored_shape) / prod(self.shape) - 1
        return f"stored as {_shape_text(self.stored_shape)}, {more:.1%} more; "

    def store(self, array: jax.Array) -> jax.Array:
        """Converts the model's array to the one that is stored: casts or quantizes it, and pads it.

        Within a jit.
        """
        own = self.blocks.encode(array) if self.blocks else array.astype(self.dtype)
        return self.pad(own)

    def load(self, stored: jax.Array) -> jax.Array:
        """Converts a stored array, in device memory, to the model's, sharded; within a jit."""
        if self.blocks is None:
            return self.unpad(stored)
        own = unpad(self.blocks.decode(stored), self.model_shape)
        return lax.with_sharding_constraint(own, self.on_device)

    def pad(self, array: jax.Array) -> jax.Array:
        """Pads an array of its own shape to the stored shape; within a jit."""
        return pad(array, self.stored_shape)

    def unpad(self, array: jax.Array) -> jax.Array:
        """Cuts a stored array, in device memory, to its own shape, sharded; within a jit."""
        if not self.is_padded:
            return array
        return lax.with_sharding_constraint(unpad(array, self.shape), self.on_device)

    def as_shown(self, kind: str = "") -> StateArray:
        """Describes it for a view; `kind` is `mu`, `nu` or `copy` where it belongs to another."""
        along = spec_axes(self.axes.user_spec(self.spec))
        *_, shown, _, rule, reason = self.cells()
        return StateArray(
            kind=kind,
            shape=self.shape,
            dtype=str(self.dtype),
            spec=shown + ", on the host" * self.on_host,
            axes=tuple(
                axis for axis, size in self.axes.shape.items() if axis in along and size > 1
            ),
            bytes=self.bytes_per_device,
            reason=f"{rule}: {reason}",
            stacked=self.shape[: self.stacked],
        )

    def cells(self) -> tuple[str, ...]:
        """Formats it as a row of the layout's table: the cells of `COLUMNS` without the part."""
        reason = self.padding + self.reason
        if self.blocks:
            reason = f"{self.blocks.text}; {reason}"
        if self.wasted_bytes:
            reason += f", {human_bytes(self.wasted_bytes)} more on every device"
        elif reason == NOT_PLACED:
            reason += f", {human_bytes(self.bytes)} on every device"
        return (
            self.path,
            _shape_text(self.shape),
            str(self.dtype),
            spec_text(self.axes.user_spec(self.spec)),
            human_bytes(self.bytes_per_device),
            self.rule,
            "in host memory; " * self.on_host + reason,
        )


@dataclass(frozen=True)
class Layout:
    """Every leaf of the state: parameters, optimizer state, the rest. `print(layout)` shows it.

    Attributes:
        axes: the mesh, and what its axes are for.
        strategy: what of the state is sharded.
        params: nested dicts of Leaf, in the model's own paths.
        optimizer: the optax state's tree, of Leaf.
        other: model state such as batch statistics, counters, random keys.
        units: what is gathered together, in words; empty where nothing is gathered by units.

    """

    axes: MeshAxes
    strategy: Strategy
    params: PyTree
    optimizer: PyTree
    other: PyTree
    units: str = ""

    def __iter__(self) -> Iterator[Leaf]:
        return iter(jax.tree.leaves((self.params, self.optimizer, self.other)))

    @property
    def mesh(self) -> Mesh:
        """The mesh, with Auto axes; the data axis may be split, see `sharding.mesh`."""
        return self.axes.mesh

    @cached_property
    def by_path(self) -> dict[str, Leaf]:
        """The leaves of the parameters, by path."""
        return flatten(self.params)

    @cached_property
    def base(self) -> str:
        """The format of the quantized parameters in one word; empty where there are none."""
        bases = (leaf.blocks.base.name for leaf in self.by_path.values() if leaf.blocks)
        return next(bases, "")

    def total(self, part: Part | None = None) -> int:
        """Counts the bytes of the unsharded state, or of one part of it."""
        return sum(leaf.bytes for leaf in self if part in (None, leaf.part))

    def per_device(self, part: Part | None = None, *, host: bool = False) -> int:
        """Counts the bytes of the state on each device between steps, or of one part of it.

        `host`: count instead the bytes in host memory, for each device.
        """
        leaves = [leaf for leaf in self if leaf.on_host == host]
        return sum(leaf.bytes_per_device for leaf in leaves if part in (None, leaf.part))

    def trainable(self, tree: PyTree) -> PyTree:
        """Selects the trained part of a tree of parameters, nested as in the model."""
        flat = flatten(tree)
        trained = {p: leaf for p, leaf in flat.items() if self.by_path[p].trainable}
        return nest_like(self.params, trained)

    def stacked_dims(self, leaf: Leaf) -> int:
        """Counts the leading dims of a leaf that stack layers.

        A moment or a copy has as many as its parameter, if it has its shape; the parameter's path
        is the end of its path.
        """
        owner = next((path for path in suffixes(leaf.path) if path in self.by_path), None)
        if owner is None or self.by_path[owner].shape != leaf.shape:
            return 0
        return self.by_path[owner].stacked

    def by_bytes(self, part: Part) -> list[Leaf]:
        """Lists the leaves of a part, those of most bytes per device first."""
        leaves = [leaf for leaf in self if leaf.part == part]
        return sorted(leaves, key=lambda leaf: (-leaf.bytes_per_device, leaf.path))

    def rows(self) -> list[tuple[str, ...]]:
        """Formats a row of cells per leaf, as `COLUMNS`: part by part, each as `by_bytes`."""
        return [(part, *leaf.cells()) for part in PARTS for leaf in self.by_bytes(part)]

    def summary(self) -> str:
        """Sums up in one line: strategy, mesh, bytes per device against replicated."""
        mesh = " x ".join(f"{name}={size}" for name, size in self.axes.shape.items())
        sharded, on_host = self.per_device(), self.per_device(host=True)
        replicated = self.total()
        beside = f", {human_bytes(on_host)} per device in host memory" if on_host else ""
        return (
            f"{self.strategy.name} on {mesh}: {human_bytes(sharded)} of state per device{beside} "
            f"({human_bytes(replicated)} replicated, {replicated / max(sharded + on_host, 1):.2f}x)"
        )

    def save(self, path: str | Path) -> None:
        """Writes the layout as a tree: a page, or text for `.txt`."""
        self.tree().save(path)

    def tree(self, *, reasons: bool = False) -> LayoutTree:
        """Shows the layout as a tree: `print` it, or `.save("layout.html")`; notebooks show it.

        Identical and stacked layers share a row, and moments are in their parameter's row.
        `reasons`: include them in the text; on a page, a click on a row shows its reason.
        """
        # a parameter first, then its moments and copies; all other arrays have their own rows
        owned = {path: [leaf.as_shown()] for path, leaf in self.by_path.items()}
        rest: dict[str, dict[str, tuple[StateArray, ...]]] = {"optimizer": {}, "other": {}}
        for leaf in self:
            # A moment or a copy is shown beside the parameter that it belongs to.
            owner = None
            if leaf.part != "other" or leaf.path.startswith(COPIES + SEPARATOR):
                owner = next((path for path in suffixes(leaf.path) if path in self.by_path), None)
            if leaf.part == "params":
                continue
            if owner is None:
                rest[leaf.part][leaf.path] = (leaf.as_shown(),)
            else:
                kind = leaf.path.removesuffix(owner).rstrip("/0123456789").split(SEPARATOR)[-1]
                owned[owner].append(leaf.as_shown(kind or "state"))
        note = f"{human_bytes(self.total())} replicated"
        state = sum(leaf.bytes_per_device for leaf in self)
        cards = [("state", human_bytes(state), note)]
        for part in PARTS:
            here, host = self.per_device(part), self.per_device(part, host=True)
            note = f"{human_bytes(host)} of it in host memory" if host else ""
            cards.append((part, human_bytes(here + host), note))
        return LayoutTree(
            summary=self.summary(),
            cards=cards,
            axes=self.axes.shape,
            sections={
                "parameters": {path: tuple(arrays) for path, arrays in owned.items()},
                "other optimizer state": rest["optimizer"],
                "other state": rest["other"],
            },
            footer=[f"units: {self.units}"] if self.units else [],
            reasons=reasons,
        )

    def __str__(self) -> str:
        units = f"\nunits: {self.units}" if self.units else ""
        return f"{self.summary()}\n{text_table(COLUMNS, self.rows())}{units}"

    def __repr__(self) -> str:
        return f"<Layout: {self.summary()}>"

    def _repr_html_(self) -> str:
        try:
            return self.tree()._repr_html_()
        except MissingPackageError as error:  # a notebook without templates has the plain table
            caption = f"{self.summary()}; for a tree: {error.fix}"
            return html_table(COLUMNS, self.rows(), caption=caption)


def spec_text(spec: PartitionSpec) -> str:
    """Formats a spec in short: `P(None, 'data')`."""
    return str(spec).replace("PartitionSpec", "P").replace(",)", ")")


def _shape_text(shape: tuple[int, ...]) -> str:
    return str(shape).replace(" ", "")


def make_layout(
    params: PyTree,
    placements: Mapping[str, Placement],
    other: PyTree,
    tx: optax.GradientTransformation,
    axes: MeshAxes,
    strategy: Strategy,
    rules: Rules,
    *,
    stacked: Mapping[str, int],
    frozen: Container[str] = (),
    copied: Container[str] = (),
    units: str = "",
    state: Mapping[str, Placement] = MappingProxyType({}),
    offload: Offload = NO_OFFLOAD,
    blocks: Mapping[str, Blocks] = MappingProxyType({}),
) -> Layout:
    """Plans the layout of a state that exists only as shapes.

    `params` are nested dicts of shapes, in their storage dtypes, and `other` is the rest of the
    state. `placements` has the placement of each parameter and, if a rule or an annotation names
    it, of the model's other `state`, both by path. The heuristic of `rules` serves optimizer state
    that follows no parameter. `frozen` parameters have no optimizer state. For `copied` parameters,
    `other` has a copy to compute with: the parameters are sharded even if the strategy replicates
    them. `stacked` has the number of leading dims that stack layers, by path. `blocks` has the
    parameters that are stored in 4 or 8 bits, whose shapes in `params` are those of the bytes.

    A ReplicationWarning reports large leaves, other than parameters, that stay replicated because
    nothing places them or a rule for parameters does not fit, with the bytes this costs.
    """
    # Parameters: how the optimizer updates them, and how they are stored between steps.
    shapes = {path: array.shape for path, array in flatten(params).items()}
    updated = {
        path: strategy.update_placement(place, axes, shapes[path], stacked.get(path, 0))
        for path, place in placements.items()
    }

    def param_leaf(path: str, array: Any) -> Leaf:
        """Makes the leaf of a parameter: under zero1 it is stored and updated differently."""
        has_copy = path in copied and strategy.gathers_updates
        stored = strategy.param_placement(placements[path], axes, has_copy=has_copy)
        leaf = _make_leaf(axes, "params", path, array, stored)
        trainable, layers = path not in frozen, stacked.get(path, 0)
        return replace(
            leaf,
            blocks=blocks.get(path),
            grad_spec=strategy.grad_placement(placements[path], axes).spec,
            update_spec=updated[path].spec,
            trainable=trainable,
            stacked=layers,
        )

    # Optimizer state follows the parameters as they are updated.
    trained = {path: array for path, array in flatten(params).items() if path not in frozen}
    abstract, optimizer = optimizer_placements(
        tx, nest_like(params, trained), {path: updated[path] for path in trained}, rules, axes.mesh
    )

    # The rest: copies to compute with, the model's own state, small counters.
    def other_leaf(path: str, array: Any) -> Leaf:
        """Makes the leaf of a copy to compute with, of state placed by a rule, or other state."""
        part, _, name = path.partition(SEPARATOR)
        placement = Placement(PartitionSpec(), "state", "small state is replicated")
        if part == COPIES:
            spec = strategy.param_placement(placements[name], axes).spec
            placement = Placement(spec, "state", f"{strategy.name} computes with this copy")
        elif part == MODEL_STATE and name in state:
            placement = strategy.param_placement(state[name], axes)
            is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
            if is_key and padded_shape(array.shape, placement.spec, axes.mesh) != array.shape:
                reason = "random keys cannot be padded: replicated"
                placement = replace(placement, spec=PartitionSpec(), reason=reason)
        elif prod(array.shape) >= rules.min_size:
            placement = replace(placement, reason=NOT_PLACED)
        return _make_leaf(axes, "other", path, array, placement)

    layout = Layout(
        axes=axes,
        strategy=strategy,
        params=map_with_path(param_leaf, params),
        optimizer=map_with_path(partial(_make_leaf, axes, "optimizer"), abstract, optimizer),
        other=map_with_path(other_leaf, other),
        units=units,
    )
    # Move leaves to host memory, and warn of leaves that are larger than they should be.
    layout = _offload_leaves(layout, offload, rules.min_size)
    _warn_of_replicated(layout, rules)
    return layout


def _make_leaf(axes: MeshAxes, part: Part, path: str, array: Any, placement: Placement) -> Leaf:
    """Makes the Leaf of an array or shape by its placement; its gradient gets the same sharding."""
    return Leaf(
        path=path,
        part=part,
        shape=tuple(array.shape),
        dtype=array.dtype,
        spec=placement.spec,
        grad_spec=placement.spec,
        update_spec=placement.spec,
        rule=placement.rule,
        reason=placement.reason,
        axes=axes,
        missed_shards=placement.missed_shards,
    )


def _offload_leaves(layout: Layout, offload: Offload, min_size: int) -> Layout:
    """Sets the memory kind of the leaves of a layout that are kept in host memory.

    Leaves that are not `worth_sending` stay on the device; `min_size` is its argument.
    """
    if not offload.state:
        return layout
    of_params = {leaf.path for leaf in layout if leaf.part == "params"}

    def is_large(leaf: Leaf) -> bool:
        """Decides whether to send a leaf; of what all updates read, as Muon's, not a small one."""
        of_param = leaf.part != "optimizer" or any(
            path in of_params for path in suffixes(leaf.path)
        )
        least = min_size
        if not of_param:
            least = max(min_size, MIN_SIZE)
        return worth_sending(leaf.shape, layout.stacked_dims(leaf), least)

    large = [leaf for leaf in layout if is_large(leaf)]
    # All parameters, with their copies.
    chosen: list[Leaf] = []
    if offload.params:
        copies = COPIES + SEPARATOR
        chosen += [leaf for leaf in large if leaf.part == "params"]
        chosen += [leaf for leaf in large if leaf.part == "other" and leaf.path.startswith(copies)]
    # Take the largest optimizer state first, until the fraction is reached.
    remaining = offload.optimizer * layout.total("optimizer")
    moments = [leaf for leaf in large if leaf.part == "optimizer"]
    for leaf in sorted(moments, key=lambda leaf: (-leaf.bytes, leaf.path)):
        if remaining > 0:
            chosen.append(leaf)
            remaining -= leaf.bytes
    if not chosen:
        why = f"no array has {min_size} elements in a layer (min_size)"
        if not (offload.params or moments):
            why = f"the optimizer has no state with {min_size} elements in a layer (min_size)"
        what = f"offload keeps nothing in host memory: {why}"
        warnings.warn(what, SlowerWarning, stacklevel=5)  # the caller of fully_shard
    places = {(leaf.part, leaf.path) for leaf in chosen}

    def with_kind(leaf: Leaf) -> Leaf:
        return replace(leaf, memory_kind=HOST) if (leaf.part, leaf.path) in places else leaf

    parts = (layout.params, layout.optimizer, layout.other)
    params, optimizer, other = jax.tree.map(with_kind, parts)
    return replace(layout, params=params, optimizer=optimizer, other=other)


def _warn_of_replicated(layout: Layout, rules: Rules) -> None:
    """Warns of leaves that stay replicated because no rule fits, or none places large state."""
    wasteful = [leaf for leaf in layout if leaf.wasted_bytes]
    if wasteful:
        largest = max(wasteful, key=lambda leaf: leaf.wasted_bytes)
        total = human_bytes(sum(leaf.wasted_bytes for leaf in wasteful))
        warnings.warn(
            f"{len(wasteful)} arrays stay replicated, {total} more on every device than if they "
            f"were sharded; the largest is {largest.part} '{largest.path}' {largest.shape}: "
            f"{largest.reason}",
            ReplicationWarning,
            stacklevel=5,  # the caller of fully_shard
        )
    unplaced = [leaf for leaf in layout if leaf.reason == NOT_PLACED]
    others = sum(leaf.bytes for leaf in unplaced)
    would_shard = layout.strategy.shards_params and shards_of(layout.mesh, rules.axes) > 1
    if would_shard and others >= LARGE_BYTES:
        largest = max(unplaced, key=lambda leaf: leaf.bytes)
        path = largest.path.removeprefix(MODEL_STATE + SEPARATOR)
        warnings.warn(
            f"{human_bytes(others)} of the model's other state is replicated on every device; the "
            f"largest is '{path}' {largest.shape}: a rule such as ('{path}', ('fsdp',)) shards it "
            "between steps",
            ReplicationWarning,
            stacklevel=5,  # the caller of fully_shard
        )
