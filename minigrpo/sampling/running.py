"""The state of the completions during decoding: their tokens, which are unfinished, their slots.

A *slot* is a place in the decoder's batch. With drafts, completions of a prompt that are equal so
far share a slot, because the model would compute the same logits for all of them; once they differ,
they get slots of their own. One of the sequences that share a slot stands for all of them: the
slot's *representative*.

Shapes: R = P * G sequences, of which N are running; B slots; W tokens per slot and round.
"""

import numpy as np
import torch
from torch import Tensor

from ..model.logprobs import log_softmax
from ..types import Completions
from .decoders import Decoder
from .drafts import NUM_MATCHED_TOKENS, ProposalPauses, propose
from .params import SamplingParams, pick_token, truncate


def assign_slots(slot: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assign one slot to each set of running sequences that are equal so far.

    Slots keep their place where possible, so that little of the cache is copied.

    Args:
        slot: `[N]`, the current slot of each running sequence.
        states: `[K, N]`, K numbers in which sequences of a slot may differ; those that agree in
            all of them keep sharing a slot.

    Returns:
        `[B]`, the old slot that each new slot continues; `[N]`, the new slot of each sequence;
        `[B]`, the representative of each new slot, as an index into the N sequences.
    """
    # one number per (slot, state 1, .., state K), ordered by slot first
    key = slot
    for state in states:
        key = key * (state.max() + 1) + state
    _, representative, group = np.unique(key, return_index=True, return_inverse=True)
    old, places = slot[representative], np.arange(len(representative))  # `old` is sorted
    # of the groups from one old slot, the first stays there if that place still exists
    stays = np.append(True, old[1:] != old[:-1]) & (old < len(old))
    new = np.empty_like(places)
    new[stays], new[~stays] = old[stays], np.setdiff1d(places, old[stays])
    order = np.argsort(new)
    return old[order], new[group], representative[order]


class RunningSequences:
    """The state of `generate`: P * G completions, from their first token to their last."""

    def __init__(
        self,
        num_prompts: int,
        num_samples: int,
        *,
        max_new_tokens: int,
        eos: int,
        params: SamplingParams,
        u: Tensor | None,
        drafts: Tensor | None,
        num_speculative_tokens: int,
        device: torch.device,
    ) -> None:
        """For the arguments, see `generate`."""
        self.grid, self.max_new_tokens, self.eos = (num_prompts, num_samples), max_new_tokens, eos
        self.params, self.drafts, self.device = params, drafts, device
        self.max_window = 1 if drafts is None else num_speculative_tokens + 1
        self.pauses = ProposalPauses()
        self.rounds, self.sequence_rounds = 0, 0  # of the batch; summed over sequences
        sequences = torch.arange(num_prompts * num_samples, device=device)
        sequences_per_slot = 1 if drafts is None else num_samples
        self.running = sequences  # [N] unfinished at the last check
        self.slot = sequences // sequences_per_slot  # [N] slot of each
        self.representatives = sequences[::sequences_per_slot]  # [B] sequence of each slot
        self.lengths = torch.zeros_like(sequences)  # [R] tokens of each completion
        self.length_bound = 0  # on the host: an upper bound of lengths
        # W spare columns, because proposals may go past the last column
        width = max_new_tokens + self.max_window
        self.ids = torch.zeros(len(sequences), width, dtype=torch.int64, device=device)
        self.logp = torch.zeros(self.ids.shape, dtype=torch.float32, device=device)
        self.log_kept_mass = torch.zeros_like(self.logp) if params.truncates else None
        self.u = u
        if u is not None:
            u = u.flatten(0, 1)[:, :max_new_tokens]
            self.u = torch.nn.functional.pad(u, (0, self.max_window))  # [R, width]
        self.proposals = self.ids[self.representatives, :0]  # [B, W - 1], none yet

    @property
    def window(self) -> int:
        """W: the last token, and the tokens that may be proposed after it."""
        return 1 if self.pauses.paused else self.max_window

    def next_inputs(self) -> tuple[Tensor, Tensor]:
        """The tokens that the decoder runs next.

        Returns:
            `[B, W]`, the last token of each slot, followed by proposals; `[B]`, the column of that
            last token.
        """
        self.rounds += 1
        self.sequence_rounds += len(self.running)
        columns = self.lengths[self.representatives]
        tokens = self.ids[self.representatives, columns - 1][:, None]
        if self.drafts is not None and self.window > 1:
            back = torch.arange(-NUM_MATCHED_TOKENS, 0, device=self.device)
            recent_columns = (columns[:, None] + back).clamp(min=0)
            recent = self.ids[self.representatives[:, None], recent_columns]
            drafts = self.drafts[self.representatives // self.grid[1]]
            proposals = propose(drafts, recent, columns, self.window - 1)
            tokens = torch.cat([tokens, proposals], dim=1)
        self.proposals = tokens[:, 1:]
        return tokens, columns - 1

    def accept(self, logits: Tensor) -> None:
        """Pick tokens from `[B, W, V]`, up to and including the first that was not proposed.

        A pick counts only if the model was run on the picks before it. The first pick always
        counts; each further one counts if all picks before it equal the proposals.
        """
        logp = log_softmax(logits, self.params.temperature)
        allowed = truncate(logp, self.params)
        rows, starts = self.running[:, None], self.lengths[self.running][:, None]
        offsets = torch.arange(logp.shape[1], device=self.device)
        columns = starts + offsets  # [N, W]
        picks = pick_token(allowed, None if self.u is None else self.u[rows, columns], self.slot)
        right = (picks[:, :-1] == self.proposals[self.slot]) & (picks[:, :-1] != self.eos)
        right = torch.cat([torch.ones_like(starts, dtype=torch.bool), right], dim=1)
        # a sequence that has ended since the last check gets no more tokens
        unfinished = (starts == 0) | (self.ids[rows, starts - 1] != self.eos)
        kept = right.cumprod(1).bool() & (columns < self.max_new_tokens) & unfinished
        picked_logp = logp[self.slot[:, None], offsets, picks].float()
        self.ids[rows, columns] = torch.where(kept, picks, 0)
        self.logp[rows, columns] = torch.where(kept, picked_logp, 0.0)
        if self.log_kept_mass is not None:
            log_mass = allowed.logsumexp(-1)[self.slot].float()
            self.log_kept_mass[rows, columns] = torch.where(kept, log_mass, 0.0)
        self.num_accepted = kept.sum(1)  # [N] of this round
        self.lengths[self.running] += self.num_accepted
        self.length_bound += logp.shape[1]

    @property
    def may_have_diverged(self) -> bool:
        """Whether sequences may need other slots, or have lengths that the host does not know."""
        return self.window > 1 or len(self.representatives) < len(self.running)

    def update_slots(self, decoder: Decoder) -> bool:
        """Drop finished sequences, and separate those of a slot that now differ.

        Returns:
            False when all sequences have finished.
        """
        lengths = self.lengths[self.running]
        last = self.ids[self.running, lengths - 1]
        unfinished = (lengths < self.max_new_tokens) & (last != self.eos)
        # a single copy to the host and back, because each makes the host wait for the device
        numbers = [self.slot, lengths, last, self.num_accepted, unfinished.long()]
        on_host = torch.stack(numbers).cpu().numpy()
        left = np.flatnonzero(on_host[4])
        if not len(left):
            return False
        slot, lengths_left, last_left, num_accepted, _ = on_host[:, left]
        proposed = self.proposals.shape[1] > 0
        self.pauses.update(self.rounds, float(num_accepted.mean()), proposed=proposed)
        # Sequences of a slot were equal before this round and got the same proposals. So they are
        # equal now if they have the same length and the same last token.
        sources, slot, chosen = assign_slots(slot, np.stack([lengths_left, last_left]))
        joined = torch.from_numpy(np.concatenate([left, slot, chosen])).to(self.device)
        still_running, self.slot, representatives = joined.split(
            [len(left), len(left), len(chosen)]
        )
        self.running = self.running[still_running]
        self.representatives = self.running[representatives]
        if not np.array_equal(sources, np.arange(decoder.num_slots)):
            decoder.reorder(sources)
        self.length_bound = int(lengths_left.max())
        return True

    def to_completions(self, prompt_ids: Tensor, prompt_len: Tensor) -> Completions:
        """The finished completions, `[P, G, S]` with S the longest."""
        longest = int(self.lengths.max())
        mask = torch.arange(longest, device=self.device) < self.lengths[:, None]
        mass = self.log_kept_mass
        return Completions(
            prompt_ids=prompt_ids,
            prompt_len=prompt_len,
            completion_ids=self.ids[:, :longest].unflatten(0, self.grid),
            completion_mask=mask.unflatten(0, self.grid),
            sampler_logp=self.logp[:, :longest].unflatten(0, self.grid),
            log_kept_mass=None if mass is None else mass[:, :longest].unflatten(0, self.grid),
        )
