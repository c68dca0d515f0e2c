"""The sequences of a batch: the slots that they share, and how each picks its next token.

Proposals are read off a draft, a text such as the known answer, as in prompt-lookup decoding: they
need no smaller model (Leviathan et al., arXiv 2211.17192).
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..settings import SamplingConfig
from ..turns.dialogues import Dialogues
from ..types import Completions

NUM_MATCHED = 3  # M, the number of last tokens that locate a sequence in its draft


class Tables:
    """A row for each of P * G sequences on the device, and a padding row after them: R in all."""

    def __init__(
        self, num_sequences: int, columns: int, truncates: bool, device: torch.device
    ) -> None:
        size = (num_sequences + 1, columns)
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)  # `length + unread` of each
        self.sampled = torch.zeros_like(self.ids, dtype=torch.bool)  # others are an answer's
        self.logp = torch.zeros_like(self.ids, dtype=torch.float32)
        self.log_kept_mass = torch.zeros_like(self.logp) if truncates else None
        # [R] each, see RoundState
        self.lengths = self.ids.new_zeros(len(self.ids))
        self.unread = torch.zeros_like(self.lengths)
        self.waiting = torch.zeros_like(self.lengths, dtype=torch.bool)

    def clear(self) -> None:
        for table in vars(self).values():
            if table is not None:
                table.zero_()
        self.lengths[-1] = 1  # a round runs the last token of each row

    def completions(self, prompt_ids: Tensor, prompt_len: Tensor, ended: Tensor) -> Completions:
        """The completions of P prompts; `ended`, `[P * G]`, says which were not cut off."""
        groups = (len(prompt_ids), -1)
        longest = int(self.lengths[:-1].max())

        def grouped(table: Tensor) -> Tensor:
            return table[: len(ended), :longest].unflatten(0, groups)

        return Completions(
            prompt_ids,
            prompt_len,
            grouped(self.ids),
            grouped(self.sampled),
            grouped(self.logp),
            log_kept_mass=None if self.log_kept_mass is None else grouped(self.log_kept_mass),
            ended=ended.unflatten(0, groups),
        )


@dataclass(frozen=True)
class RoundState:
    """What the host knows of the N running sequences after a round; each array is `[N]`."""

    sequence: np.ndarray  # int64, the number p * G + g, ascending
    slot: np.ndarray  # int64
    length: np.ndarray  # int64, tokens so far, without unread ones
    last_token: np.ndarray  # int64
    unread: np.ndarray  # int64, tokens of an answer that are stored, and have not been run
    waiting: np.ndarray  # bool, a turn has been submitted, and its answer has not come
    answer: np.ndarray  # int64, the number of an answer that has just come, or 0 for none
    ended: np.ndarray  # bool, the last token is a stop, or completes a stop text
    is_full: np.ndarray  # bool, there is no place for another token

    @property
    def runs(self) -> np.ndarray:
        """`[N]` bool: the next round has something to run for a sequence."""
        return (self.unread > 0) | ~(self.ended | self.is_full)

    def select(self, which: np.ndarray) -> "RoundState":
        """The sequences where `which`, `[N]` bool, is true."""
        return RoundState(**{name: values[which] for name, values in vars(self).items()})


def exchange_turns(dialogues: Dialogues, tables: Tables, state: RoundState) -> RoundState:
    """Submit the turns that have ended, and store the answers that have come.

    A stop token ends a turn. Its sequence keeps its slot and waits: each round runs its last token
    again, and drops what is picked. The rounds after the answer has come run the answer's tokens.
    If nothing else can run, this waits until an answer comes.
    """
    # 1. Submit turns. A stop token within an answer does not end one.
    asks = state.ended & (state.unread == 0) & ~state.waiting
    asking = state.sequence[asks]
    turns = zip(asking, tables.ids[asking].tolist(), state.length[asks], strict=True)
    for sequence, ids, length in turns:
        dialogues.submit(int(sequence), ids[:length])

    # 2. Take answers.
    waiting = state.waiting | asks
    unread = state.unread.copy()
    answer = np.zeros_like(state.sequence)
    numbers: dict[tuple[int, ...], int] = {}  # numbers of distinct answers, from 1
    stored: list[tuple[int, int, int]] = []  # sequence, column and token
    for sequence, tokens in dialogues.replies(wait=not state.runs.any()).items():
        n = int(np.searchsorted(state.sequence, sequence))
        waiting[n] = False
        unread[n] = len(tokens)
        answer[n] = numbers.setdefault(tuple(tokens), len(numbers) + 1)
        for column, token in enumerate(tokens, start=int(state.length[n])):
            stored.append((sequence, column, token))

    # 3. Store them, each after the turn that it answers; two copies to the device.
    if stored:
        rows, columns, answer_ids = tables.ids.new_tensor(stored).T
        tables.ids[rows, columns] = answer_ids
    on_host = np.stack([state.sequence, unread, waiting])
    sequences, of_unread, of_waiting = tables.ids.new_tensor(on_host)
    tables.unread[sequences] = of_unread
    tables.waiting[sequences] = of_waiting.bool()
    return replace(state, unread=unread, waiting=waiting, answer=answer)


class Slots(NamedTuple):
    """A new assignment of B slots to N sequences."""

    old_slot: np.ndarray  # [B] the old slot that each new one continues
    of_sequence: np.ndarray  # [N] the new slot of each sequence
    first_sequence: np.ndarray  # [B] one of the N sequences in each new slot


def assign_slots(slot: np.ndarray, *properties: np.ndarray) -> Slots:
    """Assign one slot to the sequences that agree in their old slot and in all properties, `[N]`.

    Slots keep their place where possible, so that little is copied: sequences of the slots
    [0, 0, 0, 1] with the last tokens [5, 7, 5, 5] get the slots [0, 2, 0, 1].
    """
    # 1. Group the sequences, by one number for all that must agree; it is ordered by slot first.
    key = slot
    for values in properties:
        key = key * (values.max(initial=0) + 1) + values
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    old = slot[first]  # the old slot of each group, sorted

    # 2. The first group of each old slot stays there, if that place still exists.
    is_first = np.diff(old, prepend=-1) > 0
    stays = is_first & (old < len(old))
    new = np.empty_like(old)
    new[stays] = old[stays]
    new[~stays] = np.setdiff1d(np.arange(len(old)), old[stays])

    by_place = np.argsort(new)
    return Slots(old[by_place], new[group], first[by_place])


def truncate(logp: Tensor, sampling: SamplingConfig) -> Tensor:
    """Log-probabilities `[..., V]` with -inf for every token that is removed.

    First top-k, then top-p (nucleus sampling, arXiv 1904.09751) of what top-k kept, then min-p
    (arXiv 2407.01082), in the order of transformers. Tokens that tie with the last kept one are
    kept too. The log-sum-exp of the result is the log of the kept mass.
    """
    vocab_size = logp.shape[-1]
    if 0 < sampling.top_k < vocab_size:
        kept = logp.topk(sampling.top_k).values
        least = kept[..., -1:]
        logp = logp.masked_fill(logp < least, -torch.inf)
    if sampling.top_p < 1:
        ordered = logp.sort(descending=True).values
        mass = ordered.softmax(-1).cumsum(-1)
        # The last token that is kept is the first one at which the mass reaches top_p.
        num_before = (mass < sampling.top_p).sum(-1, keepdim=True)
        least = ordered.gather(-1, num_before.clamp(max=vocab_size - 1))
        logp = logp.masked_fill(logp < least, -torch.inf)
    if sampling.min_p > 0:
        least = logp.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logp = logp.masked_fill(logp < least, -torch.inf)
    return logp


def pick_token(logp: Tensor, uniforms: Tensor | None, slot: Tensor) -> Tensor:
    """Sample by inverse CDF, or take the most likely token if `uniforms` is None.

    Log-probs `[B, W, V]` of B slots at W positions, which need not be normalised, numbers
    `uniforms` `[N, W]` in [0, 1) and the slot of each sequence `[N]` -> tokens `[N, W]`.
    """
    if uniforms is None:
        return logp.argmax(-1)[slot]
    cdf = logp.exp().cumsum(-1)[slot]
    # Scaled by the total, because with truncation and rounding the CDF does not end in exactly 1.
    targets = uniforms[..., None].to(cdf.dtype) * cdf[..., -1:]
    picked = torch.searchsorted(cdf, targets, right=True)[..., 0]
    # Clamped, because logits that are not finite would pick a token past the vocabulary.
    return picked.clamp_(max=logp.shape[-1] - 1)


def propose(drafts: Tensor, ids: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """Propose the tokens that come next in each draft.

    A sequence is located in its draft by its last M tokens, at the first of the matches that are
    nearest to its own length. If they match nowhere, the draft is read from that length on.

    `drafts` `[B, L]` int64, `ids` `[B, S]`, the tokens of each sequence, and their number `lengths`
    `[B]` -> `[B, num_tokens]`. Past the last column, that column is repeated.
    """
    missing = NUM_MATCHED + 1 - drafts.shape[1]
    drafts = pad(drafts, (0, max(0, missing)))
    lengths = lengths[:, None]
    last_columns = lengths + torch.arange(-NUM_MATCHED, 0, device=ids.device)
    recent = ids.gather(1, last_columns.clamp(min=0))  # [B, M]

    # 1. A draft matches at column c if its tokens c - M .. c - 1 are the recent ones.
    columns = torch.arange(NUM_MATCHED, drafts.shape[1], device=ids.device)
    pieces = drafts.unfold(1, NUM_MATCHED, 1)[:, :-1]  # [B, L - M, M]
    is_match = (pieces == recent[:, None]).all(-1)
    is_match &= lengths >= NUM_MATCHED  # else there are fewer than M recent tokens

    # 2. Take the nearest match, and read on from there.
    distance = (columns - lengths).abs().masked_fill(~is_match, 1 << 30)
    nearest = columns[distance.argmin(1, keepdim=True)]
    start = torch.where(is_match.any(1, keepdim=True), nearest, lengths)
    next_columns = start + torch.arange(num_tokens, device=ids.device)
    return drafts.gather(1, next_columns.clamp(max=drafts.shape[1] - 1))
