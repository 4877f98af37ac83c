"""Where a scheduler has placed this process: the number of processes, its own, and process 0's.

Each scheduler tells its processes in their environment; `SCHEDULERS` says which variables it is
recognized by, and how they are read. The first that is recognized counts: what starts processes
inside of another scheduler's job, as `mpirun` in one of Slurm, stands before that scheduler.
"""

import re
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_jax.compat.pjrt_plugins import has_tpus
from fsdp_jax.errors import ConfigError

Environment = Mapping[str, str]

# Where a scheduler names no port, one is derived from the job. These are above the ports that Linux
# gives to outgoing connections; jax's service takes the next one, so that they come in pairs.
FIRST_PORT, PAIRS = 61440, 2000
TPU_PORT = 8476
METADATA_SECONDS = 5.0  # until the metadata server of a TPU VM has to answer

DETECT_OFF = "`--cluster.detect false` starts a run of one process"


@dataclass(frozen=True)
class ProcessPlacement:
    """The place of a process in its run.

    Attributes:
        scheduler: its name, for messages.
        coordinator: HOST:PORT where process 0 listens; empty if the scheduler does not tell.
        processes: number of processes.
        process: number of this process, from 0.
        binds_gpus: each process of the host sees its own GPUs only.

    """

    scheduler: str
    coordinator: str
    processes: int
    process: int
    binds_gpus: bool = False


@dataclass(frozen=True)
class Scheduler:
    """A scheduler, the variables that all its processes have, and how to read a placement.

    `read` takes the name and the environment; it returns None for a job of one process, and raises
    ConfigError where the environment does not tell enough.
    """

    name: str
    variables: tuple[str, ...]
    read: Callable[[str, Environment], ProcessPlacement | None]


def find_placement(environment: Environment) -> ProcessPlacement | None:
    """Finds where a scheduler has placed this process; None if there is none, or one process.

    Raises ConfigError for variables that make no sense, and for jobs of several processes whose
    environment does not tell their places.
    """
    for each in SCHEDULERS:
        given = [name for name in each.variables if name in environment]
        if each.read is _read_jax and len(given) == 1:  # set by hand, and not whole
            (missing,) = set(each.variables) - set(given)
            raise _nonsense(missing, f"a number, as {given[0]} is set", environment)
        if len(given) < len(each.variables):
            continue
        placement = each.read(each.name, environment)
        if placement is None or placement.processes == 1:
            return None
        if not 0 <= placement.process < placement.processes:
            raise ConfigError(
                f"{each.name} gives this process a number that its run does not have",
                where=each.variables[-1],
                expected=f"0 to {placement.processes - 1}",
                got=placement.process,
            )
        return replace(placement, coordinator=_chosen_address(placement, environment))
    if "JAX_COORDINATOR_ADDRESS" in environment:
        raise _nonsense("JAX_NUM_PROCESSES", "a number, as the address is set", environment)
    if has_tpus() and "TPU_SKIP_MDS_QUERY" not in environment:
        return _read_tpu_metadata(environment)
    return None


def choose_gpus(
    placement: ProcessPlacement | None,
    environment: Environment,
    visible: int,
    process: int,
    sharers: Sequence[int],
) -> list[int] | None:
    """Chooses which of the `visible` GPUs are this process's; None where there are none to choose.

    `sharers` are the processes of its host that see the same GPUs, itself included, in order. They
    share them equally, in that order; one that is alone takes all of them, as do those that the
    scheduler shows their own. `JAX_LOCAL_DEVICE_IDS` is left to jax. Raises ConfigError if the GPUs
    cannot be shared equally.
    """
    if not visible or "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    binds_gpus = placement is not None and placement.binds_gpus
    # Fewer than processes, and chosen for them: each has its own, under names that are the same.
    if "CUDA_VISIBLE_DEVICES" in environment and visible < len(sharers):
        binds_gpus = True
    if len(sharers) == 1 or visible == 1 or binds_gpus:
        return list(range(visible))
    share, rest = divmod(visible, len(sharers))
    if rest or not share:
        raise ConfigError(
            "the GPUs of this host cannot be shared equally by its processes",
            where="this host",
            expected=f"a multiple of {len(sharers)}, the processes of this host",
            got=f"{visible} GPUs",
            fix="start one process per host or per GPU; or set CUDA_VISIBLE_DEVICES for each "
            "process, and JAX_LOCAL_DEVICE_IDS=0,1,... for as many of them",
        )
    first = sharers.index(process) * share
    return list(range(first, first + share))


def require_several(placement: ProcessPlacement | None, processes: int) -> None:
    """Refuses a run of one process where the scheduler started several. Raises ConfigError."""
    if placement is not None and processes == 1:
        raise ConfigError(
            f"a run of one process, of which {placement.scheduler} has started "
            f"{placement.processes}",
            where="cluster.processes",
            expected=placement.processes,
            got=processes,
            fix=f"leave out the keys of `cluster`; or start one task; or {DETECT_OFF} in each task",
        )


