"""The training loop: resume, step, measure, evaluate, save, stop.

The host runs one step ahead of the devices: metrics of a step are read after the next one is
dispatched.
"""

import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fsdp_jax.checkpoint import CheckpointError, CheckpointStore
from fsdp_jax.checkpoint.arrays import leaves_of, not_finite
from fsdp_jax.errors import DamageError, message
from fsdp_jax.launch import StepTimeout, is_lead
from fsdp_jax.planner import peak_flops
from fsdp_jax.processes import in_any_process, raise_together
from fsdp_jax.sharding.padding import Padded
from fsdp_jax.step.compiled_step import NonFiniteError, SkippedStepWarning, skipped_text
from fsdp_jax.step.known_defects import known_defects
from fsdp_jax.step.loss import OWN, averaged
from fsdp_jax.step.loss_spikes import LossSpikeError, LossSpikes
from fsdp_jax.step.state import LOSS_SCALE, TrainState
from fsdp_jax.step.train_step import LOSS_Z_SCORE, STATE_FINITE
from fsdp_jax.train.build import Run, lora_scale
from fsdp_jax.train.config_file import config_digest
from fsdp_jax.train.console import Screen, banner, closing_summary
from fsdp_jax.train.dataset import Data
from fsdp_jax.train.initial_weights import initial_params
from fsdp_jax.train.memory import find_memory_cliff
from fsdp_jax.train.metrics import (
    JsonLines,
    StepRecord,
    device_memory,
    loss_metrics_field,
    utc_timestamp,
)
from fsdp_jax.train.optimizers import learning_rates
from fsdp_jax.train.resume import ResumePoint, Resumer
from fsdp_jax.train.samples import make_sample
from fsdp_jax.train.signals import Agreement, StopSignal

DONE, STOPPED = 0, 75  # exit codes
RETURNS = 3  # times that spikes may take a run back to one and the same step


@dataclass
class PendingStep:
    """A dispatched step whose metrics have not been read."""

    step: int
    metrics: dict[str, jax.Array]
    data_wait: float


