"""A model that is not trained, and is asked for the log-probs of completions.

The reference of --kl-coef is one, the teacher, and every model that a reward asks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call

from ..types import Completions, ConfigError, Example, RolloutBatch
from .chat import extended
from .encoding import encode_prompts, messages_of
from .packing import Pack
from .tokenizer import Tokenizer
from .transformer import Transformer


@dataclass(eq=False)
class FrozenModel:
    """Log-probs under frozen weights, in micro-batches that share prompts and groups."""

    model: Transformer  # not trained here; with --teacher self, the learner trains it
    tokenizer: Tokenizer  # its own, with its own chat template
    packing: Pack
    name: str  # in errors
    # (function of a micro-batch size, number of prompts) -> what it returns: see runtime/guard.py
    run_in_parts: Callable[[Callable[[int], Tensor], int], Tensor]
    autocast: Callable[[], AbstractContextManager[object]]
    offload: bool  # keep the weights in host memory (pinned, with CUDA) between calls of `logp`

    def __post_init__(self) -> None:
        self.device = self.model.device
        if self.offload and self.device.type == "cuda":
            for parameter in self.model.parameters():
                parameter.data = parameter.data.cpu().pin_memory()

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
            name: parameter.to(self.device, non_blocking=True)
            for name, parameter in self.model.named_parameters()
        }

        def in_parts(size: int) -> Tensor:
            logps = []
            for part in completions.split(size):
                with self.autocast():
                    inputs = (self.packing(part, self.device), temperature)
                    logps.append(functional_call(self.model, weights, inputs).logp.cpu())
            return torch.cat(logps)

        return self.run_in_parts(in_parts, len(completions))

    def reads(self, batch: RolloutBatch, field: str) -> Completions:
        """A batch's completions, after prompts that have a field of the examples too; "": none."""
        if not field:
            return batch.completions
        examples = [with_context(self.tokenizer, example, field) for example in batch.examples]
        ids, lengths = encode_prompts(self.tokenizer, examples, self.model.shape.context)
        return replace(batch.completions, prompt_ids=ids, prompt_len=lengths)


def with_context(tokenizer: Tokenizer, example: Example, field: str) -> Example:
    """An example whose prompt has the text of one of its fields too, for --teacher-context.

    It follows the last message that asks. A plain prompt, which goes on at its end, follows it.
    """
    text = example.fields.get(field)
    if text is None:
        raise ConfigError(f"--teacher-context: {example.label} has no {field}")
    messages = messages_of(tokenizer, example)
    if not messages:
        return replace(example, prompt=f"{text}\n\n{example.prompt}")
    return replace(example, messages=extended(messages, f"\n\n{text}"))
