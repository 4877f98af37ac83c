"""Sharded checkpoints with a verified manifest, and the lease that keeps out a second writer."""

from fsdp_jax.checkpoint.export import export_params, import_params
from fsdp_jax.checkpoint.import_foreign import import_dcp, import_levanter, import_orbax
from fsdp_jax.checkpoint.lease import Lease
from fsdp_jax.checkpoint.manifest import Checked
from fsdp_jax.checkpoint.preflight import Preflight
from fsdp_jax.checkpoint.saved_array import SavedArray
from fsdp_jax.checkpoint.store import CheckpointStore
from fsdp_jax.checkpoint.verify import Verified, verify_run
from fsdp_jax.errors import CheckpointError, DamageError
from fsdp_jax.io.safetensors_writer import Exported

__all__ = [
    "Checked",
    "CheckpointError",
    "CheckpointStore",
    "DamageError",
    "Exported",
    "Lease",
    "Preflight",
    "SavedArray",
    "Verified",
    "export_params",
    "import_dcp",
    "import_levanter",
    "import_orbax",
    "import_params",
    "verify_run",
]
