"""The weights that a run starts from, where they are not random: other people's, or those of
another run.
"""

from pathlib import Path
from typing import Any

from fsdp_jax.api import Sharded
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.checkpoint.export import PARAMS, refuse_misfits
from fsdp_jax.data.tokenizer import FILE as TOKENIZER
from fsdp_jax.errors import ConfigError, message
from fsdp_jax.io.array_specs import describe, parse_description
from fsdp_jax.lora import split_lora
from fsdp_jax.tree import PyTree, flatten, unflatten
from fsdp_jax.weights import import_weights, read_config

CHECKPOINTS = "checkpoints"
NEW_HEAD = {
    "head/kernel": ("classifier.weight", "head.weight"),
    "head/bias": ("classifier.bias", "head.bias"),
}
"""What another number of classes leaves random: our path -> its names in a ViT and in a CaiT."""


def weights_shape(path: str | None) -> Any | None:
    """The configuration of the model whose weights lie there, by its `config.json`; None where no
    weights are named.
    """
    return None if path is None else read_config(Path(path).expanduser())


def tokenizer_beside(path: str | None) -> str | None:
    """The folder of the weights, if their tokenizer lies there too."""
    return path if path is not None and (Path(path).expanduser() / TOKENIZER).is_file() else None


def initial_params(
    path: str | None, sharded: Sharded, shape: Any, *, verify: bool = True
) -> PyTree | None:
    """The parameters of a fresh run, read straight into their shards; None leaves all of them
    random.

    Adapters of LoRA are in no file and stay as they are drawn; so does the head of a model of
    images that has another number of classes than the weights.

    Args:
        path: of a folder as on Hugging Face, or of a run, whose newest step it is.
        sharded: the model.
        shape: its configuration.
        verify: whether a run's step is held against its manifest first, which reads all of its
            files, the optimizer's state too. A folder as on Hugging Face has none.

    Raises:
        ConfigError: weights that do not fit the model, by name.
        DamageError: a checkpoint that is not as it was written, if that is verified.
        CheckpointError: one that cannot be read.

    """
    if path is None:
        return None
    folder = Path(path).expanduser()
    base, _ = split_lora(sharded.checkpoint_target().params)
    anew = (
        NEW_HEAD
        if getattr(weights_shape(path), "classes", None) != getattr(shape, "classes", None)
        else {}
    )
    target = unflatten({path: leaf for path, leaf in flatten(base).items() if path not in anew})
    if not (folder / CHECKPOINTS).is_dir():
        return import_weights(
            folder, target, shape, ignore=[name for names in anew.values() for name in names]
        )
    with CheckpointStore(folder / CHECKPOINTS) as store:
        step = store.latest()
        if step is None:
            fix = "fsdp-jax import FOLDER --to RUN"
            raise ConfigError(
                message("no checkpoint there", where="model.weights", got=str(folder), fix=fix)
            )
        if verify:
            store.require_good(step)
        wanted = flatten({"params": target})
        saved = store.record(step)["leaves"]
        kept = {path: leaf for path, leaf in saved.items() if path.removeprefix(PARAMS) not in anew}
        _check_saved(kept, wanted, str(store.path(step)))
        return unflatten(store.read(step, wanted))["params"]


def _check_saved(saved: dict[str, str], wanted: dict[str, Any], where: str) -> None:
    """Every parameter is there in its shape, and there is no other. Dtypes may differ: they are
    cast.
    """
    found = {
        path: parse_description(text)[1] for path, text in saved.items() if path.startswith(PARAMS)
    }
    lines = [f"{path}: unknown" for path in found if path not in wanted]
    for path, leaf in wanted.items():
        if path not in found:
            lines.append(f"{path}: missing")
        elif found[path] != tuple(leaf.shape):
            lines.append(f"{path}: expected {describe(leaf)}, got {saved[path]}")
    refuse_misfits(
        where,
        sorted(lines),
        fix="model.scan_layers and lora as they were there; or export it, and start from that",
    )
