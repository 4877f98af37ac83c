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
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_jax.cli import options
from fsdp_jax.train.config import Config
from fuzz.harness import Case, Running, Target, search
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
"""{planted fault: the problem to be reported}."""


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


KEYS = ("strategy", "embed", "layers", "size", "train", "step")
"""Of the targets' results, what the reference does not take from the reader."""


def planted(kind: type[Target], fault: str) -> Target:
    """Returns a target whose reader has a fault."""

    class Planted(kind):  # type: ignore[misc, valid-type]
        def start(self) -> None:
            super().start()
            # The command line calls no `read`.
            options.ConfigFile.load = with_fault(options.ConfigFile.load, fault)

        def read(self, case: Case) -> Any:
            return with_fault(super().read, fault)(case)

    return Planted()


def with_fault(read: Callable[..., Any], fault: str) -> Callable[..., Any]:
    """Returns a reader with a fault."""

    def read_with_fault(*arguments: Any) -> Any:
        if fault == "another exception":
            raise IndexError("planted")
        if fault == "a damaged input" and Running.case.done:
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
        found = []
        for fault in list(FAULTS)[: None if name in LIMITS else -1]:
            # The first input is the simplest, which is valid.
            outcome = search(planted(kind, fault), 1, seed=0, limit=LIMITS.get(name, 60.0))[-1]
            found.append((outcome.problem, outcome.text))
        print(json.dumps({name: found}), flush=True)
    target = planted(TARGETS["config.json"], "a damaged input")
    reduced = [search(target, 200, seed=1, keep=Path("kept"))[-1].done for _ in range(2)]
    print(json.dumps({"reduced": reduced}))


if __name__ == "__main__":
    main()
