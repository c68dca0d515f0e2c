"""Advantages, policy losses and KL estimators, as pure functions of tensors.

Symbols: R rewards and A advantages `[P, G]`; logp, old, ref `[P, G, S]`, as types.RolloutBatch
explains them; m the mask; n_i = sum_t m the length of completion i; B completions and N tokens of
the whole step.

    r  = exp(logp - old)                                                   ratio, per token
    l  = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * kl  term, per token
    L  = sum(w * l)                                                        loss

Each loss is a row of LOSSES, which says how to form the ratio, the term and the weights w; a user's
is such a row, or a function from `LossInputs` to the term. The weights come from counts over the
whole optimizer step: except for bnpo, no gradient depends on micro-batches or processes. All is
computed in float32 or wider. learner.py calls `policy_loss`, rollout.py calls `advantages`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

STD_EPS = 1e-4  # added to the standard deviation of rewards, as TRL does; ddof = 1
SCALES: dict[str, Callable[[Tensor], Tensor | float]] = {  # rewards [P, G] -> what divides
    "group": lambda rewards: rewards.std(-1, keepdim=True) + STD_EPS,
    "batch": lambda rewards: rewards.std() + STD_EPS,
    "mean": lambda rewards: rewards.mean(-1, keepdim=True),  # MaxRL, arXiv 2602.02710
    "none": lambda rewards: 1.0,  # Dr. GRPO, arXiv 2503.20783
}


def advantages(rewards: Tensor, *, estimator: str = "group_mean", scale: str = "group") -> Tensor:
    """Group-relative advantages: `[P, G]` -> `[P, G]`, in float32 or wider.

    Args:
        estimator: `group_mean`: R_i - mean(R) (GRPO, arXiv 2402.03300). `leave_one_out`: R_i minus
            the mean of the others, which is G / (G - 1) times that (RLOO, arXiv 2402.14740).
        scale: what divides the result: a row of SCALES. With `mean`, no reward may be negative.

    A group with equal rewards has advantages of exactly 0. They have no gradient.
    """
    size = rewards.shape[-1]
    if rewards.dim() != 2 or size < 2:
        raise ValueError(f"rewards must be [P, G] with G of at least 2, got {list(rewards.shape)}")
    if not rewards.isfinite().all() or (scale == "mean" and (rewards < 0).any()):
        raise ValueError("rewards must be finite, and with the scale mean not negative")
    rewards = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    factor = {"group_mean": 1.0, "leave_one_out": size / (size - 1)}[estimator]
    centred = (rewards - rewards.mean(-1, keepdim=True)) * factor / SCALES[scale](rewards)
    # Eight rewards of 0.1 do not average to 0.1 in float32. Divided by a tiny std, that rounding
    # error would become a gradient.
    equal = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
    return torch.where(equal, 0.0, centred)


def decoupled(parts: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """The weighted sum of rewards, `[P, G]` each, after each was centred and scaled by itself.

    GDPO (arXiv 2601.05242) then takes `advantages` with the scale `batch`. NaN counts as 0.
    """
    given = {name: x.masked_fill(x.isnan(), 0) for name, x in parts.items()}
    centred = [x * advantages(given[name]) for name, x in weights.items()]
    return torch.stack(centred).sum(0)


@dataclass(frozen=True)
class LossNormalizer:
    """What a loss divides by: counts over all micro-batches and processes of a step."""

    completions: int | Tensor  # B, also those outside the loss mask
    tokens: int | Tensor  # N, completion tokens in the loss
    max_length: int  # tokens that a completion may have


# The ratio: how far the policy has moved from the one that sampled.
def token_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """r_t = exp(logp_t - old_t)."""
    return log_ratio.exp()


def sequence_mean_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """s = exp((1/n) sum_t (logp - old)), broadcast over the tokens (GSPO, arXiv 2507.18071)."""
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    return (log_ratio.sum(-1, keepdim=True) / lengths).exp().expand_as(log_ratio)


def sequence_sum_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """exp(sum_t (logp - old)), broadcast over the tokens (RLOO, arXiv 2402.14740)."""
    return log_ratio.sum(-1, keepdim=True).exp().expand_as(log_ratio)


# The surrogate: from ratio and advantage to a term per token, and what was clipped.
@dataclass(frozen=True)
class Clip:
    """Clips the ratio to [1 - low, 1 + high]; `cap`, if given, bounds the unclipped ratio."""

    low: float = 0.2
    high: float = 0.2
    cap: float | None = None


@dataclass(frozen=True)
class LossInputs:
    """What a term is made of: `[..., S]` each, in float32 or wider; 0 (`ratio`: 1) where masked."""

    logp: Tensor  # of the sampled tokens, with gradient
    old_logp: Tensor
    ratio: Tensor  # as the row forms it, with gradient
    advantages: Tensor  # of each token; NaN in supervised fine-tuning
    mask: Tensor  # 1 or 0
    clip: Clip
    entropy: Tensor | None = None  # of the policy at each token, in nats; None unless asked for
    ref_logp: Tensor | None = None  # None without a KL


# [..., S]; or with it, by name of a metric, where a clip takes the gradient away
Term = Tensor | tuple[Tensor, dict[str, Tensor]]


def clipped(x: LossInputs) -> Term:
    """-min(r A, clip(r) A), as in PPO (arXiv 1707.06347).

    A cap bounds the first r too: the two-sided clip of arXiv 2505.07291.
    """
    ratio, adv, low, high = x.ratio, x.advantages, 1 - x.clip.low, 1 + x.clip.high
    capped = ratio if x.clip.cap is None else ratio.clamp(max=x.clip.cap)
    term = -torch.minimum(capped * adv, ratio.clamp(low, high) * adv)
    below, above = (ratio < low) & (adv < 0), (ratio > high) & (adv > 0)
    return term, {"clip_ratio/low_mean": below, "clip_ratio/high_mean": above}


def cispo(x: LossInputs) -> Term:
    """-stopgrad(min(r, cap)) A logp (MiniMax-M1, arXiv 2506.13585); the cap is absolute."""
    cap, adv = x.clip.cap, x.advantages
    assert cap is not None
    hits = {"cispo_clip_ratio": (x.ratio > cap) & (adv > 0)}
    return -x.ratio.detach().clamp(max=cap) * adv * x.logp, hits


def negative_logp(x: LossInputs) -> Term:
    """-log p: supervised training on true answers."""
    return -x.logp


# The weights: how much each token counts.
def per_completion(mask: Tensor, normalizer: LossNormalizer) -> Tensor:
    """1 / (B n_i)"""
    return mask / (mask.sum(-1, keepdim=True).clamp(min=1) * normalizer.completions)


def per_token(mask: Tensor, normalizer: LossNormalizer) -> Tensor:
    """1 / N, over all ranks and micro-batches of the step"""
    return mask / normalizer.tokens


def per_local_token(mask: Tensor, normalizer: LossNormalizer) -> Tensor:
    """1 / (tokens of the micro-batch), times its share of the step's completions"""
    return mask / mask.sum().clamp(min=1) * (mask[..., 0].numel() / normalizer.completions)


