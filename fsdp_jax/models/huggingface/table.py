"""Weight tables: which of our parameters is which tensor of a file, read in both directions.

An entry states only how one tensor is placed in one of our arrays, so that any slice of ours is
slices of theirs: dims in another order, rows of padding that theirs lacks, and layers that ours
stacks in a first dim where theirs has a tensor for each.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fsdp_jax.io.tensor_mapping import TensorMapping


@dataclass(frozen=True)
class Entry:
    """One parameter of ours, and the tensor of a file that it is, or each block's tensor.

    Attributes:
        ours: its path; `*` is the number of a block, dropped where the blocks are stacked.
        theirs: the tensor's name; `*` is the number of a block.
        dims: for each dim of ours, the dim of theirs; empty where they are in the same order.
        rows: (dim of ours, its size in theirs) where ours is padded with zeros.
        aliases: other names of the same tensor that a file may have too.
        depth: the number of blocks, where the names have a `*`.
        vocabulary: dim of ours with a row for each token, of which a file may have fewer.

    """

    ours: str
    theirs: str
    dims: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    aliases: tuple[str, ...] = ()
    depth: int | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        assert (self.depth is not None) == ("*" in self.ours) == ("*" in self.theirs), self

    def mapping(self, name: str, shape: Sequence[int]) -> TensorMapping | None:
        """Places the tensor `name` in an array of one block, or of no block.

        None where an array of that shape cannot hold it.
        """
        # the array may have another number of dims than the tensor, which then does not fit
        dims = self.dims or tuple(range(len(shape)))
        # the part of our array that is not padding
        size = list(shape)
        if self.rows and len(shape) > self.rows[0]:
            size[self.rows[0]] = self.rows[1]
        too_large = any(unpadded > padded for unpadded, padded in zip(size, shape, strict=True))
        if too_large or len(dims) != len(shape):
            return None
        their_shape = tuple(size[dims.index(dim)] for dim in range(len(dims)))
        return TensorMapping(name, (0,) * len(size), tuple(size), dims, their_shape)

    def mappings(self, path: str, shape: Sequence[int]) -> list[TensorMapping]:
        """Places tensors in our array at `path`: one for each block that it stacks.

        Empty where the path is not this entry's, or the array cannot hold them.
        """
        # stacked blocks: the path has no number, and the first dim counts the blocks
        if self.depth is not None and path == self.ours.replace("*/", "") and shape:
            mapping = self.mapping("", shape[1:])
            if mapping is None:
                return []
            return [mapping.in_stack(self.name(block), block) for block in range(shape[0])]
        # one block, by its number, or an array of no block
        match = re.fullmatch(re.escape(self.ours).replace(r"\*", r"(\d+)"), path)
        if match is None:
            return []
        mapping = self.mapping(self.name(*match.groups()), shape)
        if mapping is None:
            return []
        return [mapping]

    def name(self, block: object = "") -> str:
        """Formats the name of the tensor, with the number of its block for the `*`."""
        return self.theirs.replace("*", str(block))

    def names(self) -> list[str]:
        """Lists the name of the tensor, or of every block's."""
        if not self.depth:
            return [self.theirs]
        return [self.name(block) for block in range(self.depth)]


@dataclass(frozen=True)
class Table:
    """Which tensor of a file is which parameter, for all parameters of one configuration.

    Attributes:
        entries: of all parameters.
        prefix: of names, that a file may lack if it was saved from the model without its head.
        ignored: names of tensors that are not parameters of ours; `*` is a number.
        modules: (part of the name of a tensor, the same in the name of its module), in order, where
            transformers' modules have other names than the tensors in its files.

    """

    entries: tuple[Entry, ...]
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()

    def module_of(self, name: str) -> str:
        """Finds the module of the weight `name`, as transformers 5 and adapters call it."""
        module = name.removesuffix(".weight")
        for stored, renamed in self.modules:
            module = module.replace(stored, renamed)
        return module

    def names(self) -> dict[str, Entry]:
        """Maps the name of every tensor of a full model to its entry."""
        names = {name: entry for entry in self.entries for name in entry.names()}
        count = sum(entry.depth or 1 for entry in self.entries)
        assert len(names) == count, "each tensor has one entry"
        return names

    def vocabulary(self) -> dict[str, int]:
        """Maps the path of each parameter with a row for each token to the dim of these rows."""
        dims = {entry.ours: entry.vocabulary for entry in self.entries}
        return {path: dim for path, dim in dims.items() if dim is not None}

    def aliases(self) -> dict[str, str]:
        """Maps the other names of tensors to their names in `entries`."""
        return {alias: entry.theirs for entry in self.entries for alias in entry.aliases}

    def is_ignored(self, name: str) -> bool:
        """Tells whether a tensor is one of `ignored`, no parameter of ours."""
        patterns = (re.escape(each).replace(r"\*", r"\d+") for each in self.ignored)
        return any(re.fullmatch(pattern, name) for pattern in patterns)

    def mappings(self, leaves: Mapping[str, Any]) -> dict[str, list[TensorMapping]]:
        """Finds the `Entry.mappings` of {path: an object with its shape}, by path.

        They are empty where no entry has the path.
        """
        # by paths, not by entries: a path without an entry is reported by the caller
        mappings = {}
        for path, leaf in leaves.items():
            candidates = (entry.mappings(path, leaf.shape) for entry in self.entries)
            matches = [match for match in candidates if match]
            assert len(matches) < 2, f"{path} has two entries"
            mappings[path] = matches[0] if matches else []
        return mappings


def for_every_block(
    depth: int, ours: str, theirs: str, entries: Sequence[Entry]
) -> Iterator[Entry]:
    """Yields `entries`, whose names are relative to a block, for `depth` blocks.

    `ours` and `theirs`: the path and the name of a block, with a `*` for its number.
    """
    for entry in entries:
        ours_path, name = f"{ours}/{entry.ours}", f"{theirs}.{entry.theirs}"
        yield replace(entry, ours=ours_path, theirs=name, depth=depth)


def _layer_entries(
    kernel: str, dims: tuple[int, ...], ours: str, theirs: str, *, bias: bool = True
) -> list[Entry]:
    """Makes the entries of the weight and the bias of the layer at `ours`.

    `kernel`: what we call the weight. `dims`: as for `Entry`, of the weight.
    """
    entries = [Entry(f"{ours}/{kernel}", f"{theirs}.weight", dims)]
    if bias:
        entries.append(Entry(f"{ours}/bias", f"{theirs}.bias"))
    return entries


LINEAR = (1, 0)
"""torch.nn.Linear stores the transpose."""
linear = partial(_layer_entries, "kernel", LINEAR)
conv1d = partial(_layer_entries, "kernel", ())
"""GPT-2's Conv1D, whose weight is [in, out] as ours is."""
conv2d = partial(_layer_entries, "kernel", (2, 3, 1, 0))
"""torch.nn.Conv2d, whose weight is [out, in, height, width] and ours [height, width, in, out]."""
norm = partial(_layer_entries, "scale", ())
"""A LayerNorm, or without bias an RMSNorm."""
