"""Options and environment variables of XLA: it knows each, and does what is relied on.

A program that adds one is compiled with each option: XLA refuses what it does not know only then.
"""

import os

import jax
import jax.numpy as jnp
import pytest
from mend import in_gpu_compiler, relied_on
from processes import finish, start

from fsdp_jax.compat.error_texts import NO_OPTION
from fsdp_jax.compat.xla_flags import (
    ANNOTATOR,
    OF_TPU,
    THREADS_PER_DEVICE,
    WITHOUT_PASS,
    WITHOUT_TRITON,
    WITHOUT_WINDOWED_MATMULS,
    combine_collectives,
    environment_flags,
    set_virtual_devices,
)
from fsdp_jax.planner import parse_topology
from fsdp_jax.sharding.mesh import make_mesh, replicated

pytestmark = pytest.mark.releases

OPTIONS = {
    "WITHOUT_TRITON": WITHOUT_TRITON,
    "WITHOUT_PASS": {WITHOUT_PASS: ANNOTATOR},
    "combine_collectives": combine_collectives(1 << 20, 1 << 17),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_known(name):
    """XLA has the options of all platforms on each of them."""
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    with relied_on("jaxlib", f"xla_flags.{name}", f"the options {', '.join(OPTIONS[name])}"):
        lowered.compile(compiler_options=OPTIONS[name])
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        lowered.compile(compiler_options={"xla_gpu_nothing_like_this": True})
    with relied_on("jaxlib", "error_texts.NO_OPTION", "the text of an error"):
        assert NO_OPTION.found_in(caught.value)[1] == "xla_gpu_nothing_like_this"


@pytest.mark.needs_plugin
@pytest.mark.parametrize(
    ("kind", "topology"),
    [("TPU v5", "v5p:2x2x2"), ("TPU v6 lite", "v6e:2x4"), ("TPU v5 lite", "v5e:2x4")],
)
def test_options_of_tpus_are_known_to_its_compiler(kind, topology):
    mesh = make_mesh(devices=parse_topology(topology).devices())
    assert mesh.devices.flat[0].device_kind == kind
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=replicated(mesh))
    with relied_on("libtpu", "xla_flags.OF_TPU", "options that run collectives apart"):
        options = {**OF_TPU.get(kind, {}), **WITHOUT_WINDOWED_MATMULS}
        jax.jit(lambda x: x + 1).lower(x).compile(compiler_options=options)


@pytest.mark.needs_plugin
def test_annotator_is_a_pass_of_the_gpu_compiler():
    """XLA takes any name of a pass: this one is looked for in the file of jax's plugin."""
    with relied_on("jax-cuda13-plugin", "xla_flags.ANNOTATOR", "the name of this pass"):
        assert in_gpu_compiler(ANNOTATOR)


VIRTUAL = """
import os
os.environ.pop("NPROC", None)
from fsdp_jax.compat.xla_flags import set_virtual_devices
set_virtual_devices(3)
import jax
jax.numpy.ones(3).block_until_ready()
names = [open(f"/proc/self/task/{each}/comm").read() for each in os.listdir("/proc/self/task")]
print(jax.device_count(), sum("XLAEigen" in name for name in names))
"""


@pytest.mark.long
def test_set_virtual_devices():
    """XLA knows the flags, or the process would end; NPROC is the number of its threads."""
    with relied_on("jaxlib", "xla_flags.set_virtual_devices", "flags of XLA:CPU, and NPROC"):
        ((out, _),) = finish(start(VIRTUAL, JAX_PLATFORMS="cpu"))
        assert out.split() == ["3", str(3 * THREADS_PER_DEVICE)]


def test_environment_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/x")
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert environment_flags() == {"XLA_FLAGS": "--xla_dump_to=/x", "LIBTPU_INIT_ARGS": ""}


def test_set_virtual_devices_keeps_what_is_set(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/x --xla_force_host_platform_device_count=2")
    monkeypatch.setenv("NPROC", "5")
    set_virtual_devices(4)
    assert os.environ["NPROC"] == "5"
    first, second, *_ = os.environ["XLA_FLAGS"].split()
    assert (first, second) == ("--xla_dump_to=/x", "--xla_force_host_platform_device_count=4")
