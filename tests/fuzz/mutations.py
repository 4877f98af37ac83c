"""Damaged and hostile inputs, drawn from a `random.Random`: bytes, trees of JSON, kinds of files.

A mutation is named in what it returns, so that a failing input says what was done to it.
"""

import copy
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

SENTINEL = "../sentinel"
"""A folder beside that of the input, whose files nobody may touch."""


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
    Raw("[" * 200 + "]" * 200),
    Raw("[" * 100_000 + "]" * 100_000),
    Raw('{"a":' * 50_000 + "1" + "}" * 50_000),
    Raw("1" * 5000),
    Raw("-" + "9" * 400),
    Raw("1e999"),
    Raw("-0"),
    Raw("NaN"),
    Raw("Infinity"),
    Raw("1.0"),
    Raw('"\\ud800"'),
    Raw('"\\u0000"'),
    Raw('{"a": 1, "a": 2}'),
]


def value(rng: Random) -> Any:
    """Returns a hostile value."""
    return copy.deepcopy(rng.choice(SCALARS if rng.random() < 0.85 else RAW))


# Bytes


def _span(rng: Random, size: int) -> tuple[int, int]:
    start = rng.randrange(size + 1)
    return start, min(size, start + rng.choice([1, 1, 2, 8, 64, 512]))


def flip(content: bytearray, rng: Random) -> None:
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def truncate(content: bytearray, rng: Random) -> None:
    del content[rng.randrange(len(content) + 1) :]


def remove(content: bytearray, rng: Random) -> None:
    start, stop = _span(rng, len(content))
    del content[start:stop]


def repeat(content: bytearray, rng: Random) -> None:
    start, stop = _span(rng, len(content))
    content[stop:stop] = content[start:stop] * rng.choice([1, 1, 2, 30])


def insert(content: bytearray, rng: Random) -> None:
    pieces = [
        b"\0", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\n", b"\n\n", b"\t",
        b"\x1b[2J", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"-", b"9" * 30,
        b"\xe2\x80\xa8", b"\x85", b"\x0b", b"\x0c", b"# \n", b"null", b"NaN", b"true", b"&a ",
        b"*a", b"!!python/object/apply:os.system [true]", b"<<: ", b"%",
    ]  # fmt: skip
    start, _ = _span(rng, len(content))
    content[start:start] = rng.choice(pieces)


def overwrite(content: bytearray, rng: Random) -> None:
    start, stop = _span(rng, len(content))
    fill = rng.choice([b"\0", b"\xff", b" ", b"0", b"9", bytes([rng.randrange(256)])])
    content[start:stop] = fill * (stop - start)


