"""The plan of a step, and the report of its trace."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import optax

from fsdp_jax.errors import ArgumentError
from fsdp_jax.prefetch.rewrite import Prefetch, PrefetchReport
from fsdp_jax.sharding.layout import Layout, Leaf
from fsdp_jax.sharding.mesh import MeshAxes
from fsdp_jax.sharding.offload import NO_OFFLOAD, Offload, is_count
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.step.loss_spikes import LossSpikes
from fsdp_jax.step.streaming import StreamReport
from fsdp_jax.units.comm import ParamComm
from fsdp_jax.units.model import Boundary, LossFn, Model
from fsdp_jax.units.remat import SAVED, Activations


@dataclass(frozen=True, eq=False)
class StepPlan:
    """All settings and objects that a step is built from.

    Attributes:
        comms: path -> how that parameter is communicated.
        boundaries: module path -> what happens as a call enters and leaves it.
        loss_fn: `(model, batch) -> (sum, count, metrics)`, as `step.loss.as_loss` makes it; in
            a step that only evaluates, a function with any result.
        others: name -> another model, which `loss_fn` gets as a keyword argument.
        takes_key: whether `loss_fn` is called with a random key too.
        activations: how those of the whole model are kept, if it is the unit.
        accumulation: microbatches per step.
        deferred: whether gradients are reduced once, after the last microbatch.
        clip: largest global norm of the gradient; None does not clip.
        spikes: how spikes of the loss are detected; None does not.
        local_batch: each device runs the loss on its own rows, inside `shard_map` with explicit
            collectives; otherwise the loss sees the global batch, and XLA inserts the collectives.
        prefetch: how units are gathered ahead; never `auto`.
        prefetch_asked: whether the user asked for it: then gathers that stay cause a warning.
        strict: a matmul in a wider dtype than was asked for is an error.

    """

    model: Model
    layout: Layout
    precision: Precision
    tx: optax.GradientTransformation
    comms: dict[str, ParamComm]
    boundaries: dict[str, Boundary]
    loss_fn: LossFn
    others: "Mapping[str, OtherModel]" = field(default_factory=dict)
    takes_key: bool = False
    activations: Activations = SAVED
    accumulation: int = 1
    deferred: bool = False
    clip: float | None = None
    spikes: LossSpikes | None = None
    prefetch: Prefetch = "none"
    prefetch_asked: bool = True
    offload: Offload = NO_OFFLOAD
    local_batch: bool = False
    strict: bool = False

    @property
    def offloads(self) -> bool:
        """Whether any state or activations are kept in host memory, of other models too."""
        own = self.offload.state or bool(self.activations.offload)
        return own or any(other.plan.offloads for other in self.others.values())

    @property
    def per_unit(self) -> bool:
        """Whether parameters are gathered unit by unit, rather than once for the step."""
        return self.layout.strategy.gathers_per_unit

    def with_axes(self, axes: MeshAxes) -> "StepPlan":
        """Replaces the axes of the plan's layout; returns the plan itself if it has them."""
        if axes == self.layout.axes:
            return self
        # The others are on this mesh too, with data axes of their own.
        explicit = axes.explicit_axes
        others = {
            name: replace(
                other,
                plan=other.plan.with_axes(replace(other.plan.layout.axes, explicit_axes=explicit)),
            )
            for name, other in self.others.items()
        }
        return replace(self, layout=replace(self.layout, axes=axes), others=others)

    @property
    def chose_prefetch(self) -> bool:
        """Whether the plan prefetches units although the user did not ask for it."""
        return self.prefetch != "none" and not self.prefetch_asked

    def without_chosen_prefetch(self) -> "StepPlan":
        """Plans the step without the prefetch that the user did not ask for."""
        return replace(self, prefetch="none") if self.chose_prefetch else self

    def with_local_batch(self) -> "StepPlan":
        """Plans the step with explicit collectives on local batches; returns itself if it has them.

        Raises ValueError for settings that local batches do not support: sharded layers, the
        model's own mesh axes.
        """
        if self.local_batch or self.layout.axes.batch_shards == 1:
            return self
        check_local_batch(self.layout)
        comms = {path: replace(comm, mode="explicit") for path, comm in self.comms.items()}
        others = {
            name: replace(other, plan=other.plan.with_local_batch())
            for name, other in self.others.items()
        }
        return replace(self, local_batch=True, comms=comms, others=others)

    @property
    def trained(self) -> list[str]:
        """Paths of the parameters that are trained."""
        return [path for path, leaf in self.layout.by_path.items() if leaf.trainable]

    @cached_property
    def traced(self) -> dict[str, tuple[ParamComm, Leaf]]:
        """{path of a parameter in traces: how it is communicated, how it is stored}.

        In traces the paths of another model's begin with its name.
        """
        plans = [self, *(other.plan for other in self.others.values())]
        return {
            comm.path: (comm, plan.layout.by_path[path])
            for plan in plans
            for path, comm in plan.comms.items()
        }


