"""Machines to plan for: chips, their links, and compilers for hardware that is not present."""
