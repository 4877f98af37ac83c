"""Adapter of Flax Linen models.

The model is not modified and needs no preparation: Linen lets us intercept its method calls, and
its lifted transforms gather a unit's parameters around the original method.

[Note: interception] An interceptor is called inside whatever the user has wrapped a method in
(`nn.remat`, `nn.scan`, ..., as a decorator or on the class), and receives the unwrapped function. A
unit's call lifts that function, never the attribute of the same name, which would enter the user's
transform again. A boundary is entered once: methods that a module calls on itself, the
lifted function included, are inside it already.

`nn.jit` reuses the trace of an equal module, and in a reused trace nothing is intercepted. So
everything here runs in a scope with a flag that never equals itself, which makes every trace a new
one.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import core, errors

from fsdp_jax.errors import message
from fsdp_jax.tree import SEPARATOR, PyTree, flatten, prefixes
from fsdp_jax.units.auto_wrap import ModuleInfo
from fsdp_jax.units.linen_scope import FLAG, Demands, ScopeWatch, sow_nothing, unbox_tree
from fsdp_jax.units.model import (
    Boundary,
    LossFn,
    ModelCall,
    axis_names_of,
    dtype_of,
    split_arrays,
)
from fsdp_jax.units.remat import SAVED
from fsdp_jax.units.unit import all_shards, checkpoint_settings, gathered, shards_in

_PARAMS = "params"


class _NeverEqual:
    """A flag that hashes anew each time; see the note on interception."""

    _numbers = itertools.count()

    def __hash__(self) -> int:
        return hash(("fsdp_jax", next(self._numbers)))


_FLAGS = {FLAG: _NeverEqual()}


class LinenModel:
    """Adapter for an unbound `linen.Module` and example inputs of its `__call__`.

    These are positional arguments as a tuple, or keyword arguments as a dict: arrays, shapes, or
    plain values. Raises ValueError for inputs that do not fit, or a model without parameters.
    """

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]) -> None:
        self._module = module
        self._args, self._kwargs = _example_arguments(module, inputs)
        self.demands = Demands()
        kinds: dict[str, type] = {}
        dtypes: dict[str, Any] = {}
        axis_names: set[str] = set()

        def record(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            path = _module_path(context.module) or ""
            kinds.setdefault(path, type(context.module))
            dtypes.setdefault(path, dtype_of(context.module))
            axis_names.update(axis_names_of(context.module))
            return next_fun(*args, **kwargs)

        with nn.intercept_methods(record):
            boxed = jax.eval_shape(lambda: self._make_variables(jax.random.key(0)))
        if _PARAMS not in boxed:
            what = "the model has no parameters"
            raise ValueError(message(what, where=type(module).__name__, got=sorted(boxed)))
        self.params: PyTree = boxed[_PARAMS]
        self.boxed_rest: PyTree = {k: tree for k, tree in boxed.items() if k != _PARAMS}
        self.rest: PyTree = unbox_tree(self.boxed_rest)
        self._collections = list(self.rest)
        paths = flatten(unbox_tree(self.params))
        self.modules: Sequence[ModuleInfo] = _module_infos(kinds, dtypes, paths)
        self.axis_names = frozenset(axis_names)

    def _make_variables(self, key: jax.Array) -> Any:
        """Returns newly made variables, in Flax's boxes; called inside jit."""

        def zeros(x: Any) -> Any:
            return jax.numpy.zeros(x.shape, x.dtype) if hasattr(x, "shape") else x

        args, kwargs = jax.tree.map(zeros, (self._args, self._kwargs))
        call = self._as_scope_function(lambda module: module(*args, **kwargs))

        def trace() -> Any:
            """Returns the variables; traced anew while the model asks for more."""
            watch = ScopeWatch(self.demands, gives_streams=True, known=())

            def intercept(
                next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any
            ) -> Any:
                """Watches a module's scope before its method runs."""
                if context.module.scope is not None:
                    watch.watch(context.module.scope)
                    sow_nothing(context.module)
                return next_fun(*args, **kwargs)

            params_key, dropout_key = jax.random.split(key, 2)
            rngs = self.demands.rngs(params_key, dropout_key, key)
            with nn.intercept_methods(intercept):
                return core.init(call, flags=_FLAGS)(rngs)[1]

        return self.demands.trace_until_met(trace)

    def _as_scope_function(self, fn: Callable[[nn.Module], Any]) -> Callable[[core.Scope], Any]:
        """Returns `fn` as a function of a scope; `nn.apply` and `nn.init` take no flags."""
        return lambda scope: fn(self._module.clone(parent=scope, _deep_clone=True))

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Returns (params, rest), concrete; called inside jit."""
        variables = unbox_tree(self._make_variables(key))
        return variables[_PARAMS], {name: variables[name] for name in self._collections}

    def build(self, params: PyTree, rest: PyTree) -> nn.Module:
        """Returns the module bound to these values; `model(x)` and `model.variables` work."""
        return self._module.bind({_PARAMS: params, **rest})

    def run(self, fn: LossFn, call: ModelCall) -> tuple[Any, PyTree]:
        """Returns (`fn(model, call.batch)`, the updated `call.rest`).

        Modules in `call.boundaries` gather and cast around their calls. `call.training` gives
        random streams and lets the rest be written; other switches are arguments of the model's
        own. `fn` may be traced more than once.

        Raises ValueError for a model that draws from a stream that it is not given, or writes where
        it may not.
        """
        key = call.key if call.device is None else jax.random.fold_in(call.key, call.device)
        rest, training = call.rest, call.training
        demands = Demands(self.demands.streams)

        def trace() -> tuple[Any, PyTree]:
            """Returns (result, collections); traced anew while the model asks for more."""
            # A cache is written where it is mutable, which changes what a decoder does.
            known = {_PARAMS, "cache", *rest}
            watch = ScopeWatch(demands, gives_streams=training, known=known)

            def loss(scope: core.Scope) -> Any:
                watch.watch(scope)
                return self._as_scope_function(lambda model: fn(model, call.batch))(scope)

            mutable = [*demands.sown, *(self._collections if training else ())]
            apply = core.apply(loss, mutable=mutable, flags=_FLAGS)
            rngs = demands.rngs(key, jax.random.fold_in(key, 1), key) if training else {}
            with nn.intercept_methods(_interceptor(call.boundaries, watch)):
                return apply({_PARAMS: call.params, **rest}, rngs=rngs)

        try:
            out, after = demands.trace_until_met(trace)
        except (errors.ModifyScopeVariableError, errors.InvalidRngError) as error:
            raise _scope_error(error, training) from error
        return out, {name: after.get(name, rest[name]) for name in self._collections}


def _interceptor(boundaries: Mapping[str, Boundary], watch: ScopeWatch) -> Callable[..., Any]:
    """Returns an interceptor of Linen's method calls, for one trace; see the note."""
    entered: set[str] = set()

    def intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """Runs a method inside its module's boundary, unless it is called from inside it."""
        path = _module_path(context.module)
        if path is not None:
            watch.watch(context.module.scope)
        inside = path in entered or context.method_name == "setup"
        if path is None or path not in boundaries or inside:
            return next_fun(*args, **kwargs)
        entered.add(path)
        try:
            return _call_in_boundary(next_fun, args, kwargs, context, boundaries[path])
        finally:
            entered.remove(path)

    return intercept


