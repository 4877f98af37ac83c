"""Converts a training state to named arrays, and back: a checkpoint stores `path -> array`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fsdp_jax.errors import ArgumentError
from fsdp_jax.host_memory import HOST, to_device
from fsdp_jax.io.array_specs import describe_array, is_prng_key, parse_description
from fsdp_jax.sharding.mesh import axes_of
from fsdp_jax.sharding.padding import Padded, stored_array
from fsdp_jax.sharding.quantized import QuantizedStruct
from fsdp_jax.step.average import without_average
from fsdp_jax.step.kept_programs import compile_kept, keeps_programs
from fsdp_jax.step.state import OPTIONAL, TrainState, require_held
from fsdp_jax.tree import SEPARATOR, PyTree, flatten, path_of

OPT_STATE = "opt_state/"
SHOWN = 40  # leaves without a sharding
SHARED_BYTES = 16 << 20  # least bytes that a replica writes, where replicas share the writing


def leaves_of(state: PyTree) -> dict[str, Any]:
    """Flattens a state to {path: leaf}. Raises ValueError if two leaves share a path."""
    flat = flatten(state)
    if len(flat) < len(jax.tree.leaves(state)):
        paths = [path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
        raise ArgumentError(
            "two leaves share a path",
            got=", ".join(sorted({path for path in paths if paths.count(path) > 1})),
            fix="no `/` in names",
        )
    return flat


def require_shardings(leaves: Mapping[str, Any], *, where: str, fix: str) -> None:
    """Checks that all leaves have a sharding; raises ValueError naming those without."""
    without = [path for path, leaf in leaves.items() if getattr(leaf, "sharding", None) is None]
    if without:
        raise ArgumentError(
            "a target without shardings", where=where, got=", ".join(without[:SHOWN]), fix=fix
        )


def to_arrays(state: PyTree) -> tuple[dict[str, jax.Array | Padded], dict[str, Any]]:
    """Converts a state to the arrays to write, and the manifest's record of them.

    The record has `leaves` (dtype and shape of every leaf as text), `keys` (implementations of PRNG
    keys) and `shards` (shapes of the shards), each by path.

    A `Padded` stays one, and the record has its own shape.

    Raises ValueError for leaves that are neither a jax.Array nor `Padded`, for those that were
    donated, and for a state without a single element.
    """
    require_held(state)
    # Refuse what a restore could not bring back.
    if isinstance(state, TrainState) and jax.tree.leaves(state.copies):
        raise ArgumentError(
            "copies that only this layout computes with",
            where="copies",
            fix="save sharded.to_checkpoint(state)",
        )
    leaves = leaves_of(state)
    foreign = [
        f"{path}: {type(leaf).__name__}"
        for path, leaf in leaves.items()
        if not isinstance(leaf, jax.Array | Padded)
    ]
    if foreign:
        raise ArgumentError(
            "only jax.Arrays can be saved", got="; ".join(foreign), fix="use jnp.asarray"
        )
    # The arrays. Orbax refuses those without elements; the record is enough to restore them.
    key_impls = {
        path: str(jax.random.key_impl(leaf)) for path, leaf in leaves.items() if is_prng_key(leaf)
    }
    arrays = {path: leaf for path, leaf in leaves.items() if prod(leaf.shape)}
    for path in key_impls.keys() & arrays.keys():
        arrays[path] = jax.random.key_data(leaves[path])
    if not arrays:
        raise ArgumentError(
            "nothing to save", expected="a state with at least one element", got="none"
        )
    # The record.
    stored = {path: stored_array(leaf) for path, leaf in arrays.items()}
    record = {
        "leaves": {path: describe_array(leaf) for path, leaf in leaves.items()},
        "keys": key_impls,
        "shards": {
            path: list(array.sharding.shard_shape(array.shape)) for path, array in stored.items()
        },
    }
    return arrays, record


def not_finite(arrays: Mapping[str, jax.Array | Padded]) -> list[str]:
    """Finds the names of the arrays that have an infinite or NaN element; waits for them.

    Every process of an array's devices must call this.
    """
    return begin_finite_check(arrays)()


def begin_finite_check(leaves: Mapping[str, jax.Array | Padded]) -> Callable[[], list[str]]:
    """Starts the check of `not_finite`; the returned function waits for it, in any thread.

    The check itself is dispatched at once: the arrays may be donated afterwards. Every process of
    an array's devices must call this, in the same order as its steps.
    """
    # One program for all arrays in device memory; those in host memory pass through it one by one.
    arrays = {name: stored_array(leaf) for name, leaf in leaves.items()}
    groups: dict[Any, list[str]] = {}
    for name, array in arrays.items():
        if jnp.issubdtype(array.dtype, jnp.inexact) and array.size:
            alone = None
            if array.sharding.memory_kind == HOST:
                alone = name
            groups.setdefault((frozenset(array.sharding.device_set), alone), []).append(name)
    dispatched: list[tuple[list[str], jax.Array]] = []
    for names in groups.values():
        # One at a time: XLA's CPU devices can wait for one another in programs that overlap.
        jax.block_until_ready([finite for _, finite in dispatched[-1:]])
        dispatched.append((names, _run_finite_check([arrays[name] for name in names])))

    def result() -> list[str]:
        return sorted(
            name
            for names, finite in dispatched
            for name, each in zip(names, np.asarray(finite), strict=True)
            if not each
        )

    return result


def _run_finite_check(arrays: list[jax.Array]) -> jax.Array:
    """Tells for each array whether it is finite, with a program that the run may keep."""
    sharding = arrays[0].sharding
    if not keeps_programs() or not isinstance(sharding, NamedSharding):
        return _are_finite(arrays)
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh), "that of arrays with elements"
    key = tuple((array.shape, array.dtype, array.sharding) for array in arrays)
    if key not in _kept_checks:
        lowered = _are_finite.lower(arrays)
        _kept_checks.clear()  # of another layout
        name = "the check for numbers that are not finite"
        _kept_checks[key] = compile_kept(name, lowered, mesh, {}, is_step=False)
    return _kept_checks[key](arrays)


_kept_checks: dict[tuple[Any, ...], Any] = {}  # shapes, dtypes and shardings -> program


@jax.jit
def _are_finite(arrays: list[jax.Array]) -> jax.Array:
    """Tells for each array whether all of its elements are finite: bool[arrays]."""
    on_device = map(to_device, arrays)
    return jnp.stack([jnp.all(jnp.isfinite(array)) for array in on_device])


def divide_replicas(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Shards large replicated arrays over their replicas, so that each process writes a part.

    The parts are copied, in one program without collectives; arrays in host memory, and those that
    no dim divides, stay as they are. Every process of the arrays' devices must call this.
    """
    shardings = {
        name: sharding
        for name, array in arrays.items()
        if (sharding := _sharding_over_replicas(array)) is not None
    }
    if not shardings:
        return dict(arrays)
    # Every device has all of a replicated array: it keeps its part, and nothing is sent.
    copy = jax.jit(_copy, out_shardings=shardings)
    return {**arrays, **copy({name: arrays[name] for name in shardings})}


