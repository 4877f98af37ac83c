"""Attributes every byte that a program sends to the parameter that it serves.

It does so by the mesh axes, by the scope that the library puts around its collectives, and by dtype
and shape where XLA has lost the scope. Bytes that serve no parameter are of activations.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import jax.numpy as jnp

from fsdp_jax.contract.expected import ExpectedTraffic, Role
from fsdp_jax.hlo.collectives import Collective
from fsdp_jax.sharding.mesh import MeshAxes

TOLERANCE = 1.02  # a step may send this multiple of its declared bytes
MATERIAL = 0.005
"""Fraction of a step's declared bytes that matters.

Small parameters may be padded, and the compiler may choose the collective that sends each: neither
is a violation.
"""
AVOIDED = 0.05  # below this fraction of a parameter's declared bytes, activations are sent instead
SCALARS = 16  # elements that may be sent unattributed: the loss, the norms, scales of float8
IMMATERIAL_BYTES = 4096  # bytes that never matter, however small the step

_ROLES: dict[str, tuple[Role, ...]] = {
    "all-gather": ("gather", "update"),
    "reduce-scatter": ("reduce",),
}
_ANY_ROLE: tuple[Role, ...] = ("reduce", "gather", "update")


class Sent(NamedTuple):
    """One operand of a collective, with the bytes of all its executions in a step.

    `sliced` is the collective's: each device keeps only a part of an all-reduce's result. So are
    `axis` and `hidden`, whether a kernel runs beside it.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    bytes: int
    sliced: bool
    axis: str = ""
    hidden: bool = False


@dataclass
class Account:
    """The declared and the sent traffic of a parameter, or of its gradient, as `role` says."""

    path: str
    role: Role
    expected: list[ExpectedTraffic] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)

    @property
    def declared_bytes(self) -> int:
        """Bytes that a device sends by the strategy's arithmetic."""
        return sum(each.bytes for each in self.expected)

    @property
    def sent_bytes(self) -> int:
        """Bytes that the program sends."""
        return sum(each.bytes for each in self.sent)

    @property
    def dtype(self) -> str:
        """The declared dtype."""
        return self.expected[0].dtype

    @cached_property
    def axes(self) -> set[str]:
        """The mesh axes that traffic is declared along; cached, so `expected` must be complete."""
        return {name for each in self.expected for name in each.axis.split("+")}

    def is_avoided(self, material: float) -> bool:
        """Tells whether hardly any of the declared bytes are sent.

        `material`: bytes of a parameter that matter; one that declares fewer is never avoided.
        """
        declared = self.declared_bytes
        return self.sent_bytes < AVOIDED * declared and declared > material

    def missing(self, op: str, *, as_substitute: bool) -> int:
        """Counts the declared bytes that an operation, such as "all-gather", has not yet sent.

        `as_substitute`: it is used in place of any that is declared; an all-reduce sends twice the
        bytes of the others.
        """
        if not as_substitute:
            declared = sum(each.bytes for each in self.expected if each.op == op)
            return declared - sum(each.bytes for each in self.sent if each.op == op)
        declared = 0
        for each in self.expected:
            declared += each.bytes
            if op == "all-reduce" and each.op != "all-reduce":
                declared += each.bytes
        return declared - self.sent_bytes

    def may_send_by(self, op: str) -> bool:
        """Tells whether an operation may serve it: for matrices of the optimizer, all-to-all alone.

        Other collectives of an update, which bear the same name, are of parameters.
        """
        declared = {each.op for each in self.expected}
        return declared != {"all-to-all"} or op == "all-to-all"

    def may_be_served_by(self, sent: Sent) -> bool:
        """Tells whether an operand that names this parameter may be an array of it.

        XLA may give the names of combined operands in another order.
        """
        return not self.expected or sent.dtype == self.dtype or self.may_have_shape(sent.shape)

    def may_lack(self, sent: Sent, *, as_substitute: bool) -> bool:
        """Tells whether an operand, in any dtype, may be an array that has not yet been sent."""
        size = sent.bytes * jnp.dtype(self.dtype).itemsize // jnp.dtype(sent.dtype).itemsize
        limit = TOLERANCE * self.missing(sent.op, as_substitute=as_substitute)
        return self.may_have_shape(sent.shape) and size <= limit

    def may_have_shape(self, shape: tuple[int, ...]) -> bool:
        """Tells whether the parameter is declared in this shape, transposed or flattened.

        Dims of size 1 do not count.
        """
        return any(
            _may_be_same_array(shape, other) for each in self.expected for other in each.shapes
        )


