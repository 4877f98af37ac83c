"""What is most often passed in place of what is meant, and what to write instead."""

import re
from collections.abc import Collection, Mapping
from typing import Any, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from fsdp_jax.errors import did_you_mean, message
from fsdp_jax.prefetch.rewrite import Prefetch
from fsdp_jax.sharding.layout import Layout
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.units.linen import LinenModel
from fsdp_jax.units.model import Model
from fsdp_jax.units.nnx import NnxModel
from fsdp_jax.units.unit import Remat


def check_arguments(
    tx: Any, mesh: Any, units: Any, precision: Any, remat: Any, prefetch: Any
) -> None:
    """Of `fully_shard`. Raises ValueError."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            message("not a mesh", where="mesh", got=type(mesh), fix="fsdp_jax.make_mesh(data=8)")
        )
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise ValueError(
            message("not an optax transformation", where="tx", got=tx, fix="optax.adamw(3e-4)")
        )
    if precision is not None and not isinstance(precision, Precision):
        fix = 'Precision(compute="bfloat16")'
        raise ValueError(message("not a Precision", where="precision", got=precision, fix=fix))
    if isinstance(units, type) or units is None or units == [] or units == ():
        raise ValueError(
            message(
                "no units",
                where="units",
                got=units,
                fix="units=[Block], or units='model' for one unit",
            )
        )
    for name, value, known in (
        ("remat", remat, get_args(Remat)),
        ("prefetch", prefetch, get_args(Prefetch)),
    ):
        if value not in known:
            raise ValueError(
                message(
                    f"unknown {name} '{value}'", where=name, fix=did_you_mean(str(value), known)
                )
            )


def check_train_step(
    layout: Layout,
    precision: Precision,
    prefetch: Prefetch,
    *,
    accumulation: Any,
    deferred: bool,
    local_batch: Any,
    clip: Any,
) -> None:
    """Of `Sharded.train_step`. Raises ValueError."""
    if not isinstance(accumulation, int) or accumulation < 1:
        raise ValueError(
            message(
                "accumulation is a whole number, at least 1", where="accumulation", got=accumulation
            )
        )
    if clip is not None and not clip > 0:
        raise ValueError(message("clip is above 0, or None", where="clip", got=clip))
    if not isinstance(local_batch, bool):
        fix = "True if loss_fn is a sum over examples, or else False"
        raise ValueError(message("not a bool", where="local_batch", got=local_batch, fix=fix))
    if local_batch:
        _check_stacks(layout)
        return
    compute, reduce = precision.compute, precision.reduce
    asked = [
        (deferred, "deferred_reduction=True", "leave deferred_reduction out"),
        (prefetch != "none", f"prefetch='{prefetch}'", "fully_shard(..., prefetch='none')"),
        (
            reduce is not None and reduce != compute,
            f"Precision(compute='{compute}', reduce='{reduce}')",
            "reduce=None",
        ),
    ]
    for wanted, name, otherwise in asked:
        if wanted:
            fix = (
                "train_step(loss_fn, local_batch=True) if loss_fn is a sum over examples "
                f"(fsdp_jax.testing.certify checks it); otherwise {otherwise}"
            )
            what = f"{name} needs local_batch=True: on the global batch XLA places the collectives"
            raise ValueError(message(what, where="train_step", fix=fix))


def _check_stacks(layout: Layout) -> None:
    """Raises ValueError where a device would hold some of the layers of a stack."""
    for path, leaf in layout.by_path.items():
        if any(leaf.spec[: leaf.stacked]):
            what, expected = (
                "a stack of layers is sharded along its layers",
                "a spec that keeps that dim whole",
            )
            fix = "shard another dim, or leave local_batch out"
            raise ValueError(message(what, where=path, expected=expected, got=leaf.spec, fix=fix))


def check_trained(parameters: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises ValueError for trained parameters by path that have no gradient."""
    for path, leaf in parameters.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            fix = f"frozen=['{path}'] in fully_shard; or make it an nnx.Variable, not an nnx.Param"
            what = "only parameters of real floating-point numbers can be trained"
            raise ValueError(
                message(what, where=path, expected="a float dtype", got=leaf.dtype, fix=fix)
            )


