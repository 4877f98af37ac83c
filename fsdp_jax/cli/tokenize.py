"""The work of `fsdp-jax tokenize`: encodes a corpus as token shards."""

from contextlib import suppress
from pathlib import Path

from fsdp_jax.compat.error_texts import is_disk_full
from fsdp_jax.data import (
    embedded_documents,
    load_tokenizer,
    open_documents,
    split_documents,
    tokenize,
    train_bpe,
)
from fsdp_jax.data.checks import ignored_key_error
from fsdp_jax.data.documents import Documents, Split, spell_special_tokens
from fsdp_jax.data.files import Skipped
from fsdp_jax.data.options import HELD_OUT, Invalid, SpecialTokens
from fsdp_jax.data.sources import skip_note
from fsdp_jax.data.tokenize_shards import Say, read_plan
from fsdp_jax.data.tokenizer import END, Tokenizer, check_special_tokens
from fsdp_jax.errors import CheckpointError, ConfigError, DamageError
from fsdp_jax.io.model_files import TOKENIZER


def tokenize_corpus(
    corpus: str,
    to: str,
    *,
    tokenizer: str | None,
    vocab_size: int | None,
    field: str,
    held_out: float | None,
    invalid: Invalid,
    special_tokens: SpecialTokens,
    say: Say,
) -> str:
    """Writes token shards, or resumes writing them; returns the line to print.

    The arguments are those of the command, of which either `tokenizer` or `vocab_size` is None.
    Raises ConfigError and DamageError as `tokenize` does, and CheckpointError for a full disk.
    """
    # The documents, and a tokenizer that is loaded or trained on them.
    share = HELD_OUT if held_out is None else held_out
    documents = _open_corpus(corpus, field, invalid)
    spellings: tuple[str, ...] = (END,)  # of a tokenizer that is trained
    end: str | None = END
    if tokenizer is not None:
        encoder = load_tokenizer(tokenizer)
        check_special_tokens("--special-tokens", special_tokens, encoder)
        spellings, end = encoder.special_tokens, encoder.end_spelling
    documents = spell_special_tokens(documents, spellings, end, special_tokens)
    split = split_documents(documents, held_out=share)
    if tokenizer is None:
        assert vocab_size is not None, "a tokenizer or a size is given"
        encoder = _trained_tokenizer(split, Path(to).expanduser(), vocab_size, say)
    try:
        manifest = tokenize(split, encoder, to, asked=vocab_size, say=say)
    except OSError as error:
        raise CheckpointError(
            "the shards cannot be written",
            where=to,
            got=error,
            fix="free some space, and run the same command again" if is_disk_full(error) else "",
        ) from error
    # The line to print.
    plan = manifest.plan
    held_out_tokens = manifest.tokens("held_out")
    tokens = manifest.tokens("train") + held_out_tokens
    return (
        f"{plan.name}: {tokens:,} tokens of {plan.documents:,} documents, {held_out_tokens:,} held "
        f"out, in {to} (tokenizer {plan.tokenizer}, {encoder.vocab_size:,} tokens)"
        f"{skip_note(Skipped(plan.skipped))}"
    )


def _open_corpus(corpus: str, field: str, invalid: Invalid) -> Documents:
    """Opens the embedded corpus or a path's. Raises ConfigError for a flag without effect."""
    if corpus != "embedded":
        return open_documents(corpus, field=field, invalid=invalid)
    for name, got, default in (("field", field, "text"), ("invalid", invalid, "error")):
        if got != default:
            raise ignored_key_error(f"--{name}", got)
    return embedded_documents()


def _trained_tokenizer(split: Split, to: Path, vocab_size: int, say: Say) -> Tokenizer:
    """Loads the tokenizer that a stopped command left in `to`, or trains one.

    The same text gives the same one. The requested sizes are compared, since a tokenizer may have
    got fewer ids than that.
    """
    plan = read_plan(to)
    if plan is not None and plan.asked != vocab_size:
        what = "the folder holds shards of another tokenizer"
        expected = f"{plan.asked}, as was asked for when it was trained"
        if plan.asked is None:
            expected = "--tokenizer, as it was made with one"
        raise ConfigError(
            what,
            where="--vocab-size",
            expected=expected,
            got=vocab_size,
            fix="choose another folder, or remove this one",
        )
    if plan is not None and (to / TOKENIZER).exists():
        with suppress(DamageError):  # then the same one is trained again
            found = load_tokenizer(to)
            if found.digest == plan.tokenizer_digest:
                return found
    say(f"training a tokenizer of {vocab_size:,} tokens")
    return train_bpe(split.read("train"), vocab_size)
