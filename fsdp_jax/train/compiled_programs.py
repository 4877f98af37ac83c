"""Where a run keeps its compiled programs, so that the next start does not compile them again."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from fsdp_jax.compat.compilation_cache import cache_folder, cache_is_enabled, use_compilation_cache
from fsdp_jax.errors import ConfigError
from fsdp_jax.step.kept_programs import KeptPrograms
from fsdp_jax.train.config import TrainConfig
from fsdp_jax.train.planning import NOT_OF_THE_STEP

PROGRAMS = "programs"  # folder in the directory of a run
# Keys that change no program; a tokenizer, weights or a corpus may, by the sizes that they have.
_OF_THE_LOOP = frozenset(
    (
        *("train.programs", "train.keep_programs", "train.log_every", "train.eval_every"),
        *("train.eval_batches", "train.sample", "train.seed", "train.check_replicas"),
        *("train.devices", "data.held_out"),
    )
)


@dataclass(frozen=True)
class Programs:
    """Where a run keeps its programs: `kept`, if not in jax's own cache, and how that is told."""

    kept: KeptPrograms | None
    text: str

    @property
    def use(self) -> str:
        """What is done with kept programs, or `none`."""
        return "none" if self.kept is None else self.kept.use


def keep_compiled_programs(
    settings: TrainConfig, output: str, values: Mapping[str, Any], device_kind: str
) -> Programs:
    """Chooses where the programs of a run are kept, and turns jax's own cache on if that is it.

    `train.programs` comes before all; a folder that the environment names
    (`JAX_COMPILATION_CACHE_DIR`) is left as it is. One process uses jax's cache, several keep their
    programs in the directory of the run. `values`: of the configuration, by key. Raises ConfigError
    for a folder without programs for so many processes, or one that cannot be made.
    """
    keep, several = settings.keep_programs, jax.process_count() > 1
    kept: KeptPrograms | None = None
    if settings.programs is not None:
        directory = Path(settings.programs).expanduser()
        kept = KeptPrograms(directory, "require", keys_of_the_step(values))
        kept.require_any(jax.process_count())
        return Programs(kept, f"of {directory} (train.programs)")
    stated = cache_folder()
    if stated is not None:
        return Programs(None, f"kept in {stated} (JAX_COMPILATION_CACHE_DIR)")
    if keep == "never" or (several and not cache_is_enabled()):
        return Programs(None, "not kept (train.keep_programs)")
    folder = programs_folder(device_kind)
    if several:
        folder = Path(output) / PROGRAMS
        kept = KeptPrograms(folder, "keep", keys_of_the_step(values))
    else:
        _use_jax_cache(folder)
    text = f"kept in {folder} (train.keep_programs)"
    if device_kind == "cpu" and jax.device_count() > 1:
        text += "; steps with loops are compiled at each start on CPUs"
    return Programs(kept, text)


def keys_of_the_step(values: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the values of a configuration that may matter to its programs, by key."""
    return {
        key: value
        for key, value in values.items()
        if key.partition(".")[0] not in NOT_OF_THE_STEP and key not in _OF_THE_LOOP
    }


def _use_jax_cache(folder: Path) -> None:
    """Turns jax's cache on, in a folder. Raises ConfigError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = "compiled programs cannot be kept"
        fix = "set XDG_CACHE_HOME or JAX_COMPILATION_CACHE_DIR, or train.keep_programs to never"
        raise ConfigError(what, where=str(folder), got=error, fix=fix) from error
    use_compilation_cache(str(folder))


def programs_folder(device_kind: str) -> Path:
    """Names the folder in the user's caches; one for each host where the CPU runs the programs.

    Hosts that share it may have other instruction sets.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = device_kind.replace("/", " ").replace(" ", "-").lower()
    if name == "cpu":
        name = f"cpu-{platform.node()}"
    return Path(base).expanduser() / "fsdp_jax" / "programs" / name
