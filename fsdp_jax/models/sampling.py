"""Text from a causal language model of any family."""

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
    """Continues `prompt_tokens`, int32 [P] with P at least 1, by `length` tokens; returns int32 [P + length].

    `model` maps int32 [1, T] to causal logits [1, T, V]. It sees the last `window` tokens (None: all of them), so give
    the model's sequence length where P + length exceeds it. `temperature` is a Python number; 0 takes the likeliest
    token. Every token costs a full forward pass: this is for looking at a model, not for serving one.
    """
    prompt = jnp.asarray(prompt_tokens, jnp.int32)
    if prompt.ndim != 1 or not prompt.size:
        raise ValueError(f"expected prompt_tokens of shape [P] with P at least 1, got {prompt.shape}")
    if length < 0 or temperature < 0:
        raise ValueError(f"expected length and temperature of at least 0, got {length} and {temperature}")
    total = prompt.size + length
    T = min(window or total, total)

    def step(known: jax.Array, tokens: jax.Array) -> jax.Array:
        start = jnp.maximum(known - T, 0)
        view_T = jax.lax.dynamic_slice(tokens, (start,), (T,))
        # what follows the last known token is padding, which a causal model does not see
        logits_V = model(view_T[None])[0, known - start - 1].astype(jnp.float32)
        if temperature == 0:
            token = jnp.argmax(logits_V)
        else:
            token = jax.random.categorical(jax.random.fold_in(key, known), logits_V / temperature)
        return tokens.at[known].set(token.astype(jnp.int32))

    return jax.lax.fori_loop(prompt.size, total, step, jnp.pad(prompt, (0, length)))
