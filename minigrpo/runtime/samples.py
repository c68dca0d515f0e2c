"""Completions worth looking at, as records: samples.jsonl and held_out.jsonl.

samples.jsonl: every few steps the whole group of one prompt (`source` is `train`), and at each
evaluation the completions of the same held-out prompts (`held_out`). All lines have these keys:

    step, source, index, kind, prompt (and messages), truth, completion, parts, reward
    in a dialogue: dialogue, the messages after the prompt; completion is the policy's last one
    train: advantage, prompt_tokens (their number), token_ids, tokens (their texts)
    held_out: decoding (greedy or sampled), right (1, 0, or null where that is not known)

held_out.jsonl: the answers of the last evaluation. `minigrpo compare` pairs the lines of two runs:

    step, example (a digest of all that the example says), kind, prompt, truth
    completion: the greedy one
    greedy, sampled: the value of each measure; of the sampled completions, their mean
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..model.encoding import token_texts
from ..model.tokenizer import Tokenizer
from ..types import Dialogue, Example, RewardTable, RolloutBatch
from .logging import HELD_OUT, SAMPLES, Record, RunLog
from .stats import Graded, means

STEPS_BETWEEN = 10
SHOWN = 32  # prompts per evaluation


def log_group(log: RunLog, batch: RolloutBatch, step: int, tokenizer: Tokenizer) -> None:
    """Every few steps, log the group of the batch's first prompt."""
    if batch.rewards is None or batch.advantages is None or step % STEPS_BETWEEN:
        return
    completions, records = batch.completions, []
    for g, text in enumerate(batch.texts[0]):
        ids = completions.completion_ids[0, g][completions.completion_mask[0, g]].tolist()
        records.append(
            {
                "source": "train",
                **_scored(batch.examples[0], text, batch.rewards, (0, g)),
                "advantage": float(batch.advantages[0, g]),
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
    graded = {"greedy": greedy, "sampled": drawn}
    by_example = {
        decoding: {name: means(x) for name, x in found.measures.items()}
        for decoding, found in graded.items()
    }
    answers, samples = list[Record](), list[Record]()
    for i, example in enumerate(greedy.examples):
        answers.append(
            {
                "example": digest(example),
                "kind": example.kind,
                "prompt": example.prompt,
                "truth": example.answer,
                "completion": greedy.texts[i][0],
                **{decoding: _known(found, i) for decoding, found in by_example.items()},
            }
        )
    for i, example in enumerate(greedy.examples[:SHOWN]):
        for decoding, found in graded.items():
            scored = _scored(example, found.texts[i][0], found.rewards, (i, 0))
            right = float(found.right[i, 0])
            samples.append({"source": "held_out", **scored, "decoding": decoding, "right": right})
    log.write(HELD_OUT, step, answers, mode="wb")  # in place of those of the evaluation before
    log.write(SAMPLES, step, samples)


def digest(example: Example) -> str:
    """Equal for examples that ask and are scored alike."""
    said = repr(replace(example, index=0))
    return hashlib.sha256(said.encode(errors="replace")).hexdigest()[:16]


def _known(values: Mapping[str, np.ndarray], place: int | tuple[int, int]) -> dict[str, float]:
    """The values at a place, without those that do not concern it."""
    return {name: float(x[place]) for name, x in values.items() if not np.isnan(x[place])}


def _scored(example: Example, text: str, rewards: RewardTable, place: tuple[int, int]) -> Record:
    """What all records have."""
    return {
        "index": example.index,
        "kind": example.kind,
        "prompt": example.prompt,
        **({"messages": list(example.messages)} if example.messages else {}),
        "truth": example.answer,
        "completion": text,
        **({"dialogue": list(text.messages)} if isinstance(text, Dialogue) else {}),
        "parts": _known(rewards.parts, place),
        "reward": float(rewards.total[place]),
    }
