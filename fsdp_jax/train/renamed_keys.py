"""The keys of a configuration, where the library has other names for its fields and arguments."""

import contextlib
from collections.abc import Iterator

from fsdp_jax.errors import ArgumentError, ConfigError

KEY_OF = {
    # Fields of `Config`; None: it is no key.
    "remat.policy": "remat",
    "remat.save": "remat_save",
    "remat.every": "remat_every",
    "precision.keep_float32": None,
    "precision.cast_inputs": None,
    "lora.trainable": "lora.trained",
    **dict.fromkeys(
        ("data.vocab_size", "data.classes", "data.image_size", "data.images", "data.seed")
    ),
    "loss_spikes.window": "train.spike_window",
    "loss_spikes.threshold": "train.spike_threshold",
    "loss_spikes.skip": None,  # follows from train.spike
    # Arguments of functions.
    "accumulation": "train.accumulation",
    "clip": "optimizer.clip",
    "frozen": "model.frozen",
    "make_train_step": "train.local_batch",
    "targets": "lora.targets",
    "trainable": "lora.trained",
}
# What to do about an error, where the library's answer is in Python.
FIX_OF = {
    "make_train_step": (
        "--train.local_batch True, or --prefetch none, --train.deferred_reduction False and "
        "--precision.reduce None"
    ),
}


@contextlib.contextmanager
def as_config_errors() -> Iterator[None]:
    """Turns ValueErrors about the library's arguments into ConfigErrors about the run's keys."""
    try:
        yield
    except ArgumentError as error:
        raise ConfigError(
            error.what,
            where=KEY_OF.get(error.where) or error.where,
            expected=error.expected,
            got=error.got,
            fix=FIX_OF.get(error.where, error.fix),
        ) from error
    except ValueError as error:
        raise ConfigError(error) from error
