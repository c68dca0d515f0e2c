"""From a batch to new weights.

    prepare     leave out what has no gradient, count the whole step, compute old log-probs
    gradient    forward and backward in micro-batches; their gradients add up to the step's
    update      clip the gradient, guard against values that are not finite, step AdamW

The objective itself is `Learner.objective` here and `policy_loss` in losses.py. The learner samples
nothing, and writes and prints nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .config import Config
from .losses import (
    LOSSES,
    LossNormalizer,
    per_local_token,
    policy_loss,
    truncated_importance_weights,
)
from .model.packing import PACKINGS, Packing
from .model.transformer import Transformer
from .runtime import accel
from .runtime.distributed import DistContext
from .runtime.guard import NonFiniteGuard
from .runtime.oom import OOMBackoff
from .runtime.optim import learning_rate_at, make_optimizer
from .types import Completions, RolloutBatch

Metrics = dict[str, Tensor]  # scalars on the device
LARGEST = "gap/max"  # of metrics, the one whose micro-batches combine by maximum


class Learner:
    """A model, its optimizer, and the one way in which batches change them."""

    def __init__(
        self,
        config: Config,
        model: Transformer,
        dist: DistContext | None = None,
        warn: Callable[[str], object] = lambda text: None,
        dump: Callable[[RolloutBatch, int], object] = lambda batch, step: None,
    ) -> None:
        """`warn` is told what went wrong; `dump` keeps a batch whose step was skipped."""
        accel.check_compiler(config.speed, model.device)
        self.config, self.model, self.dist = config, model, dist or DistContext()
        self.warn, self.dump, self.device = warn, dump, model.device
        # the same parameters in modules of their own, so that the sampler's stay uncompiled
        self.trained = accel.with_training_layers(config, model)
        self.wrapped = self.dist.wrap(self.trained)
        self.scaler = accel.grad_scaler(config.speed, self.device)
        self.optimizer = make_optimizer(
            model,
            learning_rate=config.optimizer.learning_rate,
            weight_decay=config.optimizer.weight_decay,
            fused=config.speed.fused_optimizer,
        )
        batch_size = config.memory.micro_batch_size
        self.backoff = OOMBackoff("update", "--micro-batch-size", batch_size, warn)
        self.guard = NonFiniteGuard()

    def learn(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """`num_iterations` optimizer steps on this process's share of a batch.

        Returns the metrics of the last one, over all processes. Raises Diverged.
        """
        learning_rate = self._set_learning_rate(step)
        prepared, normalizer = self.prepare(batch)
        for _ in range(self.config.optimizer.num_iterations):
            with self.dist.during(f"the update of step {step + 1}"):
                metrics = self.gradient(prepared, normalizer)
            grad_clip = self.config.optimizer.grad_clip
            self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), grad_clip)
            metrics["grad_norm"] = norm
            if not self._update(metrics["loss"], norm):
                self._skip_step(batch, step, metrics)
                break
        else:
            self.guard.accept()
        values = torch.stack([x.double() for x in metrics.values()]).tolist()  # one device sync
        return dict(zip(metrics, values, strict=True)) | {"learning_rate": learning_rate}

    # --- prepare --------------------------------------------------------------------------------

    def prepare(self, batch: RolloutBatch) -> tuple[RolloutBatch, LossNormalizer]:
        """The part of a batch that has a gradient, with old log-probs if the loss needs them.

        The normalizer counts the whole step over all processes, with what is left out.
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
        # bnpo divides by the tokens of the micro-batch, so leaving some out would change it
        local = LOSSES[self.config.loss.name].reduce is per_local_token
        has_kl = batch.ref_logp is not None
        skip = self.config.speed.skip_zero_variance_groups
        if batch.advantages is None or has_kl or local or not skip:
            return every
        return [p for p in every if batch.advantages[p].any()] or [0]

    @torch.no_grad()
    def _old_logp(self, batch: RolloutBatch) -> Tensor:
        def in_parts(size: int) -> Tensor:
            logps = [self.forward(self.pack(part.completions))[0] for part in batch.split(size)]
            return torch.cat([logp.cpu() for logp in logps])

        return self.backoff.run(in_parts, len(batch))

    # --- gradient -------------------------------------------------------------------------------

    def gradient(self, batch: RolloutBatch, normalizer: LossNormalizer) -> Metrics:
        """Leave the whole step's gradient in the parameters; metrics over all processes.

        If memory runs out, it starts over with smaller micro-batches.
        """

        def afresh(size: int) -> Metrics:
            self.optimizer.zero_grad(set_to_none=True)
            return self._accumulate(batch, normalizer, size)

        if self.dist.world_size > 1:  # the others would wait for gradients that are not sent
            return self._accumulate(batch, normalizer, self.backoff.size_of(len(batch)))
        return self.backoff.run(afresh, len(batch))

    def _accumulate(self, batch: RolloutBatch, normalizer: LossNormalizer, size: int) -> Metrics:
        """Forward and backward of `size` prompts at a time; gradients and metrics add up."""
        sums: Metrics = {}
        *first, last = batch.split(size)
        with self.dist.accumulating(self.wrapped):
            for part in first:
                _add(sums, self._backward(part, normalizer))
        _add(sums, self._backward(last, normalizer))  # DDP sends gradients in this one
        return self._over_processes(sums)

    def _backward(self, part: RolloutBatch, normalizer: LossNormalizer) -> Metrics:
        packing = self.pack(part.completions)
        part = part.to(self.device)
        loss, metrics = self.objective(part, packing, normalizer)
        # DDP averages over processes, and the loss is already this process's share of the sum
        self.scaler.scale(loss * self.dist.world_size).backward()
        return metrics

    def objective(
        self, part: RolloutBatch, packing: Packing, normalizer: LossNormalizer
    ) -> tuple[Tensor, Metrics]:
        """The loss of a micro-batch, as its share of the whole step's.

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
        metrics["tokens/run"] = logp.new_full((), len(packing.tokens.ids))
        if part.completions.sampler_logp is not None:
            gap = (logp.detach() - part.completions.sampler_logp).masked_fill(~mask, 0).abs()
            metrics |= {"gap/sum": gap.sum(), LARGEST: gap.max()}
        return loss, metrics

    def pack(self, completions: Completions) -> Packing:
        """Built on the host, from lengths; then on the device."""
        return PACKINGS[self.config.speed.packing](completions).to(self.device)

    def forward(self, packing: Packing) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies `[P, G, S]` of the policy, on its device."""
        with self.autocast():
            model = self.wrapped if torch.is_grad_enabled() else self.trained
            logp, entropy = model(packing.tokens, packing, self.config.sampling.temperature)
        return logp, entropy

    def autocast(self) -> AbstractContextManager[object]:
        """--use-amp, until the guard has fallen back to float32."""
        if self.guard.halvings:
            return nullcontext()
        return accel.autocast(self.config.speed, self.device)

    def _sampler_correction(self, part: RolloutBatch, logp: Tensor) -> Tensor | None:
        if not self.config.loss.sampler_correction or part.behavior_logp is None:
            return None
        old = logp.detach() if part.old_logp is None else part.old_logp
        cap = self.config.loss.sampler_correction_cap
        return truncated_importance_weights(old, part.behavior_logp, cap)

    def _over_processes(self, sums: Metrics) -> Metrics:
        largest = sums.pop(LARGEST, None)
        totals = dict(zip(sums, self.dist.sum(torch.stack(list(sums.values()))), strict=True))
        tokens = totals.pop("tokens").clamp(min=1)
        totals["entropy"] = totals["entropy"] / tokens
        if largest is not None:
            totals["sampling/logp_difference_mean"] = totals.pop("gap/sum") / tokens
            totals["sampling/logp_difference_max"] = self.dist.max(largest)
        return totals

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

    def _update(self, loss: Tensor, norm: Tensor) -> bool:
        """Step the optimizer, unless loss or gradient is not finite; False if that is a fault.

        Loss and norm are the same in all processes, and so is the verdict. With a loss scaler, an
        infinite gradient of a finite loss is no fault: it is how the scaler finds its scale.
        """
        finite = bool(torch.isfinite(norm) & torch.isfinite(loss))
        if finite or self.scaler.is_enabled():  # which looks at the gradient itself
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return finite or (self.scaler.is_enabled() and bool(torch.isfinite(loss)))

    def _skip_step(self, batch: RolloutBatch, step: int, metrics: Metrics) -> None:
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        kept = self.dump(batch, step)
        where = f"; the batch is in {kept}" if kept else ""
        self.warn(
            f"step {step + 1}: loss {loss:g}, gradient norm {norm:g}; "
            f"the weights stay as they are{where}"
        )
        self.guard.skip(self.warn)

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that cannot be derived: plain types and tensors."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "guard": self.guard.state_dict(),
        }
        return state | ({"scaler": self.scaler.state_dict()} if self.scaler.is_enabled() else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises RuntimeError, ValueError or KeyError for the state of another model."""
        self.model.load_state_dict(state["model"])
        # a speed flag of this run, not of the checkpoint
        fused = {"fused": self.config.speed.fused_optimizer}
        groups = [group | fused for group in state["optimizer"]["param_groups"]]
        self.optimizer.load_state_dict(state["optimizer"] | {"param_groups": groups})
        self.guard.load_state_dict(state.get("guard", {}))
        if self.scaler.is_enabled() and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])


def _add(sums: Metrics, values: Metrics) -> None:
    for name, value in values.items():
        before = sums.get(name, torch.zeros_like(value))
        sums[name] = torch.maximum(before, value) if name == LARGEST else before + value
