"""Estimates from a step's trace and layout, without compiling."""
