"""Chooses the FSDP units of a model: by module class, by size, by layer scan, or the whole model.

These are PyTorch's auto-wrap policies. A parameter belongs to the innermost unit around it. A
parameter that several units share, such as a tied embedding, is gathered once, when the model is
entered.

[Note: automatic units] `auto` takes the outermost repeated modules: the body of a layer scan, and
siblings of one class with numbered names (`blocks/0`, `layer_1`), or if there are none, siblings of
one class with any names. So a block is a unit, but the experts or the linear layers in it are not.
If one repeated module owns more than half of the parameters of all of them, the modules repeated
inside it are taken instead: for example a stage of a vision model, or one of two towers. If the
units found own less than a quarter of the model, gathering them separately saves little, and the
whole model is the unit.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from fsdp_jax.errors import ArgumentError, did_you_mean
from fsdp_jax.sharding.offload import is_count
from fsdp_jax.tree import prefixes
from fsdp_jax.units.unit import ROOT

Units = Sequence[type | str] | int | Literal["auto", "scan", "model"]
Owners = dict[str, str | None]  # parameter path -> unit path
LEAST_SHARE = 0.25  # of the model's elements that automatic units own
UNFOUND = "no repeated modules own a quarter of it"


@dataclass(frozen=True)
class ModuleInfo:
    """A module of the model, as far as choosing units needs it.

    A module that is used in two places is listed twice, and so is a parameter that two modules
    share.
    """

    path: str  # slash-joined; empty for the whole model
    kind: type
    direct: frozenset[str]  # paths of the parameters that are its own attributes
    callable: bool  # False for mere containers, which cannot be units
    pinned: bool = False  # it computes in a dtype that was fixed when it was made
    dtype: np.dtype | None = None  # its attribute of this name, which Flax's layers compute in
    place: int = 0  # among the modules, as an NNX model makes them, or a Linen model calls them

    @property
    def class_names(self) -> set[str]:
        """Names of its class and of all base classes."""
        return {base.__name__ for base in self.kind.__mro__}


def check_units(units: Any) -> None:
    """Raises ValueError unless `units` is a choice, a number of parameters, classes or names."""
    names = isinstance(units, list | tuple | set) and all(isinstance(u, str | type) for u in units)
    if is_count(units) or (units and (names or isinstance(units, str))):
        return
    raise ArgumentError(
        "no units",
        where="units",
        expected="classes or their names, a least number of parameters, 'auto', 'scan' or 'model'",
        got=units,
        fix="units=[Block], units='model' for one unit, or leave it out for the repeated blocks",
    )


def choose_units(
    modules: Sequence[ModuleInfo],
    units: Units,
    shapes: Mapping[str, tuple[int, ...]],
    stacked: Mapping[str, int],
) -> Owners:
    """Chooses the unit of each parameter: {parameter path: unit path, or None}.

    Parameters with None are gathered when the model is entered. `stacked`: parameter path -> number
    of leading dims that stack layers. Raises ValueError if no module matches `units`.
    """
    if units == "model":
        return dict.fromkeys(shapes, ROOT)
    tree = _Modules(modules, shapes, stacked)
    if units == "auto":
        return tree.automatic_owners()
    if isinstance(units, int):
        return tree.owners(tree.paths_by_size(units))
    return tree.owners(tree.paths_by_scan() if units == "scan" else tree.paths_by_class(units))


def recomputable_units(
    modules: Sequence[ModuleInfo], units: Units, owners: Owners, stacked: Mapping[str, int]
) -> dict[str, bool]:
    """Finds the units that remat may recompute: {path: whether it is inside a layer scan}.

    They are in the order of the model, and include modules that `units` names but that own no
    parameters (inner units own all of them, or they are shared): nothing is gathered there, but the
    modules can be recomputed.
    """
    tree = _Modules(modules, {}, stacked)
    paths = {unit for unit in owners.values() if unit}
    if not isinstance(units, int) and units not in ("auto", "scan", "model"):
        paths |= tree.paths_by_class(units)
    return {
        module.path: any(stacked.get(path) for path in tree.params_of[module.path])
        for module in modules
        if module.path in paths
    }


def outermost_scan_bodies(modules: Sequence[ModuleInfo], stacked: Mapping[str, int]) -> set[str]:
    """Finds the paths of the outermost modules whose parameters are all stacked."""
    return _outermost_of(_Modules(modules, {}, stacked).scan_bodies())


def describe_units(
    modules: Sequence[ModuleInfo], owners: Owners, shapes: Mapping[str, tuple[int, ...]]
) -> str:
    """Describes the units: `12 of Block ('blocks/0', ...), 91% of the parameters`."""
    units = dict.fromkeys(unit for unit in owners.values() if unit)
    if not units:
        return "the whole model"
    kinds = {module.path: module.kind.__name__ for module in modules}
    first: dict[str, str] = {}
    for path in units:
        first.setdefault(kinds[path], path)
    counts = Counter(kinds[path] for path in units)
    by_class = [f"{count} of {kind} ('{first[kind]}')" for kind, count in counts.most_common()]
    return f"{', '.join(by_class)}: {_owned_share(owners, shapes):.0%} of the parameters"


def _owned_share(owners: Owners, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Computes the fraction of the model's elements that belong to units inside it."""
    owned = sum(prod(shapes[path]) for path, unit in owners.items() if unit)
    return owned / max(1, sum(map(prod, shapes.values())))


