"""The control of fuzz_steps.py: plain Flax and optax on one device, microbatch after microbatch.

Nothing in it is of the library, nor of the tests' own control. It takes from a state of the library
the initial parameters alone; those of an NNX model it makes too, and compares. What a precision
means is written here again: parameters are cast to the compute dtype but for those of norms, float
inputs as well, and the model's output is float32. With local batches each device draws other random
numbers: the rows of a device are then computed by themselves, with the keys of that device.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from fuzz_steps_cases import COMPUTE, EXACT, Case, Setting
from fuzz_steps_models import (
    LION,
    Batch,
    example,
    make_loss,
    make_model,
    make_optimizer,
    name_of,
)
from jax.tree_util import tree_flatten_with_path

Arrays = dict[str, Any]
"""path -> array"""
LOSS_SCALE = 256.0
UNDECIDED = 1e-4  # of the largest: below it rounding may choose the sign


def by_name(tree: Any) -> Arrays:
    """Flattens a tree: {path: leaf}."""
    return {name_of(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]}


class Cast:
    """A model whose float inputs and outputs are cast."""

    def __init__(self, model: Any, compute: Any, output: Any) -> None:
        self._model, self._compute, self._output = model, compute, output

    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Calls the model."""
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(self._compute)
        return self._model(x, train=train).astype(self._output)