def _scope_error(error: Exception, training: bool) -> ValueError:
    """Returns the error for a write to what is not mutable, or a draw from a stream it lacks."""
    if isinstance(error, errors.InvalidRngError) and training:
        what = "a random stream does not reach the module that draws from it"
        fix = "name the stream in split_rngs of the nn.scan or nn.vmap around the module"
    elif isinstance(error, errors.InvalidRngError):
        what = "the model draws random numbers in inference mode, where no streams are given"
        fix = "switch them off by the model's own argument (deterministic=True); or give them: "
        fix += "loss_fn(model, batch, key), with model.apply(model.variables, ..., rngs={...: key})"
    elif training:
        what = "the model writes to a collection that it did not make as it was initialized"
        fix = "make it then, without a condition such as `if train`"
    else:
        what = "the model updates its state in inference mode, which keeps none"
        fix = "switch it off by the model's own argument (train=False), in a loss for evaluation"
    return ValueError(message(what, where="model", got=str(error).splitlines()[0], fix=fix))


def _example_arguments(
    module: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs) of the model's `__call__`. Raises ValueError if they do not fit it."""
    name = type(module).__name__
    where = f"inputs of {name}"
    if not isinstance(inputs, tuple | list | Mapping):
        what = "not a tuple of arguments, nor a dict"
        fix = 'inputs=(tokens,), or by name, inputs={"tokens": tokens, "train": True}'
        raise ValueError(message(what, where=where, got=type(inputs), fix=fix))
    if not callable(module):
        what = "the model has no __call__"
        fix = "give it a __call__ that runs all of it once, to make its parameters"
        raise ValueError(message(what, where=name, fix=fix))
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    signature = inspect.signature(module)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        what = "the example inputs do not fit the model"
        fix = "name every argument without a default, such as inputs={'x': x, 'train': True}"
        text = message(what, where=where, expected=signature, got=error, fix=fix)
        raise ValueError(text) from error
    return args, kwargs


