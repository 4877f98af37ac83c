"""Other models in a step: a teacher, a reference, the other half of a GAN, an average of the model.

The loss gets each as a keyword argument, in inference mode. Its parameters are inputs of the step
beside the donated state: they are gathered by their own units, are not differentiated, and stay as
they are. What the loss differentiates by the activations that go through it, it does as for any
function.

[Note: another model in a trace] A step's trace has gathers of all models, and tells them by the
`ParamComm` of each: `model` is the name of the other model, and `path` begins with it. The adapters
find a model's own parameters by the paths in that model.

[Note: one unit] A unit that is a whole model runs under a checkpoint, which the whole loss would be
in: so another model that is one unit is gathered as it is entered, once in each microbatch, and the
copy stays for as long as it is used.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec

from fsdp_jax.errors import ArgumentError
from fsdp_jax.sharding.layout import COPIES, MODEL_STATE, Layout, Leaf
from fsdp_jax.step.average import check_weights, with_weights
from fsdp_jax.step.state import (
    TrainState,
    check_base,
    check_state,
    own_array,
    require_held,
    shared_with,
)
from fsdp_jax.step.step_plan import OtherModel, StepPlan
from fsdp_jax.tree import SEPARATOR, PyTree, array_texts, flatten, nest_like
from fsdp_jax.units.model import ModelCall
from fsdp_jax.units.unit import ROOT

EMA: Literal["ema"] = "ema"
_OF_STEPS = ("self", "state", "batch")  # parameters of a step's call
_EXPECTED = "{name: what fully_shard returned, or 'ema' for the average of the model itself}"


class OtherArrays(NamedTuple):
    """The arrays of another model's state that a step takes."""

    params: PyTree
    copies: PyTree
    model_state: PyTree


def arrays_like(layout: Layout, leaf_to: Callable[[Leaf], Any]) -> OtherArrays:
    """Builds OtherArrays with `leaf_to(Leaf)` in place of every array."""
    trees = layout.params, layout.other[COPIES], layout.other[MODEL_STATE]
    return OtherArrays(*jax.tree.map(leaf_to, trees))


def arrays_of(state: TrainState) -> OtherArrays:
    """Selects the arrays of a state that a step takes of another model."""
    return OtherArrays(state.params, state.copies, state.model_state)


def leaves_of_others(plan: StepPlan) -> dict[str, list[Leaf]]:
    """Lists the arrays that a step takes of other models' states: {name: their leaves}."""
    return {
        name: jax.tree.leaves(arrays_like(other.plan.layout, lambda leaf: leaf))
        for name, other in plan.others.items()
        if not other.averages
    }


def bytes_of_others(plan: StepPlan, *, host: bool = False) -> int:
    """Counts the bytes of these arrays on a device, or in host memory for it."""
    leaves = [leaf for each in leaves_of_others(plan).values() for leaf in each]
    return sum(leaf.bytes_per_device for leaf in leaves if leaf.on_host == host)


# Making a step


def check_others(others: Any, layout: Layout, is_sharded: Callable[[Any], bool]) -> None:
    """Raises ValueError for models that do not fit a step of a model with this layout.

    `is_sharded`: tells whether a value is one that `fully_shard` returned.
    """
    if not isinstance(others, Mapping):
        raise ArgumentError("not a dict", where="others", expected=_EXPECTED, got=type(others))
    for name, other in others.items():
        where = f"others[{name!r}]"
        if not isinstance(name, str) or not name.isidentifier():
            what = "the name of another model is no name of a parameter of the loss"
            raise ArgumentError(what, where=where, got=repr(name), fix="others={'teacher': ...}")
        if any(path.split(SEPARATOR)[0] == name for path in layout.by_path):
            raise ArgumentError(
                "another model has the name of a module of the model itself",
                where=where,
                got=name,
                fix=f"another name, such as 'other_{name}'",
            )
        if isinstance(other, str):
            if other != EMA:
                raise ArgumentError("no such weights", where=where, expected=EMA, got=other)
            check_weights(other, layout)
            continue
        if not is_sharded(other):
            fix = "fully_shard(teacher, optax.identity(), mesh), and its state at each call"
            raise ArgumentError(
                "not a sharded model", where=where, expected=_EXPECTED, got=type(other), fix=fix
            )
        if name in _OF_STEPS:
            raise ArgumentError(
                "a step is called with another argument of this name",
                where=where,
                got=name,
                fix="another name, such as 'teacher': step(state, batch, teacher=teacher_state)",
            )
        _check_mesh(where, other.layout, layout)


