"""Optimizers for sharded state: Adam with moments in fewer bits, Muon on whole matrices."""

from fsdp_jax.optim.spread_muon import hidden_matrices, muon
from fsdp_jax.optim.stored_adam import (
    Moments,
    StoredAdamState,
    adam,
    adamw,
    in_float32,
    scale_by_adam,
)

__all__ = [
    "Moments",
    "StoredAdamState",
    "adam",
    "adamw",
    "hidden_matrices",
    "in_float32",
    "muon",
    "scale_by_adam",
]
