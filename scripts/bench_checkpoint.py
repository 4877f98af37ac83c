"""Throughput, host memory and blocking time of checkpoints, against plain files and plain copies of
the same bytes.

    python scripts/bench_checkpoint.py [--gib 2] [--rounds 3] [--directory DIR] [--json FILE]

The state is a GPT with AdamW, float32, sharded over 8 virtual CPU devices by `full_shard`.

Conventions
- Each measurement runs in a child process of its own; rounds alternate between ours and plain,
  medians are compared.
- save: from the call until the step is in place, digested and flushed to disk. Plain write: the
  same bytes in one file, from memory, in blocks of 8 MiB, flushed.
- restore: `CheckpointStore.restore`, with and without verification. Plain read: the checkpoint's
  own files, one after another, into memory that is kept, as the state is; streamed: through one
  block of 8 MiB, which is no restore, and for information. Before each, the kernel is told to
  forget the files (`posix_fadvise`).
- blocked: how long an asynchronous `save` keeps its caller. Copy: every shard to an array of the
  host's own.
- Peak memory is the child's largest resident set less that before the call. The restored state
  itself is in it: the devices' memory is the host's.
- Exit code 1 where a target is missed.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_init_memory import peak, resident

DEVICES = 8
GIB, MIB = 2**30, 2**20
BLOCK = 8 * MIB
THROUGHPUT, RESTORE_PEAK, EXPORT_PEAK, BLOCKED = 0.6, 1.3, 0.5 * GIB, 1.0
Figures = dict[str, float]


def make(gib: float) -> Any:
    """A layout whose state has about that size; nothing is allocated."""
    import jax
    import optax

    import fsdp_jax
    from fsdp_jax.launch import use_virtual_devices
    from fsdp_jax.models import GPT, GPTConfig

    use_virtual_devices(DEVICES)
    layers = max(
        1, round((gib * GIB / 12 - 33e6) / 12.6e6)
    )  # 12 bytes a parameter; 12.6M a block, 33M the embedding
    config = GPTConfig(vocab_size=32_000, sequence_length=1024, layers=layers, width=1024, heads=16)
    mesh = fsdp_jax.make_mesh(devices=jax.devices("cpu"))
    jax.block_until_ready(jax.jit(lambda: jax.numpy.zeros(8))())
    return fsdp_jax.fully_shard(
        lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), mesh, "full_shard", "scan"
    )


def initialised(gib: float) -> tuple[Any, Any, int]:
    """(layout, a state of random numbers, which do not compress, its bytes)."""
    import jax
    import jax.numpy as jnp

    sharded = make(gib)
    state = sharded.init()
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)

    def random(opt_state: Any) -> Any:
        leaves, tree = jax.tree.flatten(opt_state)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        drawn = [jax.random.normal(k, x.shape) if jnp.issubdtype(x.dtype, jnp.floating) else x + 0
                 for k, x in zip(keys, leaves, strict=True)]  # fmt: skip
        return jax.tree.unflatten(tree, drawn)

    state = dataclasses.replace(
        state, opt_state=jax.jit(random, out_shardings=shardings)(state.opt_state)
    )
    return (
        sharded,
        jax.block_until_ready(state),
        sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
    )


def child_save(directory: Path, gib: float, rounds: int) -> Figures:
    """Synchronous saves and plain writes."""
    from fsdp_jax.checkpoint import CheckpointStore

    sharded, state, size = initialised(gib)
    ours, plain = [], []
    buffer = os.urandom(BLOCK)
    with CheckpointStore(directory / "checkpoints", keep=1, asynchronous=False) as store:
        for step in range(rounds):
            started = time.perf_counter()
            with (directory / "plain").open("wb", buffering=0) as file:
                for _ in range(size // BLOCK):
                    file.write(buffer)
                os.fsync(file.fileno())
            plain.append(time.perf_counter() - started)
            (directory / "plain").unlink()
            ours.append(store.save(step, sharded.to_checkpoint(state), data={}, metadata={}))
    return {"bytes": size, "ours_s": statistics.median(ours), "plain_s": statistics.median(plain)}


def child_blocked(directory: Path, gib: float, rounds: int) -> Figures:
    """Asynchronous saves and plain copies."""
    import jax
    import numpy as np

    from fsdp_jax.checkpoint import CheckpointStore

    sharded, state, size = initialised(gib)
    ours, plain = [], []
    with CheckpointStore(directory / "asynchronous", keep=1) as store:
        for step in range(rounds):
            started = time.perf_counter()
            shards = [
                shard.data
                for leaf in jax.tree.leaves(state.params)
                for shard in leaf.addressable_shards
            ]
            shards += [
                shard.data
                for leaf in jax.tree.leaves(state.opt_state)
                for shard in leaf.addressable_shards
            ]
            copies = [np.array(shard) for shard in shards]
            plain.append(time.perf_counter() - started)
            del copies, shards
            ours.append(store.save(step, sharded.to_checkpoint(state), data={}, metadata={}))
            store.wait()
    shutil.rmtree(directory / "asynchronous")
    return {"bytes": size, "ours_s": statistics.median(ours), "plain_s": statistics.median(plain)}


def child_read(directory: Path, _: float, __: int) -> Figures:
    """Plain reads of the checkpoint's files, once kept and once streamed."""
    import numpy as np

    files = forget(directory)
    started = time.perf_counter()
    kept = [np.fromfile(path, np.uint8) for path in files]
    seconds = time.perf_counter() - started
    size = sum(each.nbytes for each in kept)
    del kept
    forget(directory)
    started = time.perf_counter()
    block = memoryview(bytearray(BLOCK))
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return {"bytes": size, "plain_s": seconds, "streamed_s": time.perf_counter() - started}


