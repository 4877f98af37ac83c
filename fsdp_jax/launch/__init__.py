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

# The names are imported when they are used: `fsdp-jax launch` starts processes, and takes no device
# itself, so it loads no jax.
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


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    module = {"NativeOutput": "native_output", "StepTimeout": "step_timeout"}.get(name, "cluster")
    return getattr(import_module(f"{__name__}.{module}"), name)
