"""The processes of a run: virtual devices, clusters, barriers."""

from fsdp_jax.launch.cluster import (
    barrier,
    fail_together,
    is_lead,
    join_cluster,
    leave_cluster,
    require_same,
    use_virtual_devices,
)
from fsdp_jax.launch.native_output import NativeOutput
from fsdp_jax.launch.step_timeout import StepTimeout

__all__ = [
    "NativeOutput",
    "StepTimeout",
    "barrier",
    "fail_together",
    "is_lead",
    "join_cluster",
    "leave_cluster",
    "require_same",
    "use_virtual_devices",
]
