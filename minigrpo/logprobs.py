"""From hidden states to log-probabilities: head, temperature, log-softmax, gather.

The log-softmax is computed in float32 at least, whatever the model's precision: in bfloat16 it would be off by 2-3e-3, which
is more than the ratios that a policy loss clips.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-softmax of `logits / temperature` over the last dimension, in float32 at least. temperature > 0."""
    return F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1)


def token_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of given next tokens, and entropy in nats.

    Args:
        hidden: `[M, D]`.
        head: `[V, D]`, the tied embedding.
        targets: `[M]` int64.

    Returns:
        `[M]` and `[M]`, float32 at least. The entropy carries no gradient: it is reported, not optimised.
    """
    logp = log_softmax(F.linear(hidden, head), temperature)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, targets[:, None])[:, 0], entropy
