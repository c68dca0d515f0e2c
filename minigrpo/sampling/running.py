"""The state of the completions during decoding: their tokens, which are unfinished, their slots.

A *slot* is a place in the decoder's batch. With drafts, completions of a prompt that are equal so
far share a slot, because the model would compute the same logits for all of them; once they differ,
they get slots of their own. One of the sequences that share a slot stands for all of them: the
slot's *representative*.

Shapes: R = P * G sequences, of which N are running; B slots; W tokens per slot and round.
"""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from ..model.logprobs import log_softmax
from ..types import Completions
from .decoders import Decoder
from .drafts import NUM_MATCHED_TOKENS, ProposalWindow, propose
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
        drafts: Tensor | None,
        num_speculative_tokens: int,
        device: torch.device,
    ) -> None:
        """For the arguments, see `generate`."""
        self.num_samples, self.max_new_tokens = num_samples, max_new_tokens
        self.params, self.drafts, self.device = params, drafts, device
        self.stops = torch.tensor(sorted(stops), dtype=torch.int64, device=device)
        self.max_window = 1 if drafts is None else num_speculative_tokens + 1
        self.proposal_window = ProposalWindow(self.max_window)
        # W spare columns, because proposals may go past the last column. All columns are allocated
        # at once: a token takes 16 bytes or so here, and some kilobytes in the cache.
        self.width = max_new_tokens + self.max_window
        # of the batch; summed over sequences, over slots
        self.rounds, self.sequence_rounds, self.slot_rounds = 0, 0, 0
        sequences = torch.arange(num_prompts * num_samples, device=device)
        sequences_per_slot = 1 if drafts is None else num_samples
        self.running = sequences  # [N] unfinished at the last check
        self.running_on_host = np.arange(len(sequences))  # [N] the same numbers
        self.slot = sequences // sequences_per_slot  # [N] slot of each
        # [2, N] proposals of the last round: how many were judged; of them, how many were right
        self.verdicts = sequences.new_zeros(2, len(sequences))
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
            self.u = torch.nn.functional.pad(u, (0, self.max_window))  # [R, width]
        # [B, W - 1], or [B, 1] if nothing but the last token is run
        self.proposals = self.ids[self.representatives, :0]
        if drafts is not None:
            self.proposals = drafts[:, :1]  # for the first token

    @property
    def window(self) -> int:
        """W: the last token, and the tokens that may be proposed after it."""
        return self.proposal_window.size

    @property
    def num_slots(self) -> int:
        return len(self.representatives)

    @property
    def num_finished(self) -> int:
        """How many prompts in front have only completions that were finished at the last check."""
        still = self.running_on_host
        return int(still[0] if len(still) else len(self.lengths)) // self.num_samples

    # --- a round --------------------------------------------------------------------------------

    def next_inputs(self) -> tuple[Tensor, Tensor, int]:
        """The tokens that the decoder runs next.

        Returns:
            `[B, W]`, the last token of each slot, followed by proposals; `[B]`, the column of that
            last token; a number above every column in use, these tokens' included.
        """
        self.rounds += 1
        self.sequence_rounds += len(self.running)
        self.slot_rounds += self.num_slots
        columns = self.lengths[self.representatives]
        tokens = self.ids[self.representatives, columns - 1][:, None]
        self.proposals = tokens[:, :0]
        if self.drafts is not None:
            back = torch.arange(-NUM_MATCHED_TOKENS, 0, device=self.device)
            recent_columns = (columns[:, None] + back).clamp(min=0)
            recent = self.ids[self.representatives[:, None], recent_columns]
            drafts = self.drafts[self.representatives // self.num_samples]
            self.proposals = propose(drafts, recent, columns, max(1, self.window - 1))
            tokens = torch.cat([tokens, self.proposals[:, : self.window - 1]], dim=1)
        return tokens, columns - 1, min(self.length_bound - 1 + tokens.shape[1], self.width)

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
        stops = torch.isin(picks, self.stops)
        proposals = self.proposals[self.slot]
        right = picks[:, : proposals.shape[1]] == proposals
        goes_on = (right & ~stops[:, : proposals.shape[1]])[:, : logp.shape[1] - 1]
        goes_on = torch.cat([torch.ones_like(starts, dtype=torch.bool), goes_on], dim=1)
        # a sequence that has ended since the last check gets no more tokens
        kept = goes_on.cumprod(1).bool() & (columns < self.max_new_tokens) & ~self.ended[rows]
        picked_logp = logp[self.slot[:, None], offsets, picks].float()
        self.ids[rows, columns] = torch.where(kept, picks, 0)
        self.logp[rows, columns] = torch.where(kept, picked_logp, 0.0)
        if self.log_kept_mass is not None:
            log_mass = allowed.logsumexp(-1)[self.slot].float()
            self.log_kept_mass[rows, columns] = torch.where(kept, log_mass, 0.0)
        judged = kept[:, : proposals.shape[1]]
        self.verdicts = torch.stack([judged.sum(1), (judged & right).sum(1)])
        self.lengths[self.running] += kept.sum(1)
        self.ended[self.running] |= (kept & stops).any(1)
        self.length_bound += logp.shape[1]

    @property
    def may_have_diverged(self) -> bool:
        """Whether sequences may need other slots, or have lengths that the host does not know."""
        return self.window > 1 or self.num_slots < len(self.running)

    def update_slots(self, decoder: Decoder) -> None:
        """Drop finished sequences, and separate those of a slot that now differ."""
        lengths = self.lengths[self.running]
        last = self.ids[self.running, lengths - 1]
        unfinished = (lengths < self.max_new_tokens) & ~self.ended[self.running]
        # a single copy to the host and back, because each makes the host wait for the device
        numbers = [*self.verdicts, unfinished.long(), self.slot, lengths, last]
        on_host = torch.stack(numbers).cpu().numpy()
        num_judged, num_right = on_host[:2].sum(1).tolist()
        left = np.flatnonzero(on_host[2])
        slot, lengths_left, last_left = on_host[3:, left]
        sources, chosen = left, left  # none if no sequence is left
        if len(left):
            # Sequences of a slot were equal before this round and got the same proposals. So they
            # are equal now if they have the same length and the same last token.
            sources, slot, chosen = assign_slots(slot, np.stack([lengths_left, last_left]))
            self.proposal_window.update(num_right, num_judged, len(chosen))
        self.length_bound = int(lengths_left.max(initial=0))
        joined = torch.from_numpy(np.concatenate([left, slot, chosen])).to(self.device)
        still_running, self.slot, representatives = joined.split(
            [len(left), len(left), len(chosen)]
        )
        self.running, self.verdicts = self.running[still_running], self.verdicts[:, still_running]
        self.running_on_host = self.running_on_host[left]
        self.representatives = self.running[representatives]
        if len(left) and not np.array_equal(sources, np.arange(decoder.num_slots)):
            decoder.reorder(sources)

    # --- prompts enter and leave ----------------------------------------------------------------

    def join(self, new: "RunningSequences") -> None:
        """Add sequences that have their first token; their slots come after the others'."""
        sequences, slots = len(self.lengths), self.num_slots
        for name in (*PER_SEQUENCE, "drafts"):
            old, added = getattr(self, name), getattr(new, name)
            setattr(self, name, None if old is None else torch.cat([old, added]))
        self.running = torch.cat([self.running, new.running + sequences])
        self.running_on_host = np.append(self.running_on_host, new.running_on_host + sequences)
        self.slot = torch.cat([self.slot, new.slot + slots])
        self.representatives = torch.cat([self.representatives, new.representatives + sequences])
        self.length_bound = max(self.length_bound, new.length_bound)
        self.verdicts = torch.cat([torch.zeros_like(self.verdicts), new.verdicts], dim=1)
        self.proposals = self.ids[self.representatives, :0]

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
        if self.drafts is not None:
            self.drafts = self.drafts[len(prompt_ids) :]
        self.running, self.representatives = self.running - rows, self.representatives - rows
        self.running_on_host = self.running_on_host - rows
        return taken
