"""Figures read from a compiled program: memory, cost, timeline."""
