"""The training state and the compiled training step."""
