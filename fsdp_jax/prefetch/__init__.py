"""Prefetch: gathers the next unit while the current one computes."""
