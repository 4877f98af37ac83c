"""What `fsdp-jax certify` does: a small model of a configuration, certified on virtual CPUs."""

import dataclasses
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from fsdp_jax.api import fully_shard
from fsdp_jax.certify.certificate import Certificate
from fsdp_jax.data.options import DataOptions
from fsdp_jax.errors import SlowerWarning
from fsdp_jax.models import FAMILIES
from fsdp_jax.sharding.mesh import make_mesh
from fsdp_jax.sharding.rules import ReplicationWarning
from fsdp_jax.train.build import make_loss, make_model, resolve_adapters, start_devices
from fsdp_jax.train.config import Config
from fsdp_jax.train.model_config import make_model_config
from fsdp_jax.train.optimizers import make_optimizer
from fsdp_jax.train.renamed_keys import as_config_errors
from fsdp_jax.train.shapes import BatchShapes, batch_shapes, length_fields

DEVICES = 8
ACCUMULATION = (1, 4)
LENGTH = 16


def certify_small(config: Config, strategies: Sequence[str] | None = None) -> Certificate:
    """Certifies a small model of the configured family, loss, optimizer, units and precision.

    It has two layers, width 64, a vocabulary of 128, sequences of 16 and four rows on each of
    `train.devices` (default 8) virtual CPU devices, whose float32 matmuls are exact. Attention is
    blockwise, the weights are random and the learning rate is the peak. Dropout is off: with local
    batches each device draws its own mask, which no reference reproduces. `strategies`: the
    configured one and then all others if None.

    Raises CertifyError if a setting differs from a single device, and ConfigError for keys that do
    not fit, by name.
    """
    jax.config.update("jax_platforms", "cpu")  # the accelerators may be training
    start_devices(config.train.devices or DEVICES)

    # The small model and its batch.
    model = dataclasses.replace(config.model, attention="blockwise", dropout=0.0)
    data = dataclasses.replace(config.data, sequence_length=LENGTH, target_length=None)
    family = FAMILIES[model.family]
    configured = make_model_config(model, config.data)
    model_config = family.shrink(configured, **length_fields(family, data))
    adapters = resolve_adapters(config.lora, config.model, configured)
    make, frozen = make_model(model, adapters, family, model_config, "cpu")
    rows = len(jax.devices()) * max(ACCUMULATION)
    units = config.units
    if units.min_params is not None:
        units = dataclasses.replace(units, min_params=1000)
    keep = config.keep_gathered.choice
    if keep and not config.keep_gathered.classes:
        keep = 1  # of two layers

    # Lay the model out as a run would, and compare it with a single device.
    with as_config_errors(), warnings.catch_warnings():
        for category in (ReplicationWarning, SlowerWarning):  # of bytes and time
            warnings.simplefilter("ignore", category)  # here numbers count
        sharded = fully_shard(
            make,
            make_optimizer(config.optimizer, lambda count: config.optimizer.learning_rate),
            make_mesh(),
            config.strategy,
            units.choice,
            precision=config.precision,
            remat=config.remat,
            offload=config.offload,
            prefetch=config.prefetch,
            keep_gathered=keep,
            frozen=frozen,
            base=config.lora.quantized,
            min_size=1,  # the model is small, and shall be sharded
        )
        return sharded.certify(
            partial(make_loss(family, config.train.loss_chunk), train=True),
            random_batch(batch_shapes(family, model_config, data, rows), model_config, data),
            strategies=strategies,
            accumulation=ACCUMULATION,
            local_batch=config.train.local_batch,
        )


def random_batch(
    shapes: BatchShapes, model_config: Any, data: DataOptions
) -> dict[str, np.ndarray]:
    """Draws random values for the arrays of a batch; packed rows hold two documents each."""
    random = np.random.default_rng(0)
    half = data.sequence_length // 2
    batch: dict[str, np.ndarray] = {}
    for name, leaf in shapes.items():
        columns = np.broadcast_to(np.arange(leaf.shape[-1]), leaf.shape)
        match name:
            case "tokens" | "inputs" | "targets":
                values = random.integers(1, model_config.vocab_size, leaf.shape)
            case "labels":
                values = random.integers(0, model_config.classes, leaf.shape)
            case "images":
                values = random.integers(0, 256, leaf.shape)
            case "mask" | "inputs_mask":  # uneven, so that a mean of means would show
                values = columns < random.integers(1, leaf.shape[-1] + 1, (leaf.shape[0], 1))
            case "segments":
                values = 1 + columns // half
            case "positions":
                values = columns % half
            case _:
                raise AssertionError(f"no values for the array {name} of the batch")
        batch[name] = values.astype(leaf.dtype)
    return batch
