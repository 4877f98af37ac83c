"""The weights that a run starts from, where they are not random: a folder's or another run's."""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from fsdp_jax.api import Sharded
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.checkpoint.arrays import leaves_of
from fsdp_jax.checkpoint.export import PARAMS, raise_if_misfits, read_params, saved_params
from fsdp_jax.data import Tokenizer, load_tokenizer
from fsdp_jax.errors import ConfigError, DamageError, message
from fsdp_jax.io.array_specs import describe_array, parse_description, stored_as
from fsdp_jax.io.model_files import TOKENIZER
from fsdp_jax.lora import Adapters, split_lora
from fsdp_jax.sharding.padding import mark_padded
from fsdp_jax.sharding.quantized import QuantizedStruct, as_model_arrays
from fsdp_jax.step.state import put
from fsdp_jax.tree import PyTree, flatten, unflatten
from fsdp_jax.weights import import_adapters, import_weights, read_config, table_of
from fsdp_jax.weights.adapters import stated_base
from fsdp_jax.weights.new_rows import grown_array, warn_of_new_rows

CHECKPOINTS = "checkpoints"
IS_IMPORT = "imported"  # key of a step's metadata: the name of the folder that was imported
HAS_STATE = "imported_state"  # likewise, true: with its optimizer state, so that a run goes on
NO_ADAPTERS = Adapters()
# Parameters that stay random where the weights have another number of classes.
CLASSIFIER = ("head/kernel", "head/bias")


def verified_tokenizer(folder: Path) -> Tokenizer | None:
    """Reads the tokenizer in a folder of weights, or in a run's directory; None if it has none.

    Raises DamageError if its digest is not the one that the run's newest checkpoint records.
    """
    if not (folder / TOKENIZER).exists():
        return None
    tokenizer = load_tokenizer(folder)
    saved = tokenizer.digest
    if (folder / CHECKPOINTS).is_dir():
        with CheckpointStore(folder / CHECKPOINTS) as store:
            step = store.latest()
            if step is not None:  # what was imported without a tokenizer has no digest of one
                saved = store.record(step)["metadata"].get("tokenizer", saved)
    if tokenizer.digest != saved:
        raise DamageError(
            "the tokenizer beside the weights has changed",
            where=str(folder / TOKENIZER),
            expected=f"digest {saved}",
            got=f"digest {tokenizer.digest}",
            fix="restore the file, or import the weights again with the tokenizer that is meant",
        )
    return tokenizer


def initial_params(
    path: str | None,
    sharded: Sharded,
    model_config: Any,
    *,
    adapters: Adapters = NO_ADAPTERS,
    verify: bool = True,
) -> PyTree | None:
    """Reads the parameters of a new run straight into their shards; None if all are random.

    `path` and `verify`: see `_params_at`. `adapters`: those of `lora.weights` are read, or those of
    the run at `path`; others keep their initial values. Warns of adapters that were made for other
    weights. Raises as `_params_at` and `import_adapters`.
    """
    if path is None:
        return None
    params = _params_at(path, sharded, model_config, adapters.scale, verify=verify)
    if adapters.weights is None:
        return params
    assert adapters.scale is not None
    folder = Path(adapters.weights).expanduser()
    _warn_of_other_base(folder, Path(path).expanduser())
    target = split_lora(sharded.checkpoint_target().params)[1]
    read = import_adapters(folder, target, model_config, scale=adapters.scale)
    return unflatten(leaves_of(params) | leaves_of(read))


def _warn_of_other_base(adapters: Path, weights: Path) -> None:
    """Warns of adapters that state other weights than those that they are added to."""
    stated = stated_base(adapters)
    if not stated:
        return
    base, is_run = Path(stated).expanduser(), (weights / CHECKPOINTS).is_dir()
    if base.is_dir() and not is_run:
        is_same = base.samefile(weights)
    else:  # a name in the Hub, or a folder of another machine
        is_same = base.name in _names_of(weights, is_run=is_run)
    if not is_same:
        warnings.warn(
            message(
                "the adapters were made for other weights than those that they are added to",
                where="lora.weights",
                expected=f"model.weights {stated}",
                got=f"model.weights {weights}",
                fix="the weights that they were made for, into which none are merged",
            ),
            stacklevel=3,
        )


