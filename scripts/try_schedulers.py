"""Starts one small run under each scheduler, by the same command, and prints a table and JSON.

    python scripts/try_schedulers.py [--only NAME ...] [--folder output/try_schedulers]

Slurm and Open MPI are the real ones where `srun` and `mpirun` are found; the others are processes
whose environment is set as theirs: a JobSet's is read from `scripts/clusters/jobset.yaml`. Each run
has 4 virtual CPU devices in 2 or 4 processes, and the same loss. A wrong start has to be refused by
name. Slurm needs two nodes whose names resolve (as `local_slurm` nodes do with a line for them in
/etc/hosts); they may be virtual nodes of one machine.

Exit code 1 if one of those that were tried is not as it should be. What was not tried is said.
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
CLUSTERS = ROOT / "scripts" / "clusters"
SECONDS = 420
TRAIN = [
    sys.executable, "-m", "fsdp_jax", "train", str(ROOT / "configs" / "quickstart.yaml"),
    "--model.layers", "1", "--model.width", "32", "--data.sequence_length", "16",
    "--train.steps", "2", "--train.global_batch_size", "16", "--train.eval_batches", "1",
    "--train.sample", "0", "--train.log_every", "1",
]  # fmt: skip
# What one scheduler or another sets, which a process of the next must not inherit.
FOREIGN = re.compile(
    "SLURM_(?!CONF$)|OMPI_|PMIX_|JAX_(COORDINATOR|NUM|PROCESS)|SKYPILOT_|MASTER_|(LOCAL_)?(RANK|WORLD_SIZE)$"
    "|JOB_COMPLETION_INDEX|KUBERNETES_|TPU_|XLA_FLAGS$|NPROC$"
)

Environments = Callable[[int, int], dict[str, str]]  # of process k of n


@dataclass
class Trial:
    """A start of a run, and what is expected of it.

    `command` is put before the run's own, and starts all processes; without one, `environments`
    gives each of them. `refused` is the text that a wrong start has to be answered with.
    """

    name: str
    processes: int = 2
    hosts: int = 1
    command: tuple[str, ...] = ()
    environments: Environments | None = None
    extra: tuple[str, ...] = ()
    refused: str = ""


@dataclass
class Result:
    """What a trial gave."""

    name: str
    kind: str  # real or simulated
    processes: int
    result: str
    loss: float | None
    good: bool


def free_port() -> str:
    """Finds a port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def trainer(port: str) -> Environments:
    """The variables of Kubeflow's Trainer."""
    return lambda k, n: {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(n),
        "JAX_PROCESS_ID": str(k),
    }


def jobset(port: str) -> Environments:
    """The variables that our manifest gives the pods of a JobSet, with what Kubernetes fills in."""
    manifest = yaml.safe_load((CLUSTERS / "jobset.yaml").read_text())
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]

    def of_process(k: int, n: int) -> dict[str, str]:
        annotations = {
            "jobset.sigs.k8s.io/coordinator": "localhost",
            "batch.kubernetes.io/job-completion-index": str(k),
        }
        values = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(k)}
        for variable in pod["containers"][0]["env"]:
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                text = "a secret of the cluster's own"
            elif "fieldRef" in source:
                text = annotations[source["fieldRef"]["fieldPath"].split("'")[1]]
            else:
                text = re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], variable["value"])
            values[variable["name"]] = text.replace(":8476", f":{port}")
        return values

    return of_process


def torchrun(port: str, *, local: bool = True) -> Environments:
    """The variables of torchrun, or without the local ones those of a PyTorchJob."""

    def of_process(k: int, n: int) -> dict[str, str]:
        values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(n)}
        values["RANK"] = str(k)
        if local:
            values |= {"LOCAL_RANK": str(k), "LOCAL_WORLD_SIZE": str(n)}
        return values

    return of_process


def skypilot(k: int, n: int) -> dict[str, str]:
    """The variables of SkyPilot, on nodes of one machine."""
    return {
        "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * n),
        "SKYPILOT_NODE_RANK": str(k),
        "SKYPILOT_NUM_NODES": str(n),
        "SKYPILOT_TASK_ID": f"sky-{os.getpid()}_fsdp-jax",
    }


def index_alone(k: int, n: int) -> dict[str, str]:
    """The variables of an indexed Job whose manifest sets none."""
    return {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(k)}


