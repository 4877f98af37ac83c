"""Path rules and the size heuristic: a PartitionSpec for every parameter, and the reason for it.

Usable alone: `partition_specs(abstract_params, rules, mesh)` needs no trainer and no Layout.

A rule is `(pattern, spec)`. The pattern is a regular expression searched in the slash-joined path
(`blocks/3/attn/qkv/kernel`); the first rule that matches wins. The spec is a PartitionSpec, or a
tuple of logical axis names that `logical_axes` maps to mesh axes. The name `fsdp` always stands for
the axes that the strategy shards along. Behind the rules stand Flax's own logical-axis annotations,
and behind those the heuristic: the largest dim that divides, never a stacked layer dim, nothing
below `min_size` elements.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from fsdp_jax.errors import did_you_mean, message
from fsdp_jax.sharding.mesh import DATA, axes_of, shards_of
from fsdp_jax.tree import PyTree, flatten, map_with_path

FSDP = "fsdp"
MIN_SIZE = 2**14
HEURISTIC = "heuristic"
Spec = PartitionSpec | tuple[str | None, ...]
Rule = tuple[str, Spec]
Axis = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Placement:
    """Where one array lies, which rule said so, and why; `undivided`: the parts it would have if a
    dim divided.
    """

    spec: PartitionSpec
    rule: str
    reason: str
    undivided: int = 1


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a set of rules."""

    kind: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.text}"


class ReplicationWarning(UserWarning):
    """A large array stays whole on every device though the strategy would shard it."""


