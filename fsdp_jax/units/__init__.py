"""FSDP units: which parameters are gathered together, how they are gathered, and how their
gradients are reduced.
"""
