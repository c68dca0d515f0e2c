"""The reference model: the frozen initial policy, which the KL penalty compares with.

With --kl-coef 0 no second model is kept.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.func import functional_call

from .model.packing import Packing
from .model.transformer import Transformer
from .runtime.oom import OOMBackoff
from .types import Completions


class Reference(Protocol):
    """What the rollout asks for the log-probs of the KL."""

    def logp(self, completions: Completions) -> Tensor | None:
        """`[P, G, S]` log-probs on the host, or None if there is no KL."""


class NoReference:
    """For kl_coef = 0: no second model, no second forward pass."""

    def logp(self, completions: Completions) -> Tensor | None:
        return None


class FrozenReference:
    """Log-probs under a frozen model, in micro-batches."""

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
        """`model` must not be trained elsewhere, except for adapters that are off in it.

        Args:
            temperature: the sampling temperature, as for the policy's log-probs.
            backoff: decides how many prompts go through the model at once.
            offload: keep the weights in host memory (pinned, with CUDA) between calls of `logp`.
        """
        self.device = model.device
        self.model = model
        if offload and self.device.type != "cpu":
            self.model.to("cpu")
            for parameter in self.model.parameters():
                parameter.data = parameter.data.pin_memory()
        self.packing, self.temperature = packing, temperature
        self.backoff, self.autocast = backoff, autocast

    @torch.no_grad()
    def logp(self, completions: Completions) -> Tensor | None:
        weights = self._weights_on_device()

        def in_parts(size: int) -> Tensor:
            logps = []
            for start in range(0, len(completions), size):
                rows = torch.arange(start, min(start + size, len(completions)))
                packing = self.packing(completions.select(rows)).to(self.device)
                inputs = packing.tokens, packing, self.temperature
                with self.autocast():
                    logp, _ = functional_call(self.model, weights, inputs)
                logps.append(logp.cpu())
            return torch.cat(logps)

        return self.backoff.run(in_parts, len(completions))

    def _weights_on_device(self) -> dict[str, Tensor]:
        weights = self.model.named_parameters()
        return {name: x.to(self.device, non_blocking=True) for name, x in weights}
