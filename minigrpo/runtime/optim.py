"""AdamW, and its learning rate as a pure function of the step: no scheduler state to resume."""

import math

import torch
from torch import nn

from .offloaded_optimizer import OffloadedAdamW

BETAS = (0.9, 0.98)
FINAL_SHARE = 0.1  # the learning rate ends at this fraction of its peak


def make_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    fused: bool,
    offload: bool = False,
) -> torch.optim.AdamW:
    """AdamW over the parameters that are not frozen. Biases and norms have no weight decay.

    Args:
        offload: keep the moments in host memory; without effect for a model that is there itself.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    kind = OffloadedAdamW if offload and parameters[0].device.type != "cpu" else torch.optim.AdamW
    return kind(groups, lr=learning_rate, betas=BETAS, fused=fused)


def check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a moment of another shape than its parameter.

    A fused kernel would write beyond its end.
    """
    for parameter, state in optimizer.state.items():
        for name, x in state.items():
            if isinstance(x, torch.Tensor) and x.dim() and x.shape != parameter.shape:
                raise ValueError(
                    f"{name} of a parameter {list(parameter.shape)} has the shape {list(x.shape)}"
                )


def learning_rate_at(step: int, *, peak: float, warmup_steps: int, max_steps: int) -> float:
    """Linear warm-up, then cosine decay to FINAL_SHARE of the peak. Steps count from 0."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, max_steps - 1 - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)
