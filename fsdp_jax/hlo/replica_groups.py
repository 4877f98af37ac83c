"""Maps the replica groups of a collective to axes of the mesh."""

import re
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np

from fsdp_jax.hlo.parser import Instruction, malformed_error

Axes = tuple[tuple[str, int], ...]  # (name, size) of the axes of a mesh

# `[2,4]<=[4,2]T(1,0)`: the numbers from 0 on in shape (4, 2), transposed, in two groups of four.
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# `mesh['a'=8,'b'=2], device_ids=([16]) {'b'}`: a mesh, its order of devices, axes of a group.
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))? \{([^}]*)\}")
_FORMS = re.compile(rf"replica_groups=(\{{[\d,{{}}]*\}}|{_IOTA.pattern}|{_MESH.pattern})")
# `'a'=8` of a mesh; `'a'`, or a part `'a':(2)4` of it, in a group.
_AXIS = re.compile(r"'?([^,'=:]+)'?(?:=(\d+)|:\((\d+)\)(\d+))?")


class Groups(NamedTuple):
    """The groups of devices that a collective runs in; all have the same size and axes."""

    size: int  # devices in a group
    axis: str  # mesh axes that they differ along, joined by "+"; "?" where the groups fit no axes


def groups_of(instruction: Instruction, axes: Axes) -> Groups:
    """Reads the groups of a collective; a group of size 1 sends nothing.

    Devices are numbered as positions in the flattened mesh, row-major. XLA writes groups as
    `{{0,1},{2,3}}`, as an iota `[2,2]<=[4]`, possibly transposed, or as axes of a mesh of its own,
    or parts of them: `mesh['a'=8] {'a':(2)4}`.
    """
    if pairs := re.search(r"source_target_pairs=\{([\d,{}]*)\}", instruction.attributes):
        return _permutation_groups(pairs.group(1), axes)
    if groups := _FORMS.search(instruction.attributes):
        return _replica_groups(groups.group(1), axes)
    raise malformed_error(
        "a collective without groups", f"{instruction.name}{instruction.attributes}"
    )


@cache
def _permutation_groups(pairs: str, axes: Axes) -> Groups:
    """Parses the groups of a permute, its (source, target) pairs of devices."""
    return _spanned_groups(np.array(_numbers(pairs), int).reshape(-1, 2), axes)


@cache
def _replica_groups(text: str, axes: Axes) -> Groups:
    """Parses the value of `replica_groups`; the groups' axis is "?" if they fit no axes."""
    groups = _group_members(text, prod(size for _, size in axes))
    spanned = _spanned_groups(groups, axes)
    size = groups.shape[1]
    # They may span a part of an axis.
    if spanned.size != size:
        return Groups(size, "?")
    return spanned


def _spanned_groups(groups: np.ndarray, axes: Axes) -> Groups:
    """Finds the groups along all axes along which the devices of any one group differ.

    `groups`: numbers of devices, [groups, devices of a group].
    """
    # The coordinates of each device in the mesh, [axes, groups, devices of a group].
    coordinates = np.stack(np.unravel_index(groups, [size for _, size in axes]))
    differ = (coordinates != coordinates[..., :1]).any((1, 2))
    along = [axis for axis, differs in zip(axes, differ, strict=True) if differs]
    return Groups(prod(size for _, size in along), "+".join(name for name, _ in along))


def _group_members(text: str, devices: int) -> np.ndarray:
    """Parses the numbers of the devices of each group, [groups, devices of a group].

    `text`: in any form that XLA writes; `devices`: how many the program runs on.
    """
    # All devices in one group, lists of numbers, an iota, or axes of a mesh.
    if text == "{}":
        return np.arange(devices)[None]
    if text.startswith("{"):
        rows = [row.split(",") for row in re.findall(r"\{([\d,]+)\}", text)]
        if len({len(row) for row in rows}) != 1 or sum(map(len, rows)) != devices:
            raise malformed_error(f"groups that do not share out {devices} devices evenly", text)
        return np.array(rows, int)
    if iota := _IOTA.fullmatch(text):
        return _iota_numbers(iota[2], iota[3]).reshape(_numbers(iota[1]))
    if mesh := _MESH.fullmatch(text):
        return _group_members_along_axes(*mesh.groups())
    raise malformed_error("groups of an unknown form", text)


def _group_members_along_axes(sizes: str, order: str | None, joined: str) -> np.ndarray:
    """Finds the numbers of the devices of each group along axes of XLA's own mesh.

    `sizes`: of its axes, `'a'=8,'b'=2`; `order`: of the devices in it, row-major if None; `joined`:
    the axes that a group spans, or parts of them: `a:(2)4` is the 4 of a = 2 x 4 x n.
    """
    # The spanned parts of each axis: (size of the part before it, size).
    shape = {name: int(size) for name, size, _, _ in _AXIS.findall(sizes)}
    cuts: dict[str, list[tuple[int, int]]] = {name: [] for name in shape}
    for name, _, before, size in _AXIS.findall(joined):
        cuts[name].append((int(before or 1), int(size or shape[name])))
    # The dims of the mesh with these axes split; `inside`: those that a group spans.
    dims: list[int] = []
    inside: list[int] = []
    for name, axis_size in shape.items():
        covered = 1
        for before, size in sorted(cuts[name]):
            inside.append(len(dims) + 1)
            dims += [before // covered, size]
            covered = before * size
        dims.append(axis_size // covered)
    # The devices in the order of that mesh.
    if not order:
        flat = np.arange(prod(shape.values()))
    elif iota := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", order):
        flat = _iota_numbers(iota[1], iota[2]).ravel()
    else:
        flat = np.array(_numbers(order))
    # The spanned dims last, flattened into one.
    grouped = np.moveaxis(flat.reshape(dims), inside, range(-len(inside), 0))
    return grouped.reshape(-1, prod(dims[dim] for dim in inside))


def _iota_numbers(sizes: str, order: str | None) -> np.ndarray:
    """Counts from 0 on in an array of shape `sizes`, and transposes its dims by `order`."""
    numbers = np.arange(prod(_numbers(sizes))).reshape(_numbers(sizes))
    if order:
        numbers = numbers.transpose(_numbers(order))
    return numbers


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
