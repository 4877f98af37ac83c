"""Why a sharded step differs from the unsharded one: the likely cause, read from how the numbers
differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fsdp_jax.certify.unsharded import Measured

NEAR = 0.02  # a ratio counts as a number that it is so near to, relatively


@dataclass
class Evidence:
    """What is known of a run that differs.

    Attributes:
        sizes: devices, and the axes of the mesh.
        holds_alone: whether the same setting holds with one microbatch.
        holds_local: whether `local_batch` holds with more than one row on each device.
        drawn: whether the loss depends on the model's random streams, and whether it draws random
            numbers at all.

    """

    sizes: Mapping[str, int]
    local_batch: bool
    one_row: bool
    accumulation: int
    holds_alone: bool
    holds_local: bool
    drawn: tuple[bool, bool] = (False, False)
    skipped: bool = False
    ratios: dict[str, float] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()

    def add(
        self, expected: Measured, metrics: Mapping[str, float], gradients: Mapping[str, np.ndarray]
    ) -> None:
        """Takes up the first step; later ones follow from it."""
        self.skipped = self.skipped or metrics["skipped"] > 0
        if self.ratios:
            return
        total = metrics["loss"] * metrics["count"]
        self.ratios = {
            "total": _ratio(total, expected.total),
            "count": _ratio(metrics["count"], expected.count),
            "gradient norm": _ratio(metrics["grad_norm"], expected.grad_norm),
            "gradients": _common(gradients, expected.gradients),
        }
        self.lost = frozenset(
            path
            for path, value in expected.gradients.items()
            if value.any() and not gradients[path].any()
        )


def _ratio(found: float, expected: float) -> float:
    return found / expected if expected else float("nan")


def _common(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The one number that all gradients are scaled by; not a number where there is none."""
    ours = np.concatenate([found[path].ravel() for path in expected])
    theirs = np.concatenate([value.ravel() for value in expected.values()])
    scale = _ratio(float(ours @ theirs), float(theirs @ theirs))
    near = np.linalg.norm(ours - scale * theirs) <= NEAR * np.linalg.norm(ours)
    return scale if near else float("nan")


def likely_cause(evidence: Evidence, what: str, path: str, broken: set[str]) -> str:
    """In a few words, for a failure in `what` (a column of the table) at `path`."""
    if evidence.skipped:
        return "the step was not finite and was not applied" + (
            ": a part of the batch alone gives NaN" if evidence.local_batch else ""
        )
    if evidence.local_batch:
        return _of_local_batch(evidence)
    if path in evidence.lost and what == "gradients":
        return "the gradient is lost: it is zero in all elements"
    if what == "parameters" and "gradients" not in broken:
        return "the optimizer, sharded, does not do to these gradients what it does unsharded"
    if what == "model state":
        return "the model's state (batch statistics) is computed on a part of the batch"
    name = "gradient norm" if what == "gradient norm" and "gradients" not in broken else "gradients"
    scale = evidence.ratios.get(name, float("nan"))
    if evidence.holds_alone and evidence.accumulation > 1:
        number = evidence.accumulation
        if _is(scale, number, power=1):
            return f"scaled by {scale:.3g}: a scale is applied to each of the {number} microbatches, not once"
        return "microbatches are not added up as one device does"
    for axis, size in evidence.sizes.items():
        if size > 1 and _is(scale, size, power=1):
            return f"scaled by {scale:.3g}: the number of {_plural(axis)} ({size}) is multiplied in or divided by"
        if size > 1 and name == "gradient norm" and _is(scale, size, power=0.5):
            return f"scaled by {scale:.3g}, the root of {size}: the norm counts each of the {_plural(axis)} once"
    return (
        "unknown: the loss means something else on several devices; please report it with the model"
    )


def _of_local_batch(evidence: Evidence) -> str:
    random, draws = evidence.drawn
    if random:
        return (
            "dropout or other random layers: with local_batch each device draws its own numbers, so no unsharded run "
            "is comparable; certify local_batch with them off"
        )
    size = evidence.sizes["devices"]
    if _is(evidence.ratios.get("total", float("nan")), size, power=1):
        return (
            "a mean where a sum is expected, or a number that depends on the rows of the batch: each device has "
            f"1/{size} of them; return the sum over examples and their count"
        )
    if draws:
        return "random numbers from a constant key: every device draws the same ones"
    if evidence.one_row and evidence.holds_local:
        return (
            "one row on each device is treated in another way than several (squeeze, `if rows > 1`)"
        )
    return (
        "the loss is not a sum over examples: rows are compared, a statistic over the batch is taken, or a term "
        "stands beside the sum, which every device adds"
    )


def _is(scale: float, number: int, *, power: float) -> bool:
    """Whether a scale is about `number ** power`, or one over it."""
    target = float(number) ** power
    return abs(scale / target - 1) < NEAR or abs(scale * target - 1) < NEAR


def _plural(axis: str) -> str:
    return axis if axis == "devices" else f"devices along '{axis}'"
