"""The training loop: resume, step, measure, evaluate, save, stop.

The host runs one step ahead of the devices: metrics of a step are read after the next one is
dispatched.
"""

import time
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from fsdp_jax.checkpoint import Lease
from fsdp_jax.errors import DamageError, message
from fsdp_jax.launch import StepTimeout, is_lead
from fsdp_jax.processes import in_any_process, raise_together
from fsdp_jax.step.compiled_step import SkippedStepWarning, skipped_text
from fsdp_jax.step.kept_programs import THE_STEP, was_read
from fsdp_jax.step.known_defects import known_defects
from fsdp_jax.step.loss import OWN, RESERVED, averaged
from fsdp_jax.step.loss_spikes import LossSpikeError, LossSpikes
from fsdp_jax.step.replicas import require_equal_replicas
from fsdp_jax.step.train_step import LOSS_Z_SCORE
from fsdp_jax.train.build import Run
from fsdp_jax.train.communication import CommunicationCheck
from fsdp_jax.train.config import TrainConfig
from fsdp_jax.train.console import RunLog, closing_summary
from fsdp_jax.train.dataset import Data
from fsdp_jax.train.goodput import read_goodput
from fsdp_jax.train.initial_weights import initial_params
from fsdp_jax.train.memory import ProposeFixes, find_memory_cliff
from fsdp_jax.train.metrics import (
    HostTimes,
    Meter,
    Say,
    StepRecord,
    device_memory,
    host_memory_bytes,
    loss_metrics_field,
    utc_timestamp,
)
from fsdp_jax.train.optimizers import count_updates
from fsdp_jax.train.profiling import StepProfile
from fsdp_jax.train.resume import Progress, Saving
from fsdp_jax.train.samples import make_sample
from fsdp_jax.train.signals import Agreement, StopSignal

DONE, STOPPED = 0, 75  # exit codes
READING_SECONDS = 60  # that a run waits at its end until its program has been read
RETURNS = 3  # times that spikes may take a run back to one and the same step


@dataclass
class PendingStep:
    """A dispatched step whose metrics have not been read."""

    step: int
    updates: jax.Array  # that the schedule counted before it, int32 []
    metrics: dict[str, jax.Array]
    host: HostTimes
    position: dict[str, Any]  # of the loader, after the step's batch


