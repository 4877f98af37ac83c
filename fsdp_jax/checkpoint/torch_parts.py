"""The parameters and moments of PyTorch's distributed checkpoints, of FSDP2 or another sharding.

The optimizer's state is as `torch.distributed.checkpoint.state_dict` names it: the moments of the
parameter NAME are `optim.state.NAME.exp_avg` and `.exp_avg_sq`, its count of steps `.step`.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from fsdp_jax.checkpoint.arrays import OPT_STATE
from fsdp_jax.checkpoint.import_tree import COUNTS, Saved
from fsdp_jax.checkpoint.saved_array import SavedArray
from fsdp_jax.tree import SEPARATOR

# Last key of a moment of optax -> its name in torch.optim.
MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}
COUNT = "step"
# (what is around the optimizer's state, the parameter, what of it)
_OF_OPTIMIZER = re.compile(r"(?:.*\.)?state\.(.+)\.(exp_avg|exp_avg_sq|momentum_buffer|step)")


class TorchParts:
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
        rest = {name: each for name, each in arrays.items() if not _OF_OPTIMIZER.fullmatch(name)}
        # Numbers beside the parameters: steps, and what a program counts of its own.
        self._numbers = Saved({name: each for name, each in rest.items() if not each.shape})
        self.params = [name for name in rest if name not in self._numbers]
        prefix = self._prefix()
        self._parameters = Saved({name.removeprefix(prefix): arrays[name] for name in self.params})

    def _prefix(self) -> str:
        """Finds the key that the parameters were saved under, with a dot behind it."""
        inner = {name for each in self._moments.values() for name in each}
        first = {name.partition(".")[0] for name in self.params}
        if inner & set(self.params) or len(first) != 1:
            return ""
        return f"{first.pop()}."

    @property
    def has_moments(self) -> bool:
        """Whether the checkpoint has moments of an optimizer."""
        return bool(self._moments.keys() - {COUNT})

    def require_readable(self, is_state: bool, ignore: Sequence[str]) -> None:
        """Raises nothing: a file that is missing is an error when the metadata is read."""

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
        steps = [*self._moments.get(COUNT, {}).values()]
        steps += [each for name, each in self._numbers.items() if name.split(".")[-1] == COUNT]
        if last in ("count", COUNT) and steps:
            return steps[0]
        return "missing in the checkpoint"

    def root(self, name: str) -> str:
        """Tells parameters and moments apart; what is counted for each parameter is used once."""
        of_optimizer = _OF_OPTIMIZER.fullmatch(name)
        if name in self._numbers or (of_optimizer and of_optimizer[2] == COUNT):
            return COUNTS
        return "moments" if of_optimizer else "parameters"

    def opened(self, array: SavedArray, budget: int) -> SavedArray:
        """Returns the array as it is: its files are open."""
        return array
