"""The update: from a batch of completions to new weights.

    prepare     count the whole step, leave out what has no gradient, compute old log-probs
    gradient    forward and backward in micro-batches, whose gradients add up to the step's
    learn       clip the gradient, skip the step if it is not finite, step AdamW

The objective is `Learner.objective` here and `policy_loss` in losses.py.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from . import losses
from .config import Config
from .losses import LossNormalizer, LossSpec
from .model.frozen_model import FrozenModel
from .model.lora import load_trained, trained_state
from .model.packing import PACKINGS, Packing
from .model.transformer import Transformer
from .runtime.device import autocast, grad_scaler, with_training_layers
from .runtime.distributed import DistContext
from .runtime.guard import Diverged, NonFiniteGuard, OOMBackoff, largest_weight
from .runtime.optimizer import learning_rate_at, make_optimizer
from .types import RolloutBatch, Warn

Metrics = dict[str, Tensor]  # scalars on the device
MEAN_GAP, LARGEST_GAP = "sampling/logp_difference_mean", "sampling/logp_difference_max"
# These are means over the tokens with a gradient: zero-variance groups are left out.
PER_TOKEN = ("entropy", "teacher_kl", MEAN_GAP)
ENTROPY_STEP = 0.005  # by which --entropy-target moves the coefficient (arXiv 2505.22312)


class Learner:
    """A model, its optimizer, and the update that batches make to them."""

    def __init__(
        self, config: Config, model: Transformer, dist: DistContext, warn: Warn, loss: LossSpec
    ) -> None:
        self.spec = loss
        self.teacher: FrozenModel | None = None  # set by the trainer
        self.exact_kl = config.loss.teacher_kl == "exact"
        self.entropy_coef = config.loss.entropy_coef
        if self.entropy_coef or config.loss.entropy_target or self.exact_kl:
            self.spec = replace(self.spec, entropy=True)
        self.config, self.model, self.dist = config, model, dist
        self.warn, self.device = warn, model.device
        # separate modules that share the parameters: the sampler's modules must not be compiled
        self.wrapped: Any = self.dist.wrap(with_training_layers(config, model))
        self.scaler = grad_scaler(config.speed, self.device)
        self.optimizer = make_optimizer(model, config)
        batch_size = config.memory.micro_batch_size
        self.backoff = OOMBackoff("update", "--micro-batch-size", batch_size, warn)
        self.guard = NonFiniteGuard()
        self.steps_done = 0
        # of --rest-solved, here to be saved: step (from 1) -> 1 for each example solved, else 0
        self.visits: dict[int, list[int]] = {}
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
            metrics["grad_norm"], loss = norm, metrics["loss"]
            finite = bool(torch.isfinite(norm) & torch.isfinite(loss))  # alike in all processes
            if finite:
                self.in_update = True
                self.scaler.step(self.optimizer)
            self.optimizer.zero_grad(set_to_none=True)
            # in float16 a gradient that overflows is no bad step as long as the loss scale falls
            if not self.guard.update_scale(self.scaler, loss) and not finite:
                self.guard.skip(self.warn)
                self.warn(f"step {step + 1}: loss {loss:g}, gradient norm {norm:g}: no update")
                break
        else:
            self.guard.in_a_row = 0
        # one device sync
        *values, largest = torch.stack([*metrics.values(), largest_weight(self.model)]).tolist()
        if not math.isfinite(largest):  # a large learning rate can do that to a finite gradient
            raise Diverged(
                f"step {step + 1}: weights are not finite; a smaller --learning-rate may help"
            )
        self.steps_done, self.in_update = step + 1, False
        learnt = dict(zip(metrics, values, strict=True)) | {"learning_rate": learning_rate}
        if finite and (target := self.config.loss.entropy_target):
            learnt["entropy_coef"] = self.entropy_coef
            change = ENTROPY_STEP if learnt["entropy"] < target else -ENTROPY_STEP
            self.entropy_coef = max(0.0, self.entropy_coef + change)
        return learnt | self.guard.metrics(self.scaler)

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
        if self.teacher and not self.exact_kl:
            read = self.teacher.reads(batch, self.config.loss.teacher_context)
            logp = self.teacher.logp(read, self.config.sampling.temperature)
            batch = replace(batch, teacher_logp=logp)
        batch = batch.select(self.prompts_with_gradient(batch))
        if self.config.optimizer.num_iterations > 1:
            batch = replace(batch, old_logp=self._old_logp(batch))
        longest = self.config.sampling.max_new_tokens
        return batch, LossNormalizer(num_completions, num_tokens.clamp(min=1), longest)

    def prompts_with_gradient(self, batch: RolloutBatch) -> list[int]:
        """Prompts whose gradient is not exactly 0; at least one, so that the optimizer steps."""
        # bnpo divides by the tokens of the micro-batch, so leaving groups out would change it
        whole = self.spec.entropy or self.spec.weights is losses.per_local_token
        taught = batch.ref_logp is not None or batch.teacher_logp is not None
        if batch.advantages is None or taught or whole:
            return list(range(len(batch)))
        return [p for p, row in enumerate(batch.advantages) if row.any()] or [0]

    @torch.no_grad()
    def _old_logp(self, batch: RolloutBatch) -> Tensor:
        def in_parts(size: int) -> Tensor:
            logps = [self.forward(self.pack(part))[0] for part in batch.split(size)]
            return torch.cat([logp.cpu() for logp in logps])

        return self.backoff.run(in_parts, len(batch))

    def gradient(self, batch: RolloutBatch, normalizer: LossNormalizer) -> Metrics:
        """Compute the whole step's gradient, and return metrics over all processes.

        Out of memory, it starts over with smaller micro-batches. One of several processes cannot:
        the others would wait for it in the all-reduce.
        """

        def in_parts(size: int) -> Metrics:
            self.optimizer.zero_grad(set_to_none=True)
            parts, found = batch.split(size), list[Metrics]()
            for part in parts:
                # what DDP's no_sync() sets: gradients are reduced only in the last part
                self.wrapped.require_backward_grad_sync = part is parts[-1]
                loss, metrics = self.objective(part, normalizer)
                # undo DDP's averaging: the loss is already this process's share of the sum
                self.scaler.scale(loss * self.dist.world_size).backward()
                found.append(metrics)
            return self._total(found)

        return self.backoff.run(in_parts, len(batch), retry=self.dist.world_size == 1)

    def objective(self, part: RolloutBatch, normalizer: LossNormalizer) -> tuple[Tensor, Metrics]:
        """A micro-batch's share of the whole step's loss.

        log-probs -> ratio to the old policy -> clipped surrogate -> KL -> normalise.
        """
        packing, config, other = self.pack(part), self.config.loss, None
        if self.teacher and self.exact_kl:
            other = self.teacher.predictors(self.teacher.reads(part, config.teacher_context))
        part = part.to(self.device)
        completions, mask = part.completions, part.completions.completion_mask
        logp, entropy, *teacher_kl = self.forward(packing, other)  # the last if exact
        old_logp = logp.detach() if part.old_logp is None else part.old_logp
        added = -self.entropy_coef * entropy
        advantages, weights = part.advantages, None
        if teacher_kl:
            added = added + config.teacher_coef * teacher_kl[0]
        elif part.teacher_logp is not None and advantages is not None:
            teacher_kl = [(old_logp - part.teacher_logp).masked_fill(~mask, 0)]
            advantages = advantages[..., None] - config.teacher_coef * teacher_kl[0]
        correction, drawn_from = config.sampler_correction, completions.behavior_logp
        if correction != "none" and drawn_from is not None and advantages is not None:
            # tokens are not drawn from the policy: importance sampling
            probs = logp, old_logp, drawn_from, advantages, mask
            weights = losses.sampler_weights(correction, config.sampler_cap, *probs)
        loss, metrics = losses.policy_loss(
            logp,
            old_logp,
            advantages,
            mask,
            loss=self.spec,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            ratio_cap=config.ratio_cap,
            ref_logp=part.ref_logp,
            kl_coef=0.0 if part.ref_logp is None else config.kl_coef,
            kl=config.kl,
            token_weights=weights,
            normalizer=normalizer,
            entropy=entropy if self.spec.entropy else None,
            added=added,
        )
        metrics |= {
            "loss": loss.detach(),
            "entropy": entropy.detach().sum(),
            "tokens": mask.sum().to(logp),
            "tokens/run": logp.new_full((), len(packing.ids)),
        }
        if teacher_kl:
            metrics["teacher_kl"] = teacher_kl[0].detach().sum()
        if completions.sampler_logp is not None:
            gap = (old_logp - completions.sampler_logp).masked_fill(~mask, 0).abs()
            metrics |= {MEAN_GAP: gap.sum(), LARGEST_GAP: gap.max()}
        return loss, metrics

    def pack(self, part: RolloutBatch) -> Packing:
        return PACKINGS[self.config.speed.packing](part.completions, self.device)

    def forward(self, packing: Packing, other: Any = None) -> tuple[Tensor, ...]:
        """What `Transformer.forward` returns: `[P, G, S]` each, on the policy's device."""
        with self.autocast():
            temperature = self.config.sampling.temperature
            return tuple(self.wrapped(packing, temperature, self.spec.entropy, other))

    def autocast(self) -> AbstractContextManager[object]:
        """The autocast of --use-amp, unless the guard has fallen back to float32."""
        return nullcontext() if self.guard.halvings else autocast(self.config.speed, self.device)

    def _total(self, parts: Sequence[Metrics]) -> Metrics:
        """The metrics of all micro-batches and processes: sums, means over tokens, a maximum."""
        largest = [part.pop(LARGEST_GAP) for part in parts if LARGEST_GAP in part]
        own = {name: reduce(torch.add, [part[name] for part in parts]) for name in parts[0]}
        found = dict(zip(own, self.dist.sum(torch.stack([*own.values()])), strict=True))
        tokens = found.pop("tokens").clamp(min=1)
        found |= {name: found[name] / tokens for name in PER_TOKEN if name in found}
        if largest:
            found[LARGEST_GAP] = self.dist.max(torch.stack(largest).max())
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything that cannot be recomputed, as plain types and tensors."""
        return {
            "step": self.steps_done,
            "model": trained_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "guard": dict(vars(self.guard)),
            "entropy_coef": self.entropy_coef,
            "visits": self.visits,
            "scaler": self.scaler.state_dict(),  # {} without float16
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises RuntimeError, ValueError or KeyError if the state does not fit this model."""
        self.steps_done = state["step"]
        load_trained(self.model, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:  # a resume may change the flag
            group["fused"] = self.config.speed.fused_optimizer
        self.guard = NonFiniteGuard(**state["guard"])
        self.entropy_coef = state["entropy_coef"]
        self.visits.update(state["visits"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
