"""Countdown: reach a target with given numbers, each used exactly once, by + - * and /.

Nobody knows the right answer, or there are many: only a verifier can tell. It reads what is in the
last pair of <answer> tags. Of a text without tags it reads the last line, and of that what follows
the last < or >.

There are three forms of question and completion:

    search       12 7 3 -> 9    12-7=5,5+3=8<7*3=21,21-12=9
    expression   12 7 3 -> 9    7*3-12=9
    chat         a message      ... <answer>7 * 3 - 12</answer>

A search is a row of attempts, each with its steps. After one that does not hit, < says that it is
below the target, and > that it is above. The last attempt is the answer.

The warm start (--loss nll) learns from random attempts with their true values. They are drawn
without a look at the target, which decides only that a search ends when one hits. So it teaches to
calculate and to compare, not to choose: which attempts to make, and not to give up, is learnt from
the reward.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..runtime.flags import ConfigError
from ..runtime.rng import stream
from ..runtime.text import short
from ..types import Example
from .arithmetic import MAX_DIGITS, result
from .attempts import LARGEST_VALUE, random_attempt, random_equation, random_search
from .data_lines import parse_record
from .generated import Generated
from .pairs import JSONLExamples
from .scoring import BatchScored
from .splits import fingerprint
from .task_request import TaskRequest

OPEN, CLOSE = "<answer>", "</answer>"
FEWEST, MOST = 2, 6  # numbers of a generated problem
LEAST_LARGEST = 6  # with still smaller numbers hardly any problem could be held out
MOST_IN_DATA = 16
PROBLEMS_PER_HELD_OUT = 4  # one generated problem in 4 is held out
DEFAULT_DIFFICULTY = "2x12,3x12"
LEVEL = re.compile("([0-9]{1,3})x([0-9]{1,3})")
FORM = 'must be an object like {"nums": [12, 7, 3], "target": 15}'


# --- the verifier ---------------------------------------------------------------------------------


def final_answer(text: str) -> str:
    """Return what a text gives as its answer: in its last tags, else its last attempt.

    It is "" for a text with a tag but without a pair of them.
    """
    if OPEN not in text and CLOSE not in text:
        return re.split("[\n<>]", text.strip())[-1]
    end = text.rfind(CLOSE)
    start = text.rfind(OPEN, 0, max(end, 0))
    return text[start + len(OPEN) : end].strip() if start >= 0 else ""


def solves(text: str, numbers: Sequence[int], target: int) -> bool:
    """Return whether a text, which may be any whatsoever, reaches the target.

    Each of the numbers must be used exactly once.
    """
    return result(final_answer(text), numbers) == target


class Verified(BatchScored):
    """Scores completions by `example.fields`, which has `nums` and `target`.

    Reward parts, each 0 or 1:
        solved: the answer reaches the target.
        format: the answer is arithmetic that uses each number once, and its equations are true.
    """

    parts: Mapping[str, float] = {"solved": 1.0, "format": 0.1}
    success = "solved"

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        reached = [
            result(final_answer(text), example.fields["nums"])
            for example, text in zip(examples, texts, strict=True)
        ]
        targets = [example.fields["target"] for example in examples]
        solved = [value == target for value, target in zip(reached, targets, strict=True)]
        return {
            "solved": np.array(solved, dtype=np.float32),
            "format": np.array([value is not None for value in reached], dtype=np.float32),
        }


# --- forms ----------------------------------------------------------------------------------------


def short_question(numbers: Sequence[int], target: int) -> str:
    """The question for a small model of its own, numbers from the largest down."""
    return f"{' '.join(map(str, sorted(numbers, reverse=True)))} -> {target}\n"


def spelled_question(numbers: Sequence[int], target: int) -> str:
    """The question for a chat model."""
    listed = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
    return (
        f"Reach {target} with the numbers {listed}. Use each of them exactly once; you may add, "
        "subtract, multiply, divide and use parentheses. Think it through step by step. End with "
        f"the expression alone between {OPEN} and {CLOSE}, such as {OPEN}(8 - 2) * 5{CLOSE}."
    )


def random_reply(rng: np.random.Generator, numbers: Sequence[int], target: int) -> str:
    """A chat model's warm start; it needs none."""
    return f"{OPEN}{random_attempt(rng, numbers).expression}{CLOSE}"


class Form(NamedTuple):
    """How a problem is asked, and how a completion looks."""

    ask: Callable[[Sequence[int], int], str]
    is_chat: bool  # whether the question is a user's message
    # (rng, numbers, target) -> a text for the warm start
    warm_up: Callable[[np.random.Generator, Sequence[int], int], str]

    def example(
        self, rng: np.random.Generator, numbers: Sequence[int], target: int, **others: Any
    ) -> Example:
        """The example of a problem. Its `answer` is for the warm start only, and no solution."""
        question = self.ask(numbers, target)
        messages = ({"role": "user", "content": question},) if self.is_chat else ()
        fields = {"nums": [*numbers], "target": target} | others.pop("fields", {})
        answer = self.warm_up(rng, numbers, target)
        return Example(question, answer, messages=messages, fields=fields, **others)


