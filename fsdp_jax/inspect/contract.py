"""The contract: what a step declares that it sends, held against what the compiled program sends.

Every byte of the program is given to the parameter that it serves: by the scope that the library puts around its
collectives, and where XLA has lost that, by the shape. What serves no parameter is an activation, and a violation.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp

from fsdp_jax.compiled import Step
from fsdp_jax.errors import human_bytes
from fsdp_jax.inspect.collectives import Collective, read_program
from fsdp_jax.inspect.expected import Expected, Role, axis_name, expected_of
from fsdp_jax.inspect.stderr import Rematerialization, rematerializations
from fsdp_jax.layout import Leaf
from fsdp_jax.mesh import data_axes
from fsdp_jax.rules import MIN_SIZE
from fsdp_jax.step import StepPlan
from fsdp_jax.table import html_table, text_table
from fsdp_jax.tree import PyTree

COLUMNS = ("op", "dtype", "axis", "times", "sent per step", "hidden", "for")
TOLERANCE = 1.02
MATERIAL = 0.005
"""Of what a step declares. Compilers pad small parameters and send them by whatever they have: that is no violation."""
FEW = 0.05
"""Of what a parameter declares: less than that, and it is not it that travels."""
SCALARS = 16
"""Elements of an array that may travel unexplained: the loss, the count, the norms."""


@dataclass(frozen=True)
class Violation:
    """One thing that the program does and the layout does not declare.

    Attributes:
        path: of the parameter; empty for what serves none.
        what: in the user's terms.
        bytes: more per step on the wire than declared.
        cause: and fix.

    """

    path: str
    what: str
    bytes: int
    cause: str

    def __str__(self) -> str:
        cost = f": +{human_bytes(self.bytes)} per step" if self.bytes > 0 else ""
        return f"{self.path or 'no parameter'}: {self.what}{cost}; {self.cause}"


@dataclass(frozen=True)
class Contract:
    """The verdict on a compiled step. `print(contract)` shows it.

    Attributes:
        expected: what each parameter declares.
        collectives: what the program sends.
        violations: what differs, dearest first.
        unread: what the reader could not judge; where it is not empty the contract does not hold.
        note: what the platform hides.

    """

    expected: Sequence[Expected]
    collectives: Sequence[Collective]
    violations: Sequence[Violation]
    unread: Sequence[str] = ()
    note: str = ""
    parts: Sequence[str] = field(default=(), repr=False)

    @property
    def holds(self) -> bool:
        """Whether the program sends what is declared, and no more than 1.02 of it."""
        return not self.violations and not self.unread

    @cached_property
    def wire_bytes(self) -> int:
        """That a device sends per step."""
        return sum(each.bytes for each in self.collectives)

    @cached_property
    def wire_bytes_limit(self) -> int:
        """That a device must send per step, by the strategy's arithmetic."""
        return sum(each.bytes for each in self.expected)

    def rows(self) -> list[dict[str, Any]]:
        """The collectives as `inspect --json` has them; alike ones share a row."""
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for each in sorted(self.collectives, key=lambda c: -c.bytes):
            where = ", ".join(dict.fromkeys(path for path in each.paths if path)) or "-"
            axis = axis_name(each.axis.split("+"), self.parts)
            row = rows.setdefault((each.op, each.dtype, axis, where), {
                "op": each.op, "dtype": each.dtype, "axis": axis, "count": 0, "bytes": 0, "overlapped_bytes": 0,
                "where": where,
            })  # fmt: skip
            row["count"] += each.count
            row["bytes"] += each.bytes
            row["overlapped_bytes"] += each.hidden
        return sorted(rows.values(), key=lambda row: -row["bytes"])

    def to_json(self) -> dict[str, Any]:
        """The fields of `inspect --json` with a topology."""
        return {
            "collectives": self.rows(),
            "contract": {
                "holds": self.holds,
                "expected": _sums((e.op, e.dtype, e.axis, e.bytes) for e in self.expected),
                "found": _sums((row["op"], row["dtype"], row["axis"], row["bytes"]) for row in self.rows()),
                "violations": [str(violation) for violation in self.violations] + list(self.unread),
            },
            "wire_bytes": self.wire_bytes,
            "wire_bytes_limit": self.wire_bytes_limit,
        }

    def _repr_html_(self) -> str:
        *_, verdict = str(self).partition("a device sends ")
        return html_table(COLUMNS, self._cells()) + f"<pre>a device sends {escape(verdict)}</pre>"

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (row["op"], row["dtype"], row["axis"], str(row["count"]), human_bytes(row["bytes"]),
             human_bytes(row["overlapped_bytes"]), row["where"] if len(row["where"]) < 60 else row["where"][:59] + "…")
            for row in self.rows()
        ]  # fmt: skip

    def __str__(self) -> str:
        ratio = self.wire_bytes / self.wire_bytes_limit if self.wire_bytes_limit else 1.0
        lines = [
            text_table(COLUMNS, self._cells(), right=COLUMNS[3:6]) if self.collectives else "nothing is sent",
            f"a device sends {human_bytes(self.wire_bytes)} per step; declared {human_bytes(self.wire_bytes_limit)} "
            f"({ratio:.3f}); the contract {'holds' if self.holds else 'DOES NOT HOLD'}",
            *(f"  {violation}" for violation in self.violations),
            *(f"  not judged: {line}" for line in self.unread),
            *([self.note] if self.note else []),
        ]
        return "\n".join(lines)


