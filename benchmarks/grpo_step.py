"""The first row of the steps benchmark: a training step made of grpo.py's own functions.

It samples with the library's uniform numbers, so that all rows produce the same completions.
"""

import copy
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import grpo
from minigrpo.config import Config
from minigrpo.model.encoding import encode_prompts
from minigrpo.runtime.device import PhaseTimer, set_up_process
from minigrpo.runtime.rng import uniforms
from minigrpo.types import Completions, Example, RewardTable, RolloutBatch

from .work import Work, pad_tokens


def to_columns(x: Tensor, starts: Tensor, columns: int) -> Tensor:
    """Values per new token `[B, S]` -> `[B, columns]`; row b's values begin at column `starts[b]`.

    Prompts [a b] and [c], starts [2, 1]: values [[1, 2], [3, 4]] -> [[0, 0, 1, 2], [0, 3, 4, 0]].
    """
    places = starts[:, None] + torch.arange(x.shape[1], device=x.device)
    return x.new_zeros(len(x), columns).scatter(1, places, x)


def from_columns(x: Tensor, starts: Tensor, length: int) -> Tensor:
    """The opposite of `to_columns`: `[B, columns]` -> `[B, length]`."""
    places = starts[:, None] + torch.arange(length, device=x.device)
    return x.gather(1, places.clamp(max=x.shape[1] - 1))


