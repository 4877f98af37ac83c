"""Compares gradients with and without offloaded activations before the first step that offloads.

Releases of XLA gave silently wrong gradients on GPUs where what a scan saves for its backward pass
was kept on the host; `step.xla_options` has the option that helps. So the first step that offloads
runs a scan of a few layers both ways, on one device, compiled by the options of the step. It takes
about a second, once for each platform in a process; plans run nothing.
"""

import functools
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies

from fsdp_jax.errors import message
from fsdp_jax.sharding.offload import HOST

_LAYERS, _ROWS, _WIDTH = 4, 8, 128
_SAVED = "fsdp.canary"


@functools.cache
def check_offload(platform: str, options: tuple[tuple[str, Any], ...]) -> None:
    """Checks that offloaded activations change no gradient on a platform, with options of XLA.

    Raises:
        ValueError: the gradients differ; with the releases, and the fix.

    """
    device = jax.local_devices(backend=platform)[0]
    inputs = jax.device_put(_inputs(), device)
    expected, found = (_run(offload, dict(options), inputs) for offload in (False, True))
    difference = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not difference < 0.01:  # the order of the sums may differ; wrong ones are far off
        what = f"activations that were offloaded give other gradients on {device.device_kind}"
        got = f"jax {jax.__version__}, jaxlib {version('jaxlib')}: "
        got += f"they differ by {difference:.0%} of the largest"
        fix = "another release of jax and jaxlib; or leave Offload.activations out"
        raise ValueError(message(what, where="offload.activations", got=got, fix=fix))


def _run(offload: bool, options: dict[str, Any], inputs: Any) -> np.ndarray:
    program = _gradients.lower(offload, *inputs).compile(compiler_options=options)
    return np.asarray(program(*inputs))


def _inputs() -> tuple[np.ndarray, np.ndarray]:
    """Returns (weights of the layers [L, D, D], rows [B, D]), float32."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(_LAYERS, _WIDTH, _WIDTH)) / np.sqrt(_WIDTH)
    return weights.astype(np.float32), random.normal(size=(_ROWS, _WIDTH)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _gradients(offload: bool, weights: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the gradient of the weights through a scan that saves each layer's input."""
    names: dict[str, Any] = {"names_which_can_be_saved": [_SAVED]}
    names["names_which_can_be_offloaded"] = []
    if offload:
        names = dict(zip(names, reversed(names.values()), strict=True))
    policy = checkpoint_policies.save_and_offload_only_these_names(
        **names, offload_src="device", offload_dst=HOST
    )

    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        x = checkpoint_name(x, _SAVED)
        return x + jnp.tanh(x @ weight), None

    gradient: jax.Array = jax.grad(lambda weights: lax.scan(layer, rows, weights)[0].sum())(weights)
    return gradient
