"""Speculative decoding from a draft: propose the tokens that probably come next.

Leviathan et al. (arXiv 2211.17192) propose with a small model. Here the draft is a text, such as
the known answer, and the proposal is read off it (as in prompt-lookup decoding), so it costs no
forward pass. running.py accepts a proposed token only if sampling would have picked it. A draft
therefore changes the number of rounds, never the tokens.
"""

import torch
from torch import Tensor

NUM_MATCHED_TOKENS = 3  # recent tokens that must match to locate a sequence in its draft
MIN_TOKENS_PER_ROUND = 1.5  # accepted per sequence and round; fewer do not pay
FIRST_PAUSE = 8  # in rounds; each further pause is twice as long


def propose(drafts: Tensor, recent: Tensor, columns: Tensor, num_tokens: int) -> Tensor:
    """Propose the tokens that come next in each draft.

    Each sequence is located in its draft by its last K tokens. If they match in several places,
    the nearest to the sequence's own column is taken; of two equally near ones, the first. If they
    match nowhere, the draft is read at the sequence's own column.

    Args:
        drafts: `[R, L]` int64, a text that each sequence is likely to resemble.
        recent: `[R, K]` int64, the last K tokens of each sequence.
        columns: `[R]` int64, how many tokens each sequence has so far.

    Returns:
        `[R, num_tokens]` int64. Past the end of a draft, its last token is repeated.
    """
    num_matched = recent.shape[1]
    drafts = torch.nn.functional.pad(drafts, (0, max(0, num_matched + 1 - drafts.shape[1])))
    length = drafts.shape[1]
    # column a of a draft is a match if its columns a-K .. a-1 equal the recent tokens
    places = torch.arange(num_matched, length, device=drafts.device)
    equal = (drafts.unfold(1, num_matched, 1)[:, :-1] == recent[:, None]).all(-1)
    # for a sequence of fewer than K tokens, `recent` is partly filler
    matches = equal & (columns >= num_matched)[:, None]
    no_match = 1 << 30
    distance, nearest = torch.where(matches, (places - columns[:, None]).abs(), no_match).min(1)
    start = torch.where(distance < no_match, places[nearest], columns)
    following = start[:, None] + torch.arange(num_tokens, device=drafts.device)
    return drafts.gather(1, following.clamp(max=length - 1))


class ProposalPauses:
    """Pauses proposing while hardly any proposed token is accepted.

    Running W tokens per slot costs more than running one, so a bad draft would slow decoding down.
    Each pause is twice as long as the last, so a draft that stays bad costs less and less.
    """

    def __init__(self) -> None:
        self.paused = False
        self._resume_at = 0
        self._length = FIRST_PAUSE

    def update(self, rounds: int, tokens_per_sequence: float, *, proposed: bool) -> None:
        """Decide whether the next rounds propose.

        Args:
            rounds: how many rounds have been run.
            tokens_per_sequence: tokens accepted in the last round, a mean over its sequences.
            proposed: whether anything was proposed in the last round.
        """
        if proposed and tokens_per_sequence < MIN_TOKENS_PER_ROUND:
            self.paused, self._resume_at = True, rounds + self._length
            self._length *= 2
        elif rounds >= self._resume_at:
            self.paused = False
