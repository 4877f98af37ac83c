"""A step compiled once: its signature is checked at every call, its batch placed, its bad steps counted.

The same `lower` serves training, inspection and planning, so what is shown is what runs.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax.errors import message
from fsdp_jax.mesh import batch_axes
from fsdp_jax.overlap import compile_overlapped, warn_of_left, warn_of_repeats
from fsdp_jax.state import TrainState
from fsdp_jax.step import StepPlan
from fsdp_jax.tree import PyTree, flatten
from fsdp_jax.varying import check_local_program

# Steps that may be in flight before a counter is read: every process reads the same one, and none waits for the device.
_LAG = 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GlobalBatch:
    """A batch on the devices, cut into microbatches: leaves [accumulation, microbatch, ...]."""

    leaves: PyTree
    accumulation: int = field(metadata={"static": True})


class NonFiniteError(FloatingPointError):
    """Too many steps in a row had a loss or gradient that was not finite; none of them was applied."""


class Step:
    """A compiled step. Call it as `state, metrics = step(state, batch)`.

    `batch` is a tree of NumPy or JAX arrays [rows, ...], this process's rows of the global batch; or what `put` made
    of one, to overlap the transfer with the step before.

    Attributes:
        plan: what the step is made from.

    """

    def __init__(
        self, fn: Callable[..., Any], plan: StepPlan, state: TrainState, outputs: PyTree, *, donate: bool,
        abort_after: int | None,
    ) -> None:  # fmt: skip
        self.plan = plan
        mesh = self._mesh = plan.layout.mesh
        self._state, self._accumulation, self._abort_after = state, plan.accumulation, abort_after
        self.batch_sharding = NamedSharding(mesh, PartitionSpec(None, batch_axes(mesh)))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)

        self._jitted = jax.jit(
            lambda state, batch: fn(plan, state, batch.leaves),
            in_shardings=(shardings, self.batch_sharding),
            out_shardings=outputs,
            donate_argnums=(0,) if donate else (),
        )
        self._compiled: Any = None
        self._signature: dict[str, Any] = {}
        self._in_flight: deque[Any] = deque()

    def put(self, batch: PyTree) -> GlobalBatch:
        """Moves this process's rows to its devices and cuts them into microbatches.

        Raises:
            ValueError: rows that do not divide by devices and accumulation, or that differ between leaves.

        """
        if not isinstance(batch, GlobalBatch):
            self._check_rows(batch)
            return GlobalBatch(jax.tree.map(self._put_leaf, batch), self._accumulation)
        if batch.accumulation != self._accumulation:
            what, expected = "the batch was cut for another step", f"{self._accumulation} microbatches"
            fix = "put the batch with the step that takes it"
            raise ValueError(message(what, where="batch", expected=expected, got=batch.accumulation, fix=fix))
        return batch

    def _put_leaf(self, leaf: Any) -> jax.Array:
        rows = np.asarray(leaf)
        local = rows.reshape(self._accumulation, -1, *rows.shape[1:])
        return jax.make_array_from_process_local_data(self.batch_sharding, local)

    def _check_rows(self, batch: PyTree) -> None:
        processes = len({device.process_index for device in self._mesh.devices.flat})
        devices = self._mesh.size // processes
        rows = {path: (np.shape(leaf)[0] if np.ndim(leaf) else None) for path, leaf in flatten(batch).items()}
        if len(set(rows.values())) != 1:
            raise ValueError(message("leaves of the batch differ in their rows", where="batch", got=rows))
        parts = devices * self._accumulation
        (found,) = set(rows.values())
        if found is None or found == 0 or found % parts:
            what = "the batch does not divide"
            expected = (
                f"a multiple of {parts} rows: {devices} devices of this process x accumulation {self._accumulation}"
            )
            near = max(parts, (found or 0) // parts * parts)
            raise ValueError(
                message(what, where="batch", expected=expected, got=found, fix=f"use {near} or {near + parts} rows")
            )

    def lower(self, batch: PyTree) -> Any:
        """Traces and lowers for a batch of arrays or shapes [global rows, ...]; nothing is allocated."""
        traced = self._jitted.trace(self._state, self._abstract(batch))
        if self.plan.local_batch:
            check_local_program(traced.jaxpr.jaxpr, list(flatten(self.plan.layout.other["model_state"])))
        warn_of_repeats(self.plan, traced.jaxpr.jaxpr)
        lowered = traced.lower()
        warn_of_left(self.plan)
        return lowered

    def trace(self, batch: PyTree) -> Any:
        """The traced program, a `ClosedJaxpr`; of the mesh's devices only the names are asked."""
        return self._jitted.trace(self._state, self._abstract(batch)).jaxpr

    def _abstract(self, batch: PyTree) -> GlobalBatch:
        """The batch's shapes as they are placed."""
        k = self._accumulation

        def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
            if not leaf.shape or leaf.shape[0] % (self._mesh.size * k):
                expected = f"a multiple of {self._mesh.size * k} rows: {self._mesh.size} devices x accumulation {k}"
                raise ValueError(message("the batch does not divide", where="batch", expected=expected, got=leaf.shape))
            shape = (k, leaf.shape[0] // k, *leaf.shape[1:])
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)  # NumPy's float64 arrives as float32
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.batch_sharding)

        def placed(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.batch_sharding)

        if isinstance(batch, GlobalBatch):
            return GlobalBatch(jax.tree.map(placed, batch.leaves), k)
        return GlobalBatch(jax.tree.map(abstract, batch), k)

    def compile(self, batch: PyTree) -> Any:
        """The compiled program for a batch of arrays or shapes [global rows, ...], for whoever wants to read it."""
        return compile_overlapped(self.lower(batch), self.plan)

    def __call__(self, state: TrainState, batch: PyTree) -> Any:
        """Runs the step; compiles it at the first call.

        Raises:
            ValueError: a batch or state of another signature than the first call's; the leaf that changed is named.
            NonFiniteError: `abort_after` steps in a row were skipped; the state that was passed is still good.

        """
        placed = self.put(batch)
        self._check_signature(state, placed)
        if state.step.is_deleted():
            fix = "go on with the state that the step returned: state, metrics = step(state, batch)"
            raise ValueError(
                message("this state was given to a step before, which took it over", where="state", fix=fix)
            )
        if self._compiled is None:
            self._compiled = self.compile(placed)
        # Before the step takes the state over: whoever catches the error still has it.
        while len(self._in_flight) >= _LAG:
            self._abort_if(int(self._in_flight.popleft()))
        out = self._compiled(state, placed)
        if self._abort_after is not None:
            self._in_flight.append(out[1]["skipped_in_a_row"])
        return out

    def _check_signature(self, state: TrainState, batch: GlobalBatch) -> None:
        got = {f"batch/{path}": (leaf.shape, leaf.dtype) for path, leaf in flatten(batch.leaves).items()}
        if self._compiled is None:
            self._signature = got
            expected = {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(self._state).items()}
            got = {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(state).items()}
        else:
            expected = self._signature
        for path in sorted({*expected, *got}):
            if expected.get(path) != got.get(path):
                fix = "pad to one shape, drop the last partial batch, or make a second step for the other shape"
                if not path.startswith("batch/"):
                    fix = "pass a state of the same model and optimizer"
                raise ValueError(
                    message(
                        "the step was compiled for another signature",
                        where=path,
                        expected=_show(expected.get(path)),
                        got=_show(got.get(path)),
                        fix=fix,
                    )
                )

    def finish(self) -> None:
        """Reads the counters still in flight; call it after the last step."""
        while self._in_flight:
            self._abort_if(int(self._in_flight.popleft()))

    def _abort_if(self, in_a_row: int) -> None:
        if self._abort_after is not None and in_a_row >= self._abort_after:
            self._in_flight.clear()
            fix = (
                "lower the learning rate, look at the data, or clip; the parameters are those before the first of them"
            )
            raise NonFiniteError(
                message(f"{in_a_row} steps in a row were not finite and not applied", where="step", fix=fix)
            )


def _show(signature: Any) -> str:
    return "nothing" if signature is None else f"{signature[1]}{list(signature[0])}"
