"""Parameters and model FLOPs of a configuration, counted on the shapes of its model."""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from flax import nnx

from fsdp_jax.models.config import BaseConfig


def parameter_sizes(model: Callable[..., nnx.Module], config: BaseConfig) -> Mapping[str, int]:
    """Counts the elements of each parameter of `parameter_shapes`: {path: elements}."""
    return {path: prod(shape) for path, shape in parameter_shapes(model, config).items()}


@functools.cache
def parameter_shapes(
    model: Callable[..., nnx.Module], config: BaseConfig
) -> Mapping[str, tuple[int, ...]]:
    """Finds the shapes of the parameters of `model(config, rngs=...)`: {path: shape}.

    The blocks are stacked, as with `scan_layers`.
    """
    # stacked blocks trace one block, however many layers there are
    stacked = replace(config, scan_layers=True)
    shapes = nnx.eval_shape(lambda: nnx.state(model(stacked, rngs=nnx.Rngs(0)), nnx.Param))
    return {"/".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(shapes)}


def training_flops(
    model: Callable[..., nnx.Module],
    config: BaseConfig,
    multiplied: Mapping[str, int],
    *,
    pairs: int,
    inner: int | None = None,
) -> float:
    """Counts the model FLOPs of one example in a training step, forward and backward.

    The convention is 6 N + 12 L D T per position (PaLM, appendix B), with the positions that each
    parameter is multiplied with counted separately. Attention is counted in full, not halved for
    causality, and nothing is added for recomputation.

    `multiplied`: {regular expression: positions that a parameter is multiplied with}, 0 where it is
    looked up or added; the first that matches the start of its path counts. `pairs`: of queries and
    keys, summed over the layers. `inner`: the width of all heads; by default D.
    """

    def positions_of(path: str) -> int:
        return next(count for pattern, count in multiplied.items() if re.match(pattern, path))

    sizes = parameter_sizes(model, config)
    products = sum(size * positions_of(path) for path, size in sizes.items())
    # 2 FLOPs for each product forward, and twice as many backward; a pair has 2 products (scores
    # and their use) for each of the heads' widths
    return 6.0 * products + 12.0 * (inner or config.width) * pairs
