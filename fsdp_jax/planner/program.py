"""A step compiled for hardware that need not be there: the program's text and XLA's memory reports, kept by their hash.

What is kept is what XLA said, not what is made of it, so that a later release reads old programs with new eyes.
"""

import gzip
import hashlib
import json
import os
import re
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax.compiled import Step
from fsdp_jax.errors import ConfigError, message
from fsdp_jax.inspect.stderr import quiet
from fsdp_jax.overlap import compiler_options
from fsdp_jax.planner.dumps import Dump, dumped
from fsdp_jax.planner.topology import Topology
from fsdp_jax.step import StepPlan
from fsdp_jax.tree import PyTree

_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc")
_NOISE = ("hlo_rematerialization.cc",)
"""XLA's complaints that a program is too large, which the plan says better."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"(?P<size>[\d.]+)(?P<unit>[KMGT]?)i?B?"
_WHOLE = re.compile(rf"Used {_SIZE} of [\d.]+[KMGT]? hbm", re.IGNORECASE)
_TEMPORARIES = re.compile(rf"memory required for HLO temporaries \({_SIZE}\) exceeds available HBM", re.IGNORECASE)


@dataclass(frozen=True)
class Program:
    """What XLA made of a step.

    Attributes:
        text: of the compiled program; "" where it does not fit and XLA refuses to compile it.
        dump: XLA's memory reports.
        refused_bytes: what XLA says it would take, where it refuses.
        seconds: that compiling took, once.
        cached: it was compiled before.

    """

    text: str
    dump: Dump | None
    refused_bytes: int | None
    seconds: float
    cached: bool = False


def compile_step(step: Step, batch: PyTree, topology: Topology, cache: Path | None) -> Program:
    """Compiles a step whose mesh is of `topology`'s devices, or takes what was compiled before.

    Args:
        step: from `Sharded.train_step`.
        batch: shapes of the global batch.
        topology: that the mesh is of.
        cache: folder to keep programs in; None keeps none.

    Raises:
        ConfigError: a dtype that the chip has no unit for.
        JaxRuntimeError: XLA fails for another reason than memory.

    """
    lowered = step.lower(batch)
    assert step.plan is not None
    _check_dtypes(step.plan, topology)
    key = _key(lowered.as_text(), step.plan, topology)
    kept = cache / f"{key}.json.gz" if cache else None
    if kept is not None and (found := _read(kept)) is not None:
        return found
    program = _compile(lowered, step.plan)
    if kept is not None:
        _write(kept, program)
    return program


def _check_dtypes(plan: StepPlan, topology: Topology) -> None:
    """Where a chip has no unit for bfloat16, XLA has no products of it either, and says so by an internal error."""
    lacks = topology.hardware.platform == "cuda" and "bfloat16" not in topology.hardware.peak_flops
    if lacks and any(route.compute == jnp.bfloat16 for route in plan.routes.values()):
        expected, fix = "float32", "--precision.compute float32; float16 needs loss scaling, which is not there yet"
        what = f"{topology.hardware.name} has no bfloat16"
        raise ConfigError(message(what, where="precision.compute", expected=expected, got="bfloat16", fix=fix))


def cache_folder() -> Path:
    """Where programs are kept: `fsdp_jax/plans` in the user's cache, $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdp_jax" / "plans"


def _compile(lowered: Any, plan: StepPlan) -> Program:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = compiler_options(plan) | {"xla_dump_to": folder}
        before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
        jax.config.update("jax_enable_compilation_cache", False)  # what comes from there dumps nothing
        try:
            with quiet(_NOISE):
                compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            refused = refused_bytes(str(error), plan.layout.per_device())
            if refused is None:
                raise
            return Program("", None, refused, time.perf_counter() - started)
        finally:
            jax.config.update("jax_enable_compilation_cache", before)
        return Program(compiled.as_text(), dumped(Path(folder)), None, time.perf_counter() - started)


def refused_bytes(said: str, state: int) -> int | None:
    """What XLA says that a program would take, where it refuses for want of device memory; None for another error.

    Args:
        said: the error's message.
        state: bytes that a device holds between steps, which XLA leaves out where it speaks of temporaries.

    """
    for pattern, more in ((_WHOLE, 0), (_TEMPORARIES, state)):
        if found := pattern.search(said):
            return int(float(found["size"]) * _UNITS[found["unit"].upper()]) + more
    return None


def _key(text: str, plan: StepPlan, topology: Topology) -> str:
    """Of all that decides what XLA makes, and of the names that the program carries."""
    names = sorted(plan.layout.by_path)
    said = [text, str(topology), str(compiler_options(plan)), str(names), *map(_version, _PACKAGES)]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def _read(path: Path) -> Program | None:
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        dump = content["dump"] and Dump(**content["dump"])
        return Program(content["text"], dump, content["refused_bytes"], content["seconds"], cached=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError):  # cut short, or of another release: compile again
        return None


def _write(path: Path, program: Program) -> None:
    """All at once or not at all: another process may be reading."""
    content = {name: value for name, value in asdict(program).items() if name != "cached"}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(gzip.compress(json.dumps(content).encode(), compresslevel=3))
        part.replace(path)
    except OSError:  # a full or read-only disk costs the second run's time, not the plan
        return
