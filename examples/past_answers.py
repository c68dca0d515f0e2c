"""Rows whose answers of the last epoch are proposed to the sampler, which verifies them.

    minigrpo train --task examples/past_answers.py --data rows.jsonl --rewards rewards.py

What is sampled does not change, up to rounding: a proposed token counts only where the model would
have sampled it. Where a model answers a question as it did an epoch ago, `rollout/rounds` falls.
In our sums it costs more than it saves (docs/results.md), although a fifth of the answers repeat by
the third epoch. The metric `rewards/repeats/mean` is the share of completions that are the proposed
answer. Reward functions find the true answer in `example.fields`: `example.answer` is the proposal.
Which answer of a group is proposed depends on the threads that score, and a resume begins with
none: so `rewards/repeats/mean` is not the same in two runs, and bits may differ.
"""

from collections.abc import Mapping
from dataclasses import replace

from minigrpo.tasks.base import Files
from minigrpo.tasks.prompts import Prompts
from minigrpo.types import Example


class PastAnswers(Prompts):
    reward_weights: Mapping[str, float]

    def __init__(
        self, seed: int, data: Files = (), eval_data: Files = (), chat: bool = False
    ) -> None:
        super().__init__(seed, data, eval_data, chat, judge="none")
        self.reward_weights = {"repeats": 0.0}
        self.speculate = True
        self.last: dict[str, str] = {}  # the last completion of each row

    def train(self, number: int) -> Example:
        example = super().train(number)
        return replace(example, answer=self.last.get(example.place, ""))

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        self.last[example.place] = str(text)
        return {"repeats": float(text == example.answer)}
