"""What an operation serves, from the name that its trace left:
`jit(step)/jvp()/while/body/fsdp.gather[mlp/up]/...`.
"""

import re

_SCOPE = re.compile(r"fsdp\.(?:gather|reduce)\[([^\]]*)\]")
_FACTORED = re.compile(r"fsdp\.(?:gather|reduce)\[([^\]()]*)\(([^()]*\].*)")
_WRAPPER = re.compile(r"(?:jvp|transpose|vmap|remat|checkpoint)\((.*)\)")
_NOISE = re.compile(
    r"|jit\(.*\)|pjit|shard_map|while|scan|cond|body|branch_\d+_fun|closed_call|core_call|remat2?|checkpoint"
    r"|rematted_computation|custom_vjp_call\w*|custom_jvp_call\w*"
)


def scopes(op_name: str) -> list[str]:
    """The parameters named by `fsdp.gather[...]` and `fsdp.reduce[...]`, one per operation that was
    combined.

    What XLA factored out may end inside a bracket that stands inside parentheses, which the parts
    then close: `jvp(fsdp.gather[mlp/(up])/all_gather:down])/all_gather)`.
    """
    inside = _FACTORED.search(op_name)
    if inside:
        return [inside.group(1) + part.partition("]")[0] for part in inside.group(2).split(":")]
    found = [_SCOPE.search(name) for name in expand(op_name)]
    return [scope.group(1) for scope in found if scope]


def stripped(op_name: str) -> str:
    """The name without what tracing adds: `jit(f)/transpose(jvp(mlp))/while/body/dot_general` ->
    `mlp/dot_general`.
    """
    names = dict.fromkeys("/".join(_kept(name)) for name in expand(op_name))
    return "+".join(name for name in names if name)


def expand(op_name: str) -> list[str]:
    """The names that XLA merged into one when it combined operations: `a/(b/c:d)` -> `a/b/c`,
    `a/d`.
    """
    for start in re.finditer(r"(?:^|(?<=/))\(", op_name):
        parts, end = _alternatives(op_name, start.end())
        if len(parts) > 1:
            before, after = op_name[: start.start()], op_name[end:]
            return [name for part in parts for name in expand(before + part + after)]
    return [op_name]


def _alternatives(text: str, start: int) -> tuple[list[str], int]:
    """What stands between a parenthesis and its end, cut at the colons of its own depth; where it
    ends.
    """
    parts, depth, cut = [], 1, start
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0 or (depth == 1 and text[place] == ":"):
            parts.append(text[cut:place])
            cut = place + 1
        if depth == 0:
            return parts, place + 1
    return [], len(text)


def _kept(name: str) -> list[str]:
    kept = []
    for segment in _segments(name):
        while wrapped := _WRAPPER.fullmatch(segment):
            segment = wrapped.group(1)
        if "/" in segment and segment != name:  # a function's own name may hold slashes
            kept += _kept(segment)
        elif not _NOISE.fullmatch(segment):
            kept.append(segment)
    return kept


def _segments(name: str) -> list[str]:
    """Cut at the slashes outside parentheses."""
    segments, depth, cut = [], 0, 0
    for place, letter in enumerate(name):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "/" and depth == 0:
            segments.append(name[cut:place])
            cut = place + 1
    return [*segments, name[cut:]]