def _module_path(module: nn.Module) -> str | None:
    """Returns the module's path; None for an unbound one, which has plain methods only."""
    return None if module.scope is None else SEPARATOR.join(module.path)


def _module_infos(
    kinds: Mapping[str, type], dtypes: Mapping[str, Any], params: Iterable[str]
) -> list[ModuleInfo]:
    """Returns the modules of a model, parents first.

    `kinds`, `dtypes`: {module path: its class, or its dtype}; `params`: paths, each of the deepest
    module whose path begins it.
    """
    direct: dict[str, set[str]] = {module: set() for module in kinds}
    for path in params:
        direct[next(module for module in prefixes(path) if module in kinds)].add(path)
    by_depth = sorted(kinds, key=lambda module: len(prefixes(module)) if module else 0)
    return [
        ModuleInfo(path, kinds[path], frozenset(direct[path]), True, dtype=dtypes[path])
        for path in by_depth
    ]


def _call_in_boundary(
    next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any, boundary: Boundary
) -> Any:
    """Returns what a module's method returns, run inside the module's boundary.

    A unit's parameters are gathered as the method reads them, and again in the backward pass.
    `next_fun`, `context`: as Linen gives them to an interceptor.
    """
    args, kwargs = boundary.entering((args, kwargs))
    params = context.module.variables.get(_PARAMS, {})
    unit, activations = boundary.unit, boundary.activations
    if unit is None or (activations == SAVED and not shards_in(params, unit)):
        return boundary.leaving(next_fun(*args, **kwargs))
    method = context.orig_method.func
    arrays, nodes, rebuild = split_arrays((args, kwargs))

    # Not by the method's name: Flax would capture its result (`capture_intermediates`) once more.
    def on_arrays(module: nn.Module, arrays: Sequence[Any], nodes: Sequence[Any]) -> Any:
        inner_args, inner_kwargs = rebuild(activations.name_inputs(list(arrays)), nodes)
        return method(module, *inner_args, **inner_kwargs)

    lifted = nn.map_variables(on_arrays, _PARAMS, trans_in_fn=lambda tree: gathered(tree, unit))
    settings = checkpoint_settings(all_shards(params), activations)
    if settings is not None:
        lifted = nn.remat(lifted, **settings)
    return boundary.leaving(lifted(context.module, arrays, nodes))
