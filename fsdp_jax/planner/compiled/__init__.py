"""Memory, cost and timeline, read from a compiled program."""
