"""Prompts and answers from a JSONL file: `{"prompt": ..., "answer": ...}` a line.

One prompt in ten, chosen by a hash of the prompt, is held out for evaluation. Rewards are `exact`
and `similarity`; what else a completion should be is a reward function of one's own.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..rewards import similarity
from ..runtime.rng import stream
from ..types import Example

HELD_OUT_SHARE = 10  # one prompt in 10


class Pairs:
    """The task of `--data FILE.jsonl`."""

    parts: Mapping[str, float] = {"exact": 1.0, "similarity": 0.2}

    def __init__(self, path: Path, seed: int) -> None:
        """Raises ValueError, in one line, for a file that cannot be read, a line that is no pair,
        or too few pairs.
        """
        self.seed = seed
        self._split: dict[bool, list[Example]] = {False: [], True: []}
        try:
            lines = path.read_text(encoding="utf-8").split("\n")  # and not at U+2028
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--data {path}: cannot be read ({getattr(error, 'strerror', None) or error})"
            ) from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                prompt, answer = _pair(line, f"--data {path}, line {number}")
                held_out = (
                    int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest())
                    % HELD_OUT_SHARE
                    == 0
                )
                self._split[held_out].append(
                    Example(prompt, answer, kind="held-out" if held_out else "train")
                )
        for held_out, name in ((False, "training"), (True, "evaluation")):
            if not self._split[held_out]:
                raise ValueError(
                    f"--data {path}: no pair for {name}; one prompt in {HELD_OUT_SHARE} is held "
                    "out, add more"
                )
        self.num_held_out = len(self._split[True])
        self._order = lru_cache(maxsize=4)(self._shuffle)

    def train(self, number: int) -> Example:
        epoch, place = divmod(number, len(self._split[False]))
        example = self._split[False][self._order(epoch)[place]]
        return Example(example.prompt, example.answer, index=number)

    def held_out(self, number: int) -> Example:
        example = self._split[True][number % self.num_held_out]
        return Example(example.prompt, example.answer, index=number)

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, list[float]]:
        scores = [self.score(example, text) for example, text in zip(examples, texts, strict=True)]
        return {name: [score[name] for score in scores] for name in self.parts}

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        return {
            "exact": float(text == example.answer),
            "similarity": similarity(text, example.answer),
        }

    def _shuffle(self, epoch: int) -> np.ndarray:
        return stream(self.seed, "pairs", epoch).permutation(len(self._split[False]))


def _pair(line: str, where: str) -> tuple[str, str]:
    try:
        record: Any = json.loads(line)
        prompt, answer = record["prompt"], record["answer"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f'{where}: must be an object like {{"prompt": "...", "answer": "..."}}'
        ) from None
    if not (isinstance(prompt, str) and isinstance(answer, str) and prompt):
        raise ValueError(f"{where}: prompt and answer must be text, and the prompt not empty")
    return prompt, answer
