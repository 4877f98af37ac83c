"""Imports checkpoints that other programs wrote by orbax, straight into shards.

Names are compared without `params`, which Linen and others put around parameters, and without the
`value` that NNX puts below them: `params/params/out/kernel` and `params/out/kernel` are one name.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np

from fsdp_jax.checkpoint.arrays import OPT_STATE, leaves_of, require_shardings
from fsdp_jax.checkpoint.export import PARAMS, SHOWN, fits_dtype, raise_if_misfits, read_mapped
from fsdp_jax.checkpoint.orbax_tree import AGAIN, NOT_READ, OrbaxTree, open_orbax
from fsdp_jax.checkpoint.saved_array import SavedArray, tensors_of, with_tensors
from fsdp_jax.checkpoint.store import freed_memory_returned
from fsdp_jax.errors import ArgumentError, ConfigError, DamageError, did_you_mean, first_lines
from fsdp_jax.io.array_specs import is_prng_key
from fsdp_jax.io.sharded_read import STAGING_BYTES
from fsdp_jax.sharding.layout import MODEL_STATE
from fsdp_jax.sharding.padding import Padded, stored_array
from fsdp_jax.sharding.quantized import as_model_arrays
from fsdp_jax.step.state import OPTIONAL, TrainState
from fsdp_jax.tree import SEPARATOR, PyTree, suffixes, unflatten

# Fields of a `TrainState` that other programs do not have.
OWN_FIELDS = ("rng", "skipped", "skipped_in_a_row", *OPTIONAL)
OF_MODEL = f"{MODEL_STATE}/"
WRAPPERS = ("params",)
BOXES = ("value", "raw_value", ".value")  # the last key of a leaf that a box holds


class Saved(dict[str, SavedArray]):
    """The arrays that a function of names chooses from, by path."""

    def __missing__(self, path: str) -> SavedArray:
        if plain(path) in self:
            return self[plain(path)]
        raise ConfigError(
            "no such array in the checkpoint",
            where="rename",
            got=path,
            fix=did_you_mean(path, self),
        )


Rename = Callable[[str, Saved], "SavedArray | str | None"]


def import_orbax(
    path: str | os.PathLike[str],
    target: PyTree,
    *,
    rename: Rename | None = None,
    skip: Sequence[str] = (),
    ignore: Sequence[str] = (),
    budget: int = STAGING_BYTES,
) -> PyTree:
    """Reads a checkpoint that another program wrote by orbax into the shards of `target`.

    Each process reads what its devices need. Nothing in the checkpoint is run. Floating-point
    arrays are cast to the target's dtypes.

    Args:
        path: of the step, or of the folder in it with the tree, such as `items` or `default`.
        target: `sharded.checkpoint_target().params` for the parameters alone. For the optimizer's
            state too `sharded.to_checkpoint(sharded.init())`, whose arrays are donated: what the
            checkpoint has replaces them, one after the other, and the rest keeps its value (the
            random key, counts of skipped steps).
        rename: `rename(path, saved)`, called with the path of each parameter in the target's
            `params`. It returns the path of an array of `saved`, the array itself or a view of
            several (`np.stack`, `np.concatenate`, `transpose`, `reshape`, slices: nothing is read
            for them), or None for a parameter that the checkpoint lacks. `saved` has the
            checkpoint's parameters without `params` around them; and the function is called again
            for each moment of the optimizer, with the checkpoint's moments of the same paths. By
            default the paths are the same.
        skip: patterns of paths in the parameters that keep their initial value, with `*` for
            anything, such as `head/*`: of a target without arrays they are left out, and
            `sharded.init(params=)` makes them anew.
        ignore: patterns of arrays of the checkpoint that need not be used.
        budget: bytes of host memory beside the arrays; at least a chunk of the files is held.

    Returns:
        A pytree like `target`. A leaf whose sharding does not divide its shape is a `Padded`.

    Raises:
        ConfigError: a folder of something else; arrays that are missing, not used, or of another
            shape or dtype, all at once and by both names.
        DamageError: files that are not as orbax wrote them.
        ValueError: a target without shardings.

    Example:
        >>> params = import_orbax("flax/1000", sharded.checkpoint_target().params)
        >>> state = sharded.init(params=params)

    """
    leaves = leaves_of(target)
    fix = "sharded.checkpoint_target().params, or a sharding in each leaf"
    require_shardings(leaves, where="target", fix=fix)
    tree = open_orbax(path)
    is_state = isinstance(target, TrainState)
    _require_readable(tree, is_state, ignore)
    matched = _match(tree, leaves, is_state, rename, skip)
    _check(tree, leaves, matched, ignore)
    _require_kept(target, leaves, matched)

    # Read one array after the other; those of the target that are replaced are deleted before.
    wanted = {name: leaf for name, leaf in leaves.items() if name in matched.found}
    arrays: dict[str, Any] = dict(leaves)
    with freed_memory_returned():
        for name, leaf in wanted.items():
            spec = _spec_of(leaf)
            _delete(leaf)
            arrays[name] = _read(name, spec, matched.found[name], tree, budget)
    if matched.kept and not all(map(_is_array, (leaves[each] for each in matched.kept))):
        return unflatten({name: arrays[name] for name in leaves if name not in matched.kept})
    return jax.tree.unflatten(jax.tree.structure(target), [arrays[name] for name in leaves])


def _require_readable(tree: OrbaxTree, is_state: bool, ignore: Sequence[str]) -> None:
    """Raises DamageError for arrays that cannot be opened, of the part that is to be read."""
    paths = tree.keys if is_state else _params_of(tree)
    lines = [
        f"{path}: {tree.problems[path]}"
        for path in paths
        if path in tree.problems and not _matches(path, ignore)
    ]
    if lines:
        raise DamageError(
            NOT_READ, where=str(tree.folder), got=first_lines(lines, SHOWN), fix=AGAIN
        )


def _params_of(tree: OrbaxTree) -> list[str]:
    """Lists the arrays below `params`; where there are none, all are parameters."""
    return [path for path in tree.keys if path.startswith(PARAMS)] or list(tree.keys)


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """Tells whether a path of a checkpoint matches one of the patterns, as it is or plain."""
    return any(fnmatchcase(each, pattern) for each in (path, plain(path)) for pattern in patterns)


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


def _match(
    tree: OrbaxTree,
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
    saved_parts = _Parts(tree)
    for path, (head, inner) in parts.items():
        if is_state and (path.split(SEPARATOR)[0] in OWN_FIELDS or _is_stream(path, leaves)):
            matched.kept.append(path)
            continue
        is_skipped = inner is not None and any(fnmatchcase(inner, each) for each in skip)
        found: SavedArray | str | None
        if inner is None or rename is None:
            found = _same_path(saved_parts, head, inner)
        else:
            found = _renamed(rename, inner, saved_parts.of(head), is_skipped)
        if isinstance(found, SavedArray):
            matched.used.update(each.name for each in tensors_of(found))
        if is_skipped or found is None:
            matched.kept.append(path)
        elif isinstance(found, SavedArray):
            matched.found[path] = found
        elif leaves[path].size:
            matched.lines.append(f"{path}: {found}")
        else:
            matched.kept.append(path)
    paths = matched.used or saved_parts.params
    matched.roots = {path.split(SEPARATOR)[0] for path in paths}
    return matched


def _is_stream(path: str, leaves: Mapping[str, Any]) -> bool:
    """Tells whether a leaf of the model's state is of a random stream: its key, or its count."""
    if not path.startswith(OF_MODEL):
        return False
    above = path.rpartition(SEPARATOR)[0]
    near = [leaf for each, leaf in leaves.items() if each.rpartition(SEPARATOR)[0] == above]
    return any(map(is_prng_key, near))


