"""A teacher that is paid by what a student understands: RLT (Cetin et al., arXiv 2506.08388).

The teacher reads a question and its solution, and writes an explanation between <think> tags. A
frozen student reads question and explanation, and the reward is how likely it finds the solution.

    likelihood = mean + 0.01 min over solution tokens of
                 log p_student(token | question, explanation)
    kl         = -3 mean - 0.03 max over explanation tokens of
                 log p_teacher(token | question, solution) - log p_student(token | question)
    match      = 0

`kl` keeps the explanation something that the student could have thought itself, so that the
solution is not copied into it. A completion without the tags has -1 in each of the three, as
published: where the student is so bad that its terms are below -1, leaving out the tags pays.

The student is run at the teacher's temperature and gets its very tokens: the two need the same
vocabulary, but not the same template.

Without `--data` the questions are additions: 483927+270486 has the solution 0754413, and the
explanation 111010, the carries from right to left. A small student cannot compute the first digit
in one pass. After the carries, each digit is a sum of three numbers in its own column.

    minigrpo train --config rlt
"""

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import NamedTuple

import numpy as np

from minigrpo.model.encoding import encode_prompt, to_completions, token_texts
from minigrpo.model.frozen_model import FrozenModel
from minigrpo.runtime.rng import stream
from minigrpo.task import TokenBatch
from minigrpo.tasks.base import Generated, SourceTask, is_held_out
from minigrpo.tasks.data import QUESTIONS, Files, Record, Row, Rows, text_of
from minigrpo.tasks.math import solution_of
from minigrpo.types import ConfigError, Example

STUDENT = resources.files("minigrpo.assets") / "student.safetensors"
DIGITS = 6
PLACES = 10 ** np.arange(DIGITS)[::-1]  # what a digit is worth
TEACHERS_PROMPT = """\
{question}

Solution:
{solution}

Explain to a student, who knows only the question, how to get to the solution. Write the \
explanation between <think> and </think>.
"""
STUDENTS_PROMPT = """\
{question}

Think between <think> and </think>, then write the solution between <solution> and </solution>.
"""


