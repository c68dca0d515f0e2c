"""What the parameters of a run take, from a model on torch's meta device, which has no memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..config import Config
from ..model.shape import ModelShape
from ..model.transformer import Block, Transformer
from .base_model import add_lora, base_dtype
from .kept_activations import FLOAT


@dataclass(frozen=True)
class StoredWeights:
    """Numbers and bytes of the parameters, with the adapters and the precision of a config."""

    model: Transformer  # on the meta device, with one block, because all blocks are alike
    layers: int

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> "StoredWeights":
        """Raises ConfigError for --lora-targets that the model does not have."""
        model = Transformer.empty(replace(shape, layers=1), device="meta")
        add_lora(model, config.model)
        return cls(model, shape.layers)

    @classmethod
    def frozen(cls, config: Config, shape: ModelShape) -> "StoredWeights":
        """Those of a model that a reward asks, in --base-dtype."""
        model = Transformer.empty(replace(shape, layers=1), device="meta").requires_grad_(False)
        if dtype := base_dtype(config.model):
            for parameter in (p for p in model.parameters() if p.dim() == 2):
                parameter.data = torch.empty_like(parameter, dtype=dtype)
        return cls(model, shape.layers)

    def _sum(self, size: Callable[[Tensor], int]) -> int:
        """The sum of a size over all parameters."""
        in_block = sum(map(size, self.block.parameters()))
        return sum(map(size, self.model.parameters())) + (self.layers - 1) * in_block

    @property
    def block(self) -> Block:
        block = self.model.h[0]
        assert isinstance(block, Block)
        return block

    @property
    def num_parameters(self) -> int:
        return self._sum(lambda p: p.numel())

    @property
    def num_bytes(self) -> float:
        return float(self._sum(lambda p: p.nbytes))

    @property
    def num_trained(self) -> int:
        """The number of parameters that have a gradient."""
        return self._sum(lambda p: p.numel() * p.requires_grad)

    @property
    def largest_trained(self) -> int:
        """The size of the largest tensor that has a gradient."""
        return max(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def is_whole(self) -> bool:
        """Whether all parameters are trained."""
        return all(p.requires_grad for p in self.model.parameters())

    @property
    def in_blocks(self) -> float:
        """Numbers in the linear layers of the blocks that are stored in float32."""
        layers = [layer for layer in self.block.modules() if isinstance(layer, nn.Linear)]
        wide = [p for layer in layers for p in layer.parameters() if p.itemsize == FLOAT]
        return float(self.layers * sum(p.numel() for p in wide))

    @property
    def head_gradient(self) -> float:
        """Bytes; 0 for a frozen head."""
        head = self.model.head_weight
        return float(head.nbytes * head.requires_grad)
