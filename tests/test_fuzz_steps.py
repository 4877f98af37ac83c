"""`scripts/fuzz_steps.py`: ten of its cases, and whether it finds a fault.

`make fuzz-steps` runs as many as one likes.
"""

import importlib
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
NAMES = ("cases", "models", "control", "run")


@pytest.fixture(scope="module")
def fuzz():
    """The modules of the script: by name, and its command as `fuzz["steps"]`."""
    sys.path.insert(0, str(SCRIPTS))
    names = {name: f"fuzz_steps_{name}" for name in NAMES} | {"steps": "fuzz_steps"}
    yield {name: importlib.import_module(module) for name, module in names.items()}
    sys.path.remove(str(SCRIPTS))
    for module in names.values():
        del sys.modules[module]


@pytest.mark.parametrize("number", range(10))
def test_a_step_trains_as_plain_flax_and_optax_do(fuzz, number):
    result = fuzz["run"].run_case(fuzz["cases"].draw_case(FIXED, number))
    assert result.outcome == "equal", result.text
