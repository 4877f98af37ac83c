"""The README's first example runs as it is printed, and is as short as it says."""

import re
from pathlib import Path

import numpy as np
import optax
import pytest
from reference import CASES, gpt

from fsdp_jax.models.gpt import Block

pytestmark = pytest.mark.core

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks():
    return re.findall(r"```python\n(.*?)```", README, flags=re.S)


def test_the_first_example_trains(capsys):
    example, loss, *_ = blocks()
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    names = {"optax": optax, "Block": Block, "MyTransformer": lambda rngs: gpt(True)(rngs)}
    exec(loss, names)
    case = CASES["nnx-gpt-scanned"]
    names["batches"] = [{"tokens": case.batch(i)["tokens"]} for i in range(3)]
    exec(example, names)
    assert np.isfinite(float(names["metrics"]["loss"]))
    assert int(names["state"].step) == 3
    assert "full_shard on replica=1 x data=8" in capsys.readouterr().out


def test_the_first_screen_says_what_it_is_and_names_both_commands():
    screen = README.splitlines()[:15]
    assert any("Fully Sharded Data Parallel for JAX and Flax" in line for line in screen)
    assert any(line.startswith("make quickstart") for line in screen)
    assert any(line.startswith("make test") for line in screen)
    assert "@@" not in README
