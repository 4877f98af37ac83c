"""Kills a real training run again and again, and holds it against one that was left alone.

    python scripts/torture_checkpoint.py [--trials 200] [--seed 0] [--directory DIR] [--json FILE]

Conventions
- One run of a tiny GPT over 8 virtual devices, a checkpoint every second step, the newest two kept.
  Each trial starts it, waits for a phase that is drawn at random, waits a random moment more, and
  kills it (SIGKILL). Phases are those that the run logs: `step` (the metrics of a step are
  written), `saving`, `sealed` (digested, and about to be renamed into place), `saved`, `deleting`
  (the oldest is renamed away and being removed), `restored` (just resumed).
- After each kill: the newest step in place is as it was written (every file against its digest),
  and it is not older than the newest that the run had logged as saved. Otherwise the trial has lost
  something.
- A run that reaches its last step starts anew, in another directory, so that there is always
  something to kill. When all trials are done the last one runs to its end.
- Bit differences: the losses and gradient norms of every step, as written, and the last state, leaf
  by leaf, against those of the run that was left alone. All runs must agree on every bit.
- Exit code 1 if anything was lost or differs.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

CONFIG = """
model: {layers: 2, width: 64, heads: 2}
units: {classes: [Block]}
optimizer: {learning_rate: 3.0e-3, warmup_steps: 2}
data: {sequence_length: 16}
train: {steps: STEPS, global_batch_size: 8, devices: 8, eval_batches: 1, log_every: 1}
checkpoint: {every: 2, keep: 2}
"""
STEPS = 60
PHASES = ("step", "saving", "sealed", "saved", "deleting", "restored")
SOON = 0.15  # seconds: the longest moment between a phase and the kill
PATIENCE = 300.0

RUN = """
import logging, sys
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
log = logging.getLogger("fsdp_jax.checkpoint")
log.addHandler(logging.StreamHandler(sys.stdout))
log.setLevel(logging.INFO)
log.propagate = False
from fsdp_jax.cli import main
sys.exit(main(sys.argv[2:]))
"""


@dataclass
class Found:
    """What the trials have come to."""

    kills: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    finished: int = 0
    unsealed: int = 0
    half_deleted: int = 0


def start(directory: Path, output: Path) -> subprocess.Popen[str]:
    """The run, as a user starts it; what it logs comes line by line."""
    words = [
        sys.executable,
        "-u",
        "-c",
        RUN,
        str(directory / "compiled"),
        "train",
        str(directory / "run.yaml"),
    ]
    # stderr is its own file: a pipe that nobody reads would stop it
    return subprocess.Popen(
        [*words, "--output", str(output)], stdout=subprocess.PIPE, stderr=(directory / "stderr").open("w"), text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def phase_of(line: str) -> str | None:
    """Which phase a line of output begins."""
    first = line.split(" ", 1)[0]
    if first == "step":
        return "step" if re.match(r"step \d+/", line) else None
    if "resumes at step" in line:
        return "restored"
    return first if first in PHASES else None


def steps_in(output: Path) -> list[int]:
    """The steps in place, by name."""
    return sorted(
        int(path.name) for path in (output / "checkpoints").glob("*") if path.name.isdecimal()
    )


def trial(directory: Path, output: Path, numbers: random.Random, found: Found) -> bool:
    """One start and one kill; True if the run came to its end before."""
    wanted, moment, count = numbers.choice(PHASES), numbers.random() * SOON, numbers.randrange(1, 4)
    if wanted == "restored" and not steps_in(output):
        wanted = "step"
    process = start(directory, output)
    killed, saved = False, 0
    assert process.stdout is not None
    watchdog = threading.Timer(
        PATIENCE, process.send_signal, [signal.SIGQUIT]
    )  # for one that hangs
    watchdog.start()
    for line in process.stdout:
        if line.startswith("saved "):
            saved = int(line.split()[1])
        if phase_of(line) == wanted and not killed:
            count -= 1
            if count <= 0 or wanted == "restored":
                killed = True
                time.sleep(moment)
                process.send_signal(signal.SIGKILL)
    code = process.wait()
    watchdog.cancel()
    if code == 0:
        found.kills["(came to its end)"] += 1
        return True
    if code != -signal.SIGKILL:
        raise SystemExit(f"the run failed with {code}:\n{(directory / 'stderr').read_text()}")
    found.kills[wanted] += 1
    check(output, saved, found)
    return False


def check(output: Path, saved: int, found: Found) -> None:
    """Whether the newest step in place is whole, and as new as the run has said."""
    from fsdp_jax.checkpoint.manifest import check_files

    names = [path.name for path in (output / "checkpoints").glob("*")]
    found.unsealed += any(".unsealed" in name for name in names)
    found.half_deleted += any(".deleting" in name for name in names)
    steps = steps_in(output)
    newest = max(steps, default=0)
    if newest < saved:
        found.lost.append(f"step {saved} was saved, {newest} is the newest in place")
    for step in steps:
        checked = check_files(output / "checkpoints" / str(step))
        if not checked.good:
            found.lost.append(f"step {step}: {checked.summary()}")


def losses(output: Path) -> list[tuple[object, ...]]:
    """What each step has measured, to the last bit."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [
        (record["step"], record["loss"], record["grad_norm"], record["learning_rate"])
        for record in records
    ]


