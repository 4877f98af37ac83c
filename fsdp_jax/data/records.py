"""Records with named fields: lines of `.jsonl`, the list in a `.json`, rows of a Hugging Face
dataset.

Every record comes with where it stands, so that whoever finds a fault in it can name the place.
"""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from fsdp_jax.data.files import JSON_SUFFIXES, Skipped, read_bytes, unreadable
from fsdp_jax.errors import ConfigError, did_you_mean, message

Record = dict[str, Any]
Invalid = Literal["error", "replace", "skip"]
"""What becomes of text that is not UTF-8: refused, mended with U+FFFD, or passed over. The last two are counted."""

INVALID, MENDED, BLANK = "not UTF-8", "with invalid UTF-8 replaced", "blank lines"


def is_json(path: str | Path) -> bool:
    """Whether a file holds records, by its name."""
    return str(path).endswith(JSON_SUFFIXES)


def read_json(file: Path, *, invalid: Invalid, skipped: Skipped) -> Iterator[tuple[str, Record]]:
    """(where, record) of each line of a `.jsonl`, or of each object in the list that a `.json` is.

    Raises ConfigError, with file and line, where it is not JSON, not an object, or not UTF-8.
    """
    if file.suffix == ".jsonl":
        yield from _lines(file, invalid, skipped)
        return
    text = text_of(read_bytes(file), str(file), invalid=invalid, skipped=skipped)
    if text is None:
        return
    records = _parse(text, file, 1)
    if not isinstance(records, list):
        fix = "write a list of objects, or one object a line in a .jsonl, or keep the file out of the folder"
        what, got = "A JSON file holds no records.", type(records).__name__
        raise ConfigError(
            message(what, where=str(file), expected="a list of objects", got=got, fix=fix)
        )
    for at, record in enumerate(records, 1):
        yield _checked(record, f"{file}, record {at}")


