"""Sharded checkpoints, and the lease that keeps a second writer out."""

from fsdp_jax.checkpoint.lease import Lease
from fsdp_jax.checkpoint.store import CheckpointError, CheckpointStore

__all__ = ["CheckpointError", "CheckpointStore", "Lease"]
