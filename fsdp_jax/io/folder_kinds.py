"""Tells what wrote a folder, by the names of its files: nothing in them is read."""

import os
from pathlib import Path

from fsdp_jax.errors import ConfigError, first_lines

CHECKPOINTS = ("checkpoints", "checkpoint")  # what programs call the folder of all steps
SHOWN = 10
TREE_METADATA = "_METADATA"  # of each tree that orbax writes
MANIFEST = "manifest.json"  # of each checkpoint of ours
ORBAX = "an orbax checkpoint of another program"
TORCH = "PyTorch's distributed checkpoint"
LEVANTER = "a checkpoint of Levanter"
LEVANTER_METADATA = "metadata.json"  # of each of its checkpoints, beside the folder or the database
# What orbax leaves in the folder of a checkpoint.
_ORBAX_NAMES = {"_CHECKPOINT_METADATA", "orbax.checkpoint", "manifest.ocdbt", TREE_METADATA}
_RUN_NAMES = {"config.json", "config.yaml", "starts.jsonl"}  # beside `checkpoints`, of ours
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
FIXES = {
    kind: f"fsdp_jax.checkpoint.import_{program}(PATH, target), or "
    f"fsdp-jax import PATH --from {program} --config CONFIG --to RUN"
    for kind, program in ((ORBAX, "orbax"), (TORCH, "dcp"), (LEVANTER, "levanter"))
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


def named_kind(folder: Path) -> str:
    """Names what is in a folder, or says that it is not known or not there."""
    if not folder.is_dir():
        return "a file" if folder.exists() else "no such folder"
    if not _names(folder):
        return "an empty folder"
    return kind_of_folder(folder) or "a folder of something else"


def not_one_checkpoint(what: str, folder: Path, kind: str, expected: str) -> ConfigError:
    """Makes the error for a folder that is no checkpoint of a kind, or has several steps of it."""
    found, steps = kind_of_folder(folder), steps_in(folder)
    if found == kind and steps:
        got, fix = first_lines(steps[-SHOWN:], SHOWN), f"one of them: {folder / steps[-1]}"
    else:
        got, fix = named_kind(folder), FIXES.get(found, "")
    return ConfigError(what, where=str(folder), expected=expected, got=got, fix=fix)


def _own_kind(folder: Path) -> str:
    """Names what is in a folder, steps apart."""
    names = _names(folder)
    if MANIFEST in names:
        return "a checkpoint of fsdp_jax"
    if CHECKPOINTS[0] in names:
        # Other programs have such a folder too, such as MaxText.
        newest = kind_of_folder(folder / CHECKPOINTS[0])
        if newest not in FIXES or names & _RUN_NAMES:
            return "the output directory of a run of fsdp_jax"
        return newest
    if ".metadata" in names:
        return TORCH
    if LEVANTER_METADATA in names and names & {"manifest.ocdbt", "model"}:
        return LEVANTER
    if names & _ORBAX_NAMES or trees_in(folder):
        return ORBAX
    suffixes = {os.path.splitext(name)[1] for name in names}
    if ".safetensors" in suffixes:
        return "safetensors"
    if ".distcp" in suffixes:
        return f"{TORCH} without its .metadata, as of a save that did not end"
    if suffixes & set(_PICKLES):
        return "pickled weights of PyTorch"
    return ""


def trees_in(folder: Path) -> list[str]:
    """Lists the folders in one that hold a tree of orbax, such as `items`, `default` or `state`."""
    return sorted(name for name in _names(folder) if (folder / name / TREE_METADATA).is_file())


def steps_in(folder: Path) -> list[str]:
    """Lists the folders in one that are named by a number, as `10` or `step-10`, in its order.

    Where there are none, those in the folder of checkpoints in it: `checkpoints/10`.
    """
    number = {name: name.removeprefix("step-") for name in _names(folder)}
    names = [name for name, each in number.items() if each.isdecimal() and (folder / name).is_dir()]
    if names:
        return sorted(names, key=lambda name: int(number[name]))
    for below in CHECKPOINTS:
        if below in number:
            return [f"{below}/{step}" for step in steps_in(folder / below)]
    return []


def _names(folder: Path) -> set[str]:
    """Lists the names in a folder; none if it cannot be listed."""
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()
