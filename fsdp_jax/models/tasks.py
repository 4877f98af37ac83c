"""What the models are trained for: text, text to text, or images.

A Task holds what families of one kind share: an example's arrays, the loss, how text is sampled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fsdp_jax.models.losses import classification_loss, next_token_loss, text_to_text_loss
from fsdp_jax.models.sampling import answer, sample
from fsdp_jax.models.vision import CHANNELS

Example = Mapping[str, np.ndarray]
Arrays = dict[str, jax.ShapeDtypeStruct]
PROMPT_TOKENS = 64  # tokens of plain text that a sample continues


@dataclass(frozen=True)
class Lengths:
    """The lengths of an example in tokens, where it is text."""

    sequence: int  # of a sequence, or of an encoder's inputs
    target: int  # of a decoder's targets
    packed: bool = False  # a row holds several documents, with `mask`, `segments` and `positions`


@dataclass(frozen=True, kw_only=True)
class Task:
    """The arrays of an example, the loss of a model on it, and the text that a model writes."""

    name: str  # for messages, and for the kinds of data, which list the tasks that read them
    # (model, batch, *, train) -> (sum, count); where `is_text` it takes `chunk` too
    loss: Callable[..., tuple[jax.Array, jax.Array]]
    data_keys: tuple[str, ...] = ()  # of the data, that only this task reads
    config_lengths: Callable[[Lengths], dict[str, int]]  # the model configuration's fields for them
    any_length: bool = False  # weights serve any length; otherwise their own is the limit
    arrays: Callable[[Any, Lengths], Arrays]  # of one example of a model configuration
    prompt: Callable[[Example], np.ndarray] | None = None  # int32 [P]; None for images
    # (model, prompt, length, *, window, temperature, key) -> int32 tokens
    write: Callable[..., jax.Array] | None = None
    separator: str = ""  # printed between prompt and written text

    @property
    def is_text(self) -> bool:
        """Whether examples are tokens, and the model has a vocabulary."""
        return self.prompt is not None


_integers = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
_floats = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def _text_arrays(config: Any, lengths: Lengths) -> Arrays:
    """Lists the shapes and dtypes of one example of `next_token_loss`, by name."""
    T = lengths.sequence
    arrays = {"tokens": _integers((T + 1,))}
    if lengths.packed:
        arrays |= {"mask": _floats((T,)), "segments": _integers((T,)), "positions": _integers((T,))}
    return arrays


def _text_to_text_arrays(config: Any, lengths: Lengths) -> Arrays:
    """Lists the shapes and dtypes of one example of `text_to_text_loss`, by name."""
    S, T = lengths.sequence, lengths.target
    inputs = {"inputs": _integers((S,)), "inputs_mask": _integers((S,))}
    return inputs | {"targets": _integers((T,)), "mask": _floats((T,))}


def _image_arrays(config: Any, lengths: Lengths) -> Arrays:
    """Lists the shapes and dtypes of one example of `classification_loss`, by name."""
    size = config.image_size
    images = jax.ShapeDtypeStruct((size, size, CHANNELS), jnp.uint8)
    return {"images": images, "labels": _integers(())}


def _text_prompt(example: Example) -> np.ndarray:
    """Finds the prompt of an example, int32 [P], for `Task.write` to continue.

    It is the tokens before the first target with loss; where all have loss, PROMPT_TOKENS of them.
    """
    # mask[t] weighs the target tokens[t + 1]
    tokens, mask = example["tokens"], example.get("mask")
    if mask is None or mask[0]:
        return tokens[:PROMPT_TOKENS]
    return tokens[: int(np.argmax(mask > 0)) + 1]


TEXT = Task(
    name="text",
    loss=next_token_loss,
    data_keys=("packing",),
    config_lengths=lambda lengths: {"sequence_length": lengths.sequence},
    arrays=_text_arrays,
    prompt=_text_prompt,
    write=lambda model, prompt, *rest, **more: sample(model, prompt, *rest, **more)[len(prompt) :],
)
TEXT_TO_TEXT = Task(
    name="text to text",
    loss=text_to_text_loss,
    data_keys=("target_length",),
    config_lengths=lambda lengths: {
        "inputs_length": lengths.sequence,
        "targets_length": lengths.target,
    },
    any_length=True,
    arrays=_text_to_text_arrays,
    prompt=lambda example: example["inputs"][example["inputs_mask"] > 0],
    write=lambda *args, window, **more: answer(*args, **more),
    separator="\n-> ",
)
IMAGES = Task(
    name="images",
    loss=classification_loss,
    config_lengths=lambda lengths: {},
    arrays=_image_arrays,
)
