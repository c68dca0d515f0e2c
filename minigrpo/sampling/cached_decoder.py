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

from ..model.attention import Attend, sdpa
from ..model.packed_attention import additive_mask, rows_of
from ..model.packing_rows import pad_rows
from ..model.transformer import PackedTokens, Transformer
from .kv_cache import KVCache


class CachedDecoder(ABC):
    """Runs every prompt once, then a few tokens of every slot per round."""

    def __init__(
        self,
        model: Transformer,
        prompt_ids: Tensor,
        prompt_len: Tensor,
        num_samples: int,
        length: int,
    ) -> None:
        """Make `num_samples` slots per prompt, with room for `length` new tokens each.

        Args:
            prompt_ids: `[P, Lp]` int64, right-padded.
            prompt_len: `[P]` int64.
        """
        self.model, self.length = model, length
        self.prompt_ids, self.prompt_len = prompt_ids[:, : int(prompt_len.max())], prompt_len
        self.cache = KVCache()
        self.num_columns = 0  # columns of new tokens in use
        self.tokens_run = int(prompt_len.sum())
        self._set_prompts(np.repeat(np.arange(len(prompt_ids)), num_samples))

    def _set_prompts(self, prompt_of_slot: np.ndarray) -> None:
        self.prompt_of_slot = prompt_of_slot  # [B] on the host
        self.prompt = torch.from_numpy(prompt_of_slot).to(self.model.device)  # [B] on the device

    @property
    def num_slots(self) -> int:
        return len(self.prompt_of_slot)

    def prefill(self) -> Tensor:
        """Run each prompt once; return the logits of the first new token, `[B, V]`."""
        lengths, width = self.prompt_len.cpu().numpy(), self.prompt_ids.shape[1]
        rows, unpad = (
            torch.from_numpy(x).to(self.model.device)
            for x in pad_rows(np.cumsum(lengths) - lengths, lengths)
        )
        columns = torch.arange(width, device=self.model.device)
        in_prompt = columns < self.prompt_len[:, None]
        positions = columns.expand_as(self.prompt_ids)[in_prompt]
        tokens = PackedTokens(self.prompt_ids[in_prompt], positions)
        hidden = self.model.forward_hidden(tokens, PromptAttention(self._store_prompt, rows, unpad))
        return self.model.lm_head(hidden[self.prompt_len.cumsum(0) - 1])[self.prompt]

    def step(self, tokens: Tensor, columns: Tensor, num_columns: int) -> Tensor:
        """Run W tokens of every slot.

        Args:
            tokens: `[B, W]`.
            columns: `[B]`, the column of each slot's first token. Columns may differ between slots;
                what a slot wrote there before (a rejected proposal) is overwritten.
            num_columns: how many columns of the cache attention reads: more than any column written
                so far or in this step. An int, so that the host need not wait for the device.

        Returns:
            `[B, W, V]`, the logits that follow each token.
        """
        self.tokens_run += tokens.numel()
        offsets = torch.arange(tokens.shape[1], device=tokens.device)
        self.columns = columns[:, None] + offsets  # [B, W]
        self.num_columns = num_columns
        self.cache.extend(self.num_slots, self._num_cache_columns())
        return self._run(tokens, self.prompt_len[self.prompt, None] + self.columns)

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
        self.cache.reorder(sources)
        self._set_prompts(self.prompt_of_slot[sources])

    # --- what subclasses implement ----------------------------------------------------------------

    @abstractmethod
    def _store_prompt(self, number: int, k: Tensor, v: Tensor) -> None:
        """Store a layer's keys and values of the prompts, `[P, K, Lp, E]`."""

    @abstractmethod
    def _num_cache_columns(self) -> int:
        """How many columns of the cache are in use."""

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
