"""Compiles the programs of a run ahead, into files that `train --programs` takes them from."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from sys import stderr
from typing import Any

import jax
import numpy as np

from fsdp_jax.checkpoint.arrays import leaves_of, not_finite
from fsdp_jax.errors import ConfigError
from fsdp_jax.launch import fail_together, is_lead, join_cluster, leave_cluster
from fsdp_jax.launch.supervisor import LaunchOptions, fewer_processes, launch
from fsdp_jax.planner import fake_devices, parse_topology
from fsdp_jax.step.kept_programs import KeptPrograms, keeping
from fsdp_jax.step.program_files import describe_file, program_files
from fsdp_jax.tables import text_table
from fsdp_jax.train.build import Run, build, start_devices, topology_devices
from fsdp_jax.train.compiled_programs import keys_of_the_step
from fsdp_jax.train.config import Config
from fsdp_jax.train.config_file import key_values
from fsdp_jax.train.main import joining
from fsdp_jax.train.shapes import BatchShapes

Say = Callable[[str], None]


@dataclass(frozen=True)
class CompiledAhead:
    """The programs of a folder, a row each, and what was left out, with the reason."""

    directory: Path
    rows: tuple[dict[str, Any], ...]
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        columns = ["program", "processes", "devices", "KiB", "file"]
        rows = [
            [row["program"], row["processes"], row["devices"], f"{row['bytes'] / 1024:,.0f}", name]
            for row in self.rows
            for name in [str(Path(row["file"]).relative_to(self.directory))]
        ]
        table = text_table(columns, rows, right=columns[1:4])
        use = f"fsdp-jax train CONFIG --programs {self.directory}"
        return "\n".join([table, *self.left_out, f"next: {use}"])

    def to_json(self) -> dict[str, Any]:
        """Formats the output of `compile --json`."""
        return {
            "directory": str(self.directory),
            "programs": list(self.rows),
            "left_out": list(self.left_out),
        }


@dataclass(frozen=True)
class Ahead:
    """What is compiled, and where its programs go; `say` prints a line of progress."""

    config: Config
    directory: Path
    say: Say

    def compile_here(self) -> CompiledAhead:
        """Compiles on the devices of this process and of those that it joins, as `train` does.

        The initial values are computed too. Raises ConfigError for a program that cannot be kept.
        """
        start_devices(self.config.train.devices)
        join_cluster(**joining(self.config.cluster, key_values(self.config)))
        with fail_together():
            run = build(self.config)
            with keeping(self._programs()):
                if self.config.model.weights is None:
                    seed = self.config.train.seed
                    _tell_seconds("the initial values", _initialize, run, seed, say=self.say)
                _compile_steps(run, self.say)
        leave_cluster()
        return list_programs(self.directory)

    def compile_for(self, topology: str) -> CompiledAhead:
        """Compiles for a machine that need not be present, and for one host less if that can run.

        Raises ConfigError where there is no compiler for it.
        """
        machine = parse_topology(topology)
        if machine.hardware.platform == "cpu":
            raise ConfigError(
                "programs for CPUs are compiled in processes of their own",
                where="--topology",
                got=topology,
                fix="--processes N, and --devices K of each",
            )
        left_out = []
        for name in _with_one_host_less(machine):
            try:
                run = build(self.config, topology_devices(name))
            except ConfigError as error:
                if name == machine.name:
                    raise
                left_out.append(_left_out(name, error))
                continue
            with keeping(self._programs()):
                _compile_steps(run, self.say)
        return list_programs(self.directory, left_out)

    def compile_in_processes(
        self, words: Sequence[str], processes: int, devices: int | None
    ) -> tuple[int, CompiledAhead]:
        """Starts so many processes on this machine, which compile for CPUs, and then fewer.

        Fewer are one less, and as many as `launch --min-nproc` goes on with.

        `words`: the configuration as the command line names it. Returns the exit code of the
        processes too. Their output goes to stderr. Raises ConfigError where the configuration
        cannot run on so many.
        """
        count = devices or self.config.train.devices or 1
        left_out = []
        numbers = {processes, processes - 1, fewer_processes(processes)} - {0}
        for number in sorted(numbers, reverse=True):
            try:
                build(self.config, fake_devices(parse_topology(f"cpu:{number * count}")))
            except ConfigError as error:
                if number == processes:
                    raise
                left_out.append(_left_out(f"{number} processes", error))
                continue
            command = ("compile", *words, "--to", str(self.directory))
            with redirect_stdout(stderr):
                code = launch(LaunchOptions(command, number, devices))
            if code:
                return code, list_programs(self.directory)
        return 0, list_programs(self.directory, left_out)

    def _programs(self) -> KeptPrograms:
        values = keys_of_the_step(key_values(self.config))
        return KeptPrograms(self.directory, "write", values, self.say)


def list_programs(directory: Path, left_out: Sequence[str] = ()) -> CompiledAhead:
    """Lists the programs of a folder, in process 0."""
    rows = [describe_file(file) for file in program_files(directory)] if is_lead() else []
    return CompiledAhead(directory, tuple(rows), tuple(left_out))


def _compile_steps(run: Run, say: Say) -> None:
    _tell_seconds("the train step", run.step.compile, run.batch, say=say)
    for suffix, step in run.eval_steps.items():
        average = " of the average" * bool(suffix)
        _tell_seconds(f"the eval step{average}", step.compile, _eval_batch(run.batch), say=say)


def _initialize(run: Run, seed: int) -> None:
    """Makes the initial values, and checks them as `train` does."""
    state = run.sharded.init(seed)
    not_finite(leaves_of(run.sharded.to_checkpoint(state)))


def _eval_batch(batch: BatchShapes) -> BatchShapes:
    """Adds the mask that the batches of `eval_batches` always have."""
    if "mask" in batch:
        return batch
    leaf = next(iter(batch.values()))
    shape: tuple[int, ...] = leaf.shape[:1]
    if "tokens" in batch:
        rows, length = batch["tokens"].shape
        shape = rows, length - 1
    return {**batch, "mask": jax.ShapeDtypeStruct(shape, np.float32)}


def _tell_seconds(what: str, work: Callable[..., Any], *args: Any, say: Say) -> None:
    """Does some work, and says in process 0 how long it took."""
    began = time.perf_counter()
    work(*args)
    if is_lead():
        say(f"{what}: {time.perf_counter() - began:.1f} s")


def _with_one_host_less(machine: Any) -> list[str]:
    """Names a machine, and the same with one host less where a machine comes so."""
    names = [machine.name]
    hosts = math.prod(machine.shape[:1]) if machine.hardware.platform == "cuda" else 1
    if hosts > 1:
        names.append(f"{machine.hardware.name}:{hosts - 1}x{machine.shape[1]}")
    return names


def _left_out(name: str, error: ConfigError) -> str:
    return f"not for {name}: {error.what} ({error.where}: {error.got})"
