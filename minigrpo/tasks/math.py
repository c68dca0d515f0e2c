r"""The math task: word problems with a final answer that can be checked.

    GSM8K's lines   {"question": ..., "answer": "...\n#### 72"}
    MATH's lines    {"problem": ..., "solution": "... \boxed{72} ...", "type": ..., "level": ...}

Plain numbers are compared exactly, and other formulas by math-verify if it is installed (the extra
`math`), else as text. math-verify may work for hours on 9^{9^{9}}, and Python cannot interrupt a
multiplication of huge numbers. So math-verify runs in processes that the system ends.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec

from ..errors import RunFailed
from ..runtime.calls import WorkerProcesses
from ..types import ConfigError, Example
from .base import Files, Rows
from .rows import QUESTIONS, Record, Row, text_field

LONGEST = 300  # characters of an answer that are read
PATIENCE_S = 60.0  # limit of wall time for math-verify on a busy machine, beside that of CPU time
# the two forms of an answer
HASHES = "####"
BOXED = r"\boxed{}"
REQUESTS = {
    HASHES: "Think step by step. End with a line that has #### and then the result as a number.",
    BOXED: r"Think step by step. Put the final answer, and nothing else, in \boxed{}.",
}


class Math(Rows):
    reward_weights: Mapping[str, float] = {  # each 0 or 1
        "correct": 1.0,  # the final answer is the true one
        "format": 0.1,  # it is given in the form that the prompt asks for
    }
    success = "correct"

    def __init__(
        self,
        seed: int,
        data: Files = (),
        eval_data: Files = (),
        chat: bool = False,
    ) -> None:
        """With `chat`, prompts are messages of a user, not text that a base model continues."""
        self.chat = chat
        super().__init__(seed, data, eval_data, self._row)
        self.has_verifier = find_spec("math_verify") is not None
        if not self.has_verifier:
            self.about += "; math-verify is not installed: formulas are compared as text"
        elif not same_formula("1", "1"):
            raise ConfigError("--task math: math-verify is installed, but does not work")

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        form, truth = truth_of(example.answer)
        correct = self.is_right(final_answer(text, form), truth, form)
        return {"correct": correct, "format": answer_in_form(text, form) != ""}

    def is_right(self, answer: str, truth: str, form: str) -> bool:
        """Whether a final answer that was asked for in this form is the true one."""
        if form == HASHES:  # any number of words may follow on the line
            answer = answer[:LONGEST]
        if not 0 < len(answer) <= LONGEST:
            return False
        true_value = exact_value(truth, BOXED)
        value = exact_value(answer, form)
        # if the true answer is a number, words after #### are not a formula
        if true_value is not None and (value is not None or form == HASHES):
            return value == true_value
        return truth == answer or (self.has_verifier and same_formula(truth, answer))

    def _row(self, record: Record) -> Row:
        question = text_field(record, QUESTIONS).strip()
        solution = solution_of(record)
        if not boxed(solution) and HASHES not in solution:  # words, perhaps beside the answer
            solution = text_field(record, ["answer"], solution)
        form, _ = truth_of(solution)
        request = REQUESTS[form]
        prompt = f"Question: {question}\n{request}\nAnswer:\n"
        if self.chat:
            prompt = f"{question}\n\n{request}"
        kind = text_field(record, ("type", "subject"), "")
        return Row(question, Example(prompt, solution, kind=kind, fields=record))


def solution_of(record: Record) -> str:
    """The true solution in a row, without GSM8K's notes for a calculator."""
    text = text_field(record, ("solution", "answer", "completion"))
    return re.sub(r"<<[^<>\n]*>>", "", text).strip()


def truth_of(solution: str) -> tuple[str, str]:
    """The form and the final answer of a true solution. Raises ValueError if it has none."""
    for form in (HASHES, BOXED):
        truth = answer_in_form(solution, form)
        if truth:
            return form, truth
    if solution and "\n" not in solution:
        return BOXED, solution  # nothing but the answer
    raise ValueError(f"the solution has no final answer after {HASHES} or in {BOXED}")


def answer_in_form(text: str, form: str) -> str:
    """The answer of a text in exactly this form: in a box, or in its last line after one ####."""
    if form == BOXED:
        return boxed(text)
    answer = after_hashes(text)
    return answer if answer == text.partition(HASHES)[2].strip() else ""


def final_answer(text: str, form: str) -> str:
    """The answer of a text in the form that was asked for, else in the other one, or ""."""
    if form == HASHES:
        return after_hashes(text) or boxed(text)
    return boxed(text) or after_hashes(text)


def after_hashes(text: str) -> str:
    _, mark, rest = text.rpartition(HASHES)
    return rest.strip().partition("\n")[0].strip() if mark else ""


# everything up to the last box; MATH also has \fbox, and boxes around a number without braces
LAST_BOX = re.compile(r".*\\(?:boxed|fbox) ?(?:\{|(-?[0-9.,]*[0-9]))", re.DOTALL)


def boxed(text: str) -> str:
    r"""The content of the last `\boxed{...}`, or of `\boxed 2`; "" if it is never closed."""
    found = LAST_BOX.match(text)
    if found is None:
        return ""
    number = found[1]
    if number:
        return number
    rest = text[found.end() :]
    depth = 1
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:place].strip()
    return ""


INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = rf"(-? ?(?:{INTEGER}(?:\.[0-9]+|/[1-9][0-9]*)?|\.[0-9]+))"
WHOLE = re.compile(rf"{NUMBER}\.?")
# a number that is not a part of something else, such as 72 or 73, 72k, 72^2, 72 * 6
FIRST = re.compile(
    rf"[^0-9]*?{NUMBER}(?!\w|[.,]?[0-9]|\s+(?:or|and)?\s*[0-9]"
    r"|\s*(?:[-+*/^×·÷x]|\\(?:times|cdot|div))\s*[(0-9])"
)
NOISE = re.compile(r"\\[$%!,]|[$%]|\*\*|\{,\}")  # 50% is 50: published answers leave out the sign
FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")


def exact_value(text: str, form: str) -> Fraction | None:
    r"""The exact value of a text that is a number: 1,234, $5, 50%, -3/4, \frac{3}{4}.

    After #### words may stand around it, as in "48 + 24 = 72 clips in 2 months". The first number
    after the last = counts.
    """
    plain = NOISE.sub("", text.replace("−", "-"))
    plain = FRACTION.sub(r" \1/\2", plain).strip()
    number = FIRST.match(plain.rpartition("=")[2]) if form == HASHES else WHOLE.fullmatch(plain)
    return Fraction(re.sub("[ ,]", "", number[1])) if number else None


# worker processes with math-verify, which the system ends if a comparison takes too long
workers = WorkerProcesses(f"{__package__}.math_verify_worker", "same")


@lru_cache(maxsize=1 << 14)  # a group has few distinct answers
def same_formula(truth: str, answer: str) -> bool:
    """Whether math-verify finds two formulas equal, with little time and memory."""
    try:
        return bool(workers.call((truth, answer), PATIENCE_S))
    except RunFailed:  # a user's file has changed
        raise
    except (RuntimeError, EOFError, TimeoutError, ConnectionError):  # unreadable, or it ended
        return False
