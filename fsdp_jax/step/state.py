"""The state that a step carries from one call to the next, abstract and created sharded."""

import functools
import itertools
import weakref
import zlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fsdp_jax.errors import ArgumentError, did_you_mean, first_lines
from fsdp_jax.host_memory import to_device
from fsdp_jax.processes import gather_from_processes
from fsdp_jax.sharding.explicit_style import in_model_view
from fsdp_jax.sharding.layout import COPIES, MODEL_STATE, Layout, Leaf
from fsdp_jax.sharding.padding import Padded, stored_array, unpad
from fsdp_jax.sharding.precision import LossScale
from fsdp_jax.step import loss_scaling, loss_spikes
from fsdp_jax.step.loss_spikes import LossSpikes
from fsdp_jax.step.same_program import run_same_program
from fsdp_jax.tree import SEPARATOR, PyTree, array_text, array_texts, flatten, map_with_path
from fsdp_jax.units.model import Model

COUNTERS = ("step", "skipped", "skipped_in_a_row")
LOSS_SCALE = "loss_scale"  # the field of `TrainState`, and the metric
RECENT_LOSSES = "recent_losses"
OPTIONAL = (LOSS_SCALE, RECENT_LOSSES)  # fields that are empty unless they are asked for
_SHOWN = 5  # donated arrays that an error names before it counts the rest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a training run; a pytree.

    Attributes:
        step: int32, optimizer steps taken or skipped.
        params: nested dicts in the model's own paths.
        copies: copies in the compute dtype, of parameters that the step computes with in another
            form than they are stored in: replicated ones of sharded parameters (`zero1` in mixed
            precision), sharded ones of parameters in host memory; empty elsewhere. A parameter
            beyond the range of that dtype is infinite in it, as where it is cast in each gather;
            the next step is then skipped.
        opt_state: of the optax transformation, for the trained parameters.
        model_state: the model's other state: batch statistics, random streams.
        rng: the key from which the keys of all steps are derived.
        skipped: int32, steps that were skipped: their loss, gradients or the state that they would
            have made were not finite, or the loss was a spike and these are skipped.
        skipped_in_a_row: int32, how many of the last steps were skipped without a good one between;
            with loss scaling, of those at its smallest scale.
        loss_scale: `scale`, float32, and `good_steps`, int32, where the loss is scaled; else empty.
        recent_losses: `losses`, float32 [window], and `count`, int32, where spikes of the loss are
            detected; else empty.
        base: the format of quantized parameters, of which only bytes are here, `nf4:64:float32`;
            no leaf, but part of the tree's structure. Empty where none is quantized.

    """

    step: Any
    params: PyTree
    copies: PyTree
    opt_state: PyTree
    model_state: PyTree
    rng: Any
    skipped: Any
    skipped_in_a_row: Any
    loss_scale: PyTree = field(default_factory=dict)
    recent_losses: PyTree = field(default_factory=dict)
    base: str = field(default="", metadata={"static": True})
    _number: ClassVar[int]  # of each object: states are numbered as they are made
    _of_program: ClassVar[list[int]] = []  # likewise: the arrays that a program made for it

    def __post_init__(self) -> None:
        _STATES[id(self)] = self
        object.__setattr__(self, "_number", next(_NUMBERS))

    def _note_program(self) -> None:
        object.__setattr__(self, "_of_program", _identities(self))

    def __repr__(self) -> str:
        """Counts what the larger fields hold: the numbers of a state would fill the screen."""
        shown = []
        for name in ("params", "copies", "opt_state", MODEL_STATE):
            leaves = jax.tree.leaves(getattr(self, name))
            size = sum(getattr(leaf, "size", 0) for leaf in leaves)
            if leaves:
                shown.append(f"{name}: {size:,} numbers in {len(leaves)} arrays")
        return f"TrainState({'; '.join(shown)})"


# States that are not freed: a step of theirs would donate the arrays that they hold.
_STATES: weakref.WeakValueDictionary[int, TrainState] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


# Memory that two places share must not be donated: XLA ends the process.


def mark_as_of_program(state: TrainState) -> TrainState:
    """Notes that a program has just made all arrays of a state, in memory of their own."""
    state._note_program()
    return state


def _identities(state: TrainState) -> list[int]:
    return [id(leaf) for leaf in jax.tree.leaves(state)]


def _is_of_program(state: TrainState) -> bool:
    """Tells whether `mark_as_of_program` noted the state, and no array was replaced since."""
    return bool(state._of_program) and state._of_program == _identities(state)


def shared_with(own: TrainState, other: TrainState, part: PyTree) -> list[str]:
    """Lists the paths in `part`, arrays of `other`, of those that `own` has in memory too."""
    # What a program makes shares no memory with older arrays, and is not read to find out.
    younger = own if own._number > other._number else other
    tell = _itself if _is_of_program(younger) else _memory_of
    taken = {each for leaf in jax.tree.leaves(own) for each in tell(leaf)}
    return [path for path, leaf in flatten(part).items() if not taken.isdisjoint(tell(leaf))]


def require_not_in_batch(state: TrainState, batch: PyTree) -> None:
    """Raises ValueError for an array of a state to be donated that a batch has in memory too."""
    rows = flatten(batch)
    kinds = {(x.shape, x.dtype) for x in rows.values()}
    alike = [x for x in jax.tree.leaves(state) if (x.shape, x.dtype) in kinds]
    taken = {each for leaf in alike for each in _memory_of(leaf)}
    for path, x in rows.items() if alike else ():
        if not taken.isdisjoint(_memory_of(x)):
            raise ArgumentError(
                "the step donates an array of the state that the batch has too",
                where=SEPARATOR.join(filter(None, ("batch", path))),
                got=array_text(x),
                fix="a copy, jnp.copy(array)",
            )


def _itself(leaf: Any) -> list[Hashable]:
    """Lists what an array has in common with itself alone."""
    return [id(leaf)]


def _memory_of(leaf: Any) -> list[Hashable]:
    """Lists what an array has in common with those that share memory with it, or with a part.

    `jax.device_put` makes such arrays where it need not copy: on a mesh with other axis names.
    """
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    if not is_array or not leaf.size or leaf.is_deleted():
        return _itself(leaf)
    shards = [(each.device.id, each.data) for each in leaf.addressable_shards]
    try:
        return [id(leaf), *((device, data.unsafe_buffer_pointer()) for device, data in shards)]
    except jax.errors.JaxRuntimeError:  # a platform that tells no addresses
        return _itself(leaf)


def check_state(
    state: Any,
    layout: Layout,
    *,
    donates: bool = False,
    where: str = "state",
    fix: str = "step(state, batch), with state = sharded.init() to begin",
) -> None:
    """Raises ValueError for anything but a TrainState on devices that holds all of its arrays.

    `layout`: of the model that reads it, whose quantized parameters have the state's format;
    `donates`: it will be donated, so that no array of it may be at two places; `where`: the name of
    the argument; `fix`: the call that takes a TrainState there.
    """
    require_train_state(state, layout, where=where, fix=fix)
    if not isinstance(state.step, jax.Array):
        raise ArgumentError(
            "the state is not on devices",
            where=f"{where}/step",
            got=type(state.step).__name__,
            fix="jax.device_put(state, sharded.state_shardings())",
        )
    require_held(state, where)
    if donates:
        _require_distinct(state)


def require_train_state(state: Any, layout: Layout, *, where: str, fix: str) -> None:
    """Raises ValueError for anything but a TrainState, or one of another format of parameters."""
    if not isinstance(state, TrainState):
        raise ArgumentError("not a TrainState", where=where, got=type(state).__name__, fix=fix)
    check_base(state.base, layout.base, where)


def check_base(found: str, expected: str, where: str) -> None:
    """Raises ValueError for quantized parameters in another format than the layout's."""
    if found == expected:
        return
    raise ArgumentError(
        "the parameters are stored in another format than the model's",
        where=where,
        expected=expected or "none that is quantized",
        got=found or "none that is quantized",
        fix=(
            "a state of this Sharded; from another format, init(params=) takes the model's arrays, "
            "nnx.state(other.model(state), nnx.Param)"
        ),
    )


