"""The compiled training step.

It checks its signature at every call, places its batch and counts the steps that were skipped. The
same `lower` serves training, inspection and planning, so what is shown is what runs.
"""

import functools
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fsdp_jax.errors import message
from fsdp_jax.io.array_specs import is_prng_key
from fsdp_jax.processes import gather_from_processes
from fsdp_jax.sharding.mesh import as_ambient, replicated
from fsdp_jax.step.batch import BatchPlacement, GlobalBatch
from fsdp_jax.step.offload_canary import check_offload
from fsdp_jax.step.state import TrainState, state_like
from fsdp_jax.step.traced_checks import check_traced
from fsdp_jax.step.train_step import STATE_FINITE, StepPlan
from fsdp_jax.step.xla_options import compile_overlapped, offload_options
from fsdp_jax.tree import PyTree, flatten

# Steps that may be in flight before a counter is read: every process reads the same one, and none
# waits for the device.
_LAG = 2


class NonFiniteError(FloatingPointError):
    """Too many steps in a row were skipped, or the state itself is not finite any more."""


class CompiledStep:
    """A compiled step. Call it as `state, metrics = step(state, batch)`.

    `batch` is a tree of arrays [rows, ...]: this process's rows of the global batch, or global
    arrays over the devices of all processes. Or it is what `put` returned for one, to overlap the
    transfer with the step before.

    Attributes:
        plan: what the step is made from.
        batch_sharding: of each leaf of a placed batch.
        compiled: the compiled program; None before the first call.

    """

    def __init__(
        self,
        fn: Callable[..., Any],
        plan: StepPlan,
        *,
        trains: bool,
        abort_after: int | None = None,
    ) -> None:
        self.plan = plan
        self._trains, self._abort_after = trains, abort_after
        self._state = state_like(plan.layout, lambda leaf: leaf.abstract)
        self._placement = BatchPlacement(plan.layout.axes, plan.accumulation)
        self.batch_sharding = self._placement.sharding

        def run(state: TrainState, batch: GlobalBatch) -> Any:
            leaves = batch.leaves
            if plan.accumulation == 1:
                leaves = jax.tree.map(lambda x: x[None], leaves)
            return fn(plan, state, leaves)

        shardings = state_like(plan.layout, lambda leaf: leaf.sharding)
        results = replicated(plan.layout.mesh)
        self._jitted = jax.jit(
            run,
            in_shardings=(shardings, self.batch_sharding),
            out_shardings=(shardings, results) if trains else results,
            donate_argnums=(0,) if trains else (),
        )
        self._first_rows: np.ndarray | None = None  # `_rows_and_hash` of this process's first batch
        self.compiled: Any = None
        self._signature: dict[str, Any] = {}
        self._in_flight: deque[Any] = deque()

    def put(self, batch: PyTree) -> GlobalBatch:
        """Moves this process's rows to its devices and cuts them into microbatches.

        A `jax.Array` never passes through the host; one that is already sharded as the step needs
        it is used as it is.

        Raises:
            ValueError: a number of rows that is not divisible by devices x accumulation, or that
                differs between leaves; leaves without rows, and random keys; a batch put by
                another step.

        """
        placed = self._placement.place(batch)
        if self._first_rows is None and not isinstance(batch, GlobalBatch):
            self._first_rows = self._rows_and_hash(batch)
        return placed

    def lower(self, batch: PyTree) -> Any:
        """Lowers for a batch of arrays or shapes [global rows, ...]; allocates nothing."""
        with self.plan.layout.axes.ambient():
            traced = self._trace(batch)
            check_traced(self.plan, traced)
            return traced.lower()

    def trace(self, batch: PyTree) -> Any:
        """Returns the traced program, a `ClosedJaxpr`; the mesh's devices need not exist."""
        with self.plan.layout.axes.ambient():
            return self._trace(batch).jaxpr

    def microbatch(self, batch: PyTree) -> PyTree:
        """Returns the shapes of one microbatch of a batch, arrays or shapes [global rows, ...]."""
        cut = 1 if self.plan.accumulation > 1 else 0
        leaves = self._placement.abstract(batch).leaves
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[cut:], x.dtype), leaves)

    def _trace(self, batch: PyTree) -> Any:
        """Returns the traced step, a `jax.stages.Traced`."""
        return self._jitted.trace(self._state, self._placement.abstract(batch))

    def compile(self, batch: PyTree) -> Any:
        """Returns the compiled program for a batch of arrays or shapes [global rows, ...]."""
        return compile_overlapped(self.lower(batch), self.plan)

    def __call__(self, state: TrainState, batch: PyTree) -> Any:
        """Runs the step; compiles it at the first call.

        Raises:
            ValueError: no state; a batch or state of another signature than the first call's, or a
                state that is laid out otherwise; the leaf that differs is named.
            NonFiniteError: `abort_after` steps in a row were skipped; the state that was passed is
                still valid. Or state in host memory is not finite after an update.

        """
        _check_kind(state)
        placed = self.put(batch)
        self._check_signature(state, placed)
        if state.step.is_deleted():
            what = "this state was donated to an earlier step"
            fix = "use the state that the step returned: state, metrics = step(state, batch)"
            raise ValueError(message(what, where="state", fix=fix))
        if self.compiled is None:
            if self._trains:  # before it compiles; an eval step need not use all of the state
                self._check_shardings(state)
            self._check_rows_of_processes()
            if self.plan.offloads:
                platform = self.plan.layout.mesh.devices.flat[0].platform
                check_offload(platform, tuple(offload_options(self.plan).items()))
            self.compiled = self.compile(placed)
        # Before the state is donated: whoever catches the error still has it.
        while len(self._in_flight) >= _LAG:
            self._raise_if_diverged(*self._in_flight.popleft())
        try:
            out = self.compiled(state, placed)
        except ValueError as error:
            self._check_shardings(state, error)
            raise
        if not self._trains:
            return as_ambient(out)
        new, metrics = out
        self._in_flight.append((metrics["skipped_in_a_row"], metrics.get(STATE_FINITE)))
        return new, as_ambient(metrics)

    def finish(self) -> None:
        """Reads the counters still in flight; call it after the last step."""
        while self._in_flight:
            self._raise_if_diverged(*self._in_flight.popleft())

    def _raise_if_diverged(self, in_a_row: jax.Array, state_finite: jax.Array | None) -> None:
        """Raises NonFiniteError where a finished step ends the run.

        `in_a_row`: skipped steps; `state_finite`: whether state in host memory is, if there is any.
        """
        if state_finite is not None and not int(state_finite):
            self._in_flight.clear()
            what = "an update made the state that is kept in host memory infinite or NaN"
            fix = "resume from the last checkpoint, with a lower learning rate"
            raise NonFiniteError(message(what, where="step", fix=fix))
        if self._abort_after is None or int(in_a_row) < self._abort_after:
            return
        self._in_flight.clear()
        what = f"{int(in_a_row)} steps in a row were skipped: their loss, gradients or new state "
        what += "were not finite"
        if self.plan.spikes is not None and self.plan.spikes.skip:
            what += ", or the loss was a spike"
        what += "; the state is that before the first of them"
        fix = "lower the learning rate, look at the data, or clip; a count of 0 (metrics['count']) "
        fix += "makes the loss NaN"
        raise NonFiniteError(message(what, where="step", fix=fix))

    def _rows_and_hash(self, batch: PyTree) -> np.ndarray:
        """Returns uint32 [3]: this process's rows, a hash of their values, and of their places.

        The first hash is not 0. Zeros in a run of one process, and for global arrays only.
        """
        local: list[Any] = []
        if self._placement.processes > 1:
            leaves = jax.tree.leaves(batch)
            leaves = [x if isinstance(x, jax.Array) else np.asarray(x) for x in leaves]
            local = [x for x in leaves if self._placement.is_local(x)]
        if not local:
            return np.zeros(3, np.uint32)
        digest = functools.reduce(
            lambda value, leaf: zlib.crc32(np.asarray(leaf).tobytes(), value), local, 0
        )
        places = zlib.crc32(repr(self._placement.local_shards).encode())
        return np.array([local[0].shape[0], max(digest, 1), places], np.uint32)

    def _check_rows_of_processes(self) -> None:
        """Raises ValueError where processes passed different numbers of rows, or the wrong ones.

        Processes whose devices hold the same rows, along the model's own axes, must pass the same;
        all others must not. Before the first collective of a step, which would not end, or count
        every row several times.
        """
        processes = self._placement.processes
        if processes == 1 or processes != jax.process_count():
            return
        first = np.zeros(3, np.uint32) if self._first_rows is None else self._first_rows
        rows, hashes, places = gather_from_processes(first).T
        if len(set(rows)) > 1:
            what = "the processes passed different numbers of rows"
            expected = "as many in each process"
            got = ", ".join(f"{count} in process {number}" for number, count in enumerate(rows))
            fix = "pad with rows that the loss leaves out, or drop the last partial batch"
            raise ValueError(message(what, where="batch", expected=expected, got=got, fix=fix))
        by_place = set(zip(places.tolist(), hashes.tolist(), strict=True))
        if len(by_place) > len(set(places)):
            what = "processes that hold the same rows of the batch passed different ones"
            axes = list(self.plan.layout.axes.model)
            expected = f"the same rows in processes that differ along {axes} alone"
            fix = "put these axes inside a host, or read the same rows in these processes"
            raise ValueError(message(what, where="batch", expected=expected, fix=fix))
        if len(set(hashes)) == 1 and hashes[0] and len(set(places)) > 1:
            what = "all processes passed the same rows"
            expected = "of the global batch, each process its own rows"
            fix = "rows[jax.process_index() :: jax.process_count()], "
            fix += "or global arrays over the devices of all processes"
            raise ValueError(message(what, where="batch", expected=expected, fix=fix))

    def _check_shardings(self, state: TrainState, cause: Exception | None = None) -> None:
        """Raises ValueError for an array of the state that is not sharded as in the layout.

        `cause`: jax's own error, if it has refused the state.
        """
        expected, got = flatten(self._state), flatten(state)
        for path in sorted(expected.keys() & got.keys()):
            leaf, wanted = got[path], expected[path].sharding
            # jax moves random keys, and what is not committed to devices
            if not isinstance(leaf, jax.Array) or is_prng_key(leaf) or not leaf.committed:
                continue
            if leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
                continue
            what = "the state is laid out otherwise than the step expects"
            got_text = str(leaf.sharding)
            if leaf.sharding.device_set != wanted.device_set:
                got_text += ", on other devices"
            elif got_text == str(wanted):
                got_text += ", its devices in another order"
            fix = "pass a state that this `fully_shard` made; or move this one, "
            fix += "jax.device_put(state, sharded.state_shardings())"
            text = message(what, where=path, expected=wanted, got=got_text, fix=fix)
            raise ValueError(text) from cause

    def _check_signature(self, state: TrainState, batch: GlobalBatch) -> None:
        """Raises ValueError for another state or, after the first call, another batch."""
        signature = {
            f"batch/{path}": leaf for path, leaf in _dtypes_and_shapes(batch.leaves).items()
        }
        if self.compiled is None:
            self._signature = signature
            expected, got = _dtypes_and_shapes(self._state), _dtypes_and_shapes(state)
            fix = "pass a state of the same model and optimizer"
        else:
            expected, got = self._signature, signature
            fix = "pad to one shape, drop the last partial batch, "
            fix += "or make a second step for the other shape"
        if expected.keys() != got.keys():
            fix = "pass the same names and structure in every call"
        for path in sorted({*expected, *got}):
            if expected.get(path) != got.get(path):
                what = "the step was compiled for another signature"
                was, got_now = expected.get(path, "nothing"), got.get(path, "nothing")
                text = message(what, where=path, expected=was, got=got_now, fix=fix)
                raise ValueError(text)


def _check_kind(state: Any) -> None:
    """Raises ValueError for what is no TrainState, or one that is not on devices."""
    what, where, value = "not a TrainState", "state", state
    fix = "step(state, batch), with state = sharded.init() to begin"
    if isinstance(state, TrainState):
        if isinstance(state.step, jax.Array):
            return
        what, where, value = "the state is not on devices", "state/step", state.step
        fix = "jax.device_put(state, sharded.state_shardings())"
    raise ValueError(message(what, where=where, got=type(value).__name__, fix=fix))


def _dtypes_and_shapes(tree: PyTree) -> dict[str, str]:
    """Returns {path: dtype and shape}, such as `float32[8, 16]`."""
    return {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in flatten(tree).items()}
