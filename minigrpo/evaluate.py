"""How good a model is: greedy and sampled answers to held-out examples that no training ever
sees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .model.encoding import decode
from .rewards import RewardScorer
from .rollout import Sampler
from .runtime.rng import uniforms
from .types import Example, RewardTable, Task

BATCH = 256  # prompts decoded together


@dataclass(frozen=True)
class Graded:
    """Greedy answers to n examples, and what they are worth."""

    examples: Sequence[Example]
    texts: Sequence[str]
    exact: np.ndarray  # [n] bool, whether it is the whole truth, to the letter
    rewards: RewardTable  # of one completion each, [n, 1]

    def by_kind(self) -> dict[str, np.ndarray]:
        """ModelSelection examples are of each kind of question, [n] bool; what has no kind is not among
        them.
        """
        kinds = np.array([example.kind for example in self.examples])
        return {str(kind): kinds == kind for kind in np.unique(kinds) if kind}


def answer(
    sampler: Sampler,
    examples: Sequence[Example],
    *,
    seed: int | None = None,
    advance: Callable[[int], object] = lambda number: None,
) -> list[str]:
    """One completion of each example: greedy, or at temperature 1 if a seed is given. `advance` is
    told how many are done.
    """
    u = None
    if seed is not None:
        rows = np.array([example.index for example in examples])
        u = uniforms(seed, "evaluate", 0, rows, 1, sampler.config.sampling.max_new_tokens)
    texts: list[str] = []
    for part in sampler.complete(examples, u=u, batch_size=BATCH):
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
    """Score the first `size` held-out examples, or all that there are.

    Returns:
        n: how many that was.
        exact: share of greedy completions that are the whole truth, to the letter. exact_sampled:
            the same at temperature 1. The reward parts, and reward: means over the greedy
            completions. exact/<kind> and count/<kind>: the same by kind of question.
    """
    size = min(size, getattr(task, "num_held_out", None) or size)
    examples = [task.held_out(i) for i in range(size)]
    graded, sampled = grade(sampler, scorer, examples), answer(sampler, examples, seed=seed)
    kinds = graded.by_kind()
    return {
        "n": float(size),
        "exact": float(np.mean(graded.exact)),
        "exact_sampled": float(
            np.mean([t == e.answer for t, e in zip(sampled, examples, strict=True)])
        ),
        **{name: float(scores.mean()) for name, scores in graded.rewards.parts.items()},
        "reward": float(graded.rewards.total.mean()),
        **{f"exact/{kind}": float(np.mean(graded.exact[rows])) for kind, rows in kinds.items()},
        **{f"count/{kind}": float(rows.sum()) for kind, rows in kinds.items()},
    }
