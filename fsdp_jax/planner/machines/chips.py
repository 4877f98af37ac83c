"""Chips by name: the table in `chips.toml`, and look-ups in it."""

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from fsdp_jax.errors import ArgumentError
from fsdp_jax.planner.machines.hardware import Efficiency, Hardware, Protocol

_ADA = 8.9  # the first compute capability with float8, NVIDIA Ada GPU Architecture white paper
_IRONWOOD = "TPU7"  # 4614 TFLOP/s in float8, 2307 in bfloat16, Cloud TPU documentation, TPU7x


def _read_chips() -> Mapping[str, Hardware]:
    """Reads the chips of `chips.toml`, by name."""
    file = resources.files("fsdp_jax.planner.machines").joinpath("chips.toml")
    chips: dict[str, Hardware] = {}
    for name, entry in tomllib.loads(file.read_text(encoding="utf-8")).items():
        # what an entry does not state is as in an earlier one that it is `like`
        like: dict[str, Any] = {}
        if "like" in entry:
            like = vars(chips[entry.pop("like")])
        entry |= {"name": name, "device_kinds": tuple(entry["device_kinds"])}
        # its efficiency too, constant by constant
        if efficiency := entry.get("efficiency"):
            if "tiles" in efficiency:
                efficiency["tiles"] = tuple(map(tuple, efficiency["tiles"]))
            if "protocols" in efficiency:
                protocols = (Protocol(**each) for each in efficiency["protocols"])
                efficiency["protocols"] = tuple(protocols)
            if like:
                efficiency = vars(like["efficiency"]) | efficiency
            entry["efficiency"] = Efficiency(**efficiency)
        chips[name] = Hardware(**like | entry)
    return MappingProxyType(chips)


HARDWARE = _read_chips()  # every chip by its name in a topology


def hardware_of(device_kind: str) -> Hardware | None:
    """Finds the chip that `jax.Device.device_kind` names; None if it is not in the table."""
    return next((chip for chip in HARDWARE.values() if device_kind in chip.device_kinds), None)


def peak_flops(device_kind: str, dtype: DTypeLike) -> float | None:
    """Looks up the peak FLOP/s of matmuls of `dtype` on a live device; None if unknown.

    `float32` is at jax's default matmul precision: TF32 on GPUs, bfloat16 on TPUs.
    """
    chip = hardware_of(device_kind)
    if chip is None:
        return None
    name = jnp.dtype(dtype).name
    if name.startswith("float8"):  # one rate for all of them
        name = "float8"
    return chip.peak_flops.get(name)


def check_float8_matmuls(device: Any) -> None:
    """Raises ValueError for a chip without matrix units for float8.

    Args:
        device: live, or of a topology. Virtual CPU devices pass: they compute the same numbers.

    Raises:
        ValueError: it multiplies float8 no faster than bfloat16; the message has its rates.

    """
    name = kind = device.device_kind
    chip = hardware_of(kind)
    # a chip that is not in the table is known by its generation
    if chip is None:
        capability = str(getattr(device, "compute_capability", ""))
        is_cuda = re.fullmatch(r"\d+\.\d+", capability) is not None  # AMD's is a name
        has_units = (is_cuda and float(capability) >= _ADA) or kind.startswith(_IRONWOOD)
        got = "a chip that is not in the table, of no known kind"
    else:
        name = chip.name
        has_units = chip.platform == "cpu" or chip.has_float8_units
        rates = {name: chip.peak_flops.get(name, 0) for name in ("float8", "bfloat16")}
        got = ", ".join(f"{rate / 1e12:.0f} TFLOP/s in {name}" for name, rate in rates.items())
    if not has_units:
        known = [each.name for each in HARDWARE.values() if each.has_float8_units]
        raise ArgumentError(
            f"{name} has no matrix units for float8",
            where="precision.matmul",
            expected=f"{', '.join(known)}, an Ada GPU, or TPU7x",
            got=got,
            fix="leave matmul out; gather='float8_e4m3fn' alone sends half of the bytes",
        )
