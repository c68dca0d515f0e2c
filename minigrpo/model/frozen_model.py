"""Models in passes without gradients: reference, teacher, a reward's, and the sampler's copy."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..shards import is_sharded, set_parameter, whole
from ..text.chat import extended
from ..text.encoding import messages_of, pad, prompt_within
from ..text.tokenizer import Tokenizer
from ..types import Completions, ConfigError, Example, RolloutBatch
from .linear import Linear
from .packing import Packing, pack
from .transformer import Transformer

# the one layer that takes the place of layers with the same inputs
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(eq=False)
class FrozenModel:
    """Log-probs under frozen weights, in micro-batches that share prompts and groups."""

    model: Transformer  # not trained here; with --teacher self, the learner trains it
    tokenizer: Tokenizer  # its own, with its own chat template
    packing: str  # the value of --packing
    name: str  # in errors
    # (function of a micro-batch size, number of prompts) -> the function's result: see guard.py
    run_in_parts: Callable[[Callable[[int], Tensor], int], Tensor]
    autocast: Callable[[], AbstractContextManager[object]]
    offload: bool  # keep the weights in host memory (pinned, with CUDA) between calls of `logp`
    dtype: torch.dtype = torch.float32  # of products, in which weights in shards are gathered

    def __post_init__(self) -> None:
        self.device = self.model.device
        if self.offload and self.device.type == "cuda":
            for parameter in self.model.parameters():
                parameter.data = parameter.data.cpu().pin_memory()

    def logp_of_batch(self, batch: RolloutBatch, temperature: float, field: str = "") -> Tensor:
        """`logp` of a batch; with a field of each example in its prompt, if named."""
        if not field:
            return self.logp(batch.completions, temperature)
        context = self.model.shape.context
        examples = [with_context(self.tokenizer, example, field) for example in batch.examples]
        prompts = [prompt_within(self.tokenizer, example, context) for example in examples]
        ids, lengths = pad(prompts)
        completions = replace(batch.completions, prompt_ids=ids, prompt_len=lengths)
        return self.logp(completions, temperature)

    @torch.no_grad()
    def logp(self, completions: Completions, temperature: float) -> Tensor:
        """`[P, G, S]` log-probs on the host, in nats, 0 where masked; of logits / temperature."""
        prompts = pack(completions, self.packing)
        longest = 1 + max(int(prompt.positions.max()) for prompt in prompts)
        if longest > self.model.shape.context:  # later positions were never trained
            raise ConfigError(f"{self.name}: {longest} tokens are more than the model's context")
        model = self.model
        if is_sharded(model):
            model = InferenceCopy(model, self.dtype).model
        weights = {
            name: parameter.to(self.device, non_blocking=True)
            for name, parameter in model.named_parameters()
        }

        def in_micro_batches(size: int) -> Tensor:
            logps = []
            for start in range(0, len(prompts), size):
                packing = Packing(prompts[start : start + size], self.device)
                with self.autocast():
                    predictions = functional_call(model, weights, (packing, temperature))
                logps.append(predictions.logp.cpu())
            return torch.cat(logps)

        return self.run_in_parts(in_micro_batches, len(prompts))


def with_context(tokenizer: Tokenizer, example: Example, field: str) -> Example:
    """An example whose prompt has the text of one of its fields too, for --teacher-context."""
    text = example.fields.get(field)
    if text is None:
        raise ConfigError(f"--teacher-context: {example.label} has no {field}")
    messages = messages_of(tokenizer, example)
    if not messages:  # the completion continues the prompt
        return replace(example, prompt=f"{text}\n\n{example.prompt}")
    return replace(example, messages=extended(messages, f"\n\n{text}"))


class InferenceCopy:
    """A model whose linear layers are stored in the precision of autocast, and joined.

    Its results are those of autocast, which would cast the weights in each pass. `refresh` copies
    the trained ones again, to the same places in memory. Weights in shards are gathered.
    """

    def __init__(self, model: Transformer, dtype: torch.dtype) -> None:
        """With float32 and without shards there is nothing to copy: `model` is the model itself."""
        self.dtype = dtype
        self.model = model
        self.trained: list[Tensor] = []  # weights of the model
        self.copies: list[Tensor] = []  # of each of them
        if dtype != torch.float32:
            self._lower()
        if is_sharded(self.model):
            self.model = self.model.sharing_weights()
            for name, weights in [*self.model.named_parameters()]:
                set_parameter(self.model, name, whole(weights.detach()))

    def _lower(self) -> None:
        self.model = low = self.model.sharing_weights()
        modules: list[Any] = [*low.h.modules()]
        for module in modules:
            for name, names in JOINED.items():
                layers = [getattr(module, part, None) for part in names]
                # others have adapters, or need no copy
                if all(type(x) is Linear and x.weight.dtype == torch.float32 for x in layers):
                    setattr(module, name, self._joined(layers))
                    module.is_fused = True
                    for part in names:
                        delattr(module, part)
        for module in modules:
            if isinstance(module, nn.Linear):
                for name, weights in [*module.named_parameters()]:
                    if weights.dtype == torch.float32:
                        setattr(module, name, self._copied([weights]))
        if low.head_weight.dtype == torch.float32:
            low.head = self._joined([low.head or low.wte])

    def _joined(self, layers: Sequence[Any]) -> Linear:
        weight = self._copied([layer.weight for layer in layers])
        joined = Linear(weight.shape[1], len(weight), bias=False, device="meta")
        joined.weight = weight
        if getattr(layers[0], "bias", None) is not None:
            joined.bias = self._copied([layer.bias for layer in layers])
        return joined

    def _copied(self, weights: Sequence[Tensor]) -> nn.Parameter:
        """Weights in the copy's precision, one after another."""
        copied = torch.cat([whole(x.detach().to(self.dtype)) for x in weights])
        places = copied.split([len(x) for x in weights])
        for source, place in zip(weights, places, strict=True):
            if source.requires_grad:
                self.trained.append(source)
                self.copies.append(place)
        return nn.Parameter(copied, requires_grad=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the trained weights again, after an update."""
        if self.trained:
            torch._foreach_copy_(self.copies, self.trained)


class CurrentModel:
    """A context that gives a model with its weights as they are now, to sample from.

    All processes enter the outermost context together, because weights in shards are gathered.
    """

    def __init__(
        self,
        model: Transformer,
        dtype: torch.dtype,
        keeps: bool,
    ) -> None:
        """With `keeps`, the copy's place in memory stays between contexts."""
        self.model = model
        self.dtype = dtype
        self.keeps = keeps
        self.copy: InferenceCopy | None = None
        self.depth = 0  # of contexts within each other

    def __enter__(self) -> Transformer:
        if self.copy is None:
            self.copy = InferenceCopy(self.model, self.dtype)
        elif self.depth == 0:
            self.copy.refresh()
        self.depth += 1
        return self.copy.model

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if not (self.depth or self.keeps):
            self.copy = None

    def forget(self) -> None:
        """Free the copy, from now on after each context."""
        self.keeps = False
        self.copy = None
