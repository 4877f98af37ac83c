"""Stored programs for GPUs and TPUs: they are of today's steps, and the contract judges them.

The programs are read, so that no compiler is needed. One test compiles them again, since only the
compilers tell whether they would still make the same.
"""

from collections import Counter

import pytest
from bars import bars_have_every_byte
from stored_steps import (
    PROGRAMS,
    STEPS,
    STORE,
    asked_today,
    compiled,
    contract_of,
    stored,
)

from fsdp_jax.contract.running import summary, violation_warnings

HOLD = ("annotated", "hybrid", "float8", "hybrid_v5p", "prefetch_v5e")


def test_stored_programs_are_of_todays_steps():
    """What the library asks XLA to send is what the stored programs were compiled from."""
    assert {path.name for path in PROGRAMS.iterdir()} == {f"{name}.json.xz" for name in STEPS}
    other = [name for name in STEPS if asked_today(name) != stored(name)[1:]]
    assert not other, f"the library asks XLA for something else now: {STORE} {' '.join(other)}"


@pytest.mark.long
@pytest.mark.needs_plugin
@pytest.mark.filterwarnings("ignore:compute=:fsdp_jax.SlowerWarning")  # of modules in float32
@pytest.mark.parametrize("name", STEPS)
def test_the_compiler_makes_the_stored_program(name):
    again = f"XLA makes another program now: {STORE} {name}"
    new, old = compiled(name), stored(name)
    contracts = contract_of(name, new.program), contract_of(name)
    rows = [Counter(map(essentials, contract.rows())) for contract in contracts]
    assert rows[0] == rows[1], again
    assert str(contracts[0]) == str(contracts[1]), again
    memory = [sum(each.program.report.spaces.values()) for each in (new, old)]
    assert memory[0] == pytest.approx(memory[1], rel=0.01), again


def essentials(row):
    return tuple(row[key] for key in ("op", "dtype", "axis", "count", "bytes"))


@pytest.mark.parametrize("name", HOLD)
def test_the_contract_holds_on_chips(name):
    contract = contract_of(name)
    assert contract.holds, contract
    assert contract.wire_bytes <= 1.02 * contract.wire_bytes_limit
    bars_have_every_byte(contract)
    # As a run of this program says it.
    assert list(violation_warnings(contract, "more")) == []
    assert f"{contract.wire_bytes / contract.wire_bytes_limit:.3f} of declared" in summary(contract)
    replicated = {"replica", "replica+data"} if "hybrid" in name else set()
    assert {row["axis"] for row in contract.rows()} == {"data"} | replicated


def test_kernels_travel_in_float8():
    sent = [
        row
        for row in contract_of("float8").rows()
        if row["op"] == "all-gather" and "blocks/up/kernel" in row["where"]
    ]
    assert {row["dtype"] for row in sent} == {"float8_e4m3fn"}
    kernels = 3 * 2 * 4 * 128**2  # elements
    # One byte each in forward and backward; the last layer's are still there in backward.
    assert sum(row["bytes"] for row in sent) == (2 * kernels - kernels // 3) * 7 // 8


def test_gathers_in_float32_without_pin_and_fence_are_named(tmp_path):
    contract = contract_of("unfenced")
    [violation] = contract.violations
    assert violation.path == "head/kernel"
    # 128 x 512 elements, two bytes more each, 7/8 of them
    what = "gathered in float32, declared bfloat16: +112 KiB per step"
    assert f"head/kernel: {what}; the cast moved past the gather" in str(violation)
    assert not contract.holds
    (head,) = [bar for bar in bars_have_every_byte(contract).bars if bar.name == "head/kernel"]
    assert head.cells == ("all-gather float32; reduce-scatter bfloat16", "dtype")
    contract.save(tmp_path / "contract.html")
    page = (tmp_path / "contract.html").read_text()
    assert "DOES NOT HOLD" in page
    assert what in page
    assert 'class="fsdp-view bars"' in contract._repr_html_().replace("'", '"')
    # A run of this program warns of it.
    (warning,) = violation_warnings(contract, "more")
    assert warning.startswith("warning: communication: gathered in float32, declared bfloat16\n")
    assert "\n  got:      112 KiB a step above the declared\n" in warning
    assert "\n  fix:      the cast moved past the gather" in warning


def test_a_module_of_float32_is_reduced_in_float32():
    contract = contract_of("pinned")
    assert {row.dtype for row in contract.expected} == {"bfloat16"}
    wide = {each.path: str(each) for each in contract.violations}
    assert set(wide) == {"embed/embedding", "middle/linear/kernel"}
    for path, line in wide.items():
        size = {"embed/embedding": "56 KiB", "middle/linear/kernel": "28 KiB"}[path]
        module = path.rpartition("/")[0]
        what = f"{path}: reduced in float32, declared bfloat16: +{size} per step"
        assert f"{what}; '{module}'" in line
        assert "make its model, or it, with dtype=jnp.bfloat16" in line
        assert f"keep_float32=('{module}',)" in line


def test_a_lookup_may_send_tokens_in_place_of_its_gradient():
    """64 tokens of 64 features and their ids go to every device's rows of a table of 4096."""
    contract = contract_of("few_tokens")
    assert contract.holds, contract
    assert contract.wire_bytes < contract.wire_bytes_limit
    assert contract.choices == [
        "embed/embedding: its gradient not reduced; XLA computed with its shards and moved "
        "14.2 KiB of activations per step in place of 896 KiB"
    ]
    assert contract.choices[0] in str(contract)


def advised_rules(contract, cause):
    """The rules that a violation of this cause gives to the user, as they are written in it."""
    line = next(line for line in map(str, contract.violations) if cause in line)
    return eval(line.partition("rules=")[2])


def test_the_gradient_of_a_lookup_names_the_rule_that_mends_it():
    """A table of 4096 rows, sharded by its rows, looked up at 16 x 128 positions."""
    before, after = contract_of("tied"), contract_of("tied_by_features")
    rules = advised_rules(before, "gradient of a lookup")
    assert rules == STEPS["tied_by_features"].make.keywords["rules"]
    excess = [each.wire_bytes - each.wire_bytes_limit for each in (before, after)]
    assert excess[1] < excess[0] / 6, (before, after)  # an eighth, and the ids


def test_a_stack_taken_apart_names_the_rule_that_mends_it():
    before, after = contract_of("experts"), contract_of("experts_by_columns")
    rules = advised_rules(before, "a stack of such arrays")
    assert rules == STEPS["experts_by_columns"].make.keywords["rules"]
    assert after.holds, after
    assert after.wire_bytes < before.wire_bytes
