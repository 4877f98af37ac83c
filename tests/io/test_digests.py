"""Digests, and JSON that carries its own."""

import os

import pytest
import xxhash
from collected import collected
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_jax.io import digests
from fsdp_jax.io.json_text import parse_json

BODY = {"format": 1, "files": {"a": 0.5, "b": [None, "é"]}}


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(1, 64))
def test_a_digest_does_not_depend_on_the_block_size(tmp_path_factory, content, block):
    file = tmp_path_factory.mktemp("digest") / "file"
    file.write_bytes(content)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(digests, "BLOCK", block)
        found = digests.digest_file(file, flush=True)
    assert found == {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    os.unlink(file)


def test_every_flipped_bit_of_sealed_json_is_found():
    sealed = digests.sealed_text(BODY)
    assert digests.parse_sealed(sealed) == BODY | {"digest": digests.parse_sealed(sealed)["digest"]}
    content = bytearray(sealed.encode())
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"."):  # of several readers
            digests.parse_sealed(content.decode())
        content[bit // 8] ^= 1 << bit % 8


def test_json_that_readers_disagree_on_is_refused():
    cases = [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' twice in one object"),
        ("[" * 100_000, "too many nested lists"),
        ("[NaN]", "NaN, which is not a finite number"),
        ("[-Infinity]", "-Infinity, which is not a finite number"),
        ("[1e999]", "1e999, which is not a finite number"),
        ("9" * 5000, "Exceeds the limit"),
        ("{", "Expecting property name"),
    ]
    with collected() as case:
        for text, says in cases:
            with case(says), pytest.raises(ValueError, match=says):
                parse_json(text)


def test_constants_of_python_are_allowed_on_request():
    assert parse_json('{"a": [Infinity, 1.5, 2]}', constants=True) == {"a": [float("inf"), 1.5, 2]}
