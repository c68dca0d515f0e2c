"""Prompts and answers from JSONL files: one `{"prompt": ..., "answer": ...}` per line.

The prompt and the answer are used verbatim, without a separator between them. In place of the
prompt, a line may have chat messages, of which the model's chat template makes one. Files that are
named as tests are held out for evaluation; without one, that is one prompt in ten, chosen by a hash
of the prompt. The rewards are `exact` and `similarity`; --rewards adds functions of your own.
`JSONLExamples` is also the base of tasks that read the lines of another format.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..rewards import similarities
from ..runtime.rng import stream
from ..runtime.text import as_asked
from ..types import Example
from .data_lines import data_lines, decode_line, parse_example
from .files import Listener, SilentListener, open_data, readable, test_files
from .scoring import BatchScored
from .splits import PROMPTS_PER_HELD_OUT, is_held_out_prompt
from .task_request import TaskRequest


class Pair(NamedTuple):
    """A line of the file."""

    example: Example  # not numbered yet
    path: Path
    line: int

    @property
    def where(self) -> str:
        """The file and the line."""
        return f"--data {self.path}, line {self.line}"

    @property
    def question(self) -> tuple[str, ...]:
        """What is asked, system messages included."""
        said = (text for message in self.example.messages for text in message.values())
        return (self.example.prompt, *said)

    @property
    def size(self) -> int:
        """Bytes of what is asked and of the answer."""
        return sum(len(text.encode()) for text in (*self.question, self.example.answer))


class JSONLExamples:
    """The examples of JSONL files, one per line. Each training epoch visits every one once, in a
    different order. A task adds `parts` and `score_batch`.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        seed: int,
        listener: Listener | None = None,
        parse: Callable[[str], Example] = parse_example,
    ) -> None:
        """
        Args:
            listener: receives warnings about answers that are empty or contradict each other.
            parse: a line -> its example, or ValueError that says what is allowed.

        Raises:
            ValueError: in one line, for a file that cannot be read, a line that `parse` refuses, or
                a split without any.
        """
        self.seed = seed
        self._split: dict[bool, list[Pair]] = {False: [], True: []}  # held out or not
        names = f"--data {','.join(map(str, paths))}"
        try:
            pairs = [pair for path in paths for pair in _read(path, parse)]
        except ValueError as error:
            raise ValueError(f"--data {error}") from None
        self.has_messages = any(pair.example.messages for pair in pairs)
        self.held_out_are = f"one prompt in {PROMPTS_PER_HELD_OUT}"
        if in_both := self._share_out(pairs, test_files(paths)):
            (listener or SilentListener()).warn(
                f"{names}: {in_both} lines for training ask what a held-out line asks, and are "
                "left out"
            )
        for held_out, name in ((False, "training"), (True, "evaluation")):
            if not self._split[held_out]:
                raise ValueError(
                    f"{names}: no pair for {name}; {self.held_out_are} is held out, add more"
                )
        for path in paths if listener else ():
            of_file = [pair for pair in pairs if pair.path == path]
            for warning in _doubts(of_file):
                (listener or SilentListener()).warn(f"--data {path}: {warning}")
        self.num_held_out = len(self._split[True])
        self._order = lru_cache(maxsize=4)(self._shuffle)

    def _share_out(self, pairs: Sequence[Pair], tests: Sequence[Path]) -> int:
        """Put pairs into their splits. Returns how many of training's were asked in a test too."""
        if tests:
            self.held_out_are = ", ".join(map(str, tests))
            marked = [(pair, pair.path in tests) for pair in pairs]
        else:
            is_held_out = self.split([pair.example for pair in pairs])
            marked = [(pair, is_held_out(pair.example)) for pair in pairs]
        tested = {as_asked(self.asks(pair.example)) for pair, held_out in marked if held_out}
        evaluated, in_both = set[Example](), 0
        for pair, held_out in marked:
            if held_out and pair.example in evaluated:
                continue  # a question that occurs several times is evaluated once
            if not held_out and as_asked(self.asks(pair.example)) in tested:
                in_both += 1
                continue
            self._split[held_out].append(pair)
            evaluated.add(pair.example)
        return in_both

    @property
    def about(self) -> str:
        """Which examples are held out."""
        return f"{self.num_held_out} examples are held out ({self.held_out_are})"

    def split(self, examples: Sequence[Example]) -> Callable[[Example], bool]:
        """Without a test file: what says which of all examples are held out, by a hash of what they
        ask.
        """
        return lambda example: is_held_out_prompt(as_asked(self.asks(example)))

    def asks(self, example: Example) -> str:
        """The question of an example; training has none that is held out, however it is put."""
        return example.prompt

    def train(self, number: int) -> Example:
        """Return training example `number`."""
        epoch, place = divmod(number, len(self._split[False]))
        return _asked(self._split[False][self._order(epoch)[place]].example, number)

    def held_out(self, number: int) -> Example:
        """Return evaluation example `number`; beyond `num_held_out` they repeat."""
        return _asked(self._split[True][number % self.num_held_out].example, number)

    def longest(self) -> Iterator[tuple[str, Example]]:
        """Yield all examples, most bytes first, each with its file and line."""
        pairs = self._split[False] + self._split[True]
        for pair in sorted(pairs, key=lambda pair: -pair.size):
            yield pair.where, pair.example

    def _shuffle(self, epoch: int) -> np.ndarray:
        return stream(self.seed, "pairs", epoch).permutation(len(self._split[False]))


class Pairs(JSONLExamples, BatchScored):
    """The task of `--task prompts --data FILE.jsonl`: prompts and answers.

    Reward parts, each in [0, 1]:
        exact: the completion is the answer.
        similarity: 1 - normalized edit distance between the two.
    """

    parts: Mapping[str, float] = {"exact": 1.0, "similarity": 0.2}

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        answers = [example.answer for example in examples]
        exact = [text == answer for text, answer in zip(texts, answers, strict=True)]
        return {"exact": np.array(exact, dtype=float), "similarity": similarities(texts, answers)}


def of_files(request: TaskRequest) -> Pairs:
    """The task on the files of --data."""
    return Pairs(request.paths, request.seed, request.listener)


def _asked(example: Example, index: int) -> Example:
    """An example with messages and fields of its own, into which a reward function may write."""
    messages, fields = copy.deepcopy((example.messages, example.fields))
    return replace(example, index=index, messages=messages, fields=fields)


def _read(path: Path, parse: Callable[[str], Example]) -> list[Pair]:
    """The pairs of a file. Raises ValueError, in one line, for the first line that is none."""
    pairs = list[Pair]()
    with readable(path), open_data(path) as file:
        for number, _, raw in data_lines(file):
            try:
                pairs.append(Pair(parse(decode_line(raw)), path, number))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return pairs


def _doubts(pairs: Sequence[Pair]) -> Iterator[str]:
    """What is allowed but probably a mistake."""
    if empty := [pair.line for pair in pairs if not pair.example.answer]:
        yield f"{len(empty)} answers are empty, the first in line {empty[0]}"
    first: dict[tuple[str, ...], Pair] = {}
    differ = [
        (first[pair.question].line, pair.line)
        for pair in pairs
        if first.setdefault(pair.question, pair).example.answer != pair.example.answer
    ]
    if differ:
        yield (
            f"{len(differ)} prompts have another answer in an earlier line, the first in line "
            f"{differ[0][1]} (see line {differ[0][0]}); each line is a question of its own"
        )
