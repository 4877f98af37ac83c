"""Opens any supported dataset; returns train and held-out examples with a description.

Shapes: T sequence; S inputs and T targets of models with an encoder.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_jax.data.checks import check_choice, check_held_out_share, check_seed, ignored_key_error
from fsdp_jax.data.documents import (
    Part,
    dataset_documents,
    embedded_documents,
    holdout_stride,
    open_documents,
    spell_special_tokens,
    split_documents,
)
from fsdp_jax.data.examples import Examples
from fsdp_jax.data.files import Skipped
from fsdp_jax.data.images import CLASSES, DrawnImages, ImageSplit, load_images
from fsdp_jax.data.instruction_rows import PackedInstructions, TextToText
from fsdp_jax.data.instructions import (
    Chat,
    EncodedInstruction,
    digest_instructions,
    encode_instructions,
    load_instructions,
)
from fsdp_jax.data.options import KINDS, DataOptions, SpecialTokens, TooLong
from fsdp_jax.data.shard_manifest import PARTS, TokenizePlan
from fsdp_jax.data.shards import TokenShards
from fsdp_jax.data.span_corruption import SpanCorruption, corruption_sizes, sentinels_of
from fsdp_jax.data.tokenize_shards import make_tokenize_plan
from fsdp_jax.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    check_special_tokens,
    check_vocabulary,
    load_tokenizer,
)
from fsdp_jax.data.windows import TokenStream, Windows, encode_stream
from fsdp_jax.errors import ConfigError, did_you_mean


@dataclass(frozen=True, eq=False)
class LoadedData:
    """Data that are ready to be read."""

    train: Examples
    held_out: Examples | None  # None without a row
    description: str  # one line for people
    digest: str  # SHA-256, in hexadecimal, of all documents, records or images in order
    tokenizer: Tokenizer | None  # encoded the text; None for images
    shards: TokenShards | None = None  # of tokens on disk; their `check` may still be reading

    @property
    def identity(self) -> dict[str, str]:
        """Digests of the data, by name; a saved position is valid for the same ones."""
        digests = {"corpus": self.digest}
        if self.tokenizer is not None:
            digests["tokenizer"] = self.tokenizer.digest
        if self.shards is not None and (digest := self.shards.manifest.digest) is not None:
            digests["shards"] = digest
        return digests


def open_examples(options: DataOptions) -> LoadedData:
    """Opens the data of a run.

    Every process of a run reads all of a text here (documents, datasets, instructions), encodes it,
    and keeps the tokens in memory. For a larger corpus, encode it once with `fsdp-jax tokenize` and
    open `tokens`, of which a process reads only its own rows, when it needs them.

    Raises ConfigError for an option that is missing, malformed, ignored or inconsistent, with its
    key, and for data that cannot be read, with its place.
    """
    if options.kind not in KINDS:
        what = "there is no such kind of data"
        fix = did_you_mean(options.kind, KINDS)
        raise ConfigError(what, where="data.kind", got=options.kind, fix=fix)
    # the path that the kind needs or ignores
    kind = KINDS[options.kind]
    fix = ""
    if options.path is None and kind.path == "required":
        fix = "set data.path"
    if options.path is not None and kind.path == "unused":
        fix = "leave data.path out"
    if fix:
        what = "kind and path do not go together"
        got = f"kind {options.kind}, path {options.path}"
        raise ConfigError(what, where="data.path", got=got, fix=fix)
    # values of the other options; the kind's own function checks those that it alone uses
    check_choice("too_long", options.too_long, TooLong)
    check_choice("special_tokens", options.special_tokens, SpecialTokens)
    check_seed(options.seed)
    _check_ignored_keys(options)
    check_held_out_share(options.share)
    return _OPEN[options.kind](options)


def split_indices(count: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Splits the indices 0 to `count` - 1 into (train, held out), int64, in order.

    Every k-th index is held out if that makes at least two; otherwise the last ones are.
    """
    indices = np.arange(count)
    stride = holdout_stride(share)
    if stride and count >= 2 * stride:
        held_out = indices % stride == stride - 1
    else:
        held_out = indices >= count - round(count * share)
    return indices[~held_out], indices[held_out]


def _check_ignored_keys(options: DataOptions) -> None:
    """Raises ConfigError for an optional key that is set but that the kind of data ignores."""
    # keys that no kind lists are not checked here
    optional = {key for kind in KINDS.values() for key in kind.keys}
    used = set(KINDS[options.kind].keys)
    if options.target_length is not None:
        used -= {"packing"}  # corrupted chunks cross document boundaries
    for option in fields(options):
        value = getattr(options, option.name)
        if option.name in optional - used and value != option.default:
            raise ignored_key_error(f"data.{option.name}", value)


# Text: documents and token shards become windows, or corrupted chunks for models with an encoder.


