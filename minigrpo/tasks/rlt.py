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
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..model.encoding import to_completions, token_texts
from ..runtime.rng import stream
from ..task import TokenBatch
from ..types import ConfigError, Example
from .base import Generated, SourceTask, is_held_out
from .data import QUESTIONS, Files, Row, Rows, text_of
from .math import solution_of

if TYPE_CHECKING:
    from ..model.frozen_model import FrozenModel

A = (1.0, 0.01)  # of the mean and the minimum over the solution's tokens
B = (3.0, 0.03)  # of the mean and the maximum over the explanation's tokens
MISSING_TAGS = -1.0  # each term of a completion without tags
HALF = float(np.log(0.5))
DIGITS = 6
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

Think between <think> and </think>, then write the solution between <solution> and </solution>."""


class RLT(SourceTask):
    """Scores explanations by what a student makes of them.

    Metrics beside the three reward functions above, with weight 0:
        solved: 1 if the student finds the solution with the explanation: each token of it has more
            than half of the probability, so that greedy decoding writes it; else 0.
        unaided: the same with an empty explanation.
    """

    parts: Mapping[str, float] = {
        "likelihood": 1.0,
        "kl": 1.0,
        "match": 1.0,
        "solved": 0.0,
        "unaided": 0.0,
    }
    token_parts = tuple(parts)
    success = "solved"

    def __init__(
        self, seed: int, data: Files = (), eval_data: Files = (), student: str = "shipped"
    ) -> None:
        """`student`: a run, a model's folder or file, ORG/NAME, or `shipped` for additions."""
        self.seed, self.student, self.student_prompt = seed, student, STUDENTS_PROMPT
        if data or eval_data:
            super().__init__(Rows(seed, data, eval_data, parse_lesson))
            if student == "shipped":
                raise ConfigError("--task rlt --data needs --task-args student=MODEL")
            return
        super().__init__(Generated(self._addition, f"additions of {DIGITS} digits"))
        self.student_prompt, self.speculate = "{question}", True
        if student == "shipped":
            self.student = str(files("minigrpo.assets") / "student.safetensors")

    def score_tokens(self, batch: TokenBatch) -> Mapping[str, np.ndarray]:
        """Every part, `[P, G]` float64."""
        student = batch.model(self.student)
        encode, teacher = student.tokenizer.encode, batch.completions.sampler_logp
        assert teacher is not None
        shown, inside = self._spans(student, batch)
        prompts, solutions, rows = [], [], []
        for example, ids, tagged in zip(
            batch.examples, batch.completions.completion_ids, shown, strict=True
        ):
            prompts.append(self._prompt(student, example))
            solutions.append(encode(example.fields["solution"]))
            read = [row[kept].tolist() for row, kept in zip(ids, tagged, strict=True)]
            read.append(encode("<think></think>"))
            rows.append([[*row, *encode("<solution>"), *solutions[-1]] for row in read])
        completions = to_completions(prompts, rows)
        logp = student.logp(completions, batch.temperature).double()  # [P, G + 1, S]
        values = {name: np.zeros(teacher.shape[:2]) for name in self.parts}
        for p, group in enumerate(rows):
            ends = [(len(row) - len(solutions[p]), len(row)) for row in group]
            *aided, alone = [logp[p, g, a:b] for g, (a, b) in enumerate(ends)]
            values["unaided"][p] = (alone > HALF).all()
            for g, solution in enumerate(aided):
                if not shown[p, g].any():
                    for name in ("likelihood", "kl", "match"):
                        values[name][p, g] = MISSING_TAGS
                    continue
                values["solved"][p, g] = (solution > HALF).all()
                values["likelihood"][p, g] = A[0] * solution.mean() + A[1] * solution.min()
                own = inside[p, g][shown[p, g]]
                ratio = teacher[p, g][inside[p, g]].double() - logp[p, g, : len(own)][own]
                if len(ratio):
                    values["kl"][p, g] = -B[0] * ratio.mean() - B[1] * ratio.max()
        return values

    def _spans(self, student: "FrozenModel", batch: TokenBatch) -> Tensor:
        """`find_span` of all completions, `[2, P, G, S]`."""
        tokenizer, mask = student.tokenizer, batch.completions.completion_mask
        spans = torch.zeros(2, *mask.shape, dtype=torch.bool)
        for p, g in np.ndindex(*mask.shape[:2]):
            ids = batch.completions.completion_ids[p, g][mask[p, g]].tolist()
            # it may not know the last one, which ends the text
            if not tokenizer.decode(ids).startswith(batch.texts[p][g]):
                raise ConfigError(
                    f"--task-args student={self.student}: its vocabulary differs from the model's"
                )
            spans[:, p, g, : len(ids)] = find_span(token_texts(tokenizer, ids))
        return spans

    def _prompt(self, student: "FrozenModel", example: Example) -> list[int]:
        """The question by the student's chat template, if it has one, else as a plain line."""
        text = self.student_prompt.format(question=example.fields["question"])
        if not student.tokenizer.chat:
            return student.encode_prompt(Example(f"{text}\n"))
        return student.encode_prompt(Example(text, messages=({"role": "user", "content": text},)))

    def _addition(self, number: int, held_out: bool) -> Example:
        rng = stream(self.seed, "additions", number, held_out)
        while True:
            x, y = rng.integers(10, size=(2, DIGITS))
            y = np.where(rng.random(DIGITS) < CHAINED, 9 - x, y)
            a, b = ("".join(map(str, digits)) for digits in (x, y))
            question = f"{a}+{b}"
            if is_held_out(question) == held_out:
                break
        solution = f"{int(a) + int(b):0{DIGITS + 1}d}"
        sums = [int(a[-n:]) + int(b[-n:]) for n in range(1, DIGITS + 1)]  # of the last n columns
        carries = "".join(str(total // 10**n) for n, total in enumerate(sums, 1))
        prompt = f"{question}\n<solution>{solution}</solution>\n"
        fields = {"question": question, "solution": solution}
        return Example(prompt, f"<think>{carries}</think>", number, fields=fields)


def parse_lesson(record: dict[str, Any]) -> Row:
    """The row of a line. Its answer is empty, because no explanation is the true one."""
    question, solution = text_of(record, QUESTIONS), solution_of(record)
    prompt = TEACHERS_PROMPT.format(question=question, solution=solution)
    fields = {**record, "question": question, "solution": solution}
    return Row(question, Example(prompt, fields=fields))


def find_span(pieces: Sequence[str]) -> Tensor:
    """Which of n tokens are an explanation, `[2, n]`: with its tags, and between them.

    It reaches from the first <think> to the next </think>; without these nothing is one. Tags are
    looked for in the texts of the tokens, because a tokenizer may merge a tag's last character with
    the text that follows. A token that holds part of a tag belongs to the tag.

    >>> find_span(["<thi", "nk>a", "b", "c</think>", "."]).int().tolist()
    [[1, 1, 1, 1, 0], [0, 0, 1, 0, 0]]
    """
    found = EXPLANATION.search("".join(pieces))
    if not found:
        return torch.zeros(2, len(pieces), dtype=torch.bool)
    sizes = torch.tensor([len(piece) for piece in pieces])
    ends = sizes.cumsum(0)
    starts = ends - sizes
    shown = (ends > found.start()) & (starts < found.end())
    return torch.stack([shown, (starts >= found.start(1)) & (ends <= found.end(1))])
