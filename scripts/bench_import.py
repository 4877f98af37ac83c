"""Speed and host memory of importing weights into shards, against plain reads of the same files.

    python scripts/bench_import.py [--gib 3] [--rounds 3] [--dir DIR] [--json FILE] [--cases
    llama-bfloat16 ...]

The models are a Llama and a GPT-2 of `--gib` bytes of random numbers each, in files of about 500 MB
under Hugging Face's names, imported in the dtype of the files over 8 virtual CPU devices by
`full_shard`, and also from bfloat16 into float32, and into a frozen base in 4 bits. The files are
deleted afterwards.

Conventions
- Each measurement runs in a child process of its own; rounds alternate, medians are compared.
- Before each, the kernel is told to forget the files (`posix_fadvise`, DONTNEED), after they have
  been flushed.
- The machine's memory has been in use before: a child that fills three times the bytes and ends
  goes ahead of each measurement. A virtual machine gets memory from its host at the first touch, at
  a tenth of the speed.
- import: `import_weights`, the first in its process, from the call until every shard is in place.
- Sequential read: the same files, one after another, streamed through one block of 8 MiB, which
  takes no new memory; the target is of the import against that. Kept: read into new memory, as an
  import has to, for information.
- Peak memory is the child's largest resident set (`VmHWM`) less what was resident before the call,
  jax's devices having been started; the imported arrays are in it, for the devices' memory is the
  host's. Against the bytes of the arrays as they are laid out, replicas counted for each device.
- A base in 4 bits: what the peak has above the arrays, over the largest array as the files hold it
  (all its layers); it costs arithmetic, so no speed is asked of it.
- Exit code 1 where a target is missed.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from bench_init_memory import peak, resident

DEVICES = 8
GIB, MIB = 2**30, 2**20
BLOCK = 8 * MIB
FILE_BYTES = 500_000_000
PEAK, SPEED, ABOVE = 1.25, 0.5, 1.1
Measurement = dict[str, float]
# name: (family, dtype of the files, dtype of the parameters or the format of a frozen base)
CASES = {
    "llama-bfloat16": ("llama", "bfloat16", "bfloat16"),
    "llama-float32": ("llama", "float32", "float32"),
    "llama-widened": ("llama", "bfloat16", "float32"),
    "gpt2-bfloat16": ("gpt", "bfloat16", "bfloat16"),
    "gpt2-float32": ("gpt", "float32", "float32"),
    "llama-nf4": ("llama", "bfloat16", "nf4"),
}
PRESETS: dict[str, tuple[str, dict[str, int]]] = {
    "llama": ("llama2-7b", {"width": 2048, "heads": 32, "kv_heads": 8, "hidden": 5632}),
    "gpt": ("gpt2-xl", {}),
}


def config_of(case: str, gib: float) -> Any:
    """Returns the configuration of a model of about that size in the dtype of the files."""
    from fsdp_jax.models import FAMILIES, parameter_count

    name, dtype, _ = CASES[case]
    family = FAMILIES[name]
    preset, sizes = PRESETS[name]
    config = family.preset(preset, **sizes, layers=1)
    one, two = (parameter_count(replace(config, layers=depth)) for depth in (1, 2))
    wanted = gib * GIB / (2 if dtype == "bfloat16" else 4)
    return replace(config, layers=max(1, round((wanted - one) / (two - one)) + 1))


def make_files(case: str, gib: float, folder: Path) -> None:
    """Writes random weights under Hugging Face's names."""
    import numpy as np

    from fsdp_jax.io.safetensors_writer import write_weights
    from fsdp_jax.weights import config_json, table_of

    config, dtype = config_of(case, gib), np.dtype(CASES[case][1])
    import jax

    from fsdp_jax.tree import flatten

    layout = laid_out(case, gib).layout
    leaves = {
        path: jax.ShapeDtypeStruct(leaf.model_shape, dtype)
        for path, leaf in flatten(layout.params).items()
    }
    mappings = [mapping for each in table_of(config).mappings(leaves).values() for mapping in each]
    drawn = np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(np.float32).astype(dtype)

    def values() -> Iterator[np.ndarray]:
        for mapping in mappings:
            yield np.resize(drawn, mapping.shape)

    outlines = {each.name: jax.ShapeDtypeStruct(each.shape, dtype) for each in mappings}
    others = {"config.json": json.dumps(config_json(config)).encode()}
    write_weights(
        folder, outlines, values(), file_bytes=FILE_BYTES, metadata={"format": "pt"}, others=others
    )


def laid_out(case: str, gib: float) -> Any:
    """Returns a layout in the dtype of the case; nothing is allocated."""
    import jax
    import optax

    import fsdp_jax
    from fsdp_jax.launch import use_virtual_devices
    from fsdp_jax.models import FAMILIES

    use_virtual_devices(DEVICES)
    config, dtype = config_of(case, gib), CASES[case][2]
    mesh = fsdp_jax.make_mesh(devices=jax.devices("cpu"))
    jax.block_until_ready(jax.jit(lambda: jax.numpy.zeros(8))())
    model = FAMILIES[CASES[case][0]].model
    settings: dict[str, Any] = {}
    if dtype == "nf4":
        dtype = "bfloat16"
        settings = {"frozen": ("kernel|embedding",), "base": fsdp_jax.QuantizedBase("nf4")}
    precision = fsdp_jax.Precision(param=dtype, compute=dtype)
    return fsdp_jax.fully_shard(
        lambda rngs: model(config, rngs=rngs),
        optax.sgd(0.0),
        mesh,
        "full_shard",
        "scan",
        precision=precision,
        **settings,
    )


