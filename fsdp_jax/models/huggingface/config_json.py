"""Reads and writes `config.json` by a table of its keys.

A key becomes a field of our configuration, must have a value that we implement, or does not affect
the computation. Any other key is an error, unless it is switched off (null, false, empty): it may
change the computation.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_jax.errors import ConfigError
from fsdp_jax.models.huggingface.table import Table

Json = dict[str, Any]
NO_MODEL = "no model configuration"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Ids that begin, end and pad a text; written, and read by programs that continue texts."""
TokenIds = Mapping[str, int | Sequence[int] | None]

# Keys of provenance, initialization, training, sampling and the form of results.
HARMLESS = (
    "model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path",
    "_commit_hash", "name_or_path", *TOKENS, "sep_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "use_cache", "return_dict",
    "return_dict_in_generate", "output_hidden_states", "output_attentions", "output_scores",
    "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params",
    "tokenizer_class", "prefix", "chunk_size_feed_forward", "gradient_checkpointing", "torchscript",
    "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
    "initializer_range", "initializer_factor", "max_length", "min_length", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k",
    "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "suppress_tokens",
    "begin_suppress_tokens", "exponential_decay_length_penalty", "remove_invalid_values",
    "tf_legacy_loss", "use_bfloat16",
)  # fmt: skip


@dataclass(frozen=True)
class WeightFormat:
    """How one family's weights and configuration are stored by Hugging Face or timm."""

    model_type: str | None  # of `config.json`; None for timm, which states an `architecture`
    table: Callable[[Any], Table]  # of our configuration
    # (content of `config.json`, its path) -> our configuration; raises ConfigError, and ValueError
    # for sizes that do not fit together.
    read: Callable[[Json, object], Any]
    # The reverse, without `model_type`, for any version of transformers.
    write: Callable[[Any], Json]
    tokens: tuple[str, ...] = TOKENS  # that its `config.json` has
    # Keys of `write` that change no number of the model: those of a source are kept.
    descriptive: tuple[str, ...] = ()
    # Folder -> fields of our configuration from another file; the reverse, {its name: content}.
    read_preprocessor: Callable[[Path], dict[str, Any]] = lambda folder: {}
    write_preprocessor: Callable[[Any], dict[str, Json]] = lambda config: {}


@dataclass(frozen=True)
class Keys:
    """The keys of one family's `config.json`, and what becomes of each."""

    fields: Mapping[str, str]  # key -> field of our configuration with the same value
    # Key -> values that we implement; the first one is the default of an absent key.
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # Keys that change nothing here, besides those of every family. Dropout rates are among them,
    # since they are settings of a training run.
    harmless: Sequence[str] = ()
    derived: Sequence[str] = ()  # keys that the family reads itself
    optional: Mapping[str, Any] = field(default_factory=dict)  # defaults of keys of `fields`

    def read(self, content: Json, where: object) -> dict[str, Any]:
        """Converts the content of a `config.json` to {field of our configuration: value}.

        `where`, its path, is for messages. Raises ConfigError with every key that is missing, not
        known or not implemented.
        """
        # every problem, so that one error lists them all
        required = self.fields.keys() - self.optional.keys()
        lines = [f"{key}: missing" for key in self.fields if key in required - content.keys()]
        for key, allowed in self.fixed.items():
            if key in content and content[key] not in allowed:
                choice = " or ".join(json.dumps(value) for value in allowed)
                lines.append(f"{key}: {json.dumps(content[key])} is not implemented, only {choice}")
        # a key that is switched off cannot change anything, whatever it means
        known = {*self.fields, *self.fixed, *self.harmless, *self.derived, *HARMLESS}
        lines += [
            f"{key}: {json.dumps(value)} is not known, and may change what is computed"
            for key, value in content.items()
            if key not in known and value not in (None, False, "", [], {})
        ]
        refuse_unsupported(lines, where)
        values = {**self.optional, **content}
        return {ours: values[theirs] for theirs, ours in self.fields.items()}

    def write(self, config: Any) -> Json:
        """Makes the content that `read` reads, without the `derived` keys."""
        content: Json = {theirs: getattr(config, ours) for theirs, ours in self.fields.items()}
        return content | {key: allowed[0] for key, allowed in self.fixed.items()}


def refuse_unsupported(lines: Sequence[str], where: object) -> None:
    """Raises ConfigError with the problems of a `config.json`, a line each, if there are any."""
    if lines:
        raise ConfigError(
            "a model that is not supported", where=str(where), got="\n            ".join(lines)
        )


def read_normalization(
    content: Json, keys: Mapping[str, str], where: object
) -> dict[str, tuple[float, ...]]:
    """Reads the mean and std of pixels: {field of our configuration: three numbers}.

    `keys`: {key of `content`: field}; absent ones are left out. Raises ConfigError for values that
    are not three finite numbers.
    """
    present = {key: content[key] for key in keys if content.get(key) is not None}
    lines = [
        f"{key}: {value} is not three numbers"
        for key, value in present.items()
        if not _is_three_numbers(value)
    ]
    refuse_unsupported(lines, where)
    return {keys[key]: tuple(map(float, value)) for key, value in present.items()}


def _is_three_numbers(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    return all(isinstance(each, int | float) and math.isfinite(each) for each in value)
