"""The parameters, moments and counts of a tree that orbax or Levanter wrote, by path."""

from collections.abc import Collection, Iterable, Sequence

from fsdp_jax.checkpoint.arrays import OPT_STATE
from fsdp_jax.checkpoint.chunked_tree import ChunkedTree
from fsdp_jax.checkpoint.export import PARAMS, SHOWN
from fsdp_jax.checkpoint.import_tree import COUNTS, OF_MODEL, Saved, matches, plain
from fsdp_jax.checkpoint.saved_array import (
    SavedArray,
    damage,
    is_read_in_blocks,
    tensors_of,
    with_tensors,
)
from fsdp_jax.errors import first_lines
from fsdp_jax.tree import SEPARATOR

MODEL = "model/"  # Levanter's parameters


class ChunkedParts:
    """The checkpoint's parameters, each of its moments, and the rest: arrays by plain path."""

    def __init__(self, tree: ChunkedTree, params: str) -> None:
        """Takes the arrays below `params` as the parameters; where there are none, all of them."""
        self._named, self._model = {path: path for path in tree.names}, ""
        if params == PARAMS:
            self._named, self._model = _named_as_state(tree.names)
        self.plain: dict[str, list[str]] = {}
        for path, named in self._named.items():
            self.plain.setdefault(plain(named), []).append(path)
        self.tree = tree
        self.folder = tree.folder
        self.names = tree.names.keys()
        self._made: dict[str, Saved] = {}
        self.params = self._below(params) or list(tree.names)
        # What is around the names of parameters, and is not in those of moments.
        self._start = params
        if params == PARAMS:
            self._start = ""

    @property
    def has_moments(self) -> bool:
        """Whether the checkpoint has state of an optimizer, for each parameter."""
        tensors = self.tree.tensors
        return any(path in tensors and tensors[path].shape for path in self._below(OPT_STATE))

    def _below(self, start: str) -> list[str]:
        """Lists the arrays whose names begin so."""
        return [path for path, named in self._named.items() if named.startswith(start)]

    def require_readable(self, is_state: bool, ignore: Sequence[str]) -> None:
        """Raises DamageError for arrays that cannot be opened, of the part that is to be read."""
        lines = [
            f"{path}: {self.tree.problems[path]}"
            for path in (self.names if is_state else self.params)
            if path in self.tree.problems and not matches(path, ignore)
        ]
        if lines:
            raise damage(self.folder, first_lines(lines, SHOWN))

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
        start, paths = self._start, self.params
        if head not in ("", "params"):
            start = self._their_head(head) + SEPARATOR
            paths = [
                path
                for each, paths in self.plain.items()
                for path in paths
                if each.startswith(start)
            ]
        found = Saved()
        found.around = self._model
        for path in paths:
            array = self._array(path)
            if isinstance(array, SavedArray):
                found[plain(self._named[path]).removeprefix(start)] = array
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
            found, name = self.of(head), plain(inner)
            for each in (name, name.removeprefix(self._model)):
                if each in found:
                    return found[each]
            return self.one(_joined(head, inner))
        whole = self.one(head)
        if head not in self.plain and head.startswith(OF_MODEL):
            return self.one(head.removeprefix(OF_MODEL))
        if head not in self.plain and (head.startswith(OPT_STATE) or head == "step"):
            # An optimizer in another chain: the counts of that name, if they are one number.
            last = head.rpartition(SEPARATOR)[2].replace("step", "count")
            alike = [
                self.one(each)
                for each in self.plain
                if each.startswith(OPT_STATE) and each.endswith(f"{SEPARATOR}{last}")
            ]
            counts = [each for each in alike if isinstance(each, SavedArray) and not each.shape]
            if counts and len({each.read(()).item() for each in counts}) == 1:
                return counts[0]
        return whole

    def root(self, name: str) -> str:
        """Returns the first key of an array; numbers of the optimizer need not be used."""
        tensor, named = self.tree.tensors.get(name), self._named[name]
        if named.startswith(OPT_STATE) and tensor is not None and not tensor.shape:
            return COUNTS
        return named.split(SEPARATOR)[0]

    def opened(self, array: SavedArray, budget: int) -> SavedArray:
        """Opens an array with a cache of chunks, which is freed with it."""
        names = sorted({each.name for each in tensors_of(array)})
        keeps_chunks = not is_read_in_blocks(array)
        return with_tensors(array, self.tree.reopened(names, budget, keeps_chunks=keeps_chunks))


def _named_as_state(paths: Iterable[str]) -> tuple[dict[str, str], str]:
    """Names the arrays of a tree `params/...`, `opt_state/...` and `step`, as a `TrainState` does.

    The optimizer's state, or an `nnx.Optimizer` with its `opt_state` and `step`, may be below a key
    of the user's, and the model below another. Returns (the name of each path, the model's key).
    """
    named = {path: path for path in paths}
    optimizer, named_there = _optimizer_key(named)
    for path in named:
        inner = named_there + path.removeprefix(optimizer)
        if path.startswith(optimizer) and inner not in named:
            named[path] = inner
    if any(each.startswith(PARAMS) for each in named.values()):
        return named, ""
    others = [path for path in named if not optimizer or not path.startswith(optimizer)]
    models = {path.split(SEPARATOR)[0] for path in others if SEPARATOR in plain(path)}
    model = f"{min(models, default='')}{SEPARATOR}"
    if len(models) != 1 or not (optimizer or model == MODEL):
        return named, ""
    for path in others:
        if path.startswith(model):
            named[path] = PARAMS + path.removeprefix(model)
    return named, model


def _optimizer_key(paths: Collection[str]) -> tuple[str, str]:
    """Finds the one key, or keys, that the optimizer is below: (it, what it is for a TrainState).

    Where no key is `opt_state` it is known by Adam's `mu`, beside its `count`.
    """
    if any(path.startswith(OPT_STATE) for path in paths):
        return OPT_STATE, OPT_STATE
    around = {path.partition(f"/{OPT_STATE}")[0] for path in paths if f"/{OPT_STATE}" in path}
    inside = ""
    if not around:
        plain_paths = set(map(plain, paths))
        adams = {path.partition("/mu/")[0] for path in paths if "/mu/" in path}
        around = {each.split(SEPARATOR)[0] for each in adams if f"{each}/count" in plain_paths}
        inside = OPT_STATE
    if len(around) != 1 or around == {PARAMS.rstrip(SEPARATOR)}:
        return "", ""
    return f"{around.pop()}{SEPARATOR}", inside


def _joined(head: str, inner: str) -> str:
    """Joins a part of a target and a path in it, as the checkpoint would have it."""
    return plain(SEPARATOR.join(filter(None, (head, inner))))
