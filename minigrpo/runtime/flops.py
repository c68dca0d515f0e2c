"""Floating-point operations: of a forward pass, and of a step by phase."""

from ..config import Config
from ..model.shape import ModelShape
from .step_counts import StepCounts


def forward_flops(
    shape: ModelShape, *, tokens: float, attended: float, head_tokens: float
) -> float:
    """FLOPs of a forward over `tokens` tokens, each attending to `attended` tokens on average.

    2 per token and weight of a linear layer, and 4 per layer, (query, key) pair and unit. Only
    `head_tokens` of the tokens go through the output head. A backward pass takes twice as many.
    """
    head = shape.vocab_size * shape.width
    per_pair = 4 * shape.heads * shape.head_dim
    per_token = shape.layers * (2 * shape.block_weights + per_pair * attended)
    return per_token * tokens + 2 * head * head_tokens


def step_flops(config: Config, shape: ModelShape, counts: StepCounts) -> dict[str, float]:
    """FLOPs of one process's share of a step, by phase."""
    attended = counts.prompt_len + counts.completion_len / 2  # roughly
    forward = forward_flops(
        shape, tokens=counts.packed, attended=attended, head_tokens=counts.predictions
    )
    updates = config.optimizer.num_iterations
    flops = {"update": 3 * forward * updates}
    if updates > 1:
        flops["old log-probs"] = forward
    if config.loss.kl_coef:
        flops["reference"] = forward
    if not config.supervised:
        # a prompt's tokens need no logits, but for the last
        flops["rollout"] = forward_flops(
            shape,
            tokens=counts.prompt_tokens + counts.decoded,
            attended=attended,
            head_tokens=counts.prompts + counts.decoded,
        )
    return flops
