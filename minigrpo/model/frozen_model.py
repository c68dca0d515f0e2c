"""A model that is not trained, and is asked for the log-probs of completions.

The reference of --kl-coef is one, and so is every model that a reward asks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from ..types import Completions, ConfigError, Example
from .encoding import encode_prompt
from .packing import Packing
from .tokenizer import Tokenizer
from .transformer import Transformer


class FrozenModel:
    """Log-probs under frozen weights, in micro-batches that share prompts and groups.

    `tokenizer` is its own, with its own chat template.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        packing: Callable[[Completions], Packing],
        name: str,
        backoff: Any,
        autocast: Callable[[], AbstractContextManager[object]],
        offload: bool = False,
    ) -> None:
        """`model` must not be trained elsewhere, except for adapters that are off in it.

        Args:
            packing: a value of PACKINGS.
            name: how errors name it.
            backoff: `run(function, total)` calls `function(size)` with as many of `total` prompts
                at a time as fit into memory.
            offload: keep the weights in host memory (pinned, with CUDA) between calls of `logp`.
        """
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.device, self.packing = model.device, packing
        if offload and self.device.type == "cuda":  # others have no memory but the host's
            self.model.to("cpu")
            for parameter in self.model.parameters():
                parameter.data = parameter.data.pin_memory()
        self.backoff, self.autocast = backoff, autocast

    @torch.no_grad()
    def logp(self, completions: Completions, temperature: float) -> Tensor:
        """`[P, G, S]` log-probs on the host, in nats, 0 where masked; of logits / temperature.

        Prompts and common beginnings of a group run once, as for the policy.
        """
        lengths = completions.prompt_len + completions.completion_len.amax(-1)
        longest = int(lengths.max()) - 1  # the last token predicts nothing
        if longest > self.model.shape.context:  # no embedding, or one that was never trained
            raise ConfigError(f"{self.name}: {longest} tokens are more than the model's context")
        weights = {
            name: x.to(self.device, non_blocking=True) for name, x in self.model.named_parameters()
        }

        def in_parts(size: int) -> Tensor:
            logps = []
            for prompts in torch.arange(len(completions)).split(size):
                packing = self.packing(completions.select(prompts)).to(self.device)
                inputs = packing, temperature
                with self.autocast():
                    logp, _ = functional_call(self.model, weights, inputs)
                logps.append(logp.cpu())
            return torch.cat(logps)

        logp: Tensor = self.backoff.run(in_parts, len(completions))
        return logp

    def encode_prompt(self, example: Example) -> list[int]:
        """The tokens of an example's prompt, or of its messages by the model's own template."""
        return encode_prompt(self.tokenizer, example)
