"""`config.json`, key by key: what a key becomes here, what it must say, or that it does not touch
the arithmetic.

A key that is none of these is refused, unless it is switched off (null, false, empty): it may
change what is computed.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_jax.errors import ConfigError, did_you_mean, message

Json = dict[str, Any]
CONFIG = "config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What says how a text begins, ends and is filled up; written, and read by whoever continues texts."""
Tokens = Mapping[str, int | Sequence[int] | None]

# What says where a model comes from, how it is to be initialised, trained or sampled, and in which
# form it is returned.
HARMLESS = (
    "model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "_commit_hash",
    "name_or_path", *TOKENS, "sep_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "use_cache", "return_dict", "return_dict_in_generate",
    "output_hidden_states", "output_attentions", "output_scores", "id2label", "label2id", "problem_type",
    "finetuning_task", "task_specific_params", "tokenizer_class", "prefix", "chunk_size_feed_forward",
    "gradient_checkpointing", "torchscript", "_attn_implementation", "attn_implementation",
    "_attn_implementation_autoset", "initializer_range", "initializer_factor", "max_length", "min_length", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty",
    "remove_invalid_values", "tf_legacy_loss", "use_bfloat16",
)  # fmt: skip


@dataclass(frozen=True)
class Keys:
    """How one kind of `config.json` is read and written.

    Attributes:
        fields: key -> field of our config with the same value.
        fixed: key -> values that we compute with, the first of them where it is absent.
        harmless: keys that change nothing here, beside those of every family; dropout rates are
            among them, since they are settings of a training run.
        derived: keys that the family reads itself.
        optional: what keys of `fields` stand for where they are absent.

    """

    fields: Mapping[str, str]
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    harmless: Sequence[str] = ()
    derived: Sequence[str] = ()
    optional: Mapping[str, Any] = field(default_factory=dict)

    def read(self, found: Json, where: object) -> dict[str, Any]:
        """{field: value}. Raises ConfigError with every key that is missing, or that says what we
        do not compute.
        """
        lines = [
            f"{key}: missing"
            for key in self.fields
            if key not in found and key not in self.optional
        ]
        for key, allowed in self.fixed.items():
            if key in found and found[key] not in allowed:
                choice = " or ".join(json.dumps(value) for value in allowed)
                lines.append(f"{key}: {json.dumps(found[key])} is not implemented, only {choice}")
        known = {*self.fields, *self.fixed, *self.harmless, *self.derived, *HARMLESS}
        for key, value in found.items():
            if key not in known and value not in (None, False, "", [], {}):
                lines.append(
                    f"{key}: {json.dumps(value)} is not known, and may change what is computed"
                )
        refuse(lines, where)
        taken = {**self.optional, **found}
        return {ours: taken[theirs] for theirs, ours in self.fields.items()}

    def write(self, config: Any) -> Json:
        """What `read` reads."""
        written: Json = {theirs: getattr(config, ours) for theirs, ours in self.fields.items()}
        return written | {key: allowed[0] for key, allowed in self.fixed.items()}


def refuse(lines: Sequence[str], where: object) -> None:
    """Raises ConfigError with all that is wrong."""
    if lines:
        got = "\n            ".join(lines)
        raise ConfigError(message("a model that is not one of ours", where=str(where), got=got))


def read_json(folder: Path, name: str = CONFIG) -> Json:
    """The folder's `config.json`, or another file of its kind. Raises ConfigError."""
    path = folder / name
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            message("no configuration of a model", where=str(path), got=error)
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            message("no configuration of a model", where=str(path), got=type(found).__name__)
        )
    return found


def colours(found: Json, keys: Mapping[str, str], where: object) -> dict[str, tuple[float, ...]]:
    """{field: three numbers} of keys that are there, {key: field}. Raises ConfigError where they
    are none.
    """
    given = {key: found[key] for key in keys if found.get(key) is not None}
    refuse(
        [
            f"{key}: {value} is not three numbers"
            for key, value in given.items()
            if not _three(value)
        ],
        where,
    )
    return {keys[key]: tuple(map(float, value)) for key, value in given.items()}


def _three(value: Any) -> bool:
    numbers = isinstance(value, list) and all(
        isinstance(each, int | float) and math.isfinite(each) for each in value
    )
    return numbers and len(value) == 3


def unknown_kind(kind: object, known: Sequence[str], where: object) -> ConfigError:
    """For a model of no family."""
    fix = did_you_mean(str(kind), known)
    return ConfigError(
        message("a kind of model that is not known", where=str(where), got=kind, fix=fix)
    )
