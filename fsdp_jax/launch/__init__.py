"""The processes of a run: virtual devices, clusters, barriers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from fsdp_jax.processes import in_any_process

# The names are imported when they are used: `fsdp-jax launch` starts processes, and takes no device
# itself, so it loads no jax.
__all__ = [
    "NativeOutput",
    "StepTimeout",
    "barrier",
    "fail_together",
    "in_any_process",
    "is_lead",
    "join_cluster",
    "leave_cluster",
    "require_same",
    "use_virtual_devices",
]

MODULES = {
    "NativeOutput": "fsdp_jax.launch.native_output",
    "StepTimeout": "fsdp_jax.launch.step_timeout",
    "in_any_process": "fsdp_jax.processes",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(MODULES.get(name, "fsdp_jax.launch.cluster")), name)
