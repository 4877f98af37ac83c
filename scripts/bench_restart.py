"""Measures the seconds from the kill of a host to the next step, part by part.

    python scripts/bench_restart.py [--trials 20] [--layers 8] [--width 256] [--kinds kept never]
                                    [--directory DIR] [--json FILE]

Conventions
- Two hosts are two network namespaces (scripts/torture_hosts.py), made as root. On each a process
  of two virtual CPU devices trains a Llama, fully sharded, whose layers are unrolled: its program
  has no loops, which CPUs need to keep it. The state is copied to memory after every step, and no
  checkpoint is on disk. Python keeps its bytecode, as of an installed package.
- A trial kills a random process (SIGKILL) after a random step, waits for the end of the other, and
  starts both again at once, as a restart loop does. Seconds are from the kill to the moment at
  which the next step is in `metrics.jsonl`.
- `kept`: compiled programs are kept in the directory of the run, as by default. `never`:
  `train.keep_programs never`.
- The parts are those of process 0, as it calls them: `notice` is from the kill to the end of both
  processes, `import` from their start until the modules are there, `join` until the processes have
  joined, `build`, `restore` (from the copies in memory), `trace` and `lower` of the step, `program`
  (it is compiled, or read), and `first step`, with the copy of the state behind it.
- `CPU seconds` are those of process 0 until then. Where they are far fewer than the seconds, other
  work shares the cores; a part takes its CPU time on a machine of its own.
- Steps lost: the last step that was recorded before the kill, less the step of the memory copy.
- Exit code 1 if a run did not go on, or lost more than one step beyond its copy.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torture_hosts import Hosts, Run, why_impossible

from fsdp_jax.tables import text_table

CONFIG = """
model: {family: llama, layers: LAYERS, width: WIDTH, heads: 4, scan_layers: false}
data: {kind: text, path: TEXT, sequence_length: 32}
train: {steps: 1000000, global_batch_size: 8, devices: 2, eval_batches: 1, log_every: 1, sample: 0}
optimizer: {schedule: constant}
checkpoint: {every: null, memory_every: 1, memory_folder: MEMORY}
"""
KINDS = {"never": ("--train.keep_programs", "never"), "kept": ()}
PARTS = ("notice", "import", "join", "build", "restore", "trace, lower", "program", "first step")
PATIENCE = 600.0
CHILD = "child"


@dataclass
class Trial:
    """A kill, and what was found."""

    kind: str
    process: int
    step: int  # recorded last before the kill
    resumed_at: int | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    problem: str = ""

    @property
    def lost(self) -> int:
        """Steps that have to be made again."""
        return self.step - (self.resumed_at or 0)


class TimedRun(Run):
    """A run whose processes write when they reach which part."""

    def __init__(self, hosts: Hosts, name: str, options: tuple[str, ...]):
        super().__init__(hosts, name)
        self.times = hosts.folder / f"{name}-times.json"
        self._options = options

    def start(self) -> None:
        """Starts both processes, which write their times."""
        self._port += 10
        self.times.unlink(missing_ok=True)
        words = [CHILD, str(self.times), "train", str(self.hosts.folder / "bench.yaml")]
        words += ["--output", str(self.output), "--cluster.processes", "2", *self._options]
        words += ["--cluster.coordinator", f"{self.hosts.addresses[0]}:{self._port}"]
        self.processes = [
            self.hosts.start(number, [*words, "--cluster.process", str(number)], log, (__file__,))
            for number, log in enumerate(self.logs)
        ]

    def read_times(self) -> dict[str, float]:
        """Reads the time of each part's end, in seconds of the clock of all processes."""
        with contextlib.suppress(OSError, ValueError):
            times: dict[str, float] = json.loads(self.times.read_text())
            return times
        return {}


