"""Every byte of a program given to the parameter that it serves: an account for each, one way and
the other.

By the scope that the library puts around its collectives, and where XLA has lost that, by dtype and
shape. What serves no parameter is an activation.
"""

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

import jax.numpy as jnp

from fsdp_jax.contract.expected import Expected, Role, axis_name
from fsdp_jax.errors import human_bytes
from fsdp_jax.hlo.collectives import Collective

TOLERANCE = 1.02
MATERIAL = 0.005
"""Of what a step declares. Compilers pad small parameters and send them by whatever they have: that is no violation."""
FEW = 0.05
"""Of what a parameter declares: less than that, and it is not it that travels."""
SCALARS = 16
"""Elements of an array that may travel unexplained: the loss, the count, the norms."""
FEW_OF_MANY = 4
"""Times that: what many parameters together may differ by."""


@dataclass(frozen=True)
class Violation:
    """One thing that the program does and the layout does not declare.

    Attributes:
        path: of the parameter; empty for what serves none.
        what: in the user's terms.
        bytes: more per step on the wire than declared.
        cause: and fix.
        kind: bytes: more than declared; dtype: another one; less: hardly anything is sent.

    """

    path: str
    what: str
    bytes: int
    cause: str
    kind: Literal["bytes", "dtype", "less"] = "bytes"

    def __str__(self) -> str:
        cost = f": +{human_bytes(self.bytes)} per step" if self.bytes > 0 else ""
        return f"{self.path or 'no parameter'}: {self.what}{cost}; {self.cause}"


def other_axes(
    expected: Sequence[Expected], collectives: Sequence[Collective], parts: Sequence[str]
) -> list[Violation]:
    """What is sent along mesh axes that less is declared for."""
    declared, sent = Counter[str](), Counter[str]()
    for one in expected:
        declared[one.axis] += one.bytes
    for each in collectives:
        sent[axis_name(each.axis.split("+"), parts)] += each.bytes
    least = max(MATERIAL * sum(declared.values()), 4096)
    cause = "the placement of an array, in the model or by a rule, crosses axes that its parameter does not"
    return [
        Violation(
            "", f"more is sent along '{axis}' than declared", sent[axis] - declared[axis], cause
        )
        for axis in sent
        if len(declared) and sent[axis] > TOLERANCE * declared[axis] + least and not declared[axis]
    ]


