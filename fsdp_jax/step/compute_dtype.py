"""Finds the matmuls of a traced step that run in a wider dtype than `Precision.compute`.

A weight is gathered in the compute dtype. A module that has a dtype of its own, or that is given
wide inputs, casts it back: the weight is rounded, and its matmul runs in float32 all the same. So
gathered weights are followed through what rearranges or casts them to the matmuls and convolutions
that take them. Matmuls of activations alone (attention logits, a loss) are not looked at, nor are
weights that are gathered in float32 because they are declared so (`Precision.keep_float32`).
"""

import inspect
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from fsdp_jax.errors import ArgumentError, SlowerWarning, human_bytes
from fsdp_jax.program.dataflow import NONE, DataFlow, Labels
from fsdp_jax.program.equations import scopes_of
from fsdp_jax.program.primitives import BARRIER, CONCATENATE, primitive_of
from fsdp_jax.sharding.mesh import shards_of, spec_axes
from fsdp_jax.step.step_plan import StepPlan
from fsdp_jax.tree import prefixes
from fsdp_jax.units.auto_wrap import ModuleInfo
from fsdp_jax.units.collectives import REDUCE_SCOPE, is_gathering, path_of_gather

# Below this share of the elements of all multiplied weights float32 costs nothing, such as in the
# router of a mixture of experts, where it is usual.
LEAST_SHARE = 0.01
SHOWN = 3  # modules in a message


def check_compute_dtype(plan: StepPlan, program: jex.Jaxpr) -> None:
    """Warns of weights whose matmuls run in a wider dtype than `Precision.compute`.

    Raises ValueError in place of the warning if the plan is strict.
    """
    asked = plan.precision.compute
    if asked is None or jnp.dtype(asked).itemsize >= jnp.dtype("float32").itemsize:
        return
    # Find the weights that are multiplied in a wider dtype; a small share is fine.
    weights = Weights()
    weights.outputs(program, [NONE] * len(program.invars))
    # Those of this model, by its own paths: the step may have other models.
    multiplied = {
        path: weights.multiplied[comm.path]
        for path, comm in plan.comms.items()
        if comm.path in weights.multiplied
    }
    reduced = {path for path, comm in plan.comms.items() if comm.path in weights.reduced}
    wide = {
        path: dtype
        for path, dtype in multiplied.items()
        if dtype.itemsize > plan.comms[path].transform.compute.itemsize
    }
    sizes = {path: prod(plan.comms[path].shape) for path in multiplied}
    if sum(sizes[path] for path in wide) <= LEAST_SHARE * sum(sizes.values()):
        return
    # Tell the cost, and the fix for the largest of them.
    largest = sorted(wide, key=lambda path: (-sizes[path], path))
    what = f"compute='{asked}' was asked for, and the matmuls of {len(wide)} of {len(sizes)} "
    what += "weights run in a wider dtype"
    where = _first([f"'{path}' ({wide[path]})" for path in largest])
    cost = f"they are rounded to {asked} and multiplied at the speed of the wider dtype"
    if more := _wide_gradient_bytes(plan, wide, reduced):
        cost += f"; their gradients are reduced in it, {human_bytes(more)} per step above what "
        cost += "the layout declares"
    fix = _way_out(plan, _module_of(plan, largest[0]))
    if len(wide) < len(sizes):
        fix += f". Or declare that they shall compute in float32: {_declared(plan, largest)}"
    if plan.strict:
        raise ArgumentError(what, where=where, expected=asked, got=cost, fix=fix)
    warnings.warn(f"{what}: {where}; {cost}. {fix}", SlowerWarning, stacklevel=3)


def _first(texts: Sequence[str]) -> str:
    """Joins the first texts, and the count of the others."""
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


def _declared(plan: StepPlan, paths: Sequence[str]) -> str:
    """Writes the argument of a Precision that keeps the modules of these weights in float32."""
    modules = {_module_of(plan, path).path: None for path in paths}
    patterns = [*plan.precision.keep_float32, *(f"^{re.escape(path)}/" for path in modules if path)]
    return f"keep_float32={tuple(patterns)}"


