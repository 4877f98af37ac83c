"""Units that stay gathered from the forward pass to the backward pass.

[Note: units that stay gathered] A unit is gathered in the forward pass, dropped, and gathered again
in the backward pass. One that stays gathered is gathered once: its copies, in the compute dtype,
live in between. The units that run last have the shortest time in between, so a number of units, or
a budget of bytes, takes those. A layer of a scan counts as a unit. What each layer of a scan keeps
must be the same, so a scan over layers some of which stay gathered runs as one loop after another
(`prefetch.layer_scan`).

Kernels that float8 matmuls take as they were sent stay in float8, and count in the compute dtype
all the same: where the model uses one otherwise, that copy stays.

With accumulation the copies live during one microbatch.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from fsdp_jax.errors import ArgumentError, did_you_mean, human_bytes, join_fixes
from fsdp_jax.sharding.offload import is_count
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.tree import SEPARATOR, flatten, prefixes
from fsdp_jax.units.auto_wrap import ModuleInfo, Owners, outermost_scan_bodies
from fsdp_jax.units.comm import gathered_bytes
from fsdp_jax.units.param_comms import float32_paths
from fsdp_jax.units.placement import PlacedModel

KeepGathered = Sequence[type | str] | int | str
"""Classes, their names or paths of units; a number of units from the end; or bytes, `"2GiB"`."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B\s*")
_WAYS = 'keep_gathered=4 (the last four), "2GiB" (of a device), or [Block]'


@dataclass(frozen=True)
class KeptUnits:
    """What stays gathered of a model's units.

    Attributes:
        layers: path of a parameter -> how many of its layers, the last that run, stay gathered; 1
            for all of a parameter that is no stack.
        description: in words; empty where nothing stays gathered.

    """

    layers: Mapping[str, int]
    description: str = ""


NOTHING_KEPT = KeptUnits({})


@dataclass(frozen=True)
class _Unit:
    """A unit that gathers: a module, or, in a scan, one for each of its layers."""

    path: str
    names: frozenset[str]  # of its class and base classes
    kinds: tuple[type, ...]  # the classes themselves
    params: tuple[str, ...]
    layers: int  # 1 outside of scans
    bytes: int  # of a device, for the gathered copies of one layer; 0 if none of it is sharded


def check_keep_gathered(keep: Any) -> None:
    """Raises ValueError unless `keep` is names or classes, a number, or bytes as text."""
    is_text = isinstance(keep, str)
    if is_text and _SIZE.fullmatch(keep):
        return
    names = isinstance(keep, list | tuple | set | frozenset)
    if is_count(keep, least=0) or (names and all(isinstance(each, str | type) for each in keep)):
        return
    fix = _WAYS
    if is_text:
        fix = f"[{keep!r}] for the units of that name; or {_WAYS}"
    raise ArgumentError(
        "not a choice of units that stay gathered",
        where="keep_gathered",
        expected="a number of units, bytes of a device as text, or a list of classes or names",
        got=repr(keep),
        fix=fix,
    )


