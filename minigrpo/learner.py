"""From a batch to new weights: micro-batches, a loss whose weights count the whole step,
`num_iterations` optimizer steps.

It samples nothing, and writes and prints nothing; trainer.py does. What decides a gradient is here
or in losses.py.
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
from .model.packing import PACKINGS
from .model.transformer import Transformer
from .runtime import accel
from .runtime.distributed import DistContext
from .runtime.oom import OOMBackoff
from .runtime.optim import learning_rate_at, make_optimizer
from .types import Completions, RolloutBatch

State = dict[str, Any]
BAD_STEPS_TO_HALVE = 3  # in a row: then half the learning rate, and float32
BAD_STEPS_TO_STOP = 6


class Diverged(RuntimeError):
    """Too many steps in a row whose loss or gradient was not finite."""


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
        """`warn` says what went wrong; `dump` keeps a batch that could not be learnt from."""
        self.config, self.model, self.dist, self.warn, self.dump = (
            config,
            model,
            dist or DistContext(),
            warn,
            dump,
        )
        self.device = model.device
        self.wrapped = self.dist.wrap(model)
        self.scaler = accel.grad_scaler(config, self.device)
        accel.check_compiler(config, self.device)
        self.optimizer = make_optimizer(
            model,
            learning_rate=config.optimizer.learning_rate,
            weight_decay=config.optimizer.weight_decay,
            fused=config.speed.fused_optimizer,
        )
        self.backoff = OOMBackoff(
            "update", "--micro-batch-size", config.memory.micro_batch_size, warn
        )
        self.guard = {
            "skipped": 0,
            "in_a_row": 0,
            "halvings": 0,
        }  # optimizer steps left out because of a NaN or an infinity

    def autocast(self) -> AbstractContextManager[object]:
        """--use-amp, until the guard has fallen back to float32."""
        return nullcontext() if self.guard["halvings"] else accel.autocast(self.config, self.device)

    def learn(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """`num_iterations` optimizer steps on this process's share of a batch; metrics of the last
        step, of all shares.
        """
        config, given = self.config, batch
        batch, counts = self.prepare(batch)
        peak = config.optimizer.learning_rate * 0.5 ** self.guard["halvings"]
        learning_rate = learning_rate_at(
            step,
            peak=peak,
            warmup_steps=config.optimizer.warmup_steps,
            max_steps=config.run.max_steps,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        for _ in range(config.optimizer.num_iterations):
            with self.dist.during(f"the update of step {step + 1}"):
                metrics = self.gradient(batch, counts)
            self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), config.optimizer.grad_clip
            )
            # both are the same in all processes, and so is the verdict
            good = bool(torch.isfinite(norm) & torch.isfinite(metrics["loss"]))
            if (
                good or self.scaler.is_enabled()
            ):  # which looks for itself: an overflow is how it finds its scale
                self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            overflow = self.scaler.is_enabled() and torch.isfinite(metrics["loss"])
            if not good and not overflow:
                self._leave_out(
                    given, step, f"loss {float(metrics['loss']):g}, gradient norm {float(norm):g}"
                )
                break
        else:
            self.guard["in_a_row"] = 0
        metrics["grad_norm"] = norm
        values = torch.stack([x.double() for x in metrics.values()]).tolist()  # read back once
        return dict(zip(metrics, values, strict=True)) | {"learning_rate": learning_rate}

    def prepare(self, batch: RolloutBatch) -> tuple[RolloutBatch, LossNormalizer]:
        """What is to be run of a batch, old log-probs included, and the counts of the whole step,
        whatever is left out.
        """
        batch = batch.counted()
        mask = batch.completions.completion_mask
        completions, tokens = self.dist.sum(
            torch.tensor([mask[..., 0].numel(), int(mask.sum())], device=self.device)
        )
        batch = batch.select(self.live_prompts(batch))
        if self.config.optimizer.num_iterations > 1:
            batch = replace(batch, old_logp=self._old_logp(batch))
        return batch, LossNormalizer(completions, tokens.clamp(min=1))

    def _leave_out(self, batch: RolloutBatch, step: int, why: str) -> None:
        """Change no weight and no moment, keep the batch, and after several in a row try less, or
        give up.
        """
        self.guard["skipped"] += 1
        self.guard["in_a_row"] += 1
        kept = self.dump(batch, step)
        self.warn(
            f"step {step + 1}: {why}; the weights stay as they are"
            + (f"; the batch is in {kept}" if kept else "")
        )
        if self.guard["in_a_row"] >= BAD_STEPS_TO_STOP:
            raise Diverged(
                f"{BAD_STEPS_TO_STOP} steps in a row had a loss or gradient that is not finite; "
                "the weights are those before "
                "them. A smaller --learning-rate, or no --use-amp, may help"
            )
        if self.guard["in_a_row"] == BAD_STEPS_TO_HALVE:
            self.guard["halvings"] += 1
            self.warn(
                f"{BAD_STEPS_TO_HALVE} such steps in a row: from here on half the learning rate, "
                "and float32"
            )

    def live_prompts(self, batch: RolloutBatch) -> list[int]:
        """Prompts whose gradient is not exactly 0; one at least, so that the optimizer steps all
        the same.
        """
        everything = list(range(len(batch)))
        local = (
            LOSSES[self.config.loss.name].reduce is per_local_token
        )  # bnpo counts the tokens that are at hand
        if (
            batch.advantages is None
            or batch.ref_logp is not None
            or local
            or not self.config.speed.skip_zero_variance_groups
        ):
            return everything
        return [p for p in everything if batch.advantages[p].any()] or [0]

    def gradient(self, batch: RolloutBatch, counts: LossNormalizer) -> dict[str, Tensor]:
        """Leave the whole step's gradient, over all processes, in the parameters; in smaller pieces
        if memory asks for it.
        """
        if (
            self.dist.world_size > 1
        ):  # the others would wait for gradients that this process does not send
            return self._accumulate(batch, counts, self.backoff.of(len(batch)))

        def afresh(size: int) -> dict[str, Tensor]:
            self.optimizer.zero_grad(set_to_none=True)
            return self._accumulate(batch, counts, size)

        return self.backoff.run(afresh, len(batch))

    def _accumulate(
        self, batch: RolloutBatch, counts: LossNormalizer, size: int
    ) -> dict[str, Tensor]:
        """Forward and backward of `size` prompts at a time; gradients and metrics add up."""
        sums: dict[str, Tensor] = {}
        *first, last = batch.split(size)
        with self.dist.accumulating(self.wrapped):
            for part in first:
                _add(sums, self._backward(part, counts))
        _add(sums, self._backward(last, counts))
        worst = sums.pop("gap/max", None)
        totals = dict(zip(sums, self.dist.sum(torch.stack(list(sums.values()))), strict=True))
        tokens = totals.pop("tokens").clamp(min=1)
        totals["entropy"] = totals["entropy"] / tokens
        if worst is not None:
            totals["sampling/logp_difference_mean"] = totals.pop("gap/sum") / tokens
            totals["sampling/logp_difference_max"] = self.dist.max(worst)
        return totals

    def _backward(self, part: RolloutBatch, counts: LossNormalizer) -> dict[str, Tensor]:
        config, completions = self.config, part.completions
        given = (
            part.advantages,
            part.old_logp,
            part.ref_logp,
            part.behavior_logp,
            completions.sampler_logp,
        )
        # before the forward: a copy to the device waits for what was launched before it
        adv, old, ref, behavior_logp, sampler_logp = (
            x if x is None else x.to(self.device) for x in given
        )
        mask = completions.completion_mask.to(self.device)
        logp, entropy, ran = self.forward(completions)
        weights = None
        if config.loss.sampler_correction and behavior_logp is not None:
            weights = truncated_importance_weights(
                logp.detach() if old is None else old,
                behavior_logp,
                config.loss.sampler_correction_cap,
            )
        loss, metrics = policy_loss(
            logp,
            old,
            adv,
            mask,
            loss=config.loss.name,
            clip_low=config.loss.clip_low,
            clip_high=config.loss.clip_high,
            ratio_cap=config.loss.ratio_cap,
            max_completion_length=config.sampling.max_new_tokens,
            ref_logp=ref,
            kl_coef=config.loss.kl_coef,
            kl=config.loss.kl,
            token_weights=weights,
            counts=counts,
        )
        # DDP averages over processes, and the loss is already this process's share of the whole
        self.scaler.scale(loss * self.dist.world_size).backward()
        values = {
            **metrics,
            "loss": loss.detach(),
            "entropy": entropy.sum(),
            "tokens": mask.sum().to(logp),
        }
        values["tokens/run"] = logp.new_full((), ran)
        if sampler_logp is not None:
            gap = (logp.detach() - sampler_logp).masked_fill(~mask, 0).abs()
            values |= {"gap/sum": gap.sum(), "gap/max": gap.max()}
        return values

    def forward(self, completions: Completions) -> tuple[Tensor, Tensor, int]:
        """Log-probs and entropies `[P, G, S]` of the policy, on its device, and how many tokens
        that took.
        """
        packing = PACKINGS[self.config.speed.packing](completions).to(self.device)
        with self.autocast():
            model = self.wrapped if torch.is_grad_enabled() else self.model
            return *model(packing.tokens, packing, self.config.sampling.temperature), len(
                packing.tokens.ids
            )

    @torch.no_grad()
    def _old_logp(self, batch: RolloutBatch) -> Tensor:
        def in_pieces(size: int) -> Tensor:
            return torch.cat(
                [self.forward(part.completions)[0].cpu() for part in batch.split(size)]
            )

        return self.backoff.run(in_pieces, len(batch))

    def state_dict(self) -> State:
        """Everything that cannot be derived: plain types and tensors."""
        state: State = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "guard": dict(self.guard),
        }
        return state | ({"scaler": self.scaler.state_dict()} if self.scaler.is_enabled() else {})

    def load_state_dict(self, state: State) -> None:
        """Raises RuntimeError, ValueError or KeyError for the state of another model."""
        self.model.load_state_dict(state["model"])
        fused = {
            "fused": self.config.speed.fused_optimizer
        }  # a speed flag of now, not of the checkpoint
        groups = [group | fused for group in state["optimizer"]["param_groups"]]
        self.optimizer.load_state_dict(state["optimizer"] | {"param_groups": groups})
        self.guard.update(state.get("guard", {}))
        if self.scaler.is_enabled() and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])


def _add(sums: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        there = sums.get(name, torch.zeros_like(value))
        sums[name] = torch.maximum(there, value) if name == "gap/max" else there + value
