"""Kills and stops processes of two hosts, and cuts the link between them, again and again.

    python scripts/torture_hosts.py [--trials 30] [--seed 0] [--directory DIR] [--json FILE]

Conventions
- The hosts are two network namespaces with a pair of virtual interfaces between them, each with a
  host name of its own; made as root. Where that is not permitted the script says so and ends with
  2. On each host a process of two virtual CPU devices trains a tiny GPT, fully sharded, with Gloo's
  collectives; a checkpoint every fifth step.
- A trial is a fault at a random moment of a random step: `kill` (SIGKILL of a random process),
  `stop` (SIGSTOP of one, with `cluster.step_timeout` 30), `link` (the interface goes down). Every
  process must end by itself with an exit code that is not 0, within `LIMITS` seconds; a stopped one
  is continued once the other has ended. Then the link is up again, and the same command goes on.
- A run has three faults and is then compared to an undisturbed one: every line of its metrics and
  evaluations as written, and its last state, leaf by leaf. All bits must be equal. A resumed run
  must begin at the newest checkpoint, which must not be older than the last but one that was due
  before the fault: a save under way is lost.
- All randomness is drawn from the seed; where in a step a delay ends is not.
- Seconds are from the fault to the end of the last process (`stop`: of the other).
- Exit code 1 if a process did not end, a step was lost, or a bit differs.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torture_checkpoint import metrics, states

from fsdp_jax.tables import text_table

CONFIG = """
model: {layers: 1, width: 64, heads: 2}
units: {classes: [Block]}
optimizer: {learning_rate: 3.0e-3, warmup_steps: 2}
data: {kind: text, path: TEXT, sequence_length: 16}
train: {steps: STEPS, global_batch_size: 8, devices: 2, eval_every: 50, eval_batches: 1,
        log_every: 1, sample: 0}
