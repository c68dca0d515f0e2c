"""Questions with known answers, from JSONL files: docs/tasks.md has the format and the judges."""

from collections.abc import Mapping
from typing import Any

from ..rewards.functions import similarity
from ..types import EXACT, REWARD, ConfigError, Example
from .base import Files, Generated, Rows, SourceTask
from .rows import Parse, parse_any, parse_episode, parse_pair

REQUEST = (
    "Think first if that helps. Then write the answer itself, in a few words, between <answer> and "
    "</answer>."
)


class Prompts(SourceTask):
    def __init__(
        self,
        seed: int,
        data: Files = (),
        eval_data: Files = (),
        chat: bool = False,
        judge: str = "exact",
        environment: Any = None,
    ) -> None:
        """`environment` is an `EnvironmentSet` or None; if it asks, rows need no question."""
        if judge not in ("exact", "none"):
            raise ConfigError(f"--task-args judge must be exact or none, got {judge}")
        is_exact = judge == "exact"
        self.reward_weights = {"exact": 1.0, "similarity": 0.2} if is_exact else {}
        self.success = EXACT if is_exact else REWARD
        parse: Parse = parse_pair if is_exact else parse_any
        if data or eval_data or not environment:
            if environment and environment.reads_rows and not is_exact:
                parse = parse_episode
            super().__init__(Rows(seed, data, eval_data, parse))
        elif is_exact:
            raise ConfigError("no reward: give the environment a get_reward, or give rewards")
        else:  # the environment asks by itself
            super().__init__(Generated(lambda number, _: Example("", index=number), "episodes"))
        # chat models reason before they answer, so proposing the answer's tokens is in vain
        self.speculate = is_exact and not (chat or self.held_out(0).messages)

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        truth = example.answer
        return {"exact": text == truth, "similarity": similarity(text, truth)}


def tagged_answer(text: str, default: str) -> str:
    """The text between the last <answer> and </answer>, or `default` if there are none."""
    before = text.rpartition("</answer>")[0]
    _, opened, answer = before.rpartition("<answer>")
    return answer if opened else default
