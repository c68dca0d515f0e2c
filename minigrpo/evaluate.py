"""How good a model is: greedy and sampled answers to held-out examples that no training ever sees."""

from collections import defaultdict

import numpy as np

from .encoding import decode
from .randomness import uniforms
from .rewards import RewardScorer
from .rollout import Sampler
from .types import Example, Task

BATCH = 256  # prompts decoded together


def answer(sampler: Sampler, examples: list[Example], *, seed: int | None = None) -> list[str]:
    """One completion of each example: greedy, or at temperature 1 if a seed is given."""
    u = None
    if seed is not None:
        rows = np.array([example.index for example in examples])
        u = uniforms(seed, "evaluate", 0, rows, 1, sampler.config.max_new_tokens)
    parts = sampler.complete(examples, u=u, batch_size=BATCH)
    return [group[0] for part in parts for group in decode(sampler.tokenizer, part)]


def evaluate(sampler: Sampler, task: Task, scorer: RewardScorer, *, size: int, seed: int) -> dict[str, float]:
    """Score the first `size` held-out examples, or all that there are.

    Returns:
        n: how many that was.
        exact: share of greedy completions that are the whole truth, to the letter. exact_sampled: the same at temperature 1.
        The reward parts, and reward: means over the greedy completions.
        exact/<kind> and count/<kind>: the same by kind of question.
    """
    size = min(size, getattr(task, "num_held_out", None) or size)
    examples = [task.held_out(i) for i in range(size)]
    greedy, sampled = answer(sampler, examples), answer(sampler, examples, seed=seed)
    table = scorer.score(examples, [[text] for text in greedy])
    right = [text == example.answer for text, example in zip(greedy, examples, strict=True)]
    by_kind: dict[str, list[bool]] = defaultdict(list)
    for example, hit in zip(examples, right, strict=True):
        by_kind[example.kind].append(hit)
    kinds = {kind: hits for kind, hits in sorted(by_kind.items()) if kind}
    return {
        "n": float(size),
        "exact": float(np.mean(right)),
        "exact_sampled": float(np.mean([t == e.answer for t, e in zip(sampled, examples, strict=True)])),
        **{name: float(scores.mean()) for name, scores in table.parts.items()},
        "reward": float(table.total.mean()),
        **{f"exact/{kind}": float(np.mean(hits)) for kind, hits in kinds.items()},
        **{f"count/{kind}": float(len(hits)) for kind, hits in kinds.items()},
    }
