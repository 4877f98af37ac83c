"""What several tests of the data read."""

import pytest

from fsdp_jax.data.documents import Documents
from fsdp_jax.data.tokenizer import train_bpe

TEXTS = [f"The {thing} number {number} is {size}.\n" * (1 + number % 3) for number, (thing, size) in enumerate(
    [("house", "small"), ("river", "long"), ("été", "chaud"), ("tree", "tall"), ("日本", "far")] * 8
)]  # fmt: skip


@pytest.fixture(scope="session")
def bpe():
    return train_bpe(TEXTS, 300)


@pytest.fixture
def documents():
    return Documents("texts", lambda skipped: iter(TEXTS))
