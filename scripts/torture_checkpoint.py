"""Kills, starves and spoils runs again and again, and compares them to undisturbed ones.

    python scripts/torture_checkpoint.py [--trials 200] [--only KIND] [--seed 0] [--jobs 2]
        [--directory DIR] [--json FILE]

Conventions
- One configuration: a tiny GPT over 4 virtual devices, trained on tokens that `tokenize` wrote; a
  checkpoint every second step, the newest two kept, an evaluation every third step. The trials are
  divided over the kinds below. A process of a trial is a fork of this one, which has imported
  everything and started nothing of JAX; the compiled programs are shared. All randomness is drawn
  from the seed, the kind and the number of the trial; where in the process a delay ends is not.
- Kills (SIGKILL) of a run: a random number of times after it has passed a point, and a random
  moment more: `step` (the metrics of a step are written), `saving`, `sealed` (digested, and about
  to be renamed into place), `saved`, `deleting` (the oldest is renamed away and being removed),
  `restoring` (about to read a checkpoint), `restored`, `evaluating`, `file` (any operation on a
  file that Python can see). A run goes on from kill to kill; one that ends is compared to the
  control run, and the next begins in another directory.
- Kills of a command, at one of its file operations: `export`, which then succeeds when it is
  repeated, with the same bytes, and without anything `*.unfinished`; `import`, which starts over
  and ends with the same bits; `tokenize`, which resumes and ends with the same bytes.
- `processes`: a run of two processes, of two devices each, of which a random one is killed in a
  step, a save or an evaluation. The other must end by itself, with 69. They go on from kill to
  kill, and a run that ends is compared to a control run of two processes.
- `disk`: the disk fills, but for a random number of bytes, at a random point of a run. It is a
  small tmpfs where user and mount namespaces are permitted (`unshare -rm`), and in a quarter of
  the trials, or where they are not, a limit on the size of every file (RLIMIT_FSIZE). Either holds
  for the writers in C++ too; a tmpfs ends at a page, the limit at a byte. The run says so and
  ends with 1, or goes on to its end, as it often does where there is space again after a moment, in
  a third of the trials. What it had saved is there, and with space the same command ends with the
  control's bits. Only lines of metrics may be missing, if the run said so.
- `nan`: the learning rate is infinite or NaN from a random update on; the run aborts, ends, is
  asked to stop or is killed. No checkpoint in place has a value that is not finite, and the newest
  is no older than the last that was due before. With the schedule mended the same command ends:
  with the control's bits where no step was skipped, else finite.
- After each trial of a run, every step in place must be intact (every file against its digest), and
  every step that the run logged as saved, and not as deleted, must be in place.
- Bit differences: losses, gradient norms, learning rates and held-out losses, as written, and the
  last state, leaf by leaf, against those of the control run. All runs must agree on every bit.
- Exit code 1 if a step was lost, a bit differs, a good step was lost to a bad one, or a process
  failed where it should not have.
"""

import argparse
import faulthandler
import hashlib
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

CONFIG = """
model: {layers: 1, width: 64, heads: 2, vocab_size: 384}
units: {classes: [Block]}
optimizer: {learning_rate: 3.0e-3, warmup_steps: 2}
data: {kind: tokens, path: TOKENS, sequence_length: 16}
train: {steps: STEPS, global_batch_size: 4, devices: 4, eval_every: 3, eval_batches: 1,
        log_every: 1, sample: 0}
checkpoint: {every: EVERY, keep: 2}
"""
STEPS, EVERY, DEVICES = 30, 2, 4
VOCABULARY = 300
SHARD_TOKENS = 3000
DRAIN = 10.0  # seconds for what is left of the output of a process that has ended
PATIENCE = 300.0  # seconds until a process that hangs shows where, and ends with 1

RUN_KILLS = (
    "step",
    "saving",
    "sealed",
    "saved",
    "deleting",
    "restoring",
    "restored",
    "evaluating",
    "file",
)
PROCESSES = 2  # of a run of several
COMMANDS = ("export", "import", "tokenize")
KINDS = (*RUN_KILLS, *COMMANDS, "disk", "nan", "processes")
DELAY = 0.15  # seconds: the longest delay between a point and the kill
DISK = 8 << 20  # bytes of the tmpfs
IN_NAMESPACE = "TORTURE_IN_NAMESPACE"  # set where this process may mount
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
LOST = 69  # exit code of a process whose others are gone
FULL = ("No space left on device", "File too large")


