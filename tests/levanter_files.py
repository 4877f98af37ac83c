"""Writes checkpoints as Levanter does: by jax's own serialization of arrays, and `metadata.json`.

In releases before 2026 each array is zarr in a folder of its own; now all are zarr3 in a database.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.experimental.array_serialization import serialization

from fsdp_jax.tree import flatten


def write_levanter(folder: Path, tree: Any, *, database: bool = False, step: int = 0) -> None:
    """Writes the arrays of a tree by their paths; numbers become arrays."""
    folder.mkdir(parents=True)
    arrays = {path: jnp.asarray(leaf) for path, leaf in flatten(tree).items()}
    if database:
        base = {"driver": "file", "path": str(folder)}
        specs = [
            {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": path}}
            for path in arrays
        ]
    else:
        specs = [serialization.get_tensorstore_spec(str(folder / path)) for path in arrays]
    manager = serialization.GlobalAsyncCheckpointManager()
    manager.serialize(list(arrays.values()), specs, on_commit_callback=lambda: None)
    manager.wait_until_finished()
    metadata = {"step": step, "timestamp": "2026-01-01T00:00:00", "is_temporary": False}
    (folder / "metadata.json").write_text(json.dumps(metadata))
