"""Measures checkpoints: throughput, host memory and blocking time, against other ways to save.

    python scripts/bench_checkpoint.py [--gib 2] [--rounds 3] [--torch PYTHON] [--only saves]
                                       [--directory DIR] [--json FILE]

The state is a GPT with AdamW, float32, sharded over 8 virtual CPU devices by `full_shard`. Others
are plain files, copies, bare orbax, and torch's distributed checkpoint (DCP), which runs under the
interpreter that `--torch` names; without it that column is empty, and its targets are not judged.

Conventions
- Each measurement runs in a child process of its own; rounds alternate between ours and plain,
  medians are compared.
- save: from the call until the step is in place, digested and flushed to disk. Plain write: the
  same bytes in one file, from memory, in blocks of 8 MiB, flushed.
- restore: `CheckpointStore.restore`, with and without verification. Plain read: the checkpoint's
  files, one after another, into memory that is kept, as the state is; streamed: through one block
  of 8 MiB, which is not a restore, for information. Before each, the files are dropped from the
  page cache (`posix_fadvise`).
- blocked: how long an asynchronous `save` blocks its caller. Copy: every shard to a numpy array.
- saves: of a state of `--gib`, and of a toy of 10 MiB. A round is a child process each of ours,
  bare orbax and DCP, in turn, of 1 first and 4 later saves; each is removed, and what is pending
  written (`sync`), before the next. First: medians over rounds; later: over all saves of all
  rounds. The page cache is warm: what is written was just computed.
  - blocked: until an asynchronous save returns to its caller; total: until the step is complete.
    All three wait until their data is on disk (DCP: `sync_files`, its default).
  - ours is told that the state is finite, as a run knows from its steps; it digests every file and
    reads the metadata back besides. orbax: `save_async` and `save` with its defaults. DCP:
    `async_save` and `save` of a dict of CPU tensors of the same shapes, in
    one process with gloo; it copies the state while it blocks, where jax's CPU arrays need none.
  - the total of the toy misses its target, at 2 to 5 times that of DCP: ours takes about 90 ms of
    processor time, orbax 60 of them, for 53 arrays of any size.
- Peak memory is the child's largest resident set less that before the call. It includes the
  restored state: the devices' memory is the host's.
- Exit code 1 if a target is missed.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_init_memory import peak, resident

DEVICES = 8
GIB = 2**30
BLOCK = 8 << 20
THROUGHPUT = 0.6  # of plain files, at least
RESTORE_PEAK = 1.3  # of the state's bytes, at most
EXPORT_PEAK = 0.5 * GIB  # above the largest tensor, at most
BLOCKED = 1.0  # of a plain copy's time and of bare orbax's, at most
FIRST = 1.5  # of a later save's blocking, at most
TOTAL = 1.2  # of DCP's time, at most
LATER = 4  # saves of a round after its first
TOY = 0.01  # GiB
Measured = dict[str, float]


def sharded_model(gib: float) -> Any:
    """Returns a sharded model whose state has about `gib` GiB; allocates nothing."""
    import jax
    import optax

    import fsdp_jax
    from fsdp_jax.launch import use_virtual_devices
    from fsdp_jax.models import GPT, GPTConfig

    use_virtual_devices(DEVICES)
    # 12 bytes a parameter; 12.6M parameters a block, 33M in the embedding.
    layers = max(1, round((gib * GIB / 12 - 33e6) / 12.6e6))
    config = GPTConfig(vocab_size=32_000, sequence_length=1024, layers=layers, width=1024, heads=16)
    if gib == TOY:
        config = GPTConfig(vocab_size=256, sequence_length=128, layers=4, width=128, heads=4)
    mesh = fsdp_jax.make_mesh(devices=jax.devices("cpu"))
    jax.block_until_ready(jax.jit(lambda: jax.numpy.zeros(8))())
    return fsdp_jax.fully_shard(
        lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), mesh, "full_shard", "scan"
    )


def random_state(gib: float) -> tuple[Any, Any, int]:
    """Returns the sharded model, a state of incompressible random numbers, and its bytes."""
    import jax
    import jax.numpy as jnp

    sharded = sharded_model(gib)
    state = sharded.init()
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)

    def random(opt_state: Any) -> Any:
        leaves, tree = jax.tree.flatten(opt_state)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        for i, (key, leaf) in enumerate(zip(keys, leaves, strict=True)):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                leaves[i] = jax.random.normal(key, leaf.shape)
        return jax.tree.unflatten(tree, leaves)

    opt_state = jax.jit(random, out_shardings=shardings)(state.opt_state)
    state = jax.block_until_ready(dataclasses.replace(state, opt_state=opt_state))
    return sharded, state, sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def child_save(directory: Path, gib: float, rounds: int) -> Measured:
    """Measures synchronous saves and plain writes."""
    from fsdp_jax.checkpoint import CheckpointStore

    sharded, state, size = random_state(gib)
    ours: list[float] = []
    plain: list[float] = []
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


def child_blocked(directory: Path, gib: float, rounds: int) -> Measured:
    """Measures the blocking time of asynchronous saves, and plain copies."""
    import jax
    import numpy as np

    from fsdp_jax.checkpoint import CheckpointStore

    sharded, state, size = random_state(gib)
    ours: list[float] = []
    plain: list[float] = []
    with CheckpointStore(directory / "asynchronous", keep=1) as store:
        for step in range(rounds):
            started = time.perf_counter()
            leaves = jax.tree.leaves((state.params, state.opt_state))
            copies = [np.array(shard.data) for leaf in leaves for shard in leaf.addressable_shards]
            plain.append(time.perf_counter() - started)
            del copies, leaves
            ours.append(store.save(step, sharded.to_checkpoint(state), data={}, metadata={}))
            store.wait()
    shutil.rmtree(directory / "asynchronous")
    return {"bytes": size, "ours_s": statistics.median(ours), "plain_s": statistics.median(plain)}


def timed_saves(
    start: Callable[[Path], Any], finish: Callable[[Any], object], directory: Path
) -> tuple[list[float], list[float]]:
    """Returns blocked and total seconds of `1 + LATER` saves; each path is removed again."""
    blocked, total = [], []
    for step in range(1 + LATER):
        path = directory / str(step)
        os.sync()
        started = time.perf_counter()
        pending = start(path)
        blocked.append(time.perf_counter() - started)
        finish(pending)
        total.append(time.perf_counter() - started)
        assert path.is_dir(), f"{path} is complete"
        shutil.rmtree(path)
    return blocked, total


def summary(
    asynchronous: tuple[list[float], list[float]], synchronous: tuple[list[float], list[float]]
) -> dict[str, list[float]]:
    """Returns seconds by name: of the first save, and of each later one."""
    blocked, total = asynchronous
    return {
        "first_s": blocked[:1],
        "blocked_s": blocked[1:],
        "total_s": total[1:],
        "synchronous_s": synchronous[1][1:],
    }


def child_ours(directory: Path, gib: float, _: int) -> dict[str, Any]:
    """Measures our saves, asynchronous and synchronous, and notes the shapes for DCP."""
    import jax

    from fsdp_jax.checkpoint import CheckpointStore

    sharded, state, size = random_state(gib)
    state = sharded.to_checkpoint(state)
    shapes = [list(leaf.shape) for leaf in jax.tree.leaves(state)]
    (directory / "shapes.json").write_text(json.dumps(shapes))
    results = []
    for asynchronous in (True, False):
        with CheckpointStore(directory / "ours", asynchronous=asynchronous) as store:

            def start(path: Path, store: CheckpointStore = store) -> CheckpointStore:
                store.save(int(path.name), state, data={}, metadata={}, finite=True)
                return store

            results.append(timed_saves(start, CheckpointStore.wait, store.directory))
    return {"bytes": size, **summary(*results)}


def child_orbax(directory: Path, gib: float, _: int) -> dict[str, Any]:
    """Measures bare orbax's saves, with its defaults."""
    from orbax.checkpoint import v1 as orbax

    from fsdp_jax.checkpoint.arrays import to_arrays
    from fsdp_jax.sharding.padding import stored_array

    sharded, state, size = random_state(gib)
    leaves, _record = to_arrays(sharded.to_checkpoint(state))
    arrays = {path: stored_array(leaf) for path, leaf in leaves.items()}
    asynchronous = timed_saves(
        lambda path: orbax.save_async(path, arrays),
        lambda response: response.result(),
        directory / "orbax",
    )
    synchronous = timed_saves(
        lambda path: orbax.save(path, arrays), lambda _: None, directory / "orbax"
    )
    return {"bytes": size, **summary(asynchronous, synchronous)}


