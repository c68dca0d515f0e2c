"""The first row of the steps benchmark: a training step made of grpo.py's own functions.

It samples with the library's uniform numbers, so that all rows produce the same completions.
"""

import copy
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import grpo
from minigrpo.config import Config
from minigrpo.runtime.device import PhaseTimer, set_up_process
from minigrpo.runtime.rng import uniforms
from minigrpo.types import Example

from .work import Work


def to_columns(x: Tensor, starts: Tensor, columns: int) -> Tensor:
    """Values per new token `[B, S]` -> `[B, columns]`; row b's values begin at column `starts[b]`.

    Prompts [a b] and [c], starts [2, 1]: values [[1, 2], [3, 4]] -> [[0, 0, 1, 2], [0, 3, 4, 0]].
    """
    places = starts[:, None] + torch.arange(x.shape[1], device=x.device)
    return x.new_zeros(len(x), columns).scatter(1, places, x)


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
        self.sampled: tuple[Tensor, Tensor]  # `ids` and `mask` of the last step, `[B, T]`

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
        self.sampled = ids, mask
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
        rows = [ids[mask] for ids, mask in zip(*self.sampled, strict=True)]
        tokens = pad_sequence(rows, batch_first=True, padding_value=-1).cpu()
        missing = self.config.sampling.max_new_tokens - tokens.shape[1]
        return torch.nn.functional.pad(tokens, (0, missing), value=-1)

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

    def _backward(self, ids: Tensor, mask: Tensor, A: Tensor, ref_logp: Tensor | None) -> None:
        """Accumulate the gradient, with as many rows at a time as the workload sets."""
        every = torch.arange(len(ids), device=self.device)
        for rows in every.split(self._rows_at_a_time(len(ids))):
            logp = grpo.token_logprobs(self.model, ids[rows], mask[rows])
            ref = None if ref_logp is None else ref_logp[rows]
            kl_coef = self.config.loss.kl_coef
            loss = grpo.grpo_loss(logp, logp.detach(), A[rows], mask[rows], ref, kl_coef)
            (loss * len(rows) / len(ids)).backward()
