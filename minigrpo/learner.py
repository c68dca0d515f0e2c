"""The update: from a batch of completions to new weights.

    prepare     count the whole step, leave out what has no gradient, compute old log-probs
    gradient    forward and backward in micro-batches, whose gradients add up to the step's
    learn       clip the gradient, skip the step if it is not finite, step AdamW

The objective is `Learner.objective` here and `policy_loss` in losses.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from . import losses
from .config import Config
from .losses import LossNormalizer, LossSpec
from .model.lora import load_trained, trained_state
from .model.packing import PACKINGS, Packing
from .model.transformer import Predictions, Transformer
from .runtime.device import Precision, grad_scaler
from .runtime.distributed import DistContext
from .runtime.guard import Diverged, OOMBackoff, largest_weight
from .runtime.optimizer import learning_rate_at, make_optimizer
from .types import RolloutBatch, Warn

Metrics = dict[str, Tensor]  # scalars on the device
MEAN_GAP = "sampling/logp_difference_mean"
LARGEST_GAP = "sampling/logp_difference_max"
# These are means over the tokens with a gradient: zero-variance groups are left out.
PER_TOKEN = ("entropy", "teacher_kl", MEAN_GAP)


@dataclass(eq=False)
class Learner:
    """A model, its optimizer, and the update that batches make to them."""

    config: Config
    model: Transformer
    loss: LossSpec
    precision: Precision  # has the guard that counts bad steps
    dist: DistContext
    warn: Warn

    def __post_init__(self) -> None:
        config = self.config
        self.guard = self.precision.guard
        self.device = self.model.device

        # the objective; a clip or cap that is None is the loss's own
        settings = config.loss
        clips = {"low": settings.clip_low, "high": settings.clip_high, "cap": settings.ratio_cap}
        given = {name: bound for name, bound in clips.items() if bound is not None}
        self.loss = replace(self.loss, clip=replace(self.loss.clip, **given))
        entropy_coef = settings.entropy_coef
        self.learns_entropy = self.loss.needs_entropy or entropy_coef > 0
        learns = self.loss.learns_without_advantage
        if learns is None:
            learns = self.loss.surrogate not in (losses.clipped, losses.cispo)
        self.learns_without_advantage = learns or entropy_coef > 0

        # separate modules that share the parameters: the sampler's, whose shapes vary, must not be
        # compiled
        trained = self.model.for_training(
            checkpointing=config.memory.gradient_checkpointing,
            compiled=config.speed.compile_model,
        )
        self.wrapped: Any = self.dist.wrap(trained)
        self.scaler = grad_scaler(config.speed, self.device)
        self.optimizer = make_optimizer(self.model, config)
        size = config.memory.micro_batch_size
        self.backoff = OOMBackoff("update", "--micro-batch-size", size, self.warn)
        self.steps_done = 0
        self.in_update = False  # if so, the weights belong to no step

    def learn(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """`num_iterations` optimizer steps on this process's share of a batch.

        Returns the metrics of the last one, over all processes. Raises Diverged if weights are not
        finite, or too many losses or gradients in a row.
        """
        self.guard.check()
        learning_rate = learning_rate_at(step, self.config) * 0.5**self.guard.halvings
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        prepared, normalizer = self.prepare(batch)
        for _ in range(self.config.optimizer.num_iterations):
            metrics = self.gradient(prepared, normalizer)
            self.scaler.unscale_(self.optimizer)
            norm = clip_grad_norm_(self.model.parameters(), self.config.optimizer.grad_clip)
            metrics["grad_norm"] = norm
            all_good = self._update_weights(metrics["loss"], norm, step)
            if not all_good:
                break
        if all_good:
            self.guard.in_a_row = 0
        # the host waits for the device once, for all numbers
        largest, *values = torch.stack([largest_weight(self.model), *metrics.values()]).tolist()
        if not math.isfinite(largest):  # a large learning rate can do that to a finite gradient
            raise Diverged(f"step {step + 1}: weights are not finite; lower --learning-rate")
        self.steps_done = step + 1
        self.in_update = False
        learnt = dict(zip(metrics, values, strict=True))
        return learnt | {"learning_rate": learning_rate} | self.guard.metrics(self.scaler)

    def _update_weights(self, loss: Tensor, norm: Tensor, step: int) -> bool:
        """Step AdamW unless loss or gradient are not finite; return whether all is well."""
        is_finite = bool(torch.isfinite(norm) & torch.isfinite(loss))  # alike in all processes
        if is_finite:
            self.in_update = True
            self.scaler.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        if self.guard.update_scale(self.scaler, loss) or is_finite:  # float16 may lower its scale
            return True
        self.guard.skip(self.warn)
        self.warn(f"step {step + 1}: loss {loss:g}, gradient norm {norm:g}: no update")
        return False

    def prepare(self, batch: RolloutBatch) -> tuple[RolloutBatch, LossNormalizer]:
        """The part of a batch that has a gradient, with old log-probs if there are several updates.

        Completions outside its loss mask have no tokens left. The normalizer counts the whole step
        over all processes, skipped groups included.
        """
        mask = batch.completions.completion_mask
        if batch.loss_mask is not None:
            mask = mask & batch.loss_mask[..., None]
            batch = replace(batch, completions=replace(batch.completions, completion_mask=mask))
        here = torch.tensor([mask[..., 0].numel(), int(mask.sum())], device=self.device)
        num_completions, num_tokens = self.dist.sum(here)
        batch = batch.select(self.prompts_with_gradient(batch))
        if self.config.optimizer.num_iterations > 1:
            batch = replace(batch, old_logp=self._old_logp(batch))
        longest = self.config.sampling.max_new_tokens
        return batch, LossNormalizer(num_completions, num_tokens.clamp(min=1), longest)

    def prompts_with_gradient(self, batch: RolloutBatch) -> list[int]:
        """Prompts whose gradient is not exactly 0; at least one, so that the optimizer steps."""
        has_other_signal = batch.ref_logp is not None or batch.teacher_logp is not None
        if batch.advantages is None or has_other_signal or self.learns_without_advantage:
            return list(range(len(batch)))
        return [p for p, row in enumerate(batch.advantages) if row.any()] or [0]

    @torch.no_grad()
    def _old_logp(self, batch: RolloutBatch) -> Tensor:
        def in_parts(size: int) -> Tensor:
            logps = [self.forward(self.pack(part)).logp for part in batch.split(size)]
            return torch.cat([logp.cpu() for logp in logps])

        return self.backoff.run(in_parts, len(batch))

    def gradient(self, batch: RolloutBatch, normalizer: LossNormalizer) -> Metrics:
        """Compute the whole step's gradient, and return metrics over all processes.

        Out of memory, it starts over with smaller micro-batches. One of several processes cannot:
        the others would wait for it in the all-reduce.
        """

        def in_parts(size: int) -> Metrics:
            self.optimizer.zero_grad(set_to_none=True)
            parts = batch.split(size)
            of_parts: list[Metrics] = []
            for part in parts:
                # what DDP's no_sync() sets: gradients are reduced only in the last part
                self.wrapped.require_backward_grad_sync = part is parts[-1]
                loss, metrics = self.objective(part, normalizer)
                # undo DDP's averaging: the loss is already this process's share of the sum
                self.scaler.scale(loss * self.dist.world_size).backward()
                of_parts.append(metrics)
            return self._total(of_parts)

        return self.backoff.run(in_parts, len(batch), retry=self.dist.world_size == 1)

    def objective(self, part: RolloutBatch, normalizer: LossNormalizer) -> tuple[Tensor, Metrics]:
        """log-probs -> ratio to the old policy -> surrogate -> KL -> share of the step's loss."""
        settings = self.config.loss
        # 1. What the policy says now, and what it said before the step's first update.
        packing = self.pack(part)
        part = part.to(self.device)
        mask = part.completions.completion_mask
        logp, entropy = self.forward(packing)
        old_logp = logp.detach() if part.old_logp is None else part.old_logp
        teacher_kl = None  # [P, G, S], log p - log p_teacher of each token
        if part.teacher_logp is not None:
            teacher_kl = (old_logp - part.teacher_logp).masked_fill(~mask, 0)

        # 2. The loss.
        bonus = -settings.entropy_coef * entropy if self.learns_entropy else None
        loss, metrics = losses.policy_loss(
            logp,
            old_logp,
            self._advantages(part, teacher_kl),
            mask,
            loss=self.loss,
            kl=settings.kl,
            kl_coef=0.0 if self.config.supervised else settings.kl_coef,
            normalizer=normalizer,
            ref_logp=part.ref_logp,
            token_weights=self._token_weights(part, old_logp),
            entropy=entropy if self.learns_entropy else None,
            added=bonus,
        )

        # 3. Metrics: sums over tokens, which `_total` makes means.
        metrics |= {
            "loss": loss.detach(),
            "entropy": entropy.detach().sum(),
            "tokens": mask.sum().to(logp),
            "tokens/run": logp.new_full((), len(packing.ids)),
        }
        if teacher_kl is not None:
            metrics["teacher_kl"] = teacher_kl.sum()
        if part.completions.sampler_logp is not None:
            gap = (old_logp - part.completions.sampler_logp).masked_fill(~mask, 0).abs()
            metrics[MEAN_GAP] = gap.sum()
            metrics[LARGEST_GAP] = gap.max()
        return loss, metrics

    def _advantages(self, part: RolloutBatch, teacher_kl: Tensor | None) -> Tensor | None:
        """The advantages `[P, G]`; with a teacher `[P, G, S]`: A + c (log p_teacher - log p)."""
        if teacher_kl is None:
            return part.advantages
        assert part.advantages is not None
        return part.advantages[..., None] - self.config.loss.teacher_coef * teacher_kl

    def _token_weights(self, part: RolloutBatch, old_logp: Tensor) -> Tensor | None:
        """The weights `[P, G, S]` of --sampler-correction, because the sampler drew the tokens."""
        settings = self.config.loss
        behavior_logp = part.completions.behavior_logp
        if settings.sampler_correction == "none" or behavior_logp is None:
            return None
        return losses.sampler_weights(
            settings.sampler_correction,
            settings.sampler_cap,
            old_logp,
            behavior_logp,
            part.completions.completion_mask,
        )

    def pack(self, part: RolloutBatch) -> Packing:
        return PACKINGS[self.config.speed.packing](part.completions, self.device)

    def forward(self, packing: Packing) -> Predictions:
        """Log-probs and entropies, `[P, G, S]` each, on the policy's device."""
        with self.precision.autocast():
            return self.wrapped(packing, self.config.sampling.temperature, self.learns_entropy)

    def _total(self, of_parts: Sequence[Metrics]) -> Metrics:
        """The metrics of all micro-batches and processes: sums, means over tokens, a maximum."""
        gaps = [part.pop(LARGEST_GAP) for part in of_parts if LARGEST_GAP in part]
        own = sum((torch.stack([*part.values()]) for part in of_parts), torch.tensor(0.0))
        total = dict(zip(of_parts[0], self.dist.sum(own), strict=True))
        tokens = total.pop("tokens").clamp(min=1)
        total |= {name: total[name] / tokens for name in PER_TOKEN if name in total}
        if gaps:
            total[LARGEST_GAP] = self.dist.max(torch.stack(gaps).max())
        return total

    def state_dict(self) -> dict[str, Any]:
        """Everything that cannot be recomputed, as plain types and tensors."""
        return {
            "step": self.steps_done,
            "model": trained_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "guard": dict(vars(self.guard)),
            "scaler": self.scaler.state_dict(),  # {} without float16
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises RuntimeError, ValueError or KeyError if the state does not fit this model."""
        self.steps_done = state["step"]
        load_trained(self.model, state["model"])
        # a resume may change the flag, which decides on which device the step counts are
        fused = {"fused": self.config.speed.fused_optimizer}
        groups = [{**group, **fused} for group in state["optimizer"]["param_groups"]]
        self.optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
        vars(self.guard).update(state["guard"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
