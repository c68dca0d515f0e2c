"""Decoding with a KV cache: the base class of the cached decoders in decoders.py.

A decoder runs *slots*: sequences that each continue one prompt, at their own column. It neither
picks tokens (generate.py) nor decides which completions a slot stands for (running.py).

Shapes: P prompts, B slots, W tokens per slot and round, H query heads, K heads of keys and values,
heads of size E.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..model.attention import Attend, rows_of, sdpa
from ..model.packed_attention import additive_mask
from ..model.packing_rows import pad_rows
from ..model.transformer import PackedTokens, Transformer
from .kv_cache import BLOCK, KVCache


class CachedDecoder(ABC):
    """Runs every prompt once, then a few tokens of every slot per round."""

    def __init__(self, model: Transformer, length: int) -> None:
        """No slots yet; each will have room for `length` new tokens, proposals included."""
        self.model, self.length = model, length
        self.cache = KVCache()
        self.tokens_run = 0
        self.prompt_len = torch.zeros(0, dtype=torch.int64, device=model.device)  # [P]
        none = np.zeros(0, dtype=np.int64)
        self._set_prompts(none, none)

    def _set_prompts(self, prompt_of_slot: np.ndarray, prompt_len: np.ndarray) -> None:
        """Set the prompt of each slot, `[B]`, and how many tokens it has, `[B]`; on the host."""
        self.prompt_of_slot, self.prompt_len_of_slot = prompt_of_slot, prompt_len
        self.prompt = torch.from_numpy(prompt_of_slot).to(self.model.device)  # [B]

    @property
    def num_slots(self) -> int:
        return len(self.prompt_of_slot)

    def prefill(self, prompt_ids: Tensor, prompt_len: Tensor, num_samples: int) -> Tensor:
        """Run new prompts once each, and add `num_samples` slots for each, after the others.

        Args:
            prompt_ids: `[P', Lp]` int64, right-padded.
            prompt_len: `[P']` int64.

        Returns:
            `[P' * num_samples, V]`, the logits of the first new tokens.
        """
        lengths, first = prompt_len.cpu().numpy(), self.num_slots
        width, device = int(lengths.max()), self.model.device
        prompts = np.repeat(np.arange(len(lengths)), num_samples)
        self._set_prompts(
            np.append(self.prompt_of_slot, len(self.prompt_len) + prompts),
            np.append(self.prompt_len_of_slot, lengths[prompts]),
        )
        self.prompt_len = torch.cat([self.prompt_len, prompt_len])
        self.tokens_run += int(lengths.sum())
        columns = max(self.cache.num_columns, self._cache_columns(0))
        self._make_room(self.num_slots, columns)
        self.cache.extend(first, columns)

        rows, unpad = (
            torch.from_numpy(x).to(device) for x in pad_rows(np.cumsum(lengths) - lengths, lengths)
        )
        positions = torch.arange(width, device=device).expand(len(lengths), -1)
        in_prompt = positions < prompt_len[:, None]
        tokens = PackedTokens(prompt_ids[:, :width][in_prompt], positions[in_prompt])

        def store(number: int, k: Tensor, v: Tensor) -> None:
            self._store_prompts(number, k, v, num_samples)

        hidden = self.model.forward_hidden(tokens, PromptAttention(store, rows, unpad))
        logits = self.model.lm_head(hidden[prompt_len.cumsum(0) - 1])
        return logits.repeat_interleave(num_samples, dim=0)

    def step(self, tokens: Tensor, columns: Tensor, num_columns: int) -> Tensor:
        """Run W tokens of every slot.

        Args:
            tokens: `[B, W]`.
            columns: `[B]`, the column of each slot's first token. Columns may differ between slots;
                what a slot wrote there before (a rejected proposal) is overwritten.
            num_columns: more than any column that a slot has written so far or writes in this step.
                An int, so that the host need not wait for the device.

        Returns:
            `[B, W, V]`, the logits that follow each token.
        """
        self.tokens_run += tokens.numel()
        offsets = torch.arange(tokens.shape[1], device=tokens.device)
        self.columns = columns[:, None] + offsets  # [B, W]
        num_columns = self._cache_columns(num_columns)
        self._make_room(self.num_slots, num_columns)
        self.cache.extend(self.num_slots, num_columns)
        return self._run(tokens, self.prompt_len[self.prompt, None] + self.columns)

    def _make_room(self, num_slots: int, num_columns: int) -> None:
        """Let the cache hold so many slots and columns.

        When columns are added, rows that no slot uses are freed.
        """
        if num_columns > self.cache.length:
            longest = self._cache_columns(self.length)
            block = BLOCK.get(self.model.device.type, longest)
            self._resize(num_slots, min(num_columns + block, longest))
        elif num_slots > self.cache.capacity:
            self._resize(num_slots, self.cache.length)

    def _resize(self, capacity: int, length: int) -> None:
        self.cache.resize(capacity, length)

    def _run(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits `[B, W, V]` that follow tokens `[B, W]` at positions `[B, W]`."""
        self.positions = positions
        # proposals may go past the context; they are never kept, but their positions must exist
        positions = positions.clamp(max=self.model.shape.context - 1)
        hidden = self.model.forward_hidden(
            PackedTokens(tokens.flatten(), positions.flatten()), self
        )
        return self.model.lm_head(hidden).unflatten(0, tokens.shape)

    def layer(self, number: int) -> Attend:
        return partial(self._attend_packed, number)

    def _attend_packed(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if number == 0:  # all layers share the mask
            share = q.shape[1] // k.shape[1]
            self.mask = additive_mask(self._visible_keys(), q.dtype, share)
        q, k, v = (x.unflatten(0, self.positions.shape) for x in (q, k, v))  # [B, W, H or K, E]
        return self._attend(number, q.transpose(1, 2), k, v).transpose(1, 2).flatten(0, 1)

    def reorder(self, sources: np.ndarray) -> None:
        """Change to `len(sources)` slots: slot i continues the former slot `sources[i]`."""
        capacity = self.cache.capacity
        if len(sources) > capacity:
            # twice as many, because slots separate one by one
            self._make_room(max(len(sources), 2 * capacity), self.cache.num_columns)
        self.cache.reorder(sources)
        self._set_prompts(self.prompt_of_slot[sources], self.prompt_len_of_slot[sources])

    # --- what subclasses implement ----------------------------------------------------------------

    @abstractmethod
    def _store_prompts(self, number: int, k: Tensor, v: Tensor, num_samples: int) -> None:
        """Store a layer's keys and values of new prompts, `[P', K, Lp, E]`."""

    @abstractmethod
    def _cache_columns(self, num_columns: int) -> int:
        """How many columns of the cache prompts and `num_columns` columns of new tokens take."""

    @abstractmethod
    def _visible_keys(self) -> Tensor:
        """`[B, 1, W, keys]` bool: what each token may attend to; `self.mask` is additive."""

    @abstractmethod
    def _attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: `q [B, H, W, E]`, new keys and values `[B, W, K, E]` -> `[B, H, W, E]`."""


class PromptAttention:
    """Causal attention of the prompts, which also stores their keys and values."""

    def __init__(
        self, store: Callable[[int, Tensor, Tensor], None], rows: Tensor, unpad: Tensor
    ) -> None:
        """`rows [P, Lp]` and `unpad [sum of lengths]` as `pad_rows` returns them."""
        self.store, self.rows, self.unpad = store, rows, unpad

    def layer(self, number: int) -> Attend:
        return partial(self._attend, number)

    def _attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (rows_of(x, self.rows) for x in (q, k, v))
        self.store(number, k, v)
        return sdpa(q, k, v).transpose(1, 2).flatten(0, 1).index_select(0, self.unpad)
