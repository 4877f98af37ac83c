"""What a trained model says: shown at the end of a run, from the beginning of what was held out."""

from typing import Any

import jax
import numpy as np

from fsdp_jax.api import Sharded
from fsdp_jax.data import Examples, Tokenizer
from fsdp_jax.data.examples import Row
from fsdp_jax.models import Task, answer, sample
from fsdp_jax.step.state import TrainState

PROMPT = 64  # tokens of plain text that a sample goes on from
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
    """Text of at most `length` tokens, or predictions for a few images.

    A model with an encoder writes no more than the targets that it is trained on.

    Args:
        sharded: the model.
        state: its parameters.
        task: of its family.
        examples: to begin with the first of.
        tokenizer: None for images.
        length: tokens to write.
        window: tokens that the model sees at most.
        seed: of what is drawn.

    """
    if task == "images":
        return _predictions(
            sharded, state, [examples[at] for at in range(min(IMAGES, len(examples)))]
        )
    assert tokenizer is not None, "text has one"
    row = examples[0]
    settings: dict[str, Any] = {"temperature": TEMPERATURE, "key": jax.random.key(seed)}
    if task == "text to text":
        given, longest = row["inputs"][row["inputs_mask"] > 0], min(length, len(row["targets"]))

        def write(model: Any, given: jax.Array) -> jax.Array:
            return answer(model, given, longest, **settings)
    else:
        given = prompt_of(row)

        def write(model: Any, given: jax.Array) -> jax.Array:
            return sample(model, given, length, window=window, **settings)

    written: np.ndarray = np.asarray(sharded.apply(write)(state, given))
    if task == "text":
        written = written[len(given) :]
    if tokenizer.end in written:
        written = written[: list(written).index(tokenizer.end)]
    between = "\n-> " if task == "text to text" else ""
    return tokenizer.decode(given) + between + tokenizer.decode(written)


def prompt_of(row: Row) -> np.ndarray:
    """int32 [P] to go on from: up to where the loss begins of a row with a prompt, else the first
    tokens.
    """
    tokens, mask = row["tokens"], row.get("mask")
    if mask is None or mask[0]:
        return tokens[:PROMPT]
    return tokens[: int(np.argmax(mask > 0)) + 1]


def _predictions(sharded: Sharded, state: TrainState, rows: list[Row]) -> str:
    images, labels = (np.stack([row[name] for row in rows]) for name in ("images", "labels"))
    found: np.ndarray = np.asarray(
        sharded.apply(lambda model, x: model(x).argmax(-1))(state, images)
    )
    lines = [("class    ", labels), ("predicted", found)]
    table = "\n".join(
        f"{name} {' '.join(f'{label:>3}' for label in values)}" for name, values in lines
    )
    return f"{table}\n{int((found == labels).sum())} of {len(labels)} right"
