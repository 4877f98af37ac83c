"""Small models of every family with drawn weights and batches, and programs compiled once."""

import dataclasses
import functools
import re
import zlib
from typing import Any

import jax
import numpy as np
from flax import nnx
from reference import Case as TrainingCase

from fsdp_jax.models import FAMILIES, Family
from fsdp_jax.models.llama import RopeScaling
from fsdp_jax.models.tasks import Lengths

TEXT = {"vocab_size": 19, "sequence_length": 8, "layers": 2, "width": 16, "heads": 2}
T5 = {"vocab_size": 32, "width": 16, "heads": 2, "head_dim": 6, "hidden": 24, "buckets": 8}
IMAGE = {"image_size": 12, "patch": 4, "classes": 8, "layers": 2, "width": 16, "heads": 2}
LENGTHS = {"inputs_length": 12, "targets_length": 8, "max_distance": 10}
# The sizes of each family: those of `Family.shrink`, and smaller ones for these.
SIZES: dict[str, dict[str, Any]] = {
    name: dict(vars(family.shrink(next(iter(family.presets.values())))))
    for name, family in FAMILIES.items()
} | {
    "gpt": TEXT,
    "llama": TEXT | {"width": 24, "heads": 4, "kv_heads": 2, "hidden": 20},
    "t5": T5 | LENGTHS | {"layers": 3, "decoder_layers": 2},
    "vit": IMAGE | {"hidden": 24},
    "cait": IMAGE | {"hidden": 24},
}
# Sizes of which 8 devices divide many and not all, for weights on devices and in files.
WIDE = {"layers": 3, "width": 32, "heads": 4}
SCALED = {"rope_scaling": RopeScaling(factor=8.0, original_length=16)}
WIDER: dict[str, dict[str, Any]] = {
    "gpt": WIDE | {"vocab_size": 93, "sequence_length": 16},
    "llama": WIDE | {"vocab_size": 96, "sequence_length": 32, "hidden": 48} | SCALED,
    "t5": WIDE
    | {"vocab_size": 96, "head_dim": 16, "hidden": 48, "decoder_layers": 2}
    | dict.fromkeys(["inputs_length", "targets_length"], 16),
    "vit": WIDE | {"image_size": 16, "classes": 7, "hidden": 48},
    "cait": WIDE | {"image_size": 16, "classes": 7, "hidden": 128},
}
# {name: (family, what differs from the sizes above)}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt", {}),  # as Hugging Face calls it
    "gpt2-untied": ("gpt", {"tie_head": False}),
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_head": True, "kv_heads": 4}),
    "t5": ("t5", {}),
    "t5-v1_1": ("t5", {"gated": True, "tie_head": False}),
}
CASES = VARIANTS | {
    name: (name, {}) for name in FAMILIES if not any(name == each for each, _ in VARIANTS.values())
}
FIRST = {
    family: next(name for name, (each, _) in CASES.items() if each == family) for family in FAMILIES
}
"""The first case of each family."""

# bfloat16 weights against float32: the mean error, as a share of the logits' standard deviation,
# and where one is stated, the error of every logit; llama's, of these weights, deviate by 2
BFLOAT16_MEAN = dict.fromkeys(CASES, 0.03) | {"t5-v1_1": 0.05}
BFLOAT16_EACH = {"gpt2": 0.05, "llama": 0.15}


def config_of(name: str, **fields: Any) -> tuple[Family, Any]:
    """(family, small configuration)."""
    family, variant = CASES[name]
    return FAMILIES[family], FAMILIES[family].config(**SIZES[family] | variant | fields)


def wider_config_of(name: str, **fields: Any) -> tuple[Family, Any]:
    """(family, configuration for weights on 8 devices)."""
    return config_of(name, **WIDER.get(CASES[name][0], {}) | fields)


def cases_of(*tasks: str) -> list[str]:
    """The cases of the families that are trained for these."""
    return [name for name in CASES if config_of(name)[0].task.name in tasks]


