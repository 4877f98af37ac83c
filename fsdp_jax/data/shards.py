"""Token shards: a tokenized corpus on disk, as `fsdp-jax tokenize` writes it; read row by row.

    DIR/manifest.json           written last; describes all the others
    DIR/tokenizer.json          and others of the tokenizer; none for bytes
    DIR/train-00000.tokens      ids, uint16 or uint32, little-endian, document after document
    DIR/train-00000.documents   first token of each document in that file, int64, little-endian
    DIR/held_out-00000.tokens   and so on

A shard holds whole documents.
"""

import os
import threading
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fsdp_jax.data.documents import Part
from fsdp_jax.data.shard_manifest import (
    DOCUMENTS,
    TOKENS,
    Manifest,
    TokenizePlan,
    TokenShard,
    read_manifest,
)
from fsdp_jax.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from fsdp_jax.errors import DamageError, human_bytes, message
from fsdp_jax.io.digests import Json, digest_file
from fsdp_jax.io.model_files import TOKENIZER_FILES
from fsdp_jax.io.regular_files import read_into, read_regular, regular_opener

OFFSET = np.dtype("<i8")
RESTORE = "restore the file, or run the same `fsdp-jax tokenize` again, which writes it again"
AT_ONCE = 64 << 20  # bytes that are compared with their digests before the first is read


class DigestCheck:
    """Compares files with their digests: small ones at once, large ones in a thread.

    `files`: {name: digest}. Damage of those that are compared at once is raised at once.
    """

    def __init__(self, folder: Path, files: Mapping[str, Json]) -> None:
        self._folder = folder
        self._problem: DamageError | None = None
        # the tokenizer is always among them: it is read as soon as the folder is open
        small = sum(each["bytes"] for each in files.values()) <= AT_ONCE
        at_once = [name for name in files if small or name in TOKENIZER_FILES]
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
        """Waits at most `seconds`; returns whether all files have been compared."""
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