def _open_text(options: DataOptions) -> LoadedData:
    """Opens documents, and encodes them into memory."""
    reading: dict[str, Any] = {"field": options.field, "invalid": options.invalid}
    if options.path is None:
        documents = embedded_documents()
    elif options.kind == "datasets":
        documents = dataset_documents(options.path, split=options.split, **reading)
    else:
        documents = open_documents(options.path, **reading)
    tokenizer = _load_checked_tokenizer(options)
    spellings, end = tokenizer.special_tokens, tokenizer.end_spelling
    documents = spell_special_tokens(documents, spellings, end, options.special_tokens)
    # one pass over the text surveys it, and one more for each part encodes it
    split = split_documents(documents, held_out=options.share)
    special = documents.special_tokens
    train, held_out = (
        encode_stream(split.read(part), tokenizer, special=special) for part in PARTS
    )
    return _text_data(train, held_out, make_tokenize_plan(split, tokenizer), tokenizer, options)


def _open_shards(options: DataOptions) -> LoadedData:
    """Opens token shards. Raises ConfigError for options that contradict how they were made."""
    assert options.path is not None
    shards = TokenShards.open(options.path)
    plan = shards.manifest.plan
    tokenizer = shards.tokenizer
    # The tokenizer and the share were decided when the shards were written.
    if options.tokenizer is not None:
        requested = load_tokenizer(options.tokenizer)
        if requested.digest != tokenizer.digest:
            what, where = "the tokens are of another tokenizer", "data.tokenizer"
            expected, got = (
                f"{each.name}, digest {each.digest}" for each in (tokenizer, requested)
            )
            fix = "leave data.tokenizer out, or tokenize again"
            raise ConfigError(what, where=where, expected=expected, got=got, fix=fix)
    share = options.held_out
    if share not in (None, plan.held_out):
        what = "the tokens are split otherwise"
        fix = "leave data.held_out out, or tokenize again"
        raise ConfigError(what, where="data.held_out", expected=plan.held_out, got=share, fix=fix)
    # The ids that occur, not all of the tokenizer's: these never reach the model.
    if options.vocab_size is not None:
        check_vocabulary(shards.manifest.largest, options.vocab_size, weights=options.weights)
    train, held_out = (_shard_stream(shards, part, options) for part in PARTS)
    loaded = _text_data(train, held_out, plan, tokenizer, options)
    return replace(loaded, shards=shards)


def _shard_stream(shards: TokenShards, part: Part, options: DataOptions) -> TokenStream:
    """Opens the tokens of a part, with the starts of documents where rows keep them apart."""
    tokens = shards.tokens(part)
    starts = None
    if options.packing:
        starts = shards.starts(part)
    return TokenStream(tokens, starts)


def _text_data(
    train: TokenStream,
    held_out: TokenStream,
    plan: TokenizePlan,
    tokenizer: Tokenizer,
    options: DataOptions,
) -> LoadedData:
    """Makes the data of two streams; `held_out` is None if its tokens fill no example."""
    # too little to hold out is no error, unlike too little to train on
    needed = options.sequence_length + 1
    if options.target_length is not None:
        needed = corruption_sizes(options.sequence_length, end=tokenizer.end).chunk
    train_examples = _text_examples(train, tokenizer, options)
    held_out_examples = None
    if len(held_out.tokens) >= needed:
        held_out_examples = _text_examples(held_out, tokenizer, options)
    return LoadedData(
        train=train_examples,
        held_out=held_out_examples,
        description=f"{plan.name}: {plan.documents:,} documents, {len(train.tokens):,} training "
        f"tokens and {len(held_out.tokens):,} held out (tokenizer {plan.tokenizer})"
        f"{skip_note(Skipped(plan.skipped))}",
        digest=_digest(plan.corpus, special=plan.special_tokens),
        tokenizer=tokenizer,
    )


def _text_examples(stream: TokenStream, tokenizer: Tokenizer, options: DataOptions) -> Examples:
    """Returns the windows of a stream, or its corrupted chunks for a model with an encoder."""
    if options.target_length is None:
        starts = stream.starts if options.packing else None
        return Windows(stream.tokens, sequence_length=options.sequence_length, starts=starts)
    return SpanCorruption(
        stream.tokens,
        inputs_length=options.sequence_length,
        targets_length=options.target_length,
        sentinels=sentinels_of(tokenizer, options.vocab_size or tokenizer.vocab_size),
        end=tokenizer.end,
        seed=options.seed,
    )


def _digest(corpus: str, *, special: bool) -> str:
    """Makes a digest of the texts and of how they spell special tokens."""
    return hashlib.sha256(f"{corpus} special".encode()).hexdigest() if special else corpus


def _load_checked_tokenizer(options: DataOptions) -> Tokenizer:
    """Loads the options' tokenizer.

    Raises ConfigError if the model's vocabulary is smaller, or it has no special tokens to spell.
    """
    tokenizer = load_tokenizer(options.tokenizer or ByteTokenizer.name)
    check_special_tokens("data.special_tokens", options.special_tokens, tokenizer)
    if options.vocab_size is not None:
        check_vocabulary(tokenizer, options.vocab_size, weights=options.weights)
    return tokenizer