def check_patterns(precision: Precision, classes: Collection[str], paths: Collection[str]) -> None:
    """Raises ValueError for a pattern in `keep_float32`, of the user's own, that matches nothing in
    the model.
    """
    for pattern in precision.keep_float32:
        if pattern in Precision().keep_float32 or any(
            re.search(pattern, name) for name in (*classes, *paths)
        ):
            continue
        what = f"pattern '{pattern}' matches no parameter and no class of a module"
        raise ValueError(
            message(what, where="precision.keep_float32", fix=did_you_mean(pattern, paths))
        )


def check_plan(topology: Any, batch: Any) -> None:
    """Of `Sharded.plan`. Raises ValueError."""
    if not isinstance(topology, str):
        fix = 'sharded.plan("h100:8", loss_fn, batch)'
        raise ValueError(
            message("not the name of a machine", where="topology", got=type(topology), fix=fix)
        )
    leaves = jax.tree.leaves(batch)
    if not leaves or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        fix = '{"tokens": jax.ShapeDtypeStruct((rows, length), "int32")}'
        raise ValueError(message("not arrays, nor their shapes", where="batch", got=batch, fix=fix))


def adapt(model: Any, inputs: tuple[Any, ...] | Mapping[str, Any] | None) -> Model:
    """The adapter of a model of either library. Raises ValueError for what is none."""
    mistake = _mistaken(model)
    if mistake is not None:
        what, fix = mistake
        got = model if isinstance(model, type) else type(model)
        expected = "a function of nnx.Rngs that makes an NNX model, or an unbound Linen module"
        raise ValueError(message(what, where="model", expected=expected, got=got.__name__, fix=fix))
    if not isinstance(model, nn.Module):
        return NnxModel(model)
    if inputs is None:
        fix = "inputs=(jax.ShapeDtypeStruct((1, 128), jnp.int32),)"
        raise ValueError(message("a Linen model needs example inputs", where="inputs", fix=fix))
    return LinenModel(model, inputs)


def _mistaken(model: Any) -> tuple[str, str] | None:
    """(what, fix) for what is most often passed in place of a model; None for a model."""
    if isinstance(model, type):
        if issubclass(model, nn.Module):
            return "a class, not a model", "Model(...), and inputs=(...)"
        return "a class, not a model", "lambda rngs: Model(..., rngs=rngs)"
    if isinstance(model, nnx.bridge.ToNNX):
        return "a Linen module wrapped for NNX", "pass the Linen module itself, and inputs=(...)"
    if isinstance(model, nnx.bridge.ToLinen):
        return (
            "an NNX model wrapped for Linen",
            "lambda rngs: Model(..., rngs=rngs), the NNX model itself",
        )
    if isinstance(model, nnx.Module):
        fix = "pass the function that makes it, lambda rngs: Model(..., rngs=rngs), so that it is born sharded"
        return "the model is already in memory, unsharded", fix
    if isinstance(model, nn.Module):
        if model.scope is None:
            return None
        return (
            "a module bound to its variables",
            "pass the module that it was made from, or model.unbind()[0]",
        )
    if callable(getattr(model, "apply_fn", None)):
        return (
            "a train state, not a model",
            "pass the module whose `apply` is its apply_fn, and inputs=(...)",
        )
    if isinstance(getattr(model, "module", None), nn.Module | nnx.Module):
        return (
            "an object around a module",
            "pass the module that it holds, its attribute `module`, and inputs=(...)",
        )
    if not callable(model):
        return (
            "not a model",
            "lambda rngs: Model(..., rngs=rngs), or a Linen module and inputs=(...)",
        )
    return None