def child_import(case: str, folder: Path, gib: float) -> Measurement:
    """Measures one import and its memory."""
    import jax

    from fsdp_jax.sharding.padding import stored_array
    from fsdp_jax.tree import flatten
    from fsdp_jax.weights import import_weights, read_config

    sharded = laid_out(case, gib)
    target = sharded.checkpoint_target().params
    size = forget(folder)
    before, started = resident(), time.perf_counter()
    params = import_weights(folder, target, read_config(folder))
    jax.block_until_ready(params)
    seconds = time.perf_counter() - started
    took = peak() - before
    leaves = [stored_array(leaf) for leaf in flatten(params).values()]
    if CASES[case][2] == "nf4":
        assert {str(leaf.dtype) for leaf in leaves} == {"uint8", "bfloat16"}
    else:
        assert {str(leaf.dtype) for leaf in leaves} == {CASES[case][2]}
    placed = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    largest = max(prod(leaf.model_shape) for leaf in sharded.layout) * 2
    found = {"bytes": size, "import_s": seconds, "peak": took, "placed": placed}
    return found | {"largest": largest}


def child_stream(_: str, folder: Path, __: float) -> Measurement:
    """Reads the files through one block of memory."""
    size, block = forget(folder), memoryview(bytearray(BLOCK))
    started = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return {"bytes": size, "stream_s": time.perf_counter() - started}


def child_keep(_: str, folder: Path, __: float) -> Measurement:
    """Reads the files into new memory."""
    import numpy as np

    size = forget(folder)
    started = time.perf_counter()
    kept = [np.fromfile(path, np.uint8) for path in sorted(folder.glob("*.safetensors"))]
    seconds = time.perf_counter() - started
    assert sum(each.nbytes for each in kept) == size
    return {"bytes": size, "keep_s": seconds}


def child_touch(_: str, __: Path, gib: float) -> Measurement:
    """Allocates memory and frees it."""
    import numpy as np

    return {"touched": float(np.ones(int(3 * gib * GIB), np.uint8).size)}


def forget(folder: Path) -> int:
    """Drops the files from the page cache; returns their bytes."""
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sum(path.stat().st_size for path in files)


def child_make(case: str, folder: Path, gib: float) -> Measurement:
    """Writes the files."""
    make_files(case, gib, folder)
    return {}


CHILDREN = {
    "make": child_make,
    "touch": child_touch,
    "stream": child_stream,
    "import": child_import,
    "keep": child_keep,
}


def run(name: str, case: str, folder: Path, gib: float) -> Measurement:
    """Runs one measurement in its own process."""
    command = [sys.executable, __file__, "--child", name, "--cases", case]
    command += ["--dir", str(folder), "--gib", str(gib)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(case: str, folder: Path, gib: float, rounds: int) -> Measurement:
    """Returns the medians of a case."""
    run("make", case, folder, gib)
    each: list[Measurement] = []
    for _ in range(rounds):
        measurement: Measurement = {}
        for name in ("stream", "import", "keep"):
            measurement |= run("touch", case, folder, gib) | run(name, case, folder, gib)
        each.append(measurement)
    shutil.rmtree(folder)
    return {key: statistics.median(one[key] for one in each) for key in each[0]}


def row(case: str, found: Measurement) -> tuple[list[str], bool]:
    """Returns (a row of the table, whether the targets are met)."""
    size, placed, largest = (found[name] / GIB for name in ("bytes", "placed", "peak"))
    speed = {name: size / found[f"{name}_s"] for name in ("import", "stream", "keep")}
    times, rate = largest / placed, speed["import"] / speed["stream"]
    fits = times < PEAK and rate >= SPEED
    if CASES[case][2] == "nf4":
        times = (found["peak"] - found["placed"]) / found["largest"]
        fits = times < ABOVE
    speeds = (speed["import"], speed["stream"], rate, speed["keep"])
    cells = [f"{value:.2f}" for value in (size, placed, largest)]
    cells += [f"{times:.3f}", *(f"{value:.2f}" for value in speeds)]
    return [case, *cells, "" if fits else "MISSED"], fits


HEADER = ["case", "files GiB", "arrays GiB", "peak GiB", f"x (< {PEAK})"]
HEADER += ["import GiB/s", "streamed", f"x (>= {SPEED})", "in memory", ""]


def main() -> int:
    """Prints a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--child", choices=CHILDREN)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child](options.cases[0], options.dir, options.gib)))
        return 0
    from fsdp_jax.tables import text_table

    found = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for case in options.cases:
            found[case] = measure(case, Path(directory) / case, options.gib, options.rounds)
    rows = [row(case, each) for case, each in found.items()]
    print(text_table(HEADER, [cells for cells, _ in rows]))
    text = json.dumps(found)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return int(not all(fits for _, fits in rows))


if __name__ == "__main__":
    sys.exit(main())
