"""The training loop. GRPO and supervised fine-tuning share it; only their batches differ.

    batch  ->  num_iterations optimizer steps  ->  log  ->  maybe evaluate  ->  maybe save

Batches come from rollout.py, losses.py defines the losses, and learner.py turns a batch into new
weights. build.py makes the parts; speed layers, checkpoints and logs are in runtime/.
"""

import time
from dataclasses import asdict
from typing import Any

import torch

from .build import (
    check_examples,
    make_model,
    make_reference,
    make_scorer,
    make_task,
    make_tokenizer,
    weights_digest,
    with_own_tokenizer,
)
from .config import Config
from .evaluate import measure
from .learner import Learner
from .model.lora import frozen_weights
from .rollout import BatchSource, RolloutBatches, SupervisedBatches
from .runtime import device as layers
from .runtime import samples
from .runtime.console import Console
from .runtime.distributed import DistContext
from .runtime.guard import Diverged
from .runtime.prefetch import ExamplePrefetcher
from .runtime.run_dir import RunDir
from .runtime.signals import StopRequest
from .runtime.stats import Estimate, rollout_metrics
from .sampling.generate import Sampler

Evaluation = dict[str, float]


class Trainer:
    """A run, built from its config. Bad input is found here, before `fit` starts to work."""

    def __init__(
        self, config: Config, *, dist: DistContext | None = None, quiet: bool = False
    ) -> None:
        """Raises ConfigError, one line that names the setting or the file."""
        self.config = config = with_own_tokenizer(config)
        self.dist = dist or DistContext()
        self.console = Console(quiet=quiet, rank=self.dist.rank)
        say, warn = self.console.say, self.console.warn
        self.run_dir = RunDir(config, self.dist, self.console)
        self.device = layers.pick_device(config.speed.device, self.dist.local_rank)
        layers.set_up_process(config.speed, self.device)

        self.tokenizer = self.dist.on_main_first(lambda: make_tokenizer(config, say))
        self.task = make_task(config)
        self.model = self.dist.on_main_first(
            lambda: make_model(config, self.tokenizer, self.device, say)
        )
        check_examples(config, self.task, self.tokenizer, self.model.shape.context)
        self.scorer = make_scorer(config, self.task, self.tokenizer, self.device, warn)
        self.learner = Learner(config, self.model, self.dist, warn, self.run_dir.dump)
        # before a checkpoint is loaded: the reference stays the initial model
        self.reference = make_reference(config, self.learner, self.tokenizer)
        base = self._initial_weights_digest()
        self.sampler = Sampler(
            config,
            self.model,
            self.tokenizer,
            self.learner.autocast,
            warn,
            speculate=self.task.speculate,
        )
        self.timer = layers.PhaseTimer(self.device)
        shape = asdict(self.model.shape)
        facts = {"tokenizer": self.tokenizer.fingerprint, "base_model": base, "shape": shape}
        questions = self.task.questions
        load = self.learner.load_state_dict
        self.learner.steps_done = self.run_dir.open(load, facts, questions)
        self.source = self._make_source()

        self.stop_reason = ""
        self.first: Evaluation | None = None
        self.last: Evaluation | None = None
        self.intervals: dict[float, dict[str, Estimate]] = {}  # by step, of this start of the run

    @property
    def step(self) -> int:
        """The number of steps that are done."""
        return self.learner.steps_done

    def _initial_weights_digest(self) -> str:
        """A hash of the weights that no checkpoint holds, and a resumed run needs; "" if none."""
        if self.config.model.name == "scratch":  # made again from the seed
            return ""
        if self.config.model.lora_rank:
            return weights_digest(frozen_weights(self.model))
        return weights_digest(self.model.state_dict()) if self.reference else ""

    def _make_source(self) -> BatchSource:
        examples = ExamplePrefetcher(self.task, self.config, self.dist)
        if self.config.supervised:
            context = self.model.shape.context
            return SupervisedBatches(examples, self.tokenizer, self.timer, context)
        return RolloutBatches(
            self.config, examples, self.sampler, self.scorer, self.reference, self.timer, self.dist
        )

    # --- the loop -------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        """Train to `max_steps`, or until asked to stop; return the contents of summary.json."""
        self.log = self.run_dir.open_log(self.step, self._state())
        began = time.perf_counter()
        parameters = sum(p.numel() for p in self.model.parameters())
        self.console.introduce(
            self.config,
            self.device,
            self.dist.world_size,
            parameters,
            self.task,
            self.scorer.weights,
        )
        try:
            with StopRequest(self.console.warn) as request:
                self._train(request)
                self.run_dir.save_weights(self.model)  # first: with little room they matter most
                self._save()
                if not self.stop_reason:
                    self._evaluate()
        except BaseException as error:
            # weights in the middle of an update belong to no step; those that diverged are finite
            if not self.learner.in_update:
                self.run_dir.save_here(self.step, self._state())
            reason = str(error) or type(error).__name__
            status = "diverged" if isinstance(error, Diverged) else "failed"
            self._summarise(status, reason, time.perf_counter() - began)
            raise
        finally:
            self.log.close()
        seconds = time.perf_counter() - began
        status = "stopped" if self.stop_reason else "finished"
        summary = self._summarise(status, self.stop_reason or "max_steps", seconds)
        self.console.finish(self.run_dir.path, summary)
        if not self.stop_reason and self.first and self.last:
            ends = (self.first, self.last)
            found = {f"step {x['step']:.0f}": x | self.intervals.get(x["step"], {}) for x in ends}
            self.console.measures(found)
        return summary

    def _train(self, request: StopRequest) -> None:
        run = self.config.run
        evaluated = self.dist.on_main(lambda: self.log.evaluated)
        self.first, self.last = (evaluated[0], evaluated[-1]) if evaluated else (None, None)
        if not self.last or (self._evaluation_is_due() and self.last["step"] < self.step):
            self._evaluate()
        end = min(run.stop_after or run.max_steps, run.max_steps)
        with layers.profiler(run, self.run_dir.path, self.dist.is_main) as profiler:
            while self.step < end and not self.stop_reason:
                self.one_step()
                profiler.step()
                if self._evaluation_is_due():
                    self._evaluate()
                if self.step < run.max_steps and self.step % run.save_every == 0:
                    self._save(required=False)
                self.stop_reason = request.agreed(self.dist)
        if self.step < run.max_steps and not self.stop_reason:
            self.stop_reason = "stop_after"

    def one_step(self) -> dict[str, float]:
        """Draw a batch, learn from it, log it; return the metrics."""
        start = time.perf_counter()
        batch = self.source.batch(self.step)
        with self.timer.phase("update"):
            learnt = self.learner.learn(batch, self.step)
        metrics = self.dist.combine(rollout_metrics(batch, self.sampler.stops)) | learnt
        peak = torch.tensor(layers.peak_memory_mib(self.device))
        metrics["memory/peak_mib"] = float(self.dist.max(peak))
        metrics |= {f"time/{name}": seconds for name, seconds in self.timer.take().items()}
        metrics["step_time"] = time.perf_counter() - start
        self.log.step(self.step, metrics)
        samples.log_group(self.log, batch, self.step, self.tokenizer, self.task)
        last_step = self.config.run.stop_after or self.config.run.max_steps
        self.console.update(self.step, last_step, metrics, self.last or {})
        return metrics

    def _evaluation_is_due(self) -> bool:
        """Whether an evaluation between steps is due now."""
        every = self.config.run.eval_every
        return bool(every) and self.step < self.config.run.max_steps and self.step % every == 0

    def _evaluate(self) -> None:
        """Evaluate in the main process, unless this step has been."""
        if self.last and self.last["step"] == self.step:
            return
        run = self.config.run

        def on_main() -> dict[str, Estimate]:
            found, greedy, drawn = measure(
                self.sampler,
                self.task,
                self.scorer,
                size=run.eval_size,
                seed=run.seed,
                samples=run.eval_samples,
            )
            samples.log_held_out(self.log, greedy, drawn, self.step, self.task)
            return found

        found = self.dist.on_main(on_main)
        values = {name: x.value for name, x in found.items()}
        self.last, self.intervals[self.step] = {"step": self.step, **values}, found
        self.first = self.first or self.last
        self.log.evaluation(self.step, values)  # last: a resume takes it as done
        self.console.evaluation(self.step, found)

    # --- the end --------------------------------------------------------------------------------

    def _save(self, *, required: bool = True) -> None:
        """Save a checkpoint, unless this step has one. `required`: no room is an error."""
        self.run_dir.save(self.step, self._state(), required=required)

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds, beside what the run's folder adds."""
        return {"shape": asdict(self.model.shape), **self.learner.state_dict()}

    def _summarise(self, status: str, reason: str, seconds: float) -> dict[str, Any]:
        summary = {
            "status": status,
            "exit_reason": reason,
            "step": self.step,
            "wall_seconds": seconds,
            "first_evaluation": self.first,
            "last_evaluation": self.last,
            "skipped_steps": self.learner.guard.skipped,
        }
        self.run_dir.write_summary(summary)
        self.run_dir.close()
        return summary
