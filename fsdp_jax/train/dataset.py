"""From the keys of the data to batches of this process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from fsdp_jax.data import (
    LoadedData,
    Loader,
    eval_batches,
    load_tokenizer,
    make_loader,
    open_examples,
)
from fsdp_jax.data.loader import Batch
from fsdp_jax.errors import ConfigError, message
from fsdp_jax.train.build import Run
from fsdp_jax.train.config import DataConfig
from fsdp_jax.train.initial_weights import tokenizer_beside
from fsdp_jax.train.shapes import target_length


@dataclass(frozen=True)
class Data:
    """What a run reads.

    Attributes:
        loaded: the examples, and what is known of them.
        evaluation: makes an iterator over held-out batches; None where there is not one held-out
            example.

    """

    loaded: LoadedData
    loader: Loader
    evaluation: Callable[[], Iterator[Batch]] | None

    @property
    def unit(self) -> str:
        """What a loss is per."""
        tokenizer = self.loaded.tokenizer
        return "image" if tokenizer is None else "byte" if tokenizer.name == "bytes" else "token"

    @property
    def tokenizer(self) -> str:
        """What a checkpoint must have in common with a run."""
        return "none" if self.loaded.tokenizer is None else self.loaded.tokenizer.digest


def open_data(
    settings: DataConfig, run: Run, weights: str | None, *, seed: int, eval_limit: int | None
) -> Data:
    """The examples, and this process's part of their batches.

    Args:
        settings: the keys of the data.
        run: the model and the batch that they are for.
        weights: `model.weights`, whose tokenizer it is where the keys name none.
        seed: of their order.
        eval_limit: batches of an evaluation, at most.

    Raises:
        ConfigError: what is missing, malformed or does not go together, with its key or its place.

    """
    task, rows = run.family.task, jax.tree.leaves(run.batch)[0].shape[0]
    beside = tokenizer_beside(weights) if task.is_text else None
    given = settings.tokenizer or (None if settings.kind == "tokens" else beside)
    if weights is not None and given is None and task.is_text and settings.kind != "tokens":
        what, fix = (
            "no tokenizer beside the weights",
            "the tokenizer.json that they were trained with, or bytes if so",
        )
        raise ConfigError(message(what, where="data.tokenizer", got=weights, fix=fix))
    loaded = open_examples(
        settings.kind,
        sequence_length=settings.sequence_length,
        targets_length=target_length(settings) if "target_length" in task.data_keys else None,
        path=settings.path,
        split=settings.split,
        field=settings.field,
        tokenizer=given,
        vocab_size=getattr(run.shape, "vocab_size", None),
        held_out=settings.held_out,
        apart=settings.packing,
        invalid=settings.invalid,
        too_long=settings.too_long,
        seed=seed,
        **_of_images(run),
    )
    _check_tokenizer(loaded, beside)
    _check_rows(loaded, run)
    share = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    loader = make_loader(loaded.train, global_batch_size=rows, seed=seed, **share)
    if loaded.held_out is None:
        return Data(loaded, loader, None)
    return Data(
        loaded,
        loader,
        partial(eval_batches, loaded.held_out, batch_size=rows, limit=eval_limit, **share),
    )


def _of_images(run: Run) -> dict[str, int]:
    """What drawn images shall be like, or labels at most."""
    return (
        {}
        if run.family.task.is_text
        else {"image_size": run.shape.image_size, "classes": run.shape.classes}
    )


def _check_tokenizer(loaded: LoadedData, beside: str | None) -> None:
    """Weights know the tokens of their own tokenizer alone."""
    if beside is None:
        return
    own = load_tokenizer(Path(beside).expanduser())
    if loaded.tokenizer is not None and loaded.tokenizer.digest != own.digest:
        what, got = "another tokenizer than the weights were trained with", loaded.tokenizer.name
        fix = "leave data.tokenizer out, or tokenize with theirs; if this one is meant, put it beside the weights"
        raise ConfigError(
            message(what, where="data.tokenizer", expected=own.name, got=got, fix=fix)
        )


def _check_rows(loaded: LoadedData, run: Run) -> None:
    """Rows are what the step is compiled for."""
    found = {name: (array.shape, array.dtype) for name, array in loaded.train[0].items()}
    wanted = {name: (leaf.shape[1:], leaf.dtype) for name, leaf in run.batch.items()}
    if "images" in wanted and found["images"] != wanted["images"]:
        fix = "use a model for images of that size, or resize them"
        expected, got = (
            f"{'x'.join(map(str, shape))}" for shape, _ in (wanted["images"], found["images"])
        )
        raise ConfigError(
            message(
                "the images have another size",
                where="data.path",
                expected=expected,
                got=got,
                fix=fix,
            )
        )
    assert found == wanted, (found, wanted)
