"""The plan of one parameter's communication."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from fsdp_jax.errors import ArgumentError
from fsdp_jax.sharding.mesh import MeshAxes, axes_of, shards_of, spec_axes
from fsdp_jax.units import float8
from fsdp_jax.units.gather_transform import GatherTransform, QuantizedGather

Mode = Literal["annotated", "explicit"]
"""By sharding annotations, or by explicit collectives; see the note in `units.collectives`."""
AxesAtOnce = Literal["all", "one", "sparse_cores"]
"""The mesh axes of one collective, where a dim is sharded along several.

On a TPU's torus `one`, or as many as its SparseCores take, which run several collectives during
compute; elsewhere `all`. See the note in `sharding.mesh`.
"""
# The most devices of one collective on SparseCores. XLA replaces an all-gather over 64 devices by
# an all-reduce, which sends twice the bytes: on v5p:4x4x4 for any size, on v6e:8x8 and v6e:16x16
# for at most 16 MiB.
MOST_AT_ONCE = 32


def gathered_bytes(
    shape: tuple[int, ...], dtype: np.dtype, spec: PartitionSpec, axes: MeshAxes
) -> int:
    """Counts a device's bytes of a parameter that was gathered along the batch axes.

    `spec`: of what is gathered; 0 if they do not shard it. What the model's own mesh axes shard
    stays sharded.
    """
    if shards_of(axes.mesh, axes.batch_spec_axes(spec)) == 1:
        return 0
    shards = shards_of(axes.mesh, spec_axes(axes.model_spec(spec)))
    return prod(shape) * np.dtype(dtype).itemsize // shards


@dataclass(frozen=True)
class ParamComm:
    """How one parameter is gathered, and how its gradient is reduced."""

    path: str
    unit: str | None  # path of the module that gathers it; None: as the model is entered
    shape: tuple[int, ...]  # of the parameter; inside a layer scan the leading dims are gone
    axes: MeshAxes
    shard_spec: PartitionSpec  # of what is gathered: the parameter, or its copy to compute with
    grad_spec: PartitionSpec  # how its gradient is sharded
    transform: GatherTransform  # the casts around gather and reduction
    mode: Mode
    stacked: int = 0  # leading dims of the stored array that stack layers
    axes_at_once: AxesAtOnce = "all"
    in_loop: bool = False  # it is gathered in a loop over layers or microbatches
    trained: bool = True  # it has a gradient
    on_host: bool = False  # what is gathered is in host memory: brought to the device first
    deferred: bool = False  # its gradient is reduced once, after the last microbatch, not here
    already_gathered: bool = False  # once for the whole step; the unit uses it as it is
    keeps: int = 0  # layers of it, the last that run, that stay gathered; see `keep_gathered`
    float8_matmuls: bool = False  # the matmuls that take it run in float8
    int8_scatter: bool = False  # its gradient is scattered in int8, by all-to-alls: `int8_blocks`
    model: str = ""  # name of the other model that it is of, which `path` begins with; see `others`

    @property
    def traced_whole(self) -> bool:
        """Whether the model is traced with a full-shape array for it; see `units.shard_reads`.

        This is so with local batches, where a use outside its unit must be found, for an array in
        host memory, and for a quantized one.
        """
        held_otherwise = self.on_host or self.is_quantized
        return self.mode == "explicit" or (held_otherwise and not self.already_gathered)

    @property
    def is_quantized(self) -> bool:
        """Whether it is stored in 4 or 8 bits, and its gather dequantizes it."""
        return isinstance(self.transform, QuantizedGather)

    @property
    def multiplied_as_sent(self) -> bool:
        """Whether matmuls take it in float8 as it arrives, without a cast to the compute dtype."""
        in_float8 = self.float8_matmuls and self.transform.wire == float8.WEIGHT
        is_same = self.transform.compute.name in float8.HOLD_SCALED  # as the cast parameter
        return in_float8 and is_same and not self.already_gathered

    @property
    def ndim(self) -> int:
        """The number of dims of the parameter."""
        return len(self.shape)

    @property
    def layers(self) -> int:
        """The number of layers in the stored array; 1 where it is no stack."""
        return prod(self.shape[: self.stacked])

    @property
    def kept(self) -> bool:
        """Whether what it gathers stays for the backward pass, in all of its layers."""
        return self.keeps >= self.layers

    @property
    def keeps_some(self) -> bool:
        """Whether what it gathers stays in some of its layers, but not in all."""
        return 0 < self.keeps < self.layers

    def keeping(self, keeps: bool) -> "ParamComm":
        """Plans the same for layers all of which stay gathered, or none."""
        return replace(self, keeps=keeps * self.layers)

    @property
    def mesh(self) -> Mesh:
        """The mesh that it is sharded over."""
        return self.axes.mesh

    @property
    def kept_bytes(self) -> int:
        """A device's bytes of the copies that stay gathered; in float8 they need fewer."""
        whole = gathered_bytes(self.shape, self.transform.compute, self.shard_spec, self.axes)
        return whole // self.layers * self.keeps

    def sliced_spec(self, spec: PartitionSpec, ndim: int) -> PartitionSpec:
        """Drops the stacked dims from `spec`, for a slice of the stored array with `ndim` dims.

        A layer scan sliced the leading dims away. Raises ValueError if one of those is sharded.
        """
        entries = [*spec, *[None] * (self.ndim - len(spec))]
        removed = self.ndim - ndim
        assert removed >= 0, f"{self.path}: {ndim} dims, of {self.ndim} that are stored"
        if any(entries[:removed]):
            raise ArgumentError(
                "a scan or vmap over layers slices a sharded dim",
                where=self.path,
                expected="layers along the first dim, which is not sharded",
                got=spec,
                fix=(
                    "name the stack, stacked=('path',), or give the parameter a rule that shards "
                    "another dim"
                ),
            )
        return PartitionSpec(*entries[removed:])

    @property
    def other_axes(self) -> tuple[str, ...]:
        """Batch axes of several devices along which its gradient is summed and not scattered."""
        scattered = spec_axes(self.grad_spec)
        return tuple(
            axis for axis in self.axes.batch if axis not in scattered and self.mesh.shape[axis] > 1
        )

    @property
    def reduced_in_two(self) -> bool:
        """Whether its gradient is scattered along some mesh axes and then summed along others."""
        if self.deferred:
            return False
        scattered = self.axes.batch_spec_axes(self.grad_spec)
        return bool(self.other_axes) and shards_of(self.mesh, scattered) > 1

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Tells whether an array of this shape may be the parameter, or a layer of its stack.

        Nested scans slice several dims away, including some that are not known to stack layers.
        """
        is_slice = 0 < len(shape) < self.ndim and shape == self.own_shape(len(shape))
        return is_slice or shape in (self.shape, self.shape[self.stacked :])

    def own_shape(self, ndim: int) -> tuple[int, ...]:
        """Computes the shape, without padding, of a slice of the parameter that has `ndim` dims."""
        return self.shape[self.ndim - ndim :]

    def axes_per_collective(self, entry: Any) -> list[tuple[str, ...]]:
        """Lists the mesh axes of each collective along one dim, in the order of a scatter.

        SparseCores take as many mesh axes as `MOST_AT_ONCE` allows. `entry`: the dim's entry in a
        PartitionSpec.
        """
        axes = axes_of(entry)
        if self.axes_at_once == "one":
            return [(axis,) for axis in axes]
        if self.axes_at_once == "all":
            return [axes] if axes else []
        groups: list[tuple[str, ...]] = []
        for axis in axes:
            joined = (*groups[-1], axis) if groups else (axis,)
            if groups and prod(self.mesh.shape[each] for each in joined) <= MOST_AT_ONCE:
                groups[-1] = joined
            else:
                groups.append((axis,))
        return groups
