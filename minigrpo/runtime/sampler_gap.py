"""The gap between sampler and trainer: its measures, and weights that correct for it.

Both run the same code with the same weights, but on batches of other shapes, so they round
differently: in float32 in the last bits, in bfloat16 by whole steps of its 8 bits.
"""

from torch import Tensor

from . import loss_arguments as check

MEAN = "sampling/logp_difference_mean"
LARGEST = "sampling/logp_difference_max"
OFF = "sampling/off_by_10_percent"
OFF_BY = 0.1  # of a probability: what OFF counts


def gap_sums(logp: Tensor, sampler_logp: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The gap of a batch's tokens, `[..., S]` all three, as scalars without gradient.

    Returns:
        MEAN: the sum of |logp - sampler_logp|, in nats. OFF: the number of tokens for which
        |p / p_sampler - 1| > OFF_BY. Both are to be divided by the number of tokens. LARGEST: the
        largest |logp - sampler_logp|.
    """
    gap = (logp.detach() - sampler_logp).masked_fill(~mask, 0)
    off = (gap.expm1().abs() > OFF_BY).sum().to(gap.dtype)
    return {MEAN: gap.abs().sum(), OFF: off, LARGEST: gap.abs().max()}


def truncated_importance_weights(logp: Tensor, sampler_logp: Tensor, cap: float) -> Tensor:
    """min(exp(logp - sampler_logp), cap), without gradient; any shape.

    Truncated importance sampling (Ionides 2008), per token. It corrects for a sampler whose
    distribution differs from the policy's. `logp` is of the old policy, computed by the training
    forward; `sampler_logp` is of the distribution that the tokens were drawn from.
    """
    check.number("cap", cap, above=0)
    check.tensor("logp", logp, needed=True)
    check.tensor("sampler_logp", sampler_logp, logp.shape, needed=True)
    return (logp.detach() - sampler_logp.detach()).exp().clamp(max=cap)