def require_like(expected: TrainState, state: TrainState, cause: Exception | None = None) -> None:
    """Raises ValueError, from `cause`, for a state whose arrays or structure are not `expected`."""
    fix = "pass a state of the same model and optimizer, on the same mesh: padding depends on it; "
    fix += "a checkpoint moves it to another"
    refuse_difference("state", array_texts(expected), array_texts(state), fix, cause)
    # Optimizers may differ in what has no arrays.
    for name in (each.name for each in fields(TrainState)):
        wanted, got = (
            {
                name: str(
                    jax.tree.structure(
                        getattr(each, name), is_leaf=lambda x: isinstance(x, Mapping)
                    )
                )
            }
            for each in (expected, state)
        )
        refuse_difference("state", wanted, got, fix, cause)


def refuse_difference(
    what: str,
    expected: Mapping[str, str],
    got: Mapping[str, str],
    fix: str,
    cause: Exception | None = None,
) -> None:
    """Raises ValueError, from `cause`, for the first path of `what` whose texts differ."""
    for path in sorted({*expected, *got}):
        if expected.get(path) != got.get(path):
            raise ArgumentError(
                f"the {what} has another signature",
                where=path,
                expected=expected.get(path, "nothing"),
                got=got.get(path, "nothing"),
                fix=fix,
            ) from cause