# One process


@dataclass
class Fault:
    """What happens to a process a moment after it has passed a point for the `count`-th time."""

    point: str
    count: int
    delay: float  # seconds
    action: Callable[[], object]
    operations: int = 0  # on files, so far

    def passed(self, point: str) -> None:
        """Counts one point; acts when it is the one."""
        self.operations += point == "file"
        if point != self.point:
            return
        self.count -= 1
        if self.count == 0:
            after(self.delay, self.action)


@dataclass(frozen=True)
class Ended:
    """How a process ended, and all that it printed."""

    code: int  # negative: the signal that ended it
    output: str

    def logged(self, word: str) -> list[int]:
        """Returns the numbers of the lines `word N`."""
        lines = [line.split() for line in self.output.splitlines()]
        return [int(line[1]) for line in lines if len(line) == 2 and line[0] == word]

    def __str__(self) -> str:
        return f"exit code {self.code}\n" + "\n".join(self.output.splitlines()[-25:])


def after(seconds: float, action: Callable[[], object]) -> None:
    """Does something now, or in a thread after a time."""
    if not seconds:
        action()
        return
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def kill() -> None:
    """Kills this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def terminate() -> None:
    """Asks this process to stop."""
    os.kill(os.getpid(), signal.SIGTERM)


def nothing() -> Fault:
    """Returns a fault that never happens."""
    return Fault("", 0, 0, kill)


def forked(work: Callable[[], int]) -> Ended:
    """Does some work in a fork of this process, whose exit code it returns."""
    return all_forked([work])[0]


def all_forked(works: Sequence[Callable[[], int]]) -> list[Ended]:
    """Does pieces of work at the same time, each in a fork of this process."""
    started = []
    for work in works:
        # Through a pipe: a limit on the size of files would cut a file.
        read, write = os.pipe()
        process = os.fork()
        if process == 0:
            _work(work, write)
        os.close(write)
        output: list[bytes] = []
        # Nobody else reads the output of one while another is waited for.
        reader = threading.Thread(target=_read_all, args=(read, output), daemon=True)
        reader.start()
        started.append((process, reader, output))
    ended = []
    for process, reader, output in started:
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        reader.join(DRAIN)
        ended.append(Ended(code, b"".join(output).decode(errors="replace")))
    return ended


def _read_all(read: int, output: list[bytes]) -> None:
    """Appends what comes through a pipe to `output`, until all its writers have ended."""
    with os.fdopen(read, "rb", buffering=0) as pipe:
        while part := pipe.read(1 << 16):
            output.append(part)


def _work(work: Callable[[], int], write: int) -> NoReturn:
    code = 70
    try:
        os.dup2(write, 1)
        os.dup2(write, 2)
        # Descriptor 1 is redirected in a run of several processes, as Gloo prints there.
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.dump_traceback_later(PATIENCE, exit=True, file=sys.stderr)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def command(words: list[str], fault: Fault, folder: Path, shards: bool = False) -> int:
    """Runs a command, whose points `fault` sees; prints the number of its file operations."""
    from fsdp_jax.cli.main import main
    from fsdp_jax.data import tokenize

    if shards:
        several = partial(tokenize, shard_tokens=SHARD_TOKENS)
        mock.patch("fsdp_jax.cli.tokenize.tokenize", several).start()
    watch(fault, folder)
    code = main(words)
    print(f"operations {fault.operations}")
    return code


def watch(fault: Fault, folder: Path) -> None:
    """Tells a fault each point that this process passes; `folder`: whose file operations count."""
    from fsdp_jax.train.loop import Training

    class Points(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(record.getMessage())
            fault.passed(record.getMessage().split()[0])

    log = logging.getLogger("fsdp_jax.checkpoint")
    log.addHandler(Points())
    log.setLevel(logging.INFO)
    log.propagate = False

    def wrap(name: str, before: str, after: str) -> None:
        method = getattr(Training, name)

        def wrapped(*args: Any, **keys: Any) -> Any:
            fault.passed(before)
            result = method(*args, **keys)
            fault.passed(after)
            return result

        mock.patch.object(Training, name, wrapped).start()

    wrap("resume", "restoring", "restored")
    wrap("_record_step", "", "step")
    wrap("_evaluate", "evaluating", "")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS and isinstance(args[0], str | os.PathLike):
            path = os.fspath(args[0])
            if isinstance(path, str) and (path.startswith(str(folder)) or "/" not in path):
                fault.passed("file")

    sys.addaudithook(hook)


# What all trials share


@dataclass
class Outcome:
    """The results of the trials of one kind."""

    trials: int = 0
    lost: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    good_lost: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Outcome") -> None:
        """Adds the results of other trials."""
        self.trials += other.trials
        for name in ("lost", "differences", "good_lost", "failures"):
            getattr(self, name).extend(getattr(other, name))
        self.notes.update(other.notes)


@dataclass
class Job:
    """The trials of one worker, and what they compare with."""

    folder: Path  # of this worker
    shared: Path  # configuration, controls, compiled programs
    operations: dict[str, int]  # file operations of the undisturbed commands
    control: dict[str, Any]  # `bits` of the control run
    namespace: bool
    runs: int = 0
    killed: Path | None = None  # the run that goes on from kill to kill
    killed_of_several: Path | None = None  # and that of several processes
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def new_output(self) -> Path:
        """Returns a directory that does not exist yet."""
        self.runs += 1
        return self.folder / f"run-{self.runs}"

    def train(
        self,
        output: Path,
        fault: Fault | None = None,
        *words: str,
        before: Callable[[], object] | None = None,
    ) -> Ended:
        """Trains, in a process of its own."""
        fault = fault or nothing()

        def work() -> int:
            if before is not None:
                before()
            return command(training_words(self.shared, output, *words), fault, output)

        return forked(work)

    def train_together(self, output: Path, faults: dict[int, Fault]) -> list[Ended]:
        """Trains in several processes; `faults`: of some of them, by number."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        cluster = [f"--cluster.coordinator={address}", f"--cluster.processes={PROCESSES}"]
        devices = f"--train.devices={DEVICES // PROCESSES}"
        works = []
        for process in range(PROCESSES):
            words = [*cluster, f"--cluster.process={process}", devices]
            words = training_words(self.shared, output, *words)
            works.append(partial(command, words, faults.get(process, nothing()), output))
        return all_forked(works)


