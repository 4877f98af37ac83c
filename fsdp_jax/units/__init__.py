"""FSDP units: how parameters are grouped and gathered, and how their gradients are reduced."""
