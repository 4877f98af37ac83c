"""The faults that `scripts/mutation_check.py` plants fit the code as it is now."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "mutation_check.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("mutation_check", SCRIPT)
    module = sys.modules["mutation_check"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutation_check"]


def test_every_fault_has_one_place_and_its_tests(script):
    script.check_texts(script.FAULTS, script.ROOT)
    assert len(script.FAULTS) >= 10


def test_a_fault_whose_text_is_not_there_is_an_error(script, tmp_path):
    (tmp_path / "code.py").write_text("a = 1\na = 1\n")
    faults = [script.Fault(old, "code.py", old, "", ("code.py",)) for old in ("a = 1", "b = 1")]
    with pytest.raises(ValueError, match="found 2 times in code") as error:
        script.check_texts(faults, tmp_path)
    assert "found 0 times" in str(error.value)
