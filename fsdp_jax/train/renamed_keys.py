"""The keys of a configuration, where the library has other names for its fields and arguments."""

import contextlib
import difflib
from collections.abc import Collection, Iterator, Mapping

from fsdp_jax.errors import ArgumentError, ConfigError, did_you_mean

KEY_OF = {
    # Fields of `Config`; None: it is no key.
    "remat.policy": "remat",
    "remat.save": "remat_save",
    "remat.every": "remat_every",
    "precision.keep_float32": None,
    "precision.cast_inputs": None,
    "lora.trainable": "lora.trained",
    **dict.fromkeys(
        (
            "data.vocab_size",
            "data.weights",
            "data.classes",
            "data.image_size",
            "data.images",
            "data.seed",
        )
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
MOST_NAMED = 3  # keys that are suggested for one name
# What to do about an error, where the library's answer is in Python.
FIX_OF = {
    "make_train_step": (
        "--train.local_batch True, or --train.deferred_reduction False, --precision.reduce None "
        "and --precision.scatter None"
    ),
}


def suggest_key(
    name: str, keys: Collection[str], aliases: Mapping[str, str], prefix: str = ""
) -> str:
    """Suggests the key that an unknown name may mean: `did you mean 'optimizer.learning_rate'?`.

    One that people know by this name, a mistyped one, those of this name in other sections, those
    that have all of its words, as `data.sequence_length` has `sequence`, or the closest of all.
    `aliases`: {another word for a key: the key}; `prefix`: put before keys, `--` on a command line.
    """
    last = name.rpartition(".")[2]
    words = set(last.split("_"))
    ends = {key: key.rpartition(".")[2] for key in keys}
    candidates = [
        [key for key in keys if key == aliases.get(last)],
        difflib.get_close_matches(name, keys, n=1, cutoff=0.8),
        [key for key, end in ends.items() if end == last],
        [key for key, end in ends.items() if words <= set(end.split("_"))],
    ]
    for found in candidates:
        if 1 <= len(found) <= MOST_NAMED:
            named = " or ".join(f"'{prefix}{key}'" for key in found)
            return f"did you mean {named}?"
    return did_you_mean(prefix + name, [prefix + key for key in keys])


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
