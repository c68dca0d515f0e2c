"""Batched sampling with a preallocated KV cache that holds each prompt once.

A token is a pure function of its logits and of one uniform number drawn beforehand (inverse CDF), so a completion depends
neither on what else is in the batch nor on when its neighbours finish, and what it will say can be guessed and checked.
The model runs *cells*, a grid of prompts by prefixes: completions that agree so far share one, and part where they differ.
"""

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .layout import pad_rows, rows_of
from .logprobs import log_softmax
from .model import GPT, Attend, Causal, Stream
from .types import Completions

STEPS_BETWEEN_LOOKS = 8  # how often the host asks who has finished; asking is a device sync. Drafted: every round
DRAFT_MATCH = 3  # so many tokens must agree for a row to be found in its draft again


def pick_token(logp: Tensor, u: Tensor | None) -> Tensor:
    """The next token: inverse CDF of the uniform number `u [R]`, or the most likely token if `u` is None.

    `logp [R, V]` -> `[R]` int64.
    """
    if u is None:
        return logp.argmax(-1)
    cdf = logp.exp().cumsum(-1)
    # u times the total, not u: rounding leaves the last entry off 1. And never beyond the last token.
    picked = torch.searchsorted(cdf, (u.to(cdf.dtype) * cdf[:, -1])[:, None], right=True)[:, 0]
    return picked.clamp_(max=logp.shape[-1] - 1)


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


