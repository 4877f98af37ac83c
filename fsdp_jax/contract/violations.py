"""Compares the traffic that a program sends with the declared, and names the likely causes."""

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np

from fsdp_jax.contract.attribution import (
    IMMATERIAL_BYTES,
    MATERIAL,
    TOLERANCE,
    Account,
    Attribution,
    Sent,
)
from fsdp_jax.contract.expected import ExpectedTraffic
from fsdp_jax.errors import human_bytes
from fsdp_jax.hlo.collectives import Collective
from fsdp_jax.program.primitives import PALLAS_CALL
from fsdp_jax.tree import array_text

MANY = 4  # multiple of the material bytes by which many parameters together may differ
_LOOKUP = re.compile(r"scatter-add|_take")


@dataclass(frozen=True)
class Violation:
    """A difference between the program and the traffic that the layout declares."""

    path: str  # of the parameter; empty for operands that serve none
    what: str  # the difference, in the user's terms
    bytes: int  # sent per step above the declared
    cause: str  # the likely cause, and the fix
    # bytes: more is sent than declared; repeat: more often; dtype: in another dtype; less: hardly
    # anything is sent
    kind: Literal["bytes", "repeat", "dtype", "less"] = "bytes"

    def __str__(self) -> str:
        text = f"{self.path or 'no parameter'}: {self.what}"
        if self.bytes > 0:
            text += f": +{human_bytes(self.bytes)} per step"
        return f"{text}; {self.cause}"


@dataclass(frozen=True)
class PlacementRules:
    """Rules, as text, that shard another dim of parameters that are sharded along their first."""

    lookups: Mapping[int, str]  # features of an embedding table -> rule
    slices: Mapping[tuple[int, ...], str]  # shape of one array of a stack, without ones -> rules

    def advice_for_slice(self, shape: tuple[int, ...]) -> str:
        """Explains an array of this shape that is one of a sharded stack: the cause and the fix."""
        rules = self.slices.get(tuple(size for size in shape if size > 1))
        if rules is None:
            return ""
        return (
            "a stack of such arrays (of experts, say) is sharded along its first dim, and the "
            f"model takes it apart: another dim is sharded by {rules}"
        )


NO_RULES = PlacementRules({}, {})


def traffic_violations(
    expected: Sequence[ExpectedTraffic],
    collectives: Sequence[Collective],
    paths: Container[str],
    *,
    annotated: bool,
    rules: PlacementRules = NO_RULES,
) -> tuple[list[Violation], list[str]]:
    """Compares parameter by parameter; where each is within its tolerance, all together.

    Returns (violations, substitutions: a line each on what XLA sends in place of declared traffic).

    `paths`: of all parameters, also of those that declare nothing; `annotated`: the step is
    partitioned by sharding annotations; otherwise its collectives are explicit, and any activation
    is a violation. `rules`: those to advise.
    """
    attribution = Attribution(expected, collectives, paths)
    alone = (_account_violation(account, attribution.material) for account in attribution.accounts)
    own = [each for each in alone if each is not None] or _violations_in_sum(attribution)
    if annotated:
        return _annotated_violations(attribution, own, rules)
    accounts, unattributed = attribution.accounts, attribution.unattributed
    activations = [_activation_violation(sent, accounts) for sent in unattributed]
    return own + activations or _total_excess_violations(attribution), []


def _annotated_violations(
    attribution: Attribution, own: Sequence[Violation], rules: PlacementRules
) -> tuple[list[Violation], list[str]]:
    """Does the work of `traffic_violations` for a step partitioned by sharding annotations.

    `own`: the violations of single parameters, as if they were not annotated. XLA may send
    activations in place of a parameter, or of its gradient, where that is less. The bytes saved on
    parameters offset the activations sent instead, the smallest first; an activation that they do
    not offset is a violation.
    """
    # A wrong dtype is wrong however much is saved elsewhere.
    never_offset = [violation for violation in own if violation.kind == "dtype"]
    more = [violation for violation in own if violation.kind in ("bytes", "repeat")]
    # A large all-gather in a wider dtype than any parameter declares is not offset either: it may
    # be of concatenated weights.
    accounts, material = attribution.accounts, attribution.material
    gathers = [
        each for account in accounts if account.role == "gather" for each in account.expected
    ]
    itemsizes = [jnp.dtype(each.dtype).itemsize for each in gathers if each.bytes > material]
    for sent in attribution.unattributed:
        is_large = sent.op == "all-gather" and sent.bytes > material
        is_wide = is_large and jnp.dtype(sent.dtype).itemsize > max(itemsizes, default=4)
        violation = _activation_violation(sent, accounts, rules)
        if is_wide:
            never_offset.append(violation)
        else:
            more.append(violation)
    # Offset the rest by the bytes saved. Within the slack of the whole step, all of it is allowed.
    avoided = [account for account in accounts if account.is_avoided(material)]
    saved = sum(account.declared_bytes - account.sent_bytes for account in avoided)
    offset: list[Violation] = []
    not_offset: list[Violation] = []
    for violation in sorted(more, key=lambda violation: violation.bytes):
        if attribution.excess <= attribution.slack or violation.bytes <= saved:
            saved -= violation.bytes
            offset.append(violation)
        else:
            not_offset.append(violation)
    violations = never_offset + not_offset or _total_excess_violations(attribution)
    return violations, _substitutions(avoided, offset)