class _Sent(NamedTuple):
    """One operand of a collective: what is sent of one array, all executions of a step."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    bytes: int
    sliced: bool


@dataclass
class _Account:
    """What is declared for one parameter, one way, and what is sent for it."""

    path: str
    role: Role
    expected: list[Expected] = field(default_factory=list)
    found: list[_Sent] = field(default_factory=list)

    @property
    def budget(self) -> int:
        return sum(each.bytes for each in self.expected)

    @property
    def dtype(self) -> str:
        return self.expected[0].dtype

    @property
    def sent(self) -> int:
        return sum(each.bytes for each in self.found)

    def spared(self, material: float) -> bool:
        """Whether hardly anything is sent of what is declared."""
        return self.sent < FEW * self.budget and self.budget > material

    def room(self, op: str, *, instead: bool) -> int:
        """Bytes that it lacks by this operation; or by it in place of another, all-reduces counted
        twice.
        """
        if instead:
            return (
                sum(
                    each.bytes * (2 if op == "all-reduce" != each.op else 1)
                    for each in self.expected
                )
                - self.sent
            )
        declared = sum(each.bytes for each in self.expected if each.op == op)
        return declared - sum(each.bytes for each in self.found if each.op == op)

    def fits(self, sent: _Sent) -> bool:
        """Whether this may be it, as it is named; XLA may give the names of what it combined in
        another order.
        """
        return not self.expected or sent.dtype == self.dtype or self.alike(sent.shape)

    def alike(self, shape: tuple[int, ...]) -> bool:
        return any(_alike(shape, other) for each in self.expected for other in each.shapes)


_LOOKUP = re.compile(r"scatter-add|_take")
_ROLES: dict[str, tuple[Role, ...]] = {"all-gather": ("gather",), "reduce-scatter": ("reduce",)}


def judged(
    expected: Sequence[Expected], collectives: Sequence[Collective], paths: Container[str]
) -> list[Violation]:
    """What the collectives of a program differ in from what is expected, parameter by parameter,
    then in their sum.

    Args:
        expected: of each parameter.
        collectives: of the program.
        paths: of all parameters, those of which nothing is expected too.

    """
    books = _Books(expected, collectives, paths)
    found = [
        violation for each in books.accounts for violation in _violations(each, books.material)
    ]
    found = found or _together(books.accounts, books.material)
    found += [_foreign(sent, books.accounts) for sent in books.foreign]
    return found or books.excess()


def judged_by_sum(
    expected: Sequence[Expected], collectives: Sequence[Collective], paths: Container[str]
) -> tuple[list[Violation], list[str]]:
    """What exceeds the declared bytes or dtypes, and what is sent in place of what is declared.

    XLA may move activations in place of a parameter, or of its gradient, where that is less. What
    it saves so on some parameters pays for the activations, the smallest first; what it does not
    pay for is a violation.

    Args:
        expected: as in `judged`.
        collectives: as in `judged`.
        paths: as in `judged`.

    """
    books = _Books(expected, collectives, paths)
    found = [
        violation for each in books.accounts for violation in _violations(each, books.material)
    ]
    found = found or _together(books.accounts, books.material)
    wrong = [violation for violation in found if violation.kind == "dtype"]
    more = [violation for violation in found if violation.kind == "bytes"]
    # A wider all-gather than any parameter declares may be of weights in disguise (concatenated,
    # say): never paid for.
    gathers = [each for each in expected if each.role == "gather" and each.bytes > books.material]
    declared = max((jnp.dtype(each.dtype).itemsize for each in gathers), default=4)
    for sent in books.foreign:
        wide = (
            sent.op == "all-gather"
            and jnp.dtype(sent.dtype).itemsize > declared
            and sent.bytes > books.material
        )
        (wrong if wide else more).append(_foreign(sent, books.accounts, annotated=True))
    spared = [each for each in books.accounts if each.spared(books.material)]
    left = sum(each.budget - each.sent for each in spared)
    paid: list[Violation] = []
    for violation in sorted(more, key=lambda violation: violation.bytes):
        if books.over <= books.slack or violation.bytes <= left:
            left -= violation.bytes
            paid.append(violation)
    over = [violation for violation in more if violation not in paid]
    return wrong + over or books.excess(), _choices(spared, paid)


def _choices(spared: Sequence[_Account], paid: Sequence[Violation]) -> list[str]:
    """What XLA does in place of gathering or reducing some parameters, in the user's words."""
    moved = sum(violation.bytes for violation in paid)
    if not spared:
        said = ", ".join(violation.what for violation in paid)
        return [f"within the limit: {said} ({human_bytes(moved)} per step)"] if paid else []
    kept = sum(each.budget - each.sent for each in spared)
    done: dict[str, list[str]] = {}
    for each in spared:
        done.setdefault(each.path, []).append(
            "not gathered" if each.role == "gather" else "its gradient not reduced"
        )
    alike: dict[str, list[str]] = {}
    for path, what in done.items():
        alike.setdefault(", ".join(what), []).append(path)
    whose = "; ".join(f"{', '.join(paths)}: {what}" for what, paths in alike.items())
    instead = (
        f"and moved {human_bytes(moved)} of activations"
        if moved
        else "and moved no activations for it"
    )
    return [
        f"{whose}; XLA computed with its shards {instead} per step in place of {human_bytes(kept)}"
    ]


class _Books:
    """Every byte of a program in the account of the parameter that it serves.

    Attributes:
        accounts: of each parameter, one way and the other.
        foreign: what serves none of them.
        material: bytes of a parameter that matter.
        over: bytes that are sent above what is declared for all of them.
        slack: how many of these do not matter.

    """

    def __init__(
        self, expected: Sequence[Expected], collectives: Sequence[Collective], paths: Container[str]
    ):
        accounts: dict[tuple[str, Role], _Account] = {}
        for each in expected:
            accounts.setdefault(
                (each.path, each.role), _Account(each.path, each.role)
            ).expected.append(each)
        lost = []
        for sent in (operand for collective in collectives for operand in _operands(collective)):
            roles = _ROLES.get(sent.op, ("reduce", "gather"))
            own = [accounts[sent.path, role] for role in roles if (sent.path, role) in accounts]
            if (
                sent.path not in paths
                or len(sent.shape) < 2
                or (own and not any(each.fits(sent) for each in own))
            ):
                lost.append(sent)
            elif own:
                next(
                    (each for each in own if sent.bytes <= each.room(sent.op, instead=True)), own[0]
                ).found.append(sent)
            else:
                accounts[sent.path, roles[0]] = _Account(sent.path, roles[0], found=[sent])
        declared = sum(each.bytes for each in expected)
        self.accounts, self.material = accounts.values(), declared * MATERIAL
        self.over = sum(each.bytes for each in collectives) - declared
        self.slack = max((TOLERANCE - 1) * declared, 4096)
        foreign: dict[_Sent, int] = {}
        for sent in sorted(lost, key=lambda sent: -sent.bytes):
            if left := _placed(self.accounts, sent, self.material):
                foreign[left._replace(bytes=0)] = (
                    foreign.get(left._replace(bytes=0), 0) + left.bytes
                )
        self.foreign = [sent._replace(bytes=size) for sent, size in foreign.items()]

    def excess(self) -> list[Violation]:
        """What is sent above all that is declared, where no parameter and no array accounts for it."""
        cause = "many small parameters, each sent by what the compiler has: raise min_size, and they rest whole"
        return (
            [Violation("", "more is sent than declared", self.over, cause)]
            if self.over > self.slack
            else []
        )


