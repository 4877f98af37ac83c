"""Holds one model of third_party_models.py against an unsharded control; prints a line of JSON.

    python scripts/third_party_runner.py "Llama 3" [--topology h100:8]

scripts/third_party.py runs it in the environment that it makes; the conventions are there.
"""

import argparse
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from third_party_models import CASES, Batch, Case

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.contract.contract import check_contract
from fsdp_jax.launch import use_virtual_devices
from fsdp_jax.planner import parse_topology
from fsdp_jax.tree import PyTree, flatten

STEPS, ROWS, MIN_SIZE = 5, 16, 256
# Strategy, replicas, microbatches.
RUNS = (("full_shard", 1, 1), ("hybrid_shard", 2, 1), ("full_shard", 1, 2))
RESTORED = ("hybrid_shard_zero2", 2)
HALF = fsdp.Precision(compute="bfloat16")


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-3, eps=1e-6)


def batch_of(case: Case, step: int, rows: int = ROWS, *, wide: bool = False) -> Batch:
    return case.batch(rows, np.random.default_rng(step), wide)


def mesh_of(case: Case, replica: int = 1, devices: Any = None) -> jax.sharding.Mesh:
    """Returns the mesh that a model runs on: 8 devices, or those that are given."""
    count = len(jax.devices() if devices is None else devices)
    if not case.explicit:
        return fsdp.make_mesh(data=count // replica, replica=replica, devices=devices)
    shape, names = (count // replica, replica), ("fsdp", "replica")
    types = (jax.sharding.AxisType.Explicit,) * 2
    return jax.make_mesh(shape, names, axis_types=types, devices=devices)


def layout(
    case: Case,
    mesh: jax.sharding.Mesh,
    strategy: str,
    *,
    wide: bool = False,
    precision: fsdp.Precision | None = None,
    advised: bool = True,
    **settings: Any,
) -> fsdp.Sharded:
    """Returns the model laid out as its user would, the block classes as units.

    `advised`: with the dtype of the precision, and the rules, that messages ask for.
    """
    dtype = jnp.dtype(precision.compute) if precision and advised else jnp.dtype("float32")
    if case.inputs is not None:
        settings["inputs"] = case.inputs(batch_of(case, 0, 2, wide=wide))
    settings |= {"rules": case.rules if advised else (), "precision": precision}
    model = case.make(wide, dtype)
    return fsdp.fully_shard(model, optimizer(), mesh, strategy, case.units, **settings)


# The control: Flax, optax and jax.jit on one device; the initial values are all that it is given.


def one_device(case: Case) -> AbstractContextManager[Any]:
    """Returns the context that the control of a model runs in: a mesh of one device, or none."""
    if not case.needs_mesh:
        return nullcontext()
    auto = (jax.sharding.AxisType.Auto,)
    return jax.set_mesh(jax.make_mesh((1,), ("fsdp",), axis_types=auto, devices=jax.devices()[:1]))


def train_unsharded(case: Case, initial: fsdp.TrainState, accumulation: int) -> list[float]:
    """Returns the losses of `STEPS` steps on one device."""
    params, rest, apply = control_model(case, initial)
    tx = optimizer()
    opt_state = tx.init(params)

    @jax.jit
    def gradients(params: Any, rest: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            (total, count), after = apply(params, rest, batch)
            return total, (jnp.float32(count), after)

        (total, (count, after)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return (grads, total, count), after

    @jax.jit
    def update(params: Any, opt_state: Any, sums: Any) -> Any:
        grads, total, count = sums
        grads = jax.tree.map(lambda g: g / count, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, total / count

    losses = []
    for step in range(STEPS):
        parts = []
        whole = batch_of(case, step)
        for index in range(accumulation):
            microbatch = {k: np.split(v, accumulation)[index] for k, v in whole.items()}
            sums, rest = gradients(params, rest, microbatch)
            parts.append(sums)
        summed = jax.tree.map(lambda *each: sum(each), *parts)
        params, opt_state, loss = update(params, opt_state, summed)
        losses.append(float(loss))
    return losses


def control_model(
    case: Case, initial: fsdp.TrainState, *, training: bool = True
) -> tuple[PyTree, PyTree, Callable[..., Any]]:
    """Returns (parameters, other state, `apply(parameters, state, batch)`), on one device.

    In inference mode Linen keeps no state (`mutable=False`), and NNX has a switch (`model.eval()`).
    """
    loss = case.loss
    if not training and case.evaluation is not None:
        loss = case.evaluation
    params = jax.tree.map(np.asarray, initial.params)
    rest = jax.device_put(initial.model_state, jax.devices()[0])  # keys are no NumPy arrays
    if case.kind == "Linen":
        module = case.make(False, jnp.float32)

        def apply_linen(params: PyTree, rest: PyTree, batch: Any) -> Any:
            mutable = list(rest) if training else False
            run = nn.apply(lambda model: loss(model, batch), module, mutable=mutable)
            out = run({"params": params, **rest})
            if not training:
                return out, rest
            result, after = out
            return result, {**rest, **after}

        return params, rest, apply_linen

    with nnx.use_eager_sharding(False):  # the control has no mesh that annotations could name
        model = case.make(False, jnp.float32)(nnx.Rngs(0))
    graphdef, fresh, *others = nnx.split(model, nnx.Param, ...)
    other = others[0]
    flat = flatten(params) | flatten(rest)
    for path, variable in (*nnx.to_flat_state(fresh), *nnx.to_flat_state(other)):
        if isinstance(variable, nnx.Variable):
            variable.set_value(jnp.asarray(flat["/".join(map(str, path))]))

    def apply_nnx(params: Any, rest: Any, batch: Any) -> Any:
        model = nnx.merge(graphdef, params, rest, copy=True)
        if not training:
            model.eval()
        out = loss(model, batch)
        return out, nnx.state(model, nnx.Not(nnx.Param))

    return fresh, other, apply_nnx


# What is checked. Each function returns columns of the row.


def parity(case: Case) -> dict[str, Any]:
    """Trains by the library and by the control; returns the largest relative difference of each."""
    columns: dict[str, Any] = {}
    for strategy, replica, accumulation in RUNS:
        mesh = mesh_of(case, replica)
        sharded = layout(case, mesh, strategy, min_size=MIN_SIZE)
        state = sharded.init(0)
        with one_device(case):
            expected = train_unsharded(case, sharded.to_checkpoint(state), accumulation)
        step = sharded.make_train_step(case.loss, accumulation=accumulation)
        losses = []
        for index in range(STEPS):
            state, metrics = step(state, batch_of(case, index))
            losses.append(float(metrics["loss"]))
        difference = np.max(np.abs(np.array(losses) / expected - 1))
        columns[f"{strategy}, accumulation {accumulation}"] = float(difference)
        if (strategy, accumulation) == ("full_shard", 1):
            columns["losses"] = losses
            columns["evaluation"] = evaluated(case, sharded, state)
            columns |= restored(case, sharded, state, step)
    return columns


def evaluated(case: Case, sharded: fsdp.Sharded, state: fsdp.TrainState) -> float:
    """Returns the relative difference of an evaluation's loss after training."""
    batch = batch_of(case, STEPS)
    total, count = sharded.make_eval_step(case.evaluation or case.loss)(state, batch)
    with one_device(case):
        initial = sharded.to_checkpoint(state)
        params, rest, apply = control_model(case, initial, training=False)
        (expected, number), _ = jax.jit(apply)(params, rest, batch)
    return abs(float(total / count) / float(expected / number) - 1)


def restored(
    case: Case, sharded: fsdp.Sharded, state: fsdp.TrainState, step: fsdp.CompiledStep
) -> dict[str, Any]:
    """Saves a state, restores it into another strategy, and takes the next step of both."""
    strategy, replica = RESTORED
    other = layout(case, mesh_of(case, replica), strategy, min_size=MIN_SIZE)
    with tempfile.TemporaryDirectory() as folder, CheckpointStore(folder) as store:
        store.save(0, sharded.to_checkpoint(state), data={}, metadata={})
        saved, *_ = store.restore(0, other.checkpoint_target())
    found = other.from_checkpoint(saved)
    before = flatten(sharded.to_checkpoint(state).params)
    after = flatten(other.to_checkpoint(found).params)
    same = all(np.array_equal(np.asarray(before[p]), np.asarray(after[p])) for p in before)
    batch = batch_of(case, STEPS)
    _, next_metrics = other.make_train_step(case.loss)(found, batch)
    _, metrics = step(state, batch)
    difference = abs(float(next_metrics["loss"]) / float(metrics["loss"]) - 1)
    return {"restored bitwise": same and len(before) == len(after), "next loss": difference}


def contract(case: Case, topology: str, *, advised: bool) -> dict[str, Any]:
    """Compiles the wide model's step in bfloat16 for a machine, and judges what it sends."""
    mesh = mesh_of(case, devices=parse_topology(topology).devices())
    sharded = layout(case, mesh, "full_shard", wide=True, precision=HALF, advised=advised)
    batch = batch_of(case, 0, rows=mesh.size, wide=True)
    verdict = check_contract(sharded.make_train_step(case.loss), batch)
    sent = verdict.wire_bytes / verdict.wire_bytes_limit
    if not advised:
        return {"as it is": sent, "advice": [str(each) for each in verdict.violations]}
    return {
        "parameters": sum(int(np.prod(x.shape)) for x in jax.tree.leaves(sharded.layout.params)),
        "contract": verdict.holds,
        "sent / declared": sent,
        "violations": [str(each) for each in verdict.violations] + list(verdict.unread),
        "choices": list(verdict.choices),
    }


def run(case: Case, topology: str | None) -> dict[str, Any]:
    """Returns the columns of one row; what raised is in `errors`.

    What is warned of is in `said`; of the model as it is, without what it needs, in `advice`.
    """
    checks: dict[str, Callable[[], dict[str, Any]]] = {"parity": partial(parity, case)}
    if topology is not None:
        checks["contract"] = partial(contract, case, topology, advised=True)
    columns: dict[str, Any] = {"package": case.package, "errors": {}}
    columns["said"] = checked(checks, columns)
    columns["needs"] = ["dtype=jnp.bfloat16"] * case.dtype + ["rules"] * bool(case.rules)
    if topology is not None and columns["needs"]:
        as_it_is = {"contract as it is": partial(contract, case, topology, advised=False)}
        warned = checked(as_it_is, columns)
        columns["advice"] = warned + columns.get("advice", [])
    return columns


def checked(
    checks: Mapping[str, Callable[[], dict[str, Any]]], columns: dict[str, Any]
) -> list[str]:
    """Runs checks, adds their columns, and returns what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, check in checks.items():
            try:
                columns |= check()
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                columns["errors"][name] = f"{type(error).__name__}: {error}"
    kinds = fsdp.SlowerWarning | fsdp.ReplicationWarning
    said = [str(each.message) for each in caught if issubclass(each.category, kinds)]
    return list(dict.fromkeys(said))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=CASES)
    parser.add_argument("--topology")
    options = parser.parse_args()
    use_virtual_devices(8)
    print(json.dumps(run(CASES[options.model], options.topology)))


if __name__ == "__main__":
    main()
