"""Virtual devices, and the processes of a run: they join, compare facts, wait and end together."""

import atexit
import contextlib
import multiprocessing
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import NamedTuple

import jax
from jax.experimental import multihost_utils

from fsdp_jax.checkpoint.manifest import package_versions
from fsdp_jax.compat.error_texts import STARTED_ALREADY
from fsdp_jax.compat.pjrt_plugins import choose_platforms, list_gpus
from fsdp_jax.compat.xla_flags import environment_flags, set_virtual_devices
from fsdp_jax.errors import ArgumentError, ConfigError, ProcessLostError, error_block, exit_code
from fsdp_jax.launch.admission import read_secret
from fsdp_jax.launch.native_output import NativeOutput
from fsdp_jax.launch.preflight import LEAST_SECONDS, START, first_sum
from fsdp_jax.launch.schedulers import (
    ProcessPlacement,
    choose_gpus,
    find_placement,
    require_several,
)
from fsdp_jax.launch.source_digests import source_digests
from fsdp_jax.launch.watch import Watch, print_stacks
from fsdp_jax.processes import compare_facts_by, note_joining, set_hosts
from fsdp_jax.step.program_files import compiler_settings

# Of jax, which decide on the program that a process compiles, as the flags of XLA do.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)

AT_EXIT = 300.0  # seconds that a process which exits, perhaps too early, waits for the others
# Of jax's service. It counts time in which a process is stopped, or its machine sleeps, so that its
# default of 100 s would end runs that could go on; who is dead is noticed by `watch`, and who hangs
# by `step_timeout`. The processes send a heartbeat in half of the time, which also keeps firewalls
# from forgetting the connection.
HEARTBEAT_SECONDS = 600
SHUTDOWN_SECONDS = 300  # `leave_cluster` has waited for the others before
JOINED = "FSDP_JAX_JOINED"
"""The environment variable with the process that has joined, for processes that it starts."""
_watch: Watch | None = None  # of a process that has joined others


def use_virtual_devices(count: int) -> None:
    """Gives this process `count` virtual CPU devices; an accelerator stays the default backend.

    Plugins whose hardware is absent are not started; see `fsdp_jax.planner.choose_platforms`.

    Raises ConfigError if `count` is not positive, and ValueError if jax has already started with
    another count.
    """
    if count < 1:
        raise ConfigError(
            "no such number of devices", where="train.devices", expected="1 or more", got=count
        )
    # before the backends start, since jax fixes both then
    choose_platforms()
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # the backends have started, which is fine if they need no change
        if jax.default_backend() != "cpu" or jax.local_device_count() == count:
            return
        raise ArgumentError(
            "jax has started already: the number of virtual devices is fixed",
            where="train.devices",
            expected=count,
            got=jax.local_device_count(),
            fix="call use_virtual_devices before anything that touches a device, and before "
            "join_cluster",
        ) from None
    set_virtual_devices(count)


def join_cluster(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    detect: bool = True,
    timeout: float = 300,
    facts: Mapping[str, object] | None = None,
    secret_file: str | None = None,
    native_output: NativeOutput | None = None,
) -> None:
    """Joins this process into a run of several, and waits until all have joined and agree.

    What is not given is read from the environment that a scheduler has set, such as Slurm's; see
    `fsdp_jax.launch.schedulers`. Where there is none this is a run of one process, and nothing
    happens. Call it before anything that touches a device: it starts the devices, for a first
    sum over all of them. On a host with GPUs and several processes, each then has its own.

    From then on an error that ends one process, or its death, ends all of them: see
    `fail_together`.

    Args:
        coordinator: HOST:PORT where process 0 listens; jax's own service takes the next port.
        processes: number of processes.
        process: number of this process, from 0.
        detect: read what a scheduler has set. Without it the three above are given, or it is a run
            of one process.
        timeout: seconds to wait for the others.
        facts: what must be equal in all processes, beside packages and settings of jax.
        secret_file: holds the secret without which nobody can join; default: it is that of the
            environment variable `FSDP_JAX_CLUSTER_SECRET`, or there is none.
        native_output: keeps off stdout what Gloo prints there, from here on.

    Raises:
        ConfigError: the arguments or the scheduler's variables do not make sense, the scheduler has
            started several processes for a run of one, or the processes disagree.
        ProcessLostError: some have not joined in time, or do not compute together.

    """
    global _watch
    note_joining()
    # Arguments that make no sense are refused before anything is sent.
    member = _find_member(coordinator, processes, process, detect)
    if member is None:
        return
    if _watch is not None:
        raise ConfigError(
            "this process has joined already", where="cluster", fix="call leave_cluster before"
        )
    _refuse_worker()
    # Our own connection first, which compares the facts: processes that disagree end with a message
    # that says how, where jax alone would hang or fail in a collective.
    choose_platforms()
    gpus = list_gpus(os.environ)
    secret = read_secret(secret_file)
    watch = Watch(member.host, member.port, member.process, member.processes, timeout, secret)
    service = watch.join(
        {"cluster.processes": member.processes, **_environment_facts(), **(facts or {})},
        following=(START, max(timeout, LEAST_SECONDS)),
        gpus=gpus,
    )
    _watch = watch
    os.environ[JOINED] = str(os.getpid())
    set_hosts(watch.hosts)
    compare_facts_by(require_same)
    _install_exit_hooks()
    # From here on an error ends all.
    with fail_together():
        _start_jax(member, watch, service, len(gpus))
        if native_output is not None:
            native_output.redirect()
        first_sum(watch, timeout)


