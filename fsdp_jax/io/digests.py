"""Digests of files, and JSON that carries a digest of itself: any flipped bit is found.

The digest is xxh3 of 128 bits, which is computed about as fast as memory is read. It protects from
accidents, not from attacks: anyone who can write a file can write its digest too.
"""

import json
import os
from typing import Any

import xxhash

from fsdp_jax.io.atomic import fsync_file
from fsdp_jax.io.json_text import parse_json
from fsdp_jax.io.regular_files import open_regular

Json = dict[str, Any]

BLOCK = 4 << 20  # bytes read at a time
DIGEST = "digest"  # key of a JSON object's own digest


def digest_file(
    path: str | os.PathLike[str], *, flush: bool = False, follow_link: bool = True
) -> Json:
    """Computes {bytes, xxh3_128} of a regular file. `flush` also waits until it is on disk.

    Raises OSError, as `open_regular` does. Other threads run meanwhile.
    """
    state = xxhash.xxh3_128()
    size = 0
    with open_regular(path, follow_link=follow_link) as file:
        if flush:
            fsync_file(file)
        # Clearing a whole block takes longer than digesting a small file.
        block = memoryview(bytearray(min(BLOCK, os.fstat(file.fileno()).st_size + 1)))
        while count := file.readinto(block):
            state.update(block[:count])
            size += count
    return {"bytes": size, "xxh3_128": state.hexdigest()}


def digest_bytes(content: bytes | memoryview) -> Json:
    """Computes the {bytes, xxh3_128} of a file with this content."""
    return {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}


def digest_json(value: Json) -> str:
    """Computes the xxh3_128, in hexadecimal, of an object's JSON with sorted keys."""
    return xxhash.xxh3_128_hexdigest(_json_text(value).encode())


def sealed_text(body: Json) -> str:
    """Formats `body` as JSON with its own digest under the key `digest`."""
    # The digest is of all else: it cannot be a part of what it is computed from.
    body = {key: value for key, value in body.items() if key != DIGEST}
    return _json_text(body | {DIGEST: digest_json(body)})


def parse_sealed(text: str) -> Json:
    """Parses a text of `sealed_text`, and returns its object, digest included.

    Raises ValueError unless it is such a text, byte for byte.
    """
    body = parse_json(text, constants=True)
    # The text is compared: a flipped bit in white space is a flipped bit.
    if not isinstance(body, dict) or sealed_text(body) != text:
        raise ValueError("its own digest does not fit it")
    return body


def _json_text(body: Json) -> str:
    """Formats the JSON text that is digested: equal objects have equal texts."""
    # Indented, so that a user can read a manifest.
    return json.dumps(body, indent=1, sort_keys=True) + "\n"