class ShardTokens:
    """The `Tokens` of one part, read from disk by position, never by a memory map.

    The files stay open: those that are replaced by others of their names are read as they were.
    DamageError for a file that is cut short or cannot be read, and for ids beyond the vocabulary.
    """

    def __init__(self, folder: Path, shards: tuple[TokenShard, ...], plan: TokenizePlan):
        self.shards = shards
        self._dtype = np.dtype(plan.dtype)
        self._files = [folder / (shard.name + TOKENS) for shard in shards]
        self._handles: list[int] = []
        # Not at the exit of the process, when a thread may still read.
        weakref.finalize(self, _close, self._handles).atexit = False
        for file in self._files:
            with _os_errors_as_damage(file):
                handle = regular_opener(follow_link=True)(str(file), os.O_RDONLY)
            self._handles.append(handle)
        self._ends = list(accumulate(shard.tokens for shard in shards))
        self._vocab_size = plan.vocab_size

    def __len__(self) -> int:
        if not self.shards:
            return 0
        return self._ends[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        """Reads a slice without a step: int32 [stop - start]."""
        start, stop, step = part.indices(len(self))
        assert step == 1, "a stream is read forwards"
        return self.read_slices([start], max(stop - start, 0))[0]

    def read_slices(self, starts: Sequence[int], length: int) -> np.ndarray:
        """Reads slices of one length within the stream, int32 [slices, length]."""
        tokens = np.empty((len(starts), length), self._dtype)
        for row, start in zip(tokens, starts, strict=True):
            self._fill(row.view(np.uint8).data, start)
        # before a model reads them: a damaged id would be an embedding of nothing
        if tokens.size and int(tokens.max()) >= self._vocab_size:
            row, number = np.argwhere(tokens >= self._vocab_size)[0]
            self._raise_unknown(tokens[row, number], starts[row] + int(number))
        return tokens.astype(np.int32)

    def _fill(self, view: memoryview, start: int) -> None:
        """Fills `view` (bytes) with the tokens from `start` on, of every shard that they meet."""
        size = self._dtype.itemsize
        index = bisect_right(self._ends, start)
        while view:
            begin = self._ends[index] - self.shards[index].tokens
            count = min(len(view), (self._ends[index] - start) * size)
            self._read(index, view[:count], (start - begin) * size)
            view, start, index = view[count:], self._ends[index], index + 1

    def _read(self, index: int, view: memoryview, offset: int) -> None:
        """Fills `view` with bytes of one shard."""
        file, handle = self._files[index], self._handles[index]
        try:
            count = read_into(handle, view, offset)
        except OSError as error:
            raise damaged_shard_error(file, "a file that can be read", error) from error
        if count < len(view):
            expected = f"{self.shards[index].tokens * self._dtype.itemsize:,} bytes"
            got = f"{os.fstat(handle).st_size:,} bytes: it was cut short while it was in use"
            raise damaged_shard_error(file, expected, got)

    def _raise_unknown(self, token: np.integer[Any], place: int) -> NoReturn:
        """Raises DamageError for an id that is not in the vocabulary, at `place` of the stream."""
        index = bisect_right(self._ends, place)
        number = place - (self._ends[index] - self.shards[index].tokens)
        raise DamageError(
            "a token id is not in the vocabulary",
            where=f"{self._files[index]}, token {number}",
            expected=f"less than {self._vocab_size}, the tokenizer's vocabulary",
            got=f"id {token}",
            fix=RESTORE,
        )


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

    def tokens(self, part: Part) -> ShardTokens:
        """Opens one part as one stream, which stays on disk."""
        return ShardTokens(self.folder, self._shards_with_tokens(part), self.manifest.plan)

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
        source: str | Path = self.folder
        if digest == ByteTokenizer.digest:  # it has no file
            source = ByteTokenizer.name
        tokenizer = load_tokenizer(source)
        if tokenizer.digest != digest:
            what = "the tokenizer is not the one that encoded the text"
            where, expected = str(self.folder), f"digest {digest}"
            got = tokenizer.digest
            raise DamageError(what, where=where, expected=expected, got=got, fix=RESTORE)
        return tokenizer


def damaged_shard_error(file: Path, expected: str, got: object) -> DamageError:
    """Makes the error for a file of shards that differs from what was written."""
    what = "a file of token shards is not as it was written"
    return DamageError(what, where=str(file), expected=expected, got=got, fix=RESTORE)


@contextmanager
def _os_errors_as_damage(file: Path) -> Iterator[None]:
    """Turns an OSError of reading `file`, a file of shards, into a DamageError that names it."""
    try:
        yield
    except OSError as error:
        raise damaged_shard_error(file, "a file that can be read", error) from error


def _close(handles: list[int]) -> None:
    for handle in handles:
        os.close(handle)


def _read_starts(file: Path, shard: TokenShard) -> np.ndarray:
    """Reads int64 [documents]: the first token of each document in its shard."""
    with _os_errors_as_damage(file):
        content = read_regular(file)
    size = shard.documents * OFFSET.itemsize
    if len(content) != size:
        raise damaged_shard_error(file, f"{size:,} bytes", f"{len(content):,} bytes")
    starts = np.frombuffer(content, OFFSET).astype(np.int64)
    # they begin at 0, never decrease, and stay within the shard
    bounds = np.concatenate([[0], starts, [shard.tokens]])
    wrong = np.flatnonzero(np.diff(bounds) < 0)
    if len(wrong) or (len(starts) and starts[0]):
        number = int(next(iter(wrong), 0))
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
        if not file.is_file():
            raise damaged_shard_error(file, f"{expected:,} bytes", "no file")
        size = file.stat().st_size
        if size != expected:
            got = f"{size:,} bytes ({human_bytes(size)})"
            raise damaged_shard_error(file, f"{expected:,} bytes", got)