def child_dcp(directory: Path, _: float, __: int) -> dict[str, Any]:
    """Measures the saves of torch's distributed checkpoint; runs where torch is."""
    import logging

    import torch
    import torch.distributed
    import torch.distributed.checkpoint as dcp

    logging.disable(logging.WARNING)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/gloo", rank=0, world_size=1
    )
    shapes = json.loads((directory / "shapes.json").read_text())
    state = {str(i): torch.randn(shape) for i, shape in enumerate(shapes)}
    asynchronous = timed_saves(
        lambda path: dcp.async_save(state, checkpoint_id=str(path)),
        lambda future: future.result(),
        directory / "dcp",
    )
    synchronous = timed_saves(
        lambda path: dcp.save(state, checkpoint_id=str(path)), lambda _: None, directory / "dcp"
    )
    torch.distributed.destroy_process_group()
    (directory / "gloo").unlink(missing_ok=True)
    size = sum(tensor.nbytes for tensor in state.values())
    return {"bytes": size, **summary(asynchronous, synchronous)}


def measure_saves(
    directory: Path, gib: float, rounds: int, torch: str
) -> dict[str, dict[str, float]]:
    """Returns medians by library and name."""
    libraries = {"ours": sys.executable, "orbax": sys.executable}
    if torch:
        libraries["dcp"] = torch
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in libraries}
    sizes = {}
    for _ in range(rounds):
        for name, interpreter in libraries.items():
            measured: Any = run(name, directory, gib, 1, interpreter)
            sizes[name] = measured.pop("bytes")
            for key, values in measured.items():
                seconds[name].setdefault(key, []).extend(values)
    return {
        name: {"bytes": sizes[name]} | {key: statistics.median(all_) for key, all_ in own.items()}
        for name, own in seconds.items()
    }


