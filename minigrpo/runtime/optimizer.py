"""AdamW, and its learning rate as a pure function of the step: no scheduler state to resume."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Config

BETAS = (0.9, 0.98)
FINAL_SHARE = 0.1  # the learning rate ends at this fraction of its peak


def learning_rate_at(step: int, config: Config) -> float:
    """Linear warm-up, then cosine decay to FINAL_SHARE of the peak. Steps count from 0."""
    peak = config.optimizer.learning_rate
    warmup_steps = config.optimizer.warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, config.run.max_steps - 1 - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW over the parameters that are not frozen. Biases and norms have no weight decay."""
    settings = config.optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    offloads = config.memory.offload_optimizer and trained[0].is_cuda
    kind = OffloadedAdamW if offloads else torch.optim.AdamW
    return kind(groups, settings.learning_rate, BETAS, fused=config.speed.fused_optimizer)


class OffloadedAdamW(torch.optim.AdamW):
    """--offload-optimizer: AdamW whose moments are in host memory between steps.

    So a float32 model takes 8 bytes per parameter of the device instead of 16. AdamW itself steps,
    with one parameter at a time, whose moments are on the device meanwhile: the bits are the same.
    """

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            for parameter in group["params"]:
                self._move_state(parameter, parameter.device)
                self.param_groups = [{**group, "params": [parameter]}]
                super().step()
                self._move_state(parameter, torch.device("cpu"))
        self.param_groups = groups
        torch.cuda.synchronize()  # the host may read the moments as soon as this returns

    def _move_state(self, parameter: Tensor, device: torch.device) -> None:
        """Without waiting for it: to the host, such a copy makes pinned memory."""
        state = self.state.get(parameter, {})
        state.update({name: x.to(device, non_blocking=True) for name, x in state.items()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # without the tensors: it would move all of them to the device
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, state in state_dict["state"].items():
            self.state[parameters[number]] = dict(state)
