"""Answers that state how sure they are, and a reward for being honest about it.

This is RLCR (arXiv 2507.16806). A completion states its confidence q, a number from 0 to 1. With
c = 1 for a right answer and 0 for a wrong one,

    reward = 0.5 format + 0.5 c + 0.5 (1 - (c - q)^2),    or 0 if the form does not match.

The last term is 1 minus the Brier score. Its expectation is largest for q = P(c = 1). With
`--data`, the questions come from `--task prompts`, `math` or qa.py. Messages ask for the published
form; plain prompts stay as they are, and the model learns the short form:

    <think>...</think> <answer>8</answer> <analysis>...</analysis> <confidence>0.5</confidence>
    8<confidence>0.5</confidence>

Without `--data`, the task is to guess a hidden digit. Each prompt, such as `47_1, 3 or 8: `, says
which digits are possible, with equal chances. In a quarter of the prompts each, one, two, five or
all ten are possible. So the best confidence is 1, 1/2, 1/5 or 1/10.

    minigrpo train --config calibration
"""

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from qa import QA

from minigrpo.evaluate import calibration
from minigrpo.rng import stream
from minigrpo.tasks.base import Files, Generated, SourceTask, is_held_out
from minigrpo.tasks.math import HASHES, Math, final_answer
from minigrpo.tasks.prompts import Prompts
from minigrpo.text.chat import extended
from minigrpo.types import Example

REQUEST = (
    "\n\nAnswer in exactly this form: <think>your reasoning</think> <answer>the final answer and "
    "nothing else</answer> <analysis>what could be wrong with the answer</analysis> <confidence>"
    "the probability that the answer is right, a number from 0 to 1 such as 0.7</confidence>"
)

HALVES = {"even": "02468", "odd": "13579", "below 5": "01234", "above 4": "56789"}
TAG = re.compile("</?(?:think|answer|analysis|confidence)>")
# 0, 1 or a fraction, without a sign, an exponent or a percent sign
CONFIDENCE = r"<confidence>\s*([01](?:\.0*)?|0?\.[0-9]+)\s*</confidence>\s*"
PLAIN_FORM = re.compile(f"(.*){CONFIDENCE}", re.DOTALL)
# <think> is not required, because some chat templates write it at the end of the prompt
CHAT_FORM = re.compile(
    rf".*</think>\s*<answer>\s*+(.*)</answer>\s*<analysis>.*</analysis>\s*{CONFIDENCE}", re.DOTALL
)


def parse(text: str, *, chat: bool) -> tuple[str, float] | None:
    """The answer and the confidence that a completion states; None if its form does not match."""
    tags = TAG.findall(text)
    if len(tags) != len({*tags}):
        return None  # so there is only one way to match, in linear time
    match = (CHAT_FORM if chat else PLAIN_FORM).fullmatch(text)
    return (match[1].rstrip(), float(match[2])) if match else None


class Calibration(SourceTask):
    """Another task's questions, whose answers also state a confidence.

    The true answers for supervised fine-tuning state random confidences, and teach only the form.
    """

    reward_weights: Mapping[str, float] = {  # all rewards are 0 if the form does not match
        "format": 0.5,  # the form matches
        "correct": 0.5,  # the other task's measure of success says that the answer is right
        "brier": 0.5,  # 1 - (correct - confidence)^2
        "confidence": 0.0,  # the stated confidence, a metric
    }
    success = "correct"

    def __init__(
        self,
        seed: int,
        data: Files = (),
        eval_data: Files = (),
        chat: bool = False,
        judge: str = "exact",
    ) -> None:
        """`judge` is exact, qa or math. `chat` makes plain prompts messages."""
        self.seed = seed
        self.chat = chat
        if not (data or eval_data):
            super().__init__(Generated(self._digit, "digits that can only be guessed"))
        elif judge == "math":
            super().__init__(Math(seed, data, eval_data, chat))
        elif judge == "qa":
            super().__init__(QA(seed, data, eval_data))
        else:
            super().__init__(Prompts(seed, data, eval_data, chat, judge))

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        stated = parse(text, chat=bool(example.messages))
        if stated is None:
            return dict.fromkeys(self.reward_weights, 0.0)
        answer, confidence = stated
        if isinstance(self.source, Math) and not final_answer(answer, HASHES):
            answer = f"{HASHES} {answer}"  # the content of the tags is the final answer
        truth = example.fields["true_answer"]
        scores = self.source.score(replace(example, answer=truth), answer)
        correct = scores.get(self.source.success, float(answer == truth))  # a digit has no score
        brier = 1 - (correct - confidence) ** 2
        return {"format": 1.0, "correct": correct, "brier": brier, "confidence": confidence}

    def summaries(self, values: Mapping[str, np.ndarray]) -> Mapping[str, float]:
        """The calibration of completions whose form matches; others have no confidence."""
        valid = values["format"] == 1
        if not valid.any():
            return {}
        confidence = values["confidence"][valid]
        measures = calibration(confidence, values["correct"][valid])
        brier_score = measures.pop("brier")  # the reward of this name is 1 minus the square
        return {"brier_score": brier_score, **measures, "mean_confidence": confidence.mean()}

    def ask(self, example: Example, number: int, split: str) -> Example:
        """Add the request for the form to an example, and a true answer in that form."""
        messages = [*example.messages]
        if self.chat and not messages:
            messages = [{"role": "user", "content": example.prompt}]
        answer = example.answer
        if messages:
            messages = extended(messages, REQUEST)
            answer = f"<think></think> <answer>{answer}</answer> <analysis></analysis> "
        confidence = stream(self.seed, "confidence", number).integers(11) / 10
        answer += f"<confidence>{confidence:.1f}</confidence>"
        fields = {**example.fields, "true_answer": example.answer}
        return replace(example, answer=answer, messages=tuple(messages), fields=fields)

    def _digit(self, number: int, split: str) -> Example:
        """A question about a hidden digit; `kind` is the chance of the best answer."""
        held_out = split == "held-out"
        rng = stream(self.seed, "hidden digit", number, held_out)
        size = (1, 2, 5, 10)[number % 4]  # number of possible digits
        while True:
            shown = [*map(str, rng.integers(10, size=4))]
            shown[rng.integers(4)] = "_"
            if size == 5:
                hint, possible = list(HALVES.items())[rng.integers(len(HALVES))]
            else:
                possible = "".join(map(str, sorted(rng.permutation(10)[:size])))
                hint = " or ".join(possible) if size < 10 else "any digit"
            prompt = f"{''.join(shown)}, {hint}: "
            if is_held_out(prompt) == held_out:
                break
        answer = possible[rng.integers(size)]
        return Example(prompt, answer, number, f"1 of {size}", fields={"possible": possible})
