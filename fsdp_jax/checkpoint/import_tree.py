"""Matches the leaves of a target with the arrays of any checkpoint, and reads them into its shards.

Names are compared without `params`, which Linen and others put around parameters, and without the
`value` that NNX puts below them: `params/params/out/kernel` and `params/out/kernel` are one name.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from fsdp_jax.checkpoint.arrays import OPT_STATE, leaves_of, require_shardings
from fsdp_jax.checkpoint.export import PARAMS, SHOWN, fits_dtype, raise_if_misfits, read_mapped
from fsdp_jax.checkpoint.saved_array import SavedArray, tensors_of
from fsdp_jax.errors import ArgumentError, ConfigError, did_you_mean, first_lines
from fsdp_jax.host_memory import freed_memory_returned
from fsdp_jax.io.array_specs import array_bytes, is_prng_key
from fsdp_jax.io.sharded_read import STAGING_BYTES
from fsdp_jax.sharding.layout import MODEL_STATE
from fsdp_jax.sharding.padding import Padded, as_stored, stored_array
from fsdp_jax.sharding.quantized import as_model_arrays
from fsdp_jax.step.state import OPTIONAL, TrainState
from fsdp_jax.tree import SEPARATOR, PyTree, suffixes, unflatten

# Fields of a `TrainState` that other programs do not have.
OWN_FIELDS = ("rng", "skipped", "skipped_in_a_row", *OPTIONAL)
OF_MODEL = f"{MODEL_STATE}/"
COUNTS = "counts"  # the root of arrays that are alike, of which one is enough
ORDERS = {"mu": 1, "trace": 1, "nu": 2}  # of moments, by the last key of their path
SMALLEST_BUDGET = 8 << 20
WRAPPERS = ("params",)
BOXES = ("value", "raw_value", ".value")  # the last key of a leaf that a box holds


class Saved(dict[str, SavedArray]):
    """The arrays that a function of names chooses from, by path.

    `moment`: 1 or 2 for moments of that order; 0 for the parameters, and for others.
    `around`: what is before the paths in the checkpoint; a function may write it or not.
    """

    moment = 0
    around = ""

    def __missing__(self, path: str) -> SavedArray:
        inner = plain(path).removeprefix(self.around)
        if inner in self:
            return self[inner]
        raise ConfigError(
            "no such array in the checkpoint",
            where="rename",
            got=path,
            fix=did_you_mean(path, self),
        )


Rename = Callable[[str, Saved], "SavedArray | str | None"]


class Parts(Protocol):
    """A checkpoint as a target is matched with it."""

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint."""

    @property
    def names(self) -> Collection[str]:
        """The names of all arrays."""

    @property
    def params(self) -> Sequence[str]:
        """The names of the parameters."""

    def of(self, head: str) -> Saved:
        """Selects the arrays of a part of the target: the parameters, or the moments of a path."""

    def same(self, head: str, inner: str | None) -> SavedArray | str:
        """Finds the array of a path, `inner` of the part `head`; or says why there is none."""

    def root(self, name: str) -> str:
        """Returns what an array is in; of what a target uses, all has to be used."""

    @property
    def has_moments(self) -> bool:
        """Whether the checkpoint has state of an optimizer, for each parameter."""

    def require_readable(self, is_state: bool, ignore: Sequence[str]) -> None:
        """Raises DamageError for arrays that cannot be opened, of the part that is to be read."""

    def opened(self, array: SavedArray, budget: int) -> SavedArray:
        """Prepares an array to be read, with `budget` bytes beside it."""


