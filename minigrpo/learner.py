"""The update: from a batch of completions to new weights.

    prepare     leave out what has no gradient, count the whole step, compute old log-probs
    gradient    forward and backward in micro-batches, whose gradients add up to the step's
    update      clip the gradient, skip the step if it is not finite, step AdamW

The objective is `Learner.objective` here and `policy_loss` in losses.py. Sampling is in rollout.py;
the learner writes no files and prints nothing, but calls `warn` and `dump`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from .config import Config
from .losses import LossNormalizer, LossSpec, loss_spec, per_local_token, policy_loss
from .model.lora import load_trained, trained_state
from .model.packing import PACKINGS, Packing
from .model.transformer import Transformer
from .runtime.device import autocast, grad_scaler, with_training_layers
from .runtime.distributed import DistContext
from .runtime.guard import NonFiniteGuard, OOMBackoff, check_weights, largest_weight
from .runtime.optimizer import learning_rate_at, make_optimizer
from .types import RolloutBatch

Metrics = dict[str, Tensor]  # scalars on the device
MEAN_GAP, LARGEST_GAP = "sampling/logp_difference_mean", "sampling/logp_difference_max"
# These are means over the tokens with a gradient: zero-variance groups are left out.
PER_TOKEN = ("entropy", MEAN_GAP)


class Learner:
    """A model, its optimizer, and the update that batches make to them."""

    def __init__(
        self,
        config: Config,
        model: Transformer,
        dist: DistContext | None = None,
        warn: Callable[[str], object] = lambda text: None,
        dump: Callable[[RolloutBatch, int], object] = lambda batch, step: None,
        loss: LossSpec | None = None,
    ) -> None:
        """`dump` saves a batch whose step was skipped; `loss`: None for the row of --loss."""
        self.loss = loss or loss_spec(config.loss.name)
        self.config, self.model, self.dist = config, model, dist or DistContext()
        self.warn, self.dump, self.device = warn, dump, model.device
        # separate modules that share the parameters: the sampler's modules must not be compiled
        self.trained = with_training_layers(config, model)
        self.wrapped = self.dist.wrap(self.trained)
        self.scaler = grad_scaler(config.speed, self.device)
        self.optimizer = make_optimizer(model, config)
        batch_size = config.memory.micro_batch_size
        self.backoff = OOMBackoff("update", "--micro-batch-size", batch_size, warn)
        self.guard = NonFiniteGuard()
        self.steps_done = 0
        # with --rest-solved: step, from 1 -> 1 for each of its examples that was all right, else 0
        self.visits: dict[int, list[int]] = {}
        self.in_update = False  # if so, the weights belong to no step

    def learn(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """`num_iterations` optimizer steps on this process's share of a batch.

        Returns the metrics of the last one, over all processes. Raises Diverged if the weights are
        not finite, or if too many steps in a row had a loss or gradient that is not.
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
            if not self._update(metrics["loss"], norm, step):
                self.guard.skip(self.warn)
                where = f"; the batch is in {kept}" if (kept := self.dump(batch, step)) else ""
                numbers = f"loss {metrics['loss']:g}, gradient norm {norm:g}"
                self.warn(f"step {step + 1}: {numbers}: no update{where}")
                break
        else:
            self.guard.in_a_row = 0
        scalars = [*metrics.values(), largest_weight(self.model)]
        *values, largest = torch.stack(scalars).tolist()  # one device sync
        check_weights(largest, step)
        self.steps_done, self.in_update = step + 1, False
        learnt = dict(zip(metrics, values, strict=True)) | {"learning_rate": learning_rate}
        return learnt | self.guard.metrics(self.scaler)

    # --- prepare --------------------------------------------------------------------------------

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
        every = list(range(len(batch)))
        # bnpo divides by the tokens of the micro-batch, so leaving groups out would change it
        whole = self.loss.entropy or self.loss.weights is per_local_token
        if batch.advantages is None or batch.ref_logp is not None or whole:
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

        If a single process runs out of memory, it starts over with smaller micro-batches. Among
        several processes, the others would wait for it in the all-reduce.
        """

        def in_parts(size: int) -> Metrics:
            self.optimizer.zero_grad(set_to_none=True)
            parts, found = batch.split(size), list[Metrics]()
            for part in parts:
                # DDP reduces gradients only in the last part
                with self.dist.accumulating(self.wrapped, part is not parts[-1]):
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
        packing, part, config = self.pack(part), part.to(self.device), self.config.loss
        completions, mask = part.completions, part.completions.completion_mask
        logp, entropy = self.forward(packing)
        old_logp = logp.detach() if part.old_logp is None else part.old_logp
        importance, cap = None, config.sampler_correction
        if cap and completions.behavior_logp is not None:
            # truncated importance sampling (Ionides 2008): tokens are not drawn from the policy
            importance = (old_logp - completions.behavior_logp).exp().clamp(max=cap)
        loss, metrics = policy_loss(
            logp,
            old_logp,
            part.advantages,
            mask,
            loss=self.loss,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            ratio_cap=config.ratio_cap,
            ref_logp=part.ref_logp,
            kl_coef=0.0 if part.ref_logp is None else config.kl_coef,
            kl=config.kl,
            token_weights=importance,
            normalizer=normalizer,
            entropy=entropy if self.loss.entropy else None,
        )
        total = entropy.detach().sum()
        metrics |= {"loss": loss.detach(), "entropy": total, "tokens": mask.sum().to(logp)}
        metrics["tokens/run"] = logp.new_full((), len(packing.ids))
        if completions.sampler_logp is not None:
            gap = (old_logp - completions.sampler_logp).masked_fill(~mask, 0).abs()
            metrics |= {MEAN_GAP: gap.sum(), LARGEST_GAP: gap.max()}
        return loss, metrics

    def pack(self, part: RolloutBatch) -> Packing:
        """Build the packing on the host, then move it to the device."""
        return PACKINGS[self.config.speed.packing](part.completions).to(self.device)

    def forward(self, packing: Packing) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies `[P, G, S]` under the policy, on its device."""
        with self.autocast():
            model = self.wrapped if torch.is_grad_enabled() else self.trained
            logp, entropy = model(packing, self.config.sampling.temperature, self.loss.entropy)
        return logp, entropy

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

    # --- update ---------------------------------------------------------------------------------

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

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that cannot be recomputed, as plain types and tensors."""
        return {
            "model": trained_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "guard": dict(vars(self.guard)),
            "visits": self.visits,
            "scaler": self.scaler.state_dict(),  # {} without float16
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises RuntimeError, ValueError or KeyError if the state does not fit this model."""
        load_trained(self.model, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:  # a resume may change the flag
            group["fused"] = self.config.speed.fused_optimizer
        self.guard = NonFiniteGuard(**state["guard"])
        self.visits.update(state["visits"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
