"""Token shards: a tokenized corpus on disk, as `fsdp-jax tokenize` writes it; memory-mapped.

    DIR/manifest.json           written last; describes all the others
    DIR/tokenizer.json          and tokenizer_config.json; neither for bytes
    DIR/train-00000.tokens      ids, uint16 or uint32, little-endian, document after document
    DIR/train-00000.documents   first token of each document in that file, int64, little-endian
    DIR/held_out-00000.tokens   and so on

A shard holds whole documents.
"""

import threading
import types
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from fsdp_jax.data.checks import config_error, damage_error
from fsdp_jax.data.documents import Part
from fsdp_jax.data.tokenizer import (
    FILE,
    SETTINGS,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    token_dtype,
)
from fsdp_jax.errors import DamageError, human_bytes, message
from fsdp_jax.io.digests import DIGEST, Json, digest_file, digest_json, parse_sealed, sealed_text
from fsdp_jax.io.json_text import parse_json
from fsdp_jax.io.regular_files import open_regular, read_regular

T = TypeVar("T")

MANIFEST = "manifest.json"
TOKENS, DOCUMENTS = ".tokens", ".documents"
FORMAT = 1
OFFSET = np.dtype("<i8")
PARTS: tuple[Part, ...] = ("train", "held_out")
RESTORE = "restore the file, or run the same `fsdp-jax tokenize` again, which writes it again"
AT_ONCE = 64 << 20  # bytes that are compared with their digests before the first is read


@dataclass(frozen=True)
class TokenizePlan:
    """What determines every byte of the shards; a run is resumed only under the same plan."""

    name: str  # of the corpus
    corpus: str  # its digest
    documents: int  # before the split
    skipped: dict[str, int]  # or repaired, by reason
    held_out: float  # share
    tokenizer: str
    tokenizer_digest: str
    end: int | None  # the end-of-text token
    vocab_size: int
    dtype: str  # of ids on disk
    shard_tokens: int  # a shard ends with the document that reaches so many
    asked: int | None  # vocabulary size of a tokenizer trained for this, which may have fewer ids
    format: int = FORMAT


@dataclass(frozen=True)
class TokenShard:
    """One shard: its `name` without suffix, and how many tokens and documents it holds."""

    name: str
    part: Part
    tokens: int
    documents: int


