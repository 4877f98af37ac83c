"""A Flax Linen model as the core wants it: parameters by path, a loss to differentiate, units to
gather.

The model is not modified and need not know: Linen lets us intercept its method calls, and its
lifted transforms gather a unit's parameters around the original method.

[Note: interception] An interceptor is called inside whatever the user has wrapped a method in
(`nn.remat`, `nn.scan`, ..., as a decorator or on the class), with the function that was wrapped. A
unit's call lifts that function, never the attribute of the same name: that one would enter the
user's transform again. A module is entered once: what it calls on itself meanwhile, the lifted
function included, is inside already.

`nn.jit` reuses the trace of an equal module, and in a trace that is reused nothing is intercepted.
So everything here runs in a scope with a flag that never equals itself, which makes every trace a
new one.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import core
from flax.core import meta

from fsdp_jax.errors import message
from fsdp_jax.tree import PyTree, flatten, prefixes
from fsdp_jax.units.auto_wrap import ModuleInfo
from fsdp_jax.units.model import Boundary, LossFn, split_arrays
from fsdp_jax.units.unit import all_shards, checkpoint_settings, gathered, shards_in

_PARAMS = "params"


class _NeverEqual:
    """A flag that hashes anew each time; see the note on interception."""

    _numbers = itertools.count()

    def __hash__(self) -> int:
        return hash(("fsdp_jax", next(self._numbers)))


_FLAGS = {"fsdp_jax": _NeverEqual()}


class LinenModel:
    """Adapter for a `linen.Module` and example inputs of its `__call__`: arrays, shapes, or plain
    values.

    Args:
        module: unbound.
        inputs: positional arguments as a tuple, or keyword arguments as a dict.

    Raises:
        ValueError: inputs that do not fit, or a model without parameters.

    """

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]) -> None:
        self._module = module
        self._args, self._kwargs = _example(module, inputs)
        seen: dict[str, type] = {}

        def watch(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            seen.setdefault(_path(context.module) or "", type(context.module))
            return next_fun(*args, **kwargs)

        with nn.intercept_methods(watch):
            boxed = jax.eval_shape(lambda: self._variables(jax.random.key(0)))
        if _PARAMS not in boxed:
            raise ValueError(
                message(
                    "the model has no parameters", where=type(module).__name__, got=sorted(boxed)
                )
            )
        self.params: PyTree = boxed[_PARAMS]
        self.rest: PyTree = meta.unbox(
            {name: tree for name, tree in boxed.items() if name != _PARAMS}
        )
        self._collections = list(self.rest)
        paths = list(flatten(meta.unbox(self.params)))
        self.modules: Sequence[ModuleInfo] = _modules(seen, paths)

    def _variables(self, key: jax.Array) -> Any:
        args, kwargs = jax.tree.map(
            lambda x: jax.numpy.zeros(x.shape, x.dtype) if hasattr(x, "shape") else x,
            (self._args, self._kwargs),
        )
        rngs = dict(zip((_PARAMS, "dropout"), jax.random.split(key, 2), strict=True))
        call = self._scoped(lambda module: module(*args, **kwargs))
        return core.init(call, mutable=core.DenyList("intermediates"), flags=_FLAGS)(rngs)[1]

    def _scoped(self, fn: Callable[[nn.Module], Any]) -> Callable[[core.Scope], Any]:
        """As `nn.apply` and `nn.init` do, which take no flags."""
        return lambda scope: fn(self._module.clone(parent=scope, _deep_clone=True))

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """(params, rest), concrete; called inside jit."""
        variables = meta.unbox(self._variables(key))
        return variables[_PARAMS], {name: variables[name] for name in self._collections}

    def build(self, params: PyTree, rest: PyTree) -> nn.Module:
        """The module bound to these values; `model(x)` and `model.variables` work."""
        return self._module.bind({_PARAMS: params, **rest})

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
        """(`fn(model, batch)`, the rest afterwards). Whether to train is an argument of the model's
        own.
        """
        key = key if device is None else jax.random.fold_in(key, device)
        rngs = {_PARAMS: key, "dropout": jax.random.fold_in(key, 1)} if training else {}
        entered: set[str] = set()

        def intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            path = _path(context.module)
            if path not in boundaries or path in entered or context.method_name == "setup":
                return next_fun(*args, **kwargs)
            entered.add(path)
            try:
                return _call(next_fun, args, kwargs, context, boundaries[path])
            finally:
                entered.remove(path)

        call = self._scoped(lambda model: fn(model, batch))
        with nn.intercept_methods(intercept):
            out, after = core.apply(call, mutable=self._collections, flags=_FLAGS)(
                {_PARAMS: params, **rest}, rngs=rngs
            )
        return out, {name: after.get(name, rest[name]) for name in self._collections}


def _example(
    module: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the model's `__call__`. Raises ValueError where they are none."""
    where = f"inputs of {type(module).__name__}"
    if not isinstance(inputs, tuple | list | Mapping):
        fix = 'inputs=(tokens,), or by name, inputs={"tokens": tokens, "train": True}'
        raise ValueError(
            message("not a tuple of arguments, nor a dict", where=where, got=type(inputs), fix=fix)
        )
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    if not callable(module):
        fix = "give it a __call__ that runs all of it once, to make its parameters"
        raise ValueError(message("the model has no __call__", where=type(module).__name__, fix=fix))
    signature = inspect.signature(module)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        fix = "name every argument without a default, such as inputs={'x': x, 'train': True}"
        raise ValueError(
            message(
                "the example inputs do not fit the model",
                where=where,
                expected=signature,
                got=error,
                fix=fix,
            )
        ) from error
    return args, kwargs


