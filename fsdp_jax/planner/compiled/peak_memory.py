"""What a compiled train step holds in device memory at its peak, and for what.

XLA tells where every value lies and how long it lives (`xla_dump_to` among the options of
`lowered.compile`); the program's text tells what made it. `dumped` reads the first, and `held`
joins it with the second.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax

from fsdp_jax.hlo.op_names import scopes, stripped
from fsdp_jax.hlo.parser import Computation, Instruction, Module, parse
from fsdp_jax.planner.compiled.buffer_assignment import DEFAULT, HOST, Alive, Dump
from fsdp_jax.sharding.layout import COPIES, Layout, Leaf
from fsdp_jax.step.state import state_like
from fsdp_jax.step.train_step import StepPlan
from fsdp_jax.tree import SEPARATOR

Kind = Literal["params", "gradients", "optimizer", "activations", "gathered", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_MOVES = {
    "all-gather",
    "bitcast",
    "concatenate",
    "convert",
    "copy",
    "dynamic-slice",
    "pad",
    "reduce-precision",
    "reshape",
    "slice",
    "transpose",
}
_REDUCTIONS = {f"{op}{half}" for op in ("all-reduce", "reduce-scatter") for half in ("", "-start")}
_FLOAT = re.compile(r"b?f\d+")
_MOST = 64
"""How many instructions an array is followed through."""
_UNNAMED = re.compile(r"^state\.|\.\d+$")  # an input, or a name that the compiler made
_SILENT = (
    "dynamic_update_slice",
    "dynamic_slice",
    "copy",
    "optimization_barrier",
    "squeeze",
    "broadcast_in_dim",
)


@dataclass(frozen=True)
class Buffer:
    """One array in device memory.

    Attributes:
        bytes: that it takes there, padding included.
        array: as `bf16[31,1,2048,4096]`.
        kind: what it is for; `gathered` are whole parameters, and casts of shards on their way to
            be gathered.
        path: of the parameter or leaf of the state, else of the module that made it, where names
            tell.
        operation: the traced operation that made it.

    """

    bytes: int
    array: str
    kind: Kind
    path: str
    operation: str


@dataclass(frozen=True)
class Held:
    """What a device holds at the peak of a step.

    Attributes:
        peak_bytes: of device memory that the program takes.
        host_bytes: of the host's memory that it takes for each device.
        breakdown: bytes by kind; their sum is `peak_bytes`. `other` has what packing leaves unused.
        buffers: all that live at the peak, largest first.

    """

    peak_bytes: int
    host_bytes: int
    breakdown: dict[Kind, int]
    buffers: tuple[Buffer, ...]


def held(plan: StepPlan, program: str | Module, dump: Dump) -> Held:
    """What a device holds at the peak of a step, array by array.

    Args:
        plan: of the step, as it was lowered.
        program: `compiled.as_text()`, or what `inspect.hlo.parse` made of it.
        dump: what `dumped` read of the same compilation.

    """
    reader = _Reader(plan, parse(program) if isinstance(program, str) else program)
    buffers = sorted(
        (reader.buffer(one) for one in dump.alive), key=lambda one: (-one.bytes, one.kind, one.path)
    )
    breakdown: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for one in buffers:
        breakdown[one.kind] += one.bytes
    peak = dump.spaces[DEFAULT]
    breakdown["other"] += peak - sum(breakdown.values())
    return Held(peak, dump.spaces.get(HOST, 0), breakdown, tuple(buffers))


class _Place(NamedTuple):
    """A result, or the element of a tuple, in a program."""

    within: Computation
    name: str
    element: tuple[int, ...] = ()

    @property
    def one(self) -> Instruction:
        return self.within[self.name]


class _Reader:
    """Tells what arrays of a step's program are for, from what they are made of and what becomes of
    them.
    """

    def __init__(self, plan: StepPlan, module: Module) -> None:
        self._plan, self._module = plan, module
        self._home = {
            one.name: within
            for within in module.computations.values()
            for one in within.instructions
        }
        self._callers: dict[str, _Place] = {}
        for within in module.computations.values():
            for one in within.instructions:
                for called in (*one.calls, *(part.name for part in _parts(module, one))):
                    self._callers[called] = _Place(within, one.name)
        self._leaves = _leaves(plan.layout)
        inputs = [one for one in module[module.entry].instructions if one.opcode == "parameter"]
        self._inputs = {int(one.inside): self._leaf(one) for one in inputs}
        self._shapes = {shape for leaf in plan.layout.by_path.values() for shape in _shapes(leaf)}

    def buffer(self, alive: Alive) -> Buffer:
        kind, path, operation = self._purpose(alive)
        return Buffer(alive.bytes, alive.array, kind, path, operation)

    def _purpose(self, alive: Alive) -> tuple[Kind, str, str]:
        if alive.parameter is not None:  # what is updated in place too
            leaf = self._inputs.get(alive.parameter)
            return (_kind(leaf), leaf.path, "") if leaf else ("other", "", "input")
        within = self._home.get(alive.name)
        if within is None:
            return _hidden(alive.name), "", alive.name
        place = _Place(within, alive.name, tuple(alive.element))
        chain = list(self._walk(place, self._behind))
        chain = self._filling(place) if chain[-1].one.opcode in ("broadcast", "constant") else chain
        operation = _operation(chain)
        module = operation.rpartition(SEPARATOR)[0]
        if not _FLOAT.match(alive.array):
            return "other", module, operation
        kind, path = (
            self._served(chain) or self._reduced(place) or (self._guessed(alive, chain), module)
        )
        return kind, path, operation

    def _served(self, chain: list[_Place]) -> tuple[Kind, str] | None:
        """By what an array is a copy of: a parameter on its way, a gradient on its way back."""
        for place in chain:
            if leaf := self._leaf(place.one):
                return ("gathered" if _kind(leaf) == "params" else _kind(leaf)), leaf.path
            if found := _scope(place):
                return found
        return None

    def _filling(self, place: _Place) -> list[_Place]:
        """Of zeros made for a loop: what the loop fills them with."""
        for ahead in self._walk(place, self._ahead):
            for user in ahead.within.users.get(ahead.name, []):
                if user.opcode == "while" and ahead.element:
                    return list(
                        self._walk(_Place(ahead.within, user.name, ahead.element), self._behind)
                    )
        return [place]

    def _reduced(self, place: _Place) -> tuple[Kind, str] | None:
        """By where it goes: what is reduced next is a gradient."""
        for ahead in self._walk(place, self._ahead):
            found = _scope(ahead)
            if found and found[0] == "gradients":
                return found
            if ahead.one.opcode in _REDUCTIONS:
                return "gradients", ""
        return None

    def _guessed(self, alive: Alive, chain: list[_Place]) -> Kind:
        """By its shape: the optimizer has no scope, nor what adds up gradients, nor those reduced
        late or by XLA.
        """
        names = [place.one.op_name for place in chain if place.one.op_name]
        name = names[0] if names else ""
        backward = "transpose(" in name and (self._plan.deferred or not self._plan.local_batch)
        if (backward or "jvp(" not in name) and _dims(alive.array) in self._shapes:
            return "gradients"
        return "activations"

    def _leaf(self, one: Instruction) -> Leaf | None:
        return self._leaves.get(one.op_name.replace("\\'", "'"))

    def _walk(self, start: _Place, step: Callable[[_Place], list[_Place]]) -> Iterator[_Place]:
        """Breadth first, through what only moves an array."""
        seen, ahead = {start[1:]}, deque([start])
        while ahead:
            place = ahead.popleft()
            yield place
            new = [each for each in step(place) if each[1:] not in seen]
            ahead += new if len(seen) < _MOST else []
            seen |= {each[1:] for each in new}

    def _behind(self, place: _Place) -> list[_Place]:
        """What an array is a copy of."""
        within, one, index = place.within, place.one, place.element
        match one.opcode:
            case "get-tuple-element":
                return [_Place(within, one.operands[0], (int(one.attribute("index")), *index))]
            case "tuple":
                return [_Place(within, one.operands[index[0]], index[1:])] if index else []
            case "while":  # what its body made last, and what it began with
                body = self._module.parts(one)[1]
                return [_Place(body, body.root.name, index), _Place(within, one.operands[0], index)]
            case "parameter":
                caller = self._callers.get(within.name)
                if caller is None or caller.one.opcode == "while":
                    return [caller._replace(element=index)] if caller else []
                return [_Place(caller.within, caller.one.operands[int(one.inside)], index)]
            case "fusion" | "call" | "async-start":
                called = self._module[one.calls[0]]
                return [
                    _Place(
                        called,
                        called.root.name,
                        index[1:] if one.opcode == "async-start" else index,
                    )
                ]
            case "dynamic-update-slice":
                return [_Place(within, one.operands[1])]
            case "copy-done" | "copy-start":
                return [_Place(within, one.operands[0])]
            case "optimization-barrier":
                return [_Place(within, one.operands[0], index)]
            case opcode if opcode.endswith("-done"):
                return [_Place(within, one.operands[0], (1, *index))]
            case "all-gather-start":
                return [_Place(within, one.operands[index[1] if len(index) > 1 else 0])]
            case opcode if opcode in _MOVES:
                return [
                    _Place(within, name)
                    for name in one.operands[: None if opcode == "concatenate" else 1]
                ]
        return []

    def _ahead(self, place: _Place) -> list[_Place]:
        """What is a copy of an array."""
        within, name, index = place
        found = [each for user in within.users.get(name, []) for each in self._used(place, user)]
        if place.one.opcode == "while":  # its next round
            found += self._used(place, place.one)
        caller = self._callers.get(within.name)
        if caller and within.root.name == name:
            found.append(caller._replace(element=index))
            found += (
                self._used(caller._replace(element=index), caller.one)
                if caller.one.opcode == "while"
                else []
            )
        return found

    def _used(self, place: _Place, user: Instruction) -> list[_Place]:
        within, name, index = place
        match user.opcode:
            case "get-tuple-element":
                return (
                    [_Place(within, user.name, index[1:])]
                    if (int(user.attribute("index")),) == index[:1]
                    else []
                )
            case "tuple":
                return [
                    _Place(within, user.name, (i, *index))
                    for i, o in enumerate(user.operands)
                    if o == name
                ]
            case "while":
                body = self._module.parts(user)[1]
                return [
                    _Place(body, each.name, index)
                    for each in body.instructions
                    if each.opcode == "parameter"
                ]
            case "fusion" | "call":
                inside = {str(i) for i, operand in enumerate(user.operands) if operand == name}
                called = self._module[user.calls[0]]
                given = [
                    one
                    for one in called.instructions
                    if one.opcode == "parameter" and one.inside in inside
                ]
                return [_Place(called, one.name, index) for one in given]
            case (
                "dynamic-update-slice" | "scatter"
            ):  # an embedding's gradient is scattered into zeros
                given_as = user.operands.index(name)
                return (
                    [_Place(within, user.name)]
                    if given_as == (user.opcode == "dynamic-update-slice")
                    else []
                )
            case opcode if opcode in _REDUCTIONS:
                return [_Place(within, user.name, (user.operands.index(name),))]
            case opcode if opcode in _MOVES or opcode.startswith("copy-"):
                return [_Place(within, user.name)]
        return []


def _hidden(name: str) -> Kind:
    """Of what the text does not show: newer releases name collectives by what stands inside their
    `-start`.
    """
    opcode = name.replace("_", "-")
    if opcode.startswith("all-gather"):
        return "gathered"
    return "gradients" if opcode.startswith(("all-reduce", "reduce-scatter")) else "other"


def _parts(module: Module, one: Instruction) -> tuple[Computation, ...]:
    return module.parts(one) if one.opcode == "while" else ()


def _leaves(layout: Layout) -> dict[str, Leaf]:
    """The state's leaves by the names that jax gives to a step's inputs:
    `state.params['head']['kernel']`.
    """
    keyed = jax.tree_util.tree_flatten_with_path(state_like(layout, lambda leaf: leaf))[0]
    return {f"state{jax.tree_util.keystr(keys)}": leaf for keys, leaf in keyed}


def _kind(leaf: Leaf) -> Kind:
    return "params" if leaf.path.startswith(COPIES + SEPARATOR) else leaf.part


def _shapes(leaf: Leaf) -> set[tuple[int, ...]]:
    """As `_dims` has them: a parameter and its shard, of all layers and of one."""
    whole, shard = leaf.shape, leaf.grad_sharding.shard_shape(leaf.shape)
    return {
        tuple(sorted(size for size in dims if size > 1))
        for s in (whole, shard)
        for dims in (s, s[leaf.stacked :])
    }


def _dims(array: str) -> tuple[int, ...]:
    """Without those of one, sorted: XLA transposes as it likes."""
    return tuple(
        sorted(int(size) for size in re.findall(r"\d+", array.partition("[")[2]) if size != "1")
    )


def _scope(place: _Place) -> tuple[Kind, str] | None:
    name = place.one.op_name
    gathers, reduces = name.rfind("fsdp.gather["), name.rfind("fsdp.reduce[")
    if max(gathers, reduces) < 0:
        return None
    paths, index = scopes(name), place.element[-1] if place.element else 0
    path = paths[index] if index < len(paths) else paths[0] if paths else ""
    return ("gathered" if gathers > reduces else "gradients"), path


def _operation(chain: list[_Place]) -> str:
    """The first name that says more than that something was stacked."""
    names = [name for place in chain if (name := stripped(place.one.op_name))]
    told = [
        name
        for name in names
        if name.rpartition(SEPARATOR)[2] not in _SILENT and not _UNNAMED.search(name)
    ]
    return next(iter([*told, *names]), "")
