"""Speed and host memory of reading foreign weights into shards, against plain reads of the same
files.

    python scripts/bench_import.py [--gib 3] [--rounds 3] [--dir DIR] [--json FILE] [--cases
    llama-bfloat16 ...]

The models are a Llama and a GPT-2 of `--gib` bytes of random numbers each, in files of about 500 MB
under Hugging Face's names, imported in the dtype of the files over 8 virtual CPU devices by
`full_shard`, and also from bfloat16 into float32. The files are deleted afterwards.

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
from pathlib import Path
from typing import Any

from bench_init_memory import peak, resident

DEVICES = 8
GIB, MIB = 2**30, 2**20
BLOCK = 8 * MIB
FILE_BYTES = 500_000_000
PEAK, SPEED = 1.25, 0.5
Figures = dict[str, float]
# name: (family, dtype of the files, dtype of the parameters)
CASES = {
    "llama-bfloat16": ("llama", "bfloat16", "bfloat16"),
    "llama-float32": ("llama", "float32", "float32"),
    "llama-widened": ("llama", "bfloat16", "float32"),
    "gpt2-bfloat16": ("gpt2", "bfloat16", "bfloat16"),
    "gpt2-float32": ("gpt2", "float32", "float32"),
}


def config_of(case: str, gib: float) -> Any:
    """Of a model whose parameters in the files' dtype take about that much."""
    from fsdp_jax.models import GPTConfig, LlamaConfig, parameter_count
    from fsdp_jax.models.llama import parameter_count as llama_count

    family, dtype, _ = CASES[case]
    config: Any
    if family == "llama":
        config = LlamaConfig(
            vocab_size=32_000,
            sequence_length=4096,
            layers=1,
            width=2048,
            heads=32,
            kv_heads=8,
            hidden=5632,
        )
    else:
        config = GPTConfig(vocab_size=50_257, sequence_length=1024, layers=1, width=1600, heads=25)
    count = llama_count if family == "llama" else parameter_count
    one, two = count(config), count(replace(config, layers=2))
    wanted = gib * GIB / (2 if dtype == "bfloat16" else 4)
    return replace(config, layers=max(1, round((wanted - one) / (two - one)) + 1))


def make_files(case: str, gib: float, folder: Path) -> None:
    """Random weights under foreign names."""
    import numpy as np

    from fsdp_jax.io.safetensors_writer import TensorSpec, write_weights
    from fsdp_jax.weights import config_json, table_of

    config, dtype = config_of(case, gib), np.dtype(CASES[case][1])
    import jax

    from fsdp_jax.tree import flatten

    sharded = laid_out(case, gib)
    leaves = flatten(jax.tree.map(lambda leaf: leaf.abstract, sharded.layout.params))
    mappings = [mapping for each in table_of(config).mappings(leaves).values() for mapping in each]
    drawn = np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(np.float32).astype(dtype)

    def values() -> Iterator[np.ndarray]:
        for mapping in mappings:
            yield np.resize(drawn, mapping.shape)

    outlines = [TensorSpec(mapping.name, mapping.shape, dtype) for mapping in mappings]
    others = {"config.json": json.dumps(config_json(config)).encode()}
    write_weights(
        folder, outlines, values(), file_bytes=FILE_BYTES, metadata={"format": "pt"}, others=others
    )


def laid_out(case: str, gib: float) -> Any:
    """A layout in the dtype of the case; nothing is allocated."""
    import jax
    import optax

    import fsdp_jax
    from fsdp_jax.launch import use_virtual_devices
    from fsdp_jax.models import GPT, Llama

    use_virtual_devices(DEVICES)
    config, dtype = config_of(case, gib), CASES[case][2]
    mesh = fsdp_jax.make_mesh(devices=jax.devices("cpu"))
    jax.block_until_ready(jax.jit(lambda: jax.numpy.zeros(8))())
    model = Llama if CASES[case][0] == "llama" else GPT
    precision = fsdp_jax.Precision(param=dtype, compute=dtype)
    return fsdp_jax.fully_shard(
        lambda rngs: model(config, rngs=rngs),
        optax.sgd(0.0),
        mesh,
        "full_shard",
        "scan",
        precision=precision,
    )


