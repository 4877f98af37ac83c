"""Every test runs on 8 virtual CPU devices: forced before jax starts, asserted, never skipped."""

import gc
import os
import platform
import random
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# As many threads as devices can be too few: `fsdp_jax.compat.xla_flags.set_virtual_devices`.
os.environ["NPROC"] = "32"
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        # how LLVM optimizes programs is not what is tested here, and takes half of the time
        "--xla_backend_optimization_level=0",
        # without fused multiply-add a number does not depend on what is fused with what
        "--xla_cpu_max_isa=AVX",
        # a busy machine may keep one of the eight threads waiting for long; the default aborts the
        # process after 40 s
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
        "--xla_cpu_collective_call_terminate_timeout_seconds=180",
    ]
    # XLA's older code generators, in one module, compile in half the time again. Newer releases
    # do not have them: there the suite runs what users run.
    + ["--xla_cpu_use_fusion_emitters=false"] * version("jaxlib").startswith("0.10.")
    + ["--xla_cpu_parallel_codegen_split_count=1"] * version("jaxlib").startswith("0.10.")
)
# Compiled programs are shared by the workers, by the processes that tests start, and by later runs.
# jax's key holds the program, the XLA flags and the versions of jax and XLA.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import hypothesis
import jax
import pytest

from fsdp_jax.compat.compilation_cache import without_compilation_cache

jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes many objects and few cycles: Python's default collects far more often than it pays.
gc.set_threshold(50_000, 20, 100)

# No test asserts a time: a busy machine is slow.
hypothesis.settings.register_profile(
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

COMPILERS = (sys.platform, platform.machine()) == ("linux", "x86_64")


def pytest_report_header():
    return (
        None
        if COMPILERS
        else "no TPU and CUDA compilers on this platform: tests marked needs_plugin are left out"
    )


def pytest_addoption(parser):
    parser.addoption(
        "--of-each",
        type=int,
        metavar="N",
        help="of each test, run at most N of its sets of parameters, drawn by the test's name",
    )


def pytest_itemcollected(item):
    """Makes `-m "not long"` what `make test` runs: no compilers of chips, one of many alike."""
    if item.get_closest_marker("needs_plugin") or item.get_closest_marker("exhaustive"):
        item.add_marker("long")


@pytest.fixture
def without_cache():
    """For tests that compile loops with collectives themselves: docs/design/xla-cpu-waits.md."""
    with without_compilation_cache():
        yield


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`
def pytest_collection_modifyitems(config, items):
    left_out = set()
    if not COMPILERS:
        left_out = {item for item in items if item.get_closest_marker("needs_plugin")}
    if (most := config.getoption("--of-each")) is not None:
        tests = defaultdict(list)
        for item in items:
            tests[item.nodeid.partition("[")[0]].append(item)
        for test, sets in tests.items():
            # Every n-th would always meet the same value of an axis that has n of them.
            drawn = random.Random(test).sample(sets, min(most, len(sets)))
            left_out |= set(sets).difference(drawn)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_sessionstart(session):
    assert jax.device_count() == 8, f"the suite needs 8 virtual devices, found {jax.device_count()}"
