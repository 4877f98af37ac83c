"""A step compiled once: its signature is checked at every call, its batch placed, its bad steps
counted.

The same `lower` serves training, inspection and planning, so what is shown is what runs.
"""

import functools
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype  # NumPy's float64 arrives as float32
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax.errors import message
from fsdp_jax.processes import from_processes
from fsdp_jax.sharding.mesh import batch_axes, batch_shards
from fsdp_jax.step.device_varying import check_local_program
from fsdp_jax.step.state import TrainState
from fsdp_jax.step.train_step import StepPlan
from fsdp_jax.step.xla_options import compile_overlapped, warn_of_left, warn_of_repeats
from fsdp_jax.tree import PyTree, flatten

# Steps that may be in flight before a counter is read: every process reads the same one, and none
# waits for the device.
_LAG = 2
_ARRAYS = (np.ndarray, jax.Array, jax.ShapeDtypeStruct)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GlobalBatch:
    """A batch on the devices: leaves [rows, ...], or cut into microbatches, [accumulation,
    microbatch, ...].
    """

    leaves: PyTree
    accumulation: int = field(metadata={"static": True})


class NonFiniteError(FloatingPointError):
    """Too many steps in a row had a loss or gradient that was not finite; none of them was applied."""


class CompiledStep:
    """A compiled step. Call it as `state, metrics = step(state, batch)`.

    `batch` is a tree of arrays [rows, ...]: this process's rows of the global batch, or global
    arrays over the devices of all processes. Or it is what `put` made of one, to overlap the
    transfer with the step before.

    Attributes:
        plan: what the step is made from.

    """

    def __init__(
        self,
        fn: Callable[..., Any],
        plan: StepPlan,
        state: TrainState,
        outputs: PyTree,
        *,
        donate: bool,
        abort_after: int | None,
    ) -> None:
        self.plan = plan
        mesh = self._mesh = plan.layout.mesh
        self._state, self._accumulation, self._abort_after = state, plan.accumulation, abort_after
        self._rows = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
        cut = self._accumulation > 1
        self.batch_sharding = (
            NamedSharding(mesh, PartitionSpec(None, batch_axes(mesh))) if cut else self._rows
        )
        self._processes = len({device.process_index for device in mesh.devices.flat})
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)

        def run(state: TrainState, batch: GlobalBatch) -> Any:
            return fn(
                plan, state, batch.leaves if cut else jax.tree.map(lambda x: x[None], batch.leaves)
            )

        self._jitted = jax.jit(
            run,
            in_shardings=(shardings, self.batch_sharding),
            out_shardings=outputs,
            donate_argnums=(0,) if donate else (),
        )
        self._cut_placed = jax.jit(
            lambda leaves: [self._cut(leaf) for leaf in leaves], out_shardings=self.batch_sharding
        )
        self._first: np.ndarray | None = (
            None  # of this process's first batch: its rows and a hash of them
        )
        self._compiled: Any = None
        self._signature: dict[str, Any] = {}
        self._in_flight: deque[Any] = deque()

    def put(self, batch: PyTree) -> GlobalBatch:
        """Moves this process's rows to its devices and cuts them into microbatches.

        A `jax.Array` never passes through the host; one that lies as the step wants it is used as
        it is.

        Raises:
            ValueError: rows that do not divide by devices and accumulation, or that differ between
                leaves; leaves without rows, and random keys.

        """
        if not isinstance(batch, GlobalBatch):
            leaves, tree = jax.tree.flatten(batch)
            leaves = self._checked(
                leaves,
                batch,
                batch_shards(self._mesh) // self._processes,
                "devices of this process",
            )
            if self._first is None:
                self._first = self._summary(leaves)
            return GlobalBatch(jax.tree.unflatten(tree, self._placed(leaves)), self._accumulation)
        if batch.accumulation != self._accumulation:
            what, expected = (
                "the batch was cut for another step",
                f"{self._accumulation} microbatches",
            )
            fix = "put the batch with the step that takes it"
            raise ValueError(
                message(what, where="batch", expected=expected, got=batch.accumulation, fix=fix)
            )
        return batch

    def _placed(self, leaves: list[Any]) -> list[jax.Array]:
        """Each kind in one call: a call for each leaf takes several times as long."""
        own = [self._cut(leaf) for leaf in leaves if self._is_own(leaf)]
        if self._processes == 1:
            arrays = iter(jax.device_put(own, self.batch_sharding))
        else:
            arrays = iter(jax.make_array_from_process_local_data(self.batch_sharding, own))
        if len(own) == len(leaves):
            return list(arrays)
        placed = jax.device_put([leaf for leaf in leaves if not self._is_own(leaf)], self._rows)
        rest = iter(self._cut_placed(placed) if self._accumulation > 1 else placed)
        return [next(arrays if self._is_own(leaf) else rest) for leaf in leaves]

    def _is_own(self, leaf: Any) -> bool:
        """Whether a leaf has this process's rows alone, and not those of the global batch."""
        return isinstance(leaf, np.ndarray) or (self._processes > 1 and leaf.is_fully_addressable)

    def _cut(self, leaf: Any) -> Any:
        k = self._accumulation
        return leaf.reshape(k, -1, *leaf.shape[1:]) if k > 1 else leaf

    def _checked(self, leaves: list[Any], batch: PyTree, devices: int, which: str) -> list[Any]:
        """The leaves of a batch as arrays, once they have one number of rows that divides over
        these devices.
        """
        if not leaves:
            raise ValueError(
                message(
                    "the batch is empty", where="batch", expected="arrays [rows, ...]", got=batch
                )
            )
        leaves = [leaf if isinstance(leaf, _ARRAYS) else np.asarray(leaf) for leaf in leaves]
        for number, leaf in enumerate(leaves):
            if not leaf.ndim or not isinstance(leaf.dtype, np.dtype) or leaf.dtype.kind in "OSUmM":
                raise _refused(list(flatten(batch))[number], leaf)
        all_here = devices == batch_shards(self._mesh)
        share = devices / batch_shards(self._mesh)  # what this process has of a global array
        rows = [leaf.shape[0] * (1 if all_here or self._is_own(leaf) else share) for leaf in leaves]
        if len(set(rows)) != 1:
            got = {path: int(count) for path, count in zip(flatten(batch), rows, strict=True)}
            raise ValueError(
                message("leaves of the batch differ in their rows", where="batch", got=got)
            )
        found, parts = rows[0], devices * self._accumulation
        if found == 0 or found % parts:
            expected = (
                f"a multiple of {parts} rows: {devices} {which} x accumulation {self._accumulation}"
            )
            near = max(parts, int(found) // parts * parts)
            fix = f"use {near} or {near + parts} rows"
            raise ValueError(
                message(
                    "the batch does not divide",
                    where="batch",
                    expected=expected,
                    got=int(found),
                    fix=fix,
                )
            )
        return leaves

    def lower(self, batch: PyTree) -> Any:
        """Traces and lowers for a batch of arrays or shapes [global rows, ...]; nothing is
        allocated.
        """
        traced = self._jitted.trace(self._state, self._abstract(batch))
        if self.plan.local_batch:
            check_local_program(
                traced.jaxpr.jaxpr, list(flatten(self.plan.layout.other["model_state"]))
            )
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

        def placed(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.batch_sharding)

        if isinstance(batch, GlobalBatch):
            return GlobalBatch(
                jax.tree.map(lambda leaf: placed(leaf.shape, leaf.dtype), batch.leaves), k
            )
        leaves, tree = jax.tree.flatten(batch)
        found = [
            placed(
                (k, leaf.shape[0] // k, *leaf.shape[1:]) if k > 1 else leaf.shape,
                canonicalize_dtype(leaf.dtype),
            )
            for leaf in self._checked(leaves, batch, batch_shards(self._mesh), "devices")
        ]
        return GlobalBatch(jax.tree.unflatten(tree, found), k)

    def compile(self, batch: PyTree) -> Any:
        """The compiled program for a batch of arrays or shapes [global rows, ...], for whoever
        wants to read it.
        """
        return compile_overlapped(self.lower(batch), self.plan)

    def __call__(self, state: TrainState, batch: PyTree) -> Any:
        """Runs the step; compiles it at the first call.

        Raises:
            ValueError: a batch or state of another signature than the first call's; the leaf that
                changed is named.
            NonFiniteError: `abort_after` steps in a row were skipped; the state that was passed is
                still good.

        """
        placed = self.put(batch)
        self._check_signature(state, placed)
        if state.step.is_deleted():
            fix = "go on with the state that the step returned: state, metrics = step(state, batch)"
            raise ValueError(
                message("this state was donated to an earlier step", where="state", fix=fix)
            )
        if self._compiled is None:
            self._check_processes()
            self._compiled = self.compile(placed)
        # Before the step takes the state over: whoever catches the error still has it.
        while len(self._in_flight) >= _LAG:
            self._abort_if(int(self._in_flight.popleft()))
        out = self._compiled(state, placed)
        if self._abort_after is not None:
            self._in_flight.append(out[1]["skipped_in_a_row"])
        return out

    def _summary(self, leaves: list[Any]) -> np.ndarray:
        """uint32 [2]: this process's rows and a hash of them, not 0; zeros where it passed none of
        its own.
        """
        own = [leaf for leaf in leaves if self._is_own(leaf)] if self._processes > 1 else []
        digest = functools.reduce(
            lambda value, leaf: zlib.crc32(np.asarray(leaf).tobytes(), value), own, 0
        )
        return np.array([own[0].shape[0], max(digest, 1)] if own else [0, 0], np.uint32)

    def _check_processes(self) -> None:
        """Before the first collective of a step: it would not end, or every row would count several
        times.
        """
        if self._processes == 1 or self._processes != jax.process_count():
            return
        rows, hashes = from_processes(
            np.zeros(2, np.uint32) if self._first is None else self._first
        ).T
        if len(set(rows)) > 1:
            what, expected = (
                "the processes passed different numbers of rows",
                "as many in each process",
            )
            got = ", ".join(f"{count} in process {number}" for number, count in enumerate(rows))
            fix = "pad with rows that the loss leaves out, or drop the last partial batch"
            raise ValueError(message(what, where="batch", expected=expected, got=got, fix=fix))
        if len(set(hashes)) == 1 and hashes[0]:
            what, expected = (
                "all processes passed the same rows",
                "of the global batch, each process its own rows",
            )
            fix = "rows[jax.process_index() :: jax.process_count()], or global arrays over the devices of all processes"
            raise ValueError(message(what, where="batch", expected=expected, fix=fix))

    def _check_signature(self, state: TrainState, batch: GlobalBatch) -> None:
        got = {
            f"batch/{path}": (leaf.shape, leaf.dtype)
            for path, leaf in flatten(batch.leaves).items()
        }
        if self._compiled is None:
            self._signature = got
            expected = {
                path: (leaf.shape, leaf.dtype) for path, leaf in flatten(self._state).items()
            }
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
            fix = "lower the learning rate, look at the data, or clip; the parameters are those before the first of them"
            raise NonFiniteError(
                message(
                    f"{in_a_row} steps in a row were not finite and not applied",
                    where="step",
                    fix=fix,
                )
            )


def _refused(path: str, leaf: Any) -> ValueError:
    """Of a leaf that has no rows or no numbers."""
    where, got = "/".join(filter(None, ("batch", path))), f"{leaf.dtype}{list(leaf.shape)}"
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        what, fix = (
            "a random key in the batch",
            "leave it out: dropout draws from the model's own streams, a new key each step",
        )
    elif leaf.ndim:
        what, fix = "not an array of numbers in the batch", "leave it out, or encode it as numbers"
    else:
        what, fix = "a scalar in the batch", "repeat it for each row: numpy.full(rows, value)"
    return ValueError(message(what, where=where, expected="numbers, [rows, ...]", got=got, fix=fix))


def _show(signature: Any) -> str:
    return "nothing" if signature is None else f"{signature[1]}{list(signature[0])}"
