"""Attributes every byte that a program sends to the parameter that it serves.

By the scope that the library puts around its collectives, and where XLA has lost that, by dtype and
shape. What serves no parameter is an activation.
"""

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import jax.numpy as jnp

from fsdp_jax.contract.expected import ExpectedTraffic, Role
from fsdp_jax.hlo.collectives import Collective

TOLERANCE = 1.02  # a step may send this multiple of what it declares
MATERIAL = 0.005
"""Fraction of a step's declared bytes that matters.

Small parameters may be padded, and each sent by a collective that the compiler chose: that is not a
violation.
"""
AVOIDED = 0.05  # below this fraction of a parameter's declared bytes, activations are sent instead
SCALARS = 16  # elements that may be sent unattributed: the loss, the norms, scales of float8
IMMATERIAL_BYTES = 4096  # bytes that never matter, however small the step

_ROLES: dict[str, tuple[Role, ...]] = {"all-gather": ("gather",), "reduce-scatter": ("reduce",)}
_ANY_ROLE: tuple[Role, ...] = ("reduce", "gather")


class Sent(NamedTuple):
    """One operand of a collective: what is sent of one array, all executions of a step.

    `sliced` is that of the collective: each device keeps only a part of an all-reduce's result.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    bytes: int
    sliced: bool


@dataclass
class Account:
    """What is declared, and what is sent, for a parameter or its gradient, as `role` says."""

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

    def is_avoided(self, material: float) -> bool:
        """Returns whether hardly anything is sent of what is declared.

        `material`: bytes of a parameter that matter; what declares less is never avoided.
        """
        declared = self.declared_bytes
        return self.sent_bytes < AVOIDED * declared and declared > material

    def missing(self, op: str, *, as_substitute: bool) -> int:
        """Returns the declared bytes that an operation, such as "all-gather", has not yet sent.

        `as_substitute`: by this operation in place of any that is declared; an all-reduce sends
        twice the bytes of the others.
        """
        if as_substitute:
            declared = sum(
                each.bytes * (2 if op == "all-reduce" != each.op else 1) for each in self.expected
            )
            return declared - self.sent_bytes
        declared = sum(each.bytes for each in self.expected if each.op == op)
        return declared - sum(each.bytes for each in self.sent if each.op == op)

    def may_be_served_by(self, sent: Sent) -> bool:
        """Returns whether an operand that names this parameter may be an array of it.

        XLA may give the names of what it combined in another order.
        """
        return not self.expected or sent.dtype == self.dtype or self.may_have_shape(sent.shape)

    def may_have_shape(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the parameter is declared in this shape, transposed or flattened.

        Dims of size 1 do not count.
        """
        return any(
            _may_be_same_array(shape, other) for each in self.expected for other in each.shapes
        )


