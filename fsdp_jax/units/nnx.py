"""A Flax NNX model as the core wants it: parameters by path, a loss to differentiate, units to
gather.

The model is not modified and need not know. Inside a step it is rebuilt around Shards, and the
modules that act as units, the norms that stay in float32 and the model itself get, for that trace
alone, a subclass of their class whose methods gather and cast around the original ones.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from fsdp_jax.errors import message
from fsdp_jax.tree import PyTree, flatten, unflatten
from fsdp_jax.units.auto_wrap import ModuleInfo
from fsdp_jax.units.model import Boundary, LossFn, split_arrays
from fsdp_jax.units.unit import run_unit


class NnxModel:
    """Adapter for `make_model(rngs) -> nnx.Module`."""

    def __init__(self, make_model: Callable[[nnx.Rngs], nnx.Module]) -> None:
        self._make = make_model
        with nnx.use_eager_sharding(False):
            self._graphdef, *states = jax.eval_shape(lambda: self._split(0))
        params, rest = states
        model = nnx.merge(self._graphdef, params, rest)
        _refuse_plain_arrays(model)
        self._params = _Skeleton(params)
        self._rest = _Skeleton(rest)
        self.params: PyTree = unflatten(_variables(params))
        self.rest: PyTree = self._rest.to_tree(rest)
        self.modules: Sequence[ModuleInfo] = list(_modules(model))
        self._keys = {path for path, var in _variables(rest).items() if isinstance(var, nnx.RngKey)}

    def _split(self, key: Any) -> Any:
        """A new model's (graphdef, params, rest); called inside jit."""
        rngs = nnx.Rngs(key)
        _swap_streams(rngs, nnx.RngStream, _Stream)
        model = self._make(rngs)
        if not isinstance(model, nnx.Module):
            fix = "return the model; a Linen module is passed itself, with inputs=(...)"
            what = "the function makes no NNX model"
            raise ValueError(
                message(what, where="model", expected=nnx.Module, got=type(model), fix=fix)
            )
        _swap_streams(model, _Stream, nnx.RngStream)
        return nnx.split(model, nnx.Param, ...)

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """(params, rest), concrete; called inside jit."""
        with nnx.use_eager_sharding(False):
            _, *states = self._split(key)
        params, rest = states
        return self._params.to_tree(params), self._rest.to_tree(rest)

    def build(self, params: PyTree, rest: PyTree) -> nnx.Module:
        """The model around these parameters, arrays or Shards."""
        return nnx.merge(
            self._graphdef, self._params.to_state(params), self._rest.to_state(rest), copy=True
        )

    def run(
        self,
        fn: LossFn,
        params: PyTree,
        rest: PyTree,
        batch: PyTree,
        key: jax.Array,
        boundaries: dict[str, Boundary],
        *,
        training: bool,
        device: jax.Array | None,
    ) -> tuple[Any, PyTree]:
        """(`fn(model, batch)`, the rest afterwards). `device` numbers the device where each sees
        its own batch.
        """
        del key  # NNX keeps its random streams in the model
        local = rest if device is None else self._fold(rest, device)
        model = self.build(params, local)
        if not training:
            model.eval()
        for path, module in list(_walk(model)):
            if path in boundaries and not hasattr(module, "_fsdp"):
                module._fsdp = boundaries[path]
                _become(module, _bounded(type(module)))  # type: ignore[arg-type]
        out = fn(model, batch)
        after = self._rest.to_tree(nnx.state(model, nnx.Not(nnx.Param)))
        return out, after if device is None else self._unfold(after, rest, local)

    def _fold(self, rest: PyTree, device: jax.Array) -> PyTree:
        """Random streams of each device's own."""
        flat = flatten(rest)
        return unflatten(
            {p: _fold_in(v, device) if p in self._keys else v for p, v in flat.items()}
        )

    def _unfold(self, after: PyTree, before: PyTree, local: PyTree) -> PyTree:
        """The state with its keys as before: a stream advances by its count, which is the same on
        every device.
        """
        keys, folded = flatten(before), flatten(local)
        for path, value in flatten(after).items():
            own = path in self._keys and path.removesuffix("key") + "count" not in keys
            if own and value is not folded[path]:
                what, fix = (
                    "the model writes a random key of its own",
                    "draw from an nnx.RngStream, or leave local_batch out",
                )
                raise ValueError(
                    message(
                        what,
                        where=path,
                        expected="keys that are read only, with local_batch",
                        fix=fix,
                    )
                )
        return unflatten({p: keys[p] if p in self._keys else v for p, v in flatten(after).items()})


class _Stream(nnx.RngStream):
    """Draws the same keys, in time that does not depend on what was traced before.

    NNX's `count[...] += 1` asks a tracer for its sharding, which has none, and for the message of
    that AttributeError jax walks all that was traced so far: quadratic in the number of parameters.
    """

    def __call__(self) -> jax.Array:
        count = self.count.get_value()
        self.count.set_value(count + 1)
        return jax.random.fold_in(self.key.get_value(), count)


def _swap_streams(node: Any, old: type, new: type) -> None:
    for _, each in _walk(node):
        if type(each) is old:
            _become(each, new)


def _fold_in(keys: jax.Array, number: jax.Array) -> jax.Array:
    """Into one key, or into each of a stack of them."""
    return (
        jax.vmap(_fold_in, (0, None))(keys, number)
        if keys.ndim
        else jax.random.fold_in(keys, number)
    )


