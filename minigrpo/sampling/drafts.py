"""Speculative decoding from a draft: propose the tokens that probably come next.

Leviathan et al. (arXiv 2211.17192) propose with a small model. Here the draft is a text, such as
the known answer, and the proposal is read off it (as in prompt-lookup decoding), so it costs no
forward pass. running.py accepts a proposed token only if sampling would have picked it. A draft
therefore changes the number of rounds, never the tokens.
"""

import torch
from torch import Tensor

NUM_MATCHED_TOKENS = 3  # recent tokens that must match to locate a sequence in its draft
# What a round and each of its slots cost, in tokens that it runs. A round was measured to cost 64
# with a model of 1 M parameters and 18 with one of 124 M, on a CPU; on a GPU it costs more.
COST_OF_ROUND, COST_OF_SLOT = 64, 1
KEPT = 0.5  # how much of the earlier rounds' counts is kept in each update


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


class ProposalWindow:
    """Chooses how many tokens a round runs per slot, from how many proposals were right lately.

    If each proposal is right with probability p, a round of W tokens per slot gains
    1 + p + .. + p^(W-1) tokens per sequence (Leviathan et al., section 3.1), and costs W tokens per
    slot plus what rounds and slots cost in any case. The best W gains most per cost.

    Where few proposals are right, W is 1: no proposal is run. One is made all the same, and the
    token that is picked shows whether it would have been right.
    """

    def __init__(self, largest: int) -> None:
        """`largest` is the most tokens per slot and round, the last one and the proposals."""
        smaller = [2**k for k in range(largest.bit_length()) if 2**k < largest]
        self.sizes = (*smaller, largest)  # few, because CUDA graphs are captured for each
        self.size = 1
        self._right, self._judged = 0.0, 0.0

    def update(self, right: int, judged: int, num_slots: int) -> None:
        """Choose the size of the next rounds.

        Args:
            right: how many proposals of the last round were right.
            judged: how many proposals came after right ones only, so that this is known.
            num_slots: slots of the next round.
        """
        self._right, self._judged = KEPT * self._right + right, KEPT * self._judged + judged
        p = self._right / max(1.0, self._judged)

        def tokens_per_cost(size: int) -> float:
            gained = sum(p**k for k in range(size))
            return gained / (COST_OF_ROUND + num_slots * (COST_OF_SLOT + size))

        self.size = max(self.sizes, key=tokens_per_cost)
