"""What has to happen around the processes of a run."""

from fsdp_jax.launch.cluster import (
    barrier,
    is_lead,
    join_cluster,
    leave_cluster,
    use_virtual_devices,
)

__all__ = ["barrier", "is_lead", "join_cluster", "leave_cluster", "use_virtual_devices"]
