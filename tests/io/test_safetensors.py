"""What is no folder of weights is refused; `fuzz` compares damaged files with the package."""

import json
import os

import numpy as np
import pytest
from collected import collected
from refusals import refused
from safetensors.numpy import save_file

from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.io.safetensors import INDEX, SINGLE, SafetensorsFolder

TENSORS = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.arange(5)}


@pytest.mark.parametrize("name", [SINGLE, INDEX])
def test_pipes_in_place_of_weights_are_refused(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(DamageError, match=rf"{name}(?s:.*)a pipe, not a file"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({}, {"error": DamageError, "what": "not an index"}),
        ({"weight_map": {"a": 3}}, {"error": DamageError, "what": "not an index"}),
        (
            {"weight_map": {"a": {"error": DamageError, "where": "./missing.safetensors"}}},
            {"error": DamageError, "where": "./missing.safetensors"},
        ),
        ({"weight_map": {"a": "x\0y"}}, {"error": DamageError, "what": "cannot be read"}),
        ({"weight_map": {"a": "\ud800"}}, {"error": DamageError, "what": "cannot be read"}),
        (
            {"weight_map": {"z": "part.safetensors"}},
            {
                "error": DamageError,
                "what": "not in its file",
                "where": "./part.safetensors",
                "expected": "z",
            },
        ),
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
    with refused("no weights there", error=ConfigError):
        SafetensorsFolder(tmp_path / "nowhere")
