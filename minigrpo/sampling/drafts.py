"""Speculative decoding from a draft: propose the tokens that probably come next.

Leviathan et al. (arXiv 2211.17192) propose with a small model. Here the draft is a text, such as
the known answer, and the proposal is read off it (as in prompt-lookup decoding), so it costs no
forward pass. generate.py accepts a proposed token only if sampling would have picked it. A draft
therefore changes the number of rounds, never the tokens.
"""

import torch
from torch import Tensor

NUM_MATCHED_TOKENS = 3  # K, the last tokens of a sequence, which locate it in its draft


def propose(drafts: Tensor, ids: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """Propose the tokens that come next in each draft.

    Each sequence is located in its draft by its last K tokens. If they match in several places,
    the nearest to the sequence's own length is taken; of two equally near ones, the first. If they
    match nowhere, the draft is read from the sequence's own length on.

    Args:
        drafts: `[B, L]` int64, a text that each sequence is likely to resemble.
        ids: `[B, S]` int64, the tokens that each sequence has so far.
        lengths: `[B]` int64, how many these are.

    Returns:
        `[B, num_tokens]` int64. Past the end of a draft, its last token is repeated.
    """
    num_matched = NUM_MATCHED_TOKENS
    drafts = torch.nn.functional.pad(drafts, (0, max(0, num_matched + 1 - drafts.shape[1])))
    back = torch.arange(-num_matched, 0, device=ids.device)
    recent = ids.gather(1, (lengths[:, None] + back).clamp(min=0))  # [B, K]
    # place a of a draft is a match if its tokens a-K .. a-1 equal the recent ones
    places = torch.arange(num_matched, drafts.shape[1], device=ids.device)
    equal = (drafts.unfold(1, num_matched, 1)[:, :-1] == recent[:, None]).all(-1)
    matches = equal & (lengths >= num_matched)[:, None]  # else `recent` is partly filler
    no_match = 1 << 30
    distance, nearest = torch.where(matches, (places - lengths[:, None]).abs(), no_match).min(1)
    start = torch.where(distance < no_match, places[nearest], lengths)
    following = start[:, None] + torch.arange(num_tokens, device=ids.device)
    return drafts.gather(1, following.clamp(max=drafts.shape[1] - 1))