class GrpoPyStep:
    """The same interface as Step, implemented with grpo.py."""

    def __init__(self, config: Config, work: Work) -> None:
        self.config, self.work, self.device = config, work, work.device
        self.model = copy.deepcopy(work.model)
        self.reference = copy.deepcopy(work.model) if config.loss.kl_coef else None
        learning_rate = config.optimizer.learning_rate
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, weight_decay=0.0
        )
        self.eos = -1 if work.forced else work.tokenizer.eot
        self.timer = PhaseTimer(self.device)
        self.batch: RolloutBatch

    def step(self, number: int) -> dict[str, float]:
        """Run one training step; return its seconds, total and by phase, and its token counts."""
        set_up_process(self.config.speed, self.device)
        timer, prompts = self.timer, self.config.sampling.prompts_per_step
        timer.take()
        start = time.perf_counter()
        with timer.phase("data"):
            examples = [self.work.task.train(number * prompts + i) for i in range(prompts)]
        with timer.phase("rollout"):
            starts, ids, mask = self._sample(examples, number)  # [B], [B, T], [B, T]
            texts = grpo.decode(self.work.tokenizer, ids, mask)
        with timer.phase("reward"):
            rewards = self._rewards(examples, texts)  # [P, G]
            A = grpo.advantages(rewards).flatten()  # [B]
        with timer.phase("reference"):
            ref_logp = self._reference(ids, mask)  # [B, T] or None
        with timer.phase("update"):
            self._backward(ids, mask, A, ref_logp)
            grad_clip = self.config.optimizer.grad_clip
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), grad_clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        seconds = time.perf_counter() - start
        self.batch = self._as_batch(examples, texts, starts, ids, mask, rewards, A, ref_logp)
        rounds = ids.shape[1] - 1 - int(starts.min())  # forwards after the one over the prompts
        return {
            "seconds": seconds,
            **timer.take(),
            "completion_tokens": float(mask.sum()),
            "rollout/rounds": float(rounds),
            "rollout/tokens": float(ids[:, 1:].numel()),
            "tokens/run": float(ids[:, 1:].numel()),
        }

    def tokens(self) -> Tensor:
        """What the last step sampled, `[P * G, S]`; -1 beyond the end."""
        return pad_tokens(self.batch.completions, self.config.sampling.max_new_tokens)

    def gradient(self, batch: RolloutBatch) -> tuple[float, list[Tensor]]:
        """Mean negative log-likelihood of a batch's tokens, and the gradient of the loss."""
        set_up_process(self.config.speed, self.device)
        completions, groups = batch.completions.to(self.device), self.config.sampling.group_size
        starts = completions.prompt_len.repeat_interleave(groups)  # [B]
        columns = completions.prompt_ids.shape[1] + completions.completion_ids.shape[-1]

        def in_columns(x: Tensor) -> Tensor:
            return to_columns(x.to(self.device).flatten(0, 1), starts, columns)

        mask = in_columns(completions.completion_mask)
        ids = torch.where(mask, in_columns(completions.completion_ids), 0)
        prompts = completions.prompt_ids.repeat_interleave(groups, dim=0)  # [B, Lp]
        in_prompt = torch.arange(prompts.shape[1], device=self.device) < starts[:, None]
        ids[:, : prompts.shape[1]][in_prompt] = prompts[in_prompt]
        ref_logp = None if batch.ref_logp is None else in_columns(batch.ref_logp)
        assert batch.advantages is not None
        total = self._backward(ids, mask, batch.advantages.flatten().to(self.device), ref_logp)
        gradient = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        return -total / int(mask.sum()), gradient

    def _sample(self, examples: Sequence[Example], step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Lengths of the prompts `[B]`, and grpo.sample's `ids` and `mask`, `[B, T]`."""
        sampling, groups = self.config.sampling, self.config.sampling.group_size
        encode = self.work.tokenizer.encode
        prompts = [ids for example in examples for ids in [encode(example.prompt)] * groups]
        index = np.array([example.index for example in examples])
        seed, length = self.config.run.seed, sampling.max_new_tokens
        u = uniforms(seed, "sample", step, index, groups, length)  # [P, G, S]
        starts = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        flat = torch.from_numpy(u).flatten(0, 1).to(self.device)
        u_columns = to_columns(flat, starts, int(starts.max()) + length)  # [B, T]
        return starts, *grpo.sample(self.model, prompts, self.eos, u_columns, length)

    def _rewards(self, examples: Sequence[Example], texts: Sequence[str]) -> Tensor:
        rows = [example for example in examples for _ in range(self.config.sampling.group_size)]
        scores = [
            grpo.reward(self.work.task, example, text)
            for example, text in zip(rows, texts, strict=True)
        ]
        return torch.tensor(scores, device=self.device).view(len(examples), -1)

    @torch.no_grad()
    def _reference(self, ids: Tensor, mask: Tensor) -> Tensor | None:
        if self.reference is None:
            return None
        parts = zip(*(x.split(self._rows_at_a_time(len(ids))) for x in (ids, mask)), strict=True)
        return torch.cat([grpo.token_logprobs(self.reference, *part) for part in parts])

    def _rows_at_a_time(self, rows: int) -> int:
        return self.config.memory.micro_batch_size * self.config.sampling.group_size or rows

    def _backward(self, ids: Tensor, mask: Tensor, A: Tensor, ref_logp: Tensor | None) -> float:
        """Accumulate the gradient, with as many rows at a time as the workload sets.

        Returns the log-likelihood of all completions.
        """
        total, size = ids.new_zeros((), dtype=torch.float64), self._rows_at_a_time(len(ids))
        for rows in torch.arange(len(ids), device=self.device).split(size):
            logp = grpo.token_logprobs(self.model, ids[rows], mask[rows])
            ref = None if ref_logp is None else ref_logp[rows]
            kl_coef = self.config.loss.kl_coef
            loss = grpo.grpo_loss(logp, logp.detach(), A[rows], mask[rows], ref, kl_coef)
            (loss * len(rows) / len(ids)).backward()
            total += logp.detach().sum()
        return float(total)

    def _as_batch(
        self,
        examples: Sequence[Example],
        texts: Sequence[str],
        starts: Tensor,
        ids: Tensor,
        mask: Tensor,
        rewards: Tensor,
        A: Tensor,
        ref_logp: Tensor | None,
    ) -> RolloutBatch:
        """The rollout as the library's RolloutBatch, on the host."""
        prompts, groups = rewards.shape
        longest = int(mask.sum(1).max())

        def grouped(x: Tensor) -> Tensor:
            return from_columns(x, starts, longest).unflatten(0, (prompts, groups)).cpu()

        completion_mask = torch.arange(longest) < mask.sum(1).cpu()[:, None]
        completion_mask = completion_mask.unflatten(0, (prompts, groups))
        prompt_ids = encode_prompts(self.work.tokenizer, examples, self.model.shape.context)
        return RolloutBatch(
            examples=examples,
            completions=Completions(*prompt_ids, grouped(ids), completion_mask),
            texts=[texts[p * groups : (p + 1) * groups] for p in range(prompts)],
            rewards=RewardTable(rewards.cpu().numpy(), {}),
            advantages=A.view(prompts, groups).cpu(),
            ref_logp=None if ref_logp is None else grouped(ref_logp) * completion_mask,
        )
