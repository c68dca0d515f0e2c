"""How good a model is: greedy and sampled completions of held-out examples, scored.

The trainer and `minigrpo evaluate` call `measure`.
"""

import math
from collections.abc import Sequence

import numpy as np

from .config import SamplingConfig
from .metrics import SAMPLED, Graded
from .model.chat import Message
from .rewards import RewardScorer
from .runtime.rng import uniforms
from .runtime.statistics import Estimate, estimate, passes
from .runtime.statistics import calibration as calibration
from .runtime.statistics import pass_at_k as pass_at_k
from .sampling.generate import PLAIN, Sampler
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
    config, u, num_samples = sampler.config, None, max(1, n)
    if n:
        rows = np.array([example.index for example in examples])
        u = uniforms(config.run.seed, "evaluate", 0, rows, n, config.sampling.max_new_tokens)
    most = config.memory.rollout_batch_size * config.sampling.group_size or BATCH
    size = max(1, min(most, BATCH) // num_samples)
    return sampler.complete(
        examples, num_samples=num_samples, u=u, sampling=sampling, batch_size=size
    )


def ask(
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
    done, texts = complete(sampler, [example], n, sampler.config.sampling)
    return texts[0], done.ended(sampler.stops)[0].tolist()


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


def measure(sampler: Sampler, scorer: RewardScorer) -> tuple[dict[str, Estimate], Graded, Graded]:
    """Score the first --eval-size held-out examples, or all if there are fewer.

    Returns:
        The measures (docs/tasks.md lists them), the greedy completions and the sampled ones. Shares
        and means have their 95 % interval, the task's summaries have none.
    """
    task, run = scorer.task, sampler.config.run
    examples = held_out(task, run.eval_size)
    greedy = grade(sampler, scorer, examples)
    drawn = grade(sampler, scorer, examples, run.eval_samples)
    success, found = greedy.success, {"n": Estimate(float(len(examples)))}
    for name, values in greedy.measures.items():  # first what GRPO raises: the sampled completions
        found |= {name + SAMPLED: estimate(drawn.measures[name]), name: estimate(values)}
    for graded, ending in ((greedy, ""), (drawn, SAMPLED)):
        parts = {name: values.flatten() for name, values in graded.rewards.parts.items()}
        found |= {name + ending: Estimate(float(x)) for name, x in task.summaries(parts).items()}
    found |= passes(drawn.right)
    kinds = np.array([example.kind for example in examples])
    for kind in filter(None, map(str, np.unique(kinds))):
        found[f"{success}/{kind}"] = estimate(greedy.measures[success][kinds == kind])
    stay = (success, success + SAMPLED)  # the headline, whatever it is
    found = {name: x for name, x in found.items() if name in stay or not math.isnan(x.value)}
    return found, greedy, drawn


def held_out(task: Task, number: int) -> list[Example]:
    """The first held-out examples, or all if there are fewer."""
    return [task.held_out(i) for i in range(min(number, task.num_held_out or number))]
