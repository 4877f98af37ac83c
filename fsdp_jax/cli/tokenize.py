"""What `fsdp-jax tokenize` does: a corpus and a tokenizer become token shards."""

from pathlib import Path
from typing import cast

from fsdp_jax.data import (
    embedded_documents,
    load_tokenizer,
    open_documents,
    split_documents,
    tokenize,
    train_bpe,
)
from fsdp_jax.data.documents import Split
from fsdp_jax.data.files import Skipped
from fsdp_jax.data.records import Invalid, check_invalid, would_be_ignored
from fsdp_jax.data.shard_writer import Say, plan_of
from fsdp_jax.data.sources import HELD_OUT
from fsdp_jax.data.tokenizer import FILE, Tokenizer
from fsdp_jax.errors import ConfigError, message

EMBEDDED = "embedded"


def tokenize_corpus(
    corpus: str,
    to: str,
    *,
    tokenizer: str | None,
    vocab_size: int | None,
    field: str,
    held_out: float | None,
    invalid: str,
    say: Say,
) -> str:
    """Writes the shards, or goes on writing them; returns what to print.

    Args:
        corpus: a text file, a .jsonl, a folder of them, or `embedded`.
        to: folder of the shards.
        tokenizer: as `load_tokenizer` takes it; None trains one.
        vocab_size: of the one that is trained; one that was trained before for the same shards is
            taken again.
        field: of a record that holds the text.
        held_out: share that is kept from training; 0.05 if None.
        invalid: what becomes of text that is not UTF-8.
        say: told of the progress.

    Raises:
        ConfigError: what cannot be read, or a folder that holds something else, or shards that were
            asked for otherwise.

    """
    check_invalid(invalid)
    kept = cast(Invalid, invalid)
    if corpus == EMBEDDED:
        for name, got, default in (("field", field, "text"), ("invalid", invalid, "error")):
            if got != default:
                raise would_be_ignored(name, got, where=f"--{name}")
    documents = (
        embedded_documents()
        if corpus == EMBEDDED
        else open_documents(corpus, field=field, invalid=kept)
    )
    split = split_documents(documents, held_out=HELD_OUT if held_out is None else held_out)
    if vocab_size is None:
        assert tokenizer is not None, "or a size is"
        found = load_tokenizer(tokenizer)
    else:
        assert tokenizer is None, "a size is given"
        found = _trained(split, Path(to).expanduser(), vocab_size, say)
    manifest = tokenize(split, found, to, asked=vocab_size, say=say)
    plan, tokens = manifest.plan, sum(manifest.tokens(part) for part in ("train", "held_out"))
    passed = (
        f"; passed over or mended: {Skipped(plan.skipped)}" if any(plan.skipped.values()) else ""
    )
    return (
        f"{plan.name}: {tokens:,} tokens of {plan.documents:,} documents, {manifest.tokens('held_out'):,} held out, in "
        f"{to} (tokenizer {plan.tokenizer}, {found.vocab_size:,} tokens){passed}"
    )


def _trained(split: Split, to: Path, vocab_size: int, say: Say) -> Tokenizer:
    """The tokenizer of a run before, or one trained now: the same text gives the same one.

    What was asked for is compared, since a tokenizer may have got fewer ids than that.
    """
    before = plan_of(to)
    if before is not None and before.asked != vocab_size:
        what, fix = (
            "The folder holds shards of another tokenizer.",
            "choose another folder, or remove this one",
        )
        expected = f"{before.asked}, as was asked for when it was trained"
        expected = "--tokenizer, as it was made with one" if before.asked is None else expected
        raise ConfigError(
            message(what, where="--vocab-size", expected=expected, got=vocab_size, fix=fix)
        )
    if (to / FILE).is_file():
        return load_tokenizer(to)
    say(f"training a tokenizer of {vocab_size:,} tokens")
    return train_bpe(split.read("train"), vocab_size)
