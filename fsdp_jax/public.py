"""The names of `import fsdp_jax`, which the package imports when the first is used."""

from fsdp_jax.api import Sharded, explain_memory, fully_shard
from fsdp_jax.errors import ConfigError, SlowerWarning
from fsdp_jax.local_rows import on_local_rows
from fsdp_jax.sharding.device_bytes import device_bytes
from fsdp_jax.sharding.layout import Layout
from fsdp_jax.sharding.layout_diff import diff_layouts
from fsdp_jax.sharding.mesh import make_mesh
from fsdp_jax.sharding.offload import Offload
from fsdp_jax.sharding.optimizer_state import optimizer_specs
from fsdp_jax.sharding.padding import Padded
from fsdp_jax.sharding.precision import LossScale, Precision
from fsdp_jax.sharding.quantized import QuantizedBase
from fsdp_jax.sharding.rules import ReplicationWarning, lint, partition_specs
from fsdp_jax.sharding.show import show
from fsdp_jax.sharding.strategy import STRATEGIES
from fsdp_jax.step.batch import pad_rows
from fsdp_jax.step.compiled_step import (
    CompiledStep,
    NonFiniteError,
    RecompileWarning,
    SkippedStepWarning,
)
from fsdp_jax.step.loss_spikes import LossSpikes
from fsdp_jax.step.replicas import ReplicaError, require_equal_replicas
from fsdp_jax.step.state import TrainState
from fsdp_jax.step.step_memory import step_memory
from fsdp_jax.units.remat import RematPolicy

__all__ = [
    "STRATEGIES",
    "CompiledStep",
    "ConfigError",
    "Layout",
    "LossScale",
    "LossSpikes",
    "NonFiniteError",
    "Offload",
    "Padded",
    "Precision",
    "QuantizedBase",
    "RecompileWarning",
    "RematPolicy",
    "ReplicaError",
    "ReplicationWarning",
    "Sharded",
    "SkippedStepWarning",
    "SlowerWarning",
    "TrainState",
    "device_bytes",
    "diff_layouts",
    "explain_memory",
    "fully_shard",
    "lint",
    "make_mesh",
    "on_local_rows",
    "optimizer_specs",
    "pad_rows",
    "partition_specs",
    "require_equal_replicas",
    "show",
    "step_memory",
]
