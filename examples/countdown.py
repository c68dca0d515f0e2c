"""Problems for countdown, from a seed: minigrpo/tasks/countdown.py has the rules, and decides.

    minigrpo train --config countdown

`--task-args form=` is one of

    search   12 7 3 -> 9    12-7=5,5+3=8<7*3=21,21-12=9      the default, for a small model
    chat     a message      ... <answer>7 * 3 - 12</answer>  the form of rows

In a search, < says that an attempt is below the target, and > that it is above. The shipped model
was trained on random attempts that ignore the target (countdown_sft.py): it has learnt to calculate
and to compare. The reward then teaches which attempts to make.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from countdown_rows import Countdown, judge_text, short_question, spelled
from numpy.random import Generator

from minigrpo.rng import stream
from minigrpo.tasks.base import Generated, is_held_out
from minigrpo.types import ConfigError, Example

SMALLEST = 6  # least limit of the numbers in a level; below it hardly any problem is held out
LARGEST = 100  # largest value in a random attempt


class Attempt(NamedTuple):
    """Numbers that were combined until one was left."""

    value: int
    steps: str  # such as 4+3=7,7*5=35
    expression: str  # the same in one expression, (4+3)*5
    growing: str  # steps that keep their expressions, 4+3=7,(4+3)*5=35


def random_attempt(rng: Generator, numbers: Sequence[int]) -> Attempt:
    """Combine two random numbers, the larger one first, by a random operator until one is left."""
    pool = [(number, str(number)) for number in numbers]  # values with their expressions
    steps = []
    growing = []
    while len(pool) > 1:
        pair = [pool.pop(rng.integers(len(pool))) for _ in range(2)]
        (b, right), (a, left) = sorted(pair)
        results = {"+": a + b, "-": a - b, "*": a * b}
        if b and a % b == 0:
            results["/"] = a // b
        allowed = [sign for sign, value in results.items() if 0 < value <= LARGEST] or ["+"]
        sign = allowed[rng.integers(len(allowed))]
        steps.append(f"{a}{sign}{b}={results[sign]}")
        growing.append(f"{left}{sign}{right}={results[sign]}")
        pool.append((results[sign], f"({left}{sign}{right})"))
    value, expression = pool[0]
    return Attempt(value, ",".join(steps), expression[1:-1], ",".join(growing))


class Problems(Generated):
    reward_weights: Mapping[str, float] = Countdown.reward_weights
    success = Countdown.success
    difficulty = "2x12,3x12"

    def __init__(self, seed: int, form: str = "search", difficulty: str | None = None) -> None:
        """`difficulty` has the levels of problems: the count of numbers x the largest."""
        self.seed = seed
        self.form = form
        if form not in ("search", "chat"):
            raise ConfigError(f"--task-args form must be search or chat, got {form}")
        if difficulty is not None:
            self.difficulty = difficulty
        self.levels = [tuple(map(int, level.split("x"))) for level in self.difficulty.split(",")]
        if any(largest < SMALLEST for _, largest in self.levels):
            raise ConfigError(f"--task-args difficulty: the largest number is below {SMALLEST}")
        super().__init__(self.problem, f"problems of {self.difficulty}", speculate=False)

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        return judge_text(text, example.fields["nums"], example.fields["target"])

    def problem(self, number: int, split: str) -> Example:
        rng = stream(self.seed, f"countdown/{split}", number)
        while True:
            size, largest = rng.choice(self.levels)
            numbers = rng.integers(1, largest + 1, size).tolist()
            target = random_attempt(rng, numbers).value  # so it can be reached
            problem = f"{sorted(numbers)} {target}"  # the order of the numbers does not count
            if is_held_out(problem, one_in=4) == (split == "held-out"):
                break
        answer = self.answer(rng, numbers, target)
        kind = f"{size} numbers up to {largest}"
        question = short_question(numbers, target)
        messages: Sequence[Mapping[str, str]] = ()
        if self.form == "chat":
            question = spelled(numbers, target)
            messages = ({"role": "user", "content": question},)
        fields = {"nums": numbers, "target": target}
        return Example(question, answer, number, kind, messages=messages, fields=fields)

    def answer(self, rng: Generator, numbers: Sequence[int], target: int) -> str:
        """The text for supervised fine-tuning, which countdown_sft.py overrides."""
        return ""