class Attribution:
    """The bytes that a program sends, in the accounts of the parameters that they serve.

    `expected`: the declared traffic; `collectives`: from `by_user_axes`; `paths`: of all
    parameters, also those that declare none.
    """

    def __init__(
        self,
        expected: Sequence[ExpectedTraffic],
        collectives: Sequence[Collective],
        paths: Container[str],
    ):
        declared = sum(each.bytes for each in expected)
        self.material = declared * MATERIAL  # bytes of a parameter that matter
        # Bytes sent above those declared for all parameters, and how many of these do not matter.
        self.excess = sum(each.bytes for each in collectives) - declared
        self.slack = max((TOLERANCE - 1) * declared, IMMATERIAL_BYTES)
        accounts: dict[tuple[str, Role], Account] = {}
        for each in expected:
            key = each.path, each.role
            accounts.setdefault(key, Account(*key)).expected.append(each)
        # First by name, ...
        unnamed = []
        operands = (sent for collective in collectives for sent in _sent_operands(collective))
        for sent in operands:
            roles = _ROLES.get(sent.op, _ANY_ROLE)
            own = [accounts[sent.path, role] for role in roles if (sent.path, role) in accounts]
            own = _along(sent.axis, [each for each in own if each.may_send_by(sent.op)])
            is_known = sent.path in paths or bool(own)
            fits = is_known and len(sent.shape) > 1
            if not fits or (own and not any(each.may_be_served_by(sent) for each in own)):
                unnamed.append(sent)
            elif own:
                # An all-reduce may be of the gradient or of the parameter: the one that lacks it.
                missing = (a for a in own if sent.bytes <= a.missing(sent.op, as_substitute=True))
                next(missing, own[0]).sent.append(sent)
            else:  # a parameter for which nothing is declared
                accounts[sent.path, roles[0]] = Account(sent.path, roles[0], sent=[sent])
        self.accounts = list(accounts.values())
        # ... then by shape.
        left = Counter[Sent]()
        for sent in sorted(unnamed, key=lambda sent: -sent.bytes):
            if remainder := self._attribute_by_shape(sent):
                left[remainder._replace(bytes=0, axis="", hidden=False)] += remainder.bytes
        # The operands that serve no parameter; equal ones are added up, the largest come first.
        self.unattributed = [sent._replace(bytes=total) for sent, total in left.items()]
        self._resolve_doubts()

    def _resolve_doubts(self) -> None:
        """Moves operands without a name to gathers that lack them, declared in a narrower dtype.

        Of two parameters of a shape that declare different dtypes either may be meant: the contract
        must not hold by the more favorable one.
        """
        gathers = [each for each in self.accounts if each.role == "gather" and each.expected]
        lack = [each for each in gathers if each.missing("all-gather", as_substitute=False) > 0]
        for own in self.accounts:
            for sent in [each for each in own.sent if own.path not in each.path.split("+")]:
                names, itemsize = set(sent.axis.split("+")), jnp.dtype(sent.dtype).itemsize
                for other in lack:
                    is_wider = names <= other.axes and jnp.dtype(other.dtype).itemsize < itemsize
                    if is_wider and other.may_lack(sent, as_substitute=False):
                        own.sent.remove(sent)
                        other.sent.append(sent)
                        break

    def _attribute_by_shape(self, sent: Sent) -> Sent | None:
        """Attributes an operand that names no parameter to those that lack it.

        Returns the remaining part of it, or None. An array of a parameter's shape is taken for that
        parameter. Small arrays are sent together: their bytes are shared out.
        """
        # The accounts that it may belong to, the most likely first.
        roles = _ROLES.get(sent.op, _ANY_ROLE)
        named = sent.path.split("+")
        fits = [each for each in self.accounts if each.role in roles and each.expected]
        fits = _along(sent.axis, [each for each in fits if each.may_send_by(sent.op)])
        fits.sort(
            key=lambda each: (
                each.dtype != sent.dtype,
                each.path not in named,
                roles.index(each.role),
                each.sent_bytes / max(1, each.declared_bytes),
            )
        )
        # Several parameters in one array: XLA names those that it has joined, and they lack as
        # much. It does not always name the small ones.
        joined = [each for each in fits if each.path in named]
        missing = sum(max(0, each.missing(sent.op, as_substitute=False)) for each in joined)
        if len(named) > 1 and sent.bytes <= TOLERANCE * missing:
            rest = _share_out(joined, sent, as_substitute=False)
            return _without_scalars(_share_out(fits, rest, as_substitute=False))
        # One parameter of this shape, first by the declared operation, then by another.
        for as_substitute in (False, True):
            for each in fits:
                if each.may_lack(sent, as_substitute=as_substitute):
                    each.sent.append(sent)
                    return None
        # Small parameters that are sent together, as one vector or in an all-reduce.
        few_bytes = sent.op == "all-reduce" and sent.bytes <= self.material
        if len(sent.shape) < 2 or few_bytes:
            for as_substitute in (False, True):
                sent = _share_out(joined, sent, as_substitute=as_substitute)
                sent = _share_out(fits, sent, as_substitute=as_substitute)
        return _without_scalars(sent)


