"""Where a collective's operands come from, for what they serve, and where its result goes, for what
is kept of it.
"""

from math import prod

from fsdp_jax.hlo.op_names import expand, scopes, stripped
from fsdp_jax.hlo.parser import Computation, Instruction, Module

_COLLECTIVES = {
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "async",
}
_HALVES = {f"{op}-{half}" for op in (*_COLLECTIVES, "call", "copy") for half in ("start", "done")}
_MOVES = {
    "bitcast",
    "copy",
    "convert",
    "reshape",
    "transpose",
    "slice",
    "get-tuple-element",
    *_HALVES,
}
_SCALES = {"multiply", "divide", "add", "subtract", "negate"}
_GATHERS = {"concatenate", "pad", "dynamic-slice", "tuple", *_COLLECTIVES}
_IDLE = {"parameter", "constant", "broadcast"}
DEPTH = 10
"""How many instructions a name is looked for."""


def paths_of(module: Module, within: Computation, one: Instruction) -> list[str]:
    """What each operand of a collective serves; "" where the program does not tell.

    XLA names a combined collective after all that it combined, or after the first; then its
    operands are asked. A gradient that the partitioner reduces has no name of its own, but what it
    becomes has.
    """
    own, names, count = scopes(one.op_name), expand(one.op_name), len(one.operands)
    if own and (count == 1 or len(own) == count):
        return own if count > 1 else [_joined(own)]
    paths = [_joined(scopes_behind(module, within, name)) for name in one.operands]
    paths = [path or _joined(_scopes_ahead(module, within, one, i)) for i, path in enumerate(paths)]
    if count > 1 and len(names) == count:  # parameters, and activations, which have no scope
        rest = [_joined(scopes(name)) for name in names]
    else:
        rest = (own or _scopes_of_reduction(module, one))[:1]
    if not rest or len(rest) == count > 1:
        rest = [path or _traced(within, one, i) for i, path in enumerate(rest or [""] * count)]
    rest += [""] * count
    return [path or other for path, other in zip(paths, rest, strict=False)]


def pieces(module: Module, within: Computation, name: str) -> list[str]:
    """The arrays that an operand is made of, by their names: of a concatenation its parts, as they
    were before.
    """
    one = within[name]
    made = one
    if one.opcode == "fusion":
        called = module[one.calls[0]]
        made = called.root
        given = (
            [called[operand] for operand in made.operands] if made.opcode == "concatenate" else []
        )
        if not given or any(each.opcode != "parameter" for each in given):
            return [name]
        parts = [one.operands[int(each.inside)] for each in given]
    else:
        parts = list(one.operands)
    if made.opcode != "concatenate":
        return [name]
    while flat := [i for i, part in enumerate(parts) if within[part].opcode == "bitcast"]:
        for i in flat:
            parts[i] = within[parts[i]].operands[0]
    same = sum(prod(within[part].shapes[0].dims) for part in parts) == prod(one.shapes[0].dims)
    return parts if same and all(len(within[part].shapes) == 1 for part in parts) else [name]


def _scopes_ahead(module: Module, within: Computation, one: Instruction, operand: int) -> list[str]:
    """The scope of the reduction that a collective's result is cast in, where it is but moved
    before.
    """
    if one.opcode.removesuffix("-start") not in ("all-reduce", "reduce-scatter"):
        return []
    while done := [
        user for user in within.users.get(one.name, []) if user.opcode.endswith("-done")
    ]:
        one = done[0]
    if len(one.shapes) == 1:
        return _named_users(module, within, one.name)
    place = str(operand)
    mine = [user for user in within.users.get(one.name, []) if user.attribute("index") == place]
    return [scope for user in mine for scope in _named_users(module, within, user.name)]


def _named_users(module: Module, within: Computation, name: str, depth: int = DEPTH) -> list[str]:
    found: list[str] = []
    for user in within.users.get(name, []) if depth else []:
        if user.opcode == "fusion":
            called = module[user.calls[0]]
            for given in _given(called, user, name):
                found += _named_users(module, called, given, depth - 1)
        elif user.opcode in _MOVES:
            found += scopes(user.op_name) or _named_users(module, within, user.name, depth - 1)
    return list(dict.fromkeys(found))


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
        named = inside
        if any(
            each.opcode in ("dot", "convolution") for each in inside
        ):  # of a weight it makes an activation
            named = [each for each in inside if "fsdp.reduce[" in each.op_name]
        if found := [
            scope
            for each in named
            for scope in scopes(each.op_name) or _scopes_of_reduction(module, each)
        ]:
            return found
        if not all(each.opcode in _MOVES | _GATHERS | _IDLE for each in inside):
            return []
    elif one.opcode not in _MOVES | _GATHERS:
        return []
    return [
        scope
        for operand in one.operands
        for scope in scopes_behind(module, within, operand, depth - 1)
    ]


def _scopes_of_element(
    module: Module, within: Computation, one: Instruction, depth: int
) -> list[str]:
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
    """A TPU's compiler may drop a reduction's own name; the function that it applies still has the
    first one's.
    """
    name = one.attribute("to_apply").lstrip("%")
    return (
        [scope for each in module[name].instructions for scope in scopes(each.op_name)]
        if name
        else []
    )


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
        return user.operands[0] == name and prod(user.shapes[0].dims) < prod(
            within[name].shapes[0].dims
        )
    if user.opcode != "fusion":
        return False
    called = module[user.calls[0]]
    return all(only_sliced(module, called, parameter) for parameter in _given(called, user, name))


def _given(called: Computation, user: Instruction, name: str) -> list[str]:
    """The parameters of a fusion's computation that are given an array."""
    places = {str(place) for place, operand in enumerate(user.operands) if operand == name}
    return [
        one.name
        for one in called.instructions
        if one.opcode == "parameter" and one.inside in places
    ]