def _names_of(weights: Path, *, is_run: bool) -> set[str]:
    """Lists the names of weights: of their folder, in the Hub, and of the folder of an import."""
    names = {weights.name, weights.resolve().name}
    # The cache of the Hub has them in models--ORG--NAME/snapshots/COMMIT.
    names |= {part.rpartition("--")[2] for part in weights.parts if part.startswith("models--")}
    if is_run:
        with CheckpointStore(weights / CHECKPOINTS) as store:
            step = store.latest()
            assert step is not None, "it has been read"
            names.add(store.record(step)["metadata"].get(IS_IMPORT, ""))
    return names


def _params_at(
    path: str, sharded: Sharded, model_config: Any, scale: float | None, *, verify: bool
) -> Any:
    """Reads all parameters, and adapters if they are there, straight into their shards.

    The path is of a folder in Hugging Face's layout, or of a run, for its newest step, which
    `verify` checks against its manifest first: that reads all files, the optimizer state too.
    Adapters of a run must have been trained with `scale`. The head of an image model that has
    another number of classes than the weights keeps its initial values. Tokens that the weights
    lack begin with the mean of the others, and a warning says so. Raises ConfigError for weights
    that do not fit the model, by name, DamageError, and CheckpointError for what cannot be read.
    """
    folder = Path(path).expanduser()
    # Adapters that are not there, and a head for other classes, start from random values.
    base, lora = map(flatten, split_lora(sharded.checkpoint_target().params))
    of_weights = read_config(folder)
    saved_classes = getattr(of_weights, "classes", None)
    random = CLASSIFIER if saved_classes != getattr(model_config, "classes", None) else ()
    target = {path: leaf for path, leaf in base.items() if path not in random}
    # A Hugging Face folder.
    if not (folder / CHECKPOINTS).is_dir():
        ignore = [each.theirs for each in table_of(model_config).entries if each.ours in random]
        params = import_weights(folder, unflatten(target), model_config, ignore=ignore)
        _warn_of_frozen_rows(sharded, _vocabulary_added(of_weights, model_config))
        return params

    # The newest checkpoint of another run.
    with CheckpointStore(folder / CHECKPOINTS) as store:
        step = _newest_step(store, folder, verify=verify)
        record = store.record(step)
        saved = {
            path: text
            for path, text in record["leaves"].items()
            if path.startswith(PARAMS) and path.removeprefix(PARAMS) not in random
        }
        if lora and split_lora(saved)[1]:
            _check_scale(record["metadata"].get("lora_scale"), scale, str(store.path(step)))
            target |= lora
        wanted = {PARAMS + path: leaf for path, leaf in target.items()}
        # Those that get rows for more tokens are read apart, and so are those that are quantized.
        grown = _vocabulary_added(of_weights, model_config)
        for path in grown:
            saved.pop(PARAMS + path, None)
            wanted.pop(PARAMS + path, None)
        quantized = {
            path: leaf
            for path, leaf in wanted.items()
            if isinstance(leaf, QuantizedStruct) and not stored_as(saved.get(path, ""))
        }
        _check_saved_params(saved, wanted | as_model_arrays(quantized), str(store.path(step)))
        rest = {path: leaf for path, leaf in wanted.items() if path not in quantized}
        params = store.read(step, rest)
        params |= _with_new_rows(store, step, sharded, grown, of_weights, model_config)
        params |= _quantized(store, step, sharded, quantized)
        return unflatten(params)["params"]


def _newest_step(store: CheckpointStore, run: Path, *, verify: bool) -> int:
    """Finds the newest step of a run, and checks it. Raises ConfigError if there is none."""
    step = store.latest()
    if step is None:
        raise ConfigError(
            "no checkpoint there",
            where="model.weights",
            got=str(run),
            fix="fsdp-jax import FOLDER --to RUN",
        )
    if verify:
        store.require_good(step)
    return step