class Control:
    """A run of a case.

    Attributes:
        params: all parameters, as they are stored.
        losses: of each step; so are `norms`, of the gradient before it is clipped, and `metrics`.
        undecided: where the sign of an update hangs on rounding, for Lion.

    """

    def __init__(self, case: Case, initial: Mapping[str, np.ndarray], state: Any) -> None:
        """Starts a run.

        Args:
            case: its model, optimizer and precision.
            initial: the parameters of the library's state, by path.
            state: the library's other state of a Linen model, such as batch statistics.

        """
        self.case = case
        self.params: Arrays = {path: jnp.asarray(x) for path, x in initial.items()}
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.metrics: list[dict[str, Any]] = []
        self._init_key, self._run_key = jax.random.split(jax.random.key(case.seed))
        self._module = make_model(case.net)
        if case.net.flax == "linen":
            init = functools.partial(self._module.init, train=False)
            shapes = jax.eval_shape(init, {"params": self._init_key}, example(case.net))
            self._structure = jax.tree.structure(shapes["params"])
            self._names = [*by_name(shapes["params"])]
            self.rest = jax.tree.map(jnp.asarray, state)
        else:
            self._start_nnx()
        self.is_trained = {path: self._trains(path) for path in self.params}
        self.tx = make_optimizer(case.optimizer, control=True)
        self.opt_state = jax.jit(self.tx.init)(self._for_optimizer(self._of(trained=True)))
        self.undecided = {path: np.zeros(x.shape, bool) for path, x in self.params.items()}
        self.steps = 0
        self._update = jax.jit(self._updated)

    def _start_nnx(self) -> None:
        """Makes the model, and compares its parameters with those of the library."""

        def make() -> Any:
            return nnx.split(self._module(nnx.Rngs(self._init_key)), nnx.Param, ...)

        self._graphdef, *_ = nnx.split(
            nnx.eval_shape(lambda: self._module(nnx.Rngs(self._init_key))), nnx.Param, ...
        )
        params, self.rest = jax.jit(lambda: make()[1:])()
        made = by_name(params)
        self._structure, self._names = jax.tree.structure(params), [*made]
        known = {path for path in self.params if "lora_" not in path}
        assert known == made.keys(), f"other parameters: {sorted(known ^ made.keys())}"
        for path, expected in made.items():
            if path == "positions" and self.case.given:
                continue
            found = self.params[path]
            stored = np.asarray(expected.astype(found.dtype), np.float32)
            atol = 1e-6 if found.dtype == jnp.float32 else 1e-2
            difference = np.abs(np.asarray(found, np.float32) - stored).max()
            assert difference <= atol, f"{path}: an initial value is off by {difference}"

    def _trains(self, path: str) -> bool:
        if self.case.lora is not None:
            return "lora_" in path or (self.case.lora_head and path.startswith("head/"))
        return not any(_matches(pattern, path) for pattern in self.case.frozen)

    def _of(self, *, trained: bool) -> Arrays:
        return {path: x for path, x in self.params.items() if self.is_trained[path] == trained}

    def _for_optimizer(self, arrays: Arrays) -> Arrays:
        """Widens what is updated in float32."""
        if self.case.precision != "stochastic":
            return arrays
        return {path: x.astype(jnp.float32) for path, x in arrays.items()}

    # The model

    def _run(
        self, params: Arrays, rest: Any, batch: Batch, key: Any, device: Any, *, train: bool
    ) -> Any:
        """Computes (the loss's result, the model's other state). `device`: None on one device."""
        case = self.case
        loss = make_loss(case.net, case.loss, train=train)
        own = key if device is None else jax.random.fold_in(key, device)
        if case.loss.key:
            loss = functools.partial(_with_key, loss, jax.random.fold_in(own, 2))
        tree = jax.tree.unflatten(self._structure, list(map(self._cast(params).get, self._names)))
        if case.net.flax == "linen":

            def call(model: nn.Module) -> Any:
                return loss(self._wrapped(model), batch)

            rngs = {"params": own, "dropout": jax.random.fold_in(own, 1)} if train else {}
            run = nn.apply(call, self._module, mutable=[*rest] if train else False)
            out = run({"params": tree, **rest}, rngs=rngs)
            return (out[0], {**rest, **out[1]}) if train else (out, rest)
        local = rest if device is None else _map_keys(rest, device)
        model = nnx.merge(self._graphdef, tree, local, copy=True)
        if not train:
            model.eval()
        out = loss(self._wrapped(model), batch)
        return out, nnx.state(model, nnx.Not(nnx.Param))

    def _wrapped(self, model: Any) -> Any:
        if self.case.precision in EXACT:
            return model
        output = jnp.bfloat16 if self.case.precision == "output" else jnp.float32
        return Cast(model, COMPUTE.get(self.case.precision, "float32"), output)

    def _cast(self, params: Arrays) -> Arrays:
        """Casts parameters as the model computes with them; adds LoRA's products to kernels."""
        compute = jnp.dtype(COMPUTE.get(self.case.precision, "float32"))
        cast = {
            path: x.astype(jnp.float32 if "norm" in path else compute) for path, x in params.items()
        }
        for path in [path for path in cast if path.endswith("/lora_a")]:
            module = path.removesuffix("/lora_a")
            product = cast[path] @ cast[f"{module}/lora_b"]
            cast[f"{module}/kernel"] += product * (1 / (self.case.lora or 1))
        return cast

    # A step

    def step(self, setting: Setting, batch: Batch) -> None:
        """Trains on a batch, as the library does with a setting."""
        parts = _split(batch, setting.accumulation)
        random = self.case.net.dropout > 0 or self.case.loss.key
        pieces = setting.devices if setting.local_batch and random else 1
        sums: Any = None
        for index, part in enumerate(parts):
            key = jax.random.fold_in(jax.random.fold_in(self._run_key, self.steps), index)
            trained, frozen = self._of(trained=True), self._of(trained=False)
            one, self.rest = self._gradients(pieces)(trained, frozen, self.rest, part, key)
            sums = one if sums is None else jax.tree.map(jnp.add, sums, one)
        (gradients, total, count, metrics) = sums
        self.losses.append(float(total / count))
        self.metrics.append(
            {
                name: np.asarray(total if own is None else total / own)
                for name, (total, own) in metrics.items()
            }
        )
        trained = self._of(trained=True)
        clip = jnp.float32(np.inf if setting.clip is None else setting.clip)
        updated, self.opt_state, norm, undecided = self._update(
            trained, self.opt_state, gradients, count, clip
        )
        self.params |= updated
        self.norms.append(float(norm))
        for path, where in undecided.items():
            self.undecided[path] |= np.asarray(where)
        self.steps += 1

    def _gradients(self, pieces: int) -> Callable[..., Any]:
        return _compiled_gradients(self, pieces)

    def summed(
        self, pieces: int, params: Arrays, rest: Any, batch: Batch, key: jax.Array
    ) -> tuple[Any, Any]:
        """Computes ((total, count, metrics), other state) of a microbatch; pieces are devices."""
        if pieces == 1:
            out, after = self._run(params, rest, batch, key, None, train=True)
            return _sums(out), after
        cut = jax.tree.map(lambda x: x.reshape(pieces, -1, *x.shape[1:]), batch)

        def of_device(device: jax.Array) -> Any:
            own = jax.tree.map(lambda x: x[device], cut)
            out, after = self._run(params, rest, own, key, device, train=True)
            return _sums(out), after

        outs, after = jax.lax.map(of_device, jnp.arange(pieces))
        added = jax.tree.map(lambda x: x.sum(0), outs)
        kept = jax.tree.map(lambda old, new: old if _is_key(old) else new[-1], rest, after)
        return added, kept

    def _updated(
        self, trained: Arrays, opt_state: Any, gradients: Arrays, count: Any, clip: Any
    ) -> Any:
        """Computes the update: (parameters, state, norm, where its sign hangs on rounding)."""
        mean = {path: g / count for path, g in gradients.items()}
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in mean.values()))
        scale = jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12))
        given = self._for_optimizer(trained)
        clipped = {path: (g * scale).astype(given[path].dtype) for path, g in mean.items()}
        updates, new_state = self.tx.update(clipped, opt_state, given)
        new = optax.apply_updates(given, updates)
        undecided: Arrays = {}
        if self.case.optimizer == "lion":
            drawn = {
                path: jnp.abs(LION["b1"] * mu + (1 - LION["b1"]) * clipped[path])
                for path, mu in opt_state[0].mu.items()
            }
            # A bias of attention's keys has no gradient but rounding's.
            largest = jnp.stack([x.max() for x in drawn.values()]).max()
            for path, x in drawn.items():
                undecided[path] = x <= UNDECIDED * jnp.maximum(x.max(), 0.1 * largest)
        return (
            {path: new[path].astype(trained[path].dtype) for path in new},
            new_state,
            norm,
            (undecided),
        )

    def evaluate(self, batch: Batch) -> tuple[float, float]:
        """Computes (sum, count) of a batch in inference mode."""
        out, _ = jax.jit(functools.partial(self._run, device=None, train=False))(
            self.params, self.rest, batch, jax.random.fold_in(self._run_key, 2**32 - 1)
        )
        return float(out[0]), float(out[1])


