"""Boxes of Flax, with names of an array's dims: told by their attributes, without Flax's modules.

Linen's are `nn.Partitioned` and `nn.LogicallyPartitioned`; those of NNX are its Variables.
"""

from typing import Any


def is_box(leaf: Any) -> bool:
    """Tells whether a leaf is a box of Flax: a Variable, or an array with names of its dims."""
    return hasattr(leaf, "get_metadata") or hasattr(leaf, "names")


def array_in_box(leaf: Any) -> Any:
    """Takes the array in a box of Linen; a Variable has its array's shape itself."""
    return getattr(leaf, "value", leaf) if hasattr(leaf, "names") else leaf


def names_in_box(leaf: Any) -> Any:
    """Reads the names that `with_partitioning` gave to a parameter's dims; None without them."""
    if hasattr(leaf, "get_metadata"):
        return leaf.get_metadata().get("out_sharding") or None
    return getattr(leaf, "names", None)


def rules_in_box(leaf: Any) -> Any:
    """Reads the table of logical axes beside the names; None without one."""
    if hasattr(leaf, "get_metadata"):
        return leaf.get_metadata().get("sharding_rules")
    return getattr(leaf, "rules", None)
