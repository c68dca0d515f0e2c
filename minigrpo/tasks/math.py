r"""The math task: word problems with a final answer that can be checked.

    GSM8K's lines   {"question": ..., "answer": "...\n#### 72"}
    MATH's lines    {"problem": ..., "solution": "... \boxed{72} ...", "type": ..., "level": ...}

`--data` takes either file as it is published, or both. Without it the questions are seeded sums
(sums.py). A prompt asks for the answer in the form that the data has. `--system` makes it a chat: a
model's chat template then writes the prompt. math_answers.py finds the answer in a completion, and
math_judge.py compares it with the true one.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..runtime.text import as_asked, has_lone_surrogate, short
from ..types import Example
from .data_lines import data_lines, decode_line, parse_record
from .files import (
    Listener,
    ShuffledExamples,
    SilentListener,
    SkippedRecords,
    open_data,
    readable,
    test_files,
)
from .math_answers import HASHES, after_hashes, boxed, final_answer, in_tags, number, stated
from .math_judge import Judge, Numbers, make_judge
from .scoring import BatchScored
from .splits import PROMPTS_PER_HELD_OUT, fingerprint, is_held_out_prompt
from .sums import Sums
from .task_request import TaskRequest

BOXED = r"\boxed{}"
# settings of a run on sums, from the shipped model
SUMS = {"max_new_tokens": 32, "learning_rate": 1.5e-4, "max_steps": 200, "eval_every": 50}
# settings of a run on word problems, from a published model
PROBLEMS = {"max_new_tokens": 512, "learning_rate": 1e-6, "speculative_decoding": False}
KEYS = ("question", "answer"), ("problem", "solution")
LINE = "must be an object with question and answer, or problem and solution"
CALCULATION = re.compile(r"<<[^<>\n]*>>")  # GSM8K's notes for a calculator, inside the solutions


class Form(NamedTuple):
    """A way to give the final answer, which a prompt asks for."""

    request: str
    is_met: Callable[[str], bool]  # whether a completion gives its answer so


def _ends_with_hashes(text: str) -> bool:
    """Whether a text has one `####`, with one line after it."""
    _, *after = text.split(HASHES)
    return len(after) == 1 and len(after[0].strip().splitlines()) == 1


def _is_boxed(text: str) -> bool:
    return boxed(text) is not None


ASKED_FOR: dict[str, Form] = {  # by their names in math_answers.FORMS
    HASHES: Form(
        "Think step by step. End with a line that has #### and then the result as a number.",
        _ends_with_hashes,
    ),
    BOXED: Form(
        r"Think step by step. Put the final answer, and nothing else, in \boxed{}.", _is_boxed
    ),
}


class Math(BatchScored):
    """Scores completions by their final answer.

    Reward parts, each 1 or 0:
        correct: the final answer is the true one.
        format: it is given in the form that the prompt asks for.
    """

    parts: Mapping[str, float] = {"correct": 1.0, "format": 0.1}
    success = "correct"

    def __init__(self, source: "Sums | MathFiles", judge: Judge) -> None:
        self.sources, self.judge = [source], judge
        self.about = f"{source.about}; answers are compared by {judge.name}"
        self.judged_by = judge.name
        self.num_held_out = source.num_held_out

    def train(self, number: int) -> Example:
        return self.sources[0].train(number)

    def held_out(self, number: int) -> Example:
        return self.sources[0].held_out(number)

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        rows = [
            self._score(example.answer, text) for example, text in zip(examples, texts, strict=True)
        ]
        correct, well_formed = np.array(rows, dtype=np.float32).reshape(-1, 2).T
        return {"correct": correct, "format": well_formed}

    def _score(self, solution: str, text: str) -> tuple[bool, bool]:
        form, truth = truth_of(solution)
        answer = final_answer(text, form)
        if form == HASHES and answer and number(truth) and not number(answer):
            # a line like "#### The answer is 72 clips."
            answer = boxed(answer) or in_tags(answer) or stated(answer)
        correct = bool(answer) and self.judge.same(truth, answer or "")
        return correct, ASKED_FOR[form].is_met(text)


@lru_cache(maxsize=1 << 12)
def truth_of(solution: str) -> tuple[str, str]:
    """The form of a true solution, a key of `ASKED_FOR`, and its final answer.

    Raises ValueError if it has none.
    """
    for form, find in ((HASHES, after_hashes), (BOXED, boxed)):
        if (truth := find(solution)) is not None and ASKED_FOR[form].is_met(solution):
            return form, truth
    raise ValueError(f"the solution has no final answer after {HASHES} or in {BOXED}")


# --- files ----------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A line of a file."""

    example: Example  # not numbered yet
    question: str
    path: Path
    line: int


