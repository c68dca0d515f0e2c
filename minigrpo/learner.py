"""The update: from a batch of completions to new weights.

    prepare     leave out what has no gradient, count the whole step, compute old log-probs
    gradient    forward and backward in micro-batches, whose gradients add up to the step's
    update      clip the gradient, skip the step if it is not finite, step AdamW

The objective is `Learner.objective` here and `policy_loss` in losses.py. Sampling is in rollout.py;
the learner writes no files and prints nothing, but calls `warn` and `dump`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .config import Config
from .losses import LOSSES, LossNormalizer, per_local_token, policy_loss
from .model.lora import load_trained, trained_state
from .model.packing import PACKINGS, Packing
from .model.transformer import Transformer
from .runtime import device as layers
from .runtime.distributed import DistContext
from .runtime.guard import NonFiniteGuard, OOMBackoff, check_weights, weight_norm
from .runtime.optimizer import learning_rate_at, make_optimizer
from .runtime.stats import LARGEST, MEAN, OFF, gap_sums, truncated_importance_weights
from .types import RolloutBatch

Metrics = dict[str, Tensor]  # scalars on the device
# Micro-batches' metrics are added up, but for LARGEST; of these, the sum is divided by the tokens.
PER_TOKEN = ("entropy", MEAN, OFF)


class Learner:
    """A model, its optimizer, and the update that batches make to them."""

    def __init__(
        self,
        config: Config,
        model: Transformer,
        dist: DistContext | None = None,
        warn: Callable[[str], object] = lambda text: None,
        dump: Callable[[RolloutBatch, int], object] = lambda batch, step: None,
    ) -> None:
        """`warn` receives messages; `dump` saves a batch whose step was skipped."""
        self.config, self.model, self.dist = config, model, dist or DistContext()
        self.warn, self.dump, self.device = warn, dump, model.device
        # separate modules that share the parameters: the sampler's modules must not be compiled
        self.trained = layers.with_training_layers(config, model)
        self.wrapped = self.dist.wrap(self.trained)
        self.scaler = layers.grad_scaler(config.speed, self.device)
        self.optimizer = make_optimizer(
            model,
            learning_rate=config.optimizer.learning_rate,
            weight_decay=config.optimizer.weight_decay,
            fused=config.speed.fused_optimizer,
            offload=config.memory.offload_optimizer,
        )
        batch_size = config.memory.micro_batch_size
        self.backoff = OOMBackoff("update", "--micro-batch-size", batch_size, warn)
        self.guard = NonFiniteGuard()
        self.in_update = False  # if so, the weights belong to no step; who counts the step ends it

    def learn(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """`num_iterations` optimizer steps on this process's share of a batch.

        Returns the metrics of the last one, over all processes. Raises Diverged if the weights are
        not finite, or if too many steps in a row had a loss or gradient that is not.
        """
        self.guard.check()
        learning_rate = self._set_learning_rate(step)
        prepared, normalizer = self.prepare(batch)
        for _ in range(self.config.optimizer.num_iterations):
            with self.dist.during(f"the update of step {step + 1}"):
                metrics = self.gradient(prepared, normalizer)
            grad_clip = self.config.optimizer.grad_clip
            self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), grad_clip)
            metrics["grad_norm"] = norm
            if not self._update(metrics["loss"], norm, step):
                self._skip_step(batch, step, metrics)
                break
        else:
            self.guard.accept()
        scalars = [*metrics.values(), weight_norm(self.model)]
        *values, weights = torch.stack([x.double() for x in scalars]).tolist()  # one device sync
        check_weights(self.model, weights, step, learning_rate)
        learnt = dict(zip(metrics, values, strict=True)) | {"learning_rate": learning_rate}
        return learnt | self.guard.metrics(self.scaler)

    # --- prepare --------------------------------------------------------------------------------

    def prepare(self, batch: RolloutBatch) -> tuple[RolloutBatch, LossNormalizer]:
        """The part of a batch that has a gradient, with old log-probs if there are several updates.

        The normalizer counts the whole step over all processes, skipped groups included.
        """
        batch = batch.with_loss_mask_applied()
        mask = batch.completions.completion_mask
        here = torch.tensor([mask[..., 0].numel(), int(mask.sum())], device=self.device)
        completions, tokens = self.dist.sum(here)
        batch = batch.select(self.prompts_with_gradient(batch))
        if self.config.optimizer.num_iterations > 1:
            batch = replace(batch, old_logp=self._old_logp(batch))
        return batch, LossNormalizer(completions, tokens.clamp(min=1))

    def prompts_with_gradient(self, batch: RolloutBatch) -> list[int]:
        """Prompts whose gradient is not exactly 0; at least one, so that the optimizer steps."""
        every = list(range(len(batch)))
        # bnpo divides by the tokens of the micro-batch, so leaving groups out would change it
        local = LOSSES[self.config.loss.name].reduce is per_local_token
        if batch.advantages is None or batch.ref_logp is not None or local:
            return every
        return [p for p in every if batch.advantages[p].any()] or [0]

    @torch.no_grad()
    def _old_logp(self, batch: RolloutBatch) -> Tensor:
        def in_parts(size: int) -> Tensor:
            logps = [self.forward(self.pack(part))[0] for part in batch.split(size)]
            return torch.cat([logp.cpu() for logp in logps])

        return self.backoff.run(in_parts, len(batch))

    # --- gradient -------------------------------------------------------------------------------

    def gradient(self, batch: RolloutBatch, normalizer: LossNormalizer) -> Metrics:
        """Compute the whole step's gradient, and return metrics over all processes.

        If a single process runs out of memory, it starts over with smaller micro-batches.
        """

        def afresh(size: int) -> Metrics:
            self.optimizer.zero_grad(set_to_none=True)
            return self._accumulate(batch, normalizer, size)

        if self.dist.world_size > 1:  # no retry: the other processes would wait in the all-reduce
            return self._accumulate(batch, normalizer, self.backoff.size_of(len(batch)))
        return self.backoff.run(afresh, len(batch))

    def _accumulate(self, batch: RolloutBatch, normalizer: LossNormalizer, size: int) -> Metrics:
        """Forward and backward on `size` prompts at a time; gradients and metrics add up."""
        sums: Metrics = {}
        *first, last = batch.split(size)
        with self.dist.accumulating(self.wrapped):
            for part in first:
                _add(sums, self._backward(part, normalizer))
        _add(sums, self._backward(last, normalizer))  # DDP reduces gradients only in this one
        return self._over_processes(sums)

    def _backward(self, part: RolloutBatch, normalizer: LossNormalizer) -> Metrics:
        packing = self.pack(part)
        part = part.to(self.device)
        loss, metrics = self.objective(part, packing, normalizer)
        # undo DDP's averaging: the loss is already this process's share of the sum
        self.scaler.scale(loss * self.dist.world_size).backward()
        return metrics

    def objective(
        self, part: RolloutBatch, packing: Packing, normalizer: LossNormalizer
    ) -> tuple[Tensor, Metrics]:
        """A micro-batch's share of the whole step's loss.

        log-probs -> ratio to the old policy -> clipped surrogate -> KL -> normalise.
        """
        config, mask = self.config.loss, part.completions.completion_mask
        logp, entropy = self.forward(packing)
        loss, metrics = policy_loss(
            logp,
            part.old_logp,
            part.advantages,
            mask,
            loss=config.name,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            ratio_cap=config.ratio_cap,
            max_completion_length=self.config.sampling.max_new_tokens,
            ref_logp=part.ref_logp,
            kl_coef=config.kl_coef,
            kl=config.kl,
            token_weights=self._sampler_correction(part, logp),
            normalizer=normalizer,
        )
        metrics |= {"loss": loss.detach(), "entropy": entropy.sum(), "tokens": mask.sum().to(logp)}
        metrics["tokens/run"] = logp.new_full((), len(packing.ids))
        if part.completions.sampler_logp is not None:
            metrics |= gap_sums(_old(part, logp), part.completions.sampler_logp, mask)
        return loss, metrics

    def pack(self, part: RolloutBatch) -> Packing:
        """Build the packing on the host, then move it to the device."""
        return PACKINGS[self.config.speed.packing](part.completions).to(self.device)

    def forward(self, packing: Packing) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies `[P, G, S]` under the policy, on its device."""
        with self.autocast():
            model = self.wrapped if torch.is_grad_enabled() else self.trained
            logp, entropy = model(packing, self.config.sampling.temperature)
        return logp, entropy

    def autocast(self) -> AbstractContextManager[object]:
        """The autocast of --use-amp, unless the guard has fallen back to float32."""
        if self.guard.halvings:
            return nullcontext()
        return layers.autocast(self.config.speed, self.device)

    def _sampler_correction(self, part: RolloutBatch, logp: Tensor) -> Tensor | None:
        cap, behavior_logp = self.config.loss.sampler_correction, part.completions.behavior_logp
        if not cap or behavior_logp is None:
            return None
        return truncated_importance_weights(_old(part, logp), behavior_logp, cap)

    def _over_processes(self, sums: Metrics) -> Metrics:
        largest = sums.pop(LARGEST, None)
        totals = dict(zip(sums, self.dist.sum(torch.stack(list(sums.values()))), strict=True))
        tokens = totals.pop("tokens").clamp(min=1)
        totals |= {name: totals[name] / tokens for name in PER_TOKEN if name in totals}
        return totals if largest is None else totals | {LARGEST: self.dist.max(largest)}

    # --- update ---------------------------------------------------------------------------------

    def _set_learning_rate(self, step: int) -> float:
        learning_rate = learning_rate_at(
            step,
            peak=self.config.optimizer.learning_rate * 0.5**self.guard.halvings,
            warmup_steps=self.config.optimizer.warmup_steps,
            max_steps=self.config.run.max_steps,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate

    def _update(self, loss: Tensor, norm: Tensor, step: int) -> bool:
        """Step the optimizer if loss and gradient are finite; return False for a bad step.

        Loss and norm are equal in all processes, so all of them decide alike. With a loss scaler,
        an infinite gradient of a finite loss is not a bad step as long as the scale falls.
        """
        finite = bool(torch.isfinite(norm) & torch.isfinite(loss))
        if finite:
            self.in_update = True
            self.scaler.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        return self.guard.update_scale(self.scaler, loss, step, self.warn) or finite

    def _skip_step(self, batch: RolloutBatch, step: int, metrics: Metrics) -> None:
        learning_rate = self._set_learning_rate(step)
        check_weights(self.model, float(weight_norm(self.model)), step, learning_rate)
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        kept = self.dump(batch, step)
        where = f"; the batch is in {kept}" if kept else ""
        partly = self.in_update  # by the updates before, with --num-iterations
        result = "the updates before it stay" if partly else "the weights stay as they are"
        self.warn(f"step {step + 1}: loss {loss:g}, gradient norm {norm:g}; {result}{where}")
        self.guard.skip(self.warn, partly=partly)

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that cannot be recomputed, as plain types and tensors."""
        state = {
            "model": trained_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "guard": self.guard.state_dict(),
        }
        return state | ({"scaler": self.scaler.state_dict()} if self.scaler.is_enabled() else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises RuntimeError, ValueError or KeyError if the state does not fit this model."""
        load_trained(self.model, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.guard.load_state_dict(state["guard"])
        if self.scaler.is_enabled() and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])


def _old(part: RolloutBatch, logp: Tensor) -> Tensor:
    """The trainer's log-probs under the policy that sampled, without gradient."""
    return logp.detach() if part.old_logp is None else part.old_logp


def _add(sums: Metrics, values: Metrics) -> None:
    for name, value in values.items():
        before = sums.get(name, torch.zeros_like(value))
        sums[name] = torch.maximum(before, value) if name == LARGEST else before + value
