"""The names of `fsdp_jax.data`, which imports them when they are used."""

from fsdp_jax.data.documents import (
    Documents,
    Split,
    dataset_documents,
    embedded_documents,
    open_documents,
    split_documents,
)
from fsdp_jax.data.examples import Examples
from fsdp_jax.data.files import Skipped
from fsdp_jax.data.loader import Loader, eval_batches, make_loader
from fsdp_jax.data.options import DataOptions
from fsdp_jax.data.shard_manifest import Manifest
from fsdp_jax.data.shards import TokenShards
from fsdp_jax.data.sources import LoadedData, open_examples
from fsdp_jax.data.tokenize_shards import tokenize
from fsdp_jax.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer, train_bpe
from fsdp_jax.data.windows import Windows

__all__ = [
    "DataOptions",
    "Documents",
    "Examples",
    "LoadedData",
    "Loader",
    "Manifest",
    "Skipped",
    "Split",
    "TokenShards",
    "Tokenizer",
    "Windows",
    "check_vocabulary",
    "dataset_documents",
    "embedded_documents",
    "eval_batches",
    "load_tokenizer",
    "make_loader",
    "open_documents",
    "open_examples",
    "split_documents",
    "tokenize",
    "train_bpe",
]
