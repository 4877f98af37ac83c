"""Peak host memory of importing other programs' checkpoints into shards, against the shards.

    python scripts/bench_import_foreign.py [--mib 512] [--dir DIR] [--cases orbax-as-is ...]

Arrays of 64 MiB of float32 are imported over 8 virtual CPU devices, as they are and transposed.

Conventions
- orbax: written by plain orbax from 8 devices, so that a chunk is an eighth of an array; `whole`
  from one device: a chunk is an array, which tensorstore decodes as a whole.
- dcp: the files of 8 ranks of FSDP2, whose shards are of the first dim.
- levanter: written by jax's own serialization, an array a folder, from 8 devices.
- `maxtext`: layers along dim 1 and heads of their own, as MaxText stores a kernel.
- Each import runs in a child process of its own. Peak is the child's largest resident set
  (`ru_maxrss`) less what was resident before the call; the shards are in it, for the devices'
  memory is the host's.
- The target does not hold for `whole`, of which a chunk is 64 MiB. Exit code 1 where it is missed.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_init_memory import peak, resident

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # which write the files

MIB = 1 << 20
ARRAY_MIB = 64
DEVICES = 8
TARGET = 1.05
CASES = [
    *("orbax-as-is", "orbax-transposed", "orbax-maxtext", "orbax-whole"),
    *("dcp-as-is", "dcp-transposed", "levanter-as-is"),
]
LAYERS, HEADS, HEAD, WIDTH = 8, 16, 64, 2048
SHAPES = {"maxtext": (WIDTH, LAYERS, HEADS, HEAD)}


def shape_of(case: str) -> tuple[int, ...]:
    """Returns the shape of an array in the files."""
    return SHAPES.get(case.partition("-")[2], (2048, 8192))


def arrays(mib: int) -> list[str]:
    """Names the arrays."""
    return [f"a{number}" for number in range(mib // ARRAY_MIB)]


def write(case: str, folder: Path, mib: int) -> None:
    """Writes the checkpoint of a case."""
    import jax
    import orbax.checkpoint as ocp
    from jax.sharding import NamedSharding, PartitionSpec

    from fsdp_jax.launch import use_virtual_devices

    use_virtual_devices(DEVICES)
    random = np.random.default_rng(0).normal(size=ARRAY_MIB * MIB // 4).astype(np.float32)
    random = random.reshape(shape_of(case))
    values = {name: np.roll(random, number) for number, name in enumerate(arrays(mib))}
    if case.startswith("dcp"):
        importlib.import_module("dcp_files").write_dcp(folder, values, ranks=8)
        return
    used = jax.devices()[: 1 if case.endswith("whole") else DEVICES]
    sharding = NamedSharding(jax.make_mesh((len(used),), ("x",), devices=used), PartitionSpec("x"))
    placed = {name: jax.device_put(each, sharding) for name, each in values.items()}
    if case.startswith("orbax"):
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(folder, placed)
        return
    importlib.import_module("levanter_files").write_levanter(folder, {"model": placed})


def child(case: str, folder: Path, mib: int) -> dict[str, Any]:
    """Imports, and measures."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from fsdp_jax import checkpoint
    from fsdp_jax.launch import use_virtual_devices

    use_virtual_devices(DEVICES)
    program, _, view = case.partition("-")
    shape = shape_of(case)
    rename = None
    if view == "transposed":
        shape = shape[::-1]
        rename = lambda path, saved: saved[path].transpose()  # noqa: E731
    if view == "maxtext":
        shape = (LAYERS, WIDTH, HEADS * HEAD)
        rename = lambda path, saved: np.moveaxis(saved[path], 1, 0).reshape(shape)  # noqa: E731
    mesh = jax.make_mesh((DEVICES,), ("data",))
    spec = PartitionSpec(None, "data") if view == "maxtext" else PartitionSpec("data")
    sharding = NamedSharding(mesh, spec)
    target = {
        name: jax.ShapeDtypeStruct(shape, "float32", sharding=sharding) for name in arrays(mib)
    }
    jax.block_until_ready(jax.jit(lambda: jax.numpy.zeros(8))())
    read = getattr(checkpoint, f"import_{program}")
    before, start = resident(), time.perf_counter()
    params = jax.block_until_ready(read(folder, target, rename=rename))
    seconds = time.perf_counter() - start
    placed = sum(each.nbytes for each in params.values())
    return {"case": case, "bytes": placed, "peak": peak() - before, "seconds": seconds}


def main() -> int:
    """Prints a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--child", choices=("write", "import"))
    options = parser.parse_args()
    if options.child == "write":
        write(options.cases[0], options.dir, options.mib)
        return 0
    if options.child:
        print(json.dumps(child(options.cases[0], options.dir, options.mib)))
        return 0
    from fsdp_jax.tables import text_table

    rows, found, missed = [], [], False
    for case in options.cases:
        with tempfile.TemporaryDirectory(dir=options.dir) as above:
            command = [sys.executable, __file__, "--cases", case, "--mib", str(options.mib)]
            command += ["--dir", str(Path(above) / "checkpoint"), "--child"]
            subprocess.run([*command, "write"], check=True, stdout=subprocess.DEVNULL)
            done = subprocess.run([*command, "import"], check=True, capture_output=True, text=True)
        each = json.loads(done.stdout.splitlines()[-1])
        ratio = each["peak"] / each["bytes"]
        misses = ratio > TARGET and not case.endswith("whole")
        missed |= misses
        found.append(each)
        rows.append(
            [
                case,
                f"{each['bytes'] / MIB:.0f}",
                f"{each['peak'] / MIB:.0f}",
                f"{ratio:.3f}",
                f"{each['seconds']:.1f}",
                "MISSED" if misses else "",
            ]
        )
    header = ["case", "shards MiB", "peak MiB", f"x (<= {TARGET})", "seconds", ""]
    print(text_table(header, rows))
    print(json.dumps(found))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
