"""Imports the parameters of a checkpoint that another program wrote, as a run."""

import os
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import optax

from fsdp_jax.api import fully_shard
from fsdp_jax.checkpoint import import_dcp, import_orbax
from fsdp_jax.errors import ConfigError, did_you_mean, first_lines
from fsdp_jax.models import FAMILIES
from fsdp_jax.sharding.mesh import make_mesh
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.train.config_file import load_config
from fsdp_jax.train.huggingface import describe_import, require_empty, write_imported
from fsdp_jax.train.initial_weights import IS_IMPORT
from fsdp_jax.train.model_config import make_model_config
from fsdp_jax.tree import flatten

AnyPath = str | os.PathLike[str]
RENAME = "rename"  # the function in a file of names
SHOWN = 20
# What may have written a checkpoint, and the function that reads it.
READERS = {"orbax": import_orbax, "dcp": import_dcp}


def import_checkpoint_run(
    folder: AnyPath,
    to: AnyPath,
    *,
    written_by: Literal["orbax", "dcp"],
    config: AnyPath,
    rename: AnyPath | None = None,
    skip: Sequence[str] = (),
    dtype: str = "float32",
) -> str:
    """Writes the parameters as step 0 of a new run: `fsdp-jax import --from orbax` or `dcp`.

    Args:
        folder: of the checkpoint, as `import_orbax` takes it.
        to: an empty directory, or one that does not exist.
        written_by: a key of `READERS`.
        config: of a run whose `model` is that of the checkpoint.
        rename: a file of Python, which is run; its function `rename` is that of `import_orbax`.
        skip: patterns of parameters that are initialized anew.
        dtype: to store the parameters in.

    Returns what to print. Raises as `import_orbax`; ConfigError for a directory that is not empty,
    and a file without the function.

    """
    source, target = Path(folder).expanduser(), Path(to).expanduser()
    require_empty(target)
    settings = load_config(Path(config))
    model_config = make_model_config(settings.model, settings.data)
    family = FAMILIES[settings.model.family]
    sharded = fully_shard(
        lambda rngs: family.model(model_config, rngs=rngs),
        optax.identity(),
        make_mesh(),
        precision=Precision(dtype),
    )
    wanted = sharded.checkpoint_target().params
    read = READERS[written_by]
    params = read(source, wanted, rename=_function_of(rename), skip=skip)
    anew = sorted(flatten(wanted).keys() - flatten(params).keys())
    if anew:
        params = sharded.to_checkpoint(sharded.init(params=params)).params
    write_imported(target, params, {IS_IMPORT: source.resolve().name}, model_config)
    lines = [describe_import(params, target)]
    if anew:
        lines.append(f"initialized anew: {first_lines(anew, SHOWN)}")
    return "\n".join(lines)


def _function_of(file: AnyPath | None) -> Any:
    """Runs a file of the user's, and takes its function of names."""
    if file is None:
        return None
    path = Path(file).expanduser()
    if not path.is_file():
        expected = f"a file of Python with a function `{RENAME}(path, saved)`"
        raise ConfigError("no such file", where="--rename", expected=expected, got=str(path))
    found = runpy.run_path(str(path))
    if not callable(found.get(RENAME)):
        raise ConfigError(
            f"no function `{RENAME}` in the file",
            where=str(path),
            expected=f"{RENAME}(path, saved)",
            fix=did_you_mean(RENAME, [name for name in found if callable(found[name])]),
        )
    return found[RENAME]