def undeclared_axis_violations(
    expected: Sequence[ExpectedTraffic], collectives: Sequence[Collective]
) -> list[Violation]:
    """Finds the mesh axes along which traffic is sent and none is declared."""
    if not expected:
        return []
    sent = Counter[str]()
    for each in collectives:
        sent[each.axis] += each.bytes
    declared = {each.axis for each in expected}
    least = max(MATERIAL * sum(each.bytes for each in expected), IMMATERIAL_BYTES)
    cause = "the placement of an array, in the model or by a rule, "
    cause += "crosses axes that its parameter does not"
    return [
        Violation("", f"more is sent along '{axis}' than declared", sent[axis], cause)
        for axis in sent
        if axis not in declared and sent[axis] > least
    ]


def _substitutions(avoided: Sequence[Account], offset: Sequence[Violation]) -> list[str]:
    """Formats, in at most one line, what XLA sends in place of gathers and reductions.

    `avoided`: the parameters that are not sent; `offset`: the violations that the bytes saved on
    them offset.
    """
    if not avoided and not offset:
        return []
    moved = sum(violation.bytes for violation in offset)
    if not avoided:
        what = ", ".join(violation.what for violation in offset)
        return [f"within the limit: {what} ({human_bytes(moved)} per step)"]
    # Parameters of which the same operations are left out are named together.
    by_path: dict[str, list[str]] = {}
    for each in avoided:
        what = "not gathered" if each.role != "reduce" else "its gradient not reduced"
        by_path.setdefault(each.path, []).append(what)
    by_what: dict[str, list[str]] = {}
    for path, whats in by_path.items():
        by_what.setdefault(", ".join(whats), []).append(path)
    which = "; ".join(f"{', '.join(paths)}: {what}" for what, paths in by_what.items())
    saved = human_bytes(sum(each.declared_bytes - each.sent_bytes for each in avoided))
    instead = "no activations for it"
    if moved:
        instead = f"{human_bytes(moved)} of activations"
    return [
        f"{which}; XLA computed with its shards and moved {instead} per step in place of {saved}"
    ]


def _total_excess_violations(attribution: Attribution) -> list[Violation]:
    """Compares the bytes of all parameters together; finds at most one violation."""
    if attribution.excess <= attribution.slack:
        return []
    cause = "many small parameters, each sent by a collective that the compiler chose: "
    cause += "raise min_size, and they stay replicated"
    return [Violation("", "more is sent than declared", attribution.excess, cause)]


def _activation_violation(
    sent: Sent, accounts: Sequence[Account], rules: PlacementRules | None = None
) -> Violation:
    """Explains an operand that serves no parameter.

    It is an activation, or a parameter of the same shape is sent once more. `rules`: those to
    advise; None where the step's collectives are explicit.
    """
    of_stack = ""
    if rules is not None:
        of_stack = rules.advice_for_slice(sent.shape)
    what = f"{array_text(sent)} by {sent.op}"
    if sent.path:
        what += f" ({sent.path})"
    # By its shape it may be a parameter.
    same_shape = list(
        dict.fromkeys(each.path for each in accounts if each.may_have_shape(sent.shape))
    )
    if same_shape:
        where = " or ".join(same_shape)
        what = f"one more array of its shape is sent, {what}"
        cause = (
            "with sharding annotations, an array that is used in several places (a tied head, "
            "chunks of a loss) is gathered or reduced once for each: local_batch=True adds that up "
            "first; or an activation is sent"
        )
        if of_stack:
            cause += f"; or {of_stack}"
        return Violation(where, what, sent.bytes, cause)
    if PALLAS_CALL.name in sent.path or "custom_call" in sent.path:
        cause = (
            "XLA cannot partition a kernel, so each device runs it on the whole batch: wrap it in "
            "fsdp_jax.local_rows.on_local_rows, or give it a partitioning rule "
            "(jax.experimental.custom_partitioning)"
        )
    elif rules is not None and _LOOKUP.search(sent.path):
        cause = (
            "the gradient of a lookup: XLA sends each device what flows back to all positions, "
            "for its own rows of the table; wrap the lookup in fsdp_jax.local_rows.on_local_rows, "
            "and the table's gradient is reduced instead"
        )
        if rule := rules.lookups.get(sent.shape[-1]):
            cause += f"; or shard the table's features, which sends each device its part: {rule}"
    elif of_stack:
        cause = of_stack
    else:
        cause = (
            "the loss or the model mixes the examples of a batch, computes on a sharded operand, "
            "or makes a parameter's gradient from a larger one: look at the operation named, "
            "and at sharding constraints in the model"
        )
    return Violation("", f"an activation is sent, {what}", sent.bytes, cause)


