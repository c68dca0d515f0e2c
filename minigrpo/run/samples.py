"""Completions worth looking at, as records: samples.jsonl and held_out.jsonl.

All lines have `step` and what `_shared_fields` gives.

samples.jsonl: every ten steps the whole group of one prompt (`source` is `train`), and at each
evaluation the completions of the same 32 held-out prompts (`held_out`):

    train: advantage, tokens (their texts)
    held_out: decoding (greedy or sampled), right (1, 0, or null where that is not known)

held_out.jsonl: the greedy answers of the last evaluation. `minigrpo compare` pairs those of runs:

    example: a digest of all that the example says
    greedy, sampled: the value of each measure; of the sampled completions, their mean
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..identity import digest
from ..metrics import Graded
from ..model.encoding import token_texts
from ..model.tokenizer import Tokenizer
from ..types import RolloutBatch
from .logging import HELD_OUT, SAMPLES, LogLine, RunLog


def log_group(log: RunLog, batch: RolloutBatch, step: int, tokenizer: Tokenizer) -> None:
    """Every ten steps, log the group of the batch's first prompt."""
    if batch.advantages is None or step % 10:
        return
    completions = batch.completions
    records = []
    for g, advantage in enumerate(batch.advantages[0].tolist()):
        ids = completions.completion_ids[0, g][completions.completion_mask[0, g]].tolist()
        record = {"source": "train", **_shared_fields(batch, 0, g), "advantage": advantage}
        record["tokens"] = token_texts(tokenizer, ids)
        records.append(record)
    log.write(SAMPLES, step, records)


def log_held_out(log: RunLog, greedy: Graded, drawn: Graded, step: int) -> None:
    """Log the answers of an evaluation, and the completions of its first prompts."""
    for function, failed in greedy.rewards.failed.items():
        total = failed.sum() + drawn.rewards.failed[function].sum()
        if total:  # which eval.jsonl does not tell
            log.warn(f"evaluation at step {step}: {function} failed on {total} completions")
    samples = []
    for decoding, graded in (("greedy", greedy), ("sampled", drawn)):
        for i, right in enumerate(graded.right[:32, 0]):
            record = {"source": "held_out", **_shared_fields(graded, i, 0)}
            samples.append(record | {"decoding": decoding, "right": float(right)})
    answers = []
    for i, example in enumerate(greedy.examples):
        record = {"example": digest(replace(example, index=0)), **_shared_fields(greedy, i, 0)}
        record |= {"greedy": _known(greedy.measures, i), "sampled": _known(drawn.measures, i)}
        answers.append(record)
    log.write(HELD_OUT, step, answers, mode="w")  # in place of those of the evaluation before
    log.write(SAMPLES, step, samples)


def _shared_fields(done: Graded | RolloutBatch, p: int, g: int) -> LogLine:
    """What all records have: of completion g of prompt p."""
    example = done.examples[p]
    text = done.texts[p][g]
    rewards = done.rewards
    assert rewards is not None
    return {
        "index": example.index,
        "kind": example.kind,
        "prompt": example.prompt,
        "messages": list(example.messages),
        "truth": example.answer,
        "completion": text,  # in a dialogue the last turn
        "dialogue": getattr(text, "messages", []),  # all that follows the prompt
        "parts": _known(rewards.parts, (p, g)),
        "reward": float(rewards.total[p, g]),
    }


def _known(values: Mapping[str, np.ndarray], place: int | tuple[int, int]) -> dict[str, float]:
    """The values at a place, without those that do not concern it."""
    return {name: float(x[place]) for name, x in values.items() if not np.isnan(x[place])}
