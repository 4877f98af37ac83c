"""Token shards: a tokenised corpus on the disk, as `fsdp-jax tokenize` writes it, read through
memory maps.

    DIR/manifest.json           written last; what all the rest is
    DIR/tokenizer.json          and tokenizer_config.json; neither for bytes
    DIR/train-00000.tokens      ids, uint16 or uint32, little-endian, document after document
    DIR/train-00000.documents   where each document begins in that file, in tokens, int64, little-endian
    DIR/held_out-00000.tokens   and so on

A shard holds whole documents.
"""

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_jax.data.documents import Part
from fsdp_jax.data.tokenizer import Bytes, Tokenizer, load_tokenizer
from fsdp_jax.errors import ConfigError, human_bytes, message

MANIFEST = "manifest.json"
TOKENS, DOCUMENTS = ".tokens", ".documents"
FORMAT = 1
OFFSET = np.dtype("<i8")
PARTS: tuple[Part, ...] = ("train", "held_out")


@dataclass(frozen=True)
class TokenizePlan:
    """What fixes every byte of the shards; only the same plan goes on where another stopped.

    Attributes:
        name: of the corpus.
        corpus: its digest.
        documents: before the split.
        skipped: what of it was passed over, by reason.
        held_out: the share.
        tokenizer, tokenizer_digest, end: what encoded it, and the end-of-text token.
        vocab_size: of the tokenizer.
        dtype: of the ids.
        shard_tokens: a shard ends with the document that reaches so many.
        asked: the vocabulary that was asked for, of a tokenizer trained for these shards, which may
            have got fewer ids; None where a tokenizer was named.

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
    """One shard: `name` without suffix, and how many tokens and documents it holds."""

    name: str
    part: Part
    tokens: int
    documents: int


@dataclass(frozen=True)
class Manifest:
    """What a folder of shards holds. `largest`: the largest id; -1 of no tokens."""

    plan: TokenizePlan
    shards: tuple[TokenShard, ...]
    largest: int

    def tokens(self, part: Part) -> int:
        """Tokens of a part."""
        return sum(shard.tokens for shard in self.shards if shard.part == part)

    def documents(self, part: Part) -> int:
        """Documents of a part; one that was cut in two counts in both."""
        return sum(shard.documents for shard in self.shards if shard.part == part)

    def to_json(self) -> dict[str, Any]:
        """As the file has it; the sums are for people."""
        sums = {
            part: {"tokens": self.tokens(part), "documents": self.documents(part)} for part in PARTS
        }
        return asdict(self) | {"sums": sums}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "Manifest":
        """Raises KeyError, TypeError or ValueError where it is none."""
        if body["plan"]["format"] != FORMAT:
            raise ValueError(f"format {body['plan']['format']}, which this version does not read")
        return cls(
            TokenizePlan(**body["plan"]),
            tuple(TokenShard(**shard) for shard in body["shards"]),
            int(body["largest"]),
        )


@dataclass(frozen=True, eq=False)
class ShardedTokens:
    """The tokens of one part, across its shards, as one stream; each slice is read through the
    memory maps.

    Raises ConfigError, with shard and place, at an id that the tokenizer does not have.
    """

    folder: Path
    shards: tuple[TokenShard, ...]
    dtype: str
    vocab_size: int
    _ends: np.ndarray = field(init=False, repr=False)
    _maps: list[np.ndarray] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "_ends", np.cumsum([shard.tokens for shard in self.shards], dtype=np.int64)
        )
        maps = [
            np.memmap(self.folder / (shard.name + TOKENS), np.dtype(self.dtype), "r")
            for shard in self.shards
        ]
        object.__setattr__(self, "_maps", maps)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.shards else 0

    def __getitem__(self, part: slice) -> np.ndarray:
        """int32 [stop - start] of a slice without a step."""
        start, stop, step = part.indices(len(self))
        assert step == 1, "a stream is read forwards"
        pieces = [np.zeros(0, np.int32)]
        at = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begins = int(self._ends[at]) - self.shards[at].tokens
            piece = np.asarray(self._maps[at][start - begins : stop - begins])
            self._check(at, start - begins, piece)
            pieces.append(piece.astype(np.int32))
            start, at = begins + self.shards[at].tokens, at + 1
        return np.concatenate(pieces)

    def _check(self, at: int, first: int, piece: np.ndarray) -> None:
        wrong = np.flatnonzero(piece >= self.vocab_size)
        if len(wrong):
            where = f"{self.folder / (self.shards[at].name + TOKENS)}, token {first + wrong[0]}"
            got, fix = f"id {piece[wrong[0]]}", "the file is damaged: tokenize again"
            expected = f"less than {self.vocab_size}, the tokenizer's vocabulary"
            raise ConfigError(
                message("A token is no token.", where=where, expected=expected, got=got, fix=fix)
            )


@dataclass(frozen=True)
class TokenShards:
    """A folder of shards, opened: nothing of the tokens is read yet."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | Path) -> "TokenShards":
        """Checks the manifest against the files' sizes. Raises ConfigError where they do not go
        together.
        """
        path = Path(folder).expanduser()
        manifest = read_manifest(path)
        for shard in manifest.shards:
            sizes = {TOKENS: shard.tokens * np.dtype(manifest.plan.dtype).itemsize}
            sizes[DOCUMENTS] = shard.documents * OFFSET.itemsize
            for suffix, size in sizes.items():
                _check_size(path / (shard.name + suffix), size)
        return cls(path, manifest)

    def tokens(self, part: Part) -> ShardedTokens:
        """One part as one stream, which stays on the disk."""
        plan = self.manifest.plan
        return ShardedTokens(self.folder, self._shards(part), plan.dtype, plan.vocab_size)

    def starts(self, part: Part) -> np.ndarray:
        """int64 [documents]: where each begins in `tokens(part)`; read from the disk."""
        shards = self._shards(part)
        begins = np.cumsum([0, *(shard.tokens for shard in shards)])
        starts = [
            np.fromfile(self.folder / (shard.name + DOCUMENTS), OFFSET) + begins[at]
            for at, shard in enumerate(shards)
        ]
        return np.concatenate([np.zeros(0, np.int64), *starts])

    def _shards(self, part: Part) -> tuple[TokenShard, ...]:
        return tuple(shard for shard in self.manifest.shards if shard.part == part and shard.tokens)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What encoded the text. Raises ConfigError where it is no longer beside the shards."""
        plan = self.manifest.plan
        tokenizer = load_tokenizer(
            Bytes.name if plan.tokenizer_digest == Bytes.digest else self.folder
        )
        if tokenizer.digest != plan.tokenizer_digest:
            what, expected = (
                "The tokenizer is not the one that encoded the text.",
                f"digest {plan.tokenizer_digest}",
            )
            raise ConfigError(
                message(what, where=str(self.folder), expected=expected, got=tokenizer.digest)
            )
        return tokenizer


def read_manifest(folder: Path) -> Manifest:
    """Raises ConfigError where there is none, or it cannot be read."""
    file, fix = (
        folder / MANIFEST,
        "make it with `fsdp-jax tokenize`; run it again if it was stopped",
    )
    what = "There are no finished token shards."
    if not file.is_file():
        raise ConfigError(message(what, where="data.path", expected=MANIFEST, got=folder, fix=fix))
    try:
        return Manifest.from_json(json.loads(file.read_text()))
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise ConfigError(
            message(what, where=str(file), expected="a manifest", got=got, fix=fix)
        ) from error


def _check_size(file: Path, size: int) -> None:
    found = file.stat().st_size if file.is_file() else None
    if found != size:
        got = "no file" if found is None else f"{found:,} bytes ({human_bytes(found)})"
        fix = "restore the file, or tokenize again"
        what, expected = "A token shard is not as it was written.", f"{size:,} bytes"
        raise ConfigError(message(what, where=str(file), expected=expected, got=got, fix=fix))
