"""The work behind `fsdp-jax tokenize`: documents become token shards, and a stopped run goes on
where it was.

A shard is written under another name and renamed when all of it is on the disk, so a shard that is
there is whole. What must stay the same between the runs is written down first (`progress.json`) and
compared.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np

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
from fsdp_jax.data.tokenizer import Tokenizer, encoded, token_dtype
from fsdp_jax.data.windows import check_positive
from fsdp_jax.errors import ConfigError, message
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

    The same call goes on after the last whole shard where it was stopped, and ends with the same
    bytes as one that was not; where all is done it changes nothing.

    Args:
        documents: what to encode, split.
        tokenizer: with what.
        to: a new or empty folder, or that of a stopped run.
        shard_tokens: a shard ends with the document that reaches so many; one document at a time is
            in memory.
        asked: the vocabulary that was asked for, where `tokenizer` was trained for this; is written
            down.
        say: is told of every shard.

    Raises:
        ConfigError: the folder holds something else, or shards of another corpus, tokenizer or
            setting, each by name; another process writes there; or an id is not of the tokenizer's
            vocabulary.
        OSError: it cannot be written.

    """
    from fsdp_jax.checkpoint.lease import Lease  # here: it brings all that checkpoints need

    check_positive("the tokens of a shard", shard_tokens)
    folder, plan = Path(to).expanduser(), _plan(documents, tokenizer, shard_tokens, asked)
    _check_folder(folder)
    with Lease(folder):
        if (folder / MANIFEST).exists():
            manifest = read_manifest(folder)
            _check_same(folder / MANIFEST, manifest.plan, plan)
            (folder / PROGRESS).unlink(missing_ok=True)  # killed just before it was done
            return manifest
        _begin(folder, plan, tokenizer)
        shards = [
            shard
            for part in PARTS
            for shard in _write_part(folder, part, documents, tokenizer, plan, say)
        ]
        largest = max((_largest(folder, shard, plan) for shard in shards), default=-1)
        manifest = Manifest(plan, tuple(shards), largest)
        _write_json(folder / MANIFEST, manifest.to_json())
        (folder / PROGRESS).unlink()
        return manifest


def plan_of(folder: Path) -> TokenizePlan | None:
    """That of the shards that a folder holds, or was begun with; None where there are none.

    Raises ConfigError where it cannot be read.
    """
    if (folder / MANIFEST).exists():
        return read_manifest(folder).plan
    progress = folder / PROGRESS
    if not progress.exists():
        return None
    try:
        return TokenizePlan(**json.loads(progress.read_text()))
    except (TypeError, ValueError) as error:
        what, fix = "The progress of a stopped run cannot be read.", "remove the folder"
        raise ConfigError(message(what, where=str(progress), got=error, fix=fix)) from error