def _operands(collective: Collective) -> Iterator[_Sent]:
    sizes = [prod(shape) for shape in collective.shapes]
    whole = max(sum(sizes), 1)
    for shape, path, size in zip(collective.shapes, collective.paths, sizes, strict=True):
        part = collective.bytes * size // whole
        yield _Sent(collective.op, collective.dtype, shape, path, part, collective.sliced)


def _placed(accounts: Collection[_Account], sent: _Sent, material: float) -> _Sent | None:
    """Gives what names no parameter to those that lack it; returns what is left.

    An array of a parameter's shape is that parameter. Small arrays travel together: theirs is
    shared out.
    """
    roles, named = _ROLES.get(sent.op, ("reduce", "gather")), sent.path.split("+")
    fits = [each for each in accounts if each.role in roles and each.expected]
    fits.sort(
        key=lambda each: (
            each.dtype != sent.dtype,
            each.path not in named,
            roles.index(each.role),
            each.sent / max(1, each.budget),
        )
    )
    joined = [each for each in fits if each.path in named]
    if len(named) > 1 and sent.bytes <= TOLERANCE * sum(
        max(0, each.room(sent.op, instead=False)) for each in joined
    ):
        # XLA says which it has joined, and they lack as much; it does not always name the small
        # ones
        return _unexplained(_shared(fits, _shared(joined, sent, instead=False), instead=False))
    for instead in (False, True):
        for each in fits:
            declared = sent.bytes * jnp.dtype(each.dtype).itemsize // jnp.dtype(sent.dtype).itemsize
            if each.alike(sent.shape) and declared <= TOLERANCE * each.room(
                sent.op, instead=instead
            ):
                each.found.append(sent)
                return None
    together = len(sent.shape) < 2 or (sent.op == "all-reduce" and sent.bytes <= material)
    for instead in (False, True) if together else ():
        for group in (joined, fits):
            sent = _shared(group, sent, instead=instead)
    return _unexplained(sent)


def _unexplained(sent: _Sent) -> _Sent | None:
    """What is left, unless a few scalars make it up; they are joined to small arrays too."""
    few = prod(sent.shape) <= SCALARS or sent.bytes <= 2 * SCALARS * jnp.dtype(sent.dtype).itemsize
    return None if few else sent


def _shared(accounts: Sequence[_Account], sent: _Sent, *, instead: bool) -> _Sent:
    """Shares bytes out in proportion to what each lacks; returns the rest."""
    rooms = [max(0, each.room(sent.op, instead=instead)) for each in accounts]
    given = min(sent.bytes, sum(rooms))
    for each, room in zip(accounts, rooms, strict=True):
        if part := given * room // max(1, sum(rooms)):
            each.found.append(sent._replace(bytes=part))
    return sent._replace(bytes=sent.bytes - given)


