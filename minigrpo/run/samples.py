"""Completions worth looking at, as records: samples.jsonl and held_out.jsonl.

All lines have these keys:

    step, index, kind, prompt, messages, truth, completion, parts, reward
    dialogue: if there are several turns, all messages after the prompt; completion is the last turn

samples.jsonl: every few steps the whole group of one prompt (`source` is `train`), and at each
evaluation the completions of the same held-out prompts (`held_out`):

    train: advantage, prompt_tokens (their number), token_ids, tokens (their texts)
    held_out: decoding (greedy or sampled), right (1, 0, or null where that is not known)

held_out.jsonl: the greedy answers of the last evaluation. `minigrpo compare` pairs those of runs:

    example: a digest of all that the example says
    greedy, sampled: the value of each measure; of the sampled completions, their mean
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..metrics import Graded
from ..model.encoding import token_texts
from ..model.tokenizer import Tokenizer
from ..types import RolloutBatch
from .logging import HELD_OUT, SAMPLES, Record, RunLog

STEPS_BETWEEN = 10
SHOWN = 32  # prompts per evaluation


def log_group(log: RunLog, batch: RolloutBatch, step: int, tokenizer: Tokenizer) -> None:
    """Every few steps, log the group of the batch's first prompt."""
    if batch.advantages is None or step % STEPS_BETWEEN:
        return
    completions, records = batch.completions, []
    for g, advantage in enumerate(batch.advantages[0].tolist()):
        ids = completions.completion_ids[0, g][completions.completion_mask[0, g]].tolist()
        records.append(
            {
                "source": "train",
                **_record(batch, 0, g),
                "advantage": advantage,
                "prompt_tokens": int(completions.prompt_len[0]),
                "token_ids": ids,
                "tokens": token_texts(tokenizer, ids),
            }
        )
    log.write(SAMPLES, step, records)


def log_held_out(log: RunLog, greedy: Graded, drawn: Graded, step: int) -> None:
    """Log the answers of an evaluation, and the completions of its first prompts.

    Warns of rewards that failed: eval.jsonl cannot tell a failure's 0 from a score.
    """
    for part, failed in greedy.rewards.failures.items():
        if failed := failed + drawn.rewards.failures[part]:
            log.warn(f"evaluation at step {step}: {part} failed on {failed} completions")
    sides = {"greedy": greedy, "sampled": drawn}
    samples = [
        {"source": "held_out", **_record(side, i, 0), "decoding": how, "right": float(right)}
        for how, side in sides.items()
        for i, right in enumerate(side.right[:SHOWN, 0])
    ]
    answers = [
        {"example": digest(replace(example, index=0)), **_record(greedy, i, 0)}
        | {how: _known(side.measures, i) for how, side in sides.items()}
        for i, example in enumerate(greedy.examples)
    ]
    log.write(HELD_OUT, step, answers, mode="w")  # in place of those of the evaluation before
    log.write(SAMPLES, step, samples)


def digest(value: object) -> str:
    """Equal for values that are written alike, such as examples that ask the same."""
    return hashlib.sha256(repr(value).encode(errors="replace")).hexdigest()[:16]


def _record(done: Graded | RolloutBatch, p: int, g: int) -> Record:
    """What all records have: of completion g of prompt p."""
    example, rewards = done.examples[p], done.rewards
    assert rewards
    return {
        "index": example.index,
        "kind": example.kind,
        "prompt": example.prompt,
        "messages": list(example.messages),
        "truth": example.answer,
        "completion": done.texts[p][g],
        "dialogue": getattr(done.texts[p][g], "messages", []),
        "parts": _known(rewards.parts, (p, g)),
        "reward": float(rewards.total[p, g]),
    }


def _known(values: Mapping[str, np.ndarray], place: int | tuple[int, int]) -> dict[str, float]:
    """The values at a place, without those that do not concern it."""
    return {name: float(x[place]) for name, x in values.items() if not np.isnan(x[place])}