def constant(mask: Tensor, normalizer: LossNormalizer) -> Tensor:
    """1 / (B max_length)"""
    return mask / (normalizer.completions * normalizer.max_length)


@dataclass(frozen=True)
class LossSpec:
    """A row of the loss table, with the defaults of its paper; what it does not say is GRPO's."""

    ratio: Callable[[Tensor, Tensor], Tensor] = token_ratio
    surrogate: Callable[[LossInputs], Term] = clipped
    weights: Callable[[Tensor, LossNormalizer], Tensor] = per_completion
    clip: Clip = Clip()
    estimator: str = "group_mean"
    scale: str = "group"
    # the entropy has a gradient, so that groups whose advantages are 0 have one too
    entropy: bool = False


def loss_spec(loss: "str | LossSpec | Callable[[LossInputs], Term]") -> LossSpec:
    """A row by its name, a row, or grpo's row with a function of the caller's as its surrogate."""
    if isinstance(loss, str):
        return LOSSES[loss]
    if isinstance(loss, LossSpec):
        return loss
    return LossSpec(surrogate=loss, entropy=True)


LOSSES = {
    "grpo": LossSpec(),  # arXiv 2402.03300
    "dr_grpo": LossSpec(weights=constant, scale="none"),  # 2503.20783
    "dapo": LossSpec(weights=per_token, clip=Clip(high=0.28)),  # 2503.14476
    "bnpo": LossSpec(weights=per_local_token),  # TRL
    "gspo": LossSpec(sequence_mean_ratio, clip=Clip(3e-4, 4e-4)),  # 2507.18071
    "cispo": LossSpec(surrogate=cispo, weights=per_token, clip=Clip(cap=5.0)),  # 2506.13585
    "rloo": LossSpec(sequence_sum_ratio, estimator="leave_one_out", scale="none"),  # 2402.14740
    "maxrl": LossSpec(weights=per_token, scale="mean"),  # 2602.02710
    "nll": LossSpec(surrogate=negative_logp, weights=per_token),  # supervised fine-tuning
}

