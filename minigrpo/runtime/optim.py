"""AdamW, and its learning rate as a pure function of the step: no scheduler state to resume."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .offloaded_optimizer import MOMENTS, OffloadedAdamW
from .saved_state import misfit

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


def load_optimizer(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], *, most_updates: float
) -> None:
    """Load the state of an AdamW of `make_optimizer` that made at most `most_updates` updates.

    The hyperparameters are this run's. Those in the state must be equal, except for the learning
    rate, which depends on the step, and the choice of the kernel.

    Raises ValueError, which names what does not fit; then nothing is loaded.
    """
    own = optimizer.state_dict()["param_groups"]
    groups, state = saved["param_groups"], saved["state"]
    if len(groups) != len(own):
        raise ValueError(f"the optimizer has {len(own)} groups of parameters, not {len(groups)}")
    for number, (found, group) in enumerate(zip(groups, own, strict=True)):
        # another version of torch may know more hyperparameters, or fewer
        for key in [key for key in group if key in found and key != "fused"]:
            name = f"optimizer.param_groups.{number}.{key}"
            if problem := misfit(found[key], group[key], name):
                raise ValueError(problem)
            if key != "lr" and found[key] != group[key]:
                raise ValueError(f"{name} was {found[key]}, is {group[key]}")
    if state:  # there is none before the first update
        _check_moments(state, optimizer, most_updates)
    optimizer.load_state_dict({"state": state, "param_groups": own})


def _check_moments(state: Any, optimizer: torch.optim.Optimizer, most_updates: float) -> None:
    """Raise ValueError unless each parameter has moments of its own shape, of the same update."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    form = [{"step": p.new_zeros(()), **dict.fromkeys(MOMENTS, p)} for p in parameters]
    if problem := misfit(state, dict(enumerate(form)), "optimizer.state"):
        raise ValueError(problem)
    updates = {float(moments["step"]) for moments in state.values()}
    if len(updates) > 1 or not all(x in range(1, int(most_updates) + 1) for x in updates):
        raise ValueError(
            f"optimizer.state has {', '.join(f'{x:g}' for x in sorted(updates))} updates, of at "
            f"most {most_updates:g}"
        )
    for number, moments in state.items():
        if (moments["exp_avg_sq"] < 0).any():
            raise ValueError(f"optimizer.state.{number}.exp_avg_sq is below 0")


def learning_rate_at(step: int, *, peak: float, warmup_steps: int, max_steps: int) -> float:
    """Linear warm-up, then cosine decay to FINAL_SHARE of the peak. Steps count from 0."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, max_steps - 1 - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)