def training_words(shared: Path, output: Path, *words: str) -> list[str]:
    """Returns the command line of a run."""
    return ["train", str(shared / "run.yaml"), "--output", str(output), *words]


def steps_in(output: Path) -> list[int]:
    """Returns the steps in place, by name."""
    names = [path.name for path in (output / "checkpoints").glob("*")]
    return sorted(int(name) for name in names if name.isdecimal())


def check(output: Path, before: list[int], ended: Ended, outcome: Outcome) -> None:
    """Checks that the steps in place are intact, and that none is missing which was saved."""
    from fsdp_jax.checkpoint.manifest import check_files

    steps = steps_in(output)
    saved = {*before, *ended.logged("saved")}
    missing = saved - {*ended.logged("deleting")} - {*steps}
    if missing or max(steps, default=0) < max(saved, default=0):
        outcome.lost.append(f"{sorted(saved)} were saved, {steps} are in place\n{ended}")
    for step in steps:
        checked = check_files(output / "checkpoints" / str(step))
        if not checked.good:
            outcome.lost.append(f"step {step}: {checked.summary()}\n{ended}")


def metrics(output: Path) -> dict[str, list[Any]]:
    """Returns what a run measured that does not depend on time, exactly as written."""
    names = {
        "metrics": ("step", "loss", "grad_norm", "learning_rate", "skipped_steps"),
        "evals": ("step", "held_out_loss", "tokens"),
    }
    measured: dict[str, list[Any]] = {}
    for file, fields in names.items():
        lines = (output / f"{file}.jsonl").read_text().splitlines()
        measured[file] = [[json.loads(line)[each] for each in fields] for line in lines]
    return measured


