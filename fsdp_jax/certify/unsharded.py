"""A training step on one device in plain JAX, with which `certify` compares sharded steps.

Nothing here comes from the library's core, except the check of a loss's result: the model is called
as its own library calls it, `jax.value_and_grad` differentiates the summed loss, microbatches are
added up one after another, and optax updates whole arrays.
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import core, nnx
from jax.sharding import AxisType, Mesh

from fsdp_jax.io.array_specs import is_prng_key
from fsdp_jax.sharding.mesh import MeshAxes
from fsdp_jax.step.loss import as_loss, takes_key
from fsdp_jax.tree import PyTree, flatten, nest_like, unflatten
from fsdp_jax.units.model import bind_axis_names

Arrays = dict[str, jax.Array]
Apply = Callable[[Arrays, Arrays, PyTree, jax.Array], tuple[Any, Arrays]]
"""(parameters, other state, batch, key) -> (result of the loss, other state afterwards)."""


@dataclass(frozen=True)
class UnshardedStep:
    """The results of one device for a batch; all but the model state in float64."""

    total: float  # the summed loss
    count: float  # the divisor of the loss
    gradients: dict[str, np.ndarray]  # path -> gradient of the mean
    model_state: Arrays  # path -> the model's other state afterwards
    metrics: dict[str, np.ndarray]  # name -> metric of the user's own

    @property
    def loss(self) -> float:
        """The mean loss; NaN where nothing is counted."""
        if not self.count:
            return float("nan")
        return self.total / self.count

    @property
    def grad_norm(self) -> float:
        """The norm over all parameters."""
        squares = (np.square(np.abs(gradient)).sum() for gradient in self.gradients.values())
        return float(np.sqrt(sum(squares)))


@dataclass(eq=False)
class OtherOnOneDevice:
    """Another model of the loss, in inference mode."""

    model: Any  # as `fully_shard` takes it
    compute: Mapping[str, np.dtype]  # path -> dtype that a parameter is rounded to
    axis_names: Collection[str]  # names of axes that its norms average over
    arrays: tuple[Arrays, Arrays] | None  # parameters and other state; None: the model's average

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module):
            self._build = lambda params, rest: self.model.bind(
                {"params": unflatten(params), **unflatten(rest)}
            )
        else:
            self._build, _ = _make_builder_nnx(self.model, jax.random.key(0))

    def build(self, params: Arrays, rest: Arrays) -> Any:
        """Builds the model of these arrays, as its own library calls it."""
        to_compute = {path: rounded(x, self.compute[path]) for path, x in params.items()}
        model = self._build(to_compute, rest)
        if isinstance(model, nnx.Module):
            model.eval()
        return model


@dataclass(eq=False)
class UnshardedRun:
    """The model, its loss and its optimizer on one device."""

    model: Any  # as `fully_shard` takes it
    loss_fn: Callable[..., Any]
    tx: optax.GradientTransformationExtraArgs
    trained: PyTree  # of the parameters that are differentiated, nested as in the model
    compute: Mapping[str, np.dtype]  # path -> dtype that it is rounded to, to compute in float32
    streams: Collection[str]  # random streams of a Linen model beside "params" and "dropout"
    axis_names: Collection[str]  # names of axes that its norms average over
    key: jax.Array  # with which the model is made
    inputs: tuple[Any, ...] | Mapping[str, Any] | None  # examples for a Linen model's `init`
    others: Mapping[str, OtherOnOneDevice]  # name -> another model of the loss
    initial: Arrays = field(init=False, repr=False)  # path -> array of the model as it is made

    def __post_init__(self) -> None:
        with_key, checked = takes_key(self.loss_fn, [*self.others]), as_loss(self.loss_fn)

        def loss(model: Any, inputs: PyTree, key: jax.Array) -> Any:
            batch, arrays = inputs
            others = {name: self.others[name].build(*each) for name, each in arrays.items()}
            if not with_key:
                return checked(model, batch, **others)
            return checked(model, batch, jax.random.fold_in(key, 2), **others)

        if isinstance(self.model, nn.Module):
            self._apply = _make_apply_linen(self.model, loss, self.streams)
            self.initial = _init_linen(self.model, self.inputs, self.streams, self.key)
        else:
            self._apply, self.initial = _make_apply_nnx(self.model, loss, self.key)
        self._differentiate = jax.jit(self._gradients)
        self.update = jax.jit(self._update)

    def arrays_of_others(
        self, params: Arrays, model_state: Arrays, average: Arrays
    ) -> dict[str, tuple[Arrays, Arrays]]:
        """Lists {name: (parameters, other state)} of the other models of the loss in a step.

        `average`: of the trained parameters; empty if the optimizer keeps none.
        """
        averaged = {path: average.get(path, x).astype(x.dtype) for path, x in params.items()}
        return {
            name: (averaged, model_state) if other.arrays is None else other.arrays
            for name, other in self.others.items()
        }

    def _gradients(
        self,
        params: Arrays,
        model_state: Arrays,
        batch: PyTree,
        key: jax.Array,
        others: Mapping[str, tuple[Arrays, Arrays]],
    ) -> Any:
        """Computes (gradients, sum, count, other state afterwards, metrics) of a microbatch."""
        trained = flatten(self._trained_tree(params))

        def loss(trained: Arrays) -> Any:
            """Computes (sum, (count, other state afterwards, metrics)) on rounded parameters."""
            every = {**params, **trained}
            to_compute = {path: rounded(x, self.compute[path]) for path, x in every.items()}
            names = {*self.axis_names}.union(*(each.axis_names for each in self.others.values()))
            (total, count, metrics), after = bind_axis_names(
                names, lambda: self._apply(to_compute, model_state, (batch, others), key)
            )
            # A metric is a sum alone, or a sum with the count that it is divided by.
            sums = {name: pair[: 1 if pair[1] is None else 2] for name, pair in metrics.items()}
            return total, (count, after, sums)

        (total, aux), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
        return gradients, total, *aux

    def evaluate(
        self,
        params: Arrays,
        model_state: Arrays,
        batch: PyTree,
        rng: jax.Array,
        step: int,
        accumulation: int,
        average: Arrays,
    ) -> UnshardedStep:
        """Computes the loss, gradients and metrics of a batch [rows, ...]: means over microbatches.

        Sums over the microbatches are divided by the sum of their counts. `average`: of the
        parameters; empty if the optimizer keeps none.
        """
        each = []
        others = self.arrays_of_others(params, model_state, average)
        for index in range(accumulation):
            microbatch = jax.tree.map(
                lambda leaf, index=index: np.split(leaf, accumulation)[index], batch
            )
            # The keys that the sharded step derives too.
            key = jax.random.fold_in(jax.random.fold_in(rng, step), index)
            gradients, total, count, model_state, metrics = self._differentiate(
                params, model_state, microbatch, key, others
            )
            each.append(jax.tree.map(as_float64, (gradients, total, count, metrics)))
        # Sums over the microbatches, in float64: they add no rounding of the control's own.
        gradients, total, count, metrics = jax.tree.map(lambda *parts: sum(parts), *each)
        with np.errstate(invalid="ignore", divide="ignore"):  # a count may be zero
            reported = {name: pair[0] / (*pair, 1.0)[1] for name, pair in metrics.items()}
            means = {path: gradient / count for path, gradient in gradients.items()}
        return UnshardedStep(float(total), float(count), means, model_state, reported)

    def init_optimizer(self, params: Arrays) -> PyTree:
        """Makes the optimizer's initial state."""
        return self.tx.init(self._trained_tree(params))

    def _update(
        self, params: Arrays, opt_state: PyTree, gradients: Arrays, loss: jax.Array
    ) -> tuple[Arrays, PyTree]:
        """Computes (parameters, optimizer state) after a step with these gradients of the mean."""
        # The gradients come from float64 arrays; optimizers expect the parameter's dtype.
        cast = self._trained_tree({p: x.astype(params[p].dtype) for p, x in gradients.items()})
        trained = self._trained_tree(params)
        updates, opt_state = self.tx.update(cast, opt_state, trained, value=loss, grad=cast)
        return {**params, **flatten(optax.apply_updates(trained, updates))}, opt_state

    def _trained_tree(self, params: Arrays) -> PyTree:
        """Takes the parameters that are differentiated, as a nested tree."""
        return nest_like(self.trained, params)

    def randomness(
        self, params: Arrays, model_state: Arrays, batch: PyTree, rng: jax.Array
    ) -> tuple[bool, bool]:
        """Tells whether the loss depends on random streams, and whether it draws any numbers.

        With dropout both are true; with random numbers from a constant key, the second alone.
        """
        # The same step twice, from the model's keys and from others.
        keys = {path: value for path, value in model_state.items() if is_prng_key(value)}
        other = model_state | {path: _another_key(value) for path, value in keys.items()}
        one = self.evaluate(params, model_state, batch, rng, 0, 1, {})
        two = self.evaluate(params, other, batch, _another_key(rng), 0, 1, {})
        others = self.arrays_of_others(params, model_state, {})
        program = jax.make_jaxpr(self._gradients)(params, model_state, batch, rng, others)
        return one.total != two.total, "random_bits" in str(program)


