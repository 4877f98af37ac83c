"""The strategies as data: what is sharded at rest, when it is gathered, how gradients are reduced."""

from dataclasses import dataclass
from typing import Literal

from jax.sharding import Mesh

from fsdp_jax.errors import did_you_mean, message
from fsdp_jax.sharding.mesh import DATA, REPLICA, data_axes


@dataclass(frozen=True)
class Strategy:
    """What one row of the ZeRO table says.

    Attributes:
        shards_params: parameters are sharded at rest.
        shards_optimizer: gradients are reduce-scattered and the optimizer state is sharded.
        gather: parameters are gathered `never`, once per `step`, or per `unit` in forward and again
            in backward.
        hybrid: shards along `data` alone and repeats along `replica`.
        summary: one line for tables and help.

    """

    name: str
    aliases: tuple[str, ...]
    shards_params: bool
    shards_optimizer: bool
    gather: Literal["never", "step", "unit"]
    hybrid: bool
    summary: str

    def shard_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The mesh axes that state is sharded along; axes of size one are left out unless nothing
        else is there.
        """
        parts = data_axes(mesh) or (DATA,)
        names = (REPLICA, *parts) if REPLICA in mesh.axis_names and not self.hybrid else parts
        return tuple(axis for axis in names if mesh.shape[axis] > 1) or parts


_TABLE = (
    Strategy("no_shard", ("ddp", "zero0"), False, False, "never", False, "everything replicated"),
    Strategy("zero1", (), False, True, "never", False, "optimizer state sharded"),
    Strategy(
        "shard_grad_op",
        ("zero2",),
        True,
        True,
        "step",
        False,
        "all sharded at rest, gathered once per step",
    ),
    Strategy(
        "full_shard",
        ("zero3", "fsdp"),
        True,
        True,
        "unit",
        False,
        "all sharded, gathered unit by unit",
    ),
    Strategy(
        "hybrid_shard",
        ("hsdp",),
        True,
        True,
        "unit",
        True,
        "full_shard over data, replicated over replica",
    ),
    Strategy(
        "hybrid_shard_zero2",
        (),
        True,
        True,
        "step",
        True,
        "shard_grad_op over data, replicated over replica",
    ),
)
STRATEGIES = {strategy.name: strategy for strategy in _TABLE}
_NAMES = {alias: s for s in _TABLE for alias in (s.name, *s.aliases)}


def get_strategy(name: str | Strategy) -> Strategy:
    """The strategy of that name or alias, in any case: `full_shard`, `FULL_SHARD`, `zero3`, `fsdp`.

    Raises:
        ValueError: no such strategy; the message proposes the nearest.

    """
    if isinstance(name, Strategy):
        return name
    if name.lower() in _NAMES:
        return _NAMES[name.lower()]
    fix = did_you_mean(name, _NAMES)
    raise ValueError(
        message(
            f"unknown strategy '{name}'", where="strategy", expected=sorted(STRATEGIES), fix=fix
        )
    )
