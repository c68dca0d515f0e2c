r"""The math task: word problems with a final answer that can be checked.

    GSM8K's lines   {"question": ..., "answer": "...\n#### 72"}
    MATH's lines    {"problem": ..., "solution": "... \boxed{72} ...", "type": ..., "level": ...}

A prompt asks for the answer in the form that the data has, and it is looked for there: after the
last `####`, or in the last `\boxed{}`. Without `--data` the questions are sums, `7+8+3+5=`, with
completions such as `15,18,23####23`: the sum so far after each further number, then the answer.

Plain numbers are compared exactly, and other formulas by math-verify where it is installed (the
extra `math`), else as text. math-verify may work for hours on 9^{9^{9}}, and a multiplication of
huge numbers cannot be interrupted in Python: it runs in a process that the system ends.
"""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.rng import stream
from ..types import ConfigError, Example
from .base import Generated, SourceTask, is_held_out
from .data import QUESTIONS, Files, Row, Rows, text_of

HASHES, BOXED = "####", r"\boxed{}"
SOLUTIONS = ("solution", "answer", "completion")  # keys of a true answer
REQUESTS = {
    HASHES: "Think step by step. End with a line that has #### and then the result as a number.",
    BOXED: r"Think step by step. Put the final answer, and nothing else, in \boxed{}.",
}
CALCULATION = re.compile(r"<<[^<>\n]*>>")  # GSM8K's notes for a calculator, inside the solutions
MAX_ANSWER_CHARS = 300
FEWEST, MOST, LARGEST = 3, 6, 9  # numbers in a sum, and the largest of them


class Math(SourceTask):
    """Scores completions by their final answer.

    Reward functions, each 0 or 1:
        correct: the final answer is the true one.
        format: it is given in the form that the prompt asks for.
    """

    parts: Mapping[str, float] = {"correct": 1.0, "format": 0.1}
    success = "correct"

    def __init__(
        self, seed: int, data: Files = (), eval_data: Files = (), chat: bool = False
    ) -> None:
        """`chat`: prompts are messages of a user, not text that a base model continues."""
        self.seed, self.chat = seed, chat
        self.verifier: MathVerify | None = None
        if not (data or eval_data):
            super().__init__(Generated(self._sum, f"sums of {FEWEST} to {MOST} numbers"))
            self.speculate = True
            return
        super().__init__(Rows(seed, data, eval_data, self._row))
        if find_spec("math_verify"):
            self.verifier = MathVerify()
        else:
            self.about += "; math-verify is not installed: formulas are compared as text"

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        form, truth = truth_of(example.answer)
        answer = final_answer(text, form)
        right = 0 < len(answer) <= MAX_ANSWER_CHARS
        if right:
            expected, value = number(truth, BOXED), number(answer, form)
            if expected is not None and (value is not None or form == HASHES):
                right = value == expected
            else:
                right = truth == answer or bool(self.verifier and self.verifier.same(truth, answer))
        return {"correct": right, "format": answer_in_form(text, form) != ""}

    def _row(self, record: dict[str, Any]) -> Row:
        question, solution = text_of(record, QUESTIONS).strip(), solution_of(record)
        request = REQUESTS[truth_of(solution)[0]]
        prompt = f"Question: {question}\n{request}\nAnswer:\n"
        if self.chat:
            prompt = f"{question}\n\n{request}"
        kind = text_of(record, ("type", "subject"), "")
        return Row(question, Example(prompt, solution, kind=kind, fields=record))

    def _sum(self, number: int, held_out: bool) -> Example:
        rng = stream(self.seed, f"sums/{'held-out' if held_out else 'train'}", number)
        while True:
            terms = rng.integers(1, LARGEST + 1, rng.integers(FEWEST, MOST + 1))
            prompt = "+".join(map(str, terms)) + "="
            if is_held_out(prompt) == held_out:
                break
        answer = f"{','.join(map(str, np.cumsum(terms)[1:]))}{HASHES}{terms.sum()}"
        return Example(prompt, answer, number, f"{len(terms)} numbers")


