"""What is no folder of weights is refused; `fuzz` compares damaged files with the package."""

import json
import os

import numpy as np
from collected import collected
from refusals import fields, refused
from safetensors.numpy import save_file

from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.io.safetensors import INDEX, SINGLE, SafetensorsFolder

TENSORS = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.arange(5)}


def test_pipes_in_place_of_weights_are_refused(tmp_path):
    with collected() as case:
        for number, name in enumerate([SINGLE, INDEX]):
            folder = tmp_path / str(number)
            folder.mkdir()
            with case(name):
                os.mkfifo(folder / name)
                with refused(error=DamageError, where=f"{folder}/{name}", got="a pipe, not a file"):
                    SafetensorsFolder(folder)


def test_an_index_that_names_what_is_not_there_is_refused(tmp_path):
    cases = [
        ({}, {"what": "not an index"}),
        ({"weight_map": {"a": 3}}, {"what": "not an index"}),
        ({"weight_map": {"a": "missing.safetensors"}}, {"where": "./missing.safetensors"}),
        ({"weight_map": {"a": "x\0y"}}, {"what": "cannot be read"}),
        ({"weight_map": {"a": "\ud800"}}, {"what": "cannot be read"}),
        (
            {"weight_map": {"z": "part.safetensors"}},
            {"what": "not in its file", "where": "./part.safetensors", "expected": "z"},
        ),
    ]
    with collected() as case:
        for number, (index, says) in enumerate(cases):
            folder = tmp_path / str(number)
            folder.mkdir()
            with case(index):
                save_file(TENSORS, folder / "part.safetensors")
                (folder / INDEX).write_text(json.dumps(index))
                with refused(error=DamageError, **fields(says, folder)):
                    SafetensorsFolder(folder)


def test_an_index_that_is_no_strict_json_is_refused(tmp_path):
    cases = ['{"weight_map": {}, "weight_map": {}}', "[" * 10**5, "[NaN]"]
    with collected() as case:
        for text in cases:
            with case(text[:50]):
                (tmp_path / INDEX).write_text(text)
                with refused("not an index", error=DamageError, where=str(tmp_path / INDEX)):
                    SafetensorsFolder(tmp_path)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with refused("no weights there", error=ConfigError):
        SafetensorsFolder(tmp_path / "nowhere")
