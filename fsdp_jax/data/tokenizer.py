"""Tokenizers: text to ids and back. Bytes need no file; all others are a `tokenizer.json` as
Hugging Face writes it.

Text is encoded as text: a document that spells out a special token (`</s>`) gets the ids of its
letters, and `encode` puts no token before or after it. Whoever joins documents puts `begin` before
each, and the end-of-text token after it.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from fsdp_jax.errors import ConfigError, message

END = "<|endoftext|>"
ENDS = (END, "</s>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>", "[SEP]")
"""What the end-of-text token is called where no `tokenizer_config.json` says it, the first that is there."""

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
BATCH = 1 << 20  # characters encoded at a time
NOTHING: Mapping[str, bytes] = MappingProxyType({})


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def vocab_size(self) -> int:
        """The largest id, plus one."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of its `tokenizer.json` and of `begin` and `end`; "bytes" for
        bytes.
        """
        ...

    @property
    def begin(self) -> tuple[int, ...]:
        """Ids that it puts before a text by itself, such as Llama's `<|begin_of_text|>`."""
        ...

    @property
    def end(self) -> int | None:
        """The id of the end-of-text token; None where there is none."""
        ...

    @property
    def sentinels(self) -> tuple[int, ...]:
        """Ids that stand for a span taken out of a text (T5's `<extra_id_0>` and on), in their
        order.
        """
        ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """{name: contents} that make it anew, in a folder of its own; nothing for bytes."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """int32 [tokens], without special tokens."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Each of `texts` as `encode` does it, in parallel where that can be."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Ids of any integer dtype, shape [tokens], as text; what cannot be text is U+FFFD."""
        ...


class Bytes:
    """The bytes of the text's UTF-8 are its ids.

    The end-of-text token is byte 0, which hardly any text contains; where documents end is known
    from their lengths, so a text that does contain it is read as it is.
    """

    name = "bytes"
    vocab_size = 256
    digest = "bytes"
    begin: tuple[int, ...] = ()
    end = 0
    sentinels: tuple[int, ...] = ()
    files = NOTHING

    def encode(self, text: str) -> np.ndarray:
        """int32 [bytes]."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Each of `texts`."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        """What is not UTF-8, or no byte, becomes U+FFFD."""
        tokens = np.asarray(tokens)
        # 255 is never part of UTF-8
        return (
            np.where((tokens >= 0) & (tokens < 256), tokens, 255)
            .astype(np.uint8)
            .tobytes()
            .decode(errors="replace")
        )


