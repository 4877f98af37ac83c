"""A sample of a trained model, shown at the end of a run, for the first held-out example."""

import warnings
from typing import Any

import jax
import numpy as np

from fsdp_jax.api import Sharded
from fsdp_jax.data import LoadedData
from fsdp_jax.data.examples import Row
from fsdp_jax.errors import SlowerWarning
from fsdp_jax.step.state import TrainState
from fsdp_jax.train.build import Run

TEMPERATURE = 0.7
IMAGES = 16


def make_sample(run: Run, state: TrainState, loaded: LoadedData, *, length: int, seed: int) -> str:
    """Writes text that continues the first held-out example, or predictions for a few images.

    Without held-out examples, takes those of training. `length`: of the text, in tokens.
    """
    task = run.family.task
    examples = loaded.held_out or loaded.train
    if task.prompt is None or task.write is None:
        count = min(IMAGES, len(examples))
        return _image_predictions(run.sharded, state, [examples[index] for index in range(count)])
    assert loaded.tokenizer is not None, "text has one"
    # What to continue, and by how many tokens.
    example, tokenizer, write = examples[0], loaded.tokenizer, task.write
    prompt = task.prompt(example)
    if "targets" in example:
        length = min(length, len(example["targets"]))
    # Tokens that the model sees at most.
    window = getattr(run.model_config, "sequence_length", 0)
    if "tokens" in run.batch:
        window = min(window, run.batch["tokens"].shape[1] - 1)
    settings: dict[str, Any] = {"temperature": TEMPERATURE, "key": jax.random.key(seed)}

    def generate(model: Any, prompt: jax.Array) -> jax.Array:
        return write(model, prompt, length, window=window, **settings)

    # Units are gathered for each token, which takes no more memory than a step does.
    with warnings.catch_warnings(action="ignore", category=SlowerWarning):
        written: np.ndarray = np.asarray(run.sharded.apply(generate)(state, prompt))
    if tokenizer.end in written:
        written = written[: list(written).index(tokenizer.end)]
    return tokenizer.decode(prompt) + task.separator + tokenizer.decode(written)


def _image_predictions(sharded: Sharded, state: TrainState, rows: list[Row]) -> str:
    """Formats three lines: the classes of the images, those predicted, and how many agree."""
    images = np.stack([row["images"] for row in rows])
    labels = np.stack([row["labels"] for row in rows])
    classify = sharded.apply(lambda model, images: model(images).argmax(-1))
    predicted = np.asarray(classify(state, images))
    lines = [
        f"{name:<9} {' '.join(f'{label:>3}' for label in values)}"
        for name, values in (("class", labels), ("predicted", predicted))
    ]
    correct = int((predicted == labels).sum())
    return "\n".join([*lines, f"{correct} of {len(labels)} right"])
