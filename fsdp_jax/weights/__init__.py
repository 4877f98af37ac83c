"""Weights from Hugging Face and timm into a sharded model, and back: safetensors and `config.json`, nothing else."""

from fsdp_jax.checkpoint.writing import Exported
from fsdp_jax.weights.exporting import Source, export_weights, from_arrays, from_store
from fsdp_jax.weights.families import EXCHANGED, config_files, config_json, read_config, table_of, token_ids
from fsdp_jax.weights.importing import import_weights
from fsdp_jax.weights.table import Entry, Table

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
