"""The model while it writes: with a preallocated KV cache that holds each prompt once, and without, for comparison.

Both run *cells*, ragged rows of tokens that each go on from one prompt; which completion a cell stands for is sampling.py's
business.
"""

import itertools
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .layout import pad_rows, rows_of
from .model import GPT, Attend, Causal, Stream


class CachedDecoder:
    """The model with a KV cache of two segments: each prompt once, and each cell's own tokens.

    (Hydragen, arXiv 2402.05099: attention over a shared prefix as one matrix product per group, one softmax over both.)
    """

    def __init__(self, model: GPT, prompt_ids: Tensor, prompt_len: Tensor, num_samples: int, length: int) -> None:
        """`prompt_ids [P, Lp]`, `prompt_len [P]`; room for `length` new tokens of `num_samples` cells a prompt."""
        self.model, self.length = model, length
        self.prompt_ids = prompt_ids = prompt_ids[:, : int(prompt_len.max())]
        columns = torch.arange(prompt_ids.shape[1], device=model.device)
        self.prompt_len = prompt_len
        self.in_prompt = columns < prompt_len[:, None]  # [P, Lp]
        self.num_columns = 0  # how much of own_kv is in use
        self.tokens_run = int(prompt_len.sum())
        self.prompt_kv: list[tuple[Tensor, Tensor]] = []  # a layer: keys and values [P, H, Lp, D/H]
        self.own_kv: list[tuple[Tensor, Tensor]] = []  # a layer: keys and values [C, H, length, D/H]
        self._arrange(np.repeat(np.arange(len(prompt_ids)), num_samples))

    def _arrange(self, group: np.ndarray) -> None:
        """Lay out the cells by prompt: `group [C]`, ascending, is the prompt of each."""
        counts = np.bincount(group)
        starts = np.cumsum(counts) - counts
        # where a prompt has fewer cells than the widest one, its last is attended for again, and nobody asks
        grid = starts[:, None] + np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        self.group, self.num_cells = group, len(group)
        tensors = (torch.from_numpy(x).to(self.model.device) for x in (grid, group, np.arange(len(group)) - starts[group]))
        self.grid, prompt, place = tensors  # [P, G] the cells of each prompt
        self.place = prompt, place  # [C] and [C], where in the grid each cell is

    def prefill(self) -> Tensor:
        """Run the prompts, each once; the logits of the first new token, `[C, V]`."""
        lengths = self.prompt_len.cpu().numpy()
        rows, unpad = (torch.from_numpy(x).to(self.model.device) for x in pad_rows(np.cumsum(lengths) - lengths, lengths))
        positions = torch.arange(self.prompt_ids.shape[1], device=self.model.device).expand_as(self.prompt_ids)
        stream = Stream(self.prompt_ids[self.in_prompt], positions[self.in_prompt])
        hidden = self.model.hidden(stream, _Prefill(self, rows, unpad))
        return self.model.head(hidden[self.prompt_len.cumsum(0) - 1])[self.place[0]]

    def step(self, tokens: Tensor, columns: Tensor, num_columns: int) -> Tensor:
        """Run W tokens of every cell, at that cell's own column, and return the logits that follow each.

        Args:
            tokens: `[C, W]`.
            columns: `[C]`, the column of each cell's first token.
            num_columns: on the host, more than any column written so far: how much of the cache to look at.

        Returns:
            `[C, W, V]`.
        """
        self.tokens_run += tokens.numel()
        self.columns = columns[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # [C, W]
        for cache in itertools.chain.from_iterable(self.own_kv):  # seen for the first time: 0 times garbage may be NaN
            cache[:, :, self.num_columns : num_columns] = 0
        self.num_columns = num_columns
        of_prompt = ~self.in_prompt[self.place[0], None].expand(-1, tokens.shape[1], -1)
        of_own = torch.arange(num_columns, device=tokens.device) > self.columns[..., None]
        self.unseen = torch.cat([of_prompt, of_own], dim=-1)[:, None]  # [C, 1, W, Lp + columns]
        positions = self.prompt_len[self.place[0], None] + self.columns
        positions = positions.clamp(max=self.model.shape.context - 1)  # a guess beyond the end, which nothing keeps
        hidden = self.model.hidden(Stream(tokens.flatten(), positions.flatten()), self)
        return self.model.head(hidden).unflatten(0, tokens.shape)

    def layer(self, number: int) -> Attend:
        return partial(self._attend, number)

    def _attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (cells, window), (heads, size) = self.columns.shape, q.shape[1:]
        prompt_k, prompt_v = self.prompt_kv[number]
        own_k, own_v = self.own_kv[number]
        rows = torch.arange(cells, device=q.device)[:, None]
        own_k[rows, :, self.columns] = k.view(cells, window, heads, size)
        own_v[rows, :, self.columns] = v.view(cells, window, heads, size)
        own_k, own_v = own_k[:, :, : self.num_columns], own_v[:, :, : self.num_columns]

        by_cell = (q * size**-0.5).view(cells, window, heads, size).transpose(1, 2)  # [C, H, W, D/H]
        to_prompt = self._by_group(by_cell) @ prompt_k.transpose(-1, -2)  # [P, H, G*W, Lp]
        to_own = by_cell @ own_k.transpose(-1, -2)  # [C, H, W, columns]
        scores = torch.cat([self._by_cell(to_prompt), to_own], dim=-1).masked_fill_(self.unseen, -torch.inf)
        of_prompt, of_own = scores.softmax(-1).to(v.dtype).split([prompt_k.shape[2], self.num_columns], dim=-1)
        out = self._by_cell(self._by_group(of_prompt) @ prompt_v) + of_own @ own_v  # [C, H, W, D/H]
        return out.transpose(1, 2).reshape(-1, heads, size)

    def _by_group(self, x: Tensor) -> Tensor:
        """`[C, H, W, E]` -> `[P, H, G*W, E]`, padded."""
        return x[self.grid].transpose(1, 2).flatten(2, 3)

    def _by_cell(self, x: Tensor) -> Tensor:
        """`[P, H, G*W, E]` -> `[C, H, W, E]`, without the pads."""
        return x.unflatten(2, (self.grid.shape[1], -1)).transpose(1, 2)[self.place]

    def keep(self, cells: np.ndarray) -> None:
        """Go on with these cells, `[C']`, some of them perhaps twice, in ascending order."""
        going_on = torch.from_numpy(cells).to(self.model.device)

        def copy(cache: Tensor) -> Tensor:
            new = cache.new_empty(len(cells), *cache.shape[1:])
            new[:, :, : self.num_columns] = cache[:, :, : self.num_columns].index_select(0, going_on)
            return new

        self.own_kv = [(copy(k), copy(v)) for k, v in self.own_kv]
        alive, group = np.unique(self.group[cells], return_inverse=True)
        if len(alive) < len(self.prompt_len):
            prompts = torch.from_numpy(alive).to(self.model.device)
            self.prompt_len, self.in_prompt = self.prompt_len[prompts], self.in_prompt[prompts]
            self.prompt_kv = [(k[prompts], v[prompts]) for k, v in self.prompt_kv]
        self._arrange(group)


class _Prefill:
    """Causal attention over the prompts that leaves their keys and values in a decoder's cache."""

    def __init__(self, decoder: CachedDecoder, rows: Tensor, unpad: Tensor) -> None:
        self.decoder, self.rows, self.unpad = decoder, rows, unpad

    def layer(self, number: int) -> Attend:
        return self.attend

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (rows_of(x, self.rows) for x in (q, k, v))
        own = (self.decoder.num_cells, k.shape[1], self.decoder.length, k.shape[3])
        self.decoder.prompt_kv.append((k, v))
        self.decoder.own_kv.append((k.new_empty(own), v.new_empty(own)))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.unpad)


