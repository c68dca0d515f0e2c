"""Copies of models for passes without gradients, with fewer and cheaper products."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .linear import Linear
from .transformer import Transformer

# the one layer that takes the place of layers with the same inputs
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class InferenceCopy:
    """A model whose linear layers are stored in the precision of autocast, and joined.

    Its results are those of autocast, which would cast the weights again in each pass. Frozen
    weights are copied once, and trained ones by `refresh`, always to the same places in memory.
    """

    def __init__(self, model: Transformer, dtype: torch.dtype) -> None:
        """With float32 there is nothing to copy: `model` is the model itself."""
        self.dtype = dtype
        self.model = model
        self.trained: list[Tensor] = []  # weights of the model
        self.copies: list[Tensor] = []  # of each of them
        if dtype == torch.float32:
            return
        self.model = low = model.sharing_weights()
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
        """One layer with the outputs of several, one after another."""
        weight = self._copied([layer.weight for layer in layers])
        joined = Linear(weight.shape[1], len(weight), bias=False, device="meta")
        joined.weight = weight
        if getattr(layers[0], "bias", None) is not None:
            joined.bias = self._copied([layer.bias for layer in layers])
        return joined

    def _copied(self, weights: Sequence[Tensor]) -> nn.Parameter:
        """Weights in the copy's precision, one after another."""
        copied = torch.cat([x.detach().to(self.dtype) for x in weights])
        for source, place in zip(weights, copied.split([len(x) for x in weights]), strict=True):
            if source.requires_grad:
                self.trained.append(source)
                self.copies.append(place)
        return nn.Parameter(copied, requires_grad=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the trained weights again, after an update."""
        if self.trained:
            torch._foreach_copy_(self.copies, self.trained)
