"""Completions worth looking at, as records: samples.jsonl and held_out.jsonl.

samples.jsonl: every few steps the whole group of one prompt (`source` is `train`), and at each
evaluation the completions of the same held-out prompts (`held_out`). All lines have these keys:

    step, source, index, kind, prompt (and messages), truth, completion, parts, reward
    explained: what is wrong with the completion, where the task can tell
    train: advantage, prompt_tokens (their number), token_ids, tokens (their texts)
    held_out: decoding (greedy or sampled), right (1, 0, or null where that is not known)

held_out.jsonl: the answers of the last evaluation. `minigrpo compare` pairs the lines of two runs:

    step, example (a digest of all that the example says), kind, prompt, truth
    completion: the greedy one
    greedy, sampled: the value of each measure; of the sampled completions, their mean
"""

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch

from ..model.encoding import token_texts
from ..model.tokenizer import Tokenizer
from ..task import Task
from ..types import Example, RewardTable, RolloutBatch
from .logging import NoLog, Record, RunLog, to_json
from .stats import Graded

STEPS_BETWEEN = 10
HELD_OUT = 32  # prompts per evaluation
SHOWN = 2  # completions that TensorBoard gets


def log_group(
    log: RunLog | NoLog, batch: RolloutBatch, step: int, tokenizer: Tokenizer, task: Task
) -> None:
    """Every few steps, log the group of the batch's first prompt."""
    if batch.rewards is None or step % STEPS_BETWEEN or isinstance(log, NoLog):
        return
    example = batch.examples[0]
    shown = [f"prompt      {example.prompt}", f"answer      {example.answer}"]
    shown += [f"completion  {text}" for text in batch.texts[0][:SHOWN]]
    text = "\n".join(f"    {line}" for line in shown)
    records = list(_group(batch, batch.rewards, tokenizer, task))
    log.samples(step, records, text.encode("utf-8", "backslashreplace").decode())


def _group(
    batch: RolloutBatch, rewards: RewardTable, tokenizer: Tokenizer, task: Task
) -> Iterator[Record]:
    """The records of the batch's first prompt, one per completion."""
    completions = batch.completions
    lengths = completions.completion_mask[0].sum(-1).tolist()
    rows = completions.completion_ids[0].tolist()
    unknown = torch.full((len(rows),), math.nan)
    advantages = (unknown if batch.advantages is None else batch.advantages[0]).tolist()
    for g, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        yield {
            "source": "train",
            **_scored(task, batch.examples[0], batch.texts[0][g], rewards, 0, g),
            "advantage": advantages[g],
            "prompt_tokens": int(completions.prompt_len[0]),
            "token_ids": row[:length],
            "tokens": token_texts(tokenizer, row[:length]),
        }


def log_held_out(log: RunLog | NoLog, greedy: Graded, drawn: Graded, step: int, task: Task) -> None:
    """Log the answers of an evaluation, and the completions of its first prompts.

    Warns of rewards that failed: eval.jsonl cannot tell their default from a score.
    """
    for part, failed in greedy.rewards.failures.items():
        if failed := failed + drawn.rewards.failures[part]:
            log.warn(f"evaluation at step {step}: {part} failed on {failed} completions")
    log.held_out(step, answers(greedy, drawn))
    log.samples(step, list(_held_out(greedy, drawn, task)))


def _held_out(greedy: Graded, drawn: Graded, task: Task) -> Iterator[Record]:
    """The greedy completion and the first sampled one of the first prompts."""
    for i, example in enumerate(greedy.examples[:HELD_OUT]):
        for decoding, graded in (("greedy", greedy), ("sampled", drawn)):
            scored = _scored(task, example, graded.texts[i][0], graded.rewards, i, 0)
            right = float(graded.right[i, 0])
            yield {"source": "held_out", **scored, "decoding": decoding, "right": right}


def answers(greedy: Graded, drawn: Graded) -> Iterator[Record]:
    """The lines of held_out.jsonl. A measure that does not concern an example is left out."""
    means = {"greedy": _means(greedy), "sampled": _means(drawn)}
    for row, example in enumerate(greedy.examples):
        yield {
            "example": digest(example),
            "kind": example.kind,
            "prompt": example.prompt,
            "truth": example.answer,
            "completion": greedy.texts[row][0],
            **{
                how: {name: float(x[row]) for name, x in found.items() if not np.isnan(x[row])}
                for how, found in means.items()
            },
        }


def digest(example: Example) -> str:
    """Equal for examples that ask and are scored alike."""
    said = {"prompt": example.prompt, "answer": example.answer, "messages": example.messages}
    fields = repr(sorted(example.fields.items()))
    return hashlib.sha256((to_json(said) + fields).encode(errors="replace")).hexdigest()[:16]


def _means(graded: Graded) -> dict[str, np.ndarray]:
    """`[n]` means over the completions of each example; NaN where a measure concerns none."""
    found = {}
    for name, values in graded.measures.items():
        known = ~np.isnan(values)
        sums = np.where(known, values, 0.0).sum(axis=1, dtype=np.float64)
        found[name] = np.where(known.any(axis=1), sums / np.maximum(1, known.sum(axis=1)), np.nan)
    return found


def _scored(
    task: Task, example: Example, text: str, rewards: RewardTable, i: int, g: int
) -> Record:
    """What all records have. Reward functions that do not concern the completion are left out."""
    scores = {name: float(x[i, g]) for name, x in rewards.parts.items()}
    explained = task.explain(example, text)
    return {
        "index": example.index,
        "kind": example.kind,
        "prompt": example.prompt,
        **({"messages": list(example.messages)} if example.messages else {}),
        "truth": example.answer,
        "completion": text,
        "parts": {name: x for name, x in scores.items() if not math.isnan(x)},
        "reward": float(rewards.total[i, g]),
        **({"explained": explained} if explained else {}),
    }
