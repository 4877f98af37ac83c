"""Tells what wrote a folder, by the names of its files: nothing in them is read."""

import os
from pathlib import Path

TREE_METADATA = "_METADATA"  # of each tree that orbax writes
MANIFEST = "manifest.json"  # of each checkpoint of ours
ORBAX = "an orbax checkpoint of another program"
TORCH = "PyTorch's distributed checkpoint"
# What orbax leaves in the folder of a checkpoint.
_ORBAX_NAMES = {"_CHECKPOINT_METADATA", "orbax.checkpoint", "manifest.ocdbt", TREE_METADATA}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
FIXES = {
    ORBAX: "fsdp_jax.checkpoint.import_orbax(PATH, target), or "
    "fsdp-jax import PATH --from orbax --config CONFIG --to RUN",
    TORCH: "fsdp_jax.checkpoint.import_dcp(PATH, target), or "
    "fsdp-jax import PATH --from dcp --config CONFIG --to RUN",
}


def kind_of_folder(folder: Path) -> str:
    """Names what is in a folder, such as `an orbax checkpoint of another program`; "" if unknown.

    Of a folder of numbered steps, what the newest is.
    """
    kind = _own_kind(folder)
    steps = steps_in(folder)
    if not kind and steps:
        kind = _own_kind(folder / steps[-1])
    return kind


def _own_kind(folder: Path) -> str:
    """Names what is in a folder, steps apart."""
    names = _names(folder)
    if MANIFEST in names:
        return "a checkpoint of fsdp_jax"
    if "checkpoints" in names:
        return "the output directory of a run of fsdp_jax"
    if ".metadata" in names:
        return TORCH
    if names & _ORBAX_NAMES or trees_in(folder):
        return ORBAX
    suffixes = {os.path.splitext(name)[1] for name in names}
    if ".safetensors" in suffixes:
        return "safetensors"
    if suffixes & set(_PICKLES):
        return "pickled weights of PyTorch"
    return ""


def trees_in(folder: Path) -> list[str]:
    """Lists the folders in one that hold a tree of orbax, such as `items`, `default` or `state`."""
    return sorted(name for name in _names(folder) if (folder / name / TREE_METADATA).is_file())


def steps_in(folder: Path) -> list[str]:
    """Lists the folders in one that are named by a number, in its order."""
    names = [name for name in _names(folder) if name.isdecimal() and (folder / name).is_dir()]
    return sorted(names, key=lambda name: (len(name), name))


def _names(folder: Path) -> set[str]:
    """Lists the names in a folder; none if it cannot be listed."""
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()
