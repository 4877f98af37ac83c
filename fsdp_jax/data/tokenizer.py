"""Tokenizers: text to ids and back, by bytes or by a Hugging Face `tokenizer.json`.

Text is encoded as text: a document that contains the spelling of a special token (`</s>`) gets the
ids of its characters, unless `special` is True, and `encode` adds no tokens. `encode_documents`
puts the tokenizer's `begin` before each document and the end-of-text token after it.
"""

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import count, groupby, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from fsdp_jax.data.chat import ChatTemplate
from fsdp_jax.data.options import SpecialTokens
from fsdp_jax.errors import ConfigError, DamageError, extra, is_failure
from fsdp_jax.io.json_text import parse_json
from fsdp_jax.io.model_files import TEMPLATE, TOKENIZER_FILES
from fsdp_jax.io.model_files import TOKENIZER as FILE
from fsdp_jax.io.model_files import TOKENIZER_SETTINGS as SETTINGS
from fsdp_jax.io.regular_files import read_regular

END = "<|endoftext|>"
ENDS = (END, "</s>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>", "[SEP]")
"""Names of the end-of-text token, tried in order if no `tokenizer_config.json` states it."""

BATCH = 1 << 20  # characters encoded at a time
REDIRECTED = threading.RLock()  # while descriptor 2 is a file


class Tokenizer(Protocol):
    """Encodes text as ids, and decodes ids as text."""

    name: str  # for descriptions
    vocab_size: int  # the largest id, plus one
    digest: str  # SHA-256 (hexadecimal) of its file, `begin` and `end`; "bytes" for bytes
    begin: tuple[int, ...]  # put before a text by its template, as Llama's `<|begin_of_text|>`
    end: int | None  # the end-of-text token, if it has one
    special_tokens: tuple[str, ...] = ()  # their spellings
    sentinels: tuple[int, ...]  # replace spans removed from a text: T5's `<extra_id_0>` and up
    files: Mapping[str, bytes]  # {name: contents} that restore it; none for bytes

    @property
    def end_spelling(self) -> str | None:
        """The spelling of the end-of-text token, if it has one."""
        return None

    @property
    def chat_template(self) -> ChatTemplate | None:
        """What makes the text of a chat; None if the tokenizer has none."""
        return None

    def encode(self, text: str) -> np.ndarray:
        """Returns int32 [tokens], without special tokens."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes each text, in parallel where possible."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        """Decodes ids [tokens] of any integer dtype; bytes that are not text become U+FFFD."""

    def encode_rendered(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encodes texts, as of chats, in which the spelling of a special token is that token.

        Returns for each its ids, int32 [tokens], and the characters of each token, int64
        [tokens, 2]: the first, and the one after the last. Only for one with special tokens.
        """
        raise TypeError(f"the tokenizer {self.name} has no special tokens")


