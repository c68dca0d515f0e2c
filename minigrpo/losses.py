"""Policy losses and KL estimators, as pure functions of tensors.

Symbols: R are rewards and A advantages, `[P, G]`. logp, old and ref are log-probs `[P, G, S]`: the
policy's now, the policy's before the step's first update, and the reference's. m is the mask,
n_i = sum_t m the length of completion i. The whole step has B completions and N tokens.

    r  = exp(logp - old)                                                   ratio, per token
    l  = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * kl  term, per token
    L  = sum(w * l)                                                        loss

Each loss is a row of LOSSES, which says how to form the ratio, the term and the weights w.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossNormalizer:
    """What a loss divides by: counts over all micro-batches and processes of a step."""

    completions: int | Tensor  # B, also those outside the loss mask
    tokens: int | Tensor  # N, completion tokens in the loss
    max_length: int  # tokens that a completion may have, what dr_grpo divides by

    @classmethod
    def of(cls, mask: Tensor, max_length: int | None = None) -> "LossNormalizer":
        """The counts of one batch, by its mask `[..., S]`; a completion may have S tokens."""
        num_completions = max(1, mask[..., 0].numel())
        return cls(num_completions, mask.sum().clamp(min=1), max_length or mask.shape[-1])


# Ratios: how far the policy has moved from the one that sampled.
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


# Surrogates: from ratio and advantage to a term per token, and what was clipped.
@dataclass(frozen=True)
class Clip:
    """Clips the ratio to [1 - low, 1 + high]; `cap`, if given, bounds the unclipped ratio."""

    low: float = 0.2
    high: float = 0.2
    cap: float | None = None


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a term, `[..., S]`, in float32 or wider; 0 where masked, but for the ratio."""

    logp: Tensor  # log-probs of the sampled tokens, with gradient
    old_logp: Tensor
    ratio: Tensor  # the ratio of the loss's row, with gradient
    advantages: Tensor  # the advantage of each token; NaN in supervised fine-tuning
    mask: Tensor  # 1 or 0
    clip: Clip
    entropy: Tensor | None = None  # the policy's at each token, in nats; None unless asked for
    ref_logp: Tensor | None = None  # None without a KL


# A term `[..., S]`, alone or with the tokens whose gradient a clip takes away, by metric.
Term = Tensor | tuple[Tensor, dict[str, Tensor]]


def clipped(x: LossInputs) -> Term:
    """-min(r A, clip(r) A) (PPO, arXiv 1707.06347). `cap` bounds the first r (2505.07291)."""
    ratio = x.ratio
    adv = x.advantages
    low = 1 - x.clip.low
    high = 1 + x.clip.high
    capped = ratio if x.clip.cap is None else ratio.clamp(max=x.clip.cap)
    term = -torch.minimum(capped * adv, ratio.clamp(low, high) * adv)
    hits = {
        "clip_ratio/low_mean": (ratio < low) & (adv < 0),
        "clip_ratio/high_mean": (ratio > high) & (adv > 0),
    }
    return term, hits


def cispo(x: LossInputs) -> Term:
    """-stopgrad(min(r, cap)) A logp (MiniMax-M1, arXiv 2506.13585); the cap is absolute."""
    cap = x.clip.cap
    assert cap is not None
    hits = {"cispo_clip_ratio": (x.ratio > cap) & (x.advantages > 0)}
    return -x.ratio.detach().clamp(max=cap) * x.advantages * x.logp, hits


# The weights of tokens.
def per_completion(mask: Tensor, normalizer: LossNormalizer) -> Tensor:
    """1 / (B n_i)"""
    return mask / (mask.sum(-1, keepdim=True).clamp(min=1) * normalizer.completions)


def per_token(mask: Tensor, normalizer: LossNormalizer) -> Tensor:
    """1 / N, over all ranks and micro-batches of the step"""
    return mask / normalizer.tokens


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
    needs_entropy: bool = False  # whether the term reads `LossInputs.entropy`


def loss_spec(loss: "str | LossSpec | Callable[[LossInputs], Term]") -> LossSpec:
    """A row by its name, a row, or grpo's row with a function of the caller's as its surrogate."""
    if isinstance(loss, str):
        return LOSSES[loss]
    if isinstance(loss, LossSpec):
        return loss
    return LossSpec(surrogate=loss, needs_entropy=True)


LOSSES = {
    "grpo": LossSpec(),  # arXiv 2402.03300
    "dr_grpo": LossSpec(weights=constant, scale="none"),  # 2503.20783
    "dapo": LossSpec(weights=per_token, clip=Clip(high=0.28)),  # 2503.14476
    "gspo": LossSpec(sequence_mean_ratio, clip=Clip(3e-4, 4e-4)),  # 2507.18071
    "cispo": LossSpec(surrogate=cispo, weights=per_token, clip=Clip(cap=5.0)),  # 2506.13585
    "rloo": LossSpec(sequence_sum_ratio, estimator="leave_one_out", scale="none"),  # 2402.14740
    "maxrl": LossSpec(weights=per_token, scale="mean"),  # 2602.02710
    "nll": LossSpec(surrogate=lambda x: -x.logp, weights=per_token),  # supervised fine-tuning
}

