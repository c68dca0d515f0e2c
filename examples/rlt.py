"""A teacher whose reward is what a student understands: RLT (Cetin et al., arXiv 2506.08388).

The teacher reads a question and its solution, and writes an explanation between <think> tags. A
frozen student reads the question and the explanation. The reward is the likelihood of the solution.

    likelihood = mean + 0.01 min over solution tokens of
                 log p_student(token | question, explanation)
    kl         = -3 mean - 0.03 max over explanation tokens of
                 log p_teacher(token | question, solution) - log p_student(token | question)
    match      = 0

`kl` keeps the explanation close to the student's own thoughts, so that the solution is not copied
into it. A completion without the tags gets -1 for each of the three, as published. If the student
is so bad that its terms are below -1, leaving out the tags pays.

The student runs at the teacher's temperature and reads the teacher's tokens. So both need the same
vocabulary, but not the same template.

Without `--data` the questions are additions: 483927+270486 has the solution 0754413, and the
explanation 111010, which are the carries from right to left. A small student cannot compute the
first digit in one pass. After the carries, each digit is a sum of three numbers in its own column.

    minigrpo train --config rlt
"""

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import NamedTuple

import numpy as np

from minigrpo.model.frozen_model import FrozenModel
from minigrpo.rng import stream
from minigrpo.task import TokenBatch
from minigrpo.tasks.base import Files, Generated, Rows, SourceTask, is_held_out
from minigrpo.tasks.math import solution_of
from minigrpo.tasks.rows import QUESTIONS, Record, Row, text_field
from minigrpo.text.encoding import encode_prompt, to_completions, token_texts
from minigrpo.types import ConfigError, Example

