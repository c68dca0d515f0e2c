"""AdamW, and its learning rate as a pure function of the step: no scheduler state to resume."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .config import Config
from .model.weights import DECAYING, roles
from .settings import SpeedConfig
from .shards import stored_like
from .types import ConfigError

BETAS = (0.9, 0.98)
FINAL_RATE = 0.1  # the last learning rate, as a fraction of the peak


def learning_rate_at(step: int, config: Config) -> float:
    """Linear warm-up, then cosine decay to FINAL_RATE of the peak. Steps count from 0."""
    peak = config.optimizer.learning_rate
    warmup_steps = config.optimizer.warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay_steps = max(1, config.run.max_steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW over the parameters that are not frozen. Biases and norms have no weight decay."""
    settings = config.optimizer
    role = roles(model)
    decaying = list[Tensor]()
    others = list[Tensor]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = decaying if role[name] in DECAYING else others
            group.append(parameter)
    groups = [
        {"params": decaying, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    offloads = config.memory.offload_optimizer and next(model.parameters()).is_cuda
    adamw = OffloadedAdamW if offloads else torch.optim.AdamW
    return adamw(groups, settings.learning_rate, BETAS, fused=config.speed.fused_optimizer)


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], fused: bool) -> None:
    """Load the state of an optimizer, whose moments may be in shards here."""
    # a resume may change the flag, which decides on which device the step counts are
    groups = [{**group, "fused": fused} for group in state["param_groups"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {}
    for number, of_one in state["state"].items():
        moments[number] = {name: stored_like(x, parameters[number]) for name, x in of_one.items()}
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def grad_scaler(speed: SpeedConfig, device: torch.device) -> torch.amp.GradScaler:
    """The loss scaler for --amp-dtype float16, which is disabled for bfloat16."""
    is_float16 = speed.use_amp and speed.amp_dtype == "float16"
    if is_float16 and device.type != "cuda":
        raise ConfigError("--amp-dtype float16 needs a CUDA device; bfloat16 is allowed everywhere")
    return torch.amp.GradScaler(device.type, enabled=is_float16)


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments, 8 bytes per parameter, are in host memory between steps.

    AdamW itself steps one parameter at a time, so the bits are the same.
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
        """Move a parameter's moments without waiting; those on the host are in pinned memory."""
        state = self.state.get(parameter, {})
        for name, moments in state.items():
            state[name] = moments.to(device, non_blocking=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # AdamW loads no tensors, because it would move all of them to the device.
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, state in state_dict["state"].items():
            self.state[parameters[number]] = dict(state)
