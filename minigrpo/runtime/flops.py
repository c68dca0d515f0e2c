"""Floating-point operations: of a forward pass, and of a step by phase."""

from dataclasses import dataclass

from ..config import Config
from ..model.shape import ModelShape
from .step_counts import StepCounts
from .stored_weights import StoredWeights


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of a forward pass by what a backward pass has to do with them."""

    products: float  # with the weights of linear layers
    adapters: float  # with those of adapters
    attention: float

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        *,
        tokens: float,
        attended: float,
        head_tokens: float,
        in_adapters: int = 0,
    ) -> "ForwardFlops":
        """Over `tokens` tokens, each attending to `attended` tokens on average.

        2 per token and weight, and 4 per layer, (query, key) pair and unit. Only `head_tokens` of
        the tokens go through the output head.

        Args:
            in_adapters: the number of weights in adapters.
        """
        head = shape.vocab_size * shape.width * head_tokens
        return cls(
            products=2 * (shape.layers * shape.block_weights * tokens + head),
            adapters=2 * in_adapters * tokens,
            attention=4 * shape.layers * shape.heads * shape.head_dim * attended * tokens,
        )

    @property
    def total(self) -> float:
        return self.products + self.adapters + self.attention

    def with_backward(self, *, frozen: bool) -> float:
        """FLOPs of a forward and its backward pass; `frozen`: only adapters are trained.

        A backward pass computes the gradient of each product's inputs, and of its weights unless
        they are frozen: as many FLOPs each as the product. Both inputs of attention have gradients.
        """
        return (2 if frozen else 3) * self.products + 3 * (self.adapters + self.attention)


def step_flops(config: Config, shape: ModelShape, counts: StepCounts) -> dict[str, float]:
    """FLOPs of one process's share of a step, by phase."""
    weights = StoredWeights.of(config, shape)
    frozen = not weights.is_whole
    in_adapters = weights.num_trained * frozen
    attended = counts.prompt_len + counts.completion_len / 2  # roughly
    forward = ForwardFlops.of(
        shape,
        tokens=counts.packed,
        attended=attended,
        head_tokens=counts.predictions,
        in_adapters=in_adapters,
    )
    updates = config.optimizer.num_iterations
    flops = {"update": forward.with_backward(frozen=frozen) * updates}
    if updates > 1:
        flops["old log-probs"] = forward.total
    if config.loss.kl_coef:
        flops["reference"] = forward.total - forward.adapters
    if not config.supervised:
        # a prompt's tokens need no logits, but for the last
        flops["rollout"] = ForwardFlops.of(
            shape,
            tokens=counts.prompt_tokens + counts.decoded,
            attended=attended,
            head_tokens=counts.prompts + counts.decoded,
            in_adapters=in_adapters,
        ).total
    return flops
