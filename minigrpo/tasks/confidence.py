"""--confidence: ask any task's questions, and pay for knowing how sure an answer is.

This is RLCR (arXiv 2507.16806). A completion states its confidence q, a number from 0 to 1. With
c = 1 for a right answer and 0 for a wrong one,

    reward = 0.5 format + 0.5 c + 0.5 (1 - (c - q)^2),    all 0 where the form does not match.

The last term is 1 minus the Brier score. In expectation it is largest for q = P(c = 1): stating the
true probability pays best. The answer alone, without the tags, is scored by the task itself.

Prompts made of messages ask for the published form, and plain prompts, which stay as they are, are
completed with the answer and its confidence:

    <think>...</think> <answer>8</answer> <analysis>...</analysis> <confidence>0.5</confidence>
    8<confidence>0.5</confidence>
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..runtime.calibration import calibration, error_by_chance
from ..runtime.flags import ConfigError
from ..runtime.measures import success_of
from ..runtime.reward_functions import RewardFunction
from ..runtime.rng import stream
from ..runtime.task_sources import task_sources
from ..types import Example, Task

WEIGHTS = {"format": 0.5, "correct": 0.5, "brier": 0.5, "confidence": 0.0}
PREFIX = "answer_"  # of the task's own parts that have one of these names
REQUEST = (
    "\n\nAnswer in exactly this form: <think>your reasoning</think> <answer>the final answer and "
    "nothing else</answer> <analysis>what could be wrong with the answer</analysis> <confidence>"
    "the probability that the answer is right, a number from 0 to 1 such as 0.7</confidence>"
)
TAGS = "think|answer|analysis|confidence"


def _text_without(tags: str) -> str:
    """A pattern for any text in which none of these tags begins or ends.

    What it can match is the same however it backtracks, so the time grows with the text only. The
    group is not possessive, because Python before 3.11.5 matches such groups wrongly.
    """
    return rf"[^<]*+(?:<(?!/?(?:{tags})>)[^<]*+)*"


_TEXT = _text_without(TAGS)
# <think> is optional, because some chat templates write it at the end of the prompt
CHAT_FORM = re.compile(
    rf"\s*+(?:<think>)?{_TEXT}</think>\s*+<answer>(?P<answer>{_TEXT})</answer>\s*+"
    rf"<analysis>{_TEXT}</analysis>\s*+<confidence>(?P<confidence>{_TEXT})</confidence>\s*"
)
PLAIN_FORM = re.compile(
    rf"(?P<answer>{_text_without('confidence')})<confidence>(?P<confidence>{_TEXT})</confidence>\s*"
)
NUMBER = re.compile(r"\s*([0-9]++(?:\.[0-9]*+)?|\.[0-9]++)\s*")  # no sign, exponent, nan, percent


class Stated(NamedTuple):
    """What a completion states."""

    answer: str  # without white space around it; in plain form only at its end
    confidence: float  # in [0, 1]
    matches: bool = True  # False stands for a completion in another form


def parse(text: str, *, chat: bool) -> Stated | None:
    """Return what a completion states, or None if its form does not match.

    Each tag occurs once, in the order above, with nothing but white space between and after them.
    The confidence is a plain decimal number from 0 to 1, such as 0.75, .5 or 1.

    Args:
        chat: whether the published form is expected, with reasoning and analysis.
    """
    found = (CHAT_FORM if chat else PLAIN_FORM).fullmatch(text)
    number = found and NUMBER.fullmatch(found["confidence"])
    if not found or not number:
        return None
    confidence = float(number[1])  # alone, because `float` knows less white space than a pattern
    answer = found["answer"].strip() if chat else found["answer"].rstrip()
    return Stated(answer, confidence) if confidence <= 1 else None


def write(answer: str, confidence: float, *, chat: bool) -> str:
    """Return a completion that `parse` reads; in chat form without reasoning and analysis."""
    stated = f"<confidence>{confidence:.1f}</confidence>"
    if not chat:
        return answer + stated
    return f"<think></think> <answer>{answer}</answer> <analysis></analysis> {stated}"


@dataclass(frozen=True)
class AskedWithConfidence(Example):
    """An example of which a completion must state its confidence."""

    # what the task itself, or the user's own task in a file, has made and scores
    original: Example = field(default=Example("", ""))
    where: str = field(default="", compare=False)  # for errors, see tasks/own.py


class WithConfidence:
    """A task whose completions also state how sure they are.

    Reward parts:
        format: the form matches.
        correct: the answer is right: by the user's function with `success=True`, else by the task's
            `success`, else because it equals its answer.
        brier: 1 - (correct - confidence)^2.
        confidence: what is stated.
        and the task's other parts, of the answer alone. All are 0 where the form does not match.

    The last two kinds are measured and not paid, unless --reward-weights names them.
    """

    success = "correct"

    def __init__(
        self,
        task: Task,
        judge: RewardFunction | None = None,
        *,
        seed: int,
        chat: bool,
        supervised: bool,
    ) -> None:
        """
        Args:
            judge: says which answers are right, in place of the task.
            seed: of the random confidences in true answers.
            chat: whether plain prompts are asked as a user's message, as with --system.
            supervised: true answers state random confidences, so that a warm start teaches the form
                and nothing else. Otherwise they state 1.

        Raises:
            ConfigError: the task does not say which completions are right, or the judge looks at
                tokens.
        """
        if judge and judge.tokens:
            raise ConfigError(f"--confidence: {judge.name} must judge texts, not tokens")
        self.judge = judge.source(timeout_s=1.0) if judge else None
        if hasattr(task, "score_tokens"):
            raise ConfigError("--confidence needs a task whose answers are right or wrong")
        self.task, self.seed, self.chat, self.supervised = task, seed, chat, supervised
        # calls are timed by who calls this task
        self.source = task_sources(task, timeout_s=1.0)[0]
        self.own_success = success_of(task)
        # the task's name of a part -> its name here; `correct` is the part that it calls right
        names = [name for name in task.parts if judge or name != self.own_success]
        self.own_parts = {name: PREFIX * (name in WEIGHTS) + name for name in names}
        self.parts: Mapping[str, float] = {**WEIGHTS, **dict.fromkeys(self.own_parts.values(), 0.0)}
        for name in ("num_held_out", "has_messages", "about", "judged_by"):
            if hasattr(task, name):
                setattr(self, name, getattr(task, name))
        if hasattr(task, "longest"):
            self.longest = self._longest
        if hasattr(task, "explain"):
            self.explain = self._explain

    def train(self, number: int) -> Example:
        """Return training example `number`."""
        return self._asked(self.task.train(number))

    def held_out(self, number: int) -> Example:
        """Return evaluation example `number`."""
        return self._asked(self.task.held_out(number))

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        """Every part of one completion."""
        example = original_of(example)
        stated = self._parse(example, text)
        own = self.source.of_one(example, stated.answer)
        return {name: float(x[0]) for name, x in self._paid([example], [stated], own).items()}

    def summaries(self, parts: Mapping[str, np.ndarray]) -> Mapping[str, float]:
        """Return the calibration of the completions whose form matches, and the task's summaries.

        brier_score is the mean of (correct - confidence)^2; the part brier is 1 minus that square.
        Completions of another form have no confidence and do not enter: `format` says how many.
        """
        measures: dict[str, float] = {}
        valid = (parts["format"] == 1) & ~np.isnan(parts["correct"])
        if valid.any():
            confidence, correct = parts["confidence"][valid], parts["correct"][valid]
            found = calibration(confidence, correct)
            measures = {"brier_score": found.pop("brier"), "ece": found.pop("ece")}
            measures |= {"ece_by_chance": error_by_chance(confidence), **found}
            measures["mean_confidence"] = float(confidence.mean())
        summaries = getattr(self.task, "summaries", None)
        own = {name: parts[here] for name, here in self.own_parts.items()}
        own.setdefault(self.own_success, parts["correct"])
        return {**measures, **(summaries(own) if summaries else {})}

    def _explain(self, example: Example, text: str) -> str:
        task: Any = self.task
        example = original_of(example)
        if (stated := self._parse(example, text)).matches:
            return str(task.explain(example, stated.answer))
        return "the form of the confidence does not match"

    def _parse(self, example: Example, text: str) -> Stated:
        found = parse(text, chat=self._is_chat(example))
        # scored like any other, because only the task knows which parts do not concern the example
        return found or Stated("", 0.0, matches=False)

    def _paid(
        self, examples: Sequence[Example], stated: Sequence[Stated], own: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The parts of n completions, `[n]` each, from the task's `[parts, n]` of their answers."""
        of_task = dict(zip(self.task.parts, own, strict=True))
        correct, asked = of_task.get(self.own_success), zip(examples, stated, strict=True)
        if self.judge:
            correct = np.array([self.judge.of_one(x, one.answer)[0, 0] for x, one in asked])
        elif correct is None:
            correct = np.array([float(one.answer == example.answer) for example, one in asked])
        correct = np.where(np.isnan(correct), correct, correct == 1)  # nothing is half right
        matches = np.array([float(one.matches) for one in stated])
        confidence = np.array([one.confidence for one in stated])
        parts = {
            "format": matches,
            "correct": correct,
            "brier": 1 - (correct - confidence) ** 2,
            "confidence": confidence,
            **{here: of_task[name] for name, here in self.own_parts.items()},
        }
        return {name: values * matches for name, values in parts.items()}

    def _is_chat(self, example: Example) -> bool:
        return self.chat or bool(example.messages)

    def _asked(self, example: Example) -> Example:
        """The example with the request for the form, and with a true answer in that form."""
        chat, confidence = self._is_chat(example), 1.0
        if self.supervised:
            confidence = int(stream(self.seed, "confidence", example.index).integers(11)) / 10
        return AskedWithConfidence(
            example.prompt,
            write(example.answer, confidence, chat=chat),
            example.index,
            example.kind,
            _requested(example) if chat else (),
            example.fields,
            original=original_of(example),
            where=getattr(example, "where", ""),
        )

    def _longest(self) -> Iterator[tuple[str, Example]]:
        task: Any = self.task
        for where, example in task.longest():
            yield where, self._asked(example)


