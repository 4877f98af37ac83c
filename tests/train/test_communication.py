"""A run compares the program that it executes with the contract, and tells what it sends.

The runs share the compiled step of `conftest.py`, since they tell of a compiled program.
"""

import json
from types import SimpleNamespace

import pytest
from pages import Outline
from runs import records

import fsdp_jax as fsdp
from fsdp_jax.contract import running
from fsdp_jax.contract.contract import Contract
from fsdp_jax.contract.expected import ExpectedTraffic
from fsdp_jax.contract.running import summary, violation_warnings
from fsdp_jax.contract.violations import Violation
from fsdp_jax.hlo.collectives import Collective
from fsdp_jax.sharding.mesh import mesh_axes
from fsdp_jax.train import communication
from fsdp_jax.train.communication import CommunicationCheck, StepFigures, comparison
from fsdp_jax.train.report import render_report, report_run

DECLARED = ExpectedTraffic("a", "gather", "all-gather", "bfloat16", "data", 1000, 1, ((64, 64),))


def sent(count, kernels=0):
    shape = ((64, 64),)
    return Collective(
        "all-gather", "bfloat16", "data", 1, count, True, False, kernels, shape, ("a",), 0, "x"
    )


def contract(*collectives, expected=(DECLARED,), violations=(), unread=()):
    layout = SimpleNamespace(axes=mesh_axes(fsdp.make_mesh()))
    return Contract(expected, collectives, violations, layout, unread)


def test_the_line_has_bytes_their_ratio_and_the_share_hidden():
    assert summary(contract(sent(750, kernels=1), sent(250))) == (
        "sends 1000 B a step, 1.000 of declared; 75% beside compute"
    )
    assert summary(contract(sent(10), expected=())) == (
        "sends 10 B a step, none declared; 0% beside compute"
    )
    assert summary(contract()) == "sends nothing, declared 1000 B a step"
    assert summary(contract(expected=())) == "sends nothing, as declared"


def test_a_warning_has_the_path_the_bytes_the_cause_and_the_fix():
    cause = "the cast is after the gather: cast in the unit"
    found = [Violation("a/kernel", "gathered in float32", 2048, cause)]
    found += [Violation("", "an activation is sent", 0, "look")] * 6
    first, *_, more, unread = violation_warnings(
        contract(violations=found, unread=("a loop of unknown trips",)), "see the file"
    )
    assert first == (
        "warning: communication: gathered in float32\n"
        "  where:    a/kernel\n"
        "  got:      2 KiB a step above the declared\n"
        f"  fix:      {cause}"
    )
    assert more == "warning: communication: 2 more violations: see the file"
    assert unread == "warning: communication: not judged: a loop of unknown trips"


def test_a_run_on_virtual_devices_says_that_it_is_not_judged(run, capsys):
    assert run("cpu", "--train.steps", "8") == 0
    said = capsys.readouterr().out
    assert said.count("communication: not judged on CPU\n") == 1
    assert "planned against" not in said
    for name in ("communication.json", "measured.json"):
        assert not (run.directory / "cpu" / name).exists()


def test_a_run_on_accelerators_tells_what_its_program_sends(run, capsys, monkeypatch):
    """As if the virtual devices were accelerators."""
    for module in (communication, running):
        monkeypatch.setattr(module, "NOT_JUDGED", ())
    chip = fsdp.planner.HARDWARE["h100"]
    monkeypatch.setattr(communication, "hardware_of", lambda kind: chip)
    by_name = "--train.local_batch", "True"  # or XLA:CPU reduces a tied table twice
    assert run("judged", "--train.steps", "9", *by_name) == 0
    fields = json.loads((run.directory / "judged" / "communication.json").read_text())
    said = capsys.readouterr().out
    assert said.count(f"communication: {fields['summary']}\n") == 1
    assert "warning" not in said
    # What a plan says of this program, against the first steps; a CPU tells no memory.
    measured = json.loads((run.directory / "judged" / "measured.json").read_text())
    assert (measured["first_step"], measured["last_step"]) == (3, 7)
    times = [each["step_time_s"] for each in records(run.directory / "judged")]
    assert measured["measured"] == {"peak_bytes": None, "step_s": sorted(times[2:7])[2]}
    assert measured["planned"]["peak_bytes"] > 0
    assert measured["planned"]["step_s"] > 0
    figures = (StepFigures(**measured[name]) for name in ("planned", "measured"))
    assert said.count(f"planned against measured: {comparison(*figures)}\n") == 1
    assert fields["contract"]["holds"]
    ratio = fields["wire_bytes"] / fields["wire_bytes_limit"]
    assert f"{ratio:.3f} of declared" in fields["summary"]
    assert 0.98 < ratio < 1.02
    # The report of the run has it too.
    report = report_run(run.directory / "judged")
    page = Outline(render_report(report))
    assert "Communication of a step" in page.of("h3")
    assert any(fields["summary"] in text for text in page.of("p"))
    assert {"all-gather", "reduce-scatter"} <= set(page.of("td"))
    (run.directory / "judged" / "communication.json").write_text('{"collectives": [{}]}')
    (problem,) = report_run(run.directory / "judged").files.problems
    assert problem.startswith("communication.json: ")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("not a program", "communication: not judged: "),
        (None, "communication: not judged: TypeError: gone"),
    ],
)
def test_a_program_that_cannot_be_read_fails_no_run(text, line):
    def as_text():
        if text is None:
            raise TypeError("gone")
        return text

    device = SimpleNamespace(platform="gpu", device_kind="x")
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=[device]), shape={"data": 1})
    layout = SimpleNamespace(mesh=mesh, axes=SimpleNamespace(mesh=mesh))
    plan = SimpleNamespace(layout=layout, local_batch=True)
    check = CommunicationCheck(
        SimpleNamespace(plan=plan, compiled=SimpleNamespace(as_text=as_text))
    )
    check.wait(60)
    lines = list(check.news(lease=None))
    assert lines[0].startswith(line)
    assert list(check.news(lease=None)) == []


def test_planned_and_measured_are_shown_with_their_ratio():
    gib = 2**30
    assert comparison(StepFigures(10 * gib, 1.0), StepFigures(11 * gib, 1.5)) == (
        "peak memory 10 GiB planned, 11 GiB measured, ratio 1.10; "
        "a step 1 s planned, 1.5 s measured, ratio 1.50"
    )
    assert comparison(StepFigures(10 * gib, None), StepFigures(None, 1.5)) == (
        "peak memory 10 GiB planned, not measured; a step not planned, 1.5 s measured"
    )
