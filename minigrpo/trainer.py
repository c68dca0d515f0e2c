"""The training loop. GRPO and supervised fine-tuning share it; only their batches differ.

    maybe evaluate  ->  batch  ->  num_iterations optimizer steps  ->  log  ->  maybe save

Batches come from rollout.py, losses.py defines the losses, and learner.py turns a batch into new
weights. parts.py makes the parts; speed layers are in runtime/, checkpoints and logs in run/.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from .config import Config
from .evaluate import measure
from .identity import digest
from .learner import Learner
from .metrics import rollout_metrics
from .parts import Given, Parts
from .resolve import resolve
from .rollout import RolloutBatches, SupervisedBatches
from .run import samples
from .run.console import Console
from .run.logging import RunLog
from .run.run_dir import RunDir, choose_folder
from .runtime.device import PhaseTimer, memory_mib, pick_device, profiler, set_up_process
from .runtime.distributed import DistContext
from .runtime.guard import Diverged, RunFailed
from .runtime.prefetch import ExamplePrefetcher
from .runtime.signals import Stopped, StopRequest
from .runtime.statistics import Estimate
from .types import ConfigError
from .userfiles import refusing_exit

Callback = Callable[[int, Mapping[str, float]], object]  # of (step, metrics)


class Trainer:
    """A run, built from its config. Bad input is found here, before `fit` starts to work."""

    @refusing_exit(ConfigError)
    def __init__(
        self,
        config: Config,
        *,
        dist: DistContext | None = None,
        quiet: bool = False,
        callbacks: Sequence[Callback] = (),
        why: str = "",
        **objects: Any,
    ) -> None:
        """
        Args:
            callbacks: called by the main process after each step.
            why: what brought the values of settings, to be printed: see `config.settle`.
            objects: in place of names and files: see `Given.of`.
        """
        # Each part depends on those above it alone.
        self.dist = dist or DistContext()
        self.callbacks = callbacks
        self.why = why
        self.console = Console(quiet=quiet, rank=self.dist.rank)
        given = Given.of(**objects)
        folder = choose_folder(config, self.dist)
        # all processes take the main one's, so that names mean the same to all
        self.config = self.dist.on_main(lambda: resolve(config, given))
        self.device = pick_device(self.config.speed.device, self.dist.local_rank)
        set_up_process(self.config.speed, self.device)

        parts = Parts(self.config, self.device, self.console, given, folder)
        self.parts = parts
        self.tokenizer = parts.tokenizer
        self.task = parts.task
        self.scorer = parts.scorer  # of the task
        loss = parts.loss  # users' files have been run, before weights are loaded
        self.model = parts.model  # fits the tokenizer
        parts.check_examples()  # they fit the model
        self.teacher = parts.teacher  # the model as it is now, unless another is named
        self.reference = parts.reference
        if self.dist.world_size > 1:
            self.dist.refuse_differences(parts.digests() | {"settings": digest(config.flat())})
        self.learner = Learner(  # gives all processes the model of the main one
            self.config,
            self.model,
            loss,
            precision=parts.precision,
            dist=self.dist,
            warn=self.console.warn,
        )
        self.sampler = parts.sampler  # of the model, for the task
        self.timer = PhaseTimer(self.device)
        self.source = self._batch_source()
        facts = {"tokenizer": self.tokenizer.fingerprint, "shape": asdict(self.model.shape)}
        self.run_dir = RunDir(
            folder,
            self.config,
            self.dist,
            self.console,
            facts,
            self.task.questions,
            code=given.code,
            checksums=parts.checksums,
        )
        self.run_dir.open(self.learner.load_state_dict)  # loads a checkpoint, if there is one
        self.evaluations: list[dict[str, float]] = []  # of the whole run, oldest first
        self.stop_request = StopRequest(self.console.warn)

    def _batch_source(self) -> SupervisedBatches | RolloutBatches:
        prompts_per_step = self.config.sampling.prompts_per_step
        share = self.dist.share(prompts_per_step)
        prefetcher = ExamplePrefetcher(self.task, prompts_per_step, share)
        if self.config.supervised:
            context = self.model.shape.context
            return SupervisedBatches(prefetcher, self.tokenizer, context, self.timer)
        return RolloutBatches(
            self.config,
            prefetcher,
            self.sampler,
            self.scorer,
            self.learner.loss,
            self.reference,
            self.teacher,
            self.dist,
            self.timer,
        )

    @property
    def step(self) -> int:
        return self.learner.steps_done

    @cached_property
    def log(self) -> RunLog:
        """The logs, opened by the first step: until then a trainer changes no file of a run."""
        return self.run_dir.open_log(self.learner.state_dict())

    def fit(self) -> dict[str, Any]:
        """Train to `max_steps`, or until asked to stop; return the contents of summary.json."""
        log = self.log
        began = time.perf_counter()
        self.evaluations = self.dist.on_main(lambda: log.evaluated)
        self.console.introduce(
            self.config,
            self.why,
            self.task,
            self.scorer.weights,
            f"{self.dist.world_size} x {self.device.type}",
        )
        try:
            with self.stop_request, refusing_exit(RunFailed):
                with suppress(Stopped):
                    self._train()
                state = self.learner.state_dict()
                base = self.parts.base
                self.dist.on_main(lambda: self.run_dir.save_end(self.model, state, base))
                if not self._why_stopped():
                    with suppress(Stopped):
                        self._evaluate()
                stopped = self._why_stopped()
        except BaseException as error:
            status = "diverged" if isinstance(error, Diverged) else "failed"
            with suppress(RunFailed):  # if the folder has gone, `error` says so, or what came first
                # in an update, the weights are between two of a step, or not finite
                if not self.learner.in_update:
                    self.run_dir.save(self.learner.state_dict())  # alone: others may be gone
                self._summarise(status, str(error) or type(error).__name__, began)
            raise
        finally:
            log.close()
        status = "stopped" if stopped else "finished"
        summary = self._summarise(status, stopped or "max_steps", began)
        self.console.finish(self.run_dir.path, summary)
        return summary

    def _train(self) -> None:
        """Train to the end, or until asked to stop. Raises Stopped for work that is broken off."""
        run = self.config.run
        end = min(run.stop_after or run.max_steps, run.max_steps)
        with profiler(run, self.run_dir.path, self.dist.is_main) as trace:
            while self.step < end and not self.stop_request.agreed(self.dist):
                if not self.evaluations or (run.eval_every and self.step % run.eval_every == 0):
                    self._evaluate()
                metrics = self.one_step()
                self.console.update(self.step, end, metrics)
                for callback in self.callbacks if self.dist.is_main else ():
                    callback(self.step, metrics)
                trace.step()
                if self.step % run.save_every == 0 and self.step < end:  # `fit` saves the last one
                    self.dist.on_main(lambda: self.run_dir.save(self.learner.state_dict()))

    def _why_stopped(self) -> str:
        """Why the run stops before its end, the same in all processes; "" if it does not."""
        is_early = self.step < self.config.run.max_steps
        return self.stop_request.agreed(self.dist) or ("stop_after" if is_early else "")

    def one_step(self) -> dict[str, float]:
        """Draw a batch, learn from it, log it; return the metrics. `fit` goes on from there."""
        log = self.log
        step = self.step
        start = time.perf_counter()
        # environments are called from the start, rewards later
        self.scorer.begin_step(time.monotonic() if self.parts.environments else math.inf)
        batch = self.source.batch(step)
        self._refuse_cut_off()
        with self.timer.phase("update"):
            learnt = self.learner.learn(batch, step)
        metrics = self.dist.combine(rollout_metrics(batch, self.sampler.stops)) | learnt
        for name, mib in memory_mib(self.device).items():
            metrics[f"memory/{name}_mib"] = float(self.dist.max(torch.tensor(mib)))
        metrics |= {f"time/{name}": seconds for name, seconds in self.timer.take().items()}
        metrics["step_time"] = time.perf_counter() - start
        log.step(step + 1, metrics)
        samples.log_group(log, batch, step + 1, self.tokenizer)
        self.scorer.check(metrics, self.step)
        return metrics

    def _refuse_cut_off(self) -> None:
        """Raise Stopped, in all processes, if a stop was asked while code of others was called.

        The signal may have ended what that had started, such as a program that it tests, and a
        reward may take this for a wrong answer. A resume makes the step again.
        """
        request = self.stop_request
        is_asked = request.reason != ""
        came_in_calls = request.asked_at > self.scorer.began
        is_cut_off = is_asked and (self.scorer.has_failed or came_in_calls)
        if self.dist.max(torch.tensor(int(is_cut_off))):
            reason = "the signal came while its rewards were made"
            self.console.warn(
                f"step {self.step + 1} is given up: {reason}; a resume makes it again"
            )
            raise Stopped

    def _evaluate(self) -> None:
        """Evaluate in the main process, unless this step has been.

        Raises Stopped, in all processes, for a signal to the main one: a resume evaluates again.
        """
        if self.evaluations and self.evaluations[-1]["step"] == self.step:
            return

        def on_main() -> dict[str, Estimate] | None:
            try:
                with self.stop_request.breaking_off():
                    evaluation = measure(self.sampler, self.scorer)
            except Stopped:
                return None
            samples.log_held_out(self.log, evaluation.greedy, evaluation.sampled, self.step)
            return evaluation.measures

        measures = self.dist.on_main(on_main)
        if measures is None:
            raise Stopped
        values = {name: estimate.value for name, estimate in measures.items()}
        self.evaluations.append({"step": self.step, **values})
        self.log.evaluation(self.step, values)  # last: a resume takes it as done
        self.console.evaluation(self.step, measures)

    def _summarise(self, status: str, reason: str, began: float) -> dict[str, Any]:
        """Write summary.json, unlock the folder, and return what was written."""
        summary = {
            "status": status,
            "exit_reason": reason,
            "step": self.step,
            "wall_seconds": time.perf_counter() - began,
            "first_evaluation": self.evaluations[0] if self.evaluations else None,
            "last_evaluation": self.evaluations[-1] if self.evaluations else None,
            "skipped_steps": self.learner.guard.skipped,
        }
        self.run_dir.write_summary(summary)
        self.run_dir.close()
        return summary
