"""The only training loop: GRPO and the supervised warm start are the same steps on batches from different sources.

    draw a batch  ->  num_iterations optimizer steps on it  ->  log  ->  maybe evaluate  ->  maybe checkpoint

It leaves out whatever another module can own: where batches come from (rollout.py), what a loss is (losses.py), which
tokens the model runs (layout.py), how anything is made fast (accel.py), what a run leaves behind (metrics.py).
"""

import signal
import threading
import time
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any

import tiktoken
import torch
from torch import Tensor

from . import accel
from .checkpoint import CheckpointError, State, discard_after, find_checkpoint, path_of, save_checkpoint
from .config import Config, ConfigError
from .evaluate import evaluate
from .layout import LAYOUTS, Layout
from .losses import LOSSES, Counts, per_local_token, policy_loss
from .metrics import PhaseTimer, RunLog, Screen, peak_memory_mib
from .model import GPT, GPTShape
from .optim import learning_rate_at, make_optimizer
from .reference import FrozenReference, NoReference, Reference
from .rewards import RewardScorer
from .rollout import Ahead, Gold, OnPolicy, Sampler, Source, describe, encode_prompts
from .run_folder import check_same_run, open_folder, write_config, write_summary
from .tasks import TASKS
from .tokenizer import load_tokenizer
from .types import RolloutBatch

STEPS_BETWEEN_SAMPLES = 10
SAMPLES_LOGGED = 2
PROMPTS_CHECKED = 64  # for their length, before anything is written


def build_model(config: Config, tokenizer: tiktoken.Encoding) -> GPT:
    """The model that --init-from names. Raises ValueError if it is missing, damaged or does not fit."""
    if config.init_from == "scratch":
        shape = GPTShape(tokenizer.n_vocab, config.context, config.layers, config.width, config.heads)
        model = GPT(shape, seed=config.seed)
    else:
        shipped = str(files("minigrpo.assets").joinpath("warm-start.safetensors"))
        model = GPT.from_pretrained(shipped if config.init_from == "shipped" else config.init_from)
    if model.shape.vocab_size != tokenizer.n_vocab:
        raise ConfigError(
            f"--init-from {config.init_from}: has {model.shape.vocab_size} tokens, --tokenizer {config.tokenizer} has "
            f"{tokenizer.n_vocab}; choose a model and a tokenizer that fit"
        )
    if config.max_new_tokens >= model.shape.context:
        raise ConfigError(
            f"--max-new-tokens must leave room for a prompt in the model's context of {model.shape.context}, "
            f"got {config.max_new_tokens}"
        )
    return model


