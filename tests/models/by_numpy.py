"""Parts of the models in NumPy, in float64, for one example."""

import math
from typing import Any

import jax
import numpy as np
from flax import nnx


def weights_of(model: Any) -> dict[str, Any]:
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state)


def layers_of(weights: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The weights of each block of a scanned stack."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], weights) for i in range(count)]


def linear(x: np.ndarray, w: dict[str, Any]) -> np.ndarray:
    return x @ w["kernel"] + w.get("bias", 0)


def layer_norm(x: np.ndarray, w: dict[str, Any], epsilon: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return (
        centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * w["scale"] + w["bias"]
    )


def rms_norm(x: np.ndarray, w: dict[str, Any], epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * w["scale"]


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def mlp(x: np.ndarray, w: dict[str, Any]) -> np.ndarray:
    y = linear(x, w["up"])
    return linear(0.5 * y * (1 + np.vectorize(math.erf)(y / np.sqrt(2))), w["down"])


def patches(image: np.ndarray, w: dict[str, Any], size: int) -> np.ndarray:
    """[H, W, 3] to [patches, D], each patch on its own."""
    side = range(0, len(image), size)
    each = [image[i : i + size, j : j + size] for i in side for j in side]
    return np.stack([np.einsum("ijc,ijcd->d", patch, w["kernel"]) for patch in each]) + w["bias"]