def rounded(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rounds a parameter of floats to its compute dtype, and widens it to float32."""
    if not jnp.issubdtype(value.dtype, jnp.floating) or dtype == value.dtype:
        return value
    return value.astype(dtype).astype(jnp.float32)


@contextmanager
def mesh_of_one(axes: MeshAxes) -> Iterator[None]:
    """Sets a mesh of one device, for a model that names Explicit axes.

    It takes the place of a mesh that the user has set, which has other devices.
    """
    if not axes.explicit_axes and jax.sharding.get_abstract_mesh().empty:
        yield
        return
    names = tuple(axes.shape)
    types = [AxisType.Explicit if name in axes.explicit_axes else AxisType.Auto for name in names]
    mesh = Mesh(
        axes.mesh.devices.flatten()[:1].reshape((1,) * len(names)), names, axis_types=tuple(types)
    )
    with jax.set_mesh(mesh), jax.remove_size_one_mesh_axis_from_type(True):
        yield


def as_float64(value: Any) -> np.ndarray:
    """Copies a value to the host in float64; it is a copy because steps donate their arrays."""
    return np.array(value).astype(np.float64)


def _another_key(keys: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(jax.random.key_data(keys) ^ 1, impl=jax.random.key_impl(keys))


def arrays_of_model(model: Any) -> tuple[Arrays, Arrays]:
    """Lists the arrays of a model that its library has built: (parameters, other state) by path."""
    if isinstance(model, nnx.Module):
        _, *states = nnx.split(model, nnx.Param, ...)
        params, rest = (
            {path: _value_of(leaf) for path, leaf in _leaves(state).items()} for state in states
        )
        return params, rest
    collections = dict(nn.unbox(core.unfreeze(model.variables)))
    return flatten(collections.pop("params")), flatten(collections)


def _make_builder_nnx(
    make_model: Callable[[nnx.Rngs], nnx.Module], key: jax.Array
) -> tuple[Callable[[Arrays, Arrays], Any], Arrays]:
    """Makes the model, and a function that builds a copy of it from arrays by path.

    Returns (that function, the arrays that the model was made with).
    """
    # Arrays that the model's code annotates stay whole on this device.
    with nnx.use_eager_sharding(False):
        # Not under eval_shape: Flax takes an array attribute for state only where it is no tracer.
        model = make_model(nnx.Rngs(key))
        nnx.pop(model, nnx.Intermediate)
        graphdef, *states = nnx.split(model, nnx.Param, ...)

    # States are nested, and box arrays in variables; the control knows arrays by path.
    def filled(state: nnx.State, arrays: Arrays) -> nnx.State:
        values = [arrays[path] for path in _leaves(state)]
        return jax.tree.unflatten(jax.tree.structure(state), values)

    def build(params: Arrays, model_state: Arrays) -> Any:
        both = filled(states[0], params), filled(states[1], model_state)
        return nnx.merge(graphdef, *both, copy=True)

    made = _leaves(states[0]) | _leaves(states[1])
    return build, {path: _value_of(leaf) for path, leaf in made.items()}


def _leaves(state: nnx.State) -> dict[str, Any]:
    return {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def _value_of(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _make_apply_nnx(
    make_model: Callable[[nnx.Rngs], nnx.Module], loss_fn: Callable[..., Any], key: jax.Array
) -> tuple[Apply, Arrays]:
    """Makes the model, and a function that calls the loss on a copy of it.

    Returns (that function, which takes arrays by path; the arrays that the model was made with).
    """
    build, made = _make_builder_nnx(make_model, key)

    def apply(
        params: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array
    ) -> tuple[Any, Arrays]:
        """Computes (the loss's result, the model's other state afterwards)."""
        model = build(params, model_state)
        out = loss_fn(model, batch, key)
        after = _leaves(nnx.state(model, nnx.Not(nnx.Param)))
        return out, {path: _value_of(after[path]) for path in model_state}

    return apply, made


def _make_apply_linen(
    module: nn.Module, loss_fn: Callable[..., Any], streams: Collection[str]
) -> Apply:
    """Makes a function that calls the loss on the module; each of `streams` gets its own key."""

    def apply(
        params: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array
    ) -> tuple[Any, Arrays]:
        """Computes (the loss's result, the model's other state afterwards)."""
        collections = unflatten(model_state)
        # Collections are mutable, so that values can be sown in new ones; a cache is so only where
        # it is state: else a decoder would make one.
        mutable = core.DenyList(tuple({"params", "cache"} - collections.keys()))
        run = nn.apply(lambda model: loss_fn(model, batch, key), module, mutable=mutable)
        rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        rngs |= {name: jax.random.fold_in(key, zlib.crc32(name.encode())) for name in streams}
        out, after = run({"params": unflatten(params), **collections}, rngs=rngs)
        changed = flatten(after)
        return out, {path: changed.get(path, old) for path, old in model_state.items()}

    return apply


def _init_linen(
    module: nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any] | None,
    streams: Collection[str],
    key: jax.Array,
) -> Arrays:
    """Calls the module's own `init` on the example inputs; returns {path: array}.

    Where shapes alone are given, the inputs are zeros.
    """

    def as_array(x: Any) -> Any:
        return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x

    given = jax.tree.map(as_array, inputs)
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(given, Mapping):
        kwargs = given
    else:
        args = given or ()
    # The streams that the library makes the model with too.
    params_key, dropout_key = jax.random.split(key)
    rngs = {"params": params_key, "dropout": dropout_key}
    rngs |= {name: jax.random.fold_in(key, zlib.crc32(name.encode())) for name in streams}
    made = jax.jit(lambda rngs: module.init(rngs, *args, **kwargs))(rngs)
    collections = core.unfreeze(nn.unbox(made))
    params = flatten(collections.pop("params"))
    return params | flatten(collections)
