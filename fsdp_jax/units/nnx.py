"""Adapter of Flax NNX models.

The model is not modified and needs no preparation. A step rebuilds it. For that trace only, the
methods of the classes of units, of norms that stay in float32 and of the model itself are wrapped:
the wrappers gather and cast around the original ones. A unit finds its parameters by the path in
the metadata of their Variables, which passes through NNX's transforms.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from flax.traverse_util import unflatten_dict

from fsdp_jax.compat.error_texts import first_line
from fsdp_jax.compat.flax_nnx import (
    CALL,
    TracedStream,
    noted_shapes,
    own_attributes,
    swap_streams,
    take_noted_shape,
    traced_arrays_are_state,
)
from fsdp_jax.errors import ArgumentError
from fsdp_jax.io.array_specs import is_prng_key
from fsdp_jax.sharding.param_leaves import added_dims
from fsdp_jax.tree import SEPARATOR, PyTree, flatten, map_with_path, prefixes
from fsdp_jax.units.auto_wrap import ModuleInfo
from fsdp_jax.units.comm import ParamComm
from fsdp_jax.units.constructors import refuse_in_memory
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
from fsdp_jax.units.nnx_methods import wrapped_methods
from fsdp_jax.units.objects import captured_values
from fsdp_jax.units.unit import (
    call_checkpointed,
    checkpoint_settings,
    gather_unit,
    gathers_nothing,
    warn_of_unfound,
)

_PATH = "fsdp_path"  # metadata of a parameter's Variable in a step: its path in the model


class NnxModel:
    """Adapter for `make_model(rngs) -> nnx.Module`."""

    def __init__(self, make_model: Callable[[nnx.Rngs], nnx.Module]) -> None:
        self._make = make_model
        self._order: dict[str, int] = {}  # of modules, as the constructor assigns them
        # Make the model as shapes only, and split it into structure, parameters and other state.
        self._made: dict[str, tuple[int, ...]] = {}  # shapes in which parameters were made
        with nnx.use_eager_sharding(False), noted_shapes():
            self._graphdef, *states = jax.eval_shape(lambda: self._make_and_split(0))
        params, rest = states
        model = nnx.merge(self._graphdef, params, rest)
        _refuse_captured_arrays(model)
        self._params = _StateStructure(params)
        self._rest = _StateStructure(rest)
        # What the layout and the units are made from, as for Linen.
        self.params: PyTree = unflatten_dict(dict(nnx.to_flat_state(params)))
        self.rest: PyTree = self._rest.to_tree(rest)
        self.boxed_rest: PyTree = unflatten_dict(dict(nnx.to_flat_state(rest)))
        self.modules: Sequence[ModuleInfo] = list(_module_infos(model, self._order))
        shapes = {path: x.shape for path, x in flatten(self.params).items()}
        # Transforms of Linen inside a bridge add dims before the Variable is made.
        bridges = {path for path, node in _walk(model) if isinstance(node, nnx.bridge.ToNNX)}
        made = {p: x for p, x in self._made.items() if bridges.isdisjoint(prefixes(p))}
        self.stacked: Mapping[str, int] = added_dims(made, shapes)
        self.init_inputs: PyTree = {}
        self.aliases: Mapping[str, tuple[str, ...]] = _alias_paths(model)
        self.axis_names = frozenset().union(*(axis_names_of(node) for _, node in _walk(model)))
        # To recognize attributes that a call adds, and the keys of random streams.
        self._attributes = {
            _child_path(path, name) for path, node in _walk(model) for name, _ in _attributes(node)
        }
        self._numbers = _numbers(model)
        self._keys = {
            path for path, var in _flat_variables(rest).items() if isinstance(var, nnx.RngKey)
        }

    def _make_and_split(self, key: Any) -> Any:
        """Makes a model and splits it: (graphdef, params, rest); called inside jit."""
        rngs = nnx.Rngs(key)
        swap_streams(_walk(rngs), nnx.RngStream, TracedStream)
        with traced_arrays_are_state():
            model = self._make(rngs)
        if not isinstance(model, nnx.Module):
            raise ArgumentError(
                "the function makes no NNX model",
                where="model",
                expected=nnx.Module,
                got=type(model),
                fix="return the model; a Linen module is passed itself, with inputs=(...)",
            )
        refuse_in_memory(model)
        swap_streams(_walk(model), TracedStream, nnx.RngStream)
        nnx.pop(model, nnx.Intermediate)  # sown while the model was made: no state
        self._order |= {path: number for number, (path, _) in enumerate(_walk(model))}
        for path, variable in _flat_variables(nnx.state(model, nnx.Param)).items():
            if (shape := take_noted_shape(variable)) is not None:
                self._made[path] = shape
        graphdef, *states = nnx.split(model, nnx.Param, ...)
        for state in states:
            _refuse_other_values(state)
        return graphdef, *map(as_arrays, states)

    def init(self, key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
        """Returns (params, rest), concrete; called inside jit."""
        with nnx.use_eager_sharding(False):
            _, params, rest = self._make_and_split(key)
        return self._params.to_tree(params), self._rest.to_tree(rest)

    def build(self, params: PyTree, rest: PyTree) -> nnx.Module:
        """Builds the model with these parameters."""
        states = self._params.to_state(params), self._rest.to_state(rest)
        return nnx.merge(self._graphdef, *states, copy=True)

    def names_of_run(self) -> list[str]:
        """Makes names of mapped axes to bind around one run: NNX needs none."""
        return []

    def run(self, fn: LossFn, call: ModelCall) -> tuple[Any, PyTree]:
        """Runs the model: (`fn(model, batch)`, the updated rest).

        Ignores the key of the call: NNX keeps its random streams in the model.
        """
        local = call.rest if call.device is None else self._fold_keys(call.rest, call.device)
        model = self.build(call.params, local)
        if not call.training:
            model.eval()
        written: set[str] = set()
        for path, variable in _flat_variables(nnx.state(model, nnx.Param)).items():
            variable.set_metadata(_PATH, path)
            _record_writes(variable, written)
        classes: set[type] = set()
        for path, module in list(_walk(model)):
            if path in call.boundaries and CALL not in vars(module):
                boundary = call.boundaries[path]
                context = _ModuleCall(path, boundary, call.comms, id(module), written)
                setattr(module, CALL, context)
                classes.add(type(module))
        with traced_arrays_are_state(), wrapped_methods(classes, _call_in_boundary):
            out = fn(model, call.batch)
        if call.training:
            self._refuse_new_state(model)
            self._warn_of_changed_numbers(model)
        after = self._rest.to_tree(nnx.state(model, nnx.Not(nnx.Param)))
        return out, after if call.device is None else self._unfold_keys(after, call.rest, local)

    def _refuse_new_state(self, model: nnx.Module) -> None:
        """Raises ValueError for state that a step created and that the next one would not have.

        A new attribute that is an array is allowed: a loss may read it, and a model that reads it
        before writing it fails.
        """
        known = {*self._params.paths, *self._rest.paths}
        for path, leaf in _flat_variables(nnx.state(model)).items():
            is_side_output = not isinstance(leaf, nnx.Variable) and path not in self._attributes
            if path not in known and not is_side_output and not isinstance(leaf, nnx.Intermediate):
                raise _new_state_error(path)

    def _warn_of_changed_numbers(self, model: nnx.Module) -> None:
        """Warns of a Python number that a step has changed: the next starts from the old one."""
        for path, number in _numbers(model).items():
            before = self._numbers.get(path, number)
            if number is not before and number != before:  # a NaN is itself
                text = f"the step sets '{path}', a Python number of the model, from {before} to "
                text += f"{number}, which is not kept: each step begins with {before}. If the next "
                text += "reads it, make it an nnx.Variable, which is carried, saved and restored"
                warnings.warn(text, stacklevel=2)

    def _fold_keys(self, rest: PyTree, device: jax.Array) -> PyTree:
        """Folds the device's index into the keys of the state's random streams.

        Raises ValueError for a key that is a plain attribute: the model may draw from it for each
        row, or for something that all devices share.
        """

        def fold(path: str, value: jax.Array) -> jax.Array:
            if path in self._keys:
                return _fold_into_keys(value, device)
            if is_prng_key(value):
                raise ArgumentError(
                    "a random key is a plain attribute of the model",
                    where=path,
                    expected="keys of nnx.Rngs, with local_batch: they differ by device",
                    fix="hold nnx.Rngs in its place, or leave local_batch out",
                )
            return value

        return map_with_path(fold, rest)

    def _unfold_keys(self, after: PyTree, before: PyTree, local: PyTree) -> PyTree:
        """Restores the keys of the state: drawing from a stream only advances its count.

        Counts are the same on every device. Raises ValueError if the model itself writes a key.
        """
        keys, folded, flat = flatten(before), flatten(local), flatten(after)
        for path, value in flat.items():
            of_stream = path.removesuffix("key") + "count" in keys
            if path in self._keys and not of_stream and value is not folded[path]:
                raise ArgumentError(
                    "the model writes a random key of its own",
                    where=path,
                    expected="keys that are read only, with local_batch",
                    fix="draw from an nnx.RngStream, or leave local_batch out",
                )
        return map_with_path(lambda path, x: keys[path] if path in self._keys else x, after)


def _new_state_error(path: str) -> ValueError:
    """Makes the error for state that a call created: the next step would not have it."""
    what = "the model makes new state in a step"
    fix = "make it in __init__, with the shape that it has in every step"
    return ArgumentError(what, where=path, fix=fix)


def _fold_into_keys(keys: jax.Array, index: jax.Array) -> jax.Array:
    """Folds an index into a key, or into each of a stack of keys."""
    if keys.ndim:
        return jax.vmap(_fold_into_keys, (0, None))(keys, index)
    return jax.random.fold_in(keys, index)


class _StateStructure:
    """The structure of an `nnx.State`; converts it to nested dicts with its keys, and back."""

    def __init__(self, state: nnx.State) -> None:
        self._keys = [keys for keys, _ in nnx.to_flat_state(state)]
        self.paths = list(map(_join, self._keys))
        self._treedef = jax.tree.structure(state)

    def to_tree(self, state: nnx.State) -> PyTree:
        """Converts a state to nested dicts; None for leaves that it lacks."""
        variables = dict(nnx.to_flat_state(state))
        return unflatten_dict({keys: _leaf_value(variables.get(keys)) for keys in self._keys})

    def to_state(self, tree: PyTree) -> nnx.State:
        """Converts nested dicts to a state of this structure."""
        flat = flatten(tree)
        return jax.tree.unflatten(self._treedef, [flat[path] for path in self.paths])


def _join(path: Sequence[Any]) -> str:
    """Joins attribute names and numbers to a path by slashes."""
    return SEPARATOR.join(map(str, path))


def _child_path(path: str, name: Any) -> str:
    """Joins the path of a module and the name of its attribute."""
    return f"{path}{SEPARATOR}{name}" if path else str(name)


def _flat_variables(state: nnx.State) -> dict[str, nnx.Variable]:
    """Flattens a state: {slash-joined path: Variable or array}."""
    return {_join(path): variable for path, variable in nnx.to_flat_state(state)}


def _refuse_other_values(state: nnx.State) -> None:
    """Raises ValueError for a Variable that holds something other than one array or number."""
    for path, leaf in _flat_variables(state).items():
        value = _leaf_value(leaf)
        if not isinstance(value, jax.Array | np.ndarray | np.generic | int | float | complex):
            raise ArgumentError(
                f"an nnx.{type(leaf).__name__} holds something other than an array",
                where=path,
                expected="one array, or a number",
                got=type(value).__name__,
                fix=(
                    "a Variable for each array, nnx.Dict(a=nnx.Param(...)) or nnx.List([...]); "
                    "what is no array is a plain attribute"
                ),
            )


def _walk(
    node: Any, path: tuple[str, ...] = (), parents: frozenset[int] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """Yields (path, node) of modules and containers, parents first; shared ones come twice."""
    yield _join(path), node
    for name, child in _attributes(node):
        if isinstance(child, nnx.Pytree | dict | list | tuple) and id(child) not in parents:
            yield from _walk(child, (*path, str(name)), parents | {id(node)})


def _attributes(node: Any) -> list[tuple[Any, Any]]:
    """Lists (name, value) of a module's attributes, or of a container's elements."""
    if isinstance(node, nnx.Pytree):
        return own_attributes(node)
    return list(node.items()) if isinstance(node, dict) else list(enumerate(node))


def _module_infos(model: nnx.Module, order: Mapping[str, int]) -> Iterator[ModuleInfo]:
    """Yields modules, parents first, each with the paths of the parameters among its attributes.

    `order`: {path: its place among the modules as they are made}; `model` has them by name.
    """
    params = _flat_variables(nnx.state(model, nnx.Param))
    path_of = {id(variable): path for path, variable in params.items()}
    for path, node in _walk(model):
        children = [id(child) for _, child in _attributes(node)]
        direct = frozenset(path_of[child] for child in children if child in path_of)
        is_callable = isinstance(node, nnx.Module) and callable(node)
        # nnx.Embed keeps the dtype that its table was made in, and casts a table of another dtype
        # back to it.
        pinned = isinstance(node, nnx.Embed)
        dtype, place = dtype_of(node), order.get(path, len(order))
        yield ModuleInfo(path, type(node), direct, is_callable, pinned, dtype, place)


def _alias_paths(model: nnx.Module) -> dict[str, tuple[str, ...]]:
    """Finds the Variables that are shared: {path in the state: its other paths}."""
    path_of = {id(leaf): path for path, leaf in _flat_variables(nnx.state(model)).items()}
    aliases: dict[str, tuple[str, ...]] = {}
    for parent, node in _walk(model):
        for name, child in _attributes(node):
            path, own = _child_path(parent, name), path_of.get(id(child))
            if isinstance(child, nnx.Variable) and own not in (path, None):
                aliases[own] = (*aliases.get(own, ()), path)
    return aliases


def _refuse_captured_arrays(model: nnx.Module) -> None:
    """Raises ValueError for an attribute that is a function holding an array of the constructor.

    An array attribute is state, carried from step to step. An array that a closure or a partial
    holds belongs to the trace that made it, and is missing in the next.
    """
    for path, node in _walk(model):
        for name, child in _attributes(node):
            if any(isinstance(value, jax.core.Tracer) for value in captured_values(child)):
                raise ArgumentError(
                    "a function that is an attribute of the model holds a JAX array",
                    where=_child_path(path, name),
                    fix="make that array an attribute of the model too, or a NumPy array",
                )


def _record_writes(variable: nnx.Variable, written: set[str]) -> None:
    """Adds a hook to a parameter's Variable that records its path when the model writes it.

    NNX's transforms replace the arrays of all Variables that pass through them, without the hook.
    """

    def record(variable: nnx.Variable, value: Any) -> Any:
        written.add(variable.get_metadata(_PATH, ""))
        return value

    hooks = variable.get_metadata("on_set_value", ())
    hooks = hooks if isinstance(hooks, tuple) else (hooks,)
    variable.set_metadata(on_set_value=(*hooks, record))


@dataclass(frozen=True, eq=False)  # equal only to itself: no transform reuses another run's trace
class _ModuleCall:
    """The context of a module's methods in one run of the model: its attribute `CALL`."""

    path: str
    boundary: Boundary
    comms: Mapping[str, ParamComm]  # of all parameters, by path
    module_id: int  # of the model's own module, not of a copy with another model's Variables
    written: set[str]  # paths of parameters that the model has written so far
    entered: bool = False  # whether the call is inside the boundary: its own methods stay there

    @functools.cached_property
    def needs_unit_call(self) -> bool:
        """Whether its methods run as a unit's: its parameters or activations need handling."""
        own = [comm for comm in self.comms.values() if comm.unit == self.boundary.unit]
        return self.boundary.unit is not None and not gathers_nothing(
            own, self.boundary.activations
        )

    @functools.cached_property
    def traced_whole(self) -> bool:
        """Whether the step lacks the whole array of one of its parameters."""
        return any(
            comm.traced_whole for comm in self.comms.values() if comm.unit == self.boundary.unit
        )

    def own_params(self, leaves: Iterable[Any]) -> tuple[list[ParamComm], list[nnx.Variable]]:
        """Selects the leaves of a state that are this unit's parameters, with their `ParamComm`."""
        comms: list[ParamComm] = []
        variables: list[nnx.Variable] = []
        for leaf in leaves:
            if not isinstance(leaf, nnx.Param):
                continue
            comm = self.comms.get(leaf.get_metadata(_PATH, ""))
            if comm is not None and comm.unit == self.boundary.unit:
                comms.append(comm)
                variables.append(leaf)
        return comms, variables


