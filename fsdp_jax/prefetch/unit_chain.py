"""Units one after another, each gathered while the one before it computes; see the note in
`prefetch`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from fsdp_jax.prefetch.vjp import (
    Arrays,
    Layer,
    Saved,
    after,
    after_floats,
    fetch_all,
    is_float,
    land,
    run_layer,
    to_shards,
    typeful,
    zeros,
)
from fsdp_jax.units.collectives import ParamComm


@dataclass(frozen=True)
class Stage:
    """One unit of a chain. Values that go between units are known by number: `ins` it takes, `outs`
    it makes.
    """

    layer: Layer
    ins: Sequence[int]
    outs: Sequence[int]


@dataclass(frozen=True)
class UnitChain:
    """Units one after another, each a program of its own.

    Attributes:
        stages: in their order.
        comms: path -> how a parameter travels.
        wanted: numbers of the values that the chain is run for.
        pre: see the note on prefetch.

    """

    stages: Sequence[Stage]
    comms: Mapping[str, ParamComm]
    wanted: Sequence[int]
    pre: bool

    def run(
        self, values: list[Arrays], pending: list[Arrays], external: dict[int, Any]
    ) -> list[Any]:
        """The wanted values.

        Args:
            values: of each stage, path -> shard at rest.
            pending: of each stage, path -> zeros whose cotangent is the gradient before its
                reduction.
            external: what the stages take that no stage makes, by number.

        """
        saved: list[Saved] = []

        @jax.custom_vjp
        def run(values: list[Arrays], pending: list[Arrays], external: dict[int, Any]) -> list[Any]:
            return self._forward(values, external, [])[0]

        def forward(values: list[Arrays], pending: list[Arrays], external: dict[int, Any]) -> Any:
            saved.clear()  # inside a scan of the user's this is traced more than once
            out, ready = self._forward(values, external, saved)
            return out, (values, pending, external, ready, [each.kept for each in saved])

        run.defvjp(
            forward, lambda residual, cotangent: self._backward(saved, residual, typeful(cotangent))
        )
        return run(values, pending, external)

    def _forward(
        self, values: list[Arrays], external: dict[int, Any], saved: list[Saved]
    ) -> tuple[list[Any], Arrays]:
        """(the wanted values, the parameters of the last stage where they wait for the backward)."""
        env = dict(external)
        coming = fetch_all(self.comms, values[0]) if self.pre else {}
        for number, stage in enumerate(self.stages):
            inputs = [env[i] for i in stage.ins]
            ready, following = coming, number + 1 if self.pre else number
            if following < len(self.stages):
                shards, inputs = after_floats(values[following], inputs)
                coming = fetch_all(self.comms, shards)
            out, kept = run_layer(stage.layer, ready if self.pre else coming, [], inputs)
            saved.append(kept)
            env.update(zip(stage.outs, out, strict=True))
        return [env[i] for i in self.wanted], coming if self.pre else {}

    def _backward(self, saved: list[Saved], residual: Any, cotangent: list[Any]) -> Any:
        values, pending, external, ready, kept = residual
        last = len(self.stages) - 1
        made = {
            i: x
            for stage, each in zip(self.stages, saved, strict=True)
            for i, x in zip(stage.outs, each.outputs, strict=True)
        }
        sums = dict(zip([i for i in self.wanted if is_float(made[i])], cotangent, strict=True))
        found: list[Arrays] = [{} for _ in values]
        waiting: Arrays = {}
        coming = ready if self.pre else fetch_all(self.comms, values[last])
        for number in range(last, -1, -1):
            stage, ready = self.stages[number], coming
            floats = [i for i in stage.outs if is_float(made[i])]
            outputs = [sums.pop(i) if i in sums else zeros(made[i]) for i in floats]
            if self.pre and number:
                shards, outputs = after(values[number - 1], outputs)
                coming = fetch_all(self.comms, shards)
            if number < last:
                found[number + 1] |= land(self.comms, pending[number + 1], waiting)
            grads, inputs = saved[number].pull(kept[number], ready, [], outputs)
            for i, x in zip(stage.ins, inputs, strict=True):
                if x.dtype != jax.dtypes.float0:
                    sums[i] = sums[i] + x if i in sums else x
            waiting = grads if self.pre else {}
            found[number] = {} if self.pre else land(self.comms, pending[number], grads)
            if not self.pre and number:
                shards, inputs = after(
                    values[number - 1], [sums[i] for i in stage.ins if i in sums]
                )
                sums |= dict(zip([i for i in stage.ins if i in sums], inputs, strict=True))
                coming = fetch_all(self.comms, shards)
        found[0] |= land(self.comms, pending[0], waiting)
        cotangents = [to_shards(*each) for each in zip(values, pending, found, strict=True)]
        to_external = {
            i: sums.get(i, zeros(x)) if is_float(x) else None for i, x in external.items()
        }
        return [each[0] for each in cotangents], [each[1] for each in cotangents], to_external
