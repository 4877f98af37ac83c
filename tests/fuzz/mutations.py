"""Damaged and hostile inputs: bytes, trees of JSON, kinds of files.

A function that changes something returns what it did, so that a failing input says it.
"""

import copy
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fsdp_jax.io.digests import sealed_text
from fuzz.harness import Case

SENTINEL = "../sentinel"
"""A folder beside that of the input, whose files nobody may touch."""


RESEALED = "with a digest that fits"
"""In what was done to a file whose digests tell nothing."""


class Raw:
    """A text that stands in JSON as it is: duplicate keys, numbers and depths that Python lacks."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text[:40]


SCALARS = [
    None, True, False, 0, 1, -1, 2, 7, 255, 65536, 2**31, 2**32 - 1, 2**53 + 1, 2**63, 2**64,
    -(2**63), 10**30, 10**400, 0.5, -0.5, 1.0, 1e-320, 1e308, float("inf"), float("-inf"),
    float("nan"), "", " ", "0", "-1", "1e3", "nan", "inf", "None", "null", "true", "0x10", "1_000",
    "a/b", "..", f"{SENTINEL}/file", f"{SENTINEL}/link", "/dev/zero", "~", "*", "[", "\\", "(",
    "(a+)+$", "%s", "{}", "\0", "\n", "\r\n", "\t", "\x1b[31m", "\u2028", "\ufeff", "\u202e", "é",
    "e\u0301", "日本", "\ud800", "\U0001d518", "x" * 5000, "__class__", "error: x", [], {}, [[]],
    [None], [1, "a"], {"": {}}, {"a": None},
]  # fmt: skip
RAW = [
    "[" * 200 + "]" * 200, "[" * 100_000 + "]" * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000,
    "1" * 5000, "-" + "9" * 400, "1e999", "-0", "NaN", "Infinity", "1.0", '"\\ud800"',
    '"\\u0000"', '{"a": 1, "a": 2}',
]  # fmt: skip
HOSTILE = st.one_of(
    *[st.sampled_from(SCALARS).map(copy.deepcopy)] * 4,
    st.integers() | st.floats() | st.text(max_size=8),
    st.sampled_from(RAW).map(Raw),
)


# Bytes

PIECES = [
    b"", b"\0", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\n", b"\n\n", b"\t",
    b"\x1b[2J", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"-", b"9" * 30,
    b"\xe2\x80\xa8", b"\x85", b"\x0b", b"\x0c", b"# \n", b"null", b"NaN", b"true", b"&a ",
    b"*a", b"!!python/object/apply:os.system [true]", b"<<: ", b"%", b"\0" * 9, b"garbage",
]  # fmt: skip
NUMBERS = [0, 1, 2**16 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 100 << 20]
LENGTHS = [0, 0, 1, 1, 2, 8, 64, 512]


def damage_bytes(case: Case, content: bytes, *, lines: bool = False) -> bytes:
    """Flips a bit, or replaces a span of bytes by other bytes; with `lines` also one of lines."""
    if case.chance(30):
        flipped = bytearray(content or b"\0")
        flipped[_below(case, len(flipped))] ^= 1 << _below(case, 8)
        return bytes(flipped)

    # What is replaced is lines, a number that is aligned, or any span, to the end now and then.
    by_line = lines and case.chance(30)
    parts: Any = content.splitlines(keepends=True) if by_line else content
    start = _below(case, len(parts) + 1)
    stop = start + case.pick([0, 1] if by_line else [*LENGTHS, len(parts)])
    if not by_line and not lines and case.chance(20):
        start = start // 8 * 8
        raw = case.pick(NUMBERS).to_bytes(8, "little")[: case.pick([2, 4, 8])]
        return content[:start] + raw + content[start + len(raw) :]

    # What replaces it is a hostile piece, another span, or as many bytes of one kind.
    other = _below(case, len(parts) + 1)
    another = parts[other : other + (1 if by_line else case.pick(LENGTHS))]
    if by_line:
        return b"".join([*parts[:start], *another, *parts[stop:]])
    kind = case.pick(["nothing", "piece", "piece", "span", "fill"])
    piece = {
        "nothing": b"",
        "piece": case.pick(PIECES),
        "span": another * case.pick([1, 1, 2, 30]),
        "fill": case.pick([b"\0", b"\xff", b" ", b"0", b"9"]) * len(content[start:stop]),
    }[kind]
    return content[:start] + piece + content[stop:]


def _below(case: Case, limit: int) -> int:
    return case.draw(st.integers(0, limit - 1))


def damage_file(case: Case, path: Path, *, lines: bool = False) -> str:
    """Changes the bytes of a file once or a few times."""
    content = before = path.read_bytes()
    for _ in range(case.pick([1, 1, 1, 2, 4])):
        content = damage_bytes(case, content, lines=lines)
    path.write_bytes(content)
    pairs = enumerate(zip(before, content, strict=False))
    at = next((at for at, (old, new) in pairs if old != new), min(len(before), len(content)))
    return f"{path.name}: {before[at : at + 20]!r} became {content[at : at + 20]!r} at {at}"


# Trees of JSON


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (container, key) of every value in a tree."""
    entries: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        entries = list(tree.items())
    elif isinstance(tree, list):
        entries = list(enumerate(tree))
    for key, inner in entries:
        yield tree, key
        yield from _places(inner)


