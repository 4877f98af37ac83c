"""Wraps the methods of NNX modules while a step is traced.

The wrappers stand in the classes themselves, so that a module keeps its type. They change nothing
for a module that has no call context, such as one of another model.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flax import nnx

from fsdp_jax.compat.flax_nnx import CALL

Wrapped = Callable[[Callable[..., Any], Any, Any, Any], Any]
"""(the class's method, module, positional arguments, keyword arguments) -> result"""

_BINARY = ("add", "sub", "mul", "matmul", "truediv", "pow")
_OPERATORS = {f"__{side}{name}__" for name in _BINARY for side in ("", "r")} | {"__getitem__"}

_lock = threading.Lock()
_traces: dict[type, int] = {}  # how many traces have wrapped the methods of a class
_originals: dict[type, dict[str, Any]] = {}  # the attributes of a class that are wrapped now


@contextlib.contextmanager
def wrapped_methods(classes: Iterable[type], call: Wrapped) -> Iterator[None]:
    """Wraps the methods of classes and of their bases, in this context.

    `call` runs in a method's place for modules that have a call context. Properties and operators
    are wrapped too; for those it runs only if the context says `traced_whole`, that the step lacks
    arrays that they may read. Traces of several threads may be in this context at once.
    """
    bases = {base for cls in classes for base in cls.__mro__} - set(nnx.Module.__mro__)
    with _lock:
        for base in bases:
            _traces[base] = _traces.get(base, 0) + 1
            if _traces[base] == 1:
                _originals[base] = _wrap_methods(base, call)
    try:
        yield
    finally:
        with _lock:
            for base in bases:
                _traces[base] -= 1
                if not _traces[base]:
                    del _traces[base]
                    for name, attribute in _originals.pop(base).items():
                        setattr(base, name, attribute)


def _wrap_methods(cls: type, call: Wrapped) -> dict[str, Any]:
    """Wraps the methods that a class itself defines. Returns the original attributes by name."""
    originals: dict[str, Any] = {}
    for name, attribute in list(vars(cls).items()):
        is_called = name == "__call__" or not name.startswith("__")
        wrapped: Any
        if isinstance(attribute, property) and attribute.fget is not None:
            wrapped = attribute.getter(_wrap(attribute.fget, call, reads=True))
        elif (is_called or name in _OPERATORS) and _is_method(attribute):
            wrapped = _wrap(getattr(cls, name), call, reads=not is_called)
        else:
            continue
        originals[name] = attribute
        setattr(cls, name, wrapped)
    return originals


def _wrap(original: Callable[..., Any], call: Wrapped, *, reads: bool) -> Callable[..., Any]:
    """Wraps a method; `reads`: a property or an operator, which seldom computes by itself."""

    @functools.wraps(original)
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        context = getattr(self, "__dict__", {}).get(CALL)
        if context is None or context.entered or (reads and not context.traced_whole):
            return original(self, *args, **kwargs)
        return call(original, self, args, kwargs)

    return method


def _is_method(attribute: Any) -> bool:
    """Tells whether a class attribute is a method, also inside `nnx.jit` and the like."""
    if isinstance(attribute, staticmethod):
        return False
    is_function = inspect.isfunction(attribute) or isinstance(attribute, functools.partialmethod)
    return is_function or (hasattr(attribute, "__wrapped__") and callable(attribute))
