"""Divides the devices of this machine among the processes that the launcher starts on it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from fsdp_jax.compat.xla_flags import set_virtual_devices
from fsdp_jax.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_FOLDER = Path("/dev")
ASK_SECONDS = 60.0  # that nvidia-smi may take: it is slow where the driver is not kept loaded


def divide_devices(processes: int, per_process: int | None) -> list[dict[str, str]]:
    """Makes, for each process, the variables of the environment that give it its own devices.

    The GPUs that this process may use are divided in order, `per_process` each or as many as there
    are. Without GPUs, or with `JAX_PLATFORMS=cpu`, each process has `per_process` virtual CPU
    devices; None leaves their number to jax and to the command.

    Raises ConfigError if there are too few GPUs, or if they cannot be divided evenly.
    """
    gpus = visible_gpus()
    if not gpus:
        variables: dict[str, str] = {}
        if per_process is not None:
            changed = dict(os.environ)
            set_virtual_devices(per_process, changed)
            variables = dict(changed.items() - os.environ.items())
        return [dict(variables) for _ in range(processes)]
    # A share for each process: what is asked for, or all of them.
    share = per_process or len(gpus) // processes
    is_even = per_process is not None or len(gpus) % processes == 0
    if not is_even or not 0 < share * processes <= len(gpus):
        raise ConfigError(
            "the GPUs cannot be divided among the processes",
            where="--nproc, --devices-per-process",
            expected="as many GPUs for each process",
            got=f"{len(gpus)} GPUs for {processes} processes of {per_process or 'as many'}",
            fix="another --nproc or --devices-per-process; or JAX_PLATFORMS=cpu for virtual CPU "
            "devices",
        )
    return [
        {VISIBLE: ",".join(gpus[index * share : (index + 1) * share])} for index in range(processes)
    ]


def visible_gpus() -> list[str]:
    """Lists the GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them.

    Raises ConfigError where there are GPUs that cannot be listed.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    chosen = os.environ.get(VISIBLE)
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    command = shutil.which("nvidia-smi")
    if command is None:
        if list(NVIDIA_FOLDER.glob("nvidia[0-9]*")):
            raise ConfigError(
                "the GPUs of this machine cannot be listed",
                where="nvidia-smi",
                got="no such command",
                fix=f"name them: {VISIBLE}=0,1,2,3",
            )
        return []
    # A driver without a GPU, as in some containers: nvidia-smi fails, and there is nothing to list.
    listing = subprocess.run(
        [command, "-L"], capture_output=True, text=True, check=False, timeout=ASK_SECONDS
    )
    return re.findall(r"^GPU (\d+):", listing.stdout, re.MULTILINE)
