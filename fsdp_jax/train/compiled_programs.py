"""Where a run keeps its compiled programs, so that the next start does not compile them again."""

import os
import platform
from pathlib import Path
from typing import Literal

import jax

from fsdp_jax.compat.compilation_cache import cache_folder, use_compilation_cache
from fsdp_jax.errors import ConfigError

KeepPrograms = Literal["auto", "always", "never"]


def keep_compiled_programs(keep: KeepPrograms, device_kind: str) -> str:
    """Turns jax's persistent compilation cache on, unless it is on or unwanted; describes it.

    `auto` does so in a run of one process. In several on GPUs each measures a part of the kernels
    and waits for what the others measured: one that finds its program in the cache would not come.
    A folder that the environment names (`JAX_COMPILATION_CACHE_DIR`) is left as it is. Raises
    ConfigError if the folder cannot be made.
    """
    stated = cache_folder()
    if stated is not None:
        return f"kept in {stated} (JAX_COMPILATION_CACHE_DIR)"
    several = jax.process_count() > 1
    if keep == "never" or (keep == "auto" and several):
        return "not kept (train.keep_programs)"
    folder = programs_folder(device_kind)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = "compiled programs cannot be kept"
        fix = "set XDG_CACHE_HOME or JAX_COMPILATION_CACHE_DIR, or train.keep_programs to never"
        raise ConfigError(what, where=str(folder), got=error, fix=fix) from error
    use_compilation_cache(str(folder))
    kept = f"kept in {folder} (train.keep_programs)"
    if device_kind == "cpu" and jax.device_count() > 1:
        kept += "; steps with loops are compiled at each start on CPUs"
    return kept


def programs_folder(device_kind: str) -> Path:
    """Names the folder in the user's caches; one for each host where the CPU runs the programs.

    Hosts that share it may have other instruction sets.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = device_kind.replace("/", " ").replace(" ", "-").lower()
    if name == "cpu":
        name = f"cpu-{platform.node()}"
    return Path(base).expanduser() / "fsdp_jax" / "programs" / name
