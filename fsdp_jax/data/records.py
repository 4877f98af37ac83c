"""Records with named fields: lines or a list of JSON, rows of a Hugging Face dataset.

Every record comes with its place (file and line, or row), for the messages about it.
"""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_jax.data.files import (
    HEAD,
    JSON_SUFFIXES,
    TEXT_SUFFIXES,
    Skipped,
    open_text,
    read_bytes,
    text_suffix,
)
from fsdp_jax.data.options import Invalid
from fsdp_jax.errors import ConfigError, DamageError, did_you_mean, extra, is_failure
from fsdp_jax.io.json_text import parse_json

Record = dict[str, Any]

INVALID = "not UTF-8"
REPLACED = "with invalid UTF-8 replaced"
BLANK = "blank lines"

DATASET_FORMATS = {
    **dict.fromkeys(JSON_SUFFIXES, "json"),
    ".parquet": "parquet",
    ".csv": "csv",
}
BOM = "\ufeff"  # the byte order mark, which some editors put before a text
FIRST_LINE = 1 << 20  # bytes of it that tell whether a file of unknown name holds records


@dataclass(frozen=True)
class TextDecoder:
    """Decodes text; `invalid` decides on text that is not UTF-8, which `skipped` counts."""

    invalid: Invalid
    skipped: Skipped

    def decode(self, content: bytes, where: str, *, offset: int = 0) -> str | None:
        """Decodes UTF-8; None if it is skipped. Raises DamageError if `invalid` says so.

        `where`: the place of the text, for messages. `offset`: where `content` starts in its file.
        """
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            got = f"byte 0x{content[error.start]:02x} at offset {offset + error.start:,}"
            fix = "store the text as UTF-8"
            if self._handle_invalid(where, got, error, expected="UTF-8", fix=fix):
                return None
            return content.decode(errors="replace")

    def decode_field(self, record: Record, name: str, where: str) -> str | None:
        """Decodes the text of a field; None if it is skipped.

        A string of JSON can hold half a surrogate pair, and a dataset bytes: neither need be UTF-8.
        Raises ConfigError if the field is missing or not text, DamageError if it is not UTF-8.
        """
        if name not in record:
            what, expected = "a record lacks a field", f"a field '{name}'"
            got, fix = ", ".join(map(repr, record)) or "an empty object", did_you_mean(name, record)
            raise ConfigError(what, where=where, expected=expected, got=got, fix=fix)
        # bytes of a dataset
        value = record[name]
        where = f"{where}, field '{name}'"
        if isinstance(value, bytes):
            return self.decode(value, where)
        if not isinstance(value, str):
            what = "a field is not text"
            raise ConfigError(what, where=where, expected="a string", got=_json_type_name(value))
        # a string, whose only fault can be half a surrogate pair
        try:
            value.encode()
        except UnicodeEncodeError as error:
            code = ord(value[error.start])
            got = f"half a surrogate pair, U+{code:04X}, at character {error.start}"
            fix = "repair the record: it has half of a surrogate pair"
            if self._handle_invalid(where, got, error, expected="text", fix=fix):
                return None
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return value

    def _handle_invalid(
        self, where: str, got: str, error: UnicodeError, *, expected: str, fix: str
    ) -> bool:
        """Counts a text that is not UTF-8. Returns True to skip it, False to replace invalid bytes.

        Raises DamageError, made of the arguments, where `invalid` is "error".
        """
        if self.invalid == "error":
            what = "text is not UTF-8"
            fix = f"{fix}; or set data.invalid to replace or skip"
            raise DamageError(what, where=where, expected=expected, got=got, fix=fix) from error
        if self.invalid == "skip":
            self.skipped[INVALID] += 1
            return True
        self.skipped[REPLACED] += 1
        return False


def is_records(path: str | Path) -> bool:
    """Tells whether a file holds records of JSON: by its suffix, or of unknown ones by a look.

    Such a file holds records if its first line is an object. Errors are those of `open_text`.
    """
    suffix, file = text_suffix(path), Path(path).expanduser()
    if suffix in JSON_SUFFIXES:
        return True
    if suffix in TEXT_SUFFIXES or suffix in DATASET_FORMATS or not file.is_file():
        return False
    with open_text(file) as lines:
        line = lines.readline(FIRST_LINE)
    try:
        return isinstance(parse_json(line.decode().removeprefix(BOM), constants=True), dict)
    except ValueError:
        return False


