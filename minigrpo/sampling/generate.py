"""From prompts to completions: the loop of decoding.

Completions of a prompt that are equal so far share a *slot*, a place in the decoder's batch. Slots
split when their completions differ, and never merge.

    run     The decoder runs the last token of each slot, and the tokens that are proposed after it.
    accept  Each sequence picks tokens, and keeps those up to the first that was not proposed.
    update  Finished sequences leave, and slots whose sequences now differ are split.

The cache of a slot has the first `length - 1` tokens of its sequences, at least. In a dialogue, an
update also exchanges turns for answers.

With `graphs`, rounds are CUDA graphs, padded to few sizes by the padding row of the tables. While
no slot can split, several rounds run before the host looks at them.

Shapes: P prompts with G completions each, P * G sequences in all, of which N are running in B
slots; W tokens per slot and round.
"""

from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..model.transformer import Transformer
from ..settings import SamplingConfig
from ..text.encoding import StopFinder
from ..turns.dialogues import Dialogues
from ..types import Completions
from .decoder import Capacity, Decoder
from .graphs import RoundGraphs, copy_into
from .sequences import (
    RoundState,
    Tables,
    assign_slots,
    exchange_turns,
    pick_token,
    propose,
    truncate,
)

FRACTION_THAT_ENTERS = 0.125  # of `prompts_at_once`: fewer queued prompts wait for more places
MOST_PROMPTS = 2  # times `prompts_at_once` are in memory: some wait for their last completions
MOST_READ = 16  # tokens of an answer that a round runs; all slots run as many
FEWEST_PER_ROUND = 2.0  # new tokens of a sequence; with fewer, proposals rest on a CPU
MOST_UNSEEN = 8  # rounds that run before the host looks; those after a completion's end are wasted
TOKENS_PER_UNSEEN = 32  # a sequence this much longer runs one more of these rounds


class Sizes(NamedTuple):
    """The most that a generation has memory for."""

    prompts: int
    prompts_at_once: int  # this many times G sequences run side by side
    prompt_len: int
    draft_len: int


