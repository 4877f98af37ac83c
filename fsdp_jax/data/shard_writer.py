"""Writes documents as token shards (`fsdp-jax tokenize`); a stopped run resumes after a shard.

A shard is written under another name and renamed once it is on disk, so every shard under its own
name is complete. The plan, which must be the same when a run resumes, is written first
(`progress.json`) and compared.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from fsdp_jax.data.checks import check_positive, config_error
from fsdp_jax.data.documents import Part, Split
from fsdp_jax.data.shards import (
    DOCUMENTS,
    MANIFEST,
    OFFSET,
    PARTS,
    TOKENS,
    Manifest,
    TokenizePlan,
    TokenShard,
    read_manifest,
)
from fsdp_jax.data.tokenizer import Tokenizer, encode_documents, token_dtype
from fsdp_jax.io.atomic import UNFINISHED, fsync_file, rename_durably, write_durably

PROGRESS = "progress.json"
SHARD_TOKENS = 1 << 26
LEASE = "lease.json"

Say = Callable[[str], None]


def tokenize(
    documents: Split,
    tokenizer: Tokenizer,
    to: str | Path,
    *,
    shard_tokens: int = SHARD_TOKENS,
    asked: int | None = None,
    say: Say | None = None,
) -> Manifest:
    """Writes `documents`, each with its end-of-text token, to the folder `to` as token shards.

    After a stop, the same call resumes after the last complete shard and ends with the same bytes
    as an uninterrupted one; after completion it changes nothing.

    Args:
        documents: what to encode, split.
        tokenizer: encodes it.
        to: a new or empty folder, or that of a stopped run.
        shard_tokens: a shard ends with the document that reaches so many tokens; one document at a
            time is in memory.
        asked: the requested vocabulary size, if `tokenizer` was trained for this; it is recorded.
        say: called with a line for every shard.

    Raises:
        ConfigError: the folder holds other files, or shards of another corpus, tokenizer or
            setting, each by name; another process writes there; or an id is not in the tokenizer's
            vocabulary.
        OSError: it cannot be written.

    """
    from fsdp_jax.checkpoint.lease import Lease  # here: reading shards needs no checkpoints

    check_positive("the tokens of a shard", shard_tokens)
    folder = Path(to).expanduser()
    plan = make_plan(documents, tokenizer, shard_tokens, asked)
    _check_folder(folder)
    with Lease(folder):
        if (folder / MANIFEST).exists():
            manifest = read_manifest(folder)
            _check_same(folder / MANIFEST, manifest.plan, plan)
            (folder / PROGRESS).unlink(missing_ok=True)  # the run was killed just before its end
            return manifest
        _begin(folder, plan, tokenizer)
        writer = _Writer(folder, plan, documents, tokenizer, say or (lambda line: None))
        shards = tuple(shard for part in PARTS for shard in writer.write_part(part))
        largest = max((_largest_id(folder, shard, plan) for shard in shards), default=-1)
        manifest = Manifest(plan, shards, largest)
        _write_json(folder / MANIFEST, manifest.to_json())
        (folder / PROGRESS).unlink()
        return manifest


def read_plan(folder: Path) -> TokenizePlan | None:
    """Returns the plan of a folder's shards, complete or not; None if it has none.

    Raises ConfigError if it cannot be read.
    """
    if (folder / MANIFEST).exists():
        return read_manifest(folder).plan
    progress = folder / PROGRESS
    if not progress.exists():
        return None
    try:
        return TokenizePlan(**json.loads(progress.read_text()))
    except (TypeError, ValueError) as error:
        what = "The progress of a stopped run cannot be read."
        fix = "remove the folder"
        raise config_error(what, where=str(progress), got=error, fix=fix) from error


def make_plan(
    documents: Split,
    tokenizer: Tokenizer,
    shard_tokens: int = SHARD_TOKENS,
    asked: int | None = None,
) -> TokenizePlan:
    """Returns the plan of encoding `documents`; see `tokenize`."""
    survey = documents.survey
    return TokenizePlan(
        name=documents.documents.name,
        corpus=survey.digest,
        documents=survey.documents,
        skipped={reason: count for reason, count in sorted(survey.skipped.items()) if count},
        held_out=documents.share,
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        end=tokenizer.end,
        vocab_size=tokenizer.vocab_size,
        dtype=token_dtype(tokenizer.vocab_size).str,
        shard_tokens=shard_tokens,
        asked=asked,
    )


def _check_folder(folder: Path) -> None:
    """Raises ConfigError if the folder holds files that are not of such a run."""
    if not folder.exists() or any((folder / name).exists() for name in (PROGRESS, MANIFEST)):
        return
    # A run that was killed before it wrote its progress leaves nothing else.
    leftovers = (LEASE, PROGRESS + UNFINISHED)
    if not (folder.is_dir() and all(path.name in leftovers for path in folder.iterdir())):
        what = "The folder holds other files."
        expected = "a new or empty folder, or one of a stopped run"
        raise config_error(
            what, where="--to", expected=expected, got=folder, fix="choose another folder"
        )


def _begin(folder: Path, plan: TokenizePlan, tokenizer: Tokenizer) -> None:
    """Writes the plan, or compares it to the stopped run's, whose unfinished files it removes."""
    previous = read_plan(folder)
    if previous is not None:
        _check_same(folder / PROGRESS, previous, plan)
    else:
        _write_json(folder / PROGRESS, asdict(plan))
    for file in folder.glob(f"*{UNFINISHED}"):
        file.unlink()
    for name, content in tokenizer.files.items():
        write_durably(folder / name, content)


