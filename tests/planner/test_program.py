"""Programs of absent machines are compiled once, and kept.

A step is compiled for CPUs, in place of a machine that is absent: only XLA writes its reports.
"""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest
from stored_steps import net_step

import fsdp_jax as fsdp
from fsdp_jax.planner import parse_topology
from fsdp_jax.planner.compiled import program as program_module
from fsdp_jax.planner.compiled.buffer_assignment import LiveBuffer, MemoryReport
from fsdp_jax.planner.compiled.program import CompiledProgram, cache_folder, compile_step

pytestmark = pytest.mark.releases

PROGRAM = CompiledProgram(
    "HloModule m",
    MemoryReport({"default": 8}, [LiveBuffer("a", (0,), 8, "f32[2]", None)]),
    None,
    1.5,
)


def test_a_cached_program_is_equal(tmp_path):
    program_module._write_cached(tmp_path / "a" / "p.json.gz", PROGRAM)
    assert program_module._read_cached(tmp_path / "a" / "p.json.gz") == PROGRAM


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"no gzip",
        gzip.compress(b"{", mtime=0),
        gzip.compress(json.dumps({"text": 1}).encode(), mtime=0),
    ],
)
def test_a_damaged_cache_entry_is_ignored(damage, tmp_path):
    path = tmp_path / "p.json.gz"
    path.write_bytes(damage)
    assert program_module._read_cached(path) is None


def test_a_full_disk_raises_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    # its folder cannot be made
    program_module._write_cached(tmp_path / "file" / "p.json.gz", PROGRAM)
    assert program_module._read_cached(tmp_path / "file" / "p.json.gz") is None


def test_the_cache_is_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fsdp_jax" / "plans"


def test_a_step_is_compiled_once_for_the_same_flags(monkeypatch, tmp_path):
    topology, batch = parse_topology("cpu:8"), {"x": jax.ShapeDtypeStruct((16, 32), jnp.float32)}
    step = net_step(fsdp.make_mesh(devices=topology.devices()))
    first = compile_step(step, batch, topology, tmp_path)
    assert first.text.startswith("HloModule")
    assert first.report.spaces["default"] > 0
    monkeypatch.setattr(program_module, "compile_reported", lambda *_: PROGRAM)
    assert compile_step(step, batch, topology, tmp_path) == first
    assert compile_step(step, batch, topology, None) == PROGRAM
    monkeypatch.setenv("XLA_FLAGS", "--xla_other")
    assert compile_step(step, batch, topology, tmp_path) == PROGRAM
