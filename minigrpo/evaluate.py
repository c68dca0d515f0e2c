"""How good a model is: sampled and greedy answers to held-out examples.

The trainer calls `evaluate`. `grade` also returns the answers themselves, for the evaluation tool.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .model.encoding import decode
from .rewards import RewardScorer
from .runtime.loss_arguments import whole
from .runtime.rng import uniforms
from .sampling.sampler import Sampler
from .types import Example, RewardTable, Task

BATCH = 256  # prompts decoded together, unless --rollout-batch-size bounds the completions


@dataclass(frozen=True)
class Graded:
    """Greedy answers to n examples, and their rewards."""

    examples: Sequence[Example]
    texts: Sequence[str]
    exact: np.ndarray  # [n] bool, whether the text equals the true answer
    rewards: RewardTable  # [n, 1]

    def by_kind(self) -> dict[str, np.ndarray]:
        """For each kind of question, a `[n]` bool mask of its examples."""
        kinds = np.array([example.kind for example in self.examples])
        return {str(kind): kinds == kind for kind in np.unique(kinds) if kind}


def answer(
    sampler: Sampler,
    examples: Sequence[Example],
    *,
    seed: int | None = None,
    advance: Callable[[int], object] = lambda number: None,
) -> list[str]:
    """One completion per example: greedy, or sampled at temperature 1 if a seed is given.

    After each batch, `advance` is called with the number of examples in it.
    """
    u = None
    if seed is not None:
        rows = np.array([example.index for example in examples])
        u = uniforms(seed, "evaluate", 0, rows, 1, sampler.config.sampling.max_new_tokens)
    config = sampler.config
    size = config.memory.rollout_batch_size * config.sampling.group_size or BATCH
    texts: list[str] = []
    for part in sampler.complete(examples, u=u, batch_size=min(size, BATCH)):
        texts += [group[0] for group in decode(sampler.tokenizer, part)]
        advance(len(part))
    return texts


def grade(
    sampler: Sampler,
    scorer: RewardScorer,
    examples: Sequence[Example],
    advance: Callable[[int], object] = lambda number: None,
) -> Graded:
    """Answer examples greedily, and score the answers."""
    texts = answer(sampler, examples, advance=advance)
    exact = np.array(
        [text == example.answer for text, example in zip(texts, examples, strict=True)]
    )
    return Graded(examples, texts, exact, scorer.score(examples, [[text] for text in texts]))


def evaluate(
    sampler: Sampler, task: Task, scorer: RewardScorer, *, size: int, seed: int
) -> dict[str, float]:
    """Score the first `size` held-out examples, or all if there are fewer.

    Args:
        scorer: of this kind of task; its seed may be another.
        seed: of the sampled completions.

    Raises:
        ValueError: a size below 1, a seed below 0 or None, or the scorer of another task.

    Returns:
        n: the number of examples.
        exact_sampled: share of completions sampled at temperature 1 that equal the true answer.
        exact: the same for greedy completions.
        The reward parts, and their weighted sum `reward`: means over the greedy completions.
        exact/<kind>, count/<kind>: `exact` and `n` by kind of question.
    """
    whole("size", size, least=1)
    whole("seed", seed, least=0)
    if _kind(scorer.task) != _kind(task):
        raise ValueError("scorer must be made for the task that is evaluated: RewardScorer(task)")
    size = min(size, getattr(task, "num_held_out", None) or size)
    examples = [task.held_out(i) for i in range(size)]
    graded, sampled = grade(sampler, scorer, examples), answer(sampler, examples, seed=seed)
    same = [text == example.answer for text, example in zip(sampled, examples, strict=True)]
    kinds = graded.by_kind()
    return {
        "n": float(size),
        "exact_sampled": float(np.mean(same)),
        "exact": float(np.mean(graded.exact)),
        **{name: float(scores.mean()) for name, scores in graded.rewards.parts.items()},
        "reward": float(graded.rewards.total.mean()),
        **{f"exact/{kind}": float(np.mean(graded.exact[rows])) for kind, rows in kinds.items()},
        **{f"count/{kind}": float(rows.sum()) for kind, rows in kinds.items()},
    }


def _kind(task: Task) -> tuple[type, list[str]]:
    """What two tasks share if a scorer of one can score the other: class and reward parts."""
    return type(getattr(task, "users", task)), list(task.parts)
