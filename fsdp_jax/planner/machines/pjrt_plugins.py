"""Compiler plugins beside each other: jax must train on the hardware that is there, whatever else
is installed.

Left alone, jax tries every installed plugin. Where its hardware is absent, the CUDA plugin prints a
traceback and is then lost as a compiler too; libtpu prints complaints, takes a lock that a second
process fails on, and logs to /tmp.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jax

EXTRAS = {"cuda": "cuda-aot", "tpu": "tpu-aot"}
"""Platform -> the extra of this package that installs its compiler."""

NVIDIA_DEVICES = (
    "/dev/nvidia0",
    "/dev/nvidiactl",
    "/dev/dxg",
)  # a host, a container, WSL: where jax looks too
TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")  # the second may be another device

# All of them speak of the machine's own TPUs, of which a compiler needs none. libtpu reads them
# once, when it loads.
_LIBTPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no lock: nothing is driven
    "TPU_SKIP_MDS_QUERY": "1",  # no cloud to ask
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any: what is compiled for is named in each call
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
}


def installed() -> set[str]:
    """Platforms that jax has plugins for here: cuda, tpu, or the name of another plugin."""
    names = {point.name for point in entry_points(group="jax_plugins")}
    found = {"cuda" if name.startswith("xla_cuda") else name for name in names}
    return found | ({"tpu"} if importlib.util.find_spec("libtpu") else set())


def _chosen() -> list[str]:
    """The platforms that the user has settled on, or jax, which does so when it is imported on a
    TPU host.
    """
    config: Any = jax.config  # its flags are not declared to type checkers
    return config.jax_platforms.split(",") if config.jax_platforms else []


def _any(devices: tuple[str, ...]) -> bool:
    return any(Path(device).exists() for device in devices)


def choose_platforms() -> None:
    """Has jax start only the plugins whose hardware is here; has an effect until jax's backends
    start.

    Nothing is changed where the user has chosen (`JAX_PLATFORMS`), on a TPU host, or with a plugin
    of another vendor. Beside libtpu, a GPU whose plugin does not start is an error, where jax alone
    would go on without it.
    """
    plugins = installed()
    if _chosen() or not plugins or not plugins <= EXTRAS.keys() or _any(TPU_DEVICES):
        return
    gpu = "cuda" in plugins and _any(NVIDIA_DEVICES)
    if plugins == {"cuda"} and gpu:
        return
    jax.config.update("jax_platforms", "cuda,cpu" if gpu else "cpu")


@contextmanager
def as_compiler() -> Iterator[None]:
    """Within, libtpu loads as a compiler and no more, unless it drives this process's own TPUs.

    The environment is as it was afterwards: a process started from here may well drive TPUs.
    """
    if "tpu" in _chosen() or (not _chosen() and _any(TPU_DEVICES)):
        yield
        return
    added = {name: value for name, value in _LIBTPU.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
