"""Batched sampling, drafted from an answer that is already known.

A token is a pure function of its logits and of one uniform number drawn beforehand (inverse CDF),
so a completion depends neither on what else is in the batch nor on when its neighbours finish, and
what it will say can be guessed and checked. The model runs *slots*: completions of a prompt that
agree so far share one, and part where they differ.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..model.logprobs import log_softmax
from ..model.transformer import Transformer
from ..types import Completions
from .decoders import Decoder, ReplicatedPrefixDecoder

STEPS_BETWEEN_LOOKS = (
    4  # how often the host asks who has finished, where it need not know; asking is a device sync
)
POOR_DRAFTS = 1.5  # tokens kept a round and row, below which guessing is left alone for a while
PATIENCE = 8  # rounds of that; twice as many each time
DRAFT_MATCH = 3  # so many tokens must agree for a row to be found in its draft again


@dataclass(frozen=True)
class SamplingParams:
    """How a token is picked from log-probabilities that are already divided by the temperature."""

    temperature: float = 1.0
    top_k: int = 0  # only the k most likely tokens; 0: all
    # only the most likely tokens that together have this mass, the last one included; 1: all
    top_p: float = 1.0

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


def truncate(logp: Tensor, params: SamplingParams) -> Tensor:
    """Log-probabilities `[..., V]` with -inf where top-k, then top-p of what that leaves, forbid a
    token; not renormalised.

    Tokens as likely as the last one that is kept are kept too.
    """
    if params.top_k and params.top_k < logp.shape[-1]:
        logp = logp.masked_fill(logp < logp.topk(params.top_k).values[..., -1:], -torch.inf)
    if params.top_p < 1:
        ordered = logp.sort(descending=True).values
        mass = (ordered - ordered.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
        needed = (
            (mass < params.top_p).sum(-1, keepdim=True).clamp(max=logp.shape[-1] - 1)
        )  # so many, and one more
        logp = logp.masked_fill(logp < ordered.gather(-1, needed), -torch.inf)
    return logp


def pick_token(logp: Tensor, u: Tensor | None, slot: Tensor) -> Tensor:
    """The next token: inverse CDF of the uniform number, or the most likely token if `u` is None.

    `logp [C, W, V]` of slots, `u [R, W]` and `slot [R]` of rows -> `[R, W]` int64.
    """
    if u is None:
        return logp.argmax(-1)[slot]
    cdf = logp.exp().cumsum(-1)[slot]
    # u times the total, not u: rounding leaves the last entry off 1. And never beyond the last
    # token.
    picked = torch.searchsorted(cdf, u[..., None].to(cdf.dtype) * cdf[..., -1:], right=True)[..., 0]
    return picked.clamp_(max=logp.shape[-1] - 1)


def regroup(slot: np.ndarray, said: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One slot for all running rows that agree so far, and none for the others.

    Args:
        slot: `[R]`, the slot of each running row as it is.
        said: `[K, R]`, where rows of one slot no longer agree, they differ in this.

    Returns:
        `[C]` the old slot that each new one goes on from, one that can stay in its place does;
        `[R]` the new slot of each row; `[C]` a row that each slot stands for.
    """
    key = slot
    for number in said:
        key = key * (number.max() + 1) + number
    _, representative, inverse = np.unique(key, return_index=True, return_inverse=True)
    old, place = slot[representative], np.arange(len(representative))  # old ascends
    stays = np.append(True, old[1:] != old[:-1]) & (old < len(old))
    new = np.empty_like(place)
    new[stays], new[~stays] = old[stays], np.setdiff1d(place, old[stays])
    order = np.argsort(new)
    return old[order], new[inverse], representative[order]


def guess(drafts: Tensor, recent: Tensor, columns: Tensor, num_tokens: int) -> Tensor:
    """What rows will probably say next, read off their drafts where their last tokens stand.

    Args:
        drafts: `[R, L]`, a text that each row is likely to write.
        recent: `[R, K]`, the last K tokens that the row has written.
        columns: `[R]`, how many tokens that is in all.

    Returns:
        `[R, num_tokens]`: what follows, in the draft, the place nearest to the row's own column
        where the same K tokens stand; where there is none, what stands at its own column.
    """
    known = recent.shape[1]
    drafts = torch.nn.functional.pad(drafts, (0, max(0, known + 1 - drafts.shape[1])))
    length = drafts.shape[1]
    places = torch.arange(
        known, length, device=drafts.device
    )  # place a follows the tokens a-K..a-1
    same = (drafts.unfold(1, known, 1)[:, :-1] == recent[:, None]).all(-1) & (columns >= known)[
        :, None
    ]
    far = 1 << 30
    distance, nearest = torch.where(same, (places - columns[:, None]).abs(), far).min(1)
    start = torch.where(distance < far, places[nearest], columns)
    ahead = (start[:, None] + torch.arange(num_tokens, device=drafts.device)).clamp(max=length - 1)
    return drafts.gather(1, ahead)


