"""Plans the step of a configuration, and searches for its fastest settings."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_jax.errors import ConfigError, SlowerWarning
from fsdp_jax.planner import (
    HARDWARE,
    Plan,
    Topology,
    Work,
    analytic_plan,
    compiled_plan,
    fake_devices,
    parse_topology,
)
from fsdp_jax.planner.fixes import describe_best_fix, propose_faster, propose_fixes
from fsdp_jax.planner.plan import Fix
from fsdp_jax.planner.remaking import Remaking
from fsdp_jax.planner.search import Progress, Search, SearchResult
from fsdp_jax.planner.settings import StepSettings
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.train.build import Run, build, start_devices
from fsdp_jax.train.config import Config
from fsdp_jax.train.config_file import dump_config, key_values, replace_keys
from fsdp_jax.tree import PyTree

SHOWN = (
    *("model.family", "model.preset", "train.global_batch_size", "data.sequence_length"),
    *("strategy", "precision.param", "precision.compute", "remat"),
)
"""Keys that a plan shows whatever their values."""
NOT_OF_THE_STEP = ("output", "cluster", "checkpoint", "profile", "track")
"""Sections that a plan does not depend on."""


def plan_of(
    config: Config, topology: Topology, *, analytic: bool = False, cache: Path | None = None
) -> Plan:
    """Plans the step that `train` would run, with fixes where memory is short.
    An `analytic` one needs no compiler; `cache` is a folder for compiled programs. Raises
    ConfigError for keys that do not go together, or where there is no compiler for that machine.
    """
    if analytic:
        run = build(config, fake_devices(topology))
        plan = analytic_plan(run.step, run.batch, topology, run.work)
    else:
        start_devices(None)
        run = build(config, topology.devices())
        plan = compiled_plan(run.step, run.batch, topology, run.work, cache)
    keys = _planned_keys(config)
    if config.prefetch == "auto" and run.step.plan.prefetch != "none":
        keys["prefetch"] = run.step.plan.prefetch  # what the step has chosen
    plan = replace(plan, settings=keys)
    if plan.fits and plan.cliff is None:
        return plan
    make_step = partial(_make_step, config)
    changes = propose_fixes(plan, _settings_of(config), make_step, topology, run.work)
    cliff = plan.cliff and replace(
        plan.cliff, lever=describe_best_fix(changes, plan.cliff.free_bytes)
    )
    note = (
        f"`fsdp-jax plan CONFIG --search --topology {topology.name}` finds the fastest settings"
        f" that fit; with `--topology {topology.hardware.name}`, the smallest machine: more devices"
        " hold less each"
    )
    return replace(plan, fixes=changes, cliff=cliff, notes=(*plan.notes, note))


@dataclass(frozen=True)
class SearchedConfig:
    """The result of a search, and the run's configuration with the best settings."""

    result: SearchResult
    config: Config

    def to_json(self) -> dict[str, Any]:
        """Formats the output of `plan --search --json`: the best settings and the Pareto front."""
        return {
            "topology": self.result.topology.name,
            "best": self.result.best.settings.keys(),
            "pareto": [
                {**candidate.settings.keys(), **candidate.plan.to_json()}
                for candidate in self.result.pareto()
            ],
        }

    def save(self, path: Path) -> None:
        """Writes the configuration as YAML, with a comment above it: the plan's summary."""
        head = (*self.result.best.plan.summary().splitlines(), self.result.topology.name)
        comment = "\n".join(f"# {line}" for line in head)
        path.write_text(f"{comment}\n{dump_config(self.config)}")


def search_fastest(
    config: Config, where: str, devices: int | None, cache: Path | None, progress: Progress
) -> SearchedConfig:
    """Searches for the fastest strategy, mesh, remat, prefetch and accumulation for a batch.

    `where` is a topology, or a chip alone, of which `devices`, or the smallest machine that fits,
    are taken. Raises ConfigError for an unknown machine or a batch that cannot be split evenly, and
    FitError where nothing fits.
    """
    rows = config.train.global_batch_size
    search = Search(partial(_make_step, config), rows, _work_of_config(config), cache, progress)
    chip = HARDWARE.get(where.strip().lower())
    if chip is not None:
        topology = search.smallest_topology(chip, devices)
    elif devices is not None:
        name = where.partition(":")[0]
        raise ConfigError(
            "the topology says how many devices",
            where="--devices",
            got=devices,
            fix=f"--topology {name} --devices {devices}, or --topology {where} alone",
        )
    else:
        topology = parse_topology(where)
    start_devices(None)
    result = search.run(topology)
    return SearchedConfig(result, with_settings(config, result.best.settings))


def propose_fixes_on(remaking: Remaking, topology: Topology) -> tuple[Fix, ...]:
    """Proposes changes of settings that lower the peak memory of a run on a machine."""
    settings, make_step, work = remaking.settings, remaking.make_step, remaking.work
    plan = analytic_plan(*make_step(settings, fake_devices(topology)), topology, work)
    return propose_fixes(plan, settings, make_step, topology, work)


def remaking_of(config: Config, run: Run) -> Remaking:
    """Tells how the step of a run is made with other settings."""
    return Remaking(_settings_of(config), partial(_make_step, config), work=run.work)


def with_faster(plan: Plan, config: Config, topology: Topology) -> Plan:
    """Adds to a plan, where much memory is free, a few faster settings; takes some seconds."""
    if not plan.fits or plan.cliff is not None:
        return plan
    make_step = partial(_make_step, config)
    work = _work_of_config(config)
    return replace(
        plan, faster=propose_faster(plan, _settings_of(config), make_step, topology, work)
    )


def _planned_keys(config: Config) -> dict[str, Any]:
    """Selects the keys of a configuration that say what was planned.

    These are `SHOWN`, and those of the step that are not the default.
    """
    values, defaults = key_values(config), key_values(Config())
    keys = dict.fromkeys(key for key in SHOWN if values[key] is not None)
    keys |= dict.fromkeys(
        key
        for key, value in values.items()
        if value != defaults[key] and key.partition(".")[0] not in NOT_OF_THE_STEP
    )
    return {key: values[key] for key in keys}


def _settings_of(config: Config) -> StepSettings:
    """Selects the settings that plans vary, as they are configured."""
    assert isinstance(config.remat.policy, str), "a file has names alone"
    return StepSettings(
        config.strategy,
        config.mesh.replica,
        config.remat.policy,
        config.prefetch,
        config.train.accumulation,
        offload=config.offload,
        keep_gathered=config.keep_gathered.choice,
    )


def with_settings(config: Config, settings: StepSettings) -> Config:
    """Replaces strategy, mesh, remat, offload, ... of a configuration by those of `settings`."""
    values = settings.values() | {"mesh.data": -1, "train.devices": None}
    if settings.remat == "none":
        values |= {"remat_save": (), "remat_every": 1}
    return replace_keys(config, values)


def _make_step(
    config: Config, settings: StepSettings, devices: Sequence[Any]
) -> tuple[CompiledStep, PyTree]:
    """Builds (the train step, shapes of the batch) of a configuration with other settings."""
    with warnings.catch_warnings(action="ignore", category=SlowerWarning):  # not of the user's
        run = build(with_settings(config, settings), devices)
    return run.step, run.batch


def _work_of_config(config: Config) -> Work:
    """Counts the tokens and FLOPs of a step, which do not depend on the machine."""
    one_device = fake_devices(parse_topology("h100:1"))
    with warnings.catch_warnings(action="ignore", category=SlowerWarning):  # not of the user's
        return build(with_settings(config, StepSettings("no_shard")), one_device).work