class RLT(SourceTask):
    """Scores explanations by what a student makes of them.

    Metrics: `solved`, 1 if its greedy decoding writes the solution, and `unaided`, without them.
    """

    parts: Mapping[str, float] = {"likelihood": 1, "kl": 1, "match": 1, "solved": 0, "unaided": 0}
    token_parts = tuple(parts)
    success = "solved"

    def __init__(
        self, seed: int, data: Files = (), eval_data: Files = (), student: str = ""
    ) -> None:
        """`student`: a run, a model's folder or file, or ORG/NAME; "": the one of additions."""
        self.seed = seed
        self.student = student or str(STUDENT)
        made = Generated(self._addition, f"additions of {DIGITS} digits")
        super().__init__(Rows(seed, data, eval_data, parse_lesson) if data or eval_data else made)
        if self.source is not made and not student:
            raise ConfigError("--data needs --task-args student=MODEL")

    def score_tokens(self, batch: TokenBatch) -> Mapping[str, np.ndarray]:
        """Every part, `[P, G]` float64."""
        student: FrozenModel = batch.model(self.student)
        teacher_logp = batch.completions.sampler_logp
        assert teacher_logp is not None

        # 1. What the student reads, and its log-probs, [P, 1 + G, S].
        lessons = [self._lesson(student, batch, p) for p in range(len(batch.examples))]
        prompts = [lesson.prompt for lesson in lessons]
        texts = [lesson.texts for lesson in lessons]
        student_logp = student.logp(to_completions(prompts, texts), batch.temperature).double()

        # 2. The parts of each completion.
        parts = {name: np.zeros(teacher_logp.shape[:2]) for name in self.parts}
        for p, lesson in enumerate(lessons):
            unaided, *aided = (
                student_logp[p, row, len(text) - lesson.solution_len : len(text)]
                for row, text in enumerate(lesson.texts)
            )
            # greedy decoding writes tokens that each have more than half of the probability
            parts["unaided"][p] = (unaided.exp() > 0.5).all()
            for g, (shown, inside) in enumerate(lesson.spans):
                if not shown.stop:  # no explanation
                    for name in ("likelihood", "kl", "match"):
                        parts[name][p, g] = -1
                    continue
                parts["likelihood"][p, g] = aided[g].mean() + 0.01 * aided[g].min()
                parts["solved"][p, g] = (aided[g].exp() > 0.5).all()
                own = student_logp[p, 1 + g, inside.start - shown.start : inside.stop - shown.start]
                ratio = teacher_logp[p, g, inside].double() - own
                if len(ratio):
                    parts["kl"][p, g] = -3 * ratio.mean() - 0.03 * ratio.max()
        return parts

    def _lesson(self, student: FrozenModel, batch: TokenBatch, p: int) -> "Lesson":
        """What the student reads of prompt p. Raises ConfigError for another vocabulary."""
        tokenizer = student.tokenizer
        fields = batch.examples[p].fields
        prompt = encode_prompt(tokenizer, Example(fields["students_prompt"], tools=()))
        solution = tokenizer.encode(fields["solution"])
        ending = [*tokenizer.encode("<solution>"), *solution]
        texts = [[*tokenizer.encode("<think></think>"), *ending]]
        spans = []
        for g, text in enumerate(batch.texts[p]):
            is_sampled = batch.completions.completion_mask[p, g]
            ids = batch.completions.completion_ids[p, g][is_sampled].tolist()
            # the student may not know the last one, which ends the text
            if not tokenizer.decode(ids).startswith(text):
                raise ConfigError(f"--task-args student={self.student}: has another vocabulary")
            shown, inside = find_span(token_texts(tokenizer, ids))
            texts.append([*ids[shown], *ending])
            spans.append((shown, inside))
        return Lesson(prompt, texts, len(solution), spans)

    def _addition(self, number: int, held_out: bool) -> Example:
        rng = stream(self.seed, "additions", number, held_out)
        while True:
            first, second = rng.integers(10, size=(2, DIGITS))  # the digits of both numbers
            # make some columns add up to 9: carries pass through
            second = np.where(rng.random(DIGITS) < 0.4, 9 - first, second)
            a, b = first @ PLACES, second @ PLACES
            question = f"{a:0{DIGITS}d}+{b:0{DIGITS}d}"
            if is_held_out(question) == held_out:
                break
        solution = f"{a + b:0{DIGITS + 1}d}"
        above = 10 * PLACES[::-1]  # what a carry out of each column is worth
        carries = "".join(map(str, (a % above + b % above) // above))
        prompt = f"{question}\n<solution>{solution}</solution>\n"
        fields = {"students_prompt": f"{question}\n", "solution": solution}
        return Example(prompt, f"<think>{carries}</think>", number, fields=fields)


def parse_lesson(record: Record) -> Row:
    """The row of a line. Its answer is empty, because no explanation is the true one."""
    question = text_of(record, QUESTIONS)
    solution = solution_of(record)
    if not solution:  # the explanation itself would be taken for it
        raise ValueError("the solution is empty")
    prompt = TEACHERS_PROMPT.format(question=question, solution=solution)
    students_prompt = STUDENTS_PROMPT.format(question=question)
    fields = {**record, "students_prompt": students_prompt, "solution": solution}
    return Row(question, Example(prompt, fields=fields))


class Lesson(NamedTuple):
    """A prompt as the student reads it, with the explanations of its group."""

    prompt: Sequence[int]  # tokens
    # [1 + G], the tokens after it: no explanation, or that of a completion, then the solution
    texts: Sequence[Sequence[int]]
    solution_len: int  # tokens of the solution, which end each text
    spans: Sequence[tuple[slice, slice]]  # [G], see `find_span`


def find_span(pieces: Sequence[str]) -> tuple[slice, slice]:
    """Which tokens, given by their texts, are an explanation: with its tags, and inside them.

    It reaches from the first <think> to the next </think>; without these nothing is one. A token
    that holds part of a tag belongs to the tag: a tokenizer may merge its end with what follows.

    >>> find_span(["<thi", "nk>a", "b", "c</think>", "."])
    (slice(0, 4, None), slice(2, 3, None))
    """
    match = re.search("<think>(.*?)</think>", "".join(pieces), re.DOTALL)
    if not match:
        return slice(0, 0), slice(0, 0)
    owner = [number for number, piece in enumerate(pieces) for _ in piece]  # of each character
    shown = slice(owner[match.start()], owner[match.end() - 1] + 1)
    inside = slice(owner[match.start(1) - 1] + 1, owner[match.end(1)])
    return shown, inside
