"""Our reader and the safetensors package accept the same files, and read the same from them."""

import json
import os
import random

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save_file

from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.io.boxes import full_box
from fsdp_jax.io.safetensors import INDEX, SINGLE, SafetensorsFolder

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(5),
    "nothing": np.zeros((0, 2), np.float16),
    "scalar": np.ones((), np.int8),
    "half": np.ones((2, 3), ml_dtypes.bfloat16),
}
NUMBERS = (-1, 0, 1, 2, 7, 2**31, 2**63, 2**64, 1.0, 1e308, float("nan"), True, None, "1", [], {})


def read(folder):
    """Returns {name: shape, dtype and bytes}."""
    with SafetensorsFolder(folder) as tensors:
        return {
            name: (each.shape, str(each.dtype), each.read(full_box(each.shape)).tobytes())
            for name, each in tensors.items()
        }


def read_by_the_package(file):
    with safe_open(file, "numpy") as tensors:
        arrays = {name: tensors.get_tensor(name) for name in tensors.offset_keys()}
    deserialize(file.read_bytes())
    return {name: (each.shape, str(each.dtype), each.tobytes()) for name, each in arrays.items()}


def mutated_header(header, numbers):
    """Returns the header with one value of one tensor changed, removed or added."""
    body = json.loads(header)
    name = numbers.choice(sorted(body))
    entry, key = body[name], numbers.choice(["dtype", "shape", "data_offsets", "more"])
    match numbers.randrange(4):
        case 0:
            entry[key] = numbers.choice(NUMBERS)
        case 1 if isinstance(entry.get(key), list) and entry[key]:
            entry[key][numbers.randrange(len(entry[key]))] = numbers.choice(NUMBERS)
        case 2:
            entry.pop(key, None)
        case _:
            body[numbers.choice(["a", "b", "copy"])] = entry
    return json.dumps(body).encode()


def mutated(content, numbers):
    """Returns a file with its header, some bits or its length changed."""
    size = int.from_bytes(content[:8], "little")
    damaged = bytearray(content)
    match numbers.randrange(5):
        case 0:
            del damaged[numbers.randrange(len(damaged)) :]
        case 1:
            damaged += b"\0" * numbers.randrange(1, 9)
        case 2:
            damaged[numbers.randrange(8 + size)] ^= 1 << numbers.randrange(8)
        case _:
            header = mutated_header(content[8 : 8 + size], numbers)
            damaged = len(header).to_bytes(8, "little") + header + content[8 + size :]
    return bytes(damaged)


def test_what_the_package_refuses_is_refused_and_what_is_read_is_equal(tmp_path):
    file = tmp_path / SINGLE
    save_file(TENSORS, file, metadata={"format": "pt"})
    content = file.read_bytes()
    assert read(tmp_path) == read_by_the_package(file)
    numbers = random.Random(0)
    accepted = 0
    for _ in range(400):
        file.write_bytes(mutated(content, numbers))
        try:
            expected = read_by_the_package(file)
        except (SafetensorError, OSError, ValueError, KeyError, AttributeError, TypeError):
            expected = None
        if expected is None:
            with pytest.raises(DamageError, match=rf"cannot be read\n +where: +{file}\n"):
                read(tmp_path)
        else:
            assert read(tmp_path) == expected
            accepted += 1
    assert 20 < accepted < 200


@pytest.mark.parametrize("name", [SINGLE, INDEX])
def test_pipes_in_place_of_weights_are_refused(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(DamageError, match=rf"{name}(?s:.*)a pipe, not a file"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({}, "not an index"),
        ({"weight_map": {"a": 3}}, "not an index"),
        ({"weight_map": {"a": "missing.safetensors"}}, "missing.safetensors"),
        ({"weight_map": {"a": "x\0y"}}, "cannot be read"),
        ({"weight_map": {"a": "\ud800"}}, "cannot be read"),
        ({"weight_map": {"z": "part.safetensors"}}, r"not in its file\n.*part.*\n +expected: z\n"),
    ],
)
def test_an_index_that_names_what_is_not_there_is_refused(tmp_path, index, says):
    save_file(TENSORS, tmp_path / "part.safetensors")
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(DamageError, match=says):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("text", ['{"weight_map": {}, "weight_map": {}}', "[" * 10**5, "[NaN]"])
def test_an_index_that_is_no_strict_json_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(DamageError, match=rf"not an index(?s:.*){INDEX}"):
        SafetensorsFolder(tmp_path)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no weights there"):
        SafetensorsFolder(tmp_path / "nowhere")
