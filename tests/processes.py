"""Python in fresh processes, as a user starts it."""

import os
import subprocess
import sys
from pathlib import Path

PATIENCE = 300  # seconds: two cores shared by whoever is testing

# What jax and this suite set in their own environment.
INHERITED = ("JAX_PLATFORMS", "XLA_FLAGS", "TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH")


def start(program, *arguments, **environment):
    """`program` with nothing chosen for jax but what `environment` says."""
    clean = {name: value for name, value in os.environ.items() if name not in INHERITED}
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**clean, "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes):
    """(stdout, stderr) of each, which has to have succeeded."""
    try:
        outputs = [process.communicate(timeout=PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(
        err for _, err in outputs
    )
    return outputs
