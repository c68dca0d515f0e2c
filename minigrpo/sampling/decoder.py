"""Decoding with a KV cache that stores each prompt once, for all of its completions.

A decoder runs *slots*: sequences that each continue one prompt, at their own column; generate.py
picks their tokens. All slots of a prompt attend to it in one matrix product, and one softmax covers
the prompt and the slot's own tokens (Hydragen, Juravsky et al., arXiv 2402.05099).

Shapes: P prompts, B slots, W tokens per slot and round, K heads of keys and values, each shared by
R heads of queries (H = K * R), heads of size E.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..model.packing import rows_of, sdpa
from ..model.transformer import Transformer

BLOCK = 32  # columns by which the cache of new tokens grows


class Decoder:
    """Runs every prompt once, then a few tokens of every slot per round."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        # keys and values of each layer: of prompts [2, K, P, Lp, E], heads first for the product
        # with a grid of slots; of the slots' own tokens [2, most_slots, K, columns, E]
        self.prompt_kv: list[Tensor] = []
        self.own_kv: list[Tensor] = []
        self.most_slots = 0  # slots only split, so this many suffice until the next prefill
        empty = np.zeros(0, dtype=np.int64)
        self._arrange(empty, empty)

    def _arrange(self, prompt_len: np.ndarray, prompt_of_slot: np.ndarray) -> None:
        """Set the length of each prompt, `[P]`, and the prompt of each slot, `[B]`.

        Attention to prompts takes the slots as a grid with one row per prompt. Slots of the prompts
        [0, 1, 0] have the grid [[0, 2], [1, 0]], filled up with slot 0, and places [0, 2, 1] in it.
        """
        self.prompt_len, self.prompt_of_slot = prompt_len, prompt_of_slot
        counts = np.bincount(prompt_of_slot, minlength=len(prompt_len))
        self.grid_width = int(counts.max(initial=0))  # G', most slots of a prompt
        used = np.arange(self.grid_width) < counts[:, None]
        grid = np.zeros(used.shape, dtype=np.int64)
        order = np.argsort(prompt_of_slot, kind="stable")
        grid[used] = order
        place = np.empty_like(order)
        place[order] = np.flatnonzero(used)
        self.grid, self.place, self.starts = (
            torch.from_numpy(x).to(self.model.device)
            for x in (grid.ravel(), place, prompt_len[prompt_of_slot])
        )

    def prefill(self, prompt_ids: Tensor, prompt_len: Tensor, num_samples: int) -> Tensor:
        """Run new prompts, and add a slot for each, after the others.

        `prompt_ids` `[P', Lp]` int64 and `prompt_len` `[P']` -> `[P', V]`, the logits of the first
        new tokens. A prompt will have at most `num_samples` slots.
        """
        lengths = prompt_len.cpu().numpy()
        positions = torch.arange(lengths.max(), device=self.model.device)
        real = positions < prompt_len[:, None]  # [P', Lp]
        ids = prompt_ids[:, : len(positions)][real]
        # the packed token of each place; padding is hidden by causality, and repeats a token
        rows = real.flatten().cumsum(0).sub(1).view(real.shape)
        attend = partial(self._attend_in_prompts, real, rows)
        hidden = self.model.forward_hidden(ids, positions.expand_as(real)[real], attend)

        new = len(self.prompt_len) + np.arange(len(lengths))
        self._arrange(np.append(self.prompt_len, lengths), np.append(self.prompt_of_slot, new))
        self.most_slots += len(lengths) * num_samples
        self._resize(self.own_kv[0].shape[3])
        return self.model.lm_head(hidden[prompt_len.cumsum(0) - 1])

    def _attend_in_prompts(
        self, real: Tensor, rows: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Causal attention, which also stores keys and values."""
        q, k, v = (rows_of(x, rows) for x in (q, k, v))  # [P', H or K, Lp, E]
        new = torch.stack([k.transpose(0, 1), v.transpose(0, 1)])
        if layer == len(self.prompt_kv):
            self.prompt_kv.append(new)
            self.own_kv.append(k.new_zeros(2, 0, k.shape[1], 0, k.shape[3]))
        else:
            old = self.prompt_kv[layer]
            width = max(old.shape[3], new.shape[3])
            both = [pad(x, (0, 0, 0, width - x.shape[3])) for x in (old, new)]
            self.prompt_kv[layer] = torch.cat(both, dim=2)
        return sdpa(q, k, v).transpose(1, 2)[real]

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
        if num_columns > self.own_kv[0].shape[3]:
            self._resize(num_columns + BLOCK)
        width, device = tokens.shape[1], tokens.device
        columns = columns[:, None] + torch.arange(width, device=device)  # [B, W]
        in_prompt = torch.arange(self.prompt_kv[0].shape[3], device=device) < self.starts[:, None]
        own = torch.arange(num_columns, device=device) <= columns[..., None]
        visible = torch.cat([in_prompt[:, None].expand(-1, width, -1), own], dim=-1)
        # [B, 1, 1, W, Lp + num_columns], one for all layers
        attend = partial(self._attend, columns, ~visible[:, None, None])
        # proposals may go past the context; they are never kept, but their positions must exist
        positions = (self.starts[:, None] + columns).clamp(max=self.model.shape.context - 1)
        hidden = self.model.forward_hidden(tokens.flatten(), positions.flatten(), attend)
        hidden = hidden.unflatten(0, tokens.shape)
        if last is not None:
            hidden = hidden.take_along_dim(last[:, None, None], dim=1)
        return self.model.lm_head(hidden)

    def _attend(
        self, columns: Tensor, masked: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """`q [B * W, H, E]`, new keys and values `[B * W, K, E]` -> `[B * W, H, E]`."""
        (num_slots, width), heads = columns.shape, k.shape[1]
        prompt_k, prompt_v = self.prompt_kv[layer]
        slots = torch.arange(num_slots, device=q.device)[:, None]
        new = torch.stack([k, v], dim=1).unflatten(0, (-1, width))  # [B, W, 2, K, E]
        self.own_kv[layer][:, slots, :, columns] = new
        num_columns = masked.shape[-1] - prompt_k.shape[2]
        own_k, own_v = self.own_kv[layer][:, :num_slots, :, :num_columns]

        q = (q * q.shape[-1] ** -0.5).unflatten(0, (-1, width)).unflatten(2, (heads, -1))
        q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, K, R * W, E]
        prompt_scores = self._to_slots(self._to_grid(q) @ prompt_k.mT)
        scores = torch.cat([prompt_scores, q @ own_k.mT], dim=-1)  # [B, K, R * W, keys]
        scores.unflatten(2, (-1, width)).masked_fill_(masked, -torch.inf)
        weights = scores.softmax(-1).to(v.dtype)
        prompt_weights, own_weights = weights.split([prompt_k.shape[2], num_columns], dim=-1)
        out = self._to_slots(self._to_grid(prompt_weights) @ prompt_v) + own_weights @ own_v
        out = out.unflatten(2, (-1, width)).permute(0, 3, 1, 2, 4)  # [B, W, K, R, E]
        return out.flatten(2, 3).flatten(0, 1)

    def _to_grid(self, x: Tensor) -> Tensor:
        """Group slots by prompt: `[B, K, T, E]` -> `[K, P, G' * T, E]`."""
        grid = x.transpose(0, 1).index_select(1, self.grid)
        return grid.unflatten(1, (-1, self.grid_width)).flatten(2, 3)

    def _to_slots(self, x: Tensor) -> Tensor:
        """Undo `_to_grid`: `[K, P, G' * T, E]` -> `[B, K, T, E]`."""
        grid = x.unflatten(2, (self.grid_width, -1)).flatten(1, 2)
        return grid.transpose(0, 1).index_select(0, self.place)

    def reorder(self, sources: np.ndarray, most_slots: int) -> None:
        """Change to `len(sources)` slots: slot i continues the former slot `sources[i]`.

        There will be no more than `most_slots` before the next `prefill`.
        """
        self.most_slots, moved = most_slots, np.flatnonzero(sources != np.arange(len(sources)))
        if len(sources) == len(self.prompt_of_slot) and not len(moved):
            return
        to, source = (torch.from_numpy(x).to(self.model.device) for x in (moved, sources[moved]))
        for layer in self.own_kv:
            # all sources are read before any slot is overwritten
            layer.index_copy_(1, to, layer.index_select(1, source))
        alive, prompt_of_slot = np.unique(self.prompt_of_slot[sources], return_inverse=True)
        prompt_len = self.prompt_len[alive]
        if len(alive) < len(self.prompt_len):  # drop prompts without slots
            prompts, width = torch.from_numpy(alive).to(source.device), prompt_len.max(initial=0)
            self.prompt_kv = [x[:, :, :, :width].index_select(2, prompts) for x in self.prompt_kv]
        self._arrange(prompt_len, prompt_of_slot)

    def _resize(self, columns: int) -> None:
        """Resize the cache of new tokens to these columns, and to `most_slots` rows.

        New ones are zeros: attention gives them no weight, but 0 times a NaN is NaN.
        """
        for layer, x in enumerate(self.own_kv):  # one at a time, for memory
            more = columns - x.shape[3], self.most_slots - x.shape[1]
            self.own_kv[layer] = pad(x, (0, 0, 0, more[0], 0, 0, 0, more[1]))