def _check_same(file: Path, previous: TokenizePlan, plan: TokenizePlan) -> None:
    old, new = asdict(previous), asdict(plan)
    # Names are for people: the corpus may have moved, and the digest identifies the tokenizer.
    compared = [name for name in old if name not in ("name", "tokenizer", "asked")]
    differing = [name for name in compared if old[name] != new[name]]
    if differing:
        expected = ", ".join(f"{name} {old[name]}" for name in differing)
        raise config_error(
            "The folder holds shards of another corpus, tokenizer or setting.",
            where=f"{file.parent}: {', '.join(differing)}",
            expected=f"{expected} ({file.name})",
            got=", ".join(f"{name} {new[name]}" for name in differing),
            fix="choose another folder, or remove this one",
        )


@dataclass(frozen=True)
class _Writer:
    """Writes the shards of one folder."""

    folder: Path
    plan: TokenizePlan
    documents: Split
    tokenizer: Tokenizer
    say: Say

    def write_part(self, part: Part) -> Iterator[TokenShard]:
        """Yields the shards of one part: those that exist already, then those it writes."""
        number = 0
        done = 0
        while (self.folder / f"{_shard_name(part, number)}{TOKENS}").exists():
            shard = self._existing_shard(part, number)
            done += shard.documents
            number += 1
            yield shard
        if done:
            self.say(f"{part}: {done:,} documents in {number} shards exist already")
        pieces = encode_documents(islice(self.documents.read(part), done, None), self.tokenizer)
        for first in pieces:
            shard = self._write_shard(part, number, first, pieces)
            self.say(f"{shard.name}: {shard.tokens:,} tokens of {shard.documents:,} documents")
            number += 1
            yield shard

    def _existing_shard(self, part: Part, number: int) -> TokenShard:
        name = _shard_name(part, number)
        tokens_bytes = (self.folder / f"{name}{TOKENS}").stat().st_size
        offsets_bytes = (self.folder / f"{name}{DOCUMENTS}").stat().st_size
        tokens = tokens_bytes // np.dtype(self.plan.dtype).itemsize
        return TokenShard(name, part, tokens, offsets_bytes // OFFSET.itemsize)

    def _write_shard(
        self, part: Part, number: int, first: np.ndarray, rest: Iterator[np.ndarray]
    ) -> TokenShard:
        """Writes documents, `first` and then of `rest`, until the shard is full."""
        name = _shard_name(part, number)
        starts: list[int] = []
        tokens = 0
        piece: np.ndarray | None = first
        unfinished = self.folder / f"{name}{TOKENS}{UNFINISHED}"
        with unfinished.open("wb") as file:
            while piece is not None:
                self._check_ids(piece, f"document {len(starts)} of {name}")
                file.write(piece.astype(self.plan.dtype).tobytes())
                starts.append(tokens)
                tokens += len(piece)
                piece = next(rest, None) if tokens < self.plan.shard_tokens else None
            fsync_file(file)
        write_durably(self.folder / f"{name}{DOCUMENTS}", np.array(starts, OFFSET).tobytes())
        # The tokens get their name last: it marks the shard as complete.
        rename_durably(unfinished, self.folder / f"{name}{TOKENS}")
        return TokenShard(name, part, tokens, len(starts))

    def _check_ids(self, piece: np.ndarray, where: str) -> None:
        if piece.size and piece.max() >= self.plan.vocab_size:
            what = "A token id is not in the vocabulary."
            expected = f"less than {self.plan.vocab_size}"
            raise config_error(what, where=where, expected=expected, got=f"id {piece.max()}")


def _shard_name(part: Part, number: int) -> str:
    return f"{part}-{number:05}"


def _largest_id(folder: Path, shard: TokenShard, plan: TokenizePlan) -> int:
    file = folder / f"{shard.name}{TOKENS}"
    return int(np.memmap(file, np.dtype(plan.dtype), "r").max()) if shard.tokens else -1


def _write_json(file: Path, body: dict) -> None:
    write_durably(file, (json.dumps(body, indent=1) + "\n").encode())