def read_records(file: Path, decoder: TextDecoder) -> Iterator[tuple[str, Record]]:
    """Yields (where, record) of a file with one list of objects, or with an object on each line.

    Raises DamageError with file and line. Lines that are skipped are counted.
    """
    with open_text(file) as reader:
        head = reader.read(HEAD).removeprefix(BOM.encode()).lstrip()
    if head.startswith(b"["):
        # one value, which must be in memory as a whole
        text = decoder.decode(read_bytes(file), str(file))
        records = [] if text is None else _parse_json(text, file, 1)
        for number, record in enumerate(records, 1):
            yield _checked_record(record, f"{file}, record {number}")
        return
    offset = 0
    with open_text(file) as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}, line {number}"
            text = decoder.decode(line, where, offset=offset)
            offset += len(line)
            if text is None:
                continue
            if text.removeprefix(BOM).strip():
                yield _checked_record(_parse_json(text.rstrip("\r\n"), file, number), where)
            else:
                decoder.skipped[BLANK] += 1


def _parse_json(text: str, file: Path, first_line: int) -> Any:
    """Parses a JSON text that starts at line `first_line` of `file`.

    A byte order mark is removed; NaN and Infinity are accepted. Raises DamageError with the line.
    """
    try:
        return parse_json(text.removeprefix(BOM), constants=True)
    except ValueError as error:
        line, got = first_line, str(error)
        if isinstance(error, json.JSONDecodeError):
            line = first_line + error.lineno - 1
            got = f"{error.msg}, at column {error.colno}"
        what, where = "this is not JSON", f"{file}, line {line}"
        expected = "one list of objects, or an object on each line"
        raise DamageError(what, where=where, expected=expected, got=got) from error


def _checked_record(record: Any, where: str) -> tuple[str, Record]:
    """Checks a record, and returns (where, record). Raises DamageError unless it is an object."""
    if not isinstance(record, dict):
        what = "a record is not an object"
        expected = 'an object such as {"text": "..."}'
        raise DamageError(what, where=where, expected=expected, got=_json_type_name(record))
    return where, record


def _json_type_name(value: Any) -> str:
    """Names the type of a value as JSON does."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def read_dataset(name: str, split: str) -> Iterator[tuple[str, Record]]:
    """Yields (where, row) of a Hugging Face dataset, which is memory-mapped.

    `name` is a file of one of the `DATASET_FORMATS`, a folder of such files or one that
    `save_to_disk` wrote, or else the name of a dataset on the hub. Text that is not UTF-8 stays
    bytes, for `TextDecoder.decode_field`. Raises ConfigError if the dataset or the split is
    missing, MissingPackageError without the package.
    """
    with extra("hf"):
        import datasets  # type: ignore[import-untyped]
    # a path that exists is never taken for a name on the hub
    path = Path(name).expanduser()
    is_readable = path.is_dir() or (path.is_file() and text_suffix(path) in DATASET_FORMATS)
    if path.exists() and not is_readable:
        expected = f"a folder, a name, or a file named *{', *'.join(DATASET_FORMATS)}"
        raise ConfigError("not a dataset", where="data.path", expected=expected, got=name)
    try:
        # in Arrow's own format: the package's would raise for text that is not UTF-8
        rows = _open_dataset(datasets, name, path, split)
        for number, row in enumerate(rows.with_format("arrow"), 1):
            record = {column: _arrow_value(row.column(column)) for column in row.column_names}
            yield _checked_record(record, f"{name}, split {split}, row {number}")
    except (ConfigError, DamageError):
        raise
    except BaseException as error:  # of any kind, as the package raises for damaged files
        if not is_failure(error):
            raise
        what, where = "the dataset cannot be read", f"{name}, split {split}"
        expected = "a local file or folder, or a name on the hub"
        cause = error.__cause__ or error  # the package wraps the fault of a file
        got = f"{type(cause).__name__}: {cause}"
        raise ConfigError(what, where=where, expected=expected, got=got) from error


def _open_dataset(datasets: Any, name: str, path: Path, split: str) -> Any:
    """Opens one split of a dataset; errors are the package's own."""
    # a folder that `save_to_disk` wrote
    saved = ("dataset_dict.json", "dataset_info.json")
    if path.is_dir() and any((path / mark).exists() for mark in saved):
        found = datasets.load_from_disk(str(path))
        if not isinstance(found, datasets.DatasetDict):
            return found
        if split not in found:
            raise ValueError(f"no split '{split}': {did_you_mean(split, found)}")
        return found[split]
    # a file, a folder of files, or a name on the hub
    if path.is_file():
        arguments = {"path": DATASET_FORMATS[text_suffix(path)], "data_files": str(path)}
    elif path.exists():
        arguments = {"path": str(path)}
    else:
        arguments = {"path": name}
    # The package leaves its temporary files to the garbage collector, which warns of them.
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        return datasets.load_dataset(**arguments, split=split)


def _arrow_value(column: Any) -> Any:
    """Converts an Arrow column of one row to its Python value.

    Text that is not UTF-8 becomes bytes; a column with such text inside is returned as it is.
    """
    try:
        return column[0].as_py()
    except UnicodeDecodeError:
        if str(column.type).endswith("string"):
            return column.cast("binary")[0].as_py()
        return column
