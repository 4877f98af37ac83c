"""Imports a checkpoint that another program wrote, as a run: its weights, or all of its state."""

import os
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optax

from fsdp_jax.api import Sharded, fully_shard
from fsdp_jax.checkpoint.import_foreign import Program, open_checkpoint
from fsdp_jax.checkpoint.import_tree import Parts, Rename, import_tree
from fsdp_jax.data.checks import ignored_key_error
from fsdp_jax.errors import ConfigError, did_you_mean, first_lines
from fsdp_jax.models import FAMILIES
from fsdp_jax.sharding.mesh import make_mesh
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.train.build import make_model, resolve_adapters
from fsdp_jax.train.config import Config
from fsdp_jax.train.config_file import load_config
from fsdp_jax.train.huggingface import describe_import, require_empty, write_imported
from fsdp_jax.train.initial_weights import HAS_STATE, IS_IMPORT
from fsdp_jax.train.model_config import make_model_config
from fsdp_jax.train.optimizers import make_optimizer, make_schedule
from fsdp_jax.tree import flatten
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
    with open_checkpoint(source, written_by) as parts:
        lines: list[str] = []
        if names is None:
            names, lines = _known_names(parts, settings)
        if parts.has_moments and not weights_only:
            if dtype is not None:
                fix = "precision.param in the configuration, or --weights-only"
                raise ignored_key_error("--dtype", dtype, fix)
            return "\n".join([_import_state(parts, settings, names, skip, target, config), *lines])
        done = _import_weights(parts, settings, names, skip, target, dtype or "float32")
        if parts.has_moments:
            lines.append("the optimizer's state is left out (--weights-only)")
        else:
            lines.append("the checkpoint has no optimizer state: a run starts with a fresh one")
        return "\n".join([done, *lines])


def _known_names(parts: Parts, settings: Config) -> tuple[Rename | None, list[str]]:
    """Finds the names of a known program: (the function, what to print); None for our own."""
    model_config = make_model_config(settings.model, settings.data)
    program = program_of(parts.of("params"), model_config)
    if program is None:
        return None, []
    return foreign_names(program, model_config), [f"names of {program}"]


def _import_weights(
    parts: Parts,
    settings: Config,
    names: Rename | None,
    skip: Sequence[str],
    target: Path,
    dtype: str,
) -> str:
    """Writes the parameters as step 0 of a run."""
    model_config = make_model_config(settings.model, settings.data)
    family = FAMILIES[settings.model.family]
    sharded = fully_shard(
        lambda rngs: family.model(model_config, rngs=rngs),
        optax.identity(),
        make_mesh(),
        precision=Precision(dtype),
    )
    wanted = sharded.checkpoint_target().params
    params = import_tree(parts, wanted, names, skip)
    anew = sorted(flatten(wanted).keys() - flatten(params).keys())
    if anew:
        params = sharded.to_checkpoint(sharded.init(params=params)).params
    metadata = {IS_IMPORT: parts.folder.resolve().name}
    write_imported(target, {"params": params}, metadata, model_config)
    lines = [f"{describe_import(params, target)}: for --model.weights {target}"]
    if anew:
        lines.append(f"initialized anew: {first_lines(anew, SHOWN)}")
    return "\n".join(lines)


def _import_state(
    parts: Parts,
    settings: Config,
    names: Rename | None,
    skip: Sequence[str],
    target: Path,
    config: AnyPath,
) -> str:
    """Writes the parameters and the optimizer's state as the step of a run that they are of."""
    sharded, model_config, scale = _sharded_as_trained(settings)
    fresh = sharded.to_checkpoint(sharded.init(settings.train.seed))
    state = import_tree(parts, fresh, names, skip)
    step = int(state.step)
    metadata = {IS_IMPORT: parts.folder.resolve().name, HAS_STATE: True, "lora_scale": scale}
    write_imported(target, state, metadata, model_config, step=step)
    done = f"{describe_import(state.params, target)}, with the optimizer's state of step {step:,}"
    lines = [f"{done}: go on with fsdp-jax train {config} --output {target}"]
    if skip:
        lines.append(f"initialized anew, with their moments: {', '.join(skip)}")
    return "\n".join(lines)


def _sharded_as_trained(settings: Config) -> tuple[Sharded, Any, float | None]:
    """Makes (the layout of a run's state over these devices, the model's config, LoRA's scale)."""
    model_config = make_model_config(settings.model, settings.data)
    adapters = resolve_adapters(settings.lora, settings.model, model_config)
    family, mesh = FAMILIES[settings.model.family], make_mesh()
    platform = mesh.devices.flat[0].platform
    make, frozen = make_model(settings.model, adapters, family, model_config, platform)
    schedule = make_schedule(settings.optimizer, settings.train.steps)
    sharded = fully_shard(
        make,
        make_optimizer(settings.optimizer, schedule),
        mesh,
        precision=settings.precision,
        frozen=frozen,
        base=settings.lora.quantized,
    )
    return sharded, model_config, adapters.scale


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
    function: Rename = found[RENAME]
    return function
