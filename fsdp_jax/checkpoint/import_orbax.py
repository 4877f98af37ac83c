"""Imports checkpoints that other programs wrote by orbax, straight into shards."""

import os
from collections.abc import Sequence

from fsdp_jax.checkpoint.arrays import OPT_STATE
from fsdp_jax.checkpoint.export import PARAMS, SHOWN
from fsdp_jax.checkpoint.import_tree import (
    OF_MODEL,
    Rename,
    Saved,
    checked_leaves,
    import_tree,
    matches,
    plain,
)
from fsdp_jax.checkpoint.orbax_tree import AGAIN, NOT_READ, OrbaxTree, open_orbax
from fsdp_jax.checkpoint.saved_array import SavedArray, tensors_of, with_tensors
from fsdp_jax.errors import DamageError, first_lines
from fsdp_jax.io.sharded_read import STAGING_BYTES
from fsdp_jax.step.state import TrainState
from fsdp_jax.tree import SEPARATOR, PyTree


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
    leaves = checked_leaves(target)
    tree = open_orbax(path)
    _require_readable(tree, isinstance(target, TrainState), ignore)
    return import_tree(_OrbaxParts(tree), target, leaves, rename, skip, ignore, budget)


def _require_readable(tree: OrbaxTree, is_state: bool, ignore: Sequence[str]) -> None:
    """Raises DamageError for arrays that cannot be opened, of the part that is to be read."""
    paths = tree.keys if is_state else _params_of(tree)
    lines = [
        f"{path}: {tree.problems[path]}"
        for path in paths
        if path in tree.problems and not matches(path, ignore)
    ]
    if lines:
        raise DamageError(
            NOT_READ, where=str(tree.folder), got=first_lines(lines, SHOWN), fix=AGAIN
        )


def _params_of(tree: OrbaxTree) -> list[str]:
    """Lists the arrays below `params`; where there are none, all are parameters."""
    return [path for path in tree.keys if path.startswith(PARAMS)] or list(tree.keys)


class _OrbaxParts:
    """The checkpoint's parameters, each of its moments, and the rest: arrays by plain path."""

    def __init__(self, tree: OrbaxTree) -> None:
        self.plain: dict[str, list[str]] = {}
        for path in tree.keys:
            self.plain.setdefault(plain(path), []).append(path)
        self.tree = tree
        self.folder = tree.folder
        self.names = tree.keys.keys()
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

    def same(self, head: str, inner: str | None) -> SavedArray | str:
        """Finds the array of the same path: (of the part of the target, in that part)."""
        if inner is not None:
            return self.of(head).get(plain(inner), self.one(_joined(head, inner)))
        found = self.one(head)
        if head not in self.plain and head.startswith(OF_MODEL):
            return self.one(head.removeprefix(OF_MODEL))
        if head not in self.plain and head.startswith(OPT_STATE):
            # An optimizer in another chain: the only count of that name.
            last = head.rpartition(SEPARATOR)[2]
            alike = [
                each
                for each in self.plain
                if each.startswith(OPT_STATE) and each.endswith(f"{SEPARATOR}{last}")
            ]
            if len(alike) == 1:
                return self.one(alike[0])
        return found

    def root(self, name: str) -> str:
        """Returns the first key of an array."""
        return name.split(SEPARATOR)[0]

    def opened(self, array: SavedArray, budget: int) -> SavedArray:
        """Opens an array with a cache of chunks, which is freed with it."""
        names = sorted({each.name for each in tensors_of(array)})
        return with_tensors(array, self.tree.with_cache(names, budget))


def _joined(head: str, inner: str) -> str:
    """Joins a part of a target and a path in it, as the checkpoint would have it."""
    return plain(SEPARATOR.join(filter(None, (head, inner))))
