"""XLA:CPU reads programs from jax's cache without the order of a loop's collectives.

Compiles programs of plain jax in fresh processes: what is read from a cache is what is tested.
"""

import json
import logging
import re

import jax
import pytest
from mend import relied_on
from processes import finish, start

import fsdp_jax as fsdp
from fsdp_jax.compat.compilation_cache import (
    ProgramNotReadError,
    cache_folder,
    cache_is_enabled,
    compile_and_take,
    key_of_program,
    loses_order,
    read_compiled,
    use_compilation_cache,
    without_cache_on_cpus,
    without_compilation_cache,
)

pytestmark = pytest.mark.releases

# Gathers beside a loop that gathers, and other work, which XLA gives to several threads. Without
# the order, some device starts the loop first: on two busy cores none of 14 processes came to its
# 600th step, and of eight none to its 100th. jax names all of these collectives by one number, so
# that they take each other's data; that usually crashes.
PROGRAM = """
import json, sys
from contextlib import nullcontext
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from fsdp_jax.compat.compilation_cache import without_cache_on_cpus
anew, steps = json.loads(sys.argv[1]), int(sys.argv[2])
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
    for _ in range(2):
        jax.clear_caches()
        hits.clear()
        lowered = function.lower(*given)
        with without_cache_on_cpus(mesh, lowered) if anew else nullcontext():
            compiled = lowered.compile()
    found.append(len(hits))
print("found", json.dumps(found), flush=True)
first = jax.device_get(compiled(*arguments)) if steps else None
for _ in range(steps):
    again = jax.device_get(compiled(*arguments))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), first, again))
print("done", flush=True)
"""


def run(folder, anew, steps=0, **environment):
    """(hits of the cache by the second compile of a plain and of a looping program, the log)."""
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


def test_a_program_that_hangs_when_read_runs_when_compiled_anew(tmp_path):
    """The worst known program, 100 times; others still come from the cache."""
    assert run(tmp_path, True, steps=100)[0] == [1, 0]


def test_a_folder_is_used_from_then_on(tmp_path):
    before = cache_folder()
    try:
        use_compilation_cache(str(tmp_path))
        assert cache_folder() == str(tmp_path)
        jax.jit(lambda x: x * 3.25 + 1)(1.0)
    finally:
        use_compilation_cache(before)
    assert list(tmp_path.glob("*-cache"))


def lowered(factor=3.5):
    jax.clear_caches()  # jax remembers what it has compiled
    return jax.jit(lambda x: x * factor + 1).lower(1.0)


def test_a_program_is_taken_from_the_cache_and_given_back():
    before = cache_folder(), cache_is_enabled(), jax.config.jax_explain_cache_misses
    what = "a miss of its cache is logged, with the key, before it compiles; an entry is a file"
    with relied_on("jax", "compilation_cache.key_of_program", what):
        key = key_of_program(lowered().compile)
        assert key.startswith("jit__lambda-"), key
        assert key == key_of_program(lowered().compile)
        assert key != key_of_program(lowered(2.5).compile)
    with relied_on("jax", "compilation_cache.compile_and_take", "its key names the file"):
        compiled, content = compile_and_take(lowered().compile, key)
        assert content
    misses = []
    handler = logging.Handler()
    handler.handle = misses.append
    logging.getLogger("jax").addHandler(handler)
    hits = []
    listen = jax.monitoring.register_event_listener
    listen(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
    with relied_on("jax", "compilation_cache.read_compiled", "it reads an entry of its cache"):
        again = read_compiled(lowered().compile, key, content)
        assert len(hits) == 1
    assert float(again(2.0)) == float(compiled(2.0)) == 8.0
    logging.getLogger("jax").removeHandler(handler)
    assert misses == [], "nothing is printed"
    assert before == (cache_folder(), cache_is_enabled(), jax.config.jax_explain_cache_misses)


@pytest.mark.parametrize("what", ["truncated", "of another program", "nothing"])
def test_what_jax_does_not_read_raises(what):
    key = key_of_program(lowered().compile)
    _, content = compile_and_take(lowered().compile, key)
    if what == "of another program":
        key = f"{key[:-1]}x"
    content = {"truncated": content[:-20], "nothing": b""}.get(what, content)
    with pytest.raises(ProgramNotReadError):
        read_compiled(lowered().compile, key, content)


def test_which_programs_lose_the_order_of_their_collectives():
    mesh = fsdp.make_mesh()
    looping = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * y, x)).lower(1.0)
    assert loses_order(mesh, looping)
    assert loses_order(mesh)
    assert not loses_order(mesh, lowered())
    assert not loses_order(fsdp.make_mesh(devices=jax.devices()[:1]), looping)


def test_blocks_of_several_threads_leave_the_switch_as_it_was():
    """One block begins in another and ends after it: the cache is off in both, then on again."""
    assert cache_folder() is not None, "conftest names one"
    before = jax.config.jax_enable_compilation_cache
    first, second = without_compilation_cache(), without_cache_on_cpus(fsdp.make_mesh())
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not jax.config.jax_enable_compilation_cache
    second.__exit__(None, None, None)
    assert jax.config.jax_enable_compilation_cache == before


@pytest.mark.long
def test_a_program_of_another_process_is_not_read(tmp_path):
    assert run(tmp_path, False)[0] == [1, 1]
    assert run(tmp_path, True, steps=600)[0] == [1, 0]


@pytest.mark.long
def test_xla_reads_a_program_without_the_order_of_its_collectives(tmp_path):
    """What a loop waits for, of the program just compiled and of the same from the cache."""
    found, log = run(tmp_path, False, TF_CPP_MIN_LOG_LEVEL="0", TF_CPP_VMODULE="thunk_executor=6")
    assert found == [1, 1]
    loops = re.findall(r"kind=while, dependencies=\[(.*?)\]", log)
    if len(loops) == 2 and "gather" in loops[0] and "gather" in loops[1]:
        pytest.fail("XLA reads the order: drop without_cache_on_cpus")
    assert ["gather" in each for each in loops] == [True, False], "the log of XLA's schedule"
