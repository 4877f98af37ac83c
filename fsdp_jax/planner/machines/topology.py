"""Machines by name, `h100:64x8` or `v5e:16x16*2`, and devices to compile for without them."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import ceil, prod
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from fsdp_jax.compat.jax_devices import slice_index
from fsdp_jax.compat.pjrt_plugins import (
    EXTRAS,
    choose_platforms,
    installed_plugins,
    libtpu_as_compiler,
)
from fsdp_jax.errors import ConfigError, did_you_mean
from fsdp_jax.planner.machines.chips import HARDWARE, hardware_of
from fsdp_jax.planner.machines.hardware import Hardware, target_config
from fsdp_jax.processes import host_of

EXAMPLES = "cpu:8, h100:8, h100:64x8 (hosts x GPUs), v5p:2x2x2, v5e:16x16, v5e:16x16*2 (two slices)"

_FORM = re.compile(
    r"(?P<chip>[^:]+):(?P<shape>[0-9]{1,9}(x[0-9]{1,9}){0,4})(\*(?P<slices>[0-9]{1,9}))?"
)
LARGEST = 2**17  # devices; each is an object, also where it is not present


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine, which may be absent.

    Attributes:
        name: as given, `h100:64x8`.
        shape: (devices,) of a CPU host, (hosts, GPUs per host), or the chips along each torus dim
            of a TPU slice.
        slices: of TPUs, joined by the data center's network.

    """

    name: str
    hardware: Hardware
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def size(self) -> int:
        """How many devices it has."""
        return prod(self.shape) * self.slices * self.hardware.chip_devices

    @property
    def host_devices(self) -> int:
        """How many devices share a host and its memory."""
        if self.hardware.platform == "cuda":
            return self.shape[1]
        return min(self.size, self.hardware.host_devices or self.size)

    def devices(self) -> list[jax.Device]:
        """Makes devices for `make_mesh(devices=...)`: virtual for `cpu`, else for compiling only.

        They have a `process_index`, one per host, and with several slices a `slice_index`. If jax
        has not started its backends yet, it is told to start only those whose hardware is present
        (`choose_platforms`).

        Raises:
            ConfigError: the compiler is not installed, or jax started without it; too few virtual
                CPU devices.

        """
        choose_platforms()
        platform = self.hardware.platform
        if platform == "cpu":
            return self._virtual_devices()
        # devices of the compiler's own making: it needs no hardware, but must be installed
        compiler = f"the {platform.upper()} compiler"
        if platform not in installed_plugins():
            need = f"{self.name} needs {compiler} (Linux on x86-64)"
            raise ConfigError(f"{need}: pip install 'fsdp_jax[{EXTRAS[platform]}]'")
        with libtpu_as_compiler():
            try:
                description = topologies.get_topology_desc(
                    platform=platform, **self.plugin_options()
                )
            except NotImplementedError:  # the plugin is installed, but jax has not registered it
                what = f"jax started without {compiler} and cannot add it"
                call = "fsdp_jax.planner.choose_platforms()"
                fix = f"set JAX_PLATFORMS=cpu, or call {call} before jax starts"
                raise _topology_error(what, got=self.name, fix=fix) from None
        devices = list(description.devices)
        assert len(devices) == self.size, f"{self.name}: {len(devices)} devices"
        return devices

    def _virtual_devices(self) -> list[jax.Device]:
        """Finds CPU devices of this process. Raises ConfigError if it has too few."""
        devices = jax.devices("cpu")
        if len(devices) < self.size:
            what, expected = "this process has fewer CPU devices", f"{self.size} for {self.name}"
            call = f"fsdp_jax.launch.use_virtual_devices({self.size})"
            fix = f"before jax starts, {call} (train.devices in a config)"
            raise _topology_error(what, expected=expected, got=len(devices), fix=fix)
        return devices[: self.size]

    def plugin_options(self) -> dict[str, Any]:
        """Lists the options by which the compiler's plugin makes devices of the machine."""
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
        return options | dict(self.hardware.topology_options)


def parse_topology(name: str) -> Topology:
    """Parses the name of a machine.

    Raises:
        ConfigError: not of the form CHIP:SHAPE, an unknown chip, or a shape that it does not come
            in.

    """
    match = _FORM.fullmatch(name.strip().lower())
    if match is None:
        alone = next((chip for chip in HARDWARE if name.strip().lower().startswith(chip)), "")
        fix = ""
        if alone:
            fix = f"{alone}:8 or another shape; a chip alone goes with plan --search"
        expected = f"CHIP:SHAPE, such as {EXAMPLES}"
        raise _topology_error(f"not a topology: '{name}'", expected=expected, fix=fix)
    chip = HARDWARE.get(match["chip"])
    if chip is None:
        fix = did_you_mean(match["chip"], HARDWARE)
        variants = [known for known in HARDWARE if known.startswith(match["chip"])]
        if len(variants) > 1:  # a100
            fix = "one of: " + ", ".join(variants)
        raise _topology_error(f"unknown hardware '{match['chip']}'", got=name, fix=fix)
    # `h100:8` is one host of eight
    shape = tuple(map(int, match["shape"].split("x")))
    if chip.platform == "cuda" and len(shape) == 1:
        shape = (1, *shape)
    slices = int(match["slices"] or 1)
    problem = _shape_problem(chip, shape, slices, has_slices=match["slices"] is not None)
    if problem is not None:
        what = f"{chip.name} does not come in this shape"
        expected, fix = problem
        raise _topology_error(what, expected=expected, got=name, fix=fix)
    return Topology(match[0], chip, shape, slices)