def saves_table(
    measured: dict[str, dict[str, float]], *, toy: bool
) -> list[tuple[str, str, str, str, bool]]:
    """Returns rows (what, ours, others', target, whether it is met)."""
    ours, bare, dcp = measured["ours"], measured["orbax"], measured.get("dcp")
    size = "toy" if toy else f"{ours['bytes'] / GIB:.2f} GiB"

    def others(key: str) -> str:
        torch = f"{dcp[key]:.3f} s" if dcp else "no torch"
        return f"orbax {bare[key]:.3f} s, DCP {torch}"

    first, blocked = ours["first_s"], ours["blocked_s"]
    rows = [
        (
            f"{size}: blocked, first save",
            f"{first:.3f} s",
            others("first_s"),
            f"<= {FIRST}x later",
            first <= FIRST * blocked,
        ),
        (
            f"{size}: blocked, later",
            f"{blocked:.3f} s",
            others("blocked_s"),
            f"<= {BLOCKED}x orbax",
            blocked <= BLOCKED * bare["blocked_s"],
        ),
    ]
    for key, label in (("total_s", "asynchronous"), ("synchronous_s", "synchronous")):
        target, met = "", True
        if dcp:
            target, met = f"<= {TOTAL}x DCP", ours[key] <= TOTAL * dcp[key]
        rows.append((f"{size}: total, {label}", f"{ours[key]:.3f} s", others(key), target, met))
    return rows


def child_read(directory: Path, _: float, __: int) -> Measured:
    """Measures plain reads of the checkpoint's files, once kept and once streamed."""
    import numpy as np

    files = drop_from_page_cache(directory)
    started = time.perf_counter()
    contents = [np.fromfile(path, np.uint8) for path in files]
    seconds = time.perf_counter() - started
    size = sum(content.nbytes for content in contents)
    del contents
    drop_from_page_cache(directory)
    started = time.perf_counter()
    block = memoryview(bytearray(BLOCK))
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return {"bytes": size, "plain_s": seconds, "streamed_s": time.perf_counter() - started}


def child_restore(directory: Path, gib: float, verify: bool) -> Measured:
    """Measures one restore and its memory."""
    import jax

    from fsdp_jax.checkpoint import CheckpointStore

    sharded = sharded_model(gib)
    with CheckpointStore(directory / "checkpoints") as store:
        step, target = max(store.steps()), sharded.checkpoint_target()
        size = sum(
            leaf.size * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(target)
            if leaf.dtype != target.rng.dtype
        )
        drop_from_page_cache(directory)
        before = resident()
        started = time.perf_counter()
        restored, *_ = store.restore(step, target, verify=verify)
        jax.block_until_ready(restored.params)
        seconds = time.perf_counter() - started
    return {"bytes": size, "ours_s": seconds, "peak": peak() - before}


def child_export(directory: Path, gib: float, _: int) -> Measured:
    """Measures one export and its memory."""
    from fsdp_jax.checkpoint import CheckpointStore, export_params
    from fsdp_jax.tree import flatten

    sharded = sharded_model(gib)
    largest = max(leaf.bytes for leaf in flatten(sharded.layout.params).values())
    with CheckpointStore(directory / "checkpoints") as store:
        step = max(store.steps())
        before = resident()
        started = time.perf_counter()
        exported = export_params(store, step, directory / "export")
        seconds = time.perf_counter() - started
    shutil.rmtree(directory / "export")
    return {"bytes": exported.size, "ours_s": seconds, "peak": peak() - before, "largest": largest}


