"""The contract as a view: what each parameter sends along each mesh axis, and what is declared."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from fsdp_jax.contract.attribution import Account, Attribution, by_user_axes
from fsdp_jax.contract.expected import ExpectedTraffic
from fsdp_jax.contract.violations import Violation
from fsdp_jax.hlo.collectives import Collective
from fsdp_jax.sharding.layout import Leaf
from fsdp_jax.sharding.mesh import MeshAxes
from fsdp_jax.views.bars import BarRow, Bars, Kind, collapsed

Sizes = Counter[str]
"""{kind of bar: bytes}"""


def bars_by_parameter(
    axes: MeshAxes,
    leaves: Mapping[str, Leaf],
    expected: Sequence[ExpectedTraffic],
    collectives: Sequence[Collective],
    violations: Iterable[Violation],
    *,
    summary: str,
    cards: Sequence[tuple[str, str, str]],
    notes: Sequence[str],
) -> Bars:
    """Makes a bar for each parameter, of the bytes that a device sends for it in a step.

    `leaves`: of the parameters, by path; those of other models of the step too. Layers that are
    alike share a bar. Whether bytes are hidden is known of accelerators' programs alone. What
    serves no parameter, and what the model sends along its own axes, are bars too.
    """
    own, model = by_user_axes(collectives, axes)
    kinds, kind_names = _kinds(axes, own + model)
    rest = _sum_by_kind(kind_names, own)
    attribution = Attribution(expected, own, leaves)
    bars = list(_parameter_bars(leaves, attribution, kind_names, violations))
    for bar in bars:
        rest.subtract(bar.parts)
    # What is left: of no parameter, and the model's own.
    left = {kind: size for kind, size in rest.items() if size > 0}
    others = {
        "no parameter": left,
        "the model, along its own axes": _sum_by_kind(kind_names, model),
    }
    bars = collapsed(bars)
    has_differences = any(bar.cells[1] for bar in bars)
    columns = ("sends", "differs")[: 1 + has_differences]
    bars += [BarRow(name, parts, None, ("", "")) for name, parts in others.items() if parts]
    return Bars(
        summary=summary,
        kinds=kinds,
        bars=[
            BarRow(bar.name, bar.parts, bar.expected, bar.cells[: len(columns)], bar.count)
            for bar in bars
        ],
        size="sent",
        expected="declared",
        columns=columns,
        notes=notes,
        cards=cards,
        axes=axes.shape,
    )


def _parameter_bars(
    leaves: Mapping[str, Leaf],
    attribution: Attribution,
    kind_names: Mapping[tuple[str, bool], str],
    violations: Iterable[Violation],
) -> Iterator[BarRow]:
    """Yields a bar for each parameter, which names its operations and what differs."""
    # Each parameter, with the accounts of its gathers and of its gradient.
    accounts: dict[str, list[Account]] = defaultdict(list)
    for account in attribution.accounts:
        accounts[account.path].append(account)
    differences: dict[str, set[str]] = defaultdict(set)
    for violation in violations:
        differences[violation.path].add(violation.kind)
    for path, both in accounts.items():
        leaf = leaves.get(path)
        parts: Sizes = Counter()
        for account in both:
            for sent in account.sent:
                parts[kind_names[sent.axis, sent.hidden]] += sent.bytes
        declared = sum(account.declared_bytes for account in both)
        different = ", ".join(sorted(differences[path]))
        yield BarRow(
            path,
            parts,
            declared,
            (_operations(both), different),
            count=1 if leaf is None else prod(leaf.shape[: leaf.stacked]),
            alike=path if leaf is None else (leaf.shape, str(leaf.dtype), declared),
        )


def _kinds(
    axes: MeshAxes, collectives: Iterable[Collective]
) -> tuple[list[Kind], Mapping[tuple[str, bool], str]]:
    """Lists the kinds of bars, and names them by (mesh axes, whether it is hidden).

    A mesh axis has a colour, its hidden bytes a paler one.
    """
    is_known = axes.mesh.devices.flat[0].platform != "cpu"
    used = dict.fromkeys(each.axis for each in collectives)
    # the axes in the mesh's order, as other views colour them
    order = [*axes.shape]
    kinds: dict[str, Kind] = {}
    names = {}
    several = 0  # colours of what is sent along several axes at once
    for axis in sorted(used):
        first = axis.split("+")[0]
        color = order.index(first) if first in order else None
        if "+" in axis:
            color = len(order) + several
            several += 1
        for hidden in (False, True):
            name = f"along {axis}"
            if is_known:
                name = f"{axis}, {'hidden' if hidden else 'exposed'}"
            kinds.setdefault(name, Kind(name, color, pale=hidden))
            names[axis, hidden] = name
    return list(kinds.values()), names


def _sum_by_kind(names: Mapping[tuple[str, bool], str], collectives: Iterable[Collective]) -> Sizes:
    """Adds up the bytes of collectives by the kind of their bar."""
    sizes: Sizes = Counter()
    for each in collectives:
        sizes[names[each.axis, bool(each.hidden)]] += each.bytes
    return sizes


def _operations(accounts: Iterable[Account]) -> str:
    """Lists the operations that serve a parameter, by dtype."""
    operations: dict[str, dict[str, None]] = {}
    for account in accounts:
        for sent in account.sent:
            operations.setdefault(sent.dtype, {})[sent.op] = None
    return "; ".join(f"{', '.join(ops)} {dtype}" for dtype, ops in operations.items())
