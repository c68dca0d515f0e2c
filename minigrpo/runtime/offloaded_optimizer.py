"""--offload-optimizer: AdamW whose moments are in host memory between steps.

Weights and gradients stay where they are, so a float32 model takes 8 bytes per parameter of the
device instead of 16. A step moves the moments of one parameter at a time to the device, updates
them there, and moves them back. The arithmetic is that of `torch.optim.AdamW` on the same device,
so the weights are the same to the bit, and a checkpoint does not show which of the two wrote it.
"""

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .machine import synchronize

MOMENTS = ("exp_avg", "exp_avg_sq")
State = dict[str, Any]


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW without amsgrad; `step` takes no closure.

    The host's copies are pinned, because only pinned memory is copied at the full speed of the bus.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        # a loss scaler then skips the whole step if a gradient is infinite, instead of passing that
        # on to a kernel
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        devices = set[torch.device]()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
                    devices.add(parameter.device)
        for device in devices:  # the host may read the moments as soon as this returns
            synchronize(device)

    def _update(self, parameter: Tensor, gradient: Tensor, group: State) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = _placed(torch.zeros(()), parameter, group)
            for name in MOMENTS:
                state[name] = _pinned(torch.zeros(parameter.shape, dtype=parameter.dtype))
        device = parameter.device
        first, second = moved = [state[name].to(device, non_blocking=True) for name in MOMENTS]
        adamw(
            [parameter],
            [gradient],
            [first],
            [second],
            [],
            [state["step"]],
            foreach=False,
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name, moment in zip(MOMENTS, moved, strict=True):
            state[name].copy_(moment, non_blocking=True)

    def load_state_dict(self, state_dict: State) -> None:
        """Raises ValueError if the state does not fit, and KeyError if a part of it is missing."""
        # without the tensors, which it would move to the device
        super().load_state_dict({**state_dict, "state": {}})
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for group in self.param_groups:
            for parameter in group["params"]:
                if found := state_dict["state"].get(next(saved)):
                    moments = {name: _pinned(found[name].cpu()) for name in MOMENTS}
                    step = _placed(found["step"], parameter, group)
                    self.state[parameter] = {"step": step, **moments}


def _placed(step: Tensor, parameter: Tensor, group: State) -> Tensor:
    """A count of steps where AdamW keeps it: on the device for the fused kernel."""
    return step.to(parameter.device if group["fused"] else "cpu", torch.float32, copy=True)


def _pinned(x: Tensor) -> Tensor:
    """A copy that the device reads fast."""
    return x.pin_memory()