def check_contract(step: Step, batch: PyTree) -> Contract:
    """Compiles a step for its mesh and holds the program to what the step declares.

    Args:
        step: from `Sharded.train_step`; its mesh may be of devices that are not there.
        batch: arrays or shapes [global rows, ...].

    """
    with rematerializations() as repeated:
        compiled = step.compile(batch)
    assert step.plan is not None
    return judge(step.plan, compiled.as_text(), repeated)


def judge(plan: StepPlan, text: str, repeated: Iterable[Rematerialization] = ()) -> Contract:
    """Holds a compiled program's text to a step's plan."""
    mesh = plan.layout.mesh
    program = read_program(text, mesh.shape)
    expected = expected_of(plan)
    parts = data_axes(mesh)
    traffic = _judged(expected, program.collectives, plan.layout.by_path)
    violations = [*traffic, *map(_replicated, _whole(plan)), *map(_repeated, repeated)]
    cpu = mesh.devices.flat[0].platform == "cpu"
    note = "XLA:CPU sends bfloat16 as float32; compile for a topology to see what an accelerator sends" if cpu else ""
    order = sorted(violations, key=lambda violation: -violation.bytes)
    return Contract(expected, program.collectives, order, program.unread, note, parts)


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

    def room(self, op: str, *, instead: bool) -> int:
        """Bytes that it lacks by this operation; or by it in place of another, all-reduces counted twice."""
        if instead:
            return sum(each.bytes * (2 if op == "all-reduce" != each.op else 1) for each in self.expected) - self.sent
        declared = sum(each.bytes for each in self.expected if each.op == op)
        return declared - sum(each.bytes for each in self.found if each.op == op)

    def fits(self, sent: _Sent) -> bool:
        """Whether this may be it, as it is named; XLA may give the names of what it combined in another order."""
        return not self.expected or sent.dtype == self.dtype or self.alike(sent.shape)

    def alike(self, shape: tuple[int, ...]) -> bool:
        return any(_alike(shape, other) for each in self.expected for other in each.shapes)


_ROLES: dict[str, tuple[Role, ...]] = {"all-gather": ("gather",), "reduce-scatter": ("reduce",)}