class _Skeleton:
    """The structure of an `nnx.State`, to go between it and nested dicts with string keys."""

    def __init__(self, state: nnx.State) -> None:
        self._paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
        self._treedef = jax.tree.structure(state)

    def to_tree(self, state: nnx.State) -> PyTree:
        variables = _variables(state)
        return unflatten(
            {path: _value(variables[path]) if path in variables else None for path in self._paths}
        )

    def to_state(self, tree: PyTree) -> nnx.State:
        flat = flatten(tree, is_leaf=lambda leaf: hasattr(leaf, "comm"))
        return jax.tree.unflatten(self._treedef, [flat[path] for path in self._paths])


def _variables(state: nnx.State) -> dict[str, nnx.Variable]:
    return {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def _walk(
    node: Any, path: tuple[str, ...] = (), above: frozenset[int] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """(path, node) for modules and containers, parents first; one that is used in two places comes
    twice.
    """
    yield "/".join(path), node
    for name, child in _attributes(node):
        if isinstance(child, nnx.Pytree | dict | list | tuple) and id(child) not in above:
            yield from _walk(child, (*path, str(name)), above | {id(node)})


def _attributes(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, nnx.Pytree):
        return [
            (name, child) for name, child in vars(node).items() if not name.startswith("_pytree__")
        ]
    return list(node.items()) if isinstance(node, dict) else list(enumerate(node))


def _modules(model: nnx.Module) -> Iterator[ModuleInfo]:
    owned = {
        id(variable): path for path, variable in _variables(nnx.state(model, nnx.Param)).items()
    }
    for path, node in _walk(model):
        direct = frozenset(owned[id(child)] for _, child in _attributes(node) if id(child) in owned)
        # nnx.Embed keeps the dtype that its table was made in, and would return to it from a table
        # cast since.
        yield ModuleInfo(
            path,
            type(node),
            direct,
            isinstance(node, nnx.Module) and callable(node),
            isinstance(node, nnx.Embed),
        )


def _refuse_plain_arrays(model: nnx.Module) -> None:
    """A JAX array that NNX does not know as state would be baked into one trace and missing in the
    next.
    """
    for path, node in _walk(model):
        for name, child in _attributes(node):
            if isinstance(child, jax.Array):
                where = "/".join(filter(None, (path, str(name))))
                fix = "make it a NumPy array, or nnx.Variable(array)"
                raise ValueError(
                    message("a plain JAX array is an attribute of the model", where=where, fix=fix)
                )


@functools.cache
def _bounded(cls: Hashable) -> type:
    """A subclass whose public methods run inside the module's boundary."""
    assert isinstance(cls, type)
    own = [c for c in cls.__mro__ if c not in nnx.Module.__mro__]
    names = {
        name for c in own for name in vars(c) if name == "__call__" or not name.startswith("_")
    }
    methods = {
        name: getattr(cls, name) for name in names if _is_method(inspect.getattr_static(cls, name))
    }

    def inside(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _call(cls, original, self, args, kwargs)

        return method

    return type(
        cls.__name__, (cls,), {name: inside(original) for name, original in methods.items()}
    )


def _is_method(attribute: Any) -> bool:
    """Whether it is called with the module: a function, or one that `nnx.jit` and the like wrap."""
    return inspect.isfunction(attribute) or (
        hasattr(attribute, "__wrapped__") and callable(attribute)
    )


def _call(cls: type, original: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
    boundary: Boundary = module._fsdp
    args, kwargs = boundary.entering((args, kwargs))
    if boundary.unit is None:
        bounded = type(module)
        _become(module, cls)  # calls among its own methods are already inside
        try:
            out = original(module, *args, **kwargs)
        finally:
            _become(module, bounded)
    else:
        out = _call_unit(cls, original, module, args, kwargs, boundary)
    return boundary.leaving(out)


def _become(module: Any, cls: type) -> None:
    """Past NNX's own check: a class is no state, and may change inside a loop of the caller's."""
    object.__setattr__(module, "__class__", cls)


def _call_unit(
    cls: type, original: Callable[..., Any], module: Any, args: Any, kwargs: Any, boundary: Boundary
) -> Any:
    """Splits the module (and what modules it is handed), runs it as a pure function, and takes over
    its new state.
    """
    assert boundary.unit is not None
    arrays, nodes, rebuild = split_arrays(
        (args, kwargs), lambda x: isinstance(x, nnx.Pytree | nnx.Variable)
    )
    graphdef, state = nnx.split((module, nodes))

    def pure(state: nnx.State, arrays: list[Any]) -> tuple[Any, nnx.State]:
        inner, inner_nodes = nnx.merge(graphdef, state, copy=True)
        _become(inner, cls)
        before = _values((inner, inner_nodes))
        inner_args, inner_kwargs = rebuild(arrays, inner_nodes)
        out = original(inner, *inner_args, **inner_kwargs)
        after = nnx.to_flat_state(nnx.state((inner, inner_nodes), nnx.Not(nnx.Param)))
        changed = nnx.from_flat_state([(p, v) for p, v in after if _value(v) is not before.get(p)])
        out_arrays, _, rebuilds["out"] = split_arrays(out)
        return out_arrays, changed

    rebuilds: dict[str, Callable[..., Any]] = {}
    out_arrays, changed = run_unit(pure, state, arrays, unit=boundary.unit, remat=boundary.remat)
    if changed:  # inside a loop of the caller's the module may be read, not written
        nnx.update((module, nodes), changed)
    return rebuilds["out"](out_arrays, ())


def _values(node: Any) -> dict[Any, Any]:
    return {
        path: _value(leaf) for path, leaf in nnx.to_flat_state(nnx.state(node, nnx.Not(nnx.Param)))
    }


def _value(leaf: Any) -> Any:
    """Of a Variable, or of an array that is a plain attribute."""
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
