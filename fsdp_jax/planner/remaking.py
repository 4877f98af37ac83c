"""How a step is made with other settings, of a configuration or of calls in Python."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fsdp_jax.errors import SlowerWarning
from fsdp_jax.planner.estimates import Work
from fsdp_jax.planner.settings import MakeStep, StepSettings
from fsdp_jax.sharding.mesh import mesh_like, shards_of
from fsdp_jax.sharding.rules import ReplicationWarning
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.tree import PyTree

_OF_FULLY_SHARD = ("strategy", "remat", "prefetch", "offload", "keep_gathered")


@dataclass(frozen=True)
class Remaking:
    """How a step is made with other settings.

    Attributes:
        settings: of the step as it is.
        make_step: makes it with others, on given devices.
        describe: formats what differs between settings (new, old); default: command-line flags.
        work: what a step computes.

    """

    settings: StepSettings
    make_step: MakeStep
    describe: Callable[[StepSettings, StepSettings], str] = lambda new, old: " ".join(
        new.flags(since=old)
    )
    work: Work = field(default_factory=Work)


def remaking_of_step(
    sharded: Any, loss_fn: Any, arguments: Mapping[str, Any], batch: PyTree
) -> Remaking:
    """Tells how a step that was made in Python is made with other settings.

    The first three are `CompiledStep.origin`.

    `batch`: shapes [global rows, ...].
    """
    given, axes = sharded.arguments, sharded.layout.axes
    strategy = sharded.layout.strategy
    settings = StepSettings(
        strategy.name,
        shards_of(axes.mesh, axes.replica) if strategy.hybrid else 1,
        given.remat,
        given.prefetch,
        arguments["accumulation"],
        offload=given.offload,
        keep_gathered=given.keep_gathered,
    )

    def make_step(changed: StepSettings, devices: Sequence[Any]) -> tuple[CompiledStep, PyTree]:
        mesh = mesh_like(axes, devices, changed.replica or 1)
        others = {
            name: other if isinstance(other, str) else other.on(mesh)
            for name, other in (arguments["others"] or {}).items()
        }
        values = {name: getattr(changed, name) for name in _OF_FULLY_SHARD}
        if changed.strategy == strategy.name:
            values["strategy"] = given.strategy  # a table of the user's own has no name
        with warnings.catch_warnings():
            # the user was warned of this model already
            warnings.simplefilter("ignore", SlowerWarning)
            warnings.simplefilter("ignore", ReplicationWarning)
            step = sharded.on(mesh, **values).make_train_step(
                loss_fn,
                **{**arguments, "accumulation": changed.accumulation, "others": others},
            )
        return step, batch

    return Remaking(settings, make_step, describe=_as_arguments)


def _as_arguments(new: StepSettings, old: StepSettings) -> str:
    """Formats what differs between settings as arguments in Python: `remat='full'`."""
    return ", ".join(
        f"{field.name}={getattr(new, field.name)!r}"
        for field in fields(StepSettings)
        if getattr(new, field.name) != getattr(old, field.name)
    )
