"""Reads pickles as data: no name in one is imported, and nothing is called."""

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Operations that push what is written in the pickle.
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BINSTRING", "SHORT_BINSTRING", "STRING"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


@dataclass(eq=False)
class Called:
    """What a pickle would make by calling a name.

    Attributes:
        name: `module.name`; empty for a persistent id.
        args: of the call.
        state: what it would set afterwards.

    """

    name: str
    args: Any = ()
    state: Any = None

    def get(self, name: str) -> Any:
        """Returns a field of the state, or None."""
        try:
            return self.field(name)
        except ValueError:
            return None

    def field(self, name: str) -> Any:
        """Returns a field of the state. Raises ValueError if there is none."""
        if isinstance(self.state, Pairs):
            for key, value in self.state.items:
                if isinstance(key, str) and key == name:
                    return value
        raise ValueError(f"no field {name}")


@dataclass(eq=False)
class Name:
    """A name that a pickle would import."""

    name: str


@dataclass(eq=False)
class Pairs:
    """A dict, as it was written: its keys are never hashed."""

    items: list[tuple[Any, Any]]


def read_pickle(content: bytes) -> Any:
    """Reads a pickle: `Pairs` for dicts, `Name` and `Called` for names and what they would make.

    Raises ValueError for what is no pickle, or has operations that plain data does not need.
    """
    try:
        return _run(pickletools.genops(content))
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"not a pickle: {error}") from error


def _run(operations: Iterator[Any]) -> Any:
    """Carries out the operations of a pickle."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def pop_to_mark() -> list[Any]:
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("no mark")
        found = stack[at + 1 :]
        del stack[at:]
        return found

    for operation, arg, _ in operations:
        code = operation.name
        if code in _LITERALS:
            stack.append(arg)
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in ("PROTO", "FRAME"):
            continue
        elif code == "STOP":
            return stack.pop()
        elif code == "MARK":
            stack.append(_MARK)
        elif code in _TUPLES:
            count = _TUPLES[code]
            items = tuple(stack[len(stack) - count :])
            if len(items) < count:
                raise ValueError("an empty stack")
            del stack[len(stack) - count :]
            stack.append(items)
        elif code == "TUPLE":
            stack.append(tuple(pop_to_mark()))
        elif code == "EMPTY_LIST":
            stack.append([])
        elif code == "LIST":
            stack.append(pop_to_mark())
        elif code == "EMPTY_DICT":
            stack.append(Pairs([]))
        elif code == "DICT":
            stack.append(Pairs(_paired(pop_to_mark())))
        elif code == "APPEND":
            item = stack.pop()
            stack[-1].append(item)
        elif code == "APPENDS":
            found = pop_to_mark()
            stack[-1].extend(found)
        elif code == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _items_of(stack[-1]).append((key, value))
        elif code == "SETITEMS":
            found = pop_to_mark()
            _items_of(stack[-1]).extend(_paired(found))
        elif code == "GLOBAL":
            stack.append(Name(arg.replace(" ", ".")))
        elif code == "STACK_GLOBAL":
            name, module = stack.pop(), stack.pop()
            stack.append(Name(module + "." + name))
        elif code in ("REDUCE", "NEWOBJ"):
            args, named = stack.pop(), stack.pop()
            stack.append(Called(named.name, args))
        elif code == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], Called):
                raise ValueError("a state of plain data")
            stack[-1].state = state
        elif code == "BINPERSID":
            stack.append(Called("", (stack.pop(),)))
        elif code == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif code in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[arg] = stack[-1]
        elif code in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[arg])
        else:
            raise ValueError(f"the operation {code}")
    raise ValueError("no end")


def _items_of(found: Any) -> list[tuple[Any, Any]]:
    """Returns the items of what stands for a dict; of an OrderedDict's they go nowhere."""
    if isinstance(found, Pairs):
        return found.items
    if isinstance(found, Called):
        return []
    raise ValueError("items of something else than a dict")


def _paired(values: list[Any]) -> list[tuple[Any, Any]]:
    """Pairs keys and values that follow one another."""
    return list(zip(values[::2], values[1::2], strict=True))
