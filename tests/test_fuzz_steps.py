"""`scripts/fuzz_steps.py`: ten of its cases, and whether it finds a fault.

`make fuzz-steps` runs as many as one likes.
"""

import importlib
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdp_jax.units.comm import ParamComm

SCRIPTS = Path(__file__).parents[1] / "scripts"
MODULES = ("cases", "models", "control", "run")
SEED, NUMBERS = 0, (1, 6, 10, 12, 16, 19, 26, 41, 47, 55)
# Settings that random draws seldom have: at least so many of 500 cases have each.
THIN, LEAST = (
    {
        "local_batch",
        "lora",
        "optimizer=muon",
        "optimizer=multi-steps",
        "optimizer=partition",
        "precision=int8",
        "another reduce dtype",
    },
    30,
)


@pytest.fixture(scope="module")
def fuzz():
    """The modules of the script."""
    sys.path.insert(0, str(SCRIPTS))
    names = {"steps": "fuzz_steps"} | {name: f"fuzz_steps_{name}" for name in MODULES}
    yield SimpleNamespace(**{name: importlib.import_module(each) for name, each in names.items()})
    sys.path.remove(str(SCRIPTS))
    for each in names.values():
        del sys.modules[each]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_step_trains_as_plain_flax_and_optax_do(fuzz, number):
    result = fuzz.run.run_case(fuzz.cases.draw_case(SEED, number))
    assert result.outcome == "equal", result.text
    assert {"loss", "grad_norm", "positions"} <= result.shares.keys()


def test_a_gradient_that_is_not_summed_over_replicas_is_found(fuzz, monkeypatch):
    monkeypatch.setattr(ParamComm, "other_axes", property(lambda self: ()))
    setting = fuzz.cases.Setting(
        devices=4, replica=2, strategy="hybrid_shard", min_size=1, units="Block", local_batch=True
    )
    net = fuzz.cases.Net(layers=2, norm="rms")
    case = fuzz.cases.Case(0, net, fuzz.cases.Loss(), "sgd", "float32", (setting,), steps=1)
    result = fuzz.run.run_case(case)
    assert result.outcome == "different"
    assert result.shares["loss"] < 1 < 1000 < result.shares["grad_norm"]


def test_a_seed_determines_all_and_no_setting_is_thin(fuzz):
    cases = [fuzz.cases.draw_case(SEED, number) for number in range(500)]
    assert cases[7] == fuzz.cases.draw_case(SEED, 7) != fuzz.cases.draw_case(SEED + 1, 7)
    found = Counter(label for case in cases for label in {*case.labels()})
    reduced = {label: n for label, n in found.items() if label.startswith("precision=reduce")}
    found["another reduce dtype"] = sum(reduced.values())
    assert {label for label in THIN if found[label] < LEAST} == set()
    assert {f"devices={n}" for n in range(1, 9)} <= found.keys()
    # What is printed of a case makes it again.
    assert eval(repr(cases[7]), vars(fuzz.cases)) == cases[7]


def test_outcomes_are_counted_by_setting_and_failures_are_printed(fuzz, capsys):
    def row(number, outcome, **result):
        case = {"case": number, "labels": ["lora"], "python": "Case()", "again": f"--case {number}"}
        return case | asdict(fuzz.run.Result(outcome, **result))

    rows = [
        row(0, "equal", worst=0.2, float32=2e-6),
        row(1, "refused", text="a rank of 9\n  where: lora"),
        row(2, "refused", text="a rank of 12"),
        row(3, "different", worst=3.0, text="loss: 3"),
    ]
    report = fuzz.steps.summary(rows, seed=5)
    assert report["settings"] == {
        "lora": {
            "compared": 2, "equal": 1, "refused": 2, "different": 1, "worst": 3.0, "float32": 2e-6
        }
    }  # fmt: skip
    assert report["refused"] == {"a rank of …": 2}
    assert [failure["again"] for failure in report["failed"]] == ["--case 3"]
    json.dumps(report)
    fuzz.steps.print_tables(report)
    assert "4 cases: 1 equal, 2 refused, 1 different" in capsys.readouterr().out
