"""Documents: texts in a fixed order, read as often as needed, and the part that is held out.

A document is a file, or a field of a record. Nothing is stored: each pass reads the files again,
one document in memory at a time. A run on text makes three: a survey, and one for each part.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fsdp_jax.data.checks import check_choice, check_held_out_share
from fsdp_jax.data.files import (
    EMBEDDED_NAME,
    Skipped,
    embedded_files,
    empty_corpus_error,
    read_bytes,
    text_files,
)
from fsdp_jax.data.options import Invalid, SpecialTokens
from fsdp_jax.data.records import (
    BOM,
    Record,
    TextDecoder,
    is_records,
    read_dataset,
    read_records,
)
from fsdp_jax.errors import ConfigError, DamageError

EMPTY = "empty"

Part = Literal["train", "held_out"]


@dataclass(frozen=True)
class Documents:
    """A corpus: texts in order, which every pass reads again."""

    name: str  # for descriptions
    # Reads all texts in one pass, and counts the skipped ones in its argument. Raises ConfigError,
    # with file and place, for what cannot be read.
    read: Callable[[Skipped], Iterator[str]]
    # The spelling of a special token in a text is that token.
    special_tokens: bool = False


@dataclass(frozen=True)
class Survey:
    """Counts of one pass over documents, and their digest."""

    documents: int
    characters: int
    skipped: Skipped
    # SHA-256, in hexadecimal, of each document's length (8 bytes, little-endian) and UTF-8.
    digest: str


def embedded_documents() -> Documents:
    """Makes documents of Python's standard library, at most 8 MiB, which every machine has."""

    def read(skipped: Skipped) -> Iterator[str]:
        decoder = TextDecoder("skip", skipped)
        texts = (decoder.decode(read_bytes(file), str(file)) for file in embedded_files())
        return _skip_empty(texts, skipped)

    return Documents(EMBEDDED_NAME, read)


def open_documents(
    path: str | Path, *, field: str = "text", invalid: Invalid = "error"
) -> Documents:
    """Opens the texts of a file, or of every text file below a folder, sorted by path.

    A file of records, such as a `.jsonl`, gives the `field` of each. Compressed ones are read.
    Empty documents (nothing but white
    space) are skipped and counted. Raises ConfigError if the path does not exist; all other faults
    are raised while reading.
    """
    check_choice("invalid", invalid, Invalid)
    # a path without text is an error here; files that change later are read as they are then
    root = Path(path).expanduser()
    text_files(root, Skipped())

    def read_texts(skipped: Skipped) -> Iterator[str | None]:
        """Yields every text, also empty ones; None where the decoder has skipped one."""
        decoder = TextDecoder(invalid, skipped)
        for file in text_files(root, skipped):
            if is_records(file):
                for where, record in read_records(file, decoder):
                    _check_field(record, field, where)
                    yield decoder.decode_field(record, field, where)
            else:
                text = decoder.decode(read_bytes(file), str(file))
                yield None if text is None else text.removeprefix(BOM)

    return Documents(root.resolve().name, lambda skipped: _skip_empty(read_texts(skipped), skipped))


def dataset_documents(
    name: str, *, split: str = "train", field: str = "text", invalid: Invalid = "error"
) -> Documents:
    """Opens the `field` of each row of a Hugging Face dataset; see `read_dataset`."""
    check_choice("invalid", invalid, Invalid)

    def read(skipped: Skipped) -> Iterator[str]:
        decoder = TextDecoder(invalid, skipped)
        rows = read_dataset(name, split)

        def texts() -> Iterator[str | None]:
            for where, row in rows:
                _check_field(row, field, where)
                yield decoder.decode_field(row, field, where)

        return _skip_empty(texts(), skipped)

    return Documents(f"{Path(name).name} ({split})", read)