# Schulman's KL estimators on sampled tokens, with d = ref - logp. On-policy, k2 and k3_is have the
# gradient of KL(pi||ref), and k3 that of KL(ref||pi) (arXiv 2506.09477, 2510.01555, 2512.21852).
# That of k1 has mean 0, so it is not here; with k1_reward, the rollout subtracts it from rewards.
KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k2": lambda d, ratio: d.square() / 2,
    "k3": lambda d, ratio: d.exp() - d - 1,
    "k3_is": lambda d, ratio: ratio * (d.exp() - d - 1),  # arXiv 2512.02556; the loss's ratio
}
KL_IN_REWARD = "k1_reward"

DEEPSEEK = "deepseek"
# How the ratio r = p_trainer / p_sampler is formed, and its lower bound: an r below the bound or
# above the cap becomes 0. Without a bound, r is clamped to the cap.
SAMPLER_CORRECTIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float | None]] = {
    "token-truncate": (token_ratio, None),
    "token-mask": (token_ratio, 0.0),
    "icepop": (token_ratio, 0.5),  # arXiv 2510.18855, whose cap is 5
    "sequence-truncate": (sequence_sum_ratio, None),
    "sequence-mask": (sequence_sum_ratio, 0.0),  # TRL's default
    DEEPSEEK: (sequence_mean_ratio, None),  # arXiv 2512.02556, equation 9
}


def sampler_weights(
    correction: str, cap: float, logp: Tensor, old: Tensor, drawn: Tensor, adv: Tensor, mask: Tensor
) -> Tensor:
    """`token_weights [..., S]` by a row of SAMPLER_CORRECTIONS, without gradient.

    `drawn`: `[..., S]`, of the distribution that the tokens are from; the others: `policy_loss`.
    """
    form_ratio, least = SAMPLER_CORRECTIONS[correction]
    trainer = logp.detach() if correction == DEEPSEEK else old  # `logp`: as the policy is now
    log_ratio = torch.where(mask, trainer - drawn, 0.0)
    ratio = form_ratio(log_ratio, mask.to(log_ratio))
    if correction == DEEPSEEK:  # drops bad completions that are far from the policy
        by_token = adv if adv.dim() == logp.dim() else adv[..., None]
        return ((by_token >= 0) | (-ratio.log() <= cap)).to(ratio)
    if least is None:
        return ratio.clamp(max=cap)
    return torch.where((least <= ratio) & (ratio <= cap), ratio, 0.0)


