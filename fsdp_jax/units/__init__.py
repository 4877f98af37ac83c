"""FSDP units: how parameters are grouped, gathered together, and their gradients reduced."""
