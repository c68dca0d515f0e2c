"""What the parameters of a run take, from a model on torch's meta device, which has no memory."""

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from ..config import Config
from ..model.shape import ModelShape
from ..model.transformer import Transformer
from .base_model import add_lora
from .kept_activations import FLOAT


@dataclass(frozen=True)
class StoredWeights:
    """Numbers and bytes of the parameters, with the adapters and the precision of a config."""

    model: Transformer  # on the meta device

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> "StoredWeights":
        """Raises ConfigError for --lora-targets that the model does not have."""
        model = Transformer.empty(shape, device="meta")
        add_lora(model, config.model)
        return cls(model)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def num_bytes(self) -> float:
        return float(sum(p.nbytes for p in self.model.parameters()))

    @cached_property
    def trained(self) -> list[int]:
        """The sizes of the parameters that have a gradient."""
        return [p.numel() for p in self.model.parameters() if p.requires_grad]

    @cached_property
    def is_whole(self) -> bool:
        """Whether all parameters are trained."""
        return all(p.requires_grad for p in self.model.parameters())

    @cached_property
    def in_blocks(self) -> float:
        """Numbers in the linear layers of the blocks that are stored in float32."""
        layers = (layer for layer in self.model.h.modules() if isinstance(layer, nn.Linear))
        sizes = (p.numel() for layer in layers for p in layer.parameters() if p.itemsize == FLOAT)
        return float(sum(sizes))

    @property
    def head_gradient(self) -> float:
        """Bytes; 0 for a frozen head."""
        head = self.model.head_weight
        return float(head.nbytes * head.requires_grad)
