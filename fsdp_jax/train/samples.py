"""What a trained model writes, shown at the end of a run, for the first held-out example."""

from typing import Any

import jax
import numpy as np

from fsdp_jax.api import Sharded
from fsdp_jax.data import Examples, Tokenizer
from fsdp_jax.data.examples import Row
from fsdp_jax.models.tasks import Task
from fsdp_jax.step.state import TrainState

TEMPERATURE = 0.7
IMAGES = 16


def make_sample(
    sharded: Sharded,
    state: TrainState,
    task: Task,
    examples: Examples,
    tokenizer: Tokenizer | None,
    *,
    length: int,
    window: int,
    seed: int,
) -> str:
    """Returns text of at most `length` tokens, or predictions for a few images.

    A model with an encoder writes no more than the targets that it is trained on.

    Args:
        sharded: the model.
        state: its parameters.
        task: of its family.
        examples: the first one is the prompt.
        tokenizer: None for images.
        length: tokens to write.
        window: tokens that the model sees at most.
        seed: of what is drawn.

    """
    if task.prompt is None or task.write is None:
        count = min(IMAGES, len(examples))
        return _predictions(sharded, state, [examples[index] for index in range(count)])
    assert tokenizer is not None, "text has one"
    example, write = examples[0], task.write
    prompt = task.prompt(example)
    if "targets" in example:
        length = min(length, len(example["targets"]))
    settings: dict[str, Any] = {"temperature": TEMPERATURE, "key": jax.random.key(seed)}

    def run(model: Any, prompt: jax.Array) -> jax.Array:
        return write(model, prompt, length, window=window, **settings)

    written: np.ndarray = np.asarray(sharded.apply(run)(state, prompt))
    if tokenizer.end in written:
        written = written[: list(written).index(tokenizer.end)]
    return tokenizer.decode(prompt) + task.separator + tokenizer.decode(written)


def _predictions(sharded: Sharded, state: TrainState, rows: list[Row]) -> str:
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