# The schedulers


def _read_jax(name: str, environment: Environment) -> ProcessPlacement | None:
    """Reads what Kubeflow's Trainer sets, and `fsdp-jax launch`, and a JobSet as docs show it."""
    processes = _number(environment, "JAX_NUM_PROCESSES")
    if processes > 1 and "JAX_COORDINATOR_ADDRESS" not in environment:
        raise ConfigError(
            "the address of process 0 is missing",
            where="JAX_COORDINATOR_ADDRESS",
            expected="HOST:PORT, the same for every process",
            got="not set, beside JAX_NUM_PROCESSES and JAX_PROCESS_ID",
            fix=f"set it for every process; {DETECT_OFF}",
        )
    address = environment.get("JAX_COORDINATOR_ADDRESS", "")
    return ProcessPlacement(name, address, processes, _number(environment, "JAX_PROCESS_ID"))


def _read_torchrun(name: str, environment: Environment) -> ProcessPlacement | None:
    """Reads the variables of torchrun, which PyTorchJob and many others set too."""
    port = _number(environment, "MASTER_PORT")
    # torchrun itself listens there
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1
    size, rank = _number(environment, "WORLD_SIZE"), _number(environment, "RANK")
    return ProcessPlacement(name, _address(environment["MASTER_ADDR"], port), size, rank)


def _read_skypilot(name: str, environment: Environment) -> ProcessPlacement | None:
    """Reads SkyPilot's variables: a task runs once on each node."""
    nodes = environment["SKYPILOT_NODE_IPS"].split()
    if not nodes:
        return None
    port = _derived_port(environment.get("SKYPILOT_TASK_ID", nodes[0]))
    process = _number(environment, "SKYPILOT_NODE_RANK")
    return ProcessPlacement(name, _address(nodes[0], port), len(nodes), process)


def _read_open_mpi(name: str, environment: Environment) -> ProcessPlacement | None:
    """Reads Open MPI's variables; process 0 is taken to be on the host of `mpirun`."""
    launcher, job = "", ""
    # "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", or tcp6://[ADDRESS,ADDRESS]:PORT, up to 4
    if uri := environment.get("OMPI_MCA_orte_hnp_uri"):
        job = uri.partition(";")[0]
        if found := re.search(r"tcp://([^,:]+)|tcp6://\[([^],]+)", uri):
            launcher = found[1] or found[2]
    # "prterun-HOST-PID@1", from 5
    elif found := re.fullmatch(r"\w+-(.+)-\d+@\d+", environment.get("PMIX_NAMESPACE", "")):
        launcher, job = found[1], found[0]
    address = ""
    if launcher:
        address = _address(launcher, _derived_port(job))
    size = _number(environment, "OMPI_COMM_WORLD_SIZE")
    return ProcessPlacement(name, address, size, _number(environment, "OMPI_COMM_WORLD_RANK"))


def _read_slurm(name: str, environment: Environment) -> ProcessPlacement | None:
    """Reads the variables of Slurm: those of a task that srun has started.

    Raises ConfigError for a process of a job of several tasks that srun has not started, as the
    script that sbatch runs.
    """
    in_step = "SLURM_STEP_NODELIST" in environment and "SLURM_LOCALID" in environment
    if not in_step:
        tasks = _number(environment, "SLURM_NTASKS", 1)
        nodes = _number(environment, "SLURM_JOB_NUM_NODES", 1)
        if max(tasks, nodes) == 1:
            return None
        raise ConfigError(
            "one process in a job of several: srun has not started it",
            where=f"Slurm's job {environment['SLURM_JOB_ID']}",
            expected=f"{max(tasks, nodes)} processes, one for each task",
            got="a process of the batch script, or of an interactive shell",
            fix=f"put `srun` before the command; or {DETECT_OFF}",
        )
    # "gpu[001-003,007]-ib,login": the first of each range is the first host
    first = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", environment["SLURM_STEP_NODELIST"]).split(",")[0]
    job = f"{environment['SLURM_JOB_ID']}.{environment.get('SLURM_STEP_ID', '')}"
    return ProcessPlacement(
        name,
        _address(first, _derived_port(job)),
        _number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS", 1)),
        _number(environment, "SLURM_PROCID"),
        binds_gpus="SLURM_GPUS_PER_TASK" in environment,
    )


def _read_tpu(name: str, environment: Environment) -> ProcessPlacement | None:
    """Reads the variables of a TPU slice on Kubernetes, or of several slices."""
    hosts = environment["TPU_WORKER_HOSTNAMES"].split(",")
    return _tpu_placement(name, hosts, _number(environment, "TPU_WORKER_ID"), environment)