def _plan(
    documents: Split, tokenizer: Tokenizer, shard_tokens: int, asked: int | None
) -> TokenizePlan:
    found = documents.survey
    return TokenizePlan(
        name=documents.documents.name,
        corpus=found.digest,
        documents=found.documents,
        skipped={reason: count for reason, count in sorted(found.skipped.items()) if count},
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
    """What is not ours is not written to."""
    ours = not folder.exists() or any((folder / name).exists() for name in (PROGRESS, MANIFEST))
    if not ours and not (folder.is_dir() and all(_is_trace(path) for path in folder.iterdir())):
        what, expected = (
            "The folder holds something else.",
            "a new or empty folder, or one of a stopped run",
        )
        raise ConfigError(
            message(what, where="--to", expected=expected, got=folder, fix="choose another folder")
        )


def _is_trace(path: Path) -> bool:
    """Whether a file is all that a run leaves which was killed before it wrote its progress."""
    return path.name in (LEASE, PROGRESS + UNFINISHED)


def _begin(folder: Path, plan: TokenizePlan, tokenizer: Tokenizer) -> None:
    """Writes the plan down, or compares it to that of the run that was stopped; removes what that
    left unfinished.
    """
    before = plan_of(folder)
    if before is not None:
        _check_same(folder / PROGRESS, before, plan)
    else:
        _write_json(folder / PROGRESS, asdict(plan))
    for left in folder.glob(f"*{UNFINISHED}"):
        left.unlink()
    for name, content in tokenizer.files.items():
        write_durably(folder / name, content)


def _check_same(file: Path, before: TokenizePlan, now: TokenizePlan) -> None:
    # names are for people: the same corpus may have moved; and what a tokenizer is, its digest says
    was, is_now = (
        {key: value for key, value in asdict(plan).items() if key not in _NAMES}
        for plan in (before, now)
    )
    differing = [name for name in was if was[name] != is_now[name]]
    if differing:
        what = "The folder holds shards of another corpus, tokenizer or setting."
        expected = ", ".join(f"{name} {was[name]}" for name in differing) + f" ({file.name})"
        got = ", ".join(f"{name} {is_now[name]}" for name in differing)
        fix = "choose another folder, or remove this one"
        where = f"{file.parent}: {', '.join(differing)}"
        raise ConfigError(message(what, where=where, expected=expected, got=got, fix=fix))


_NAMES = ("name", "tokenizer", "asked")


def _write_part(
    folder: Path,
    part: Part,
    documents: Split,
    tokenizer: Tokenizer,
    plan: TokenizePlan,
    say: Say | None,
) -> Iterator[TokenShard]:
    """The shards of one part: those that are there already, then the rest."""
    done = 0
    number = 0
    while (folder / f"{_name(part, number)}{TOKENS}").exists():
        shard = _found(folder, part, number, plan)
        done, number = done + shard.documents, number + 1
        yield shard
    if done and say is not None:
        say(f"{part}: {done:,} documents in {number} shards are there already")
    pieces = encoded(islice(documents.read(part), done, None), tokenizer)
    for first in pieces:
        shard = _write_shard(folder, part, number, first, pieces, plan)
        if say is not None:
            say(f"{shard.name}: {shard.tokens:,} tokens of {shard.documents:,} documents")
        number += 1
        yield shard


def _name(part: Part, number: int) -> str:
    return f"{part}-{number:05}"


def _found(folder: Path, part: Part, number: int, plan: TokenizePlan) -> TokenShard:
    name = _name(part, number)
    size, offsets = ((folder / f"{name}{suffix}").stat().st_size for suffix in (TOKENS, DOCUMENTS))
    return TokenShard(name, part, size // np.dtype(plan.dtype).itemsize, offsets // OFFSET.itemsize)


def _write_shard(
    folder: Path,
    part: Part,
    number: int,
    first: np.ndarray,
    rest: Iterator[np.ndarray],
    plan: TokenizePlan,
) -> TokenShard:
    """Writes documents until there are tokens enough. The tokens get their name last."""
    name, starts, tokens = _name(part, number), list[int](), 0
    piece: np.ndarray | None = first
    unfinished = folder / f"{name}{TOKENS}{UNFINISHED}"
    with unfinished.open("wb") as file:
        while piece is not None:
            if piece.size and piece.max() >= plan.vocab_size:
                where, got = f"document {len(starts)} of {name}", f"id {piece.max()}"
                expected = f"less than {plan.vocab_size}"
                raise ConfigError(
                    message("A token is no token.", where=where, expected=expected, got=got)
                )
            file.write(piece.astype(plan.dtype).tobytes())
            starts.append(tokens)
            tokens += len(piece)
            piece = next(rest, None) if tokens < plan.shard_tokens else None
        fsync_file(file)
    write_durably(folder / f"{name}{DOCUMENTS}", np.array(starts, OFFSET).tobytes())
    rename_durably(unfinished, folder / f"{name}{TOKENS}")
    return TokenShard(name, part, tokens, len(starts))


def _largest(folder: Path, shard: TokenShard, plan: TokenizePlan) -> int:
    file = folder / f"{shard.name}{TOKENS}"
    return int(np.memmap(file, np.dtype(plan.dtype), "r").max()) if shard.tokens else -1


def _write_json(file: Path, body: dict) -> None:
    write_durably(file, (json.dumps(body, indent=1) + "\n").encode())