class _ReturnsObjectsError(Exception):
    """A unit's method makes and returns a container of its own Flax objects, as a getter does."""


@contextlib.contextmanager
def _entered(module: Any, call: _ModuleCall) -> Iterator[None]:
    """Marks a module's boundary as entered: calls among its own methods are inside it already."""
    attributes = vars(module)  # a transform refuses assignments to the caller's modules
    attributes[CALL] = replace(call, entered=True)
    try:
        yield
    finally:
        attributes[CALL] = call


def _call_in_boundary(original: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
    """Runs a method of the module's class, `original`, inside the module's boundary."""
    call: _ModuleCall = vars(module)[CALL]
    boundary = call.boundary
    args, kwargs = boundary.entering((args, kwargs))
    if call.needs_unit_call:
        try:
            return boundary.leaving(_call_unit(original, module, args, kwargs, call))
        except _ReturnsObjectsError:
            pass  # the container is to hold those of the module itself, not of a copy
    with _entered(module, call), unchanged_arguments((args, kwargs), call.path):
        out = original(module, *args, **kwargs)
    return boundary.leaving(out)


def _call_unit(
    original: Callable[..., Any], module: Any, args: Any, kwargs: Any, call: _ModuleCall
) -> Any:
    """Runs a unit's method as a pure function of the module's state.

    The module's state is updated afterwards. The arguments are those of `_call_in_boundary`. Raises
    _ReturnsObjectsError for a method that returns nothing but a new container of Flax objects.
    """
    unit, activations = str(call.boundary.unit), call.boundary.activations
    # Split the module, and the modules among its arguments, into structure and state.
    arrays, nodes, rebuild = split_arrays((args, kwargs))
    graphdef, state = nnx.split((module, nodes))
    comms, variables = call.own_params(leaf for _, leaf in nnx.to_flat_state(state))
    if not comms and call.module_id == id(module):
        why, fix = "its Variables are not those of the model", "set the value of one, kernel[...]"
        warn_of_unfound(unit, call.comms.values(), why, f"{fix} = value, in place of a new Param")
    settings = checkpoint_settings(comms, [v.get_raw_value() for v in variables], activations)
    checkpointed = settings is not None
    rebuild_out: list[Callable[..., Any]] = []
    returned: list[Any] = []  # objects of the caller's
    plain = _plain_attributes((module, nodes))
    plain_after: dict[str, dict[str, Any]] = {}

    def pure(state: nnx.State, arrays: list[Any]) -> tuple[Any, nnx.State]:
        """Computes (arrays of the result, changed state). Raises ValueError if state is created."""
        leaves = dict(nnx.to_flat_state(state))
        comms, variables = call.own_params(leaves.values())
        gathered = gather_unit(comms, [v.get_raw_value() for v in variables])
        pairs = zip(variables, gathered, strict=True)
        copies = {id(variable): variable.replace(value) for variable, value in pairs}
        # Replace the unit's parameters by the gathered copies, and run the method.
        whole = nnx.from_flat_state((path, copies.get(id(x), x)) for path, x in leaves.items())
        merged = inner, inner_nodes = nnx.merge(graphdef, whole, copy=True)
        inner_args, inner_kwargs = rebuild(activations.name_inputs(arrays), inner_nodes)
        # Name its operations by the unit's path in profiles and reports, as Linen does for modules.
        written_before = set(call.written)
        call.written.clear()
        with (
            _entered(inner, call),
            unchanged_arguments((inner_args, inner_kwargs), unit, objects=checkpointed),
            jax.named_scope(unit or "model"),
        ):
            out = original(inner, *inner_args, **inner_kwargs)
        # Find what it changed, and what it returns.
        changed = _changed_state(dict(nnx.to_flat_state(whole)), merged, plain, call)
        call.written.update(written_before)
        out_arrays, out_nodes, rebuild_last = split_results(out, unit, checkpointed=checkpointed)
        own = _objects_of_caller(out_nodes, whole, merged, (module, nodes))
        if len(own) < len(out_nodes):
            known = {id(_leaf_value(x)) for x in (*leaves.values(), *copies.values())}
            made = [x for _, x in nnx.to_flat_state(nnx.state(nnx.List(list(out_nodes))))]
            if not out_arrays and all(id(_leaf_value(x)) in known for x in made):
                raise _ReturnsObjectsError
            raise ArgumentError(
                "a unit's method returns a module or a Variable that it makes",
                where=unit,
                got=type(out_nodes[0]).__name__,
                fix=f"return arrays, or leave {type(module).__name__} out of units",
            )
        rebuild_out[:] = [rebuild_last]
        returned[:] = own
        plain_after.update(_plain_attributes(merged))
        return out_arrays, changed

    # Run it, and write the state that it changed to the caller's module.
    try:
        out_arrays, changed = call_checkpointed(pure, settings, state, arrays)
    except TraceContextError as error:
        raise ArgumentError(
            "a unit's method, or a function that it is given, writes to state outside the unit",
            where=unit,
            got=first_line(error),
            fix=(
                "return the value, and write it where the unit is called; or leave "
                f"{type(module).__name__} out of units"
            ),
        ) from error
    if changed:  # inside a loop of the caller's the module may be read, not written
        nnx.update((module, nodes), changed)
    _assign_plain((module, nodes), plain, plain_after)
    return rebuild_out[0](out_arrays, returned)


def _objects_of_caller(
    returned: Sequence[Any], state: nnx.State, copies: Any, nodes: Any
) -> list[Any]:
    """Finds the caller's modules and Variables in place of their copies that a method returns.

    By their paths in `nodes`, the caller's own; what the method has made is left out. `state`,
    `copies`: those that the method ran with.
    """
    if not returned:
        return []
    own = _objects(nodes)
    path_of = {id(_leaf_value(x)): path for path, x in _flat_variables(state).items()}
    path_of |= {id(x): path for path, x in _objects(copies).items()}
    found = [path_of.get(id(x), path_of.get(id(_leaf_value(x)))) for x in returned]
    return [own[path] for path in found if path in own]


def _changed_state(
    before: Mapping[tuple[Any, ...], Any],
    nodes: Any,
    plain: Mapping[str, Mapping[str, Any]],
    call: _ModuleCall,
) -> nnx.State:
    """Selects the state of modules that a unit's method has changed.

    A parameter is selected only where the method has written it: a gathered array that leaves the
    checkpoint stays in memory.

    Args:
        before: the leaves of the state that the method began with, by path.
        nodes: the modules, after the call.
        plain: attributes that were no state before it, as of `_plain_attributes`.
        call: the context of the unit's call.

    Raises:
        ValueError: the method has made state that the module had not.

    """
    params = {path for path, leaf in before.items() if isinstance(leaf, nnx.Param)}
    values = {path: _leaf_value(leaf) for path, leaf in before.items()}
    params_after, after = map(dict, map(nnx.to_flat_state, nnx.state(nodes, nnx.Param, ...)))
    new = sorted(params_after.keys() - params)
    for path in after.keys() - (values.keys() - params):
        if str(path[-1]) in plain.get(_join(path[:-1]), ()):  # in place of a flag or None
            new.append(path)
    if new:
        raise _new_state_error(_join([str(call.boundary.unit), *new[0][1:]]))
    for path, leaf in params_after.items():
        written = leaf.get_metadata(_PATH, None)  # None: a Param that the method has put there
        if written is None or written in call.written:
            after[path] = before[path].replace(leaf.get_raw_value())
    changed = (path for path, leaf in after.items() if _leaf_value(leaf) is not values.get(path))
    return nnx.from_flat_state([(path, after[path]) for path in changed])


def _assign_plain(
    nodes: Any, before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> None:
    """Copies changes of non-state attributes from a called copy of modules to the modules."""
    for path, node in list(_walk(nodes)):
        known = before.get(path, {})
        for name, value in after.get(path, {}).items():
            if name not in known or _was_assigned(value, known[name]):
                setattr(node, name, value)


def _objects(nodes: Any) -> dict[str, Any]:
    """Collects modules, containers and their Variables: {path: object}."""
    found: dict[str, Any] = {}
    for path, node in _walk(nodes):
        found[path] = node
        for name, child in _attributes(node):
            if isinstance(child, nnx.Variable):
                found[_child_path(path, name)] = child
    return found


def _plain_attributes(node: Any) -> dict[str, dict[str, Any]]:
    """Collects the attributes that are not state: {module path: {name: value}}.

    They are flags, numbers, functions, and containers of such.
    """
    return {
        path: {k: x for k, x in _attributes(each) if not _holds_state(x) and k != CALL}
        for path, each in _walk(node)
        if isinstance(each, nnx.Pytree)
    }


def _numbers(model: nnx.Module) -> dict[str, int | float]:
    """Collects the Python numbers among the attributes of a model's modules, by path."""
    return {
        _child_path(path, name): value
        for path, names in _plain_attributes(model).items()
        for name, value in names.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _holds_state(value: Any) -> bool:
    """Tells whether an attribute is, or contains, a module, a Variable or an array."""
    if isinstance(value, dict | list | tuple):
        return any(_holds_state(child) for _, child in _attributes(value))
    return isinstance(value, nnx.Pytree | nnx.Variable | jax.Array)


def _was_assigned(value: Any, before: Any) -> bool:
    """Tells whether an attribute was assigned since it had the value `before`.

    Containers, which are copied on the way, are compared by value, other objects by identity.
    """
    if isinstance(value, dict | list | tuple):
        try:
            return bool(value != before)
        except ValueError:  # of NumPy arrays
            return True
    return value is not before


def _leaf_value(leaf: Any) -> Any:
    """Reads the value of a Variable, or of an array that is a plain attribute."""
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
