"""The model while it writes: with a preallocated KV cache that holds each prompt once, and without, for comparison.

Both run a *grid* of cells, P prompts by so many rows each; which completion a cell stands for is sampling.py's business.
"""

import itertools
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .layout import pad_rows, rows_of
from .model import GPT, Attend, Causal, Stream


class CachedDecoder:
    """The model with a KV cache of two segments: each prompt once, and each row's own tokens.

    (Hydragen, arXiv 2402.05099: attention over a shared prefix as one matrix product per group, one softmax over both.)
    """

    def __init__(self, model: GPT, prompt_ids: Tensor, prompt_len: Tensor, num_samples: int, length: int) -> None:
        """`prompt_ids [P, Lp]`, `prompt_len [P]`; room for `length` new tokens of `num_samples` rows a prompt."""
        self.model, self.length = model, length
        self.prompt_ids = prompt_ids = prompt_ids[:, : int(prompt_len.max())]
        self.grid = (len(prompt_ids), num_samples)
        columns = torch.arange(prompt_ids.shape[1], device=model.device)
        self.prompt_len = prompt_len
        self.in_prompt = columns < prompt_len[:, None]  # [P, Lp]
        self.num_columns = 0  # how much of own_kv is in use
        self.prompt_kv: list[tuple[Tensor, Tensor]] = []  # a layer: keys and values [P, H, Lp, D/H]
        self.own_kv: list[tuple[Tensor, Tensor]] = []  # a layer: keys and values [P*G, H, length, D/H]

    def prefill(self) -> Tensor:
        """Run the prompts, each once; the logits of the first new token, `[P*G, V]`."""
        lengths = self.prompt_len.cpu().numpy()
        rows, unpad = (torch.from_numpy(x).to(self.model.device) for x in pad_rows(np.cumsum(lengths) - lengths, lengths))
        positions = torch.arange(self.prompt_ids.shape[1], device=self.model.device).expand_as(self.prompt_ids)
        stream = Stream(self.prompt_ids[self.in_prompt], positions[self.in_prompt])
        hidden = self.model.hidden(stream, _Prefill(self, rows, unpad))
        logits = self.model.head(hidden[self.prompt_len.cumsum(0) - 1])
        return logits.repeat_interleave(self.grid[1], dim=0)

    def step(self, tokens: Tensor, columns: Tensor, num_columns: int) -> Tensor:
        """Run W tokens of every row, at that row's own column, and return the logits that follow each.

        Args:
            tokens: `[R, W]`.
            columns: `[R]`, the column of each row's first token.
            num_columns: on the host, more than any column written so far: how much of the cache to look at.

        Returns:
            `[R, W, V]`.
        """
        self.columns = columns[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # [R, W]
        for cache in itertools.chain.from_iterable(self.own_kv):  # seen for the first time: 0 times garbage may be NaN
            cache[:, :, self.num_columns : num_columns] = 0
        self.num_columns = num_columns
        positions = self.prompt_len.repeat_interleave(self.grid[1])[:, None] + self.columns
        positions = positions.clamp(max=self.model.shape.context - 1)  # a guess beyond the end, which nothing keeps
        hidden = self.model.hidden(Stream(tokens.flatten(), positions.flatten()), self)
        return self.model.head(hidden).unflatten(0, tokens.shape)

    def layer(self, number: int) -> Attend:
        return partial(self._attend, number)

    def _attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (prompts, samples), window = self.grid, self.columns.shape[1]
        prompt_k, prompt_v = self.prompt_kv[number]
        own_k, own_v = self.own_kv[number]
        heads, size = q.shape[1:]
        rows = torch.arange(len(own_k), device=q.device)[:, None]
        own_k[rows, :, self.columns] = k.view(-1, window, heads, size)
        own_v[rows, :, self.columns] = v.view(-1, window, heads, size)
        own_k, own_v = own_k[:, :, : self.num_columns], own_v[:, :, : self.num_columns]

        q = q * size**-0.5
        by_group = q.view(prompts, samples * window, heads, size).transpose(1, 2)  # [P, H, G*W, D/H]
        by_row = q.view(-1, window, heads, size).transpose(1, 2)  # [R, H, W, D/H]
        to_prompt = by_group @ prompt_k.transpose(-1, -2)  # [P, H, G*W, Lp]
        to_prompt = to_prompt.masked_fill(~self.in_prompt[:, None, None], -torch.inf)
        to_own = by_row @ own_k.transpose(-1, -2)  # [R, H, W, columns]
        seen = torch.arange(self.num_columns, device=q.device) <= self.columns[..., None]  # [R, W, columns]
        to_own = to_own.masked_fill(~seen[:, None], -torch.inf)

        to_prompt = to_prompt.unflatten(2, (samples, window)).transpose(1, 2).flatten(0, 1)  # [R, H, W, Lp]
        weights = torch.cat([to_prompt, to_own], dim=-1).softmax(-1).to(v.dtype)
        of_prompt, of_own = weights.split([prompt_k.shape[2], self.num_columns], dim=-1)
        of_prompt = of_prompt.unflatten(0, self.grid).transpose(1, 2).flatten(2, 3)  # [P, H, G*W, Lp]
        from_prompt = (of_prompt @ prompt_v).transpose(1, 2).reshape(-1, heads, size)
        from_own = (of_own @ own_v).transpose(1, 2).reshape(-1, heads, size)
        return from_prompt + from_own

    def keep(self, grid: tuple[int, int], cells: Tensor, groups: Tensor) -> None:
        """Make another grid: `cells [P' * G']` are the cells that go on, some of them twice, `groups [P']` their prompts."""

        def copy(cache: Tensor) -> Tensor:
            new = cache.new_empty(len(cells), *cache.shape[1:])
            new[:, :, : self.num_columns] = cache[:, :, : self.num_columns].index_select(0, cells)
            return new

        self.grid = grid
        self.prompt_len, self.in_prompt = self.prompt_len[groups], self.in_prompt[groups]
        self.prompt_kv = [(k[groups], v[groups]) for k, v in self.prompt_kv]
        self.own_kv = [(copy(k), copy(v)) for k, v in self.own_kv]


class _Prefill:
    """Causal attention over the prompts that leaves their keys and values in a decoder's cache."""

    def __init__(self, decoder: CachedDecoder, rows: Tensor, unpad: Tensor) -> None:
        self.decoder, self.rows, self.unpad = decoder, rows, unpad

    def layer(self, number: int) -> Attend:
        return self.attend

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (rows_of(x, self.rows) for x in (q, k, v))
        own = (len(k) * self.decoder.grid[1], k.shape[1], self.decoder.length, k.shape[3])
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
        self.grid = (len(prompt_ids), num_samples)

    def prefill(self) -> Tensor:
        return self._logits_after(self.prompt_len[:, None] - 1)[:, 0]

    def step(self, tokens: Tensor, columns: Tensor, num_columns: int) -> Tensor:
        places = (self.prompt_len + columns)[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.ids.scatter_(1, places, tokens)
        return self._logits_after(places)

    def _logits_after(self, places: Tensor) -> Tensor:
        positions = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        positions = positions.clamp(max=self.model.shape.context - 1)
        hidden = self.model.hidden(Stream(self.ids.flatten(), positions.flatten()), Causal(*self.ids.shape))
        hidden = hidden.unflatten(0, self.ids.shape)
        return self.model.head(hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1])))

    def keep(self, grid: tuple[int, int], cells: Tensor, groups: Tensor) -> None:
        self.grid = grid
        self.ids, self.prompt_len = self.ids[cells], self.prompt_len[cells]