@dataclass(frozen=True)
class Rules:
    """A set of rules and the settings of what stands behind them.

    Attributes:
        rules: ordered (pattern, spec) pairs.
        logical_axes: logical name -> mesh axis, several axes, or None.
        min_size: parameters with fewer elements (of one layer) stay replicated unless a rule names
            them.
        strict: a parameter that no rule and no annotation matches is an error.
        axes: the mesh axes that `fsdp` and the heuristic shard along.

    """

    rules: Sequence[Rule] = ()
    logical_axes: Mapping[str, Axis] = field(default_factory=dict)
    min_size: int = MIN_SIZE
    strict: bool = False
    axes: tuple[str, ...] = (DATA,)

    def __post_init__(self) -> None:
        for pattern, spec in self.rules:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    message(f"not a regular expression: {error}", where=f"rule '{pattern}'")
                ) from None
            if isinstance(spec, str) or not isinstance(spec, Iterable):
                fix = f"a PartitionSpec or a tuple: ({spec!r},)"
                raise ValueError(
                    message(
                        "a spec has one entry per dim", where=f"rule '{pattern}'", got=spec, fix=fix
                    )
                )

    def place(
        self, params: PyTree, mesh: Mesh, *, stacked: Mapping[str, int] | None = None
    ) -> dict[str, Placement]:
        """{path: Placement} for every leaf of `params` (anything with shape and dtype).

        Args:
            params: abstract parameters; Flax's partitioning boxes and Variables are read for their
                logical axes.
            mesh: its axis names and sizes are all that is used.
            stacked: path -> number of leading dims that stack layers; found by `stacked_dims` where
                absent.

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
        if names is not None and self._known(names, mesh):
            return Placement(self._resolve(names), "annotation", f"logical axes {names}")
        placement = self._by_size(leaf, mesh)
        if names is None or not any(names):
            return placement
        unmapped = sorted({name for name in names if name and not self._known((name,), mesh)})
        reason = f"{placement.reason}; annotation {names} has no mapping for {unmapped}"
        return Placement(placement.spec, placement.rule, reason, placement.undivided)

    def _by_size(self, leaf: "_Leaf", mesh: Mesh) -> Placement:
        """The largest dim that divides; stacked leading dims are left alone."""
        shape, stacked = leaf.shape, leaf.stacked
        parts = shards_of(mesh, self.axes)
        size = prod(shape[stacked:])
        if len(shape) <= stacked:
            return Placement(PartitionSpec(), HEURISTIC, "a scalar stays whole")
        if size < self.min_size:
            return Placement(
                PartitionSpec(), HEURISTIC, f"{size} elements, below min_size {self.min_size}"
            )
        fitting = [
            dim for dim in range(stacked, len(shape)) if shape[dim] % parts == 0 and shape[dim] > 0
        ]
        split = None if fitting else self._over_dims(shape, stacked, mesh)
        if split is not None:
            over = " and ".join(
                f"dim {dim} in {shards_of(mesh, entry)}" for dim, entry in enumerate(split) if entry
            )
            return Placement(split, HEURISTIC, f"no dim divides by {parts}: {over}")
        if not fitting:
            return Placement(
                PartitionSpec(),
                HEURISTIC,
                f"no dim of {shape} divides by {parts}: replicated",
                parts,
            )
        dim = max(fitting, key=lambda d: (shape[d], -d))
        skipped = f", {stacked} stacked layer dim left whole" if stacked else ""
        spec = PartitionSpec(*[None] * dim, self.axes if len(self.axes) > 1 else self.axes[0])
        return Placement(
            spec, HEURISTIC, f"largest dim that divides by {parts} is dim {dim}{skipped}"
        )

    def _over_dims(self, shape: tuple[int, ...], stacked: int, mesh: Mesh) -> PartitionSpec | None:
        """The mesh axes dealt out to several dims so that each divides, to as few as can be; None
        where none do.
        """
        axes = [axis for axis in self.axes if mesh.shape[axis] > 1]
        deals = product(range(stacked, len(shape)), repeat=len(axes))
        for deal in sorted(deals, key=lambda dims: (len(set(dims)), dims)):
            taken = [
                tuple(a for a, d in zip(axes, deal, strict=True) if d == dim)
                for dim in range(len(shape))
            ]
            if all(
                size % shards_of(mesh, entry) == 0 for size, entry in zip(shape, taken, strict=True)
            ):
                entries = [
                    entry if len(entry) > 1 else entry[0] if entry else None for entry in taken
                ]
                return PartitionSpec(*entries[: max(deal) + 1])
        return None

    def lint(
        self, params: PyTree, mesh: Mesh, *, stacked: Mapping[str, int] | None = None
    ) -> list[Finding]:
        """Unused and shadowed rules, unknown and repeated axes, wrong ranks, indivisible dims,
        unmatched leaves.
        """
        self._check_axes(mesh)
        leaves = _leaves(params, stacked)
        winners = {
            path: next((i for i, (p, _) in enumerate(self.rules) if re.search(p, path)), None)
            for path in leaves
        }
        findings: list[Finding] = []
        for index, (pattern, spec) in enumerate(self.rules):
            unknown = self._unknown_axes(spec, mesh)
            findings += [Finding("unknown axis", f"rule '{pattern}'", text) for text in unknown]
            won = [path for path, winner in winners.items() if winner == index]
            if not won:
                findings.append(self._never_wins(index, leaves))
            if not unknown:
                findings += [
                    f
                    for path in won
                    for f in self._misfit(f"rule '{pattern}'", path, spec, leaves[path], mesh)
                ]
        for path, winner in winners.items():
            names = leaves[path].names
            annotated = names is not None and self._known(names, mesh)
            if winner is None and annotated:
                findings += self._misfit("annotation", path, names or (), leaves[path], mesh)
            if winner is None and not annotated and self.strict:
                findings.append(
                    Finding(
                        "unmatched leaf", path, "no rule matches (strict); add one, or strict=False"
                    )
                )
        return findings

    def _never_wins(self, index: int, paths: Iterable[str]) -> Finding:
        pattern = self.rules[index][0]
        matched = [path for path in paths if re.search(pattern, path)]
        if not matched:
            return Finding(
                "unused rule",
                f"rule '{pattern}'",
                f"matches no parameter; {did_you_mean(pattern, paths)}",
            )
        earlier = next(p for p, _ in self.rules if re.search(p, matched[0]))
        text = f"all it matches ('{matched[0]}', …) is taken by '{earlier}'; put it before"
        return Finding("shadowed rule", f"rule '{pattern}'", text)

    def _check_axes(self, mesh: Mesh) -> None:
        """The settings themselves may only speak of axes that the mesh has."""
        known = (*mesh.axis_names, FSDP)
        mapped = {
            f"logical_axes['{name}']": axes_of(entry) for name, entry in self.logical_axes.items()
        }
        for where, axes in {"axes": self.axes, **mapped}.items():
            for axis in axes:
                if axis not in known:
                    fix = did_you_mean(axis, known)
                    raise ValueError(
                        message(
                            f"the mesh has no axis '{axis}'",
                            where=where,
                            expected=mesh.axis_names,
                            fix=fix,
                        )
                    )

    def _unknown_axes(self, spec: Spec, mesh: Mesh) -> list[str]:
        known = [*mesh.axis_names, *self.logical_axes, FSDP]
        names = [name for entry in spec for name in axes_of(entry)]
        return [
            f"'{name}' is no mesh or logical axis; {did_you_mean(name, known)}"
            for name in names
            if name not in known
        ]

    def _misfit(
        self, source: str, path: str, spec: Spec, leaf: "_Leaf", mesh: Mesh
    ) -> list[Finding]:
        """What is wrong with laying this leaf out so."""
        resolved, shape = self._resolve(spec), leaf.shape
        if len(resolved) > len(shape):
            text = f"{source} has {len(resolved)} entries for shape {shape}: shorten the spec or narrow the pattern"
            return [Finding("rank mismatch", path, text)]
        repeated = [
            a for a, n in Counter(a for entry in resolved for a in axes_of(entry)).items() if n > 1
        ]
        found = [
            Finding("repeated axis", path, f"{source} uses '{axis}' for two dims")
            for axis in repeated
        ]
        for dim, entry in enumerate(resolved):
            parts = shards_of(mesh, entry)
            if shape[dim] % parts:
                others = [d for d, size in enumerate(shape) if size % parts == 0]
                fix = (
                    f"did you mean dim {others[0]}?"
                    if others
                    else "no dim divides: leave it to the heuristic, or pad"
                )
                text = (
                    f"{source} splits dim {dim} of {shape} in {parts}, which does not divide; {fix}"
                )
                found.append(Finding("indivisible dim", path, text))
        return found

    def _known(self, names: Iterable[str | tuple[str, ...] | None], mesh: Mesh) -> bool:
        known = {*mesh.axis_names, *self.logical_axes, FSDP}
        return all(name in known for entry in names for name in axes_of(entry))

    def _resolve(self, spec: Iterable[Axis]) -> PartitionSpec:
        """Logical names to mesh axes; `fsdp` to the strategy's axes."""
        entries = []
        for entry in spec:
            named = (
                axis
                for name in axes_of(entry)
                for axis in axes_of(self.logical_axes.get(name, name))
            )
            axes = tuple(
                axis for name in named for axis in (self.axes if name == FSDP else (name,))
            )
            entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)


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
    """A PartitionSpec for every leaf of `params`, in the same tree.

    Works on Flax NNX states, Linen variables (boxed or not) and any other tree of things with shape
    and dtype. On a mesh of your own, `axes` names those that `fsdp` and the heuristic shard along;
    see `Rules` for the rest.

    Raises:
        ValueError: the rules do not fit; every finding of the lint is in the message.

    """
    placements = Rules(rules, logical_axes or {}, min_size, strict, axes).place(params, mesh)
    return map_with_path(lambda path, _: placements[path].spec, params, is_leaf=_is_box)


