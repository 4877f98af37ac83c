"""What is wrong with a set of rules: a finding for each rule or parameter, and the fix."""

from collections import Counter
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass

from jax.sharding import Mesh, PartitionSpec

from fsdp_jax.errors import did_you_mean, join_fixes
from fsdp_jax.sharding.logical_axes import Dropped
from fsdp_jax.sharding.mesh import axes_of, shards_of
from fsdp_jax.sharding.param_leaves import ParamLeaf


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a set of rules."""

    kind: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.text}"


def dropped_finding(drop: Dropped, where: str, known: Iterable[str]) -> Finding:
    """Reports a dropped name or axis, with the one of the known names that may be meant.

    `where`: the rule or the parameter that names it.
    """
    text = str(drop)
    if drop.kind == "unknown axis" and not drop.axes:
        close = did_you_mean(drop.name, known)
        text += f"; {close}" if close.endswith("?") else ""  # otherwise it lists them all
    return Finding(drop.kind, where, text)


def repeated_name_findings(path: str, leaf: ParamLeaf) -> list[Finding]:
    """Reports a name that an annotation gives to two dims: Flax refuses it too."""
    counts = Counter(name for entry in leaf.names or () for name in axes_of(entry))
    repeated = [name for name, count in counts.items() if count > 1]
    if not repeated:
        return []
    text = f"annotation {leaf.names} has '{repeated[0]}' twice, and a name stands for one dim; "
    text += f"give the other dim a name of its own, or add a rule: ('{path}$', (None, \"fsdp\"))"
    return [Finding("repeated name", path, text)]


def misfit_findings(
    source: str,
    path: str,
    spec: PartitionSpec,
    leaf: ParamLeaf,
    mesh: Mesh,
    axes: Collection[str],
    padded: Container[int],
) -> list[Finding]:
    """Reports how a spec does not fit a leaf: too many entries, indivisible dims.

    `source`: the rule that the spec is of, as text, or "annotation". Dims that may be `padded`,
    and are as large as their shards are many, need not be divisible by mesh axes among `axes`.
    """
    shape = leaf.shape
    # Each finding ends with the rule that would let this parameter pass.
    overrule = f"a rule before it replicates this one alone: ('{path}$', None)"
    if source == "annotation":
        overrule = f"a rule replicates it: ('{path}$', None)"
    if len(spec) > len(shape):
        text = f"{source} has {len(spec)} entries for shape {shape}: "
        text += join_fixes("shorten the spec", overrule)
        return [Finding("rank mismatch", path, text)]
    findings = []
    for dim, entry in enumerate(spec):
        # A dim is divisible by its shards, or is padded to be, if it has an element for each.
        shards = shards_of(mesh, entry)
        may_pad = dim in padded and set(axes_of(entry)) <= set(axes)
        if may_pad and shape[dim] >= shards:
            continue
        if shape[dim] % shards:
            # Guess the fix: the dim that was meant, or the heuristic.
            divisible = [d for d, size in enumerate(shape) if size % shards == 0]
            fix = "no dim is divisible: leave it to the heuristic"
            if not padded:
                fix += ", or pad"
            if may_pad:
                fix = "it is smaller than its shards are many: leave it to the heuristic"
            if divisible:
                fix = f"did you mean dim {divisible[0]}?"
            split = f"{source} splits dim {dim} of {shape} in {shards}"
            text = f"{split}, by which it is not divisible; {join_fixes(fix, overrule)}"
            findings.append(Finding("indivisible dim", path, text))
    return findings
