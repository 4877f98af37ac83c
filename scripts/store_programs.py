"""Compiles the programs that tests read, and stores them.

Needs the extras `cuda-aot` and `tpu-aot`, but no accelerator. There are two kinds:

- Steps of the library (`tests/stored_steps.py`), with XLA's memory reports, in `tests/programs`.
  A test names those to store again, where the library or XLA has changed.
- Small programs by hand, which `tests/hlo/test_parser.py` reads, in `tests/hlo/programs`. Run it
  again when a release of XLA prints something new; then derive that test's expectations again.
"""

import argparse
import gzip
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fsdp_jax.planner.machines.topology import parse_topology

LAYERS = 3
TESTS = Path(__file__).parent.parent / "tests"
PROGRAMS = TESTS / "hlo" / "programs"

Weights = dict[str, jax.Array]


class Size(NamedTuple):
    """An MLP's width and hidden width, and the tokens per device."""

    width: int
    hidden: int
    tokens: int


SMALL = Size(1024, 4096, 256)
LARGE = Size(4096, 16384, 2048)  # at this size a v5p's matmuls are windowed


def gathered(
    axes: Sequence[str], path: str, replica: Sequence[str]
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that all-gathers a shard, one axis at a time.

    Its gradient is reduce-scattered along the same axes and all-reduced over `replica`.
    """

    def gather(shard: jax.Array) -> jax.Array:
        with jax.named_scope(f"fsdp.gather[{path}]"):
            for axis in reversed(axes):
                shard = lax.all_gather(shard, axis, tiled=True)
            return shard

    def reduce(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        with jax.named_scope(f"fsdp.reduce[{path}]"):
            for axis in axes:
                gradient = lax.psum_scatter(gradient, axis, tiled=True)
            return (lax.psum(gradient, replica) if replica else gradient,)

    with_reduction = jax.custom_vjp(gather)
    with_reduction.defvjp(lambda shard: (gather(shard), None), reduce)
    return with_reduction


def mapped(mesh: Mesh, axes: Sequence[str], size: Size) -> jax.stages.Lowered:
    """Lowers a scanned MLP by hand: weights gathered twice a step, gradients scattered."""
    replica = [str(name) for name in mesh.axis_names if name not in axes]
    up, down = (gathered(axes, f"blocks/mlp/{name}/kernel", replica) for name in ("up", "down"))

    @jax.checkpoint
    def layer(x: jax.Array, shards: Weights) -> jax.Array:
        up_kernel = up(shards["up"].astype(jnp.bfloat16))
        down_kernel = down(shards["down"].astype(jnp.bfloat16))
        return x + jax.nn.relu(x @ up_kernel) @ down_kernel

    def loss(shards: Weights, x: jax.Array) -> jax.Array:
        y, _ = lax.scan(lambda x, shards: (layer(x, shards), None), x, shards)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    def step(shards: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
        value, gradients = jax.value_and_grad(loss)(shards, x)
        updated = jax.tree.map(lambda shard, gradient: shard - 0.1 * gradient, shards, gradients)
        return lax.pmean(value, mesh.axis_names), updated

    specs = {"up": PartitionSpec(None, tuple(axes)), "down": PartitionSpec(None, tuple(axes))}
    batch = PartitionSpec(tuple(mesh.axis_names))
    ours = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, batch),
        out_specs=(PartitionSpec(), specs),
        check_vma=False,
    )
    return jax.jit(ours).lower(*arguments(mesh, specs["up"], batch, size))


def annotated(mesh: Mesh, axes: Sequence[str], size: Size) -> jax.stages.Lowered:
    """Lowers the same MLP by sharding annotations: the partitioner chooses the collectives."""
    shard, batch = PartitionSpec(None, tuple(axes)), PartitionSpec(tuple(mesh.axis_names))

    def loss(weights: Weights, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: Weights) -> tuple[jax.Array, None]:
            up, down = (weights[name].astype(jnp.bfloat16) for name in ("up", "down"))
            x = x + jax.nn.relu(x @ up) @ down
            return lax.with_sharding_constraint(x, NamedSharding(mesh, batch)), None

        return jnp.mean(jnp.square(lax.scan(layer, x, weights)[0].astype(jnp.float32)))

    def step(weights: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return value, jax.tree.map(
            lambda weight, gradient: weight - 0.1 * gradient, weights, gradients
        )

    placed = {name: NamedSharding(mesh, shard) for name in ("up", "down")}
    out = (NamedSharding(mesh, PartitionSpec()), placed)
    return jax.jit(step, out_shardings=out).lower(*arguments(mesh, shard, batch, size))


def arguments(
    mesh: Mesh, shard: PartitionSpec, batch: PartitionSpec, size: Size
) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    placed = partial(jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=NamedSharding(mesh, shard))
    weights = {
        "up": placed((LAYERS, size.width, size.hidden)),
        "down": placed((LAYERS, size.hidden, size.width)),
    }
    shape = (size.tokens * mesh.size, size.width)
    tokens = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, batch))
    return weights, tokens


def exchanges(mesh: Mesh, axes: Sequence[str], size: Size) -> jax.stages.Lowered:
    """Lowers nested loops with an all-to-all and a permute, a branch, and two dtypes gathered."""
    axis, devices = axes[0], mesh.shape[axes[0]]

    def local(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            x = lax.all_to_all(x, axis, 0, 0, tiled=True) + 1
            return lax.ppermute(x, axis, [(i, (i + 1) % devices) for i in range(devices)]) * 2, None

        x, _ = lax.scan(
            lambda x, _: (lax.scan(inner, x, None, length=5)[0], None), x, None, length=2
        )
        x = lax.cond(x[0, 0] > 0, lambda x: lax.psum(x, axis), lambda x: x - 1, x)
        return (
            x,
            lax.all_gather(x.astype(jnp.bfloat16), axis, tiled=True),
            lax.all_gather(ids, axis, tiled=True),
        )

    spec, replicated = PartitionSpec(axis), PartitionSpec()
    out_specs = (spec, replicated, replicated)
    ours = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, spec), out_specs=out_specs, check_vma=False
    )
    shapes = ((size.tokens, 128), jnp.float32), ((size.tokens,), jnp.int32)
    placed = (jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, spec)) for shape in shapes)
    return jax.jit(ours).lower(*placed)


class Stored(NamedTuple):
    """A program, its topology and XLA options; the weights are sharded along `axes`."""

    program: Callable[[Mesh, Sequence[str], Size], jax.stages.Lowered]
    topology: str
    mesh: dict[str, int]
    axes: tuple[str, ...]
    size: Size = SMALL
    options: dict[str, str | bool] | None = None


SPARSE_CORE: dict[str, str | bool] = {
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": False,
}
STORED = {
    "cpu_mapped": Stored(mapped, "cpu:8", {"data": 8}, ("data",)),
    "cpu_exchanges": Stored(exchanges, "cpu:8", {"replica": 2, "data": 4}, ("data",)),
    "h100_mapped": Stored(mapped, "h100:8", {"data": 8}, ("data",)),
    "h100_hybrid": Stored(mapped, "h100:8", {"replica": 2, "data": 4}, ("data",)),
    "h100_annotated": Stored(annotated, "h100:8", {"data": 8}, ("data",)),
    "h100_exchanges": Stored(exchanges, "h100:8", {"replica": 2, "data": 4}, ("data",)),
    "v5e_mapped": Stored(mapped, "v5e:4x4", {"data": 16}, ("data",)),
    "v5e_torus": Stored(mapped, "v5e:4x4", {"a": 4, "b": 4}, ("a", "b")),
    "v5e_pod": Stored(mapped, "v5e:16x16", {"a": 16, "b": 16}, ("a", "b")),
    "v5e_slices": Stored(mapped, "v5e:4x4*2", {"replica": 2, "data": 16}, ("data",)),
    "v5p_mapped": Stored(mapped, "v5p:2x2x2", {"data": 8}, ("data",)),
    "v5p_hybrid": Stored(mapped, "v5p:2x2x2", {"replica": 2, "data": 4}, ("data",)),
    "v5p_windowed": Stored(annotated, "v5p:2x2x2", {"data": 8}, ("data",), LARGE),
    "v6e_sparse_core": Stored(mapped, "v6e:2x4", {"data": 8}, ("data",), options=SPARSE_CORE),
}


def make_mesh(topology: str, shape: dict[str, int]) -> Mesh:
    """Returns a mesh whose axes follow the links of a torus; slices are along the first axis."""
    slices: dict[int, list[jax.Device]] = {}
    for device in parse_topology(topology).devices():
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    sizes = tuple(shape.values())
    inner = sizes if len(slices) == 1 else sizes[1:]
    parts = [
        mesh_utils.create_device_mesh(inner, part, allow_split_physical_axes=True)
        for part in slices.values()
    ]
    return Mesh(
        np.stack(parts).reshape(sizes), tuple(shape), axis_types=(AxisType.Auto,) * len(sizes)
    )


def without_sources(text: str) -> str:
    """Returns the text without its tables of source files, which name paths of the machine."""
    return re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", text)


def store(name: str, folder: Path) -> Path:
    """Compiles a small program by hand, and writes its text."""
    stored = STORED[name]
    mesh = make_mesh(stored.topology, stored.mesh)
    compiled = stored.program(mesh, stored.axes, stored.size).compile(
        compiler_options=stored.options
    )
    text = without_sources(compiled.as_text() or "")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.txt.gz"
    file.write_bytes(gzip.compress(text.encode(), mtime=0))
    return file


def main() -> None:
    sys.path.insert(0, str(TESTS))
    steps: Any = importlib.import_module("stored_steps")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*steps.STEPS, *STORED]
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"which, all by default: {', '.join(names)}"
    )
    parser.add_argument(
        "--to", type=Path, help="the directory they are written to, in place of the tests' own"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no such program: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    for name in options.names or names:
        try:
            if name in STORED:
                file = store(name, options.to or PROGRAMS)
            else:
                file = steps.write(name, steps.compiled(name), options.to or steps.PROGRAMS)
        except (ValueError, RuntimeError) as error:
            sys.exit(f"{name}: not compiled\n{error}")
        print(f"{file}: {file.stat().st_size / 1e3:.1f} kB")


if __name__ == "__main__":
    main()