class ByteTokenizer(Tokenizer):
    """A tokenizer whose ids are the bytes of the text's UTF-8.

    The end-of-text token is byte 0, which hardly any text contains; where documents end is known
    from their lengths, so a text that does contain it is read unchanged.
    """

    name = "bytes"
    vocab_size = 256
    digest = "bytes"
    begin = ()
    end = 0
    sentinels = ()
    files: Mapping[str, bytes] = MappingProxyType({})

    def encode(self, text: str) -> np.ndarray:
        """Returns int32 [bytes]."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Decodes ids; bytes that are not UTF-8, and ids that are no byte, become U+FFFD."""
        tokens = np.asarray(tokens)
        is_byte = (tokens >= 0) & (tokens < 256)
        content = np.where(is_byte, tokens, 255).astype(np.uint8)  # 255 never occurs in UTF-8
        return content.tobytes().decode(errors="replace")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of Hugging Face's `tokenizers`.

    `content` are the bytes of its `tokenizer.json`, `beside` those of the other `TOKENIZER_FILES`
    in its folder, by name. Of `tokenizer_config.json`, `eos_token` is used, and for chats
    `chat_template` and the special tokens; `chat_template.jinja` goes before it. Raises
    MissingPackageError without the package, DamageError if it cannot read the file or encode with
    it.
    """

    def __init__(
        self,
        content: bytes,
        *,
        name: str,
        beside: Mapping[str, bytes] = MappingProxyType({}),
    ):
        with extra("hf"):
            import tokenizers
        # Text is text: nothing is added to it, cut off it, or read as a special token.
        with _failures_as_damage_error(name):
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
            self._tokenizer.encode_special_tokens = True  # their spelling in a text is text
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            ids = self._tokenizer.get_vocab(with_added_tokens=True)
            added = self._tokenizer.get_added_tokens_decoder().values()
            self.special_tokens = tuple(each.content for each in added if each.special)
            self.begin = self._template_prefix()
        # An id may be missing below the largest.
        self._known = frozenset(ids.values())
        self.name = name
        self.vocab_size = max(self._known, default=-1) + 1
        if self.vocab_size > 1 << 31:
            what, expected = "an id of the tokenizer is too large", "less than 2**31"
            raise DamageError(what, where=name, expected=expected, got=self.vocab_size - 1)
        self.end = _end_of_text_id(ids, beside.get(SETTINGS), name)
        # `begin` and `end` may come from the settings, which `content` does not hold.
        special = json.dumps({"begin": self.begin, "end": self.end})
        self.digest = hashlib.sha256(content + special.encode()).hexdigest()
        # T5's sentinels are numbered from 0, without a gap
        names = takewhile(ids.__contains__, map("<extra_id_{}>".format, count()))
        self.sentinels: tuple[int, ...] = tuple(ids[name] for name in names)
        self.files: Mapping[str, bytes] = {FILE: content, **beside}

    @property
    def end_spelling(self) -> str | None:
        """The spelling of the end-of-text token, if there is one."""
        return None if self.end is None else self._tokenizer.id_to_token(self.end)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The template of `chat_template.jinja`, or of the settings: of several `default`.

        Raises ConfigError if it is not Jinja, DamageError if the file is not text.
        """
        where, settings = f"{self.name}: {SETTINGS}", self.files.get(SETTINGS, b"{}")
        stated = _parse_settings(settings, where)
        source = stated.get("chat_template")
        if isinstance(source, list):
            named = {each.get("name"): each.get("template") for each in source}
            source = named.get("default")
        if TEMPLATE in self.files:
            where = f"{self.name}: {TEMPLATE}"
            try:
                source = self.files[TEMPLATE].decode()
            except UnicodeDecodeError as error:
                raise DamageError("a chat template is not text", where=where, got=error) from error
        if not isinstance(source, str):
            return None
        # a special token is a name, or an object that holds it, as an added token with options
        special = {name: value for name, value in stated.items() if name.endswith("_token")}
        contents = {
            name: value.get("content") if isinstance(value, dict) else value
            for name, value in special.items()
        }
        texts = {name: value for name, value in contents.items() if isinstance(value, str)}
        return ChatTemplate(source, texts, where=where)

    @cached_property
    def _with_special_tokens(self) -> Any:
        """The tokenizer again, which reads the spelling of a special token as that token."""
        import tokenizers

        with _failures_as_damage_error(self.name):
            again = tokenizers.Tokenizer.from_str(self.files[FILE].decode())
            again.no_truncation()
            again.no_padding()
            return again

    def encode_rendered(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (int32 [tokens], int64 [tokens, 2]) of each text, encoded on all cores."""
        with _failures_as_damage_error(self.name):
            encodings = self._with_special_tokens.encode_batch(
                list(texts), add_special_tokens=False
            )
        return [
            (np.array(each.ids, np.int32), np.array(each.offsets, np.int64).reshape(-1, 2))
            for each in encodings
        ]

    def _template_prefix(self) -> tuple[int, ...]:
        """Finds the ids that the tokenizer's own template puts before a text."""
        # the ids of a short text without and with its template, the first within the second
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start])
        return ()

    def encode(self, text: str) -> np.ndarray:
        """Returns int32 [tokens]."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes each text, on all cores."""
        with _failures_as_damage_error(self.name):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, tokens: np.ndarray) -> str:
        """Decodes ids, special tokens spelled out; ids without a token become U+FFFD."""
        # runs of known ids at once: a character may be spread over several tokens
        pieces = []
        for known, run in groupby(np.asarray(tokens).tolist(), self._known.__contains__):
            ids = list(run)
            if known:
                with _failures_as_damage_error(self.name):
                    pieces.append(self._tokenizer.decode(ids, skip_special_tokens=False))
            else:
                pieces.append("\ufffd" * len(ids))
        return "".join(pieces)


