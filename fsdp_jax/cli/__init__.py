"""The `fsdp-jax` command."""
