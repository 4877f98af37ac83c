"""The compiled training step.

It is compiled once for each shape of its batches, checks its arguments at every call, places its
batch and counts the steps that were skipped. The same `lower` serves training, inspection and
planning, so the program shown is the program that runs.

[Note: shapes in several processes] Programs for different shapes communicate differently: if
processes run different programs, their devices wait for each other without end. So whenever the
shape of a batch changes, all processes compare theirs, in a collective. If only one process has
another shape, the others do not enter the collective, and the process raises after
`AGREEMENT_SECONDS`.
"""

import functools
import gc
import math
import textwrap
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from fsdp_jax.compat.error_texts import is_out_of_memory
from fsdp_jax.errors import ArgumentError, ReadableError, SlowerWarning, message
from fsdp_jax.host_memory import return_freed
from fsdp_jax.io.array_specs import is_prng_key
from fsdp_jax.processes import count_call, gather_from_processes
from fsdp_jax.program.equations import bodies, inputs_of, notes_of, reads
from fsdp_jax.sharding.explicit_style import refusals, trace_as_asked
from fsdp_jax.sharding.mesh import MeshAxes, as_ambient, replicated
from fsdp_jax.step.batch import BatchPlacement, GlobalBatch, flatten_batch
from fsdp_jax.step.kept_programs import THE_STEP
from fsdp_jax.step.others import (
    OtherArrays,
    arrays_like,
    check_other_states,
    require_by_name,
)
from fsdp_jax.step.same_program import require_same_program
from fsdp_jax.step.state import (
    TrainState,
    check_state,
    mark_as_of_program,
    refuse_difference,
    require_like,
    require_not_in_batch,
    state_like,
)
from fsdp_jax.step.step_plan import NOTHING_MOVED, StepPlan, StepReport, report_of
from fsdp_jax.step.traced_checks import check_traced, with_traced_others
from fsdp_jax.step.train_step import LOSS_Z_SCORE
from fsdp_jax.step.xla_options import compile_overlapped
from fsdp_jax.tree import PyTree, array_text, array_texts, flatten
from fsdp_jax.units.source_lines import source_line

# Steps that may be in flight before a counter is read: every process reads the same one, and none
# waits for the device.
_LAG = 2
_SKIP_FIX = (
    "lower the learning rate, look at the data, or clip; a count of 0 or less (metrics['count']) "
    "makes the loss NaN"
)


class NonFiniteError(ReadableError, FloatingPointError):
    """Too many steps in a row were skipped, or a state that is not finite would be saved."""


_REASON = 300  # characters of an error in a warning
MOST_SHAPES = 8  # of batches that one step is compiled for
AGREEMENT_SECONDS = 300.0  # for the other processes to come with a batch of another shape


class RecompileWarning(UserWarning):
    """A step is compiled again, for a batch of another shape or dtype."""


class SkippedStepWarning(UserWarning):
    """A step was skipped, the first in a row: its loss, gradients or new state were not finite."""


def skipped_text(step: int, loss: float, norm: float, *, is_spike: bool = False) -> str:
    """Formats the message that a step was skipped, and why.

    `step`: its number, from 1; `norm`: of its gradients; `is_spike`: the loss is a spike, and
    spikes are skipped.
    """
    if not math.isfinite(loss):
        why = f"its loss is {loss}"
    elif not math.isfinite(norm):
        why = f"its loss is {loss:.6g}, and the norm of its gradients {norm}"
    elif is_spike:
        why = f"its loss, {loss:.6g}, is a spike"
    else:
        why = f"its loss is {loss:.6g}, and its update would make the state infinite or NaN"
        return f"step {step} was skipped: {why}; numbers that it would make so stay as they were"
    return f"step {step} was skipped: {why}; the state stays as it was"