def skip_note(skipped: Skipped) -> str:
    """Formats the end of a description: the counts of skipped and repaired texts, if any."""
    return skipped.note("; skipped or repaired: {}")


# Instructions and images.


def _open_instructions(options: DataOptions) -> LoadedData:
    """Opens instructions, encoded into memory; `held_out` is None where all of it is too long."""
    tokenizer = _load_checked_tokenizer(options)
    skipped = Skipped()
    records = load_instructions(options.path, skipped, split=options.split, invalid=options.invalid)
    template = None
    if any(isinstance(each, Chat) for each in records):
        if options.target_length is not None:
            what, fix = "chats are for decoder-only models", "write them as prompt and completion"
            raise ConfigError(what, where="data.path", got="a model with an encoder", fix=fix)
        if tokenizer.chat_template is not None:  # encode_instructions refuses a missing one
            template = tokenizer.chat_template.source
    how = options.special_tokens
    texts = (each for pair in records if not isinstance(pair, Chat) for each in pair.texts)
    skipped.count_spellings(texts, tokenizer.special_tokens, how)
    encoded = encode_instructions(records, tokenizer, special=how == "tokens")
    # split by instruction, before they are packed: no row holds some of both parts
    train_indices, held_out_rows = split_indices(len(encoded), options.share)
    train = _instruction_examples([encoded[i] for i in train_indices], skipped, options)
    held_out = None
    if len(held_out_rows):
        with suppress(ConfigError):  # each of them is too long, and counted as such
            held_out = _instruction_examples([encoded[i] for i in held_out_rows], skipped, options)
    name = Path(options.path or "instructions").name
    return LoadedData(
        train=train,
        held_out=held_out,
        description=f"{name}: {len(records):,} instructions, {len(held_out_rows):,} of them held "
        f"out, the others in {len(train):,} rows (tokenizer {tokenizer.name}){skip_note(skipped)}",
        digest=_digest(digest_instructions(records, template), special=how == "tokens"),
        tokenizer=tokenizer,
    )


def _instruction_examples(
    encoded: list[EncodedInstruction], skipped: Skipped, options: DataOptions
) -> Examples:
    """Makes rows of packed instructions, or of one each for a model with an encoder."""
    common: dict[str, Any] = {"too_long": options.too_long, "skipped": skipped}
    length, targets_length = options.sequence_length, options.target_length
    if targets_length is None:
        return PackedInstructions(encoded, sequence_length=length, **common)
    return TextToText(encoded, inputs_length=length, targets_length=targets_length, **common)


def _open_images(options: DataOptions) -> LoadedData:
    """Opens the images of an `.npz`; without a path, drawn ones."""
    if options.path is None:
        return _open_drawn_images(options)
    images = load_images(options.path)
    _check_classes(images.classes, options.classes)
    train, held_out = split_indices(len(images), options.share)
    height, width = images.images.shape[1:3]
    return LoadedData(
        train=ImageSplit(images, train),
        held_out=ImageSplit(images, held_out) if len(held_out) else None,
        description=f"{Path(options.path).name}: {len(train):,} images of {height}x{width} in "
        f"{images.classes} classes, and {len(held_out):,} held out",
        digest=images.digest,
        tokenizer=None,
    )


def _open_drawn_images(options: DataOptions) -> LoadedData:
    """Opens images that are drawn as they are read; the digest is of their settings."""
    _check_classes(len(CLASSES), options.classes)
    # the numbers of the held-out images follow those of the training images: none is in both
    count, side, seed = options.images, options.image_size, options.seed
    rest = round(count * options.share)
    sizes = f"{count} and {rest} of {side}x{side}"
    content = f"drawn images 1: {sizes}, {', '.join(CLASSES)}, seed {seed}"
    return LoadedData(
        train=DrawnImages(count, seed=seed, side=side),
        held_out=DrawnImages(rest, seed=seed, first=count, side=side) if rest else None,
        description=f"drawn images: {count:,} of {side}x{side} in {len(CLASSES)} classes, "
        f"and {rest:,} held out",
        digest=hashlib.sha256(content.encode()).hexdigest(),
        tokenizer=None,
    )


def _check_classes(needed: int, classes: int | None) -> None:
    """Raises ConfigError if a model's `classes` are fewer than the labels need; None is unknown."""
    if classes is not None and needed > classes:
        what = "the model has too few classes"
        expected = f"at least {needed}, as the labels have"
        raise ConfigError(what, where="model.classes", expected=expected, got=classes)


_OPEN: dict[str, Callable[[DataOptions], LoadedData]] = {
    **dict.fromkeys(("embedded", "text", "datasets"), _open_text),
    "tokens": _open_shards,
    "instructions": _open_instructions,
    "images": _open_images,
}
"""The functions that open the `KINDS`, called with options that were checked."""