def trials() -> list[Trial]:
    """Lists all trials."""
    srun = ("srun", "--overcommit", "--kill-on-bad-exit=0")
    script = str(CLUSTERS / "slurm_per_node.sbatch")
    sbatch = ("sbatch", "--wait", "--gpus-per-node=0", "--cpus-per-task=1", "--output={log}")
    alone = ("--cluster.coordinator", "localhost:1", "--cluster.processes", "1")
    return [
        Trial("Slurm, one task per node", command=(*srun, "-N2", "-n2")),
        Trial("Slurm, one task per device", 4, command=(*srun, "-N2", "-n4")),
        Trial("Slurm, our sbatch script", command=(*sbatch, script)),
        Trial("Open MPI", command=("mpirun", "--oversubscribe", "-n", "2")),
        Trial("Kubeflow's Trainer", environments=trainer(free_port())),
        Trial("JobSet, our manifest", environments=jobset(free_port())),
        Trial("SkyPilot", environments=skypilot),
        Trial("torchrun", 4, environments=torchrun(free_port())),
        Trial("PyTorchJob", environments=torchrun(free_port(), local=False)),
        Trial(
            "Slurm, a batch script without srun",
            command=(*sbatch, "-N2", "-n2", "{once}"),
            refused="srun has not started it",
        ),
        Trial(
            "Open MPI, each process alone",
            command=("mpirun", "--oversubscribe", "-n", "2"),
            extra=(*alone, "--cluster.process", "0"),
            refused="of which Open MPI has started 2",
        ),
        Trial(
            "Kubernetes, the index alone",
            environments=index_alone,
            refused="JAX_NUM_PROCESSES",
        ),
    ]


def run(trial: Trial, folder: Path) -> tuple[list[int], str]:
    """Runs a trial; returns the exit codes of what was started, and all output."""
    folder.mkdir(parents=True)
    devices = ("--train.devices", str(4 // trial.processes))
    arguments = [*TRAIN[4:], *devices, "--output", str(folder / "run"), *trial.extra]
    command = [*TRAIN[:4], *arguments]
    clean = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    path = os.pathsep.join([str(ROOT), clean.get("PYTHONPATH", "")])
    clean |= {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "FSDP_JAX_CLUSTER_SECRET": "s" * 32}
    if os.geteuid() == 0:
        clean |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    commands, environments = [command] * trial.processes, [clean] * trial.processes
    log = folder / "log"
    if trial.environments is not None:
        environments = [
            clean | trial.environments(k, trial.processes) for k in range(trial.processes)
        ]
    else:
        once = folder / "once.sh"
        once.write_text('#!/bin/bash\nexec fsdp-jax train "$@"\n')
        # batch scripts call fsdp-jax by its name
        binary = folder / "bin" / "fsdp-jax"
        binary.parent.mkdir()
        binary.write_text(f'#!/bin/bash\nexec {sys.executable} -m fsdp_jax "$@"\n')
        binary.chmod(0o755)
        clean["PATH"] = f"{binary.parent}{os.pathsep}{clean['PATH']}"
        start = [part.format(log=log, once=once) for part in trial.command]
        own = command
        if start[0] == "sbatch":
            own = arguments
        commands, environments = [[*start, *own]], [clean]
    started = [
        subprocess.Popen(
            each, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
        )
        for each, env in zip(commands, environments, strict=True)
    ]
    try:
        text = "".join(process.communicate(timeout=SECONDS)[0] for process in started)
    finally:
        for process in started:
            process.kill()
    if log.exists():
        text += log.read_text()
    return [process.returncode for process in started], text


def judge(trial: Trial, folder: Path) -> Result:
    """Runs a trial, and compares it with what is expected."""
    kind = "simulated"
    if trial.command:
        kind = "real"
        if shutil.which(trial.command[0]) is None:
            what = f"not tried: no {trial.command[0]} here"
            return Result(trial.name, kind, trial.processes, what, None, True)
    try:
        codes, text = run(trial, folder)
    except subprocess.TimeoutExpired:
        what = f"did not end within {SECONDS} s"
        return Result(trial.name, kind, trial.processes, what, None, False)
    (folder / "output.txt").write_text(text)
    loss = None
    if trial.refused:
        good = trial.refused in text and 0 not in codes and not (folder / "run").exists()
        what = "refused by name"
    else:
        metrics, rows = folder / "run" / "metrics.jsonl", []
        if metrics.exists():
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
            loss = rows[-1]["loss"]
        joined = f"{trial.processes} processes x {16 // trial.processes} rows = 16 examples"
        good = set(codes) == {0} and text.count("versions:") == 1 and joined in text
        good = good and [row["step"] for row in rows] == [1, 2]
        what = "one run"
    if not good:
        what = f"WRONG: codes {codes}, see {folder / 'output.txt'}"
    return Result(trial.name, kind, trial.processes, what, loss, good)


def main() -> int:
    """Runs the trials, and prints the table; returns 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--folder", type=Path, default=ROOT / "output" / "try_schedulers")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    print(f"{'start':<38}{'':<11}{'processes':<11}{'loss':<10}result")
    results = []
    for number, trial in enumerate(trials()):
        if options.only and not any(part in trial.name for part in options.only):
            continue
        result = judge(trial, options.folder.absolute() / str(number))
        results.append(result)
        loss = ""
        if result.loss is not None:
            loss = f"{result.loss:.5f}"
        row = f"{result.name:<38}{result.kind:<11}{result.processes:<11}{loss:<10}{result.result}"
        print(row, flush=True)
    losses = [result.loss for result in results if result.loss is not None]
    alike = not losses or max(losses) - min(losses) <= 1e-5 * min(losses)
    print(json.dumps({"alike": alike, "results": [asdict(result) for result in results]}))
    return int(not (alike and all(result.good for result in results)))


if __name__ == "__main__":
    sys.exit(main())
