"""The model while it writes: with a preallocated KV cache, and without, for comparison.

All run *slots*, ragged rows of tokens that each go on from one prompt; which completion a slot
stands for is sampling.py's business. The caches differ in where a prompt's keys and values lie:
once for its whole group, or once for each slot.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..model.packing import additive_mask, pad_rows, rows_of
from ..model.transformer import Attend, Causal, PackedTokens, Transformer

Pair = tuple[Tensor, Tensor]  # keys and values


class Decoder(Protocol):
    """Cells that write; see CachedDecoder."""

    tokens_run: int

    @property
    def num_slots(self) -> int: ...

    def prefill(self) -> Tensor: ...

    def step(self, tokens: Tensor, columns: Tensor, num_columns: int) -> Tensor: ...

    def keep(self, slots: np.ndarray) -> None: ...


class KVCache:
    """Keys and values of slots, a pair `[room, H, length, D/H]` a layer; slots come and go without
    moving the others.

    One tensor for all layers would be fewer operations, but was measured to take more memory: it is
    new in each rollout, and one of that size does not find the memory that the last update left.
    """

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.columns = 0  # in use: further ones hold anything

    def begin(self, layer: int, k: Tensor, v: Tensor, *, room: int, length: int) -> None:
        """The first columns of each slot: prompts, `[C, H, Lp, D/H]`. Makes room for slots of
        `length` if there is none.
        """
        if layer == len(self.pairs):
            shape = room, k.shape[1], length, k.shape[3]
            self.pairs.append((k.new_empty(shape), v.new_empty(shape)))
        for cache, new in zip(self.pairs[layer], (k, v), strict=True):
            cache[: len(new), :, : new.shape[2]] = new
        self.columns = k.shape[2]

    def reach(self, num_slots: int, num_columns: int) -> None:
        """So many columns are in use from now on. What nobody wrote must be numbers: 0 times
        anything may be NaN.
        """
        for cache in itertools.chain(*self.pairs):
            cache[:num_slots, :, self.columns : num_columns] = 0
        self.columns = num_columns

    def write(self, layer: int, k: Tensor, v: Tensor, columns: Tensor) -> Pair:
        """Put `k` and `v`, `[C, W, H, D/H]`, at `columns [C, W]`; what is in use, of all slots."""
        slots = torch.arange(len(columns), device=columns.device)[:, None]
        for cache, new in zip(self.pairs[layer], (k, v), strict=True):
            cache[slots, :, columns] = new
        keys, values = (cache[: len(columns), :, : self.columns] for cache in self.pairs[layer])
        return keys, values

    def make_room(self, room: int) -> None:
        self.pairs = [(self._grown(k, room), self._grown(v, room)) for k, v in self.pairs]

    def _grown(self, cache: Tensor, room: int) -> Tensor:
        new = cache.new_empty(room, *cache.shape[1:])
        new[: len(cache), :, : self.columns] = cache[:, :, : self.columns]
        return new

    def keep(self, slots: np.ndarray) -> None:
        """Slot i goes on from what was slot `slots[i]`; nobody who stays in his place is written
        over.
        """
        if len(slots) > (room := len(self.pairs[0][0])):
            self.make_room(max(len(slots), 2 * room))
        moved = np.flatnonzero(slots != np.arange(len(slots)))
        if len(moved):
            to, source = (
                torch.from_numpy(x).to(self.pairs[0][0].device) for x in (moved, slots[moved])
            )
            for used in (cache[:, :, : self.columns] for pair in self.pairs for cache in pair):
                used.index_copy_(0, to, used.index_select(0, source))


class CachedDecoder(ABC):
    """What both caches have in common: prompts run once, then a few tokens of every slot at a
    time."""

    def __init__(
        self,
        model: Transformer,
        prompt_ids: Tensor,
        prompt_len: Tensor,
        num_samples: int,
        length: int,
    ) -> None:
        """`prompt_ids [P, Lp]`, `prompt_len [P]`; room for `length` new tokens of `num_samples`
        slots a prompt.
        """
        self.model, self.length = model, length
        self.prompt_ids, self.prompt_len = prompt_ids[:, : int(prompt_len.max())], prompt_len
        self.cache = KVCache()
        self.num_columns = 0  # of own tokens: how much of the cache has been written
        self.tokens_run = int(prompt_len.sum())
        self.group = np.repeat(
            np.arange(len(prompt_ids)), num_samples
        )  # [C] the prompt of each slot
        self.prompt = torch.from_numpy(self.group).to(model.device)

    @property
    def num_slots(self) -> int:
        return len(self.group)

    def prefill(self) -> Tensor:
        """Run the prompts, each once; the logits of the first new token, `[C, V]`."""
        lengths, width = self.prompt_len.cpu().numpy(), self.prompt_ids.shape[1]
        rows, unpad = (
            torch.from_numpy(x).to(self.model.device)
            for x in pad_rows(np.cumsum(lengths) - lengths, lengths)
        )
        columns = torch.arange(width, device=self.model.device)
        in_prompt = columns < self.prompt_len[:, None]
        tokens = PackedTokens(
            self.prompt_ids[in_prompt], columns.expand_as(self.prompt_ids)[in_prompt]
        )
        hidden = self.model.forward_hidden(tokens, Prefill(self._remember, rows, unpad))
        return self.model.lm_head(hidden[self.prompt_len.cumsum(0) - 1])[self.prompt]

    def step(self, tokens: Tensor, columns: Tensor, num_columns: int) -> Tensor:
        """Run W tokens of every slot, at that slot's own column, and return the logits that follow
        each.

        Args:
            tokens: `[C, W]`.
            columns: `[C]`, the column of each slot's first token.
            num_columns: on the host, more than any column written so far: how much of the cache to
                look at.

        Returns:
            `[C, W, V]`.
        """
        self.tokens_run += tokens.numel()
        self.columns = columns[:, None] + torch.arange(
            tokens.shape[1], device=tokens.device
        )  # [C, W]
        self.num_columns = num_columns
        self.cache.reach(self.num_slots, self._columns_in_use())
        return self._run(tokens, self.prompt_len[self.prompt, None] + self.columns)

    def _run(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens `[C, W]` at their positions; the logits that follow each."""
        self.positions = positions
        positions = positions.clamp(
            max=self.model.shape.context - 1
        )  # a guess beyond the end, which nothing keeps
        hidden = self.model.forward_hidden(
            PackedTokens(tokens.flatten(), positions.flatten()), self
        )
        return self.model.lm_head(hidden).unflatten(0, tokens.shape)

    def layer(self, number: int) -> Attend:
        return partial(self.attend_flat, number)

    def attend_flat(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if number == 0:
            self.mask = additive_mask(self._visible(), q.dtype)
        q, k, v = (x.unflatten(0, self.positions.shape) for x in (q, k, v))  # [C, W, H, D/H]
        return self._attend(number, q.transpose(1, 2), k, v).transpose(1, 2).flatten(0, 1)

    def keep(self, slots: np.ndarray) -> None:
        """Go on with `[C']` slots: number i from what was number `slots[i]`."""
        self.cache.keep(slots)
        self.group = self.group[slots]
        self.prompt = torch.from_numpy(self.group).to(self.model.device)

    # --- what they differ in ----------------------------------------------------------------------

    @abstractmethod
    def _remember(self, number: int, k: Tensor, v: Tensor) -> None:
        """Keys and values of the prompts in a layer, `[P, H, Lp, D/H]`."""

    @abstractmethod
    def _columns_in_use(self) -> int:
        """How much of the cache there is to look at."""

    @abstractmethod
    def _visible(self) -> Tensor:
        """`[C, 1, W, keys]` bool: what a token may attend to; `self.mask` is that for attention."""

    @abstractmethod
    def _attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [C, H, W, D/H]` and new keys and values `[C, W, H, D/H]` -> `[C, H, W, D/H]`."""


class ReplicatedPrefixDecoder(CachedDecoder):
    """Each slot has its prompt's keys and values in front of its own: more memory, and attention is
    one call.
    """

    def _remember(self, number: int, k: Tensor, v: Tensor) -> None:
        length = self.prompt_ids.shape[1] + self.length
        self.cache.begin(number, k[self.prompt], v[self.prompt], room=self.num_slots, length=length)

    def _columns_in_use(self) -> int:
        return self.prompt_ids.shape[1] + self.num_columns

    def _visible(self) -> Tensor:
        columns = torch.arange(self._columns_in_use(), device=self.positions.device)
        return (columns <= self.positions[..., None])[:, None]

    def _attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self.cache.write(number, k, v, self.positions)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


class SharedPrefixDecoder(CachedDecoder):
    """Each prompt's keys and values are there once for all of its slots.

    (Hydragen, arXiv 2402.05099: attention over a shared prefix as one matrix product per group, one
    softmax over both.)
    """

    def __init__(
        self,
        model: Transformer,
        prompt_ids: Tensor,
        prompt_len: Tensor,
        num_samples: int,
        length: int,
    ) -> None:
        super().__init__(model, prompt_ids, prompt_len, num_samples, length)
        self.prompt_kv: list[Pair] = []  # a layer: [P, H, Lp, D/H]
        self._arrange()

    def _arrange(self) -> None:
        """Lay out the slots by prompt."""
        order = np.argsort(self.group, kind="stable")
        counts = np.bincount(self.group, minlength=len(self.prompt_len))
        starts = np.cumsum(counts) - counts
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order)) - starts[self.group[order]]
        # where a prompt has fewer slots than the widest one, its last is attended for again, and
        # nobody asks
        padded = starts[:, None] + np.minimum(
            np.arange(counts.max()), np.maximum(counts, 1)[:, None] - 1
        )
        grid = order[np.minimum(padded, len(order) - 1)]
        self.grid, within = (torch.from_numpy(x).to(self.model.device) for x in (grid, rank))
        # self.grid [P, G] is the slots of each prompt, self.place where in it each slot is
        self.place = self.prompt, within
        self.in_order = np.array_equal(grid.ravel(), np.arange(len(order)))

    def keep(self, slots: np.ndarray) -> None:
        super().keep(slots)
        alive, self.group = np.unique(self.group, return_inverse=True)
        if len(alive) < len(self.prompt_len):
            prompts = torch.from_numpy(alive).to(self.model.device)
            self.prompt_len, self.prompt = (
                self.prompt_len[prompts],
                torch.from_numpy(self.group).to(self.model.device),
            )
            self.prompt_kv = [(k[prompts], v[prompts]) for k, v in self.prompt_kv]
        self._arrange()

    def _remember(self, number: int, k: Tensor, v: Tensor) -> None:
        self.prompt_kv.append(
            (k.contiguous(), v.contiguous())
        )  # else every product would copy them first
        none = (x.new_zeros(self.num_slots, x.shape[1], 0, x.shape[3]) for x in (k, v))
        self.cache.begin(number, *none, room=self.num_slots, length=self.length)

    def _columns_in_use(self) -> int:
        return self.num_columns

    def _visible(self) -> Tensor:
        columns = torch.arange(self.prompt_ids.shape[1], device=self.columns.device)
        of_prompt = (columns < self.prompt_len[self.prompt, None])[:, None].expand(
            -1, self.columns.shape[1], -1
        )
        of_own = (
            torch.arange(self.num_columns, device=self.columns.device) <= self.columns[..., None]
        )
        return torch.cat([of_prompt, of_own], dim=-1)[:, None]

    def _attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prompt_k, prompt_v = self.prompt_kv[number]
        own_k, own_v = self.cache.write(number, k, v, self.columns)
        q = q * q.shape[-1] ** -0.5
        to_prompt = self._by_group(q) @ prompt_k.transpose(-1, -2)  # [P, H, G*W, Lp]
        scores = torch.cat([self._by_slot(to_prompt), q @ own_k.transpose(-1, -2)], dim=-1)
        weights = scores.add_(self.mask).softmax(-1).to(v.dtype)
        of_prompt, of_own = weights.split([prompt_k.shape[2], self.num_columns], dim=-1)
        return self._by_slot(self._by_group(of_prompt) @ prompt_v) + of_own @ own_v

    def _by_group(self, x: Tensor) -> Tensor:
        """`[C, H, W, E]` -> `[P, H, G*W, E]`, padded."""
        grouped = x.unflatten(0, self.grid.shape) if self.in_order else x[self.grid]
        return grouped.transpose(1, 2).flatten(2, 3)

    def _by_slot(self, x: Tensor) -> Tensor:
        """`[P, H, G*W, E]` -> `[C, H, W, E]`, without the pads."""
        grouped = x.unflatten(2, (self.grid.shape[1], -1)).transpose(1, 2)
        return grouped.flatten(0, 1) if self.in_order else grouped[self.place]


class Prefill:
    """Causal attention over the prompts, whose keys and values are handed on."""

    def __init__(
        self, remember: Callable[[int, Tensor, Tensor], None], rows: Tensor, unpad: Tensor
    ) -> None:
        self.remember, self.rows, self.unpad = remember, rows, unpad

    def layer(self, number: int) -> Attend:
        return partial(self.attend, number)

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (rows_of(x, self.rows) for x in (q, k, v))
        self.remember(number, k, v)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.unpad)


class UncachedDecoder:
    """The same interface without a cache: every step runs every row from its first token. The
    reference in tests.
    """

    def __init__(
        self,
        model: Transformer,
        prompt_ids: Tensor,
        prompt_len: Tensor,
        num_samples: int,
        length: int,
    ) -> None:
        self.model = model
        self.prompt_len = prompt_len.repeat_interleave(num_samples)
        room = prompt_ids.new_zeros(len(prompt_ids), length)
        self.ids = torch.cat([prompt_ids, room], dim=1).repeat_interleave(
            num_samples, dim=0
        )  # [R, Lp + length]
        self.tokens_run = 0

    @property
    def num_slots(self) -> int:
        return len(self.ids)

    def prefill(self) -> Tensor:
        return self._logits_after(self.prompt_len[:, None] - 1)[:, 0]

    def step(self, tokens: Tensor, columns: Tensor, num_columns: int) -> Tensor:
        places = (self.prompt_len + columns)[:, None] + torch.arange(
            tokens.shape[1], device=tokens.device
        )
        self.ids.scatter_(1, places, tokens)
        return self._logits_after(places)

    def _logits_after(self, places: Tensor) -> Tensor:
        self.tokens_run += self.ids.numel()
        positions = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        positions = positions.clamp(max=self.model.shape.context - 1)
        hidden = self.model.forward_hidden(
            PackedTokens(self.ids.flatten(), positions.flatten()), Causal(*self.ids.shape)
        )
        hidden = hidden.unflatten(0, self.ids.shape)
        return self.model.lm_head(
            hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        )

    def keep(self, slots: np.ndarray) -> None:
        going_on = torch.from_numpy(slots).to(self.ids.device)
        self.ids, self.prompt_len = self.ids[going_on], self.prompt_len[going_on]
