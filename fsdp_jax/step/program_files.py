"""Files of compiled programs: a header that says what a program is, and what jax keeps of it.

A file is the header, JSON with its own digest, a zero byte, and the program as jax's cache has it.
Nothing in it is unpickled. It is code all the same: who writes it decides what the devices run.
"""

import hashlib
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from fsdp_jax.compat.xla_flags import environment_flags
from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.io.atomic import rename_durably, write_durably
from fsdp_jax.io.digests import parse_sealed, sealed_text
from fsdp_jax.io.regular_files import read_regular

SUFFIX = ".program"
_FORMAT = 1
_ABANDONED = 3600.0  # seconds: no program takes so long to be written
# Packages whose releases decide on a program, by platform.
_PACKAGES = {
    "cpu": ("jax", "jaxlib"),
    "tpu": ("jax", "jaxlib", "libtpu"),
    "gpu": ("jax", "jaxlib", "jax-cuda12-pjrt", "jax-cuda13-pjrt"),
}
# Flags that are not in jax's own key of a program either: dumps, and the number of virtual devices.
_NO_MATTER = re.compile(r"--xla_(dump_|force_host_platform_device_count)")
# Of jax, which its compiler is given beside the flags: StableHLO does not show them.
_SETTINGS = (
    "jax_optimization_level",
    "jax_disable_most_optimizations",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_level",
    "jax_memory_fitting_effort",
    "jax_compiler_enable_remat_pass",
)
# What a field of a header is called in an error.
WORDS = {
    "versions": "version",
    "topology": "topology",
    "device": "device",
    "flags": "flag of XLA",
    "settings": "setting of jax",
    "options": "option of XLA",
}
Header = dict[str, Any]


def describe_machine(mesh: jax.sharding.Mesh) -> Header:
    """Describes what a program is compiled with and for, as its header has it."""
    devices = list(mesh.devices.flat)
    versions = {}
    for name in _PACKAGES.get(devices[0].platform, _PACKAGES["gpu"]):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    words = " ".join(environment_flags().values()).split()
    flags = [word.partition("=") for word in words if not _NO_MATTER.match(word)]
    return {
        "versions": versions,
        "device": _device_facts(devices[0]),
        "topology": {
            "processes": len({device.process_index for device in devices}),
            "devices": len(devices),
            "mesh": {str(name): size for name, size in mesh.shape.items()},
            # in the order of the mesh: what a device sends, and to which, is compiled in
            "process and id of each device": [[each.process_index, each.id] for each in devices],
        },
        "flags": {name: value for name, _, value in flags},  # XLA takes the last of a name
        "settings": compiler_settings(),
    }


def compiler_settings() -> dict[str, str]:
    """Reads the settings of jax that decide on what XLA makes of the same StableHLO."""
    return {name: str(jax.config.values.get(name)) for name in _SETTINGS}


def _device_facts(device: jax.Device) -> dict[str, str]:
    """Describes a kind of device; of CPUs, also which instructions they have."""
    facts = {"kind": str(device.device_kind)}
    if device.platform == "cpu":
        facts["instructions"] = _cpu_instructions()
    return facts


