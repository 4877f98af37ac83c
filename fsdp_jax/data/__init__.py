"""Text as bytes: corpora, and batches from them that resume exactly."""

from fsdp_jax.data.corpus import Corpus, decode, load_corpus
from fsdp_jax.data.loader import Loader, Windows, eval_batches, make_loader

__all__ = ["Corpus", "Loader", "Windows", "decode", "eval_batches", "load_corpus", "make_loader"]
