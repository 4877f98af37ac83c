"""Weights from Hugging Face and timm into a sharded model, and back: safetensors and `config.json`,
nothing else.
"""

from fsdp_jax.io.safetensors_writer import Exported
from fsdp_jax.models.huggingface.table import Entry, Table
from fsdp_jax.weights.export import Source, export_weights, from_arrays, from_store
from fsdp_jax.weights.families import (
    EXCHANGED,
    config_files,
    config_json,
    read_config,
    table_of,
    token_ids,
)
from fsdp_jax.weights.importer import import_weights

__all__ = [
    "EXCHANGED",
    "Entry",
    "Exported",
    "Source",
    "Table",
    "config_files",
    "config_json",
    "export_weights",
    "from_arrays",
    "from_store",
    "import_weights",
    "read_config",
    "table_of",
    "token_ids",
]
