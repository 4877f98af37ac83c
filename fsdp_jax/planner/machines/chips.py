"""Chips by name: the table in `chips.toml`, and look-ups in it."""

import tomllib
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from fsdp_jax.planner.machines.hardware import Efficiency, Hardware, Protocol

TABLE = resources.files("fsdp_jax.planner.machines").joinpath("chips.toml")


def read_chips(text: str) -> Mapping[str, Hardware]:
    """Reads a table of chips, by name; `text`: as in `chips.toml`."""
    chips: dict[str, Hardware] = {}
    for name, entry in tomllib.loads(text).items():
        # what an entry does not state is as in an earlier one that it is `like`
        like: dict[str, Any] = {}
        if "like" in entry:
            like = vars(chips[entry.pop("like")])
        entry |= {"name": name, "device_kinds": tuple(entry["device_kinds"])}
        # its tables too, key by key; a rate of 0 says that it has no unit for that dtype
        for table in ("peak_flops", "cuda", "topology_options"):
            stated = entry.get(table, {})
            if merged := {**(like.get(table) or {}), **stated}:
                entry[table] = {key: value for key, value in merged.items() if value}
        # and its efficiency, constant by constant
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


HARDWARE = read_chips(TABLE.read_text(encoding="utf-8"))  # every chip by its name in a topology


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
    return chip.peak_flops.get("float8" if name.startswith("float8") else name)