def _cpu_instructions() -> str:
    """Digests what Linux lists as instructions of this host's CPU; "unknown" elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown"
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return "unknown" if flags is None else hashlib.sha256(flags[1].encode()).hexdigest()[:16]


def folder_of(directory: Path, processes: int) -> Path:
    """Names the folder of the programs for so many processes."""
    return directory / f"processes-{processes}"


def file_name(program: str, header: Mapping[str, Any]) -> str:
    """Names the file of a program: what it is, and a digest of all that it depends on."""
    told = {name: header[name] for name in ("stablehlo", *WORDS)}
    digest = hashlib.sha256(sealed_text(told).encode()).hexdigest()
    return f"{_slug(program)}-{digest[:16]}{SUFFIX}"


def _slug(program: str) -> str:
    return re.sub(r"\W+", "-", program.removeprefix("the "))


def write_program(file: Path, header: Mapping[str, Any], content: bytes) -> None:
    """Writes a program durably, or not at all. Raises OSError."""
    body = {
        **header,
        "format": _FORMAT,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    # Another run may write the same: whoever is last has its file whole.
    own = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    write_durably(own, b"\0".join([sealed_text(body).encode(), content]))
    rename_durably(own, file)


def parse_program(text: bytes, where: str) -> tuple[Header, bytes]:
    """Splits what a file has into header and program. Raises DamageError unless both are whole."""
    head, _, content = text.partition(b"\0")
    part = "its header: "
    try:
        header = parse_sealed(head.decode())
        part = ""
        found = hashlib.sha256(content).hexdigest()
        if header.get("format") != _FORMAT:
            raise ValueError(f"format {header.get('format')}, which this release does not read")
        if header.get("bytes") != len(content):
            raise ValueError(f"{len(content)} bytes of {header.get('bytes')}")
        if header.get("sha256") != found:
            raise ValueError(f"SHA-256 {found[:16]}..., and not that of its header")
    except ValueError as error:
        raise DamageError(
            "a compiled program is damaged",
            where=where,
            got=f"{part}{error}" if text else "an empty file",
            fix="compile it again by `fsdp-jax compile`, which replaces the file",
        ) from error
    return dict(header), content


def read_program(file: Path) -> bytes | None:
    """Reads a file whole; None if there is none. Raises ConfigError where it cannot be read."""
    try:
        return read_regular(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        what = "a compiled program cannot be read"
        fix = "let this user read it, or remove it and compile it again by `fsdp-jax compile`"
        raise ConfigError(what, where=str(file), got=error, fix=fix) from error


def programs_in(folder: Path, program: str) -> list[Path]:
    """Lists the files of a program in a folder, the newest last.

    Raises ConfigError for a folder that this user cannot read.
    """
    pattern = f"{_slug(program)}-{'[0-9a-f]' * 16}{SUFFIX}"
    try:
        return sorted(folder.glob(pattern), key=_age_and_name)
    except OSError as error:
        what = "a folder of compiled programs cannot be read"
        raise ConfigError(
            what, where=str(folder), got=error, fix="let this user read it"
        ) from error


def _age_and_name(file: Path) -> tuple[float, str]:
    try:
        return file.stat().st_mtime, file.name
    except OSError:  # removed meanwhile
        return 0.0, file.name


def program_files(directory: Path) -> list[Path]:
    """Lists all programs in the folders of a directory, by name."""
    return sorted(directory.glob(f"processes-*/*{SUFFIX}"))


def describe_file(file: Path) -> dict[str, Any]:
    """Describes a program as a row of a table. Raises DamageError for one that is damaged."""
    header, _ = parse_program(read_program(file) or b"", str(file))
    topology = header["topology"]
    return {
        "program": header["program"].removeprefix("the "),
        "processes": topology["processes"],
        "devices": topology["devices"],
        "device": header["device"]["kind"],
        "bytes": header["bytes"],
        "sha256": header["sha256"],
        "stablehlo": header["stablehlo"],
        "versions": header["versions"],
        "file": str(file),
    }


def remove_old(folder: Path, most: int) -> None:
    """Removes the oldest programs of a folder, but for so many, and what killed writers left."""
    files = sorted(folder.glob(f"*{SUFFIX}"), key=_age_and_name)
    for file in files[:-most]:
        file.unlink(missing_ok=True)
    for file in folder.glob(f"*{SUFFIX}.*"):
        if time.time() - _age_and_name(file)[0] > _ABANDONED:
            file.unlink(missing_ok=True)


def differences(
    header: Mapping[str, Any], own: Mapping[str, Any], words: Mapping[str, str] = WORDS
) -> list[tuple[str, str, str]]:
    """Lists (what, in the file, here) of all fields that differ, in the order of `words`."""
    found = []
    for name, word in words.items():
        told, mine = header.get(name), own.get(name)
        if not isinstance(told, dict) or not isinstance(mine, dict):
            told, mine = {"": told}, {"": mine}
        for key in [*mine, *(told.keys() - mine.keys())]:
            if told.get(key) != mine.get(key):
                there, here = (str(each.get(key, "not set")) for each in (told, mine))
                found.append((": ".join(filter(None, (word, key))), there, here))
    return found
