"""minigrpo: Group Relative Policy Optimization, small enough to read in an afternoon."""

from .config import Config
from .model.transformer import Transformer
from .rewards import reward
from .trainer import Trainer

__all__ = ["Config", "Trainer", "Transformer", "reward"]
