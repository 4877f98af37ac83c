"""Installed compilers: jax starts what is present, is silent about the rest; several compile."""

import os

import jax
import pytest
from collected import collected
from processes import finish, start

from fsdp_jax.compat import pjrt_plugins


@pytest.fixture
def machine(monkeypatch):
    """Mocks what is installed, chosen and present; returns the platforms set in jax, or None."""

    def choose(installed, *, chosen=None, gpu=False, tpu=False):
        updates, present, absent = [], ("/dev/null",), ("/dev/no such device",)
        monkeypatch.setattr(pjrt_plugins, "installed_plugins", lambda: installed)
        monkeypatch.setattr(pjrt_plugins, "chosen_platforms", lambda: chosen or [])
        monkeypatch.setattr(pjrt_plugins, "NVIDIA_DEVICES", present if gpu else absent)
        monkeypatch.setattr(pjrt_plugins, "TPU_DEVICES", present if tpu else absent)
        monkeypatch.setattr(jax.config, "update", lambda *update: updates.append(update))
        pjrt_plugins.choose_platforms()
        assert all(name == "jax_platforms" for name, _ in updates)
        return updates[0][1] if updates else None

    return choose


def test_jax_starts_the_plugins_whose_hardware_is_present(machine):
    cases = [
        (set(), False, None),  # jax needs no telling
        (set(), True, None),
        ({"cuda"}, True, None),
        ({"cuda"}, False, "cpu"),
        ({"tpu"}, False, "cpu"),
        ({"tpu"}, True, "cpu"),  # jax has no plugin for that GPU
        ({"cuda", "tpu"}, False, "cpu"),
        ({"cuda", "tpu"}, True, "cuda,cpu"),
        # another vendor's: its hardware is not ours to look for
        (
            {"cuda", "tpu", "rocm7"},
            False,
            None,
        ),
    ]
    with collected() as case:
        for installed, gpu, platforms in cases:
            with case((installed, gpu)):
                assert machine(installed, gpu=gpu) == platforms


def test_the_users_choice_of_platforms_is_kept(machine):
    with collected() as case:
        for chosen in [["tpu", "cpu"], ["cpu"], ["cuda"]]:
            with case(chosen):
                assert machine({"cuda", "tpu"}, chosen=chosen) is None


def test_a_possible_tpu_is_left_to_jax(machine):
    assert machine({"cuda", "tpu"}, tpu=True) is None


def test_a_compiler_restores_the_environment(monkeypatch):
    monkeypatch.setenv("TPU_LOG_DIR", "/somewhere")
    monkeypatch.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD", raising=False)
    before = dict(os.environ)
    with pjrt_plugins.libtpu_as_compiler():
        assert os.environ["TPU_LOG_DIR"] == "/somewhere"
        assert os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert dict(os.environ) == before


@pytest.mark.parametrize("chosen", [["tpu", "cpu"], []])
def test_tpus_in_use_keep_their_lock(chosen, monkeypatch):
    monkeypatch.setattr(pjrt_plugins, "chosen_platforms", lambda: chosen)
    monkeypatch.setattr(pjrt_plugins, "TPU_DEVICES", ("/dev/null",))
    before = dict(os.environ)
    with pjrt_plugins.libtpu_as_compiler():
        assert dict(os.environ) == before


DEVICES = """
from fsdp_jax.planner import choose_platforms
choose_platforms()
import jax
print(jax.default_backend(), "libtpu.so" in open("/proc/self/maps").read())
"""


@pytest.mark.needs_plugin
def test_jax_starts_silently_and_without_libtpu():
    assert pjrt_plugins.installed_plugins() == {"cuda", "tpu"}, "make test installs both"
    assert finish(start(DEVICES)) == [("cpu False\n", "")]


COMPILE = """
import jax, numpy
from jax.sharding import NamedSharding, PartitionSpec
import fsdp_jax
from fsdp_jax.planner import parse_topology
for name in ("v5e:2x2", "h100:4"):
    mesh = fsdp_jax.make_mesh(devices=parse_topology(name).devices())
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((8, 128), "float32", sharding=rows)
    print(name, "all-reduce" in jax.jit(lambda x: x.sum()).lower(x).compile().as_text())
print(jax.default_backend())
"""


@pytest.mark.needs_plugin
def test_two_processes_compile_at_once_silently():
    # jax's compilation cache warns of what it cannot read back; see pyproject.toml.
    processes = [start(COMPILE, JAX_ENABLE_COMPILATION_CACHE="false") for _ in range(2)]
    assert finish(*processes) == [("v5e:2x2 True\nh100:4 True\ncpu\n", "")] * 2


LATE = """
import logging
logging.disable()  # jax's traceback, of which the message speaks
import jax
jax.devices()
from fsdp_jax.planner import parse_topology
try:
    parse_topology("h100:8").devices()
except ValueError as error:
    print(error)
"""


@pytest.mark.needs_plugin
def test_a_compiler_that_jax_started_without():
    ((out, _),) = finish(start(LATE))
    assert out.startswith("jax started without the CUDA compiler")
    assert "choose_platforms()" in out


def test_gpus_are_counted_without_jax(monkeypatch):
    cases = [
        ("0,1,5", 3),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("GPU-8932f937-d72c,MIG-1", 2),
        ("NoDevFiles", 1),
    ]
    with collected() as case:
        for visible, count in cases:
            with case(visible):
                monkeypatch.setattr(pjrt_plugins, "chosen_platforms", list)
                assert len(pjrt_plugins.list_gpus({"CUDA_VISIBLE_DEVICES": visible})) == count
                monkeypatch.setattr(pjrt_plugins, "chosen_platforms", lambda: ["cpu"])
                assert pjrt_plugins.list_gpus({"CUDA_VISIBLE_DEVICES": visible}) == []
