"""What the scripts in this folder share: models, trials in processes of their own, records."""

import functools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[2] / "configs"
TOY = "--model.layers 2 --model.width 64 --model.heads 2 --model.vocab_size 512"
# {model: (configuration, words of the command line, those of its toy size)}: one device, bfloat16
MODELS = {
    "gpt2-124m": ("gpt2.yaml", "--prefetch none", TOY),
    "llama-1b": (
        "llama3_2_1b.yaml",
        "--prefetch none --remat none --train.loss_chunk null",
        # of its preset it keeps 8 heads of keys, and the width of its MLP
        "--model.layers 2 --model.width 16 --model.heads 8 --model.vocab_size 512",
    ),
}


def load(model: str, sequence: int, rows: int, words: str = "", *, toy: bool = False) -> Any:
    """Loads the configuration of a model, at toy size if asked; `words` are further keys."""
    from fsdp_jax.train.config_file import load_config

    file, own, small = MODELS[model]
    sizes = f"--data.sequence_length {sequence} --train.global_batch_size {rows}"
    return load_config(CONFIGS / file, f"{own} {small if toy else ''} {sizes} {words}".split())


def run_trial(script: str, trial: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Runs `script --trial JSON` in a process of its own; its row, or {"failed": why}."""
    rows, failed = run_trials(script, trial, seconds)
    return trial | ({"failed": failed} if failed else rows[-1])


def run_trials(
    script: str, trial: dict[str, Any], seconds: float
) -> tuple[list[dict[str, Any]], str]:
    """Runs `script --trial JSON` likewise; (the rows that it has printed, why it failed or "")."""
    if seconds <= 0:
        return [], "no time left"
    command = [sys.executable, script, "--trial", json.dumps(trial)]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=seconds)
        printed, failed = done.stdout, why_failed(done)
    except subprocess.TimeoutExpired as error:
        printed, failed = error.stdout or b"", f"more than {seconds:.0f} s"
    lines = printed.decode().splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    if not rows and not failed:
        failed = "printed no row"
    return rows, failed


def why_failed(done: subprocess.CompletedProcess[bytes]) -> str:
    """Finds the line of stderr that says why a process failed; "" if it did not."""
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.decode().splitlines() if line.strip()]
    memory = [line for line in lines if "RESOURCE_EXHAUSTED" in line or "OutOfMemory" in line]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    why = [*memory[:1], *errors[-1:], *lines[-1:], f"exit code {done.returncode}"][0]
    return why.strip()[:200]


def step_seconds(step: Any, *, steps: int, warmup: int = 2) -> list[float]:
    """Times calls of `step`, which waits for its result; without the first ones."""
    seconds = []
    for _ in range(warmup + steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds[warmup:]


def median_seconds(step: Any, *, steps: int, warmup: int = 2) -> float:
    """Times calls of `step`, which waits for its result; the median after the first ones."""
    return statistics.median(step_seconds(step, steps=steps, warmup=warmup))


def peak_bytes() -> int:
    """Reads the allocator's peak; 0 where the device does not tell."""
    import jax

    return int((jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


@functools.cache
def environment() -> dict[str, Any]:
    """Describes versions, machine and device, which a process is asked for that lets it go."""
    code = "import jax; device = jax.devices()[0]; print(device.device_kind); "
    code += "print(getattr(device, 'compute_capability', ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    device, capability = done.stdout.removesuffix("\n").split("\n")[-2:]
    versions = {}
    for name in ("jax", "jaxlib", "flax", "optax", "torch"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return {
        "versions": versions,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "device": device,
        "capability": capability,
    }


def processor() -> str:
    """Names the CPU and its matmul instructions, as far as the system tells them."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    names = [line.split(":")[1].strip() for line in text.splitlines() if "model name" in line]
    flags = [each for each in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if each in text]
    return " ".join([*names[:1], *flags])


def finish(
    bench: str, columns: tuple[str, ...], cells: list[tuple[Any, ...]], rows: Any, file: Path | None
) -> None:
    """Prints the table and a line of JSON; writes the record to `file` if it is not None."""
    from fsdp_jax.tables import text_table

    print(text_table(columns, cells, right=columns[1:]))
    record = {"bench": bench, "rows": rows, "environment": environment()}
    print(json.dumps(record))
    if file is not None:
        file.write_text(json.dumps(record, indent=1) + "\n")
