"""The frozen model that a KL term holds the policy to; with no KL there is none."""

import copy
from typing import Protocol

import torch
from torch import Tensor

from .layout import Layout
from .model import GPT


class Reference(Protocol):
    def logp(self, layout: Layout, temperature: float) -> Tensor | None:
        """`[P, G, S]` log-probs of a micro-batch, or None where no KL asks for them."""


class NoReference:
    """kl_coef = 0: no second model, no second forward."""

    def logp(self, layout: Layout, temperature: float) -> Tensor | None:
        return None


class FrozenReference:
    """A copy of the model as it was when the run began."""

    def __init__(self, model: GPT) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.model.checkpoint_blocks = None

    @torch.no_grad()
    def logp(self, layout: Layout, temperature: float) -> Tensor | None:
        logp, _ = self.model(layout.stream, layout, temperature)
        return logp
