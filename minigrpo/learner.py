"""The update: from a batch of completions to new weights."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from . import losses
from .config import Config
from .guard import Diverged, NonFiniteGuard, OOMBackoff, largest_weight
from .losses import LossNormalizer, LossSpec
from .model.logprobs import Entropy
from .model.lora import load_trained_state, trained_state
from .model.packing import Packing, pack
from .model.transformer import Predictions, Transformer
from .optimizer import grad_scaler, learning_rate_at, load_optimizer, make_optimizer
from .runtime.device import autocast
from .runtime.parallel import Parallel
from .shards import gathered, whole
from .types import RolloutBatch, Warn

Metrics = dict[str, Tensor]  # scalars on the device
MEAN_GAP = "sampling/logp_difference_mean"
LARGEST_GAP = "sampling/logp_difference_max"
TOKENS = "tokens"  # tokens in the loss; the sums of PER_TOKEN are divided by them
# of the prompts that the update runs (`prompts_with_gradient`), where `kl` is of all prompts
PER_TOKEN = ("entropy", "teacher_kl", MEAN_GAP)


@dataclass(eq=False)
class Learner:
    """A model, its optimizer, and their update by a batch."""

    config: Config
    model: Transformer
    spec: LossSpec
    parallel: Parallel
    warn: Warn
    release: Callable[[], bool] = lambda: False  # frees what rollouts keep: see OOMBackoff

    def __post_init__(self) -> None:
        config = self.config
        self.guard = NonFiniteGuard()
        self.dist = self.parallel.dist
        self.device = self.parallel.device

        # the objective; a clip or cap that is None is the loss's own
        settings = config.loss
        bounds = {"low": settings.clip_low, "high": settings.clip_high, "cap": settings.ratio_cap}
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        self.spec = replace(self.spec, clip=replace(self.spec.clip, **given))
        learns_entropy = self.spec.needs_entropy or settings.entropy_coef > 0
        self.entropy: Entropy = "learnt" if learns_entropy else "measured"

        self.model.checkpointing = config.memory.gradient_checkpointing
        self.model.compiled = config.speed.compile_model
        self.wrapped: Any = self.parallel.prepare(self.model)
        self.scaler = grad_scaler(config.speed, self.device)
        self.optimizer = make_optimizer(self.model, config)
        size = config.memory.micro_batch_size
        self.backoff = OOMBackoff("update", "--micro-batch-size", size, self.warn, self.release)
        self.steps_done = 0
        self.in_update = False  # if so, the weights belong to no step

    def learn(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Take `num_iterations` optimizer steps on this process's share of a batch.

        Returns the metrics of the last one, over all processes. Raises Diverged.
        """
        # 1. What the updates share.
        self.guard.check()
        learning_rate = learning_rate_at(step, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        prepared, normalizer = self.prepare(batch)

        # 2. The updates, up to the first bad one.
        for _ in range(self.config.optimizer.num_iterations):
            metrics = self.gradient(prepared, normalizer)
            self.scaler.unscale_(self.optimizer)
            grad_clip = self.config.optimizer.grad_clip
            norm = whole(clip_grad_norm_(self.model.parameters(), grad_clip))
            metrics["grad_norm"] = norm
            loss = metrics["loss"]
            is_finite = bool(torch.isfinite(norm) & torch.isfinite(loss))  # alike in all processes
            if is_finite:
                self.in_update = True
                self.scaler.step(self.optimizer)
            self.optimizer.zero_grad(set_to_none=True)
            lowered_scale = self.guard.update_scale(self.scaler, loss)  # float16 may need that
            if not (is_finite or lowered_scale):
                self.guard.skip()
                self.warn(f"step {step + 1}: loss {loss:g}, gradient norm {norm:g}: no update")
                break
        else:
            self.guard.in_a_row = 0

        # 3. What the step has come to. The host waits for the device once, for all numbers.
        largest = self.dist.max(largest_weight(self.model))
        numbers = torch.stack([*metrics.values(), largest]).tolist()
        learnt: dict[str, float] = dict(zip(metrics, numbers[:-1], strict=True))
        if not math.isfinite(numbers[-1]):  # a finite gradient may be too large
            raise Diverged(f"step {step + 1}: weights are not finite; lower --learning-rate")
        self.steps_done = step + 1
        self.in_update = False
        return {**learnt, "learning_rate": learning_rate, **self.guard.metrics(self.scaler)}

    def prepare(self, batch: RolloutBatch) -> tuple[RolloutBatch, LossNormalizer]:
        """The prompts of a batch that have a gradient, packed, and the counts of all prompts."""
        mask = batch.completions.completion_mask
        if batch.loss_mask is not None:
            mask = mask & batch.loss_mask[..., None]
            completions = replace(batch.completions, completion_mask=mask)
            batch = replace(batch, completions=completions)
        counts = [mask[..., 0].numel(), int(mask.sum())]
        here = torch.tensor(counts, device=self.device)
        num_completions, num_tokens = self.dist.sum(here)
        longest = self.config.sampling.max_new_tokens
        normalizer = LossNormalizer(num_completions, num_tokens.clamp(min=1), longest)

        batch = batch.select(self.prompts_with_gradient(batch))
        batch = replace(batch, packed=pack(batch.completions, self.config.speed.packing))
        if self.config.optimizer.num_iterations > 1:
            batch = replace(batch, old_logp=self._old_logp(batch))
        return batch, normalizer

    def prompts_with_gradient(self, batch: RolloutBatch) -> list[int]:
        """Prompts whose gradient is not exactly 0; at least one, so that the optimizer steps."""
        vanishes = self.spec.surrogate in (losses.clipped, losses.cispo)  # where advantages are 0
        others = batch.reference_logp, batch.teacher_logp, self.config.loss.entropy_coef or None
        if batch.advantages is None or not vanishes or any(x is not None for x in others):
            return list(range(len(batch)))
        return batch.advantages.any(-1).nonzero()[:, 0].tolist() or [0]

    @torch.no_grad()
    def _old_logp(self, batch: RolloutBatch) -> Tensor:
        def in_micro_batches(size: int) -> Tensor:
            micro_batches, own = self._micro_batches(batch, size)
            logps = [self.forward(each, "none").logp.cpu() for each in micro_batches]
            return torch.cat(logps[:own])

        return self.backoff.run(in_micro_batches, len(batch), retry=not self.parallel.is_sharded)

    def _micro_batches(self, batch: RolloutBatch, size: int) -> tuple[list[RolloutBatch], int]:
        """What this process runs, and how many of them are its own: others repeat the last."""
        own = batch.split(size)
        repeated = self.parallel.num_micro_batches(len(own)) - len(own)
        return own + own[-1:] * repeated, len(own)

    def gradient(self, batch: RolloutBatch, normalizer: LossNormalizer) -> Metrics:
        """Compute the whole step's gradient, and return metrics over all processes."""

        def in_micro_batches(size: int) -> Metrics:
            self.optimizer.zero_grad(set_to_none=True)
            micro_batches, own = self._micro_batches(batch, size)
            measured: list[Metrics] = []
            for number, micro_batch in enumerate(micro_batches, 1):
                is_last = number == len(micro_batches)
                with self.parallel.adding_up(self.wrapped, is_last):
                    loss, metrics = self.objective(micro_batch, normalizer)
                    # the loss is already this process's share of the sum
                    weight = self.parallel.gradient_divisor if number <= own else 0
                    self.scaler.scale(loss * weight).backward()
                measured.append(metrics)
            return self._total(measured[:own])

        # one of several processes cannot start over: the others would wait for it
        is_alone = self.dist.world_size == 1
        return self.backoff.run(in_micro_batches, len(batch), retry=is_alone)

    def objective(
        self, micro_batch: RolloutBatch, normalizer: LossNormalizer
    ) -> tuple[Tensor, Metrics]:
        """A micro-batch's share of the step's loss, and its metrics for `_total`."""
        settings = self.config.loss
        # 1. The log-probs of the policy now, and before the step's first update.
        trainer_logp, entropy = self.forward(micro_batch, self.entropy)
        assert entropy is not None
        micro_batch = micro_batch.to(self.device)
        completions = micro_batch.completions
        mask = completions.completion_mask
        old_logp = micro_batch.old_logp
        if old_logp is None:
            old_logp = trainer_logp.detach()
        advantages = micro_batch.advantages  # [P, G]
        teacher_kl = None  # [P, G, S], log p - log p_teacher of each token
        if micro_batch.teacher_logp is not None:
            assert advantages is not None
            teacher_kl = (old_logp - micro_batch.teacher_logp).masked_fill(~mask, 0)
            advantages = advantages[..., None] - settings.teacher_coef * teacher_kl

        # 2. The loss.
        loss, metrics = losses.policy_loss(
            trainer_logp,
            old_logp,
            advantages,
            mask,
            loss=self.spec,
            kl=settings.kl,
            kl_coef=settings.kl_coef,
            normalizer=normalizer,
            ref_logp=micro_batch.reference_logp,
            token_weights=losses.sampler_weights(
                settings.sampler_correction,
                settings.sampler_cap,
                old_logp,
                completions.truncated_sampler_logp,
                mask,
            ),
            entropy=entropy if self.entropy == "learnt" else None,
            added=-settings.entropy_coef * entropy if settings.entropy_coef else None,
        )

        # 3. Metrics.
        num_run = sum(len(prompt.ids) for prompt in micro_batch.packed or ())
        metrics["loss"] = loss.detach()
        metrics["entropy"] = entropy.detach().sum()
        metrics[TOKENS] = mask.sum().to(trainer_logp)
        metrics["tokens/run"] = trainer_logp.new_full((), num_run)
        if teacher_kl is not None:
            metrics["teacher_kl"] = teacher_kl.sum()
        if completions.sampler_logp is not None:
            gap = (old_logp - completions.sampler_logp).masked_fill(~mask, 0).abs()
            metrics[MEAN_GAP] = gap.sum()
            metrics[LARGEST_GAP] = gap.max()
        return loss, metrics

    def forward(self, micro_batch: RolloutBatch, entropy: Entropy) -> Predictions:
        """Log-probs and entropies, `[P, G, S]` each, on the policy's device."""
        assert micro_batch.packed is not None  # by `prepare`
        packing = Packing(micro_batch.packed, self.device)
        keeps_casts = not self.config.memory.gradient_checkpointing
        with autocast(self.config.speed, self.device, keeps_casts):
            return self.wrapped(packing, self.config.sampling.temperature, entropy)

    def _total(self, measured: Sequence[Metrics]) -> Metrics:
        """The metrics of all micro-batches and processes: sums, means over tokens, or maxima."""
        rows = [torch.stack(list(metrics.values())) for metrics in measured]
        sums = self.dist.sum(sum(rows, torch.tensor(0.0)))
        total = dict(zip(measured[0], sums, strict=True))
        num_tokens = total.pop(TOKENS).clamp(min=1)
        for name in total.keys() & PER_TOKEN:
            total[name] = total[name] / num_tokens
        if LARGEST_GAP in total:
            gaps = torch.stack([metrics[LARGEST_GAP] for metrics in measured])
            total[LARGEST_GAP] = self.dist.max(gaps.max())
        return total

    def state_dict(self) -> dict[str, Any]:
        """What cannot be recomputed, as plain types and tensors; the main process alone has all."""
        state = {
            "step": self.steps_done,
            "model": trained_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "guard": dict(vars(self.guard)),
            "scaler": self.scaler.state_dict(),  # {} without float16
        }
        return gathered(state, self.dist.is_main)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises RuntimeError, ValueError or KeyError if the state does not fit this model."""
        self.steps_done = state["step"]
        load_trained_state(self.model, state["model"])
        load_optimizer(self.optimizer, state["optimizer"], self.config.speed.fused_optimizer)
        vars(self.guard).update(state["guard"], in_a_row=0)  # a resume tries as many again
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
