"""Follows data through a program: from a collective's operands back, and from its result on.

Backwards it finds the parameter that the collective serves, forwards the used part of its result.
"""

from math import prod

from fsdp_jax.hlo.op_names import scoped_paths, split_merged_names, strip_tracing
from fsdp_jax.hlo.parser import Computation, Instruction, Module

_SENDING = "all-gather reduce-scatter all-reduce all-to-all collective-permute async"
_COLLECTIVES = frozenset(_SENDING.split())
_HALVES = {f"{op}-{half}" for op in (*_COLLECTIVES, "call", "copy") for half in ("start", "done")}
# Opcodes of instructions whose result has elements of the operand, in another form or place.
_MOVES = "bitcast copy convert reshape transpose slice get-tuple-element"
_REARRANGING = {*_MOVES.split(), *_HALVES}
# Element by element: a slice of the result needs no more than that slice of the operand.
_SCALING = {"multiply", "divide", "add", "subtract", "negate"}
# Results that have the elements of several operands, a part of one, or those of other devices.
_JOINING = {"concatenate", "pad", "dynamic-slice", "tuple", *_COLLECTIVES}
# Other opcodes of a fusion that only moves arrays.
_CONSTANT = {"parameter", "constant", "broadcast"}
DEPTH = 10  # how many instructions are followed in search of a name


def paths_of_operands(module: Module, within: Computation, instruction: Instruction) -> list[str]:
    """Finds the parameter that each operand of a collective serves; "" where nothing names it.

    It is the path in the operand's scope, or several joined by "+"; without a scope, the traced
    operation.

    XLA names a combined collective after all that it combined, or after the first; then its
    operands' producers are searched. A gradient that the partitioner reduces has no name of its
    own, but the array that it becomes has.
    """
    # By its own name, where that names every operand.
    own = scoped_paths(instruction.op_name)
    if own and len(instruction.operands) == 1:
        return [_join_unique(own)]
    if own and len(own) == len(instruction.operands):
        return own
    # By the names around it, and last by its own although that may be another operand's.
    return [
        _join_unique(_paths_of_producers(module, within, name))
        or _join_unique(_paths_after_reduction(module, within, instruction, number))
        or _path_in_own_name(module, within, instruction, number)
        for number, name in enumerate(instruction.operands)
    ]


def _path_in_own_name(
    module: Module, within: Computation, instruction: Instruction, operand: int
) -> str:
    """Finds an operand, by number, in a collective's own name, or in its reduction's."""
    names = split_merged_names(instruction.op_name)
    if len(names) == len(instruction.operands) > 1:  # activations have no scope
        return _join_unique(scoped_paths(names[operand])) or strip_tracing(names[operand])
    own = scoped_paths(instruction.op_name)
    own = own or _paths_of_reduction_function(module, instruction)
    if not own:
        return _traced_name(within, instruction, operand)
    # A single name is that of the first operand.
    if operand > 0:
        return ""
    return own[0]


def concatenated_operands(module: Module, within: Computation, name: str) -> list[str]:
    """Lists the names of the arrays that are concatenated, flattened, in the array `name`.

    It is `[name]` alone where that is neither a concatenation nor a fusion whose root is one.
    """
    # The operands of the concatenation, as names of this computation.
    one = producer = within[name]
    parts = list(one.operands)
    if one.opcode == "fusion":
        called = module[one.calls[0]]
        producer = called.root
        inside = [called[operand] for operand in producer.operands]
        if any(each.opcode != "parameter" for each in inside):
            return [name]
        parts = [one.operands[int(each.inside)] for each in inside]
    if producer.opcode != "concatenate":
        return [name]
    # A bitcast flattens an array: its operand has the array's own shape.
    for i, part in enumerate(parts):
        array = within[part]
        while array.opcode == "bitcast":
            array = within[array.operands[0]]
        parts[i] = array.name
    # A fusion may also pad or slice them: the shapes would not be those that are sent.
    elements = sum(prod(within[part].shapes[0].dims) for part in parts)
    arrays = all(len(within[part].shapes) == 1 for part in parts)
    if not arrays or elements != prod(one.shapes[0].dims):
        return [name]
    return parts


def _paths_after_reduction(
    module: Module, within: Computation, instruction: Instruction, operand: int
) -> list[str]:
    """Finds the parameters in whose scope a reduction's result is cast, if only moved before.

    `operand`: the number of the operand whose result is followed.
    """
    if instruction.operation not in ("all-reduce", "reduce-scatter"):
        return []
    instruction = within.done_of(instruction) or instruction
    if len(instruction.shapes) == 1:
        return _paths_of_users(module, within, instruction.name)
    index = str(operand)
    elements = [u for u in within.users.get(instruction.name, []) if u.attribute("index") == index]
    return [path for each in elements for path in _paths_of_users(module, within, each.name)]