class CompiledStep:
    """A compiled step. Call it as `state, metrics = step(state, batch)`.

    The states of other models, which it was made with, are keyword arguments of the call.

    It is compiled at the first call, and again for a batch of another shape: up to 8 times.

    `batch` is a tree of arrays [rows, ...]: this process's rows of the global batch, or global
    arrays over the devices of all processes. It may also be a batch that `put` returned, so that
    the transfer overlaps with the step before.

    Attributes:
        plan: that of the step; after tracing, on the mesh axes that its loss asks for, and with
            what is known of other models since then.
        report: that of its last trace.
        batch_sharding: of each leaf of a placed batch.
        compiled: the compiled program of the last call; None before the first.

    """

    def __init__(
        self,
        fn: Callable[..., tuple[Any, StepReport]],
        plan: StepPlan,
        *,
        trains: bool,
        abort_after: int | None = None,
    ) -> None:
        # The signature of the state, and where a batch is placed.
        self.plan, self.report = plan, NOTHING_MOVED
        self._fn, self._trains, self._abort_after = fn, trains, abort_after
        self._name = THE_STEP if trains else "the eval step"
        self._state = state_like(plan.layout, lambda leaf: leaf.stored)
        self._placement = BatchPlacement(plan.layout.axes, plan.accumulation)
        self.batch_sharding = self._placement.sharding
        layouts = {
            name: other.plan.layout for name, other in plan.others.items() if not other.averages
        }
        self._others = {
            name: arrays_like(layout, lambda leaf: leaf.stored) for name, layout in layouts.items()
        }

        # The step sees a dim of microbatches even where there is only one. `others`: one mapping,
        # or none.
        def run(
            plan: StepPlan,
            state: TrainState,
            batch: GlobalBatch,
            *others: Mapping[str, OtherArrays],
        ) -> Any:
            leaves = batch.leaves
            if plan.accumulation == 1:
                leaves = jax.tree.map(lambda x: x[None], leaves)
            return fn(plan, state, leaves, *others)

        # The plan is static: it changes where the loss asks for other mesh axes.
        shardings = state_like(plan.layout, lambda leaf: leaf.sharding)
        of_inputs: tuple[Any, ...] = (shardings, self.batch_sharding)
        if layouts:
            of_inputs += (jax.tree.map(lambda x: x.sharding, self._others),)
        results: Any = replicated(plan.layout.mesh)
        donated: tuple[int, ...] = ()
        if trains:
            results, donated = (shardings, results), (1,)
        self._jitted = jax.jit(
            run,
            static_argnums=0,
            in_shardings=of_inputs,
            out_shardings=(results, None),  # the report has no arrays
            donate_argnums=donated,
        )
        # Compiled programs, and the batch of the last call.
        self._first_rows: np.ndarray | None = None  # `_rows_and_hash` of this process's first batch
        self.compiled: Any = None
        # (what `fully_shard` returned, loss, arguments) of `make_train_step`, which made it.
        self.origin: tuple[Any, Any, Mapping[str, Any]] | None = None
        self._signature: dict[str, str] = {}  # of the last call's batch
        self._shapes: Any = None  # the same, as (tree, [(shape, dtype)])
        self._programs: dict[tuple[tuple[str, str], ...], Any] = {}  # (path, dtype and shape)
        self._captured: list[jax.Array] = []  # that the loss closes over, in these programs
        self._calls = 0
        # Steps that may still run: (number, metrics that show whether it was skipped).
        self._in_flight: deque[tuple[tuple[Any, int], dict[str, jax.Array]]] = deque()
        self._skipping = False
        # The counter of the state that was returned last, and the number of the step that made it.
        self._returned: Any = None
        self._number: tuple[Any, int] = None, 0

    def put(self, batch: PyTree) -> GlobalBatch:
        """Moves this process's rows to its devices and cuts them into microbatches.

        A `jax.Array` never passes through the host; one that is already sharded as the step needs
        it is used as it is.

        Raises:
            ValueError: a number of rows that is not divisible by devices x accumulation, or that
                differs between leaves; leaves without rows, and random keys; a batch put by
                another step; with several microbatches, local rows mixed with global arrays.

        """
        placed = self._placement.place(batch)
        if self._first_rows is None and not isinstance(batch, GlobalBatch):
            self._first_rows = self._rows_and_hash(batch)
        return placed

    def lower(self, batch: PyTree) -> Any:
        """Lowers for a batch of arrays or shapes [global rows, ...]; allocates nothing."""
        with self.plan.layout.axes.ambient(), _few_collections():
            traced = self._trace(batch)
            check_traced(self.plan, traced)
            with refusals(self.plan.layout.axes, local_batch=self.plan.local_batch):
                return traced.lower()

    def trace(self, batch: PyTree) -> Any:
        """Traces the program, a `ClosedJaxpr`; the mesh's devices need not exist."""
        with self.plan.layout.axes.ambient():
            return self._trace(batch).jaxpr

    def with_local_batch(self) -> "CompiledStep":
        """Makes the same step with explicit collectives, whose trace has one device's shapes.

        Raises ValueError for settings that local batches do not support: sharded layers, the
        model's own mesh axes.
        """
        plan = self.plan.with_local_batch()
        return self if plan is self.plan else CompiledStep(self._fn, plan, trains=self._trains)

    def microbatch(self, batch: PyTree) -> PyTree:
        """Finds the shapes of one microbatch of a batch, arrays or shapes [global rows, ...]."""
        cut = 1 if self.plan.accumulation > 1 else 0
        leaves = self._placement.abstract(batch).leaves
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[cut:], x.dtype), leaves)

    def global_shapes(self, batch: PyTree) -> PyTree:
        """Finds the shapes [global rows, ...] of a batch as a call takes it, of this process."""
        return self._placement.global_shapes(batch)

    def _trace(self, batch: PyTree) -> Any:
        """Traces the step, a `jax.stages.Traced`; sets `plan` and `report` by its trace."""
        try:
            traced = self._trace_plan(batch)
            if not self.plan.chose_prefetch or not self.plan.layout.axes.explicit_axes:
                return traced
            # In a model that asks for Explicit axes, gathers stay where they are used.
            self.plan = self.plan.without_chosen_prefetch()
            return self._trace_plan(batch)
        except Exception as error:
            if not self.plan.chose_prefetch:
                raise
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", _REASON)
        # The user did not ask for prefetch, so its failure must not refuse a model: trace again
        # without it. An error of the model itself is raised again here; the next batch may have no
        # mistake, so it is traced with prefetch again. The same holds after a warning that is an
        # error.
        with_prefetch, self.plan = self.plan, self.plan.without_chosen_prefetch()
        text = "prefetch: parameters are gathered where they are used, since the step cannot be "
        text += f"traced with it ({reason}); prefetch='none' asks for this, and silences the "
        try:
            traced = self._trace_plan(batch)
            warnings.warn(text + "warning", SlowerWarning, stacklevel=3)
        except Exception:
            self.plan = with_prefetch
            raise
        return traced

    def _trace_plan(self, batch: PyTree) -> Any:
        """Traces the step as `plan` says; sets `plan` and `report` by its trace."""
        inputs = self._inputs(self._state, self._placement.abstract(batch), self._others)

        def trace(axes: MeshAxes) -> tuple[StepPlan, Any]:
            plan = self.plan.with_axes(axes)
            return plan, self._jitted.trace(plan, *inputs)

        axes, local_batch = self.plan.layout.axes, self.plan.local_batch
        self.plan, traced = trace_as_asked(axes, trace, local_batch=local_batch)
        _check_inputs(traced, len(jax.tree.leaves(inputs)))
        self.plan = with_traced_others(self.plan, traced.jaxpr.jaxpr)
        self.report = report_of(traced)
        self._captured += [x for x in traced.jaxpr.consts if isinstance(x, jax.Array)]
        self._require_captured()
        return traced

    def _inputs(self, state: Any, batch: Any, others: Mapping[str, Any]) -> tuple[Any, ...]:
        """Lists the inputs of the program; without others it has none of them."""
        return (state, batch, dict(others)) if others else (state, batch)

    def compile(self, batch: PyTree) -> Any:
        """Compiles the program for a batch of arrays or shapes [global rows, ...]."""
        return compile_overlapped(self.lower(batch), self.plan, name=self._name)

    def __call__(self, state: TrainState, batch: PyTree, *more: Any, **others: TrainState) -> Any:
        """Runs the step; compiles it at the first call, and for a batch of another shape.

        Args:
            state: of the model; a training step donates it.
            batch: as the class says.
            more: nothing; what is passed there is refused by name.
            others: the states of other models by name, of which nothing is donated.

        Raises:
            ValueError: no state; a state of another signature, or one that is laid out otherwise; a
                batch with other names, of a ninth shape, or of another shape than in the other
                processes; the leaf that differs is named; arrays of the state, or that the loss
                closes over, that were donated; a call inside a trace of jax.
            NonFiniteError: `abort_after` steps in a row were skipped; the state that was passed is
                still valid.

        Warns:
            RecompileWarning: the step is compiled once more.
            SkippedStepWarning: an earlier step was skipped, after one that was not.

        """
        # Check the arguments, and choose or compile the program for this shape of batch.
        require_by_name(self.plan, more)
        self._refuse_traced(state, batch, others)
        check_state(state, self.plan.layout, donates=self._trains)
        of_others = check_other_states(self.plan, state, others, donates=self._trains)
        placed = self.put(batch)
        if self._trains:
            require_not_in_batch(state, placed.leaves)
        self._calls += 1
        # Compare shapes without making texts: most calls have the shapes of the call before.
        leaves, tree = jax.tree.flatten(placed.leaves)
        shapes = tree, [(leaf.shape, leaf.dtype) for leaf in leaves]
        signature = self._signature
        if shapes != self._shapes:
            signature = {f"batch/{path}": text for path, text in array_texts(placed.leaves).items()}
            if not self._programs:
                require_like(self._state, state)
            elif self._signature.keys() != signature.keys():
                fix = "pass the same names and structure in every call"
                refuse_difference("batch", self._signature, signature, fix)
        if signature != self._signature:
            self._choose_program(state, placed, signature, of_others)
        self._shapes = shapes
        self._require_captured()
        # Check steps that are done, before the state is donated: a caller who catches the error
        # still has the state.
        while len(self._in_flight) >= _LAG:
            self._raise_if_diverged(*self._in_flight.popleft())
        # Note the step's number, before its counter is donated, and run.
        number = self._step_number(state)
        if self._runs_in_all_processes:
            count_call(self._name)
        try:
            with _noting_out_of_memory():
                out, _ = self.compiled(*self._inputs(state, placed, of_others))
        except (TypeError, ValueError) as error:
            require_like(self._state, state, error)
            self._check_all_shardings(state, of_others, error)
            _check_packed({"state": state, "batch": placed.leaves, **of_others}, error)
            raise
        if not self._trains:
            return as_ambient(out)
        # Keep the metrics that show whether this step was skipped; nothing waits for them.
        new, metrics = out
        self._returned, self._number = new.step, number
        told = ("loss", "grad_norm", "skipped_in_a_row", LOSS_Z_SCORE)
        self._in_flight.append((number, {k: metrics[k] for k in told if k in metrics}))
        return mark_as_of_program(new), as_ambient(metrics)

    def finish(self) -> None:
        """Reads the counters still in flight; call it after the last step."""
        while self._in_flight:
            self._raise_if_diverged(*self._in_flight.popleft())

    def _refuse_traced(self, state: Any, batch: Any, others: Any) -> None:
        """Raises ValueError within a trace of the user's: a compiled program is not traced."""
        if isinstance(batch, GlobalBatch):
            batch = batch.leaves
        leaves = [*jax.tree.leaves((state, others)), *flatten_batch(batch)[0]]
        if not any(isinstance(x, jax.core.Tracer) for x in leaves):
            return
        fix = "sharded.pure_step(loss_fn)"
        if not self._trains:
            fix = "sharded.apply(loss_fn)"
        raise ArgumentError(
            "a compiled step is called inside a function that jax traces",
            where="state, batch",
            expected="arrays: jit, scan, grad and eval_shape pass traced ones",
            fix=f"{fix} may be traced; or call this step outside",
        )

    def _require_captured(self) -> None:
        """Raises ValueError where an array that the loss closes over was donated since.

        It is a constant of the program, which would compute with the numbers of before.
        """
        donated = [x for x in self._captured if x.is_deleted()]
        if not donated:
            return
        raise ArgumentError(
            "the loss closes over arrays that were donated to a step since, such as "
            "sharded.model(other_state)",
            where="loss_fn",
            expected="arrays that stay as they are: they are constants of the compiled step",
            got=f"{len(donated)} donated arrays, {array_text(donated[0])} among them",
            fix=(
                "pass the other state to each call: make_train_step(loss_fn, "
                "others={'teacher': sharded}), loss_fn(model, batch, teacher), step(state, batch, "
                "teacher=other_state); or make the step again"
            ),
        )

    def _step_number(self, state: TrainState) -> tuple[Any, int]:
        """Numbers the next step, from 1, as two numbers to add.

        Nothing waits for the first number. It is a copy, because the state's own counter is
        donated.
        """
        base, since = self._number
        if state.step is not self._returned:
            base, since = jnp.copy(state.step), 0
        return base, since + 1

    def _raise_if_diverged(self, number: tuple[Any, int], metrics: dict[str, jax.Array]) -> None:
        """Warns of the first skipped step in a row; raises NonFiniteError if too many were skipped.

        `number`, `metrics`: of a step that has run.
        """
        # End the run after too many skipped steps in a row.
        in_a_row, was_skipping = int(metrics["skipped_in_a_row"]), self._skipping
        self._skipping = in_a_row > 0
        spikes = self.plan.spikes
        if self._abort_after is not None and in_a_row >= self._abort_after:
            self._in_flight.clear()
            what = f"{in_a_row} steps in a row were skipped: their loss, gradients or new state "
            what += "were not finite"
            if spikes is not None and spikes.skip:
                what += ", or the loss was a spike"
            what += "; no number of the state became infinite or NaN"
            raise NonFiniteError(what, where="step", fix=_SKIP_FIX)
        # Warn only of the first of several.
        if self._skipping and not was_skipping:
            step = int(number[0]) + number[1]
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
            is_spike = spikes is not None and float(metrics[LOSS_Z_SCORE]) > spikes.threshold
            what = skipped_text(step, loss, norm, is_spike=is_spike)
            fix = _SKIP_FIX
            if self._abort_after is not None:
                fix += f"; {self._abort_after} in a row end the run"
            text = message(what, where="step", fix=fix)
            warnings.warn(text, SkippedStepWarning, stacklevel=3)

    def _rows_and_hash(self, batch: PyTree) -> np.ndarray:
        """Computes uint32 [3]: this process's rows, a hash of their values, and of their places.

        The first hash is never 0. Zeros in a run of one process, and if all arrays are global.
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
        """Raises ValueError if processes passed different numbers of rows, or the wrong rows.

        Processes whose devices hold the same rows, along the model's own mesh axes, must pass the
        same rows; all others must pass different ones. The check precedes the first collective of a
        step, which would not end, or would count every row several times.
        """
        if not self._runs_in_all_processes:
            return
        # One small all-gather; a process without rows takes part too.
        first = np.zeros(3, np.uint32) if self._first_rows is None else self._first_rows
        rows, hashes, places = gather_from_processes(first).T
        if len(set(rows)) > 1:
            raise ArgumentError(
                "the processes passed different numbers of rows",
                where="batch",
                expected="as many in each process",
                got=", ".join(f"{count} in process {number}" for number, count in enumerate(rows)),
                fix="pad with rows that the loss leaves out, or drop the last partial batch",
            )
        # Processes at one place on the axes of the batch pass the same rows.
        by_place = set(zip(places.tolist(), hashes.tolist(), strict=True))
        if len(by_place) > len(set(places)):
            axes = list(self.plan.layout.axes.model)
            raise ArgumentError(
                "processes that hold the same rows of the batch passed different ones",
                where="batch",
                expected=f"the same rows in processes that differ along {axes} alone",
                fix="put these axes inside a host, or read the same rows in these processes",
            )
        # Processes at different places pass different rows.
        if len(set(hashes)) == 1 and hashes[0] and len(set(places)) > 1:
            raise ArgumentError(
                "all processes passed the same rows",
                where="batch",
                expected="of the global batch, each process its own rows",
                fix=(
                    "rows[jax.process_index() :: jax.process_count()], or global arrays over the "
                    "devices of all processes"
                ),
            )

    def _check_all_shardings(
        self,
        state: TrainState,
        others: Mapping[str, OtherArrays],
        cause: Exception | None = None,
    ) -> None:
        """Raises ValueError for an array of a state that is not sharded as in its layout.

        `cause`: jax's own error, if jax refused a state.
        """
        self._check_shardings(flatten(self._state), flatten(state), cause)
        for name, arrays in others.items():
            expected, got = (
                {f"{name}/{path}": x for path, x in flatten(each._asdict()).items()}
                for each in (self._others[name], arrays)
            )
            self._check_shardings(expected, got, cause)

    def _check_shardings(
        self, expected: Mapping[str, Any], got: Mapping[str, Any], cause: Exception | None
    ) -> None:
        """Does the work of `_check_all_shardings` for arrays by path."""
        for path in sorted(expected.keys() & got.keys()):
            # Arrays that jax itself would refuse: committed, and with another sharding.
            leaf, wanted = got[path], expected[path].sharding
            # jax moves random keys, and arrays that are not committed to devices.
            if not isinstance(leaf, jax.Array) or is_prng_key(leaf) or not leaf.committed:
                continue
            if leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
                continue
            # The texts may be equal where only the devices differ.
            what = "the state is laid out otherwise than the step expects"
            got_text = str(leaf.sharding)
            if leaf.sharding.device_set != wanted.device_set:
                got_text += ", on other devices"
            elif got_text == str(wanted):
                got_text += ", its devices in another order"
            raise ArgumentError(
                what,
                where=path,
                expected=wanted,
                got=got_text,
                fix=(
                    "pass a state that this `fully_shard` made; or move this one, "
                    "jax.device_put(state, sharded.state_shardings())"
                ),
            ) from cause

    def _choose_program(
        self,
        state: TrainState,
        batch: GlobalBatch,
        signature: dict[str, str],
        others: Mapping[str, OtherArrays],
    ) -> None:
        """Sets `compiled` to the program for a batch whose shape differs from the last call's."""
        key = tuple(sorted(signature.items()))
        known, is_first = key in self._programs, not self._programs
        # Checked once, before the first program; later only the number of programs is checked.
        if is_first:
            if self._trains:  # before it compiles; an eval step need not use all of the state
                self._check_all_shardings(state, others)
            self._check_rows_of_processes()
        elif not known and len(self._programs) >= MOST_SHAPES:
            raise ArgumentError(
                f"the step was compiled for {MOST_SHAPES} shapes of batches, and here is another",
                where="batch",
                got=self._changes(signature),
                fix="pad to a few lengths, drop the last partial batch, or make another step",
            )
        # All processes compile the same program, or none does.
        self._check_shape_of_processes(signature)
        if not (known or is_first):
            what = "the step is compiled once more, for a batch of another shape: "
            what += f"{self._changes(signature)} ({len(self._programs) + 1} of at most "
            what += f"{MOST_SHAPES} shapes); padding to one shape saves the time"
            warnings.warn(what, RecompileWarning, stacklevel=3)
        if not known:
            lowered = self.lower(batch)
            require_same_program(self._name, lowered, self.plan.layout.mesh)
            with _noting_out_of_memory():
                self._programs[key] = compile_overlapped(lowered, self.plan, name=self._name)
            return_freed()  # before the step takes its own memory
        self.compiled, self._signature = self._programs[key], signature

    @property
    def _runs_in_all_processes(self) -> bool:
        """Whether there are several processes, and each has devices of the mesh."""
        return 1 < self._placement.processes == jax.process_count()

    def _changes(self, signature: dict[str, str]) -> str:
        """Lists the leaves that differ from the last call's batch, as text."""
        changed = [path for path in signature if signature[path] != self._signature[path]]
        shown = [f"{path} {self._signature[path]} -> {signature[path]}" for path in changed[:3]]
        if len(changed) > 3:
            shown.append(f"and {len(changed) - 3} more")
        return ", ".join(shown)

    def _check_shape_of_processes(self, signature: dict[str, str]) -> None:
        """Raises ValueError if the processes have batches of different shapes; see the note."""
        if not self._runs_in_all_processes:
            return
        digest = zlib.crc32(repr(sorted(signature.items())).encode())
        what = "the processes passed batches of different shapes"
        fix = "the same shape in all processes, step by step: pad to the longest of all of them"
        got = ", ".join(f"{path} {text}" for path, text in list(signature.items())[:3])
        got += " in this process"
        try:
            own = np.array([self._calls, digest], np.uint32)
            each = gather_from_processes(own, seconds=AGREEMENT_SECONDS)
        except TimeoutError as error:
            got += f", and in another one none of a new shape within {AGREEMENT_SECONDS:g} s"
            raise ArgumentError(what, where="batch", got=got, fix=fix) from error
        if len({tuple(row) for row in each.tolist()}) > 1:
            raise ArgumentError(what, where="batch", got=got, fix=fix)