def _outermost_of(paths: Set[str]) -> set[str]:
    """Selects the paths of modules that are not inside another of these modules."""
    return {path for path in paths if paths.isdisjoint(prefixes(path)[1:])}


class _Modules:
    """The modules of a model, and the parameters inside each."""

    def __init__(
        self,
        modules: Sequence[ModuleInfo],
        shapes: Mapping[str, tuple[int, ...]],
        stacked: Mapping[str, int],
    ) -> None:
        self.modules, self.shapes, self.stacked = modules, shapes, stacked
        # Modules that may be units.
        self.inner = [module for module in modules if module.path and module.callable]
        # Module path -> paths of the parameters inside, at any depth.
        self.params_of: dict[str, set[str]] = defaultdict(set)
        for module in modules:
            for path in prefixes(module.path):
                self.params_of[path] |= module.direct
        # Elements; for stacked parameters, per layer.
        self.sizes = {path: prod(shape[stacked.get(path, 0) :]) for path, shape in shapes.items()}

    def element_count(self, params: Set[str]) -> int:
        """Counts the elements of these parameters; for stacked ones, per layer."""
        return sum(self.sizes[path] for path in params)

    def owners(self, chosen: Set[str]) -> Owners:
        """Finds the unit of each parameter: the innermost of the chosen modules around it.

        The unit is None if no chosen module contains the parameter, or if it is used in several
        units.
        """
        users: dict[str, set[str | None]] = {path: set() for path in self.shapes}
        for module in self.modules:
            innermost = next((path for path in prefixes(module.path) if path in chosen), None)
            for path in module.direct:
                users[path].add(innermost)
        return {path: next(iter(by)) if len(by) == 1 else None for path, by in users.items()}

    def automatic_owners(self) -> Owners:
        """Finds each parameter's unit, of the outermost repeated modules; see the note."""
        for numbered in (True, False):
            owners = self.owners(
                self._open_largest(self._repeated_modules(numbered) | self.scan_bodies())
            )
            if _owned_share(owners, self.shapes) >= LEAST_SHARE:
                return owners
        return dict.fromkeys(self.shapes, ROOT)

    def _repeated_modules(self, numbered: bool) -> set[str]:
        """Finds the paths of modules that have a sibling of their class.

        `numbered`: require that the siblings' names differ only by a number.
        """

        def family(module: ModuleInfo) -> tuple[type, str, str]:
            parent, _, name = module.path.rpartition("/")
            return module.kind, parent, re.sub(r"\d+", "#", name) if numbered else ""

        with_params = [module for module in self.inner if self.params_of[module.path]]
        counts = Counter(map(family, with_params))
        return {module.path for module in with_params if counts[family(module)] > 1}

    def _open_largest(self, candidates: Set[str]) -> set[str]:
        """Selects the outermost of these modules, after opening the largest ones.

        A module with more than half of their elements is replaced by the modules inside it, unless
        it is the body of a layer scan, which gathers one layer at a time.
        """
        elements = {path: self.element_count(self.params_of[path]) for path in candidates}
        closed, bodies = set(candidates), self.scan_bodies()
        while True:
            outermost = _outermost_of(closed)
            largest = max(sorted(outermost - bodies), key=elements.__getitem__, default="")
            inside = {path for path in closed if largest and largest in prefixes(path)[1:]}
            owned = self.element_count(set().union(*(self.params_of[path] for path in inside)))
            total = sum(elements[path] for path in outermost)
            if not inside or 2 * elements[largest] <= total or 2 * owned <= elements[largest]:
                return outermost
            closed.discard(largest)

    def paths_by_class(self, units: Any) -> set[str]:
        """Finds the paths of all modules of these classes, given by type or name.

        PyTorch's `transformer_auto_wrap_policy`. Raises ValueError for a class that no module has.
        """
        chosen: set[str] = set()
        for unit in (units,) if isinstance(units, str) else units:
            # A class matches by type or name, and so do its subclasses.
            name = unit if isinstance(unit, str) else unit.__name__
            matches = {m.path for m in self.inner if unit in (*m.kind.__mro__, *m.class_names)}
            # Two errors: the class of the whole model, for which `units="model"` is the fix, and a
            # class that no module has.
            if not matches and name in self.modules[0].class_names:
                inside = sorted({m.kind.__name__ for m in self.inner if self.params_of[m.path]})
                raise ArgumentError(
                    f"'{name}' is the class of the whole model, which is no unit inside it",
                    where="units",
                    fix=(
                        "units='model' gathers all of it at once"
                        + (f"; or name classes inside it: {', '.join(inside)}" if inside else "")
                    ),
                )
            if not matches:
                present = {m.kind.__name__ for m in self.inner if self.params_of[m.path]}
                raise ArgumentError(
                    f"no module of class '{name}' in the model",
                    where="units",
                    fix=did_you_mean(name, {*present, "auto", "scan", "model"}),
                )
            chosen |= matches
        return chosen

    def paths_by_size(self, least: int) -> set[str]:
        """Finds the paths of modules with at least `least` elements, from the innermost outwards.

        PyTorch's `size_based_auto_wrap_policy`: elements of an inner unit do not count. Raises
        ValueError if no module has that many.
        """
        chosen: set[str] = set()
        wrapped: set[str] = set()
        for module in reversed(self.inner):
            unwrapped = self.params_of[module.path] - wrapped
            if self.element_count(unwrapped) >= least:
                chosen.add(module.path)
                wrapped |= unwrapped
        if not chosen:
            largest = max(
                (self.element_count(self.params_of[m.path]) for m in self.inner), default=0
            )
            raise ArgumentError(
                "no module has that many parameters",
                where="units.min_params",
                got=least,
                fix=f"at most {largest}, the largest module's, or units='model'",
            )
        return chosen

    def paths_by_scan(self) -> set[str]:
        """Finds the paths of the bodies of layer scans.

        They are the outermost modules whose parameters are all stacked. Raises ValueError if there
        are none.
        """
        if not (outermost := _outermost_of(self.scan_bodies())):
            raise ArgumentError(
                "no stacked layers in the model", where="units='scan'", fix="units=[YourBlock]"
            )
        return outermost

    def scan_bodies(self) -> set[str]:
        """Finds the paths of modules whose parameters are all stacked, at any depth."""
        params_of = ((module.path, self.params_of[module.path]) for module in self.inner)
        return {path for path, params in params_of if params and all(map(self.stacked.get, params))}
