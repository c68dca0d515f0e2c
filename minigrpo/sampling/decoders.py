"""Three ways to run the model during decoding; all compute the same logits.

ReplicatedPrefixDecoder  prompts run once, then every slot has a copy of its prompt's cache
SharedPrefixDecoder      a cache in which each prompt is stored once for all of its slots
UncachedDecoder          no cache: every round reruns everything; the reference in tests
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..model.attention import Causal, sdpa
from ..model.transformer import PackedTokens, Transformer
from .cached_decoder import CachedDecoder
from .kv_cache import KeysAndValues


class Decoder(Protocol):
    """What `generate` asks of a decoder; see CachedDecoder for the shapes."""

    tokens_run: int

    @property
    def num_slots(self) -> int: ...

    def prefill(self, prompt_ids: Tensor, prompt_len: Tensor, num_samples: int) -> Tensor: ...

    def step(
        self, tokens: Tensor, columns: Tensor, num_columns: int, counts: np.ndarray | None = None
    ) -> Tensor: ...

    def reorder(self, sources: np.ndarray) -> None: ...


class ReplicatedPrefixDecoder(CachedDecoder):
    """Each slot holds a copy of its prompt's keys and values, in front of its own.

    This takes more memory than a shared prefix, but attention is a single call.
    """

    def _store_prompts(self, number: int, k: Tensor, v: Tensor, num_samples: int) -> None:
        k, v = (x.repeat_interleave(num_samples, dim=0) for x in (k, v))
        self.cache.write_prompt(number, k, v, self.num_slots - len(k))

    def _cache_columns(self, num_columns: int) -> int:
        return int(self.prompt_len_of_slot.max()) + num_columns

    def _written_columns(self) -> Tensor:
        return self.positions

    def _visible_keys(self) -> Tensor:
        columns = torch.arange(self.cache.num_columns, device=self.positions.device)
        return (columns <= self.positions[..., None])[:, None]

    def _attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self.cache.write(number, k, v, *self.cells, len(q))
        return sdpa(q, k, v, mask=self.mask)


class SharedPrefixDecoder(CachedDecoder):
    """Each prompt's keys and values are stored once for all of its slots.

    Attention to a prompt is one matrix product for all of its slots, and one softmax covers the
    prompt and the slot's own tokens (Hydragen, Juravsky et al., arXiv 2402.05099).
    """

    def __init__(self, model: Transformer, length: int) -> None:
        super().__init__(model, length)
        self.prompt_kv: list[KeysAndValues] = []  # per layer, [P, K, Lp, E]

    def prefill(self, prompt_ids: Tensor, prompt_len: Tensor, num_samples: int) -> Tensor:
        logits = super().prefill(prompt_ids, prompt_len, num_samples)
        self._group_slots()
        return logits

    def _group_slots(self) -> None:
        """Arrange the slots in a grid with one row per prompt.

        Sets `grid [P, G']`, the slots of each prompt, where G' is the largest number of slots of
        any prompt; and `place`, the row and column of each slot in that grid. A prompt with fewer
        slots repeats its last one; the duplicate results are not read.
        """
        prompt = self.prompt_of_slot
        order = np.argsort(prompt, kind="stable")  # slots, prompt by prompt
        counts = np.bincount(prompt, minlength=len(self.prompt_len))
        starts = np.cumsum(counts) - counts  # where in `order` each prompt begins
        rank = np.empty_like(order)  # place of each slot among those of its prompt
        rank[order] = np.arange(len(order)) - starts[prompt[order]]
        last = np.maximum(counts, 1)[:, None] - 1
        padded = starts[:, None] + np.minimum(np.arange(counts.max()), last)
        grid = order[np.minimum(padded, len(order) - 1)]
        self.grid, column = (torch.from_numpy(x).to(self.model.device) for x in (grid, rank))
        self.place = self.prompt, column
        # if so, grouping slots by prompt is a view and needs no copy
        self.is_grid_in_order = np.array_equal(grid.ravel(), np.arange(len(order)))

    def reorder(self, sources: np.ndarray) -> None:
        super().reorder(sources)
        alive, renumbered = np.unique(self.prompt_of_slot, return_inverse=True)
        if len(alive) < len(self.prompt_len):  # drop prompts without slots
            prompts = torch.from_numpy(alive).to(self.model.device)
            self.prompt_len = self.prompt_len[prompts]
            width = int(self.prompt_len_of_slot.max())
            self.prompt_kv = [
                (k[prompts, :, :width], v[prompts, :, :width]) for k, v in self.prompt_kv
            ]
            self._set_prompts(renumbered, self.prompt_len_of_slot)
        self._group_slots()

    def _store_prompts(self, number: int, k: Tensor, v: Tensor, num_samples: int) -> None:
        if number == len(self.prompt_kv):
            # contiguous, because matmul would otherwise copy them in every round
            self.prompt_kv.append((k.contiguous(), v.contiguous()))
        else:
            old_k, old_v = self.prompt_kv[number]
            self.prompt_kv[number] = joined_prompts(old_k, k), joined_prompts(old_v, v)
        first, slots = self.num_slots - len(k) * num_samples, len(k) * num_samples
        empty_k, empty_v = (x.new_zeros(slots, x.shape[1], 0, x.shape[3]) for x in (k, v))
        self.cache.write_prompt(number, empty_k, empty_v, first)

    def _cache_columns(self, num_columns: int) -> int:
        return num_columns

    def _written_columns(self) -> Tensor:
        return self.columns

    def _visible_keys(self) -> Tensor:
        device = self.columns.device
        in_prompt = torch.arange(self.prompt_kv[0][0].shape[2], device=device)
        in_prompt = in_prompt < self.prompt_len[self.prompt, None]  # [B, Lp]
        own = torch.arange(self.cache.num_columns, device=device) <= self.columns[..., None]
        prompt = in_prompt[:, None].expand(-1, self.columns.shape[1], -1)
        return torch.cat([prompt, own], dim=-1)[:, None]

    def _attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prompt_k, prompt_v = self.prompt_kv[number]
        own_k, own_v = self.cache.write(number, k, v, *self.cells, len(q))
        width = q.shape[2]
        q = (q * q.shape[-1] ** -0.5).unflatten(1, (own_k.shape[1], -1)).flatten(2, 3)
        prompt_scores = self._to_prompts(q) @ prompt_k.transpose(-1, -2)  # [P, K, G'*R*W, Lp]
        own_scores = q @ own_k.transpose(-1, -2)  # [B, K, R*W, num_columns]
        scores = torch.cat([self._to_slots(prompt_scores), own_scores], dim=-1)
        weights = scores.add_(self.mask).softmax(-1).to(v.dtype)
        prompt_weights, own_weights = weights.split([prompt_k.shape[2], own_k.shape[2]], dim=-1)
        out = self._to_slots(self._to_prompts(prompt_weights) @ prompt_v) + own_weights @ own_v
        return out.unflatten(2, (-1, width)).flatten(1, 2)  # [B, H, W, E]

    def _to_prompts(self, x: Tensor) -> Tensor:
        """Group slots by prompt, padded by repetition: `[B, H, W, E]` -> `[P, H, G'*W, E]`."""
        grouped = x.unflatten(0, self.grid.shape) if self.is_grid_in_order else x[self.grid]
        return grouped.transpose(1, 2).flatten(2, 3)

    def _to_slots(self, x: Tensor) -> Tensor:
        """Undo `_to_prompts`: `[P, H, G'*W, E]` -> `[B, H, W, E]`, without the padding."""
        grouped = x.unflatten(2, (self.grid.shape[1], -1)).transpose(1, 2)
        return grouped.flatten(0, 1) if self.is_grid_in_order else grouped[self.place]


def joined_prompts(old: Tensor, new: Tensor) -> Tensor:
    """Concatenate keys or values of prompts, `[P, K, Lp, E]`, padded to the longest prompt."""
    width = max(old.shape[2], new.shape[2])
    return torch.cat([pad(x, (0, 0, 0, width - x.shape[2])) for x in (old, new)])


class UncachedDecoder:
    """Runs every slot from its first token in every round. Slow, but too simple to be wrong."""

    def __init__(self, model: Transformer, length: int) -> None:
        """The arguments are those of CachedDecoder."""
        self.model, self.length, self.tokens_run = model, length, 0
        self.ids = torch.zeros(0, 0, dtype=torch.int64, device=model.device)  # [B, Lp + length]
        self.prompt_len = self.ids[:, 0:0].flatten()  # [B]

    @property
    def num_slots(self) -> int:
        return len(self.ids)

    def prefill(self, prompt_ids: Tensor, prompt_len: Tensor, num_samples: int) -> Tensor:
        first, width = self.num_slots, prompt_ids.shape[1] + self.length
        width = max(width, self.ids.shape[1])
        both = self.ids, prompt_ids.repeat_interleave(num_samples, dim=0)
        self.ids = torch.cat([pad(ids, (0, width - ids.shape[1])) for ids in both])
        new_len = prompt_len.repeat_interleave(num_samples)
        self.prompt_len = torch.cat([self.prompt_len, new_len])
        return self._logits_after(self.prompt_len[:, None] - 1)[first:, 0]

    def step(
        self, tokens: Tensor, columns: Tensor, num_columns: int, counts: np.ndarray | None = None
    ) -> Tensor:
        offsets = torch.arange(tokens.shape[1], device=tokens.device)
        places = (self.prompt_len + columns)[:, None] + offsets
        self.ids.scatter_(1, places, tokens)
        logits = self._logits_after(places)
        if counts is None:
            return logits.flatten(0, 1)
        return logits[offsets < torch.from_numpy(counts).to(tokens.device)[:, None]]

    def _logits_after(self, places: Tensor) -> Tensor:
        """Logits `[B, W, V]` that follow the tokens in columns `places [B, W]` of `ids`."""
        self.tokens_run += self.ids.numel()
        positions = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        positions = positions.clamp(max=self.model.shape.context - 1)
        packed = PackedTokens(self.ids.flatten(), positions.flatten())
        hidden = self.model.forward_hidden(packed, Causal(*self.ids.shape))
        hidden = hidden.unflatten(0, self.ids.shape)
        picked = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        return self.model.lm_head(picked)

    def reorder(self, sources: np.ndarray) -> None:
        kept = torch.from_numpy(sources).to(self.ids.device)
        self.ids, self.prompt_len = self.ids[kept], self.prompt_len[kept]
