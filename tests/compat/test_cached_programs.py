"""XLA:CPU reads programs from jax's cache without the order of a loop's collectives."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec
from mend import relied_on
from processes import finish, start

from fsdp_jax.compat.cached_programs import has_collectives_in_loops

pytestmark = pytest.mark.releases

# Gathers beside a loop that gathers, and other work, which XLA gives to several threads. Without
# the order, some device starts the loop first: on two busy cores none of 14 processes came to its
# 600th step, and of eight none to its 100th. jax names all of these collectives by one number, so
# that they take each other's data; that usually crashes.
PROGRAM = """
import json, sys
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from fsdp_jax.compat.cached_programs import compile_loops_anew
anew, steps = json.loads(sys.argv[1]), int(sys.argv[2])
if anew:
    compile_loops_anew()
    compile_loops_anew()
hits = []
listen = jax.monitoring.register_event_listener
listen(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

def gather(x):
    return jax.lax.all_gather(x, "d", tiled=True)

def around_a_loop(x, weights, beside):
    def layer(x, weight):
        return jnp.tanh(x @ gather(weight)), None
    sines = [jnp.sin(array + i) for i, array in enumerate(beside)]
    return jax.lax.scan(layer, x, weights)[0], [gather(array) for array in beside], sines

specs = {"in_specs": (P(), P(None, "d"), P("d")), "out_specs": (P(), P(), P("d"))}
looping = jax.jit(jax.shard_map(around_a_loop, mesh=mesh, check_vma=False, **specs))
plain = jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False))
arrays = [jnp.ones((512, 20 + 20 * (i % 5))) for i in range(12)]
arguments = jnp.ones((64, 64)), jnp.ones((4, 64, 64)) / 64, arrays
found = []
for function, given in ((plain, (jnp.ones(8),)), (looping, arguments)):
    compiled = function.lower(*given).compile()
    jax.clear_caches()
    hits.clear()
    compiled = function.lower(*given).compile()
    found.append(len(hits))
print("found", json.dumps(found), flush=True)
first = jax.device_get(compiled(*arguments)) if steps else None
for _ in range(steps):
    again = jax.device_get(compiled(*arguments))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), first, again))
print("done", flush=True)
"""


def run(folder, anew, steps=0, **environment):
    flags = {
        "xla_force_host_platform_device_count": 8,
        "xla_cpu_collective_call_terminate_timeout_seconds": 60,
    }
    environment = {
        "JAX_PLATFORMS": "cpu",
        "NPROC": "32",
        "XLA_FLAGS": " ".join(f"--{name}={value}" for name, value in flags.items()),
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        **environment,
    }
    ((out, err),) = finish(start(PROGRAM, json.dumps(anew), steps, **environment))
    assert out.endswith("done\n")
    return json.loads(re.search(r"^found (.*)$", out, re.MULTILINE)[1]), err


def test_xla_reads_a_program_without_the_order_of_its_collectives(tmp_path):
    """What a loop waits for, of the program just compiled and of the same from the cache."""
    found, log = run(tmp_path, False, TF_CPP_MIN_LOG_LEVEL="0", TF_CPP_VMODULE="thunk_executor=6")
    assert found == [1, 1]
    loops = re.findall(r"kind=while, dependencies=\[(.*?)\]", log)
    if len(loops) == 2 and "gather" in loops[0] and "gather" in loops[1]:
        pytest.fail("XLA reads the order: drop fsdp_jax.compat.cached_programs")
    with relied_on("jaxlib", "cached_programs.compile_loops_anew", "the log of XLA's schedule"):
        assert ["gather" in each for each in loops] == [True, False]


def test_compile_loops_anew(tmp_path):
    with relied_on("jax", "cached_programs.compile_loops_anew", "how it reads and writes programs"):
        assert run(tmp_path, True, steps=100)[0] == [1, 0]
        kept = len(list(tmp_path.glob("*-cache")))
        assert run(tmp_path, False)[0] == [1, 1]  # written by another process ...
        assert len(list(tmp_path.glob("*-cache"))) > kept
        assert run(tmp_path, True)[0] == [1, 0]  # ... and not taken


@pytest.mark.long
def test_compiled_anew_a_program_that_hangs_when_read_does_not(tmp_path):
    assert run(tmp_path, True, steps=3000)[0] == [1, 0]


def test_has_collectives_in_loops():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    split, whole = PartitionSpec("d"), PartitionSpec()

    def text(function, of=split):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=of, out_specs=whole, check_vma=False)
        return jax.jit(mapped).lower(jnp.ones((8, 8))).compile().as_text()

    def in_loop(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: jax.lax.psum(jnp.sin(y), "d"), x)

    def in_branch(x):
        return jax.lax.cond(x.sum() > 0, lambda: jax.lax.pmax(x, "d"), lambda: x)

    with relied_on("jaxlib", "cached_programs.has_collectives_in_loops", "the text of programs"):
        assert has_collectives_in_loops(text(in_loop))
        assert has_collectives_in_loops(text(in_branch))
        beside = text(
            lambda x: jax.lax.psum(jax.lax.fori_loop(0, 3, lambda _, y: y @ y, x), "d"), whole
        )
        assert "all-reduce" in beside
        assert not has_collectives_in_loops(beside)