def _alike(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """The same array, transposed or flattened, with or without dims of one."""
    if len(shape) == 1:
        return prod(shape) == prod(other)
    return sorted(size for size in shape if size > 1) == sorted(size for size in other if size > 1)


def _foreign(sent: _Sent, accounts: Iterable[_Account], *, annotated: bool = False) -> Violation:
    """What serves no parameter, or one of those of its shape once more than declared."""
    what = f"{sent.dtype}{list(sent.shape)} by {sent.op}{f' ({sent.path})' if sent.path else ''}"
    alike = list(dict.fromkeys(each.path for each in accounts if each.alike(sent.shape)))
    if alike:
        cause = (
            "by annotations, what is used in several places (a tied head, chunks of a loss) is gathered or reduced "
            "once for each: local_batch=True adds that up first; or an activation travels"
        )
        return Violation(
            " or ".join(alike), f"one more array of its shape travels, {what}", sent.bytes, cause
        )
    if "pallas_call" in sent.path or "custom_call" in sent.path:
        cause = (
            "XLA cannot partition a kernel, so each device runs it on the whole batch: wrap it in "
            "fsdp_jax.local_rows.on_local_rows, or give it a partitioning rule (jax.experimental.custom_partitioning)"
        )
    elif annotated and _LOOKUP.search(sent.path):
        cause = (
            "the gradient of a lookup: XLA sends each device what flows back to all positions, for its own rows of the "
            "table; wrap the lookup in fsdp_jax.local_rows.on_local_rows, and the table's gradient is reduced instead"
        )
    else:
        cause = (
            "the loss or the model mixes the examples of a batch, computes on a sharded operand, or makes a "
            "parameter's gradient from a larger one: look at the operation named, and at sharding constraints in the "
            "model"
        )
    return Violation("", f"an activation travels, {what}", sent.bytes, cause)


def _together(accounts: Collection[_Account], material: float) -> list[Violation]:
    """What is too little to matter in any of many parameters, and matters in their sum."""
    kinds: dict[str, list[tuple[int, Violation]]] = {}
    for each in accounts:
        for violation in _violations(each, 0):
            if "more often" in violation.what:  # the total tells
                continue
            another = sum(sent.bytes for sent in each.found if sent.dtype != each.dtype)
            weight = (
                each.budget if violation.what.startswith("never") else max(another, violation.bytes)
            )
            kinds.setdefault(violation.what, []).append((weight, violation))
    found = []
    for what, alike in kinds.items():
        if sum(weight for weight, _ in alike) > max(FEW_OF_MANY * material, 4096):
            first = max(
                (violation for _, violation in alike), key=lambda violation: violation.bytes
            )
            where = f"{first.path} and {len(alike) - 1} more" if len(alike) > 1 else first.path
            more = sum(violation.bytes for _, violation in alike)
            found.append(Violation(where, what, more, first.cause, first.kind))
    return found


def _excess(each: _Account, done: str, over: int) -> Violation:
    """More bytes than declared, in the declared dtype."""
    ops = {one.op for one in each.expected}
    whole = sum(sent.bytes for sent in each.found if sent.op == "all-reduce")
    if (
        each.role == "reduce"
        and "reduce-scatter" in ops
        and whole > sum(one.bytes for one in each.expected if one.op == "all-reduce") + over / 2
    ):
        cause = (
            "annotations leave that to the compiler; with local_batch=True, this compiler finds no way to scatter an "
            "array of this shape"
        )
        return Violation(
            each.path, "reduced by an all-reduce, declared a reduce-scatter", over, cause
        )
    unnamed = next((sent for sent in each.found if sent.path != each.path and sent.path), None)
    where = f" ({unnamed.path})" if unnamed else ""
    cause = (
        "it is used in several places (a tied head), and by annotations each use's gradient is reduced by itself: "
        "train_step(local_batch=True) adds them up first"
        if each.role == "reduce"
        else "it is used in several places, or outside its unit: leave it to no unit, and it is gathered once"
    )
    return Violation(each.path, f"{done} more often than declared{where}", over, cause)


def _violations(each: _Account, material: float) -> Iterator[Violation]:
    """What one parameter's traffic differs in, the first of it that matters."""
    done = "gathered" if each.role == "gather" else "reduced"
    over = each.sent - each.budget
    if not each.expected:
        if each.sent > material:
            yield Violation(
                each.path,
                f"{done}, which is not declared",
                each.sent,
                "it rests whole, or is not trained",
            )
        return
    declared = jnp.dtype(each.expected[0].dtype)
    other = [sent for sent in each.found if sent.dtype != declared.name]
    dtype = jnp.dtype(other[0].dtype) if other else declared
    more = (
        sum(sent.bytes for sent in other) * (dtype.itemsize - declared.itemsize) // dtype.itemsize
    )
    if abs(more) > material and (each.role == "gather" or more < 0 or over > material):
        if each.role == "gather":
            cause = "the cast moved past the gather: cast the shard and fence it (an optimization barrier) before it"
        elif more > 0:
            module = each.path.rpartition("/")[0] or each.path
            cause = (
                f"'{module}' computes in {dtype}, by its own dtype or its inputs', and by annotations a gradient is "
                f"reduced in the dtype that it is computed in: make it with dtype=None (an nnx.Embed, whose default is "
                f"its table's own dtype, with dtype='{declared}'), or declare it: keep_float32=('{module}',)"
            )
        else:
            cause = (
                "it is reduced in the dtype that it is computed in; local_batch=True casts it first"
            )
        yield Violation(
            each.path, f"{done} in {dtype}, declared {declared}", max(more, 0), cause, "dtype"
        )
    elif over > max(material, (TOLERANCE - 1) * each.budget):
        yield _excess(each, done, over)
    elif each.spared(material):
        cause = (
            "XLA computes on its shards and sends activations: make the module that uses it a unit"
        )
        yield Violation(each.path, f"never {done}", 0, cause, "less")
