"""Follows data through a program: from a collective's operands back, and from its result on.

Backwards for the parameter that it serves, forwards for the part of its result that is used.
"""

from math import prod

from fsdp_jax.hlo.op_names import expand, scopes, stripped
from fsdp_jax.hlo.parser import Computation, Instruction, Module

_SENDING = "all-gather reduce-scatter all-reduce all-to-all collective-permute async"
_COLLECTIVES = frozenset(_SENDING.split())
_HALVES = {f"{op}-{half}" for op in (*_COLLECTIVES, "call", "copy") for half in ("start", "done")}
_MOVES = "bitcast copy convert reshape transpose slice get-tuple-element"
_REARRANGING = {*_MOVES.split(), *_HALVES}
_SCALING = {"multiply", "divide", "add", "subtract", "negate"}
_JOINING = {"concatenate", "pad", "dynamic-slice", "tuple", *_COLLECTIVES}
_CONSTANT = {"parameter", "constant", "broadcast"}
DEPTH = 10  # how many instructions are followed in search of a name


def paths_of(module: Module, within: Computation, one: Instruction) -> list[str]:
    """Returns what each operand of a collective serves; "" where the program does not tell.

    XLA names a combined collective after all that it combined, or after the first; then its
    operands' producers are searched. A gradient that the partitioner reduces has no name of its
    own, but the array that it becomes has.
    """
    own = scopes(one.op_name)
    if own and len(one.operands) == 1:
        return [_joined(own)]
    if own and len(own) == len(one.operands):
        return own
    return [
        _joined(_scopes_behind(module, within, name))
        or _joined(_scopes_ahead(module, within, one, number))
        or _own_name(module, within, one, number)
        for number, name in enumerate(one.operands)
    ]


def _own_name(module: Module, within: Computation, one: Instruction, operand: int) -> str:
    """Returns what a collective's own name, or its reduction's, tells of an operand."""
    names = expand(one.op_name)
    if len(names) == len(one.operands) > 1:  # activations have no scope
        return _joined(scopes(names[operand])) or stripped(names[operand])
    if own := scopes(one.op_name) or _scopes_of_reduction(module, one):
        return "" if operand else own[0]  # it is that of the first
    return _traced_name(within, one, operand)


def concatenated_operands(module: Module, within: Computation, name: str) -> list[str]:
    """Returns the names of the arrays that an array concatenates, before they were flattened.

    It is a concatenation of arrays of `within`, or a fusion whose root is; else, `[name]`.
    """
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
    for i, part in enumerate(parts):
        array = within[part]
        while array.opcode == "bitcast":
            array = within[array.operands[0]]
        parts[i] = array.name
    elements = sum(prod(within[part].shapes[0].dims) for part in parts)
    arrays = all(len(within[part].shapes) == 1 for part in parts)
    return parts if arrays and elements == prod(one.shapes[0].dims) else [name]


def _scopes_ahead(module: Module, within: Computation, one: Instruction, operand: int) -> list[str]:
    """Returns the scopes in which a reduction's result is cast, where it is only moved before."""
    if one.opcode.removesuffix("-start") not in ("all-reduce", "reduce-scatter"):
        return []
    one = within.done(one) or one
    if len(one.shapes) == 1:
        return _scopes_of_users(module, within, one.name)
    index = str(operand)
    elements = [u for u in within.users.get(one.name, []) if u.attribute("index") == index]
    return [scope for each in elements for scope in _scopes_of_users(module, within, each.name)]


def _scopes_of_users(
    module: Module, within: Computation, name: str, depth: int = DEPTH
) -> list[str]:
    """Returns the nearest scopes among the instructions that move an array on."""
    nearest: list[str] = []
    for user in within.users.get(name, []) if depth else []:
        if user.opcode == "fusion":
            called = module[user.calls[0]]
            for parameter in called.parameters_for(user, name):
                nearest += _scopes_of_users(module, called, parameter.name, depth - 1)
        elif user.opcode in _REARRANGING:
            own = scopes(user.op_name)
            nearest += own or _scopes_of_users(module, within, user.name, depth - 1)
    return list(dict.fromkeys(nearest))


def _scopes_behind(module: Module, within: Computation, name: str, depth: int = DEPTH) -> list[str]:
    """Returns the nearest scopes among an array's producers that only move it."""
    one = within[name]
    if not depth:
        return []
    if one.opcode == "get-tuple-element":
        return _scopes_of_element(module, within, one, depth)
    if own := scopes(one.op_name):
        return own
    if one.opcode == "fusion":
        inside = module[one.calls[0]].instructions
        named = inside
        if any(each.opcode in ("dot", "convolution") for each in inside):
            # It makes an activation of a weight; a gradient's scope still counts.
            named = [each for each in inside if "fsdp.reduce[" in each.op_name]
        scopes_inside = [
            scope
            for each in named
            for scope in scopes(each.op_name) or _scopes_of_reduction(module, each)
        ]
        if scopes_inside:
            return scopes_inside
        if not all(each.opcode in _REARRANGING | _JOINING | _CONSTANT for each in inside):
            return []
    elif one.opcode not in _REARRANGING | _JOINING:
        return []
    return [
        scope
        for operand in one.operands
        for scope in _scopes_behind(module, within, operand, depth - 1)
    ]


def _scopes_of_element(
    module: Module, within: Computation, one: Instruction, depth: int
) -> list[str]:
    """Returns the scopes of one element of a tuple, or of a combined collective's result."""
    source = within[one.operands[0]]
    index = int(one.attribute("index"))
    own = scopes(source.op_name)
    if len(own) > 1:
        return own[index : index + 1]
    while source.opcode.endswith("-done"):
        source = within[source.operands[0]]
    opcode = source.opcode.removesuffix("-start")
    if (opcode in _COLLECTIVES or opcode == "tuple") and index < len(source.operands):
        behind = _scopes_behind(module, within, source.operands[index], depth - 1)
        return behind or (own if index == 0 else [])
    return own


def _scopes_of_reduction(module: Module, one: Instruction) -> list[str]:
    """Returns the scopes in the function that a reduction applies.

    A TPU's compiler may drop a reduction's own name; the function keeps that of the first one.
    """
    name = one.attribute("to_apply").lstrip("%")
    if not name:
        return []
    return [scope for each in module[name].instructions for scope in scopes(each.op_name)]


def _traced_name(within: Computation, one: Instruction, operand: int) -> str:
    """Returns the traced operation of a collective without scope, or of its operand's producer."""
    for _ in range(DEPTH):
        if name := stripped(one.op_name):
            return name
        if not one.operands or operand >= len(one.operands):
            break
        one, operand = within[one.operands[operand]], 0
    return ""


def _joined(names: list[str]) -> str:
    return "+".join(dict.fromkeys(names))


def only_sliced(module: Module, within: Computation, name: str) -> bool:
    """Returns whether only a dynamic slice of a result is used: by each device its own part."""
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
            elif not _only_slices(module, within, user, name):
                return False
    return True


def _only_slices(module: Module, within: Computation, user: Instruction, name: str) -> bool:
    """Returns whether `user` reads no more than a slice of `name`, itself or in its fusion."""
    if user.opcode == "dynamic-slice":
        smaller = prod(user.shapes[0].dims) < prod(within[name].shapes[0].dims)
        return user.operands[0] == name and smaller
    if user.opcode != "fusion":
        return False
    called = module[user.calls[0]]
    parameters = called.parameters_for(user, name)
    return all(only_sliced(module, called, parameter.name) for parameter in parameters)