def draw_batch(family: Family, config: Any, rows: int = 2, seed: int = 7) -> dict[str, np.ndarray]:
    """Random arrays of the task; every row has something in it, and masks are uneven."""
    random = np.random.default_rng(seed)
    lengths = Lengths(getattr(config, "sequence_length", 12), 8)
    batch = {}
    for name, leaf in family.task.arrays(config, lengths).items():
        shape = (rows, *leaf.shape)
        if name in ("mask", "inputs_mask"):
            values = np.arange(leaf.shape[0])[None] < random.integers(3, leaf.shape[0], (rows, 1))
        else:
            high = {"labels": 8, "images": 256}.get(name) or config.vocab_size
            values = random.integers(0, high, shape)
        batch[name] = values.astype(leaf.dtype)
    if "images" in batch:  # so that there is something to learn
        batch["images"] = (batch["images"] // 2 + 16 * batch["labels"][:, None, None, None]).astype(
            np.uint8
        )
    return batch


def logits_of(model: Any, batch: dict[str, Any], **settings: Any) -> jax.Array:
    """What a model makes of a batch; an encoder-decoder reads the targets as they are."""
    if "tokens" in batch:
        return model(batch["tokens"][:, :-1], **settings)
    if "inputs" in batch:
        mask = batch["inputs_mask"]
        return model(batch["inputs"], batch["targets"], inputs_mask=mask, **settings)
    return model(batch["images"], **settings)


def path_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def draw_weights(path: Any, leaf: Any) -> np.ndarray:
    """Weights large enough that every part shows in the logits; norms' scales are around 1."""
    name = path_of(path)
    drawn = np.random.default_rng(zlib.crc32(name.encode())).normal(size=leaf.shape)
    return (0.3 * drawn + name.endswith("scale")).astype(np.float32)


def unstacked(weights: dict[str, np.ndarray], path: Any) -> np.ndarray:
    """The weights of one block of a list, of those of the scanned blocks."""
    name = path_of(path)
    block = re.search(r"blocks/(\d+)/", name)
    if block is None:
        return weights[name]
    return weights[re.sub(r"blocks/\d+/", "blocks/", name)][int(block[1])]


def make(name: str, **fields: Any) -> Any:
    """A small model without dropout, its weights drawn by `draw_weights`."""
    family, config = config_of(name, **fields)
    graph, params = nnx.split(nnx.eval_shape(lambda: family.model(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(draw_weights, params))


@nnx.jit
def call(model: Any, *args: Any, **settings: Any) -> jax.Array:
    """Calls a model in one compiled program: eagerly each operation is one."""
    return model(*args, **settings)


@dataclasses.dataclass(frozen=True)
class Small:
    """A small model: its parts, its parameters, a batch, and programs of (params, batch)."""

    family: Family
    config: Any
    graph: Any
    params: Any
    rest: Any
    batch: dict[str, np.ndarray]

    def model(self, params: Any) -> Any:
        return nnx.merge(self.graph, params, self.rest)

    @functools.cached_property
    def logits(self) -> Any:
        return jax.jit(lambda params, batch: logits_of(self.model(params), batch))

    @functools.cached_property
    def loss_and_gradients(self) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            return self.family.loss(self.model(params), batch)[0]

        return jax.jit(jax.value_and_grad(loss))


@functools.cache
def small(name: str, scan_layers: bool = True) -> Small:
    """The scanned and the unrolled one have the same weights."""
    family, config = config_of(name, scan_layers=scan_layers)
    # traced, not run: an eager initialization compiles each of its operations
    model = nnx.eval_shape(lambda: family.model(config, rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    if scan_layers:
        params = jax.tree_util.tree_map_with_path(draw_weights, params)
    else:
        stacks = jax.tree_util.tree_leaves_with_path(small(name).params)
        weights = {path_of(path): leaf for path, leaf in stacks}
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: unstacked(weights, path), params
        )
    return Small(family, config, graph, params, rest, draw_batch(family, config))


@dataclasses.dataclass(frozen=True)
class FamilyCase(TrainingCase):
    """A small model for `reference.train`."""

    name: str = ""

    def batch(self, step: int, rows: int = 16) -> dict[str, np.ndarray]:
        batch = draw_batch(*config_of(self.name), rows, step)
        if "images" in batch:  # uneven over devices, so that a mean of means would show
            random = np.random.default_rng(step)
            batch["mask"] = (random.random(rows) < 0.7).astype(np.float32)
        return batch


@functools.cache
def training_case(name: str, scan_layers: bool = True) -> FamilyCase:
    family, config = config_of(name, scan_layers=scan_layers)

    def make(rngs: nnx.Rngs) -> Any:
        return family.model(config, rngs=rngs)

    return FamilyCase(make, family.loss, family.blocks, name=name)
