"""Fully Sharded Data Parallel for JAX and Flax, by sharding annotations: ZeRO-1, -2, -3, hybrid."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_jax.public import *  # noqa: F403

__version__ = "0.1.0"
# The names of `fsdp_jax.public` and these packages are attributes of this module, and imported when
# they are used: the command prints its help without jax, and who shards a model loads neither orbax
# nor the planner.
PACKAGES = {
    *("certify", "checkpoint", "contract", "data", "launch", "lora", "models", "optim", "planner"),
    *("sharding", "testing", "trackers", "train", "units", "weights"),
}


def __getattr__(name: str) -> Any:
    """Imports a package, or the public names, when it is first asked for."""
    if name in PACKAGES:
        return import_module(f"{__name__}.{name}")
    is_private = name.startswith("_") and name != "__all__"
    if not is_private:
        public = import_module(f"{__name__}.public")
        if hasattr(public, name):
            return getattr(public, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Lists the public names for completion, as `dir` and notebooks show them."""
    return sorted({*globals(), *__getattr__("__all__"), *PACKAGES})