@dataclass(eq=False)
class Generation:
    """Completions in progress, batch after batch: `begin` sets prompts, `run` completes them."""

    model: Transformer
    _: KW_ONLY
    stops: Collection[int]  # tokens that end a completion; others end after `max_new_tokens`
    stop_texts: StopFinder | None = None  # texts that end one too
    max_new_tokens: int
    num_samples: int  # G
    sizes: Sizes
    sampling: SamplingConfig  # its temperature, top_k, top_p and min_p count
    num_speculative_tokens: int  # tokens of drafts that are proposed per round
    dialogues: Dialogues | None  # what answers turns, or None if a completion is one turn
    graphs: RoundGraphs | None = None

    def __post_init__(self) -> None:
        device = self.model.device
        sizes = self.sizes
        self.tokens_per_round = 1 + self.num_speculative_tokens  # W
        most_tokens = self.tokens_per_round  # that a slot runs at once
        if self.dialogues is not None:
            most_tokens = max(most_tokens, 1 + MOST_READ)

        # 1. Where tokens are run and stored.
        most_prompts = sizes.prompts_at_once * (MOST_PROMPTS if self.num_samples > 1 else 1)
        capacity = Capacity(
            prompts=min(sizes.prompts, most_prompts),
            prompt_len=sizes.prompt_len,
            slots=sizes.prompts_at_once * self.num_samples,
            slots_of_prompt=self.num_samples,
            columns=self.max_new_tokens + most_tokens,
            tokens=most_tokens,
        )
        self.decoder = Decoder(self.model, capacity, few_sizes=self.graphs is not None)
        num_sequences = sizes.prompts * self.num_samples
        columns = self.max_new_tokens + self.tokens_per_round
        self.tables = Tables(num_sequences, columns, self.sampling.truncates, device)
        self.uniforms = torch.zeros(num_sequences + 1, columns, device=device)  # as tables
        self.drafts = self.tables.ids.new_zeros(sizes.prompts + 1, sizes.draft_len)
        self.layout = self.tables.ids.new_zeros(3 * self.decoder.most_slots)

        # 2. The tokens that end a turn, and a round.
        self.is_stop = np.zeros(self.model.shape.vocab_size, dtype=bool)
        self.is_stop[[*self.stops]] = True
        # [V] a round ends after these tokens, even if a proposal goes on with the token after them
        ends_round = self.is_stop
        if self.stop_texts is not None:
            # a special token may have no row in the model
            ends_round = ends_round | self.stop_texts.candidates[: len(ends_round)]
        self.ends_round = torch.from_numpy(ends_round).to(device)
        # Stop texts and turns are for the host to find.
        is_plain = self.stop_texts is None and self.dialogues is None
        self.looks_ahead = is_plain and self.graphs is not None

    def begin(
        self,
        prompt_ids: Tensor,
        prompt_len: Tensor,
        uniforms: Tensor | np.ndarray | None,
        drafts: Tensor | None,
    ) -> None:
        """Prepare to complete prompts `[P, Lp]`, right-padded, of lengths `[P]`.

        `uniforms` are numbers in [0, 1), `[P, G, S]` with S >= max_new_tokens, or None if it is
        greedy. `drafts`, `[P, L]`, have a text for each prompt, whose tokens are proposed.
        """
        device = self.model.device
        self.prompt_ids = prompt_ids.to(device)
        self.prompt_len = prompt_len.to(device)
        self.decoder.clear()
        self.tables.clear()
        self.is_greedy = uniforms is None  # the most likely token is taken each time
        if uniforms is not None:
            numbers = torch.as_tensor(uniforms).flatten(0, 1)[:, : self.max_new_tokens]
            self.uniforms[: len(numbers), : self.max_new_tokens] = numbers.to(device)
        if drafts is not None:
            self.drafts.zero_()
            self.drafts[: len(drafts), : drafts.shape[1]] = drafts.to(device)
        self.ended = np.zeros(len(prompt_ids) * self.num_samples, dtype=bool)  # by a stop
        self.running = self.layout[:0]  # [N, padded] their numbers, in ascending order
        self.slot = self.layout[:0]  # [N, padded] the slot of each
        self.representatives = self.layout[:0]  # [B, padded] one running sequence of each slot
        self.num_running = 0  # N
        self.num_entered = 0  # prompts that have been run
        self.rest = 0  # rounds until tokens are proposed again
        self.next_rest = 1
        self.rounds = 0
        self.tokens = 0  # tokens that the model ran, prompts included

    @torch.no_grad()
    def run(self, show: Callable[[int, int], object] | None = None) -> Completions:
        """Complete all prompts, on the model's device; `show` hears how many are done, of how many.

        Queued prompts enter with all of their completions, as others end (continuous batching, as
        in Orca, Yu et al., OSDI 2022).
        """
        self._enter(self._num_entering())
        state = self._update()
        while self.num_entered < len(self.prompt_ids) or self.num_running:
            num_entering = self._num_entering()
            if num_entering:
                self._enter(num_entering)
            elif state.unread.any():
                self._read_answers(state)
            elif not state.waiting.all():
                longest = int(state.length.max())
                for _ in range(self._rounds_to_run(longest)):
                    self._run_round(longest - 1 + self.tokens_per_round)
                    longest += self.tokens_per_round
            state = self._update()
            if show is not None:
                show(self.num_entered * self.num_samples - self.num_running, len(self.ended))
        ended = torch.from_numpy(self.ended)
        return self.tables.completions(self.prompt_ids, self.prompt_len, ended)

    def _num_entering(self) -> int:
        """The number of queued prompts that enter now: all that there are places for, or none."""
        queued = len(self.prompt_ids) - self.num_entered
        places_taken = -(-self.num_running // self.num_samples)
        places_in_memory = self.decoder.capacity.prompts - len(self.decoder.prompt_len)
        num_entering = min(queued, self.sizes.prompts_at_once - places_taken, places_in_memory)
        fewest = max(1, int(self.sizes.prompts_at_once * FRACTION_THAT_ENTERS))
        return num_entering if num_entering >= min(queued, fewest) else 0

    def _enter(self, num_prompts: int) -> None:
        first = self.num_entered
        last = first + num_prompts
        lengths = self.prompt_len[first:last]
        first_slot = len(self.decoder.prompt_of_slot)
        logits = self.decoder.prefill(self.prompt_ids[first:last], lengths)
        slot = torch.arange(num_prompts, device=logits.device).repeat_interleave(self.num_samples)
        sequences = torch.arange(len(slot), device=logits.device) + first * self.num_samples
        self._accept(logits[:, None], sequences, slot, proposals=self.tables.ids[:num_prompts, :0])
        self.running = torch.cat([self.running[: self.num_running], sequences])
        self.slot = torch.cat([self.slot[: self.num_running], slot + first_slot])
        self.num_running = len(self.running)
        self.num_entered = last
        self.tokens += int(lengths.sum())

    def _rounds_to_run(self, longest: int) -> int:
        """The number of rounds that run before the host looks; no slot may split meanwhile."""
        has_queue = self.num_entered < len(self.prompt_ids)
        has_shared_slots = len(self.decoder.prompt_of_slot) < self.num_running
        if not self.looks_ahead or has_queue or has_shared_slots:
            return 1
        fit = (self.max_new_tokens - longest) // self.tokens_per_round
        return max(1, min(MOST_UNSEEN, 1 + longest // TOKENS_PER_UNSEEN, fit))

    def _run_round(self, num_columns: int) -> None:
        decoder = self.decoder
        usable = decoder.use_columns(num_columns)
        width = 1 if self.rest else self.tokens_per_round
        if self.graphs is not None:
            sizes = len(self.running), len(self.representatives)
            key = *sizes, usable, *decoder.grid_shape, decoder.prompt_width, decoder.states.width
            self.graphs.run(key, lambda: self._round(usable, width))
        elif self.model.device.type == "cpu":
            num_before = self.tables.lengths.sum()
            self._round(num_columns, width)
            self._rest_after(int(self.tables.lengths.sum() - num_before))
        else:
            self._round(num_columns, width)
        self.rounds += 1
        self.tokens += len(decoder.prompt_of_slot) * width

    def _rest_after(self, num_new: int) -> None:
        """Choose whether the next round proposes tokens: on a CPU, refused ones take time."""
        if self.rest:
            self.rest -= 1
        elif num_new < FEWEST_PER_ROUND * self.num_running:
            self.rest = self.next_rest
            self.next_rest *= 2
        else:
            self.next_rest = 1

    def _round(self, num_columns: int, width: int) -> None:
        """All that a round does on the device; nothing of it is read by the host."""
        ids = self.tables.ids[self.representatives]
        lengths = self.tables.lengths[self.representatives]
        tokens = ids.gather(1, lengths[:, None] - 1)
        if width > 1:
            drafts = self.drafts[self.representatives // self.num_samples]
            proposals = propose(drafts, ids, lengths, width - 1)
            tokens = torch.cat([tokens, proposals], dim=1)
        logits = self.decoder.step(tokens, lengths - 1, num_columns)
        goes_on = ~self.ends_round[tokens[:, 0]] if self.looks_ahead else None
        self._accept(logits, self.running, self.slot, tokens[:, 1:], goes_on)

    def _read_answers(self, state: RoundState) -> None:
        """Run the last token of each slot, and after it up to MOST_READ tokens of its answer.

        What a slot runs beyond the tokens that it reads is padding, and is overwritten later.
        """
        most_read = min(int(state.unread.max()), MOST_READ)
        num_columns = int(state.length.max()) + most_read
        tables = self.tables
        ids = tables.ids[self.representatives]
        lengths = tables.lengths[self.representatives]
        columns = lengths[:, None] - 1 + torch.arange(most_read + 1, device=ids.device)
        tokens = ids.gather(1, columns.clamp(max=ids.shape[1] - 1))
        num_read = tables.unread.clamp(max=most_read)  # [P * G]
        self.decoder.use_columns(num_columns)
        last = num_read[self.representatives]
        logits = self.decoder.step(tokens, lengths - 1, num_columns, last)
        tables.lengths += num_read
        tables.unread -= num_read
        self._accept(logits, self.running, self.slot, proposals=tokens[:, :0])
        self.rounds += 1
        self.tokens += tokens.numel()

    def _accept(
        self,
        logits: Tensor,
        sequences: Tensor,
        slot: Tensor,
        proposals: Tensor,
        goes_on: Tensor | None = None,
    ) -> None:
        """Pick tokens from `[B, W, V]`, up to and including the first that was not proposed.

        A pick counts if the model was run on all picks before it, `proposals` `[B, W - 1]`, and if
        its slot `goes_on`, `[B]`; None if all do.
        """
        # 1. Pick a token at each place.
        tables = self.tables
        if self.sampling.temperature != 1:
            logits = logits / self.sampling.temperature
        logp = logits.log_softmax(-1)
        allowed = truncate(logp, self.sampling)
        rows = sequences[:, None]
        offsets = torch.arange(logp.shape[1], device=logp.device)
        columns = tables.lengths[rows] + offsets  # [N, W]
        uniforms = None if self.is_greedy else self.uniforms[rows, columns]
        picks = pick_token(allowed, uniforms, slot)

        # 2. Find the picks that count.
        has_place = columns < self.max_new_tokens
        before = picks[:, :-1]
        follows = (before == proposals[slot]) & ~self.ends_round[before]
        follows = torch.cat([has_place[:, :1], follows], dim=1)
        counts = follows.cumprod(1).bool() & has_place
        if goes_on is not None:
            counts &= goes_on[slot, None]
        if self.dialogues is not None:
            counts &= (tables.unread[rows] == 0) & ~tables.waiting[rows]

        # 3. Store them.
        def store(table: Tensor, values: Tensor) -> None:
            kept = torch.where(counts, values, table[rows, columns])
            table[rows, columns] = kept.to(table.dtype)

        store(tables.ids, picks)
        store(tables.sampled, counts)
        store(tables.logp, logp[slot[:, None], offsets, picks])
        if tables.log_kept_mass is not None:
            store(tables.log_kept_mass, allowed.logsumexp(-1)[slot])
        tables.lengths[sequences] += counts.sum(1)

    def _update(self) -> RoundState:
        """Exchange turns, let finished sequences leave, and split slots whose sequences differ."""
        state = self._read_state()
        if self.dialogues is not None:
            state = exchange_turns(self.dialogues, self.tables, state)
        state = state.select(state.runs | state.waiting)
        # Sequences of a slot were equal before the round and got the same proposals. So they are
        # equal now if they have the same length, last token and, if there is one, new answer.
        slots = assign_slots(state.slot, state.length, state.answer, state.last_token)
        padding_row = len(self.tables.ids) - 1
        arrays = [
            self._padded(state.sequence, padding_row),
            self._padded(slots.of_sequence, 0),
            self._padded(state.sequence[slots.first_sequence], padding_row),
        ]
        self.running, self.slot, self.representatives = copy_into(self.layout, arrays)
        self.num_running = len(state.sequence)
        self.decoder.reorder(slots.old_slot)
        return state

    def _padded(self, numbers: np.ndarray, value: int) -> np.ndarray:
        size = self.decoder.pad_to(len(numbers), self.decoder.capacity.slots)
        return np.pad(numbers, (0, size - len(numbers)), constant_values=value)

    def _read_state(self) -> RoundState:
        """What the host needs to know, in one copy: each waits for the device."""
        tables = self.tables
        running = self.running[: self.num_running]
        lengths = tables.lengths[running]
        fields = [
            running,
            self.slot[: self.num_running],
            lengths,
            tables.ids[running, lengths - 1],
            tables.unread[running],
            tables.waiting[running].long(),
        ]
        sequence, slot, length, last_token, unread, waiting = torch.stack(fields).cpu().numpy()
        self.ended[sequence] = self.is_stop[last_token]
        if self.stop_texts is not None:
            candidates = self.stop_texts.candidates[last_token]
            rows = sequence[candidates]
            sampled_ids = tables.ids[rows].where(tables.sampled[rows], -1).cpu().numpy()
            for row, ids, end in zip(rows, sampled_ids, length[candidates], strict=True):
                start = max(np.flatnonzero(ids[:end] < 0), default=-1) + 1  # after the last answer
                self.ended[row] |= self.stop_texts.completes(ids[start:end].tolist())
        return RoundState(
            sequence=sequence,
            slot=slot,
            length=length,
            last_token=last_token,
            unread=unread,
            waiting=waiting.astype(bool),
            answer=np.zeros_like(sequence),
            ended=self.ended[sequence],
            is_full=length >= self.max_new_tokens,
        )
