"""What the texts of lowered programs hold beside the program itself."""

import dataclasses
import hashlib
import linecache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from mend import relied_on

from fsdp_jax.compat.lowered_texts import comparable_text

pytestmark = pytest.mark.releases

KERNEL = """
import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

def kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

def double(x):
    params = triton.CompilerParams() if TRITON else None
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=result, compiler_params=params)(x) + ADDED
"""


def lowered(platform, file, added=1.0):
    """A program with a kernel, lowered from a file of this name."""
    linecache.cache[file] = (len(KERNEL), None, KERNEL.splitlines(keepends=True), file)
    names = {"ADDED": added, "TRITON": platform == "cuda"}
    exec(compile(KERNEL, file, "exec"), names)
    # The newest jax asks which GPU it is. Earlier ones do not name the platform.
    fields = {"device_kind": "NVIDIA H100 80GB HBM3", "num_cores": None, "platform": platform}
    device = AbstractDevice(**{f.name: fields[f.name] for f in dataclasses.fields(AbstractDevice)})
    with use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=device)):
        traced = jax.jit(names["double"]).trace(jax.ShapeDtypeStruct((8, 128), jnp.float32))
        return traced.lower(lowering_platforms=(platform,))


# The Triton backend is what GPUs have in every release that is supported; the newest deprecates it.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("platform", [pytest.param("tpu", marks=pytest.mark.long), "cuda"])
def test_comparable_text_of_kernels_from_other_folders(platform):
    here, there = lowered(platform, "/here/model.py"), lowered(platform, "/there/model.py")
    with relied_on("jax", "lowered_texts.comparable_text", "kernels are bytecode in strings"):
        assert here.as_text() != there.as_text()
        assert comparable_text(here) == comparable_text(there)
    # Only strings of the kernel's own line are left out.
    assert comparable_text(here) != comparable_text(lowered(platform, "/here/model.py", 2.0))


def test_comparable_text_holds_constants_and_no_places():
    def program(number):
        return jax.jit(lambda x: x * number).lower(jnp.ones(3))

    again = jax.jit(lambda x: x * 2.5).lower(jnp.ones(3))
    with relied_on("jax", "lowered_texts.comparable_text", "a text has no places in files"):
        assert comparable_text(program(2.5)) == comparable_text(again)
        assert "test_lowered_texts" not in comparable_text(again)
    assert comparable_text(program(2.5)) != comparable_text(program(2.50001))
    large = [jax.jit(lambda x, d=d: x + d).lower(jnp.ones(4000)) for d in large_constants()]
    texts = [hashlib.sha256(comparable_text(each).encode()).hexdigest() for each in large]
    assert texts[0] != texts[1]


def large_constants():
    """Two arrays that differ in one element."""
    first = jnp.arange(4000.0)
    return first, first.at[2000].add(1)
