"""The training loop. GRPO and the supervised warm start share it; only their batches differ.

    batch  ->  num_iterations optimizer steps  ->  log  ->  maybe evaluate  ->  maybe save

Batches come from rollout.py, losses.py defines the losses, and learner.py turns a batch into new
weights. Speed, checkpoints, logging and the screen are in runtime/.
"""

import time
from typing import Any

from .config import Config
from .evaluate import measure, size_of
from .learner import Learner
from .rollout import BatchSource, RolloutBatches, SupervisedBatches
from .runtime import accel, announce, samples
from .runtime.build import (
    make_model,
    make_reference,
    make_scorer,
    make_task,
    make_token_scoring,
    make_tokenizer,
)
from .runtime.distributed import DistContext
from .runtime.estimate import MeasuredSteps, measure_lengths_and_estimate
from .runtime.examples import check_examples
from .runtime.failures import Diverged, RunFailed, describe
from .runtime.logging import PhaseTimer, Screen, peak_memory_mib
from .runtime.measures import Estimate, is_of
from .runtime.no_effect import Situation
from .runtime.origins import fetch_models
from .runtime.prefetch import ExamplePrefetcher
from .runtime.process_state import KeptState
from .runtime.rollout_metrics import counts_of, rollout_metrics
from .runtime.run_dir import RunDir
from .runtime.signals import StopRequest
from .runtime.startup import check_machine
from .runtime.tokenizers import with_own_tokenizer
from .sampling.sampler import Sampler

Evaluation = dict[str, float]


