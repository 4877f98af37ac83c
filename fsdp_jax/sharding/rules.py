"""Path rules and the size heuristic: a PartitionSpec for every parameter, and the reason for it.

Usable alone: `partition_specs(abstract_params, rules, mesh)` needs no trainer and no Layout.

A rule is `(pattern, spec)`. The pattern is a regular expression searched in the slash-joined path
(`blocks/3/attn/qkv/kernel`); the first rule that matches wins. The spec is a PartitionSpec, or a
tuple of logical axis names that `logical_axes` maps to mesh axes. The name `fsdp` always stands for
the axes that the strategy shards along. Where no rule matches, Flax's own logical-axis annotations
count, and where there are none, the heuristic: the largest divisible dim, never a stacked layer
dim, nothing below `min_size` elements.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product, zip_longest
from math import prod
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from fsdp_jax.errors import check_regexes, did_you_mean, message
from fsdp_jax.sharding.mesh import DATA, FSDP, axes_of, entry_of, shards_of, spec_of
from fsdp_jax.tree import SEPARATOR, PyTree, flatten, map_with_path

MIN_SIZE = 2**14
HEURISTIC = "heuristic"
Spec = PartitionSpec | tuple[str | None, ...]
Rule = tuple[str, Spec]
Axis = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Placement:
    """How one array is sharded, by which rule, and why.

    `missed_shards`: the shard count it would have if a dim were divisible; 1 if it is sharded or
    small.
    """

    spec: PartitionSpec
    rule: str
    reason: str
    missed_shards: int = 1


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a set of rules."""

    kind: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.text}"


class ReplicationWarning(UserWarning):
    """A large array is replicated though the strategy would shard it."""