def _compiled_gradients(control: Control, pieces: int) -> Callable[..., Any]:
    """Compiles the gradients of a microbatch: ((gradients, total, count, metrics), state)."""
    cache: dict[int, Any] = control.__dict__.setdefault("_jitted", {})
    factor = LOSS_SCALE if control.case.precision == "float16" else 1.0

    def gradients(trained: Arrays, frozen: Arrays, rest: Any, batch: Batch, key: Any) -> Any:
        rows = len(batch["mask"])
        scale = factor / 2.0 ** (rows - 1).bit_length() if factor != 1 else 1.0

        def loss(trained: Arrays) -> Any:
            (total, *others), after = control.summed(pieces, trained | frozen, rest, batch, key)
            return total * scale, ((total, *others), after)

        found, ((total, count, metrics), after) = jax.grad(loss, has_aux=True)(trained)
        wide = {path: g.astype(jnp.float32) / scale for path, g in found.items()}
        return (wide, total, count, metrics), after

    if pieces not in cache:
        cache[pieces] = jax.jit(gradients)
    return cache[pieces]


def _with_key(loss: Callable[..., Any], key: jax.Array, model: Any, batch: Batch) -> Any:
    return loss(model, batch, key)


def _matches(pattern: str, path: str) -> bool:
    """Tells whether a pattern of `frozen` matches: a part, a beginning, or an end of the path."""
    if pattern.startswith("^"):
        return path.startswith(pattern[1:])
    return path.endswith(pattern[:-1]) if pattern.endswith("$") else pattern in path


def _split(batch: Batch, parts: int) -> list[Batch]:
    return [{name: np.split(x, parts)[i] for name, x in batch.items()} for i in range(parts)]


def _sums(out: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Unpacks a loss's result: (total, count, {name: (sum, count or None)})."""
    total, count, *rest = out
    metrics: dict[str, Any] = {}
    if rest:
        found = rest[0]
        metrics = {"size": (found["size"], count), "own": found["own"]}
        metrics["own"] = (found["own"][0], jnp.float32(found["own"][1]))
        metrics |= {f"sums/{name}": value for name, value in found["sums"].items()}
    return total, jnp.float32(count), metrics


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _map_keys(rest: Any, device: Any) -> Any:
    """Folds a device's number into every random key."""

    def fold(keys: jax.Array) -> jax.Array:
        return jax.vmap(fold)(keys) if keys.ndim else jax.random.fold_in(keys, device)

    return jax.tree.map(lambda leaf: fold(leaf) if _is_key(leaf) else leaf, rest)