def _copy(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the arrays as they are; jitted, it copies them to other shardings."""
    return arrays


def _sharding_over_replicas(array: jax.Array) -> jax.NamedSharding | None:
    """Finds a sharding that also splits some dim over the mesh axes that replicate an array.

    Returns None if nothing is replicated or no dim divides, in host memory, and if a part would
    have less than SHARED_BYTES.
    """
    sharding = array.sharding
    if not isinstance(sharding, jax.NamedSharding) or sharding.memory_kind == HOST:
        return None
    # The axes that replicate it, ...
    spec = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
    used = [axis for entry in spec for axis in axes_of(entry)]
    sizes = sharding.mesh.shape
    unused = tuple(axis for axis in sizes if axis not in used and sizes[axis] > 1)
    if not unused or array.nbytes < SHARED_BYTES * sharding.mesh.size:
        return None
    # ... all of them on the first dim that they divide.
    for dim, size in enumerate(array.shape):
        axes = (*axes_of(spec[dim]), *unused)
        if size % prod(sizes[axis] for axis in axes) == 0:
            return jax.NamedSharding(sharding.mesh, jax.P(*spec[:dim], axes, *spec[dim + 1 :]))
    return None


def with_saved_options(target: PyTree, saved: Mapping[str, str]) -> PyTree:
    """Replaces what a `TrainState` need not have, such as a loss scale, by what a step has of it.

    `sharded.from_checkpoint` takes it, or starts anew. `saved`: {path: dtype and shape}.
    """
    if not isinstance(target, TrainState):
        return target
    options: dict[str, PyTree] = {name: {} for name in OPTIONAL}
    for path, description in saved.items():
        field, _, leaf = path.partition(SEPARATOR)
        if field in options:
            dtype, shape = parse_description(description)
            sharding = getattr(target.step, "sharding", None)  # replicated, as these are
            options[field][leaf] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    # An average of the parameters that was not kept starts from them.
    paths = {path for path in saved if path.startswith(OPT_STATE)}
    for opt_state in without_average(target.opt_state):
        if {OPT_STATE + path for path in flatten(opt_state)} == paths:
            options["opt_state"] = opt_state
            break
    return replace(target, **options)


def saved_spec(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Computes shape, dtype and sharding of the saved array for a leaf of a target.

    PRNG keys are stored as their data, which has one more dim, unsharded.
    """
    if isinstance(leaf, QuantizedStruct):
        return leaf
    spec = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if is_prng_key(leaf):
        spec = jax.eval_shape(jax.random.key_data, spec)
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=leaf.sharding)


def leaf_from_saved(
    array: jax.Array | Padded | None, leaf: jax.ShapeDtypeStruct, impl: str | None
) -> jax.Array | Padded:
    """Converts a saved array to a leaf of the restored state.

    `array` is None for a leaf without elements, which is not saved; `impl` is the implementation
    of PRNG keys, which are never padded, and None for other leaves. Raises ValueError or TypeError
    for an implementation that is not that of the leaf.
    """
    if array is None:
        spec = saved_spec(leaf)
        empty = np.zeros(spec.shape, spec.dtype)
        array = jax.make_array_from_callback(empty.shape, spec.sharding, lambda index: empty[index])
    if impl is not None:
        array = jax.random.wrap_key_data(stored_array(array), impl=impl)
    if is_prng_key(leaf) and array.dtype != leaf.dtype:
        raise TypeError(f"{array.dtype}, not {leaf.dtype}")
    return array