def child_restore(directory: Path, gib: float, verify: bool) -> Figures:
    """One restore, and the memory it took."""
    import jax

    from fsdp_jax.checkpoint import CheckpointStore

    sharded = make(gib)
    with CheckpointStore(directory / "checkpoints") as store:
        step, target = max(store.steps()), sharded.checkpoint_target()
        size = sum(
            leaf.size * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(target)
            if leaf.dtype != target.rng.dtype
        )
        forget(directory)
        before, started = resident(), time.perf_counter()
        restored, *_ = store.restore(step, target, verify=verify)
        jax.block_until_ready(restored.params)
        seconds = time.perf_counter() - started
    return {"bytes": size, "ours_s": seconds, "peak": peak() - before}


def child_export(directory: Path, gib: float, _: int) -> Figures:
    """One export, and the memory it took."""
    from fsdp_jax.checkpoint import CheckpointStore, export_params
    from fsdp_jax.tree import flatten

    sharded = make(gib)
    largest = max(leaf.bytes for leaf in flatten(sharded.layout.params).values())
    with CheckpointStore(directory / "checkpoints") as store:
        step = max(store.steps())
        before, started = resident(), time.perf_counter()
        done = export_params(store, step, directory / "export")
        seconds = time.perf_counter() - started
    shutil.rmtree(directory / "export")
    return {"bytes": done.size, "ours_s": seconds, "peak": peak() - before, "largest": largest}


def forget(directory: Path) -> list[Path]:
    """The checkpoint's files, which the kernel no longer holds in memory."""
    files = [path for path in sorted((directory / "checkpoints").rglob("*")) if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return files


CHILDREN = {
    "save": child_save, "read": child_read, "blocked": child_blocked, "export": child_export,
    "restore": lambda directory, gib, _: child_restore(directory, gib, verify=False),
    "verified": lambda directory, gib, _: child_restore(directory, gib, verify=True),
}  # fmt: skip


def run(name: str, directory: Path, gib: float, rounds: int) -> Figures:
    """One measurement in a process of its own."""
    words = [sys.executable, __file__, "--child", name, "--directory", str(directory)]
    words += ["--gib", str(gib), "--rounds", str(rounds)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def rate(figures: Figures, seconds: str) -> float:
    """GiB/s."""
    return figures["bytes"] / GIB / figures[seconds]


def measure(
    directory: Path, gib: float, rounds: int
) -> tuple[list[tuple[str, str, str, str, bool]], dict[str, Any]]:
    """(rows of the table, all figures)."""
    found: dict[str, Any] = {"save": run("save", directory, gib, rounds)}
    names = ("read", "restore", "verified")
    each = [{name: run(name, directory, gib, 1) for name in names} for _ in range(rounds)]
    for name in names:
        found[name] = {
            key: statistics.median(one[name][key] for one in each) for key in each[0][name]
        }
    found["export"], found["blocked"] = (
        run("export", directory, gib, 1),
        run("blocked", directory, gib, rounds),
    )
    rows = []
    write, read = rate(found["save"], "plain_s"), rate(found["read"], "plain_s")
    rows.append(
        ("plain read, streamed", "", f"{rate(found['read'], 'streamed_s'):.2f} GiB/s", "", True)
    )
    for name, plain in (("save", write), ("restore", read), ("verified", read)):
        ours = rate(found[name], "ours_s")
        label = {"save": "save", "restore": "restore, unverified", "verified": "restore"}[name]
        target = f">= {THROUGHPUT}x" if name != "verified" else ""
        fits = name == "verified" or ours >= THROUGHPUT * plain
        rows.append(
            (label, f"{ours:.2f} GiB/s", f"{plain:.2f} GiB/s, {ours / plain:.2f}x", target, fits)
        )
    for name, label in (("restore", "peak of a restore"), ("verified", "peak of a verified one")):
        times = found[name]["peak"] / found[name]["bytes"]
        against = f"{found[name]['bytes'] / GIB:.2f} GiB, {times:.2f}x"
        rows.append(
            (
                label,
                f"{found[name]['peak'] / GIB:.2f} GiB",
                against,
                f"< {RESTORE_PEAK}x",
                times < RESTORE_PEAK,
            )
        )
    above = found["export"]["peak"] - found["export"]["largest"]
    size, largest = (found["export"][name] / GIB for name in ("peak", "largest"))
    against = f"{largest:.2f} GiB, {above / GIB:+.2f}"
    rows.append(
        ("peak of an export", f"{size:.2f} GiB", against, "< 0.5 GiB more", above < EXPORT_PEAK)
    )
    ours, plain = found["blocked"]["ours_s"], found["blocked"]["plain_s"]
    against = f"{plain:.2f} s, {ours / plain:.2f}x"
    rows.append(
        ("blocked by a save", f"{ours:.2f} s", against, f"<= {BLOCKED}x", ours <= BLOCKED * plain)
    )
    return rows, found


def main() -> int:
    """Prints a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=CHILDREN)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child](options.directory, options.gib, options.rounds)))
        return 0
    from fsdp_jax.tables import text_table

    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        rows, found = measure(Path(directory), options.gib, options.rounds)
    verdicts = [(*row[:4], "" if row[4] else "MISSED") for row in rows]
    print(text_table(["what", "ours", "against", "target", ""], verdicts))
    text = json.dumps(found)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return int(not all(row[4] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
