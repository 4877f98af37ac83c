"""The arrays of a compiled step in device memory at its peak, and the purpose of each.

XLA's memory reports tell where each value is stored and how long it lives (`read_memory_report`);
the program's text tells what made it. `peak_memory` joins the two.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import jax

from fsdp_jax.hlo.op_names import MERGED, scoped_paths, strip_tracing
from fsdp_jax.hlo.parser import Computation, Instruction, Module, shapes_of
from fsdp_jax.hlo.source_frames import SourceFrames
from fsdp_jax.host_memory import HOST_SPACE
from fsdp_jax.planner.compiled.buffer_assignment import (
    DEFAULT,
    ON_HOST,
    LiveBuffer,
    MemoryReport,
)
from fsdp_jax.sharding.layout import COPIES, Leaf
from fsdp_jax.step.others import arrays_like, leaves_of_others
from fsdp_jax.step.state import state_like
from fsdp_jax.step.step_plan import StepPlan
from fsdp_jax.tree import SEPARATOR

Kind = Literal["params", "gradients", "optimizer", "activations", "gathered", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_MOVES = """all-gather bitcast concatenate convert copy copy-done copy-start dynamic-slice
    dynamic-slice-start pad reduce-precision reshape slice slice-start transpose"""
_MOVING_OPCODES = frozenset(_MOVES.split())
_REDUCTIONS = {f"{op}{half}" for op in ("all-reduce", "reduce-scatter") for half in ("", "-start")}
_FLOAT = re.compile(r"b?f\d+")
_MOST_VISITED = 64  # how many instructions a search from an array visits
_MOST_OPERATIONS = 512  # … and one through operations, for the parameter that it is computed with
_KEYS = re.compile(r"\[\\?'([^'\\]+)")  # of `batch.leaves['tokens']`
_UNNAMED = re.compile(r"^state\.|\.\d+$")  # an input, or a name that the compiler made
_STACKING = "dynamic_update_slice dynamic_slice copy optimization_barrier squeeze broadcast_in_dim"
_UNINFORMATIVE = frozenset(_STACKING.split())
_WITHOUT_LINE = _UNINFORMATIVE | {"", "convert_element_type", "reduce_precision"}


@dataclass(frozen=True)
class Buffer:
    """One array in device memory."""

    bytes: int  # that it takes, padding included
    array: str  # as `bf16[31,1,2048,4096]`
    kind: Kind  # `gathered`: full parameters, and casts of shards that are about to be gathered
    path: str  # of the parameter or leaf of the state, else of the module, where names tell
    operation: str  # the traced operation that made it
    line: str = ""  # `model.py:12`, of the model or loss; "" where the program's text has no lines


@dataclass(frozen=True)
class PeakMemory:
    """Device memory at the peak of a step."""

    peak_bytes: int  # device memory that the program uses
    host_bytes: int  # host memory that it uses for each device
    breakdown: dict[Kind, int]  # their sum is `peak_bytes`; `other` includes gaps between buffers
    buffers: tuple[Buffer, ...]  # all that are live at the peak, largest first
    idle: tuple[Buffer, ...] = ()  # for which the rest of the memory is kept, part of `other`


def peak_memory(
    plan: StepPlan, module: Module, report: MemoryReport, frames: SourceFrames | None = None
) -> PeakMemory:
    """Lists what a device keeps at the peak of a step, array by array.

    `plan`: of the step as it was lowered; `report`: of the compilation that made `module`;
    `frames`: of its text, for the lines that arrays come from.
    """
    classifier = _BufferClassifier(plan, module, report.live, frames or SourceFrames(""))

    def described(live: LiveBuffer) -> Buffer:
        array = live.array.lstrip("(")  # of a tuple's own table, the first element
        return Buffer(live.bytes, array, *classifier.classify(live))

    buffers = [described(live) for live in report.live]
    buffers.sort(key=lambda buffer: (-buffer.bytes, buffer.kind, buffer.path))
    breakdown: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for buffer in buffers:
        breakdown[buffer.kind] += buffer.bytes
    peak = report.spaces[DEFAULT]
    breakdown["other"] += peak - sum(breakdown.values())
    idle = [described(live) for live in report.idle]
    on_host = report.spaces.get(ON_HOST, 0)
    return PeakMemory(peak, on_host, breakdown, tuple(buffers), tuple(idle))


def steady_state(plan: StepPlan) -> dict[Kind, int]:
    """Counts the bytes of the state on a device between steps, by kind; of other models too."""
    kinds: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    others = leaves_of_others(plan).values()
    for leaf in (*plan.layout, *chain.from_iterable(others)):
        if not leaf.on_host:
            kinds[_leaf_kind(leaf)] += leaf.bytes_per_device
    return kinds


class _ArrayRef(NamedTuple):
    """A result in a program, or an element of a tuple result."""

    within: Computation
    name: str
    element: tuple[int, ...] = ()

    @property
    def instruction(self) -> Instruction:
        return self.within[self.name]


class _BufferClassifier:
    """Finds the purpose of arrays of a step's program, by their sources and their uses."""

    def __init__(
        self,
        plan: StepPlan,
        module: Module,
        live: Sequence[LiveBuffer],
        frames: SourceFrames,
    ) -> None:
        self._plan = plan
        self._frames = frames
        self._module = module
        self._computation_of: dict[str, Computation] = {}
        self._callers: dict[str, _ArrayRef] = {}
        for within in module.computations.values():
            for instruction in within.instructions:
                self._computation_of[instruction.name] = within
                loop = module.loop_parts(instruction) if instruction.opcode == "while" else ()
                for called in (*instruction.calls, *(part.name for part in loop)):
                    self._callers[called] = _ArrayRef(within, instruction.name)
        self._leaves = _leaves_by_input_name(plan)
        self._inputs = module[module.entry].parameters
        # Inputs of the program, and the leaves of the state that they are.
        held = {each.parameter for each in live if self._is_input(each)}
        # inputs in device memory whose own memory holds something else by now
        self._moved = {
            one.op_name: one
            for number, one in self._inputs.items()
            if number not in held and all(shape.space != HOST_SPACE for shape in one.shapes)
        }
        self._modules = {
            SEPARATOR.join(names[:count])
            for names in (path.split(SEPARATOR) for path in plan.layout.by_path)
            for count in range(1, len(names))
        }
        self._shapes: dict[tuple[int, ...], list[str]] = {}
        for path, leaf in plan.layout.by_path.items():
            for sizes in {_sorted_sizes(shape) for shape in gradient_shapes(leaf)}:
                self._shapes.setdefault(sizes, []).append(path)

    def classify(self, live: LiveBuffer) -> tuple[Kind, str, str, str]:
        """Finds the kind, path, operation and line of a `Buffer` for a value that is live."""
        if live.parameter is not None and self._is_input(live):
            leaf = self._leaf_of_input(self._inputs[live.parameter])
            path = _batch_path(self._inputs[live.parameter].op_name)
            return (*leaf, "", "") if leaf else ("other", path, "input", "")
        ref = self._find(live)
        if ref is None:
            return _kind_by_name(live.name), "", live.name, ""
        sources = list(self._walk_copies(ref, self._sources_of))
        if sources[-1].instruction.opcode in ("broadcast", "constant"):
            sources = self._loop_results(ref)
        operation = _informative_operation(sources)
        module_path = self._module_path(operation, ref)
        line = self._line(sources)
        if not _FLOAT.match(live.array):
            return "other", module_path, operation, line
        known = self._kind_by_source(live, sources) or self._kind_by_reduction(ref)
        kind, path = known or (self._kind_by_shape(live, sources), module_path)
        if kind == "gradients" and (not path or not known):
            path = self._gradient_path(live, operation)
        return kind, path, operation, line

    def _gradient_path(self, live: LiveBuffer, operation: str) -> str:
        """Finds whose gradient an array is: of the one parameter of its shape in the module.

        Where there are several it is the module, which the operation's name tells.
        """
        (array,) = shapes_of(live.array)
        module = self._module_of(operation)
        paths = self._shapes.get(_sorted_sizes(array.dims), [])
        inside = [path for path in paths if path.startswith(f"{module}{SEPARATOR}")] or paths
        return inside[0] if len(inside) == 1 else module

    def _line(self, sources: Sequence[_ArrayRef]) -> str:
        """Finds the line of the model that made an array: of its sources, what computes first.

        What only moves or stacks an array has the line of the loop that stacks it.
        """
        names = [strip_tracing(ref.instruction.op_name) for ref in sources]
        moves = [
            name in self._modules or name.rpartition(SEPARATOR)[2] in _WITHOUT_LINE
            for name in names
        ]
        computing = [ref for ref, is_move in zip(sources, moves, strict=True) if not is_move]
        lines = (self._frames.line(ref.instruction) for ref in (*computing, *sources))
        return next(filter(None, lines), "")

    def _module_path(self, operation: str, made: _ArrayRef) -> str:
        """Finds the path of the module that made an array, from the operation's name.

        That may be the name of the module alone, as of a slice of what a loop stacks. Units alone
        have names in a trace: inside of one, and outside of all, it is the module of the parameter
        that the array is computed with, through as few operations as possible.
        """
        if path := _batch_path(operation):
            return path
        path = self._module_of(operation)
        for ref in self._walk_copies(made, self._inputs_of, most=_MOST_OPERATIONS):
            leaf = self._leaf_of_input(ref.instruction) or _scope_kind(ref)
            if leaf is None or leaf[0] not in ("params", "gathered"):
                continue
            module = leaf[1].rpartition(SEPARATOR)[0] or leaf[1]
            if not path or module.startswith(path + SEPARATOR):
                return module
        return path

    def _module_of(self, operation: str) -> str:
        """Finds the module of an operation; of several that XLA merged, the one that has all."""
        paths = {
            name if name in self._modules else name.rpartition(SEPARATOR)[0]
            for name in operation.split(MERGED)
        } - {""}
        if len(paths) < 2:
            return "".join(paths)
        levels = zip(*(path.split(SEPARATOR) for path in paths), strict=False)
        return SEPARATOR.join(
            next(iter(same)) for same in takewhile(lambda names: len(names) == 1, map(set, levels))
        )

    def _inputs_of(self, ref: _ArrayRef) -> list[_ArrayRef]:
        """Finds the arrays that an array is a copy of, or else is computed from."""
        sources = self._sources_of(ref)
        if sources or ref.instruction.opcode in ("parameter", "tuple"):
            return sources
        return [_ArrayRef(ref.within, name) for name in ref.instruction.operands]

    def _find(self, live: LiveBuffer) -> _ArrayRef | None:
        """Finds where the program's text shows a value; None where it does not.

        The text of an asynchronous fusion shows the computation that it runs and not its name:
        `wrapped_slice.2` is the result of what calls `wrapped_slice_computation.2`.
        """
        if live.name in self._computation_of:
            return _ArrayRef(self._computation_of[live.name], live.name, live.element)
        name, dot, number = live.name.partition(".")
        caller = self._callers.get(f"{name}_computation{dot}{number}")
        if caller is None or not caller.instruction.opcode.endswith("-start"):
            return None
        return caller._replace(element=(1, *live.element))

    def _is_input(self, live: LiveBuffer) -> bool:
        """Tells whether a value in an input's memory is the input, or its update in place.

        The update is computed from the input, or is a result of the step. Any other value may have
        this memory where the input was copied before, or is not needed any more.
        """
        number = live.parameter
        if number not in self._inputs or not _is_alike(live.array, self._inputs[number].type):
            return False
        made = self._find(live)
        if made is None:
            return True
        operands = [_ArrayRef(made.within, name) for name in made.instruction.operands]
        sources = chain.from_iterable(
            self._walk_copies(ref, self._sources_of) for ref in (made, *operands)
        )
        if any(ref.instruction is self._inputs[number] for ref in sources):
            return True
        results = self._module[self._module.entry].root
        return any(ref.instruction is results for ref in self._walk_copies(made, self._uses_of))

    def _kind_by_source(
        self, live: LiveBuffer, sources: Sequence[_ArrayRef]
    ) -> tuple[Kind, str] | None:
        """Finds (kind, path) of an array by its sources; None if these tell nothing.

        `sources`: the arrays that it is a copy of: of the state, or in the scope of a collective.
        """
        for ref in sources:
            if leaf := self._leaf_of_input(ref.instruction):
                kind, path = leaf
                moved = self._moved.get(ref.instruction.op_name)
                if kind == "params" and not (moved and _is_alike(live.array, moved.type)):
                    kind = "gathered"
                return kind, path
            if scope := _scope_kind(ref):
                return scope
        return None

    def _loop_results(self, zeros: _ArrayRef) -> list[_ArrayRef]:
        """Finds what a loop writes into an array of zeros, and its sources; else the array."""
        for ref in self._walk_copies(zeros, self._uses_of):
            for user in ref.within.users.get(ref.name, []):
                if user.opcode == "while" and ref.element:
                    result = _ArrayRef(ref.within, user.name, ref.element)
                    return list(self._walk_copies(result, self._sources_of))
        return [zeros]

    def _kind_by_reduction(self, start: _ArrayRef) -> tuple[Kind, str] | None:
        """Matches an array that is reduced next: ("gradients", path); None if it is not."""
        for ref in self._walk_copies(start, self._uses_of):
            scope = _scope_kind(ref)
            if scope and scope[0] == "gradients":
                return scope
            if ref.instruction.opcode in _REDUCTIONS:
                return "gradients", ""
        return None

    def _kind_by_shape(self, live: LiveBuffer, sources: Sequence[_ArrayRef]) -> Kind:
        """Guesses the kind of an array by its shape: gradients if a parameter has it.

        There is no scope around the optimizer, around the sum of gradients over microbatches, and
        around gradients reduced after the last of them or by XLA.
        """
        names = (ref.instruction.op_name for ref in sources)
        name = next((name for name in names if name), "")
        backward = "transpose(" in name and (self._plan.deferred or not self._plan.local_batch)
        (array,) = shapes_of(live.array)
        if (backward or "jvp(" not in name) and _sorted_sizes(array.dims) in self._shapes:
            return "gradients"
        return "activations"

    def _leaf_of_input(self, instruction: Instruction) -> tuple[Kind, str] | None:
        """Finds kind and path of the array of a state that an input is; None for other inputs."""
        return self._leaves.get(instruction.op_name.replace("\\'", "'"))

    def _walk_copies(
        self,
        start: _ArrayRef,
        neighbours: Callable[[_ArrayRef], list[_ArrayRef]],
        most: int = _MOST_VISITED,
    ) -> Iterator[_ArrayRef]:
        """Yields `start` and the arrays that `neighbours` leads to, breadth first, each once.

        `neighbours`: `_sources_of` or `_uses_of`, which follow instructions that only move arrays,
        or `_inputs_of`; `most`: how many are visited.
        """
        seen = {start[1:]}
        queue = deque([start])
        while queue:
            ref = queue.popleft()
            yield ref
            new = [each for each in neighbours(ref) if each[1:] not in seen]
            if len(seen) < most:
                queue += new
            seen |= {each[1:] for each in new}

    def _sources_of(self, ref: _ArrayRef) -> list[_ArrayRef]:
        """Finds the arrays that an array is directly a copy of."""
        within, instruction, element = ref.within, ref.instruction, ref.element
        operands = instruction.operands
        # `element`: indices into nested tuples, which each case pushes, pops or passes on.
        match instruction.opcode:
            case "get-tuple-element":
                index = int(instruction.attribute("index"))
                return [_ArrayRef(within, operands[0], (index, *element))]
            case "tuple":
                return [_ArrayRef(within, operands[element[0]], element[1:])] if element else []
            case "while":  # the last result of its body, and its initial value
                body = self._module.loop_parts(instruction)[1]
                initial = _ArrayRef(within, operands[0], element)
                return [_ArrayRef(body, body.root.name, element), initial]
            case "parameter":
                caller = self._callers.get(within.name)
                if caller is None:
                    return []
                if caller.instruction.opcode == "while":
                    return [caller._replace(element=element)]
                argument = caller.instruction.operands[int(instruction.inside)]
                return [_ArrayRef(caller.within, argument, element)]
            case "fusion" | "call" | "async-start" | "fusion-start":
                if instruction.opcode.endswith("-start"):  # (operands, result, context)
                    element = element[1:]
                called = self._module[instruction.calls[0]]
                return [_ArrayRef(called, called.root.name, element)]
            case "dynamic-update-slice" | "dynamic-update-slice-start":
                return [_ArrayRef(within, operands[1])]
            case "optimization-barrier":
                return [_ArrayRef(within, operands[0], element)]
            case "all-gather-start":
                return [_ArrayRef(within, operands[element[1] if len(element) > 1 else 0])]
            case "concatenate":
                return [_ArrayRef(within, name) for name in operands]
            case opcode if opcode in _MOVING_OPCODES:
                return [_ArrayRef(within, name) for name in operands[:1]]
            case opcode if opcode.endswith("-done"):
                return [_ArrayRef(within, operands[0], (1, *element))]
        return []

    def _uses_of(self, ref: _ArrayRef) -> list[_ArrayRef]:
        """Finds the arrays that are directly copies of an array."""
        within, name, element = ref
        copies = [
            each for user in within.users.get(name, []) for each in self._copies_made_by(ref, user)
        ]
        if ref.instruction.opcode == "while":  # the next trip
            copies += self._copies_made_by(ref, ref.instruction)
        caller = self._callers.get(within.name)
        if caller and within.root.name == name:
            copies.append(caller._replace(element=element))
        return copies

    def _copies_made_by(self, ref: _ArrayRef, user: Instruction) -> list[_ArrayRef]:
        """Finds the arrays that `user` makes as copies of an array."""
        within, name, element = ref
        # The inverse of `_sources_of`; a reduction gives one result for each operand.
        match user.opcode:
            case "get-tuple-element":
                if (int(user.attribute("index")),) != element[:1]:
                    return []
                return [_ArrayRef(within, user.name, element[1:])]
            case "tuple":
                indices = [i for i, operand in enumerate(user.operands) if operand == name]
                return [_ArrayRef(within, user.name, (i, *element)) for i in indices]
            case "while":
                body = self._module.loop_parts(user)[1]
                return [_ArrayRef(body, one.name, element) for one in body.parameters.values()]
            case "fusion" | "call":
                called = self._module[user.calls[0]]
                parameters = called.parameters_for(user, name)
                return [_ArrayRef(called, one.name, element) for one in parameters]
            case "dynamic-update-slice" | "scatter":
                # an embedding's gradient is scattered into zeros
                copied = 0 if user.opcode == "scatter" else 1
                if user.operands.index(name) == copied:
                    return [_ArrayRef(within, user.name)]
            case opcode if opcode in _REDUCTIONS:
                return [_ArrayRef(within, user.name, (user.operands.index(name),))]
            case opcode if opcode in _MOVING_OPCODES:
                return [_ArrayRef(within, user.name)]
        return []