def states(checkpoints: Path) -> dict[str, Any]:
    """Returns {step: {path: digest, "data": position, "not finite": paths}} of a directory."""

    def work() -> int:
        import jax
        import jax.numpy as jnp

        from fsdp_jax.checkpoint import CheckpointStore
        from fsdp_jax.io.array_specs import parse_description

        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        found = {}
        with CheckpointStore(checkpoints) as store:
            for step in store.steps():
                record = store.record(step)
                target = {}
                for path, text in record["leaves"].items():
                    name, shape = parse_description(text)
                    dtype = jax.random.key(0).dtype if name.startswith("key<") else jnp.dtype(name)
                    target[path] = jax.ShapeDtypeStruct(shape, dtype, sharding=device)
                state, data, _ = store.restore(step, target)
                bad = [
                    path
                    for path, leaf in state.items()
                    if jnp.issubdtype(leaf.dtype, jnp.inexact) and not jnp.isfinite(leaf).all()
                ]
                for path in record["keys"]:
                    state[path] = jax.random.key_data(state[path])
                arrays = {path: jax.device_get(leaf).tobytes() for path, leaf in state.items()}
                found[step] = {
                    path: hashlib.sha256(content).hexdigest() for path, content in arrays.items()
                } | {"data": repr(data), "not finite": bad}
        print(json.dumps(found))
        return 0

    ended = forked(work)
    if ended.code:
        raise RuntimeError(f"{checkpoints} cannot be read: {ended}")
    return json.loads(ended.output.splitlines()[-1])


def bits(output: Path) -> dict[str, Any]:
    """Returns the metrics and the last state of a run."""
    return metrics(output) | {"state": states(output / "checkpoints").get(str(STEPS), {})}


def compare(
    output: Path, control: dict[str, Any], outcome: Outcome, *, some_lines: bool = False
) -> None:
    """Records every difference from the control run; `some_lines`: metrics may be missing."""
    found = bits(output)
    outcome.notes["runs compared to the control run"] += 1
    for name in ("metrics", "evals"):
        lines, expected = found[name], control[name]
        if some_lines:
            steps = {line[0] for line in lines}
            expected = [line for line in expected if line[0] in steps]
        if lines != expected:
            differing = [line for line in lines if line not in expected]
            differing += [["missing", *line] for line in expected if line not in lines]
            outcome.differences.append(f"{output.name}: {name}: {differing or lines}")
    state, expected = found["state"], control["state"]
    outcome.differences += [
        f"{output.name}: {path}"
        for path in state.keys() | expected.keys()
        if state.get(path) != expected.get(path)
    ]


def files_in(folder: Path) -> dict[str, bytes]:
    """Returns {name: content} of a folder's files, but for the lease."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in paths
        if path.name != "lease.json"
    }


# The trials, one function for each kind


def killed_run(job: Job, kind: str, numbers: random.Random, outcome: Outcome) -> None:
    """Kills the worker's run once, after a point; where it ends before, another begins."""
    while True:
        output = job.killed = job.killed or job.new_output()
        before = steps_in(output)
        count = 1 if kind.startswith("restor") else numbers.randrange(1, 4)
        count = numbers.randrange(1, 150) if kind == "file" else count
        # What has no checkpoint cannot be restored: it is killed later, and then again.
        early = kind.startswith("restor") and not before
        point = "deleting" if early else kind
        ended = job.train(output, Fault(point, count, numbers.random() * DELAY, kill))
        check(output, before, ended, outcome)
        if ended.code == -signal.SIGKILL and early:
            continue
        if ended.code == -signal.SIGKILL:
            break
        if ended.code:
            outcome.failures.append(f"{kind}: {ended}")
            job.killed = None
            return
        compare(output, job.control, outcome)
        shutil.rmtree(output)
        job.killed = None
    names = [path.name for path in (output / "checkpoints").glob("*")]
    outcome.notes["kills that left a half-written step"] += any(".unsealed" in x for x in names)
    outcome.notes["kills that left a half-deleted step"] += any(".deleting" in x for x in names)


def killed_process(job: Job, kind: str, numbers: random.Random, outcome: Outcome) -> None:
    """Kills one process of a run of several once; where the run ends before, another begins."""
    while True:
        output = job.killed_of_several = job.killed_of_several or job.new_output()
        before = steps_in(output)
        point = numbers.choice(("step", "saving", "evaluating"))
        victim = numbers.randrange(PROCESSES)
        fault = Fault(point, numbers.randrange(1, 4), numbers.random() * DELAY, kill)
        ended = job.train_together(output, {victim: fault})
        check(output, before, ended[0], outcome)
        codes = [each.code for each in ended]
        outcome.notes[f"runs of {PROCESSES} processes that ended with {sorted(codes)}"] += 1
        if any(codes):
            break
        compare(output, several_control(job), outcome)
        shutil.rmtree(output)
        job.killed_of_several = None
    others = [code for process, code in enumerate(codes) if process != victim]
    if codes[victim] != -signal.SIGKILL or others != [LOST] * len(others):
        texts = "\n".join(map(str, ended))
        outcome.failures.append(f"{kind}: process {victim} killed, {point}: {codes}\n{texts}")


