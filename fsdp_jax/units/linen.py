"""Adapter of Flax Linen models.

The model is not modified and needs no preparation: Linen lets us intercept its method calls, and
its lifted transforms gather a unit's parameters around the original method.

[Note: interception] An interceptor is called inside whatever the user has wrapped a method in
(`nn.remat`, `nn.scan`, ..., as a decorator or on the class), and receives the unwrapped function. A
unit's call lifts that function, never the attribute of the same name, which would enter the user's
transform again. A boundary is entered once: methods that a module calls on itself, including the
lifted function, are already inside it.

Everything here runs in scopes with a flag that makes `nn.jit` trace anew. A user's `jax.jit` around
`module.apply` would reuse a trace for equal shapes, unless a mapped axis with another name is
bound: a new name is therefore bound around each run, and around those nested in it, because Flax
refuses a module that is called inside another `jax.vmap` than its scope was made in.

Interceptors of nested runs see the modules of each other. A second flag, the number of the run,
tells whose a scope is. A user's own `model.apply` makes scopes without flags: there the arrays that
its root holds tell it, and inside Flax's transforms, which replace arrays, the call around them.

[Note: example inputs] To make their variables, most models need only the shapes of their example
inputs. So the initialization is traced with all inputs as arguments, and that program shows which
inputs' values reach a variable. Those inputs have to be arrays, and are passed to the
initialization; the others are zeros, which cost neither memory nor a transfer.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.extend.core as jex
import numpy as np
from flax import core, errors, nnx
from jax.dtypes import canonicalize_dtype

from fsdp_jax.compat.error_texts import first_line
from fsdp_jax.compat.flax_linen import (
    FLAGS,
    flags_of_run,
    in_scope,
    original_method,
    params_of_root,
    run_of,
    sow_nothing,
    unbox_tree,
)
from fsdp_jax.errors import ArgumentError, first_lines
from fsdp_jax.io.array_specs import is_prng_key
from fsdp_jax.program.dataflow import NONE, DataFlow, Labels
from fsdp_jax.program.primitives import MULTIPLY, primitive_of
from fsdp_jax.sharding.param_leaves import added_dims
from fsdp_jax.tree import SEPARATOR, PyTree, flatten, map_with_path, prefixes
from fsdp_jax.units.auto_wrap import ModuleInfo
from fsdp_jax.units.comm import ParamComm
from fsdp_jax.units.linen_scope import Demands, ScopeWatch
from fsdp_jax.units.model import (
    Boundary,
    LossFn,
    ModelCall,
    as_arrays,
    axis_names_of,
    dtype_of,
    split_arrays,
    split_results,
    unchanged_arguments,
)
from fsdp_jax.units.unit import (
    checkpoint_settings,
    gather_unit,
    gathers_nothing,
    warn_of_unfound,
)

_PARAMS = "params"
_RUNS = itertools.count()
_RUNNING: ContextVar[Mapping[int, Set[int]]] = ContextVar(
    "fsdp_jax_linen_runs", default=MappingProxyType({})
)
"""{number of a run that is traced: ids of its model's parameters}."""


class LinenModel:
    """Adapter for an unbound `linen.Module` and example inputs of its `__call__`.

    The inputs are positional arguments as a tuple, or keyword arguments as a dict: arrays, shapes,
    or plain values. Raises ValueError for inputs that do not fit, for a model without parameters,
    and if an initial value depends on the values of an input that is given only as a shape.
    """

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]) -> None:
        self._module = module
        # Example inputs: arrays are traced as shapes, other values are static.
        arguments = _example_arguments(module, inputs)
        examples, self._arguments_tree = jax.tree_util.tree_flatten_with_path(arguments)
        self._leaves = [_abstract(leaf) for _, leaf in examples]
        abstract = {
            number: leaf
            for number, leaf in enumerate(self._leaves)
            if isinstance(leaf, jax.ShapeDtypeStruct)
        }
        self.demands = Demands()
        kinds: dict[str, type] = {}
        dtypes: dict[str, Any] = {}
        axis_names: set[str] = set()
        made: dict[str, tuple[int, ...]] = {}

        # Trace the initialization, and record of each module that is called its class, its dtype
        # and the shapes of its parameters, of one layer where a transform of Linen stacks them.
        def record(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            path = _module_path(context.module) or ""
            kinds.setdefault(path, type(context.module))
            dtypes.setdefault(path, dtype_of(context.module))
            axis_names.update(axis_names_of(context.module))
            result = next_fun(*args, **kwargs)
            params = {}
            if context.module.scope is not None:
                params = context.module.variables.get(_PARAMS, {})
            for name, leaf in flatten(unbox_tree(params)).items():
                made.setdefault(SEPARATOR.join(filter(None, (path, name))), np.shape(leaf))
            return result

        make_variables = jax.make_jaxpr(self._make_variables, return_shape=True)
        with nn.intercept_methods(record):
            key = jax.eval_shape(lambda: jax.random.key(0))
            program, boxed = make_variables(key, abstract)
        if _PARAMS not in boxed:
            raise ArgumentError(
                "the model has no parameters", where=type(module).__name__, got=sorted(boxed)
            )
        # Pass to the real initialization only inputs whose values reach a variable.
        read = _inputs_read(program, [str(number) for number in abstract], unbox_tree(boxed))
        self.init_inputs: PyTree = {
            number: _value(*examples[number], read[str(number)])
            for number in abstract
            if str(number) in read
        }
        # The layout and the units are made from these: parameters, other state, modules.
        self.params: PyTree = boxed[_PARAMS]
        self.boxed_rest: PyTree = {k: tree for k, tree in boxed.items() if k != _PARAMS}
        self.rest: PyTree = unbox_tree(self.boxed_rest)
        self._collections = list(self.rest)
        paths = flatten(unbox_tree(self.params))
        self.modules: Sequence[ModuleInfo] = _module_infos(kinds, dtypes, paths)
        self.axis_names = frozenset(axis_names)
        shapes = {path: leaf.shape for path, leaf in paths.items()}
        # Transforms of NNX inside a bridge add dims before Linen sees the parameter.
        bridges = {path for path, kind in kinds.items() if issubclass(kind, nnx.bridge.ToLinen)}
        seen = {path: x for path, x in made.items() if bridges.isdisjoint(prefixes(path))}
        self.stacked: Mapping[str, int] = added_dims(seen, shapes)
        self.aliases: Mapping[str, tuple[str, ...]] = {}  # a shared module has one scope

    def _make_variables(self, key: jax.Array, inputs: Mapping[int, Any]) -> Any:
        """Initializes the variables, in Flax's boxes; called inside jit.

        `inputs`: values of example inputs by number; the others are zeros.
        """

        def example(number: int, leaf: Any) -> Any:
            """Makes an example input: its value, zeros, or a plain value."""
            if number in inputs or not isinstance(leaf, jax.ShapeDtypeStruct):
                return inputs.get(number, leaf)
            return jax.numpy.zeros(leaf.shape, leaf.dtype)

        # The arguments of `__call__`: the example inputs, as their original tree.
        leaves = [example(*each) for each in enumerate(self._leaves)]
        args, kwargs = jax.tree.unflatten(self._arguments_tree, leaves)

        def call(scope: core.Scope) -> Any:
            return in_scope(self._module, scope)(*args, **kwargs)

        # The model asks for streams and collections as it runs, so it may have to be traced again.
        def trace() -> Any:
            """Traces the variables' initialization, and again while the model asks for more."""
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
                return as_arrays(core.init(call, flags=FLAGS)(rngs)[1])

        return self.demands.trace_until_met(trace)

    def init(self, key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        """Returns (params, rest), concrete; called inside jit. `inputs`: `init_inputs`."""
        variables = unbox_tree(self._make_variables(key, inputs))
        return variables[_PARAMS], {name: variables[name] for name in self._collections}

    def build(self, params: PyTree, rest: PyTree) -> nn.Module:
        """Binds the module to these values; `model(x)` and `model.variables` work."""
        return self._module.bind({_PARAMS: params, **rest})

    def names_of_run(self) -> list[str]:
        """Makes a name to bind around one run; see the note."""
        return [f"fsdp_run_{next(_RUNS)}"]

    def run(self, fn: LossFn, call: ModelCall) -> tuple[Any, PyTree]:
        """Runs the model: (`fn(model, call.batch)`, the updated `call.rest`).

        Modules in `call.boundaries` gather and cast around their calls. `call.training` provides
        random streams and makes the rest mutable; other switches are the model's own arguments.
        `fn` may be traced more than once.

        Raises ValueError for a model that draws from a stream it is not given, or writes to an
        immutable collection.
        """
        # With local batches every device draws different random numbers.
        key = call.key if call.device is None else jax.random.fold_in(call.key, call.device)
        rest, training = call.rest, call.training
        demands = Demands(self.demands.streams)
        number = next(_RUNS)

        def trace() -> tuple[Any, PyTree]:
            """Computes (result, collections); traced again while the model asks for more."""
            # A cache is written where it is mutable, which changes what a decoder does.
            known = {_PARAMS, "cache", *rest}
            watch = ScopeWatch(demands, gives_streams=training, known=known)

            def loss(scope: core.Scope) -> Any:
                watch.watch(scope)
                return fn(in_scope(self._module, scope), call.batch)

            mutable = [*demands.sown, *(self._collections if training else ())]
            apply = core.apply(loss, mutable=mutable, flags=flags_of_run(number))
            rngs = demands.rngs(key, jax.random.fold_in(key, 1), key) if training else {}
            with nn.intercept_methods(_interceptor(call, watch, number)):
                return apply({_PARAMS: call.params, **rest}, rngs=rngs)

        arrays = {id(x) for x in jax.tree.leaves(call.params)}
        token = _RUNNING.set({**_RUNNING.get(), number: arrays})
        try:
            with _scope_errors(training=training):
                out, after = demands.trace_until_met(trace)
        finally:
            _RUNNING.reset(token)
        return out, {name: after.get(name, rest[name]) for name in self._collections}


def _interceptor(call: ModelCall, watch: ScopeWatch, number: int) -> Callable[..., Any]:
    """Makes an interceptor of Linen's method calls, for one trace; see the note.

    `number`: of the run.
    """
    boundaries = call.boundaries
    entered: set[str] = set()
    owners = _ScopeOwners(number)

    def intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """Runs a method inside its module's boundary, unless it is called from inside it."""
        path = _module_path(context.module)
        if path is None:
            return next_fun(*args, **kwargs)
        with owners.entered(context.module.scope, path) as is_own:
            if not is_own:
                return next_fun(*args, **kwargs)
            with _scope_errors(training=call.training):  # of this model, not of a nested run's
                return run(next_fun, args, kwargs, context, path)

    def run(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any, path: str) -> Any:
        """Runs a method of the model's own module at this path."""
        watch.watch(context.module.scope)
        inside = path in entered or context.method_name == "setup"
        if path not in boundaries or inside:
            return next_fun(*args, **kwargs)
        entered.add(path)
        try:
            return _call_in_boundary(next_fun, args, kwargs, context, boundaries[path], call.comms)
        finally:
            entered.remove(path)

    return intercept


class _ScopeOwners:
    """Tells the scopes of one run from those of runs that are nested with it; see the note."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._applied: int | None = None  # the run whose model the user's `model.apply` runs

    @contextmanager
    def entered(self, scope: core.Scope, path: str) -> Iterator[bool]:
        """Tells whether the module that is called at a path, in this scope, is of the run."""
        number = run_of(scope)
        if number is not None:
            yield number == self._number
            return
        before = self._applied
        self._applied = self._owner_of(scope, path)
        try:
            yield self._applied == self._number
        finally:
            self._applied = before

    def _owner_of(self, scope: core.Scope, path: str) -> int | None:
        """Finds the run whose model the user applies, in a scope of no run; None for another model.

        Raises ValueError for traced parameters that may be of several models.
        """
        running = _RUNNING.get()
        if len(running) == 1:  # as far as its arrays have the shapes of the model's own
            return self._number
        arrays = params_of_root(scope)
        for number, known in running.items():
            if not known.isdisjoint(map(id, arrays)):
                return number
        if self._applied is not None:
            return self._applied
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            raise ArgumentError(
                "a Linen model is applied inside a transform of the loss's, which hides whether it "
                "is the step's own model or another one",
                where=path or "loss_fn",
                expected="with several Linen models in a step: calls of the models",
                got="model.apply on arrays of no model's variables",
                fix="model(x) in place of jax.jit(model.apply)(model.variables, x)",
            )
        return None


@contextmanager
def _scope_errors(*, training: bool) -> Iterator[None]:
    """Replaces Flax's errors about what a scope lacks by errors with the fix."""
    try:
        yield
    except (errors.ModifyScopeVariableError, errors.InvalidRngError) as error:
        raise _scope_error(error, training) from error


def _scope_error(error: Exception, training: bool) -> ValueError:
    """Makes the error for a write to an immutable collection, or a draw from a missing stream."""
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
    return ArgumentError(what, where="model", got=first_line(error), fix=fix)


def _example_arguments(
    module: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Finds (args, kwargs) of the model's `__call__`. Raises ValueError if they do not fit it."""
    name = type(module).__name__
    where = f"inputs of {name}"
    # The inputs are a collection of arguments, and the model can be called.
    if not isinstance(inputs, tuple | list | Mapping):
        raise ArgumentError(
            "not a tuple of arguments, nor a dict",
            where=where,
            got=type(inputs),
            fix='inputs=(tokens,), or by name, inputs={"tokens": tokens, "train": True}',
        )
    if not callable(module):
        raise ArgumentError(
            "the model has no __call__",
            where=name,
            fix="give it a __call__ that runs all of it once, to make its parameters",
        )
    # Bind them to the signature: a missing argument is reported here, and not by an error in the
    # model.
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    signature = inspect.signature(module)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(
            "the example inputs do not fit the model",
            where=where,
            expected=signature,
            got=error,
            fix="name every argument without a default, such as inputs={'x': x, 'train': True}",
        ) from error
    return args, kwargs


def _abstract(x: Any) -> Any:
    """Takes the shape of an array, in a dtype that jax has; returns other values unchanged.

    NumPy scalars are such values, because a model may use one as a flag.
    """
    if not hasattr(x, "shape") or not hasattr(x, "dtype") or isinstance(x, np.generic):
        return x
    return jax.ShapeDtypeStruct(x.shape, canonicalize_dtype(x.dtype, allow_extended_dtype=True))


def _inputs_read(
    program: jex.ClosedJaxpr, inputs: Sequence[str], variables: PyTree
) -> dict[str, list[str]]:
    """Finds the variables that inputs reach: {name of an input: their paths}; see the note.

    `program`: takes a key and inputs with these names, and returns the `variables`.
    """
    labels = [NONE, *(frozenset({name}) for name in inputs)]
    reached: dict[str, list[str]] = {}
    outputs = _InputFlow().outputs(program.jaxpr, labels)
    for path, names in zip(flatten(variables), outputs, strict=True):
        for name in names:
            reached.setdefault(name, []).append(path.removeprefix(f"{_PARAMS}{SEPARATOR}"))
    return reached


class _InputFlow(DataFlow):
    """Follows a model's inputs through its initialization; most of the program reads no input."""

    def results(self, eqn: jex.JaxprEqn, operands: list[Labels]) -> list[Labels]:
        if not any(operands):
            return [NONE] * len(eqn.outvars)
        literals = [x.val for x in eqn.invars if isinstance(x, jex.Literal)]
        if primitive_of(eqn) is MULTIPLY and any(np.all(value == 0) for value in literals):
            return [NONE]  # x * 0, for zeros of the shape of x
        return super().results(eqn, operands)


def _value(keys: tuple[Any, ...], leaf: Any, paths: Sequence[str]) -> Any:
    """Makes the argument of the initialization for an example input: on the host, if possible.

    `keys`: its place among the arguments; `paths`: the variables that depend on it. Raises
    ValueError for a shape.
    """
    if isinstance(leaf, jax.Array) and (is_prng_key(leaf) or not leaf.is_fully_addressable):
        return leaf
    if isinstance(leaf, jax.Array | np.ndarray):
        return np.asarray(leaf)
    raise ArgumentError(
        "an initial value depends on the values of an input, and only its shape is given",
        where=first_lines(list(paths), 3),
        expected="an array, as Flax's own init takes it",
        got=f"inputs{jax.tree_util.keystr(keys[1:])}, a {type(leaf).__name__}",
        fix=(
            "real arrays in inputs=, such as the first rows of a batch; zeros where nothing is "
            "trained"
        ),
    )


def _module_path(module: nn.Module) -> str | None:
    """Joins the module's path; None for an unbound one, which has plain methods only."""
    return None if module.scope is None else SEPARATOR.join(module.path)


def _module_infos(
    kinds: Mapping[str, type], dtypes: Mapping[str, Any], params: Iterable[str]
) -> list[ModuleInfo]:
    """Lists the modules of a model, parents first.

    `kinds`, `dtypes`: {module path: its class, or its dtype}, in the order of calls; `params`:
    parameter paths, each assigned to the deepest module whose path is a prefix.
    """
    direct: dict[str, set[str]] = {module: set() for module in kinds}
    for path in params:
        direct[next(module for module in prefixes(path) if module in kinds)].add(path)
    places = {path: number for number, path in enumerate(kinds)}
    by_depth = sorted(kinds, key=lambda module: len(prefixes(module)) if module else 0)
    return [
        ModuleInfo(
            path, kinds[path], frozenset(direct[path]), True, dtype=dtypes[path], place=places[path]
        )
        for path in by_depth
    ]


def _warn_of_other_slices(unit: str, own: Mapping[str, ParamComm], variables: PyTree) -> None:
    """Warns of a unit that gathers nothing, because its layers are stacked along a later dim.

    `own`: its parameters, by path; `variables`: the arrays that its module has at these paths.
    """
    for path, x in flatten(variables).items():
        comm = own.get(f"{unit}{SEPARATOR}{path}")
        if comm is None or x.ndim >= comm.ndim:
            continue
        # Another model's layers, such as a wider teacher's, may have the same path.
        if x.shape in itertools.combinations(comm.shape, x.ndim) and isinstance(x, jax.core.Tracer):
            why = f"'{path}' is {x.shape} in it, which is not {comm.shape} without its first dims"
            fix = (
                "stack layers along the first dim: variable_axes={'params': 0} in nn.scan, nn.vmap"
            )
            warn_of_unfound(unit, own.values(), why, fix)
            return


def _call_in_boundary(
    next_fun: Callable[..., Any],
    args: Any,
    kwargs: Any,
    context: Any,
    boundary: Boundary,
    comms: Mapping[str, ParamComm],
) -> Any:
    """Runs a module's method inside the module's boundary.

    A unit's parameters are gathered for the call, and again in the backward pass. `next_fun`,
    `context`: as Linen passes them to an interceptor; `comms`: of all parameters, by path.
    """
    args, kwargs = boundary.entering((args, kwargs))
    unit, activations = boundary.unit, boundary.activations
    own = {path: comm for path, comm in comms.items() if comm.unit == unit}
    # Without parameters to gather or activations to recompute, run the method unchanged.
    if unit is None or gathers_nothing(list(own.values()), activations):
        with unchanged_arguments((args, kwargs), _module_path(context.module) or ""):
            out = next_fun(*args, **kwargs)
        return boundary.leaving(out)

    def own_params(tree: PyTree) -> dict[str, jax.Array]:
        """Selects the unit's parameters in its module's variables: {path: value}.

        The loss may apply another model whose modules have the same paths, such as a teacher, to
        arrays that are constants of the trace, or of another shape.
        """
        flat = {f"{unit}{SEPARATOR}{path}": x for path, x in flatten(tree).items()}
        flat = {path: x for path, x in flat.items() if isinstance(x, jax.core.Tracer)}
        return {path: x for path, x in flat.items() if path in own and own[path].fits(x.shape)}

    def with_gathered(variables: PyTree) -> PyTree:
        """Gathers the unit's parameters in the module's variables."""
        params = own_params(variables.get(_PARAMS, {}))
        gathered = gather_unit([own[path] for path in params], list(params.values()))
        new = dict(zip(params, gathered, strict=True))
        replaced = map_with_path(
            lambda path, x: new.get(f"{unit}{SEPARATOR}{path}", x), variables.get(_PARAMS, {})
        )
        return {**variables, _PARAMS: replaced}

    method = original_method(context)
    arrays, nodes, rebuild = split_arrays((args, kwargs))
    variables = context.module.variables.get(_PARAMS, {})
    params = own_params(variables)
    if not params:
        _warn_of_other_slices(str(unit), own, variables)
    settings = checkpoint_settings(
        [own[path] for path in params], list(params.values()), activations
    )
    checkpointed = settings is not None
    rebuild_out: list[Callable[..., Any]] = []

    # Do not lift by the method's name: Flax would capture its result (`capture_intermediates`)
    # twice.
    def on_arrays(module: nn.Module, arrays: Sequence[Any], nodes: Sequence[Any]) -> Any:
        inner_args, inner_kwargs = rebuild(activations.name_inputs(list(arrays)), nodes)
        with unchanged_arguments((inner_args, inner_kwargs), unit, objects=checkpointed):
            out = method(module, *inner_args, **inner_kwargs)
        out_arrays, out_nodes, rebuild_last = split_results(out, unit, checkpointed=checkpointed)
        if checkpointed and out_nodes:
            raise ArgumentError(
                "a unit's method returns a module or a Variable",
                where=unit,
                got=type(out_nodes[0]).__name__,
                fix="return arrays, or choose the units without this one, units='model'",
            )
        rebuild_out[:] = [lambda arrays: rebuild_last(arrays, out_nodes)]
        return out_arrays

    # Gather as the method reads its variables, inside the checkpoint, so that the backward pass
    # gathers again.
    lifted = nn.map_variables(on_arrays, _PARAMS, trans_in_fn=with_gathered)
    if settings is not None:
        lifted = nn.remat(lifted, **settings)
    out_arrays = lifted(context.module, arrays, nodes)
    return boundary.leaving(rebuild_out[0](out_arrays))