def _refuse_worker() -> None:
    """Raises ConfigError in a process that `multiprocessing` started in one that has joined.

    Such a process imports the script: a data worker would take its parent's place, be refused, and
    be replaced by another for ever.
    """
    # While a worker imports the script, `parent_process` does not tell yet; its name does.
    name = multiprocessing.current_process().name
    if name == "MainProcess" or JOINED not in os.environ:
        return
    raise ConfigError(
        "a worker of multiprocessing runs the script, and would join the run once more",
        where="cluster",
        got=f"{name}, of process {os.environ[JOINED]}",
        fix='put what the script does, join_cluster too, under `if __name__ == "__main__":`',
    )


class _Member(NamedTuple):
    """The place of a process in a run of several."""

    host: str  # where process 0 listens
    port: int
    processes: int
    process: int
    placement: ProcessPlacement | None  # by a scheduler


def _find_member(
    coordinator: str | None, processes: int | None, process: int | None, detect: bool
) -> _Member | None:
    """Finds this process's place by what is given and what a scheduler has set; None if alone.

    Raises ConfigError.
    """
    placement = None
    if detect:
        try:
            placement = find_placement(os.environ)
        except ConfigError:  # of a scheduler; what is given needs none
            if None in (coordinator, processes, process) or processes == 1:
                raise
    if placement is not None:
        coordinator = coordinator or placement.coordinator or None
        processes = placement.processes if processes is None else processes
        process = placement.process if process is None else process
        require_several(placement, processes)
    if coordinator is None and processes is None and process is None:
        return None
    if coordinator is None or processes is None or process is None:
        raise _incomplete(coordinator, processes, process, placement)
    host, port = _parse_address(coordinator)
    if processes < 1:
        raise ConfigError(
            "an empty cluster", where="cluster.processes", expected="1 or more", got=processes
        )
    if not 0 <= process < processes:
        raise ConfigError(
            "no such process",
            where="cluster.process",
            expected=f"0 to {processes - 1} for {processes} processes",
            got=process,
        )
    return _Member(host, port, processes, process, placement)


