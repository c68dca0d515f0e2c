"""The only training loop: GRPO and the supervised warm start are the same steps on batches from
different sources.

    draw a batch  ->  num_iterations optimizer steps on it  ->  log  ->  maybe evaluate  ->  maybe
    checkpoint

It leaves out whatever another module can own: where batches come from (rollout.py), what a loss is
(losses.py), which tokens the model runs (packing.py), how anything is made fast (accel.py), what a
run leaves behind (metrics.py).
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from .config import Config
from .evaluate import evaluate
from .learner import Learner
from .model.encoding import encode_answers, encode_prompts
from .model.packing import PACKINGS
from .model.pretrained import build_model
from .model.tokenizer import load_tokenizer
from .reference import FrozenReference, NoReference, Reference
from .rewards import RewardScorer
from .rollout import ExamplePrefetcher, RolloutBatches, Sampler, Source, SupervisedBatches, describe
from .runtime import accel, fast, settings
from .runtime.checkpoint import (
    CheckpointError,
    State,
    discard_after,
    find_checkpoint,
    path_of,
    save_checkpoint,
)
from .runtime.distributed import DistContext
from .runtime.estimate import Measured, Plan, plan
from .runtime.logging import NoLog, PhaseTimer, RunLog, Screen, peak_memory_mib
from .runtime.run_dir import (
    check_ranks,
    check_same_run,
    dump_batch,
    lock,
    open_folder,
    write_config,
    write_summary,
)
from .runtime.signals import StopRequest
from .tasks.registry import load_rewards, load_task
from .types import RolloutBatch

STEPS_BETWEEN_SAMPLES = 10
STEPS_WITHOUT_SIGNAL = 20  # before it is said
SAMPLES_LOGGED = 2
PROMPTS_CHECKED = 64  # for their length, before anything is written


class Trainer:
    """A run, from its config. Everything that can be wrong is found out here, before `fit` does any
    work.
    """

    def __init__(
        self, config: Config, *, dist: DistContext | None = None, quiet: bool = False
    ) -> None:
        """Raises ValueError (ConfigError, CheckpointError) in one line that names the flag or the
        file.
        """
        self.config = config
        self.dist = dist or DistContext()
        self.screen = Screen(quiet=quiet, rank=self.dist.rank)
        self.device = accel.pick_device(config.speed.device, self.dist.local_rank)
        check_ranks(config, self.dist)
        self.tokenizer = load_tokenizer(config.model.tokenizer)
        self.task = load_task(
            config.task.name,
            seed=config.run.seed,
            history=config.task.history,
            data=config.task.data,
            listener=self.screen if self.dist.is_main else None,
        )
        self.scorer = RewardScorer(
            self.task,
            weights=config.task.weights(),
            functions=load_rewards(config.task.rewards),
            workers=config.speed.num_reward_workers if config.speed.parallel_rewards else 0,
            timeout_s=config.task.reward_timeout,
            warn=self.screen.warn,
        )
        self.model = build_model(config, self.tokenizer, self.screen.say).to(self.device)
        accel.chunk_logprobs(config, self.model)  # before the reference is copied from it
        self.plan = self._make_plan()
        if config.run.plan:
            of_each = (
                f", in each of {self.dist.world_size} processes" if self.dist.world_size > 1 else ""
            )
            self.screen.table(
                f"a step, planned (nothing repeats){of_each}", ["", ""], self.plan.rows()
            )
            raise SystemExit(0)
        self.learner = Learner(config, self.model, self.dist, self.screen.warn, self._dump)
        self.reference = self._make_reference()
        self.lock: IO[str] | None = None
        self.folder = self.dist.on_main(self._open_folder)
        self.step = 0  # optimizer steps are counted from 0; this many are done
        self.saved_step = -1  # the step of the newest checkpoint
        self.stop_reason = ""
        self.measured = Measured()
        self.dead_steps = 0  # in a row, without a group whose rewards differ
        self.first: dict[str, float] | None = None  # evaluations
        self.last: dict[str, float] | None = None
        try:
            self._resume()
        except ValueError:
            self._unlock()
            raise
        accel.use_tf32(config)
        accel.checkpoint_blocks(config, self.model)
        self.timer = PhaseTimer(self.device)
        self.sampler = Sampler(
            config, self.model, self.tokenizer, self.learner.autocast, self.screen.warn
        )
        accel.compile_blocks(config, self.model)
        self.source = self._make_source()

    def _make_plan(self) -> Plan:
        """From the lengths of some examples. Raises ConfigError if a prompt is too long."""
        config, some = (
            self.config,
            [self.task.train(0), *map(self.task.held_out, range(PROMPTS_CHECKED))],
        )
        prompt_len = encode_prompts(
            self.tokenizer, some, self.model.shape.context - config.sampling.max_new_tokens
        )[1]
        return plan(
            config,
            self.model.shape,
            prompt_len=float(prompt_len.float().mean()),
            answer_len=float(
                encode_answers(self.tokenizer, some)[1]
                .float()
                .mean()
                .clamp(max=config.sampling.max_new_tokens)
            ),
            device=self.device.type,
            world_size=self.dist.world_size,
        )

    def _open_folder(self) -> Path:
        folder = open_folder(self.config)
        self.lock = lock(folder)
        return folder

    def _unlock(self) -> None:
        if self.lock:
            self.lock.close()

    def _make_reference(self) -> Reference:
        """The model as it is now, before a checkpoint is loaded into it."""
        if not self.config.loss.kl_coef:
            return NoReference()
        return FrozenReference(
            accel.low_precision_copy(self.config, self.model),
            packing=PACKINGS[self.config.speed.packing],
            temperature=self.config.sampling.temperature,
            backoff=self.learner.backoff,
            autocast=self.learner.autocast,
            offload=self.config.memory.offload_reference,
        )

    def _make_source(self) -> Source:
        examples = ExamplePrefetcher(self.task, self.config, self.dist, self.step)
        if self.config.supervised:
            return SupervisedBatches(examples, self.tokenizer, self.timer, self.model.shape.context)
        return RolloutBatches(
            self.config, examples, self.sampler, self.scorer, self.reference, self.timer, self.dist
        )

    # --- the loop ---------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        """Train to `max_steps`, or until asked to stop; the summary, as `summary.json` holds it."""
        config, began = self.config, time.perf_counter()
        self.log = RunLog(self.folder, start_step=self.step) if self.dist.is_main else NoLog()
        self._introduce()
        try:
            with StopRequest(self.screen.warn) as request:
                self._train(request)
                self.save()
                self.dist.on_main(
                    lambda: self.model.save_pretrained(self.folder / "model.safetensors")
                )
                if not self.stop_reason:
                    self._evaluate(config.run.eval_size)
        except BaseException as error:
            self._summarise("failed", repr(error), time.perf_counter() - began)
            raise
        finally:
            self.screen.stop()
            self.log.close()
            self.scorer.close()
        return self._finish(time.perf_counter() - began)

    def _train(self, request: StopRequest) -> None:
        config = self.config
        evaluated = self.dist.on_main(lambda: self.log.evaluated)
        self.first, self.last = (evaluated[0], evaluated[-1]) if evaluated else (None, None)
        self._evaluate(config.run.eval_size if not evaluated else 0)
        end = min(config.run.stop_after or config.run.max_steps, config.run.max_steps)
        self.screen.start(config.run.max_steps, self.step)
        with accel.profiler(config, self.folder, self.device, self.dist.is_main) as profiler:
            while self.step < end and not self.stop_reason:
                self.one_step()
                profiler.step()
                if self.step < config.run.max_steps:
                    if config.run.eval_every and self.step % config.run.eval_every == 0:
                        self._evaluate(config.run.eval_size_during)
                    if self.step % config.run.save_every == 0:
                        self.save(must=False)
                self.stop_reason = request.agreed(self.dist)
        if self.step < config.run.max_steps and not self.stop_reason:
            self.stop_reason = "stop_after"

    def one_step(self) -> None:
        """Draw a batch, learn from it, log it."""
        start, graphs = time.perf_counter(), accel.graphs_compiled()
        with self.dist.during(f"step {self.step + 1}"):
            batch = self.source.batch(self.step)
        with self.timer.phase("update"):
            learnt = self.learner.learn(batch, self.step)
        self.step += 1
        values = {**self.dist.combine(describe(batch, self.tokenizer.eot_token)), **learnt}
        values |= {f"time/{name}": seconds for name, seconds in self.timer.take().items()}
        values |= {
            "step_time": time.perf_counter() - start,
            "memory/peak_mib": peak_memory_mib(self.device),
        }
        if self.config.speed.compile_model:
            values["recompiles"] = (
                accel.graphs_compiled() - graphs
            )  # the first steps are the warm-up
        self.log.step(self.step, values)
        self.measured.see(values)
        self._look_for_a_signal(values)
        self._log_samples(batch)
        seen = f"exact {self.last['exact']:.1%}  " if self.last else ""
        now = (
            f"reward {values['reward']:.3f}" if "reward" in values else f"loss {values['loss']:.4f}"
        )
        self.screen.update(
            self.step, self.config.run.max_steps, f"{now}  {seen}{values['step_time']:.2f} s/step"
        )

    # --- what it says -----------------------------------------------------------------------------

    def _introduce(self) -> None:
        """One line with what a step is, and what should be known before it begins."""
        config, ranks = self.config, self.dist.world_size
        self.dist.on_main(lambda: write_config(self.folder, config, ranks))
        share = config.sampling.prompts_per_step // ranks
        micro = -(-share // (config.memory.micro_batch_size or share))
        completions = (
            "true answers" if config.supervised else f"{config.sampling.group_size} completions"
        )
        self.screen.say(
            f"{config.loss.name}: {config.sampling.prompts_per_step} prompts x {completions} a step, on {ranks} "
            f"x {self.device.type}: "
            f"{share} prompts each in {micro} micro-batch{'es' if micro > 1 else ''}; "
            f"{sum(p.numel() for p in self.model.parameters()) / 1e6:.1f} M parameters"
        )
        if config.speed.fast:
            kind = fast.device_kind(config.speed.device, config.speed.amp_dtype)
            layers = {name: config.flat()[name] for name in fast.LAYERS[kind]}
            self.screen.say(f"--fast on {kind}: {' '.join(settings.as_flags(layers))}")
        if config.speed.cuda_graphs and self.device.type != "cuda":
            self.screen.warn(
                "--cuda-graphs: no CUDA device, so rounds are run and not recorded: slower, same "
                "tokens"
            )
        if config.sampling.top_k or config.sampling.top_p < 1:
            self.screen.warn(
                "--top-k and --top-p truncate the sampler only: training keeps the whole "
                "distribution "
                "(sampling/removed_mass is what they remove; --sampler-correction weighs for it)"
            )

    def _look_for_a_signal(self, values: dict[str, float]) -> None:
        """Say so, once, if there has been nothing to learn from for a while."""
        self.dead_steps = self.dead_steps + 1 if values.get("frac_reward_zero_std") == 1 else 0
        if self.dead_steps == STEPS_WITHOUT_SIGNAL and self.dist.is_main:
            self.screen.warn(
                f"for {STEPS_WITHOUT_SIGNAL} steps all completions of each prompt had equal "
                "rewards: nothing is learnt. A "
                "model that never gets a part right needs a warm start on true answers first "
                "(--loss nll)"
            )

    def _log_samples(self, batch: RolloutBatch) -> None:
        if batch.rewards is None or self.step % STEPS_BETWEEN_SAMPLES:
            return
        example, texts = batch.examples[0], batch.texts[0][:SAMPLES_LOGGED]
        for g, text in enumerate(texts):
            parts = {name: float(scores[0, g]) for name, scores in batch.rewards.parts.items()}
            record = {
                "prompt": example.prompt,
                "completion": text,
                "truth": example.answer,
                "parts": parts,
            }
            self.log.sample(self.step, {**record, "reward": float(batch.rewards.total[0, g])})
        shown = [
            f"prompt      {example.prompt}",
            f"truth       {example.answer}",
            *(f"completion  {t}" for t in texts),
        ]
        self.log.sample_text(self.step, "\n".join(f"    {line}" for line in shown))

    def _evaluate(self, size: int) -> None:
        """Evaluate on the first `size` held-out examples, log it, say it; unless this step has been
        evaluated.
        """
        if not size or (self.last and self.last["step"] == self.step):
            return
        options = {"size": size, "seed": self.config.run.seed}
        values = self.dist.on_main(
            lambda: evaluate(self.sampler, self.task, self.scorer, **options)
        )
        self.last = {"step": self.step, **values}
        self.first = self.first or self.last
        self.log.evaluation(self.step, values)
        shown = "  ".join(
            f"{name} {values[name]:.1%}" for name in ("exact", "exact_sampled") if name in values
        )
        self.screen.say(
            f"evaluation at step {self.step} on {values['n']:.0f} held-out examples: {shown}  "
            f"reward {values['reward']:.3f}"
        )

    def _summarise(self, status: str, reason: str, seconds: float) -> dict[str, Any]:
        summary = {
            "status": status,
            "exit_reason": reason,
            "step": self.step,
            "wall_seconds": seconds,
        }
        summary |= {
            "first_evaluation": self.first,
            "last_evaluation": self.last,
            "skipped_steps": self.learner.guard["skipped"],
            "measured": self.measured.means(),
        }
        if self.dist.is_main:
            write_summary(self.folder, summary)
        self._unlock()
        return summary

    def _finish(self, seconds: float) -> dict[str, Any]:
        status, reason = (
            ("stopped", self.stop_reason) if self.stop_reason else ("finished", "max_steps")
        )
        if self.first and self.last and not self.stop_reason:
            names = [
                name
                for name in self.first
                if name in self.last and name not in ("step", "n") and "count/" not in name
            ]
            ends = [(name, self.first[name], self.last[name]) for name in names]
            title = f"before -> after {self.step} steps, {self.last['n']:.0f} held-out examples, {seconds:.0f} s"
            rows = [
                [name, f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}"]
                for name, first, last in ends
            ]
            self.screen.table(title, ["", "before", "after", "change"], rows)
        if self.measured.steps:
            title = (
                "a step of one process, planned (nothing repeats, no guess is wrong) and measured"
            )
            rows = self.measured.beside(self.plan, self.device.type, self.dist.world_size)
            self.screen.table(title, ["", "planned", "measured"], rows)
        self.screen.say(
            f"{status} ({reason}) at step {self.step}; saved "
            f"{path_of(self.folder / 'checkpoints', self.step)}"
        )
        if self.stop_reason:
            self.screen.say(f"go on with: --out-dir {self.folder} --resume auto")
        self.screen.say(f"run: {self.folder}")
        return self._summarise(status, reason, seconds)

    # --- saving and resuming ----------------------------------------------------------------------

    def save(self, *, must: bool = True) -> None:
        """Write a checkpoint of everything that cannot be derived.

        Unless it `must` succeed, a full disk is said loudly and training goes on; the checkpoints
        before it stay.
        """
        try:
            self.dist.on_main(self._save_checkpoint)
        except (OSError, RuntimeError) as error:  # torch says RuntimeError for a full disk
            if must:
                raise
            self.screen.warn(
                f"step {self.step}: NOT SAVED ({str(error).splitlines()[0][:200]}); going on"
            )

    def _save_checkpoint(self) -> None:
        if self.saved_step != self.step:
            state = {**self.learner.state_dict(), "step": self.step, "config": self.config.flat()}
            state["shape"] = asdict(self.model.shape)  # so that a checkpoint is a model by itself
            state["made_by"] = {
                "processes": self.dist.world_size,
                "threads": torch.get_num_threads(),
            }
            save_checkpoint(
                self.folder / "checkpoints", self.step, state, keep_last=self.config.run.keep_last
            )
            self.saved_step = self.step

    def _resume(self) -> None:
        """Load what --resume names, if anything: the main process reads, the others are told."""
        found: State = {}

        def find() -> bool:
            found.update(
                find_checkpoint(
                    self.folder / "checkpoints", self.config.run.resume, self.screen.warn
                )
                or {}
            )
            if found:
                check_same_run(self.config, found["config"], self.folder)
                discard_after(self.folder / "checkpoints", found["step"])
            return bool(found)

        if not self.dist.on_main(find):
            if self.config.run.resume:
                self.screen.say(f"--resume auto: no checkpoint in {self.folder}, starting afresh")
            return
        state = self.dist.broadcast(found)
        try:
            self.learner.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{self.folder}: does not fit this model: {' '.join(str(error).split())}"
            ) from None
        self.step = self.saved_step = state["step"]
        now = {"processes": self.dist.world_size, "threads": torch.get_num_threads()}
        for name, number in state.get("made_by", now).items():
            if number != now[name]:
                self.screen.warn(
                    f"the checkpoint was written by {number} {name}, this run has {now[name]}: it "
                    "goes on with the same "
                    "batches, but not bit for bit as it would have"
                )
        self.screen.say(f"resumed from step {self.step} of {self.folder}")

    def _dump(self, batch: RolloutBatch, step: int) -> Path | None:
        try:
            return dump_batch(self.folder, batch, step, self.dist.rank)
        except (OSError, RuntimeError):  # a full disk must not end what the guard has saved
            return None