@dataclass(frozen=True, eq=False)
class OtherModel:
    """Another model that the loss computes with; see `step.others`.

    Attributes:
        plan: its model, layout and communication.
        averages: it is the average of the step's own parameters, which the state holds; otherwise
            a state of its own is passed to each call.
        in_backward: whether its units are gathered in the backward pass too, because the loss is
            differentiated through it; known once the step is traced.

    """

    plan: StepPlan
    averages: bool = False
    in_backward: bool = False


class StepReport(NamedTuple):
    """Findings of the trace of a step; part of its results, without any arrays."""

    prefetch: PrefetchReport  # which gathers were moved ahead
    streaming: StreamReport  # how state in host memory is updated


NOTHING_MOVED = StepReport(PrefetchReport(), StreamReport())
"""The report of a step that does not train."""


def report_of(stage: Any) -> StepReport:
    """Reads the report in a traced or lowered step, whose results are (anything, report)."""
    _, report = stage.out_info
    assert isinstance(report, StepReport)
    return report


def check_train_step(
    layout: Layout,
    precision: Precision,
    *,
    accumulation: Any,
    deferred: Any,
    local_batch: Any,
    clip: Any,
    abort_after: Any,
) -> None:
    """Raises ValueError for arguments of `Sharded.make_train_step` that do not go together."""
    if not any(leaf.trainable for leaf in layout.by_path.values()):
        raise ArgumentError(
            "nothing is trained: every parameter is frozen",
            where="frozen",
            fix="patterns that match fewer: an empty one matches every path",
        )
    if not is_count(accumulation):
        what = "accumulation is a whole number, at least 1"
        raise ArgumentError(what, where="accumulation", got=repr(accumulation))
    if abort_after is not None and not is_count(abort_after):
        what = "abort_after is a whole number, at least 1, or None"
        raise ArgumentError(what, where="abort_after", got=repr(abort_after))
    is_number = isinstance(clip, int | float | np.number) and not isinstance(clip, bool)
    if clip is not None and not (is_number and clip > 0):
        raise ArgumentError("clip is above 0, or None", where="clip", got=repr(clip))
    if not isinstance(local_batch, bool):
        raise ArgumentError(
            "not a bool",
            where="local_batch",
            got=local_batch,
            fix="True if loss_fn is a sum over examples, or else False",
        )
    if not isinstance(deferred, bool):
        raise ArgumentError("not a bool", where="deferred_reduction", got=repr(deferred))
    if local_batch:
        check_local_batch(layout)
    else:
        _check_global_batch(precision, deferred)


def check_local_batch(layout: Layout) -> None:
    """Raises ValueError for settings that `local_batch=True` does not support.

    These are sharded layers and the model's own mesh axes.
    """
    for path, leaf in layout.by_path.items():
        if any(leaf.spec[: leaf.stacked]):
            raise ArgumentError(
                "a stack of layers is sharded along its layers",
                where=path,
                expected="a spec that leaves that dim unsharded",
                got=leaf.spec,
                fix="shard another dim, or leave local_batch out",
            )
    axes = layout.axes
    if axes.model_shards > 1:
        raise ArgumentError(
            "local_batch=True needs a mesh without axes of the model's own",
            where="local_batch",
            got=f"{list(axes.model)} beside data={list(axes.user_data)}",
            fix=(
                "leave local_batch out: XLA then inserts the collectives along all axes; or, if "
                "these axes shard state or batch, name them in data or replica"
            ),
        )


def _check_global_batch(precision: Precision, deferred: bool) -> None:
    """Raises ValueError for settings that need explicit collectives, and so local batches."""
    compute, reduce = precision.compute, precision.reduce
    reduces_otherwise = reduce is not None and reduce != compute
    precision_text = f"Precision(compute={compute!r}, reduce={reduce!r})"
    unsupported = [
        (deferred, "deferred_reduction=True", "leave deferred_reduction out"),
        (reduces_otherwise, precision_text, "reduce=None"),
        (precision.scatter is not None, "Precision(scatter='int8')", "scatter=None"),
    ]
    for requested, name, otherwise in unsupported:
        if requested:
            raise ArgumentError(
                f"{name} needs local_batch=True: on the global batch XLA places the collectives",
                where="make_train_step",
                fix=(
                    "make_train_step(loss_fn, local_batch=True) if loss_fn is a sum over examples "
                    f"(fsdp_jax.testing.certify checks it); otherwise {otherwise}"
                ),
            )
