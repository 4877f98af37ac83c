"""Programs that are compiled once: what is kept, and what XLA says where it refuses."""

import gzip
import json

import pytest

from fsdp_jax.planner.compiled import program as program_module
from fsdp_jax.planner.compiled.buffer_assignment import LiveBuffer, MemoryReport
from fsdp_jax.planner.compiled.program import CompiledProgram, cache_folder, refused_bytes

pytestmark = pytest.mark.core

KEPT = CompiledProgram(
    "HloModule m",
    MemoryReport({"default": 8}, [LiveBuffer("a", (0,), 8, "f32[2]", None)]),
    None,
    1.5,
)


@pytest.mark.parametrize(
    ("said", "state", "expected"),
    [
        (
            "RESOURCE_EXHAUSTED: ... in memory space hbm. Used 23.54G of 15.75G hbm. Exceeded",
            7,
            int(23.54 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (44.53G)"
            " exceeds available HBM (31.25G).",
            7,
            int(44.53 * 2**30) + 7,
        ),
        (
            "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 327680, available: 232448",
            7,
            None,
        ),
        ("INTERNAL: no", 7, None),
    ],
)
def test_what_xla_wants_is_read_from_its_refusal(said, state, expected):
    assert refused_bytes(said, state) == expected


def test_a_program_is_kept_as_it_was(tmp_path):
    program_module._write_cached(tmp_path / "a" / "p.json.gz", KEPT)
    found = program_module._read_cached(tmp_path / "a" / "p.json.gz")
    assert found is not None
    assert found.cached
    assert (found.text, found.report, found.seconds) == (KEPT.text, KEPT.report, KEPT.seconds)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"no gzip",
        gzip.compress(b"{", mtime=0),
        gzip.compress(json.dumps({"text": 1}).encode(), mtime=0),
    ],
)
def test_what_cannot_be_read_is_compiled_again(damage, tmp_path):
    path = tmp_path / "p.json.gz"
    path.write_bytes(damage)
    assert program_module._read_cached(path) is None


def test_a_full_disk_costs_no_plan(tmp_path):
    (tmp_path / "file").write_text("")
    program_module._write_cached(tmp_path / "file" / "p.json.gz", KEPT)  # its folder cannot be made
    assert program_module._read_cached(tmp_path / "file" / "p.json.gz") is None


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fsdp_jax" / "plans"