class Trainer:
    """A run, from its config. Everything that can be wrong is found out here, before `fit` does any work."""

    def __init__(self, config: Config, *, quiet: bool = False) -> None:
        """Raises ValueError (ConfigError, CheckpointError) in one line that names the flag or the file."""
        self.config = config
        self.screen = Screen(quiet=quiet)
        self.device = accel.pick_device(config.device)
        self.scaler = accel.grad_scaler(config, self.device)
        self.autocast = partial(accel.autocast, config, self.device)
        self.tokenizer = load_tokenizer(config.tokenizer)
        self.task = TASKS[config.task](config.seed, config.history)
        self.model = build_model(config, self.tokenizer).to(self.device)
        probe = [self.task.held_out(i) for i in range(PROMPTS_CHECKED)]
        encode_prompts(self.tokenizer, probe, self.model.shape.context - config.max_new_tokens)
        self.reference = self._make_reference()
        self.folder = open_folder(config)
        self.step = 0  # optimizer steps are counted from 0; this many are done
        self.saved_step = -1  # the step of the newest checkpoint
        self.stop_reason = ""
        self.skipped = 0
        self.first: dict[str, float] | None = None  # evaluations
        self.last: dict[str, float] | None = None
        self.optimizer = make_optimizer(
            self.model, learning_rate=config.learning_rate, weight_decay=config.weight_decay, fused=config.fused_optimizer
        )
        self._resume(find_checkpoint(self.folder / "checkpoints", config.resume, self.screen.warn))
        accel.use_tf32(config)
        accel.checkpoint_blocks(config, self.model)
        accel.compile_blocks(config, self.model)
        self.timer = PhaseTimer(self.device)
        workers = config.num_reward_workers if config.parallel_rewards else 0
        self.scorer = RewardScorer(self.task, weights=config.weights(), workers=workers)
        names = ("loss", "clip_low", "clip_high", "ratio_cap", "kl", "kl_coef")
        self.loss_options: dict[str, Any] = {name: getattr(config, name) for name in names}
        self.loss_options["max_completion_length"] = config.max_new_tokens
        self.sampler = Sampler(config, self.model, self.tokenizer, self.autocast)
        self.source = self._make_source()

    def _make_reference(self) -> Reference:
        """The model as it is now, before a checkpoint is loaded into it."""
        if not self.config.kl_coef:
            return NoReference()
        return FrozenReference(
            self.model,
            layout=LAYOUTS[self.config.layout],
            temperature=self.config.temperature,
            micro_batch_size=self.config.micro_batch_size,
            autocast=self.autocast,
        )

    def _make_source(self) -> Source:
        examples = Ahead(self.task.train, self.config.prompts_per_step, self.step, self.config.max_steps)
        if self.config.supervised:
            return Gold(examples, self.tokenizer, self.timer, self.model.shape.context)
        return OnPolicy(self.config, examples, self.sampler, self.scorer, self.reference, self.timer)

    # --- the loop ---------------------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        """Train to `max_steps`, or until asked to stop; the summary, as `summary.json` holds it."""
        config, began = self.config, time.perf_counter()
        write_config(self.folder, config)
        self.log = RunLog(self.folder, start_step=self.step)
        handlers = self._handle_signals()
        try:
            before = self.log.evaluations.kept or [{"step": self.step, **self.evaluate(config.eval_size)}]
            self.first, self.last = before[0], before[-1]
            end = min(config.stop_after or config.max_steps, config.max_steps)
            self.screen.start(config.max_steps, self.step)
            while self.step < end and not self.stop_reason:
                self.one_step()
                if config.eval_every and self.step % config.eval_every == 0 and self.step < config.max_steps:
                    self.last = {"step": self.step, **self.evaluate(config.eval_size_during)}
                if self.step % config.save_every == 0 and self.step < config.max_steps:
                    self.save()
            if self.step < config.max_steps and not self.stop_reason:
                self.ask_to_stop("stop_after")
            path = self.save()
            self.model.save_pretrained(self.folder / "model.safetensors")
            if not self.stop_reason and self.last["step"] < self.step:
                self.last = {"step": self.step, **self.evaluate(config.eval_size)}
        except BaseException as error:
            self._summarise("failed", repr(error), time.perf_counter() - began)
            raise
        finally:
            self.screen.stop()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self.log.close()
            self.scorer.close()
        return self._finish(path, time.perf_counter() - began)

    def one_step(self) -> None:
        """Draw a batch, learn from it, log it."""
        start = time.perf_counter()
        batch = self.source.batch(self.step)
        with self.timer.phase("update"):
            learnt = self.learn(batch)
        self.step += 1
        values = {**describe(batch, self.tokenizer.eot_token), **learnt}
        values |= {f"time/{name}": seconds for name, seconds in self.timer.take().items()}
        values |= {"step_time": time.perf_counter() - start, "memory/peak_mib": peak_memory_mib(self.device)}
        self.log.step(self.step, values)
        self._log_samples(batch)
        seen = f"exact {self.last['exact']:.1%}  " if self.last else ""
        now = f"reward {values['reward']:.3f}" if "reward" in values else f"loss {values['loss']:.4f}"
        self.screen.update(self.step, self.config.max_steps, f"{now}  {seen}{values['step_time']:.2f} s/step")

    def learn(self, batch: RolloutBatch) -> dict[str, float]:
        """`num_iterations` optimizer steps on one batch; the metrics of the last."""
        config = self.config
        counts = Counts.of(batch.completions.completion_mask)  # of the whole batch, whatever is left out below
        batch = batch.select(self.live_prompts(batch))
        parts = batch.split(config.micro_batch_size or len(batch))
        layouts = [LAYOUTS[config.layout](part.completions).to(self.device) for part in parts]
        old = [self._old_logp(layout) if config.num_iterations > 1 else None for layout in layouts]
        learning_rate = learning_rate_at(
            self.step, peak=config.learning_rate, warmup_steps=config.warmup_steps, max_steps=config.max_steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        for _ in range(config.num_iterations):
            metrics = self.accumulate(parts, layouts, old, counts)
            self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip)
            metrics["grad_norm"] = norm
            if torch.isfinite(norm) or self.scaler.is_enabled():
                self.scaler.step(self.optimizer)
            else:  # one NaN has spread to every gradient: a step would spread it to every weight
                self.skipped += 1
                self.screen.warn(f"step {self.step + 1}: gradient norm is {norm.item()}; the weights stay as they are")
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        tokens = {"tokens/run": float(sum(len(layout.stream.ids) for layout in layouts))}
        return {name: float(x) for name, x in metrics.items()} | {"learning_rate": learning_rate} | tokens

    def live_prompts(self, batch: RolloutBatch) -> list[int]:
        """Prompts whose gradient is not exactly 0; one at least, so that the optimizer steps all the same."""
        everything = list(range(len(batch)))
        local = LOSSES[self.config.loss].reduce is per_local_token  # bnpo counts the tokens that are at hand
        if batch.advantages is None or batch.ref_logp is not None or local or not self.config.skip_dead_groups:
            return everything
        return [p for p in everything if batch.advantages[p].any()] or [0]

    def accumulate(
        self, parts: list[RolloutBatch], layouts: list[Layout], old: list[Tensor | None], counts: Counts
    ) -> dict[str, Tensor]:
        """Forward and backward of every micro-batch; gradients and metrics add up to the whole batch's."""
        config = self.config
        sums: dict[str, Tensor] = {}
        entropy, gaps = [], []
        for part, layout, old_logp in zip(parts, layouts, old, strict=True):
            with self.autocast():
                logp, uncertainty = self.model(layout.stream, layout, config.temperature)
            adv = None if part.advantages is None else part.advantages.to(self.device)
            ref_logp = None if part.ref_logp is None else part.ref_logp.to(self.device)
            loss, metrics = policy_loss(
                logp, old_logp, adv, layout.mask, ref_logp=ref_logp, counts=counts, **self.loss_options
            )
            self.scaler.scale(loss).backward()
            for name, value in {"loss": loss.detach(), **metrics}.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
            entropy.append(uncertainty[layout.mask])
            if part.completions.sampler_logp is not None:
                gap = logp.detach() - part.completions.sampler_logp.to(self.device)
                gaps.append(gap[layout.mask].abs())
        sums["entropy"] = torch.cat(entropy).mean()
        if gaps:
            gap = torch.cat(gaps)
            sums |= {"sampling/logp_difference_mean": gap.mean(), "sampling/logp_difference_max": gap.max()}
        return sums

    @torch.no_grad()
    def _old_logp(self, layout: Layout) -> Tensor:
        with self.autocast():
            logp, _ = self.model(layout.stream, layout, self.config.temperature)
        return logp

    # --- what it says -----------------------------------------------------------------------------------------------------

    def _log_samples(self, batch: RolloutBatch) -> None:
        if batch.rewards is None or self.step % STEPS_BETWEEN_SAMPLES:
            return
        example, texts = batch.examples[0], batch.texts[0][:SAMPLES_LOGGED]
        for g, text in enumerate(texts):
            parts = {name: float(scores[0, g]) for name, scores in batch.rewards.parts.items()}
            record = {"prompt": example.prompt, "completion": text, "truth": example.answer, "parts": parts}
            self.log.sample(self.step, {**record, "reward": float(batch.rewards.total[0, g])})
        shown = [f"prompt      {example.prompt}", f"truth       {example.answer}", *(f"completion  {t}" for t in texts)]
        self.log.sample_text(self.step, "\n".join(f"    {line}" for line in shown))

    def evaluate(self, size: int) -> dict[str, float]:
        """Evaluate on the first `size` held-out examples, log it, say it."""
        values = evaluate(self.sampler, self.task, self.scorer, size=size, seed=self.config.seed)
        self.log.evaluation(self.step, values)
        shown = "  ".join(f"{name} {values[name]:.1%}" for name in ("exact", "exact_sampled") if name in values)
        self.screen.say(f"evaluation at step {self.step} on {size} held-out examples: {shown}  reward {values['reward']:.3f}")
        return values

    def _summarise(self, status: str, reason: str, seconds: float) -> dict[str, Any]:
        summary = {"status": status, "exit_reason": reason, "step": self.step, "wall_seconds": seconds}
        summary |= {"first_evaluation": self.first, "last_evaluation": self.last, "skipped_steps": self.skipped}
        write_summary(self.folder, summary)
        return summary

    def _finish(self, checkpoint: Path, seconds: float) -> dict[str, Any]:
        status, reason = ("stopped", self.stop_reason) if self.stop_reason else ("finished", "max_steps")
        if self.first and self.last and not self.stop_reason:
            names = [name for name in self.first if name in self.last and name != "step" and not name.startswith("count/")]
            ends = [(name, self.first[name], self.last[name]) for name in names]
            title = f"before -> after {self.step} steps, {self.config.eval_size} held-out examples, {seconds:.0f} s"
            rows = [[name, f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}"] for name, first, last in ends]
            self.screen.table(title, ["", "before", "after", "change"], rows)
        self.screen.say(f"{status} ({reason}) at step {self.step}; saved {checkpoint}")
        if self.stop_reason:
            self.screen.say(f"go on with: --out-dir {self.folder} --resume auto")
        self.screen.say(f"run: {self.folder}")
        return self._summarise(status, reason, seconds)

    # --- stopping and resuming --------------------------------------------------------------------------------------------

    def ask_to_stop(self, reason: str) -> None:
        """Finish the step that is under way, save, and return from `fit`."""
        self.stop_reason = reason

    def _handle_signals(self) -> dict[signal.Signals, Any]:
        """Catch SIGINT and SIGTERM; the handlers that were there. Only a main thread may do so."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self._ask_to_stop) for number in (signal.SIGINT, signal.SIGTERM)}

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop_reason:  # asked twice: at once; checkpoints are whole or not there
            raise KeyboardInterrupt
        self.ask_to_stop(signal.Signals(number).name)
        self.screen.warn(f"{self.stop_reason}: finishing step {self.step + 1}, then saving; once more stops at once")

    def save(self) -> Path:
        """Write a checkpoint of everything that cannot be derived."""
        folder = self.folder / "checkpoints"
        if self.saved_step == self.step:
            return path_of(folder, self.step)
        state: State = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "config": self.config.to_dict(),
        }
        if self.scaler.is_enabled():
            state["scaler"] = self.scaler.state_dict()
        path = save_checkpoint(folder, self.step, state, keep_last=self.config.keep_last)
        self.saved_step = self.step
        return path

    def _resume(self, state: State | None) -> None:
        if state is None:
            if self.config.resume:
                self.screen.say(f"--resume auto: no checkpoint in {self.folder}, starting afresh")
            return
        check_same_run(self.config, state["config"], self.folder)
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"{self.folder}: does not fit this model: {error}") from None
        for group in self.optimizer.param_groups:
            group["fused"] = self.config.fused_optimizer  # a speed flag of now, not of the checkpoint
        if self.scaler.is_enabled() and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
        self.step = self.saved_step = state["step"]
        discard_after(self.folder / "checkpoints", self.step)
        self.screen.say(f"resumed from step {self.step} of {self.folder}")
