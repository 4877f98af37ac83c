"""The training loop: resume, step, measure, evaluate, save, stop.

The host runs one step ahead of the devices: metrics of a step are read after the next one is
dispatched.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fsdp_jax.checkpoint import CheckpointError, CheckpointStore
from fsdp_jax.planner import peak_flops
from fsdp_jax.processes import anywhere
from fsdp_jax.sharding.mesh import shape_of
from fsdp_jax.step.state import TrainState
from fsdp_jax.train.build import Run
from fsdp_jax.train.console import Screen, banner, last_screen
from fsdp_jax.train.dataset import Data
from fsdp_jax.train.metrics import JsonLines, device_memory, now
from fsdp_jax.train.resume import Resuming
from fsdp_jax.train.samples import make_sample
from fsdp_jax.train.signals import Agreement, StopSignal
from fsdp_jax.tree import PyTree

DONE, STOPPED = 0, 75  # exit codes


@dataclass
class Pending:
    """A dispatched step whose metrics have not been read."""

    step: int
    metrics: dict[str, jax.Array]
    data_wait: float


class Training:
    """One run, from resuming to the last screen. Every process makes the same calls; `lead` writes
    the files.

    `save_every`, `eval_every`: steps; None is at the end only. `save_seconds`: also after so long.
    """

    def __init__(
        self,
        run: Run,
        data: Data,
        store: CheckpointStore,
        stop: StopSignal,
        screen: Screen,
        *,
        output: Path,
        lead: bool,
        steps: int,
        seed: int,
        log_every: int,
        eval_every: int | None,
        save_every: int | None,
        save_seconds: float | None,
        sample: int,
        weights: str | None,
        config_hash: str,
        lora_scale: float | None,
    ) -> None:
        self.run, self.data, self.store, self.screen = run, data, store, screen
        self.output, self.lead, self.steps, self.seed = output, lead, steps, seed
        self.log_every, self.eval_every, self.save_every = log_every, eval_every, save_every
        self.save_seconds, self.saved_at = save_seconds, time.monotonic()
        self.layout = run.sharded.layout
        assert run.work.tokens is not None, "known of a run"
        assert run.work.flops is not None, "known of a run"
        self.batch_size = jax.tree.leaves(run.batch)[0].shape[0]
        self.tokens_per_step, self.flops_per_step = run.work.tokens, run.work.flops
        self.peak = peak_flops(
            self.layout.mesh.devices.flat[0].device_kind,
            run.sharded.precision.compute or jnp.float32,
        )
        self.metadata: dict[str, Any] = {
            "config": config_hash,
            "strategy": self.layout.strategy.name,
            "mesh": shape_of(self.layout.mesh),
            "corpus": data.loaded.digest,
            "tokenizer": data.tokenizer,
            "lora_scale": lora_scale,
        }
        # Read on the host: asking the schedule in the loop would queue behind the step.
        self.learning_rates = np.asarray(jax.vmap(run.schedule)(jnp.arange(steps)))
        self.stop, self.agree, self.sample, self.weights = (
            stop,
            Agreement(self.layout.mesh),
            sample,
            weights,
        )
        self.state: TrainState
        self.at = 0
        self.resumed: int | None = None
        self.saved: int | None = None
        self.retrying = False
        self.blocked: float | None = None
        self.valley: int | None = None
        self.skipped = 0
        self.clock = 0.0
        self.held_out: float | None = None
        self.metrics: JsonLines | None = None
        self.evals: JsonLines | None = None

    def resume(self, resuming: Resuming, initial: Callable[[], PyTree | None]) -> None:
        """From the checkpoint that is chosen, or a fresh state with the `initial` parameters.

        Raises:
            ConfigError: the checkpoint belongs to another corpus or another state; or the weights
                do not fit.
            DamageError: it is not as it was written.

        """
        chosen = resuming.choose()
        if chosen is None:
            self.state = self.run.sharded.init(self.seed, initial())
            return
        self.data.loader.set_state(resuming.check(chosen.step, self.metadata))
        self.state = resuming.restore(chosen.step, self.run.sharded)
        assert int(self.state.step) == chosen.step, "the state counts its own steps"
        resuming.set_aside(
            chosen
        )  # after all that might be refused: what is refused stays as it was
        self.metadata["stated"] = chosen.stated
        self.at = self.resumed = self.saved = chosen.step
        self.skipped = int(self.state.skipped)

    def train(self) -> int:
        """Trains to the last step, or until asked to stop; returns the exit code."""
        self.screen.say(self._banner())
        if self.at >= self.steps:
            self.screen.say(f"this run is complete: {self.at} of {self.steps} steps are done")
            return self._finish(save=False)
        if self.lead:
            self.metrics = JsonLines(self.output / "metrics.jsonl", after=self.at)
            self.evals = JsonLines(self.output / "evals.jsonl", after=self.at)
        try:
            stopped = self.resumed is None and self._evaluate()  # where it starts from
            stopped = stopped or self._steps()
            return self._stop() if stopped else self._finish(save=True)
        finally:
            for file in (self.metrics, self.evals):
                if file is not None:
                    file.close()

    def _steps(self) -> bool:
        """Steps until the last; True if asked to stop before."""
        pending: Pending | None = None
        self.valley = device_memory()[0]
        self.screen.start_bar(self.at)
        while self.at < self.steps:
            started = time.perf_counter()
            batch = self.run.step.put(next(self.data.loader))
            wait = time.perf_counter() - started
            first = self.clock == 0.0
            self.state, metrics = self.run.step(self.state, batch)
            if first:
                self.clock = time.perf_counter()
                self.screen.say(f"compiled in {self.clock - started - wait:.1f} s")
            self.at += 1
            if pending is not None:
                self._record(pending)
            pending = Pending(self.at, metrics, wait)
            stopped, late, failed = self.agree(
                self.stop.asked, self._long_since_saved(), self.store.failed()
            )
            save, evaluate = (
                every is not None and self.at % every == 0
                for every in (self.save_every, self.eval_every)
            )
            save = save or late or failed
            if stopped or save or evaluate or self.at == self.steps:
                self._settle(pending)
                pending = None
                if self.at < self.steps and evaluate and not stopped:
                    stopped = (
                        self._evaluate()
                    )  # before the save: a run that goes on from there does not evaluate again
                if self.at < self.steps and save:
                    self._save()
                self.clock = time.perf_counter()
            if stopped and self.at < self.steps:
                return True
        return False

    def _settle(self, pending: Pending) -> None:
        """Waits until nothing is in flight, so that what follows is not charged to a step."""
        self._record(pending)
        self.run.step.finish()
        self.valley = device_memory()[0]

    def _record(self, pending: Pending) -> None:
        """Waits for a step and writes what it measured."""
        found = {name: float(value) for name, value in pending.metrics.items()}
        finished, before = time.perf_counter(), self.clock
        self.clock, seconds = finished, finished - before
        rate = self.tokens_per_step / seconds
        tflops = self.flops_per_step / seconds / self.layout.mesh.size / 1e12
        # the optimizer counts the updates that were applied, and so does its schedule
        update = pending.step - 1 - self.skipped
        self.skipped = int(found["skipped"])
        record = {
            "step": pending.step,
            "loss": found["loss"],
            "grad_norm": found["grad_norm"],
            "learning_rate": float(self.learning_rates[update]),
            "tokens": pending.step * self.tokens_per_step,
            "step_time_s": seconds,
            "data_wait_s": pending.data_wait,
            "tokens_per_s": rate,
            "tflops_per_device": tflops,
            "mfu": tflops * 1e12 / self.peak if self.peak else None,
            "memory_valley_bytes": self.valley,
            "memory_peak_bytes": device_memory()[1],
            "skipped_steps": self.skipped,
            "checkpoint_blocked_s": self.blocked,
            "time": now(),
        }
        self.blocked = None
        if self.metrics is not None:
            self.metrics.write(record)
        self.screen.step(
            record, log=pending.step % self.log_every == 0 or pending.step == self.steps
        )

    def _evaluate(self) -> bool:
        """Held-out loss in nats per token, each token counting once; True if asked to stop
        meanwhile.
        """
        if self.data.evaluation is None:
            self.screen.say("no evaluation: what is held out is less than one example")
            return False
        sums = []
        for batch in self.data.evaluation():
            sums.append(self.run.eval_step(self.state, batch))
            if self.agree(self.stop.asked, False, False)[0]:
                return True
        total, count = np.sum([[float(x) for x in pair] for pair in sums], axis=0)
        self.held_out = float(total / count)
        self.screen.say(
            f"step {self.at}: held-out loss {self.held_out:.4f} over {count:,.0f} {self.data.unit}s"
        )
        if self.evals is not None:
            self.evals.write(
                {
                    "step": self.at,
                    "held_out_loss": self.held_out,
                    "tokens": int(count),
                    "time": now(),
                }
            )
        return False

    def _save(self) -> None:
        self._report_failure()
        if self.at != self.saved:
            state = self.run.sharded.to_checkpoint(self.state)
            self.blocked = self.store.save(
                self.at, state, data=self.data.loader.get_state(), metadata=self.metadata
            )
            self.saved, self.saved_at = self.at, time.monotonic()

    def _report_failure(self) -> None:
        """A save that failed behind our back is made up for by the next, at once; if that fails
        too, the run ends.
        """
        error = None
        try:
            self.store.wait()
        except CheckpointError as failure:
            error = failure
        failed = anywhere(error is not None)
        other = CheckpointError("a checkpoint could not be written, in another process")
        if failed and self.retrying:
            raise error or other
        if failed:
            self.screen.say(
                f"warning: step {self.saved} was not saved; saving step {self.at} instead\n{error or other}"
            )
            self.saved = None
        self.retrying = failed

    def _long_since_saved(self) -> bool:
        """Whether it is time for a save by process 0's clock, said once: clocks disagree, and the
        answer comes late.
        """
        if (
            not self.lead
            or self.save_seconds is None
            or time.monotonic() - self.saved_at < self.save_seconds
        ):
            return False
        self.saved_at = time.monotonic()
        return True

    def _stop(self) -> int:
        self.screen.end_bar()
        self._save()
        self.store.wait()
        self.screen.say(
            f"stopped by a signal; saved at step {self.at}. Run the same command again to go on."
        )
        return STOPPED

    def _finish(self, *, save: bool) -> int:
        """The last checkpoint, held-out loss, memory and a sample."""
        self.screen.end_bar()
        if save:
            self._save()
        stopped = self._evaluate()
        self.store.wait()
        if stopped:
            return self._stop()
        self.screen.say(last_screen(self.layout, self.held_out, self.data.unit, self._sample()))
        return DONE

    def _sample(self) -> str | None:
        """Of what it has learnt, from the beginning of the held-out part."""
        loaded, window = self.data.loaded, getattr(self.run.shape, "sequence_length", 0)
        if not self.sample:
            return None
        if "tokens" in self.run.batch:
            window = min(window, self.run.batch["tokens"].shape[1] - 1)
        return make_sample(
            self.run.sharded,
            self.state,
            self.run.family.task,
            loaded.held_out or loaded.train,
            loaded.tokenizer,
            length=self.sample,
            window=window,
            seed=self.seed,
        )

    def _banner(self) -> str:
        return banner(
            self.layout,
            weights=self.weights,
            corpus=self.data.loaded.description,
            batch=self.batch_size,
            tokens=self.tokens_per_step,
            checkpoints=str(self.store.directory),
            resumed=self.resumed,
        )
