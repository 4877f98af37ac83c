"""Texts that several tests of the data share."""

from fsdp_jax.data.documents import Documents

NOUNS = [("house", "small"), ("river", "long"), ("été", "chaud"), ("tree", "tall"), ("日本", "far")]
TEXTS = [
    f"The {thing} number {number} is {size}.\n" * (1 + number % 3)
    for number, (thing, size) in enumerate(NOUNS * 8)
]


def documents_of(texts):
    return Documents("texts", lambda skipped: iter(texts))
