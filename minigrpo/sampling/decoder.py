"""Decoding with a KV cache that stores each prompt once, for all of its completions.

A decoder runs *slots*: sequences that each continue one prompt, at their own column; generate.py
picks their tokens. All slots of a prompt attend to it in one matrix product, and one softmax covers
the prompt and the slot's own tokens (Hydragen, Juravsky et al., arXiv 2402.05099).

The caches and the layout, which says where everything lies in them, have one place in memory from
the beginning. With `few_sizes` a CUDA graph can run a step again: see runtime/graphs.py.

Shapes: P prompts, B slots, W tokens per slot and round, K heads of keys and values, each shared by
R heads of queries (H = K * R), heads of size E, L layers.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..model.linear import autocast_dtype, has_float32_products
from ..model.logprobs import logits_of
from ..model.packing import causal, rows_of
from ..model.transformer import Transformer
from ..runtime.graphs import copy_into, next_size

Masks = Mapping[int, Tensor]  # what is not seen, by window, [B, 1, 1, W, Lp + num_columns]
BLOCK = 64  # columns by which the used part of a cache grows


class Room(NamedTuple):
    """What a decoder has room for."""

    prompts: int
    prompt_len: int  # tokens of the longest one
    slots: int
    slots_of_prompt: int
    columns: int  # new tokens of a slot


class Decoder:
    """Runs every prompt once, then a few tokens of every slot per round."""

    def __init__(self, model: Transformer, room: Room, *, few_sizes: bool = False) -> None:
        """With `few_sizes`, slots and prompts are padded, by some that nobody reads."""
        self.model = model
        self.room = room
        self.few_sizes = few_sizes
        self.pad_to = next_size if few_sizes else int
        self.heads = model.shape.kv_heads  # K
        self.head = model.head_weight.to(autocast_dtype(model.head_weight))  # cast once
        self.prompts = self.pad_to(room.prompts)
        self.slots = self.pad_to(room.slots)
        # keys and values, made when their type is known
        self.prompt_kv = torch.empty(0)  # [L, 2, P, K, Lp, E]
        self.own_kv = torch.empty(0)  # of the slots' own tokens, [L, 2, B, K, columns, E]
        self.columns = 0  # of own_kv that are in use
        longest = room.prompt_len + room.columns
        windows = map(model.shape.window_of, range(model.shape.layers))
        self.windows = [window if window < longest else 0 for window in windows]  # by layer
        grid_size = self.prompts * self.pad_to(room.slots_of_prompt)
        size = self.slots * (1 + self.heads) + grid_size * self.heads
        self.layout = torch.zeros(size, dtype=torch.int64, device=model.device)
        empty = np.zeros(0, dtype=np.int64)
        self._arrange(empty, empty)

    def _arrange(self, prompt_len: np.ndarray, prompt_of_slot: np.ndarray) -> None:
        """Set the length of each prompt, `[P]`, and the prompt of each slot, `[B]`.

        Attention to prompts takes the slots as a grid with one row per prompt. Slots of the prompts
        [0, 1, 0] have the grid [[0, 2], [1, 0]], filled up with slot 0, and places [0, 2, 1] in it.
        """
        self.prompt_len = prompt_len
        self.prompt_of_slot = prompt_of_slot
        counts = np.bincount(prompt_of_slot, minlength=len(prompt_len))
        num_slots = self.pad_to(len(prompt_of_slot))
        num_prompts = self.pad_to(len(prompt_len))
        self.grid_shape = num_prompts, self.heads, self.pad_to(int(counts.max(initial=0)))
        longest = int(prompt_len.max(initial=0))
        self.prompt_width = self.room.prompt_len if self.few_sizes else longest
        order = np.argsort(prompt_of_slot, kind="stable")
        prompts = prompt_of_slot[order]
        number = np.arange(len(order)) - (counts.cumsum() - counts)[prompts]  # within its prompt
        # of each slot and head [B, K], its place in the flat grid [P, K, G']; and the inverse
        heads = np.arange(self.heads)
        place = np.zeros((num_slots, self.heads), dtype=np.int64)
        in_grid = (prompts[:, None] * self.heads + heads) * self.grid_shape[2] + number[:, None]
        place[order] = in_grid
        grid = np.zeros(self.grid_shape, dtype=np.int64)
        grid.ravel()[in_grid] = order[:, None] * self.heads + heads
        starts = np.zeros(num_slots, dtype=np.int64)
        starts[: len(order)] = prompt_len[prompt_of_slot]
        parts = [starts, place.ravel(), grid.ravel()]
        self.starts, self.place, self.grid = copy_into(self.layout, parts)

    def prefill(self, prompt_ids: Tensor, prompt_len: Tensor) -> Tensor:
        """Run new prompts, and add a slot for each, after the others.

        `prompt_ids` `[P', Lp]` int64 and `prompt_len` `[P']` -> `[P', V]`, the logits of the first
        new tokens.
        """
        lengths = prompt_len.cpu().numpy()
        columns = np.arange(lengths.max())
        real = columns < lengths[:, None]  # [P', Lp]
        # the packed token of each place; padding is hidden by causality, and repeats a token
        rows = prompt_ids.new_tensor((real.ravel().cumsum() - 1).reshape(real.shape))
        places = prompt_ids.new_tensor(np.flatnonzero(real))
        ids = prompt_ids[:, : len(columns)].flatten().index_select(0, places)
        attend = partial(self._attend_in_prompts, places, rows)
        hidden = self.model.forward_hidden(ids, places % len(columns), attend)

        old = len(self.prompt_of_slot)
        new = len(self.prompt_len) + np.arange(len(lengths))
        self._arrange(np.append(self.prompt_len, lengths), np.append(self.prompt_of_slot, new))
        self.own_kv[:, :, old : old + len(lengths), :, : self.columns] = 0
        return logits_of(hidden[prompt_len.cumsum(0) - 1], self.head)

    def _attend_in_prompts(
        self, places: Tensor, rows: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Causal attention, which also stores keys and values."""
        if not len(self.prompt_kv):
            heads, size = self.heads, k.shape[-1]
            pair = self.model.shape.layers, 2
            self.prompt_kv = k.new_empty(*pair, self.prompts, heads, self.room.prompt_len, size)
            self.own_kv = k.new_empty(*pair, self.slots, heads, self.room.columns, size)
        q, k, v = (rows_of(x, rows) for x in (q, k, v))  # [P', H or K, Lp, E]
        first = len(self.prompt_len)
        width = k.shape[2]
        stored = self.prompt_kv[layer, :, first : first + len(k)]
        stored[..., :width, :] = torch.stack([k, v])
        stored[..., width:, :] = 0  # attention gives it no weight, but 0 times a NaN is NaN
        attended = causal(self.windows[layer], q, k, v)
        return attended.transpose(1, 2).flatten(0, 1).index_select(0, places)

    def step(
        self, tokens: Tensor, columns: Tensor, num_columns: int, last: Tensor | None = None
    ) -> Tensor:
        """Run W tokens of every slot, `[B, W]` -> `[B, W, V]`, the logits that follow them.

        Args:
            columns: `[B]`, the column of each slot's first token. What a slot wrote there before (a
                rejected proposal) is overwritten.
            num_columns: how many columns the slots use after this step, at most.
            last: `[B]`, which token of each slot needs logits; the others get none: `[B, 1, V]`.
        """
        width = tokens.shape[1]
        device = tokens.device
        columns = columns[:, None] + torch.arange(width, device=device)  # [B, W]
        positions = self.starts[:, None] + columns
        of_prompt = torch.arange(self.prompt_width, device=device)
        own = torch.arange(num_columns, device=device)
        in_prompt = (of_prompt < self.starts[:, None])[:, None].expand(-1, width, -1)
        visible = torch.cat([in_prompt, own <= columns[..., None]], dim=-1)
        masks = {0: ~visible[:, None, None]}
        for window in {*self.windows} - {0}:
            age = torch.cat([positions[..., None] - of_prompt, columns[..., None] - own], dim=-1)
            masks[window] = masks[0] | (age >= window)[:, None, None]
        attend = partial(self._attend, columns, masks)
        # proposals may go past the context; they are never kept, but their positions must exist
        positions = positions.clamp(max=self.model.shape.context - 1)
        hidden = self.model.forward_hidden(tokens.flatten(), positions.flatten(), attend)
        hidden = hidden.unflatten(0, tokens.shape)
        if last is not None:
            hidden = hidden.take_along_dim(last[:, None, None], dim=1)
        return logits_of(hidden, self.head)

    def use_columns(self, num_columns: int) -> int:
        """Grow the usable columns to at least `num_columns`, by blocks; return their number."""
        if num_columns > self.columns:
            before = self.columns
            self.columns = min(-(-num_columns // BLOCK) * BLOCK, self.room.columns)
            self.own_kv[:, :, : len(self.prompt_of_slot), :, before : self.columns] = 0
        return self.columns

    def _attend(
        self, columns: Tensor, masks: Masks, layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """`q [B * W, H, E]`, new keys and values `[B * W, K, E]` -> `[B * W, H, E]`."""
        masked = masks[self.windows[layer]]
        num_slots, width = columns.shape
        heads = self.heads
        prompt = self.prompt_kv[layer, :, : self.grid_shape[0], :, : self.prompt_width]
        slots = torch.arange(num_slots, device=q.device)[:, None]
        new = torch.stack([k, v], dim=1).unflatten(0, (-1, width))  # [B, W, 2, K, E]
        self.own_kv[layer][:, slots, :, columns] = new
        num_columns = masked.shape[-1] - self.prompt_width
        own_k, own_v = self.own_kv[layer, :, :num_slots, :, :num_columns]

        q = (q * q.shape[-1] ** -0.5).unflatten(0, (-1, width)).unflatten(2, (heads, -1))
        q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, K, R * W, E]
        prompt_scores = self._to_slots(scores_of(self._to_grid(q), prompt[0]))
        scores = torch.cat([prompt_scores, scores_of(q, own_k)], dim=-1)  # [B, K, R * W, keys]
        scores.unflatten(2, (-1, width)).masked_fill_(masked, -torch.inf)
        weights = scores.softmax(-1).to(v.dtype)
        prompt_weights, own_weights = weights.split([self.prompt_width, num_columns], dim=-1)
        out = self._to_slots(self._to_grid(prompt_weights) @ prompt[1]) + own_weights @ own_v
        out = out.unflatten(2, (-1, width)).permute(0, 3, 1, 2, 4)  # [B, W, K, R, E]
        return out.flatten(2, 3).flatten(0, 1)

    def _to_grid(self, x: Tensor) -> Tensor:
        """Group slots by prompt: `[B, K, T, E]` -> `[P, K, G' * T, E]`."""
        grid = x.flatten(0, 1).index_select(0, self.grid)
        return grid.unflatten(0, self.grid_shape).flatten(2, 3)

    def _to_slots(self, x: Tensor) -> Tensor:
        """Undo `_to_grid`: `[P, K, G' * T, E]` -> `[B, K, T, E]`."""
        rows = x.unflatten(2, (self.grid_shape[2], -1)).flatten(0, 2)
        return rows.index_select(0, self.place).unflatten(0, (-1, self.heads))

    def reorder(self, sources: np.ndarray) -> None:
        """Change to `len(sources)` slots: slot i continues the former slot `sources[i]`."""
        moved = np.flatnonzero(sources != np.arange(len(sources)))
        if len(sources) == len(self.prompt_of_slot) and not len(moved):
            return
        move(self.own_kv[..., : self.columns, :], moved, sources[moved])
        # prompts without slots leave
        prompts = self.prompt_of_slot[sources]
        used = np.unique(prompts)
        places = compact(used, len(self.prompt_len))
        moved = np.flatnonzero(places != np.arange(len(places)))
        move(self.prompt_kv, places[moved], moved)
        prompt_len = np.zeros(len(used), dtype=np.int64)
        prompt_len[places[used]] = self.prompt_len[used]
        self._arrange(prompt_len, places[prompts])


def compact(used: np.ndarray, num_rows: int) -> np.ndarray:
    """New places `[rows]` with which the rows in use come first: the last ones fill the gaps.

    Of four rows, [0, 2, 3] are in use. Row 3 moves to the gap at 1: [0, 1, 2, 1].
    """
    places = np.arange(num_rows)
    places[used[used >= len(used)]] = np.setdiff1d(np.arange(len(used)), used)
    return places


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """`q @ k.mT`, not rounded to 16 bits before the softmax where torch can do so."""
    if not has_float32_products(q):
        return q @ k.mT
    products = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, out_dtype=torch.float32)
    return products.unflatten(0, k.shape[:2])


def move(cache: Tensor, to: np.ndarray, source: np.ndarray) -> None:
    """Overwrite some rows of `[L, 2, rows, ..]` by others; all are read before any is written."""
    if len(to):
        rows = torch.from_numpy(np.stack([to, source])).to(cache.device)
        cache.index_copy_(2, rows[0], cache.index_select(2, rows[1]))
