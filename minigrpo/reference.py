"""The frozen model that a KL term holds the policy to. Without a KL there is none."""

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
        """`[P, G, S]` log-probs on the host, or None if there is no KL."""


class NoReference:
    """kl_coef = 0: no second model, no second forward."""

    def logp(self, completions: Completions) -> Tensor | None:
        return None


class FrozenReference:
    """A model that never changes."""

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
        """Takes the model over: nobody else may train it.

        Args:
            temperature: the policy's.
            backoff: how many prompts go through the model at once.
            offload: keep the weights in host memory (pinned, with CUDA) between calls of `logp`.
        """
        self.device = model.device
        self.model = model.requires_grad_(False)
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
        with self.autocast():  # which ends when the non-finite guard falls back to float32
            low = torch.is_autocast_enabled(self.device.type)
        weights = {
            name: x.to(self.device, non_blocking=True) for name, x in self.model.named_parameters()
        }
        return weights if low else {name: at_least_fp32(x) for name, x in weights.items()}
