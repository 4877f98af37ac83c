"""A tokenizer, trained once, and its documents."""

import pytest
from corpora import TEXTS, documents_of

from fsdp_jax.data.tokenizer import train_bpe


@pytest.fixture(scope="session")
def bpe():
    return train_bpe(TEXTS, 300)


@pytest.fixture(scope="session")
def documents():
    return documents_of(TEXTS)