def by_user_axes(
    collectives: Iterable[Collective], axes: MeshAxes
) -> tuple[list[Collective], list[Collective]]:
    """Gives collectives the user's names of mesh axes, in which traffic is declared.

    Returns (those to compare with it, those along the model's own axes alone).
    """
    own: list[Collective] = []
    model: list[Collective] = []
    for each in collectives:
        names = each.axis.split("+")
        part = model if set(names) <= set(axes.model) else own
        part.append(replace(each, axis=axes.user_name(names)))
    return own, model


def _along(axis: str, accounts: list[Account]) -> list[Account]:
    """Selects the accounts of what is declared along these mesh axes; all where none is.

    A parameter that is gathered along one axis may be updated in parts along another.
    """
    names = set(axis.split("+"))
    return [each for each in accounts if names <= each.axes] or accounts


def _sent_operands(collective: Collective) -> Iterator[Sent]:
    """Yields the operands of a collective, with the bytes of each."""
    sizes = [prod(shape) for shape in collective.shapes]
    total = max(sum(sizes), 1)
    for shape, path, size in zip(collective.shapes, collective.paths, sizes, strict=True):
        part = collective.bytes * size // total
        yield Sent(
            collective.op,
            collective.dtype,
            shape,
            path,
            part,
            collective.sliced,
            collective.axis,
            bool(collective.hidden),
        )


def _without_scalars(sent: Sent) -> Sent | None:
    """Drops the rest of an operand that may be a few scalars: returns None for it.

    XLA joins scalars with small arrays.
    """
    scalars = 2 * SCALARS * jnp.dtype(sent.dtype).itemsize
    if prod(sent.shape) <= SCALARS or sent.bytes <= scalars:
        return None
    return sent


def _share_out(accounts: Sequence[Account], sent: Sent, *, as_substitute: bool) -> Sent:
    """Shares bytes out in proportion to what each account lacks; returns the rest."""
    missing = [max(0, each.missing(sent.op, as_substitute=as_substitute)) for each in accounts]
    given = min(sent.bytes, sum(missing))
    for each, lacks in zip(accounts, missing, strict=True):
        if part := given * lacks // max(1, sum(missing)):
            each.sent.append(sent._replace(bytes=part))
    return sent._replace(bytes=sent.bytes - given)


def _may_be_same_array(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Tells whether two shapes may be of one array, transposed or flattened; dims of 1 aside."""
    if len(shape) == 1:
        return prod(shape) == prod(other)
    return sorted(size for size in shape if size > 1) == sorted(size for size in other if size > 1)