class Training:
    """One run, from resuming to its summary. Every process makes the same calls; 0 writes files."""

    def __init__(
        self, run: Run, data: Data, store: CheckpointStore, stop: StopSignal, screen: Screen
    ) -> None:
        self.run = run
        self.data = data
        self.store = store
        self.stop = stop
        self.screen = screen
        self.config = run.config.train
        self.checkpoint = run.config.checkpoint
        self.resuming = Resumer(store, self.checkpoint, screen.say)
        self.layout = run.sharded.layout
        self.agree = Agreement(self.layout.mesh)
        self.step_timeout = StepTimeout(run.config.cluster.step_timeout)
        self.metadata: dict[str, Any] = {
            "config": config_digest(run.config),
            "strategy": self.layout.strategy.name,
            "mesh": self.layout.axes.shape,
            "corpus": data.loaded.digest,
            "tokenizer": data.tokenizer_digest,
            "lora_scale": lora_scale(run.config.lora),
        }
        self.peak_flops = peak_flops(
            self.layout.mesh.devices.flat[0].device_kind,
            run.sharded.arguments.precision.compute or jnp.float32,
        )
        self.learning_rate = learning_rates(run.schedule)

        self.state: TrainState
        self.steps_done = 0
        self.skipped = 0  # steps whose update was not applied
        self.skipped_in_a_row = 0
        self.returns: dict[int, int] = {}  # step -> times that the run went back to it
        self.resumed: int | None = None  # the step that the run resumed from
        self.held_out_loss: float | None = None
        # Saving.
        self.saved: int | None = None  # the last saved step
        self.saved_at = time.monotonic()
        self.save_failed = False  # the last save, in the background
        self.save_postponed = False  # because steps were being skipped
        self.not_finite_at_start: set[str] = set()  # paths
        self.blocked_seconds: float | None = None
        # Measuring.
        self.previous_finish = 0.0
        self.steady_bytes: int | None = None
        self.metrics: JsonLines | None = None
        self.evals: JsonLines | None = None

    def resume(self) -> None:
        """Restores the checkpoint to resume from, or initializes, from `model.weights` if set."""
        point = self.resuming.choose()
        if point is None:
            weights, verify = self.run.config.model.weights, self.checkpoint.verify
            params = initial_params(weights, self.run.sharded, self.run.model_config, verify=verify)
            self.state = self.run.sharded.init(self.config.seed, params)
        else:
            self.data.loader.set_state(self.resuming.check_metadata(point.step, self.metadata))
            self._restore(point)
            self.metadata["stated"] = self.checkpoint.step
            self.resumed = point.step
        # What is not finite before the first step may stay so, as a mask of -inf.
        self.not_finite_at_start = set(not_finite(self._checkpoint_leaves()))
        if self.not_finite_at_start:
            paths = ", ".join(sorted(self.not_finite_at_start))
            self.screen.say(f"warning: the state is infinite or NaN before the first step: {paths}")

    def _restore(self, point: ResumePoint) -> None:
        """Takes over the state of a checkpoint, and the counters of its steps."""
        self.state = self.resuming.restore(point, self.run.sharded)
        self.steps_done = self.saved = point.step
        self.skipped = int(self.state.skipped)
        self.skipped_in_a_row = int(self.state.skipped_in_a_row)

    def train(self) -> int:
        """Trains to the last step, or until asked to stop; returns the exit code."""
        corpus, checkpoints = self.data.loaded.description, str(self.store.directory)
        self.screen.say(banner(self.run, corpus, checkpoints, self.resumed))
        for defect in known_defects(self.run.step.plan, jax.process_count()):
            self.screen.say(str(defect))
        steps = self.config.steps
        complete = self.steps_done >= steps
        # A run that was killed may have evaluated this step already, or not.
        self._open_metrics(evaluates=complete or self.resumed is None)
        try:
            if complete:
                done = f"{self.steps_done} steps are done; train.steps is {steps}"
                self.screen.say(f"this run is complete: {done}")
                return self._finish(save=False)
            stopped = self._lacks_evaluation() and self._evaluate()
            # `_record_step` tells of skipped steps, in the log.
            told = warnings.catch_warnings(action="ignore", category=SkippedStepWarning)
            with self.step_timeout, told:
                stopped = stopped or self._run_steps()
            return self._stop() if stopped else self._finish(save=True)
        finally:
            self._close_metrics()

    def _open_metrics(self, *, evaluates: bool = False) -> None:
        """Opens the files of metrics in process 0, without the lines after the current step.

        Where the current step `evaluates` next, its held-out loss is dropped too.
        """
        if is_lead():
            output, say = Path(self.run.config.output), self.screen.say
            after = self.steps_done - evaluates
            self.metrics = JsonLines(output / "metrics.jsonl", after=self.steps_done, say=say)
            self.evals = JsonLines(output / "evals.jsonl", after=after, say=say)

    def _close_metrics(self) -> None:
        for file in (self.metrics, self.evals):
            if file is not None:
                file.close()

    def _lacks_evaluation(self) -> bool:
        """Returns whether the held-out loss is due at the current step, and not in `evals.jsonl`.

        It is at step 0, and where a signal or a full disk kept the run before from writing it.
        """
        due = self.steps_done == 0 or self._is_due(self.config.eval_every)
        missing = self.evals is not None and self.evals.continued_at != self.steps_done
        return in_any_process(due and missing)

    def _run_steps(self) -> bool:
        """Trains to the last step; returns True if asked to stop before it."""
        pending: PendingStep | None = None
        compiled = False
        self.steady_bytes = device_memory()[0]
        self.screen.start_bar(self.steps_done)
        while self.steps_done < self.config.steps:
            # Dispatch a step, then read the metrics of the one before.
            started = time.perf_counter()
            batch = self.run.step.put(next(self.data.loader))
            data_wait = time.perf_counter() - started
            self.state, metrics = self.run.step(self.state, batch)
            if not compiled:
                compiled = True
                self.previous_finish = time.perf_counter()
                seconds = self.previous_finish - started - data_wait
                self.screen.say(f"compiled in {seconds:.1f} s")
                if self.run.sharded.arguments.offload.state:
                    self.screen.say(str(self.run.step.report.streaming))
                if is_lead() and (cliff := find_memory_cliff(self.run)):
                    self.screen.say(str(cliff))
            self.steps_done += 1
            if pending is not None and self._record_step(pending):
                pending = None
                continue
            pending = PendingStep(self.steps_done, metrics, data_wait)

            # Decide what interrupts the loop; every process decides the same.
            stopped, late, failed = self.agree(
                self.stop.asked, self._timed_save_is_due(), self.store.failed()
            )
            save = late or failed or self._is_due(self.checkpoint.every)
            # While it is postponed every step is waited for: the next applied one may be the last.
            save = save or self.save_postponed
            evaluate = self._is_due(self.config.eval_every)
            last = self.steps_done == self.config.steps
            if stopped or save or evaluate or last:
                # Wait for all steps, so that no other work counts as theirs.
                went_back = self._record_step(pending)
                pending = None
                if went_back:
                    if stopped:
                        return True
                    continue
                self.run.step.finish()
                self.steady_bytes = device_memory()[0]
                if evaluate and not stopped and not last:
                    # Before the save: a run resumed from it does not evaluate again.
                    stopped = self._evaluate()
                if save and not last:
                    self._save()
                self.previous_finish = time.perf_counter()
            if stopped and not last:
                return True
        return False

    def _go_back_after_spike(self, what: str) -> bool:
        """Restores the newest good checkpoint, without going back in the data.

        `what` describes the spike. Returns False if there is no checkpoint. Raises
        LossSpikeError if the run has gone back to it `RETURNS` times.
        """
        self.run.step.finish()
        self._check_previous_save("going back to an older one")
        # Verified, as when a run resumes, but whichever step this one began from.
        resuming = replace(self.resuming, settings=replace(self.checkpoint, step=None))
        point = resuming.choose() if self.store.steps() else None
        if point is None:
            self.screen.say(f"warning: {what}; there is no checkpoint to go back to")
            return False
        step = point.step
        self.returns[step] = self.returns.get(step, 0) + 1
        if self.returns[step] > RETURNS:
            raise LossSpikeError(
                "the loss has spikes",
                where="loss",
                got=f"{what}; the run went back to step {step} {RETURNS} times",
                fix="lower the learning rate, or look at the data",
            )
        # Free the state before its successor is read.
        for array in jax.tree.leaves(self.state):
            array.delete()
        self._restore(point)
        self.save_postponed = False
        self._close_metrics()
        self._open_metrics()
        self.screen.say(f"warning: {what}; back to step {step}, and on with the data that follows")
        self.previous_finish = time.perf_counter()
        return True

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.steps_done % every == 0

    def _timed_save_is_due(self) -> bool:
        """Returns True once, in process 0 alone, when `every_minutes` have passed since a save."""
        minutes = self.checkpoint.every_minutes
        if not is_lead() or minutes is None or time.monotonic() - self.saved_at < 60 * minutes:
            return False
        self.saved_at = time.monotonic()  # the agreed answer comes a step later
        return True

    def _record_step(self, pending: PendingStep) -> bool:
        """Waits for a step, writes and shows its metrics; returns True if the run goes back."""
        values = {name: np.asarray(value) for name, value in pending.metrics.items()}
        metrics = {name: float(values.pop(name)) for name in OWN}
        self.step_timeout.restart()  # from the first step that all processes have done
        finish = time.perf_counter()
        seconds = finish - self.previous_finish
        self.previous_finish = finish
        tokens, flops = self.run.work.tokens, self.run.work.flops
        assert tokens is not None, "known of a run"
        assert flops is not None, "known of a run"
        flops_per_device = flops / seconds / self.layout.mesh.size
        # The optimizer and its schedule count the updates that were applied.
        update = pending.step - 1 - self.skipped
        was_skipping = self.skipped_in_a_row > 0
        self.skipped = int(metrics["skipped"])
        self.skipped_in_a_row = int(metrics["skipped_in_a_row"])
        record = StepRecord(
            step=pending.step,
            loss=metrics["loss"],
            grad_norm=metrics["grad_norm"],
            learning_rate=self.learning_rate(update),
            tokens=pending.step * tokens,
            step_time_s=seconds,
            data_wait_s=pending.data_wait,
            tokens_per_s=tokens / seconds,
            tflops_per_device=flops_per_device / 1e12,
            mfu=flops_per_device / self.peak_flops if self.peak_flops else None,
            memory_valley_bytes=self.steady_bytes,
            memory_peak_bytes=device_memory()[1],
            skipped_steps=self.skipped,
            checkpoint_blocked_s=self.blocked_seconds,
            time=utc_timestamp(),
        )
        self.blocked_seconds = None
        # In the log beside the metrics of the loss, in the file beside the step's own.
        values.pop(STATE_FINITE, None)  # the step raises where it is not
        scale = {name: float(x) for name, x in values.items() if name in (LOSS_SCALE, LOSS_Z_SCORE)}
        values.pop(LOSS_Z_SCORE, None)
        if self.metrics is not None:
            of_loss = {name: x for name, x in values.items() if name not in scale}
            self.metrics.write(vars(record) | scale | loss_metrics_field(of_loss))
        log = pending.step % self.config.log_every == 0 or pending.step == self.config.steps
        self.screen.show_step(record, log=log, more=values)

        spikes = self.run.sharded.arguments.loss_spikes
        if spikes is not None and scale[LOSS_Z_SCORE] > spikes.threshold:
            return self._handle_spike(spikes, record, scale[LOSS_Z_SCORE])
        if self.skipped_in_a_row and not was_skipping:
            what = skipped_text(record.step, record.loss, record.grad_norm)
            self.screen.say(f"warning: {what}")
        return False

    def _handle_spike(self, spikes: LossSpikes, record: StepRecord, z_score: float) -> bool:
        """Warns of a loss above the threshold, or goes back, if asked; returns True if it did."""
        what = (
            f"the loss of step {record.step}, {record.loss:.4f}, is {z_score:.1f} "
            f"standard deviations (robust) above the median of the {spikes.window} before it"
        )
        if self.config.spike == "back":
            return self._go_back_after_spike(what)
        skipped = ", and its update was skipped" if spikes.skip else ""
        self.screen.say(f"warning: {what}{skipped}")
        return False

    def _evaluate(self) -> bool:
        """Measures the held-out loss in nats per `loss_unit`; returns True if asked to stop."""
        if self.data.evaluation is None:
            self.screen.say("no evaluation: the held-out data is less than one example")
            return False
        sums = []
        for batch in self.data.evaluation():
            sums.append(self.run.eval_step(self.state, batch))
            if self.agree(self.stop.asked, False, False)[0]:
                return True
        loss_sum, count, *more = jax.tree.map(lambda *each: np.sum(each, 0, float), *sums)
        loss = self.held_out_loss = float(loss_sum / count)
        measured = f"held-out loss {loss:.4f} over {count:,.0f} {self.data.loss_unit}s"
        self.screen.say(f"step {self.steps_done}: {measured}")
        if self.evals is not None:
            fields = {"step": self.steps_done, "held_out_loss": loss, "tokens": int(count)}
            with np.errstate(invalid="ignore", divide="ignore"):  # a metric's own count may be zero
                values = averaged(more[0]) if more else {}
            arrays = {name: np.asarray(value) for name, value in values.items()}
            self.evals.write({**fields, "time": utc_timestamp()} | loss_metrics_field(arrays))
        return False

    def _save(self, *, ends: bool = False) -> None:
        """Saves the state, unless this step is saved already, or a bad state might replace a good.

        While steps are skipped nothing is saved; where the run `ends` the state before them is, but
        no older step is deleted. A state that is not finite is never saved: if the run ends with
        it, NonFiniteError is raised.
        """
        started = time.perf_counter()
        self._check_previous_save(f"saving step {self.steps_done} instead")
        self._check_token_shards()
        if self.steps_done == self.saved:
            return
        skipping = self.skipped_in_a_row
        if skipping and not ends:
            if not self.save_postponed:
                why = f"steps skipped in a row: {skipping}; the next one that is applied is saved"
                self.screen.say(f"step {self.steps_done} is not saved: {why}")
            self.save_postponed = True
            return
        self.save_postponed = False
        spoiled = sorted({*not_finite(self._checkpoint_leaves())} - self.not_finite_at_start)
        if spoiled:
            what = f"step {self.steps_done} is not saved: its state is infinite or NaN"
            where, fix = ", ".join(spoiled), "resume from an older step; none was deleted"
            if ends:
                raise NonFiniteError(what, where=where, fix=fix)
            self.screen.say(f"warning: {what}: {where}")
            return
        self.store.save(
            self.steps_done,
            self.run.sharded.to_checkpoint(self.state),
            data=self.data.loader.get_state(),
            metadata=self.metadata,
            finite=True,
            delete_older=not skipping,
        )
        self.blocked_seconds = time.perf_counter() - started
        self.saved = self.steps_done
        self.saved_at = time.monotonic()

    def _checkpoint_leaves(self) -> dict[str, jax.Array | Padded]:
        """Returns {path: array} of the state as a checkpoint has it."""
        return leaves_of(self.run.sharded.to_checkpoint(self.state))

    def _check_previous_save(self, instead: str) -> None:
        """Waits for the last save; tells what happens `instead` if it failed, once."""
        failed_before, self.save_failed = self.save_failed, True
        try:
            with raise_together(
                CheckpointError("a checkpoint was not written, in another process")
            ):
                self.store.wait()
            self.save_failed = False
        except CheckpointError as error:
            if failed_before:
                raise
            self.screen.say(f"warning: step {self.saved} was not saved; {instead}\n{error}")
            self.saved = None

    def _check_token_shards(self, *, wait: bool = False) -> None:
        """Raises DamageError in every process if one has found that its token shards are damaged.

        With `wait` all of them are compared with their digests first, unless a signal asks to
        stop. Does nothing for other data.
        """
        shards = self.data.loaded.shards
        if shards is None:
            return
        if wait and not shards.check.wait(0):
            self.screen.say("comparing the rest of the token shards with their digests")
            while not (shards.check.wait(0.2) or self.stop.asked):
                pass
        elsewhere = message("the data are damaged, in another process", where=str(shards.folder))
        with raise_together(DamageError(elsewhere)):
            shards.check.raise_if_damaged()

    def _stop(self) -> int:
        """Saves, waits for the save and says how to resume; returns the exit code."""
        self.screen.end_bar()
        self._save(ends=True)
        self.store.wait()
        saved = f"stopped by a signal; saved at step {self.steps_done}"
        self.screen.say(f"{saved}. Run the same command again to resume.")
        return STOPPED

    def _finish(self, *, save: bool) -> int:
        """Saves the last step if asked to, evaluates and prints the summary."""
        self.screen.end_bar()
        if save:
            self._check_token_shards(wait=True)
            self._save(ends=True)
        stopped = self._evaluate()
        self.store.wait()
        if stopped:
            return self._stop()
        sample = make_sample(self.run, self.state, self.data.loaded) if self.config.sample else None
        self.screen.say(
            closing_summary(self.layout, self.held_out_loss, self.data.loss_unit, sample)
        )
        return DONE
