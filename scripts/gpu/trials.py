"""What the scripts in this folder share: models, trials in processes of their own, records."""

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[2] / "configs"
# {model: (configuration, words of the command line)}: one device, bfloat16
MODELS = {
    "gpt2-124m": ("gpt2.yaml", "--prefetch none"),
    "llama-1b": ("llama3_2_1b.yaml", "--prefetch none --remat none --train.loss_chunk none"),
}
TOY = "--model.layers 2 --model.width 64 --model.heads 2 --model.vocab_size 512"
TOY_LLAMA = f"{TOY} --model.kv_heads 2 --model.hidden 128"


def load(model: str, sequence: int, rows: int, words: str = "", *, toy: bool = False) -> Any:
    """Loads the configuration of a model, at toy size if asked; `words` are further keys."""
    from fsdp_jax.train.config_file import load_config

    file, own = MODELS[model]
    sizes = f"--data.sequence_length {sequence} --train.global_batch_size {rows}"
    small = TOY if toy else ""
    return load_config(CONFIGS / file, f"{own} {small} {sizes} {words}".split())


def run_trial(script: str, trial: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Runs `script --trial JSON` in a process of its own; its row, or {"failed": why}."""
    command = [sys.executable, script, "--trial", json.dumps(trial)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return trial | {"failed": f"more than {seconds:.0f} s"}
    if done.returncode == 0:
        return trial | dict(json.loads(done.stdout.splitlines()[-1]))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    memory = [line for line in lines if "RESOURCE_EXHAUSTED" in line or "OutOfMemory" in line]
    why = [*memory[:1], *lines[-1:], f"exit code {done.returncode}"][0]
    return trial | {"failed": why.strip()[:200]}


def median_seconds(step: Any, *, steps: int, warmup: int = 2) -> float:
    """Times calls of `step`, which waits for its result; the median after the first ones."""
    seconds = []
    for _ in range(warmup + steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[warmup:])[steps // 2]


def peak_bytes() -> int:
    """Reads the allocator's peak; 0 where the device does not tell."""
    import jax

    return int((jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


def environment() -> dict[str, Any]:
    """Describes versions, machine and device, which a process is asked for that lets it go."""
    code = "import jax; print(jax.devices()[0].device_kind)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
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
        "cores": os.cpu_count(),
        "device": done.stdout.strip().splitlines()[-1],
    }


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