def _path(module: nn.Module) -> str | None:
    """Slash-joined; None for a module without variables, of which only a plain method is called."""
    return None if module.scope is None else "/".join(module.path)


def _modules(seen: dict[str, type], paths: list[str]) -> list[ModuleInfo]:
    """Parameters belong to the deepest module whose path starts theirs."""
    owned: dict[str, set[str]] = {module: set() for module in seen}
    for path in paths:
        owned[next(module for module in prefixes(path) if module in seen)].add(path)
    return [
        ModuleInfo(module, kind, frozenset(owned[module]), True)
        for module, kind in sorted(
            seen.items(), key=lambda item: item[0].count("/") + bool(item[0])
        )
    ]


def _call(
    next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any, boundary: Boundary
) -> Any:
    args, kwargs = boundary.entering((args, kwargs))
    shards = context.module.variables.get(_PARAMS, {})
    if boundary.unit is None or not shards_in(shards, boundary.unit):
        out = next_fun(*args, **kwargs)
    else:
        settings = checkpoint_settings(all_shards(shards), boundary.remat)
        out = _call_unit(context, args, kwargs, boundary.unit, settings)
    return boundary.leaving(out)


def _call_unit(
    context: Any, args: Any, kwargs: Any, unit: str, settings: dict[str, Any] | None
) -> Any:
    """The method, lifted: its parameters are gathered as the module reads them, and again in the
    backward.
    """
    method = context.orig_method.func
    arrays, nodes, rebuild = split_arrays(
        (args, kwargs), lambda x: isinstance(x, nn.Module | nn.Variable)
    )

    @functools.wraps(method)
    def inside(module: nn.Module, arrays: Sequence[Any], nodes: Sequence[Any]) -> Any:
        inner_args, inner_kwargs = rebuild(arrays, nodes)
        return method(module, *inner_args, **inner_kwargs)

    lifted = nn.map_variables(inside, _PARAMS, trans_in_fn=lambda tree: gathered(tree, unit))
    if settings is not None:
        lifted = nn.remat(lifted, **settings)
    return lifted(context.module, arrays, nodes)
