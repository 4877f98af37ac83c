"""docs/design/other-libraries.md names all of `fsdp_jax/compat/`, with tests that exist."""

import ast
import re
from pathlib import Path

import pytest
from mend import relied_on

TESTS = Path(__file__).parent
ROOT = TESTS.parents[1]
TABLE = (ROOT / "docs" / "design" / "other-libraries.md").read_text()
ROWS = [line.split(" | ") for line in TABLE.splitlines() if line.startswith("|")][2:]


def public_names(module):
    """Functions, classes and constants of a module."""
    for node in ast.parse(module.read_text()).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names = [getattr(node, "name", None), *(getattr(each, "id", None) for each in targets)]
        yield from (f"{module.stem}.{name}" for name in names if name and name[0] != "_")


def test_every_public_name_is_in_the_table():
    modules = sorted((ROOT / "fsdp_jax" / "compat").glob("*.py"))
    names = [name for module in modules for name in public_names(module)]
    assert "error_texts.NO_AXIS" in names
    assert sorted(row[3].strip("`") for row in ROWS) == sorted(names)


def test_every_test_in_the_table_exists():
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", TABLE)
    assert len(named) >= len(ROWS)
    assert all("::" in row[4] for row in ROWS)
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not re.search(rf"^def {test}\(", (TESTS / file).read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_a_failure_says_what_to_mend():
    with (
        pytest.raises(pytest.fail.Exception, match=r"jax \S+ changed.*\nmend: fsdp_jax\.compat\.x"),
        relied_on("jax", "x", "nothing"),
    ):
        raise KeyError
