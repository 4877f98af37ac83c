"""Finds the units of a placed model, and decides how their activations are kept."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_jax.errors import ArgumentError
from fsdp_jax.sharding.mesh import shards_of
from fsdp_jax.sharding.offload import Offload
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.sharding.quantized import QuantizedBase
from fsdp_jax.tree import flatten
from fsdp_jax.units.auto_wrap import (
    UNFOUND,
    ModuleInfo,
    Owners,
    Units,
    choose_units,
    describe_units,
    recomputable_units,
)
from fsdp_jax.units.keep_gathered import (
    NOTHING_KEPT,
    KeepGathered,
    KeptUnits,
    find_kept_units,
)
from fsdp_jax.units.placement import PlacedModel
from fsdp_jax.units.remat import INPUT, Activations, RematPolicy, activations_of


@dataclass(frozen=True)
class FoundUnits:
    """The units of a model."""

    owners: Owners  # path of a parameter -> of its unit; None if gathered as the model is entered
    local_owners: Owners  # the same with local batches
    activations: Mapping[str, Activations]  # by path of the unit
    description: str  # in words; empty where nothing is gathered by units
    kept: KeptUnits = NOTHING_KEPT  # what of them stays gathered


def find_units(
    placed: PlacedModel,
    units: Units,
    precision: Precision,
    policy: RematPolicy,
    offload: Offload,
    base: QuantizedBase | None = None,
    keep: KeepGathered = (),
) -> FoundUnits:
    """Finds the units of a model; the arguments are those of `fully_shard`."""
    modules, stacked = placed.model.modules, placed.stacked
    shapes = {path: tuple(leaf.shape) for path, leaf in flatten(placed.model.params).items()}

    # If no unit gathers, recomputes or casts, and the user names none, there is no need to search.
    mesh = placed.axes.mesh
    gathers = placed.strategy.gathers_per_unit and shards_of(mesh, placed.rules.axes) > 1
    recomputes = policy.policy != "none" or offload.saves_activations
    searched: Units = "model"
    if gathers or recomputes or precision.eight_bit or base or units != "auto":
        searched = units
    owners = choose_units(modules, searched, shapes, stacked)
    # With local batches a use outside its unit is an error, the same under every strategy.
    local_owners = owners
    if searched != units:
        local_owners = choose_units(modules, units, shapes, stacked)

    # The text for the layout.
    description = ""
    if gathers:
        description = describe_units(modules, owners, shapes)
    if gathers and units == "auto":
        how = UNFOUND
        if any(owners.values()):
            how = "the outermost repeated modules"
        description += f" ({how})"
    activations = _unit_activations(modules, searched, owners, stacked, policy, offload)
    kept = NOTHING_KEPT
    if gathers:
        kept = find_kept_units(keep, placed, owners, precision)
    if kept.description:
        description += f"; {kept.description}"
    return FoundUnits(owners, local_owners, activations, description, kept)


def _unit_activations(
    modules: Sequence[ModuleInfo],
    units: Units,
    owners: Owners,
    stacked: Mapping[str, int],
    policy: RematPolicy,
    offload: Offload,
) -> dict[str, Activations]:
    """Decides for each unit how its activations are kept: {path of a unit: Activations}.

    `units` and `stacked`: as passed to `choose_units`; `owners`: its result. Raises ValueError if
    every k-th unit is to be recomputed, but the units cannot be distinguished or counted.
    """
    in_scan = recomputable_units(modules, units, owners, stacked)
    recomputed, saved = activations_of(policy, offload)
    # The body of a layer scan is traced once, so all of its layers are treated alike.
    where, k = "remat.every", policy.every
    scanned = list(filter(in_scan.get, in_scan))
    if k > 1 and scanned:
        raise ArgumentError(
            f"every {k}-th unit cannot be recomputed inside a layer scan: all layers are one",
            where=where,
            got=f"'{scanned[0]}'",
            fix="unroll the layers (scan_layers=False), or save by name, RematPolicy(save=(...,))",
        )
    # Every k-th unit of each class is recomputed, in the order of the model.
    counts: Counter[type] = Counter()
    activations = {}
    for module in modules:
        if module.path in in_scan and module.path not in activations:
            counts[module.kind] += 1
            activations[module.path] = saved if counts[module.kind] % k else recomputed
    # Settings that would have no effect are errors.
    if k > max(counts.values(), default=0) and k > 1:
        got = ", ".join(f"{count} of {kind.__name__}" for kind, count in counts.items())
        raise ArgumentError(
            f"there are not {k} units of a class, so that none would be recomputed",
            where=where,
            got=got or "the whole model",
            fix="units=[Block], where Block is the class of the layers",
        )
    if INPUT in recomputed.offload and not activations:
        raise ArgumentError(
            "the inputs of units are to be offloaded, and the whole model is the unit",
            where="offload.activations",
            got=True,
            fix="units=[Block], or names: Offload(activation_names=('attention',))",
        )
    return activations
