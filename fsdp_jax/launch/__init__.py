"""The processes of a run: virtual devices, clusters, barriers."""

from fsdp_jax.launch.cluster import (
    barrier,
    is_lead,
    join_cluster,
    leave_cluster,
    use_virtual_devices,
)

__all__ = ["barrier", "is_lead", "join_cluster", "leave_cluster", "use_virtual_devices"]