class UncachedDecoder:
    """The same interface without a cache: every step runs every row from its first token. The reference in tests."""

    def __init__(self, model: GPT, prompt_ids: Tensor, prompt_len: Tensor, num_samples: int, length: int) -> None:
        self.model = model
        self.prompt_len = prompt_len.repeat_interleave(num_samples)
        room = prompt_ids.new_zeros(len(prompt_ids), length)
        self.ids = torch.cat([prompt_ids, room], dim=1).repeat_interleave(num_samples, dim=0)  # [R, Lp + length]
        self.num_cells = len(self.ids)
        self.tokens_run = 0

    def prefill(self) -> Tensor:
        return self._logits_after(self.prompt_len[:, None] - 1)[:, 0]

    def step(self, tokens: Tensor, columns: Tensor, num_columns: int) -> Tensor:
        places = (self.prompt_len + columns)[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.ids.scatter_(1, places, tokens)
        return self._logits_after(places)

    def _logits_after(self, places: Tensor) -> Tensor:
        self.tokens_run += self.ids.numel()
        positions = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        positions = positions.clamp(max=self.model.shape.context - 1)
        hidden = self.model.hidden(Stream(self.ids.flatten(), positions.flatten()), Causal(*self.ids.shape))
        hidden = hidden.unflatten(0, self.ids.shape)
        return self.model.head(hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1])))

    def keep(self, cells: np.ndarray) -> None:
        going_on = torch.from_numpy(cells).to(self.ids.device)
        self.ids, self.prompt_len, self.num_cells = self.ids[going_on], self.prompt_len[going_on], len(cells)