def swap_lines(content: bytearray, rng: Random) -> None:
    lines = content.split(b"\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    content[:] = b"\n".join(lines)


def repeat_line(content: bytearray, rng: Random) -> None:
    lines = content.split(b"\n")
    line = rng.choice(lines)
    lines.insert(rng.randrange(len(lines) + 1), line)
    content[:] = b"\n".join(lines)


def remove_line(content: bytearray, rng: Random) -> None:
    lines = content.split(b"\n")
    del lines[rng.randrange(len(lines))]
    content[:] = b"\n".join(lines)


def append(content: bytearray, rng: Random) -> None:
    content += rng.choice(
        [b"\0" * 9, b"garbage", b"\n{}", b"\n", rng.randbytes(40), bytes(content[-64:])]
    )


def number(content: bytearray, rng: Random) -> None:
    """Writes an extreme integer, little-endian, over some bytes."""
    raw = rng.choice([0, 1, 2**16 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 100 << 20])
    start, _ = _span(rng, len(content))
    if rng.random() < 0.5:
        start = start // 8 * 8
    size = rng.choice([2, 4, 8])
    content[start : start + size] = (raw % (1 << 8 * size)).to_bytes(size, "little")


IN_BYTES = [flip, flip, flip, truncate, remove, repeat, insert, insert, overwrite, append, number]
IN_TEXT = [*IN_BYTES[:-1], swap_lines, repeat_line, repeat_line, remove_line]


def mutate_file(rng: Random, path: Path, how: list[Callable[[bytearray, Random], None]]) -> str:
    """Changes the bytes of a file once or a few times."""
    content = bytearray(path.read_bytes())
    names = []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        change = rng.choice(how)
        change(content, rng)
        names.append(change.__name__)
    path.write_bytes(content)
    return f"{path.name}: {', '.join(names)}"


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


def mutate_tree(rng: Random, tree: Any) -> tuple[Any, str]:
    """Returns a tree with a value, key or entry changed, and what was done."""
    tree = copy.deepcopy(tree)
    places = list(_places(tree))
    if not places or rng.random() < 0.02:
        return value(rng), "another root"
    container, key = rng.choice(places)
    kind = rng.choice(
        [
            "value",
            "value",
            "value",
            "number",
            "type",
            "remove",
            "rename",
            "copy",
            "swap",
            "wrap",
            "twice",
            "add",
        ]
    )
    old = container[key]
    is_dict = isinstance(container, dict)
    if kind == "number" and isinstance(old, int | float) and not isinstance(old, bool):
        container[key] = rng.choice(
            [old + 1, old - 1, -old, old * 2, old * 1000, float(old), str(old), 0, [old], bool(old)]
        )
    elif kind == "type":
        container[key] = rng.choice([str(old), [old], {"a": old}, [], {}, None, 0, "", True])
    elif kind == "remove":
        del container[key]
    elif kind == "rename" and is_dict:
        renamed = rng.choice(
            [str(key).upper(), f"{key} ", f"{key}s", "", "\0", str(key)[:-1], "é", "__proto__"]
        )
        container[renamed] = container.pop(key)
    elif kind == "copy":
        container[key] = copy.deepcopy(_get(rng.choice(places)))
    elif kind == "swap":
        other, at = rng.choice(places)
        if not _contains(old, other) and not _contains(other[at], container):
            container[key], other[at] = other[at], old
    elif kind == "wrap":
        container[key] = [old]
    elif kind == "twice" and is_dict:
        second = dumps(rng.choice([old, value(rng)]))
        container[key] = Raw(f"{dumps(old)}, {json.dumps(str(key))}: {second}")
    elif kind == "twice" and isinstance(container, list):
        container.insert(key, copy.deepcopy(old))
    elif kind == "add" and is_dict:
        container[rng.choice(["extra", "", "format", "a.b", "é", "\n"])] = value(rng)
    else:
        container[key] = value(rng)
    return tree, f"{kind} {key}"


def _get(place: tuple[Any, Any]) -> Any:
    return place[0][place[1]]


def _contains(tree: Any, container: Any) -> bool:
    return tree is container or any(_get(place) is container for place in _places(tree))


def dumps(tree: Any) -> str:
    """Returns JSON, in which a `Raw` stands as it is."""
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))}: {dumps(v)}" for k, v in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        return "[" + ", ".join(map(dumps, tree)) + "]"
    return json.dumps(tree)


def mutate_json(rng: Random, path: Path) -> str:
    """Changes the values, keys and entries of a JSON file, or its bytes."""
    try:
        tree = json.loads(path.read_text())
    except ValueError:  # damaged before
        tree = None
    if tree is None or rng.random() < 0.3:
        return mutate_file(rng, path, IN_TEXT)
    names = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        tree, name = mutate_tree(rng, tree)
        names.append(name)
    path.write_text(dumps(tree))
    return f"{path.name}: {', '.join(names)}"


# Files


def replace_file(rng: Random, path: Path) -> str:
    """Puts something else in the place of a file, or takes it away."""
    kinds = {
        "nothing": lambda: None,
        "an empty file": lambda: path.write_bytes(b""),
        "a folder": path.mkdir,
        "a folder with a file": lambda: (path.mkdir(), (path / "file").write_text("x")),
        "a pipe": lambda: os.mkfifo(path),
        "a socket": lambda: _socket(path),
        "a link to the sentinel": lambda: path.symlink_to(
            path.parent / _up(path) / "sentinel/file"
        ),
        "a link to the sentinel's folder": lambda: path.symlink_to(
            path.parent / _up(path) / "sentinel"
        ),
        "a link to itself": lambda: path.symlink_to(path.name),
        "a link to nothing": lambda: path.symlink_to("nothing"),
        "a link to /dev/zero": lambda: path.symlink_to("/dev/zero"),
        "a link to /dev/null": lambda: path.symlink_to("/dev/null"),
        "a link to a pipe": lambda: (os.mkfifo(f"{path}.pipe"), path.symlink_to(f"{path}.pipe")),
        "zeros": lambda: path.write_bytes(bytes(rng.choice([1, 4096, 8 << 20]))),
    }
    kind = rng.choice(list(kinds))
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(path.name + ".away"))
    else:
        path.unlink()
    kinds[kind]()
    return f"{path.name}: {kind} in its place"


def _up(path: Path) -> str:
    """Returns the way from a file's folder to the root of all inputs, which has the sentinel."""
    root = next(parent for parent in path.parents if (parent / "sentinel").is_dir())
    return os.path.relpath(root, path.parent)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has at most 108 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def swap_files(rng: Random, paths: list[Path]) -> str:
    """Swaps the names of two files, or gives one the content of the other."""
    one, other = rng.sample(paths, 2) if len(paths) > 1 else (paths[0], paths[0])
    if rng.random() < 0.5:
        one.write_bytes(other.read_bytes())
        return f"{one.name}: the content of {other.name}"
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return f"{one.name} and {other.name}: swapped"
