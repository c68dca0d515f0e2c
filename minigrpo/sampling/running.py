"""The state of the completions during decoding: their tokens, which are unfinished, their slots.

A *slot* is a place in the decoder's batch. With a proposer, completions of a prompt that are equal
so far share a slot if the same tokens are proposed for them, because the model would compute the
same logits for all of them; otherwise they get slots of their own. One of the sequences that share
a slot stands for all of them: the slot's *representative*.

Shapes: R = P * G sequences, of which N are running; B slots; up to W tokens per slot and round, M
in all; K pairs of a running sequence and one of its slot's tokens.
"""

from collections import Counter
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from ..model.logprobs import log_softmax
from ..types import Completions
from .decoders import Decoder
from .drafts import Texts
from .params import SamplingParams, pick_token, truncate
from .proposer import Proposer, Round
from .slots import assign_slots, round_up_window

# Fields of RunningSequences with a row for every sequence that has joined and was not taken
PER_SEQUENCE = ("lengths", "ended", "ids", "logp", "log_kept_mass", "u")


class RunningSequences:
    """The state of `generate`: the completions of some prompts, from first token to last.

    `join` adds prompts, and `take` removes those in front when they have finished.
    """

    def __init__(
        self,
        num_prompts: int,
        num_samples: int,
        *,
        max_new_tokens: int,
        stops: Collection[int],
        params: SamplingParams,
        u: Tensor | None,
        proposer: Proposer | None,
        device: torch.device,
    ) -> None:
        """For the arguments, see `generate`."""
        self.num_samples, self.max_new_tokens = num_samples, max_new_tokens
        self.params, self.proposer, self.device = params, proposer, device
        self.stops = torch.tensor(sorted(stops), dtype=torch.int64, device=device)
        # Spare columns, because proposals may go past the last column. All columns are allocated
        # at once: a token takes 16 bytes or so here, and some kilobytes in the cache.
        spare = round_up_window(1 if proposer is None else proposer.max_tokens + 1)
        self.width = max_new_tokens + spare
        self.rounds, self.sequence_rounds, self.slot_rounds = 0, 0, 0  # of the batch; summed
        sequences = torch.arange(num_prompts * num_samples, device=device)
        sequences_per_slot = 1 if proposer is None else num_samples
        self.running = sequences  # [N] unfinished at the last check
        self.running_on_host = np.arange(len(sequences))  # [N] the same numbers
        self.slot = sequences // sequences_per_slot  # [N] slot of each
        self.representatives = sequences[::sequences_per_slot]  # [B] sequence of each slot
        self.lengths = torch.zeros_like(sequences)  # [R] tokens of each completion
        self.length_bound = 0  # on the host: an upper bound of the lengths of running sequences
        self.ended = torch.zeros_like(sequences, dtype=torch.bool)  # [R] by a stop token
        self.ids = torch.zeros(len(sequences), self.width, dtype=torch.int64, device=device)
        self.logp = torch.zeros(self.ids.shape, dtype=torch.float32, device=device)
        self.log_kept_mass = torch.zeros_like(self.logp) if params.truncates else None
        self.u = u
        if u is not None:
            u = u.flatten(0, 1)[:, :max_new_tokens]
            self.u = torch.nn.functional.pad(u, (0, spare))  # [R, width]
        self.lengths_on_host = np.zeros(len(sequences), dtype=np.int64)  # [R] at the last check
        self.rows_taken = self.kept = 0
        self._propose_nothing()

    def _propose_nothing(self) -> None:
        self.proposals = self.ids[self.representatives, :0]  # [B, W - 1], -1 where there is none
        self.counts: np.ndarray | None = None  # [B], tokens of each slot in a round; None: 1
        # ([K] of the N sequences, [K] offset, [K] of the M logits) of each pair; None: W is 1
        self.pairs: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def num_slots(self) -> int:
        return len(self.representatives)

    @property
    def num_finished(self) -> int:
        """How many prompts in front have only completions that were finished at the last check."""
        still = self.running_on_host
        return int(still[0] if len(still) else len(self.lengths)) // self.num_samples

    @property
    def work(self) -> Counter[str]:
        """What `generate` counts, once all sequences have finished."""
        rows = self.rows_taken + len(self.lengths)
        return Counter(
            rounds=self.rounds,
            rows=rows,
            row_rounds=self.sequence_rounds,
            slot_rounds=self.slot_rounds,
            kept=self.kept - rows,  # the first token of each comes from its prompt
        )

    # --- a round --------------------------------------------------------------------------------

    def next_inputs(self) -> tuple[Tensor, Tensor, int, np.ndarray | None]:
        """The tokens that the decoder runs next: the arguments of its `step`.

        Returns:
            `[B, W]`, the last token of each slot, followed by proposals; `[B]`, the column of that
            last token; a number above every column in use, these tokens' included; `[B]`, how many
            of the W tokens there are, None for all.
        """
        self.rounds += 1
        self.sequence_rounds += len(self.running)
        self.slot_rounds += self.num_slots
        columns = self.lengths[self.representatives]
        tokens = self.ids[self.representatives, columns - 1][:, None]
        tokens = torch.cat([tokens, self.proposals.clamp(min=0)], dim=1)
        num_columns = min(self.length_bound - 1 + tokens.shape[1], self.width)
        return tokens, columns - 1, num_columns, self.counts

    def accept(self, logits: Tensor) -> None:
        """Pick tokens from `[M, V]`, up to and including the first that was not proposed.

        A pick counts only if the model was run on the picks before it. The first pick always
        counts; each further one counts if all picks before it equal the proposals.
        """
        logp = log_softmax(logits, self.params.temperature)
        allowed = truncate(logp, self.params)
        one_each = torch.arange(len(self.running), device=self.device)
        sequence, offset, place = self.pairs or (one_each, torch.zeros_like(one_each), self.slot)
        rows, starts = self.running[:, None], self.lengths[self.running][:, None]
        shape = len(self.running), self.proposals.shape[1] + 1  # [N, W]
        columns = starts + torch.arange(shape[1], device=self.device)

        def on_grid(x: Tensor, fill: float) -> Tensor:
            """`[K] -> [N, W]`"""
            return x.new_full(shape, fill).index_put_((sequence, offset), x)

        u = None if self.u is None else self.u[self.running[sequence], columns[sequence, offset]]
        picked = pick_token(allowed[:, None], None if u is None else u[:, None], place)[:, 0]
        picks = on_grid(picked, -2)  # -2 is no proposal
        stops = torch.isin(picks, self.stops)
        right = (picks[:, :-1] == self.proposals[self.slot]) & ~stops[:, :-1]
        right = torch.cat([torch.ones_like(starts, dtype=torch.bool), right], dim=1)
        # a sequence that has ended since the last check gets no more tokens
        kept = right.cumprod(1).bool() & (columns < self.max_new_tokens) & ~self.ended[rows]
        self.ids[rows, columns] = torch.where(kept, picks, 0)
        picked_logp = on_grid(logp[place, picked].float(), 0)
        self.logp[rows, columns] = torch.where(kept, picked_logp, 0.0)
        if self.log_kept_mass is not None:
            log_mass = on_grid(allowed.logsumexp(-1)[place].float(), 0)
            self.log_kept_mass[rows, columns] = torch.where(kept, log_mass, 0.0)
        self.lengths[self.running] += kept.sum(1)
        self.ended[self.running] |= (kept & stops).any(1)
        self.length_bound += shape[1]

    @property
    def may_have_diverged(self) -> bool:
        """Whether sequences may need other slots, or have lengths that the host does not know."""
        return self.pairs is not None or self.num_slots < len(self.running)

    def update_slots(self, decoder: Decoder) -> None:
        """Drop finished sequences, propose, and separate those of a slot that now differ."""
        lengths = self.lengths[self.running]
        last = self.ids[self.running, lengths - 1]
        unfinished = (lengths < self.max_new_tokens) & ~self.ended[self.running]
        # few copies to the host and back, because each makes the host wait for the device
        on_host = torch.stack([self.slot, lengths, last, unfinished.long()]).cpu().numpy()
        self.kept += int((on_host[1] - self.lengths_on_host[self.running_on_host]).sum())
        self.lengths_on_host[self.running_on_host] = on_host[1]
        left = np.flatnonzero(on_host[3])
        slot, lengths_left, last_left, _ = on_host[:, left]
        self.running_on_host = self.running_on_host[left]
        proposals = self._proposals(slot)
        sources, chosen = left, left  # none if no sequence is left
        if len(left):
            states = np.zeros((0, len(left)), dtype=np.int64)
            if self.num_slots < len(self.running):
                # Sequences of a slot were equal before this round and got the same proposals. So
                # they are equal now if they have the same length and the same last token.
                states = np.stack([lengths_left, last_left])
                if proposals.size:
                    kinds = np.unique(proposals, axis=0, return_inverse=True)[1].ravel()
                    states = np.append(states, kinds[None], axis=0)
            sources, slot, chosen = assign_slots(slot, states)
        self.length_bound = int(lengths_left.max(initial=0))
        joined = torch.from_numpy(np.concatenate([left, slot, chosen])).to(self.device)
        still_running, self.slot, representatives = joined.split([len(left)] * 2 + [len(chosen)])
        self.running = self.running[still_running]
        self.representatives = self.running[representatives]
        self._propose_nothing()
        if proposals.size:
            self._set_proposals(proposals, slot, chosen)
        if len(left) and not np.array_equal(sources, np.arange(decoder.num_slots)):
            decoder.reorder(sources)

    def _proposals(self, slot: np.ndarray) -> np.ndarray:
        """`[N, W - 1]`, the tokens that are proposed next, -1 behind the last of each sequence."""
        if self.proposer is None:
            return np.empty((len(self.running_on_host), 0), dtype=np.int64)
        ids = self.ids.cpu().numpy()
        texts = Texts(ids, self.lengths_on_host, self.rows_taken)
        numbers = self.running_on_host + self.rows_taken
        tokens = self.num_slots if self.counts is None else int(self.counts.sum())
        return self.proposer.update(
            texts, numbers, slot, Round(self.rounds, self.num_slots, tokens)
        )

    def _set_proposals(self, proposals: np.ndarray, slot: np.ndarray, chosen: np.ndarray) -> None:
        """Run proposals `[N, W - 1]` in the next round, where `chosen [B]` represent the slots."""
        of_slot = proposals[chosen]
        self.counts = 1 + (of_slot >= 0).sum(1)
        number = self.counts[slot]  # [N]
        sequence = np.arange(len(slot)).repeat(number)
        offset = np.arange(len(sequence)) - (number.cumsum() - number).repeat(number)
        place = (self.counts.cumsum() - self.counts)[slot[sequence]] + offset
        on_device = torch.from_numpy(np.stack([sequence, offset, place])).to(self.device)
        self.pairs = on_device[0], on_device[1], on_device[2]
        self.proposals = torch.from_numpy(of_slot).to(self.device)

    # --- prompts enter and leave ----------------------------------------------------------------

    def join(self, new: "RunningSequences") -> None:
        """Add sequences that have their first token; their slots come after the others'."""
        sequences, slots = len(self.lengths), self.num_slots
        for name in PER_SEQUENCE:
            old, added = getattr(self, name), getattr(new, name)
            setattr(self, name, None if old is None else torch.cat([old, added]))
        self.running = torch.cat([self.running, new.running + sequences])
        self.running_on_host = np.append(self.running_on_host, new.running_on_host + sequences)
        self.slot = torch.cat([self.slot, new.slot + slots])
        self.representatives = torch.cat([self.representatives, new.representatives + sequences])
        self.lengths_on_host = np.append(self.lengths_on_host, new.lengths_on_host)
        self.length_bound = max(self.length_bound, new.length_bound)
        self._propose_nothing()
        if self.proposer is not None:
            self.proposer.wake()

    def take(self, prompt_ids: Tensor, prompt_len: Tensor) -> Completions:
        """Remove the prompts in front, which must have finished.

        Args:
            prompt_ids: `[P, Lp]`, the prompts that are taken.
            prompt_len: `[P]`.

        Returns:
            Their completions, `[P, G, S]` with S the longest.
        """
        grid = len(prompt_ids), self.num_samples
        rows = len(prompt_ids) * self.num_samples
        longest = int(self.lengths[:rows].max())
        mask = torch.arange(longest, device=self.device) < self.lengths[:rows, None]
        mass = self.log_kept_mass
        taken = Completions(
            prompt_ids=prompt_ids,
            prompt_len=prompt_len,
            completion_ids=self.ids[:rows, :longest].unflatten(0, grid),
            completion_mask=mask.unflatten(0, grid),
            sampler_logp=self.logp[:rows, :longest].unflatten(0, grid),
            log_kept_mass=None if mass is None else mass[:rows, :longest].unflatten(0, grid),
        )
        for name in PER_SEQUENCE:
            setattr(self, name, None if (x := getattr(self, name)) is None else x[rows:])
        self.rows_taken += rows
        self.lengths_on_host = self.lengths_on_host[rows:]
        self.running, self.representatives = self.running - rows, self.representatives - rows
        self.running_on_host = self.running_on_host - rows
        return taken
