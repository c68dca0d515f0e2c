"""The training loop. GRPO and supervised fine-tuning share it; only their batches differ.

    maybe evaluate  ->  batch  ->  num_iterations optimizer steps  ->  log  ->  maybe save

Batches come from rollout.py, losses.py defines the losses, and learner.py turns a batch into new
weights. build.py makes the parts; speed layers, checkpoints and logs are in runtime/.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from .build import Parts, as_objects, resolve
from .config import Config
from .evaluate import measure
from .learner import Learner
from .metrics import rollout_metrics
from .rollout import Batches
from .run import samples
from .run.console import Console
from .run.logging import RunLog
from .run.run_dir import RunDir
from .runtime.device import PhaseTimer, peak_memory_mib, pick_device, profiler, set_up_process
from .runtime.distributed import DistContext
from .runtime.guard import Diverged
from .runtime.signals import StopRequest
from .runtime.statistics import Estimate
from .types import REWARD, ConfigError

Callback = Callable[[int, Mapping[str, float]], object]  # of (step, metrics)


class Trainer(Parts):
    """A run, built from its config. Bad input is found here, before `fit` starts to work.

    Its model, task, sampler, scorer and loss are those of `Parts`, each made when first used.
    """

    def __init__(
        self,
        config: Config,
        *,
        dist: DistContext | None = None,
        quiet: bool = False,
        callbacks: Sequence[Callback] = (),
        **objects: Any,
    ) -> None:
        """`callbacks`: called by the main process after each step; `objects`: as `as_objects`."""
        self.dist, self.callbacks = dist or DistContext(), callbacks
        given, console = as_objects(**objects), Console(quiet=quiet, rank=self.dist.rank)
        # of the main process: others may lack the defaults of --model, if they cannot reach the Hub
        config = self.dist.on_main(lambda: resolve(config, given))
        device = pick_device(config.speed.device, self.dist.local_rank)
        super().__init__(config, device, console, given)
        set_up_process(config.speed, device)
        self.run_dir = RunDir(config, self.dist, console)
        self.check_examples()
        rests, success, task = config.sampling.rest_solved, self.scorer.success, self.task
        # prompts tell questions apart, but an environment may repeat or change them
        if rests and (config.supervised or success == REWARD or not task.num_train or task.world):
            raise ConfigError(
                "--rest-solved needs --data, a measure of what is right, and no SFT or environment"
            )
        self.learner = Learner(config, self.model, self.dist, console.warn, self.loss)
        # it may fall back to float32; `Batches` makes a sampler that has it
        self.autocast = self.learner.autocast
        self.learner.teacher = self.teacher
        self.timer = PhaseTimer(device)
        self.source = Batches(self, self.timer, self.dist, self.learner.visits)
        # last, as it loads a checkpoint: reference and teacher are copies of the initial model
        facts = {"tokenizer": self.tokenizer.fingerprint, "shape": asdict(self.model.shape)}
        self.run_dir.open(self.learner.load_state_dict, facts, self.task.questions)
        self.evaluations: list[dict[str, float]] = []  # of the whole run, oldest first

    @property
    def step(self) -> int:
        return self.learner.steps_done

    @cached_property
    def log(self) -> RunLog:
        """The logs, opened by the first step: until then a trainer changes no file of a run."""
        return self.run_dir.open_log(self.learner.state_dict())

    # --- the loop -------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        """Train to `max_steps`, or until asked to stop; return the contents of summary.json."""
        log, began = self.log, time.perf_counter()
        self.evaluations = self.dist.on_main(lambda: log.evaluated)
        self.console.introduce(
            self.config, self.task, self.scorer.weights, self.dist.world_size, self.device.type
        )
        try:
            with StopRequest(self.console.warn) as request:
                stopped = self._train(request)
                state = self.learner.state_dict()
                self.dist.on_main(lambda: self.run_dir.save_end(self.model, state))
                if not stopped:
                    self._evaluate()
        except BaseException as error:
            # in an update, the weights are between two of a step, or not finite
            if not self.learner.in_update:
                self.run_dir.save(self.learner.state_dict())  # alone: others may be gone
            status = "diverged" if isinstance(error, Diverged) else "failed"
            self._summarise(status, str(error) or type(error).__name__, began)
            raise
        finally:
            log.close()
        status = "stopped" if stopped else "finished"
        summary = self._summarise(status, stopped or "max_steps", began)
        self.console.finish(self.run_dir.path, summary)
        return summary

    def _train(self, request: StopRequest) -> str:
        """Train to the end, or until asked to stop; return why it stopped before, or ""."""
        run, stopped = self.config.run, ""
        end = min(run.stop_after or run.max_steps, run.max_steps)
        with profiler(run, self.run_dir.path, self.dist.is_main) as trace:
            while self.step < end and not stopped:
                if not self.evaluations or (run.eval_every and self.step % run.eval_every == 0):
                    self._evaluate()
                metrics = self.one_step()
                self.console.update(self.step, end, metrics)
                for callback in self.callbacks if self.dist.is_main else ():
                    callback(self.step, metrics)
                trace.step()
                if self.step % run.save_every == 0 and self.step < end:  # `fit` saves the last one
                    self.dist.on_main(lambda: self.run_dir.save(self.learner.state_dict()))
                stopped = request.agreed(self.dist)
        return stopped or ("stop_after" if self.step < run.max_steps else "")

    def one_step(self) -> dict[str, float]:
        """Draw a batch, learn from it, log it; return the metrics. `fit` goes on from there."""
        log, step, start = self.log, self.step, time.perf_counter()
        batch = self.source.batch(step)
        with self.timer.phase("update"):
            learnt = self.learner.learn(batch, step)
        metrics = self.dist.combine(rollout_metrics(batch, self.sampler.stops)) | learnt
        peak = torch.tensor(peak_memory_mib(self.device))
        metrics["memory/peak_mib"] = float(self.dist.max(peak))
        metrics |= {f"time/{name}": seconds for name, seconds in self.timer.take().items()}
        metrics["step_time"] = time.perf_counter() - start
        log.step(step + 1, metrics)
        samples.log_group(log, batch, step + 1, self.tokenizer)
        return metrics

    def _evaluate(self) -> None:
        """Evaluate in the main process, unless this step has been."""
        if self.evaluations and self.evaluations[-1]["step"] == self.step:
            return

        def on_main() -> dict[str, Estimate]:
            found, greedy, drawn = measure(self.sampler, self.scorer)
            samples.log_held_out(self.log, greedy, drawn, self.step)
            return found

        found = self.dist.on_main(on_main)
        values = {name: x.value for name, x in found.items()}
        self.evaluations.append({"step": self.step, **values})
        self.log.evaluation(self.step, values)  # last: a resume takes it as done
        self.console.evaluation(self.step, found)

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