@contextlib.contextmanager
def _failures_as_damage_error(name: str) -> Iterator[None]:
    """Turns whatever the package raises, which is nothing specific, into a DamageError."""
    try:
        with _stderr_dropped_on_failure():
            yield
    except BaseException as error:  # its panics are no Exceptions
        if not is_failure(error):
            raise
        what, fix = "not a tokenizer", f"restore {FILE}, or name another tokenizer"
        raise DamageError(what, where=name, expected=FILE, got=error, fix=fix) from error


@contextlib.contextmanager
def _stderr_dropped_on_failure() -> Iterator[None]:
    """Drops the `with` block's output on stderr if it fails: the package prints panics there."""
    scratch = None
    with contextlib.suppress(AttributeError, OSError):  # no stderr, or no room: then it is printed
        sys.stderr.flush()
        scratch = _scratch_file()
    if scratch is None:
        yield
        return
    # A file in place of descriptor 2, which the package's Rust code writes to; one thread at a
    # time, since the descriptor is the process's.
    with REDIRECTED:
        stderr = os.dup(2)
        os.dup2(scratch, 2)
        try:
            yield
            # nothing failed: the output is passed on
            with contextlib.suppress(OSError):  # nobody reads it
                sys.stderr.flush()
                os.write(stderr, os.pread(scratch, os.fstat(scratch).st_size, 0))
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            os.ftruncate(scratch, 0)
            os.lseek(scratch, 0, os.SEEK_SET)


@cache  # a text is encoded in less time than a file is made
def _scratch_file() -> int:
    """Makes a file without a name, open while this process lives. Raises OSError."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Loads the tokenizer named `bytes`, a `tokenizer.json`, or that of a folder that holds one.

    Such a folder may be one that `tokenize` wrote. Raises ConfigError if there is none, DamageError
    if it cannot be read.
    """
    if source == ByteTokenizer.name:
        return ByteTokenizer()
    file = Path(source).expanduser()
    if file.is_dir():
        file = file / FILE
    if not file.exists():
        what = "there is no such tokenizer"
        fix = f"set data.tokenizer to bytes, a {FILE}, or a folder that holds one"
        raise ConfigError(what, where="data.tokenizer", expected=FILE, got=source, fix=fix)
    try:
        beside = {
            name: read_regular(file.with_name(name))
            for name in TOKENIZER_FILES
            if name != FILE
            and os.path.lexists(file.with_name(name))  # a broken link too: it raises
        }
        return HuggingFaceTokenizer(read_regular(file), name=str(source), beside=beside)
    except OSError as error:
        raise DamageError("a tokenizer cannot be read", where=str(file), got=error) from error


def train_bpe(documents: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    """Trains byte-level BPE (as GPT-2's) with `<|endoftext|>` as id 0; deterministic.

    A small corpus gives fewer than `vocab_size` ids, as only pairs that occur twice are merged.
    Raises ConfigError if `vocab_size` does not hold the 256 bytes and the end-of-text token.
    """
    with extra("hf"):
        import tokenizers
    if vocab_size < 257:
        what = "the vocabulary is too small"
        where = "--vocab-size"
        expected = "at least 257: every byte, and the end of text"
        raise ConfigError(what, where=where, expected=expected, got=vocab_size)
    # GPT-2's parts: every byte is in the alphabet, so that no text is unknown
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        # The order of a set of strings differs between processes.
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(documents), trainer)
    return HuggingFaceTokenizer(tokenizer.to_str(pretty=True).encode(), name="bpe")


def encode_documents(
    texts: Iterable[str], tokenizer: Tokenizer, *, special: bool = False
) -> Iterator[np.ndarray]:
    """Yields int32 ids of each text, between the tokenizer's `begin` and end-of-text token, if any.

    `special`: texts spell special tokens, perhaps these too. About a million characters are encoded
    at a time.
    """
    begin = np.array(tokenizer.begin, np.int32)
    end = np.array([] if tokenizer.end is None else [tokenizer.end], np.int32)
    for batch in _batches_by_characters(texts):
        if special:
            encoded = encode_spelled(batch, tokenizer, begin, end)
        else:
            encoded = tokenizer.encode_batch(batch)
        yield from (np.concatenate([begin, ids, end]) for ids in encoded)