class Attribution:
    """Every byte that a program sends, in the account of the parameter that it serves.

    `expected`: the declared traffic; `paths`: of all parameters, also those that declare none.
    """

    def __init__(
        self,
        expected: Sequence[ExpectedTraffic],
        collectives: Sequence[Collective],
        paths: Container[str],
    ):
        declared = sum(each.bytes for each in expected)
        self.material = declared * MATERIAL  # bytes of a parameter that matter
        # bytes that are sent above what is declared for all parameters, and how many do not matter
        self.excess = sum(each.bytes for each in collectives) - declared
        self.slack = max((TOLERANCE - 1) * declared, IMMATERIAL_BYTES)
        accounts: dict[tuple[str, Role], Account] = {}
        for each in expected:
            key = each.path, each.role
            accounts.setdefault(key, Account(*key)).expected.append(each)
        # First by name, ...
        unnamed = []
        for sent in (
            operand for collective in collectives for operand in _sent_operands(collective)
        ):
            roles = _ROLES.get(sent.op, _ANY_ROLE)
            own = [accounts[sent.path, role] for role in roles if (sent.path, role) in accounts]
            fits = sent.path in paths and len(sent.shape) > 1
            if not fits or (own and not any(each.may_be_served_by(sent) for each in own)):
                unnamed.append(sent)
            elif own:
                missing = (a for a in own if sent.bytes <= a.missing(sent.op, as_substitute=True))
                next(missing, own[0]).sent.append(sent)
            else:  # a parameter for which nothing is declared
                accounts[sent.path, roles[0]] = Account(sent.path, roles[0], sent=[sent])
        self.accounts = list(accounts.values())
        # ... then by shape.
        left = Counter[Sent]()
        for sent in sorted(unnamed, key=lambda sent: -sent.bytes):
            if remainder := self._attribute_by_shape(sent):
                left[remainder._replace(bytes=0)] += remainder.bytes
        # What serves no parameter, equal operands added up, the largest first.
        self.unattributed = [sent._replace(bytes=total) for sent, total in left.items()]

    def _attribute_by_shape(self, sent: Sent) -> Sent | None:
        """Attributes an operand that names no parameter to those that lack it.

        Returns what is left of it; None if nothing is. An array of a parameter's shape is that
        parameter. Small arrays are sent together: their bytes are shared out.
        """
        roles = _ROLES.get(sent.op, _ANY_ROLE)
        named = sent.path.split("+")
        fits = [each for each in self.accounts if each.role in roles and each.expected]
        fits.sort(
            key=lambda each: (
                each.dtype != sent.dtype,
                each.path not in named,
                roles.index(each.role),
                each.sent_bytes / max(1, each.declared_bytes),
            )
        )
        joined = [each for each in fits if each.path in named]
        missing = sum(max(0, each.missing(sent.op, as_substitute=False)) for each in joined)
        if len(named) > 1 and sent.bytes <= TOLERANCE * missing:
            # XLA names what it has joined, and they lack as much; it does not always name the
            # small ones.
            rest = _share_out(joined, sent, as_substitute=False)
            return _without_scalars(_share_out(fits, rest, as_substitute=False))
        for as_substitute in (False, True):
            for each in fits:
                itemsizes = jnp.dtype(each.dtype).itemsize, jnp.dtype(sent.dtype).itemsize
                size = sent.bytes * itemsizes[0] // itemsizes[1]  # in the declared dtype
                limit = TOLERANCE * each.missing(sent.op, as_substitute=as_substitute)
                if each.may_have_shape(sent.shape) and size <= limit:
                    each.sent.append(sent)
                    return None
        few_bytes = sent.op == "all-reduce" and sent.bytes <= self.material
        if len(sent.shape) < 2 or few_bytes:
            for as_substitute in (False, True):
                sent = _share_out(joined, sent, as_substitute=as_substitute)
                sent = _share_out(fits, sent, as_substitute=as_substitute)
        return _without_scalars(sent)


def _sent_operands(collective: Collective) -> Iterator[Sent]:
    """Yields the operands of a collective, with the bytes of each."""
    sizes = [prod(shape) for shape in collective.shapes]
    total = max(sum(sizes), 1)
    for shape, path, size in zip(collective.shapes, collective.paths, sizes, strict=True):
        part = collective.bytes * size // total
        yield Sent(collective.op, collective.dtype, shape, path, part, collective.sliced)


def _without_scalars(sent: Sent) -> Sent | None:
    """Returns what is left of an operand; None if that may be a few scalars.

    XLA joins scalars with small arrays.
    """
    scalars = 2 * SCALARS * jnp.dtype(sent.dtype).itemsize
    return None if prod(sent.shape) <= SCALARS or sent.bytes <= scalars else sent


def _share_out(accounts: Sequence[Account], sent: Sent, *, as_substitute: bool) -> Sent:
    """Shares bytes out in proportion to what each account lacks; returns the rest."""
    missing = [max(0, each.missing(sent.op, as_substitute=as_substitute)) for each in accounts]
    given = min(sent.bytes, sum(missing))
    for each, lacks in zip(accounts, missing, strict=True):
        if part := given * lacks // max(1, sum(missing)):
            each.sent.append(sent._replace(bytes=part))
    return sent._replace(bytes=sent.bytes - given)


def _may_be_same_array(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Returns whether two shapes may be of one array, transposed or flattened; dims of 1 aside."""
    if len(shape) == 1:
        return prod(shape) == prod(other)
    return sorted(size for size in shape if size > 1) == sorted(size for size in other if size > 1)
