"""Prompts and answers from a JSONL file: one `{"prompt": ..., "answer": ...}` per line.

The prompt and the answer are used verbatim, without a separator between them. One prompt in
ten, chosen by a hash of the prompt, is held out for evaluation. The rewards are `exact` and
`similarity`; --rewards adds functions of your own.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..rewards import similarities
from ..runtime.rng import stream
from ..types import Example
from .scoring import BatchScored
from .splits import PROMPTS_PER_HELD_OUT, is_held_out_prompt


class Pairs(BatchScored):
    """The task of `--data FILE.jsonl`. Each training epoch visits every pair once, in a different
    order.

    Reward parts, each in [0, 1]:
        exact: the completion is the answer.
        similarity: 1 - normalized edit distance between the two.
    """

    parts: Mapping[str, float] = {"exact": 1.0, "similarity": 0.2}

    def __init__(self, path: Path, seed: int) -> None:
        """
        Raises:
            ValueError: in one line, for a file that cannot be read, a line that is not a pair, or a
                split without any.
        """
        self.seed = seed
        self._split: dict[bool, list[tuple[str, str]]] = {False: [], True: []}  # held out or not
        try:
            # not splitlines(), which would also cut a text at U+2028
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"--data {path}: cannot be read ({reason})") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                prompt, answer = _pair(line, f"--data {path}, line {number}")
                self._split[is_held_out_prompt(prompt)].append((prompt, answer))
        for held_out, name in ((False, "training"), (True, "evaluation")):
            if not self._split[held_out]:
                raise ValueError(
                    f"--data {path}: no pair for {name}; one prompt in {PROMPTS_PER_HELD_OUT} is "
                    "held out, add more"
                )
        self.num_held_out = len(self._split[True])
        self._order = lru_cache(maxsize=4)(self._shuffle)

    def train(self, number: int) -> Example:
        """Return training example `number`."""
        epoch, place = divmod(number, len(self._split[False]))
        prompt, answer = self._split[False][self._order(epoch)[place]]
        return Example(prompt, answer, index=number)

    def held_out(self, number: int) -> Example:
        """Return evaluation example `number`; beyond `num_held_out` they repeat."""
        prompt, answer = self._split[True][number % self.num_held_out]
        return Example(prompt, answer, index=number)

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        answers = [example.answer for example in examples]
        exact = [text == answer for text, answer in zip(texts, answers, strict=True)]
        return {"exact": np.array(exact, dtype=float), "similarity": similarities(texts, answers)}

    def _shuffle(self, epoch: int) -> np.ndarray:
        return stream(self.seed, "pairs", epoch).permutation(len(self._split[False]))


def _pair(line: str, where: str) -> tuple[str, str]:
    """The prompt and answer of a line. Raises ValueError that begins with `where`."""
    try:
        record: Any = json.loads(line)
        prompt, answer = record["prompt"], record["answer"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f'{where}: must be an object like {{"prompt": "...", "answer": "..."}}'
        ) from None
    if not (isinstance(prompt, str) and isinstance(answer, str) and prompt):
        raise ValueError(f"{where}: prompt and answer must be text, and the prompt not empty")
    return prompt, answer