def require_held(state: PyTree, where: str = "state") -> None:
    """Raises ValueError naming the arrays of a state, or of a part of it, that were donated.

    On several devices XLA ends the process where it is passed one. Traced arrays pass.
    """
    if not any(map(_is_donated, jax.tree.leaves(state))):
        return
    flat = flatten(state)
    donated = [path for path, leaf in flat.items() if _is_donated(leaf)]
    what = "this state was donated to an earlier step"
    if len(donated) < len(flat):
        what = f"{len(donated)} of {len(flat)} arrays of this state were donated to an earlier step"
        what += ", of a state that held them too"
    raise ArgumentError(
        what,
        where=where,
        got=first_lines(donated, _SHOWN),
        fix=(
            "use the state that the step returned, state, metrics = step(state, batch); copy what "
            "you keep before the step, best = jax.tree.map(jnp.copy, state.params)"
        ),
    )


def _require_distinct(state: TrainState) -> None:
    """Raises ValueError for one array at two places of a state, which cannot be donated twice."""
    if _is_of_program(state):
        return
    places: dict[Hashable, list[str]] = {}
    for path, leaf in flatten(state).items():
        for each in _memory_of(leaf):
            places.setdefault(each, []).append(path)
    same = next((paths for paths in places.values() if len(paths) > 1), None)
    if same is None:
        return
    raise ArgumentError(
        "one array is at two places of the state, and a step donates each of them",
        where=same[0],
        got=f"the array of {', '.join(same[1:])}",
        fix="put a copy there, jnp.copy(array)",
    )


def _is_donated(leaf: Any) -> bool:
    """Tells whether an array, or the one that a `Padded` stores, was donated."""
    array = stored_array(leaf)
    if isinstance(array, jax.core.Tracer):
        return False
    return isinstance(array, jax.Array) and array.is_deleted()


def start_optional(scaling: LossScale | None, spikes: LossSpikes | None) -> dict[str, PyTree]:
    """Makes {field: value} of a new state for the loss scale and the recent losses."""
    return {
        LOSS_SCALE: loss_scaling.start_scale(scaling),
        RECENT_LOSSES: loss_spikes.start_losses(spikes),
    }


def _start_small_fields(
    key: jax.Array, scaling: LossScale | None, spikes: LossSpikes | None
) -> dict[str, PyTree]:
    """Makes {field of TrainState: value} for fields of neither model nor optimizer."""
    counters = {name: jnp.zeros((), jnp.int32) for name in COUNTERS}
    return {"rng": key, **counters, **start_optional(scaling, spikes)}


