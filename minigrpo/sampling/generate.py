"""From prompts to completions: the loop of decoding, and its running state.

A token is a pure function of its logits and of one uniform number that was drawn beforehand. So a
completion does not depend on what else is in the batch, up to rounding. And speculative decoding is
exact: a proposed token is kept only if it would have been picked anyway.

Completions of a prompt that are equal so far share a *slot*, a place in the decoder's batch: their
logits are the same. Slots split when their completions differ, and never merge.

    run     The decoder runs the last token of each slot, and the tokens that are proposed after it.
    accept  Each sequence picks tokens, and keeps those up to the first that was not proposed.
    update  Finished sequences leave, and slots whose sequences now differ are split.

In a dialogue, a stop token ends a turn. The sequence keeps its slot and waits for an answer; each
round runs its last token again, and drops what is picked. When the answer has come, its tokens are
stored, and the next rounds run them.

The cache of a slot has the first `length - 1` tokens of its sequences, at least. `ids` has `length
+ unread` tokens of each.

With `graphs`, rounds are CUDA graphs (runtime/graphs.py). For this, sequences and slots are padded
to few sizes by a sequence that nobody reads, the last row of all tables.

Shapes: P prompts with G completions each, P * G sequences in all, of which N are running in B
slots; W tokens per slot and round.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..config import SamplingConfig
from ..model.encoding import StopTexts
from ..model.transformer import Transformer
from ..runtime.graphs import RoundGraphs, copy_into
from ..turns.dialogues import Dialogues
from ..types import Completions
from .decoder import Decoder, Room
from .pick import pick_token, propose, truncate

# Queued prompts enter when there is room for this share of `prompts_at_once`: an entry costs a
# forward pass of its own.
SHARE_THAT_ENTERS = 0.125
# Prompts of which a few completions still run keep their place in memory: at most this many times
# `prompts_at_once` in all.
MOST_PROMPTS = 2
MOST_READ = 16  # tokens of an answer that a round runs; all slots run as many
PLAIN = SamplingConfig()  # the model's own distribution


@dataclass
class RoundState:
    """What the host knows of the N running sequences after a round, `[N]` int64 each."""

    sequence: np.ndarray  # the number p * G + g, ascending
    slot: np.ndarray
    length: np.ndarray  # tokens so far, without unread ones
    last_token: np.ndarray
    ended: np.ndarray  # 1 if the last token is a stop, or completes a stop text, else 0
    unread: np.ndarray  # tokens of an answer that are stored, and not run yet
    waiting: np.ndarray  # 1 if it waits for an answer, else 0

    @classmethod
    def read(cls, **fields: Tensor) -> "RoundState":
        """Copy the fields to the host, all at once: each copy makes it wait for the device."""
        values = torch.stack([*fields.values()]).cpu().numpy()
        return cls(**dict(zip(fields, values, strict=True)))

    def select(self, which: np.ndarray) -> "RoundState":
        """The sequences where `which`, `[N]` bool, is true."""
        return RoundState(**{name: values[which] for name, values in vars(self).items()})


@dataclass(eq=False)
class Generation:
    """Completions in progress: their tokens, which of them are running, and in which slots."""

    model: Transformer
    prompt_ids: Tensor  # [P, Lp] int64, right-padded
    prompt_len: Tensor  # [P] int64
    _: KW_ONLY
    stops: Collection[int]  # tokens that end a completion; others end after `max_new_tokens`
    stop_texts: StopTexts | None = None  # end one too
    max_new_tokens: int
    num_samples: int  # G
    prompts_at_once: int  # at most this many times G sequences run side by side
    # [P, G, S] numbers in [0, 1), S >= max_new_tokens; None: the most likely token each time
    u: Tensor | np.ndarray | None
    sampling: SamplingConfig
    drafts: Tensor | None  # [P, L] int64, a text for each prompt, whose tokens are proposed
    num_speculative_tokens: int
    work: Counter[str]  # counts `rounds`, and the `tokens` that the model ran, prompts included
    answers: Dialogues | None  # None: a completion is one turn
    graphs: RoundGraphs | None = None

    def __post_init__(self) -> None:
        device = self.model.device
        self.prompt_ids = self.prompt_ids.to(device)
        self.prompt_len = self.prompt_len.to(device)
        self.window = 1  # W
        if self.drafts is not None:
            self.window += self.num_speculative_tokens
            self.drafts = torch.nn.functional.pad(self.drafts.to(device), (0, 0, 0, 1))
        num_prompts, longest_prompt = self.prompt_ids.shape
        at_once = min(self.prompts_at_once, num_prompts)
        self.most_prompts = min(num_prompts, MOST_PROMPTS * at_once)
        columns = self.max_new_tokens + self.window
        room = Room(
            prompts=self.most_prompts,
            prompt_len=longest_prompt,
            slots=at_once * self.num_samples,
            slots_of_prompt=self.num_samples,
            columns=columns if self.answers is None else columns + MOST_READ,
        )
        self.decoder = Decoder(self.model, room, few_sizes=self.graphs is not None)

        # 1. Tables of all sequences. They have W spare columns, because proposals may go past the
        #    last one, and a row of filler.
        num_sequences = num_prompts * self.num_samples
        size = num_sequences + 1, columns
        self.ids = self.prompt_ids.new_zeros(size)
        self.sampled = torch.zeros_like(self.ids, dtype=torch.bool)  # not of an answer
        self.logp = torch.zeros_like(self.ids, dtype=torch.float32)
        sampling = self.sampling
        truncates = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self.log_kept_mass = torch.zeros_like(self.logp) if truncates else None
        self.uniforms = None
        if self.u is not None:
            uniforms = torch.as_tensor(self.u).flatten(0, 1)[:, : self.max_new_tokens].to(device)
            self.uniforms = torch.nn.functional.pad(uniforms, (0, self.window, 0, 1))
        self.lengths = self.prompt_len.new_zeros(num_sequences + 1)  # [P * G]
        self.lengths[-1] = 1
        self.unread = torch.zeros_like(self.lengths)  # [P * G], see RoundState
        self.waiting = torch.zeros_like(self.lengths)  # [P * G], see RoundState

        # 2. What ends a completion.
        self.is_stop = self.sampled.new_zeros(self.model.shape.vocab_size)
        self.is_stop[sorted(self.stops)] = True  # [V]
        # [V] after these tokens a round ends, although a proposal may have gone on as sampled
        self.ends_round = self.is_stop
        if self.stop_texts is not None:
            self.ends_round = self.is_stop | torch.from_numpy(self.stop_texts.candidates).to(device)
        self.stopped = np.zeros(num_sequences, dtype=bool)  # by a stop text

        # 3. The running sequences, padded, in one place.
        self.layout = self.ids.new_zeros(3 * self.decoder.pad_to(num_sequences))
        self.running = self.layout[:0]  # [N, padded] their numbers, in ascending order
        self.slot = self.layout[:0]  # [N, padded] the slot of each; the filler's is 0
        self.representatives = self.layout[:0]  # [B, padded] one running sequence of each slot
        self.num_running = 0
        self.longest = 0  # the largest length
        self.most_unread = 0
        self.all_wait = False  # whether there is nothing to run

        self.num_entered = 0  # prompts that have been run

    @torch.no_grad()
    def run(self) -> Completions:
        """Complete all prompts, on the model's device.

        Queued prompts enter as completions end and make room (continuous batching, as in Orca, Yu
        et al., OSDI 2022). A prompt enters with all of its completions.
        """
        num_prompts = len(self.prompt_ids)
        fewest = max(1, int(self.prompts_at_once * SHARE_THAT_ENTERS))
        while self.num_entered < num_prompts or self.num_running:
            queued = num_prompts - self.num_entered
            places_taken = -(-self.num_running // self.num_samples)
            prompts = len(self.decoder.prompt_len)
            room = min(queued, self.prompts_at_once - places_taken, self.most_prompts - prompts)
            if queued and room >= min(queued, fewest):
                self._enter(self.num_entered, self.num_entered + room)
            elif not self.all_wait:
                self._run_round()
            self._update()
        longest = int(self.lengths[:-1].max())
        stopped = torch.from_numpy(self.stopped).unflatten(0, (num_prompts, -1))

        def grouped(table: Tensor) -> Tensor:
            return table[:-1, :longest].unflatten(0, (num_prompts, -1))

        return Completions(
            self.prompt_ids,
            self.prompt_len,
            grouped(self.ids),
            grouped(self.sampled),
            grouped(self.logp),
            log_kept_mass=None if self.log_kept_mass is None else grouped(self.log_kept_mass),
            stopped=None if self.stop_texts is None else stopped,
        )

    def _enter(self, first: int, last: int) -> None:
        """Run queued prompts, and pick the first token of each of their completions."""
        lengths = self.prompt_len[first:last]
        num_slots = len(self.decoder.prompt_of_slot)
        logits = self.decoder.prefill(self.prompt_ids[first:last], lengths)
        start, end = first * self.num_samples, last * self.num_samples
        sequences = torch.arange(start, end, device=logits.device)
        slot = sequences // self.num_samples - first
        self._accept(logits[:, None], sequences, slot, self.ids[: len(logits), :0])
        self.slot = torch.cat([self.slot[: self.num_running], slot + num_slots])
        self.running = torch.cat([self.running[: self.num_running], sequences])
        self.num_running = len(self.running)
        self.num_entered = last
        self.work["tokens"] += int(lengths.sum())

    def _run_round(self) -> None:
        if self.most_unread:
            self._run_answers()
            return
        decoder = self.decoder
        num_columns = self.longest - 1 + self.window
        usable = decoder.use_columns(num_columns)
        if self.graphs is None:
            self._round(num_columns)
        else:
            sizes = len(self.running), len(self.representatives)
            key = *sizes, usable, *decoder.grid_shape, decoder.prompt_width
            self.graphs.run(key, lambda: self._round(usable))
        self.work.update(rounds=1, tokens=len(decoder.prompt_of_slot) * self.window)

    def _round(self, num_columns: int) -> None:
        """All that a round does on the device; nothing of it is read by the host."""
        ids = self.ids[self.representatives]
        lengths = self.lengths[self.representatives]
        tokens = ids.gather(1, lengths[:, None] - 1)
        if self.drafts is not None:
            drafts = self.drafts[self.representatives // self.num_samples]
            tokens = torch.cat([tokens, propose(drafts, ids, lengths, self.window - 1)], dim=1)
        logits = self.decoder.step(tokens, lengths - 1, num_columns)
        self._accept(logits, self.running, self.slot, tokens[:, 1:])

    def _accept(self, logits: Tensor, sequences: Tensor, slot: Tensor, proposals: Tensor) -> None:
        """Pick tokens from `[B, W, V]`, up to and including the first that was not proposed.

        A pick counts only if the model was run on the picks before it. The first pick always
        counts; each further one counts if all picks before it equal the proposals, `[B, W - 1]`.
        """
        logp = (logits / self.sampling.temperature).log_softmax(-1)
        allowed = truncate(logp, self.sampling)
        rows = sequences[:, None]
        offsets = torch.arange(logp.shape[1], device=logp.device)
        columns = self.lengths[rows] + offsets  # [N, W]
        uniforms = None if self.uniforms is None else self.uniforms[rows, columns]
        picks = pick_token(allowed, uniforms, slot)
        # whether the pick after each one counts
        goes_on = (picks[:, :-1] == proposals[slot]) & ~self.ends_round[picks[:, :-1]]
        goes_on = torch.cat([torch.ones_like(rows, dtype=torch.bool), goes_on], dim=1)
        kept = goes_on.cumprod(1).bool() & (columns < self.max_new_tokens)
        if self.answers is not None:
            kept &= (self.unread[rows] == 0) & (self.waiting[rows] == 0)

        def store(table: Tensor, values: Tensor) -> None:
            table[rows, columns] = torch.where(kept, values, table[rows, columns]).to(table.dtype)

        store(self.ids, picks)
        store(self.sampled, kept)
        store(self.logp, logp[slot[:, None], offsets, picks])
        if self.log_kept_mass is not None:
            store(self.log_kept_mass, allowed.logsumexp(-1)[slot])
        self.lengths[sequences] += kept.sum(1)

    def _update(self) -> None:
        """Exchange turns, let finished sequences leave, and split slots whose sequences differ."""
        # 1. What the host needs to know of the round.
        running = self.running[: self.num_running]
        lengths = self.lengths[running]
        last_token = self.ids[running, lengths - 1]
        state = RoundState.read(
            sequence=running,
            slot=self.slot[: self.num_running],
            length=lengths,
            last_token=last_token,
            ended=self.is_stop[last_token].long(),
            unread=self.unread[running],
            waiting=self.waiting[running],
        )
        if self.stop_texts is not None:
            self._find_stop_texts(self.stop_texts, state)

        # 2. Sequences of a slot were equal before the round and got the same proposals. So they are
        #    equal now if they have the same length, last token and, if there is one, new answer.
        answer = np.zeros_like(state.sequence)
        if self.answers is not None:
            answer = self._exchange_turns(self.answers, state)
        stays = self._goes_on(state) | (state.waiting > 0)
        state = state.select(stays)
        slots = assign_slots(state.slot, state.length, answer[stays], state.last_token)

        # 3. One copy back.
        filler = len(self.ids) - 1
        parts = [
            self._padded(state.sequence, filler),
            self._padded(slots.of_sequence, 0),
            self._padded(state.sequence[slots.first_sequence], filler),
        ]
        self.running, self.slot, self.representatives = copy_into(self.layout, parts)
        self.num_running = len(state.sequence)
        self.longest = int(state.length.max(initial=0))
        self.most_unread = int(state.unread.max(initial=0))
        self.all_wait = bool(state.waiting.all())
        self.decoder.reorder(slots.source)

    def _padded(self, numbers: np.ndarray, filler: int) -> np.ndarray:
        size = self.decoder.pad_to(len(numbers))
        return np.pad(numbers, (0, size - len(numbers)), constant_values=filler)

    def _find_stop_texts(self, stop_texts: StopTexts, state: RoundState) -> None:
        """Note the sequences whose last token completes a stop text; changes the state."""
        self.stopped[state.sequence] = False
        candidates = np.flatnonzero(stop_texts.candidates[state.last_token])
        rows = state.sequence[candidates]
        own_ids = self.ids[rows].where(self.sampled[rows], -1).cpu().numpy()  # one copy for all
        for n, length, ids in zip(candidates, state.length[candidates], own_ids, strict=True):
            start = max(np.flatnonzero(ids[:length] < 0), default=-1) + 1  # after the last answer
            if stop_texts.completes(ids[start:length].tolist()):
                self.stopped[state.sequence[n]] = True
                state.ended[n] = 1

    def _goes_on(self, state: RoundState) -> np.ndarray:
        """`[N]` bool: the next round has something to run for a sequence."""
        is_full = state.length >= self.max_new_tokens
        return (state.unread > 0) | ((state.ended == 0) & ~is_full)

    def _exchange_turns(self, answers: Dialogues, state: RoundState) -> np.ndarray:
        """Have ended turns answered, and store the answers that have come; changes the state.

        Returns `[N]` numbers that tell new answers apart; 0: none.
        """
        self._submit_turns(answers, state)
        new_answer = self._store_answers(answers, state)
        running = self.running[: self.num_running]
        self.unread[running] = running.new_tensor(state.unread)
        self.waiting[running] = running.new_tensor(state.waiting)
        return new_answer

    def _submit_turns(self, answers: Dialogues, state: RoundState) -> None:
        """Have the turns answered that have just ended; a stop within an answer ends no turn."""
        asks = np.flatnonzero((state.ended > 0) & (state.unread == 0) & (state.waiting == 0))
        for n, ids in zip(asks, self.ids[state.sequence[asks]].tolist(), strict=True):
            answers.submit(int(state.sequence[n]), ids[: state.length[n]])
        state.waiting[asks] = 1

    def _store_answers(self, answers: Dialogues, state: RoundState) -> np.ndarray:
        """Store the answers that have come after their sequences; see `_exchange_turns`."""
        numbers: dict[tuple[int, ...], int] = {}  # of distinct answers
        new_answer = np.zeros_like(state.sequence)
        stored: list[tuple[int, int, int]] = []  # sequence, column and token
        has_nothing_else_to_do = not self._goes_on(state).any()
        for sequence, answer in answers.replies(wait=has_nothing_else_to_do).items():
            n = np.searchsorted(state.sequence, sequence)
            start = int(state.length[n])
            stored += [(sequence, start + column, token) for column, token in enumerate(answer)]
            state.waiting[n] = 0
            state.unread[n] = len(answer)
            new_answer[n] = numbers.setdefault(tuple(answer), len(numbers) + 1)
        if stored:  # all go to the device at once
            row, column, token = self.ids.new_tensor(stored).T
            self.ids[row, column] = token
        return new_answer

    def _run_answers(self) -> None:
        """Run the last token of each slot, and after it up to MOST_READ tokens of its answer.

        Nothing is proposed. Each slot needs only the logits after the last token that it has read;
        what it runs beyond that is filler, and is overwritten later.
        """
        ids = self.ids[self.representatives]
        lengths = self.lengths[self.representatives]
        most_read = min(self.most_unread, MOST_READ)
        columns = lengths[:, None] - 1 + torch.arange(most_read + 1, device=ids.device)
        tokens = ids.gather(1, columns.clamp(max=ids.shape[1] - 1))
        read = self.unread.clamp(max=most_read)
        last = read[self.representatives]
        num_columns = self.longest + most_read
        self.decoder.use_columns(num_columns)
        logits = self.decoder.step(tokens, lengths - 1, num_columns, last)
        self.lengths += read
        self.unread -= read
        self._accept(logits, self.running, self.slot, tokens[:, :0])
        self.work.update(rounds=1, tokens=tokens.numel())


class Slots(NamedTuple):
    """A new assignment of B slots to N sequences."""

    source: np.ndarray  # [B] the old slot that each new one continues
    of_sequence: np.ndarray  # [N] the new slot of each sequence
    first_sequence: np.ndarray  # [B] one of the N sequences in each new slot


def assign_slots(slot: np.ndarray, *properties: np.ndarray) -> Slots:
    """Assign one slot to the sequences that agree in their old slot and in all properties, `[N]`.

    Slots keep their place where possible, so that little of the cache is copied: sequences of the
    slots [0, 0, 0, 1] with the last tokens [5, 7, 5, 5] get the slots [0, 2, 0, 1], and slot 2
    continues slot 0.
    """
    key = slot  # one number for all of these, ordered by slot first
    for values in properties:
        key = key * (values.max(initial=0) + 1) + values
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    old = slot[first]  # of each group, sorted
    # of the groups from one old slot, the first stays there if that place still exists
    stays = (np.diff(old, prepend=-1) > 0) & (old < len(old))
    new = np.empty_like(old)
    new[stays] = old[stays]
    new[~stays] = np.setdiff1d(np.arange(len(old)), old[stays])
    order = np.argsort(new)
    return Slots(old[order], new[group], first[order])