checkpoint: {every: EVERY, keep: 2}
"""
STEPS, EVERY, FAULTS_A_RUN = 150, 5, 3
KINDS = ("kill", "stop", "link")
STEP_TIMEOUT = 30  # seconds
# Until all processes must have ended. A kill closes connections; a cut link is noticed after 40 s
# by the kernel's probes. Ten seconds more for a process's last words, and as many for a busy
# machine.
LIMITS = {"kill": 20.0, "stop": STEP_TIMEOUT + 20.0, "link": 60.0}
PATIENCE = 600.0  # seconds for a run without a fault, and for one to reach a step
FSDP_JAX = ("-m", "fsdp_jax")
START = r"(?:resumes at|starting from) step (\d+)"  # what a run says of its first step
DELAY = 0.2  # seconds: the longest from the end of a step to the fault


@dataclass
class Trial:
    """A fault, and what was found."""

    number: int
    kind: str
    process: int
    step: int  # that was done last, when the fault came
    seconds: float = 0.0
    codes: list[int | None] = field(default_factory=list)
    resumed_at: int | None = None
    problems: list[str] = field(default_factory=list)


class Hosts:
    """Two network namespaces, linked, and the processes of a run in them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._names = [f"torture{os.getpid()}-{number}" for number in range(2)]
        self._links = [f"tt{os.getpid()}x{number}" for number in range(2)]
        self.addresses = ["10.219.77.1", "10.219.77.2"]

    def __enter__(self) -> "Hosts":
        for name in self._names:
            command("ip", "netns", "add", name)
        first, second = self._links
        command("ip", "link", "add", first, "type", "veth", "peer", "name", second)
        for name, link, address in zip(self._names, self._links, self.addresses, strict=True):
            command("ip", "link", "set", link, "netns", name)
            inside = ("ip", "-n", name)
            command(*inside, "address", "add", f"{address}/24", "dev", link)
            command(*inside, "link", "set", "lo", "up")
            command(*inside, "link", "set", link, "up")
        names = [f"{address} host{number}" for number, address in enumerate(self.addresses)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:  # its interface goes with it
            command("ip", "netns", "delete", name)

    def set_link(self, state: str) -> None:
        """Puts the interface of the first host `up` or `down`."""
        command("ip", "-n", self._names[0], "link", "set", self._links[0], state)

    def start(
        self, number: int, words: list[str], log: Path, program: tuple[str, ...] = FSDP_JAX
    ) -> subprocess.Popen[bytes]:
        """Starts `fsdp-jax` on a host, whose name its address has in the file of hosts.

        `program`: what Python runs in its place.
        """
        # Each command replaces the one before, so that signals reach the process itself.
        script = f'hostname host{number}; mount --bind {self.folder}/hosts /etc/hosts; exec "$@"'
        start = ["ip", "netns", "exec", self._names[number], "unshare", "--uts", "--mount"]
        start += ["sh", "-c", script, "sh", sys.executable, *program, *words]
        platform = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
        with log.open("ab") as file:
            return subprocess.Popen(
                start, env=os.environ | platform, stdout=file, stderr=file, start_new_session=True
            )


def command(*words: str) -> None:
    """Runs a command, which must succeed."""
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


class Run:
    """A run of two processes in an output directory, started again after each fault."""

    def __init__(self, hosts: Hosts, name: str):
        self.hosts = hosts
        self.output = hosts.folder / name
        self.logs = [hosts.folder / f"{name}-{number}.log" for number in range(2)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._port = 21000

    def start(self) -> None:
        """Starts both processes; each start has a port of its own."""
        self._port += 10
        words = ["train", str(self.hosts.folder / "tiny.yaml"), "--output", str(self.output)]
        words += ["--cluster.coordinator", f"{self.hosts.addresses[0]}:{self._port}"]
        words += ["--cluster.processes", "2", "--cluster.step_timeout", str(STEP_TIMEOUT)]
        self.processes = [
            self.hosts.start(number, [*words, "--cluster.process", str(number)], log)
            for number, log in enumerate(self.logs)
        ]

    def steps_done(self) -> int:
        """Reads the number of the last step whose metrics are written."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            line = (self.output / "metrics.jsonl").read_bytes().splitlines()[-1]
            return int(json.loads(line)["step"])
        return 0

    def wait_for_step(self, step: int) -> bool:
        """Waits until a step is done; returns False if a process ends before, or none is."""
        deadline = time.monotonic() + PATIENCE
        while self.steps_done() < step:
            if time.monotonic() > deadline or any(
                each.poll() is not None for each in self.processes
            ):
                return False
            time.sleep(0.005)
        return True

    def wait_for_start(self, before: int) -> int | None:
        """Waits until process 0 has said where it starts; returns the step, None if it ends before.

        `before`: characters of its log that were there already.
        """
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            said = re.search(START, self.logs[0].read_text()[before:])
            if said:
                return int(said[1])
            if any(each.poll() is not None for each in self.processes):
                return None
            time.sleep(0.1)
        return None

    def wait(self, seconds: float) -> list[int | None]:
        """Waits until both processes have ended; returns their codes, None for one that has not."""
        deadline = time.monotonic() + seconds
        codes: list[int | None] = []
        for process in self.processes:
            try:
                codes.append(process.wait(max(deadline - time.monotonic(), 0)))
            except subprocess.TimeoutExpired:
                codes.append(None)
        return codes

    def kill(self) -> None:
        """Kills what is left of the processes."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def checkpoints(self) -> list[int]:
        """Lists the steps of the checkpoints in place."""
        names = [path.name for path in (self.output / "checkpoints").glob("*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def tail(self) -> str:
        """Reads the end of both logs."""
        return "\n".join(f"{log.name}:\n{log.read_text()[-1500:]}" for log in self.logs)


def strike(run: Run, trial: Trial, delay: float) -> None:
    """Waits for the step of a trial, makes its fault, and notes how the processes end."""
    if not run.wait_for_step(trial.step):
        trial.problems.append(f"step {trial.step} was not reached\n{run.tail()}")
        run.kill()
        return
    time.sleep(delay)
    trial.step = run.steps_done()
    victim, other = run.processes[trial.process], run.processes[1 - trial.process]
    began = time.monotonic()
    if trial.kind == "link":
        run.hosts.set_link("down")
    else:
        victim.send_signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[trial.kind])
    if trial.kind == "stop":
        with contextlib.suppress(subprocess.TimeoutExpired):
            other.wait(LIMITS["stop"])
        trial.seconds = time.monotonic() - began
        victim.send_signal(signal.SIGCONT)
        trial.codes = run.wait(LIMITS["kill"])
    else:
        trial.codes = run.wait(LIMITS[trial.kind])
        trial.seconds = time.monotonic() - began
    trial.seconds = round(trial.seconds, 1)
    # All have ended, and none as if nothing had happened.
    if not all(trial.codes):
        trial.problems.append(f"exit codes {trial.codes}\n{run.tail()}")
    run.kill()
    run.hosts.set_link("up")


def resume(run: Run, trial: Trial) -> None:
    """Starts a run again, and checks what it resumes from."""
    saved = run.checkpoints()
    # A save waits for the one before it, and the step after it for its beginning.
    due = (trial.step - 1) // EVERY * EVERY - EVERY
    if due > 0 and (not saved or saved[-1] < due):
        trial.problems.append(f"checkpoints {saved} after step {trial.step}")
    newest = saved[-1] if saved else 0
    before = len(run.logs[0].read_text())
    run.start()
    trial.resumed_at = run.wait_for_start(before)
    if trial.resumed_at != newest:
        trial.problems.append(f"resumed at {trial.resumed_at}, with checkpoints {saved}")


def finish(run: Run) -> dict[str, Any]:
    """Waits for the end of a run; returns its metrics and its last state."""
    codes = run.wait(PATIENCE)
    run.kill()
    if codes != [0, 0]:
        raise RuntimeError(f"exit codes {codes} of a run without a fault\n{run.tail()}")
    last = states(run.output / "checkpoints").get(str(STEPS), {})
    return metrics(run.output) | {"state": last}


def torture(hosts: Hosts, trials: int, seed: int) -> Iterator[Trial]:
    """Yields each trial once its run has been compared to the undisturbed one."""
    control_run = Run(hosts, "control")
    control_run.start()
    control = finish(control_run)
    assert control["state"], "the undisturbed run has saved its last state"
    numbers = random.Random(seed)
    # Each kind as often as the others, in an order that is drawn.
    kinds = [KINDS[number % len(KINDS)] for number in range(trials)]
    numbers.shuffle(kinds)
    for first in range(0, trials, FAULTS_A_RUN):
        run = Run(hosts, f"run{first}")
        done = []
        run.start()
        try:
            for index, kind in enumerate(kinds[first : first + FAULTS_A_RUN]):
                # In the middle of this fault's part of the steps: a resumed run begins before it.
                share = STEPS // FAULTS_A_RUN
                step = index * share + numbers.randint(2 * EVERY, share - EVERY)
                trial = Trial(first + index, kind, numbers.randrange(2), step)
                done.append(trial)
                strike(run, trial, numbers.uniform(0, DELAY))
                resume(run, trial)
            found = finish(run)
            differing = [name for name in control if found[name] != control[name]]
            if differing:
                done[-1].problems.append(f"not equal to the undisturbed run: {differing}")
        except RuntimeError as error:
            done[-1].problems.append(str(error))
        finally:
            run.kill()
        for trial in done:
            print(f"{trial}", file=sys.stderr, flush=True)
        yield from done


def report(trials: list[Trial], options: argparse.Namespace, seconds: float) -> int:
    """Prints a table and a line of JSON; returns the exit code."""
    rows = []
    for kind in KINDS:
        of_kind = [trial for trial in trials if trial.kind == kind]
        times = [trial.seconds for trial in of_kind]
        if times:
            spread = (min(times), statistics.median(times), max(times))
            good = sum(not trial.problems for trial in of_kind)
            rows.append([kind, len(of_kind), good, *(f"{each:.1f}" for each in spread)])
    columns = ["fault", "trials", "resumed, equal", "ended after, least (s)", "median", "most"]
    print(text_table(columns, rows, right=columns[1:]))
    wrong = [trial for trial in trials if trial.problems]
    for trial in wrong:
        print(f"trial {trial.number}: {trial}")
    line = json.dumps(
        {
            "trials": [asdict(trial) for trial in trials],
            "problems": len(wrong),
            "seed": options.seed,
            "seconds": round(seconds),
            "limits": LIMITS,
        }
    )
    print(line)
    if options.json is not None:
        options.json.write_text(f"{line}\n")
    return int(bool(wrong))


def why_impossible() -> str:
    """Finds out why this machine cannot make two hosts; empty if it can."""
    name = f"torture{os.getpid()}-try"
    try:
        command("ip", "netns", "add", name)
        command("ip", "netns", "exec", name, "unshare", "--uts", "--mount", "hostname", "try")
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)
    return ""


def main() -> int:
    """Runs the trials and reports; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="default: a temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if reason := why_impossible():
        print(f"no network namespaces can be made here, which takes root: {reason}")
        return 2
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = options.directory
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        words = " ".join(str(number * number) for number in range(3000))
        (folder / "text.txt").write_text(words)
        config = CONFIG.replace("TEXT", str(folder / "text.txt"))
        config = config.replace("STEPS", str(STEPS)).replace("EVERY", str(EVERY))
        (folder / "tiny.yaml").write_text(config)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
        hosts = stack.enter_context(Hosts(folder))
        trials = list(torture(hosts, options.trials, options.seed))
    return report(trials, options, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
