"""Kills a training run again and again, and compares it to one that was never killed.

    python scripts/torture_checkpoint.py [--trials 200] [--seed 0] [--directory DIR] [--json FILE]

Conventions
- One run of a tiny GPT over 8 virtual devices, a checkpoint every second step, the newest two kept.
  Each trial starts it, waits for a random phase and then a random moment more, and kills it
  (SIGKILL). Phases are those that the run logs: `step` (the metrics of a step are written),
  `saving`, `sealed` (digested, and about to be renamed into place), `saved`, `deleting` (the oldest
  is renamed away and being removed), `restored` (just resumed).
- After each kill, the newest step in place must be intact (every file against its digest), and not
  older than the newest that the run had logged as saved. Otherwise the trial has lost something.
- A run that reaches its last step starts anew in another directory, so that there is always
  something to kill. After all trials the last one runs to its end.
- Bit differences: losses and gradient norms of every step, as written, and the last state, leaf by
  leaf, against those of the control run. All runs must agree on every bit.
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
DELAY = 0.15  # seconds: the longest delay between a phase and the kill
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
from fsdp_jax.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


@dataclass
class Outcome:
    """The results of all trials."""

    kills: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    finished: int = 0
    unsealed: int = 0
    half_deleted: int = 0


def start(directory: Path, output: Path) -> subprocess.Popen[str]:
    """Starts the run as a user does; its log comes line by line."""
    command = [sys.executable, "-u", "-c", RUN, str(directory / "compiled")]
    command += ["train", str(directory / "run.yaml"), "--output", str(output)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=(directory / "stderr").open("w"),  # a pipe that nobody reads would block it
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def phase_of(line: str) -> str | None:
    """Returns the phase that a line of output begins, if any."""
    first = line.split(" ", 1)[0]
    if first == "step":
        return "step" if re.match(r"step \d+/", line) else None
    if "resumes at step" in line:
        return "restored"
    return first if first in PHASES else None


def steps_in(output: Path) -> list[int]:
    """Returns the steps in place, by name."""
    return sorted(
        int(path.name) for path in (output / "checkpoints").glob("*") if path.name.isdecimal()
    )


def trial(directory: Path, output: Path, numbers: random.Random, outcome: Outcome) -> bool:
    """Starts the run and kills it once; returns True if the run ended before."""
    # The kill: after the n-th time that the run enters a phase, and a delay.
    phase = numbers.choice(PHASES)
    delay = numbers.random() * DELAY
    count = numbers.randrange(1, 4)
    if phase == "restored" and not steps_in(output):
        phase = "step"
    process = start(directory, output)
    assert process.stdout is not None
    watchdog = threading.Timer(PATIENCE, process.send_signal, [signal.SIGQUIT])  # if it hangs
    watchdog.start()

    killed = False
    saved = 0
    for line in process.stdout:
        if line.startswith("saved "):
            saved = int(line.split()[1])
        if phase_of(line) == phase and not killed:
            count -= 1
            if count <= 0 or phase == "restored":
                killed = True
                time.sleep(delay)
                process.send_signal(signal.SIGKILL)
    code = process.wait()
    watchdog.cancel()
    if code == 0:
        outcome.kills["(came to its end)"] += 1
        return True
    if code != -signal.SIGKILL:
        raise SystemExit(f"the run failed with {code}:\n{(directory / 'stderr').read_text()}")
    outcome.kills[phase] += 1
    check(output, saved, outcome)
    return False


def check(output: Path, saved: int, outcome: Outcome) -> None:
    """Checks that all steps in place are intact, and the newest as new as the run has logged."""
    from fsdp_jax.checkpoint.manifest import check_files

    names = [path.name for path in (output / "checkpoints").glob("*")]
    outcome.unsealed += any(".unsealed" in name for name in names)
    outcome.half_deleted += any(".deleting" in name for name in names)
    steps = steps_in(output)
    newest = max(steps, default=0)
    if newest < saved:
        outcome.lost.append(f"step {saved} was saved, {newest} is the newest in place")
    for step in steps:
        checked = check_files(output / "checkpoints" / str(step))
        if not checked.good:
            outcome.lost.append(f"step {step}: {checked.summary()}")


def losses(output: Path) -> list[tuple[object, ...]]:
    """Returns the metrics of each step that do not depend on time, exactly as written."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [
        (record["step"], record["loss"], record["grad_norm"], record["learning_rate"])
        for record in records
    ]


