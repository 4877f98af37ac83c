"""Every test runs on 8 virtual CPU devices: forced here before jax starts, asserted, never skipped."""

import os
import platform
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        # what LLVM makes of each program is not what is tested here, and takes half of the time
        "--xla_backend_optimization_level=0",
        # a busy machine may keep one of the eight threads waiting for long; the default aborts the
        # process after 40 s
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    ]
)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")


COMPILERS = (sys.platform, platform.machine()) == ("linux", "x86_64")


def pytest_report_header():
    return (
        None
        if COMPILERS
        else "no TPU and CUDA compilers on this platform: tests marked needs_plugin are left out"
    )


def pytest_collection_modifyitems(config, items):
    if not COMPILERS:
        left_out = [item for item in items if item.get_closest_marker("needs_plugin")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_sessionstart(session):
    assert jax.device_count() == 8, f"the suite needs 8 virtual devices, found {jax.device_count()}"
