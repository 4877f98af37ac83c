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
    """Continues `prompt_tokens`, int32 [P] with P at least 1, by `length` tokens; returns int32 [P
    + length].

    `model` maps int32 [1, T] to causal logits [1, T, V]. It sees the last `window` tokens (None:
    all of them), so give the model's sequence length where P + length exceeds it. `temperature` is
    a Python number; 0 takes the likeliest token. Every token costs a full forward pass: this is for
    looking at a model, not for serving one.
    """
    prompt = jnp.asarray(prompt_tokens, jnp.int32)
    if prompt.ndim != 1 or not prompt.size:
        raise ValueError(
            f"expected prompt_tokens of shape [P] with P at least 1, got {prompt.shape}"
        )
    if length < 0 or temperature < 0:
        raise ValueError(
            f"expected length and temperature of at least 0, got {length} and {temperature}"
        )
    total = prompt.size + length
    T = min(window or total, total)

    def step(known: jax.Array, tokens: jax.Array) -> jax.Array:
        start = jnp.maximum(known - T, 0)
        view_T = jax.lax.dynamic_slice(tokens, (start,), (T,))
        # what follows the last known token is padding, which a causal model does not see
        logits_V = model(view_T[None])[0, known - start - 1].astype(jnp.float32)
        return tokens.at[known].set(_draw(logits_V, temperature, key, known))

    return jax.lax.fori_loop(prompt.size, total, step, jnp.pad(prompt, (0, length)))


def answer(
    model: Callable[..., jax.Array],
    inputs: jax.Array,
    length: int,
    *,
    temperature: float,
    key: jax.Array,
) -> jax.Array:
    """What an encoder-decoder writes for `inputs`, int32 [S] without padding: int32 [length], from
    the first token on.

    `model` maps int32 [1, S] and [1, T] to logits [1, T, V] and starts from a 0, as T5 does. What
    follows an end-of-text token is of no meaning. `temperature` and cost are as for `sample`.
    """
    if length < 1 or temperature < 0:
        raise ValueError(
            f"expected length of at least 1 and temperature of at least 0, got {length}, {temperature}"
        )

    def step(known: jax.Array, written: jax.Array) -> jax.Array:
        logits_V = model(inputs[None], written[None, :-1])[0, known].astype(jnp.float32)
        return written.at[known + 1].set(_draw(logits_V, temperature, key, known))

    return jax.lax.fori_loop(0, length, step, jnp.zeros(length + 1, jnp.int32))[1:]


def _draw(logits_V: jax.Array, temperature: float, key: jax.Array, number: jax.Array) -> jax.Array:
    """An int32 token: the likeliest at temperature 0."""
    if temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    return jax.random.categorical(jax.random.fold_in(key, number), logits_V / temperature).astype(
        jnp.int32
    )