def import_tree(
    parts: Parts,
    target: PyTree,
    rename: Rename | None = None,
    skip: Sequence[str] = (),
    ignore: Sequence[str] = (),
    budget: int | None = None,
) -> PyTree:
    """Reads a checkpoint into the shards of a target.

    The other arguments, the result and the errors are those of `import_orbax`.
    """
    if rename is not None and not callable(rename):
        raise ArgumentError(
            "names are given as a function",
            where="rename",
            expected="rename(path, saved)",
            got=type(rename).__name__,
            fix="lambda path, saved: names[path], of a dict of names",
        )
    leaves = leaves_of(target)
    fix = "sharded.checkpoint_target().params, or a sharding in each leaf"
    require_shardings(leaves, where="target", fix=fix)
    if budget is None:
        budget = min(max(_bytes_here(leaves.values()) // 64, SMALLEST_BUDGET), STAGING_BYTES)
    ignore = (*ignore, *getattr(rename, "ignore", ()))
    parts.require_readable(isinstance(target, TrainState), ignore)
    matched = _match(parts, leaves, isinstance(target, TrainState), rename, skip)
    _check(parts, leaves, matched, ignore)
    _require_kept(target, leaves, matched)

    # Read one array after the other; those of the target that are replaced are deleted before.
    arrays: dict[str, Any] = dict(leaves)
    with freed_memory_returned():
        for name, found in matched.found.items():
            spec = _spec_of(leaves[name])
            if _is_array(leaves[name]):
                stored_array(leaves[name]).delete()
            arrays[name] = _read(name, spec, found, parts, budget)
    if matched.kept and not all(map(_is_array, (leaves[each] for each in matched.kept))):
        return unflatten({name: arrays[name] for name in leaves if name not in matched.kept})
    return jax.tree.unflatten(jax.tree.structure(target), [arrays[name] for name in leaves])


@dataclass
class _Matched:
    """The array for each leaf of a target, the leaves that keep their value, and what misfits."""

    found: dict[str, SavedArray] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)  # arrays of the checkpoint
    roots: set[str] = field(default_factory=set)  # first keys of those that have to be used


def plain(path: str) -> str:
    """Drops what programs put around parameters, and below them, from a path of a checkpoint."""
    keys = [key for key in path.split(SEPARATOR) if key not in WRAPPERS]
    if len(keys) > 1 and keys[-1] in BOXES:
        keys.pop()
    return SEPARATOR.join(keys)


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Tells whether a path of a checkpoint matches one of the patterns, as it is or plain."""
    return any(fnmatchcase(each, pattern) for each in (path, plain(path)) for pattern in patterns)


def _match(
    saved: Parts,
    leaves: Mapping[str, Any],
    is_state: bool,
    rename: Rename | None,
    skip: Sequence[str],
) -> _Matched:
    """Finds the array of the checkpoint for each leaf of the target."""
    matched = _Matched()
    # The parameters of the target, and the part of it that each leaf is in: they, or moments.
    params = {path: path for path in leaves}
    if is_state:
        params = {path: path.removeprefix(PARAMS) for path in leaves if path.startswith(PARAMS)}
    own = set(params.values())
    parts = {}
    for path in leaves:
        inner = params.get(path)
        if inner is None and path.startswith(OPT_STATE):
            inner = next((end for end in suffixes(path) if end in own), None)
        head = path
        if inner is not None:
            head = path.removesuffix(inner).rstrip(SEPARATOR)
        parts[path] = (head, inner)
    unmatched = [each for each in skip if not any(fnmatchcase(path, each) for path in own)]
    if unmatched:
        raise ConfigError(
            "no such parameter",
            where="skip, or --except",
            got=", ".join(unmatched),
            fix=did_you_mean(unmatched[0], own),
        )
    for path, (head, inner) in parts.items():
        if is_state and (path.split(SEPARATOR)[0] in OWN_FIELDS or _is_stream(path, leaves)):
            matched.kept.append(path)
            continue
        is_skipped = inner is not None and any(fnmatchcase(inner, each) for each in skip)
        found: SavedArray | str | None
        if inner is None or rename is None:
            found = saved.same(head, inner)
        else:
            chosen = saved.of(head)
            chosen.moment = ORDERS.get(head.rpartition(SEPARATOR)[2], 0)
            found = _renamed(rename, inner, chosen, is_skipped)
        if isinstance(found, SavedArray):
            matched.used.update(each.name for each in tensors_of(found))
        if is_skipped or found is None:
            matched.kept.append(path)
        elif isinstance(found, SavedArray):
            matched.found[path] = found
        elif 0 not in leaves[path].shape:
            matched.lines.append(f"{path}: {found}")
        else:
            matched.kept.append(path)
    matched.roots = {saved.root(name) for name in matched.used or saved.params}
    return matched


def _is_stream(path: str, leaves: Mapping[str, Any]) -> bool:
    """Tells whether a leaf of the model's state is of a random stream: its key, or its count."""
    if not path.startswith(OF_MODEL):
        return False
    above = path.rpartition(SEPARATOR)[0]
    near = [leaf for each, leaf in leaves.items() if each.rpartition(SEPARATOR)[0] == above]
    return any(map(is_prng_key, near))


def _renamed(rename: Rename, inner: str, saved: Saved, is_skipped: bool) -> SavedArray | str | None:
    """Calls the user's function for one path. Raises ConfigError for what it must not return."""
    try:
        found = rename(inner, saved)
        if isinstance(found, str):
            found = saved[found]
    except ArgumentError:
        if is_skipped:
            return None
        raise
    if found is not None and not isinstance(found, SavedArray):
        raise ConfigError(
            "a function of names returned something else",
            where=f"rename('{inner}', saved)",
            expected="a path of `saved`, an array of it or a view of some, or None",
            got=type(found).__name__,
        )
    return found


def _check(
    saved: Parts, leaves: Mapping[str, Any], matched: _Matched, ignore: Sequence[str]
) -> None:
    """Raises ConfigError with all that does not fit, and all that is not used."""
    lines = list(matched.lines)
    own = as_model_arrays({path: _spec_of(leaf) for path, leaf in leaves.items()})
    for path, array in matched.found.items():
        leaf = own[path]
        theirs = f"theirs {array.name}, ours {path}"
        shape, dtype = tuple(leaf.shape), leaf.dtype
        if is_prng_key(leaf):
            lines.append(f"{theirs}: random keys are not imported")
        elif array.shape != shape:
            lines.append(f"{theirs}: expected {list(shape)}, got {array}")
        elif not _fits(array, leaf):
            lines.append(f"{theirs}: expected {dtype}, got {array}")
    # What is beside that which is used, such as a bias that the model lacks.
    for path in saved.names:
        root = saved.root(path)
        if root not in matched.roots or root == COUNTS or path in matched.used:
            continue
        if not matches(path, ignore):
            lines.append(f"theirs {path}: of no parameter of ours")
    fix = (
        "rename= (--rename), from our path to theirs; skip= (--except) for what the checkpoint "
        "lacks; ignore= for what the model lacks"
    )
    if lines and all(OPT_STATE in line for line in lines):
        fix = (
            "the optimizer that wrote the checkpoint; or the parameters alone, "
            "by sharded.checkpoint_target().params (--weights-only)"
        )
    raise_if_misfits(saved.folder, lines, fix=fix)


def _fits(array: SavedArray, leaf: Any) -> bool:
    """Tells whether an array may be read as a leaf; a whole number as another kind that has it."""
    if array.parts and fits_dtype(replace(array.parts[0][0], dtype=array.dtype), leaf):
        return True
    is_number = array.shape == () and len(array.parts) == 1
    if not is_number or array.dtype.kind not in "iuf" or np.dtype(leaf.dtype).kind not in "iu":
        return False
    # PyTorch counts steps in float32.
    value, limits = float(np.asarray(array)), np.iinfo(leaf.dtype)
    return value.is_integer() and limits.min <= value <= limits.max


def _require_kept(target: PyTree, leaves: Mapping[str, Any], matched: _Matched) -> None:
    """Raises ArgumentError where a leaf keeps its value, and has none and cannot be left out."""
    without = [path for path in matched.kept if not _is_array(leaves[path])]
    if without and isinstance(target, TrainState):
        raise ArgumentError(
            "arrays that the checkpoint lacks have no value to keep",
            where="target",
            got=first_lines(without, SHOWN),
            fix="sharded.to_checkpoint(sharded.init()), whose arrays are donated",
        )


def _bytes_here(leaves: Iterable[Any]) -> int:
    """Counts the bytes of the shards that this process holds."""
    return sum(
        len(leaf.sharding.addressable_devices)
        * array_bytes(leaf.sharding.shard_shape(stored.shape), stored.dtype)
        for leaf in leaves
        if not is_prng_key(leaf)
        for stored in [as_stored(_spec_of(leaf))]
    )


def _is_array(leaf: Any) -> bool:
    """Tells whether a leaf of a target has a value."""
    return isinstance(leaf, jax.Array | Padded)


def _spec_of(leaf: Any) -> Any:
    """Makes shape, dtype and sharding of a leaf that is an array."""
    if not _is_array(leaf):
        return leaf
    if getattr(leaf, "stored_as", ""):
        raise ArgumentError(
            "arrays of quantized parameters are not donated",
            where="target",
            fix="sharded.checkpoint_target().params",
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _read(path: str, leaf: Any, array: SavedArray, saved: Parts, budget: int) -> Any:
    """Reads one leaf; half of the budget is for what the checkpoint's arrays keep meanwhile."""
    half = max(budget // 2, 1)
    parts = saved.opened(array, half).parts
    tensors = {str(number): tensor for number, (tensor, _) in enumerate(parts)}
    places = [replace(place, name=str(number)) for number, (_, place) in enumerate(parts)]
    return read_mapped({path: leaf}, {path: places}, tensors, half, saved.folder)[path]