def _wide_gradient_bytes(plan: StepPlan, wide: dict[str, np.dtype], reduced: set[str]) -> int:
    """Counts the bytes that a device sends above the declared, as gradients are reduced wide.

    With local batches they are cast first. `wide`: path -> dtype of its matmul; `reduced`: paths
    whose gradient the step reduces.
    """
    if plan.local_batch:
        return 0
    axes, total = plan.layout.axes, 0
    for path in reduced & wide.keys():
        leaf = plan.layout.by_path[path]
        wider_by = wide[path].itemsize - plan.comms[path].transform.compute.itemsize
        elements = prod(leaf.shape) // shards_of(leaf.mesh, spec_axes(axes.model_spec(leaf.spec)))
        shards = shards_of(leaf.mesh, axes.batch_spec_axes(leaf.grad_spec))
        total += elements * wider_by * (shards - 1) // shards * plan.accumulation
    return total


def _module_of(plan: StepPlan, path: str) -> ModuleInfo:
    """Finds the module that owns a parameter."""
    return next(module for module in plan.model.modules if path in module.direct)


def _way_out(plan: StepPlan, module: ModuleInfo) -> str:
    """Describes how to have the matmul of a module run in the compute dtype."""
    narrow = f"dtype=jnp.{plan.precision.compute}"
    around = {each.path: each.kind for each in plan.model.modules}
    kinds = [around[path] for path in reversed(prefixes(module.path)) if path in around]
    model = kinds[0].__name__
    name = f"'{module.path}' ({module.kind.__name__})" if module.path else model
    why = f"{name} is made with dtype={module.dtype}: "
    if module.dtype is None:
        why = f"{name} has no dtype of its own, and its inputs are wide: cast them (units that you "
        why += "name cast theirs), or "
    if _takes_dtype(kinds[0]):
        return f"{why}make the model with {narrow}, an argument of {model}"
    taking = [kind.__name__ for kind in kinds if _takes_dtype(kind)]
    if taking:
        return f"{why}give {narrow} to {taking[0]}, where {model} makes it"
    return f"{why}set {narrow} where {model} takes it from, such as its config"


def _takes_dtype(kind: type) -> bool:
    """Tells whether a module's class has an argument `dtype`."""
    return "dtype" in inspect.signature(inspect.getattr_static(kind, "__init__")).parameters


@dataclass
class Weights(DataFlow):
    """Follows gathered weights through a program, to the matmuls that take them in forward.

    In the backward pass a matmul that adds up in float32 is given gradients in float32: its dtype
    follows from that of the forward pass, or from what is common for logits.

    Attributes:
        multiplied: path of a weight -> the widest dtype that a matmul takes it, or its other
            operand, in.
        reduced: paths of the parameters whose gradients are reduced.
        backward: the program that is followed is of the backward pass.

    """

    multiplied: dict[str, np.dtype] = field(default_factory=dict)
    reduced: set[str] = field(default_factory=set)
    backward: bool = False

    def results(self, eqn: jex.JaxprEqn, operands: list[Labels]) -> list[Labels]:
        """Finds the weights that each result of an equation is made of."""
        if path := path_of_gather(eqn):
            # The float8 values and the scale are of the same weight.
            return [frozenset({path})] * len(eqn.outvars)
        outer, scopes = self.backward, scopes_of(eqn)
        self.backward |= "transpose(" in scopes
        inside = self.results_inside(eqn, operands)
        is_backward, self.backward = self.backward, outer
        if inside is not None:
            return inside
        primitive, held = primitive_of(eqn), NONE.union(*operands)
        made = NONE
        if primitive.matmul:
            if held and not is_backward:
                self._note_matmul(eqn, held)
        elif held and primitive is BARRIER:
            return operands
        elif held and (primitive.rearranges or primitive is CONCATENATE or is_gathering(eqn)):
            made = held  # also where a prefetched float8 kernel is multiplied by its scale
        elif (held or primitive.scoped) and (reduced := REDUCE_SCOPE.search(scopes)):
            self.reduced.add(reduced.group(1))
        return [made] * len(eqn.outvars)

    def _note_matmul(self, eqn: jex.JaxprEqn, weights: Labels) -> None:
        """Notes the dtype that a matmul runs in: the widest of its operands'."""
        avals: list[Any] = [v.aval for v in eqn.invars]
        floats = [aval.dtype for aval in avals if jnp.issubdtype(aval.dtype, jnp.floating)]
        for path in weights:
            dtypes = [*floats, self.multiplied.get(path, floats[0])]
            self.multiplied[path] = max(dtypes, key=lambda dtype: dtype.itemsize)
