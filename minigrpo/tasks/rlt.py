"""A teacher that is paid by what a student understands: RLT (Cetin et al., arXiv 2506.08388).

The teacher reads a question and its solution, and writes an explanation between <think> tags. A
frozen student reads the question and the explanation, and the reward is how likely it finds the
solution. So the reward is dense: the teacher need not find the solution by itself.

    likelihood = A . [mean, min] over solution tokens of
                 log p_student(token | question, explanation)
    kl         = -B . [mean, max] over explanation tokens of
                 log p_teacher(token | question, solution) - log p_student(token | question)
    match      = 0

`kl` keeps the explanation something that the student could have thought itself, so that the
solution is not copied into it. A completion without the tags has -1 in each of the three, as
published: where the student is so bad that its terms are below -1, leaving out the tags pays.

The student is run at the temperature at which the teacher is sampled, and gets the teacher's very
tokens. So the two need the same vocabulary, but not the same template.

`--data` has lines with a question and a solution, such as GSM8K's. Without it, the questions are
additions: 483927+270486 has the solution 0754413, and the explanation 111010, the carries out of
the columns from right to left. A small student cannot compute the first digit of the solution in
one pass. With the carries before it, each digit is a sum of three numbers in its own column.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..model.encoding import to_completions, token_texts
from ..runtime.rng import stream
from ..task import TokenBatch
from ..types import ConfigError, Example
from .base import Generated, SourceTask, asset, is_held_out
from .data import QUESTIONS, Files, Row, Rows, text_of
from .math import solution_of

A_MEAN, A_MIN = 1.0, 0.01  # over the solution's tokens
B_MEAN, B_MAX = 3.0, 0.03  # over the explanation's tokens
MISSING_TAGS = -1.0  # each term of a completion without tags
DIGITS = 6
PLACES = 10 ** np.arange(DIGITS)[::-1]  # what a digit is worth
CHAINED = 0.4  # share of the columns whose digits are made to add up to 9: carries pass through
EXPLANATION = re.compile("<think>(.*?)</think>", re.DOTALL)
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

    Metrics beside the three reward functions above, with weight 0:
        solved: 1 if the student finds the solution with the explanation: each token of it has more
            than half of the probability, so that greedy decoding writes it; else 0.
        unaided: the same with an empty explanation.
    """

    parts: Mapping[str, float] = {"likelihood": 1, "kl": 1, "match": 1, "solved": 0, "unaided": 0}
    token_parts = tuple(parts)
    success = "solved"

    def __init__(
        self, seed: int, data: Files = (), eval_data: Files = (), student: str = ""
    ) -> None:
        """`student`: a run, a model's folder or file, or ORG/NAME; "": the one of additions."""
        self.seed, self.student = seed, student or str(asset("student"))
        self.speculate = not (data or eval_data)
        if not (self.speculate or student):
            raise ConfigError("--task rlt --data needs --task-args student=MODEL")
        made = Generated(self._addition, f"additions of {DIGITS} digits")
        super().__init__(made if self.speculate else Rows(seed, data, eval_data, parse_lesson))

    def score_tokens(self, batch: TokenBatch) -> Mapping[str, np.ndarray]:
        """Every part, `[P, G]` float64."""
        student, sampled = batch.model(self.student), batch.completions
        encode, teacher = student.tokenizer.encode, sampled.sampler_logp
        assert teacher is not None
        prompts, solutions, spans, rows = [], [], {}, []
        for p, example in enumerate(batch.examples):
            # a message, if the student has a chat template
            asked = Example(example.fields["students_prompt"], tools=())
            prompts.append(student.encode_prompt(asked))
            solutions.append(encode(example.fields["solution"]))
            read = [encode("<think></think>")]
            for g, text in enumerate(batch.texts[p]):
                ids = sampled.completion_ids[p, g][sampled.completion_mask[p, g]].tolist()
                # the student may not know the last one, which ends the text
                if not student.tokenizer.decode(ids).startswith(text):
                    said = "its vocabulary differs from the model's"
                    raise ConfigError(f"--task-args student={self.student}: {said}")
                spans[p, g] = shown, _ = find_span(token_texts(student.tokenizer, ids))
                read.append(ids[shown])
            rows.append([[*ids, *encode("<solution>"), *solutions[p]] for ids in read])
        # [P, 1 + G, S]: without an explanation, and with each
        logp = student.logp(to_completions(prompts, rows), batch.temperature).double()
        values = {name: np.zeros(teacher.shape[:2]) for name in self.parts}
        for (p, g), (shown, inside) in spans.items():
            alone, aided = (
                logp[p, row, : len(rows[p][row])][-len(solutions[p]) :] for row in (0, 1 + g)
            )
            values["unaided"][p, g] = (alone.exp() > 0.5).all()
            if shown.start == shown.stop:
                for name in ("likelihood", "kl", "match"):
                    values[name][p, g] = MISSING_TAGS
                continue
            values["solved"][p, g] = (aided.exp() > 0.5).all()
            values["likelihood"][p, g] = A_MEAN * aided.mean() + A_MIN * aided.min()
            own = logp[p, 1 + g, inside.start - shown.start : inside.stop - shown.start]
            ratio = teacher[p, g, inside].double() - own
            if len(ratio):
                values["kl"][p, g] = -B_MEAN * ratio.mean() - B_MAX * ratio.max()
        return values

    def _addition(self, number: int, held_out: bool) -> Example:
        rng = stream(self.seed, "additions", number, held_out)
        while True:
            x, y = rng.integers(10, size=(2, DIGITS))
            y = np.where(rng.random(DIGITS) < CHAINED, 9 - x, y)
            a, b = x @ PLACES, y @ PLACES
            question = f"{a:0{DIGITS}d}+{b:0{DIGITS}d}"
            if is_held_out(question) == held_out:
                break
        solution = f"{a + b:0{DIGITS + 1}d}"
        above = 10 * PLACES[::-1]  # what a carry out of each column is worth
        carries = "".join(map(str, (a % above + b % above) // above))
        prompt = f"{question}\n<solution>{solution}</solution>\n"
        fields = {"students_prompt": f"{question}\n", "solution": solution}
        return Example(prompt, f"<think>{carries}</think>", number, fields=fields)


def parse_lesson(record: dict[str, Any]) -> Row:
    """The row of a line. Its answer is empty, because no explanation is the true one."""
    question, solution = text_of(record, QUESTIONS), solution_of(record)
    prompt = TEACHERS_PROMPT.format(question=question, solution=solution)
    asked = STUDENTS_PROMPT.format(question=question)
    fields = {**record, "students_prompt": asked, "solution": solution}
    return Row(question, Example(prompt, fields=fields))


def find_span(pieces: Sequence[str]) -> tuple[slice, slice]:
    """Which tokens are an explanation: with its tags, and between them.

    It reaches from the first <think> to the next </think>; without these nothing is one. Tags are
    looked for in the texts of the tokens, because a tokenizer may merge a tag's last character with
    the text that follows. A token that holds part of a tag belongs to the tag.

    >>> find_span(["<thi", "nk>a", "b", "c</think>", "."])
    (slice(0, 4, None), slice(2, 3, None))
    """
    found = EXPLANATION.search("".join(pieces))
    if not found:
        return slice(0, 0), slice(0, 0)
    owner = [number for number, piece in enumerate(pieces) for _ in piece]  # of each character
    shown = slice(owner[found.start()], owner[found.end() - 1] + 1)
    return shown, slice(owner[found.start(1) - 1] + 1, owner[found.end(1)])