@dataclass(frozen=True)
class Rules:
    """Ordered rules, and what applies where none of them matches.

    Attributes:
        rules: ordered (pattern, spec) pairs.
        logical_axes: logical name -> mesh axis, several axes, or None.
        min_size: parameters with fewer elements (of one layer) stay replicated unless a rule names
            them.
        strict: a parameter that no rule and no annotation matches is an error.
        axes: the mesh axes that `fsdp` and the heuristic shard along.
        model_axes: the model's own mesh axes; an annotation along these alone is completed by the
            heuristic along `axes`.

    """

    rules: Sequence[Rule] = ()
    logical_axes: Mapping[str, Axis] = field(default_factory=dict)
    min_size: int = MIN_SIZE
    strict: bool = False
    axes: tuple[str, ...] = (DATA,)
    model_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern, spec in self.rules:
            where = f"rule '{pattern}'"
            check_regexes([pattern], where)
            if isinstance(spec, str) or not isinstance(spec, Iterable):
                fix = f"a PartitionSpec or a tuple: ({spec!r},)"
                what = "a spec has one entry per dim"
                raise ValueError(message(what, where=where, got=spec, fix=fix))

    def place(
        self, params: PyTree, mesh: Mesh, *, stacked: Mapping[str, int] | None = None
    ) -> dict[str, Placement]:
        """Returns {path: Placement} for every leaf of `params` (anything with shape and dtype).

        Args:
            params: abstract parameters; Flax's partitioning boxes and Variables are read for their
                logical axes.
            mesh: its axis names and sizes are all that is used.
            stacked: path -> number of leading dims that stack layers; by default as `stacked_dims`
                detects them.

        Raises:
            ValueError: the mesh lacks an axis to shard along; all that `lint` finds, at once.

        """
        findings = self.lint(params, mesh, stacked=stacked)
        if findings:
            text = "\n".join(f"  {finding}" for finding in findings)
            raise ValueError(f"the sharding rules do not fit this model ({len(findings)}):\n{text}")
        leaves = _leaves(params, stacked)
        return {path: self._place(path, leaf, mesh) for path, leaf in leaves.items()}

    def _place(self, path: str, leaf: "_Leaf", mesh: Mesh) -> Placement:
        for pattern, spec in self.rules:
            if re.search(pattern, path):
                return Placement(self._resolve(spec), pattern, "first rule that matches")
        names = leaf.names
        if names is not None and not self._unknown(names, mesh):
            return self._annotated(leaf, self._resolve(names), mesh)
        spec, reason, missed = self._by_size(leaf, mesh)
        if names is not None and any(names):
            unmapped = sorted({name for name in names if name and self._unknown((name,), mesh)})
            reason += f"; annotation {names} has no mapping for {unmapped}"
        return Placement(spec, HEURISTIC, reason, missed)

    def _annotated(self, leaf: "_Leaf", spec: PartitionSpec, mesh: Mesh) -> Placement:
        """Returns the placement by an annotation; one of the model's own axes alone is completed.

        The heuristic shards what is left of the array on each device along `axes`.
        """
        reason = f"logical axes {leaf.names}"
        used = {axis for entry in spec for axis in axes_of(entry)}
        if not used or not used <= set(self.model_axes):
            return Placement(spec, "annotation", reason)
        entries = [*spec, *[None] * (len(leaf.shape) - len(spec))]
        shards = [shards_of(mesh, entry) for entry in entries]
        if any(size % count for size, count in zip(leaf.shape, shards, strict=True)):
            return Placement(spec, "annotation", reason)  # the lint refuses it
        local = tuple(size // count for size, count in zip(leaf.shape, shards, strict=True))
        free = [dim for dim, entry in enumerate(entries) if entry is None]
        added, why, missed = self._by_size(replace(leaf, shape=local), mesh, prefer=free)
        both = [
            entry_of((*axes_of(own), *axes_of(more))) for own, more in zip_longest(entries, added)
        ]
        return Placement(spec_of(both), "annotation", f"{reason}; then {why}", missed)

    def _by_size(
        self, leaf: "_Leaf", mesh: Mesh, prefer: Collection[int] = ()
    ) -> tuple[PartitionSpec, str, int]:
        """Returns (spec, reason, missed shards) by the size heuristic; never a stacked dim.

        `prefer`: dims that come before others, however small.
        """
        shape = leaf.shape
        shards = shards_of(mesh, self.axes)
        size = prod(shape[leaf.stacked :])
        if len(shape) <= leaf.stacked:
            return PartitionSpec(), "a scalar is replicated", 1
        if size < self.min_size:
            return PartitionSpec(), f"{size} elements, below min_size {self.min_size}", 1

        # One dim takes all axes if any can ...
        dims = range(leaf.stacked, len(shape))
        divisible = [dim for dim in dims if shape[dim] % shards == 0 and shape[dim] > 0]
        if divisible:
            dim = max(divisible, key=lambda d: (d in prefer, shape[d], -d))
            reason = f"largest dim divisible by {shards} is dim {dim}"
            if leaf.stacked:
                reason += f", {leaf.stacked} stacked layer dim not sharded"
            return PartitionSpec(*[None] * dim, entry_of(self.axes)), reason, 1

        # ... or else several dims share them.
        spec = self._over_dims(shape, leaf.stacked, mesh)
        if spec is None:
            reason = f"no dim of {shape} is divisible by {shards}: replicated"
            return PartitionSpec(), reason, shards
        parts = [(dim, shards_of(mesh, entry)) for dim, entry in enumerate(spec) if entry]
        over = " and ".join(f"dim {dim} in {count}" for dim, count in parts)
        return spec, f"no dim is divisible by {shards}: {over}", 1

    def _over_dims(self, shape: tuple[int, ...], stacked: int, mesh: Mesh) -> PartitionSpec | None:
        """Returns a spec of the mesh axes over as few dims as possible; None if none fits."""
        axes = [axis for axis in self.axes if mesh.shape[axis] > 1]
        choices = product(range(stacked, len(shape)), repeat=len(axes))  # a dim for each axis
        for dims in sorted(choices, key=lambda dims: (len(set(dims)), dims)):
            axes_by_dim = [
                tuple(axis for axis, d in zip(axes, dims, strict=True) if d == dim)
                for dim in range(len(shape))
            ]
            shards = [shards_of(mesh, entry) for entry in axes_by_dim]
            if all(size % count == 0 for size, count in zip(shape, shards, strict=True)):
                return spec_of(map(entry_of, axes_by_dim))
        return None

    def lint(
        self, params: PyTree, mesh: Mesh, *, stacked: Mapping[str, int] | None = None
    ) -> list[Finding]:
        """Returns all that is wrong: rules, axes, ranks and dims that do not fit the parameters.

        Unused and shadowed rules, unknown and repeated axes, wrong ranks, indivisible dims, and
        with `strict` unmatched leaves.
        """
        self._check_axes(mesh)
        leaves = _leaves(params, stacked)
        winners = {path: self._first_match(path) for path in leaves}
        findings: list[Finding] = []

        # Rules: their axes, whether they win anywhere, and whether they fit where they win.
        for index, (pattern, spec) in enumerate(self.rules):
            where = f"rule '{pattern}'"
            known = self._known_axes(mesh)
            unknown = self._unknown(spec, mesh)
            for name in unknown:
                text = f"'{name}' is neither a mesh axis nor a logical axis; "
                text += did_you_mean(name, known)
                findings.append(Finding("unknown axis", where, text))
            matched = [path for path, winner in winners.items() if winner == index]
            if not matched:
                findings.append(self._never_wins(index, leaves))
            if not unknown:
                for path in matched:
                    findings += self._misfits(where, path, spec, leaves[path], mesh)

        # Parameters that no rule wins: their annotations, which `strict` requires.
        for path, leaf in leaves.items():
            if winners[path] is not None:
                continue
            if leaf.names is not None and not self._unknown(leaf.names, mesh):
                findings += self._misfits("annotation", path, leaf.names, leaf, mesh)
            elif self.strict:
                text = "no rule matches (strict); add one, or strict=False"
                findings.append(Finding("unmatched leaf", path, text))
        return findings

    def _first_match(self, path: str) -> int | None:
        matches = (i for i, (pattern, _) in enumerate(self.rules) if re.search(pattern, path))
        return next(matches, None)

    def _never_wins(self, index: int, paths: Iterable[str]) -> Finding:
        pattern = self.rules[index][0]
        where = f"rule '{pattern}'"
        matched = [path for path in paths if re.search(pattern, path)]
        if not matched:
            text = f"matches no parameter; {did_you_mean(pattern, paths)}"
            return Finding("unused rule", where, text)
        earlier = next(p for p, _ in self.rules if re.search(p, matched[0]))
        text = f"all it matches ('{matched[0]}', …) is taken by '{earlier}'; put it before"
        return Finding("shadowed rule", where, text)

    def _check_axes(self, mesh: Mesh) -> None:
        """Raises ValueError where `axes` or `logical_axes` name an axis that the mesh lacks."""
        known = (*mesh.axis_names, FSDP)
        named = {"axes": self.axes}
        named |= {f"logical_axes['{n}']": axes_of(entry) for n, entry in self.logical_axes.items()}
        for where, axes in named.items():
            for axis in axes:
                if axis not in known:
                    what = f"the mesh has no axis '{axis}'"
                    fix = did_you_mean(axis, known)
                    raise ValueError(message(what, where=where, expected=mesh.axis_names, fix=fix))

    def _known_axes(self, mesh: Mesh) -> list[str]:
        return [*mesh.axis_names, *self.logical_axes, FSDP]

    def _unknown(self, spec: Iterable[Axis], mesh: Mesh) -> list[str]:
        known = self._known_axes(mesh)
        return [name for entry in spec for name in axes_of(entry) if name not in known]

    def _misfits(
        self, source: str, path: str, spec: Iterable[Axis], leaf: "_Leaf", mesh: Mesh
    ) -> list[Finding]:
        """Returns what prevents this leaf from being sharded by this spec."""
        resolved = self._resolve(spec)
        shape = leaf.shape
        if len(resolved) > len(shape):
            text = (
                f"{source} has {len(resolved)} entries for shape {shape}: "
                "shorten the spec or narrow the pattern"
            )
            return [Finding("rank mismatch", path, text)]
        uses = Counter(axis for entry in resolved for axis in axes_of(entry))
        findings = [
            Finding("repeated axis", path, f"{source} uses '{axis}' for two dims")
            for axis, count in uses.items()
            if count > 1
        ]
        for dim, entry in enumerate(resolved):
            shards = shards_of(mesh, entry)
            if shape[dim] % shards:
                divisible = [d for d, size in enumerate(shape) if size % shards == 0]
                fix = "no dim is divisible: leave it to the heuristic, or pad"
                if divisible:
                    fix = f"did you mean dim {divisible[0]}?"
                split = f"{source} splits dim {dim} of {shape} in {shards}"
                text = f"{split}, by which it is not divisible; {fix}"
                findings.append(Finding("indivisible dim", path, text))
        return findings

    def _resolve(self, spec: Iterable[Axis]) -> PartitionSpec:
        """Returns the spec with mesh axes in place of logical names and of `fsdp`."""
        entries = []
        for entry in spec:
            axes: list[str] = []
            for name in axes_of(entry):
                for axis in axes_of(self.logical_axes.get(name, name)):
                    axes += self.axes if axis == FSDP else (axis,)
            entries.append(entry_of(axes))
        return spec_of(entries)


def partition_specs(
    params: PyTree,
    rules: Sequence[Rule],
    mesh: Mesh,
    *,
    logical_axes: Mapping[str, Axis] | None = None,
    min_size: int = MIN_SIZE,
    strict: bool = False,
    axes: tuple[str, ...] = (DATA,),
) -> PyTree:
    """Returns a PartitionSpec for every leaf of `params`, in the same tree.

    Works on Flax NNX states, Linen variables (boxed or not) and any other tree of things with shape
    and dtype. On a mesh of your own, `axes` names those that `fsdp` and the heuristic shard along;
    see `Rules` for the rest.

    Raises:
        ValueError: the rules do not fit; every finding of the lint is in the message.

    """
    placements = Rules(rules, logical_axes or {}, min_size, strict, axes).place(params, mesh)
    return map_with_path(lambda path, _: placements[path].spec, params, is_leaf=_is_box)


def lint(params: PyTree, rules: Sequence[Rule], mesh: Mesh, **settings: Any) -> list[Finding]:
    """Returns what `partition_specs` would refuse; an empty list if the rules fit."""
    return Rules(rules, **settings).lint(params, mesh)


def stacked_dims(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Returns {path: 1} for parameters that look like layers stacked along dim 0 for a layer scan.

    A subtree is a stack where every leaf has the same leading dim, some leaf has three dims or
    more, and some dim is as large as the leading one: layers are fewer than features. What it takes
    for a stack by mistake is sharded along another dim, or stays replicated where it is small
    without the leading one.
    """
    stacked: dict[str, int] = {}
    by_parts = {tuple(path.split(SEPARATOR)): tuple(shape) for path, shape in shapes.items()}

    def visit(depth: int, subtree: dict[tuple[str, ...], tuple[int, ...]]) -> None:
        leading = {shape[0] if shape else 0 for shape in subtree.values()}
        rank = max((len(shape) for shape in subtree.values()), default=0)
        features = max((size for shape in subtree.values() for size in shape[1:]), default=0)
        if len(subtree) > 1 and rank >= 3 and len(leading) == 1 and features >= max(leading):
            stacked.update({SEPARATOR.join(parts): 1 for parts in subtree})
            return
        children: dict[str, dict[tuple[str, ...], tuple[int, ...]]] = {}
        for parts, shape in subtree.items():
            if len(parts) > depth + 1:
                children.setdefault(parts[depth], {})[parts] = shape
        for child in children.values():
            visit(depth + 1, child)

    visit(0, by_parts)
    return stacked


@dataclass(frozen=True)
class _Leaf:
    """A parameter, as far as the rules read it."""

    shape: tuple[int, ...]
    names: tuple[Any, ...] | None
    stacked: int


def _leaves(params: PyTree, stacked: Mapping[str, int] | None) -> dict[str, _Leaf]:
    boxes = flatten(params, is_leaf=_is_box)
    shapes = {}
    for path, box in boxes.items():
        array = getattr(box, "value", box) if hasattr(box, "names") else box
        shapes[path] = tuple(array.shape)
    if stacked is None:
        stacked = stacked_dims(shapes)
    leaves = {}
    for path, shape in shapes.items():
        names = logical_names(boxes[path])
        layer_dims = stacked.get(path, 0)
        if names is not None and len(names) == len(shape) - layer_dims:
            names = (None,) * layer_dims + names  # annotated before the layers were stacked
        leaves[path] = _Leaf(shape, names, layer_dims)
    return leaves


def logical_names(leaf: Any) -> tuple[Any, ...] | None:
    """Returns the names that `nnx.with_partitioning` or `nn.with_partitioning` gave a parameter."""
    if hasattr(leaf, "get_metadata"):  # nnx.Variable
        metadata = leaf.get_metadata()
        keys = ("out_sharding", "sharding_names", "sharding")
        names = next((metadata[key] for key in keys if metadata.get(key)), None)
    else:
        names = getattr(leaf, "names", None)  # linen.Partitioned
    return tuple(names) if isinstance(names, tuple | list | PartitionSpec) else None


def _is_box(leaf: Any) -> bool:
    return hasattr(leaf, "get_metadata") or hasattr(leaf, "names")
