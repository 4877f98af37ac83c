"""Machines by name, `h100:64x8` or `v5e:16x16*2`, and their devices: to be compiled for, they need
not be there.
"""

import dataclasses
import re
from math import prod
from typing import Any

import jax
from jax.experimental import topologies

from fsdp_jax.errors import ConfigError, did_you_mean, message
from fsdp_jax.planner.machines.hardware import HARDWARE, Hardware, target_config
from fsdp_jax.planner.machines.pjrt_plugins import EXTRAS, as_compiler, choose_platforms, installed

EXAMPLES = "cpu:8, h100:8, h100:64x8 (hosts x GPUs), v5p:2x2x2, v5e:16x16, v5e:16x16*2 (two slices)"

_FORM = re.compile(r"(?P<chip>[^:]+):(?P<shape>[0-9]+(x[0-9]+)*)(\*(?P<slices>[0-9]+))?")
_WHERE = "topology"


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine that may not be there.

    Attributes:
        name: as written, `h100:64x8`.
        shape: (devices,) of a CPU host, (hosts, GPUs of each), or the chips along each torus dim of
            a TPU slice.
        slices: of TPUs, joined by the data center's network.

    """

    name: str
    hardware: Hardware
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def size(self) -> int:
        """How many devices it has."""
        return prod(self.shape) * self.slices

    def devices(self) -> list[jax.Device]:
        """Devices for `make_mesh(devices=...)`: virtual ones of this process for `cpu`, else to
        compile for only.

        They carry a `process_index`, one per host, and with several slices a `slice_index`. If jax
        has not started its backends yet, it is told to start only those whose hardware is here
        (`choose_platforms`).

        Raises:
            ConfigError: the compiler is not installed, or jax has given it up; too few virtual CPU
                devices.

        """
        choose_platforms()
        if self.hardware.platform == "cpu":
            return self._virtual_devices()
        platform = self.hardware.platform
        if platform not in installed():
            need = f"{self.name} needs the {platform.upper()} compiler (Linux on x86-64)"
            raise ConfigError(message(f"{need}: pip install 'fsdp_jax[{EXTRAS[platform]}]'"))
        with as_compiler():
            try:
                description = topologies.get_topology_desc(platform=platform, **self._options())
            except NotImplementedError:  # no such plugin is registered, though it is installed
                late = f"jax started without the {platform.upper()} compiler and cannot add it"
                fix = "set JAX_PLATFORMS=cpu, or call fsdp_jax.planner.choose_platforms() before jax starts"
                raise ConfigError(message(late, where=_WHERE, got=self.name, fix=fix)) from None
        devices = list(description.devices)
        assert len(devices) == self.size, f"{self.name}: {len(devices)} devices"
        return devices

    def _virtual_devices(self) -> list[jax.Device]:
        devices = jax.devices("cpu")
        if len(devices) < self.size:
            fix = f"before jax starts, fsdp_jax.launch.use_virtual_devices({self.size}) (train.devices in a config)"
            raise ConfigError(
                message(
                    "this process has fewer CPU devices",
                    where=_WHERE,
                    expected=f"{self.size} for {self.name}",
                    got=len(devices),
                    fix=fix,
                )
            )
        return devices[: self.size]

    def _options(self) -> dict[str, Any]:
        """As jax hands them on to the compiler's plugin."""
        shape = "x".join(map(str, self.shape))
        if self.hardware.platform == "cuda":  # slices x hosts x devices
            return {
                "topology_name": self.name,
                "topology": f"1x{shape}",
                "target_config": target_config(self.hardware),
            }
        options: dict[str, Any] = {"topology_name": f"{self.hardware.name}:{shape}"}
        if self.slices > 1:
            options["num_slices"] = self.slices
        if (
            self.hardware.name == "v4"
        ):  # the runtime joins a chip's two cores into one device; the compiler, if asked
            options["chip_config_name"] = "megacore"
        return options


def parse_topology(name: str) -> Topology:
    """The machine of that name.

    Raises:
        ConfigError: not of the form CHIP:SHAPE, an unknown chip, or a shape that it does not come
            in.

    """
    match = _FORM.fullmatch(name.strip().lower())
    if match is None:
        expected = f"CHIP:SHAPE, such as {EXAMPLES}"
        alone = next((chip for chip in HARDWARE if name.strip().lower().startswith(chip)), "")
        fix = f"{alone}:8 or another shape; a chip alone goes with plan --search" if alone else ""
        raise ConfigError(
            message(f"not a topology: '{name}'", where=_WHERE, expected=expected, fix=fix)
        )
    chip = HARDWARE.get(match["chip"])
    if chip is None:
        kinds = [known for known in HARDWARE if known.startswith(match["chip"])]  # a100: which?
        fix = (
            "one of: " + ", ".join(kinds)
            if len(kinds) > 1
            else did_you_mean(match["chip"], HARDWARE)
        )
        raise ConfigError(
            message(f"unknown hardware '{match['chip']}'", where=_WHERE, got=name, fix=fix)
        )
    shape = tuple(map(int, match["shape"].split("x")))
    slices = int(match["slices"] or 1)
    if chip.platform == "cuda" and len(shape) == 1:
        shape = (1, *shape)
    problem = _problem(chip, shape, slices, sliced=match["slices"] is not None)
    if problem is not None:
        expected, fix = problem
        raise ConfigError(
            message(
                f"{chip.name} does not come in this shape",
                where=_WHERE,
                expected=expected,
                got=name,
                fix=fix,
            )
        )
    return Topology(match[0], chip, shape, slices)


def _problem(
    chip: Hardware, shape: tuple[int, ...], slices: int, *, sliced: bool
) -> tuple[str, str] | None:
    """(what was expected, what to do) of a shape that the chip does not come in."""
    if 0 in (*shape, slices):
        return "1 or more of everything", ""
    if sliced and chip.platform != "tpu":
        return (
            "no slices: they are of TPUs",
            f"hosts come first, as {chip.name}:2x8" if chip.cuda else "",
        )
    check = {"cpu": _cpu_problem, "cuda": _cuda_problem, "tpu": _tpu_problem}[chip.platform]
    return check(chip, shape)


def _cpu_problem(chip: Hardware, shape: tuple[int, ...]) -> tuple[str, str] | None:
    return (
        None if len(shape) == 1 else ("a number of virtual devices", f"{chip.name}:{prod(shape)}")
    )


def _cuda_problem(chip: Hardware, shape: tuple[int, ...]) -> tuple[str, str] | None:
    most = chip.host_devices
    assert most is not None
    if len(shape) != 2:
        return "hosts x GPUs of each", f"{chip.name}:2x8 for two hosts of eight"
    if shape[1] <= most:
        return None
    hosts = -(-prod(shape) // most)
    return f"at most {most} GPUs a host", f"{chip.name}:{hosts}x{most} for {hosts * most} of them"


def _tpu_problem(chip: Hardware, shape: tuple[int, ...]) -> tuple[str, str] | None:
    """A host of the compiler has 2 x 2 chips, and a slice is made of whole hosts."""
    most, dims = chip.slice_devices, chip.torus_dims
    assert most is not None
    small = "x".join(["2"] * dims)
    if len(shape) != dims:
        return f"{dims} dims: a slice is a {dims}-D torus", f"for example {chip.name}:{small}"
    if shape[0] % 2 or shape[1] % 2:
        return (
            "even first and second dims: a host has 2x2 chips",
            f"for example {chip.name}:{small}",
        )
    if prod(shape) > most:
        return f"at most {most} chips a slice", f"several slices, as {chip.name}:{small}*2"
    return None
