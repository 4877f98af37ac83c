"""Path rules and the size heuristic: a PartitionSpec for every parameter, and the reason for it.

Usable alone: `partition_specs(abstract_params, mesh, rules)` needs no trainer and no Layout.

A rule is `(pattern, spec)`. The pattern is a regular expression searched in the slash-joined path
(`blocks/3/attn/qkv/kernel`), or a tuple of them, each for one part of the path, as in the tables of
Flax's examples; the first rule that matches wins. The spec is a PartitionSpec, None for a
replicated array, or a tuple of logical names that `logical_axes` maps to mesh axes. The name `fsdp`
stands for the axes that are sharded along, unless the mesh has an axis of that name. Where no rule
matches, Flax's own annotations count, as far as the mesh has their axes; and where these name none,
or nothing of them remains, the heuristic: the largest divisible dim, never a stacked layer dim,
nothing below `min_size` elements; failing that, under `fully_shard`, the dim that pads least; see
`sharding.padding`. So an annotation of None for every dim does not replicate an
array: a rule does, or `logical_axes` that map its names to None.
"""

import warnings
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from numbers import Real
from types import MappingProxyType
from typing import TypedDict, Unpack, cast

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from fsdp_jax.compat.flax_boxes import is_box
from fsdp_jax.errors import ArgumentError, did_you_mean
from fsdp_jax.sharding.findings import (
    Finding,
    dropped_finding,
    misfit_findings,
    repeated_name_findings,
)
from fsdp_jax.sharding.logical_axes import (
    Assigned,
    LogicalAxes,
    Table,
    assign_axes,
    check_logical_axes,
    read_logical_axes,
)
from fsdp_jax.sharding.mesh import (
    DATA,
    FSDP,
    REPLICA,
    Entry,
    axes_of,
    default_data_axes,
    entry_of,
    named_axes,
    shard_axes,
    shards_of,
    spec_axes,
    spec_of,
)
from fsdp_jax.sharding.padding import padded_shape
from fsdp_jax.sharding.param_leaves import ParamLeaf, read_leaves
from fsdp_jax.sharding.path_rules import Pattern, Rule, Spec, pattern_name, read_rules
from fsdp_jax.tree import PyTree, map_with_path

MIN_SIZE = 2**14
HEURISTIC = "heuristic"
NO_AXES = PartitionSpec()


@dataclass(frozen=True)
class Placement:
    """How one array is sharded, by which rule, and why."""

    spec: PartitionSpec
    rule: str
    reason: str
    missed_shards: int = 1  # that it would have if a dim were divisible; 1 if sharded or small
    dropped: tuple[str, ...] = ()  # names of its annotation, or their axes, that shard nothing


# Bytes on every device, asked for by nobody, that are worth a warning: a copy of fewer fits beside
# any model's activations, and its gather takes about a millisecond.
LARGE_BYTES = 64 * 2**20


# The padding of an array that is worth a single collective for it.
SMALL_PADDING = 0.02


class ReplicationWarning(UserWarning):
    """A large array is replicated though the strategy would shard it."""