def last_state(output: Path) -> dict[str, bytes]:
    """Every array of the last checkpoint, and where the data goes on."""
    import jax
    import jax.numpy as jnp

    from fsdp_jax.checkpoint import CheckpointStore
    from fsdp_jax.io.array_specs import parse_description

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with CheckpointStore(output / "checkpoints") as store:
        record = store.record(STEPS)
        target = {}
        for path, text in record["leaves"].items():
            name, shape = parse_description(text)
            dtype = jax.random.key(0).dtype if name.startswith("key<") else jnp.dtype(name)
            target[path] = jax.ShapeDtypeStruct(shape, dtype, sharding=here)
        state, data, _ = store.restore(STEPS, target)
    arrays = {p: jax.random.key_data(x) if record["keys"].get(p) else x for p, x in state.items()}
    return {path: jax.device_get(array).tobytes() for path, array in arrays.items()} | {
        "data": repr(data).encode()
    }


def compare(output: Path, control: Path, found: Found) -> None:
    """Every difference between a run that was killed and the one that was not."""
    for one, other in zip(losses(output), losses(control), strict=True):
        if one != other:
            found.differences.append(f"{output.name}: {one}, not {other}")
    mine, theirs = last_state(output), last_state(control)
    found.differences += [f"{output.name}: {path}" for path in mine.keys() | theirs.keys()
                          if mine.get(path) != theirs.get(path)]  # fmt: skip
    found.finished += 1


def to_the_end(directory: Path, output: Path) -> None:
    """Runs without a kill."""
    process = start(directory, output)
    process.communicate(timeout=PATIENCE)
    if process.returncode:
        raise SystemExit(
            f"the run failed with {process.returncode}:\n{(directory / 'stderr').read_text()}"
        )


def torture(directory: Path, trials: int, seed: int) -> Found:
    """All trials."""
    (directory / "run.yaml").write_text(CONFIG.replace("STEPS", str(STEPS)))
    control = directory / "control"
    to_the_end(directory, control)
    numbers, found, runs = random.Random(seed), Found(), 0
    output = directory / "run-0"
    for at in range(trials):
        if trial(directory, output, numbers, found):
            compare(output, control, found)
            runs += 1
            output = directory / f"run-{runs}"
        if sys.stderr.isatty() or at % 20 == 19:
            print(f"{at + 1} of {trials}: {len(found.lost)} lost", file=sys.stderr)
    to_the_end(directory, output)
    compare(output, control, found)
    return found


def main() -> int:
    """Prints a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        found = torture(Path(directory), options.trials, options.seed)
    from fsdp_jax.tables import text_table

    print(text_table(["killed at", "trials"], sorted(found.kills.items())))
    print(
        f"kills after which a half-written step lay there: {found.unsealed}; a half-deleted one: {found.half_deleted}"
    )
    print(f"runs compared with the one left alone: {found.finished}")
    print(
        f"lost beyond the last good step: {len(found.lost)}; bit differences: {len(found.differences)}"
    )
    for line in [*found.lost, *found.differences][:40]:
        print(f"  {line}")
    figures = {
        "trials": options.trials, "seed": options.seed, "kills": dict(found.kills), "unsealed": found.unsealed,
        "half_deleted": found.half_deleted, "runs": found.finished, "lost": found.lost,
        "differences": found.differences, "seconds": time.monotonic() - started,
    }  # fmt: skip
    text = json.dumps(figures)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return int(bool(found.lost or found.differences))


if __name__ == "__main__":
    sys.exit(main())
