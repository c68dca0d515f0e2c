"""The frozen model that a KL term holds the policy to; with no KL there is none."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.func import functional_call

from .model.logprobs import at_least_fp32
from .model.packing import Packing
from .model.transformer import Transformer
from .runtime.oom import OOMBackoff
from .types import Completions


class Reference(Protocol):
    def logp(self, completions: Completions) -> Tensor | None:
        """`[P, G, S]` log-probs on the host, or None where no KL asks for them."""


class NoReference:
    """kl_coef = 0: no second model, no second forward."""

    def logp(self, completions: Completions) -> Tensor | None:
        return None


class FrozenReference:
    """A copy of the model as it was when the run began."""

    def __init__(
        self,
        model: Transformer,
        *,
        packing: Callable[[Completions], Packing],
        temperature: float,
        backoff: OOMBackoff,
        autocast: Callable[[], AbstractContextManager[object]],
        offload: bool = False,
    ) -> None:
        """`temperature` is the policy's; `backoff` says how many prompts go through at once.

        With `offload` the weights lie in host memory (pinned, where there is a CUDA device) and
        visit the device of the model for as long as `logp` runs.
        """
        self.device = model.device
        self.model = copy.deepcopy(model).requires_grad_(False)
        if offload and self.device.type != "cpu":
            self.model.to("cpu")
            for parameter in self.model.parameters():
                parameter.data = parameter.data.pin_memory()
        self.packing, self.temperature = packing, temperature
        self.backoff, self.autocast = backoff, autocast

    @torch.no_grad()
    def logp(self, completions: Completions) -> Tensor | None:
        with self.autocast():  # which may be over, if the guard has gone back to float32
            low = torch.is_autocast_enabled(self.device.type)
        weights = {
            name: x.to(self.device, non_blocking=True) for name, x in self.model.named_parameters()
        }
        weights = weights if low else {name: at_least_fp32(x) for name, x in weights.items()}

        def in_pieces(size: int) -> Tensor:
            logps = []
            for a in range(0, len(completions), size):
                packing = self.packing(
                    completions.select(torch.arange(a, min(a + size, len(completions))))
                )
                packing = packing.to(self.device)
                with self.autocast():
                    logp, _ = functional_call(
                        self.model, weights, (packing.tokens, packing, self.temperature)
                    )
                logps.append(logp.cpu())
            return torch.cat(logps)

        return self.backoff.run(in_pieces, len(completions))
