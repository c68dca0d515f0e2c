"""A step as one would write it down first, to measure the library against: `benchmark.py`'s first
row.

Completions are sampled one at a time, a token at a time, with a KV cache that grows; every prompt
is repeated for each of its completions and padded to the longest; logits are computed at every
position of prompt and completion; old log-probs take a forward of their own; each completion is
scored by itself. The numbers are those of the library: same tokens, loss, gradient.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minigrpo.learner import Learner
from minigrpo.model.encoding import encode_prompts
from minigrpo.model.logprobs import log_softmax
from minigrpo.model.transformer import Attend, PackedTokens, Transformer
from minigrpo.rewards import PendingRewards, RewardScorer
from minigrpo.rollout import GREEDY, Sampler
from minigrpo.sampling.generate import SamplingParams
from minigrpo.types import Completions, Example, RewardTable


class GrowingCache:
    """Keys and values of one row, one concatenation a token."""

    def __init__(self, layers: int) -> None:
        self.kv: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def layer(self, number: int) -> Attend:
        return partial(self._attend, number)

    def _attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, T, D/H]
        before = self.kv[number]
        if before is not None:
            k, v = torch.cat([before[0], k], dim=2), torch.cat([before[1], v], dim=2)
        self.kv[number] = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=before is None)[0].transpose(0, 1)


@torch.no_grad()
def write_one(
    model: Transformer,
    prompt: Tensor,
    u: Tensor,
    *,
    eos: int,
    max_new_tokens: int,
    params: SamplingParams,
) -> tuple[Tensor, Tensor]:
    """One completion of `prompt [L]`: its tokens and their log-probs, `[n]` each; `u [S]` are
    uniform numbers.
    """
    cache, ids, start = GrowingCache(model.shape.layers), prompt, 0
    tokens, logps = list[Tensor](), list[Tensor]()
    for s in range(max_new_tokens):
        positions = torch.arange(start, start + len(ids), device=ids.device)
        logits = model.lm_head(model.forward_hidden(PackedTokens(ids, positions), cache))
        logp = log_softmax(logits[-1], params.temperature)
        cdf = logp.exp().cumsum(-1)
        token = torch.searchsorted(cdf, u[s] * cdf[-1], right=True).clamp(max=len(logp) - 1).view(1)
        tokens.append(token)
        logps.append(logp[token])
        start, ids = start + len(ids), token
        if int(token) == eos:
            break
    return torch.cat(tokens), torch.cat(logps)


class OneAtATime(Sampler):
    """A sampler that ignores that there is more than one completion to write."""

    def complete(
        self,
        examples: Sequence[Example],
        *,
        num_samples: int = 1,
        u: np.ndarray | None = None,
        params: SamplingParams = GREEDY,
        batch_size: int = 0,
    ) -> Iterator[Completions]:
        assert u is not None
        config, device = self.config, self.model.device
        prompt_ids, prompt_len = encode_prompts(
            self.tokenizer, examples, self.model.shape.context - config.sampling.max_new_tokens
        )
        options = {
            "eos": self.eos,
            "max_new_tokens": config.sampling.max_new_tokens,
            "params": params,
        }
        shape = (len(examples), num_samples, config.sampling.max_new_tokens)
        ids, logp = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        lengths = torch.zeros(shape[:2], dtype=torch.int64)
        for p, g in np.ndindex(shape[:2]):
            prompt = prompt_ids[p, : prompt_len[p]].to(device)
            tokens, logps = write_one(
                self.model, prompt, torch.from_numpy(u[p, g]).to(device), **options
            )  # type: ignore[arg-type]
            lengths[p, g] = n = len(tokens)
            ids[p, g, :n], logp[p, g, :n] = tokens.cpu(), logps.cpu()
            self.work.update(rounds=n, tokens=len(prompt) + n - 1, row_rounds=n, rows=1)
        longest = int(lengths.max())
        mask = torch.arange(longest) < lengths[..., None]
        yield Completions(prompt_ids, prompt_len, ids[..., :longest], mask, logp[..., :longest])


def full_logits(
    model: Transformer, completions: Completions, temperature: float
) -> tuple[Tensor, Tensor, int]:
    """Log-probs and entropies `[P, G, S]` from padded rows of prompt and completion, and how many
    tokens these have.
    """
    prompts, samples, longest = completions.completion_ids.shape
    columns = torch.arange(longest, device=model.device)
    prompt_len = completions.prompt_len.to(model.device)
    places = prompt_len[:, None] + columns  # [P, S]
    prompt_ids = F.pad(completions.prompt_ids.to(model.device), (0, longest))
    rows = prompt_ids[:, None].repeat(1, samples, 1)
    where = places[:, None].expand(-1, samples, -1)
    rows = rows.scatter(2, where, completions.completion_ids.to(model.device)).flatten(0, 1)
    logp = log_softmax(model.logits(rows), temperature)  # [P*G, T, V]
    predicted = (
        logp[:, :-1]
        .gather(2, rows[:, 1:, None])[..., 0]
        .unflatten(0, (prompts, samples))
        .gather(2, where - 1)
    )
    entropy = (
        -(logp.detach().exp() * logp.detach())
        .sum(-1)
        .unflatten(0, (prompts, samples))
        .gather(2, where - 1)
    )
    mask = completions.completion_mask.to(model.device)
    return torch.where(mask, predicted, 0.0), torch.where(mask, entropy, 0.0), rows.numel()


class FullLogits(Learner):
    """An update that runs every position of every row through the head, and once more for the old
    log-probs.
    """

    def forward(self, completions: Completions) -> tuple[Tensor, Tensor, int]:
        if torch.is_grad_enabled():
            with torch.no_grad():
                full_logits(
                    self.model, completions, self.config.sampling.temperature
                )  # old log-probs; what they give is what comes next
        return full_logits(self.model, completions, self.config.sampling.temperature)


class FullLogitsReference:
    """The frozen model, its logits everywhere."""

    def __init__(self, model: Transformer, temperature: float) -> None:
        self.model, self.temperature = model, temperature

    @torch.no_grad()
    def logp(self, completions: Completions) -> Tensor | None:
        return full_logits(self.model, completions, self.temperature)[0].cpu()


class OneByOne(RewardScorer):
    """Scores every completion by itself, equal ones too."""

    judge: Callable[[Example, str], Mapping[str, float]]

    def submit(self, examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> PendingRewards:
        scores = [
            [self.judge(example, text) for text in group]
            for example, group in zip(examples, texts, strict=True)
        ]
        names = scores[0][0]
        parts = {
            name: np.array([[one[name] for one in row] for row in scores], dtype=np.float32)
            for name in names
        }
        total = np.zeros((len(examples), len(texts[0])), dtype=np.float32)
        for name, weight in self.weights.items():
            total += np.float32(weight) * parts[name]
        return PendingRewards(self, np.zeros(0), [], RewardTable(total, parts))