def last_state(output: Path) -> dict[str, bytes]:
    """Returns the bytes of every array of the last checkpoint, and its data position."""
    import jax
    import jax.numpy as jnp

    from fsdp_jax.checkpoint import CheckpointStore
    from fsdp_jax.io.array_specs import parse_description

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with CheckpointStore(output / "checkpoints") as store:
        record = store.record(STEPS)
        target = {}
        for path, text in record["leaves"].items():
            name, shape = parse_description(text)
            dtype = jax.random.key(0).dtype if name.startswith("key<") else jnp.dtype(name)
            target[path] = jax.ShapeDtypeStruct(shape, dtype, sharding=device)
        state, data, _ = store.restore(STEPS, target)
    for path in record["keys"]:
        state[path] = jax.random.key_data(state[path])
    content = {path: jax.device_get(array).tobytes() for path, array in state.items()}
    return content | {"data": repr(data).encode()}


def compare(output: Path, control: Path, outcome: Outcome) -> None:
    """Records every difference between a run that was killed and the control run."""
    for one, other in zip(losses(output), losses(control), strict=True):
        if one != other:
            outcome.differences.append(f"{output.name}: {one}, not {other}")
    state, expected = last_state(output), last_state(control)
    outcome.differences += [
        f"{output.name}: {path}"
        for path in state.keys() | expected.keys()
        if state.get(path) != expected.get(path)
    ]
    outcome.finished += 1


def run_to_end(directory: Path, output: Path) -> None:
    """Runs to the end without a kill."""
    process = start(directory, output)
    process.communicate(timeout=PATIENCE)
    if process.returncode:
        raise SystemExit(
            f"the run failed with {process.returncode}:\n{(directory / 'stderr').read_text()}"
        )


def torture(directory: Path, trials: int, seed: int) -> Outcome:
    """Runs all trials."""
    (directory / "run.yaml").write_text(CONFIG.replace("STEPS", str(STEPS)))
    control = directory / "control"
    run_to_end(directory, control)
    numbers = random.Random(seed)
    outcome = Outcome()
    runs = 0
    output = directory / "run-0"
    for number in range(1, trials + 1):
        if trial(directory, output, numbers, outcome):
            compare(output, control, outcome)
            runs += 1
            output = directory / f"run-{runs}"
        if sys.stderr.isatty() or number % 20 == 0:
            print(f"{number} of {trials}: {len(outcome.lost)} lost", file=sys.stderr)
    run_to_end(directory, output)
    compare(output, control, outcome)
    return outcome


def main() -> int:
    """Prints a table and a line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        outcome = torture(Path(directory), options.trials, options.seed)
    from fsdp_jax.tables import text_table

    print(text_table(["killed at", "trials"], sorted(outcome.kills.items())))
    print(f"kills that left a half-written step: {outcome.unsealed}")
    print(f"kills that left a half-deleted step: {outcome.half_deleted}")
    print(f"runs compared to the control run: {outcome.finished}")
    print(f"lost beyond the last good step: {len(outcome.lost)}")
    print(f"bit differences: {len(outcome.differences)}")
    for line in [*outcome.lost, *outcome.differences][:40]:
        print(f"  {line}")
    fields = dict(vars(outcome))
    fields["runs"] = fields.pop("finished")
    fields |= {"trials": options.trials, "seed": options.seed}
    text = json.dumps(fields | {"seconds": time.monotonic() - started})
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return int(bool(outcome.lost or outcome.differences))


if __name__ == "__main__":
    sys.exit(main())