class _Parts:
    """The checkpoint's parameters, each of its moments, and the rest: arrays by plain path."""

    def __init__(self, tree: OrbaxTree) -> None:
        self.plain: dict[str, list[str]] = {}
        for path in tree.keys:
            self.plain.setdefault(plain(path), []).append(path)
        self.tree = tree
        self._made: dict[str, Saved] = {}
        self.params = _params_of(tree)

    def one(self, name: str) -> SavedArray | str:
        """Returns the array of a plain path, or why there is none."""
        paths = self.plain.get(name, [])
        if len(paths) > 1:
            return f"several in the checkpoint: {', '.join(paths)}"
        if not paths:
            return "missing in the checkpoint"
        return self._array(paths[0])

    def _array(self, path: str) -> SavedArray | str:
        if path in self.tree.tensors:
            return SavedArray.of_tensor(self.tree.tensors[path])
        return f"{path} cannot be read: {self.tree.problems[path]}"

    def of(self, head: str) -> Saved:
        """Selects the arrays below a path of ours: the moments of that name, or the parameters."""
        if head in self._made:
            return self._made[head]
        start = ""
        paths = self.params
        if head not in ("", "params"):
            start = self._their_head(head) + SEPARATOR
            paths = [
                path
                for each, paths in self.plain.items()
                for path in paths
                if each.startswith(start)
            ]
        found = Saved()
        for path in paths:
            array = self._array(path)
            if isinstance(array, SavedArray):
                found[plain(path).removeprefix(start)] = array
        self._made[head] = found
        return found

    def _their_head(self, head: str) -> str:
        """Finds where the checkpoint has moments: as we do, or at the only place of their name."""
        if any(each.startswith(head + SEPARATOR) for each in self.plain):
            return head
        last = head.rpartition(SEPARATOR)[2]
        places = set()
        for each in self.plain:
            before, found, _ = each.partition(f"{SEPARATOR}{last}{SEPARATOR}")
            if found:
                places.add(f"{before}{SEPARATOR}{last}")
        if len(places) == 1:
            return places.pop()
        return head


