"""Fully Sharded Data Parallel for JAX and Flax: ZeRO-1, -2, -3 and hybrid, by sharding annotations."""

from fsdp_jax.api import Sharded, fully_shard
from fsdp_jax.compiled import NonFiniteError, Step
from fsdp_jax.errors import ConfigError, SlowerWarning
from fsdp_jax.layout import Layout
from fsdp_jax.mesh import make_mesh
from fsdp_jax.precision import Precision
from fsdp_jax.rows import on_local_rows
from fsdp_jax.rules import ReplicationWarning, lint, partition_specs
from fsdp_jax.state import TrainState
from fsdp_jax.strategy import STRATEGIES

__all__ = [
    "STRATEGIES",
    "ConfigError",
    "Layout",
    "NonFiniteError",
    "Precision",
    "ReplicationWarning",
    "Sharded",
    "SlowerWarning",
    "Step",
    "TrainState",
    "fully_shard",
    "lint",
    "make_mesh",
    "on_local_rows",
    "partition_specs",
]
__version__ = "0.1.0"
