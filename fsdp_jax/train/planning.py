"""From a configuration to plans of its step, and to the configuration that a search found best."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_jax.errors import ConfigError, message
from fsdp_jax.planner import (
    Plan,
    Topology,
    Work,
    analytic_plan,
    compiled_plan,
    parse_topology,
    stand_ins,
)
from fsdp_jax.planner.machines.hardware import HARDWARE
from fsdp_jax.planner.search import Found, Say, search, smallest
from fsdp_jax.planner.settings import Knobs, Make, fixes
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.train.build import build, start_devices
from fsdp_jax.train.config import Config
from fsdp_jax.train.config_file import dump
from fsdp_jax.tree import PyTree


def plan_of(
    config: Config, topology: Topology, *, analytic: bool = False, cache: Path | None = None
) -> Plan:
    """The plan of the step that `train` would run on that machine, with what would make it fit
    where it does not.

    Args:
        config: all of it.
        topology: to plan for.
        analytic: without any compiler.
        cache: folder of compiled programs; none are kept if None.

    Raises:
        ConfigError: what does not fit together, or no compiler for that machine.

    """
    devices = stand_ins(topology) if analytic else _devices(topology)
    run = build(config, devices)
    plan = (
        analytic_plan(run.step, run.batch, topology, run.work)
        if analytic
        else compiled_plan(run.step, run.batch, topology, run.work, cache)
    )
    if plan.fits:
        return plan
    return replace(plan, fixes=fixes(plan, knobs_of(config), _maker(config), topology, run.work))


@dataclass(frozen=True)
class Choice:
    """What a search found, and the configuration to run it with."""

    found: Found
    config: Config

    def to_json(self) -> dict[str, Any]:
        """The Pareto table, and the plan of the best."""
        rows = [{**one.knobs.keys(), **one.plan.to_json()} for one in self.found.pareto()]
        return {
            "topology": self.found.topology.name,
            "best": self.found.best.knobs.keys(),
            "pareto": rows,
        }

    def save(self, path: Path) -> None:
        """Writes the configuration, with what it rests on."""
        head = "\n".join(
            f"# {line}"
            for line in (*self.found.best.plan.summary().splitlines(), self.found.topology.name)
        )
        path.write_text(f"{head}\n{dump(self.config)}")


def choose(config: Config, where: str, devices: int | None, cache: Path | None, say: Say) -> Choice:
    """Searches for the fastest way to run a configuration's batch.

    Args:
        config: its strategy, mesh, remat, prefetch and accumulation are what is searched over.
        where: a topology, or a chip alone: then on so many devices, or on the fewest that it fits.
        devices: how many, with a chip alone.
        cache: folder of compiled programs.
        say: told of the progress.

    Raises:
        ConfigError: no such machine, or a batch that does not divide.
        FitError: nothing fits.

    """
    make, work = _maker(config), _work(config)
    rows = config.train.global_batch_size
    chip = HARDWARE.get(where.strip().lower())
    if chip is None and devices is not None:
        fix = (
            f"--topology {where.partition(':')[0]} --devices {devices}, or --topology {where} alone"
        )
        raise ConfigError(
            message("the topology says how many devices", where="--devices", got=devices, fix=fix)
        )
    topology = (
        parse_topology(where) if chip is None else smallest(make, chip, rows, work, say, devices)
    )
    start_devices(None)
    found = search(make, topology, rows, work, cache, say)
    return Choice(found, turned(config, found.best.knobs))


def knobs_of(config: Config) -> Knobs:
    """What a configuration has them at."""
    return Knobs(
        config.strategy,
        config.mesh.replica,
        config.remat,
        config.prefetch,
        config.train.accumulation,
    )


def turned(config: Config, knobs: Knobs) -> Config:
    """The configuration with these knobs."""
    mesh = replace(config.mesh, replica=knobs.replica, data=-1)
    train = replace(config.train, accumulation=knobs.accumulation, devices=None)
    return replace(
        config,
        strategy=knobs.strategy,
        mesh=mesh,
        remat=knobs.remat,
        prefetch=knobs.prefetch,
        train=train,
    )


def _maker(config: Config) -> Make:
    def make(knobs: Knobs, devices: Sequence[Any]) -> tuple[CompiledStep, PyTree]:
        run = build(turned(config, knobs), devices)
        return run.step, run.batch

    return make


def _work(config: Config) -> Work:
    """Without a machine: what a step does does not depend on it."""
    one = parse_topology("h100:1")
    alone = turned(config, Knobs("no_shard"))
    return build(alone, stand_ins(one)).work


def _devices(topology: Topology) -> list[Any]:
    start_devices(None)
    return topology.devices()
