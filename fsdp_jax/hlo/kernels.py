"""Names the kernels of a compiled program: by the parameter that a matmul uses, and by the pass."""

from fsdp_jax.hlo.dataflow import paths_of_operands
from fsdp_jax.hlo.op_names import scoped_paths, strip_tracing
from fsdp_jax.hlo.parser import Computation, Instruction, Module

# Instructions that hand an array on: moved, cast, cut, joined with others, or to its other half.
_MOVES = """async-done async-start bitcast call concatenate convert copy copy-done copy-start
    dynamic-slice opt-barrier optimization-barrier pad reshape slice transpose"""
_MOVING = frozenset(_MOVES.split())
_INERT = frozenset(("parameter", "constant", "broadcast", "tuple"))
DEPTH = 16  # how many instructions are followed in search of a name


def pass_of(op_name: str) -> str:
    """Finds the pass that an operation is of: forward, backward, or forward again; "" for others.

    `recomputed` is the forward pass as rematerialization repeats it.
    """
    if "rematted_computation" in op_name:
        return "recomputed"
    if "transpose(jvp(" in op_name:
        return "backward"
    if "jvp(" in op_name:
        return "forward"
    return ""


def kernel_label(module: Module, within: Computation, kernel: Instruction, *, matmul: bool) -> str:
    """Names a kernel for people: `blocks/mlp/up/kernel, backward`.

    A matmul is named after the parameter that it reads, or whose gradient it makes; where the
    program tells neither, and for all other kernels, it is the traced operation. The pass follows.
    """
    what = ""
    if matmul:
        what = _common_path(_parameters_of(module, within, kernel))
    what = what or strip_tracing(kernel.op_name) or kernel.name
    if scopes := scoped_paths(kernel.op_name):
        what = f"{'+'.join(dict.fromkeys(scopes))}, {what.rpartition('/')[2]}"
    return ", ".join(filter(None, (what, pass_of(kernel.op_name))))


def _common_path(paths: list[str]) -> str:
    """Finds the module of several parameters: `mlp/up` of `mlp/up/kernel` and `mlp/up/bias`."""
    if len(paths) < 2:
        return "".join(paths)
    common = []
    for names in zip(*(path.split("/") for path in paths), strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return "/".join(common) or "+".join(paths)


def _parameters_of(module: Module, within: Computation, kernel: Instruction) -> list[str]:
    """Finds the parameters that a kernel reads as they were gathered, or else reduces."""
    found = [path for name in kernel.operands for path in _gathered_in(module, within, name, DEPTH)]
    return list(dict.fromkeys(found or _reduced_from(module, within, kernel.name, DEPTH)))


def _gathered_in(module: Module, within: Computation, name: str, depth: int) -> list[str]:
    """Finds the parameters that an array is of, if nothing but moves is between."""
    one = within[name]
    if not depth:
        return []
    if "fsdp.gather[" in one.op_name and one.opcode != "get-tuple-element":
        return scoped_paths(one.op_name)[:1]
    if one.opcode == "get-tuple-element":
        source = within[one.operands[0]]
        index = int(one.attribute("index"))
        # what a loop carries was made in the trip before
        if source.opcode == "parameter" and within.root.opcode == "tuple":
            before = within.root.operands[index]
            if before == name:
                return []
            return _gathered_in(module, within, before, depth - 1)
        while source.opcode.endswith("-done"):
            source = within[source.operands[0]]
        if source.opcode.startswith("all-gather"):
            paths = paths_of_operands(module, within, source)
            return [path for path in paths[index : index + 1] if path]
        return []
    if one.opcode in ("all-gather", "all-gather-start", "all-gather-done"):
        while one.opcode.endswith("-done"):
            one = within[one.operands[0]]
        return [path for path in paths_of_operands(module, within, one)[:1] if path]
    if one.opcode == "fusion":
        inside = module[one.calls[0]].instructions
        if not all(each.opcode in _MOVING | _INERT for each in inside):
            return []
        scopes = [path for each in inside for path in scoped_paths(each.op_name)]
        if scopes:
            return scopes[:1]
    elif one.opcode not in _MOVING:
        return []
    return [
        path
        for operand in one.operands
        for path in _gathered_in(module, within, operand, depth - 1)
    ]


def _reduced_from(module: Module, within: Computation, name: str, depth: int) -> list[str]:
    """Finds the parameters whose gradient an array is, by the reductions that it moves to."""
    if not depth:
        return []
    for user in within.users.get(name, []):
        if user.opcode.startswith(("reduce-scatter", "all-reduce")):
            paths = paths_of_operands(module, within, user)
            number = user.operands.index(name)
            if number < len(paths) and "/" in paths[number]:
                return [paths[number]]
        if "fsdp.reduce[" in user.op_name:
            return scoped_paths(user.op_name)[:1]
        if user.opcode == "tuple" and user.root:
            # the next trip of a loop reads it by its number
            index = str(user.operands.index(name))
            inputs = [one.name for one in within.parameters.values()]
            for one in (reader for each in inputs for reader in within.users.get(each, [])):
                if one.attribute("index") == index and (
                    found := _reduced_from(module, within, one.name, depth - 1)
                ):
                    return found
        is_moved = user.opcode in _MOVING
        if user.opcode == "fusion":
            inside = module[user.calls[0]].instructions
            scopes = [
                path
                for each in inside
                if "fsdp.reduce[" in each.op_name
                for path in scoped_paths(each.op_name)
            ]
            if scopes:
                return scopes[:1]
            # XLA may split a matmul: the sum of its parts has the name of the matmul
            allowed = _MOVING | _INERT
            if user.op_name == within[name].op_name:
                allowed |= {"reduce"}
            is_moved = all(each.opcode in allowed for each in inside)
        if is_moved and (found := _reduced_from(module, within, user.name, depth - 1)):
            return found
    return []
