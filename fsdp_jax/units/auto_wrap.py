"""Chooses the FSDP units of a model: by module class, by size, by layer scan, or the whole model.

These are PyTorch's auto-wrap policies. A parameter belongs to the innermost unit around it. A
parameter that several units share, such as a tied embedding, is gathered once, when the model is
entered.

[Note: automatic units] `auto` takes the outermost modules that are repeated: the body of a layer
scan, and siblings of one class, numbered (`blocks/0`, `layer_1`) or failing that of any name. So a
block is a unit, and not the experts or the linear layers in it. A repeated module that owns more
than half of what all of them own is opened, for what is repeated inside it: a stage of a vision
model, one of two towers. Where what is found owns less than a quarter of the model, gathering it
apart saves little, and the whole model is the unit.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from fsdp_jax.errors import did_you_mean, message
from fsdp_jax.tree import prefixes
from fsdp_jax.units.unit import ROOT

Units = Sequence[type | str] | int | Literal["auto", "scan", "model"]
Owners = dict[str, str | None]  # parameter path -> unit path
ParamsOf = Mapping[str, Set[str]]  # module path -> paths of the parameters inside, at any depth
LEAST_SHARE = 0.25  # of the model's elements that automatic units own
UNFOUND = "no repeated modules own a quarter of it"


@dataclass(frozen=True)
class ModuleInfo:
    """A module of the model, as far as choosing units needs it.

    Attributes:
        path: slash-joined; empty for the whole model. A module that is used in two places is listed
            twice.
        kind: its class.
        direct: paths of the parameters that are its own attributes; a tied one is listed by each
            module that has it.
        callable: False for mere containers, which cannot be units.
        pinned: it computes in a dtype of its own, fixed when it was made.

    """

    path: str
    kind: type
    direct: frozenset[str]
    callable: bool
    pinned: bool = False

    @property
    def class_names(self) -> set[str]:
        """Names of its class and of all base classes."""
        return {base.__name__ for base in self.kind.__mro__}


def choose_units(
    modules: Sequence[ModuleInfo],
    units: Units,
    shapes: Mapping[str, tuple[int, ...]],
    stacked: Mapping[str, int],
) -> Owners:
    """Returns {parameter path: unit path, or None for what is gathered when the model is entered}.

    Args:
        modules: of the model, parents before children.
        units: module classes or their names; a least number of parameters; `scan` for stacked
            layers; `model` for one unit; `auto` for what is repeated, see the note.
        shapes: of the parameters, by path.
        stacked: parameter path -> number of leading dims that stack layers.

    Raises:
        ValueError: no module matches `units`.

    """
    if units == "model":
        return dict.fromkeys(shapes, ROOT)
    inner = [module for module in modules if module.path and module.callable]
    params_of = _params_of(modules)
    sizes = {path: prod(shape[stacked.get(path, 0) :]) for path, shape in shapes.items()}
    if units == "auto":
        return _automatic(modules, inner, params_of, shapes, sizes, stacked)
    if isinstance(units, int):
        chosen = _by_size(inner, params_of, units, sizes)
    elif units == "scan":
        chosen = _by_scan(inner, params_of, stacked)
    else:
        chosen = _by_class(inner, params_of, units)
    return _owners(modules, chosen, shapes)


def recomputed_units(
    modules: Sequence[ModuleInfo], units: Units, owners: Owners, stacked: Mapping[str, int]
) -> dict[str, bool]:
    """Returns {path of a unit: whether it is inside a layer scan}, in the order of the model.

    Also of modules that `units` names and that own no parameters, because units inside them own
    them all, or because they are shared: nothing is gathered there, but they can be recomputed.
    """
    named: set[str] = set()
    inner = [module for module in modules if module.path and module.callable]
    params_of = _params_of(modules)
    if not isinstance(units, int) and units not in ("auto", "scan", "model"):
        named = _by_class(inner, params_of, units)
    paths = {unit for unit in owners.values() if unit} | named
    return {
        module.path: any(stacked.get(path) for path in params_of[module.path])
        for module in modules
        if module.path in paths
    }


def describe_units(
    modules: Sequence[ModuleInfo], owners: Owners, shapes: Mapping[str, tuple[int, ...]]
) -> str:
    """Returns the units in words: `12 of Block ('blocks/0', ...), 91% of the parameters`."""
    units = dict.fromkeys(unit for unit in owners.values() if unit)
    if not units:
        return "the whole model"
    kinds = {module.path: module.kind.__name__ for module in modules}
    first: dict[str, str] = {}
    for path in units:
        first.setdefault(kinds[path], path)
    counts = Counter(kinds[path] for path in units)
    by_class = [f"{count} of {kind} ('{first[kind]}')" for kind, count in counts.most_common()]
    owned = sum(prod(shapes[path]) for path, unit in owners.items() if unit)
    share = owned / max(1, sum(map(prod, shapes.values())))
    return f"{', '.join(by_class)}: {share:.0%} of the parameters"


def _owners(modules: Sequence[ModuleInfo], chosen: Set[str], params: Mapping[str, Any]) -> Owners:
    """Returns the innermost unit around each parameter, where all its uses have the same one."""
    users: dict[str, set[str | None]] = {path: set() for path in params}
    for module in modules:
        innermost = next((path for path in prefixes(module.path) if path in chosen), None)
        for path in module.direct:
            users[path].add(innermost)
    return {path: next(iter(by)) if len(by) == 1 else None for path, by in users.items()}


def _automatic(
    modules: Sequence[ModuleInfo],
    inner: Sequence[ModuleInfo],
    params_of: ParamsOf,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
    stacked: Mapping[str, int],
) -> Owners:
    """Returns the owners by the outermost repeated modules; see the note on automatic units."""
    with_params = [module for module in inner if params_of[module.path]]
    total = sum(map(prod, shapes.values()))
    bodies = _bodies(with_params, params_of, stacked)
    for numbered in (True, False):
        candidates = _repeated(with_params, numbered) | bodies
        outermost = _outermost(candidates, bodies, params_of, sizes)
        owners = _owners(modules, outermost, shapes)
        owned = sum(prod(shapes[path]) for path, unit in owners.items() if unit is not None)
        if owned >= LEAST_SHARE * total:
            return owners
    return dict.fromkeys(shapes, ROOT)


def _repeated(modules: Sequence[ModuleInfo], numbered: bool) -> set[str]:
    """Returns the modules that have a sibling of their class, numbered alike if so asked."""

    def family(module: ModuleInfo) -> tuple[type, str, str]:
        parent, _, name = module.path.rpartition("/")
        return module.kind, parent, re.sub(r"\d+", "#", name) if numbered else ""

    counts = Counter(map(family, modules))
    return {module.path for module in modules if counts[family(module)] > 1}


def _outermost(
    candidates: Set[str], bodies: Set[str], params_of: ParamsOf, sizes: Mapping[str, int]
) -> set[str]:
    """Returns the outermost of these; one of more than half of their elements is opened.

    The bodies of layer scans are not: they gather a layer at a time.
    """
    elements = {path: sum(sizes[name] for name in params_of[path]) for path in candidates}
    closed = set(candidates)
    while True:
        outermost = {path for path in closed if closed.isdisjoint(prefixes(path)[1:])}
        largest = max(sorted(outermost - bodies), key=elements.__getitem__, default="")
        inside = {path for path in closed if largest and largest in prefixes(path)[1:]}
        owned = sum(sizes[name] for name in set().union(*(params_of[path] for path in inside)))
        total = sum(elements[path] for path in outermost)
        if not inside or 2 * elements[largest] <= total or 2 * owned <= elements[largest]:
            return outermost
        closed.discard(largest)


def _params_of(modules: Sequence[ModuleInfo]) -> ParamsOf:
    params: dict[str, set[str]] = {}
    for module in modules:
        for path in prefixes(module.path):
            params.setdefault(path, set()).update(module.direct)
    return params


def _by_class(inner: Sequence[ModuleInfo], params_of: ParamsOf, units: Any) -> set[str]:
    """PyTorch's `transformer_auto_wrap_policy`: every module of these classes."""
    chosen: set[str] = set()
    for unit in (units,) if isinstance(units, str) else units:
        name = unit if isinstance(unit, str) else unit.__name__
        matches = {m.path for m in inner if unit in m.kind.__mro__ or unit in m.class_names}
        if not matches:
            present = {module.kind.__name__ for module in inner if params_of[module.path]}
            what = f"no module of class '{name}' in the model"
            choices = {*present, "auto", "scan", "model"}
            raise ValueError(message(what, where="units", fix=did_you_mean(name, choices)))
        chosen |= matches
    return chosen