@dataclass(frozen=True)
class Manifest:
    """The contents of a folder of shards."""

    plan: TokenizePlan
    shards: tuple[TokenShard, ...]
    largest: int  # id, -1 without tokens
    # {name: {bytes, xxh3_128}} of every file; empty where an older release wrote them.
    files: Mapping[str, Json] = field(default_factory=dict)

    def of(self, part: Part) -> list[TokenShard]:
        """Returns the shards of a part, `train` or `held_out`."""
        return [shard for shard in self.shards if shard.part == part]

    def tokens(self, part: Part) -> int:
        """Returns the number of tokens in a part."""
        return sum(shard.tokens for shard in self.of(part))

    def documents(self, part: Part) -> int:
        """Returns the number of documents in a part; one that was cut counts in both."""
        return sum(shard.documents for shard in self.of(part))

    @property
    def digest(self) -> str | None:
        """The digest of all shards, which identifies the tokens; None if they have none."""
        shards = {name: each for name, each in self.files.items() if name not in (FILE, SETTINGS)}
        return digest_json(shards) if self.files else None

    def to_text(self) -> str:
        """Returns the contents of `manifest.json`, with sums for people and a digest of itself."""
        return sealed_text(asdict(self) | {"sums": self._sums()})

    @classmethod
    def from_text(cls, text: str) -> "Manifest":
        """Parses the text of a `manifest.json`.

        Raises ValueError if it is malformed or contradicts itself, or its own digest, which older
        releases did not write.
        """
        body = parse_json(text)
        if not isinstance(body, dict):
            raise ValueError("not an object")
        if DIGEST in body or "files" in body:  # older releases wrote neither
            body = parse_sealed(text)
        plan, shards = body.get("plan"), body.get("shards")
        if isinstance(plan, dict) and plan.get("format") != FORMAT:
            raise ValueError(f"format {plan.get('format')}, which this version does not read")
        if not isinstance(shards, list):
            raise ValueError("no list of shards")
        manifest = cls(
            dataclass_from_json(TokenizePlan, plan),
            tuple(dataclass_from_json(TokenShard, each) for each in shards),
            body.get("largest"),  # type: ignore[arg-type]  # checked below
            body.get("files", {}),
        )
        manifest._check_values()
        if "sums" in body and body["sums"] != manifest._sums():
            raise ValueError("the sums are not those of the shards")
        if DIGEST in body:
            _check_file_digests(manifest.files, manifest.shards)
        return manifest

    def _sums(self) -> Json:
        """Returns {part: its numbers of tokens and documents}."""
        return {
            part: {"tokens": self.tokens(part), "documents": self.documents(part)} for part in PARTS
        }

    def _check_values(self) -> None:
        """Raises ValueError unless the numbers are possible, and the names those of the shards."""
        plan, largest = self.plan, self.largest
        possible = {
            "vocab_size": 0 < plan.vocab_size <= 1 << 31,
            "dtype": plan.dtype == token_dtype(plan.vocab_size).str,
            "end": plan.end is None or 0 <= plan.end < plan.vocab_size,
            "held_out": 0 <= plan.held_out <= 0.5,
            "shard_tokens": plan.shard_tokens > 0,
            "documents": plan.documents >= 0,
            "largest": type(largest) is int and -1 <= largest < plan.vocab_size,
            "tokens and documents": all(min(s.tokens, s.documents) >= 0 for s in self.shards),
        }
        wrong = [name for name, right in possible.items() if not right]
        if wrong:
            raise ValueError(f"impossible: {', '.join(wrong)}")
        for part in PARTS:
            names = [shard.name for shard in self.of(part)]
            if names != [shard_name(part, number) for number in range(len(names))]:
                raise ValueError("the shards are not named in their order")


def shard_name(part: Part, number: int) -> str:
    """Returns the name of a shard without suffix."""
    return f"{part}-{number:05}"


def shard_files(shards: tuple[TokenShard, ...]) -> list[str]:
    """Returns the names of the shards' files, two for each."""
    return [shard.name + suffix for shard in shards for suffix in (TOKENS, DOCUMENTS)]


def _check_file_digests(files: object, shards: tuple[TokenShard, ...]) -> None:
    """Raises ValueError unless `files` are digests of the shards' files, and of a tokenizer's."""
    if not isinstance(files, dict) or set(files) - {FILE, SETTINGS} != set(shard_files(shards)):
        raise ValueError("the digests are not those of the shards")
    kinds = {"bytes": int, "xxh3_128": str}
    for name, each in files.items():
        if not isinstance(each, dict) or {key: type(each[key]) for key in each} != kinds:
            raise ValueError(f"the digest of {name} is not one")