def _violations_in_sum(attribution: Attribution) -> list[Violation]:
    """Finds differences that are too small in each parameter, and matter in their sum."""
    weights = Counter[str]()
    kinds = dict[str, list[Violation]]()
    for account in attribution.accounts:
        violation = _account_violation(account, 0)
        # `_total_excess_violations` finds repeats
        if violation is None or violation.kind == "repeat":
            continue
        # All bytes that differ from the declared; `violation.bytes` counts additional ones alone.
        weight = violation.bytes
        if violation.kind == "less":
            weight = account.declared_bytes
        elif account.expected:
            other = sum(sent.bytes for sent in account.sent if sent.dtype != account.dtype)
            weight = max(weight, other)
        weights[violation.what] += weight
        kinds.setdefault(violation.what, []).append(violation)
    merged = []
    for what, alike in kinds.items():
        if weights[what] <= max(MANY * attribution.material, IMMATERIAL_BYTES):
            continue
        first = max(alike, key=lambda violation: violation.bytes)
        where = first.path
        if len(alike) > 1:
            where += f" and {len(alike) - 1} more"
        more = sum(violation.bytes for violation in alike)
        merged.append(Violation(where, what, more, first.cause, first.kind))
    return merged


def _account_violation(account: Account, material: float) -> Violation | None:
    """Finds the first difference that matters between one parameter's declared and sent traffic.

    `material`: bytes that matter. Returns None if no difference does.
    """
    done = "gathered" if account.role != "reduce" else "reduced"
    excess = account.sent_bytes - account.declared_bytes
    if not account.expected:
        if account.sent_bytes <= material:
            return None
        what, cause = f"{done}, which is not declared", "it is replicated, or not trained"
        return Violation(account.path, what, account.sent_bytes, cause)
    # The dtype: `more` is negative in a narrower one. A gradient in a wider one matters only where
    # it also sends more than declared.
    declared = jnp.dtype(account.dtype)
    others = [sent for sent in account.sent if sent.dtype != declared.name]
    dtype = declared
    if others:
        dtype = jnp.dtype(others[0].dtype)
    wider_by = dtype.itemsize - declared.itemsize
    more = sum(sent.bytes for sent in others) * wider_by // dtype.itemsize
    dtype_matters = account.role == "gather" or more < 0 or excess > material
    if abs(more) > material and dtype_matters:
        what = f"{done} in {dtype}, declared {declared}"
        cause = _dtype_cause(account, dtype, more)
        return Violation(account.path, what, max(more, 0), cause, "dtype")
    # The bytes: too many, or hardly any.
    if excess > max(material, (TOLERANCE - 1) * account.declared_bytes):
        return _excess_violation(account, excess)
    if account.is_avoided(material):
        cause = "XLA computes on its shards and sends activations: "
        cause += "make the module that uses it a unit"
        return Violation(account.path, f"never {done}", 0, cause, "less")
    return None


def _dtype_cause(account: Account, dtype: np.dtype, more: int) -> str:
    """Explains why a parameter is sent in another dtype; `more`: bytes above the declared."""
    if account.role == "gather":
        return (
            "the cast moved past the gather: cast the shard before it, and put the result through "
            "jax.lax.optimization_barrier"
        )
    if more < 0:
        return "it is reduced in the dtype that it is computed in; local_batch=True casts it first"
    module = account.path.rpartition("/")[0] or account.path
    return (
        f"'{module}' computes in {dtype}, by its own dtype or its inputs', and with sharding "
        "annotations a gradient is reduced in the dtype that it is computed in: make its model, or "
        f"it, with dtype=jnp.{account.dtype}, or declare it: keep_float32=('{module}',)"
    )


def _excess_violation(account: Account, excess: int) -> Violation:
    """Explains why `excess` bytes above the declared are sent, in the declared dtype."""
    # By an operation that sends twice the bytes, ...
    scatters = any(each.op == "reduce-scatter" for each in account.expected)
    if scatters and -account.missing("all-reduce", as_substitute=False) > excess / 2:
        what = "reduced by an all-reduce, declared a reduce-scatter"
        cause = (
            "annotations leave that to the compiler; with local_batch=True, this compiler finds no "
            "way to scatter an array of this shape"
        )
        return Violation(account.path, what, excess, cause)
    # ... or by the declared one, more often than declared.
    if account.role == "reduce":
        done = "reduced"
        cause = (
            "it is used in several places (a tied head), and with sharding annotations each use's "
            "gradient is reduced by itself: make_train_step(local_batch=True) adds them up first"
        )
    else:
        done = "gathered"
        cause = (
            "it is used in several places, or outside its unit: leave it to no unit, "
            "and it is gathered once"
        )
    other = next((sent for sent in account.sent if sent.path not in ("", account.path)), None)
    what = f"{done} more often than declared"
    if other is not None:
        what += f" ({other.path})"
    return Violation(account.path, what, excess, cause, "repeat")
