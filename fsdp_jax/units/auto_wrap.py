"""Chooses the FSDP units of a model: by module class, by size, by layer scan, or the whole model.

These are PyTorch's auto-wrap policies. A parameter belongs to the innermost unit around it. A
parameter that several units share, such as a tied embedding, is gathered once, when the model is
entered.
"""

import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_jax.errors import SlowerWarning, did_you_mean, message
from fsdp_jax.tree import prefixes
from fsdp_jax.units.unit import ROOT, Remat

Units = Sequence[type | str] | int | Literal["scan", "model"]
ParamsOf = Mapping[str, Set[str]]  # module path -> paths of the parameters inside, at any depth


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
    sizes: Mapping[str, int],
    stacked: Mapping[str, int],
    remat: Remat = "none",
) -> dict[str, str | None]:
    """Returns {parameter path: unit path, or None for what is gathered when the model is entered}.

    Args:
        modules: of the model, parents before children.
        units: module classes or their names; a least number of parameters; `scan` for stacked
            layers; `model` for one unit.
        sizes: parameter path -> elements of one layer.
        stacked: parameter path -> number of leading dims that stack layers.
        remat: of the units; one that owns no parameters is not recomputed.

    Raises:
        ValueError: no module matches `units`.

    Warns:
        SlowerWarning: units that are not recomputed.

    """
    if units == "model":
        return dict.fromkeys(sizes, ROOT)
    inner = [module for module in modules if module.path and module.callable]
    params_of = _params_of(modules)
    if isinstance(units, int):
        chosen = _by_size(inner, params_of, units, sizes)
    elif units == "scan":
        chosen = _by_scan(inner, params_of, stacked)
    else:
        chosen = _by_class(inner, params_of, units)

    # The innermost unit around each use of a parameter; it owns the parameter if there is one only.
    users: dict[str, set[str | None]] = {path: set() for path in sizes}
    for module in modules:
        innermost = next((path for path in prefixes(module.path) if path in chosen), None)
        for path in module.direct:
            users[path].add(innermost)
    owners = {path: next(iter(by)) if len(by) == 1 else None for path, by in users.items()}
    if remat != "none":
        _warn_not_recomputed(sorted(chosen.difference(owners.values())), remat)
    return owners


def _warn_not_recomputed(units: Sequence[str], remat: Remat) -> None:
    """Warns of units without parameters of their own: nothing gathers there, nothing recomputes."""
    if units:
        warnings.warn(
            f"remat='{remat}' does nothing for {len(units)} units, such as '{units[0]}', and their "
            "activations are kept: a unit owns no parameters where units inside it own them all, "
            "or where several modules share them",
            SlowerWarning,
            stacklevel=4,
        )


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
            raise ValueError(message(what, where="units", fix=did_you_mean(name, present)))
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
    bodies = {
        module.path
        for module in inner
        if params_of[module.path] and all(stacked.get(path) for path in params_of[module.path])
    }
    outermost = {path for path in bodies if bodies.isdisjoint(prefixes(path)[1:])}
    if not outermost:
        fix = "units=[YourBlock]"
        raise ValueError(message("no stacked layers in the model", where="units='scan'", fix=fix))
    return outermost
