"""Imports PyTorch's distributed checkpoints, of FSDP2 or another sharding, straight into shards.

The optimizer's state is as `torch.distributed.checkpoint.state_dict` names it: the moments of the
parameter NAME are `optim.state.NAME.exp_avg` and `.exp_avg_sq`, its count of steps `.step`.
"""

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from fsdp_jax.checkpoint.arrays import OPT_STATE
from fsdp_jax.checkpoint.import_tree import COUNTS, Rename, Saved, checked_leaves, import_tree
from fsdp_jax.checkpoint.saved_array import SavedArray
from fsdp_jax.checkpoint.torch_distributed import open_torch
from fsdp_jax.io.sharded_read import STAGING_BYTES
from fsdp_jax.tree import SEPARATOR, PyTree

# Last key of a moment of optax -> its name in torch.optim.
MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}
COUNT = "step"
# (what is around the optimizer's state, the parameter, what of it)
_OF_OPTIMIZER = re.compile(r"(?:.*\.)?state\.(.+)\.(exp_avg|exp_avg_sq|momentum_buffer|step)")


def import_dcp(
    path: str | os.PathLike[str],
    target: PyTree,
    *,
    rename: Rename | None = None,
    skip: Sequence[str] = (),
    ignore: Sequence[str] = (),
    budget: int = STAGING_BYTES,
) -> PyTree:
    """Reads a checkpoint of `torch.distributed.checkpoint` into the shards of `target`.

    PyTorch is not needed: its pickles are read as data, and nothing in them is called. Each process
    reads what its devices need, from any number of ranks.

    Args:
        path: of the folder with `.metadata`.
        target: as `import_orbax` takes it. Of a whole state the counts of Adam are the parameters'
            `step`, and `step` is that too.
        rename: as `import_orbax` takes it. `saved` has the parameters by PyTorch's names, without
            the key that they were saved under (`model`): `saved["0.weight"].transpose()`.
        skip: as `import_orbax` takes it.
        ignore: likewise.
        budget: bytes of host memory beside the arrays.

    Returns a pytree like `target`. Raises as `import_orbax`.

    """
    leaves = checked_leaves(target)
    with ExitStack() as files:
        folder, arrays = open_torch(path, files)
        return import_tree(
            _TorchParts(folder, arrays), target, leaves, rename, skip, ignore, budget
        )


class _TorchParts:
    """The parameters of a checkpoint and each of their moments, by PyTorch's names."""

    def __init__(self, folder: Path, arrays: dict[str, SavedArray]) -> None:
        self.folder = folder
        self.names = arrays.keys()
        self._arrays = arrays
        # Of an optimizer: {what: {parameter: array}}. The rest are parameters.
        self._moments: dict[str, Saved] = {}
        for name, array in arrays.items():
            of_optimizer = _OF_OPTIMIZER.fullmatch(name)
            if of_optimizer:
                inner, what = of_optimizer.groups()
                self._moments.setdefault(what, Saved())[inner] = array
        self.params = [name for name in arrays if not _OF_OPTIMIZER.fullmatch(name)]
        prefix = self._prefix()
        self._parameters = Saved({name.removeprefix(prefix): arrays[name] for name in self.params})

    def _prefix(self) -> str:
        """Finds the key that the parameters were saved under, with a dot behind it."""
        inner = {name for each in self._moments.values() for name in each}
        first = {name.partition(".")[0] for name in self.params}
        if inner & set(self.params) or len(first) != 1:
            return ""
        return f"{first.pop()}."

    def of(self, head: str) -> Saved:
        """Selects the parameters, or the moments of a path of ours."""
        if not head.startswith(OPT_STATE):
            return self._parameters
        return self._moments.get(MOMENTS.get(head.rpartition(SEPARATOR)[2], ""), Saved())

    def same(self, head: str, inner: str | None) -> SavedArray | str:
        """Finds the array of a path, with dots between its keys; or says why there is none."""
        if inner is not None:
            return self.of(head).get(inner.replace(SEPARATOR, "."), "missing in the checkpoint")
        last = head.rpartition(SEPARATOR)[2]
        steps = self._moments.get(COUNT)
        if last in ("count", COUNT) and steps:
            return next(iter(steps.values()))
        return "missing in the checkpoint"

    def root(self, name: str) -> str:
        """Tells parameters and moments apart; what is counted for each parameter is used once."""
        of_optimizer = _OF_OPTIMIZER.fullmatch(name)
        if not of_optimizer:
            return "parameters"
        return COUNTS if of_optimizer[2] == COUNT else "moments"

    def opened(self, array: SavedArray, budget: int) -> SavedArray:
        """Returns the array as it is: its files are open."""
        del budget
        return array
