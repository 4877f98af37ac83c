"""Text, instructions and images, and batches of them that resume exactly.

Documents become tokens, in memory or as shards on disk; examples are rows by index; a loader makes
batches. `open_examples` opens any of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_jax.data.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Imports the public names when one is used: a configuration has `data.options` alone."""
    if name.startswith("_"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.public"), name)
