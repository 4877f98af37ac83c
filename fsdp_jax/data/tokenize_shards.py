"""Writes documents as token shards (`fsdp-jax tokenize`); a stopped run resumes after a shard.

A shard is written under another name and renamed once it is on disk. `progress.json` is the
manifest of the shards that are complete, rewritten after each; it is renamed to `manifest.json`
after the last. A run that resumes must have its plan, keeps the shards that have their digests, and
writes all after them again.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from fsdp_jax.data.checks import check_equal, check_positive
from fsdp_jax.data.documents import Part, Split
from fsdp_jax.data.shard_manifest import (
    DOCUMENTS,
    MANIFEST,
    PARTS,
    TOKENS,
    Manifest,
    TokenizePlan,
    TokenShard,
    dataclass_from_json,
    read_manifest,
    shard_files,
    shard_name,
)
from fsdp_jax.data.shards import OFFSET, ShardTokens, check_digest, check_sizes
from fsdp_jax.data.tokenizer import Tokenizer, encode_documents, token_dtype
from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.io.atomic import UNFINISHED, fsync_file, rename_durably, write_durably
from fsdp_jax.io.digests import digest_bytes
from fsdp_jax.io.json_text import parse_json
from fsdp_jax.io.model_files import TOKENIZER_FILES
from fsdp_jax.io.regular_files import read_regular

if TYPE_CHECKING:
    from fsdp_jax.checkpoint.lease import Lease

PROGRESS = "progress.json"
SHARD_TOKENS = 1 << 26
BLOCK = 1 << 20  # tokens read at a time
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
    as an uninterrupted one; after completion it compares all files with their digests, writes
    damaged ones again, and changes nothing else.

    A shard ends with the document that reaches `shard_tokens`; one document at a time is in memory.
    `asked`, the requested vocabulary size if `tokenizer` was trained for this, is recorded. `say`
    is called with a line for every shard, and for the shards that are kept.

    Raises ConfigError if the folder holds other files, or shards of another corpus, tokenizer or
    setting, each by name, if another process writes there, or an id is not in the tokenizer's
    vocabulary, OSError if it cannot be written, and DirectoryLostError if the folder is removed,
    moved or replaced meanwhile.
    """
    from fsdp_jax.checkpoint.lease import Lease  # here: reading shards needs no checkpoints

    check_positive("the tokens of a shard", shard_tokens)
    folder = Path(to).expanduser()
    plan = make_tokenize_plan(documents, tokenizer, shard_tokens, asked)
    _check_no_other_files(folder)
    say = say or (lambda line: None)
    with Lease(folder) as lease, lease.writing():  # another process must not write there meanwhile
        # The shards to keep of a run before this one, if it had the same plan.
        done = Manifest(plan, (), -1)
        before = _read_manifest_or_progress(folder)
        if before is not None:
            # Names are for people: the corpus may have moved, the digest identifies the tokenizer.
            unnamed = [
                replace(each, name="", tokenizer="", asked=None) for each in (before.plan, plan)
            ]
            what = "the folder holds shards of another corpus, tokenizer or setting"
            fix = "choose another folder, or remove this one"
            check_equal(what, *map(asdict, unnamed), where=f"{folder}: ", fix=fix)
            done = _keep_intact_shards(folder, before, say)
            finished = (folder / MANIFEST).exists() and _tokenizer_is_intact(folder, before)
            if finished and done == before:
                # An older release was killed at its end.
                lease.require_held()
                (lease.anchor / PROGRESS).unlink(missing_ok=True)
                return done
        # All other shards. The manifest's name is what says that they are complete.
        lease.require_held()
        done = _write_tokenizer_and_progress(lease.anchor, done, tokenizer)
        done = _write_shards(lease, done, documents, tokenizer, say)
        lease.require_held()
        rename_durably(lease.anchor / PROGRESS, lease.anchor / MANIFEST)
        return done


def read_plan(folder: Path) -> TokenizePlan | None:
    """Reads the plan of a folder's shards; None if it has none. Raises DamageError."""
    before = _read_manifest_or_progress(folder)
    if before is None:
        return None
    return before.plan


def _read_manifest_or_progress(folder: Path) -> Manifest | None:
    """Reads the manifest of a folder's complete shards, of a finished run or of a stopped one.

    None if the folder has neither. Raises DamageError.
    """
    if (folder / MANIFEST).exists():
        return read_manifest(folder)
    progress = folder / PROGRESS
    if not progress.exists():
        return None
    # of a stopped run: the manifest so far
    try:
        text = read_regular(progress).decode()
        body = parse_json(text)
        if isinstance(body, dict) and "plan" not in body:  # an older release wrote it alone
            return Manifest(dataclass_from_json(TokenizePlan, body), (), -1)
        return Manifest.from_text(text)
    except (OSError, ValueError) as error:
        what = "the progress of a stopped run cannot be read"
        fix = "remove the folder"
        raise DamageError(what, where=str(progress), got=error, fix=fix) from error


def make_tokenize_plan(
    documents: Split,
    tokenizer: Tokenizer,
    shard_tokens: int = SHARD_TOKENS,
    asked: int | None = None,
) -> TokenizePlan:
    """Makes the plan of encoding `documents`; see `tokenize`."""
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
        special_tokens=documents.documents.special_tokens,
    )


def _check_no_other_files(folder: Path) -> None:
    """Raises ConfigError if the folder holds files that no run of `tokenize` writes."""
    if not folder.exists() or any((folder / name).exists() for name in (PROGRESS, MANIFEST)):
        return
    # A run that was killed before it wrote its progress leaves nothing else.
    leftovers = (LEASE, PROGRESS + UNFINISHED)
    if not (folder.is_dir() and all(path.name in leftovers for path in folder.iterdir())):
        what = "the folder holds other files"
        expected = "a new or empty folder, or one of a stopped run"
        fix = "choose another folder"
        raise ConfigError(what, where="--to", expected=expected, got=folder, fix=fix)


