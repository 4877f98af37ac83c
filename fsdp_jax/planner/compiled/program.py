"""A step compiled for hardware that need not be there: the program's text and XLA's memory reports,
kept by their hash.

What is kept is what XLA said, not what is made of it, so that a later release reads old programs
with new eyes.
"""

import gzip
import hashlib
import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax.errors import ConfigError, message
from fsdp_jax.planner.compiled.buffer_assignment import Dump, dumped
from fsdp_jax.planner.machines.topology import Topology
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.step.train_step import StepPlan
from fsdp_jax.step.xla_options import compile_overlapped, compiler_options
from fsdp_jax.tree import PyTree

_PLACE = re.compile(r'"[^"]*":\d+:\d+(?: to (?:\d+)?:\d+)?')
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"(?P<size>[\d.]+)(?P<unit>[KMGT]?)i?B?"
_WHOLE = re.compile(rf"Used {_SIZE} of [\d.]+[KMGT]? hbm", re.IGNORECASE)
_TEMPORARIES = re.compile(
    rf"memory required for HLO temporaries \({_SIZE}\) exceeds available HBM", re.IGNORECASE
)


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


def compile_step(
    step: CompiledStep, batch: PyTree, topology: Topology, cache: Path | None
) -> Program:
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
    check_dtypes(step.plan, topology)
    key = _key(lowered, step.plan, topology)
    kept = cache / f"{key}.json.gz" if cache else None
    if kept is not None and (found := _read(kept)) is not None:
        return found
    program = _compile(lowered, step.plan)
    if kept is not None:
        _write(kept, program)
    return program


def check_dtypes(plan: StepPlan, topology: Topology) -> None:
    """Where a chip has no unit for bfloat16, XLA has no products of it either, and says so by an
    internal error.
    """
    lacks = topology.hardware.platform == "cuda" and "bfloat16" not in topology.hardware.peak_flops
    if lacks and any(comm.transform.compute == jnp.bfloat16 for comm in plan.comms.values()):
        expected, fix = (
            "float32",
            "--precision.compute float32; float16 needs loss scaling, which is not there yet",
        )
        what = f"{topology.hardware.name} has no bfloat16"
        raise ConfigError(
            message(what, where="precision.compute", expected=expected, got="bfloat16", fix=fix)
        )


def cache_folder() -> Path:
    """Where programs are kept: `fsdp_jax/plans` in the user's cache, $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdp_jax" / "plans"


def _compile(lowered: Any, plan: StepPlan) -> Program:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, _never_kept_by_jax():
        try:
            compiled = compile_overlapped(lowered, plan, {"xla_dump_to": folder})
        except jax.errors.JaxRuntimeError as error:
            refused = refused_bytes(str(error), plan.layout.per_device())
            if refused is None:
                raise
            return Program("", None, refused, time.perf_counter() - started)
        return Program(
            compiled.as_text(), dumped(Path(folder)), None, time.perf_counter() - started
        )


@contextmanager
def _never_kept_by_jax() -> Iterator[None]:
    """Within, jax's compilation cache takes nothing in: what comes out of it is not compiled, and
    so dumps nothing.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def refused_bytes(said: str, state: int) -> int | None:
    """What XLA says that a program would take, where it refuses for want of device memory; None for
    another error.

    Args:
        said: the error's message.
        state: bytes that a device holds between steps, which XLA leaves out where it speaks of
            temporaries.

    """
    for pattern, more in ((_WHOLE, 0), (_TEMPORARIES, state)):
        if found := pattern.search(said):
            return int(float(found["size"]) * _UNITS[found["unit"].upper()]) + more
    return None


def _key(lowered: Any, plan: StepPlan, topology: Topology) -> str:
    """Of all that decides what XLA makes, and of the names that the program carries."""
    # names of scopes and operations, without the places in files that they come from
    text = _PLACE.sub("", lowered.as_text(debug_info=True))
    devices = [device.id for device in plan.layout.mesh.devices.flat]
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    said = [text, str(topology), str(devices), str(compiler_options(plan)), *flags, *_compilers()]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:32]


@cache
def _compilers() -> tuple[str, ...]:
    """What is installed of jax, its plugins and NVIDIA's libraries, with versions."""
    names = {(each.name or "").lower(): each.version for each in distributions()}
    return tuple(
        f"{name} {names[name]}"
        for name in sorted(names)
        if name.startswith(("jax", "nvidia", "libtpu", "fsdp"))
    )


def _read(path: Path) -> Program | None:
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        dump = content["dump"] and Dump(**content["dump"])
        return Program(
            content["text"], dump, content["refused_bytes"], content["seconds"], cached=True
        )
    except FileNotFoundError:
        return None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        zlib.error,
    ):  # cut short, or of another release: compile again
        return None


def _write(path: Path, program: Program) -> None:
    """All at once or not at all: another process may be reading."""
    content = {name: value for name, value in asdict(program).items() if name != "cached"}
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            part = Path(file.name)
            file.write(gzip.compress(json.dumps(content).encode(), compresslevel=3))
        part.replace(path)
    except OSError:  # a full or read-only disk costs the second run's time, not the plan
        if part is not None:
            part.unlink(missing_ok=True)
