"""Units one after another, each gathered while the one before it computes.

The note in `rewrite` says what is moved where.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from fsdp_jax.prefetch.vjp import (
    Arrays,
    GatherInputs,
    Layer,
    LayerVjp,
    after,
    after_floats,
    gather_all,
    input_cotangents,
    is_float,
    reduce_gradients,
    run_layer,
    without_float0,
    zeros,
)
from fsdp_jax.units.collectives import ParamComm


@dataclass(frozen=True)
class Stage:
    """One unit of a chain.

    Values that pass between units are numbered: `ins` are those that it reads, `outs` those that it
    returns.
    """

    layer: Layer
    ins: Sequence[int]
    outs: Sequence[int]


@dataclass(frozen=True)
class UnitChain:
    """Units one after another, each a program of its own.

    Attributes:
        stages: the units in their order.
        comms: path -> how that parameter is communicated.
        results: numbers of the values that the chain returns.
        pre: see the note in `rewrite`.

    """

    stages: Sequence[Stage]
    comms: Mapping[str, ParamComm]
    results: Sequence[int]
    pre: bool

    def run(self, inputs: list[GatherInputs], external: dict[int, Any]) -> list[Any]:
        """Returns the results.

        Args:
            inputs: what the gathers of each stage read.
            external: number -> value that some stage reads and no stage returns.

        """
        vjps: list[LayerVjp] = []

        @jax.custom_vjp
        def run(inputs: list[GatherInputs], external: dict[int, Any]) -> list[Any]:
            return self._forward(inputs, external, [])[0]

        def forward(inputs: list[GatherInputs], external: dict[int, Any]) -> Any:
            vjps.clear()  # inside a scan of the user's this is traced more than once
            results, gathered = self._forward(inputs, external, vjps)
            return results, (inputs, external, gathered, [vjp.residuals for vjp in vjps])

        def backward(saved: Any, cotangents: list[Any]) -> Any:
            return self._backward(vjps, saved, without_float0(cotangents))

        run.defvjp(forward, backward)
        return run(inputs, external)

    def _forward(
        self, inputs: list[GatherInputs], external: dict[int, Any], vjps: list[LayerVjp]
    ) -> tuple[list[Any], Arrays]:
        """Returns (the results, with `pre` the last stage's parameters); appends to `vjps`."""
        env = dict(external)
        gathered: Arrays = {}
        following = gather_all(self.comms, inputs[0].shards) if self.pre else {}
        for number, stage in enumerate(self.stages):
            arguments = [env[i] for i in stage.ins]
            if self.pre:
                gathered = following
                if number + 1 < len(self.stages):
                    shards, arguments = after_floats(inputs[number + 1].shards, arguments)
                    following = gather_all(self.comms, shards)
            else:
                shards, arguments = after_floats(inputs[number].shards, arguments)
                gathered = gather_all(self.comms, shards)
            outputs, vjp = run_layer(stage.layer, gathered, [], arguments)
            vjps.append(vjp)
            env.update(zip(stage.outs, outputs, strict=True))
        return [env[i] for i in self.results], gathered if self.pre else {}

    def _backward(self, vjps: list[LayerVjp], saved: Any, cotangents: list[Any]) -> Any:
        """Returns the cotangents of the two arguments of `run`; None for non-floats."""
        inputs, external, last_gathered, residuals = saved
        last = len(self.stages) - 1
        returned = {
            i: x
            for stage, vjp in zip(self.stages, vjps, strict=True)
            for i, x in zip(stage.outs, vjp.outputs, strict=True)
        }
        # Sums of the cotangents of each value so far, by its number.
        sums = dict(
            zip([i for i in self.results if is_float(returned[i])], cotangents, strict=True)
        )
        reduced: list[Arrays] = [{} for _ in inputs]
        gradients: Arrays = {}  # with `pre`, of the stage before, reduced while this one computes
        previous = last_gathered if self.pre else gather_all(self.comms, inputs[last].shards)
        for number in range(last, -1, -1):
            stage = self.stages[number]
            gathered = previous
            float_outs = [i for i in stage.outs if is_float(returned[i])]
            to_outputs = [sums.pop(i) if i in sums else zeros(returned[i]) for i in float_outs]
            if self.pre and number:
                shards, to_outputs = after(inputs[number - 1].shards, to_outputs)
                previous = gather_all(self.comms, shards)
            if self.pre and number < last:
                reduced[number + 1] = self._reduce(inputs[number + 1], gradients)
            gradients, to_inputs = vjps[number].pull_back(
                residuals[number], gathered, [], to_outputs
            )
            for i, x in zip(stage.ins, to_inputs, strict=True):
                if x.dtype != jax.dtypes.float0:
                    sums[i] = sums[i] + x if i in sums else x
            if not self.pre:
                reduced[number] = self._reduce(inputs[number], gradients)
            if not self.pre and number:
                summed = [i for i in stage.ins if i in sums]
                shards, to_ins = after(inputs[number - 1].shards, [sums[i] for i in summed])
                sums |= dict(zip(summed, to_ins, strict=True))
                previous = gather_all(self.comms, shards)
        if self.pre:
            reduced[0] = self._reduce(inputs[0], gradients)
        to_external = {
            i: sums.get(i, zeros(x)) if is_float(x) else None for i, x in external.items()
        }
        return [input_cotangents(*each) for each in zip(inputs, reduced, strict=True)], to_external

    def _reduce(self, inputs: GatherInputs, gradients: Arrays) -> Arrays:
        return reduce_gradients(self.comms, inputs.slots, gradients)