def spell_special_tokens(
    documents: Documents, spellings: Collection[str], end: str | None, how: SpecialTokens
) -> Documents:
    """Counts the special tokens that texts spell; as tokens, `end` also ends a document there.

    `spellings`: of the tokenizer's special tokens. `end`: that of its end-of-text token.
    """
    if not spellings:
        return documents

    def read(skipped: Skipped) -> Iterator[str]:
        for text in documents.read(skipped):
            skipped.count_spellings([text], spellings, how)
            pieces = [text]
            if how == "tokens" and end is not None:
                pieces = text.split(end)
            yield from (piece for piece in pieces if piece.strip())

    return replace(documents, read=read, special_tokens=how == "tokens")


def _check_field(record: Record, field: str, where: str) -> None:
    """Raises ConfigError for a record without the field, if it is an instruction or a chat."""
    found = [name for name in ("messages", "completion", "output") if name in record]
    if field not in record and found:
        raise ConfigError(
            "a record is an instruction, not a text",
            where=where,
            expected=f"a field '{field}', as data.field names it",
            got=", ".join(record),
            fix="set data.kind to instructions, or data.field to the field that holds the text",
        )


def _skip_empty(texts: Iterable[str | None], skipped: Skipped) -> Iterator[str]:
    """Yields the texts that hold more than white space, and counts the others in `skipped`.

    None is a text that the decoder has skipped and counted.
    """
    for text in texts:
        if text is None:
            continue
        if text.strip():
            yield text
        else:
            skipped[EMPTY] += 1


def survey(documents: Documents) -> Survey:
    """Counts and digests all documents in one pass. Raises ConfigError if there are none."""
    skipped = Skipped()
    count = 0
    characters = 0
    digest = hashlib.sha256()
    for text in documents.read(skipped):
        digest.update(_with_length(text))
        count += 1
        characters += len(text)
    if not count:
        expected = "at least one document with text"
        got = f"nothing in {documents.name}"
        raise empty_corpus_error(got, skipped, expected=expected, fix="point data.path at text")
    return Survey(count, characters, skipped, digest.hexdigest())


def _with_length(text: str) -> bytes:
    """Encodes a document for a digest: with its length, so that text cut otherwise has another."""
    content = text.encode()
    return len(content).to_bytes(8, "little") + content


@dataclass(frozen=True)
class Split:
    """Documents in two parts, one of which is held out from training.

    Every k-th document is held out (k = 1/share) if that makes at least two; otherwise the end of
    the text is, and the document in which the cut falls is in both parts.
    """

    documents: Documents
    survey: Survey
    share: float

    @property
    def whole(self) -> bool:
        """Whether whole documents are held out, rather than the end of the text."""
        return self.survey.documents >= 2 * holdout_stride(self.share)

    def read(self, part: Part) -> Iterator[str]:
        """Yields the documents of one part, in order.

        Raises DamageError in the end unless the documents are those of the survey: files may change
        between the passes.
        """
        digest = hashlib.sha256()
        stride = holdout_stride(self.share)
        # both parts read every document, and drop the text of the other
        cut = round(self.survey.characters * (1 - self.share))  # training characters still to come
        for number, text in enumerate(self.documents.read(Skipped()), 1):
            digest.update(_with_length(text))
            if self.whole:
                pieces = {"train": text}
                if stride and number % stride == 0:
                    pieces = {"held_out": text}
            else:
                pieces = {"train": text[:cut], "held_out": text[cut:]}
                cut = max(0, cut - len(text))
            if piece := pieces.get(part):
                yield piece
        if digest.hexdigest() != self.survey.digest:
            raise DamageError(
                "the text has changed while it was read",
                where=self.documents.name,
                expected=f"{self.survey.documents:,} documents, digest {self.survey.digest}",
                got=f"digest {digest.hexdigest()} at the second reading",
                fix="start again once nothing writes to the text, with a new folder for `tokenize`",
            )


def split_documents(documents: Documents, *, held_out: float = 0.05) -> Split:
    """Surveys documents in one pass and splits them; `held_out` is a share of 0 to 0.5.

    Raises ConfigError if the share is out of range or there is no text.
    """
    check_held_out_share(held_out)
    return Split(documents, survey(documents), held_out)


def holdout_stride(held_out: float) -> int:
    """Computes k where every k-th document is held out for a share; 0 for a share of 0."""
    if not held_out:
        return 0
    return round(min(1 / held_out, 2.0**62))  # also of the smallest share an int64