def several_control(job: Job) -> dict[str, Any]:
    """Reads what the undisturbed run of several processes measured and saved."""
    return json.loads((job.shared / "control-of-several.json").read_text())


def command_words(shared: Path, kind: str, variant: str, to: Path) -> list[str]:
    """Returns the command line of an export, an import or `tokenize`."""
    if kind == "export":
        return ["export", str(shared / "control"), "--to", str(to), "--format", variant]
    if kind == "import":
        source = str(shared / "export-huggingface")
        return ["import", source, "--to", str(to), "--devices", str(DEVICES), "--dtype", variant]
    tokenizer = {"bytes": ["--tokenizer", "bytes"], "bpe": ["--vocab-size", str(VOCABULARY)]}
    return ["tokenize", str(shared / "corpus"), "--to", str(to), *tokenizer[variant]]


VARIANTS = {
    "export": ("safetensors", "huggingface"),
    "import": ("float32", "bfloat16"),
    "tokenize": ("bytes", "bpe"),
}


def killed_command(job: Job, kind: str, numbers: random.Random, outcome: Outcome) -> None:
    """Kills a command at a file operation, perhaps a second time, and repeats it."""
    variant = numbers.choice(VARIANTS[kind])
    control = job.shared / f"{kind}-{variant}"
    to = job.folder / "command" / "to"
    words = command_words(job.shared, kind, variant, to)
    kills = 0
    wanted = numbers.randrange(1, 3)
    while kills < wanted:
        delay = numbers.choice((0, numbers.random() * 0.02))
        fault = Fault("file", numbers.randrange(1, job.operations[control.name]), delay, kill)
        ended = forked(partial(command, words, fault, to.parent, kind == "tokenize"))
        if ended.code == -signal.SIGKILL:
            kills += 1
        elif ended.code or kills:  # the second came too late
            break
        else:
            shutil.rmtree(to.parent)
    complete = to.exists() and (kind == "export" or (to / "config.json").exists())
    if not complete or kind == "tokenize":
        ended = forked(partial(command, words, nothing(), to.parent, kind == "tokenize"))
        if ended.code:
            outcome.failures.append(f"{kind} {variant}: {ended}")
    outcome.notes[f"{kind}s that were complete when they were killed"] += complete
    leftovers = [path.name for path in to.parent.rglob("*.unfinished")]
    leftovers += [path.name for path in to.parent.rglob("*.writing")]
    leftovers += [path.name for path in to.parent.rglob("*.unsealed*")]
    if leftovers and not complete:
        outcome.failures.append(f"{kind} {variant} leaves {leftovers}")

    found, expected = files_in(to), files_in(control)
    if kind == "import":  # the checkpoint's files have other names each time
        arrays, theirs = states(to / "checkpoints"), states(control / "checkpoints")
        if arrays != theirs:
            outcome.differences.append(f"{kind} {variant}: {arrays}, not {theirs}")
        found = {name: found[name] for name in found if not name.startswith("checkpoints/")}
        expected = {name: expected[name] for name in expected if "checkpoints/" not in name}
    outcome.differences += [
        f"{kind} {variant}: {name}"
        for name in found.keys() | expected.keys()
        if found.get(name) != expected.get(name)
    ]
    shutil.rmtree(to.parent, ignore_errors=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mounts a small tmpfs in this process's namespace."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, free: int) -> None:
    """Leaves so many bytes free on a disk, to a page."""
    with (disk / "ballast").open("ab") as file:
        for _ in range(3):  # the run writes meanwhile
            status = os.statvfs(disk)
            available = status.f_bavail * status.f_frsize - free
            if available > 0:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), available)
                except OSError:
                    continue


def empty(disk: Path) -> None:
    """Takes back what `fill` did."""
    (disk / "ballast").unlink(missing_ok=True)


