"""Chooses among the installed compiler plugins, so that jax trains on the hardware that is present.

Left alone, jax tries every installed plugin. Where its hardware is absent, the CUDA plugin prints a
traceback and is then lost as a compiler too; libtpu prints complaints, takes a lock that a second
process fails on, and logs to /tmp.
"""

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jax

EXTRAS = {"cuda": "cuda-aot", "tpu": "tpu-aot"}
"""Platform -> the extra of this package that installs its compiler."""

# On a host, in a container, and on WSL: the paths that jax checks too.
NVIDIA_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")  # the second may be another device

# All of these describe the machine's own TPUs, which compiling does not need. libtpu reads them
# once, when it loads.
_LIBTPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no lock: no TPU is driven
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server to ask
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any: each compilation names its target
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
}


def installed_plugins() -> set[str]:
    """Finds the platforms that jax has plugins for: cuda, tpu, or the name of another plugin."""
    names = {point.name for point in entry_points(group="jax_plugins")}
    platforms = {"cuda" if name.startswith("xla_cuda") else name for name in names}
    if importlib.util.find_spec("libtpu"):  # which jax finds by itself
        platforms.add("tpu")
    return platforms


def chosen_platforms() -> list[str]:
    """Lists the platforms that the user chose, or jax itself on a TPU host; else none."""
    config: Any = jax.config  # its flags are not declared to type checkers
    if not config.jax_platforms:
        return []
    return config.jax_platforms.split(",")


def _any_exists(devices: tuple[str, ...]) -> bool:
    return any(Path(device).exists() for device in devices)


def has_tpus() -> bool:
    """Tells whether this machine has TPUs, and libtpu to drive them."""
    return _any_exists(TPU_DEVICES) and "tpu" in installed_plugins()


def list_gpus(environment: Mapping[str, str]) -> list[str]:
    """Names the GPUs that jax will see, without starting it; none if it is told to see none.

    Those of `CUDA_VISIBLE_DEVICES` if it is set, whose list ends at a negative number; else those
    of NVIDIA that the machine has.
    """
    chosen = chosen_platforms()
    if chosen and not {"cuda", "gpu", "rocm"} & set(chosen):
        return []
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = re.match(r"([^-,][^,]*,?)*", visible.replace(" ", ""))
        assert names is not None, "it may be empty"
        return [name for name in names[0].split(",") if name]
    nodes = [path.name for path in Path("/dev").glob("nvidia*")]
    return sorted(name for name in nodes if name[6:].isdecimal())


def choose_platforms() -> None:
    """Tells jax to start only the plugins whose hardware is present; call before backends start.

    Changes nothing where the user has chosen (`JAX_PLATFORMS`), on a TPU host, or with a plugin of
    another vendor. Beside libtpu, a GPU whose plugin does not start is an error, where jax alone
    would continue on the CPU.
    """
    plugins = installed_plugins()
    other_vendor = not plugins <= EXTRAS.keys()
    if chosen_platforms() or not plugins or other_vendor or _any_exists(TPU_DEVICES):
        return
    gpu = "cuda" in plugins and _any_exists(NVIDIA_DEVICES)
    if plugins == {"cuda"} and gpu:  # jax alone would choose the same
        return
    platforms = "cpu"
    if gpu:
        platforms = "cuda,cpu"
    jax.config.update("jax_platforms", platforms)


@contextmanager
def libtpu_as_compiler() -> Iterator[None]:
    """Lets libtpu load as a compiler only in the block, unless this process drives its own TPUs.

    The environment is restored on exit: a process started from this one may well drive TPUs.
    """
    # where jax has loaded libtpu, or will, its own settings count
    chosen = chosen_platforms()
    if "tpu" in chosen or (not chosen and _any_exists(TPU_DEVICES)):
        yield
        return
    added = {name: value for name, value in _LIBTPU.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
