"""Imports a checkpoint that another program wrote, as a run: its weights, or all of its state."""

import os
import runpy
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import optax

from fsdp_jax.api import fully_shard
from fsdp_jax.checkpoint.import_foreign import Program, open_checkpoint
from fsdp_jax.checkpoint.import_tree import Parts, Rename, import_tree
from fsdp_jax.data.checks import ignored_key_error
from fsdp_jax.errors import ConfigError, did_you_mean, first_lines
from fsdp_jax.models.families import family_of
from fsdp_jax.sharding.mesh import make_mesh
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.train.build import build_state
from fsdp_jax.train.config_file import load_config
from fsdp_jax.train.huggingface import describe_import, require_empty, write_imported
from fsdp_jax.train.initial_weights import HAS_STATE, IS_IMPORT
from fsdp_jax.train.model_config import make_model_config
from fsdp_jax.train.optimizers import make_optimizer, make_schedule
from fsdp_jax.tree import PyTree, flatten
from fsdp_jax.weights.foreign_names import foreign_names, program_of

AnyPath = str | os.PathLike[str]
RENAME = "rename"  # the function in a file of names
SHOWN = 20


def import_checkpoint_run(
    folder: AnyPath,
    to: AnyPath,
    *,
    written_by: Program,
    config: AnyPath,
    rename: AnyPath | None = None,
    skip: Sequence[str] = (),
    weights_only: bool = False,
    dtype: str | None = None,
) -> str:
    """Writes a checkpoint as a new run: `fsdp-jax import --from orbax`, `dcp` or `levanter`.

    With the optimizer's state, if the checkpoint has it, the run goes on at its step; else the
    parameters are step 0, for other runs to start from.

    Args:
        folder: of the checkpoint, as `import_orbax` takes it.
        to: an empty directory, or one that does not exist.
        written_by: what wrote it.
        config: of a run whose `model` is that of the checkpoint, and whose `optimizer` too.
        rename: a file of Python, which is run; its function `rename` is that of `import_orbax`. By
            default the names are those of a program that `foreign_names` knows, or ours.
        skip: patterns of parameters that are initialized anew.
        weights_only: leaves the optimizer's state out.
        dtype: to store the parameters in; default: float32. With the optimizer's state it is the
            configuration's.

    Returns what to print. Raises as `import_orbax`; ConfigError for a directory that is not empty,
    and a file without the function.

    """
    source, target = Path(folder).expanduser(), Path(to).expanduser()
    require_empty(target)
    settings = load_config(Path(config))
    names = _function_of(rename)
    model_config = make_model_config(settings.model, settings.data)
    with open_checkpoint(source, written_by) as parts:
        metadata: dict[str, Any] = {IS_IMPORT: source.resolve().name}
        lines = []
        if names is None:
            program = program_of(parts.of("params"), model_config)
            if program is not None:
                names = foreign_names(program, model_config)
                lines.append(f"names of {program}")
        if parts.has_moments and not weights_only:
            if dtype is not None:
                fix = "precision.param in the configuration, or --weights-only"
                raise ignored_key_error("--dtype", dtype, fix)
            if settings.lora.base is not None:
                raise _no_state_of_codes(settings.lora.base, target, config)
            if settings.optimizer.ema is not None:
                lines.append("an average of the parameters (optimizer.ema) starts from them")
            # Without the optimizer's average, which the run starts from the parameters.
            optimizer = replace(settings.optimizer, ema=None)
            tx = make_optimizer(optimizer, make_schedule(optimizer, settings.train.steps))
            of_run = (settings.model, settings.lora, model_config, tx, settings.precision)
            sharded, scale = build_state(*of_run)
            fresh = sharded.to_checkpoint(sharded.init(settings.train.seed))
            state = import_tree(parts, fresh, names, skip)
            step = int(state.step)
            metadata |= {HAS_STATE: True, "lora_scale": scale}
            write_imported(target, state, metadata, model_config, step=step)
            done = f"{describe_import(state.params, target)}, with the optimizer's state of step"
            goes_on = f"{step:,}: go on with fsdp-jax train {config} --output {target}"
            anew = [
                path
                for path in flatten(state.params)
                if any(fnmatchcase(path, each) for each in skip)
            ]
            return "\n".join([f"{done} {goes_on}", *_anew(sorted(anew)), *lines])
        params, anew = _import_weights(parts, model_config, names, skip, dtype or "float32")
        write_imported(target, {"params": params}, metadata, model_config)
        done = f"{describe_import(params, target)}: for --model.weights {target}"
        if parts.has_moments:
            lines.append("the optimizer's state is left out (--weights-only)")
        else:
            lines.append("the checkpoint has no optimizer state: a run starts with a fresh one")
        return "\n".join([done, *_anew(anew), *lines])


def _no_state_of_codes(base: str, to: Path, config: AnyPath) -> ConfigError:
    """Makes the error for a state whose frozen kernels would be codes: a run quantizes weights."""
    return ConfigError(
        "a base in codes has adapters, of which the checkpoint has no optimizer state",
        where="lora.base",
        got=base,
        fix=f"--weights-only, and then fsdp-jax train {config} --model.weights {to} "
        "--model.preset None --output OTHER",
    )


def _anew(paths: Sequence[str]) -> list[str]:
    """Says which parameters were initialized anew, in a line, if any."""
    return [f"initialized anew: {first_lines(paths, SHOWN)}"] if paths else []


def _import_weights(
    parts: Parts, model_config: Any, names: Rename | None, skip: Sequence[str], dtype: str
) -> tuple[PyTree, list[str]]:
    """Reads the parameters: (they, the paths of those that were initialized anew)."""
    sharded = fully_shard(
        lambda rngs: family_of(model_config).model(model_config, rngs=rngs),
        optax.identity(),
        make_mesh(),
        precision=Precision(dtype),
    )
    wanted = sharded.checkpoint_target().params
    params = import_tree(parts, wanted, names, skip)
    anew = sorted(flatten(wanted).keys() - flatten(params).keys())
    if anew:
        params = sharded.to_checkpoint(sharded.init(params=params)).params
    return params, anew


def _function_of(file: AnyPath | None) -> Rename | None:
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