def damage_tree(case: Case, tree: Any) -> tuple[Any, str]:
    """Returns a tree with a value, key or entry changed, and what was done."""
    tree = copy.deepcopy(tree)
    places = list(_places(tree))
    if not places or case.chance(2):
        return case.draw(HOSTILE), "another root"
    container, key = case.pick(places)
    old = container[key]
    kinds = ["value", "value", "value", "variant", "variant", "copy", "remove", "twice"]
    kinds += ["rename", "add"] * isinstance(container, dict)
    kind = case.pick(kinds)
    if kind == "value":
        container[key] = case.draw(HOSTILE)
    elif kind == "variant":
        container[key] = case.pick(_variants(old))
    elif kind == "copy":
        other, at = case.pick(places)
        container[key] = copy.deepcopy(other[at])
    elif kind == "remove":
        del container[key]
    elif kind == "twice" and isinstance(container, list):
        container.insert(key, copy.deepcopy(old))
    elif kind == "twice":
        second = dumps(case.draw(st.just(old) | HOSTILE))
        container[key] = Raw(f"{dumps(old)}, {json.dumps(str(key))}: {second}")
    elif kind == "rename":
        name = str(key)
        names = [name.upper(), f"{name} ", f"{name}s", "", "\0", name[:-1], "é", "__proto__"]
        container[case.pick(names)] = container.pop(key)
    else:
        container[case.pick(["extra", "", "format", "a.b", "é", "\n"])] = case.draw(HOSTILE)
    return tree, f"{kind} {key}"


def _variants(old: Any) -> list[Any]:
    """Returns values near to one, or of another type."""
    variants = [str(old), [old], {"a": old}, [], {}, None, 0, "", True]
    if isinstance(old, int | float) and not isinstance(old, bool):
        variants += [old + 1, old - 1, -old, old * 2, old * 1000, float(old), bool(old)] * 2
    return variants


def dumps(tree: Any) -> str:
    """Returns JSON, in which a `Raw` stands as it is."""
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))}: {dumps(v)}" for k, v in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        return "[" + ", ".join(map(dumps, tree)) + "]"
    return json.dumps(tree)


def damage_json(case: Case, path: Path) -> str:
    """Changes the values, keys and entries of a JSON file, or its bytes."""
    try:
        tree = json.loads(path.read_text())
    except (ValueError, RecursionError):  # damaged before
        tree = None
    if tree is None or case.chance(30):
        return damage_file(case, path, lines=True)
    names = []
    for _ in range(case.pick([1, 1, 1, 2, 3])):
        tree, name = damage_tree(case, tree)
        names.append(name)
    path.write_text(dumps(tree))
    return f"{path.name}: {', '.join(names)}"


def reseal_json(case: Case, path: Path) -> str:
    """Changes the values, keys and entries of a sealed JSON file, and seals it again."""
    try:
        tree = json.loads(path.read_text())
    except (ValueError, RecursionError):  # damaged before
        return damage_file(case, path)
    tree, name = damage_tree(case, tree)
    text = dumps(tree)
    with suppress(ValueError, RecursionError):  # what Python cannot read stands as it is
        body = json.loads(text)
        if isinstance(body, dict):
            text = sealed_text(body)
    path.write_text(text, errors="surrogatepass")
    return f"{path.name}: {name}, {RESEALED}"


def damage_line(case: Case, path: Path, numbers: range) -> str:
    """Changes a record in one of the lines of a file."""
    lines = path.read_text().split("\n")
    number = case.pick(numbers)
    tree, name = damage_tree(case, json.loads(lines[number]))
    lines[number] = dumps(tree)
    path.write_text(case.pick(["\n", "\n", "\n", "\r\n", "\n\n"]).join(lines))
    return f"line {number + 1}: {name}"


# Files


def replace_file(case: Case, path: Path) -> str:
    """Puts something else in the place of a file, or takes it away."""
    root = next(parent for parent in path.parents if (parent / "sentinel").is_dir())
    up = os.path.relpath(root, path.parent)
    links = {
        "the sentinel": f"{up}/sentinel/file",
        "the sentinel's folder": f"{up}/sentinel",
        "itself": path.name,
        "nothing": "nothing",
        "/dev/zero": "/dev/zero",
        "/dev/null": "/dev/null",
        "a pipe": f"{path.name}.pipe",
    }
    kinds: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "an empty file": lambda: path.write_bytes(b""),
        "zeros": lambda: path.write_bytes(bytes(case.pick([1, 4096, 8 << 20]))),
        "a folder": path.mkdir,
        "a folder with a file": lambda: (path.mkdir(), (path / "file").write_text("x")),
        "a pipe": lambda: os.mkfifo(path),
        "a socket": lambda: _socket(path),
    }
    kind = case.pick([*kinds, *(f"a link to {name}" for name in links)])
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"{path.name}.away{len(os.listdir(path.parent))}"))
    else:
        path.unlink()
    if kind in kinds:
        kinds[kind]()
    else:
        path.symlink_to(links[kind.removeprefix("a link to ")])
    if kind == "a link to a pipe":
        os.mkfifo(f"{path}.pipe")
    return f"{path.name}: {kind} in its place"


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has at most 108 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def swap_files(case: Case, paths: list[Path]) -> str:
    """Swaps the contents of two files, or gives one the content of the other."""
    one, other = case.pick(paths), case.pick(paths)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    if case.chance(50):
        return f"{one.name}: the content of {other.name}"
    other.write_bytes(content)
    return f"{one.name} and {other.name}: swapped"
