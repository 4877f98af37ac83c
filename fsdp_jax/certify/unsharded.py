"""A training step on one device in plain JAX: what `certify` compares sharded steps with.

Nothing here comes from the library's core, but the check of what a loss returns: the model is
called as its own library calls it, `jax.value_and_grad` differentiates the summed loss,
microbatches are added up one after another, and optax updates whole arrays.
"""

import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import core, nnx

from fsdp_jax.step.loss import as_loss, takes_key
from fsdp_jax.tree import PyTree, flatten, unflatten
from fsdp_jax.units.model import along_one

Arrays = dict[str, jax.Array]
Apply = Callable[[Arrays, Arrays, PyTree, jax.Array], tuple[Any, Arrays]]
"""(parameters, other state, batch, key) -> (result of the loss, other state afterwards)."""


@dataclass(frozen=True)
class Measured:
    """A batch's loss on one device.

    Attributes:
        total: the summed loss, float64.
        count: what it is divided by, float64.
        gradients: path -> gradient of the mean, float64.
        model_state: path -> the model's other state afterwards.
        metrics: name -> metric of the user's own, float64.

    """

    total: float
    count: float
    gradients: dict[str, np.ndarray]
    model_state: Arrays
    metrics: dict[str, np.ndarray]

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.total / self.count

    @property
    def grad_norm(self) -> float:
        """The norm over all parameters."""
        squares = (np.square(np.abs(gradient)).sum() for gradient in self.gradients.values())
        return float(np.sqrt(sum(squares)))


class Unsharded:
    """The model, its loss and its optimizer on one device.

    Args:
        model: as `fully_shard` takes it.
        loss_fn: as `Sharded.make_train_step` takes it.
        tx: the optimizer.
        trained: paths of the parameters that are differentiated.
        compute: path -> dtype that the parameter is rounded to before the model is run, in float32.
        streams: random streams of a Linen model beside "params" and "dropout".
        axis_names: that its norms average over.

    """

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[..., Any],
        tx: optax.GradientTransformation,
        trained: frozenset[str],
        compute: Mapping[str, np.dtype],
        streams: Collection[str],
        axis_names: Collection[str],
    ) -> None:
        self._tx = optax.with_extra_args_support(tx)
        with_key, checked = takes_key(loss_fn), as_loss(loss_fn)

        def loss(model: Any, batch: PyTree, key: jax.Array) -> Any:
            keys = [jax.random.fold_in(key, 2)] if with_key else []
            return checked(model, batch, *keys)

        self._apply: Apply
        if isinstance(model, nn.Module):
            self._apply = _apply_linen(model, loss, streams)
        else:
            self._apply = _apply_nnx(model, loss)
        self._axis_names = axis_names
        self._trained = trained
        self._compute = compute
        self._differentiate = jax.jit(self._gradients)
        self._updated = jax.jit(self._update)

    def _loss(self, params: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array) -> Any:
        rounded = {path: self._rounded(path, value) for path, value in params.items()}
        (total, count, metrics), after = along_one(
            self._axis_names, lambda: self._apply(rounded, model_state, batch, key)
        )
        # A sum alone, or with the count that it is divided by.
        sums = {name: pair[: 1 if pair[1] is None else 2] for name, pair in metrics.items()}
        return total, (count, after, sums)

    def _rounded(self, path: str, value: jax.Array) -> jax.Array:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        if self._compute[path] == value.dtype:
            return value
        return value.astype(self._compute[path]).astype(jnp.float32)

    def _gradients(self, params: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array) -> Any:
        trained = {path: value for path, value in params.items() if path in self._trained}
        frozen = {path: value for path, value in params.items() if path not in self._trained}

        def loss(trained: Arrays) -> Any:
            return self._loss({**frozen, **trained}, model_state, batch, key)

        (total, aux), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
        return gradients, total, *aux

    def measure(
        self,
        params: Arrays,
        model_state: Arrays,
        batch: PyTree,
        rng: jax.Array,
        step: int,
        accumulation: int,
    ) -> Measured:
        """Sums over the microbatches of a batch [rows, ...]; divides by the sum of their counts."""
        gradients: dict[str, np.ndarray] = {}
        metrics: dict[str, list[Any]] = {}
        total = 0.0
        count = 0.0
        for index in range(accumulation):
            microbatch = jax.tree.map(
                lambda leaf, index=index: np.split(leaf, accumulation)[index], batch
            )
            key = jax.random.fold_in(jax.random.fold_in(rng, step), index)
            of_microbatch, loss_sum, number, model_state, pairs = self._differentiate(
                params, model_state, microbatch, key
            )
            total += float(loss_sum)
            count += float(number)
            for path, gradient in of_microbatch.items():
                gradients[path] = gradients.get(path, 0.0) + as_float64(gradient)
            for name, pair in pairs.items():
                sums = metrics.get(name, [0.0] * len(pair))
                metrics[name] = [a + as_float64(b) for a, b in zip(sums, pair, strict=True)]
        with np.errstate(invalid="ignore", divide="ignore"):  # a count may be zero
            reported = {name: each[0] / (*each, 1.0)[1] for name, each in metrics.items()}
        means = {path: gradient / count for path, gradient in gradients.items()}
        return Measured(total, count, means, model_state, reported)

    def start(self, params: Arrays) -> PyTree:
        """Returns the optimizer's initial state."""
        return self._tx.init(self._tree(params))

    def update(
        self, params: Arrays, opt_state: PyTree, gradients: Mapping[str, np.ndarray], loss: float
    ) -> tuple[Arrays, PyTree]:
        """Returns (parameters, optimizer state) after a step with these gradients of the mean."""
        return self._updated(params, opt_state, dict(gradients), loss)

    def _update(
        self, params: Arrays, opt_state: PyTree, gradients: Arrays, loss: jax.Array
    ) -> tuple[Arrays, PyTree]:
        cast = unflatten(
            {path: gradient.astype(params[path].dtype) for path, gradient in gradients.items()}
        )
        trained = self._tree(params)
        updates, opt_state = self._tx.update(cast, opt_state, trained, value=loss, grad=cast)
        return {**params, **flatten(optax.apply_updates(trained, updates))}, opt_state

    def _tree(self, params: Arrays) -> PyTree:
        return unflatten({path: value for path, value in params.items() if path in self._trained})

    def is_random(self, params: Arrays, model_state: Arrays, batch: PyTree, rng: jax.Array) -> bool:
        """Returns whether the loss depends on the model's random streams, as with dropout."""
        other = {
            path: _another_key(value) if _is_key(value) else value
            for path, value in model_state.items()
        }
        one = self.measure(params, model_state, batch, rng, 0, 1)
        two = self.measure(params, other, batch, _another_key(rng), 0, 1)
        return one.total != two.total

    def draws(self, params: Arrays, model_state: Arrays, batch: PyTree, rng: jax.Array) -> bool:
        """Returns whether random numbers are drawn anywhere, also from a constant key."""
        return "random_bits" in str(
            jax.make_jaxpr(self._gradients)(params, model_state, batch, rng)
        )