def read_dataset(name: str, split: str) -> Iterator[tuple[str, Record]]:
    """(where, row) of a Hugging Face dataset, memory-mapped: a local file or folder, or a name on
    their hub.

    `name`: a `.json`, `.jsonl`, `.parquet` or `.csv` file, a folder of such files or of
    `save_to_disk`, else a hub's. Text that is not UTF-8 is left as bytes, for `field_of` to judge.
    Raises ConfigError where the package is missing, or there is no such dataset or split.
    """
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        fix = "pip install 'fsdp_jax[hf]'"
        raise ConfigError(
            message("Hugging Face datasets are not installed.", where="data.kind", fix=fix)
        ) from error
    path = Path(name).expanduser()
    kinds = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
    if path.is_file() and path.suffix not in kinds:
        expected = f"a folder, a name, or a file named *{', *'.join(kinds)}"
        raise ConfigError(message("Not a dataset.", where="data.path", expected=expected, got=name))
    try:
        if path.is_dir() and any(
            (path / mark).exists() for mark in ("dataset_dict.json", "dataset_info.json")
        ):
            found = datasets.load_from_disk(str(path))
            if isinstance(found, datasets.DatasetDict):
                if split not in found:
                    raise ValueError(f"no split '{split}': {did_you_mean(split, found)}")
                found = found[split]
        elif path.is_file():
            # the package leaves its temporary files to the collector
            with warnings.catch_warnings(action="ignore", category=ResourceWarning):
                found = datasets.load_dataset(kinds[path.suffix], data_files=str(path), split=split)
        else:
            with warnings.catch_warnings(action="ignore", category=ResourceWarning):
                found = datasets.load_dataset(str(path) if path.exists() else name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        what, expected = (
            "The dataset cannot be read.",
            "a local file or folder, or a name on the hub",
        )
        cause = error.__cause__ or error  # the package wraps what a file has wrong
        got = f"{type(cause).__name__}: {cause}"
        raise ConfigError(
            message(what, where=f"{name}, split {split}", expected=expected, got=got)
        ) from error
    for at, row in enumerate(found.with_format("arrow"), 1):
        yield _checked(_of_arrow(row), f"{name}, split {split}, row {at}")


def _of_arrow(row: Any) -> Record:
    """A row of a table; of columns that cannot be read, the bytes of texts, and all others as they
    are.
    """
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError:
        return {name: _value(row.column(name)) for name in row.column_names}


def _value(column: Any) -> Any:
    try:
        return column[0].as_py()
    except UnicodeDecodeError:
        return column.cast("binary")[0].as_py() if str(column.type).endswith("string") else column


def field_of(
    record: Record,
    name: str,
    where: str,
    *,
    invalid: Invalid = "error",
    skipped: Skipped | None = None,
) -> str | None:
    """The text of a field; None where it is passed over.

    JSON can spell half a surrogate pair, which is a string and yet no text, and datasets can hold
    bytes: `invalid` says what becomes of them where they are not UTF-8. Raises ConfigError where
    the field is missing or no text.
    """
    if name not in record:
        what, got = "A record lacks a field.", ", ".join(map(repr, record)) or "an empty object"
        fix = did_you_mean(name, record) if record else ""
        raise ConfigError(
            message(what, where=where, expected=f"a field '{name}'", got=got, fix=fix)
        )
    value, where = record[name], f"{where}, field '{name}'"
    if isinstance(value, bytes):
        return text_of(
            value, where, invalid=invalid, skipped=Skipped() if skipped is None else skipped
        )
    if not isinstance(value, str):
        what = "A field is not text."
        raise ConfigError(message(what, where=where, expected="a string", got=json_kind(value)))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        if invalid == "error":
            got = f"half a surrogate pair, U+{ord(value[error.start]):04X}, at character {error.start}"
            fix = "mend the record, or set data.invalid to replace or skip"
            raise ConfigError(
                message("Text is not UTF-8.", where=where, expected="text", got=got, fix=fix)
            ) from error
        if skipped is not None:
            skipped[INVALID if invalid == "skip" else MENDED] += 1
        return (
            None
            if invalid == "skip"
            else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        )
    return value


def text_of(
    content: bytes, where: str, *, invalid: Invalid, skipped: Skipped, start: int = 0
) -> str | None:
    """UTF-8 as text; None where it is passed over.

    `start`: the offset of `content` in its file, in bytes, for the message. Raises ConfigError with
    `where` and the offset.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        if invalid == "error":
            got = f"byte 0x{content[error.start]:02x} at offset {start + error.start:,}"
            fix = "store the text as UTF-8, or set data.invalid to replace or skip"
            raise ConfigError(
                message("Text is not UTF-8.", where=where, expected="UTF-8", got=got, fix=fix)
            ) from error
        skipped[INVALID if invalid == "skip" else MENDED] += 1
        return None if invalid == "skip" else content.decode(errors="replace")


def would_be_ignored(key: str, got: object, *, where: str = "") -> ConfigError:
    """The refusal of a key of the data that what is read has no use for."""
    return ConfigError(
        message(
            f"{key} would be ignored", where=where or f"data.{key}", got=got, fix="leave it out"
        )
    )


def check_invalid(invalid: str) -> None:
    """Raises ConfigError where it is not one of `Invalid`."""
    if invalid not in get_args(Invalid):
        expected = ", ".join(get_args(Invalid))
        raise ConfigError(
            message("No such choice.", where="data.invalid", expected=expected, got=invalid)
        )


def _lines(file: Path, invalid: Invalid, skipped: Skipped) -> Iterator[tuple[str, Record]]:
    offset = 0
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file}, line {number}"
                text = text_of(line, where, invalid=invalid, skipped=skipped, start=offset)
                offset += len(line)
                if text is None:
                    continue
                if text.strip():
                    yield _checked(_parse(text.rstrip("\r\n"), file, number), where)
                else:
                    skipped[BLANK] += 1
    except OSError as error:
        raise unreadable(file, error) from error


def _parse(text: str, file: Path, line: int) -> Any:
    """`text` as JSON; `line` is the number of its first line. A byte order mark at the start is no
    part of it.
    """
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except (json.JSONDecodeError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError):
            line, got = line + error.lineno - 1, f"{error.msg}, at column {error.colno}"
        else:
            got = "nesting without end"
        where = f"{file}, line {line}"
        raise ConfigError(
            message("This is not JSON.", where=where, expected="an object", got=got)
        ) from error


def _checked(record: Any, where: str) -> tuple[str, Record]:
    if not isinstance(record, dict):
        what = "A record is not an object."
        raise ConfigError(
            message(
                what,
                where=where,
                expected='an object such as {"text": "..."}',
                got=json_kind(record),
            )
        )
    return where, record


def json_kind(value: Any) -> str:
    """What JSON calls a value."""
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        type(None): "null",
    }
    return kinds.get(
        type(value), "a number" if isinstance(value, int | float) else type(value).__name__
    )
