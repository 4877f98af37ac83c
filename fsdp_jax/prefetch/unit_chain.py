"""Units one after another, each gathered while the previous one computes.

The note in `rewrite` explains which operations move where.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from fsdp_jax.host_memory import is_on_host, to_host
from fsdp_jax.prefetch.vjp import (
    Arrays,
    Layer,
    LayerVjp,
    Operands,
    gather_after,
    gather_all,
    kept_of,
    only_shards,
    operand_cotangents,
    reduce_gradients,
    run_layer,
    without_float0,
    zero_cotangent,
)
from fsdp_jax.units.comm import ParamComm


@dataclass(frozen=True)
class Stage:
    """One unit of a chain, and the operands of its gathers.

    Values that pass between units are numbered: `ins` are those that it reads, `outs` those that it
    returns.
    """

    layer: Layer
    operands: Operands
    ins: Sequence[int]
    outs: Sequence[int]


@dataclass(frozen=True)
class UnitChain:
    """Units one after another that gather ahead, in forward and backward."""

    stages: Sequence[Stage]  # in their order
    comms: Mapping[str, ParamComm]
    results: Sequence[int]  # numbers of the values that the chain returns
    pre: bool  # see the note in `rewrite`
    keep_last: bool  # with `pre`, the last stage's gathered parameters, for the backward pass

    def run(self, external: dict[int, Any]) -> list[Any]:
        """Computes the values numbered `results`; their VJP is the pipeline's backward pass.

        `external`: {number: value} of values that some stage reads and none returns.
        """
        vjps: list[LayerVjp] = []

        @jax.custom_vjp
        def run(inputs: list[Operands], external: dict[int, Any]) -> list[Any]:
            return self._run_forward(inputs, external, [])[0]

        def forward(inputs: list[Operands], external: dict[int, Any]) -> Any:
            vjps.clear()  # inside a scan of the user's this is traced more than once
            results, kept, residuals = self._run_forward(inputs, external, vjps)
            return results, (inputs, external, kept, residuals)

        def backward(saved: Any, cotangents: list[Any]) -> Any:
            return self._run_backward(vjps, without_float0(cotangents), *saved)

        run.defvjp(forward, backward)
        return run([stage.operands for stage in self.stages], external)

    def _run_forward(
        self, inputs: list[Operands], external: dict[int, Any], vjps: list[LayerVjp]
    ) -> tuple[list[Any], list[Arrays], list[list[Any]]]:
        """Runs the stages. Returns (the results, parameters that stay gathered, residuals).

        The last two are lists of each stage's, as is `inputs`, of operands. Appends to `vjps`.
        """
        env = dict(external)
        kept: list[Arrays] = []
        residuals: list[list[Any]] = []
        shards = [only_shards(operands) for operands in inputs]
        following = gather_all(self.comms, shards[0]) if self.pre else {}
        gathered: Arrays = {}
        for number, stage in enumerate(self.stages):
            arguments = [env[i] for i in stage.ins]
            if self.pre:
                gathered = following
                if number + 1 < len(self.stages):
                    following, arguments = gather_after(self.comms, shards[number + 1], arguments)
            else:
                gathered, arguments = gather_after(self.comms, shards[number], arguments)
            outputs, own, vjp = run_layer(stage.layer, gathered, [], arguments)
            vjps.append(vjp)
            residuals.append(own)
            kept.append(kept_of(self.comms, gathered))
            env.update(zip(stage.outs, outputs, strict=True))
        if self.keep_last:
            kept[-1] = gathered
        return [env[i] for i in self.results], kept, residuals

    def _run_backward(
        self,
        vjps: list[LayerVjp],
        cotangents: list[Any],
        inputs: list[Operands],
        external: dict[int, Any],
        kept: list[Arrays],
        residuals: list[list[Any]],
    ) -> Any:
        """Computes the cotangents of (`inputs`, `external`), given those of the results.

        `kept`, `residuals`: of each stage, kept by the forward pass.
        """
        last = len(self.stages) - 1
        # What stays gathered is not gathered again.
        shards = [
            {path: x for path, x in only_shards(operands).items() if path not in own}
            for operands, own in zip(inputs, kept, strict=True)
        ]
        # Sums of the cotangents of each value so far, by its number.
        sums = {i: x for i, x in zip(self.results, cotangents, strict=True) if x is not None}
        reduced: list[Arrays] = [{} for _ in inputs]
        gradients: Arrays = {}  # with `pre`, of the stage before, reduced while this one computes
        previous = gather_all(self.comms, shards[last])
        for number in range(last, -1, -1):
            # Cotangents of the outputs: complete, because all stages that read the outputs are
            # done.
            stage, vjp, gathered = self.stages[number], vjps[number], previous | kept[number]
            to_outputs = [
                sums.pop(i) if i in sums else zero_cotangent(output)
                for i, output in zip(stage.outs, vjp.outputs, strict=True)
            ]
            # With `pre`, gather the stage before and reduce the gradients of the stage after while
            # this stage computes.
            if self.pre and number:
                previous, to_outputs = gather_after(self.comms, shards[number - 1], to_outputs)
            if self.pre and number < last:
                reduced[number + 1] = reduce_gradients(self.comms, inputs[number + 1], gradients)
            # Pull back through this stage, and add to the sums of the values that it read.
            gradients, to_inputs = vjp.pull_back(residuals[number], gathered, [], to_outputs)
            for i, x in zip(stage.ins, to_inputs, strict=True):
                if x is not None:
                    sums[i] = sums[i] + x if i in sums else x
            # Without `pre`, and in the first stage, reduce gradients once they are computed, then
            # gather the stage before.
            if not self.pre or not number:
                reduced[number] = reduce_gradients(self.comms, inputs[number], gradients)
            if not self.pre and number:
                summed = [i for i in stage.ins if i in sums]
                to_ins = [sums[i] for i in summed]
                previous, to_ins = gather_after(self.comms, shards[number - 1], to_ins)
                sums |= zip(summed, to_ins, strict=True)
        # jax makes these cotangents on the device, also for values in host memory.
        to_external = {
            i: to_host(sums[i]) if i in sums and is_on_host(jax.typeof(x)) else sums.get(i)
            for i, x in external.items()
        }
        return list(map(operand_cotangents, inputs, reduced)), to_external