# Schulman's KL estimators on sampled tokens, with d = ref - logp. On-policy, k2 and k3_is have the
# gradient of KL(pi||ref), and k3 that of KL(ref||pi) (arXiv 2506.09477, 2510.01555, 2512.21852).
# That of k1 has mean 0, so it is not here.
KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k2": lambda d, ratio: d.square() / 2,
    "k3": lambda d, ratio: d.exp() - d - 1,
    "k3_is": lambda d, ratio: ratio * (d.exp() - d - 1),  # arXiv 2512.02556; the loss's ratio
}

# How the ratio r = p_old / p_sampler is formed, and its lower bound: an r below the bound or
# above the cap becomes 0. Without a bound, r is clamped to the cap.
SAMPLER_CORRECTIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float | None]] = {
    "token-truncate": (token_ratio, None),
    "token-mask": (token_ratio, 0.0),
    "icepop": (token_ratio, 0.5),  # arXiv 2510.18855, whose cap is 5
    "sequence-truncate": (sequence_sum_ratio, None),
    "sequence-mask": (sequence_sum_ratio, 0.0),  # TRL's default
}


def sampler_weights(
    correction: str, cap: float, old_logp: Tensor, sampler_logp: Tensor | None, mask: Tensor
) -> Tensor | None:
    """`token_weights [..., S]` by a row of SAMPLER_CORRECTIONS, or None by `none`."""
    if correction == "none" or sampler_logp is None:  # no sampler drew the answers of a data set
        return None
    form_ratio, lower_bound = SAMPLER_CORRECTIONS[correction]
    log_ratio = torch.where(mask, old_logp - sampler_logp, 0.0)
    ratio = form_ratio(log_ratio, mask.to(log_ratio))
    if lower_bound is None:
        return ratio.clamp(max=cap)
    return torch.where((lower_bound <= ratio) & (ratio <= cap), ratio, 0.0)


def policy_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor | None,
    mask: Tensor,
    *,
    loss: str | LossSpec | Callable[[LossInputs], Term] = "grpo",
    kl: str = "k3",
    kl_coef: float = 0.0,
    normalizer: LossNormalizer | None = None,
    ref_logp: Tensor | None = None,
    token_weights: Tensor | None = None,
    entropy: Tensor | None = None,
    added: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, or a micro-batch's share of it, and metrics without gradient.

    All tensors are `[..., S]`, and get no gradient except for logp, entropy and added.

    Args:
        old_logp: None means a ratio of 1.
        advantages: those of tokens, or `[...]`, those of completions; None for nll.
        loss: a name, a row or a function, see `loss_spec`.
        kl: a row of KL_ESTIMATORS.
        normalizer: the counts of the whole optimizer step, to which the losses, gradients and
            metrics of micro-batches then add up; None counts this batch only.
        token_weights: factors on the policy term, but not on the KL.
        entropy: the policy's at each token, for losses that need it.
        added: a term to add, such as an entropy bonus.
    """
    spec = loss_spec(loss)
    normalizer = normalizer or LossNormalizer.of(mask)
    masked = partial(_masked, mask=mask, dtype=torch.promote_types(logp.dtype, torch.float32))

    # 1. What the term is made of. Log-probs are masked before exp, because inf * 0 is NaN in the
    #    backward pass.
    m = masked(mask)
    logp = masked(logp)
    old_logp = logp.detach() if old_logp is None else masked(old_logp.detach())
    if advantages is None:
        advantages = torch.full_like(logp, math.nan)  # no finite loss reads it
    elif advantages.shape == logp.shape[:-1]:
        advantages = advantages[..., None].expand_as(logp)
    inputs = LossInputs(
        logp=logp,
        old_logp=old_logp,
        ratio=spec.ratio(logp - old_logp, m),
        advantages=masked(advantages.detach()),
        mask=m,
        clip=spec.clip,
        entropy=None if entropy is None else masked(entropy),
        ref_logp=None if ref_logp is None else masked(ref_logp.detach()),
    )

    # 2. The surrogate, and where it is clipped.
    term, metrics = _surrogate(spec, inputs, normalizer)
    if token_weights is not None:
        term = term * masked(token_weights.detach())

    # 3. The KL, and what else is added.
    if kl_coef:
        if inputs.ref_logp is None:
            raise ValueError("a kl_coef above 0 needs ref_logp")
        penalty = KL_ESTIMATORS[kl](inputs.ref_logp - inputs.logp, inputs.ratio)
        metrics["kl"] = (penalty.detach() * per_token(m, normalizer)).sum()
        term = term + kl_coef * penalty
    if added is not None:
        term = term + masked(added)
    return (spec.weights(m, normalizer) * term).sum(), metrics


def _masked(values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    if values.shape != mask.shape:
        # it could broadcast by chance
        raise ValueError(f"expected the shape {list(mask.shape)}, got {list(values.shape)}")
    return torch.where(mask, values.to(dtype), 0.0)


def _surrogate(
    spec: LossSpec, inputs: LossInputs, normalizer: LossNormalizer
) -> tuple[Tensor, dict[str, Tensor]]:
    """The term of a row's surrogate, `[..., S]`, and its metrics: how often it was clipped."""
    surrogate = spec.surrogate(inputs)
    term, hits = (surrogate, {}) if isinstance(surrogate, Tensor) else surrogate
    if term.shape != inputs.logp.shape:
        expected = list(inputs.logp.shape)
        raise ValueError(f"a loss must return [..., S], {expected}, not {list(term.shape)}")
    per_hit = per_token if spec.ratio is token_ratio else per_completion  # as TRL counts them
    weights = per_hit(inputs.mask, normalizer)
    return term, {name: (hit * weights).sum() for name, hit in hits.items()}