def child(arguments: list[str]) -> int:
    """Runs the command, and notes when it reaches each part; in process 0 alone."""
    times_file, *words = arguments
    times = {"started": float(os.environ["BENCH_STARTED"])}

    from fsdp_jax.cli.main import main as run_command
    from fsdp_jax.step import compiled_step, xla_options
    from fsdp_jax.train import main as running
    from fsdp_jax.train.loop import Training

    times["import"] = time.monotonic()

    def noting(owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            times.setdefault(part, time.monotonic())
            return result

        setattr(owner, name, outer)

    noting(running, "join_cluster", "join")
    noting(running, "build", "build")
    noting(Training, "resume", "restore")
    noting(compiled_step, "require_same_program", "trace, lower")
    noting(xla_options, "compile_kept", "program")
    record = Training._record_step

    def record_and_write(self: Training, pending: Any) -> bool:
        went_back = record(self, pending)
        if "first step" not in times:
            times["first step"] = time.monotonic()
            times["cpu"] = time.process_time()
            if words[-1] == "0":
                Path(times_file).write_text(json.dumps(times))
        return went_back

    Training._record_step = record_and_write  # type: ignore[method-assign]
    return run_command(words)


def wait_for_times(run: TimedRun) -> dict[str, float] | None:
    """Waits until the first step of a start is recorded; None if it ends before."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        times = run.read_times()
        if times:
            return times
        if any(each.poll() is not None for each in run.processes):
            return None
        time.sleep(0.02)
    return None


def start(run: TimedRun) -> None:
    """Starts both processes, and tells them when."""
    os.environ["BENCH_STARTED"] = str(time.monotonic())
    run.start()


def measure(run: TimedRun, kind: str, numbers: random.Random) -> Trial:
    """Kills a process of a run that trains, starts it again, and waits for its next step."""
    target = run.steps_done() + numbers.randint(2, 4)
    trial = Trial(kind, numbers.randrange(2), target)
    if not run.wait_for_step(target):
        trial.problem = f"step {target} was not reached\n{run.tail()}"
        return trial
    time.sleep(numbers.uniform(0, 0.2))
    trial.step = run.steps_done()
    killed = time.monotonic()
    run.processes[trial.process].send_signal(signal.SIGKILL)
    codes = run.wait(60)
    ended = time.monotonic()
    if not all(codes):
        trial.problem = f"exit codes {codes}\n{run.tail()}"
    run.kill()
    before = len(run.logs[0].read_text())
    start(run)
    times = wait_for_times(run)
    trial.resumed_at = run.wait_for_start(before)
    if times is None:
        trial.problem = f"the run did not go on\n{run.tail()}"
        return trial
    trial.seconds = round(times["first step"] - killed, 2)
    trial.cpu_seconds = round(times["cpu"], 2)
    moments = [killed, ended, *(times[part] for part in PARTS[1:])]
    trial.parts = {
        part: round(end - begin, 2)
        for part, begin, end in zip(PARTS, moments, moments[1:], strict=False)
    }
    # The memory copy is of the last step that all had finished, or of the one before.
    if trial.lost > 1:
        trial.problem = f"{trial.lost} steps lost: {trial.step}, resumed at {trial.resumed_at}"
    return trial


def report(trials: list[Trial], options: argparse.Namespace) -> int:
    """Prints a table and a line of JSON; returns the exit code."""
    rows = []
    for kind in options.kinds:
        good = [trial for trial in trials if trial.kind == kind and not trial.problem]
        if not good:
            continue
        for part in PARTS:
            times = [trial.parts[part] for trial in good]
            rows.append([kind, part, f"{statistics.median(times):.2f}", f"{max(times):.2f}"])
        for name in ("seconds", "cpu_seconds"):
            times = [getattr(trial, name) for trial in good]
            part = {"seconds": "kill to step", "cpu_seconds": "CPU seconds"}[name]
            rows.append([kind, part, f"{statistics.median(times):.2f}", f"{max(times):.2f}"])
    columns = ["programs", "part", "median (s)", "most"]
    print(text_table(columns, rows, right=columns[2:]))
    wrong = [trial for trial in trials if trial.problem]
    for trial in wrong:
        print(f"{trial.kind}: {trial.problem}")
    settings = {"layers": options.layers, "width": options.width, "cores": os.cpu_count()}
    settings["load, now"] = round(os.getloadavg()[0])
    counts = {
        kind: f"{sum(t.kind == kind and not t.problem for t in trials)} of "
        f"{sum(t.kind == kind for t in trials)}"
        for kind in options.kinds
    }
    most_lost = max((trial.lost for trial in trials), default=0)
    line = json.dumps(
        {
            **settings,
            "went on": counts,
            "steps lost, most": most_lost,
            "trials": [asdict(trial) for trial in trials],
        }
    )
    print(line)
    if options.json is not None:
        options.json.write_text(f"{line}\n")
    return int(bool(wrong))


def main() -> int:
    """Runs the trials and reports; returns the exit code."""
    if sys.argv[1:2] == [CHILD]:
        return child(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--kinds", nargs="*", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if why := why_impossible():
        print(f"two hosts cannot be made here: {why}", file=sys.stderr)
        return 2
    trials: list[Trial] = []
    numbers = random.Random(options.seed)
    with contextlib.ExitStack() as stack:
        folder = options.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        memory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / "text.txt"
        text.write_text(Path(__file__).read_text() * 20)
        values = {"LAYERS": options.layers, "WIDTH": options.width, "TEXT": text, "MEMORY": memory}
        config = CONFIG
        for name, value in values.items():
            config = config.replace(name, str(value))
        (folder / "bench.yaml").write_text(config)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        hosts = stack.enter_context(Hosts(folder))
        for kind in options.kinds:
            run = TimedRun(hosts, kind, KINDS[kind])
            start(run)
            try:
                # `never` takes long each time, and is there to compare with.
                for _ in range(options.trials if kind == "kept" else min(options.trials, 3)):
                    trial = measure(run, kind, numbers)
                    trials.append(trial)
                    print(trial, file=sys.stderr, flush=True)
                    if trial.problem:
                        break
            finally:
                run.kill()
    return report(trials, options)


if __name__ == "__main__":
    sys.exit(main())