def topology_of(chip: Hardware, devices: Sequence[Any], hosts: int) -> Topology | None:
    """Finds the machine that devices of a chip on so many hosts are; None where it has no name."""
    if chip.platform == "cuda" and len(devices) % hosts == 0:
        return parse_topology(f"{chip.name}:{hosts}x{len(devices) // hosts}")
    if chip.platform != "tpu":
        return None
    # A slice of a torus: the chips along each dim are told by the devices' coordinates.
    coordinates = [getattr(device, "coords", None) for device in devices]
    if None in coordinates:
        return None
    dims = [len(set(along)) for along in zip(*coordinates, strict=True)][: chip.torus_dims]
    slices = len({slice_index(device) for device in devices})
    name = f"{chip.name}:{'x'.join(map(str, dims))}" + (f"*{slices}" if slices > 1 else "")
    with suppress(ConfigError):
        topology = parse_topology(name)
        if topology.size == len(devices):
            return topology
    return None


def topology_of_mesh(mesh: Mesh) -> Topology | None:
    """Finds the machine of a mesh's devices; None where it has no name, as of unknown devices."""
    devices = list(mesh.devices.flat)
    chip = hardware_of(devices[0].device_kind)
    if chip is None:
        return None
    return topology_of(chip, devices, len({host_of(device) for device in devices}))


def check_not_virtual(chip: Hardware, name: str) -> None:
    """Raises ConfigError for virtual CPU devices, which cannot be planned for.

    `name`: as the user gave it.
    """
    if chip.platform == "cpu":
        what = "virtual CPU devices have no memory or speed of their own"
        raise _topology_error(what, got=name, fix="h100:8, v5e:16x16, or another chip")


def _topology_error(what: str, **fields: Any) -> ConfigError:
    return ConfigError(what, where="topology", **fields)


def topologies_by_size(chip: Hardware) -> Iterator[Topology]:
    """Yields machines of a chip by size: powers of two; of TPUs, the torus closest to a cube."""
    if chip.platform == "cuda":
        for size in (2**power for power in range(13)):
            host = min(8, chip.host_devices or 8)
            shape = f"{size}" if size <= host else f"{size // host}x{host}"
            yield parse_topology(f"{chip.name}:{shape}")
        return
    torus = [2, 2, *[1] * (chip.torus_dims - 2)]
    while prod(torus) * chip.chip_devices <= (chip.slice_devices or 0):
        yield parse_topology(f"{chip.name}:{'x'.join(map(str, torus))}")
        # the smallest dim, and of equal ones the last
        smallest = max(range(len(torus)), key=lambda dim: (-torus[dim], dim))
        torus[smallest] *= 2


def _shape_problem(
    chip: Hardware, shape: tuple[int, ...], slices: int, *, has_slices: bool
) -> tuple[str, str] | None:
    """Finds (expected, fix) for a shape that the chip does not come in; None if it does."""
    name, platform, devices = chip.name, chip.platform, prod(shape) * chip.chip_devices
    small = f"{name}:{'x'.join(['2'] * chip.torus_dims) or 8}"
    if 0 in (*shape, slices):
        counted = "chips along each dim, and slices"
        if platform != "tpu":
            counted = {"cpu": "devices", "cuda": "hosts, and GPUs of each"}[platform]
        return f"1 or more {counted}", f"for example {small}"
    if devices * slices > LARGEST:
        return f"{LARGEST:,} devices at most", ""
    if has_slices and platform != "tpu":
        fix = ""
        if platform == "cuda":
            fix = f"hosts come first, as {name}:2x8"
        return "no slices: only TPUs have them", fix
    # virtual devices are all in this process
    if platform == "cpu":
        if len(shape) == 1:
            return None
        return "a number of virtual devices", f"{name}:{devices}"
    # the GPUs of a host are as many as its switch joins
    if platform == "cuda":
        limit = chip.host_devices or 0
        if len(shape) != 2:
            return "hosts x GPUs of each", f"{name}:2x8 for two hosts of eight"
        if shape[1] <= limit:
            return None
        hosts = ceil(devices / limit)
        fix = f"{name}:{hosts}x{limit} for {hosts * limit} of them"
        return f"at most {limit} GPUs per host", fix
    # to the compiler a TPU host has 2 x 2 chips, and a slice is made of hosts
    dims, limit = chip.torus_dims, chip.slice_devices or 0
    if len(shape) != dims:
        return f"{dims} dims: a slice is a {dims}-D torus", f"for example {small}"
    if shape[0] % 2 or shape[1] % 2:
        return "even first and second dims: a host has 2x2 chips", f"for example {small}"
    if devices > limit:
        chips = limit // chip.chip_devices
        return f"at most {chips} chips per slice", f"several slices, as {small}*2"
    return None
