"""The manifest of token shards, `manifest.json`: how they were made, and what each file holds."""

import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from fsdp_jax.data.documents import Part
from fsdp_jax.data.tokenizer import token_dtype
from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.io.digests import DIGEST, Json, digest_json, parse_sealed, sealed_text
from fsdp_jax.io.json_text import parse_json
from fsdp_jax.io.model_files import TOKENIZER_FILES
from fsdp_jax.io.regular_files import read_regular

T = TypeVar("T")

MANIFEST = "manifest.json"
TOKENS, DOCUMENTS = ".tokens", ".documents"
FORMAT = 1
PARTS: tuple[Part, ...] = ("train", "held_out")


@dataclass(frozen=True)
class TokenizePlan:
    """What determines every byte of the shards; a run is resumed only under the same plan."""

    name: str  # of the corpus
    corpus: str  # its digest
    documents: int  # before the split
    skipped: dict[str, int]  # or repaired, by reason
    held_out: float  # share
    tokenizer: str
    tokenizer_digest: str
    end: int | None  # the end-of-text token
    vocab_size: int
    dtype: str  # of ids on disk
    shard_tokens: int  # a shard ends with the document that reaches this number
    asked: int | None  # vocabulary size of a tokenizer trained for this, which may have fewer ids
    format: int = FORMAT
    special_tokens: bool = False  # that the text spells are tokens


@dataclass(frozen=True)
class TokenShard:
    """One shard: its `name` without suffix, and how many tokens and documents it holds."""

    name: str
    part: Part
    tokens: int
    documents: int


@dataclass(frozen=True)
class Manifest:
    """The contents of a folder of shards."""

    plan: TokenizePlan
    shards: tuple[TokenShard, ...]
    largest: int  # id, -1 without tokens
    # {name: {bytes, xxh3_128}} of every file; empty where an older release wrote them.
    files: Mapping[str, Json] = field(default_factory=dict)

    def of(self, part: Part) -> list[TokenShard]:
        """Lists the shards of a part, `train` or `held_out`."""
        return [shard for shard in self.shards if shard.part == part]

    def tokens(self, part: Part) -> int:
        """Counts the tokens of a part."""
        return sum(shard.tokens for shard in self.of(part))

    def documents(self, part: Part) -> int:
        """Counts the documents of a part; one that was cut counts in both."""
        return sum(shard.documents for shard in self.of(part))

    @property
    def digest(self) -> str | None:
        """The digest of all shards, which identifies the tokens; None if they have none."""
        if not self.files:
            return None
        shards = {name: each for name, each in self.files.items() if name not in TOKENIZER_FILES}
        return digest_json(shards)

    def to_text(self) -> str:
        """Formats the contents of `manifest.json`, with sums for people and a digest of itself."""
        return sealed_text(asdict(self) | {"sums": self._sums()})

    @classmethod
    def from_text(cls, text: str) -> "Manifest":
        """Parses the text of a `manifest.json`.

        Raises ValueError if it is malformed or contradicts itself, or its own digest, which older
        releases did not write.
        """
        # the text as written, by its digest
        body = parse_json(text)
        if not isinstance(body, dict):
            raise ValueError("not an object")
        if DIGEST in body or "files" in body:  # older releases wrote neither
            body = parse_sealed(text)
        # its fields, by their names and types
        plan, shards = body.get("plan"), body.get("shards")
        if isinstance(plan, dict) and plan.get("format") != FORMAT:
            raise ValueError(f"format {plan.get('format')}, which this version does not read")
        if not isinstance(shards, list):
            raise ValueError("no list of shards")
        manifest = cls(
            dataclass_from_json(TokenizePlan, plan),
            tuple(dataclass_from_json(TokenShard, each) for each in shards),
            body.get("largest"),  # type: ignore[arg-type]  # checked below
            body.get("files", {}),
        )
        # their values, which must not contradict each other
        manifest._check_values()
        if "sums" in body and body["sums"] != manifest._sums():
            raise ValueError("the sums are not those of the shards")
        if DIGEST in body:
            _check_file_digests(manifest.files, manifest.shards)
        return manifest

    def _sums(self) -> Json:
        """Counts the tokens and documents of each part."""
        return {
            part: {"tokens": self.tokens(part), "documents": self.documents(part)} for part in PARTS
        }

    def _check_values(self) -> None:
        """Raises ValueError unless the numbers are possible, and the names those of the shards."""
        plan, largest = self.plan, self.largest
        possible = {
            "vocab_size": 0 < plan.vocab_size <= 1 << 31,
            "dtype": plan.dtype == token_dtype(plan.vocab_size).str,
            "end": plan.end is None or 0 <= plan.end < plan.vocab_size,
            "held_out": 0 <= plan.held_out <= 0.5,
            "shard_tokens": plan.shard_tokens > 0,
            "documents": plan.documents >= 0,
            "largest": type(largest) is int and -1 <= largest < plan.vocab_size,
            "tokens and documents": all(min(s.tokens, s.documents) >= 0 for s in self.shards),
        }
        wrong = [name for name, right in possible.items() if not right]
        if wrong:
            raise ValueError(f"impossible: {', '.join(wrong)}")
        # the stream of a part is its shards in this order, and the next one is named by their count
        for part in PARTS:
            names = [shard.name for shard in self.of(part)]
            if names != [shard_name(part, number) for number in range(len(names))]:
                raise ValueError("the shards are not named in their order")