def policy_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor | None,
    mask: Tensor,
    *,
    loss: str | LossSpec | Callable[[LossInputs], Term] = "grpo",
    clip_low: float | None = None,
    clip_high: float | None = None,
    ratio_cap: float | None = None,
    max_completion_length: int | None = None,
    ref_logp: Tensor | None = None,
    kl_coef: float = 0.0,
    kl: str = "k3",
    token_weights: Tensor | None = None,
    normalizer: LossNormalizer | None = None,
    entropy: Tensor | None = None,
    added: Tensor | float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, or a micro-batch's share of it.

    Args:
        logp: `[..., S]` log-probs of the sampled tokens, with gradient.
        old_logp: `[..., S]`, the same before the step's first update. None: `logp`, a ratio of 1.
        advantages: `[...]`, one per completion, or `[..., S]`; None for nll.
        mask: `[..., S]` bool.
        loss: see `loss_spec`; its defaults replace a clip or cap that is None.
        max_completion_length: what dr_grpo divides by; None: S.
        ref_logp: `[..., S]`, needed if kl_coef > 0.
        kl: a row of KL_ESTIMATORS, or k1_reward, which adds nothing here.
        token_weights: `[..., S]`, factors on the policy term, not on the KL.
        normalizer: the counts of the whole optimizer step, to which the losses, gradients and
            metrics of micro-batches then add up; None counts this batch only.
        entropy: `[..., S]`, of the policy at each token, for losses that use it.
        added: `[..., S]`, to the terms: an entropy bonus, the KL to a teacher.

    Returns:
        The scalar loss, and metrics: scalars without gradient. Only `logp`, `entropy` and `added`
        get a gradient: one through another tensor would be another objective's.
    """
    spec = loss_spec(loss)
    given = {"low": clip_low, "high": clip_high, "cap": ratio_cap}
    clip = replace(spec.clip, **{name: x for name, x in given.items() if x is not None})
    normalizer = normalizer or LossNormalizer(
        completions=max(1, mask[..., 0].numel()),
        tokens=mask.sum().clamp(min=1),
        max_length=max_completion_length or mask.shape[-1],
    )
    at_least_fp32 = torch.promote_types(logp.dtype, torch.float32)

    def masked(x: Tensor) -> Tensor:
        """`x` where the mask is true, else 0. Another shape could broadcast by chance."""
        if x.shape != logp.shape:
            raise ValueError(f"expected the shape {list(logp.shape)}, got {list(x.shape)}")
        return torch.where(mask, x.to(at_least_fp32), 0.0)

    m = masked(mask)
    logp = masked(logp)  # before exp, because inf * 0 is NaN in the backward pass
    old = logp.detach() if old_logp is None else masked(old_logp.detach())
    ratio = spec.ratio(logp - old, m)
    adv = torch.full_like(logp, math.nan) if advantages is None else advantages.detach()
    if adv.shape == logp.shape[:-1]:
        adv = adv[..., None].expand_as(logp)
    ref = None if ref_logp is None else masked(ref_logp.detach())
    entropy = None if entropy is None else masked(entropy)
    found = spec.surrogate(LossInputs(logp, old, ratio, masked(adv), m, clip, entropy, ref))
    term, hits = (found, {}) if isinstance(found, Tensor) else found
    if term.shape != logp.shape:
        raise ValueError(f"a loss must return [..., S], {list(logp.shape)}, not {list(term.shape)}")
    if token_weights is not None:
        term = term * masked(token_weights.detach())

    # as TRL counts them
    per_hit = per_token if spec.ratio is token_ratio else per_completion
    metrics = {name: (hit * per_hit(m, normalizer)).sum() for name, hit in hits.items()}
    if kl_coef and kl != KL_IN_REWARD:
        assert ref is not None
        penalty = KL_ESTIMATORS[kl](ref - logp, ratio)
        metrics["kl"] = (penalty.detach() * per_token(m, normalizer)).sum()
        term = term + kl_coef * penalty
    return (spec.weights(m, normalizer) * (term + added)).sum(), metrics
