"""How good a model is: greedy and sampled completions of held-out examples, scored.

The trainer and the evaluation tool call `measure`; `evaluate` gives its values as plain numbers.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from .model.encoding import decode
from .rewards import PendingRewards, RewardScorer
from .runtime.calibration import calibration as calibration
from .runtime.flags import ConfigError
from .runtime.graded import Graded as Graded
from .runtime.loss_arguments import whole
from .runtime.measures import SAMPLED, Estimate, Summaries, estimate, passes, summarise
from .runtime.measures import pass_at_k as pass_at_k
from .runtime.rng import uniforms
from .sampling.sampler import GREEDY, Sampler
from .types import Completions, Example, RewardTable, Task

BATCH = 256  # completions decoded together, unless --rollout-batch-size bounds them
Advance = Callable[[int], object]  # gets the number of examples that are done
Keep = Callable[[Graded, Graded], object]  # gets the greedy and the sampled completions


def answer(sampler: Sampler, examples: Sequence[Example]) -> list[str]:
    """The greedy completion of each example."""
    parts = sampler.complete(examples, batch_size=BATCH)
    return [group[0] for part in parts for group in decode(sampler.tokenizer, part)]


def grade(
    sampler: Sampler,
    scorer: RewardScorer,
    examples: Sequence[Example],
    *,
    seed: int | None = None,
    num_samples: int = 1,
    advance: Advance = lambda number: None,
) -> Graded:
    """Complete examples greedily, or `num_samples` times at temperature 1 if a seed is given.

    The random numbers depend on the seed and the example alone: all evaluations of a run are
    paired. Each batch is submitted for scoring as soon as it is decoded.
    """
    u = None
    if seed is not None:
        rows = np.array([example.index for example in examples])
        longest = sampler.config.sampling.max_new_tokens
        u = uniforms(seed, "evaluate", 0, rows, num_samples, longest)
    config = sampler.config
    size = config.memory.rollout_batch_size * config.sampling.group_size or BATCH
    batch = max(1, min(size, BATCH) // num_samples)
    parts, texts, pending = list[Completions](), list[Sequence[str]](), list[PendingRewards]()
    for part in sampler.complete(examples, num_samples=num_samples, u=u, batch_size=batch):
        answers, asked = decode(sampler.tokenizer, part), examples[len(texts) :][: len(part)]
        pending.append(scorer.submit(asked, answers))
        texts += answers
        if scorer.token_sources:  # others are not kept: they may take gigabytes
            parts.append(part)
        advance(len(part))
    table = RewardTable.join([scores.result() for scores in pending])
    if parts:
        joined = Completions.join(parts)
        table = scorer.with_token_parts(table, examples, texts, joined, GREEDY.temperature)
    return Graded(examples, texts, table, scorer.success)


def evaluate(
    sampler: Sampler, task: Task, scorer: RewardScorer, *, size: int, seed: int, samples: int = 1
) -> dict[str, float]:
    """The values of `measure`: the record of an evaluation in eval.jsonl."""
    found = measure(sampler, task, scorer, size=size, seed=seed, samples=samples)
    return {name: x.value for name, x in found.items()}


def measure(
    sampler: Sampler,
    task: Task,
    scorer: RewardScorer,
    *,
    size: int,
    seed: int,
    samples: int = 1,
    advance: Advance = lambda number: None,
    keep: Keep = lambda greedy, drawn: None,
) -> dict[str, Estimate]:
    """Score the first `size` held-out examples, or all if there are fewer.

    Args:
        scorer: of this kind of task; its seed may be another.
        seed: of the sampled completions.
        samples: completions that are sampled per example, besides the greedy one.

    Raises:
        ValueError: a size or a number of samples below 1, a seed below 0 or None, or the scorer of
            another task.

    Returns:
        Each measure with its 95 % interval (measures.py says which), in this order:
        n: the number of examples.
        <success>_sampled, <success>: share of right completions, sampled at temperature 1 and
            greedy. Right is a completion whose part `scorer.success` is 1, or if that is `exact`
            and no part, one that equals the true answer.
        <part>, <part>_sampled: the mean of each reward part over the examples that it concerns.
        reward, reward_sampled: their weighted sum.
        The task's summaries, in the same way.
        pass@1, ..., pass@K: with `samples` K above 1.
        <success>/<kind>, count/<kind>: greedy <success> and n by kind of question.
    """
    whole("size", size, least=1)
    whole("samples", samples, least=1)
    whole("seed", seed, least=0)
    if _kind(scorer.task) != _kind(task):
        raise ValueError("scorer must be made for the task that is evaluated: RewardScorer(task)")
    size = size_of(task, size)
    examples = [task.held_out(i) for i in range(size)]
    greedy = grade(sampler, scorer, examples, advance=advance)
    drawn = grade(sampler, scorer, examples, seed=seed, num_samples=samples, advance=advance)
    found = record_of(greedy, drawn, getattr(task, "summaries", None), seed)
    keep(greedy, drawn)
    success, kinds = greedy.success, by_kind(examples)
    shares = {f"{success}/{kind}": estimate(greedy.right[rows]) for kind, rows in kinds.items()}
    found |= {name: x for name, x in shares.items() if not math.isnan(x.value)}
    return found | {f"count/{kind}": Estimate(float(rows.sum())) for kind, rows in kinds.items()}


def size_of(task: Task, size: int) -> int:
    """The number of held-out examples that an evaluation of `size` has."""
    return min(size, getattr(task, "num_held_out", None) or size)


def record_of(
    greedy: Graded, drawn: Graded, summaries: Summaries | None = None, seed: int = 0
) -> dict[str, Estimate]:
    """The measures of an evaluation, without those by kind.

    Args:
        greedy: the greedy completions, one per example.
        drawn: the sampled completions of the same examples.
        seed: of the bootstrap samples for the intervals of the summaries.
    """
    found: dict[str, Estimate] = {"n": Estimate(float(len(greedy.examples)))}
    success = greedy.success
    for name, values in greedy.measures.items():
        both = {name: estimate(values), name + SAMPLED: estimate(drawn.measures[name])}
        # the headline is what GRPO raises: the sampled completions
        found |= dict(reversed(both.items())) if name == success else both
    if summaries:
        of_greedy, of_drawn = (
            summarise(summaries, graded.rewards.parts, seed) for graded in (greedy, drawn)
        )
        if twice := of_greedy.keys() & found.keys():
            raise ConfigError(
                "the summaries of a task and its reward parts must have different names, both have "
                f"{', '.join(sorted(twice))}"
            )
        found |= of_greedy | {name + SAMPLED: x for name, x in of_drawn.items()}
    found |= passes(drawn.right)
    ours = (success, success + SAMPLED)  # stay, because the headline is the first of the measures
    return {name: x for name, x in found.items() if name in ours or not math.isnan(x.value)}


def by_kind(examples: Sequence[Example]) -> dict[str, np.ndarray]:
    """For each kind of question, an `[n]` bool mask of its examples."""
    kinds = np.array([example.kind for example in examples])
    return {str(kind): kinds == kind for kind in np.unique(kinds) if kind}


def _kind(task: Task) -> tuple[type, list[str]]:
    """What two tasks share if a scorer of one can score the other: class and reward parts."""
    return type(getattr(task, "users", task)), list(task.parts)