def find_kept_units(
    keep: KeepGathered, placed: PlacedModel, owners: Owners, precision: Precision
) -> KeptUnits:
    """Finds the units that stay gathered; `keep` is as `fully_shard` takes it.

    Units of which nothing is sharded are not gathered, so that they are neither counted nor kept.

    Raises ValueError for a name that no unit has, for more units than there are, and for a budget
    in which no unit fits.
    """
    if not keep:
        return NOTHING_KEPT
    units = _units(placed, owners, precision)
    gathered = [unit for unit in units if unit.bytes]
    runs = _runs(gathered, placed)
    chosen: Sequence[_Unit]
    if not isinstance(keep, str) and isinstance(keep, Sequence | set | frozenset):
        named = _named(keep, units)
        chosen = [unit for unit in runs if unit.path in named]
    elif not gathered:
        return NOTHING_KEPT
    elif isinstance(keep, str):
        chosen = _last_within(runs, _bytes_of(keep), keep)
    else:
        chosen = _last(runs, int(keep))
    counts = Counter(unit.path for unit in chosen)
    layers: dict[str, int] = {}
    for unit in units:
        for path in unit.params if counts[unit.path] else ():
            of_param = prod(_shapes(placed)[path][: placed.stacked.get(path, 0)])
            # A unit around a scan gathers all layers at once.
            layers[path] = counts[unit.path] * (of_param // unit.layers)
    return KeptUnits(layers, _describe(units, counts))


def _shapes(placed: PlacedModel) -> dict[str, tuple[int, ...]]:
    """Lists the shapes of the parameters by path."""
    return {path: tuple(leaf.shape) for path, leaf in flatten(placed.model.params).items()}


def _units(placed: PlacedModel, owners: Owners, precision: Precision) -> list[_Unit]:
    """Lists the units that gather, in the order in which the model makes or calls them."""
    params: dict[str, list[str]] = defaultdict(list)
    for path, unit in owners.items():
        if unit is not None:
            params[unit].append(path)
    modules: dict[str, ModuleInfo] = {}
    for module in placed.model.modules:
        if module.path in params:
            modules.setdefault(module.path, module)
    leaves, float32 = flatten(placed.model.params), float32_paths(placed.model, precision)

    def layer_bytes(path: str) -> int:
        """Counts a device's bytes of the gathered copy of one layer of a parameter."""
        leaf = leaves[path]
        stored = precision.storage_dtype(leaf.dtype, path not in placed.frozen)
        compute, _ = precision.comm_dtypes(path in float32, stored)
        whole = gathered_bytes(tuple(leaf.shape), compute, placed.params[path].spec, placed.axes)
        return whole // prod(leaf.shape[: placed.stacked.get(path, 0)])

    units = []
    for path, module in sorted(modules.items(), key=lambda each: each[1].place):
        stacks = [leaves[each].shape[: placed.stacked.get(each, 0)] for each in params[path]]
        layers = prod(stacks[0]) if len(set(stacks)) == 1 else 1
        per_layer = sum(
            layer_bytes(each) * (prod(stack) // layers)
            for each, stack in zip(params[path], stacks, strict=True)
        )
        kinds = tuple(module.kind.__mro__)
        names = frozenset(module.class_names)
        units.append(_Unit(path, names, kinds, tuple(params[path]), layers, per_layer))
    return units


def _runs(units: Sequence[_Unit], placed: PlacedModel) -> list[_Unit]:
    """Lists the units in the order in which they run, one in a scan once for each of its layers.

    As far as is known: the units of one scan take turns.
    """
    bodies = outermost_scan_bodies(placed.model.modules, placed.stacked)
    stacks: dict[tuple[str, int], list[_Unit]] = {}
    for unit in units:
        body = next((each for each in prefixes(unit.path) if each in bodies), unit.path)
        stacks.setdefault((body, unit.layers), []).append(unit)
    return [unit for (_, layers), stack in stacks.items() for _ in range(layers) for unit in stack]


def _last(runs: Sequence[_Unit], count: int) -> Sequence[_Unit]:
    """Selects the last units; raises ValueError if there are fewer."""
    if count > len(runs):
        raise ArgumentError(
            "more units than are gathered",
            where="keep_gathered",
            expected=f"at most {len(runs)}, of which a layer of a scan is one",
            got=count,
            fix="a smaller number; print(sharded.layout) names the units",
        )
    return runs[len(runs) - count :]


def _last_within(runs: Sequence[_Unit], budget: float, text: str) -> Sequence[_Unit]:
    """Selects the last units whose copies fit together in a budget of bytes."""
    total, count = 0, 0
    for unit in reversed(runs):
        total += unit.bytes
        if total > budget:
            break
        count += 1
    if not count:
        raise ArgumentError(
            "no unit's gathered copies fit",
            where="keep_gathered",
            expected=f"at least {human_bytes(runs[-1].bytes)}, of '{runs[-1].path or 'the model'}'",
            got=text,
            fix="a larger budget, or leave it out",
        )
    return _last(runs, count)


def _named(names: Iterable[type | str], units: Sequence[_Unit]) -> set[str]:
    """Finds the paths of the units with these classes, names of classes, or paths."""
    found: set[str] = set()
    for name in names:
        matches = {unit.path for unit in units if name in (unit.path, *unit.names, *unit.kinds)}
        if not matches:
            text = name if isinstance(name, str) else name.__name__
            kinds = {unit.kinds[0].__name__ for unit in units}
            known = {unit.path for unit in units} if SEPARATOR in text else kinds
            raise ArgumentError(
                f"no unit is of class '{text}', or has that path",
                where="keep_gathered",
                expected=f"the units: {', '.join(sorted(kinds))}",
                got=text,
                fix=join_fixes(did_you_mean(text, known), "units=[...] makes other classes units"),
            )
        found |= matches
    return found


def _bytes_of(text: str) -> float:
    """Reads a size, such as `2GiB` or `500 MB`, in bytes."""
    found = _SIZE.fullmatch(text)
    assert found is not None, "checked as an argument"
    number, prefix = found.groups(default="")
    base = 1024 if prefix.endswith("i") else 1000
    return float(number) * base ** " KMGT".index(prefix[:1] or " ")


def _describe(units: Sequence[_Unit], counts: Mapping[str, int]) -> str:
    """Describes the units: `...: the last 4 of 32 layers of 'blocks', 1.5 GiB a device`."""
    kept = [unit for unit in units if counts[unit.path]]
    if not kept:
        return ""
    size = human_bytes(sum(counts[unit.path] * unit.bytes for unit in kept))
    whole = [unit for unit in kept if unit.layers == 1]
    parts = []
    if whole:
        first, last = (unit.path or "the model" for unit in (whole[0], whole[-1]))
        parts.append(f"'{first}'" if len(whole) == 1 else f"{len(whole)} units to '{last}'")
    for unit in kept:
        if unit.layers > 1:
            count = counts[unit.path]
            layers = f"the last {count} of {unit.layers}" if count < unit.layers else f"all {count}"
            parts.append(f"{layers} layers of '{unit.path}'")
    return f"gathered until the backward pass: {', '.join(parts)}, {size} a device"