def _keep_intact_shards(folder: Path, before: Manifest, say: Say) -> Manifest:
    """Keeps the shards before the first damaged one, and says which that is."""
    for number, shard in enumerate(before.shards):
        try:
            check_sizes(folder, shard, before.plan)
            if before.files:
                for name in shard_files((shard,)):
                    check_digest(folder / name, before.files[name])
        except DamageError as error:
            say(f"{shard.name} and all after it are written again, as it is damaged:\n{error}")
            kept = before.shards[:number]
            if not before.files:  # of an older release: nothing tells that the others are intact
                kept = ()
            # the largest id in the manifest may be one of the damaged shards
            ids = (_largest_id_of_shard(folder, each, before.plan) for each in kept)
            largest = max(ids, default=-1)
            files = {name: before.files[name] for name in shard_files(kept)}
            return Manifest(before.plan, kept, largest, files)
    return before


def _tokenizer_is_intact(folder: Path, manifest: Manifest) -> bool:
    """Tells whether the tokenizer's files, where the manifest lists them, have their digests."""
    try:
        for name in sorted(manifest.files.keys() & set(TOKENIZER_FILES)):
            check_digest(folder / name, manifest.files[name])
    except DamageError:
        return False
    return True


def _write_tokenizer_and_progress(folder: Path, done: Manifest, tokenizer: Tokenizer) -> Manifest:
    """Writes the progress and the tokenizer's files; removes the manifest and unfinished files.

    Returns `done`, the manifest of the shards to keep, with the digests of the tokenizer's files.
    """
    # In this order a stop at any point leaves a manifest, or the progress, of the shards there.
    files = {name: done.files[name] for name in shard_files(done.shards)}
    files |= {name: digest_bytes(content) for name, content in tokenizer.files.items()}
    done = replace(done, files=files)
    write_durably(folder / PROGRESS, done.to_text().encode())
    (folder / MANIFEST).unlink(missing_ok=True)
    for file in folder.glob(f"*{UNFINISHED}"):
        file.unlink()
    for name, content in tokenizer.files.items():
        write_durably(folder / name, content)
    return done


def _write_shards(
    lease: "Lease", done: Manifest, documents: Split, tokenizer: Tokenizer, say: Say
) -> Manifest:
    """Writes the shards that are not done yet; returns the manifest of all."""
    for part in PARTS:
        number, count = len(done.of(part)), done.documents(part)
        if number:
            say(f"{part}: {count:,} documents in {number} shards exist already")
        # one stream for all shards of the part: each takes documents from it until it is full
        texts = islice(documents.read(part), count, None)
        pieces = encode_documents(texts, tokenizer, special=done.plan.special_tokens)
        for first in pieces:
            lease.require_held()
            done = _write_shard(lease.anchor, done, part, chain([first], pieces))
            lease.require_held()
            write_durably(lease.anchor / PROGRESS, done.to_text().encode())
            shard = done.shards[-1]
            say(f"{shard.name}: {shard.tokens:,} tokens of {shard.documents:,} documents")
    return done


def _write_shard(
    folder: Path, done: Manifest, part: Part, pieces: Iterator[np.ndarray]
) -> Manifest:
    """Writes the next shard of a part; returns the manifest with it.

    `pieces`: the ids of one document each, taken until the shard is full.
    """
    plan, name = done.plan, shard_name(part, len(done.of(part)))
    tokens, largest = 0, done.largest
    starts: list[int] = []
    digest = xxhash.xxh3_128()  # of the ids in memory, so that a fault of the disk is found
    # the ids, document after document
    unfinished = folder / f"{name}{TOKENS}{UNFINISHED}"
    with unfinished.open("wb") as file:
        for piece in pieces:
            where = f"document {len(starts)} of {name}"
            largest = max(largest, _largest_valid_id(piece, plan, where))
            content = piece.astype(plan.dtype).tobytes()
            digest.update(content)
            file.write(content)
            starts.append(tokens)
            tokens += len(piece)
            if tokens >= plan.shard_tokens:
                break
        fsync_file(file)
        size = file.tell()
    # where each document starts; this file first, since the other's name says that both are there
    positions = np.array(starts, OFFSET).tobytes()
    files = {
        f"{name}{TOKENS}": {"bytes": size, "xxh3_128": digest.hexdigest()},
        f"{name}{DOCUMENTS}": digest_bytes(positions),
    }
    write_durably(folder / f"{name}{DOCUMENTS}", positions)
    rename_durably(unfinished, folder / f"{name}{TOKENS}")
    shard = TokenShard(name, part, tokens, len(starts))
    return Manifest(plan, (*done.shards, shard), largest, {**done.files, **files})


def _largest_valid_id(piece: np.ndarray, plan: TokenizePlan, where: str) -> int:
    """Finds a document's largest id, -1 without any. Raises ConfigError for one too large."""
    largest = int(piece.max()) if piece.size else -1
    if largest >= plan.vocab_size:
        what = "a token id is not in the vocabulary"
        expected = f"less than {plan.vocab_size}"
        raise ConfigError(what, where=where, expected=expected, got=f"id {largest}")
    return largest


def _largest_id_of_shard(folder: Path, shard: TokenShard, plan: TokenizePlan) -> int:
    """Reads the largest id that a shard holds on disk, -1 without any. Raises DamageError."""
    tokens = ShardTokens(folder, (shard,), plan)
    blocks = range(0, len(tokens), BLOCK)
    return max((int(tokens[first : first + BLOCK].max()) for first in blocks), default=-1)
