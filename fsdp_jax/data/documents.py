"""Documents: texts in an order that never changes, read as often as one likes, and what of them is
held out.

Nothing is kept: each pass reads the files again, one document in memory at a time. A document is a
file, or a field of a record.

Each process of a run that trains on text makes three passes at its start: one that surveys all of
it, and one for each part, whose tokens it keeps in memory. `fsdp-jax tokenize` is the way for more
text than that is good for: it keeps one document in memory at a time, and a run reads of its shards
what it needs.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fsdp_jax.data.files import EMBEDDED_NAME, Skipped, embedded_files, read_bytes, text_files
from fsdp_jax.data.records import (
    Invalid,
    check_invalid,
    field_of,
    is_json,
    read_dataset,
    read_json,
    text_of,
)
from fsdp_jax.errors import ConfigError, message

EMPTY = "empty"

Part = Literal["train", "held_out"]


@dataclass(frozen=True)
class Documents:
    """Texts in order.

    Attributes:
        name: of what is read, for people.
        read: a pass over all of it; what is passed over on the way is counted in its argument.
            Raises ConfigError, with file and place, at what cannot be read.

    """

    name: str
    read: Callable[[Skipped], Iterator[str]]


@dataclass(frozen=True)
class Survey:
    """What one pass over documents found.

    Attributes:
        documents, characters: how many.
        digest: SHA-256, in hexadecimal, of each document's length (8 bytes, little-endian) and
            UTF-8, in order.

    """

    documents: int
    characters: int
    skipped: Skipped
    digest: str


def embedded_documents() -> Documents:
    """The source text of the running Python's standard library, at most 8 MiB: there on every
    machine.
    """

    def read(skipped: Skipped) -> Iterator[str]:
        for file in embedded_files():
            yield from _text(file, "skip", skipped)

    return Documents(EMBEDDED_NAME, read)


def open_documents(
    path: str | Path, *, field: str = "text", invalid: Invalid = "error"
) -> Documents:
    """A file, or every text file below a folder in the order of their paths; of JSON the `field` of
    each record.

    Empty documents (nothing but white space) are passed over and counted. `invalid` says what
    becomes of what is not UTF-8. Raises ConfigError where there is no such path; all other faults
    are found by reading.
    """
    check_invalid(invalid)
    root = Path(path).expanduser()
    text_files(root, Skipped())

    def read(skipped: Skipped) -> Iterator[str]:
        for file in text_files(root, skipped):
            if is_json(file):
                for where, record in read_json(file, invalid=invalid, skipped=skipped):
                    text = field_of(record, field, where, invalid=invalid, skipped=skipped)
                    yield from _unless_empty(text, skipped)
            else:
                yield from _text(file, invalid, skipped)

    return Documents(root.resolve().name, read)


def dataset_documents(
    name: str, *, split: str = "train", field: str = "text", invalid: Invalid = "error"
) -> Documents:
    """The `field` of each row of a Hugging Face dataset; see `read_dataset`.

    `invalid` says what becomes of what is not UTF-8.
    """
    check_invalid(invalid)

    def read(skipped: Skipped) -> Iterator[str]:
        for where, record in read_dataset(name, split):
            text = field_of(record, field, where, invalid=invalid, skipped=skipped)
            yield from _unless_empty(text, skipped)

    return Documents(f"{Path(name).name} ({split})", read)


def survey(documents: Documents) -> Survey:
    """Reads all of it once. Raises ConfigError where there is not one document."""
    skipped, count, characters, digest = Skipped(), 0, 0, hashlib.sha256()
    for text in documents.read(skipped):
        content = text.encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
        count, characters = count + 1, characters + len(text)
    if not count:
        got = f"nothing in {documents.name}" + (
            f" ({skipped} passed over)" if skipped.total() else ""
        )
        expected, fix = "at least one document with text", "point data.path at text"
        raise ConfigError(
            message("The corpus is empty.", where="data.path", expected=expected, got=got, fix=fix)
        )
    return Survey(count, characters, skipped, digest.hexdigest())


@dataclass(frozen=True)
class Split:
    """Documents in two parts, of which one is held out from training.

    Every k-th document is held out (k = 1/share) where that makes at least two, so that no text is
    cut in two; else the end of the text, and the document where the cut falls is one in each part.
    """

    documents: Documents
    survey: Survey
    share: float

    @property
    def whole(self) -> bool:
        """Whether whole documents are held out."""
        return not self.share or self.survey.documents >= 2 * self._every

    @property
    def _every(self) -> int:
        return every(self.share)

    def read(self, part: Part) -> Iterator[str]:
        """The documents of one part, in order."""
        if not self.whole:
            yield from self._cut(part)
            return
        for at, text in enumerate(self.documents.read(Skipped()), 1):
            if (bool(self.share) and at % self._every == 0) == (part == "held_out"):
                yield text

    def _cut(self, part: Part) -> Iterator[str]:
        cut = round(
            self.survey.characters * (1 - self.share)
        )  # characters that are left for training
        for text in self.documents.read(Skipped()):
            kept = text[:cut] if part == "train" else text[cut:]
            cut = max(0, cut - len(text))
            if kept:
                yield kept


def split_documents(documents: Documents, *, held_out: float = 0.05) -> Split:
    """Surveys documents, in one pass, and splits them. `held_out`: the share to keep from training,
    from 0 to 0.5.

    Raises ConfigError where the share is out of range or there is no text.
    """
    check_share(held_out)
    return Split(documents, survey(documents), held_out)


def every(held_out: float) -> int:
    """The k of "every k-th is held out"; 0 for a share of 0."""
    return round(min(1 / held_out, 2.0**62)) if held_out else 0


def check_share(held_out: float) -> None:
    """Raises ConfigError where it is not 0 to 0.5."""
    if not 0 <= held_out <= 0.5:
        what = "The held-out share is out of range."
        raise ConfigError(message(what, where="data.held_out", expected="0 to 0.5", got=held_out))


def _text(file: Path, invalid: Invalid, skipped: Skipped) -> Iterator[str]:
    yield from _unless_empty(
        text_of(read_bytes(file), str(file), invalid=invalid, skipped=skipped), skipped
    )


def _unless_empty(text: str | None, skipped: Skipped) -> Iterator[str]:
    """The text, unless it was passed over already or there is nothing in it."""
    if text is not None and text.strip():
        yield text
    elif text is not None:
        skipped[EMPTY] += 1