def _judged(expected: Sequence[Expected], collectives: Sequence[Collective], paths: Container[str]) -> list[Violation]:
    accounts: dict[tuple[str, Role], _Account] = {}
    for each in expected:
        accounts.setdefault((each.path, each.role), _Account(each.path, each.role)).expected.append(each)
    lost = []
    for sent in (operand for collective in collectives for operand in _operands(collective)):
        roles = _ROLES.get(sent.op, ("reduce", "gather"))
        own = [accounts[sent.path, role] for role in roles if (sent.path, role) in accounts]
        if sent.path not in paths or len(sent.shape) < 2 or (own and not any(each.fits(sent) for each in own)):
            lost.append(sent)
        elif own:
            next((each for each in own if sent.bytes <= each.room(sent.op, instead=True)), own[0]).found.append(sent)
        else:
            accounts[sent.path, roles[0]] = _Account(sent.path, roles[0], found=[sent])
    material = sum(each.bytes for each in expected) * MATERIAL
    foreign: dict[_Sent, int] = {}
    for sent in sorted(lost, key=lambda sent: -sent.bytes):
        if left := _placed(accounts.values(), sent, material):
            foreign[left._replace(bytes=0)] = foreign.get(left._replace(bytes=0), 0) + left.bytes
    found = [violation for each in accounts.values() for violation in _violations(each, material)]
    found += [_foreign(sent._replace(bytes=size), accounts.values()) for sent, size in foreign.items()]
    declared = sum(each.bytes for each in expected)
    over = sum(each.bytes for each in collectives) - declared
    if not found and over > max((TOLERANCE - 1) * declared, 4096):
        cause = "many small parameters, each sent by what the compiler has: raise min_size, and they rest whole"
        found = [Violation("", "more is sent than declared", over, cause)]
    return found


def _operands(collective: Collective) -> Iterator[_Sent]:
    sizes = [prod(shape) for shape in collective.shapes]
    whole = max(sum(sizes), 1)
    for shape, path, size in zip(collective.shapes, collective.paths, sizes, strict=True):
        part = collective.bytes * size // whole
        yield _Sent(collective.op, collective.dtype, shape, path, part, collective.sliced)


def _placed(accounts: Collection[_Account], sent: _Sent, material: float) -> _Sent | None:
    """Gives what names no parameter to those that lack it; returns what is left.

    An array of a parameter's shape is that parameter. Small arrays travel together: theirs is shared out.
    """
    roles, named = _ROLES.get(sent.op, ("reduce", "gather")), sent.path.split("+")
    fits = [each for each in accounts if each.role in roles and each.expected]
    fits.sort(
        key=lambda each: (
            each.dtype != sent.dtype, each.path not in named, roles.index(each.role), each.sent / max(1, each.budget)
        )
    )  # fmt: skip
    for instead in (False, True):
        for each in fits:
            if each.alike(sent.shape) and sent.bytes <= TOLERANCE * each.room(sent.op, instead=instead):
                each.found.append(sent)
                return None
    together = len(sent.shape) < 2 or (sent.op == "all-reduce" and sent.bytes <= material)
    for instead in (False, True) if together else ():
        for group in ([each for each in fits if each.path in named], fits):
            sent = _shared(group, sent, instead=instead)
    return sent if sent.bytes and prod(sent.shape) > SCALARS else None


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


def _foreign(sent: _Sent, accounts: Iterable[_Account]) -> Violation:
    """What serves no parameter, or one of those of its shape once more than declared."""
    what = f"{sent.dtype}{list(sent.shape)} by {sent.op}{f' ({sent.path})' if sent.path else ''}"
    alike = list(dict.fromkeys(each.path for each in accounts if each.alike(sent.shape)))
    if alike:
        cause = (
            "by annotations, what is used in several places (a tied head) is reduced once for each: local batches, "
            "proven or promised by local_batch=True, add that up first; or an activation travels"
        )
        return Violation(" or ".join(alike), f"one more array of its shape travels, {what}", sent.bytes, cause)
    cause = (
        "the loss or the model mixes the examples of a batch, or computes on a sharded operand: look at the operation "
        "named, and at sharding constraints in the model"
    )
    return Violation("", f"an activation travels, {what}", sent.bytes, cause)