def lint(params: PyTree, rules: Sequence[Rule], mesh: Mesh, **settings: Any) -> list[Finding]:
    """What `partition_specs` would refuse, as a list; empty where the rules fit."""
    return Rules(rules, **settings).lint(params, mesh)


def stacked_dims(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """{path: 1} for parameters that look like layers stacked along dim 0, as a layer scan wants
    them.

    A subtree is a stack where every leaf has the same leading dim, some leaf has three dims or
    more, and some dim is as large as the leading one: layers are fewer than features. What it takes
    for a stack by mistake is sharded along another dim, or stays whole where it is small without
    the leading one.
    """
    found: dict[str, int] = {}

    def visit(prefix: tuple[str, ...], inside: dict[tuple[str, ...], tuple[int, ...]]) -> None:
        leading = {shape[0] if shape else 0 for shape in inside.values()}
        ranks = {len(shape) for shape in inside.values()}
        features = max((size for shape in inside.values() for size in shape[1:]), default=0)
        if len(inside) > 1 and max(ranks) >= 3 and len(leading) == 1 and features >= max(leading):
            found.update({"/".join(parts): 1 for parts in inside})
            return
        children: dict[str, dict[tuple[str, ...], tuple[int, ...]]] = {}
        for parts, shape in inside.items():
            if len(parts) > len(prefix) + 1:
                children.setdefault(parts[len(prefix)], {})[parts] = shape
        for name, child in children.items():
            visit((*prefix, name), child)

    visit((), {tuple(path.split("/")): tuple(shape) for path, shape in shapes.items()})
    return found


@dataclass(frozen=True)
class _Leaf:
    """What the rules look at in one parameter."""

    shape: tuple[int, ...]
    names: tuple[Any, ...] | None
    stacked: int


def _leaves(params: PyTree, stacked: Mapping[str, int] | None) -> dict[str, _Leaf]:
    boxes = flatten(params, is_leaf=_is_box)
    arrays = {
        path: getattr(box, "value", box) if hasattr(box, "names") else box
        for path, box in boxes.items()
    }
    shapes = {path: tuple(array.shape) for path, array in arrays.items()}
    stacked = stacked_dims(shapes) if stacked is None else stacked
    leaves = {}
    for path in arrays:
        names, extra = logical_names(boxes[path]), stacked.get(path, 0)
        if names is not None and len(names) == len(shapes[path]) - extra:
            names = (None,) * extra + names  # annotated before the layers were stacked
        leaves[path] = _Leaf(shapes[path], names, extra)
    return leaves


def logical_names(leaf: Any) -> tuple[Any, ...] | None:
    """The names that `nnx.with_partitioning` or `nn.with_partitioning` put on a parameter."""
    if hasattr(leaf, "get_metadata"):  # nnx.Variable
        metadata = leaf.get_metadata()
        names = next(
            (
                metadata[k]
                for k in ("out_sharding", "sharding_names", "sharding")
                if metadata.get(k)
            ),
            None,
        )
    else:
        names = getattr(leaf, "names", None)  # linen.Partitioned
    return tuple(names) if isinstance(names, tuple | list | PartitionSpec) else None


def _is_box(leaf: Any) -> bool:
    return hasattr(leaf, "get_metadata") or hasattr(leaf, "names")
