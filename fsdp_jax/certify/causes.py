"""Infers the likely cause of a sharded step's differences from how the numbers differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsdp_jax.certify.certificate import INITIAL, Setting
from fsdp_jax.certify.unsharded import UnshardedStep

NEAR = 0.02  # relative distance at which a ratio counts as equal to a number
NAN = float("nan")


@dataclass
class Evidence:
    """The facts of a sharded run from which a cause of its differences is inferred."""

    setting: Setting
    sizes: Mapping[str, int]  # devices, and the axes of the mesh
    holds_alone: bool  # the same setting, with one microbatch
    holds_local: bool  # `local_batch`, with more than one row on each device
    is_random: bool = False  # the loss depends on the model's random streams
    draws: bool = False  # it draws random numbers at all
    holds_resident: bool = False  # a setting without offload
    skipped: bool = False  # a step was skipped
    # Of the first step that differs:
    broken: frozenset[str] = frozenset()  # names of `COMPARED`
    ratios: dict[str, float] = field(default_factory=dict)  # sharded over unsharded
    lost: frozenset[str] = frozenset()  # paths of gradients that are zero and should not be
    # Of parameters that the loss reads outside their units: path -> where.
    read_outside: Mapping[str, str] = field(default_factory=dict)

    def add_step(
        self,
        expected: UnshardedStep,
        metrics: Mapping[str, np.ndarray],
        gradients: Mapping[str, np.ndarray],
    ) -> None:
        """Takes the numbers of a sharded step for evidence, in place of those of earlier steps."""
        self.skipped = bool(metrics["skipped"] > 0)
        self.ratios = {
            "total": _ratio(metrics["loss"] * metrics["count"], expected.total),
            "gradient norm": _ratio(metrics["grad_norm"], expected.grad_norm),
            "gradients": _common_scale(gradients, expected.gradients),
        }
        self.lost = frozenset(
            path
            for path, value in expected.gradients.items()
            if value.any() and not gradients[path].any()
        )


def _ratio(measured: Any, expected: float) -> float:
    """Divides measured by expected; NaN where zero is expected."""
    if not expected:
        return NAN
    return float(measured) / expected


def _common_scale(measured: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Finds the one number that all gradients are scaled by; NaN where there is none."""
    ours = np.concatenate([measured[path].ravel() for path in expected])
    theirs = np.concatenate([value.ravel() for value in expected.values()])
    # The least-squares fit of one scale, which counts if it explains nearly all of the gradients.
    scale = _ratio(ours @ theirs, theirs @ theirs)
    near = np.linalg.norm(ours - scale * theirs) <= NEAR * np.linalg.norm(ours)
    if not near:
        return NAN
    return scale


def likely_cause(evidence: Evidence, what: str, path: str) -> str:
    """Infers why numbers of the kind `what` differ, in a few words.

    `what`: a name of `COMPARED`; `path`: of the array that differs most.
    """
    broken = evidence.broken
    # Differences before the first step, a step that was not applied, and local batches.
    if what == INITIAL:
        return (
            "the model is made of something else than its random keys and example inputs, or is "
            "initialized otherwise; pass a Linen module inputs=(...) as real arrays, not shapes"
        )
    if evidence.skipped:
        cause = "the step was not finite and was not applied"
        if evidence.setting.local_batch:
            cause += ": a part of the batch alone gives NaN"
        return cause
    if evidence.setting.local_batch:
        cause = _cause_with_local_batch(evidence)
        if broken == {"metrics"} and not evidence.is_random:
            cause = "the metric is not a sum over examples: return its sum, or (sum, count)"
        return cause
    if what not in broken:
        return f"it follows from the {' and the '.join(sorted(broken))}, which differ before it"
    # A part of the library, named by the kind of numbers that differ first.
    outside = _read_outside(evidence)
    if evidence.setting.offload and evidence.holds_resident:
        return f"offload to host memory: without it the step equals one device{outside}"
    if path in evidence.lost and what == "gradients":
        return f"the gradient is lost: it is zero in all elements{outside}"
    if what == "parameters" and "gradients" not in broken:
        return "the sharded optimizer gives a different update for the same gradients"
    if what == "model state":
        return "the model's state (batch statistics) is computed on a part of the batch"
    # The gradients differ, or their norm alone.
    is_norm = what == "gradient norm" and "gradients" not in broken
    scale = evidence.ratios.get("gradient norm" if is_norm else "gradients", NAN)
    # A difference that accumulation alone brings.
    number = evidence.setting.accumulation
    if evidence.holds_alone and number > 1:
        if not _is_power(scale, number, 1):
            return "microbatches are not added up as one device does"
        each = f"a scale is applied to each of the {number} microbatches, not once"
        return f"scaled by {scale:.3g}: {each}"
    # A ratio that is a number of devices, or its root.
    for axis, size in evidence.sizes.items():
        which = "devices"
        if axis != "devices":
            which += f" along '{axis}'"
        if size > 1 and _is_power(scale, size, 1):
            by = f"it is multiplied or divided by the number of {which} ({size})"
            return f"scaled by {scale:.3g}: {by}"
        if size > 1 and is_norm and _is_power(scale, size, 0.5):
            root = f"the root of {size}: the norm counts each of the {which} once"
            return f"scaled by {scale:.3g}, {root}"
    if outside:
        return f"the loss reads shards, not whole parameters{outside}"
    return (
        "unknown: the loss means something else on several devices; please report it with the model"
    )


def _read_outside(evidence: Evidence) -> str:
    """Formats the end of a cause: parameters that are read outside their units, or nothing."""
    if not evidence.read_outside:
        return ""
    named = [f"{path} ({where})" for path, where in evidence.read_outside.items()]
    text = f"; parameters that are read outside their units: {', '.join(named[:3])}"
    if len(named) > 3:
        text += f" and {len(named) - 3} more"
    return text


def _cause_with_local_batch(evidence: Evidence) -> str:
    """Infers why a step with `local_batch=True` differs, in a few words."""
    # Each device draws numbers of its own.
    if evidence.is_random:
        return (
            "dropout or other random layers: with local_batch each device draws its own numbers, "
            "so no unsharded run is comparable; certify local_batch with them off"
        )
    # A mean on each device, or a count, makes the total as many times too large or too small.
    size = evidence.sizes["devices"]
    if _is_power(evidence.ratios.get("total", NAN), size, 1):
        return (
            "a mean where a sum is expected, or a number that depends on the rows of the batch: "
            f"each device has 1/{size} of them; return the sum over examples and their count"
        )
    # Without such a ratio, by other facts of the loss and the setting.
    if evidence.draws:
        return "random numbers from a constant key: every device draws the same ones"
    if evidence.setting.one_row and evidence.holds_local:
        return (
            "one row on each device is treated in another way than several (squeeze, `if rows > 1`)"
        )
    return (
        "the loss is not a sum over examples: rows are compared, a statistic over the batch is "
        "taken, or a term stands beside the sum, which every device adds"
    )


def _is_power(scale: float, number: int, exponent: float) -> bool:
    """Tells whether a scale is near `number ** exponent`, or near its inverse."""
    target = float(number) ** exponent
    return abs(scale / target - 1) < NEAR or abs(scale * target - 1) < NEAR
