"""The reference model: the frozen initial policy, which the KL penalty compares with.

With --kl-coef 0 no second model is kept; else it is a `runtime.frozen_model.FrozenModel`.
"""

from typing import Protocol

from torch import Tensor

from .types import Completions


class Reference(Protocol):
    """What the rollout asks for the log-probs of the KL."""

    def logp(self, completions: Completions) -> Tensor | None:
        """`[P, G, S]` log-probs on the host, or None if there is no KL."""


class NoReference:
    """For kl_coef = 0: no second model, no second forward pass."""

    def logp(self, completions: Completions) -> Tensor | None:
        return None
