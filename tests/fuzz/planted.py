"""`python -m fuzz.planted`: plants faults in each target, and prints what the harness reports.

An oracle that cannot fail is worth nothing: every kind of fault has to be seen in every target.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import dataclasses
import json
import time
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from fsdp_jax.cli import options
from fsdp_jax.train.config import Config
from fuzz.harness import Case, Running, Target, run_target
from fuzz.mutations import SENTINEL
from fuzz.targets import TARGETS

LIMITS = {"config": 3.0}  # seconds for one input of the target that does not answer
FAULTS = {
    "none": "",
    "another exception": "traceback",
    "another file": "outside",
    "other data": "disagreement",
    "two error blocks": "traceback",
    "the process dies": "traceback",
    "no answer": "hang",
}
"""{planted fault: the problem to be reported}, by the number of the input."""


class First(Random):
    """Draws the first of everything: the targets then make a valid input."""

    def random(self) -> float:
        return 0.0


def altered(data: Any) -> Any:
    """Returns plain data with something else in it."""
    if isinstance(data, Config):
        return dataclasses.replace(data, strategy=data.strategy + "x")
    if isinstance(data, dict):
        key = next(key for key in KEYS + tuple(data) if key in data)
        return data | {key: altered(data[key])}
    if isinstance(data, list | tuple):
        return (altered(data[0]), *data[1:]) if data else (None,)
    if isinstance(data, np.ndarray):
        return data + 1
    return data + type(data)("1")


KEYS = ("strategy", "embed", "embed/embedding", "layers", "size", "train", "step")
"""Of the targets' results, what the reference does not take from the reader."""


def planted(kind: type[Target]) -> Target:
    """Returns a target whose valid inputs meet the faults, one after another."""

    class Planted(kind):  # type: ignore[misc, valid-type]
        def start(self) -> None:
            super().start()
            # The command line calls no `read`.
            options.load_config_with = with_fault(options.load_config_with)

        def make(self, case: Case) -> None:
            case.rng = First()
            super().make(case)

        def read(self, case: Case) -> Any:
            return with_fault(super().read)(case)

    return Planted()


def with_fault(read: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a reader with the fault of the input that is being read."""

    def read_with_fault(*arguments: Any) -> Any:
        fault = list(FAULTS)[Running.case.number]
        if fault == "another exception":
            raise IndexError("planted")
        if fault == "another file":
            with open(f"{SENTINEL}/inner/file", "a") as file:
                file.write("x")
        if fault == "two error blocks":
            print("error: one", file=sys.stderr)
            raise ValueError("another")
        if fault == "the process dies":
            os.abort()
        if fault == "no answer":
            time.sleep(1000)
        result = read(*arguments)
        return altered(result) if fault == "other data" else result

    return read_with_fault


def main() -> None:
    for name, kind in TARGETS.items():
        numbers = range(len(FAULTS) if name in LIMITS else len(FAULTS) - 1)
        outcomes = run_target(planted(kind), 0, numbers, limit=LIMITS.get(name, 60.0))
        print(json.dumps({name: [(each.problem, each.text) for each in outcomes]}), flush=True)


if __name__ == "__main__":
    main()
