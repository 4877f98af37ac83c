"""Compiles a step for hardware that may be absent; caches the program's text and memory reports.

The cache holds XLA's results, not figures derived from them, so that a later release reads old
programs with new code.
"""

import gzip
import hashlib
import json
import os
import tempfile
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax.compat.compilation_cache import without_compilation_cache
from fsdp_jax.compat.error_texts import refused_bytes
from fsdp_jax.compat.xla_flags import environment_flags
from fsdp_jax.errors import ConfigError
from fsdp_jax.hlo.op_names import without_source_lines
from fsdp_jax.hlo.source_frames import without_frames
from fsdp_jax.planner.compiled.buffer_assignment import (
    LiveBuffer,
    MemoryReport,
    read_memory_report,
)
from fsdp_jax.planner.machines.topology import Topology
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.step.step_plan import StepPlan, report_of
from fsdp_jax.step.xla_options import compile_overlapped, compiler_options
from fsdp_jax.tree import PyTree

REFUSED_PROGRAM = "*.oom_intermediate_module.txt"  # libtpu's name of a program that it refuses


@dataclass(frozen=True)
class CompiledProgram:
    """What XLA made of a step: the program and its memory reports, or a refusal.

    XLA writes reports of a program that it refuses for want of memory too, after its schedule is
    known; a program from a cache has no source lines, which may have moved since.
    """

    text: str  # of the compiled program, or of the one refused; "" where XLA does not write that
    report: MemoryReport | None  # XLA's memory reports; None where it writes none
    refused_bytes: int | None  # memory that XLA says the program needs, where it refuses
    seconds: float  # that compiling took


def compile_step(
    step: CompiledStep, batch: PyTree, topology: Topology, cache: Path | None
) -> CompiledProgram:
    """Compiles a step whose mesh is made of `topology`'s devices, or returns it from the cache.

    `batch`: shapes of the global batch; `cache`: folder of compiled programs; None does not cache.
    Raises ConfigError for a dtype that the chip has no unit for, and JaxRuntimeError if XLA fails
    for another reason than memory.
    """
    # lowering takes seconds and needs no compiler; compiling takes minutes
    lowered = step.lower(batch)
    check_bfloat16(step.plan, topology)
    if cache is None:
        return compile_reported(lowered, step.plan)
    path = cache / f"{_cache_key(lowered, step.plan, topology)}.json.gz"
    program = _read_cached(path)
    if program is None or program.report is None:
        program = compile_reported(lowered, step.plan)
        program = replace(program, text=without_frames(program.text))
        _write_cached(path, program)
    return program


def check_bfloat16(plan: StepPlan, topology: Topology) -> None:
    """Raises ConfigError where the chip has no bfloat16: XLA would fail with an internal error."""
    chip = topology.hardware
    lacks = chip.platform == "cuda" and "bfloat16" not in chip.peak_flops
    if lacks and any(comm.transform.compute == jnp.bfloat16 for comm in plan.comms.values()):
        raise ConfigError(
            f"{chip.name} has no bfloat16",
            where="precision.compute",
            expected="float16 or float32",
            got="bfloat16",
            fix="--precision.compute float16, which scales the loss",
        )


def cache_folder() -> Path:
    """Finds the cache of programs: `fsdp_jax/plans` in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdp_jax" / "plans"


def compile_reported(lowered: Any, plan: StepPlan) -> CompiledProgram:
    """Compiles a lowered step with XLA's memory reports, and takes the time.

    Of a program that is too large, it returns the bytes that it needs, and XLA's reports of it.
    Raises JaxRuntimeError if XLA fails for another reason.
    """
    start = time.perf_counter()
    # without jax's cache, from which a program comes without XLA's reports
    with tempfile.TemporaryDirectory() as folder, without_compilation_cache():
        try:
            compiled = compile_overlapped(lowered, plan, {"xla_dump_to": folder})
        except jax.errors.JaxRuntimeError as error:
            refused = refused_bytes(error)
            if refused is None:
                raise
            text, report = _read_refused(Path(folder))
            return CompiledProgram(text, report, refused, time.perf_counter() - start)
        text, report = compiled.as_text(), read_memory_report(Path(folder))
        return CompiledProgram(text, report, None, time.perf_counter() - start)


def _read_refused(folder: Path) -> tuple[str, MemoryReport | None]:
    """Reads what XLA wrote of a program that it refused: (its text, its reports).

    ("", None) where it did not come so far.
    """
    texts = [path.read_text() for path in folder.glob(REFUSED_PROGRAM)]
    try:
        report = read_memory_report(folder)
    except ValueError:  # a refusal before buffers were assigned
        return "", None
    return (texts[0], report) if len(texts) == 1 else ("", None)


def _cache_key(lowered: Any, plan: StepPlan, topology: Topology) -> str:
    """Hashes all that decides what XLA makes, and the names in the program."""
    # with names of scopes and operations, without the source lines that they come from
    text = without_source_lines(lowered.as_text(debug_info=True))
    devices = [device.id for device in plan.layout.mesh.devices.flat]
    options = compiler_options(plan, report_of(lowered).prefetch)
    target = [str(topology.plugin_options()), str(devices), str(options)]
    parts = [text, *target, *environment_flags().values(), *_compiler_versions()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@cache
def _compiler_versions() -> tuple[str, ...]:
    """Lists the versions of jax, its plugins, NVIDIA's libraries and this package."""
    versions = {(each.name or "").lower(): each.version for each in distributions()}
    prefixes = ("jax", "nvidia", "libtpu", "fsdp")
    return tuple(
        f"{name} {versions[name]}" for name in sorted(versions) if name.startswith(prefixes)
    )


def _read_cached(path: Path) -> CompiledProgram | None:
    """Reads a stored compilation; None if there is none that this release can read."""
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        report = content["dump"]
        if report:
            live = [
                LiveBuffer(name, tuple(element), *fields)
                for name, element, *fields in report["alive"]
            ]
            idle = [
                LiveBuffer(name, tuple(element), *fields)
                for name, element, *fields in report.get("idle", ())
            ]
            report = MemoryReport(report["spaces"], live, idle)
        refused, seconds = content["refused_bytes"], content["seconds"]
        return CompiledProgram(content["text"], report, refused, seconds)
    # absent, cut short, or of another release: compile again
    except (OSError, ValueError, KeyError, TypeError, EOFError, zlib.error):
        return None


def _write_cached(path: Path, program: CompiledProgram) -> None:
    """Writes a program atomically: another process may be reading."""
    report = program.report
    content = {
        "text": program.text,
        "dump": report and {"spaces": report.spaces, "alive": report.live, "idle": report.idle},
        "refused_bytes": program.refused_bytes,
        "seconds": program.seconds,
    }
    compressed = gzip.compress(json.dumps(content).encode(), compresslevel=3)
    # a full or read-only disk costs the second run's time, not the plan
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            Path(folder, path.name).write_bytes(compressed)
            Path(folder, path.name).replace(path)