def _quantized(
    store: CheckpointStore, step: int, sharded: Sharded, leaves: Mapping[str, QuantizedStruct]
) -> dict[str, Any]:
    """Reads saved floats of `leaves`, and quantizes them: {saved path: array}.

    One at a time is held before it is quantized.
    """
    params = {}
    for path, leaf in leaves.items():
        of_layout = sharded.layout.by_path[path.removeprefix(PARAMS)]
        whole = jax.ShapeDtypeStruct(
            leaf.blocks.shape, leaf.blocks.dtype, sharding=of_layout.model_sharding
        )
        (array,) = store.read(step, {path: whole}).values()
        params[path] = mark_padded(put(array, of_layout), leaf)
    return params


def _vocabulary_added(of_weights: Any, model_config: Any) -> dict[str, int]:
    """Maps the path of each parameter with more rows of tokens than the weights to their dim."""
    old, new = (getattr(config, "vocab_size", 0) for config in (of_weights, model_config))
    if new <= old:
        return {}
    return table_of(model_config).vocabulary()


def _with_new_rows(
    store: CheckpointStore,
    step: int,
    sharded: Sharded,
    grown: dict[str, int],
    of_weights: Any,
    model_config: Any,
) -> dict[str, Any]:
    """Reads the parameters of `grown` from a checkpoint, and adds their rows: {saved path: array}.

    One at a time is held on the host.
    """
    if not grown:
        return {}
    old, new = of_weights.vocab_size, model_config.vocab_size
    shapes = saved_params(store, step)
    target = flatten(sharded.checkpoint_target().params)
    params = {}
    for path, dim in grown.items():
        leaf = sharded.layout.by_path[path]
        ((_, whole),) = read_params(store, step, {path: shapes[path]})
        values = grown_array(whole, leaf.model_shape, dim, old, new)
        dtype = leaf.blocks.dtype if leaf.blocks else leaf.dtype
        params[PARAMS + path] = mark_padded(put(values.astype(dtype), leaf), target[path])
    warn_of_new_rows(store.path(step), dict.fromkeys(grown, (old, new)))
    _warn_of_frozen_rows(sharded, grown)
    return params


def _warn_of_frozen_rows(sharded: Sharded, grown: Iterable[str]) -> None:
    """Warns of new rows of parameters that do not train."""
    frozen = [path for path in grown if not sharded.layout.by_path[path].trainable]
    if frozen:
        warnings.warn(
            message(
                f"the new rows of {' and '.join(frozen)} never train, as all of it is frozen",
                fix="name it in lora.trained, or leave it out of model.frozen",
            ),
            stacklevel=3,
        )


def _check_saved_params(saved: dict[str, str], wanted: dict[str, Any], where: str) -> None:
    """Raises ConfigError unless the same parameters are saved in the same shapes, in any dtypes."""
    lines = [f"{path}: unknown" for path in saved if path not in wanted]
    for path, leaf in wanted.items():
        if path not in saved:
            lines.append(f"{path}: missing")
            continue
        saved_shape = parse_description(saved[path])[1]
        own_format = getattr(leaf, "stored_as", "")
        if saved_shape != tuple(leaf.shape) or stored_as(saved[path]) != own_format:
            lines.append(f"{path}: expected {describe_array(leaf)}, got {saved[path]}")
    formats = {tuple(stored_as(text).split(":")[:3]) for text in saved.values()} - {("",)}
    keys = [f"{form} and lora.base_scales {scales}" for form, _, scales in sorted(formats)]
    fix = "model.scan_layers, lora.rank and lora.targets as they were there, with lora.base "
    fix += f"{', '.join(keys) or 'null'}; or export it, and start from that"
    raise_if_misfits(where, sorted(lines), fix=fix)


def _check_scale(saved: float | None, scale: float | None, where: str) -> None:
    """Raises ConfigError for adapters that were trained with another scale."""
    if saved != scale:
        raise ConfigError(
            "the adapters there were trained with another scale",
            where=where,
            expected=f"lora_scale {saved}",
            got=f"lora_scale {scale}",
            fix="lora.alpha and lora.rank as they were there; or export it, and start from that",
        )