def as_float64(value: Any) -> np.ndarray:
    """Returns a copy on the host; steps donate their arrays."""
    return np.array(value).astype(np.float64)


def _is_key(value: jax.Array) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _another_key(keys: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(jax.random.key_data(keys) ^ 1, impl=jax.random.key_impl(keys))


def _apply_nnx(make_model: Callable[[nnx.Rngs], nnx.Module], loss_fn: Callable[..., Any]) -> Apply:
    def split() -> Any:
        model = make_model(nnx.Rngs(0))
        nnx.pop(model, nnx.Intermediate)
        return nnx.split(model, nnx.Param, ...)

    with nnx.use_eager_sharding(False):
        # Not under eval_shape: Flax takes an array attribute for state only where it is no tracer.
        graphdef, *states = split()

    def filled(state: nnx.State, arrays: Arrays) -> nnx.State:
        paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
        return jax.tree.unflatten(jax.tree.structure(state), [arrays[path] for path in paths])

    def apply(
        params: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array
    ) -> tuple[Any, Arrays]:
        model = nnx.merge(
            graphdef, filled(states[0], params), filled(states[1], model_state), copy=True
        )
        out = loss_fn(model, batch, key)
        state = nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.Param)))
        after = {"/".join(map(str, path)): leaf for path, leaf in state}
        values = {path: after[path] for path in model_state}
        return out, {
            path: leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
            for path, leaf in values.items()
        }

    return apply


def _apply_linen(module: nn.Module, loss_fn: Callable[..., Any], streams: Collection[str]) -> Apply:
    def apply(
        params: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array
    ) -> tuple[Any, Arrays]:
        collections = unflatten(model_state)
        # What is sown too; where a cache is mutable that is no state, a decoder would write one.
        mutable = core.DenyList(tuple({"params", "cache"} - collections.keys()))
        run = nn.apply(lambda model: loss_fn(model, batch, key), module, mutable=mutable)
        rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        rngs |= {name: jax.random.fold_in(key, zlib.crc32(name.encode())) for name in streams}
        out, after = run({"params": unflatten(params), **collections}, rngs=rngs)
        changed = flatten(after)
        return out, {path: changed.get(path, old) for path, old in model_state.items()}

    return apply
