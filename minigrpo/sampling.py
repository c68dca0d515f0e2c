"""Batched sampling with a preallocated KV cache that holds each prompt once.

A token is a pure function of its logits and of one uniform number drawn beforehand (inverse CDF), so a completion depends
neither on what else is in the batch nor on when its neighbours finish. Rows are kept as a grid of prompts by samples;
when rows have finished, the grid is packed smaller. The host looks at who is finished every few steps only.
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
WORTH_PACKING = 0.8  # packing copies the cache: not for a row or two
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

    def keep(self, grid: tuple[int, int], slots: Tensor, groups: Tensor) -> None:
        """Pack the grid: `slots [P' * G']` are the rows that go on, `groups [P']` the prompts that they continue."""
        self.grid = grid
        self.prompt_len, self.in_prompt = self.prompt_len[groups], self.in_prompt[groups]
        self.prompt_kv = [(k[groups], v[groups]) for k, v in self.prompt_kv]
        self.own_kv = [(k[slots], v[slots]) for k, v in self.own_kv]


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
        self.decoder.own_kv.append((k.new_zeros(own), v.new_zeros(own)))
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

    def keep(self, grid: tuple[int, int], slots: Tensor, groups: Tensor) -> None:
        self.grid = grid
        self.ids, self.prompt_len = self.ids[slots], self.prompt_len[slots]


def pack(running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which rows go on, as a smaller grid: `running [P, G]` bool -> slots `[P', G']`, groups `[P']`, P' * G' minimal.

    A group with fewer running rows than the widest one repeats its first: it computes the same tokens again and writes
    them to the same place.
    """
    groups = np.flatnonzero(running.any(1))
    width = running[groups].sum(1).max(initial=0)
    slots = np.empty((len(groups), width), dtype=np.int64)
    for i, p in enumerate(groups):
        rows = p * running.shape[1] + np.flatnonzero(running[p])
        slots[i] = np.concatenate([rows, np.full(width - len(rows), rows[0])])
    return slots, groups


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
    draft_window: int = 16,
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
    window = 1 if drafts is None else draft_window
    device, num_rows = prompt_ids.device, len(prompt_ids) * num_samples
    make: Callable[..., CachedDecoder | UncachedDecoder] = CachedDecoder if kv_cache else UncachedDecoder
    decoder = make(model, prompt_ids, prompt_len, num_samples, max_new_tokens + window)
    # one column more than a window beyond the end, so that what is guessed there needs no special case
    ids = torch.zeros(num_rows, max_new_tokens + window, dtype=torch.int64, device=device)
    logps = torch.zeros(ids.shape, dtype=torch.float32, device=device)
    draws = None if u is None else torch.nn.functional.pad(u.flatten(0, 1)[:, :max_new_tokens], (0, window))
    drafts = None if drafts is None else drafts.repeat_interleave(num_samples, dim=0)
    ahead = torch.arange(window, device=device)

    rows = torch.arange(num_rows, device=device)  # which completion each row of the grid is
    columns = torch.zeros_like(rows)  # how many tokens it has
    lengths = torch.zeros_like(rows)  # the same for all completions, also those that have left the grid
    running = torch.ones_like(rows, dtype=torch.bool)
    logits, guesses = decoder.prefill()[:, None], rows[:, None][:, :0]  # [R, 1, V], and nothing guessed
    most_columns = 0  # on the host: no row has more tokens than that
    for turn in itertools.count(1):
        logp = log_softmax(logits, temperature)  # [R, W, V]
        places = columns[:, None] + ahead[: logp.shape[1]]  # [R, W]
        flat = None if draws is None else draws[rows[:, None], places].flatten()
        picks = pick_token(logp.flatten(0, 1), flat).view(places.shape)
        right = torch.cat([torch.ones_like(picks[:, :1]), (picks[:, :-1] == guesses).long()], dim=1).cumprod(1)
        before_eos = torch.cat([torch.ones_like(picks[:, :1]), (picks[:, :-1] != eos).long()], dim=1).cumprod(1)
        kept = (right * before_eos).bool() & (places < max_new_tokens) & running[:, None]
        ids[rows[:, None], places] = torch.where(kept, picks, 0)
        logps[rows[:, None], places] = torch.where(kept, logp.gather(2, picks[..., None])[..., 0].float(), 0.0)
        columns = columns + kept.sum(1)
        lengths[rows] = columns
        running = running & (columns < max_new_tokens) & ~(kept & (picks == eos)).any(1)

        most_columns += logp.shape[1]
        if most_columns >= max_new_tokens or turn % (STEPS_BETWEEN_LOOKS if window == 1 else 1) == 0:
            slots, groups = pack(running.view(decoder.grid).cpu().numpy())
            if not len(slots):
                break
            if slots.size <= WORTH_PACKING * running.numel():
                keep = torch.from_numpy(slots.flatten()).to(device)
                decoder.keep(slots.shape, keep, torch.from_numpy(groups).to(device))
                rows, columns, running = rows[keep], columns[keep], running[keep]
            most_columns = int(columns.max())
        tokens = ids[rows, columns - 1][:, None]
        if drafts is not None:
            recent = ids[rows[:, None], (columns[:, None] + torch.arange(-DRAFT_MATCH, 0, device=device)).clamp(min=0)]
            tokens = torch.cat([tokens, guess(drafts[rows], recent, columns, window - 1)], dim=1)
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
