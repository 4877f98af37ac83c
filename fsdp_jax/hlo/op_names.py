"""Reads the parameter or the module of an operation from the name that tracing gave it.

For example, `jit(step)/jvp()/while/body/fsdp.gather[mlp/up]/...` serves the parameter `mlp/up`.
"""

import re

MERGED = "+"  # between the names of operations that XLA merged, as `strip_tracing` returns them
# `fsdp.gather[mlp/up]`, as the units name their collectives.
_SCOPE = re.compile(r"fsdp\.(?:gather|reduce|update)\[([^\]]*)\]")
# `fsdp.gather[mlp/(up]...:down]...)`: a prefix that ends inside the bracket, and the parts.
_FACTORED = re.compile(r"fsdp\.(?:gather|reduce|update)\[([^\]()]*)\(([^()]*\].*)")
# Transformations that tracing writes around a name of the user's.
_WRAPPER = re.compile(r"(?:jvp|transpose|vmap|remat|checkpoint)\((.*)\)")
# Segments that no module or function of the user's has; also an empty one.
_ADDED_BY_TRACING = re.compile(
    r"|jit\(.*\)|pjit|shard_map|while|scan|cond|body|branch_\d+_fun|closed_call|core_call"
    r"|remat2?|checkpoint|rematted_computation|custom_vjp_call\w*|custom_jvp_call\w*"
)


def without_source_lines(text: str) -> str:
    """Returns the text of a lowered program without the source lines that its parts come from."""
    return re.sub(r'"[^"]*":\d+:\d+(?: to (?:\d+)?:\d+)?', "", text)


def scoped_paths(op_name: str) -> list[str]:
    """Reads the paths of parameters in the scopes `fsdp.gather[...]` and `fsdp.reduce[...]`.

    There is one for each operation that XLA combined. The prefix that XLA factors out of their
    names may end inside a scope's bracket:
    `jvp(fsdp.gather[mlp/(up])/all_gather:down])/all_gather)`.
    """
    factored = _FACTORED.search(op_name)
    if factored:
        prefix, parts = factored.groups()
        return [prefix + part.partition("]")[0] for part in parts.split(":")]
    matches = [_SCOPE.search(name) for name in split_merged_names(op_name)]
    return [match.group(1) for match in matches if match]


def strip_tracing(op_name: str) -> str:
    """Removes the segments that tracing adds from a name; "" if nothing is left.

    `jit(f)/transpose(jvp(mlp))/while/body/dot_general` -> `mlp/dot_general`.
    """
    merged = (name for part in op_name.split(";") for name in split_merged_names(part))
    names = dict.fromkeys("/".join(_user_segments(name)) for name in merged)
    return MERGED.join(name for name in names if name)


def split_merged_names(op_name: str) -> list[str]:
    """Splits the names that XLA merged when it combined operations: `a/(b:c)` -> `a/b`, `a/c`."""
    for start in re.finditer(r"(?:^|(?<=/))\(", op_name):
        # A parenthesis with colons is a merge, which may have others inside.
        inside, *rest = _split_outside_parentheses(op_name[start.end() :], ")")
        parts = _split_outside_parentheses(inside, ":")
        if rest and len(parts) > 1:
            before, after = op_name[: start.start()], ")".join(rest)
            return [name for part in parts for name in split_merged_names(before + part + after)]
    return [op_name]


def _user_segments(name: str) -> list[str]:
    """Lists the segments, between slashes, of a name that tracing did not add."""
    segments: list[str] = []
    for segment in _split_outside_parentheses(name, "/"):
        while wrapped := _WRAPPER.fullmatch(segment):
            segment = wrapped.group(1)
        if "/" in segment and segment != name:  # a function's own name may contain slashes
            segments += _user_segments(segment)
        elif not _ADDED_BY_TRACING.fullmatch(segment):
            segments.append(segment)
    return segments


def _split_outside_parentheses(text: str, separator: str) -> list[str]:
    """Splits a text at the separators outside parentheses."""
    parts = [""]
    depth = 0
    for letter in text:
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
            depth += {"(": 1, ")": -1}.get(letter, 0)
    return parts