class _Rows:
    """Completions under way: what each has said, which still run, and which of the decoder's slots
    runs them.
    """

    def __init__(
        self,
        grid: tuple[int, int],
        *,
        length: int,
        eos: int,
        params: SamplingParams,
        u: Tensor | None,
        drafts: Tensor | None,
        window: int,
        device: torch.device,
    ) -> None:
        """`grid` is (P, G). With drafts, completions of a prompt share one slot until they
        differ."""
        self.eos, self.length, self.params, self.drafts, self.device = (
            eos,
            length,
            params,
            drafts,
            device,
        )
        self.window = self.widest = window if drafts is not None else 1
        self.rounds, self.rests_until, self.patience = 0, 0, PATIENCE
        self.num_samples, num_rows = grid[1], grid[0] * grid[1]
        rows_per_slot = 1 if drafts is None else self.num_samples
        self.rows = torch.arange(
            num_rows, device=device
        )  # those that are still running, as of the last look
        self.slot = self.rows // rows_per_slot  # [rows] the decoder's slot of each of them
        self.representatives = self.rows[::rows_per_slot]  # [slots] a row that each slot stands for
        self.lengths = torch.zeros_like(self.rows)  # [R] how many tokens each completion has
        self.row_rounds = 0  # rounds of all rows
        self.most = 0  # on the host: no completion has more tokens than that
        # a window more than there is room for, so that what is guessed beyond the end needs no
        # special case
        self.ids = torch.zeros(num_rows, length + self.widest, dtype=torch.int64, device=device)
        self.logp = torch.zeros(self.ids.shape, dtype=torch.float32, device=device)
        self.log_kept_mass = torch.zeros_like(self.logp) if params.truncates else None
        self.u = (
            None
            if u is None
            else torch.nn.functional.pad(u.flatten(0, 1)[:, :length], (0, self.widest))
        )
        self.guesses = self.ids[self.representatives, :0]  # [slots, W - 1], but nothing yet

    def accept(self, logits: Tensor) -> None:
        """Pick tokens from `[slots, W, V]`, and keep those up to the first that was not what had
        been guessed.
        """
        logp = log_softmax(logits, self.params.temperature)
        allowed = truncate(logp, self.params)
        rows, starts = self.rows[:, None], self.lengths[self.rows][:, None]
        columns = torch.arange(logp.shape[1], device=self.device)
        places = starts + columns  # [rows, W]
        picks = pick_token(allowed, None if self.u is None else self.u[rows, places], self.slot)
        right = (picks[:, :-1] == self.guesses[self.slot]) & (picks[:, :-1] != self.eos)
        right = torch.cat(
            [torch.ones_like(starts, dtype=torch.bool), right], dim=1
        )  # the first is right in any case
        running = (starts == 0) | (self.ids[rows, starts - 1] != self.eos)
        kept = right.cumprod(1).bool() & (places < self.length) & running
        self.ids[rows, places] = torch.where(kept, picks, 0)
        self.logp[rows, places] = torch.where(
            kept, logp[self.slot[:, None], columns, picks].float(), 0.0
        )
        if self.log_kept_mass is not None:
            self.log_kept_mass[rows, places] = torch.where(
                kept, allowed.logsumexp(-1)[self.slot].float(), 0.0
            )
        self.kept = kept.sum(1)
        self.lengths[self.rows] += self.kept
        self.most += logp.shape[1]

    def regroup(self, decoder: Decoder) -> bool:
        """Let those who have finished leave, and give those who no longer agree slots of their own;
        False: nobody is left.
        """
        lengths = self.lengths[self.rows]
        last = self.ids[self.rows, lengths - 1]
        running = (lengths < self.length) & (last != self.eos)
        # one copy there and one back: each makes the host wait for the device
        here = torch.stack([self.slot, lengths, last, self.kept, running.long()]).cpu().numpy()
        left = np.flatnonzero(here[4])
        if not len(left):
            return False
        here = here[:, left]
        self._judge_drafts(float(here[3].mean()))
        slots, slot_of_row, representatives = regroup(here[0], here[1:3])
        places = torch.from_numpy(np.concatenate([left, slot_of_row, representatives])).to(
            self.device
        )
        left_rows, self.slot, chosen_rows = places.split(
            [len(left), len(left), len(representatives)]
        )
        self.rows = self.rows[left_rows]
        self.representatives = self.rows[chosen_rows]
        if not np.array_equal(slots, np.arange(decoder.num_slots)):
            decoder.keep(slots)
        self.most = int(here[1].max())
        return True

    def _judge_drafts(self, kept: float) -> None:
        """Guess no more for a while if hardly a guess is right: the forward of a guess is not
        free."""
        if self.guesses.shape[1] and kept < POOR_DRAFTS:
            self.window, self.rests_until, self.patience = (
                1,
                self.rounds + self.patience,
                2 * self.patience,
            )
        elif self.rounds >= self.rests_until:
            self.window = self.widest

    @property
    def must_look(self) -> bool:
        """Rows may have parted: by what was guessed, or in a slot that they share."""
        return self.window > 1 or len(self.representatives) < len(self.rows)

    def next_tokens(self) -> tuple[Tensor, Tensor]:
        """What the decoder runs next: `[slots, W]`, the last token of each slot and guesses, and
        `[slots]`, its column.
        """
        self.rounds += 1
        self.row_rounds += len(self.rows)
        columns = self.lengths[self.representatives]
        tokens = self.ids[self.representatives, columns - 1][:, None]
        if self.drafts is not None and self.window > 1:
            behind = columns[:, None] + torch.arange(-DRAFT_MATCH, 0, device=self.device)
            recent = self.ids[self.representatives[:, None], behind.clamp(min=0)]
            ahead = guess(
                self.drafts[self.representatives // self.num_samples],
                recent,
                columns,
                self.window - 1,
            )
            tokens = torch.cat([tokens, ahead], dim=1)
        self.guesses = tokens[:, 1:]
        return tokens, columns - 1


@torch.no_grad()
def generate(
    model: Transformer,
    prompt_ids: Tensor,
    prompt_len: Tensor,
    *,
    eos: int,
    max_new_tokens: int,
    num_samples: int = 1,
    u: Tensor | None = None,
    params: SamplingParams = SamplingParams(),
    decoder: Callable[..., Decoder] = ReplicatedPrefixDecoder,
    drafts: Tensor | None = None,
    num_speculative_tokens: int = 7,
    work: Counter[str] | None = None,
) -> Completions:
    """Complete each prompt `num_samples` times.

    Since a token is a function of its logits and its uniform number, guessing ahead is exact: a
    round runs W tokens, the last one and W-1 guesses read off a draft, and keeps them up to the
    first that is not what would have been picked; that pick is right too. Drafts change the number
    of rounds, not the tokens. Without drafts W is 1.

    Args:
        prompt_ids: `[P, Lp]` int64, right-padded, on the model's device.
        prompt_len: `[P]` int64.
        u: `[P, G, S]` uniform numbers in [0, 1), S >= max_new_tokens; None picks the most likely
            token each time.
        drafts: `[P, L]` int64, what completions of each prompt probably look like: the known
            answer.
        num_speculative_tokens: W - 1.
        decoder: how the model is run: with or without a cache.
        work: is told how many `rounds` there were after the prompts, how many `tokens` the model
            ran, and `row_rounds` of how many `rows`: rounds until a completion was seen to be done,
            summed over them.

    Returns:
        Completions on the model's device with G = num_samples and S = the longest completion. A
        completion ends with EOS, or after max_new_tokens without one.
    """
    grid, room = (len(prompt_ids), num_samples), max_new_tokens + num_speculative_tokens + 1
    progress = _Rows(
        grid,
        length=max_new_tokens,
        eos=eos,
        params=params,
        u=u,
        drafts=drafts,
        window=num_speculative_tokens + 1,
        device=prompt_ids.device,
    )
    slots = decoder(
        model, prompt_ids, prompt_len, len(progress.representatives) // len(prompt_ids), room
    )
    logits = slots.prefill()[:, None]
    for turn in itertools.count(1):
        progress.accept(logits)
        look = (
            progress.must_look or turn % STEPS_BETWEEN_LOOKS == 0 or progress.most >= max_new_tokens
        )
        if look and not progress.regroup(slots):
            break
        tokens, columns = progress.next_tokens()
        logits = slots.step(tokens, columns, min(progress.most - 1 + progress.window, room))

    if work is not None:
        each = {"row_rounds": progress.row_rounds, "rows": len(progress.lengths)}
        work.update(rounds=turn - 1, tokens=slots.tokens_run, **each)
    longest = int(progress.lengths.max())
    log_kept_mass = progress.log_kept_mass
    return Completions(
        prompt_ids=prompt_ids,
        prompt_len=prompt_len,
        completion_ids=progress.ids[:, :longest].unflatten(0, grid),
        completion_mask=(
            torch.arange(longest, device=model.device) < progress.lengths[:, None]
        ).unflatten(0, grid),
        sampler_logp=progress.logp[:, :longest].unflatten(0, grid),
        log_kept_mass=None
        if log_kept_mass is None
        else log_kept_mass[:, :longest].unflatten(0, grid),
    )