def limit_files(size: int = resource.RLIM_INFINITY) -> None:
    """Lets no file of this process grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def during(seconds: float, begin: Callable[[], object], end: Callable[[], object]) -> None:
    """Begins something, and ends it after a time."""
    begin()
    after(seconds, end)


def full_disk(job: Job, kind: str, numbers: random.Random, outcome: Outcome) -> None:
    """Fills the disk under a run, frees it again, and runs to the end."""
    tmpfs = job.namespace and numbers.random() < 0.75
    with (
        small_disk(job.folder / "disk")
        if tmpfs
        else tempfile.TemporaryDirectory(dir=job.folder) as name
    ):
        disk = Path(name)
        output = disk / "run"
        for _ in range(20):
            left = int(2 ** (18 * numbers.random())) - 1
            moment = 0.5 ** (1 + 6 * numbers.random()) if numbers.random() < 1 / 3 else PATIENCE
            begin = partial(fill, disk, left) if tmpfs else partial(limit_files, left)
            action = partial(during, moment, begin, partial(empty, disk) if tmpfs else limit_files)
            points = ("step", "saving", "sealed", "saved", "deleting", "evaluating", "file")
            point = numbers.choice(points)
            count = numbers.randrange(1, 300 if point == "file" else 10)
            ended = job.train(output, Fault(point, count, numbers.random() * DELAY, action))
            empty(disk)
            met = any(sign in ended.output for sign in FULL)
            if met or ended.code:
                break
            shutil.rmtree(output)  # it ended before the disk was full
        else:
            raise RuntimeError("no run of 20 met the end of the disk")
        outcome.notes["disks that filled: " + ("tmpfs" if tmpfs else "limit of a file's size")] += 1
        outcome.notes[f"full disks after which the run ended with {ended.code}"] += 1
        outcome.notes["full disks that cost lines of metrics"] += "metrics are" in ended.output
        if not met or ended.code not in (0, 1) or (ended.code and "error:" not in ended.output):
            outcome.failures.append(f"{kind}, {left} bytes left: {ended}")
        check(output, [], ended, outcome)

        # The same command, with space.
        before = steps_in(output)
        again = job.train(output)
        said = f"resumes at step {max(before)}" if before else "starts at step 0"
        if again.code or (said not in again.output and "is complete" not in again.output):
            outcome.failures.append(f"{kind}, {left} bytes left: {ended}\nthen: {again}")
            return
        check(output, before, again, outcome)
        compare(output, job.control, outcome, some_lines="metrics are missing" in ended.output)


def spoil(update: int, value: float) -> None:
    """Makes the learning rate of this process `value` from an update on."""
    import jax.numpy as jnp

    from fsdp_jax.train.optimizers import make_schedule

    def spoiled(*args: Any) -> Callable[[Any], Any]:
        rate = make_schedule(*args)
        return lambda count: jnp.where(count >= update, value, rate(count))

    mock.patch("fsdp_jax.train.build.make_schedule", spoiled).start()


def spoiled_run(job: Job, kind: str, numbers: random.Random, outcome: Outcome) -> None:
    """Spoils the updates of a run from a random one on, and mends it."""
    output = job.new_output()
    update = numbers.randrange(1, STEPS)
    value = numbers.choice((float("inf"), float("-inf"), float("nan")))
    end = numbers.choice(("abort", "go on", "stop", "kill"))
    moment = update + numbers.randrange(1, 5), numbers.random() * 0.05
    faults = {"stop": Fault("step", *moment, terminate), "kill": Fault("step", *moment, kill)}
    abort_after = str(numbers.randrange(1, 6)) if end == "abort" else "None"
    what = f"a rate of {value} from update {update} on, {end}"
    ended = job.train(
        output,
        faults.get(end),
        "--train.abort_after",
        abort_after,
        before=partial(spoil, update, value),
    )
    outcome.notes[f"spoiled runs that ended with {ended.code}"] += 1
    codes = {"abort": (0, 1), "go on": (0,), "stop": (0, 75), "kill": (0, -signal.SIGKILL)}
    if ended.code not in codes[end]:
        outcome.failures.append(f"{what}: {ended}")

    # The good steps, and no others.
    check(output, [], ended, outcome)
    due = update // EVERY * EVERY
    if end != "kill" and max(steps_in(output), default=0) < due:
        outcome.good_lost.append(f"{what}: {due} is not among {steps_in(output)}\n{ended}")
    check_finite(output, what, outcome)

    # The same command, mended.
    before = steps_in(output)
    again = job.train(output)
    if again.code:
        outcome.failures.append(f"{what}: {ended}\nthen {again}")
        return
    check(output, before, again, outcome)
    check_finite(output, what, outcome)
    last = metrics(output)["metrics"][-1]
    if last[0] != STEPS or STEPS not in steps_in(output):
        outcome.failures.append(f"{what}: ends with {last}\n{again}")
    if last[-1] == 0:
        compare(output, job.control, outcome)
    else:
        outcome.notes["spoiled runs that went on after skipped steps"] += before[-1] < STEPS
    shutil.rmtree(output)


def check_finite(output: Path, what: str, outcome: Outcome) -> None:
    """Checks that no step in place has a value that is not finite."""
    if not steps_in(output):
        return
    for step, leaves in states(output / "checkpoints").items():
        if leaves["not finite"]:
            outcome.good_lost.append(f"{what}: step {step}: {leaves['not finite']} not finite")


# All of them

TRIALS: dict[str, Callable[[Job, str, random.Random, Outcome], None]] = {
    **dict.fromkeys(RUN_KILLS, killed_run),
    **dict.fromkeys(COMMANDS, killed_command),
    "disk": full_disk,
    "nan": spoiled_run,
    "processes": killed_process,
}


def prepare(shared: Path, kinds: set[str], namespace: bool) -> Job:
    """Writes the corpus and the configuration; runs what the trials are compared to."""
    # A corpus of several shards, and its tokens for the runs.
    (shared / "corpus").mkdir()
    package = Path(__file__).parents[1] / "fsdp_jax"
    for number, file in enumerate(sorted(package.glob("**/*.py"))[:40]):
        (shared / "corpus" / f"{number:02}.txt").write_text(file.read_text()[:1000])
    job = Job(shared, shared, {}, {}, namespace)
    undisturbed(job, "tokenize", "bpe")
    config = CONFIG.replace("STEPS", str(STEPS)).replace("EVERY", str(EVERY))
    config = config.replace("TOKENS", str(shared / "tokenize-bpe"))
    (shared / "run.yaml").write_text(config)

    # The control runs, and the control of each command.
    ended = job.train(shared / "control")
    if ended.code:
        raise SystemExit(f"the control run failed: {ended}")
    job.control = bits(shared / "control")
    if "processes" in kinds:
        output = shared / "control-of-several"
        for each in job.train_together(output, {}):
            if each.code:
                raise SystemExit(f"the control run of several processes failed: {each}")
        output.with_suffix(".json").write_text(json.dumps(bits(output)))
    if kinds & {"export", "import"}:
        undisturbed(job, "export", "huggingface")
    for kind in sorted(kinds & {*COMMANDS}):
        for variant in VARIANTS[kind]:
            undisturbed(job, kind, variant)
    return job


def undisturbed(job: Job, kind: str, variant: str) -> None:
    """Runs a command to its end, and counts its file operations."""
    to = job.shared / f"{kind}-{variant}"
    if to.exists():
        return
    # In a folder of its own, as in the trials: its operations are counted.
    alone = job.shared / "alone" / "to"
    words = command_words(job.shared, kind, variant, alone)
    ended = forked(partial(command, words, nothing(), alone.parent, kind == "tokenize"))
    if ended.code:
        raise SystemExit(f"{kind} failed: {ended}")
    job.operations[to.name] = ended.logged("operations")[0]
    alone.rename(to)


def share(job: Job, trials: list[tuple[str, int]], seed: int) -> dict[str, Outcome]:
    """Does the trials of one worker."""
    job.folder.mkdir()
    for kind, number in trials:
        outcome = job.outcomes.setdefault(kind, Outcome())
        numbers = random.Random(f"{seed} {kind} {number}")
        outcome.trials += 1
        try:
            TRIALS[kind](job, kind, numbers, outcome)
        except Exception:
            outcome.failures.append(f"{kind} {number}: {traceback.format_exc()}")
            job.killed = None
        print(f"{kind} {number}: {problems(outcome)} problems", file=sys.stderr, flush=True)

    # The last runs, to their ends.
    if job.killed is not None:
        outcome = job.outcomes.setdefault("step", Outcome())
        ended = job.train(job.killed)
        if ended.code:
            outcome.failures.append(str(ended))
        else:
            compare(job.killed, job.control, outcome)
    if job.killed_of_several is not None:
        outcome = job.outcomes.setdefault("processes", Outcome())
        together = job.train_together(job.killed_of_several, {})
        failed = [str(each) for each in together if each.code]
        outcome.failures += failed
        if not failed:
            compare(job.killed_of_several, several_control(job), outcome)
    return job.outcomes


def problems(outcome: Outcome) -> int:
    """Returns how much went wrong in the trials of a kind."""
    return sum(map(len, (outcome.lost, outcome.differences, outcome.good_lost, outcome.failures)))


def torture(
    shared: Path, trials: dict[str, int], seed: int, jobs: int, namespace: bool
) -> dict[str, Outcome]:
    """Does so many trials of each kind; returns the results of each kind."""
    import jax

    # All that a trial imports; nothing here starts a backend or a thread.
    import fsdp_jax.checkpoint.verify
    import fsdp_jax.cli.main
    import fsdp_jax.cli.tokenize
    import fsdp_jax.train.huggingface
    import fsdp_jax.train.main  # noqa: F401

    jax.config.update("jax_compilation_cache_dir", str(shared / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
    started = time.monotonic()
    control = prepare(shared, {kind for kind, count in trials.items() if count}, namespace)
    print(f"the controls took {time.monotonic() - started:.0f} s", file=sys.stderr)

    # Kinds follow one another, so that runs are killed at all kinds of points.
    every = [(kind, number) for kind, count in trials.items() for number in range(count)]
    random.Random(seed).shuffle(every)
    outcomes = {kind: Outcome() for kind in trials}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        parts = [
            pool.submit(
                share,
                Job(shared / f"job-{n}", shared, control.operations, control.control, namespace),
                every[n::jobs],
                seed,
            )
            for n in range(jobs)
        ]
        for part in parts:
            for kind, outcome in part.result().items():
                outcomes.setdefault(kind, Outcome()).add(outcome)
    return outcomes


def may_mount(directory: Path) -> bool:
    """Returns whether user and mount namespaces are permitted, and a tmpfs in them."""
    words = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(directory)]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def main() -> int:
    """Prints a table and a line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    kinds = (options.only,) if options.only else KINDS
    trials = {
        kind: options.trials // len(kinds) + (number < options.trials % len(kinds))
        for number, kind in enumerate(kinds)
    }
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        # Again in a namespace of its own, whose mounts end with it.
        if trials.get("disk") and IN_NAMESPACE not in os.environ and may_mount(Path(directory)):
            environment = os.environ | {IN_NAMESPACE: "1"}
            words = ["unshare", "-rm", sys.executable, *sys.argv]
            return subprocess.run(words, env=environment, check=False).returncode
        print("trials:", ", ".join(f"{kind} {count}" for kind, count in trials.items()), flush=True)
        outcomes = torture(
            Path(directory), trials, options.seed, options.jobs, IN_NAMESPACE in os.environ
        )
    return report(outcomes, options, time.monotonic() - started)


def report(outcomes: dict[str, Outcome], options: argparse.Namespace, seconds: float) -> int:
    """Prints the results, and returns the exit code."""
    from fsdp_jax.tables import text_table

    names = ["kind", "trials", "steps lost", "bits differ", "good steps lost", "failures"]
    rows = [
        [kind, each.trials, *map(len, (each.lost, each.differences, each.good_lost, each.failures))]
        for kind, each in outcomes.items()
    ]
    total = [sum(map(int, column)) for column in list(zip(*rows, strict=True))[1:]]
    print(text_table(names, [*rows, ["total", *total]]))
    notes: Counter[str] = sum((each.notes for each in outcomes.values()), Counter())
    for note, count in sorted(notes.items()):
        print(f"{note}: {count}")
    for kind, each in outcomes.items():
        for line in [*each.lost, *each.differences, *each.good_lost, *each.failures][:10]:
            print(f"{kind}: {line}")
    kinds = {kind: vars(each) for kind, each in outcomes.items()}
    text = json.dumps({"kinds": kinds, "seed": options.seed, "seconds": seconds})
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return int(any(map(problems, outcomes.values())))


if __name__ == "__main__":
    sys.exit(main())