def encode_spelled(
    texts: Sequence[str], tokenizer: Tokenizer, begin: np.ndarray, end: np.ndarray
) -> list[np.ndarray]:
    """Encodes texts that spell special tokens, without `begin` and `end`, ids, at their ends."""
    encoded = []
    for ids, _ in tokenizer.encode_rendered(texts):
        if np.array_equal(ids[: len(begin)], begin):
            ids = ids[len(begin) :]
        if len(end) and np.array_equal(ids[-len(end) :], end):
            ids = ids[: -len(end)]
        encoded.append(ids)
    return encoded


def token_dtype(vocab_size: int) -> np.dtype:
    """Chooses the smaller of uint16 and uint32, little-endian, that holds every id."""
    if vocab_size <= 1 << 16:
        return np.dtype("<u2")
    return np.dtype("<u4")


def check_vocabulary(
    tokens: "Tokenizer | int", vocab_size: int, *, weights: str | None = None
) -> None:
    """Raises ConfigError if a tokenizer, or a largest id, exceeds a model's vocabulary.

    `weights`: those that the vocabulary is of.
    """
    # of encoded tokens the ids that occur count, of a tokenizer all that it may give
    if isinstance(tokens, int):
        largest = tokens
        owner = "the tokens"
    else:
        largest = tokens.vocab_size - 1
        owner = f"the tokenizer {tokens.name}"
    if largest >= vocab_size:
        what, where = "the vocabulary of the model is too small", "model.vocab_size"
        got = f"{vocab_size}, and ids up to {largest} in {owner}"
        fix = f"set it to {-(-(largest + 1) // 128) * 128}"
        expected = f"at least {largest + 1}"
        if weights is not None:
            what, where = "the vocabulary of the weights is too small", "model.weights"
            got = f"{got}; {weights}"
            fix = (
                f"set model.vocab_size to {-(-(largest + 1) // 128) * 128}, which adds rows that "
                "are the mean of theirs; or use the tokenizer that they were trained with"
            )
        raise ConfigError(what, where=where, expected=expected, got=got, fix=fix)


def extends(tokenizer: Tokenizer, other: Tokenizer) -> bool:
    """Tells whether a tokenizer differs from another by nothing but more tokens added."""
    files = [each.files.get(FILE) for each in (tokenizer, other)]
    ends = [(each.begin, each.end) for each in (tokenizer, other)]
    if None in files or ends[0] != ends[1]:
        return False
    new, old = (dict(parse_json(content.decode()).items()) for content in files if content)
    added, before = (each.pop("added_tokens", None) or [] for each in (new, old))
    return new == old and added[: len(before)] == before


def check_special_tokens(where: str, how: SpecialTokens, tokenizer: Tokenizer) -> None:
    """Raises ConfigError for special tokens to parse that the tokenizer does not have."""
    if how == "tokens" and not tokenizer.special_tokens:
        what, fix = "the tokenizer has no special tokens", "leave it out, or name another tokenizer"
        raise ConfigError(what, where=where, expected="text", got=tokenizer.name, fix=fix)


def _batches_by_characters(texts: Iterable[str]) -> Iterator[list[str]]:
    """Groups texts into lists of at least `BATCH` characters; the last may have fewer."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _end_of_text_id(ids: Mapping[str, int], settings: bytes | None, name: str) -> int | None:
    """Finds the id of the end-of-text token: the settings' `eos_token`, or else one of `ENDS`.

    None if the tokenizer has none. `ids`: {token: id}. `settings`: a `tokenizer_config.json`.
    """
    where = f"{name}: {SETTINGS}"
    stated = None
    if settings is not None:
        stated = _parse_settings(settings, where).get("eos_token")
    # a name, or an object that holds it, as an added token with options
    if isinstance(stated, dict):
        stated = stated.get("content")
    if stated is None:
        return next((ids[end] for end in ENDS if end in ids), None)
    if not isinstance(stated, str) or stated not in ids:
        what = "the end-of-text token has no id"
        raise ConfigError(what, where=where, expected=f"a token of {FILE}", got=stated)
    return ids[stated]


def _parse_settings(settings: bytes, where: str) -> dict[str, Any]:
    """Parses a `tokenizer_config.json`. Raises DamageError unless it is an object."""
    try:
        return dict(parse_json(settings.decode()).items())
    except (ValueError, AttributeError) as error:
        raise DamageError("not a tokenizer's settings", where=where, got=error) from error