def _kind_by_name(name: str) -> Kind:
    """Guesses the kind of a value that the program's text does not show, by its name.

    Newer releases name collectives by the instruction inside their `-start`.
    """
    opcode = name.replace("_", "-")
    if opcode.startswith("all-gather"):
        return "gathered"
    return "gradients" if opcode.startswith(("all-reduce", "reduce-scatter")) else "other"


def _leaves_by_input_name(plan: StepPlan) -> dict[str, tuple[Kind, str]]:
    """Maps jax's names of a step's inputs to arrays of states: `state.params['head']['w']`.

    Returns their kinds and paths; those of another model begin with its name.
    """
    trees: dict[str, Any] = {"state": state_like(plan.layout, lambda leaf: leaf)}
    prefixes = {"state": ""}
    for name, other in plan.others.items():
        argument = f"others[0]['{name}']"
        trees[argument] = arrays_like(other.plan.layout, lambda leaf: leaf)
        prefixes[argument] = name + SEPARATOR
    return {
        f"{argument}{jax.tree_util.keystr(keys)}": (
            _leaf_kind(leaf),
            prefixes[argument] + leaf.path,
        )
        for argument, tree in trees.items()
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _leaf_kind(leaf: Leaf) -> Kind:
    return "params" if leaf.path.startswith(COPIES + SEPARATOR) else leaf.part


def gradient_shapes(leaf: Leaf) -> set[tuple[int, ...]]:
    """Lists the shapes of a gradient, whole, padded and a shard, of all layers and of one."""
    shard = leaf.grad_sharding.shard_shape(leaf.grad_shape)
    return {
        dims
        for shape in (leaf.shape, leaf.grad_shape, shard)
        for dims in (shape[layers:] for layers in range(leaf.stacked + 1))
    }


def _is_alike(array: str, other: str) -> bool:
    """Tells whether two types have the same dtypes and numbers of elements.

    XLA reshapes as it likes.
    """
    one, two = ([(each.dtype, prod(each.dims)) for each in shapes_of(a)] for a in (array, other))
    return one == two


def _sorted_sizes(dims: Sequence[int]) -> tuple[int, ...]:
    """Sorts the dims, without those of 1, to compare shapes: XLA transposes as it likes."""
    return tuple(sorted(size for size in dims if size != 1))


def _batch_path(name: str) -> str:
    """Reads the path of an input of the batch, `batch/tokens`, from its name; "" for another."""
    if not name.startswith("batch."):
        return ""
    return SEPARATOR.join(["batch", *_KEYS.findall(name)])


def _scope_kind(ref: _ArrayRef) -> tuple[Kind, str] | None:
    """Reads (kind, path) in an array's `fsdp.gather[...]` or `fsdp.reduce[...]` scope, if any."""
    name = ref.instruction.op_name
    gather, reduce = name.rfind("fsdp.gather["), name.rfind("fsdp.reduce[")
    if max(gather, reduce) < 0:
        return None
    paths = scoped_paths(name) or [""]
    index = ref.element[-1] if ref.element else 0
    path = paths[index] if index < len(paths) else paths[0]
    return ("gathered" if gather > reduce else "gradients"), path


def _informative_operation(sources: Sequence[_ArrayRef]) -> str:
    """Finds the traced operation that made an array, from the names of its sources.

    That is the first name that tells more than that something was stacked; "" if there is none.
    """
    names = [name for ref in sources if (name := strip_tracing(ref.instruction.op_name))]
    informative = [
        name
        for name in names
        if name.rpartition(SEPARATOR)[2] not in _UNINFORMATIVE and not _UNNAMED.search(name)
    ]
    return next(iter(informative or names), "")
