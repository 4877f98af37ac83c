"""Which of our parameters is which of their tensors: a table of entries, read in both directions.

An entry says how one tensor lies in one of our arrays and nothing else, so that any slice of ours
is slices of theirs: its dims in another order, dims of size one added or dropped, rows of padding
that theirs lacks, and layers that ours stacks in a first dim where theirs has a tensor for each.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_jax.io.tensor_mapping import TensorMapping


@dataclass(frozen=True)
class Entry:
    """One parameter.

    Attributes:
        ours: its path; `*` is the number of a block, or nothing where the blocks are stacked.
        theirs: the tensor's name; `*` is the number of a block.
        dims: theirs -> ours, a word for each dim, as in `out in -> in out`; 1 is a dim of size one
            that the other side lacks. Empty where both are the same.
        rows: (dim of ours, its size in theirs) where ours is padded with zeros.
        aliases: other names of the same tensor, which a file may have too.
        depth: how many blocks there are, where the names have a `*`.

    """

    ours: str
    theirs: str
    dims: str = ""
    rows: tuple[int, int] | None = None
    aliases: tuple[str, ...] = ()
    depth: int | None = None

    def __post_init__(self) -> None:
        assert (self.depth is not None) == ("*" in self.ours) == ("*" in self.theirs), self

    def piece(self, name: str, shape: Sequence[int]) -> TensorMapping | None:
        """Where one tensor lies in an array of ours that stacks nothing; None where the array
        cannot hold it.
        """
        own = [f"dim {dim}" for dim in range(len(shape))]
        left, right = [side.split() for side in self.dims.split("->")] if self.dims else [own, own]
        size = list(shape)
        if self.rows and len(shape) > self.rows[0]:
            size[self.rows[0]] = self.rows[1]
        if len(right) != len(shape) or any(
            small > large for small, large in zip(size, shape, strict=True)
        ):
            return None
        theirs = tuple(1 if word == "1" else size[right.index(word)] for word in left)
        dims = tuple(None if word == "1" else left.index(word) for word in right)
        return TensorMapping(name, (0,) * len(size), tuple(size), dims, theirs)

    def pieces(self, path: str, shape: Sequence[int]) -> list[TensorMapping]:
        """The pieces of our array at `path`; none where it is not this entry's."""
        if path == self.ours:
            one = self.piece(self.theirs, shape)
            return [] if one is None else [one]
        if self.depth is None:
            return []
        if path == self.ours.replace("*/", "") and shape:
            one = self.piece("", shape[1:])
            return (
                [] if one is None else [one.in_stack(self.name(at), at) for at in range(shape[0])]
            )
        match = re.fullmatch(re.escape(self.ours).replace(r"\*", r"(\d+)"), path)
        one = self.piece(self.name(int(match[1])), shape) if match else None
        return [] if one is None else [one]

    def name(self, block: int) -> str:
        """Of the tensor of one block."""
        return self.theirs.replace("*", str(block))


@dataclass(frozen=True)
class Table:
    """A family's parameters.

    Attributes:
        entries: of all parameters.
        prefix: what a name may lack, as where a file was saved from the model without its head.
        ignored: names of tensors that are no parameters, or of none that we have; `*` is a number.

    """

    entries: tuple[Entry, ...]
    prefix: str = ""
    ignored: tuple[str, ...] = ()

    def names(self) -> dict[str, Entry]:
        """{name of every tensor that a whole model has: its entry}."""
        found = {
            name: entry for entry in self.entries for name in _numbered(entry.theirs, entry.depth)
        }
        assert len(found) == sum(entry.depth or 1 for entry in self.entries), (
            "each tensor has one entry"
        )
        return found

    def aliases(self) -> dict[str, str]:
        """{another name: the name}."""
        return {
            alias: name
            for entry in self.entries
            for pattern in entry.aliases
            for alias, name in zip(_numbered(pattern, entry.depth), _numbered(entry.theirs, entry.depth), strict=True)
        }  # fmt: skip

    def is_ignored(self, name: str) -> bool:
        """Whether it is known to be no parameter of ours."""
        return any(
            re.fullmatch(re.escape(each).replace(r"\*", r"\d+"), name) for each in self.ignored
        )

    def pieces(self, leaves: Mapping[str, Any]) -> dict[str, list[TensorMapping]]:
        """{path: its pieces} of leaves with shapes; empty where no entry has the path."""
        found: dict[str, list[TensorMapping]] = {}
        for path, leaf in leaves.items():
            matches = [
                pieces for entry in self.entries if (pieces := entry.pieces(path, leaf.shape))
            ]
            assert len(matches) < 2, f"{path} has two entries"
            found[path] = matches[0] if matches else []
        return found


def stacked(depth: int, ours: str, theirs: str, entries: Sequence[Entry]) -> Iterator[Entry]:
    """The entries of a block, for blocks that lie under two paths with a `*` each."""
    for entry in entries:
        yield Entry(
            f"{ours}/{entry.ours}", f"{theirs}.{entry.theirs}", entry.dims, entry.rows,
            tuple(f"{theirs}.{alias}" for alias in entry.aliases), depth,
        )  # fmt: skip


LINEAR = "out in -> in out"  # torch.nn.Linear keeps its weight the other way round


def linear(ours: str, theirs: str, *, bias: bool = True) -> list[Entry]:
    """A torch.nn.Linear."""
    return [Entry(f"{ours}/kernel", f"{theirs}.weight", LINEAR), *_bias(ours, theirs, bias)]


def conv1d(ours: str, theirs: str) -> list[Entry]:
    """GPT-2's Conv1D, whose weight is [in, out] as ours is."""
    return [Entry(f"{ours}/kernel", f"{theirs}.weight"), *_bias(ours, theirs, True)]


def patches(ours: str, theirs: str) -> list[Entry]:
    """A torch.nn.Conv2d."""
    return [
        Entry(f"{ours}/kernel", f"{theirs}.weight", "out in high wide -> high wide in out"),
        *_bias(ours, theirs, True),
    ]  # fmt: skip


def norm(ours: str, theirs: str, *, bias: bool = True) -> list[Entry]:
    """A LayerNorm, or without bias an RMSNorm."""
    return [Entry(f"{ours}/scale", f"{theirs}.weight"), *_bias(ours, theirs, bias)]


def _bias(ours: str, theirs: str, bias: bool) -> list[Entry]:
    return [Entry(f"{ours}/bias", f"{theirs}.bias")] if bias else []


def _numbered(name: str, depth: int | None) -> list[str]:
    return [name] if depth is None else [name.replace("*", str(at)) for at in range(depth)]