def regrid(cell: np.ndarray, said: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A grid with one cell for all running rows that agree so far, and none for the others; P' * G' is minimal.

    Args:
        cell: `[R]`, the cell of each running row in the grid as it is, `width` cells a prompt.
        said: `[K, R]`, where rows of one cell no longer agree, they differ in this.

    Returns:
        `[P', G']` the old cell that each new one goes on from; `[P']` the old group of each new one; `[R]` the new cell of
        each row; `[P', G']` a row that each cell stands for. Where a group has fewer cells than the widest one, its first
        is repeated: the same tokens are computed again, and nobody asks.
    """
    _, first, inverse = np.unique(np.stack([cell, *said]), axis=1, return_index=True, return_inverse=True)
    groups, starts, counts = np.unique(cell[first] // width, return_index=True, return_counts=True)
    places = np.repeat(np.arange(len(groups)), counts), np.arange(len(first)) - np.repeat(starts, counts)
    speakers = np.repeat(first[starts][:, None], counts.max(), axis=1)
    speakers[places] = first
    return cell[speakers], groups, np.ravel_multi_index(places, speakers.shape)[inverse.ravel()], speakers


def guess(drafts: Tensor, recent: Tensor, columns: Tensor, num_tokens: int) -> Tensor:
    """What rows will probably say next, read off their drafts where their last tokens stand.

    Args:
        drafts: `[R, L]`, a text that each row is likely to write.
        recent: `[R, K]`, the last K tokens that the row has written.
        columns: `[R]`, how many tokens that is in all.

    Returns:
        `[R, num_tokens]`: what follows, in the draft, the place nearest to the row's own column where the same K tokens
        stand; where there is none, what stands at its own column.
    """
    known = recent.shape[1]
    drafts = torch.nn.functional.pad(drafts, (0, max(0, known + 1 - drafts.shape[1])))
    length = drafts.shape[1]
    places = torch.arange(known, length, device=drafts.device)  # place a follows the tokens a-K..a-1
    same = (drafts.unfold(1, known, 1)[:, :-1] == recent[:, None]).all(-1) & (columns >= known)[:, None]
    far = 1 << 30
    distance, nearest = torch.where(same, (places - columns[:, None]).abs(), far).min(1)
    start = torch.where(distance < far, places[nearest], columns)
    ahead = (start[:, None] + torch.arange(num_tokens, device=drafts.device)).clamp(max=length - 1)
    return drafts.gather(1, ahead)


@torch.no_grad()
def generate(
    model: GPT,
    prompt_ids: Tensor,
    prompt_len: Tensor,
    *,
    eos: int,
    max_new_tokens: int,
    num_samples: int = 1,
    u: Tensor | None = None,
    temperature: float = 1.0,
    kv_cache: bool = True,
    drafts: Tensor | None = None,
    draft_window: int = 8,
) -> Completions:
    """Complete each prompt `num_samples` times.

    Since a token is a function of its logits and its uniform number, guessing ahead is exact: a round runs W tokens, the
    last one and W-1 guesses read off a draft, and keeps them up to the first that is not what would have been picked;
    that pick is right too. Drafts change the number of rounds, not the tokens. Without drafts W is 1.

    Args:
        prompt_ids: `[P, Lp]` int64, right-padded, on the model's device.
        prompt_len: `[P]` int64.
        u: `[P, G, S]` uniform numbers in [0, 1), S >= max_new_tokens; None picks the most likely token each time.
        drafts: `[P, L]` int64, what completions of each prompt probably look like: the known answer.
        draft_window: W.

    Returns:
        Completions on the model's device with G = num_samples and S = the longest completion. A completion ends with EOS,
        or after max_new_tokens without one.
    """
    window, cells_per_prompt = (1, num_samples) if drafts is None else (draft_window, 1)
    device, num_rows = prompt_ids.device, len(prompt_ids) * num_samples
    make: Callable[..., CachedDecoder | UncachedDecoder] = CachedDecoder if kv_cache else UncachedDecoder
    decoder = make(model, prompt_ids, prompt_len, cells_per_prompt, max_new_tokens + window)
    # a window more than there is room for, so that what is guessed beyond the end needs no special case
    ids = torch.zeros(num_rows, max_new_tokens + window, dtype=torch.int64, device=device)
    logps = torch.zeros(ids.shape, dtype=torch.float32, device=device)
    draws = None if u is None else torch.nn.functional.pad(u.flatten(0, 1)[:, :max_new_tokens], (0, window))
    ahead = torch.arange(window, device=device)

    lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)  # how many tokens each completion has
    rows = torch.arange(num_rows, device=device)  # those that are still running, as of the last look
    cell = rows // (num_samples // cells_per_prompt)  # where in the decoder's grid each of them is
    speakers = torch.arange(0, num_rows, num_samples // cells_per_prompt, device=device)  # a row that each cell stands for
    logits, guesses = decoder.prefill()[:, None], speakers[:, None][:, :0]  # [cells, 1, V], and nothing guessed yet
    most_columns = 0  # on the host: no completion has more tokens than that
    for turn in itertools.count(1):
        logp = log_softmax(logits, temperature)[cell]  # [R, W, V]
        places = lengths[rows][:, None] + ahead[: logp.shape[1]]  # [R, W]
        picks = pick_token(logp.flatten(0, 1), None if draws is None else draws[rows[:, None], places].flatten())
        picks = picks.view(places.shape)
        first = torch.ones_like(picks[:, :1])
        right = torch.cat([first, (picks[:, :-1] == guesses[cell]) & (picks[:, :-1] != eos)], dim=1).cumprod(1).bool()
        running = (lengths[rows] == 0) | (ids[rows, lengths[rows] - 1] != eos)
        kept = right & (places < max_new_tokens) & running[:, None]
        ids[rows[:, None], places] = torch.where(kept, picks, 0)
        logps[rows[:, None], places] = torch.where(kept, logp.gather(2, picks[..., None])[..., 0].float(), 0.0)
        lengths[rows] += kept.sum(1)

        most_columns += logp.shape[1]
        if most_columns >= max_new_tokens or turn % (STEPS_BETWEEN_LOOKS if drafts is None else 1) == 0:
            last = ids[rows, lengths[rows] - 1]
            running = (lengths[rows] < max_new_tokens) & (last != eos)
            here = torch.stack([cell, lengths[rows], last])[:, running].cpu().numpy()
            if not here.size:
                break
            cells, groups, cell_of_row, speakers_of_cells = regrid(here[0], here[1:], decoder.grid[1])
            rows, cell = rows[running], torch.from_numpy(cell_of_row).to(device)
            speakers = rows[torch.from_numpy(speakers_of_cells.ravel()).to(device)]
            if cells.shape != decoder.grid or (cells.ravel() != np.arange(cells.size)).any():
                going_on = torch.from_numpy(cells.ravel()).to(device)
                decoder.keep(cells.shape, going_on, torch.from_numpy(groups).to(device))
            most_columns = int(here[1].max())
        columns = lengths[speakers]
        tokens = ids[speakers, columns - 1][:, None]
        if drafts is not None:
            recent = ids[speakers[:, None], (columns[:, None] + torch.arange(-DRAFT_MATCH, 0, device=device)).clamp(min=0)]
            draft = drafts[speakers // num_samples]
            tokens = torch.cat([tokens, guess(draft, recent, columns, window - 1)], dim=1)
        guesses = tokens[:, 1:]
        logits = decoder.step(tokens, columns - 1, min(most_columns - 1 + window, ids.shape[1]))

    longest = int(lengths.max())
    grid = (len(prompt_ids), num_samples)
    return Completions(
        prompt_ids=prompt_ids,
        prompt_len=prompt_len,
        completion_ids=ids[:, :longest].unflatten(0, grid),
        completion_mask=(torch.arange(longest, device=device) < lengths[:, None]).unflatten(0, grid),
        sampler_logp=logps[:, :longest].unflatten(0, grid),
    )