def _paths_of_users(
    module: Module, within: Computation, name: str, depth: int = DEPTH
) -> list[str]:
    """Finds the parameters in the nearest scopes among the instructions that move an array on.

    `depth`: how many instructions are followed.
    """
    nearest: list[str] = []
    if not depth:
        return nearest
    for user in within.users.get(name, []):
        if user.opcode == "fusion":
            called = module[user.calls[0]]
            for parameter in called.parameters_for(user, name):
                nearest += _paths_of_users(module, called, parameter.name, depth - 1)
        elif user.opcode in _REARRANGING:
            own = scoped_paths(user.op_name)
            nearest += own or _paths_of_users(module, within, user.name, depth - 1)
    return list(dict.fromkeys(nearest))


def _paths_of_producers(
    module: Module, within: Computation, name: str, depth: int = DEPTH
) -> list[str]:
    """Finds the parameters in the nearest scopes among the producers that only move an array.

    `depth`: how many instructions are followed.
    """
    one = within[name]
    if not depth:
        return []
    # By the producer's own name, ...
    if one.opcode == "get-tuple-element":
        return _paths_of_element(module, within, one, depth)
    if own := scoped_paths(one.op_name):
        return own
    if one.opcode == "fusion":
        # ... by the names in its fusion, ...
        inside = module[one.calls[0]].instructions
        named = inside
        if any(each.opcode in ("dot", "convolution") for each in inside):
            # It makes an activation of a weight; a gradient's scope still counts.
            named = [each for each in inside if "fsdp.reduce[" in each.op_name]
        inside_paths = [
            path
            for each in named
            for path in scoped_paths(each.op_name) or _paths_of_reduction_function(module, each)
        ]
        if inside_paths:
            return inside_paths
        if not all(each.opcode in _REARRANGING | _JOINING | _CONSTANT for each in inside):
            return []
    elif one.opcode not in _REARRANGING | _JOINING:
        return []
    # ... or by its operands', as far as the producer only moves them.
    return [
        path
        for operand in one.operands
        for path in _paths_of_producers(module, within, operand, depth - 1)
    ]


def _paths_of_element(
    module: Module, within: Computation, instruction: Instruction, depth: int
) -> list[str]:
    """Finds the parameters in the scopes of an element of a tuple, or of a collective's result.

    `instruction`: the `get-tuple-element` that reads it.
    """
    source = within[instruction.operands[0]]
    index = int(instruction.attribute("index"))
    own = scoped_paths(source.op_name)
    if len(own) > 1:
        return own[index : index + 1]
    # The operand of the same number; a single name is that of the first.
    while source.opcode.endswith("-done"):
        source = within[source.operands[0]]
    moves = source.operation in _COLLECTIVES or source.opcode == "tuple"
    if moves and index < len(source.operands):
        behind = _paths_of_producers(module, within, source.operands[index], depth - 1)
        if behind or index > 0:
            return behind
    return own


def _paths_of_reduction_function(module: Module, instruction: Instruction) -> list[str]:
    """Finds the parameters in the scopes of the function that a reduction applies.

    A TPU's compiler may drop a reduction's own name; the function keeps that of the first one.
    """
    name = instruction.attribute("to_apply").lstrip("%")
    if not name:
        return []
    return [path for each in module[name].instructions for path in scoped_paths(each.op_name)]


def _traced_name(within: Computation, instruction: Instruction, operand: int) -> str:
    """Finds the traced operation of a collective without scope, or of its operand's producer.

    `operand`: the operand's number. "" where neither has a name.
    """
    for _ in range(DEPTH):
        if name := strip_tracing(instruction.op_name):
            return name
        if not instruction.operands or operand >= len(instruction.operands):
            break
        instruction, operand = within[instruction.operands[operand]], 0
    return ""


def _join_unique(names: list[str]) -> str:
    return "+".join(dict.fromkeys(names))


def is_only_sliced(module: Module, within: Computation, name: str) -> bool:
    """Tells whether each device uses only its own part of an array, by a dynamic slice."""
    # Follow it through instructions that move or scale it, to those that read it.
    seen = {name}
    remaining = [name]
    while remaining:
        name = remaining.pop()
        users = within.users.get(name, [])
        if not users or within[name].root:
            return False
        for user in users:
            if user.opcode in _REARRANGING | _SCALING:
                remaining += {user.name} - seen
                seen.add(user.name)
            elif not _reads_only_a_slice(module, within, user, name):
                return False
    return True


def _reads_only_a_slice(module: Module, within: Computation, user: Instruction, name: str) -> bool:
    """Tells whether `user` reads no more than a slice of `name`, itself or in its fusion."""
    if user.opcode == "dynamic-slice":
        smaller = prod(user.shapes[0].dims) < prod(within[name].shapes[0].dims)
        return user.operands[0] == name and smaller
    if user.opcode != "fusion":
        return False
    called = module[user.calls[0]]
    parameters = called.parameters_for(user, name)
    return all(is_only_sliced(module, called, parameter.name) for parameter in parameters)