def _start_jax(member: _Member, watch: Watch, service: str, gpus: int) -> None:
    """Starts jax in this process, with its own of the host's `gpus`."""
    # A scheduler that has placed it elsewhere knows nothing of its GPUs.
    placement, given = member.placement, (member.processes, member.process)
    if placement is not None and (placement.processes, placement.process) != given:
        placement = None
    sharers = watch.find_gpu_sharers()
    own_gpus = choose_gpus(placement, os.environ, gpus, member.process, sharers)
    # jax's own detection would give a task of Slurm or Open MPI one GPU, also where it is the only
    # one of its host.
    try:
        jax.distributed.initialize(
            service,
            member.processes,
            member.process,
            local_device_ids=own_gpus,
            cluster_detection_method="deactivate",
            coordinator_bind_address=service if watch.only_at_address else None,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except RuntimeError as error:
        if not STARTED_ALREADY.found_in(error):
            raise
        raise ArgumentError(
            "jax has started already, with the devices of this process alone",
            where="join_cluster",
            fix="call it before anything that touches a device, such as jax.devices(), "
            "jax.process_index(), make_mesh() or an array of jax",
        ) from None


def _incomplete(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    placement: ProcessPlacement | None,
) -> ConfigError:
    """Makes the error for a cluster of which a part is neither given nor detected."""
    fix = "give all three, or none where a scheduler tells them"
    if placement is not None:
        fix = f"{placement.scheduler} does not tell where process 0 is: give cluster.coordinator"
    return ConfigError(
        "an incomplete cluster",
        where="cluster",
        expected="coordinator, processes and process, or none",
        got=f"coordinator={coordinator}, processes={processes}, process={process}",
        fix=fix,
    )


def _environment_facts() -> dict[str, object]:
    """Collects {name: value} of packages, sources and settings that all processes must share."""
    flags = {name: value.split() for name, value in environment_flags().items()}
    return {
        "python": platform.python_version(),
        **package_versions(),
        **source_digests(),
        # Where a process dumps its programs is its own affair.
        **{name: [flag for flag in of if "xla_dump" not in flag] for name, of in flags.items()},
        **{name: getattr(jax.config, name) for name in SETTINGS},
        **compiler_settings(),
    }


def _install_exit_hooks() -> None:
    """Makes an uncaught error end all processes, an exit leave the cluster, a fork let it go."""
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if _watch is not None:
            _watch.fail(error)
        previous(kind, error, at)

    sys.excepthook = report
    atexit.register(lambda: leave_cluster(AT_EXIT))
    os.register_at_fork(after_in_child=_detach_forked_copy)


def _detach_forked_copy() -> None:
    """Closes the connections that a forked copy of this process has inherited; runs in the copy."""
    global _watch
    if _watch is not None:
        _watch.close_after_fork()
        _watch = None
        compare_facts_by(None)


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """Ends every process of the run, at once, if the block raises in this one.

    This one prints the error with its number, and exits with the code that the command line has for
    it; the others print it too and exit with the same code. What is around the block is not cleaned
    up, as that may wait for others. In a run of one process the error is raised as usual.
    """
    try:
        yield
    except BaseException as error:
        if _watch is None or (isinstance(error, SystemExit) and not error.code):
            raise
        # The first frame of the traceback is that of this function.
        at = error.__traceback__
        _watch.fail(error.with_traceback(at and at.tb_next))


def end_all_processes(error: BaseException) -> None:
    """Ends every process of the run with an error; each prints the stacks of its threads first."""
    if _watch is not None:
        _watch.fail(error, stacks=True)  # does not return
    # alone: the thread that hangs cannot be interrupted, so that only an exit ends the process
    print_stacks()
    print(error_block(error), file=sys.stderr, flush=True)
    os._exit(exit_code(error))


def require_same(what: str, facts: Mapping[str, object], patience: float | None = None) -> None:
    """Waits until every process has called this; ends all, with exit code 2, if the facts differ.

    `what` names the subject of the facts, the same in every process; facts are values that JSON can
    hold, by name. Where a process has not come within `patience` seconds all end, with exit code 69
    and the stacks of their threads; None: it is waited for.
    """
    if _watch is None or _watch.require_same(what, facts, patience):
        return
    error = ProcessLostError(
        f"other processes did not come to {what}",
        expected=f"all of them within {patience:g} s",
        fix="every process makes the same calls in the same order: where is each, by the stacks "
        "above?",
    )
    _watch.fail(error, stacks=True)


def _parse_address(coordinator: str) -> tuple[str, int]:
    """Parses `HOST:PORT` to (host, port). Raises ConfigError for anything else."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            "not an address",
            where="cluster.coordinator",
            expected="HOST:PORT, the same for every process",
            got=coordinator,
            fix="for example 10.0.0.1:1234: the host of process 0, and a free port there",
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def leave_cluster(patience: float | None = None) -> None:
    """Leaves the cluster once all processes do; does nothing if this one is in none.

    Waits as long as the others need, or ends them all if they need more than `patience` seconds:
    `AT_EXIT` where a process exits without having called this.
    """
    global _watch
    if _watch is None:
        return
    # Before jax's own shutdown, which kills processes after 300 s if others are not done.
    if not _watch.agree_to_end(patience):
        what = "this process has ended, and others have not"
        fix = "call leave_cluster at the end of the program, which waits for as long as they need"
        expected = f"all to end within {patience:.0f} s"
        _watch.fail(ProcessLostError(what, expected=expected, fix=fix))
    compare_facts_by(None)
    set_hosts([])
    jax.distributed.shutdown()
    _watch.leave()
    _watch = None
    os.environ.pop(JOINED, None)


def is_lead() -> bool:
    """Tells whether this is process 0, which logs, and writes the files that are written once.

    Starts jax's backends.
    """
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until every process calls this with the same `name`. From the main thread only."""
    require_same(f"the barrier '{name}'", {})  # names who is missing, unless jax alone joined them
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