def _check_mesh(where: str, other: Layout, own: Layout) -> None:
    """Raises ValueError for a model that is laid out over another mesh than the step's own."""
    if (other.mesh, other.axes.batch) == (own.mesh, own.axes.batch):
        return
    texts = [f"{layout.axes.shape}, batch along {layout.axes.batch}" for layout in (own, other)]
    if other.mesh.devices.tolist() != own.mesh.devices.tolist():
        texts[1] += ", of other devices or in another order"
    raise ArgumentError(
        "another model of the step is laid out over another mesh",
        where=where,
        expected=texts[0],
        got=texts[1],
        fix="teacher.on(mesh), with the mesh of the model that is trained, and a state of that",
    )


def plan_other(name: str, plan: StepPlan, *, averages: bool) -> OtherModel:
    """Makes the plan of another model of a step from the plan of a step of its own; see the notes.

    `averages`: its parameters are the average of the step's own.
    """
    comms = {
        path: replace(
            comm,
            path=f"{name}{SEPARATOR}{path}",
            model=name,
            unit=None if comm.unit == ROOT else comm.unit,
            trained=False,
        )
        for path, comm in plan.comms.items()
    }
    return OtherModel(replace(plan, comms=comms), averages)


def with_others_as_traced(plan: StepPlan, traced: StepPlan) -> StepPlan:
    """Replaces what is known of other models by what another plan of the step has learned."""
    others = {
        name: replace(other, in_backward=traced.others[name].in_backward)
        for name, other in plan.others.items()
    }
    return replace(plan, others=others)


# Calling it


def require_by_name(plan: StepPlan, more: Sequence[Any]) -> None:
    """Raises ValueError for arguments of a step beside a state and a batch that have no name."""
    if not more:
        return
    expected = _call(plan)
    raise ArgumentError(
        "a step takes a state, one batch, and the states of other models by name",
        where="step",
        expected=expected,
        got=f"{len(more)} more, {', '.join(type(each).__name__ for each in more)}",
        fix=f"{expected}; a batch of several arrays is one argument, {{'x': x, 'y': y}}",
    )


def _call(plan: StepPlan) -> str:
    """Formats a call of the step, with the states that it takes."""
    asked = [name for name, other in plan.others.items() if not other.averages]
    return f"step({', '.join(['state', 'batch', *(f'{name}={name}_state' for name in asked)])})"


def check_other_states(
    plan: StepPlan, state: TrainState, states: Mapping[str, Any], *, donates: bool
) -> dict[str, OtherArrays]:
    """Selects the arrays of the other models that a step is called with: {name: arrays}.

    Raises ValueError for a missing or an unknown name, for anything but a TrainState of the model
    whose arrays are held, and for an array of it that the step donates with its own state.
    """
    asked = [name for name, other in plan.others.items() if not other.averages]
    call = _call(plan)
    if {*asked} != {*states}:
        raise ArgumentError(
            "the step takes the states of other models by name",
            where="step",
            expected=asked or "none: it was made without others",
            got=sorted(states),
            fix=call,
        )
    if not asked:
        return {}
    found = {}
    for name in asked:
        layout = plan.others[name].plan.layout
        if not isinstance(states[name], TrainState):
            check_state(states[name], layout, where=name, fix=call)
        # Its other arrays are not used here, and may have been donated, as of `Sharded.averaged`.
        check_base(states[name].base, layout.base, name)
        arrays = found[name] = arrays_of(states[name])
        require_held(arrays._asdict(), name)
        shared = shared_with(state, states[name], arrays._asdict()) if donates else []
        if shared:
            raise ArgumentError(
                "the step donates an array that the state of another model has too",
                where=name,
                got=f"{shared[0]} and {len(shared) - 1} more",
                fix=(
                    "a copy, jax.tree.map(jnp.copy, state); or, for the average of the model "
                    f"itself, others={{'{name}': 'ema'}}"
                ),
            )
        _check_signature(name, layout, arrays)
    return found