def abstract_rest(
    model: Model, copies: PyTree, scaling: LossScale | None, spikes: LossSpikes | None
) -> PyTree:
    """Lists {field: shapes} of all fields that are neither parameters nor optimizer state."""
    small = jax.eval_shape(lambda: _start_small_fields(jax.random.key(0), scaling, spikes))
    return {**small, "model_state": model.rest, COPIES: copies}


def state_like(layout: Layout, leaf_to: Callable[[Leaf], Any]) -> TrainState:
    """Builds a TrainState with `leaf_to(Leaf)` in place of every array."""
    parts = layout.params, layout.optimizer, layout.other
    params, opt_state, other = jax.tree.map(leaf_to, parts)
    return TrainState(params=params, opt_state=opt_state, base=layout.base, **other)


def as_seed(seed: Any) -> Any:
    """Converts a random key to its uint32 data, for `init_state`; an integer seed stays.

    The data is on the host, unless the key is traced. Raises ValueError for anything else.
    """
    like = jax.eval_shape(lambda: jax.random.key(0))
    raw = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    is_array = isinstance(seed, jax.Array | np.ndarray | np.generic)
    is_int = isinstance(seed, int) and not isinstance(seed, bool)
    if is_int and not -(2**63) <= seed < 2**63:
        raise ArgumentError(
            "a seed of more than 64 bits",
            where="seed",
            expected="-2^63 to 2^63 - 1",
            got=seed,
            fix="seed % 2**63",
        )
    if is_int or (is_array and not seed.shape and jnp.issubdtype(seed.dtype, jnp.integer)):
        return seed
    if is_array and (seed.shape, seed.dtype) in ((like.shape, like.dtype), (raw.shape, raw.dtype)):
        data = jax.random.key_data(seed) if seed.dtype == like.dtype else jnp.asarray(seed)
        return data if isinstance(data, jax.core.Tracer) else np.asarray(data)
    raise ArgumentError(
        "neither a seed nor a random key",
        where="seed",
        expected=f"an int, or one key, as {like.dtype} or {array_text(raw)}",
        got=array_text(seed) if is_array else repr(seed).partition("\n")[0],
        fix="init(0), or init(jax.random.key(0))",
    )


