"""Imports checkpoints that other programs wrote, straight into shards."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, TypedDict, Unpack

from fsdp_jax.checkpoint.chunked_parts import MODEL, ChunkedParts
from fsdp_jax.checkpoint.chunked_tree import open_levanter, open_orbax
from fsdp_jax.checkpoint.export import PARAMS
from fsdp_jax.checkpoint.import_tree import Parts, Rename, import_tree
from fsdp_jax.checkpoint.torch_distributed import open_torch
from fsdp_jax.checkpoint.torch_parts import TorchParts
from fsdp_jax.errors import ConfigError
from fsdp_jax.tree import PyTree

AnyPath = str | os.PathLike[str]
Program = Literal["orbax", "dcp", "levanter"]


class ImportOptions(TypedDict, total=False):
    """The keywords of `import_orbax`."""

    rename: Rename | None
    skip: Sequence[str]
    ignore: Sequence[str]
    budget: int | None


def import_orbax(
    path: AnyPath,
    target: PyTree,
    *,
    rename: Rename | None = None,
    skip: Sequence[str] = (),
    ignore: Sequence[str] = (),
    budget: int | None = None,
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
            several (`np.stack`, `np.concatenate`, `transpose`, `reshape`, slices, a multiple:
            nothing is read for them), or None for a parameter that the checkpoint lacks. `saved`
            has the checkpoint's parameters without `params` around them; and the function is called
            again for each moment of the optimizer, with the checkpoint's moments of the same paths;
            `saved.moment` is 1 for the first, 2 for the second, else 0. By default the paths are
            the same. `fsdp_jax.weights.foreign_names` makes it for the names of known programs.
        skip: patterns of paths in the parameters that keep their initial value, with `*` for
            anything, such as `head/*`: of a target without arrays they are left out, and
            `sharded.init(params=)` makes them anew.
        ignore: patterns of arrays of the checkpoint that need not be used.
        budget: bytes of host memory beside the arrays, where a chunk of the files takes no more; by
            default a 64th of this process's shards, from 8 to 256 MiB.

    Returns:
        A pytree like `target`. A leaf whose sharding does not divide its shape is a `Padded`.

    Raises:
        ConfigError: a URL; a folder of something else; arrays that are missing, not used, or of
            another shape or dtype, all at once and by both names.
        DamageError: files that are not as they were written.
        ValueError: a target without shardings.

    Example:
        >>> params = import_orbax("flax/1000", sharded.checkpoint_target().params)
        >>> state = sharded.init(params=params)

    """
    with open_checkpoint(path, "orbax") as parts:
        return import_tree(parts, target, rename, skip, ignore, budget)


def import_dcp(path: AnyPath, target: PyTree, **options: Unpack[ImportOptions]) -> PyTree:
    """Reads a checkpoint of `torch.distributed.checkpoint` into the shards of `target`.

    PyTorch is not needed: its pickles are read as data, and nothing in them is called. Each process
    reads what its devices need, from any number of ranks.

    Args:
        path: of the folder with `.metadata`, or around those of the model and its optimizer.
        target: as `import_orbax` takes it. Of a whole state the counts of Adam are the parameters'
            `step`, and `step` is that too.
        options: `rename`, `skip`, `ignore` and `budget` of `import_orbax`. `saved` has the
            parameters by PyTorch's names, without the key that they were saved under (`model`):
            `saved["0.weight"].transpose()`.

    Returns a pytree like `target`. Raises as `import_orbax`.

    """
    with open_checkpoint(path, "dcp") as parts:
        return import_tree(parts, target, **options)


def import_levanter(path: AnyPath, target: PyTree, **options: Unpack[ImportOptions]) -> PyTree:
    """Reads a checkpoint of Levanter into the shards of `target`.

    Args:
        path: of a step, such as `step-1000`: with an array in each folder, or all in a database.
        target: as `import_orbax` takes it.
        options: `rename`, `skip`, `ignore` and `budget` of `import_orbax`. `saved` has the arrays
            below `model`: `saved["transformer/norm/weight"]`.

    Returns a pytree like `target`. Raises as `import_orbax`.

    """
    with open_checkpoint(path, "levanter") as parts:
        return import_tree(parts, target, **options)


@contextmanager
def open_checkpoint(path: AnyPath, written_by: Program) -> Iterator[Parts]:
    """Opens a checkpoint of another program: its names; arrays can be read until it is closed.

    Raises ConfigError for a folder of something else, and DamageError.
    """
    if re.match(r"\w+:/", os.fspath(path)):
        raise ConfigError(
            "a checkpoint is read from a file system",
            where="path",
            got=os.fspath(path),
            fix="a copy of it, or a mount such as gcsfuse",
        )
    with ExitStack() as files:
        if written_by == "orbax":
            yield ChunkedParts(open_orbax(path), PARAMS)
        elif written_by == "levanter":
            yield ChunkedParts(open_levanter(path), MODEL)
        else:
            yield TorchParts(*open_torch(path, files))
