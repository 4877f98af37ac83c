"""Training from a configuration: its keys, the objects that it describes, and the training loop."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_jax.train.report import run_curves

__all__ = ["run_curves"]


def __getattr__(name: str) -> Any:
    """Imports the public name when it is used: the command prints its help without it."""
    if name != "run_curves":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from fsdp_jax.train.report import run_curves

    return run_curves