class Trainer:
    """A run, built from its config. Bad input is found here, before `fit` starts to work."""

    def __init__(
        self, config: Config, *, dist: DistContext | None = None, quiet: bool = False
    ) -> None:
        """Raises ValueError (ConfigError, CheckpointError), one line that names flag or file."""
        self.config = config = with_own_tokenizer(config)
        self.dist = dist or DistContext()
        self.screen = Screen(quiet=quiet, rank=self.dist.rank)
        self.run_dir = RunDir(config, self.dist, self.screen)  # before users' code may call chdir
        self.device = check_machine(config, self.dist)
        self.dist.on_main(lambda: fetch_models(config))
        accel.set_up_process(config.speed, self.device)
        self.process = KeptState()  # which users' code must not change

        self.tokenizer = make_tokenizer(config, self.screen.say)
        self.task = make_task(config, self.screen if self.dist.is_main else None)
        warn, files = self.screen.warn, self.run_dir.files
        token_scoring = make_token_scoring(config, self.tokenizer, self.device, warn, files)
        self.scorer = make_scorer(config, self.task, warn, token_scoring)
        self.process.undo(self.screen.warn)
        self.model = make_model(config, self.tokenizer, self.device, self.screen.say, warn)
        limits = self.model.shape.context, warn
        self.dist.on_main(lambda: check_examples(config, self.task, self.tokenizer, *limits))
        tried = self.scorer.token_sources, self.task, self.model.shape.context
        self.dist.on_main(lambda: token_scoring.try_out(*tried))
        self.estimate = measure_lengths_and_estimate(
            config,
            self.model.shape,
            self.task,
            self.tokenizer,
            device=self.device.type,
            world_size=self.dist.world_size,
        )
        self.process.undo(self.screen.warn)

        self.learner = Learner(config, self.model, self.dist, warn, self.run_dir.dump)
        autocast = self.learner.autocast
        # before a checkpoint is loaded: the reference stays the initial model
        self.reference = make_reference(config, self.learner, self.tokenizer)
        self.sampler = Sampler(config, self.model, self.tokenizer, autocast, warn)
        self.timer = PhaseTimer(self.device)
        judge = getattr(self.task, "judged_by", "")
        self.step = self.run_dir.open(self.learner, self.tokenizer.fingerprint, judge)  # steps done
        self.source = self._make_source(first_step=self.step)

        self.stop_reason = ""
        self.measured = MeasuredSteps()
        self.signal = announce.SignalWatch(self.screen, self.dist.is_main)
        self.first: Evaluation | None = None
        self.last: Evaluation | None = None
        self.intervals: dict[float, dict[str, Estimate]] = {}  # by step, of this start of the run

    def _situation(self) -> Situation:
        processes, shape = self.dist.world_size, self.model.shape
        return Situation(self.config, self.device, processes, shape, self.task)

    def _make_source(self, first_step: int) -> BatchSource:
        examples = ExamplePrefetcher(self.task, self.config, self.dist, first_step)
        if self.config.supervised:
            context = self.model.shape.context
            return SupervisedBatches(examples, self.tokenizer, self.timer, context)
        return RolloutBatches(
            self.config, examples, self.sampler, self.scorer, self.reference, self.timer, self.dist
        )

    # --- the loop -------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        """Train to `max_steps`, or until asked to stop; return the contents of summary.json."""
        self.log = self.run_dir.open_log(self.step)
        began = time.perf_counter() - self.run_dir.earlier_seconds
        parameters = sum(p.numel() for p in self.model.parameters())
        announce.introduce(self.screen, self._situation(), parameters, self.scorer.weights)
        try:
            with StopRequest(self.screen.warn) as request:
                self._train(request)
                self.run_dir.save(self.step, self.learner)
                self.run_dir.save_weights(self.model)
                if not self.stop_reason:
                    self._evaluate(self.config.run.eval_size)
        except BaseException as error:
            has_weights = not isinstance(error, RunFailed) or isinstance(error, Diverged)
            if has_weights and not self.learner.in_update:
                why = "stopped" if isinstance(error, KeyboardInterrupt) else "the run fails"
                self.run_dir.save_before_ending(self.step, self.learner, why)
            self._summarise("failed", describe(error), time.perf_counter() - began)
            raise
        finally:
            self.screen.stop()
            self.log.close()
            self.scorer.close()
        return self._finish(time.perf_counter() - began)

    def _train(self, request: StopRequest) -> None:
        run = self.config.run
        evaluated = self.dist.on_main(lambda: self.log.evaluated)
        self.first, self.last = (evaluated[0], evaluated[-1]) if evaluated else (None, None)
        if not self.last:
            self._evaluate(run.eval_size)
        elif self.last["step"] < self.step:  # an evaluation that was due here may have been stopped
            self._evaluate(self._size_due())
        end = min(run.stop_after or run.max_steps, run.max_steps)
        self.screen.start(end, self.step)
        where = self.run_dir.path, self.device, self.dist.is_main
        with accel.profiler(run, *where, end - self.step, self.screen.warn) as profiler:
            while self.step < end and not self.stop_reason:
                self.one_step()
                profiler.step()
                self._evaluate(self._size_due())
                if self.step < run.max_steps and self.step % run.save_every == 0:
                    self.run_dir.save(self.step, self.learner, required=False)
                self.stop_reason = request.agreed(self.dist)
        if self.step < run.max_steps and not self.stop_reason:
            self.stop_reason = "stop_after"

    def one_step(self) -> None:
        """Draw a batch, learn from it, log it."""
        start, graphs = time.perf_counter(), accel.graphs_compiled()
        with self.dist.during(f"step {self.step + 1}"):
            batch = self.source.batch(self.step)
        self.process.undo(self.screen.warn)
        with self.timer.phase("update"):
            learnt = self.learner.learn(batch, self.step)
        self.step, self.learner.in_update = self.step + 1, False
        own = rollout_metrics(batch, self.sampler.stops)
        own["memory/peak_mib"] = peak_memory_mib(self.device)
        rolled = self.dist.combine(own, counts_of(batch))
        metrics = {**rolled, **learnt}
        metrics |= {f"time/{name}": seconds for name, seconds in self.timer.take().items()}
        metrics["step_time"] = time.perf_counter() - start
        if self.config.speed.compile_model:  # more than 0 after the first steps is a recompile
            metrics["recompiles"] = accel.graphs_compiled() - graphs
        self.log.step(self.step, metrics)
        self.measured.add(metrics)
        self.signal.add(metrics)
        samples.log_group(self.log, batch, self.step, self.tokenizer, self.task)
        beside = announce.progress(metrics, self.last, self.config)
        self.screen.update(self.step, self.config.run.max_steps, beside)

    def _size_due(self) -> int:
        """How many examples an evaluation between steps has now; 0 if none is due."""
        run = self.config.run
        due = run.eval_every and self.step < run.max_steps and self.step % run.eval_every == 0
        return run.eval_size_during if due else 0

    def _evaluate(self, size: int) -> None:
        """Evaluate on the first `size` held-out examples, unless this step has been, on as many."""
        run, parts = self.config.run, (self.sampler, self.task, self.scorer)
        if self.last and self.last["step"] == self.step:
            size *= not is_of(self.last, size_of(self.task, size), run.eval_samples)
        if not size:
            return
        kept = samples.HeldOut(self.task)
        found = self.dist.on_main(
            lambda: measure(
                *parts, size=size, seed=run.seed, samples=run.eval_samples, keep=kept.keep
            )
        )
        self.process.undo(self.screen.warn)
        values = {name: x.value for name, x in found.items()}
        self.last, self.intervals[self.step] = {"step": self.step, **values}, found
        self.first = self.first or self.last
        kept.log(self.log, self.step)
        self.log.evaluation(self.step, values)  # last: a resume takes it as done
        announce.say_evaluation(self.screen, self.step, found)

    # --- the end --------------------------------------------------------------------------------

    def _finish(self, seconds: float) -> dict[str, Any]:
        status, reason = "stopped" if self.stop_reason else "finished", self.stop_reason
        if not self.stop_reason and self.first and self.last:
            announce.show_change(self.screen, self.first, self.last, self.intervals, seconds)
        if self.measured.steps:
            rows = self.measured.beside(self.estimate, self.device.type, self.dist.world_size)
            announce.show_cost(self.screen, rows)
        announce.say_end(self.screen, self.run_dir.shown, status, reason or "max_steps", self.step)
        return self._summarise(status, reason or "max_steps", seconds)

    def _summarise(self, status: str, reason: str, seconds: float) -> dict[str, Any]:
        summary = {
            "status": status,
            "exit_reason": reason,
            "step": self.step,
            "wall_seconds": seconds,
            "first_evaluation": self.first,
            "last_evaluation": self.last,
            "skipped_steps": self.learner.guard.skipped,
            "measured": self.measured.means(),
        }
        if self.dist.is_main:
            self.run_dir.write_summary(summary)
        self.run_dir.close()
        return summary