class BatchedWithConfidence(WithConfidence):
    """`WithConfidence` of a task that scores a batch at once, without a time limit."""

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        """Every part of one completion."""
        return {name: float(x[0]) for name, x in self.score_batch([example], [text]).items()}

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Every part of n completions, `[n]` each."""
        asked = [original_of(example) for example in examples]
        stated = [self._parse(*pair) for pair in zip(asked, texts, strict=True)]
        answers = [one.answer for one in stated]
        own = self.source.check(self.source.answer(asked, answers), len(texts))
        return self._paid(asked, stated, own)


def with_confidence(
    task: Task, judge: RewardFunction | None = None, *, seed: int, chat: bool, supervised: bool
) -> WithConfidence:
    """Return the task of --confidence; arguments and errors are those of `WithConfidence`.

    A judge is a user's function, so its calls have a time limit and may fail.
    """
    batched = task_sources(task, timeout_s=1.0)[0].trusted and not judge
    kind = BatchedWithConfidence if batched else WithConfidence
    return kind(task, judge, seed=seed, chat=chat, supervised=supervised)


def original_of(example: Example) -> Example:
    """The example that the task scores; in a user's task, the user's own object."""
    found: Example = getattr(example, "original", example)
    return found


def _requested(example: Example) -> tuple[Mapping[str, str], ...]:
    """The messages of an example, with the request at the end of the last one of the user."""
    messages = list(example.messages) or [{"role": "user", "content": example.prompt}]
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    place = users[-1] if users else len(messages) - 1
    messages[place] = {**messages[place], "content": messages[place]["content"] + REQUEST}
    return tuple(messages)
