"""Compares gradients with and without host memory before the first step that offloads.

Releases of XLA gave silently wrong gradients on GPUs where the backward pass of a scan reads slices
of arrays in host memory: saved activations and parameters. `step.xla_options` has the option
that helps. So the first step that offloads runs a scan of a few layers both ways, on one device,
compiled by the options of the step. It takes about a second, once for each platform in a process;
plans run nothing.
"""

import functools
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies

from fsdp_jax.errors import ArgumentError
from fsdp_jax.host_memory import HOST, to_device, to_host

_LAYERS, _ROWS, _WIDTH = 4, 8, 128
_SAVED = "fsdp.canary"


@functools.cache
def check_offload(platform: str, options: tuple[tuple[str, Any], ...]) -> None:
    """Raises ValueError where host memory changes gradients on a platform, with options of XLA."""
    device = jax.local_devices(backend=platform)[0]
    inputs = jax.device_put(_inputs(), device)
    expected, found = (_run_gradients(offload, dict(options), inputs) for offload in (False, True))
    difference = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not difference < 0.01:  # the order of the sums may differ; wrong ones are far off
        raise ArgumentError(
            f"a scan over arrays in host memory gives other gradients on {device.device_kind}",
            where="offload",
            got=(
                f"jax {jax.__version__}, jaxlib {version('jaxlib')}: they differ by "
                f"{difference:.0%} of the largest"
            ),
            fix="another release of jax and jaxlib; or leave offload out",
        )


def _run_gradients(offload: bool, options: dict[str, Any], inputs: Any) -> np.ndarray:
    """Compiles `_gradients` with these options of XLA, and runs it; see `_inputs`."""
    weights, slots, rows = inputs
    if offload:
        weights = to_host(weights)
    program = _gradients.lower(offload, weights, slots, rows).compile(compiler_options=options)
    return np.asarray(program(weights, slots, rows))


def _inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws (weights of the layers [L, D, D], zeros like them, rows [B, D]), float32."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(_LAYERS, _WIDTH, _WIDTH)) / np.sqrt(_WIDTH)
    rows = random.normal(size=(_ROWS, _WIDTH)).astype(np.float32)
    return weights.astype(np.float32), np.zeros(weights.shape, np.float32), rows


@functools.partial(jax.jit, static_argnums=0)
def _gradients(offload: bool, weights: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """Computes the gradient of the weights through a scan that saves each layer's input.

    `slots`: zeros that are added to the weights; these are in host memory if `offload`.
    """
    policy = checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[_SAVED] * (not offload),
        names_which_can_be_offloaded=[_SAVED] * offload,
        offload_src="device",
        offload_dst=HOST,
    )

    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def layer(x: jax.Array, slices: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        weight, slot = slices
        if offload:
            weight = to_device(weight)
        x = checkpoint_name(x, _SAVED)
        return x + jnp.tanh(x @ (weight + slot)), None

    def total(slots: jax.Array) -> jax.Array:
        return lax.scan(layer, rows, (weights, slots))[0].sum()

    gradient: jax.Array = jax.grad(total)(slots)
    return gradient
