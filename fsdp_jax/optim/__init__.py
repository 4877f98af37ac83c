"""Optimizers for sharded state: Adam with small moments, Muon on whole matrices, averages."""

from fsdp_jax.optim.params_ema import ParamsEmaState, params_ema
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
    "ParamsEmaState",
    "StoredAdamState",
    "adam",
    "adamw",
    "hidden_matrices",
    "in_float32",
    "muon",
    "params_ema",
    "scale_by_adam",
]
