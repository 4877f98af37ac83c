"""Gradients as partial sums: which are split, and that their sums are the gradients.

Compiles one program of all layers: whether sums are equal is not seen in a trace.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fsdp_jax as fsdp
from fsdp_jax.prefetch.partial_sums import SplitPullback
from fsdp_jax.prefetch.vjp import run_layer
from fsdp_jax.sharding.mesh import mesh_axes

pytestmark = pytest.mark.releases

ROWS, LENGTH, FEATURES = 16, 3, 8


def dense(p, x):
    return jnp.einsum("bld,df->blf", x, p["w"]) + p["b"][None, None]


def flat(p, x):
    return (x.reshape(-1, FEATURES) @ p["w"]).reshape(x.shape) + p["b"][None, None]


def in_bfloat16(p, x):
    return (x.astype("bfloat16") @ p["w"].astype("bfloat16")).astype("float32")


def called_back(x):
    jax.debug.callback(lambda x: None, x)
    return x


@jax.custom_vjp
def doubled_in_derivative(x):
    return x


doubled_in_derivative.defvjp(lambda x: (x, None), lambda _, cotangent: (2 * cotangent,))

# Layers of w [features, features] and b [features] -> those of their gradients that are split.
LAYERS = {
    "a matmul and a bias": (dense, "b w"),
    "inside a checkpoint": (jax.checkpoint(dense), "b w"),
    "a callback in a checkpoint": (jax.checkpoint(lambda p, x: dense(p, called_back(x))), "b w"),
    "inside a jit inside a checkpoint": (jax.checkpoint(jax.jit(dense)), "b w"),
    "rows that are flattened": (flat, "b w"),
    "two uses, which are added": (lambda p, x: dense(p, x) + dense(p, 2 * x), "b w"),
    "one use transposed": (lambda p, x: dense(p, x) + x @ p["w"].T, "b w"),
    "a part of it": (lambda p, x: x[..., :2] @ p["w"][:2] + p["b"][None, None], "b"),
    "mixed rows": (lambda p, x: dense(p, x - x.mean(0, keepdims=True)), "b w"),
    "a product of matrices": (lambda p, x: x @ (p["w"] @ p["w"].T), ""),
    "what another reads whole": (lambda p, x: x @ (p["w"] * p["b"][None]) + x @ p["w"], ""),
    "a penalty on it": (lambda p, x: dense(p, x) + jnp.sum(p["w"] ** 2), "b"),
    "squared": (lambda p, x: dense({"w": p["w"] ** 2, "b": p["b"]}, x), "b"),
    "a custom derivative": (lambda p, x: x @ doubled_in_derivative(p["w"]), ""),
    "cast inside": (in_bfloat16, ""),
    "time first": (lambda p, x: dense(p, x.swapaxes(0, 1)).swapaxes(0, 1), "b w"),
    "a number": (lambda p, x: x * jnp.sum(p["w"], keepdims=True)[None], "w"),
    "no gradient": (lambda p, x: x + jax.lax.stop_gradient(p["b"])[None, None], ""),
}


def integers(shape, seed):
    """Makes floats whose sums are exact in any order."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def test_the_sums_of_partial_sums_are_the_gradients():
    axes = mesh_axes(fsdp.make_mesh(data=4, replica=2))
    params = {"b": integers([FEATURES], 0), "w": integers([FEATURES, FEATURES], 1)}
    x, cotangent = integers([ROWS, LENGTH, FEATURES], 2), integers([ROWS, LENGTH, FEATURES], 3)
    split = {}

    @jax.jit
    def run(params, x, cotangent):
        results = {}
        for name, (function, _) in LAYERS.items():
            layer = lambda p, xs, f=function: [f({k: v for k, [v] in p.items()}, xs[0])]  # noqa: E731
            gathered = {path: [param] for path, param in params.items()}
            _, residuals, vjp = run_layer(layer, gathered, [], [x])
            args = residuals, gathered, [], [cotangent]
            pullback = SplitPullback.of(vjp, {"b", "w"}, axes, ROWS, *args)
            split[name] = pullback.split
            _, control = jax.vjp(function, params, x)
            results[name] = control(cotangent), pullback.pull_back(*args)
        return results

    results = run(params, x, cotangent)
    assert split == {name: parts.split() for name, (_, parts) in LAYERS.items()}
    for name, ((gradients, to_input), (parts, whole, to_inputs)) in results.items():
        for part in parts.values():
            assert part.stack.sharding.spec[:2] == ("replica", "data"), name
        sums = {path: np.asarray(part.stack).sum((0, 1)) for path, part in parts.items()}
        assert_equal(sums | whole, gradients, name)
        assert_equal(to_inputs, [to_input], name)


def assert_equal(found, expected, name):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, err_msg=name), found, expected)
