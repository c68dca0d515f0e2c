"""How good a model is: greedy and sampled completions of held-out examples, scored.

The trainer and `minigrpo evaluate` call `measure`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .config import SamplingConfig
from .metrics import SAMPLED, Graded
from .model.chat import Message
from .rewards import RewardScorer
from .runtime.rng import uniforms
from .runtime.statistics import Estimate, estimate, passes
from .runtime.statistics import calibration as calibration
from .runtime.statistics import pass_at_k as pass_at_k
from .sampling.generate import PLAIN
from .sampling.sampler import Sampler
from .task import Task
from .types import Completions, Example

BATCH = 256  # completions decoded together, unless --rollout-batch-size bounds them


def complete(
    sampler: Sampler, examples: Sequence[Example], n: int = 0, sampling: SamplingConfig = PLAIN
) -> tuple[Completions, list[list[str]]]:
    """n completions of each example, or for 0 the greedy one, and their texts `[P][n]`.

    The random numbers depend on the run's seed and the example alone: all evaluations of a run are
    paired.
    """
    config = sampler.config
    u = None
    if n:
        indices = np.array([example.index for example in examples])
        u = uniforms(config.run.seed, "evaluate", 0, indices, n, config.sampling.max_new_tokens)
    num_samples = max(1, n)
    most = config.memory.rollout_batch_size * config.sampling.group_size or BATCH
    return sampler.complete(
        examples,
        num_samples=num_samples,
        u=u,
        sampling=sampling,
        batch_size=max(1, min(most, BATCH) // num_samples),
    )


def complete_prompt(
    sampler: Sampler, prompt: str | Sequence[Message], n: int, raw: bool
) -> tuple[list[str], list[bool]]:
    """n completions of a prompt, or for 0 the greedy one; and which of them ended by themselves.

    A text is a user's message if the model has a chat template, unless it is `raw`.
    """
    if not isinstance(prompt, str):
        example = Example("", messages=tuple(prompt))
    elif sampler.tokenizer.chat and not raw:
        example = Example(prompt, messages=({"role": "user", "content": prompt},))
    else:
        example = Example(prompt)
    completions, texts = complete(sampler, [example], n, sampler.config.sampling)
    return texts[0], completions.ended(sampler.stops)[0].tolist()


def grade(
    sampler: Sampler,
    scorer: RewardScorer,
    examples: Sequence[Example],
    n: int = 0,
    sampling: SamplingConfig = PLAIN,
) -> Graded:
    """Complete examples as `complete` does, and score the texts."""
    completions, texts = complete(sampler, examples, n, sampling)
    rewards = scorer.score(examples, texts, completions, sampling.temperature)
    return Graded(examples, texts, rewards, scorer.success)


@dataclass(frozen=True)
class Evaluation:
    """What `measure` finds."""

    # docs/tasks.md lists the measures; shares and means have their 95 % interval, the task's
    # summaries have none
    measures: dict[str, Estimate]
    greedy: Graded
    sampled: Graded


def measure(sampler: Sampler, scorer: RewardScorer) -> Evaluation:
    """Score the first --eval-size held-out examples, or all if there are fewer."""
    run = sampler.config.run
    examples = held_out(scorer.task, run.eval_size)
    greedy = grade(sampler, scorer, examples)
    sampled = grade(sampler, scorer, examples, run.eval_samples)
    measures = {"n": Estimate(float(len(examples)))}

    # 1. Means; first of the sampled completions, which GRPO raises.
    for name, values in greedy.measures.items():
        measures[name + SAMPLED] = estimate(sampled.measures[name])
        measures[name] = estimate(values)
    # 2. The task's summaries.
    for graded, ending in ((greedy, ""), (sampled, SAMPLED)):
        parts = {name: values.flatten() for name, values in graded.rewards.parts.items()}
        for name, value in scorer.task.summaries(parts).items():
            measures[name + ending] = Estimate(float(value))
    # 3. pass@k, and the success by kind of question.
    measures |= passes(sampled.right)
    success = greedy.success
    kinds = np.array([example.kind for example in examples])
    for kind in filter(None, map(str, np.unique(kinds))):
        measures[f"{success}/{kind}"] = estimate(greedy.measures[success][kinds == kind])

    stay = (success, success + SAMPLED)  # the headline, whatever it is
    known = {name: x for name, x in measures.items() if name in stay or not math.isnan(x.value)}
    return Evaluation(known, greedy, sampled)


def held_out(task: Task, number: int) -> list[Example]:
    """The first held-out examples, or all if there are fewer."""
    return [task.held_out(i) for i in range(min(number, task.num_held_out or number))]
