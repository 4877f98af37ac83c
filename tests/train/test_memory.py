"""What a run says of memory and of its release, before and after it compiles.

The runs share the compiled step of `conftest.py`.
"""

from functools import partial
from types import SimpleNamespace

import pytest

from fsdp_jax.planner import HARDWARE
from fsdp_jax.step import known_defects
from fsdp_jax.step.known_defects import KnownDefect
from fsdp_jax.train import memory
from fsdp_jax.train.build import build
from fsdp_jax.train.config_file import load_config
from fsdp_jax.train.planning import propose_fixes_on

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
    return run, partial(propose_fixes_on, config)


def test_a_run_on_virtual_devices_has_no_cliff(run_like):
    assert memory.find_memory_cliff(*run_like) is None


def test_a_cliff_on_hosts_that_cannot_be_planned_has_no_lever(run_like, monkeypatch):
    """As if the virtual devices were eight H100s on three hosts."""
    monkeypatch.setattr(memory, "hardware_of", lambda kind: HARDWARE["h100"])
    monkeypatch.setattr(memory, "host_of", lambda device: device.id % 3)
    cliff = memory.find_memory_cliff(*run_like)
    assert (cliff.rematerialized, cliff.free_bytes, cliff.lever) == (1, 256, "")


@pytest.mark.long
def test_a_run_names_the_lever_of_its_cliff(run_like, monkeypatch):
    """As if the virtual devices were eight H100s."""
    monkeypatch.setattr(memory, "hardware_of", lambda kind: HARDWARE["h100"])
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