def check_given_params(params: PyTree, layout: Layout) -> dict[str, jax.Array]:
    """Checks the parameters that the caller has filled: {path: array}, sharded as they must be.

    Raises ValueError for an unknown path, or an array of another shape or dtype than the layout's;
    a padded array is a `Padded`.
    """
    require_held(params, "params")
    given, expected = flatten(params), layout.by_path
    fix = "sharded.checkpoint_target().params has all of them"
    # An array that another state or parameter holds too would be donated twice.
    held = jax.tree.leaves([*_STATES.values()]) if given else []
    taken = {each for leaf in held for each in _memory_of(leaf)}
    for path, array in given.items():
        if path not in expected:
            raise ArgumentError(
                "no such parameter", where="params", got=path, fix=did_you_mean(path, expected)
            )
        leaf = expected[path]
        if not isinstance(array, jax.Array | np.ndarray | Padded):
            raise ArgumentError("not an array", where=path, got=type(array), fix=fix)
        if leaf.blocks:
            _check_for_blocks(path, array, leaf)
        elif (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            what = "a parameter does not fit"
            wanted, got = map(array_text, (leaf, array))
            if array.shape == leaf.shape:
                fix = f"array.astype('{leaf.dtype}')"
            elif array.ndim == len(leaf.shape) and not isinstance(array, Padded):
                fix = "sharded.to_checkpoint(state).params: those of a state may be padded"
            raise ArgumentError(what, where=path, expected=wanted, got=got, fix=fix)
        stored = put(array, leaf)
        is_taken = not taken.isdisjoint(_memory_of(stored))
        given[path] = _copied(stored) if is_taken else stored
        taken.update(_memory_of(given[path]))
    return given


def _check_for_blocks(path: str, array: Any, leaf: Leaf) -> None:
    """Raises ValueError for what is neither the model's array nor stored in the leaf's format."""
    blocks = leaf.blocks
    assert blocks is not None
    if isinstance(array, Padded) and array.stored_as:
        if array.stored_as == blocks.name:
            return
        got, fix = array.stored_as, "a checkpoint of the same QuantizedBase, or the model's array"
    elif (array.shape, array.dtype) == (leaf.model_shape, blocks.dtype):
        return
    else:
        got, fix = array_text(array), f"array.astype('{blocks.dtype}')"
        if array.dtype == np.uint8:
            fix = "sharded.to_checkpoint(state).params, which names the format of the bytes"
    expected = f"{blocks.dtype}{list(blocks.shape)}, or {blocks.name}"
    what = "a parameter does not fit one that is stored in 4 or 8 bits"
    raise ArgumentError(what, where=path, expected=expected, got=got, fix=fix)


def _copied(array: jax.Array) -> jax.Array:
    """Copies an array shard by shard, without a program: another process may hold it alone."""
    shards = [shard.data.copy() for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def put(array: jax.Array | np.ndarray | Padded, leaf: Leaf) -> jax.Array:
    """Stores an array of the leaf's shape as the leaf is; itself if it is sharded so.

    An array of the model is quantized where the leaf is stored in blocks.
    """
    stored = leaf.stored
    held = stored_array(array)
    if leaf.blocks and held.dtype != leaf.dtype:
        whole = jax.device_put(unpad(jnp.asarray(held), leaf.model_shape), leaf.model_sharding)
        return jax.jit(leaf.store, out_shardings=leaf.sharding)(whole)
    is_stored = isinstance(held, jax.Array) and held.shape == stored.shape
    if is_stored and held.sharding.is_equivalent_to(leaf.sharding, held.ndim):
        return held
    if not leaf.is_padded and not isinstance(array, Padded):
        # jax may share the memory of the caller, and the first step donates it.
        return jax.device_put(array.copy(), leaf.sharding)
    if isinstance(array, np.ndarray):
        behind = [(0, big - own) for big, own in zip(stored.shape, array.shape, strict=True)]
        return jax.device_put(np.pad(array, behind), leaf.sharding)
    cut = jax.device_put(unpad(held, leaf.shape), leaf.divisible)
    return jax.jit(leaf.pad, out_shardings=leaf.sharding)(cut)


def make_copies(layout: Layout, params: PyTree) -> PyTree:
    """Casts the parameters to the copies that the layout has."""
    flat = flatten(own_params(layout, params))
    return map_with_path(
        lambda path, leaf: leaf.pad(flat[path].astype(leaf.dtype)), layout.other[COPIES]
    )


def own_params(layout: Layout, params: PyTree) -> PyTree:
    """Moves stored parameters to device memory, in their own shapes; within a jit."""

    def own(path: str, value: jax.Array) -> jax.Array:
        leaf = layout.by_path[path]
        return leaf.load(to_device(value) if leaf.on_host else value)

    return map_with_path(own, params)


def unpad_state(layout: Layout, stored: TrainState) -> TrainState:
    """Removes the padding of a state's arrays; see `own_array`, and `sharding.padding`."""
    return jax.tree.map(own_array, state_like(layout, lambda leaf: leaf), stored)


def own_array(leaf: Leaf, stored: jax.Array) -> jax.Array:
    """Removes the padding of an array unless it is in host memory or in blocks; within a jit."""
    return stored if leaf.on_host or leaf.blocks else leaf.unpad(stored)


def pad_state(layout: Layout, own: TrainState) -> TrainState:
    """Pads the state as it is stored; the inverse of `unpad_state`."""

    def stored(leaf: Leaf, array: jax.Array) -> jax.Array:
        return array if leaf.on_host or leaf.blocks else leaf.pad(array)

    return jax.tree.map(stored, state_like(layout, lambda leaf: leaf), own)


def _check_inputs_of_processes(inputs: PyTree, layout: Layout) -> None:
    """Raises ValueError where processes initialize from different example inputs of the model."""
    on_host = [x for x in jax.tree.leaves(inputs) if isinstance(x, np.ndarray)]
    processes = {device.process_index for device in layout.mesh.devices.flat}
    if not on_host or len(processes) == 1 or len(processes) != jax.process_count():
        return
    digest = functools.reduce(lambda value, x: zlib.crc32(x.tobytes(), value), on_host, 0)
    if len({*gather_from_processes(np.array([digest], np.uint32)).flat}) > 1:
        raise ArgumentError(
            "the processes passed different example inputs, which initial values depend on",
            where="inputs",
            fix="the same arrays in all processes, such as rows of a file that all of them read",
        )


def init_state(
    model: Model,
    tx: optax.GradientTransformation,
    layout: Layout,
    seed: Any,
    given: Mapping[str, jax.Array],
    scaling: LossScale | None,
    spikes: LossSpikes | None,
) -> TrainState:
    """Creates a state, every array on the devices that hold it, never unsharded.

    Parameters come first and the optimizer after, so that what the random generator needs is freed
    when the optimizer's arrays are created. `seed`: an integer, or the data of a key, uint32;
    `given`: path -> parameter to use as it is; the others are drawn.
    """
    shardings = state_like(layout, lambda leaf: leaf.sharding)
    # The keys to make the model with, and to run it with.
    is_data = jnp.ndim(seed) > 0
    key = jax.random.wrap_key_data(jnp.asarray(seed)) if is_data else jax.random.key(seed)
    init_key, run_key = jax.random.split(key)

    # Parameters that are not given, and the model's other state; then copies.
    def params_and_model_state(
        key: jax.Array, inputs: PyTree
    ) -> tuple[dict[str, jax.Array], PyTree]:
        params, model_state = in_model_view(layout.axes, model.init)(key, inputs)
        drawn = {path: x for path, x in flatten(params).items() if path not in given}
        leaves = layout.by_path
        drawn = {p: leaves[p].store(x) for p, x in drawn.items()}
        return drawn, jax.tree.map(Leaf.pad, layout.other[MODEL_STATE], model_state)

    drawn_shardings = {p: leaf.sharding for p, leaf in layout.by_path.items() if p not in given}
    init = jax.jit(params_and_model_state, out_shardings=(drawn_shardings, shardings.model_state))
    _check_inputs_of_processes(model.init_inputs, layout)
    name, mesh = "the model's initialization", layout.mesh
    drawn, model_state = run_same_program(name, init, mesh, init_key, model.init_inputs)
    params = map_with_path(lambda path, _: {**drawn, **given}[path], layout.params)
    copy = jax.jit(lambda params: make_copies(layout, params), out_shardings=shardings.copies)
    copies = run_same_program("the copies of parameters", copy, mesh, params)

    # The optimizer's state.
    def optimizer_state(params: PyTree) -> PyTree:
        return jax.tree.map(Leaf.pad, layout.optimizer, tx.init(own_params(layout, params)))

    init_optimizer = jax.jit(optimizer_state, out_shardings=shardings.opt_state)
    name = "the optimizer's initialization"
    opt_state = run_same_program(name, init_optimizer, mesh, layout.trainable(params))

    # The rest. Inside jit each counter has a buffer of its own, as donation needs.
    small_shardings = {name: getattr(shardings, name) for name in ("rng", *OPTIONAL, *COUNTERS)}
    start = jax.jit(
        lambda key: _start_small_fields(key, scaling, spikes), out_shardings=small_shardings
    )
    small = run_same_program("the counters' initialization", start, mesh, run_key)
    state = TrainState(
        params=params,
        copies=copies,
        opt_state=opt_state,
        model_state=model_state,
        base=layout.base,
        **small,
    )
    return mark_as_of_program(state)
