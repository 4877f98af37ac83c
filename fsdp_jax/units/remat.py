"""How a unit's activations are kept: saved, recomputed in the backward pass, or offloaded.

[Note: policies] `jax.checkpoint` asks a policy about the result of each operation. The table lists
the named policies; none of them decides about gathered parameters, see `units.unit`.

| name | saved for the backward pass |
|---|---|
| `none` | everything that it reads |
| `full` | nothing but the unit's inputs |
| `dots` | `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`: products with weights |
| `selective` | all matmuls and convolutions except attention's scores, and fused kernels |

`selective` is what torchtitan calls selective activation checkpointing by operation: it saves
matmuls and attention, and recomputes cheap operations. It does not save a matmul whose result is
larger than its operands, such as the scores [heads, queries, keys]: recomputation exists to save
that memory. torchtitan also recomputes every second matmul; here none is recomputed.

An array that `jax.ad_checkpoint.checkpoint_name` named is saved if `RematPolicy.save` has its name.
The results of a fused kernel (Pallas, or cuDNN's attention) have the name `attention`: the backward
pass of flash attention reads more than its output, so saving only the output would not avoid
running the kernel again.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.extend.core as jex
from flax import nnx
from jax.ad_checkpoint import Offloadable, checkpoint_name, checkpoint_policies

from fsdp_jax.errors import ArgumentError, did_you_mean, join_fixes
from fsdp_jax.host_memory import HOST
from fsdp_jax.limits import Positive, check_fields
from fsdp_jax.program.equations import (
    Asked,
    Operation,
    all_eqns,
    array_name,
    dot_dimensions,
    eqns_inside,
)
from fsdp_jax.program.primitives import CUSTOM_VJP, DOT, primitive_of
from fsdp_jax.sharding.offload import Offload, activation_names
from fsdp_jax.tree import PyTree

Policy = Callable[..., Any]  # as in jax.checkpoint_policies
RematName = Literal["none", "full", "dots", "selective"]

INPUT = "fsdp.unit_input"  # the name of a unit's float inputs, where they are offloaded
ATTENTION = "attention"  # the name of what attention returns, and of what fused kernels return
_TO_HOST = Offloadable(src="device", dst=HOST)


@dataclass(frozen=True)
class RematPolicy:
    """Chooses which units are recomputed in the backward pass, and what these units still save.

    A policy may also be one of `jax.checkpoint`; `jax.ad_checkpoint.checkpoint_name` names arrays.
    With `every`, every k-th unit of each class is recomputed, and the others behave as with `none`.

    Raises:
        ValueError: a value of another type or out of range.

    """

    # What each unit computes again in the backward pass: nothing (none, all activations are
    # kept), all of it (full), all but matmuls with weights (dots), or all but matmuls and
    # attention (selective).
    policy: RematName | Policy = "full"
    # Names of activations that are saved in addition: qkv, attention, attention_out, mlp.
    save: tuple[str, ...] = ()
    every: Positive = 1  # Recompute every k-th block only; needs model.scan_layers False.

    def __post_init__(self) -> None:
        names = activation_names(self.save, "remat.save", 'RematPolicy(save=("attention",))')
        object.__setattr__(self, "save", names)
        check_fields(self, "remat")
        _check_policy(self.policy, "remat.policy")
        for name, is_set in {"save": bool(self.save), "every": self.every > 1}.items():
            if is_set and self.policy == "none":
                raise ArgumentError(
                    "with remat none nothing is recomputed",
                    where=f"remat.{name}",
                    got=getattr(self, name),
                    fix="remat full, or leave it out",
                )


Remat = RematName | Policy | RematPolicy


def as_policy(remat: Remat) -> RematPolicy:
    """Converts `remat` to a RematPolicy. Raises ValueError for anything that is no policy."""
    if isinstance(remat, RematPolicy):
        return remat
    _check_policy(remat, "remat")
    return RematPolicy(remat)


def _check_policy(policy: Any, where: str) -> None:
    """Raises ValueError for an unknown policy name, or a value that is neither a name nor a policy.

    `where`: the argument that has it.
    """
    choices = get_args(RematName)
    takes_a_policy = policy in (jax.checkpoint, nnx.remat, nn.remat)
    if takes_a_policy or (not callable(policy) and policy not in choices):
        otherwise = "a policy, such as jax.checkpoint_policies.dots_saveable"
        fix = join_fixes(did_you_mean(str(policy), choices), otherwise)
        if isinstance(policy, str):
            raise ArgumentError(f"unknown remat '{policy}'", where=where, fix=fix)
        elif isinstance(policy, Collection):
            fix = f"RematPolicy(save={tuple(policy)}) saves activations by name"
        raise ArgumentError("not a policy of rematerialization", where=where, got=policy, fix=fix)


@dataclass(frozen=True)
class Activations:
    """How the activations of one unit are kept between its forward and its backward pass."""

    policy: RematName | Policy = "none"  # by a name of the note, or a policy of `jax.checkpoint`
    save: tuple[str, ...] = ()  # names of arrays that are saved in addition
    offload: tuple[str, ...] = ()  # names of arrays that are kept in host memory meanwhile

    def name_inputs(self, arrays: PyTree) -> PyTree:
        """Gives the inputs of a unit the name `INPUT` if they are offloaded."""
        if INPUT not in self.offload:
            return arrays

        def named(x: Any) -> Any:
            is_float = jax.numpy.issubdtype(x.dtype, jax.numpy.floating) and x.ndim
            return checkpoint_name(x, INPUT) if is_float else x

        return jax.tree.map(named, arrays)

    def checkpoint_policy(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        """The policy for `jax.checkpoint`: whether the result of an operation is saved.

        Returns a bool, or how the result is offloaded.
        """
        asked = Asked(primitive, avals, params)
        given_name = array_name(asked)
        name = ATTENTION if _is_kernel(asked) else given_name
        if name and name in self.offload:
            return _TO_HOST
        if name and name in self.save:
            return True
        if self.policy == "none":
            return given_name is None  # the array itself is saved, where it is read
        if self.policy == "selective":
            return _is_costly(asked)
        named = {
            "full": checkpoint_policies.nothing_saveable,
            "dots": checkpoint_policies.dots_with_no_batch_dims_saveable,
        }
        policy: Policy = named[self.policy] if isinstance(self.policy, str) else self.policy
        return asked.ask(policy)


SAVED = Activations()
"""All that the backward pass reads is saved, on the device."""


def activations_of(policy: RematPolicy, offload: Offload) -> tuple[Activations, Activations]:
    """Decides on the activations of (units that are recomputed, other units)."""
    to_host = offload.activation_names or (INPUT,) * offload.activations
    saved = tuple(name for name in policy.save if name not in to_host)
    return Activations(policy.policy, saved, to_host), Activations("none", (), to_host)


def check_named_activations(activations: Activations, program: jex.Jaxpr) -> None:
    """Raises ValueError for a name to save or to offload that no array in a program has."""
    wanted = {"remat.save": activations.save, "offload.activation_names": activations.offload}
    found = _activation_names(all_eqns(program)) if any(wanted.values()) else set()
    for where, names in wanted.items():
        for name in names:
            if name not in found and name != INPUT:
                fix = did_you_mean(name, found - {INPUT})
                fix = fix or "jax.ad_checkpoint.checkpoint_name(x, name) in the model gives one"
                raise ArgumentError(
                    f"nothing in the model has the name '{name}'", where=where, fix=fix
                )


def _activation_names(eqns: Iterable[Operation]) -> set[str]:
    """Lists the names that `checkpoint_name` gives to arrays; `attention` for fused kernels."""
    names = (ATTENTION if primitive_of(eqn).fused_kernel else array_name(eqn) for eqn in eqns)
    return {name for name in names if name is not None}


def _is_kernel(asked: Asked) -> bool:
    """Tells whether an operation is a fused kernel, or a custom derivative around one.

    JAX asks about such a function as a whole: its result and what its derivative reads.
    """
    if primitive_of(asked) is CUSTOM_VJP:
        return ATTENTION in _activation_names(eqns_inside(asked))
    return primitive_of(asked).fused_kernel


def _is_costly(asked: Asked) -> bool:
    """Tells whether `selective` saves a result: of matmuls, convolutions, fused kernels."""
    if primitive_of(asked) is not DOT:
        return primitive_of(asked).matmul or _is_kernel(asked)
    left, right = asked.avals[:2]
    (contracted, _), (batch, _) = dot_dimensions(asked)
    if not batch:
        return True
    summed = prod(left.shape[dim] for dim in contracted)
    shared = prod(left.shape[dim] for dim in batch)
    result = left.size * right.size // (summed * summed * shared)
    return bool(result <= max(left.size, right.size))
