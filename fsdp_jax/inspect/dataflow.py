"""Where a collective's operands come from, for what they serve, and where its result goes, for what is kept of it."""

from math import prod

from fsdp_jax.inspect.hlo import Computation, Instruction, Module
from fsdp_jax.inspect.names import expand, scopes, stripped

_COLLECTIVES = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "async"}
_HALVES = {f"{op}-{half}" for op in (*_COLLECTIVES, "call", "copy") for half in ("start", "done")}
_MOVES = {"bitcast", "copy", "convert", "reshape", "transpose", "slice", "get-tuple-element", *_HALVES}
_SCALES = {"multiply", "divide", "add", "subtract", "negate"}
_GATHERS = {"concatenate", "pad", "dynamic-slice", "tuple", *_COLLECTIVES}
_IDLE = {"parameter", "constant", "broadcast"}
DEPTH = 10
"""How many instructions a name is looked for."""


def paths_of(module: Module, within: Computation, one: Instruction) -> list[str]:
    """What each operand of a collective serves; "" where the program does not tell.

    XLA names a combined collective after all that it combined, or after the first; then its operands are asked.
    """
    own, count = scopes(one.op_name), len(one.operands)
    if own and (count == 1 or len(own) == count):
        return own if count > 1 else [_joined(own)]
    paths = [_joined(scopes_behind(module, within, name)) for name in one.operands]
    rest = own or _scopes_of_reduction(module, one)
    rest = [*rest[:1], *[""] * count] if rest else [_traced(within, one, i) for i in range(count)]
    return [path or other for path, other in zip(paths, rest, strict=False)]


def scopes_behind(module: Module, within: Computation, name: str, depth: int = DEPTH) -> list[str]:
    """The nearest scopes among an array's producers that only move it."""
    one = within[name]
    if not depth:
        return []
    if one.opcode == "get-tuple-element":
        return _scopes_of_element(module, within, one, depth)
    if found := scopes(one.op_name):
        return found
    if one.opcode == "fusion":
        inside = module[one.calls[0]].instructions
        if found := [scope for each in inside for scope in scopes(each.op_name) or _scopes_of_reduction(module, each)]:
            return found
        if not all(each.opcode in _MOVES | _GATHERS | _IDLE for each in inside):
            return []
    elif one.opcode not in _MOVES | _GATHERS:
        return []
    return [scope for operand in one.operands for scope in scopes_behind(module, within, operand, depth - 1)]


def _scopes_of_element(module: Module, within: Computation, one: Instruction, depth: int) -> list[str]:
    """Of one element of a tuple, or of a combined collective's result."""
    source, index = within[one.operands[0]], int(one.attribute("index"))
    found = scopes(source.op_name)
    if len(found) > 1:
        return found[index : index + 1]
    while source.opcode.endswith("-done"):
        source = within[source.operands[0]]
    plain = source.opcode.removesuffix("-start")
    if (plain in _COLLECTIVES or plain == "tuple") and index < len(source.operands):
        behind = scopes_behind(module, within, source.operands[index], depth - 1)
        return behind or (found if index == 0 else [])
    return found


def _scopes_of_reduction(module: Module, one: Instruction) -> list[str]:
    """A TPU's compiler may drop a reduction's own name; the function that it applies still has the first one's."""
    name = one.attribute("to_apply").lstrip("%")
    return [scope for each in module[name].instructions for scope in scopes(each.op_name)] if name else []


def _traced(within: Computation, one: Instruction, operand: int) -> str:
    """The traced operation of a collective without a scope, or of what produces its operand."""
    names = expand(one.op_name)
    if len(names) == len(one.operands) > 1:
        return stripped(names[operand])
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
    """Whether of a result only a dynamic slice is used: by each device its own part."""
    seen, ahead = {name}, [name]
    while ahead:
        name = ahead.pop()
        users = within.users.get(name, [])
        if not users or within[name].root:
            return False
        for user in users:
            if user.opcode in _MOVES | _SCALES:
                ahead += {user.name} - seen
                seen.add(user.name)
            elif not _slices(module, within, user, name):
                return False
    return True


def _slices(module: Module, within: Computation, user: Instruction, name: str) -> bool:
    if user.opcode == "dynamic-slice":
        return user.operands[0] == name and prod(user.shapes[0].dims) < prod(within[name].shapes[0].dims)
    if user.opcode != "fusion":
        return False
    called = module[user.calls[0]]
    places = {str(place) for place, operand in enumerate(user.operands) if operand == name}
    given = [one.name for one in called.instructions if one.opcode == "parameter" and one.inside in places]
    return all(only_sliced(module, called, parameter) for parameter in given)
