"""Python programs in fresh processes, alone or joined into a cluster."""

import os
import socket
import subprocess
import sys
from pathlib import Path

PATIENCE = 300  # seconds: the machine may be busy

# Variables that jax and this suite set in their own environment.
INHERITED = ("JAX_PLATFORMS", "XLA_FLAGS", "TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH")

JOIN = """
import sys
from fsdp_jax.launch import barrier, is_lead, join_cluster, leave_cluster, use_virtual_devices
port, process, processes = map(int, sys.argv[1:4])
use_virtual_devices(4)
join_cluster(f"127.0.0.1:{port}", processes, process)
"""


def start(program, *arguments, **environment):
    """Starts `program` with no settings for jax but those in `environment`."""
    clean = {name: value for name, value in os.environ.items() if name not in INHERITED}
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**clean, "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes):
    """Returns (stdout, stderr) of each process; fails if one does not exit with 0."""
    try:
        outputs = [process.communicate(timeout=PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    errors = "\n".join(err for _, err in outputs)
    assert [process.returncode for process in processes] == [0] * len(processes), errors
    return outputs


def run_cluster(program, *arguments, count=2, devices=4, **environment):
    """Runs `program` in `count` processes of some CPU devices, joined; returns their stdouts.

    In the program, `process` is its number, and `sys.argv[4:]` are the arguments. How LLVM
    optimizes its programs is not what is tested: it takes most of the time.
    """
    flags = "--xla_backend_optimization_level=0 --xla_cpu_max_isa=AVX"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **environment}
    port = free_port()
    program = JOIN.replace("devices(4)", f"devices({devices})") + program
    started = [
        start(program, port, process, count, *arguments, **environment) for process in range(count)
    ]
    return [out for out, _ in finish(*started)]


def free_port():
    """Returns a port of this host that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