STUDENT = resources.files("minigrpo.assets") / "student.safetensors"
DIGITS = 6
PLACES = 10 ** np.arange(DIGITS)[::-1]  # place values of the digits
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

    Two rewards are metrics: `solved` is 1 if the student gives every token of the solution more
    than half of the probability, at the teacher's temperature, and `unaided` is the same without an
    explanation.
    """

    reward_weights: Mapping[str, float] = {
        "likelihood": 1,
        "kl": 1,
        "match": 1,
        "solved": 0,
        "unaided": 0,
    }
    token_rewards = tuple(reward_weights)
    success = "solved"

    def __init__(
        self, seed: int, data: Files = (), eval_data: Files = (), student: str = ""
    ) -> None:
        """`student` is a run, a model's folder or file, ORG/NAME, or "" for the shipped one."""
        self.seed = seed
        self.student = student or str(STUDENT)
        if not (data or eval_data):
            super().__init__(Generated(self._addition, f"additions of {DIGITS} digits"))
        elif student:
            super().__init__(Rows(seed, data, eval_data, parse_lesson))
        else:
            raise ConfigError("--data needs --task-args student=MODEL")

    def score_tokens(self, batch: TokenBatch) -> Mapping[str, np.ndarray]:
        """Every reward, `[P, G]` float64."""
        student: FrozenModel = batch.model(self.student)
        teacher_logp = batch.completions.sampler_logp
        assert teacher_logp is not None

        # 1. The student's log-probs of what it reads, [P, 1 + G, S].
        lessons = [self._lesson(student, batch, p) for p in range(len(batch.examples))]
        prompts = [lesson.prompt for lesson in lessons]
        texts = [lesson.texts for lesson in lessons]
        student_logp = student.logp(to_completions(prompts, texts), batch.temperature).double()

        # 2. The rewards of each completion.
        values = {name: np.zeros(teacher_logp.shape[:2]) for name in self.reward_weights}
        for p, lesson in enumerate(lessons):
            unaided, *aided = (
                student_logp[p, row, len(text) - lesson.solution_len : len(text)]
                for row, text in enumerate(lesson.texts)
            )
            # greedy decoding writes tokens that each have more than half of the probability
            values["unaided"][p] = (unaided.exp() > 0.5).all()
            for g, (shown, inside) in enumerate(lesson.spans):
                if not shown.stop:  # no explanation
                    for name in ("likelihood", "kl", "match"):
                        values[name][p, g] = -1
                    continue
                values["likelihood"][p, g] = aided[g].mean() + 0.01 * aided[g].min()
                values["solved"][p, g] = (aided[g].exp() > 0.5).all()
                own = student_logp[p, 1 + g, inside.start - shown.start : inside.stop - shown.start]
                ratio = teacher_logp[p, g, inside].double() - own
                if len(ratio):
                    values["kl"][p, g] = -3 * ratio.mean() - 0.03 * ratio.max()
        return values

    def _lesson(self, student: FrozenModel, batch: TokenBatch, p: int) -> "Lesson":
        """The lesson of prompt p. Raises ConfigError if the student has another vocabulary."""
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
            # the student may not know the last token, which ends the text
            if not tokenizer.decode(ids).startswith(text):
                raise ConfigError(f"--task-args student={self.student}: has another vocabulary")
            shown, inside = find_span(token_texts(tokenizer, ids))
            texts.append([*ids[shown], *ending])
            spans.append((shown, inside))
        return Lesson(prompt, texts, len(solution), spans)

    def _addition(self, number: int, split: str) -> Example:
        held_out = split == "held-out"
        rng = stream(self.seed, "additions", number, held_out)
        while True:
            first, second = rng.integers(10, size=(2, DIGITS))  # the digits of both numbers
            # some columns add up to 9, so that carries pass through
            second = np.where(rng.random(DIGITS) < 0.4, 9 - first, second)
            a, b = first @ PLACES, second @ PLACES
            question = f"{a:0{DIGITS}d}+{b:0{DIGITS}d}"
            if is_held_out(question) == held_out:
                break
        solution = f"{a + b:0{DIGITS + 1}d}"
        above = 10 * PLACES[::-1]  # place value of the carry out of each column
        carries = "".join(map(str, (a % above + b % above) // above))
        prompt = f"{question}\n<solution>{solution}</solution>\n"
        fields = {"students_prompt": f"{question}\n", "solution": solution}
        return Example(prompt, f"<think>{carries}</think>", number, fields=fields)


def parse_lesson(record: Record) -> Row:
    """The row of a line. Its answer is empty, because many explanations are right."""
    question = text_field(record, QUESTIONS)
    solution = solution_of(record)
    if not solution:
        raise ValueError("the solution is empty")
    prompt = TEACHERS_PROMPT.format(question=question, solution=solution)
    students_prompt = STUDENTS_PROMPT.format(question=question)
    fields = {**record, "students_prompt": students_prompt, "solution": solution}
    return Row(question, Example(prompt, fields=fields))


class Lesson(NamedTuple):
    """A prompt as the student reads it, with the explanations of its group."""

    prompt: Sequence[int]  # tokens
    # [1 + G], tokens after the prompt: an explanation, which the first text lacks, and the solution
    texts: Sequence[Sequence[int]]
    solution_len: int  # number of tokens of the solution, which end each text
    spans: Sequence[tuple[slice, slice]]  # [G], see `find_span`


def find_span(pieces: Sequence[str]) -> tuple[slice, slice]:
    """Find the tokens of an explanation by their texts; return it with and without its tags.

    It reaches from the first <think> to the next </think>; without them it is empty. A token with a
    part of a tag belongs to the tag, because a tokenizer may merge its end with what follows.

    >>> find_span(["<thi", "nk>a", "b", "c</think>", "."])
    (slice(0, 4, None), slice(2, 3, None))
    """
    match = re.search("<think>(.*?)</think>", "".join(pieces), re.DOTALL)
    if not match:
        return slice(0, 0), slice(0, 0)
    owner = [number for number, piece in enumerate(pieces) for _ in piece]  # character -> token
    shown = slice(owner[match.start()], owner[match.end() - 1] + 1)
    inside = slice(owner[match.start(1) - 1] + 1, owner[match.end(1)])
    return shown, inside