class HuggingFace:
    """A tokenizer of Hugging Face's `tokenizers`, from the bytes of its `tokenizer.json`.

    `settings`: the bytes of the `tokenizer_config.json` beside it, of which only `eos_token` is
    used. Raises ConfigError where the package is missing or the file is not one of its own.
    """

    def __init__(self, content: bytes, *, name: str, settings: bytes | None = None):
        tokenizers = _package()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the package raises nothing more exact
            raise ConfigError(
                message("Not a tokenizer.", where=name, expected=FILE, got=error)
            ) from error
        self._tokenizer.encode_special_tokens = True  # text is text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self._known = np.zeros(max(ids.values(), default=-1) + 1, bool)
        self._known[list(ids.values())] = True
        self.name = name
        self.vocab_size = len(self._known)
        self.begin = self._before("a")
        self.end = _end(ids, settings, name)
        decided = json.dumps(
            {"begin": self.begin, "end": self.end}
        )  # the settings are not in `content`
        self.digest = hashlib.sha256(content + decided.encode()).hexdigest()
        numbers = iter(range(len(ids)))
        spans = iter(lambda: ids.get(f"<extra_id_{next(numbers)}>"), None)
        self.sentinels: tuple[int, ...] = tuple(spans)
        self.files: Mapping[str, bytes] = {FILE: content} | (
            {} if settings is None else {SETTINGS: settings}
        )

    def _before(self, text: str) -> tuple[int, ...]:
        """What the tokenizer's own template puts before a text."""
        plain, full = (
            self._tokenizer.encode(text, add_special_tokens=special).ids
            for special in (False, True)
        )
        starts = range(len(full) - len(plain) + 1)
        return tuple(full[: next((at for at in starts if full[at : at + len(plain)] == plain), 0)])

    def encode(self, text: str) -> np.ndarray:
        """int32 [tokens]."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Each of `texts`, on all cores."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, np.int32) for each in found]

    def decode(self, tokens: np.ndarray) -> str:
        """Special tokens are spelt out; ids that the vocabulary lacks become U+FFFD."""
        pieces = []
        for known, run in groupby(
            np.asarray(tokens).tolist(), lambda i: 0 <= i < self.vocab_size and self._known[i]
        ):
            ids = list(run)
            pieces.append(
                self._tokenizer.decode(ids, skip_special_tokens=False)
                if known
                else "\ufffd" * len(ids)
            )
        return "".join(pieces)


def load_tokenizer(source: str | Path) -> Tokenizer:
    """`bytes`, or the path of a `tokenizer.json` or of a folder that holds one (also one that
    `tokenize` wrote).

    Raises ConfigError where there is none.
    """
    if source == Bytes.name:
        return Bytes()
    path = Path(source).expanduser()
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        fix = f"set data.tokenizer to bytes, a {FILE}, or a folder that holds one"
        what = "There is no such tokenizer."
        raise ConfigError(message(what, where="data.tokenizer", expected=FILE, got=source, fix=fix))
    beside = file.with_name(SETTINGS)
    try:
        settings = beside.read_bytes() if beside.is_file() else None
        return HuggingFace(file.read_bytes(), name=str(source), settings=settings)
    except OSError as error:
        raise ConfigError(
            message("A tokenizer cannot be read.", where=str(file), got=error)
        ) from error


def train_bpe(documents: Iterable[str], vocab_size: int, *, name: str = "bpe") -> HuggingFace:
    """Byte-level BPE (as GPT-2's) of `documents`, with `<|endoftext|>` as id 0; the same ones give
    the same bytes.

    A small corpus gives fewer than `vocab_size` ids: no pair is merged that it does not hold twice.
    Raises ConfigError where there is no room for the 256 bytes and the end.
    """
    _package()
    if vocab_size < 257:
        what, expected = (
            "The vocabulary is too small.",
            "at least 257: every byte, and the end of text",
        )
        raise ConfigError(
            message(what, where="the vocabulary's size", expected=expected, got=vocab_size)
        )
    from tokenizers import Tokenizer as Trained
    from tokenizers import decoders, models, pre_tokenizers, trainers

    trained = Trained(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # a set's order changes from run to run
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    trained.train_from_iterator(iter(documents), trainer)
    return HuggingFace(trained.to_str(pretty=True).encode(), name=name)


def encoded(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """`begin`, each text's ids, and the end-of-text token, int32; encoded about a million
    characters at a time.

    A tokenizer without such tokens gives the texts' ids alone.
    """
    begin = np.array(tokenizer.begin, np.int32)
    end = np.array([] if tokenizer.end is None else [tokenizer.end], np.int32)
    for batch in _batches(texts):
        yield from (np.concatenate([begin, ids, end]) for ids in tokenizer.encode_batch(batch))


def token_dtype(vocab_size: int) -> np.dtype:
    """The smaller of uint16 and uint32, little-endian, that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def check_vocabulary(tokens: "Tokenizer | int", vocab_size: int) -> None:
    """Raises ConfigError where a tokenizer, or a largest id, goes beyond a model's vocabulary."""
    largest = tokens if isinstance(tokens, int) else tokens.vocab_size - 1
    if largest >= vocab_size:
        what = "The vocabulary of the model is too small."
        whose = "the tokens" if isinstance(tokens, int) else f"the tokenizer {tokens.name}"
        got, fix = (
            f"{vocab_size}, and ids up to {largest} in {whose}",
            f"set it to {-(-(largest + 1) // 128) * 128}",
        )
        where, expected = "model.vocab_size", f"at least {largest + 1}"
        raise ConfigError(message(what, where=where, expected=expected, got=got, fix=fix))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _end(ids: dict[str, int], settings: bytes | None, name: str) -> int | None:
    """The id of the end-of-text token: the one that the settings name, else the first of `ENDS`."""
    if settings is not None:
        try:
            stated = json.loads(settings).get("eos_token")
        except (ValueError, AttributeError) as error:
            raise ConfigError(
                message("Not a tokenizer's settings.", where=f"{name}: {SETTINGS}", got=error)
            ) from error
        stated = stated.get("content") if isinstance(stated, dict) else stated
        if stated is not None:
            if stated not in ids:
                what, expected = "The end-of-text token has no id.", f"a token of {FILE}"
                raise ConfigError(
                    message(what, where=f"{name}: {SETTINGS}", expected=expected, got=stated)
                )
            return ids[stated]
    return next((ids[end] for end in ENDS if end in ids), None)


def _package() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        fix = "pip install 'fsdp_jax[hf]', or use the tokenizer bytes"
        what = "Hugging Face tokenizers are not installed."
        raise ConfigError(message(what, where="data.tokenizer", fix=fix)) from error
    return tokenizers