@dataclass
class Training:
    """One run, from resuming to its summary. Every process makes the same calls; 0 writes files."""

    run: Run
    data: Data
    settings: TrainConfig
    saving: Saving
    meter: Meter
    log: RunLog
    lease: Lease  # of the run's directory
    stop: StopSignal
    agree: Agreement
    step_timeout: StepTimeout
    propose_fixes: ProposeFixes  # where memory is short
    profile: StepProfile
    progress: Progress = field(init=False)
    save_is_asked: bool = False  # by the clock, or after a failed save
    has_compared: bool = False  # the copies of replicated arrays
    communication: CommunicationCheck | None = field(init=False, default=None)

    @property
    def say(self) -> Say:
        """Prints text on lines of its own."""
        return self.log.screen.say

    def resume(self, weights: str | None) -> None:
        """Restores the checkpoint to resume from, or initializes, from `weights` if not None."""
        saving, sharded = self.saving, self.run.sharded
        resumer = saving.resumer
        copy = saving.find_copy()
        if copy is not None:
            state, position, returns = saving.restore_copy(copy)
            self.data.loader.set_state(position)
            self.progress = Progress(state, resumed=copy.step, returns=returns)
            saving.note_start(sharded, self.progress.state)
            return
        point = resumer.choose()
        if point is None:
            verify = resumer.settings.verify
            params = initial_params(
                weights,
                sharded,
                self.run.model_config,
                adapters=self.run.adapters,
                verify=verify,
            )
            self.progress = Progress(sharded.init(self.settings.seed, params))
        else:
            saved_position = resumer.check_metadata(point.step, saving.metadata)
            if saved_position is not None:
                self.data.loader.set_state(saved_position)
            returns = resumer.returns(point.step)
            state = resumer.restore(point, sharded)
            self.progress = Progress(state, resumed=point.step, returns=returns)
            resumer.note_learning_rate(point.step, self._next_rate())
            saving.saved = point.step
            saving.metadata["stated"] = resumer.settings.step
            saving.remove_copies()
        saving.note_start(sharded, self.progress.state)

    def _next_rate(self) -> float:
        """Computes the learning rate of the next update."""
        return self.meter.learning_rate(int(count_updates(self.progress.state.opt_state)))

    def train(self) -> int:
        """Trains to the last step, or until asked to stop; returns the exit code."""
        for defect in known_defects(self.run.step.plan, jax.process_count()):
            self.say(str(defect))
        steps = self.settings.steps
        complete = self.progress.steps >= steps
        # A run that was killed may have evaluated this step already, or not.
        evaluates = complete or self.progress.resumed is None
        self.log.open(self.progress.steps, evaluates=evaluates)
        try:
            if complete:
                done = f"{self.progress.steps} steps are done; train.steps is {steps}"
                self.say(f"this run is complete: {done}")
                # A copy in memory may be of a step that was not saved.
                return self._finish(save=self.saving.saved != self.progress.steps)
            stopped = self._lacks_evaluation() and self._evaluate()
            # `_record_step` tells of skipped steps, in the log.
            told = warnings.catch_warnings(action="ignore", category=SkippedStepWarning)
            with self.step_timeout, told:
                stopped = stopped or self._run_steps()
            self.profile.close()
            return self._stop() if stopped else self._finish(save=True)
        finally:
            self.log.close()

    def _lacks_evaluation(self) -> bool:
        """Tells whether the held-out loss is due at the current step, and not in `evals.jsonl`.

        It is at step 0, and where a signal or a full disk kept the run before from writing it.
        """
        due = self.progress.steps == 0 or self._is_due(self.settings.eval_every)
        missing = self.log.evals is not None and self.log.evals.continued_at != self.progress.steps
        return in_any_process(due and missing)

    def _run_steps(self) -> bool:
        """Trains to the last step; returns True if asked to stop before it."""
        pending: PendingStep | None = None
        is_first = True
        self.meter.steady_bytes = device_memory()[0]
        self.log.screen.start_bar(self.progress.steps)
        self.profile.note_resume(self.progress.steps)
        while self.progress.steps < self.settings.steps:
            # Dispatch a step, then read the metrics of the one before. Where that was a spike, the
            # run may go back, and this one does not count.
            dispatched = self._dispatch_step(is_first=is_first)
            is_first = False
            if pending is not None and self._record_step(pending):
                pending = None
                continue
            pending = dispatched

            # Decide what interrupts the loop; every process decides the same.
            # A signal stops the run; a timer or a failed save in the background asks for a save.
            stopped = self._agree_to_stop(
                save=self.saving.timed_save_is_due() or self.saving.resumer.store.failed()
            )
            save = self.save_is_asked or self._is_due(self.saving.resumer.settings.every)
            # While it is postponed every step is waited for: the next applied one may be the last.
            save = save or self.saving.postponed
            evaluate = self._is_due(self.settings.eval_every)
            check = self._is_due(self.settings.check_replicas)
            copy = self._is_due(self.saving.resumer.settings.memory_every)
            last = self.progress.steps == self.settings.steps
            if stopped or save or evaluate or last or check or copy:
                # Wait for all steps, so that no other work counts as theirs.
                went_back = self._record_step(pending)
                pending = None
                if went_back:
                    if stopped:
                        return True
                    continue
                self.run.step.finish()
                self.meter.steady_bytes = device_memory()[0]
                with self.step_timeout.paused():
                    if self.settings.check_replicas is not None:
                        self._compare_replicas()
                    if evaluate and not stopped and not last:
                        # Before the save: a run resumed from it does not evaluate again.
                        stopped = self._evaluate()
                    if save and not last:
                        self._save()
                    if copy and not (last or stopped):
                        self.saving.copy_to_memory(
                            self.progress, self.run.sharded, self.data.loader
                        )
                self.meter.previous_finish = time.perf_counter()
            if stopped and not last:
                return True
        return False

    def _dispatch_step(self, *, is_first: bool) -> PendingStep:
        """Reads a batch and dispatches the next step; the first one is compiled."""
        started = time.perf_counter()
        with self.profile.begin(self.progress.steps + 1):
            with jax.profiler.TraceAnnotation("next batch"):
                batch = self.run.step.put(next(self.data.loader))
            data_wait = time.perf_counter() - started
            updates = count_updates(self.progress.state.opt_state)
            self.progress.state, metrics = self.run.step(self.progress.state, batch)
        dispatched = time.perf_counter()
        if is_first:
            self.meter.previous_finish = dispatched
            self._tell_of_program(seconds=dispatched - started - data_wait)
        self._tell_communication()
        # What this process took since it last waited for the devices.
        host_seconds = dispatched - self.meter.previous_finish
        host = HostTimes(data_wait, host_seconds, host_memory_bytes())
        self.agree.numbers = np.array([value or 0 for value in host], np.float32)
        self.progress.steps += 1
        position = self.data.loader.get_state()
        return PendingStep(self.progress.steps, updates, metrics, host, position)

    def _tell_of_program(self, seconds: float) -> None:
        """Prints the seconds that the first call, which compiled, took, and what was found."""
        how = "compiled"
        if was_read(THE_STEP):
            how = "read its compiled program"
        self.say(f"{how} in {seconds:.1f} s")
        if self.run.sharded.arguments.offload.state:
            self.say(str(self.run.step.report.streaming))
        if is_lead():
            if cliff := find_memory_cliff(self.run, self.propose_fixes):
                self.say(str(cliff))
            self.communication = CommunicationCheck(self.run.step)

    def _compare_replicas(self) -> None:
        """Compares replicated arrays; before a save, so that none that differs is in a checkpoint.

        Says so the first time. Raises ReplicaError.
        """
        require_equal_replicas(self.progress.state)
        if not self.has_compared:
            self.has_compared = True
            self.say(f"step {self.progress.steps}: the copies of all replicated arrays are equal")

    def _tell_communication(self, *, wait: float = 0) -> None:
        """Prints what the program of the step sends, once this is known; waits for it so long."""
        if self.communication is not None:
            self.communication.wait(wait)
            for line in self.communication.news(self.lease):
                self.say(line)

    def _go_back_after_spike(self, what: str) -> bool:
        """Restores the checkpoint that `Resumer.choose_after_spike` finds, and not its data.

        `what` describes the spike. Returns False if there is no checkpoint. Raises
        LossSpikeError if the run has gone back to it `RETURNS` times.
        """
        self.run.step.finish()
        self.saving.check_previous("going back to an older one")
        resumer = self.saving.resumer
        point = resumer.choose_after_spike()
        if point is None:
            self.say(f"warning: {what}; there is no checkpoint to go back to")
            return False
        step, returns = point.step, self.progress.returns
        returns[step] = returns.get(step, 0) + 1
        # Going back to the same step again and again does not help.
        if returns[step] > RETURNS:
            raise LossSpikeError(
                "the loss has spikes",
                where="loss",
                got=f"{what}; the run went back to step {step} {RETURNS} times",
                fix="lower the learning rate, or look at the data",
            )
        # Free the state before its successor is read.
        for array in jax.tree.leaves(self.progress.state):
            array.delete()
        # Continue from the restored state, in logs that are cut off behind its step.
        self.progress.take(resumer.restore(point, self.run.sharded))
        self.saving.remove_copies()
        self.saving.saved, self.saving.postponed = step, False
        self.log.close()
        self.log.open(step)
        self.say(f"warning: {what}; back to step {step}, and on with the data that follows")
        self.meter.previous_finish = time.perf_counter()
        return True

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.progress.steps % every == 0

    def _record_step(self, pending: PendingStep) -> bool:
        """Waits for a step, writes and shows its metrics; returns True if the run goes back."""
        values = {name: np.asarray(value) for name, value in pending.metrics.items()}
        metrics = {name: float(values.pop(name)) for name in OWN}
        self.step_timeout.restart(pending.step)  # which all processes have done
        self.profile.end(pending.step)
        self.lease.require_held()
        progress = self.progress
        record = self.meter.record(
            pending.step,
            metrics,
            int(pending.updates),
            pending.host,
            self.saving.blocked_seconds,
            self.agree.of_processes,
        )
        self.saving.blocked_seconds = None
        if self.communication is not None:
            self.communication.note_step(record)
        was_skipping = progress.skipped_in_a_row > 0
        progress.skipped_in_a_row = int(metrics["skipped_in_a_row"])
        # In the log beside the metrics of the loss, in the file beside the step's own.
        scale = {name: float(x) for name, x in values.items() if name in RESERVED}
        values.pop(LOSS_Z_SCORE, None)
        of_loss = {name: x for name, x in values.items() if name not in scale}
        self.log.write_step(vars(record) | scale | loss_metrics_field(of_loss))
        log = pending.step % self.settings.log_every == 0 or pending.step == self.settings.steps
        self.log.screen.show_step(record, log=log, more=values)

        # Go back or warn, after a spike; tell of the first skipped step in a row.
        spikes = self.run.sharded.arguments.loss_spikes
        if spikes is not None and scale[LOSS_Z_SCORE] > spikes.threshold:
            went_back = self._handle_spike(spikes, record, scale[LOSS_Z_SCORE])
            if went_back:
                # The step after it may have been dispatched: its batch is read again.
                self.data.loader.set_state(pending.position)
            return went_back
        if progress.skipped_in_a_row and not was_skipping:
            what = skipped_text(record.step, record.loss, record.grad_norm)
            self.say(f"warning: {what}")
        return False

    def _handle_spike(self, spikes: LossSpikes, record: StepRecord, z_score: float) -> bool:
        """Warns of a loss above the threshold, or goes back, if asked; returns True if it did."""
        what = (
            f"the loss of step {record.step}, {record.loss:.4f}, is {z_score:.1f} "
            f"standard deviations (robust) above the median of the {spikes.window} before it"
        )
        if self.settings.spike == "back":
            with self.step_timeout.paused():
                return self._go_back_after_spike(what)
        skipped = ", and its update was skipped" if spikes.skip else ""
        self.say(f"warning: {what}{skipped}")
        return False

    @partial(jax.profiler.annotate_function, name="evaluate")
    def _evaluate(self) -> bool:
        """Measures the held-out loss in nats per `loss_unit`; returns True if asked to stop."""
        if self.data.evaluation is None:
            self.say("no evaluation: the held-out data is less than one example")
            return False
        fields: dict[str, Any] = {"step": self.progress.steps}
        texts: list[str] = []
        values: dict[str, np.ndarray] = {}
        # The parameters themselves, and then their average, if the optimizer keeps one.
        for suffix, evaluate in self.run.eval_steps.items():
            sums = []
            for batch in self.data.evaluation():
                sums.append(evaluate(self.progress.state, batch))
                if self._agree_to_stop():
                    return True
            # Sums over all batches, then their ratio: batches count by their tokens.
            loss_sum, count, *more = jax.tree.map(lambda *each: np.sum(each, 0, float), *sums)
            loss = float(loss_sum / count)
            fields |= {f"held_out_loss{suffix}": loss, "tokens": int(count)}
            texts.append(f"{loss:.4f}" + " of the averaged weights" * bool(suffix))
            with np.errstate(invalid="ignore", divide="ignore"):  # a metric's count may be zero
                means = averaged(more[0]) if more else {}
            values |= {f"{name}{suffix}": np.asarray(value) for name, value in means.items()}
        unit = self.data.loss_unit
        texts[0] += f" nats per {unit}"
        over = f"over {fields['tokens']:,} {unit}s"
        self.say(f"step {self.progress.steps}: held-out loss {', '.join(texts)}, {over}")
        self.lease.require_held()
        self.log.write_evaluation({**fields, "time": utc_timestamp()} | loss_metrics_field(values))
        return False

    def _agree_to_stop(self, *, save: bool = False) -> bool:
        """Tells whether any process was asked to stop, and notes whether any asks for a `save`.

        Of several processes the answer is that of the call before, so that what is asked for before
        an evaluation is answered in it.
        """
        stopped, asked = self.agree(self.stop.asked, save)
        self.save_is_asked |= asked
        return stopped

    @partial(jax.profiler.annotate_function, name="save")
    def _save(self, *, ends: bool = False) -> None:
        """Saves the state as `Saving.save` says; where the run `ends`, in any case."""
        started = time.perf_counter()
        self.save_is_asked = False
        self.saving.check_previous(f"saving step {self.progress.steps} instead")
        self._check_token_shards()
        self.saving.metadata["learning_rate"] = self._next_rate()
        self.saving.save(self.progress, self.run.sharded, self.data.loader, started, ends=ends)

    def _check_token_shards(self, *, wait: bool = False) -> None:
        """Raises DamageError in every process if one has found that its token shards are damaged.

        With `wait` all of them are compared with their digests first, unless a signal asks to
        stop. Does nothing for other data.
        """
        shards = self.data.loaded.shards
        if shards is None:
            return
        if wait and not shards.check.wait(0):
            self.say("comparing the rest of the token shards with their digests")
            while not (shards.check.wait(0.2) or self.stop.asked):
                pass
        elsewhere = message("the data are damaged, in another process", where=str(shards.folder))
        with raise_together(DamageError(elsewhere)):
            shards.check.raise_if_damaged()

    def _stop(self) -> int:
        """Saves, waits for the save and says how to resume; returns the exit code."""
        self.log.screen.end_bar()
        self._save(ends=True)
        self.saving.resumer.store.wait()
        self.saving.remove_copies()
        self._tell_communication(wait=READING_SECONDS)
        saved = f"stopped by a signal; saved at step {self.progress.steps}"
        self.say(f"{saved}. Run the same command again to resume.")
        return STOPPED

    def _finish(self, *, save: bool) -> int:
        """Saves the last step if asked to, evaluates and prints the summary."""
        self.log.screen.end_bar()
        if save:
            self._check_token_shards(wait=True)
            self._save(ends=True)
        stopped = self._evaluate()
        self._tell_communication(wait=READING_SECONDS)
        self.saving.resumer.store.wait()
        if stopped:
            return self._stop()
        self.saving.remove_copies()
        sample, length, seed = None, self.settings.sample, self.settings.seed
        if length:
            state = self.progress.state
            sample = make_sample(self.run, state, self.data.loaded, length=length, seed=seed)
        goodput = None
        if is_lead():  # which prints it
            goodput = read_goodput(self.lease.anchor)
        summary = closing_summary(
            self.run.sharded.layout,
            self.data.loss_unit,
            sample,
            goodput,
            self.lease.directory,
            has_adapters=self.run.adapters.rank is not None,
        )
        self.say(summary)
        return DONE
