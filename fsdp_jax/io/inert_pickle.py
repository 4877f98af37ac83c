"""Reads pickles as data: no name in one is imported, and nothing is called."""

import pickletools
from collections.abc import Callable, Iterator
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
        return _Machine().run(pickletools.genops(content))
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"not a pickle: {error}") from error


class _Machine:
    """The stack and the memo of a pickle, and its operations, by name."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, operations: Iterator[Any]) -> Any:
        """Carries out the operations of a pickle, up to its end."""
        for operation, arg, _ in operations:
            name = operation.name
            if name == "STOP":
                return self.stack.pop()
            if name in _LITERALS:
                self.stack.append(arg)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in _TUPLES:
                self._tuple(_TUPLES[name])
            elif name in _OPERATIONS:
                _OPERATIONS[name](self, arg)
            elif name not in _IGNORED:
                raise ValueError(f"the operation {name}")
        raise ValueError("no end")

    def to_mark(self) -> list[Any]:
        """Takes what is above the last mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("no mark")
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def push(self, value: Any) -> None:
        """Puts a value on the stack."""
        self.stack.append(value)

    def _tuple(self, count: int) -> None:
        """Makes a tuple of so many values."""
        items = tuple(self.stack[len(self.stack) - count :])
        if len(items) < count:
            raise ValueError("an empty stack")
        del self.stack[len(self.stack) - count :]
        self.push(items)

    def append(self, _: Any) -> None:
        """Adds one item to a list."""
        item = self.stack.pop()
        self.stack[-1].append(item)

    def appends(self, _: Any) -> None:
        """Adds the items above the mark to a list."""
        found = self.to_mark()
        self.stack[-1].extend(found)

    def set_item(self, _: Any) -> None:
        """Adds one pair to a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        _items_of(self.stack[-1]).append((key, value))

    def set_items(self, _: Any) -> None:
        """Adds the pairs above the mark to a dict."""
        found = self.to_mark()
        _items_of(self.stack[-1]).extend(_paired(found))

    def stack_global(self, _: Any) -> None:
        """Joins a module and a name."""
        name, module = self.stack.pop(), self.stack.pop()
        self.push(Name(module + "." + name))

    def call(self, _: Any) -> None:
        """Notes a call of a name."""
        args, named = self.stack.pop(), self.stack.pop()
        self.push(Called(named.name, args))

    def build(self, _: Any) -> None:
        """Notes the state of what a call would make."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Called):
            raise ValueError("a state of plain data")
        self.stack[-1].state = state

    def put(self, arg: Any) -> None:
        """Remembers the value on the stack, by a number, or the next one."""
        self.memo[len(self.memo) if arg is None else arg] = self.stack[-1]


_IGNORED = ("PROTO", "FRAME")
_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": lambda machine, _: machine.push(_MARK),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.to_mark())),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "LIST": lambda machine, _: machine.push(machine.to_mark()),
    "EMPTY_DICT": lambda machine, _: machine.push(Pairs([])),
    "DICT": lambda machine, _: machine.push(Pairs(_paired(machine.to_mark()))),
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "GLOBAL": lambda machine, arg: machine.push(Name(arg.replace(" ", "."))),
    "STACK_GLOBAL": _Machine.stack_global,
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.call),
    "BUILD": _Machine.build,
    "BINPERSID": lambda machine, _: machine.push(Called("", (machine.stack.pop(),))),
    **dict.fromkeys(("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(
        ("GET", "BINGET", "LONG_BINGET"), lambda machine, arg: machine.push(machine.memo[arg])
    ),
}


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
