"""Fully Sharded Data Parallel for JAX and Flax: ZeRO-1, -2, -3 and hybrid, by sharding annotations."""

from fsdp_jax.api import Sharded as Sharded
from fsdp_jax.api import SlowerWarning as SlowerWarning
from fsdp_jax.api import fully_shard as fully_shard
from fsdp_jax.compiled import NonFiniteError as NonFiniteError
from fsdp_jax.compiled import Step as Step
from fsdp_jax.errors import ConfigError as ConfigError
from fsdp_jax.layout import Layout as Layout
from fsdp_jax.mesh import make_mesh as make_mesh
from fsdp_jax.precision import Precision as Precision
from fsdp_jax.rules import ReplicationWarning as ReplicationWarning
from fsdp_jax.rules import lint as lint
from fsdp_jax.rules import partition_specs as partition_specs
from fsdp_jax.state import TrainState as TrainState
from fsdp_jax.strategy import STRATEGIES as STRATEGIES

__version__ = "0.1.0"
