"""Text from a causal language model of any family, and answers from an encoder-decoder."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def sample(
    model: Callable[[jax.Array], jax.Array],
    prompt_tokens: jax.Array,
    length: int,
    *,
    temperature: float,
    key: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """Continues `prompt_tokens`, int32 [P], by `length` tokens; returns int32 [P + length].

    Every token costs a full forward pass: this is for looking at a model, not for serving one.

    Args:
        model: int32 [1, T] to causal logits [1, T, V].
        prompt_tokens: P is at least 1.
        length: tokens to write.
        temperature: a Python number; 0 takes the likeliest token.
        key: of what is drawn.
        window: the last tokens that the model sees, all of them if None; the model's sequence
            length where P + length exceeds it.
    """
    prompt = jnp.asarray(prompt_tokens, jnp.int32)
    if prompt.ndim != 1 or not prompt.size:
        expected = "expected prompt_tokens of shape [P] with P at least 1"
        raise ValueError(f"{expected}, got {prompt.shape}")
    if length < 0 or temperature < 0:
        expected = "expected length and temperature of at least 0"
        raise ValueError(f"{expected}, got {length} and {temperature}")
    # One array of the full length, filled from the left: its shape is the same for every token, so
    # that the model is compiled once.
    total = prompt.size + length
    T = min(window or total, total)

    def write_token(known: jax.Array, tokens: jax.Array) -> jax.Array:
        start = jnp.maximum(known - T, 0)
        window_T = jax.lax.dynamic_slice(tokens, (start,), (T,))
        # what follows the last known token is padding, which a causal model does not see
        logits_V = model(window_T[None])[0, known - start - 1].astype(jnp.float32)
        return tokens.at[known].set(_draw_token(logits_V, temperature, key, known))

    return jax.lax.fori_loop(prompt.size, total, write_token, jnp.pad(prompt, (0, length)))


def answer(
    model: Callable[..., jax.Array],
    inputs: jax.Array,
    length: int,
    *,
    temperature: float,
    key: jax.Array,
) -> jax.Array:
    """Writes an answer to `inputs` with an encoder-decoder; returns its tokens, int32 [length].

    Tokens after an end-of-text token have no meaning. The cost is that of `sample`.

    Args:
        model: int32 [1, S] and [1, T] to logits [1, T, V]; it starts from a 0, as T5 does.
        inputs: int32 [S] without padding.
        length: tokens to write, at least 1.
        temperature: as for `sample`.
        key: of what is drawn.
    """
    if length < 1 or temperature < 0:
        expected = "expected length of at least 1 and temperature of at least 0"
        raise ValueError(f"{expected}, got {length}, {temperature}")

    # `written` starts with the 0 that the decoder starts from; what follows token `known` is
    # padding, which its causal attention does not see
    def write_token(known: jax.Array, written: jax.Array) -> jax.Array:
        logits_V = model(inputs[None], written[None, :-1])[0, known].astype(jnp.float32)
        return written.at[known + 1].set(_draw_token(logits_V, temperature, key, known))

    return jax.lax.fori_loop(0, length, write_token, jnp.zeros(length + 1, jnp.int32))[1:]


def _draw_token(
    logits_V: jax.Array, temperature: float, key: jax.Array, number: jax.Array
) -> jax.Array:
    """Draws token `number`, int32 [], from softmax(logits / temperature); at 0 the likeliest."""
    if temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    token = jax.random.categorical(jax.random.fold_in(key, number), logits_V / temperature)
    return token.astype(jnp.int32)
