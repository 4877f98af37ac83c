"""What NNX decides by types and attributes that it does not document."""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from flax import nnx

CALL = "to_nnx__fsdp"
"""The attribute of a module that holds the context of its calls in a step.

It passes through NNX's transforms as any attribute that is no state. `nnx.bridge.ToNNX` takes its
attributes for variables of a Linen module, except those with this prefix.
"""


@contextlib.contextmanager
def traced_arrays_are_state() -> Iterator[None]:
    """Lets an array that is made inside jit be state where it is an attribute, as outside jit.

    Flax decides by the exact type of what is assigned, and takes a tracer's for a constant.
    `nnx.register_data_type` would hold for the whole process, and so for models of others.
    """
    known = nnx.pytreelib.DATA_REGISTRY
    added = _subclasses(jax.core.Tracer) - known
    known |= added
    try:
        yield
    finally:
        known -= added


def _subclasses(kind: type) -> set[type]:
    """Lists a class and all that are derived from it."""
    subclasses: list[type] = kind.__subclasses__()
    return {kind}.union(*map(_subclasses, subclasses))


def set_class(node: Any, cls: type) -> None:
    """Sets an object's class: NNX refuses the assignment inside a transform up to Flax 0.12.8."""
    object.__setattr__(node, "__class__", cls)


class TracedStream(nnx.RngStream):
    """Draws the same keys as `nnx.RngStream`, in time independent of what was traced before.

    NNX's `count[...] += 1` asks a tracer for its sharding, which has none, and for the message of
    that AttributeError jax walks all that was traced so far: quadratic in the number of parameters.
    """

    def __call__(self) -> jax.Array:
        """Draws the next key."""
        count = self.count.get_value()
        self.count.set_value(count + 1)
        return jax.random.fold_in(self.key.get_value(), count)


def swap_streams(nodes: Iterable[tuple[str, Any]], old: type, new: type) -> None:
    """Sets the class of the random streams of the class `old`, among (path, node) of a model."""
    for _, node in nodes:
        if type(node) is old:
            set_class(node, new)


_SHAPE = "fsdp_shape"  # metadata of a parameter while its model is made
_noting = threading.RLock()


@contextlib.contextmanager
def noted_shapes() -> Iterator[None]:
    """Notes in the metadata of each parameter the shape in which it is made, in this context.

    Metadata passes through NNX's transforms, which add dims to the arrays: `nnx.vmap` and
    `nnx.scan` stack what is made inside of them, and keep no other trace of it.
    """
    thread = threading.get_ident()

    def init(self: nnx.Variable, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        shape = getattr(self.get_raw_value(), "shape", None)
        if isinstance(self, nnx.Param) and thread == threading.get_ident() and shape is not None:
            self.set_metadata(_SHAPE, tuple(shape))

    with _noting:
        original = nnx.Variable.__init__
        nnx.Variable.__init__ = init  # type: ignore[method-assign]
        try:
            yield
        finally:
            nnx.Variable.__init__ = original  # type: ignore[method-assign]


def take_noted_shape(variable: Any) -> tuple[int, ...] | None:
    """Returns the shape in which a parameter was made, and removes the note; None without one."""
    if not isinstance(variable, nnx.Variable) or not variable.has_metadata(_SHAPE):
        return None
    shape: tuple[int, ...] = variable.get_metadata(_SHAPE)
    variable.del_metadata(_SHAPE)
    return shape


def own_attributes(node: nnx.Pytree) -> list[tuple[str, Any]]:
    """Lists (name, value) of a module's attributes, without those that NNX keeps for itself."""
    return [(name, x) for name, x in vars(node).items() if not name.startswith("_pytree__")]