@contextmanager
def _noting_out_of_memory() -> Iterator[None]:
    """Adds to XLA's error, where it says that memory is exhausted, what explains it."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            error.add_note(
                "fsdp_jax.explain_memory(step, batch, error) tells what takes the memory, and with "
                "which settings the step fits"
            )
        raise


@contextmanager
def _few_collections() -> Iterator[None]:
    """Makes Python collect cycles less often: tracing makes many objects, but few cycles."""
    before = gc.get_threshold()
    if before[0]:  # zero is off
        gc.set_threshold(max(before[0], 50_000), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _check_inputs(traced: Any, count: int) -> None:
    """Raises ValueError for a traced step with more inputs than the `count` it is called with.

    If the step computes with an array of an inner or an earlier trace, that array becomes an
    additional input, before the others.
    """
    program = traced.jaxpr.jaxpr
    left_over = set(program.invars[: len(program.invars) - count])
    if not left_over:
        return
    raise ArgumentError(
        "the step computes with an array of another trace",
        where=_first_use(program, left_over) or "the loss",
        expected="arrays of the state and the batch, of the same call, and constants",
        got="an array that a custom derivative closes over, or that a cache or a list has kept, "
        "or a variable that was written inside another module's unit",
        fix=(
            "pass the array to the custom derivative as an argument; make what is kept of NumPy "
            "arrays, or anew in each call; write a variable of another module where the unit is "
            "called, with what it returns"
        ),
    )


def _first_use(program: jex.Jaxpr, variables: Set[Any]) -> str:
    """Finds the source line that first reads one of these variables; "" for none."""
    for eqn in program.eqns:
        if variables.isdisjoint(reads(eqn)):
            continue
        # The operands of an equation are the last inputs of the program inside it.
        used = notes_of(dict.fromkeys(variables, True), eqn.invars)
        for inner in bodies(eqn):
            pairs = zip(reversed(inputs_of(inner)), reversed(used), strict=False)
            if place := _first_use(inner, {v for v, is_used in pairs if is_used}):
                return place
        return source_line(eqn.source_info)
    return ""


def _check_packed(inputs: PyTree, error: Exception) -> None:
    """Raises ValueError, from jax's error, for an array whose elements are smaller than a byte.

    A program that is compiled ahead expects such elements packed, and on some platforms the layout
    that jax has for an argument does not say that they are.
    """
    for path, leaf in flatten(inputs).items():
        if is_prng_key(leaf) or leaf.dtype == bool or leaf.dtype.itemsize > 1:
            continue
        info = jnp.finfo if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo
        if info(leaf.dtype).bits < 8:
            raise ArgumentError(
                "jax passes a compiled step no array whose elements are smaller than a byte",
                where=path,
                got=leaf.dtype,
                fix="int8 or float8_e4m3fn, which hold all its values, cast where they are used",
            ) from error
