"""Reads and writes the safetensors and `config.json` of Hugging Face and timm, sharded."""

from fsdp_jax.io.safetensors_writer import Exported
from fsdp_jax.models.huggingface.table import Entry, Table
from fsdp_jax.weights.adapters import export_adapters, import_adapters, read_adapters
from fsdp_jax.weights.export import Source, export_weights, from_arrays, from_store
from fsdp_jax.weights.foreign_names import foreign_names
from fsdp_jax.weights.from_qwix import import_qwix
from fsdp_jax.weights.importer import import_weights
from fsdp_jax.weights.model_config import (
    config_files,
    config_json,
    read_config,
    table_of,
    token_ids,
)

__all__ = [
    "Entry",
    "Exported",
    "Source",
    "Table",
    "config_files",
    "config_json",
    "export_adapters",
    "export_weights",
    "foreign_names",
    "from_arrays",
    "from_store",
    "import_adapters",
    "import_qwix",
    "import_weights",
    "read_adapters",
    "read_config",
    "table_of",
    "token_ids",
]
