"""Where examples come from: a generator, files or another task; and the examples of steps."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..errors import refusing
from ..rng import stream
from ..task import Task, TokenBatch
from ..types import EXACT, REWARD, ConfigError, Example
from .rows import Parse, Record, Row, as_json, canonical, parse_pair, question_of

Files = Sequence[Path | Sequence[Record]]  # files, or rows themselves
MOST_STEPS = 2**20  # a longer run may use a number twice


@dataclass(eq=False)
class Generated(Task):
    """A source of examples without end."""

    make: Callable[[int, str], Example]  # a pure function of a number and "train" or "held-out"
    about: str
    speculate: bool = True

    def train(self, number: int) -> Example:
        return self.make(number, "train")

    def held_out(self, number: int) -> Example:
        return self.make(number, "held-out")


class Rows(Task):
    """The examples of files. An epoch visits every row once, in an order of its own.

    docs/tasks.md says what is held out, and what a question is.
    """

    def __init__(
        self,
        seed: int,
        data: Files,
        eval_data: Files,
        parse: Parse = parse_pair,
    ) -> None:
        """Without `data` there is nothing to train on. Raises ConfigError for an empty split."""
        self.seed = seed
        self.parse = parse

        # 1. The split. A question that is evaluated is represented by its first row.
        rows = self.read(data)
        eval_rows = self.read(eval_data, "eval_data")
        evaluated: dict[str, Example] = {}
        for row in eval_rows if eval_data else self.choose_held_out(rows):
            evaluated.setdefault(row.question, row.example)
        trained = [row for row in rows if row.question not in evaluated]
        self._train = [row.example for row in trained]
        self._held_out = list(evaluated.values())

        # 2. The counts. A row that asks an evaluated question again is left out.
        self.num_train = len(trained)
        self.num_held_out = len(evaluated)
        self.about = f"{len(trained)} of {len(rows)} rows, {len(evaluated)} questions held out"
        if not evaluated or (data and not trained):
            raise ConfigError(f"--data: {self.about}; needs two questions, or --eval-data")

    def read(self, files: Files, argument: str = "data") -> list[Row]:
        """The rows of JSONL files, or of a caller's argument. Raises ConfigError for bad ones."""
        rows = []
        for place, record in _places(files, argument):
            with refusing(place):
                if isinstance(record, bytes):
                    with refusing("not JSON Lines; pass other tables as rows, from Python"):
                        record = json.loads(record)
                row = self.parse(as_json(record))
                question = canonical(row.question)
                if not question:
                    raise ValueError("the question is empty")
                example = replace(row.example, place=place)
                rows.append(row._replace(question=question, example=example))
        return rows

    def choose_held_out(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows of a tenth of the questions, or one row. A subclass may have another rule."""
        chosen = [row for row in rows if is_held_out(row.question)]
        return chosen or sorted(rows, key=lambda row: hash64(row.question))[:1]

    def train(self, number: int) -> Example:
        epoch, place = divmod(number, self.num_train)
        order = permutation(self.seed, epoch, self.num_train)
        return replace(self._train[order[place]], index=number)

    def held_out(self, number: int) -> Example:
        return replace(self._held_out[number % len(self._held_out)], index=number)

    def known(self) -> Sequence[Example]:
        return [*self._train, *self._held_out]


def _places(files: Files, argument: str) -> Iterator[tuple[str, bytes | Record]]:
    """Each line of files, or row of a caller, after its name, such as "a.jsonl, line 3"."""
    for source in files:
        if not isinstance(source, Path):
            for number, record in enumerate(source, 1):
                yield f"{argument}, row {number}", record
            continue
        # as bytes, because `splitlines` of a text also splits at U+2028
        for number, line in enumerate(source.read_bytes().splitlines(), 1):
            if line.strip():
                yield f"{source}, line {number}", line


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    return stream(seed, "pairs", epoch).permutation(n)


def hash64(text: str) -> int:
    """A 64-bit hash of a text, the same in every process (Python's `hash` is not)."""
    hashed = hashlib.blake2b(text.encode(), digest_size=8)
    return int.from_bytes(hashed.digest())


def is_held_out(question: str, one_in: int = 10) -> bool:
    """Whether a question is for evaluation, by its hash alone: copies of it are in one split."""
    return hash64(question) % one_in == 0


class SourceTask(Task):
    """A task whose examples come from a source; a subclass adds `reward_weights` and `score`."""

    def __init__(self, source: Task) -> None:
        """`source` is a generator, or the rows of files; its scores are not read."""
        self.source = source
        self.about = source.about
        self.num_held_out = source.num_held_out
        self.speculate = source.speculate

    def ask(self, example: Example, number: int, split: str) -> Example:
        """Return example `number` of a split of the source as this task asks it."""
        return example

    def train(self, number: int) -> Example:
        return self.ask(self.source.train(number), number, "train")

    def held_out(self, number: int) -> Example:
        return self.ask(self.source.held_out(number), number, "held-out")

    def known(self) -> Sequence[Example]:
        return [self.ask(each, number, "known") for number, each in enumerate(self.source.known())]


class WrappedTask(SourceTask):
    """A whole task with its rewards; examples get an `index`, the key of their random numbers."""

    def __init__(self, source: Task) -> None:
        super().__init__(source)
        self.reward_weights = source.reward_weights
        self.token_rewards = source.token_rewards
        self.success = source.success
        compares = source.success == EXACT and EXACT not in source.reward_weights
        if compares and not source.held_out(0).answer:
            self.success = REWARD  # examples have no answers, so none is right
        self.environment = source.environment
        self.tools = source.tools

    def ask(self, example: Example, number: int, split: str) -> Example:
        prompt = example.prompt or question_of(example.messages)
        return replace(example, index=number, prompt=prompt)

    def score(self, example: Example, text: str) -> Mapping[str, float | None]:
        return self.source.score(example, text)

    def score_tokens(self, batch: TokenBatch) -> Mapping[str, np.ndarray]:
        return self.source.score_tokens(batch)

    def summaries(self, values: Mapping[str, np.ndarray]) -> Mapping[str, float]:
        return self.source.summaries(values)


class ExamplePrefetcher:
    """Makes the examples of the next steps in a thread, so that no step waits for self-play."""

    def __init__(self, task: Task, prompts_per_step: int, share: range) -> None:
        self.task = task
        self.prompts_per_step = prompts_per_step
        self.share = share  # the places in a step that belong to this process
        if not share:
            raise ConfigError("--prompts-per-step is below the number of processes")
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.futures: dict[int, Future[list[Example]]] = {}  # by step

    def take(self, step: int) -> list[Example]:
        """This process's examples of a step. Raises what the task raised."""
        for due in (step, step + 1):  # the next step's are made meanwhile
            if due not in self.futures:
                self.futures[due] = self.thread.submit(self._make, due, self.share)
        return self.futures.pop(step).result()

    def replacements(
        self,
        step: int,
        attempt: int,
        places: Sequence[int],
    ) -> list[Example]:
        """New examples for places in the share, with numbers that no step has."""
        unused_step = (attempt + 1) * MOST_STEPS + step
        return self._make(unused_step, [self.share[place] for place in places])

    def _make(self, step: int, places: Sequence[int]) -> list[Example]:
        return [self.task.train(step * self.prompts_per_step + place) for place in places]