FORMS = {
    "search": Form(short_question, False, random_search),
    "expression": Form(short_question, False, random_equation),
    "chat": Form(spelled_question, True, random_reply),
}


# what each form changes from the defaults
SMALL = {"loss": "dapo", "learning_rate": 5e-4}
SETTINGS: dict[str, dict[str, Any]] = {
    "search": SMALL
    | {"max_new_tokens": 72, "eval_every": 50, "eval_size": 512, "eval_size_during": 256},
    "expression": SMALL | {"init_from": "scratch", "max_new_tokens": 24},
    "chat": {"speculative_decoding": False, "init_from": "scratch", "max_new_tokens": 1024},
}


# --- where problems come from ---------------------------------------------------------------------


class Level(NamedTuple):
    """Problems of one difficulty."""

    size: int  # how many numbers
    largest: int  # of them

    @property
    def kind(self) -> str:
        return f"{self.size} numbers up to {self.largest}"


def parse_levels(text: str) -> list[Level]:
    """Return the levels of --difficulty, such as `2x12,3x12`. Raises ConfigError."""
    levels = []
    for item in text.split(","):
        found = LEVEL.fullmatch(item.strip())
        level = Level(int(found[1]), int(found[2])) if found else Level(0, 0)
        if not (FEWEST <= level.size <= MOST and LEAST_LARGEST <= level.largest <= LARGEST_VALUE):
            raise ConfigError(
                "--difficulty must read COUNTxLARGEST,..., such as 2x12,3x20, with "
                f"{FEWEST} to {MOST} numbers up to {LEAST_LARGEST} to {LARGEST_VALUE}, "
                f"got {text!r:.60}"
            )
        levels.append(level)
    return levels


class Countdown(Generated, Verified):
    """Seeded problems without end. Each level of the difficulty has an equal share of them.

    A target is what a random attempt at the numbers reaches, so every problem can be solved.
    """

    def __init__(self, seed: int, form: str = "search", difficulty: str = "") -> None:
        """Raises ConfigError for a difficulty that is not `2x12,3x20` or the like."""
        self.seed, self.form = seed, FORMS[form]
        self.levels = parse_levels(difficulty or DEFAULT_DIFFICULTY)

    def _example(self, split: str, number: int) -> Example:
        rng = stream(self.seed, f"countdown/{split}", number)
        while True:
            level = self.levels[int(rng.integers(len(self.levels)))]
            numbers = rng.integers(1, level.largest + 1, level.size).tolist()
            target = random_attempt(rng, numbers).value
            if is_held_out_problem(numbers, target) == (split == "held-out"):
                return self.form.example(rng, numbers, target, index=number, kind=level.kind)


def is_held_out_problem(numbers: Iterable[int], target: int) -> bool:
    """Return whether a problem is for evaluation, in whatever order its numbers stand."""
    return fingerprint(f"{sorted(numbers)} {target}") % PROBLEMS_PER_HELD_OUT == 0


def generated(request: TaskRequest, form: str) -> Countdown:
    """The task on seeded problems."""
    return Countdown(request.seed, form, request.difficulty)


class CountdownFiles(JSONLExamples, Verified):
    """Problems from JSONL files with the field's keys: `{"nums": [12, 7, 3], "target": 15}`."""

    def __init__(self, request: TaskRequest, form: str = "search") -> None:
        """Raises ValueError, in one line that names the file."""
        parse = partial(parse_problem, form=FORMS[form])
        super().__init__(request.paths, request.seed, request.listener, parse)

    def asks(self, example: Example) -> str:
        """The problem, in whatever order its numbers stand."""
        return short_question(example.fields["nums"], example.fields["target"])


def parse_problem(line: str, form: Form) -> Example:
    """Return the problem of a JSON line; all of its keys are in `fields`.

    Raises:
        ValueError: says what is wrong with the line, and what is allowed.
    """
    record = parse_record(line, FORM)
    for key in ("nums", "target"):
        if key not in record:
            raise ValueError(f"{FORM}, has no {key}")
    numbers, target = record["nums"], record["target"]
    if not (isinstance(numbers, list) and 1 < len(numbers) <= MOST_IN_DATA):
        raise ValueError(
            f"nums must be a list of 2 to {MOST_IN_DATA} numbers, got {short(numbers)}"
        )
    for number in (*numbers, target):
        if type(number) is not int or not 0 <= number < 10**MAX_DIGITS:
            raise ValueError(
                f"nums and target must be whole numbers from 0 to {10**MAX_DIGITS - 1}, "
                f"got {short(number)}"
            )
    # a problem that stands twice in a file has the same answer twice
    rng = stream(0, "countdown/file", fingerprint(f"{numbers} {target}"))
    return form.example(rng, numbers, target, kind=f"{len(numbers)} numbers", fields=record)