def _by_size(
    inner: Sequence[ModuleInfo], params_of: ParamsOf, least: int, sizes: Mapping[str, int]
) -> set[str]:
    """PyTorch's `size_based_auto_wrap_policy`: from the leaves up, what is large enough."""
    chosen: set[str] = set()
    wrapped: set[str] = set()
    for module in reversed(inner):
        unwrapped = params_of[module.path] - wrapped
        if sum(sizes[path] for path in unwrapped) >= least:
            chosen.add(module.path)
            wrapped |= unwrapped
    if not chosen:
        largest = max((sum(sizes[p] for p in params_of[m.path]) for m in inner), default=0)
        fix = f"at most {largest}, the largest module's, or units='model'"
        what = "no module has that many parameters"
        raise ValueError(message(what, where="units.min_params", got=least, fix=fix))
    return chosen


def _by_scan(
    inner: Sequence[ModuleInfo], params_of: ParamsOf, stacked: Mapping[str, int]
) -> set[str]:
    """The outermost modules all of whose parameters are stacked: the body of a layer scan."""
    bodies = _bodies(inner, params_of, stacked)
    outermost = {path for path in bodies if bodies.isdisjoint(prefixes(path)[1:])}
    if not outermost:
        fix = "units=[YourBlock]"
        raise ValueError(message("no stacked layers in the model", where="units='scan'", fix=fix))
    return outermost


def _bodies(
    inner: Sequence[ModuleInfo], params_of: ParamsOf, stacked: Mapping[str, int]
) -> set[str]:
    """Returns the modules all of whose parameters are stacked."""
    return {
        module.path
        for module in inner
        if params_of[module.path] and all(stacked.get(path) for path in params_of[module.path])
    }