def solution_of(record: dict[str, Any]) -> str:
    """The true solution of a line."""
    return CALCULATION.sub("", text_of(record, SOLUTIONS)).strip()


def truth_of(solution: str) -> tuple[str, str]:
    """The form of a true solution, and its final answer. Raises ValueError if it has none."""
    for form in (HASHES, BOXED):
        if truth := answer_in_form(solution, form):
            return form, truth
    if solution and "\n" not in solution:
        return BOXED, solution  # nothing but the answer
    raise ValueError(f"the solution has no final answer after {HASHES} or in {BOXED}")


def answer_in_form(text: str, form: str) -> str:
    """The answer of a text in the form asked for: in a box, or in its last line, after one ####."""
    if form == BOXED:
        return boxed(text)
    answer = after_hashes(text)
    return answer if answer == text.partition(HASHES)[2].strip() else ""


def final_answer(text: str, form: str) -> str:
    """The answer that a text gives in the form that was asked for, else in the other one, or ""."""
    if form == HASHES:
        return after_hashes(text) or boxed(text)
    return boxed(text) or after_hashes(text)


def after_hashes(text: str) -> str:
    """The rest of the line after the last `####`."""
    _, mark, rest = text.rpartition(HASHES)
    return rest.strip().partition("\n")[0].strip() if mark else ""


def boxed(text: str) -> str:
    r"""The content of the last `\boxed{...}`; nothing if it is never closed."""
    _, mark, rest = text.rpartition(r"\boxed{")
    depth = 1
    for place, character in enumerate(rest if mark else ""):
        depth += (character == "{") - (character == "}")
        if not depth:
            return rest[:place].strip()
    return ""


INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = rf"(-? ?(?:{INTEGER}(?:\.[0-9]+|/[1-9][0-9]*)?|\.[0-9]+))"
WHOLE = re.compile(rf"{NUMBER}\.?")
# a number that is no part of something else: 72 or 73, 72k, 72^2, 72 * 6
FIRST = re.compile(
    rf"[^0-9]*?{NUMBER}(?!\w|[.,]?[0-9]|\s+(?:or|and)?\s*[0-9]"
    r"|\s*(?:[-+*/^×·÷x]|\\(?:times|cdot|div))\s*[(0-9])"
)
NOISE = re.compile(r"\\[$%!,]|[$%]|\*\*|\{,\}")  # 50% is 50: published answers leave out the sign
FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")


def number(text: str, form: str) -> Fraction | None:
    r"""The exact value of a text that is a number: 1,234, $5, 50%, -3/4, \frac{3}{4}.

    After #### words may stand around it, as in "48 + 24 = 72 clips in 2 months": the first one
    after the last = counts.
    """
    text = FRACTION.sub(r" \1/\2", NOISE.sub("", text.replace("−", "-"))).strip()
    found = FIRST.match(text.rpartition("=")[2]) if form == HASHES else WHOLE.fullmatch(text)
    return Fraction(re.sub("[ ,]", "", found[1])) if found else None


class MathVerify:
    """Compares formulas in a process that is started again when the system has ended it."""

    def __init__(self) -> None:
        worker = str(Path(__file__).with_name("math_verify_worker.py"))
        self.start = partial(
            subprocess.Popen,
            # -P: else our math.py would hide the standard library's
            [sys.executable, "-P", worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the run, which ends the input
        )
        self.lock, self.process = threading.Lock(), self.start()
        # a group has many completions and few answers
        self.same = lru_cache(maxsize=1 << 14)(self._ask)
        if not self._ask("1", "1"):
            raise ConfigError("--task math: math-verify is installed, but does not work")

    def _ask(self, truth: str, answer: str) -> bool:
        """Whether two formulas are equal; False for one that takes too long or too much memory."""
        with self.lock:
            assert self.process.stdin and self.process.stdout
            print(json.dumps([truth, answer]), file=self.process.stdin, flush=True)
            verdict = self.process.stdout.readline()
            if not verdict:  # the system has ended it
                self.process = self.start()
            return verdict == "1\n"
