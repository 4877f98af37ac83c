"""A Flax Linen model as the core wants it: parameters by path, a loss to differentiate, units to gather.

The model is not modified and need not know: Linen lets us intercept its method calls, and its lifted transforms
gather a unit's parameters around the original method.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta

from fsdp_jax.errors import message
from fsdp_jax.model import Boundary, LossFn, split_arrays
from fsdp_jax.tree import PyTree, flatten
from fsdp_jax.units import ModuleInfo, all_shards, checkpoint_settings, gathered, shards_in

_PARAMS = "params"


class LinenModel:
    """Adapter for a `linen.Module` and example inputs (arrays or shapes) to initialise it with."""

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._module, self._inputs = module, inputs
        seen: dict[str, type] = {}

        def watch(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            seen.setdefault("/".join(context.module.path), type(context.module))
            return next_fun(*args, **kwargs)

        with nn.intercept_methods(watch):
            boxed = jax.eval_shape(lambda: self._variables(jax.random.key(0)))
        if _PARAMS not in boxed:
            raise ValueError(message("the model has no parameters", where=type(module).__name__, got=sorted(boxed)))
        self.params: PyTree = boxed[_PARAMS]
        self.rest: PyTree = meta.unbox({name: tree for name, tree in boxed.items() if name != _PARAMS})
        self._collections = list(self.rest)
        paths = list(flatten(meta.unbox(self.params)))
        self.modules: Sequence[ModuleInfo] = _modules(seen, paths)

    def _variables(self, key: jax.Array) -> Any:
        zeros = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype) if hasattr(x, "shape") else x, self._inputs)
        names = (_PARAMS, "dropout")
        return self._module.init(dict(zip(names, jax.random.split(key, 2), strict=True)), *zeros)

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """(params, rest), concrete; called inside jit."""
        variables = meta.unbox(self._variables(key))
        return variables[_PARAMS], {name: variables[name] for name in self._collections}

    def build(self, params: PyTree, rest: PyTree) -> nn.Module:
        """The module bound to these values; `model(x)` and `model.variables` work."""
        return self._module.bind({_PARAMS: params, **rest})

    def run(
        self, fn: LossFn, params: PyTree, rest: PyTree, batch: PyTree, key: jax.Array, boundaries: dict[str, Boundary],
        *, training: bool, device: jax.Array | None,
    ) -> tuple[Any, PyTree]:  # fmt: skip
        """(`fn(model, batch)`, the rest afterwards). Whether to train is an argument of the model's own."""
        key = key if device is None else jax.random.fold_in(key, device)
        rngs = {_PARAMS: key, "dropout": jax.random.fold_in(key, 1)} if training else {}

        def intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            boundary = boundaries.get("/".join(context.module.path))
            # Lifted transforms pass through here too, under the names of the functions that they lift.
            if (
                boundary is None
                or context.method_name == "setup"
                or not hasattr(type(context.module), context.method_name)
            ):
                return next_fun(*args, **kwargs)
            return _call(next_fun, args, kwargs, context, boundary)

        with nn.intercept_methods(intercept):
            out, after = nn.apply(lambda model: fn(model, batch), self._module, mutable=self._collections)(
                {_PARAMS: params, **rest}, rngs=rngs
            )
        return out, {name: after.get(name, rest[name]) for name in self._collections}


def _modules(seen: dict[str, type], paths: list[str]) -> list[ModuleInfo]:
    """Parameters belong to the deepest module whose path starts theirs."""
    owner = {path: max((m for m in seen if not m or path.startswith(m + "/")), key=len) for path in paths}
    return [
        ModuleInfo(module, kind, frozenset(path for path in paths if owner[path] == module), True)
        for module, kind in sorted(seen.items(), key=lambda item: item[0].count("/") + bool(item[0]))
    ]


def _call(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any, boundary: Boundary) -> Any:
    args, kwargs = boundary.entering((args, kwargs))
    module = context.module
    if boundary.unit is None or not _waiting(module, boundary.unit):
        out = next_fun(*args, **kwargs)
    else:
        out = _call_unit(module, context.method_name, args, kwargs, boundary)
    return boundary.leaving(out)


def _waiting(module: nn.Module, unit: str) -> bool:
    """Whether this call is the unit's own, not one already inside it."""
    return bool(shards_in(module.variables.get(_PARAMS, {}), unit))


def _call_unit(module: nn.Module, name: str, args: Any, kwargs: Any, boundary: Boundary) -> Any:
    """The method, lifted: its parameters are gathered as the module reads them, and again in the backward."""
    assert boundary.unit is not None
    unit = boundary.unit
    arrays, _, rebuild = split_arrays((args, kwargs))

    def lifted(module: nn.Module, *arrays: Any) -> Any:
        inner_args, inner_kwargs = rebuild(arrays, ())

        def call(module: nn.Module) -> Any:
            return getattr(module, name)(*inner_args, **inner_kwargs)

        return nn.map_variables(call, _PARAMS, trans_in_fn=lambda tree: gathered(tree, unit))(module)

    settings = checkpoint_settings(all_shards(module.variables.get(_PARAMS, {})), boundary.remat)
    return (lifted if settings is None else nn.remat(lifted, **settings))(module, *arrays)