def drop_from_page_cache(directory: Path) -> list[Path]:
    """Drops the checkpoint's files from the page cache and returns them."""
    files = [path for path in sorted((directory / "checkpoints").rglob("*")) if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return files


CHILDREN: dict[str, Callable[[Path, float, int], dict[str, Any]]] = {
    "ours": child_ours,
    "orbax": child_orbax,
    "dcp": child_dcp,
    "save": child_save,
    "read": child_read,
    "blocked": child_blocked,
    "export": child_export,
    "restore": lambda directory, gib, _: child_restore(directory, gib, verify=False),
    "verified": lambda directory, gib, _: child_restore(directory, gib, verify=True),
}


def run(
    name: str, directory: Path, gib: float, rounds: int, interpreter: str = sys.executable
) -> Measured:
    """Runs one measurement in a child process."""
    command = [interpreter, __file__, "--child", name, "--directory", str(directory)]
    command += ["--gib", str(gib), "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def rate(measured: Measured, seconds: str) -> float:
    """Returns GiB/s."""
    return measured["bytes"] / GIB / measured[seconds]


def measure(directory: Path, gib: float, rounds: int) -> dict[str, Measured]:
    """Returns the measurements by name; medians where there are several rounds."""
    measured = {"save": run("save", directory, gib, rounds)}
    names = ("read", "restore", "verified")
    each = [{name: run(name, directory, gib, 1) for name in names} for _ in range(rounds)]
    for name in names:
        keys = each[0][name]
        measured[name] = {key: statistics.median(one[name][key] for one in each) for key in keys}
    measured["export"] = run("export", directory, gib, 1)
    measured["blocked"] = run("blocked", directory, gib, rounds)
    return measured


def table(measured: dict[str, Measured]) -> list[tuple[str, str, str, str, bool]]:
    """Returns rows (what, ours, plain, target, whether it is met)."""
    write, read = rate(measured["save"], "plain_s"), rate(measured["read"], "plain_s")
    streamed = rate(measured["read"], "streamed_s")
    rows = [("plain read, streamed", "", f"{streamed:.2f} GiB/s", "", True)]

    def throughput(label: str, name: str, plain: float, *, required: bool) -> None:
        ours = rate(measured[name], "ours_s")
        against = f"{plain:.2f} GiB/s, {ours / plain:.2f}x"
        target = f">= {THROUGHPUT}x" if required else ""
        met = not required or ours >= THROUGHPUT * plain
        rows.append((label, f"{ours:.2f} GiB/s", against, target, met))

    throughput("save", "save", write, required=True)
    throughput("restore, unverified", "restore", read, required=True)
    throughput("restore", "verified", read, required=False)

    for name, label in (("restore", "peak of a restore"), ("verified", "peak of a verified one")):
        peak_bytes, size = measured[name]["peak"], measured[name]["bytes"]
        times = peak_bytes / size
        against = f"{size / GIB:.2f} GiB, {times:.2f}x"
        ours, target = f"{peak_bytes / GIB:.2f} GiB", f"< {RESTORE_PEAK}x"
        rows.append((label, ours, against, target, times < RESTORE_PEAK))

    peak_bytes, largest = measured["export"]["peak"], measured["export"]["largest"]
    above = peak_bytes - largest
    against = f"{largest / GIB:.2f} GiB, {above / GIB:+.2f}"
    ours = f"{peak_bytes / GIB:.2f} GiB"
    rows.append(("peak of an export", ours, against, "< 0.5 GiB more", above < EXPORT_PEAK))

    blocked, copy = measured["blocked"]["ours_s"], measured["blocked"]["plain_s"]
    against = f"{copy:.2f} s, {blocked / copy:.2f}x"
    met = blocked <= BLOCKED * copy
    rows.append(("blocked by a save", f"{blocked:.2f} s", against, f"<= {BLOCKED}x", met))
    return rows


def main() -> int:
    """Prints a table and a line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torch", default="", metavar="PYTHON", help="an interpreter with torch")
    parser.add_argument("--only", choices=["saves"], help="the comparison of saves alone")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=CHILDREN)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child](options.directory, options.gib, options.rounds)))
        return 0
    from fsdp_jax.tables import text_table

    rows: list[tuple[str, str, str, str, bool]] = []
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for gib in (TOY, options.gib):
            saves = measure_saves(Path(directory), gib, options.rounds, options.torch)
            rows += saves_table(saves, toy=gib == TOY)
            results[f"saves of {gib} GiB"] = saves
        if options.only is None:
            measured = measure(Path(directory), options.gib, options.rounds)
            rows += table(measured)
            results |= measured
    verdicts = [(*row[:4], "" if row[4] else "MISSED") for row in rows]
    print(text_table(["what", "ours", "against", "target", ""], verdicts))
    text = json.dumps(results)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return int(not all(row[4] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
