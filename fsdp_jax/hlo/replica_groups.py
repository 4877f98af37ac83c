"""The devices that talk to each other in a collective, as axes of the mesh."""

import re
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np

from fsdp_jax.hlo.parser import Instruction, malformed

Axes = tuple[tuple[str, int], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))? \{([^}]*)\}")
_FORMS = re.compile(rf"replica_groups=(\{{[\d,{{}}]*\}}|{_IOTA.pattern}|{_MESH.pattern})")
_AXIS = re.compile(r"'?([^,'=:]+)'?(?:=(\d+)|:\((\d+)\)(\d+))?")


class Groups(NamedTuple):
    """How many devices a collective joins, and the mesh axes that they lie along ("?" where they
    fit none).
    """

    size: int
    axis: str


def groups_of(one: Instruction, axes: Axes) -> Groups:
    """The groups of a collective; size 1 sends nothing.

    Devices are numbered as positions in the flattened mesh, row-major. XLA writes groups as
    `{{0,1},{2,3}}`, as an iota `[2,2]<=[4]`, possibly transposed, or as axes of a mesh of its own,
    or parts of them: `mesh['a'=8] {'a':(2)4}`.
    """
    if pairs := re.search(r"source_target_pairs=\{([\d,{}]*)\}", one.attributes):
        return _permuted(pairs.group(1), axes)
    if found := _FORMS.search(one.attributes):
        return _joined(found.group(1), axes)
    raise malformed("a collective without groups", f"{one.name}{one.attributes}")


@cache
def _permuted(pairs: str, axes: Axes) -> Groups:
    moved = [tuple(map(int, pair.split(","))) for pair in re.findall(r"\d+,\d+", pairs)]
    moved = [(source, target) for source, target in moved if source != target]
    if not moved:
        return Groups(1, "")
    sizes = [size for _, size in axes]
    here, there = (
        np.stack(np.unravel_index(np.array(end), sizes)) for end in zip(*moved, strict=True)
    )
    along = [
        name for (name, _), differs in zip(axes, (here != there).any(1), strict=True) if differs
    ]
    return Groups(prod(size for name, size in axes if name in along), "+".join(along))


@cache
def _joined(text: str, axes: Axes) -> Groups:
    devices = prod(size for _, size in axes)
    groups = _expand(text, devices)
    if groups.shape[1] == 1:
        return Groups(1, "")
    sizes = [size for _, size in axes]
    places = np.stack(np.unravel_index(groups[0], sizes))
    along = [dim for dim, place in enumerate(places) if len(set(place.tolist())) > 1]
    width = prod(sizes[dim] for dim in along)
    expected = np.moveaxis(np.arange(devices).reshape(sizes), along, range(-len(along), 0)).reshape(
        -1, width
    )
    fits = {frozenset(group) for group in groups.tolist()} == {
        frozenset(group) for group in expected.tolist()
    }
    return Groups(groups.shape[1], "+".join(axes[dim][0] for dim in along) if fits else "?")


def _expand(text: str, devices: int) -> np.ndarray:
    """[groups, devices of a group] numbers."""
    if text == "{}":
        return np.arange(devices)[None]
    if text.startswith("{"):
        rows = [row.split(",") for row in re.findall(r"\{([\d,]+)\}", text)]
        if len({len(row) for row in rows}) != 1 or sum(map(len, rows)) != devices:
            raise malformed(f"groups that do not share out {devices} devices evenly", text)
        return np.array(rows, int)
    if iota := _IOTA.fullmatch(text):
        return _iota(iota[2], iota[3]).reshape(_numbers(iota[1]))
    if mesh := _MESH.fullmatch(text):
        return _mesh(*mesh.groups())
    raise malformed("groups of an unknown form", text)


def _mesh(sizes: str, order: str | None, joined: str) -> np.ndarray:
    """Groups along some axes of a mesh, or along parts of them: `a:(2)4` is the middle of a = 2 x 4
    x rest.
    """
    shape = {name: int(size) for name, size, _, _ in _AXIS.findall(sizes)}
    cuts: dict[str, list[tuple[int, int]]] = {name: [] for name in shape}
    for name, _, before, size in _AXIS.findall(joined):
        cuts[name].append((int(before), int(size)) if size else (1, shape[name]))
    dims: list[int] = []
    inside: list[int] = []
    for name, whole in shape.items():
        done = 1
        for before, size in sorted(cuts[name]):
            inside.append(len(dims) + 1)
            dims += [before // done, size]
            done = before * size
        dims.append(whole // done)
    flat = np.arange(prod(shape.values()))
    if order:
        iota = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", order)
        flat = _iota(iota[1], iota[2]).ravel() if iota else np.array(_numbers(order))
    grouped = np.moveaxis(flat.reshape(dims), inside, range(-len(inside), 0))
    return grouped.reshape(-1, prod(dims[dim] for dim in inside))


def _iota(sizes: str, order: str | None) -> np.ndarray:
    numbers = np.arange(prod(_numbers(sizes))).reshape(_numbers(sizes))
    return numbers.transpose(_numbers(order)) if order else numbers


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
