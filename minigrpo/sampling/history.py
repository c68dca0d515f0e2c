"""What proposals remember from step to step: completions by prompt, and how often they were right.

It has no influence on tokens but by rounding: rounds of other widths round differently. So it is
saved in checkpoints, and a resumed run decodes in the same rounds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..types import Completions
from .contexts import hash_rows

MOST_TOKENS = 1 << 20  # kept in all, of the prompts that were seen last


@dataclass(frozen=True)
class Visit:
    """The completions of a prompt when it was last sampled."""

    ending: np.ndarray  # [K] int32, the prompt's last tokens, -1 before its first
    tokens: np.ndarray  # [sum of lengths] int32, one completion after the other
    lengths: np.ndarray  # [G] int32


def endings_of(prompt_ids: np.ndarray, prompt_len: np.ndarray, number: int) -> np.ndarray:
    """`[P, number]`, the last tokens of prompts `[P, Lp]`, -1 before the first."""
    columns = prompt_len[:, None] + np.arange(-number, 0)
    ids: np.ndarray = np.take_along_axis(prompt_ids, columns.clip(min=0), axis=1)
    return np.where(columns >= 0, ids, -1)


class History:
    """Completions of earlier steps, and the hits of each class of proposals (drafts.py)."""

    def __init__(self, num_classes: int, ending: int, most_tokens: int = MOST_TOKENS) -> None:
        """`ending`: how many of a prompt's last tokens are kept."""
        self.ending, self.most_tokens, self.num_tokens = ending, most_tokens, 0
        self.hits = np.zeros((2, num_classes))  # right proposals, and all that were compared
        self.visits: dict[int, Visit] = {}  # by the prompt's hash, those seen last at the end

    def add(self, completions: Completions) -> None:
        """Remember a batch on the host, in place of earlier completions of its prompts."""
        prompt_len = completions.prompt_len.numpy()
        prompt_ids = completions.prompt_ids.numpy()
        endings = endings_of(prompt_ids, prompt_len, self.ending).astype(np.int32)
        masks = completions.completion_mask.numpy()
        ids, lengths = completions.completion_ids.numpy(), masks.sum(-1).astype(np.int32)
        for p, key in enumerate(hash_rows(prompt_ids, prompt_len).tolist()):
            self._put(key, Visit(endings[p], ids[p][masks[p]].astype(np.int32), lengths[p]))

    def _put(self, key: int, visit: Visit) -> None:
        self._drop(key)
        self.visits[key] = visit
        self.num_tokens += len(visit.tokens)
        while self.num_tokens > self.most_tokens:
            self._drop(next(iter(self.visits)))

    def _drop(self, key: int) -> None:
        if key in self.visits:
            self.num_tokens -= len(self.visits.pop(key).tokens)

    def newest(self, most_tokens: int) -> Iterator[tuple[int, Visit]]:
        """The visits seen last, by their prompt's hash, up to so many tokens."""
        for key, visit in reversed(self.visits.items()):
            most_tokens -= len(visit.tokens)
            if most_tokens < 0:
                return
            yield key, visit

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors."""
        visits = [*self.visits.values()]
        keys = np.array([*self.visits], dtype=np.uint64).view(np.int64)
        arrays = {
            "hits": self.hits,
            "prompts": keys,
            "endings": _joined([visit.ending for visit in visits]).reshape(-1, self.ending),
            "samples": np.array([len(visit.lengths) for visit in visits], dtype=np.int64),
            "lengths": _joined([visit.lengths for visit in visits]),
            "tokens": _joined([visit.tokens for visit in visits]),
        }
        return {name: torch.from_numpy(x.copy()) for name, x in arrays.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state over; one of a version with other classes of proposals is left out."""
        found = {name: x.numpy() for name, x in state.items()}
        if not found or found["hits"].shape != self.hits.shape:
            return
        self.hits = found["hits"].copy()
        lengths = np.split(found["lengths"], found["samples"].cumsum()[:-1])
        tokens = np.split(found["tokens"], np.cumsum([x.sum() for x in lengths])[:-1])
        keys = found["prompts"].view(np.uint64).tolist()
        self.visits, self.num_tokens = {}, 0
        for key, *parts in zip(keys, found["endings"], tokens, lengths, strict=False):
            self._put(key, Visit(*parts))


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32)
