"""One door to all data: what kind, where it lies, how rows are made of it; out come examples and
what to say of them.

Shapes: T sequence; S inputs and T targets of models with an encoder.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from fsdp_jax.data.corruption import SpanCorruption, sentinels_of, tokens_needed
from fsdp_jax.data.documents import (
    Documents,
    check_share,
    dataset_documents,
    embedded_documents,
    every,
    open_documents,
    split_documents,
)
from fsdp_jax.data.examples import Examples, Tokens, check_seed
from fsdp_jax.data.files import Skipped
from fsdp_jax.data.images import CLASSES, SIDE, ArrayImages, ImageSplit, DrawnImages, load_images
from fsdp_jax.data.instructions import (
    InstructionRecord,
    PackedInstructions,
    EncodedInstruction,
    TextToText,
    TooLong,
    check_too_long,
    digest_of,
    encode_pairs,
    load_instructions,
)
from fsdp_jax.data.records import Invalid, check_invalid, would_be_ignored
from fsdp_jax.data.shards import TokenShards
from fsdp_jax.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from fsdp_jax.data.windows import Windows, stream_of
from fsdp_jax.errors import ConfigError, did_you_mean, message

Kind = Literal["embedded", "text", "tokens", "datasets", "instructions", "images"]

WITH_PATH, WITHOUT_PATH = ("text", "tokens", "datasets"), ("embedded",)
HELD_OUT = 0.05
IMAGES = 50_000

TEXT: tuple[Kind, ...] = ("embedded", "text", "tokens", "datasets", "instructions")
USED: dict[str, tuple[object, tuple[Kind, ...]]] = {
    "field": ("text", ("text", "datasets")),
    "invalid": ("error", ("text", "datasets", "instructions")),
    "packing": (False, TEXT),
    "split": ("train", ("datasets", "instructions")),
    "tokenizer": (None, TEXT),
    "too_long": ("truncate", ("instructions",)),
}
"""{key: (its default, the kinds that use it)}."""


@dataclass(frozen=True, eq=False)
class LoadedData:
    """Data that are ready to be read.

    Attributes:
        train, held_out: rows; held_out is None where there is not one row.
        description: one line about it, for people.
        digest: of the documents, records or images, held-out ones too, in order; SHA-256 in
            hexadecimal.
        tokenizer: what encoded the text; None for images.

    """

    train: Examples
    held_out: Examples | None
    description: str
    digest: str
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class _Rows:
    """How rows are made; see `open_examples`."""

    sequence_length: int
    targets_length: int | None
    apart: bool
    too_long: TooLong
    seed: int
    vocab_size: int | None


def open_examples(
    kind: Kind,
    *,
    sequence_length: int,
    targets_length: int | None = None,
    path: str | None = None,
    split: str = "train",
    field: str = "text",
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    held_out: float | None = None,
    apart: bool = False,
    invalid: Invalid = "error",
    too_long: TooLong = "truncate",
    seed: int = 0,
    images: int = IMAGES,
    image_size: int = SIDE,
    classes: int | None = None,
) -> LoadedData:
    """Opens the data of a run.

    Every process of a run reads all of its text here (documents, datasets, instructions), tokenises
    it, and keeps the tokens in memory. For more than that is good for, tokenise once with `fsdp-jax
    tokenize` and read `tokens`, of which a process reads its own rows, when it needs them.

    Args:
        kind: `embedded` (the source of Python's standard library), `text` (files), `tokens` (what
            `tokenize` wrote), `datasets` (Hugging Face's), `instructions` (Alpaca's format) or
            `images`.
        sequence_length: T of a decoder-only model; S of one with an encoder. Images have none.
        targets_length: T of a model with an encoder, whose rows are prompts and answers, or
            corrupted text; None for a decoder-only model.
        path: of a file or folder, or a dataset's name. None for embedded text, for the instructions
            that come along and for drawn images.
        split: of a dataset.
        field: of a dataset, or of the records in JSON files, that holds a document.
        tokenizer: as `load_tokenizer` takes it; None is bytes, or what the tokens were made with.
        vocab_size: of the model, which must have every id; not checked if None.
        held_out: share that is kept from training, 0 to 0.5; None is 0.05, or what the tokens were
            split with.
        apart: documents do not see each other, with `segments` and `positions`; instructions never
            do.
        invalid: what becomes of text that is not UTF-8.
        too_long: what becomes of instructions that no row can hold.
        seed: of the corruption of text, and of drawn images.
        images: how many are drawn for training.
        image_size: side of those that are drawn, in pixels.
        classes: of the model, for images, which must have every label; not checked if None.

    Raises:
        ConfigError: what is missing, malformed, ignored or does not go together, with its key or
            its place.

    """
    if kind not in get_args(Kind):
        raise ConfigError(
            message(
                "No such data.", where="data.kind", got=kind, fix=did_you_mean(kind, get_args(Kind))
            )
        )
    if (path is None and kind in WITH_PATH) or (path is not None and kind in WITHOUT_PATH):
        fix = "leave data.path out" if kind in WITHOUT_PATH else "set data.path"
        what = "kind and path do not go together"
        raise ConfigError(
            message(what, where="data.path", got=f"kind {kind}, path {path}", fix=fix)
        )
    check_too_long(too_long)
    check_invalid(invalid)
    check_seed(seed)
    given = {
        "field": field,
        "invalid": invalid,
        "packing": apart,
        "split": split,
        "tokenizer": tokenizer,
    }
    _check_used(kind, given | {"too_long": too_long}, targets_length)
    check_share(share := HELD_OUT if held_out is None else held_out)
    rows = _Rows(sequence_length, targets_length, apart, too_long, seed, vocab_size)
    if kind == "images":
        return (
            _drawn(images, image_size, share, seed, classes)
            if path is None
            else _arrays(path, share, classes)
        )
    if kind == "tokens":
        assert path is not None, "checked above"
        return _shards(path, tokenizer, held_out, rows)
    encoder = load_tokenizer(tokenizer or "bytes")
    if vocab_size is not None:
        check_vocabulary(encoder, vocab_size)
    if kind == "instructions":
        skipped = Skipped()
        found = load_instructions(path, skipped, split=split, invalid=invalid)
        return _instructions(path, found, skipped, encoder, share, rows)
    return _documents(_read(kind, path, split, field, invalid), encoder, share, rows)


def _check_used(kind: Kind, given: dict[str, object], targets_length: int | None) -> None:
    """Raises ConfigError for what differs from its default and would be ignored."""
    for key, got in given.items():
        default, kinds = USED[key]
        spans = (
            key == "packing" and targets_length is not None
        )  # stretches for an encoder go across documents
        if got != default and (kind not in kinds or spans):
            raise would_be_ignored(key, got)


def _read(kind: Kind, path: str | None, split: str, field: str, invalid: Invalid) -> Documents:
    if path is None:
        return embedded_documents()
    if kind == "datasets":
        return dataset_documents(path, split=split, field=field, invalid=invalid)
    return open_documents(path, field=field, invalid=invalid)


def _documents(documents: Documents, tokenizer: Tokenizer, share: float, rows: _Rows) -> LoadedData:
    parts = split_documents(documents, held_out=share)
    train, rest = (stream_of(parts.read(part), tokenizer) for part in ("train", "held_out"))
    found = parts.survey
    return LoadedData(
        train=_of_stream(train.tokens, train.starts, tokenizer, rows),
        held_out=_unless_short(rest.tokens, rest.starts, tokenizer, rows),
        description=_line(
            documents.name,
            found.documents,
            train.tokens,
            rest.tokens,
            tokenizer.name,
            found.skipped,
        ),
        digest=found.digest,
        tokenizer=tokenizer,
    )


def _shards(path: str, tokenizer: str | None, held_out: float | None, rows: _Rows) -> LoadedData:
    shards = TokenShards.open(path)
    plan, own = shards.manifest.plan, shards.tokenizer
    asked = None if tokenizer is None else load_tokenizer(tokenizer)
    if asked is not None and asked.digest != own.digest:
        what, fix = (
            "The tokens are of another tokenizer.",
            "leave data.tokenizer out, or tokenize again",
        )
        expected, got = f"{own.name}, digest {own.digest}", f"{asked.name}, digest {asked.digest}"
        raise ConfigError(
            message(what, where="data.tokenizer", expected=expected, got=got, fix=fix)
        )
    if held_out not in (None, plan.held_out):
        what, fix = "The tokens are split otherwise.", "leave data.held_out out, or tokenize again"
        raise ConfigError(
            message(what, where="data.held_out", expected=plan.held_out, got=held_out, fix=fix)
        )
    if rows.vocab_size is not None:
        check_vocabulary(shards.manifest.largest, rows.vocab_size)
    train, rest = shards.tokens("train"), shards.tokens("held_out")
    starts = [shards.starts(part) if rows.apart else None for part in ("train", "held_out")]
    skipped = Skipped(plan.skipped)
    return LoadedData(
        train=_of_stream(train, starts[0], own, rows),
        held_out=_unless_short(rest, starts[1], own, rows),
        description=_line(plan.name, plan.documents, train, rest, plan.tokenizer, skipped),
        digest=plan.corpus,
        tokenizer=own,
    )


def _of_stream(
    tokens: Tokens, starts: np.ndarray | None, tokenizer: Tokenizer, rows: _Rows
) -> Examples:
    if rows.targets_length is None:
        return Windows(
            tokens, sequence_length=rows.sequence_length, starts=starts if rows.apart else None
        )
    return SpanCorruption(
        tokens,
        inputs_length=rows.sequence_length,
        targets_length=rows.targets_length,
        sentinels=sentinels_of(tokenizer, rows.vocab_size or tokenizer.vocab_size),
        end=tokenizer.end,
        seed=rows.seed,
    )


def _unless_short(
    tokens: Tokens, starts: np.ndarray | None, tokenizer: Tokenizer, rows: _Rows
) -> Examples | None:
    """Rows of the held-out part; None where there is not one."""
    needed = rows.sequence_length + 1
    if rows.targets_length is not None:
        needed = tokens_needed(rows.sequence_length, end=tokenizer.end)
    if len(tokens) < needed:
        return None
    return _of_stream(tokens, starts, tokenizer, rows)


def _instructions(
    path: str | None,
    found: list[InstructionRecord],
    skipped: Skipped,
    tokenizer: Tokenizer,
    share: float,
    rows: _Rows,
) -> LoadedData:
    pairs = encode_pairs(found, tokenizer)
    kept, rest = held_out_indices(len(pairs), share)
    train = _of_pairs([pairs[at] for at in kept], rows, skipped)
    try:
        held_out = _of_pairs([pairs[at] for at in rest], rows, skipped) if len(rest) else None
    except ConfigError:  # each of them is too long, and counted so
        held_out = None
    name = "instructions" if path is None else Path(path).name
    return LoadedData(
        train=train,
        held_out=held_out,
        description=f"{name}: {len(found):,} instructions, {len(rest):,} of them held out, the others in "
        f"{len(train):,} rows (tokenizer {tokenizer.name}){_passed_over(skipped)}",
        digest=digest_of(found),
        tokenizer=tokenizer,
    )


def _of_pairs(pairs: list[EncodedInstruction], rows: _Rows, skipped: Skipped) -> Examples:
    if rows.targets_length is None:
        return PackedInstructions(
            pairs, sequence_length=rows.sequence_length, too_long=rows.too_long, skipped=skipped
        )
    return TextToText(
        pairs,
        inputs_length=rows.sequence_length,
        targets_length=rows.targets_length,
        too_long=rows.too_long,
        skipped=skipped,
    )


def _drawn(count: int, side: int, share: float, seed: int, classes: int | None) -> LoadedData:
    _check_classes(len(CLASSES), classes)
    rest = round(count * share)
    content = (
        f"drawn images 1: {count} and {rest} of {side}x{side}, {', '.join(CLASSES)}, seed {seed}"
    )
    return LoadedData(
        train=DrawnImages(count, seed=seed, side=side),
        held_out=DrawnImages(rest, seed=seed, first=count, side=side) if rest else None,
        description=f"drawn images: {count:,} of {side}x{side} in {len(CLASSES)} classes, and {rest:,} held out",
        digest=hashlib.sha256(content.encode()).hexdigest(),
        tokenizer=None,
    )


def _arrays(path: str, share: float, classes: int | None) -> LoadedData:
    found: ArrayImages = load_images(path)
    _check_classes(found.classes, classes)
    kept, rest = held_out_indices(len(found), share)
    height, width = found.images.shape[1:3]
    name = Path(path).name
    return LoadedData(
        train=ImageSplit(found, kept),
        held_out=ImageSplit(found, rest) if len(rest) else None,
        description=f"{name}: {len(kept):,} images of {height}x{width} in {found.classes} classes, "
        f"and {len(rest):,} held out",
        digest=found.digest,
        tokenizer=None,
    )


def held_out_indices(count: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """(kept, held out) of 0 to `count`: every k-th where that makes at least two, else the end;
    int64, in order.
    """
    places, step = np.arange(count), every(share)
    whole = bool(step) and count >= 2 * step
    out = places % step == step - 1 if whole else places >= count - round(count * share)
    return places[~out], places[out]


def _check_classes(found: int, classes: int | None) -> None:
    if classes is not None and found > classes:
        what, expected = "The model has too few classes.", f"at least {found}, as the labels have"
        raise ConfigError(message(what, where="model.classes", expected=expected, got=classes))


def _line(
    name: str, documents: int, train: Tokens, rest: Tokens, tokenizer: str, skipped: Skipped
) -> str:
    return (
        f"{name}: {documents:,} documents, {len(train):,} tokens to learn from and {len(rest):,} held out "
        f"(tokenizer {tokenizer}){_passed_over(skipped)}"
    )


def _passed_over(skipped: Skipped) -> str:
    return f"; passed over or mended: {skipped}" if str(skipped) else ""