def _read_tpu_metadata(environment: Environment) -> ProcessPlacement | None:
    """Reads where a TPU VM is in its slice from its metadata server; None where there is none."""
    server = environment.get("GCE_METADATA_HOST", "metadata.google.internal")
    folder = f"http://{server}/computeMetadata/v1/instance/attributes/"

    def fetch(key: str) -> str:
        request = urllib.request.Request(folder + key, headers={"Metadata-Flavor": "Google"})
        # the metadata server is on the machine itself: no proxy knows it
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=METADATA_SECONDS) as answer:
            return str(answer.read(1 << 20), "utf-8")

    try:
        worker, endpoints = fetch("agent-worker-number"), fetch("worker-network-endpoints")
        lines = fetch("tpu-env").splitlines()
    except OSError:  # not a TPU VM of Google's cloud
        return None
    # HOST, or NAME:ID:ADDRESS
    hosts = [endpoint.split(":")[-1] for endpoint in endpoints.split(",")]
    pairs = [line.partition(":") for line in lines if line.startswith("MEGASCALE_")]
    slices = {key.strip(): value.strip().strip("'") for key, _, value in pairs}
    number = _number({"agent-worker-number": worker}, "agent-worker-number")
    return _tpu_placement("Cloud TPU", hosts, number, slices | dict(environment))


def _tpu_placement(
    name: str, hosts: list[str], worker: int, environment: Environment
) -> ProcessPlacement | None:
    """Makes the placement of a TPU host: its slice's hosts, and the other slices' (MEGASCALE)."""
    slices = _number(environment, "MEGASCALE_NUM_SLICES", 1)
    number = _number(environment, "MEGASCALE_SLICE_ID", 0)
    if len(hosts) * slices == 1:
        return None
    first = environment.get("MEGASCALE_COORDINATOR_ADDRESS", hosts[0]).split(":")[0]
    address = _address(first, TPU_PORT)
    return ProcessPlacement(name, address, len(hosts) * slices, number * len(hosts) + worker)


def _read_kubernetes(name: str, environment: Environment) -> ProcessPlacement | None:
    """Refuses an indexed Job whose pods know nothing but their index. Raises ConfigError."""
    raise ConfigError(
        "an indexed Job of Kubernetes, whose environment does not tell how many pods there are",
        where="JOB_COMPLETION_INDEX",
        expected="JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or the keys "
        "cluster.coordinator, cluster.processes and cluster.process",
        got=f"index {environment['JOB_COMPLETION_INDEX']} alone",
        fix=f"set them in the manifest, as docs/clusters.md shows; or {DETECT_OFF}",
    )


SCHEDULERS = (
    # Set on purpose, or by our own launcher; inherited variables of others remain beside them.
    Scheduler("JAX_NUM_PROCESSES", ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"), _read_jax),
    Scheduler("torchrun", ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"), _read_torchrun),
    Scheduler("SkyPilot", ("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"), _read_skypilot),
    Scheduler("Open MPI", ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), _read_open_mpi),
    Scheduler("Slurm", ("SLURM_JOB_ID",), _read_slurm),
    Scheduler("Cloud TPU", ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"), _read_tpu),
    Scheduler("Kubernetes", ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"), _read_kubernetes),
)


# Values


def _chosen_address(placement: ProcessPlacement, environment: Environment) -> str:
    """Applies jax's variables for the address, or for its port alone, to a scheduler's address."""
    if address := environment.get("JAX_COORDINATOR_ADDRESS"):
        return address
    if placement.coordinator and "JAX_COORDINATOR_PORT" in environment:
        host = placement.coordinator.rpartition(":")[0]
        return f"{host}:{_number(environment, 'JAX_COORDINATOR_PORT')}"
    return placement.coordinator


def _number(environment: Environment, name: str, default: int | None = None) -> int:
    """Reads a variable that is a number from 0. Raises ConfigError for anything else."""
    text = environment.get(name, "")
    if text == "" and default is not None:
        return default
    if not text.strip().isdecimal():
        raise _nonsense(name, "a number", environment)
    return int(text)


def _nonsense(name: str, expected: str, environment: Environment) -> ConfigError:
    return ConfigError(
        "the scheduler's variable cannot be read",
        where=name,
        expected=expected,
        got=environment.get(name, "not set"),
        fix=f"unset what is left from elsewhere; or {DETECT_OFF}",
    )


def _address(host: str, port: int) -> str:
    """Formats HOST:PORT, with brackets around an IPv6 address."""
    if ":" in host:
        return f"[{host}]:{port}"
    return f"{host}:{port}"


def _derived_port(job: str) -> int:
    """Derives a port from the name of a job, the same in all of its processes."""
    return FIRST_PORT + 2 * (zlib.crc32(job.encode()) % PAIRS)
