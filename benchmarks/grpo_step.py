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
from minigrpo.runtime.device import PhaseTimer, set_up_process
from minigrpo.runtime.rng import uniforms
from minigrpo.types import Example

from .work import Work


def to_columns(values: Tensor, starts: Tensor, columns: int) -> Tensor:
    """Values per new token `[B, S]` -> `[B, columns]`; row b's values begin at column `starts[b]`.

    Prompts [a b] and [c], starts [2, 1]: values [[1, 2], [3, 4]] -> [[0, 0, 1, 2], [0, 3, 4, 0]].
    """
    places = starts[:, None] + torch.arange(values.shape[1], device=values.device)
    return values.new_zeros(len(values), columns).scatter(1, places, values)


class GrpoPyStep:
    """The same interface as Step, implemented with grpo.py."""

    def __init__(self, config: Config, work: Work) -> None:
        self.config = config
        self.work = work
        self.device = work.device
        self.model = copy.deepcopy(work.model)
        self.reference = copy.deepcopy(work.model) if config.loss.kl_coef else None
        weights = self.model.parameters()
        self.optimizer = torch.optim.AdamW(weights, config.optimizer.learning_rate, weight_decay=0)
        self.eos = -1 if work.forced else work.tokenizer.eot
        self.timer = PhaseTimer(self.device)

    def step(self, number: int) -> dict[str, float]:
        """Run one training step; return its seconds, total and by phase, and its token counts."""
        set_up_process(self.config.speed, self.device)
        prompts = self.config.sampling.prompts_per_step
        self.timer.take()
        start = time.perf_counter()
        with self.timer.phase("data"):
            examples = [self.work.task.train(number * prompts + i) for i in range(prompts)]
        with self.timer.phase("rollout"):
            starts, ids, mask = self._sample(examples, number)  # [B], [B, T], [B, T]
            texts = grpo.decode(self.work.tokenizer, ids, mask)
        with self.timer.phase("reward"):
            rewards = self._rewards(examples, texts)  # [P, G]
            A = grpo.advantages(rewards).flatten()  # [B]
        with self.timer.phase("reference"):
            ref_logp = self._reference(ids, mask)  # [B, T] or None
        with self.timer.phase("update"):
            self._backward(ids, mask, A, ref_logp)
            grad_clip = self.config.optimizer.grad_clip
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), grad_clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        seconds = time.perf_counter() - start
        rounds = ids.shape[1] - 1 - int(starts.min())  # forwards after the one over the prompts
        return {
            "seconds": seconds,
            **self.timer.take(),
            "completion_tokens": float(mask.sum()),
            "rollout/rounds": float(rounds),
            "rollout/tokens": float(ids[:, 1:].numel()),
            "tokens/run": float(ids[:, 1:].numel()),
        }

    def _sample(self, examples: Sequence[Example], step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Lengths of the prompts `[B]`, and grpo.sample's `ids` and `mask`, `[B, T]`."""
        group_size = self.config.sampling.group_size
        length = self.config.sampling.max_new_tokens
        encode = self.work.tokenizer.encode
        prompts = [ids for example in examples for ids in [encode(example.prompt)] * group_size]
        index = np.array([example.index for example in examples])
        u = uniforms(self.config.run.seed, "sample", step, index, group_size, length)  # [P, G, S]
        starts = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        flat = torch.from_numpy(u).flatten(0, 1).to(self.device)
        u_columns = to_columns(flat, starts, int(starts.max()) + length)  # [B, T]
        return starts, *grpo.sample(self.model, prompts, self.eos, u_columns, length)

    def _rewards(self, examples: Sequence[Example], texts: Sequence[str]) -> Tensor:
        rows = [example for example in examples for _ in range(self.config.sampling.group_size)]
        pairs = zip(rows, texts, strict=True)
        scores = [grpo.reward(self.work.task, example, text) for example, text in pairs]
        return torch.tensor(scores, device=self.device).view(len(examples), -1)

    @torch.no_grad()
    def _reference(self, ids: Tensor, mask: Tensor) -> Tensor | None:
        if self.reference is None:
            return None
        rows = self._rows_at_a_time(len(ids))
        pieces = zip(ids.split(rows), mask.split(rows), strict=True)
        return torch.cat([grpo.token_logprobs(self.reference, *piece) for piece in pieces])

    def _rows_at_a_time(self, rows: int) -> int:
        return self.config.memory.micro_batch_size * self.config.sampling.group_size or rows

    def _backward(self, ids: Tensor, mask: Tensor, A: Tensor, ref_logp: Tensor | None) -> None:
        """Accumulate the gradient, with as many rows at a time as the workload sets."""
        every = torch.arange(len(ids), device=self.device)
        for rows in every.split(self._rows_at_a_time(len(ids))):
            logp = grpo.token_logprobs(self.model, ids[rows], mask[rows])
            ref = None if ref_logp is None else ref_logp[rows]
            kl_coef = self.config.loss.kl_coef
            loss = grpo.grpo_loss(logp, logp.detach(), A[rows], mask[rows], ref, kl_coef)
            (loss * len(rows) / len(ids)).backward()