def _excess(each: _Account, done: str, over: int) -> Violation:
    """More bytes than declared, in the declared dtype."""
    ops = {one.op for one in each.expected}
    whole = sum(sent.bytes for sent in each.found if sent.op == "all-reduce")
    if (
        each.role == "reduce"
        and "reduce-scatter" in ops
        and whole > sum(one.bytes for one in each.expected if one.op == "all-reduce") + over / 2
    ):
        cause = "annotations leave that to the compiler; local batches, proven or promised by local_batch=True, do not"
        return Violation(each.path, "reduced by an all-reduce, declared a reduce-scatter", over, cause)
    unnamed = next((sent for sent in each.found if sent.path != each.path and sent.path), None)
    where = f" ({unnamed.path})" if unnamed else ""
    cause = (
        "it is used in several places (a tied head), and by annotations each use's gradient is reduced by itself: "
        "local batches, proven or promised by local_batch=True, add them up first"
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
            yield Violation(each.path, f"{done}, which is not declared", each.sent, "it rests whole, or is not trained")
        return
    declared = jnp.dtype(each.expected[0].dtype)
    other = [sent for sent in each.found if sent.dtype != declared.name]
    dtype = jnp.dtype(other[0].dtype) if other else declared
    more = sum(sent.bytes for sent in other) * (dtype.itemsize - declared.itemsize) // dtype.itemsize
    if abs(more) > material and (each.role == "gather" or more < 0 or over > material):
        cause = (
            "annotations reduce a gradient in the dtype that it is computed in; local batches, proven or promised by "
            "local_batch=True, in the one asked for"
            if each.role == "reduce"
            else "the cast moved past the gather: cast the shard and fence it (an optimization barrier) before it"
        )
        yield Violation(each.path, f"{done} in {dtype}, declared {declared}", max(more, 0), cause)
    elif over > max(material, (TOLERANCE - 1) * each.budget):
        yield _excess(each, done, over)
    elif each.sent < FEW * each.budget and each.budget > material:
        cause = "XLA computes on its shards and sends activations: make the module that uses it a unit"
        yield Violation(each.path, f"never {done}", 0, cause)


def _whole(plan: StepPlan) -> list[Leaf]:
    """Parameters that the strategy would shard and that are whole on every device, small ones aside."""
    if not plan.layout.strategy.shards_optimizer or plan.layout.mesh.size == 1:
        return []
    size = {path: prod(leaf.shape[leaf.stacked :]) for path, leaf in plan.layout.by_path.items()}
    return [leaf for path, leaf in plan.layout.by_path.items() if not any(leaf.work) and size[path] >= MIN_SIZE]


def _replicated(leaf: Leaf) -> Violation:
    cost = human_bytes(leaf.bytes)
    why = f"by rule '{leaf.rule}'" if leaf.rule != "heuristic" else leaf.reason
    cause = f"its gradient is all-reduced and its state costs {cost} a copy; narrow the rule, or pad a dim"
    return Violation(leaf.path, f"whole on every device, {why}", 0, cause)


def _repeated(found: Rematerialization) -> Violation:
    cause = "XLA found no way between two shardings but to gather it whole (involuntary full rematerialization)"
    return Violation(found.path, f"{found.shape} is replicated at {found.op_name}", 0, cause)


def _sums(rows: Iterable[tuple[str, str, str, int]]) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str, str], int] = {}
    for op, dtype, axis, sent in rows:
        sums[op, dtype, axis] = sums.get((op, dtype, axis), 0) + sent
    return [{"op": op, "dtype": dtype, "axis": axis, "bytes": sent} for (op, dtype, axis), sent in sums.items()]