def child_import(case: str, folder: Path, gib: float) -> Figures:
    """One import, and the memory it took."""
    import jax

    from fsdp_jax.weights import import_weights, read_config

    sharded = laid_out(case, gib)
    target = sharded.checkpoint_target().params
    size = forget(folder)
    before, started = resident(), time.perf_counter()
    params = import_weights(folder, target, read_config(folder))
    jax.block_until_ready(params)
    seconds = time.perf_counter() - started
    took = peak() - before
    leaves = jax.tree.leaves(params)
    assert {str(leaf.dtype) for leaf in leaves} == {CASES[case][2]}
    placed = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    return {"bytes": size, "import_s": seconds, "peak": took, "placed": placed}


def child_stream(_: str, folder: Path, __: float) -> Figures:
    """The files through one block of memory."""
    size, block = forget(folder), memoryview(bytearray(BLOCK))
    started = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return {"bytes": size, "stream_s": time.perf_counter() - started}


def child_keep(_: str, folder: Path, __: float) -> Figures:
    """The files into new memory."""
    import numpy as np

    size = forget(folder)
    started = time.perf_counter()
    kept = [np.fromfile(path, np.uint8) for path in sorted(folder.glob("*.safetensors"))]
    seconds = time.perf_counter() - started
    assert sum(each.nbytes for each in kept) == size
    return {"bytes": size, "keep_s": seconds}


def child_touch(_: str, __: Path, gib: float) -> Figures:
    """Memory that is given back."""
    import numpy as np

    return {"touched": float(np.ones(int(3 * gib * GIB), np.uint8).size)}


def forget(folder: Path) -> int:
    """Bytes of the files, which the kernel no longer holds in memory."""
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sum(path.stat().st_size for path in files)


def child_make(case: str, folder: Path, gib: float) -> Figures:
    """The files."""
    make_files(case, gib, folder)
    return {}


CHILDREN = {
    "make": child_make,
    "touch": child_touch,
    "stream": child_stream,
    "import": child_import,
    "keep": child_keep,
}


def run(name: str, case: str, folder: Path, gib: float) -> Figures:
    """One measurement in a process of its own."""
    words = [
        sys.executable,
        __file__,
        "--child",
        name,
        "--cases",
        case,
        "--dir",
        str(folder),
        "--gib",
        str(gib),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(case: str, folder: Path, gib: float, rounds: int) -> Figures:
    """Medians of a case."""
    run("make", case, folder, gib)
    each: list[Figures] = []
    for _ in range(rounds):
        figures: Figures = {}
        for name in ("stream", "import", "keep"):
            figures |= run("touch", case, folder, gib) | run(name, case, folder, gib)
        each.append(figures)
    shutil.rmtree(folder)
    return {key: statistics.median(one[key] for one in each) for key in each[0]}


def row(case: str, found: Figures) -> tuple[list[str], bool]:
    """(of the table, whether the targets are met)."""
    speed = {
        name: found["bytes"] / GIB / found[f"{name}_s"] for name in ("import", "stream", "keep")
    }
    times, rate = found["peak"] / found["placed"], speed["import"] / speed["stream"]
    fits = times < PEAK and rate >= SPEED
    cells = [
        case, f"{found['bytes'] / GIB:.2f}", f"{found['placed'] / GIB:.2f}", f"{found['peak'] / GIB:.2f}",
        f"{times:.3f}", f"{speed['import']:.2f}", f"{speed['stream']:.2f}", f"{rate:.2f}", f"{speed['keep']:.2f}",
        "" if fits else "MISSED",
    ]  # fmt: skip
    return cells, fits


HEADER = [
    "case", "files GiB", "arrays GiB", "peak GiB", f"x (< {PEAK})", "import GiB/s", "streamed", f"x (>= {SPEED})",
    "kept", "",
]  # fmt: skip


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