class MathFiles(ShuffledExamples):
    """The problems of GSM8K's and MATH's files; of several, each epoch visits all.

    Of several files, those that are named as tests (test.jsonl, gsm8k-test.jsonl) are held out, and
    the others are trained on. Otherwise one question in ten is held out, chosen by its hash.
    """

    def __init__(
        self, paths: Sequence[Path], seed: int, *, chat: bool, listener: Listener | None = None
    ) -> None:
        """
        Args:
            chat: whether prompts are messages of a chat, rather than plain text.
            listener: receives skipped lines, and how many questions were in both kinds of files.

        Raises:
            ValueError: in one line, for a file that cannot be read, or a split without problems.
        """
        listener = listener or SilentListener()
        self.problems = [problem for path in paths for problem in read(path, chat, listener)]
        tests = test_files(paths)
        if tests:
            self.about = f"{', '.join(map(str, tests))} is held out"
            held_out = np.array([problem.path in tests for problem in self.problems], dtype=bool)
        else:
            self.about = f"one question in {PROMPTS_PER_HELD_OUT} is held out"
            asked = [as_asked(problem.question) for problem in self.problems]
            held_out = np.array([is_held_out_prompt(text) for text in asked], dtype=bool)
        hashes = np.array(
            [fingerprint(as_asked(p.question)) for p in self.problems], dtype=np.uint64
        )
        in_both = ~held_out & np.isin(hashes, hashes[held_out])
        if in_both.any():
            listener.warn(
                f"{', '.join(map(str, tests))}: {in_both.sum()} of its questions are in the "
                "training file too, and are left out of training"
            )
        keys, training = np.arange(len(self.problems)), ~held_out & ~in_both
        named = Path(",".join(map(str, paths)))
        hint = "" if self.problems else f"; a line {LINE}; --task prompts reads prompts and answers"
        super().__init__(
            named, seed, keys[training], keys[held_out], hashes[held_out], hint, self.about
        )

    def example(self, key: int, index: int) -> Example:
        """Return problem `key`."""
        example = self.problems[key].example
        return replace(example, index=index, fields={**example.fields})  # which a reward may change

    def longest(self) -> Iterator[tuple[str, Example]]:
        """Yield all examples, the longest question first, each with its file and line."""
        for problem in sorted(self.problems, key=lambda p: -len(p.question.encode())):
            yield f"--data {problem.path}, line {problem.line}", problem.example


def read(path: Path, chat: bool, listener: Listener) -> Iterator[Problem]:
    """Yield the problems of a file. Lines that are none are skipped, and the listener told."""
    skipped, line = SkippedRecords(path, "line"), 0
    with readable(path), open_data(path) as file:
        for line, _, raw in data_lines(file):
            try:
                example, question = parse_problem(decode_line(raw), chat)
            except ValueError as error:
                skipped.add(line, error)
                continue
            yield Problem(example, question, path, line)
    skipped.report(line, listener)


def parse_problem(text: str, chat: bool) -> tuple[Example, str]:
    """The example and the question of a line. Raises ValueError that says what is wrong with it."""
    record = parse_record(text, LINE)
    keys = next((keys for keys in KEYS if set(keys) <= record.keys()), None)
    if keys is None:
        raise ValueError(LINE)
    for key in keys:
        if not isinstance(record[key], str) or has_lone_surrogate(record[key]):
            raise ValueError(f"{key} must be text, got {short(record[key])}")
    question, solution = (record[key].strip() for key in keys)
    if not question:
        raise ValueError(f"{keys[0]} is empty")
    solution = CALCULATION.sub("", solution)
    form, _ = truth_of(solution)
    prompt = prompt_of(question, form, chat=chat)
    kind = str(record.get("type") or record.get("subject") or "")
    if has_lone_surrogate(kind):
        raise ValueError("the type has half of a surrogate pair, which is no character")
    return Example(prompt, solution, kind=kind, fields=record), question


def prompt_of(question: str, form: str, *, chat: bool) -> str:
    """What is asked: a user's message of a chat, or plain text that a base model continues."""
    request = ASKED_FOR[form].request
    if chat:
        return f"{question}\n\n{request}"
    return f"Question: {question}\n{request}\nAnswer:\n"


def sums(request: TaskRequest) -> Math:
    """The task on seeded sums. Their answers are numbers, so they need no math-verify."""
    return Math(Sums(request.seed), Numbers())


def of_files(request: TaskRequest) -> Math:
    """The task on the files of --data."""
    listener = request.listener
    files = MathFiles(request.paths, request.seed, chat=request.chat, listener=listener)
    judge = make_judge()
    formulas = sum(number(truth_of(p.example.answer)[1]) is None for p in files.problems)
    if formulas and isinstance(judge, Numbers):
        listener.warn(
            f"--data {request.data}: {formulas} of {len(files.problems)} answers are no numbers; "
            "without math-verify (pip install 'minigrpo[math]') only the same spelling is right"
        )
    return Math(files, judge)