def _check_signature(name: str, layout: Layout, arrays: OtherArrays) -> None:
    """Raises ValueError for arrays of other names, shapes or dtypes, or that are on the host."""
    for path, x in flatten(arrays._asdict()).items():
        if not isinstance(x, jax.Array):
            raise ArgumentError(
                "the state of another model is not on devices",
                where=f"{name}/{path}",
                got=type(x).__name__,
                fix=f"jax.device_put(state, {name}.state_shardings())",
            )
    leaves = arrays_like(layout, lambda leaf: leaf)
    structure: Any = jax.tree.structure(leaves)
    wanted = [(leaf.stored_shape, leaf.dtype) for leaf in jax.tree.leaves(leaves)]
    described = [(x.shape, x.dtype) for x in jax.tree.leaves(arrays)]
    if structure == jax.tree.structure(arrays) and described == wanted:
        return
    expected = arrays_like(layout, lambda leaf: leaf.stored)
    texts, wanted_texts = array_texts(arrays._asdict()), array_texts(expected._asdict())
    different = [
        path
        for path in sorted({*texts, *wanted_texts})
        if texts.get(path) != wanted_texts.get(path)
    ]
    path = next(iter(different), "params")
    raise ArgumentError(
        "a state of another model than the step was made with",
        where=f"{name}/{path}",
        expected=wanted_texts.get(path, "nothing"),
        got=texts.get(path, "nothing"),
        fix=f"a state of the Sharded that others={{'{name}': ...}} has",
    )


# In the traced step


class OtherInputs(NamedTuple):
    """What a loss is traced with of another model."""

    params: dict[str, jax.Array]  # path -> what it computes with: the parameter, or its copy
    stored: dict[str, jax.Array]  # path -> the parameter; empty with local batches
    model_state: PyTree


def other_inputs(
    plan: StepPlan, stored: TrainState, passed: Mapping[str, OtherArrays]
) -> dict[str, OtherInputs]:
    """Prepares the arrays of all other models: {name: what the loss is traced with}.

    `stored`: the step's own state as it is stored; `passed`: the arrays of the other states.
    """
    inputs = {}
    for name, other in plan.others.items():
        if other.averages:
            arrays = arrays_of(with_weights(plan.layout, stored, EMA))
        else:
            arrays = passed[name]
        inputs[name] = _inputs_of(other.plan, arrays)
    return inputs


def _inputs_of(plan: StepPlan, stored: OtherArrays) -> OtherInputs:
    """Removes the padding of another model's arrays; explicit collectives take the stored shards.

    Arrays in host memory or in blocks stay as they are stored.
    """
    arrays = jax.tree.map(own_array, arrays_like(plan.layout, lambda leaf: leaf), stored)
    if plan.local_batch:
        params = flatten(stored.params) | flatten(stored.copies)
        return OtherInputs(params, {}, arrays.model_state)
    params = flatten(arrays.params)
    return OtherInputs(params | flatten(arrays.copies), params, arrays.model_state)


def specs_of_inputs(plan: StepPlan) -> dict[str, OtherInputs]:
    """Lists the specs in which a `shard_map` takes the inputs of `other_inputs`."""
    specs = {}
    for name, other in plan.others.items():
        shards: Any = {path: comm.shard_spec for path, comm in other.plan.comms.items()}
        specs[name] = OtherInputs(shards, {}, PartitionSpec())
    return specs


def call_with_others(
    plan: StepPlan,
    fn: Callable[..., Any],
    params: Mapping[str, Any],
    states: Mapping[str, PyTree],
    key: jax.Array,
    device: Any,
) -> Any:
    """Calls `fn` with the other models of a step as keyword arguments, in inference mode.

    Args:
        plan: of the step.
        fn: a function that runs the models.
        params: {path in traces: parameter}, of all models.
        states: {name: the model's other state}; changes of it are dropped.
        key: of this microbatch.
        device: its index if each runs on its own rows, otherwise None.
    """

    def enter(names: tuple[str, ...], models: dict[str, Any]) -> Any:
        """Builds the model of the first name around the runs of the others."""
        if not names:
            return fn(**models)
        name, *rest = names
        other = plan.others[name].plan
        own = {path: params[comm.path] for path, comm in other.comms.items()}
        call = ModelCall(
            params=nest_like(other.layout.params, own),
            rest=states[name],
            batch=None,
            key=key,
            boundaries=other.boundaries,
            comms=other.comms,
            training=False,
            device=device,
        )
        out, _ = other.model.run(lambda model, _: enter(tuple(rest), {**models, name: model}), call)
        return out

    return enter(tuple(plan.others), {})
