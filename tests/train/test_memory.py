"""What a run says of memory and of its release, before and after it compiles.

The runs share the compiled step of `conftest.py`.
"""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import pytest
from refusals import refused

from fsdp_jax.checkpoint import Lease
from fsdp_jax.errors import OutOfMemoryError
from fsdp_jax.planner import HARDWARE
from fsdp_jax.planner.fixes import Advice
from fsdp_jax.planner.machines import topology as machine_topology
from fsdp_jax.planner.out_of_memory import MemoryExplanation, Remaking
from fsdp_jax.planner.settings import StepSettings
from fsdp_jax.step import known_defects
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.step.known_defects import KnownDefect
from fsdp_jax.train import memory
from fsdp_jax.train.build import build
from fsdp_jax.train.config_file import load_config
from fsdp_jax.train.planning import propose_fixes_on, remaking_of

WORDS = "--model.layers 4 --model.width 64 --model.heads 2 --units.classes Block"
WORDS += " --data.sequence_length 64 --train.global_batch_size 64 --train.local_batch True"
WORDS += " --train.devices 8"
PROGRAM = """HloModule m, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  ROOT %sine.remat = f32[64]{0} sine(%x)
}
"""


class Compiled:
    def as_text(self):
        return PROGRAM

    def memory_analysis(self):
        return SimpleNamespace(
            argument_size_in_bytes=256,
            temp_size_in_bytes=0,
            output_size_in_bytes=256,
            alias_size_in_bytes=256,
        )


@pytest.fixture
def run_like(tmp_path):
    file = tmp_path / "empty.yaml"
    file.write_text("train: {}")
    config = load_config(file, WORDS.split())
    run = build(config)
    run.step.compiled = Compiled()
    return run, partial(propose_fixes_on, remaking_of(config, run))


def test_a_run_on_virtual_devices_has_no_cliff(run_like):
    assert memory.find_memory_cliff(*run_like) is None


def test_a_cliff_on_hosts_that_cannot_be_planned_has_no_lever(run_like, monkeypatch):
    """As if the virtual devices were eight H100s on three hosts."""
    for module in (memory, machine_topology):
        monkeypatch.setattr(module, "hardware_of", lambda kind: HARDWARE["h100"])
    monkeypatch.setattr(machine_topology, "host_of", lambda device: device.id % 3)
    cliff = memory.find_memory_cliff(*run_like)
    assert (cliff.rematerialized, cliff.free_bytes, cliff.lever) == (1, 256, "")


@pytest.mark.long
def test_a_run_names_the_lever_of_its_cliff(run_like, monkeypatch):
    """As if the virtual devices were eight H100s."""
    for module in (memory, machine_topology):
        monkeypatch.setattr(module, "hardware_of", lambda kind: HARDWARE["h100"])
    cliff = memory.find_memory_cliff(*run_like)
    assert (cliff.rematerialized, cliff.free_bytes) == (1, 256)
    assert "which frees" in cliff.lever
    run_like[0].step.compiled = None
    assert memory.find_memory_cliff(*run_like) is None


def test_a_run_prints_a_line_for_a_known_defect(run, capsys, monkeypatch):
    defect = KnownDefect("jax-ml/jax#1", "cpu", "0.1.0", "99.0.0", "too slow", "wait")
    monkeypatch.setattr(known_defects, "KNOWN_DEFECTS", (defect,))
    assert run("named", "--train.steps", "1") == 0
    line = "known defect of this jaxlib: too slow (jax-ml/jax#1); wait"
    assert capsys.readouterr().out.count(line) == 1


RAN_OUT = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes."


def test_a_run_that_runs_out_of_memory_tells_what_takes_it(run, capsys, monkeypatch):
    """In its third step; what had been saved is resumed."""
    called = CompiledStep.__call__
    steps = []

    def fail(step, *args, **others):
        steps.append(step)
        if len(steps) == 3:
            raise jax.errors.JaxRuntimeError(RAN_OUT)
        return called(step, *args, **others)

    with monkeypatch.context() as patched:
        patched.setattr(CompiledStep, "__call__", fail)
        words = "--checkpoint.every 1 --train.steps 4 --train.eval_every null"
        assert run("oom", words) == 71
    said = capsys.readouterr().err
    for part in ("error: out of memory: the step takes", RAN_OUT, "state: optimizer", "oom.json"):
        assert part in said
    fields = json.loads((run.directory / "oom" / "oom.json").read_text())
    assert (fields["when"], fields["requested_bytes"]) == ("run", 2 << 30)
    assert fields["named_share"] > 0.8
    assert {"state: optimizer", "gradients"} <= {each["kind"] for each in fields["buffers"]}
    # what had been saved is resumed
    assert run("oom", words) == 0
    # of the error alone, where nothing can be found out
    monkeypatch.setattr(memory, "explain_out_of_memory", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(CompiledStep, "__call__", fail)
    steps[:] = [None, None]
    assert run("other", words) == 71
    assert "not explained: ZeroDivisionError" in capsys.readouterr().err


def test_a_run_whose_plan_does_not_fit_ends_before_it_begins(run_like, tmp_path, monkeypatch):
    """As if the virtual devices were H100s whose allocator has a megabyte."""
    run, _ = run_like
    monkeypatch.setattr(machine_topology, "hardware_of", lambda kind: HARDWARE["h100"])
    monkeypatch.setattr(memory, "allocator_bytes", lambda device: 2**20)
    found = MemoryExplanation(
        when="plan",
        reason="",
        peak_bytes=2**21,
        limit_bytes=2**20,
        requested_bytes=None,
        elsewhere_bytes=0,
        device={"kind": "H100", "bytes_limit": 2**20},
        breakdown={"activations": 2**21},
        buffers=(),
        advice=(Advice("--remat full", 2**19, 0.18, "a third more FLOPs"),),
    )
    asked = []

    def explain(*args, **settings):
        asked.append(settings["remaking"])
        return found

    monkeypatch.setattr(memory, "explain_out_of_memory", explain)
    settings = StepSettings("full_shard")
    remaking = Remaking(settings, lambda *_: (run.step, run.batch), work=run.work)
    with Lease(tmp_path / "run") as lease:
        check = memory.OutOfMemory(run, remaking, lease, print)
        with refused(error=OutOfMemoryError, fix="--remat full, which takes 512 KiB, 18% slower"):
            check.check_plan()
        written = tmp_path / "run" / "oom.json"
        assert (asked, written.is_file()) == ([remaking], True)
        # a step that fits, once it is compiled; and one that is estimated to fit
        found = replace(found, peak_bytes=1)
        check.check_plan()
        monkeypatch.setattr(memory, "allocator_bytes", lambda device: 2**40)
        check.check_plan()
    assert asked == [remaking, remaking]
