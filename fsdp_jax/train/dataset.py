"""Makes the batches of this process from the data keys of a configuration."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax

from fsdp_jax.data import (
    DataOptions,
    LoadedData,
    Loader,
    Tokenizer,
    eval_batches,
    make_loader,
    open_examples,
)
from fsdp_jax.data.loader import Batch
from fsdp_jax.data.options import KINDS, SIDE
from fsdp_jax.data.tokenizer import extends
from fsdp_jax.errors import ConfigError
from fsdp_jax.train.build import Run
from fsdp_jax.train.config import TrainConfig
from fsdp_jax.train.initial_weights import verified_tokenizer
from fsdp_jax.train.shapes import target_length


@dataclass(frozen=True)
class Data:
    """The data of a run: the examples, this process's training batches, and held-out batches."""

    loaded: LoadedData  # the examples and their description
    loader: Loader  # this process's training batches
    # Returns an iterator over held-out batches; None without held-out examples.
    evaluation: Callable[[], Iterator[Batch]] | None

    @property
    def loss_unit(self) -> str:
        """What the loss is per: `image`, `byte` or `token`."""
        if self.loaded.tokenizer is None:
            return "image"
        return "byte" if self.loaded.tokenizer.name == "bytes" else "token"

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer, which must equal the checkpoint's; "none" for images."""
        return "none" if self.loaded.tokenizer is None else self.loaded.tokenizer.digest


def open_data(run: Run, settings: DataOptions, train: TrainConfig, weights: str | None) -> Data:
    """Opens the examples of a run, and this process's part of their batches.

    `weights`: the folder that the run starts from, None for none. Raises ConfigError.
    """
    task, seed = run.family.task, train.seed
    # Text takes the tokenizer of the weights by default; token shards have their own.
    tokenizer, beside = settings.tokenizer, None
    if task.is_text and weights is not None:
        beside = verified_tokenizer(Path(weights).expanduser())
        if tokenizer is None and not KINDS[settings.kind].is_tokenized:
            tokenizer = weights
            if beside is None:
                raise ConfigError(
                    "no tokenizer beside the weights",
                    where="data.tokenizer",
                    got=weights,
                    fix="the tokenizer.json that they were trained with, or bytes if so",
                )
    # The examples, checked against the model.
    targets = target_length(settings) if "target_length" in task.data_keys else None
    options = replace(
        settings,
        tokenizer=tokenizer,
        target_length=targets,
        vocab_size=getattr(run.model_config, "vocab_size", None),
        weights=weights,
        seed=seed,
        image_size=getattr(run.model_config, "image_size", SIDE),
        classes=getattr(run.model_config, "classes", None),
    )
    loaded = open_examples(options)
    _check_tokenizer_digest(loaded, beside)
    if beside is not None and settings.tokenizer is None:
        loaded = replace(loaded, tokenizer=beside)  # shards may hold fewer of its files
    _check_examples(loaded, run)
    # Batches of this process.
    rows = run.rows
    process = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    loader = make_loader(
        loaded.train, global_batch_size=rows, seed=seed, identity=loaded.identity, **process
    )
    evaluation = None
    if loaded.held_out is not None:
        limit = train.eval_batches
        evaluation = partial(eval_batches, loaded.held_out, batch_size=rows, limit=limit, **process)
    return Data(loaded, loader, evaluation)


def _check_tokenizer_digest(loaded: LoadedData, expected: Tokenizer | None) -> None:
    """Raises ConfigError if the text is not encoded by the tokenizer of the weights, if any.

    One that adds tokens to it, and changes nothing else, may encode the text too.
    """
    if expected is None or loaded.tokenizer is None or extends(loaded.tokenizer, expected):
        return
    if loaded.tokenizer.digest != expected.digest:
        raise ConfigError(
            "another tokenizer than the weights were trained with",
            where="data.tokenizer",
            expected=expected.name,
            got=loaded.tokenizer.name,
            fix=(
                "leave data.tokenizer out, or tokenize with theirs; if this one is meant, put it "
                "beside the weights"
            ),
        )


def _check_examples(loaded: LoadedData, run: Run) -> None:
    """Raises ConfigError for images of another size than that of the arrays of `run.batch`."""
    rows = {name: (array.shape, array.dtype) for name, array in loaded.train[0].items()}
    compiled = {name: (leaf.shape[1:], leaf.dtype) for name, leaf in run.batch.items()}
    if "images" in compiled and rows["images"] != compiled["images"]:
        raise ConfigError(
            "the images have another size",
            where="data.path",
            expected="x".join(map(str, compiled["images"][0])),
            got="x".join(map(str, rows["images"][0])),
            fix="use a model for images of that size, or resize them",
        )
    assert rows == compiled, (rows, compiled)
