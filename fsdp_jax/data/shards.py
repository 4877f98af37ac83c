"""Token shards: a tokenized corpus on disk, as `fsdp-jax tokenize` writes it; memory-mapped.

    DIR/manifest.json           written last; describes all the others
    DIR/tokenizer.json          and tokenizer_config.json; neither for bytes
    DIR/train-00000.tokens      ids, uint16 or uint32, little-endian, document after document
    DIR/train-00000.documents   first token of each document in that file, int64, little-endian
    DIR/held_out-00000.tokens   and so on

A shard holds whole documents.
"""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_jax.data.checks import config_error
from fsdp_jax.data.documents import Part
from fsdp_jax.data.tokenizer import Bytes, Tokenizer, load_tokenizer
from fsdp_jax.errors import human_bytes

MANIFEST = "manifest.json"
TOKENS, DOCUMENTS = ".tokens", ".documents"
FORMAT = 1
OFFSET = np.dtype("<i8")
PARTS: tuple[Part, ...] = ("train", "held_out")


@dataclass(frozen=True)
class TokenizePlan:
    """What determines every byte of the shards; a stopped run is resumed only under the same plan.

    Attributes:
        name: the corpus, for descriptions.
        corpus: its digest.
        documents: how many it has, before the split.
        skipped: what of it was skipped or repaired, by reason.
        held_out: the held-out share.
        tokenizer, tokenizer_digest, end: the tokenizer's name, digest and end-of-text token.
        vocab_size: the tokenizer's.
        dtype: the ids' on disk.
        shard_tokens: a shard ends with the document that reaches so many tokens.
        asked: the requested vocabulary size of a tokenizer trained for these shards, which may have
            got fewer ids; None if a tokenizer was named.

    """

    name: str
    corpus: str
    documents: int
    skipped: dict[str, int]
    held_out: float
    tokenizer: str
    tokenizer_digest: str
    end: int | None
    vocab_size: int
    dtype: str
    shard_tokens: int
    asked: int | None
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
    """The contents of a folder of shards; `largest` is the largest id, -1 without tokens."""

    plan: TokenizePlan
    shards: tuple[TokenShard, ...]
    largest: int

    def tokens(self, part: Part) -> int:
        """Returns the number of tokens in a part."""
        return sum(shard.tokens for shard in self.shards if shard.part == part)

    def documents(self, part: Part) -> int:
        """Returns the number of documents in a part; one that was cut counts in both."""
        return sum(shard.documents for shard in self.shards if shard.part == part)

    def to_json(self) -> dict[str, Any]:
        """Returns the contents of the file, with sums for the reader."""
        sums = {
            part: {"tokens": self.tokens(part), "documents": self.documents(part)} for part in PARTS
        }
        return asdict(self) | {"sums": sums}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "Manifest":
        """Raises KeyError, TypeError or ValueError if `body` is not a manifest."""
        if body["plan"]["format"] != FORMAT:
            raise ValueError(f"format {body['plan']['format']}, which this version does not read")
        plan = TokenizePlan(**body["plan"])
        shards = tuple(TokenShard(**shard) for shard in body["shards"])
        return cls(plan, shards, int(body["largest"]))


class ShardedTokens:
    """The tokens of one part, across its shards, as one stream that is read from memory maps.

    Reading an id that the tokenizer does not have raises ConfigError with its shard and index.
    """

    def __init__(self, folder: Path, shards: tuple[TokenShard, ...], plan: TokenizePlan):
        self.shards = shards
        self._files = [folder / (shard.name + TOKENS) for shard in shards]
        self._maps = [np.memmap(file, np.dtype(plan.dtype), "r") for file in self._files]
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
            self._check_ids(piece, self._files[index], start - begin)
            pieces.append(piece.astype(np.int32))
            start = end
            index += 1
        return np.concatenate(pieces)

    def _check_ids(self, piece: np.ndarray, file: Path, first: int) -> None:
        invalid = np.flatnonzero(piece >= self._vocab_size)
        if len(invalid):
            raise config_error(
                "A token id is not in the vocabulary.",
                where=f"{file}, token {first + invalid[0]}",
                expected=f"less than {self._vocab_size}, the tokenizer's vocabulary",
                got=f"id {piece[invalid[0]]}",
                fix="the file is damaged: tokenize again",
            )


@dataclass(frozen=True)
class TokenShards:
    """An opened folder of shards; no tokens are read yet."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | Path) -> "TokenShards":
        """Checks the manifest against the files' sizes; raises ConfigError where they differ."""
        path = Path(folder).expanduser()
        manifest = read_manifest(path)
        itemsize = np.dtype(manifest.plan.dtype).itemsize
        for shard in manifest.shards:
            _check_size(path / (shard.name + TOKENS), shard.tokens * itemsize)
            _check_size(path / (shard.name + DOCUMENTS), shard.documents * OFFSET.itemsize)
        return cls(path, manifest)

    def tokens(self, part: Part) -> ShardedTokens:
        """Returns one part as one stream, which stays on disk."""
        return ShardedTokens(self.folder, self._shards(part), self.manifest.plan)

    def starts(self, part: Part) -> np.ndarray:
        """Reads int64 [documents]: the index in `tokens(part)` of each document's first token."""
        starts = [np.zeros(0, np.int64)]
        begin = 0
        for shard in self._shards(part):
            starts.append(np.fromfile(self.folder / (shard.name + DOCUMENTS), OFFSET) + begin)
            begin += shard.tokens
        return np.concatenate(starts)

    def _shards(self, part: Part) -> tuple[TokenShard, ...]:
        return tuple(shard for shard in self.manifest.shards if shard.part == part and shard.tokens)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that encoded the text; ConfigError if it is no longer beside the shards."""
        digest = self.manifest.plan.tokenizer_digest
        tokenizer = load_tokenizer(Bytes.name if digest == Bytes.digest else self.folder)
        if tokenizer.digest != digest:
            what = "The tokenizer is not the one that encoded the text."
            where = str(self.folder)
            raise config_error(what, where=where, expected=f"digest {digest}", got=tokenizer.digest)
        return tokenizer


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a folder; raises ConfigError if it is missing or damaged."""
    what = "There are no finished token shards."
    file = folder / MANIFEST
    fix = "make it with `fsdp-jax tokenize`; run it again if it was stopped"
    if not file.is_file():
        raise config_error(what, where="data.path", expected=MANIFEST, got=folder, fix=fix)
    try:
        return Manifest.from_json(json.loads(file.read_text()))
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise config_error(
            what, where=str(file), expected="a manifest", got=got, fix=fix
        ) from error


def _check_size(file: Path, expected: int) -> None:
    size = file.stat().st_size if file.is_file() else None
    if size != expected:
        raise config_error(
            "A token shard is not as it was written.",
            where=str(file),
            expected=f"{expected:,} bytes",
            got="no file" if size is None else f"{size:,} bytes ({human_bytes(size)})",
            fix="restore the file, or tokenize again",
        )