@dataclass(frozen=True)
class Rules:
    """Ordered rules, and what applies where none of them matches.

    The attributes are arguments of `partition_specs`, with `axes` named; but for `pads`.
    """

    rules: Sequence[Rule] | Mapping[Pattern, Spec] = ()
    logical_axes: LogicalAxes | None = None
    min_size: int = MIN_SIZE
    strict: bool = False
    axes: tuple[str, ...] = (DATA,)
    pads: bool = False  # a dim along `axes` need not be divisible: it is stored padded

    def __post_init__(self) -> None:
        _ = self.pairs, self.table  # reads them, and raises where they are malformed
        if not isinstance(self.min_size, Real) or isinstance(self.min_size, bool):
            raise ArgumentError(
                "not a number of elements",
                where="min_size",
                expected="a number",
                got=repr(self.min_size),
            )

    @cached_property
    def pairs(self) -> tuple[tuple[Pattern, tuple[Entry, ...]], ...]:
        """The rules as (pattern, entries), an entry per dim."""
        return read_rules(self.rules)

    @cached_property
    def table(self) -> Table:
        """The logical axes as (name, mesh axes), in order."""
        return read_logical_axes(self.logical_axes)

    def place(
        self,
        params: PyTree,
        mesh: Mesh,
        *,
        stacked: Mapping[str, int] | None = None,
        others: Collection[str] = (),
        aliases: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> dict[str, Placement]:
        """Places every leaf of `params`, as `partition_specs` takes them: {path: Placement}.

        `stacked`: path -> number of leading dims that stack layers; by default as `stacked_dims`
        detects them. `others`: paths of leaves that are no parameters: `strict` does not ask for
        them, and where a rule for parameters does not fit, they are replicated. `aliases`: path ->
        other paths of a leaf that is shared: the first rule that matches any of them places it.
        Raises ValueError where the mesh lacks all of `logical_axes`, and for all that `lint` finds,
        at once.
        """
        leaves = {
            path: replace(leaf, aliases=aliases.get(path, ()))
            for path, leaf in read_leaves(params, stacked).items()
        }
        findings = self.lint(leaves, mesh, others)
        if findings:
            text = "\n".join(f"  {finding}" for finding in findings)
            raise ValueError(f"the sharding rules do not fit this model ({len(findings)}):\n{text}")
        placements = {path: self.place_leaf(path, leaf, mesh) for path, leaf in leaves.items()}
        for path in others:
            place = placements[path]
            if misfits := self._misfits("the rule", path, place.spec, leaves[path], mesh):
                reason = f"{misfits[0].kind} for this rule: replicated, since it is no parameter"
                missed = shards_of(mesh, spec_axes(place.spec))
                placements[path] = Placement(PartitionSpec(), place.rule, reason, missed)
        return placements

    def place_leaf(self, path: str, leaf: ParamLeaf, mesh: Mesh) -> Placement:
        """Places a parameter by rule, annotation or size; `lint` checks it."""
        index = self._first_match(path, leaf)
        assigned = self.assigned_axes(path, leaf, mesh)
        spec = assigned.spec
        # Axes that the mesh lacks, and names that stand for none or for a taken one.
        names = (name for drop in assigned.dropped for name in drop.axes or (drop.name,))
        dropped = tuple(dict.fromkeys(names))
        notes = f"; dropped: {'; '.join(map(str, assigned.dropped))}" if dropped else ""
        named = tuple(axis for axis in self.axes if axis in spec_axes(spec))
        if named not in ((), self.axes):
            notes += f"; along {named} alone of {self.axes}"
        if index is not None:
            name = pattern_name(self.pairs[index][0])
            return Placement(spec, name, f"first rule that matches{notes}", dropped=dropped)

        # Of an annotation, what the mesh has; and where it says nothing, the heuristic.
        in_table = not dict(self.table).keys().isdisjoint(spec_axes(leaf.names or ()))
        if not assigned.spec and not (assigned.keeps_meaning and in_table):
            spec, reason, missed = self.spec_by_size(leaf, mesh)
            if dropped:
                reason += f"; nothing remains of annotation {leaf.names}{notes}"
            elif leaf.names is not None:
                reason += f"; annotation {leaf.names} names no mesh axis"
            return Placement(spec, HEURISTIC, reason, missed, dropped)

        # The heuristic completes an annotation that names none of `axes`.
        reason, missed = f"logical axes {leaf.names}{notes}", 1
        if spec and not named:
            spec, why, missed = self.spec_by_size(leaf, mesh, spec)
            reason += f"; then {why}"
        return Placement(spec, "annotation", reason, missed, dropped)

    def assigned_axes(self, path: str, leaf: ParamLeaf, mesh: Mesh) -> Assigned:
        """Finds the spec by the first matching rule, or else the annotation, and its drops.

        Of a leaf with neither, the spec is empty.
        """
        index = self._first_match(path, leaf)
        if index is None:
            return self._assign_names(leaf.names or (), mesh, leaf.table)
        return self._assign_names(self.pairs[index][1], mesh)

    def _assign_names(self, names: Iterable[Entry], mesh: Mesh, table: Table = ()) -> Assigned:
        """Calls `assign_axes` with the logical axes of these rules, then those of `table`."""
        return assign_axes(names, (*self.table, *table), mesh.axis_names, self.axes)

    def spec_by_size(
        self, leaf: ParamLeaf, mesh: Mesh, own: PartitionSpec = NO_AXES
    ) -> tuple[PartitionSpec, str, int]:
        """Shards by the size heuristic, no stacked dim: (spec, reason, missed shards).

        `own`: the spec so far, of an annotation. It stays, and dims that it leaves whole come
        first. The missed shards are those of `Placement`.
        """
        entries = [*own, *[None] * (len(leaf.shape) - len(own))]
        divisors = [shards_of(mesh, entry) for entry in entries]
        shape = tuple(size // count for size, count in zip(leaf.shape, divisors, strict=True))
        shards = shards_of(mesh, self.axes)
        size = prod(shape[leaf.stacked :])
        if len(shape) <= leaf.stacked:
            return own, "a scalar is replicated", 1
        if size < max(self.min_size, 1):
            return own, f"{size} elements, below min_size {self.min_size}", 1

        # One dim takes all axes if any can, or else several dims share them.
        dims = range(leaf.stacked, len(shape))
        units = [shards * granule for granule in leaf.granules or [1] * len(shape)]
        divisible = [dim for dim in dims if shape[dim] % units[dim] == 0 and shape[dim] > 0]
        if divisible:
            # Of blocks the first: XLA gathers along it in place, and for others copies the stack.
            sizes = shape if not leaf.granules else (0,) * len(shape)
            dim = max(divisible, key=lambda d: (entries[d] is None, sizes[d], -d))
            added = {dim: self.axes}
            reason = f"largest dim divisible by {shards} is dim {dim}"
            if leaf.granules:
                reason = f"first dim divisible by {shards} in whole blocks is dim {dim}"
            if leaf.stacked:
                several = "s" * (leaf.stacked > 1)
                reason += f", {leaf.stacked} stacked layer dim{several} not sharded"
        else:
            own_dims = {dim for dim, entry in enumerate(entries) if entry is not None}
            added = self._axes_over_dims(dims, shape, mesh, own_dims, leaf.granules)
            if not added:
                return own, f"no dim of {shape} is divisible by {shards}: replicated", shards
            over = [f"dim {dim} in {shards_of(mesh, added[dim])}" for dim in sorted(added)]
            reason = f"no dim is divisible by {shards}: {' and '.join(over)}"
        both = [(*axes_of(entry), *added.get(dim, ())) for dim, entry in enumerate(entries)]
        return spec_of(map(entry_of, both)), reason, 1

    def _axes_over_dims(
        self,
        dims: Sequence[int],
        shape: tuple[int, ...],
        mesh: Mesh,
        own_dims: Container[int],
        granules: tuple[int, ...],
    ) -> dict[int, tuple[str, ...]]:
        """Spreads the axes over these dims: {dim: mesh axes}.

        Over as few as divide; failing that over as few as pad by `SMALL_PADDING`; failing that with
        the least padding. `own_dims`, along which the model's own axes shard, are not padded;
        `granules` as in `ParamLeaf`. Empty if no way divides, and these rules do not pad.
        """
        axes = [axis for axis in self.axes if mesh.shape[axis] > 1]
        ways: list[tuple[tuple[int, float, float], dict[int, tuple[str, ...]]]] = []
        for chosen in product(dims, repeat=len(axes)):  # a dim for each axis
            added: dict[int, tuple[str, ...]] = {}
            for axis, dim in zip(axes, chosen, strict=True):
                added[dim] = (*added.get(dim, ()), axis)
            spec = PartitionSpec(*(entry_of(added.get(dim, ())) for dim in range(len(shape))))
            stored = padded_shape(shape, spec, mesh, granules)
            if any(dim in own_dims and stored[dim] != shape[dim] for dim in added):
                continue
            padding = prod(stored) / prod(shape) - 1
            # Over one dim a collective is one, whose shards are contiguous.
            if padding == 0:
                ways.append(((0, len(added), 0), added))
            elif padding <= SMALL_PADDING:
                ways.append(((1, len(added), padding), added))
            else:
                ways.append(((2, padding, len(added)), added))
        (kind, *_), best = min(ways, key=lambda way: way[0], default=((0, 0, 0), {}))
        return best if self.pads or kind == 0 else {}

    def lint(
        self, leaves: Mapping[str, ParamLeaf], mesh: Mesh, others: Collection[str] = ()
    ) -> list[Finding]:
        """Finds all that is wrong: rules, axes, ranks and dims that do not fit the parameters.

        Unused and shadowed rules, unknown and repeated axes, one name on two dims, wrong ranks,
        indivisible dims, and with `strict` unmatched leaves. `others` as in `place`.
        """
        check_logical_axes(self.table, mesh.axis_names)
        winners = {path: self._first_match(path, leaf) for path, leaf in leaves.items()}
        findings: list[Finding] = []

        # Rules: their axes, whether they win anywhere, and whether they fit where they win.
        for index, (pattern, spec) in enumerate(self.pairs):
            where = f"rule '{pattern_name(pattern)}'"
            assigned = self._assign_names(spec, mesh)
            refused = self._dropped_findings(where, assigned, mesh)
            findings += refused
            matched = [path for path, winner in winners.items() if winner == index]
            if not matched:
                findings += self._idle_rule_findings(index, where, leaves)
            if not refused:
                for path in [path for path in matched if path not in others] or matched:
                    findings += self._misfits(where, path, assigned.spec, leaves[path], mesh)

        # Parameters that no rule wins: their annotations, which `strict` requires.
        for path, leaf in leaves.items():
            if winners[path] is not None:
                continue
            findings += repeated_name_findings(path, leaf)
            assigned = self.assigned_axes(path, leaf, mesh)
            if leaf.names is not None and assigned.keeps_meaning:
                findings += self._misfits("annotation", path, assigned.spec, leaf, mesh)
            elif self.strict and path not in others:
                text = "no rule matches (strict); add one, or strict=False"
                findings.append(Finding("unmatched leaf", path, text))
        return findings

    def _first_match(self, path: str, leaf: ParamLeaf) -> int | None:
        """Finds the number of the first rule that matches a leaf; None where none does."""
        winners = (i for i, (pattern, _) in enumerate(self.pairs) if leaf.matches(pattern, path))
        return next(winners, None)

    def _idle_rule_findings(
        self, index: int, where: str, leaves: Mapping[str, ParamLeaf]
    ) -> list[Finding]:
        """Explains why the rule `index` decides no parameter: unused or shadowed.

        None for a catch-all at the end. `where`: the rule, as text.
        """
        pattern = self.pairs[index][0]
        matched = [path for path, leaf in leaves.items() if leaf.matches(pattern, path)]
        if not matched:
            text = f"matches no parameter; {did_you_mean(pattern_name(pattern), leaves)}"
            return [Finding("unused rule", where, text)]
        if index == len(self.pairs) - 1 and len(matched) == len(leaves):
            return []  # the last rule of many tables, for whatever the others leave
        first = leaves[matched[0]]
        earlier = next(pattern_name(p) for p, _ in self.pairs if first.matches(p, matched[0]))
        text = f"all it matches ('{matched[0]}', …) is taken by '{earlier}'; put it before"
        return [Finding("shadowed rule", where, text)]

    def _misfits(
        self, source: str, path: str, spec: PartitionSpec, leaf: ParamLeaf, mesh: Mesh
    ) -> list[Finding]:
        """Calls `misfit_findings` for a spec, but leaves out dims that are stored padded."""
        padded = range(leaf.stacked, len(leaf.shape)) if self.pads else ()
        return misfit_findings(source, path, spec, leaf, mesh, self.axes, padded)

    def _dropped_findings(self, where: str, assigned: Assigned, mesh: Mesh) -> list[Finding]:
        """Reports the unknown and repeated axes among those that a rule drops.

        `where`: the rule, as text; `assigned`: its spec, and what was dropped.
        """
        known = [*mesh.axis_names, *dict(self.table), FSDP]
        findings = []
        for drop in assigned.dropped:
            finding = dropped_finding(drop, where, known)
            if drop.kind == "unknown axis":
                text = f"{finding.text} (the mesh has {mesh.axis_names}); "
                text += f"logical_axes={{'{drop.name}': None}} leaves its dim unsharded"
                finding = replace(finding, text=text)
            if drop.kind != "missing axis":
                findings.append(finding)
        return findings


class RuleSettings(TypedDict, total=False):
    """Optional arguments of `partition_specs`, which documents them."""

    logical_axes: LogicalAxes | None
    min_size: int
    strict: bool


def partition_specs(
    params: PyTree,
    mesh: Mesh | AbstractMesh,
    rules: Sequence[Rule] | Mapping[Pattern, Spec] = (),
    *,
    logical_axes: LogicalAxes | None = None,
    min_size: int = MIN_SIZE,
    strict: bool = False,
    axes: str | tuple[str, ...] | None = None,
) -> PyTree:
    """Chooses a PartitionSpec for every leaf of `params`, in the same tree.

    Works on Flax NNX states, Linen variables (boxed or not) and any other tree of things with shape
    and dtype, and on any mesh: its axis names and sizes are all that is used. The specs of a tree
    with boxes stand in place of the boxes, as in Flax's `get_partition_spec`.

    Args:
        params: arrays, or shapes from `jax.eval_shape`.
        mesh: a Mesh, or an AbstractMesh, with axes of any type.
        rules: ordered (pattern, spec) pairs, or a dict, as the module describes them. Tables of
            paths of other trainers are rules. Without, annotations and the heuristic decide.
        logical_axes: what the names in rules and annotations stand for: a dict, or a table such as
            Flax's `logical_axis_rules`.
        min_size: parameters with fewer elements (of one layer) stay replicated unless a rule or
            an annotation names them.
        strict: a parameter that no rule and no annotation matches is an error.
        axes: the mesh axes that `fsdp` and the heuristic shard along. By default, as under
            `full_shard`, the one named `data` or `fsdp`, else the only one of size above 1; and
            `replica`, if the mesh has it.

    Raises:
        ValueError: the rules do not fit; every finding of the lint is in the message.

    Warns:
        ReplicationWarning: parameters that no dim divides stay replicated.

    Example:
        >>> params = {"kernel": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
        >>> tuple(fsdp.partition_specs(params, mesh, {"kernel": ("fsdp", None)})["kernel"])
        ('data',)
    """
    chosen, mesh = make_rules(
        mesh, rules, logical_axes=logical_axes, min_size=min_size, strict=strict, axes=axes
    )
    placements = chosen.place(params, mesh)
    missed = [path for path, placement in placements.items() if placement.missed_shards > 1]
    if missed:
        path = missed[0]
        text = f"replicated in place of sharded: '{path}'"
        text += f" and {len(missed) - 1} more parameters: " if missed[1:] else ": "
        text += f"{placements[path].reason}; fully_shard pads what it stores, PartitionSpecs "
        text += "cannot: pad the parameter in the model, or shard along fewer devices"
        warnings.warn(text, ReplicationWarning, stacklevel=2)
    return map_with_path(lambda path, _: placements[path].spec, params, is_leaf=is_box)


def lint(
    params: PyTree,
    mesh: Mesh | AbstractMesh,
    rules: Sequence[Rule] | Mapping[Pattern, Spec] = (),
    *,
    axes: str | tuple[str, ...] | None = None,
    **settings: Unpack[RuleSettings],
) -> list[Finding]:
    """Lists all that `partition_specs`, with these arguments, would refuse; empty if all fits.

    Example:
        >>> params = {"kernel": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
        >>> [finding.kind for finding in fsdp.lint(params, mesh, {"kernl": ("fsdp",)})]
        ['unused rule']
    """
    chosen, mesh = make_rules(mesh, rules, axes=axes, **settings)
    return chosen.lint(read_leaves(params), mesh)


def make_rules(
    mesh: Mesh | AbstractMesh,
    rules: Sequence[Rule] | Mapping[Pattern, Spec] = (),
    *,
    axes: str | tuple[str, ...] | None = None,
    **settings: Unpack[RuleSettings],
) -> tuple[Rules, Mesh]:
    """Makes (Rules, mesh) for arguments of `partition_specs`, with its default for `axes`.

    Raises ValueError: not a mesh; no `axes`, and the mesh does not say which; malformed rules.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ArgumentError(
            "not a mesh",
            where="mesh",
            got=type(mesh).__name__,
            fix="partition_specs(params, mesh, rules), with jax.make_mesh((n,), ('fsdp',)) for one",
        )
    if axes is None:
        along = shard_axes(mesh, default_data_axes(mesh, (REPLICA,), where="axes"), (REPLICA,))
    else:
        along = named_axes("axes", axes, mesh.axis_names)
    return Rules(rules, **settings, axes=along), cast(Mesh, mesh)
