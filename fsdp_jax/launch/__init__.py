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

__all__ = [
    "barrier",
    "fail_together",
    "is_lead",
    "join_cluster",
    "leave_cluster",
    "require_same",
    "use_virtual_devices",
]