def _same_path(parts: _Parts, head: str, inner: str | None) -> SavedArray | str:
    """Finds the array of the same path: (of the part of the target, in that part)."""
    if inner is not None:
        return parts.of(head).get(plain(inner), parts.one(_joined(head, inner)))
    found = parts.one(head)
    if head not in parts.plain and head.startswith(OF_MODEL):
        return parts.one(head.removeprefix(OF_MODEL))
    if head not in parts.plain and head.startswith(OPT_STATE):
        # An optimizer in another chain: the only count of that name.
        last = head.rpartition(SEPARATOR)[2]
        alike = [
            each
            for each in parts.plain
            if each.startswith(OPT_STATE) and each.endswith(f"{SEPARATOR}{last}")
        ]
        if len(alike) == 1:
            return parts.one(alike[0])
    return found


def _joined(head: str, inner: str) -> str:
    """Joins a part of a target and a path in it, as the checkpoint would have it."""
    return plain(SEPARATOR.join(filter(None, (head, inner))))


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
    tree: OrbaxTree, leaves: Mapping[str, Any], matched: _Matched, ignore: Sequence[str]
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
    for path in tree.keys:
        is_beside = path.split(SEPARATOR)[0] in matched.roots
        if is_beside and path not in matched.used and not _matches(path, ignore):
            lines.append(f"theirs {path}: of no parameter of ours")
    raise_if_misfits(
        tree.folder,
        lines,
        fix="rename=, from our path to theirs; skip= for what the checkpoint lacks; "
        "ignore= for what the model lacks",
    )


def _fits(array: SavedArray, leaf: Any) -> bool:
    """Tells whether an array may be read as a leaf; a whole number as another kind that has it."""
    if array.parts and fits_dtype(replace(array.parts[0][0], dtype=array.dtype), leaf):
        return True
    is_number = array.shape == () and len(array.parts) == 1
    if not is_number or array.dtype.kind not in "iu" or np.dtype(leaf.dtype).kind not in "iu":
        return False
    limits = np.iinfo(leaf.dtype)
    return bool(limits.min <= int(np.asarray(array)) <= limits.max)


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


def _delete(leaf: Any) -> None:
    """Frees the array that a leaf of the target is, if it is one."""
    if _is_array(leaf):
        stored_array(leaf).delete()


def _read(path: str, leaf: Any, array: SavedArray, tree: OrbaxTree, budget: int) -> Any:
    """Reads one leaf; half of the budget keeps chunks, which are freed as it returns."""
    names = sorted({each.name for each in tensors_of(array)})
    parts = with_tensors(array, tree.with_cache(names, budget // 2)).parts
    tensors = {str(number): tensor for number, (tensor, _) in enumerate(parts)}
    places = [replace(place, name=str(number)) for number, (_, place) in enumerate(parts)]
    half = max(budget // 2, 1)
    return read_mapped({path: leaf}, {path: places}, tensors, half, tree.folder)[path]
