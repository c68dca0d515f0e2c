"""The training loop. GRPO and supervised fine-tuning share it; only their batches differ.

    maybe evaluate  ->  batch  ->  num_iterations optimizer steps  ->  log  ->  maybe save

Batches come from rollout.py, and learner.py turns a batch into new weights by losses.py.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from . import build
from .config import Config
from .errors import ConfigError, RunFailed
from .evaluate import measure
from .given import Given
from .guard import Diverged
from .identity import digest
from .learner import Learner
from .metrics import rollout_metrics
from .model.source import ModelSource
from .rollout import RolloutBatches, SupervisedBatches
from .run.console import Console
from .run.logging import EVALUATIONS, RunLog, log_group, log_held_out, read_jsonl
from .run.run_dir import RunDir, choose_folder
from .runtime.device import PhaseTimer, memory_mib, pick_device, profiler, set_up_process
from .runtime.distributed import DistContext
from .runtime.parallel import Parallel
from .runtime.signals import Stopped, StopRequest
from .tasks.base import ExamplePrefetcher
from .userfiles import refusing_exit

Callback = Callable[[int, Mapping[str, float]], object]  # of (step, metrics)


class Trainer:
    """A run, built from its config. Bad input is found here, before `fit` starts to work.

    Args:
        dist: `DistContext.from_env()` in a script that torchrun starts.
        callbacks: called by the main process after each step.
        objects: in place of names and files: see `Given.of`.
    """

    @refusing_exit(ConfigError)
    def __init__(
        self,
        config: Config,
        *,
        dist: DistContext | None = None,
        quiet: bool = False,
        callbacks: Sequence[Callback] = (),
        **objects: Any,
    ) -> None:
        self.dist = dist = dist or DistContext()
        self.callbacks = callbacks
        self.console = console = Console(quiet=quiet, rank=dist.rank)
        given = Given.of(**objects)
        folder = choose_folder(config, dist)
        own_settings = {"settings": digest(config.flat())}
        # all processes take the main one's, so that names mean the same to all
        config = dist.on_main(lambda: build.resolve(config, given))
        self.device = pick_device(config.speed.device, dist.local_rank)
        set_up_process(config.speed, self.device)
        # 1. The models. Frozen ones may be copies: they are made before a checkpoint is loaded.
        job = build.Job.of(config, given)
        spec = given.loss_spec(config)
        self.model_source = source = ModelSource.of(config.model.name)
        checksums: dict[str, str] = {}  # of the weights that a resume loads again
        model = source.start(config, job.tokenizer, console.say, checksums, given.model)
        self.model = model
        # The run's folder keeps sizes of 0, because a resume may be on another GPU.
        self.parallel = parallel = Parallel.of(self.device, dist, config.memory.fsdp)
        fit = partial(build.fit_to_device, job, model.shape, parallel, console)
        self.config, num_kept = dist.on_main(fit)
        self.job = job = replace(job, config=self.config)
        # The learner gives all processes the model of the main one.
        self.learner = Learner(
            self.config, model, spec, parallel, console.warn, lambda: self.sampler.release()
        )
        frozen = build.FrozenModels(job, model, parallel, console, checksums, config.model.name)
        self.scorer = build.make_scorer(job, frozen, console.warn)
        self.teacher = frozen.of_flag("--teacher", config.loss.teacher)
        self.reference = frozen.of_flag("--reference", config.loss.reference_model)
        others = [other.model for other in (self.teacher, self.reference) if other]
        context = min(each.shape.context for each in [model, *others])
        build.check_examples(job, context, console)
        if dist.world_size > 1:
            dist.refuse_differences(build.digests(job, self.scorer, checksums) | own_settings)
        # 2. What else a step needs.
        self.sampler = build.make_sampler(job, self.model, console, num_kept)
        self.timer = PhaseTimer(self.device)
        self.batches = self._make_batches()
        # 3. The folder, and the checkpoint to go on from.
        facts = {"tokenizer": job.tokenizer.fingerprint, "shape": asdict(self.model.shape)}
        self.run_dir = RunDir(folder, config, dist, console, facts, checksums)
        self.run_dir.open(self.learner.load_state_dict)
        self.log: RunLog | None = None  # opened by the first step
        self.evaluations: list[dict[str, Any]] = []  # of the whole run, oldest first
        self.stop_request = StopRequest(console.warn)

    def _make_batches(self) -> SupervisedBatches | RolloutBatches:
        prompts = self.config.sampling.prompts_per_step
        prefetcher = ExamplePrefetcher(self.job.task, prompts, self.dist.share(prompts))
        if self.config.supervised:
            context = self.model.shape.context
            return SupervisedBatches(prefetcher, self.job.tokenizer, context, self.timer)
        return RolloutBatches(
            self.config,
            prefetcher,
            self.sampler,
            self.scorer,
            self.learner.spec,
            self.reference,
            self.teacher,
            self.dist,
            self.timer,
        )

    @property
    def step(self) -> int:
        return self.learner.steps_done

    def _open_log(self) -> RunLog:
        """The logs, opened once: a trainer that has not begun to step changes no file of a run."""
        self.log = self.log or self.run_dir.open_log(self.learner.state_dict())
        return self.log

    def fit(self) -> dict[str, Any]:
        """Train to `max_steps`, or until asked to stop; return the contents of summary.json."""
        began = time.perf_counter()
        log = self._open_log()
        self.evaluations = self.dist.on_main(lambda: read_jsonl(self.run_dir.path / EVALUATIONS))
        machines = f"{self.dist.world_size} x {self.device.type}"
        self.console.introduce(self.config, self.job.task, self.scorer.weights, machines)
        try:
            with self.stop_request, refusing_exit(RunFailed):
                with suppress(Stopped):
                    self._train()
                state = self.learner.state_dict()
                under = self.model_source.under_adapters(self.config.model)
                base = "" if under.base else under.pinned  # PEFT loads no adapters above others
                self.dist.on_main(lambda: self.run_dir.save_end(self.model, state, base))
                if not self._why_stopped():
                    with suppress(Stopped):
                        self._evaluate()
                stopped = self._why_stopped()
        except BaseException as error:
            status = "diverged" if isinstance(error, Diverged) else "failed"
            with suppress(RunFailed):  # the folder may have gone, which `error` may say
                # within an update the weights belong to no step, or are not finite
                if not (self.learner.in_update or self.parallel.is_sharded):
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
        first = self.step + 1
        with profiler(run, self.run_dir.path, self.dist.is_main) as trace:
            while self.step < end and not self.stop_request.agreed(self.dist):
                if not self.evaluations or (run.eval_every and self.step % run.eval_every == 0):
                    self._evaluate()
                metrics = self.one_step()
                always = self.step in (first, end)
                self.console.progress(self.step, end, metrics, always=always)
                for callback in self.callbacks if self.dist.is_main else ():
                    callback(self.step, metrics)
                trace.step()
                if self.step % run.save_every == 0 and self.step < end:  # `fit` saves the last one
                    with self.timer.phase("save"):
                        state = self.learner.state_dict()
                        self.dist.on_main(partial(self.run_dir.save, state))

    def _why_stopped(self) -> str:
        early = "stop_after" if self.step < self.config.run.max_steps else ""
        return self.stop_request.agreed(self.dist) or early

    def one_step(self) -> dict[str, float]:
        """Draw a batch, learn from it, log it; return the metrics. `fit` goes on from there."""
        log = self._open_log()
        step = self.step
        start = time.perf_counter()
        batch = self.batches.batch(step)
        # The signal may have ended a program that a reward tests; a resume makes the step again.
        if self.stop_request.agreed(self.dist):
            raise Stopped
        with self.timer.phase("update"):
            learnt = self.learner.learn(batch, step)
        metrics = self.dist.combine(rollout_metrics(batch)) | learnt
        for name, mib in memory_mib(self.device).items():
            metrics[f"memory/{name}_mib"] = float(self.dist.max(torch.tensor(mib)))
        metrics |= {f"time/{name}": seconds for name, seconds in self.timer.take().items()}
        metrics["step_time"] = time.perf_counter() - start
        log.step(step + 1, metrics)
        log_group(log, batch, step + 1, self.job.tokenizer)
        self.scorer.check(metrics, self.step)
        return metrics

    def _evaluate(self) -> None:
        """Evaluate, unless this step has been.

        Raises Stopped, in all processes, for a signal to one of them: a resume evaluates again.
        """
        if self.evaluations and self.evaluations[-1]["step"] == self.step:
            return
        log = self._open_log()
        with self.timer.phase("evaluate"):
            breaking_off = self.stop_request.breaking_off
            evaluation = measure(self.sampler, self.scorer, self.dist, breaking_off)
        answers = evaluation.greedy, evaluation.sampled
        self.dist.on_main(lambda: log_held_out(log, *answers, self.step))
        measures = evaluation.measures
        values = {name: estimate.value for name, estimate in measures.items()}
        self.evaluations.append({"step": self.step, **values})
        log.evaluation(self.step, values)  # last: a resume takes it as done
        self.console.evaluation(self.step, measures)

    def _summarise(self, status: str, reason: str, began: float) -> dict[str, Any]:
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
