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
solution is not copied into it. A completion without the tags has -1 in each of the three parts, as
published: where the student is so bad that its terms are below -1, leaving out the tags pays.

The student is run at the temperature at which the teacher is sampled (published: 0.7 for both). It
gets the teacher's very tokens, so that the two are compared token by token: the two models need the
same vocabulary, but not the same template.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from ..runtime.flags import ConfigError
from ..types import Example

if TYPE_CHECKING:
    from ..model.tokenizer import Tokenizer
    from ..runtime.frozen_model import FrozenModel
    from ..runtime.token_rewards import TokenBatch

A = (1.0, 0.01)  # of the mean and the minimum over the solution's tokens
B = (3.0, 0.03)  # of the mean and the maximum over the explanation's tokens
MISSING_TAGS = -1.0  # each part of a completion without tags
EXPLANATION, SOLUTION = "think", "solution"  # tags
HALF = float(np.log(0.5))
TEACH = "teach"  # the name of the task
SHIPPED, SHIPPED_STUDENT = "shipped", "student"


class Teaching:
    """Scores explanations by what a student makes of them. A task adds questions with solutions,
    which are in the `fields` of its examples.

    Reward parts beside the three above, which are measured and not paid:
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
    success = "solved"
    student_prompt: str  # what the student is asked: a format of {question}

    def __init__(self, student: str) -> None:
        """`student`: what --student names. Raises ConfigError if it is empty."""
        if not student:
            raise ConfigError(
                "--task teach needs --student: a run's folder, a model's folder or file, or "
                "ORG/NAME, the model that the explanations are for"
            )
        self.student = student_path(student)

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        """There is none: explanations are scored by their tokens."""
        raise TypeError("a text alone has no score, see score_tokens")

    def score_tokens(self, batch: "TokenBatch") -> dict[str, np.ndarray]:
        """Every part, `[P, G]` float64."""
        student = self._student(batch)
        inner = batch.spans(EXPLANATION).tolist()  # [P][G][2]
        outer = batch.spans(EXPLANATION, with_tags=True).tolist()
        texts, unaided = self._texts(student, batch, outer)
        prompts = [self._prompt(student, example) for example in batch.examples]
        logp, alone = (
            student.logp(student.completions(prompts, [[x.ids for x in group] for group in groups]))
            for groups in (texts, unaided)
        )
        teacher = batch.completions.sampler_logp
        assert teacher is not None
        shape = logp.shape[:2]
        parts = {name: np.full(shape, MISSING_TAGS) for name in ("likelihood", "kl", "match")}
        parts |= {name: np.zeros(shape) for name in ("solved", "unaided")}
        for p, g in np.ndindex(*shape):
            parts["unaided"][p, g] = found(alone[p, 0, unaided[p][0].solution])
            (a, b), start = inner[p][g], outer[p][g][0]
            if start < 0:
                continue
            solution = logp[p, g, texts[p][g].solution]
            parts["likelihood"][p, g] = likelihood(solution)
            parts["kl"][p, g] = kl(teacher[p, g, a:b], logp[p, g, a - start : b - start])
            parts["match"][p, g] = 0.0
            parts["solved"][p, g] = found(solution)
        return parts

    def _texts(
        self, student: "FrozenModel", batch: "TokenBatch", outer: Sequence[Sequence[Sequence[int]]]
    ) -> tuple["Texts", "Texts"]:
        """What the student reads after each question, `[P][G]`; and without explanation, `[P][1]`.

        Of a completion without tags, which is not scored, it reads the solution alone.
        """
        ids = batch.completions.completion_ids.tolist()
        nothing = student.tokenizer.encode(f"<{EXPLANATION}></{EXPLANATION}>")
        texts, unaided = Texts(), Texts()
        for p, example in enumerate(batch.examples):
            pieces = [ids[p][g][max(a, 0) : max(b, 0)] for g, (a, b) in enumerate(outer[p])]
            solution = example.fields["solution"]
            texts.append([Text.of(student.tokenizer, piece, solution) for piece in pieces])
            unaided.append([Text.of(student.tokenizer, nothing, solution)])
        return texts, unaided

    def _prompt(self, student: "FrozenModel", example: Example) -> list[int]:
        """The question by the student's chat template, if it has one, else as a plain line."""
        text = self.student_prompt.format(question=example.fields["question"])
        asked = Example(f"{text}\n", "")
        if student.tokenizer.chat:
            asked = Example(text, "", messages=({"role": "user", "content": text},))
        try:
            return student.encode_prompt(asked)
        except ValueError as error:
            raise ConfigError(f"--student {student.name}: {error}") from None

    def _student(self, batch: "TokenBatch") -> "FrozenModel":
        """The student. Raises ConfigError if its tokens are not the teacher's."""
        try:
            student = batch.model(self.student)
        except ConfigError as error:
            raise ConfigError(f"--student {error}") from None
        own, teachers = student.tokenizer, batch.tokenizer
        if own is not teachers and own.tokens != teachers.tokens:
            raise ConfigError(
                f"--student {self.student}: its tokenizer {own.name} has other tokens than "
                f"--tokenizer {teachers.name}; the KL term compares the two models token by "
                "token, so they need the same vocabulary"
            )
        return student


def student_path(student: str) -> str:
    """What --student names, a path for the shipped one: every process finds it without the task."""
    shipped = files("minigrpo.assets").joinpath(f"{SHIPPED_STUDENT}.safetensors")
    return str(shipped) if student == SHIPPED else student


def likelihood(solution: Tensor) -> float:
    """The likelihood term of `[n]` log-probs of the solution's tokens."""
    values = solution.double()
    return A[0] * float(values.mean()) + A[1] * float(values.min())


def kl(teacher: Tensor, student: Tensor) -> float:
    """The KL term of two times `[n]` log-probs of the explanation's tokens; 0 if there is none."""
    if not len(teacher):
        return 0.0
    ratio = teacher.double() - student.double()
    return -B[0] * float(ratio.mean()) - B[1] * float(ratio.max())


def found(solution: Tensor) -> float:
    """1.0 if each of `[n]` log-probs is above log 0.5, else 0.0."""
    return float((solution > HALF).all())


@dataclass(frozen=True)
class Text:
    """What the student reads after a question: an explanation in the teacher's very tokens, and
    the solution.
    """

    ids: Sequence[int]
    solution: slice  # of ids

    @staticmethod
    def of(tokenizer: "Tokenizer", explanation: Sequence[int], solution: str) -> "Text":
        """`explanation` has its tags; the solution gets its own."""
        parts = f"<{SOLUTION}>", solution, f"</{SOLUTION}>"
        before, inside, after = (tokenizer.encode(part) for part in parts)
        start = len(explanation) + len(before)
        ids = [*explanation, *before, *inside, *after]
        return Text(ids, slice(start, start + len(inside)))


Texts = list[list[Text]]