class DigestCheck:
    """Compares files with their digests: small ones at once, large ones in a thread.

    `files`: {name: digest}. Damage of those that are compared at once is raised at once.
    """

    def __init__(self, folder: Path, files: Mapping[str, Json]) -> None:
        self._folder = folder
        self._problem: DamageError | None = None
        small = sum(each["bytes"] for each in files.values()) <= AT_ONCE
        at_once = [name for name in files if small or name in (FILE, SETTINGS)]
        self._compare({name: files[name] for name in at_once})
        self.raise_if_damaged()
        # A daemon: nothing waits for it at the end of the process.
        later = {name: each for name, each in files.items() if name not in at_once}
        self._thread = threading.Thread(target=self._compare, args=(later,), daemon=True)
        self._thread.start()

    def raise_if_damaged(self) -> None:
        """Raises DamageError, with the file's name, if one has been found damaged."""
        if self._problem is not None:
            raise self._problem

    def wait(self, seconds: float) -> bool:
        """Waits at most so long; returns whether all files have been compared."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _compare(self, files: Mapping[str, Json]) -> None:
        """Compares files until one is damaged, which `raise_if_damaged` then raises."""
        try:
            for name, expected in files.items():
                check_digest(self._folder / name, expected)
        except DamageError as error:
            self._problem = error


def check_digest(file: Path, expected: Json) -> None:
    """Raises DamageError unless a file has its digest."""
    try:
        found = digest_file(file)
    except OSError as error:
        raise damaged_shard_error(file, f"{expected['bytes']:,} bytes", error) from error
    if found != expected:
        sizes = [f"{each['bytes']:,} bytes, xxh3 {each['xxh3_128']}" for each in (expected, found)]
        raise damaged_shard_error(file, *sizes)


class MemoryMappedTokens:
    """The `Tokens` of one part, read from disk; DamageError for ids beyond the vocabulary."""

    def __init__(self, folder: Path, shards: tuple[TokenShard, ...], plan: TokenizePlan):
        self.shards = shards
        self._files = [folder / (shard.name + TOKENS) for shard in shards]
        self._maps = [_memory_map(file, plan.dtype) for file in self._files]
        self._ends = np.cumsum([shard.tokens for shard in shards], dtype=np.int64)
        self._vocab_size = plan.vocab_size

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.shards else 0

    def __getitem__(self, part: slice) -> np.ndarray:
        """Returns int32 [stop - start] of a slice without a step."""
        start, stop, step = part.indices(len(self))
        assert step == 1, "a stream is read forwards"
        pieces = [np.zeros(0, np.int32)]
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[index])
            begin = end - self.shards[index].tokens
            piece = np.asarray(self._maps[index][start - begin : stop - begin])
            invalid = np.flatnonzero(piece >= self._vocab_size)
            if len(invalid):
                what, got = "A token id is not in the vocabulary.", f"id {piece[invalid[0]]}"
                where = f"{self._files[index]}, token {start - begin + invalid[0]}"
                expected = f"less than {self._vocab_size}, the tokenizer's vocabulary"
                raise damage_error(what, where=where, expected=expected, got=got, fix=RESTORE)
            pieces.append(piece.astype(np.int32))
            start = end
            index += 1
        return np.concatenate(pieces)


@dataclass(frozen=True)
class TokenShards:
    """An opened folder of shards; `check` compares it with the digests that it has."""

    folder: Path
    manifest: Manifest
    check: DigestCheck

    @classmethod
    def open(cls, folder: str | Path) -> "TokenShards":
        """Opens a folder of finished shards, and checks the files against the manifest.

        Their sizes are compared at once, and their digests too where they are small; others in the
        background, for `check.raise_if_damaged`. Without digests, of an older release, a warning
        says so. Raises ConfigError if there are no shards, DamageError for damaged ones.
        """
        path = Path(folder).expanduser()
        manifest = read_manifest(path)
        for shard in manifest.shards:
            check_sizes(path, shard, manifest.plan)
        if not manifest.files:
            what = "token shards without digests, so damage goes unseen"
            got = "a manifest of an older release"
            fix = "tokenize again, into another folder"
            warnings.warn(message(what, where=str(path), got=got, fix=fix), stacklevel=2)
        return cls(path, manifest, DigestCheck(path, manifest.files))

    def tokens(self, part: Part) -> MemoryMappedTokens:
        """Returns one part as one stream, which stays on disk."""
        return MemoryMappedTokens(self.folder, self._shards_with_tokens(part), self.manifest.plan)

    def starts(self, part: Part) -> np.ndarray:
        """Reads int64 [documents]: each one's first index in `tokens(part)`. Raises DamageError."""
        starts = [np.zeros(0, np.int64)]
        begin = 0
        for shard in self._shards_with_tokens(part):
            file = self.folder / (shard.name + DOCUMENTS)
            starts.append(_read_starts(file, shard) + begin)
            begin += shard.tokens
        return np.concatenate(starts)

    def _shards_with_tokens(self, part: Part) -> tuple[TokenShard, ...]:
        return tuple(shard for shard in self.manifest.of(part) if shard.tokens)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that encoded the text; DamageError if it is not beside the shards."""
        digest = self.manifest.plan.tokenizer_digest
        is_bytes = digest == ByteTokenizer.digest
        tokenizer = load_tokenizer(ByteTokenizer.name if is_bytes else self.folder)
        if tokenizer.digest != digest:
            what = "The tokenizer is not the one that encoded the text."
            where, expected = str(self.folder), f"digest {digest}"
            got = tokenizer.digest
            raise damage_error(what, where=where, expected=expected, got=got, fix=RESTORE)
        return tokenizer


def read_manifest(folder: Path) -> Manifest:
    """Reads a manifest. Raises ConfigError if it is missing, DamageError if it is damaged."""
    file = folder / MANIFEST
    if not file.exists():
        what = "There are no finished token shards."
        fix = "make it with `fsdp-jax tokenize`; run it again if it was stopped"
        raise config_error(what, where="data.path", expected=MANIFEST, got=folder, fix=fix)
    try:
        return Manifest.from_text(read_regular(file).decode())
    except (OSError, ValueError) as error:
        what, expected = "The manifest of token shards is damaged.", "a manifest"
        fix = "restore the file, or remove the folder and tokenize again"
        raise damage_error(what, where=str(file), expected=expected, got=error, fix=fix) from error


def damaged_shard_error(file: Path, expected: str, got: object) -> DamageError:
    """Returns the error for a file of shards that differs from what was written."""
    what = "A file of token shards is not as it was written."
    return damage_error(what, where=str(file), expected=expected, got=got, fix=RESTORE)


def _memory_map(file: Path, dtype: str) -> np.ndarray:
    with open_regular(file) as opened:
        return np.memmap(opened, np.dtype(dtype), "r")


def _read_starts(file: Path, shard: TokenShard) -> np.ndarray:
    """Returns int64 [documents]: the first token of each document in its shard."""
    starts = np.frombuffer(read_regular(file), OFFSET).astype(np.int64)
    bounds = np.concatenate([[0], starts, [shard.tokens]])
    wrong = np.flatnonzero(np.diff(bounds) < 0)
    if len(wrong) or (len(starts) and starts[0]):
        number = int(wrong[0]) if len(wrong) else 0
        expected = f"documents in order, from token 0 to {shard.tokens}"
        got = f"document {min(number, len(starts) - 1)} out of order"
        raise damaged_shard_error(file, expected, got)
    return starts


def check_sizes(folder: Path, shard: TokenShard, plan: TokenizePlan) -> None:
    """Raises DamageError unless a shard's files have the sizes of its tokens and documents."""
    sizes = {
        TOKENS: shard.tokens * np.dtype(plan.dtype).itemsize,
        DOCUMENTS: shard.documents * OFFSET.itemsize,
    }
    for suffix, expected in sizes.items():
        file = folder / (shard.name + suffix)
        size = file.stat().st_size if file.is_file() else None
        if size != expected:
            got = "no file" if size is None else f"{size:,} bytes ({human_bytes(size)})"
            raise damaged_shard_error(file, f"{expected:,} bytes", got)


def dataclass_from_json(kind: type[T], body: object) -> T:
    """Returns a dataclass of parsed JSON, or raises ValueError for any other keys or types."""
    if not isinstance(body, dict):
        raise ValueError(f"no {kind.__name__}")
    hints = get_type_hints(kind)
    specs: Any = kind  # a dataclass, which mypy cannot say of T
    required = {each.name for each in fields(specs) if each.default is MISSING}
    wrong = {*(required - body.keys()), *(body.keys() - hints.keys())}
    wrong |= {name for name in body.keys() & hints.keys() if not _has_type(body[name], hints[name])}
    if wrong:
        raise ValueError(f"{kind.__name__}: missing, unknown or of another type: {sorted(wrong)}")
    return kind(**body)


def _has_type(value: object, hint: Any) -> bool:
    """Returns whether a value of parsed JSON is of an annotated type."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is types.UnionType:
        return any(_has_type(value, each) for each in get_args(hint))
    if get_origin(hint) is dict:
        return type(value) is dict and all(
            _has_type(each, get_args(hint)[1]) for each in value.values()
        )
    return type(value) is hint or (hint is float and type(value) is int)