def shard_name(part: Part, number: int) -> str:
    """Formats the name of a shard without suffix."""
    return f"{part}-{number:05}"


def shard_files(shards: tuple[TokenShard, ...]) -> list[str]:
    """Lists the names of the shards' files, two for each."""
    return [shard.name + suffix for shard in shards for suffix in (TOKENS, DOCUMENTS)]


def _check_file_digests(files: object, shards: tuple[TokenShard, ...]) -> None:
    """Raises ValueError unless `files` are digests of the shards' files, and of a tokenizer's."""
    if not isinstance(files, dict) or set(files) - set(TOKENIZER_FILES) != set(shard_files(shards)):
        raise ValueError("the digests are not those of the shards")
    kinds = {"bytes": int, "xxh3_128": str}
    for name, each in files.items():
        if not isinstance(each, dict) or {key: type(each[key]) for key in each} != kinds:
            raise ValueError(f"the digest of {name} is not one")


def read_manifest(folder: Path) -> Manifest:
    """Reads a manifest. Raises ConfigError if it is missing, DamageError if it is damaged."""
    file = folder / MANIFEST
    if not file.exists():
        what = "there are no finished token shards"
        fix = "make it with `fsdp-jax tokenize`; run it again if it was stopped"
        raise ConfigError(what, where="data.path", expected=MANIFEST, got=folder, fix=fix)
    try:
        return Manifest.from_text(read_regular(file).decode())
    except (OSError, ValueError) as error:
        what, expected = "the manifest of token shards is damaged", "a manifest"
        fix = "restore the file, or remove the folder and tokenize again"
        raise DamageError(what, where=str(file), expected=expected, got=error, fix=fix) from error


def dataclass_from_json(kind: type[T], body: object) -> T:
    """Makes a dataclass of parsed JSON. Raises ValueError for any other keys or types."""
    if not isinstance(body, dict):
        raise ValueError(f"no {kind.__name__}")
    # keys that are missing, of no field, or of another type
    hints = get_type_hints(kind)
    specs: Any = kind  # a dataclass, which mypy cannot know of T
    required = {each.name for each in fields(specs) if each.default is MISSING}
    wrong = {*(required - body.keys()), *(body.keys() - hints.keys())}
    wrong |= {name for name in body.keys() & hints.keys() if not _has_type(body[name], hints[name])}
    if wrong:
        raise ValueError(f"{kind.__name__}: missing, unknown or of another type: {sorted(wrong)}")
    return kind(**body)


def _has_type(value: object, hint: Any) -> bool:
    """Tells whether a value of parsed JSON is of an annotated type."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is types.UnionType:
        return any(_has_type(value, each) for each in get_args(hint))
    if get_origin(hint) is dict:
        return type(value) is dict and all(
            _has_type(each, get_args(hint)[1]) for each in value.values()
        )
    # another program may write the float 1.0 as 1
    return type(value) is hint or (hint is float and type(value) is int)
