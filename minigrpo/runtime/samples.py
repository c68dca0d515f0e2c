"""samples.jsonl: completions worth looking at, one per line.

Every few steps the whole group of one prompt is logged (`source` is `train`), and at each
evaluation the completions of the same held-out prompts (`held_out`), so that one sees how the
answers to a prompt change. All lines have these keys:

    step, source, index, kind, prompt (and messages), truth, completion, parts, reward
    truth: the example's answer; the truth only where a right completion equals it
    explained: what is wrong with the completion, where the task can tell
    train: advantage, prompt_tokens (their number), token_ids, tokens (their texts)
    held_out: decoding (greedy or sampled), right (1, 0, or null where that is not known)
"""

import codecs
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from ..model.tokenizer import Tokenizer
from ..types import Example, RewardTable, RolloutBatch, Task
from .flags import ConfigError
from .graded import Graded
from .measures import answer_in_words, success_of
from .run_log import NoLog, RunLog

STEPS_BETWEEN = 10
HELD_OUT = 32  # prompts per evaluation
SHOWN = 2  # completions that TensorBoard gets
Record = dict[str, Any]


def log_group(
    log: RunLog | NoLog, batch: RolloutBatch, step: int, tokenizer: Tokenizer, task: Task
) -> None:
    """Every few steps, log the group of the batch's first prompt."""
    if batch.rewards is None or step % STEPS_BETWEEN or isinstance(log, NoLog):
        return
    for record in group(batch, tokenizer, task):
        log.sample(step, record)
    example = batch.examples[0]
    answer = f"{answer_in_words(success_of(task)):<11} {example.answer}"
    shown = [f"prompt      {example.prompt}", answer]
    shown += [f"completion  {text}" for text in batch.texts[0][:SHOWN]]
    log.sample_text(step, "\n".join(f"    {line}" for line in shown))


def group(batch: RolloutBatch, tokenizer: Tokenizer, task: Task) -> Iterator[Record]:
    """The records of the batch's first prompt, one per completion, without their step."""
    example, rewards, completions = batch.examples[0], batch.rewards, batch.completions
    assert rewards is not None
    lengths = completions.completion_mask[0].sum(-1).tolist()
    rows = completions.completion_ids[0].tolist()
    none = torch.full((len(rows),), math.nan)
    advantages = (none if batch.advantages is None else batch.advantages[0]).tolist()
    told = explainer(task)
    for g, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids = row[:length]
        yield {
            "source": "train",
            **_scored(example, batch.texts[0][g], rewards, 0, g),
            **told(example, batch.texts[0][g]),
            "advantage": advantages[g],
            "prompt_tokens": int(completions.prompt_len[0]),
            "token_ids": ids,
            "tokens": texts_of(tokenizer, ids),
        }


class HeldOut:
    """The completions of one evaluation that are logged."""

    def __init__(self, task: Task) -> None:
        self.task = task
        # both stay empty in all processes but the main one
        self.records: list[Record] = []
        self.graded: tuple[Graded, Graded] | None = None

    def keep(self, greedy: Graded, drawn: Graded) -> None:
        """Remember the first prompts: the greedy completion and the first sampled one."""
        self.graded, told = (greedy, drawn), explainer(self.task)
        both = {"greedy": (greedy, greedy.right), "sampled": (drawn, drawn.right)}
        for i, example in enumerate(greedy.examples[:HELD_OUT]):
            for decoding, (graded, right) in both.items():
                text = graded.texts[i][0]
                self.records.append(
                    {
                        "source": "held_out",
                        **_scored(example, text, graded.rewards, i, 0),
                        **told(example, text),
                        "decoding": decoding,
                        "right": float(right[i, 0]),
                    }
                )

    def log(self, log: RunLog | NoLog, step: int) -> None:
        """Log the completions of the first prompts, and keep what `minigrpo compare` reads."""
        if self.graded:
            log.answers(step, *self.graded)
        log.held_out_samples(step, self.records)


def explainer(task: Task) -> Callable[[Example, str], Mapping[str, str]]:
    """What gives the key `explained` of a completion, if the task has something to say."""
    explain = cast("Callable[[Example, str], str] | None", getattr(task, "explain", None))

    def told(example: Example, text: str) -> Mapping[str, str]:
        try:
            said = explain(example, text) if explain else ""
        except ConfigError as error:  # a log must not end a run
            said = str(error)
        return {"explained": said} if said else {}

    return told


def texts_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token; a character of several tokens stands with the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [tokenizer.decode_bytes([number], show_stops=True) for number in ids]
    return [decoder.decode(piece, i == len(pieces)) for i, piece in enumerate(pieces, 1)]


def _scored(example: Example, text: str, rewards: RewardTable, i: int, g: int) -> Record:
    """What all records have. Parts that do not concern the completion are left out."""
    scores = {name: float(x[i, g]) for name, x in rewards.parts.items()}
    return {
        "index": example.index,
        "kind": example.kind,
        "prompt": example.prompt,
        **({"messages": list(example.messages)} if example.messages else {}),
        "truth": example.answer,
        "completion": text,
        "parts": {name: x for name, x in scores.items() if not math.isnan(x)},
        "reward": float(rewards.total[i, g]),
    }
