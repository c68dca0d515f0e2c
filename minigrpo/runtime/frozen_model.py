"""A model that is not trained, and is asked for the log-probs of completions.

The reference of --kl-coef is one, and so is every model that a reward asks (see token_rewards.py).
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.func import functional_call

from ..model.encoding import encode_prompt, pad
from ..model.packing import Packing
from ..model.tokenizer import Tokenizer
from ..model.transformer import Transformer
from ..types import Completions, Example
from .flags import ConfigError
from .oom import OOMBackoff


class FrozenModel:
    """Log-probs under frozen weights, in micro-batches that share prompts and groups.

    Attributes:
        tokenizer: its own, with its own chat template.
        temperature: divides its logits.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        name: str,
        packing: Callable[[Completions], Packing],
        temperature: float,
        backoff: OOMBackoff,
        autocast: Callable[[], AbstractContextManager[object]],
        offload: bool = False,
    ) -> None:
        """`model` must not be trained elsewhere, except for adapters that are off in it.

        Args:
            name: how errors name it.
            backoff: decides how many prompts go through the model at once.
            offload: keep the weights in host memory (pinned, with CUDA) between calls of `logp`.
        """
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.device = model.device
        if offload and self.device.type != "cpu":
            self.model.to("cpu")
            for parameter in self.model.parameters():
                parameter.data = parameter.data.pin_memory()
        self.packing, self.temperature = packing, temperature
        self.backoff, self.autocast = backoff, autocast

    def at_temperature(self, temperature: float) -> "FrozenModel":
        """The same model, whose logits are divided by another temperature."""
        changed = copy.copy(self)
        changed.temperature = temperature
        return changed

    @torch.no_grad()
    def logp(self, completions: Completions) -> Tensor:
        """`[P, G, S]` log-probs on the host, in nats, 0 where masked.

        Prompts and common beginnings of a group run once, as for the policy.
        Raises ConfigError for a text that is longer than the model's context.
        """
        self._check_length(completions)
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

    # --- texts for a model that has another prompt than the policy --------------------------------

    def encode_prompt(self, example: Example) -> list[int]:
        """The tokens of an example's prompt, or of its messages by the model's own chat template.

        Raises ValueError, in one line, for messages without a template, or refused by it.
        """
        return encode_prompt(self.tokenizer, example)

    @staticmethod
    def completions(
        prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[Sequence[int]]]
    ) -> Completions:
        """Lists of tokens as tensors for `logp`.

        Args:
            prompts: `[P]` lists, none of them empty.
            rows: `[P][G]` lists, the completions of each prompt.
        """
        prompt_ids, prompt_len = pad(prompts)
        ids, lengths = pad([row for group in rows for row in group])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        shape = len(prompts), -1, ids.shape[1]
        return Completions(prompt_ids, prompt_len, ids.view(shape), mask.view(shape))

    # ----------------------------------------------------------------------------------------------

    def _check_length(self, completions: Completions) -> None:
        """The last token predicts nothing, so it needs no position."""
        lengths = completions.prompt_len + completions.completion_mask.sum(-1).amax(-1) - 1
        longest, context = int(lengths.max()), self.model.shape.context
        if longest > context:  # positions beyond it have no embedding, or were never trained
            raise ConfigError(
                f"{self.name}: a text of {longest} tokens is longer than its context of {context}"
            )

    def _weights_on_device(self) -> dict[str, Tensor]:
        weights = self.model.named_parameters()
        return {name: x.to(self.device, non_blocking=True) for name, x in weights}
