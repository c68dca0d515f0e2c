"""How good a model is: greedy and sampled completions of held-out examples, scored.

The trainer and `minigrpo evaluate` call `measure`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .config import Config, RunConfig, SamplingConfig
from .model.chat import Message
from .rewards import RewardScorer
from .runtime.rng import uniforms
from .runtime.stats import SAMPLED, Estimate, Graded, estimate, has_ended, passes
from .runtime.stats import calibration as calibration
from .runtime.stats import pass_at_k as pass_at_k
from .sampling.generate import PLAIN, Sampler
from .task import Task
from .types import Completions, Example

BATCH = 256  # completions decoded together, unless --rollout-batch-size bounds them


def complete(
    sampler: Sampler,
    examples: Sequence[Example],
    *,
    seed: int | None = None,
    num_samples: int = 1,
    sampling: SamplingConfig = PLAIN,
) -> Completions:
    """Complete examples greedily, or `num_samples` times by `sampling` if a seed is given.

    The random numbers depend on the seed and the example alone: all evaluations of a run are
    paired.
    """
    config, u = sampler.config, None
    if seed is not None:
        rows = np.array([example.index for example in examples])
        u = uniforms(seed, "evaluate", 0, rows, num_samples, config.sampling.max_new_tokens)
    most = config.memory.rollout_batch_size * config.sampling.group_size or BATCH
    size = max(1, min(most, BATCH) // num_samples)
    return sampler.complete(
        examples, num_samples=num_samples, u=u, sampling=sampling, batch_size=size
    )


def drawing(config: Config, n: int) -> dict[str, Any]:
    """The arguments with which `complete` draws n completions, or for 0 the greedy one."""
    if not n:
        return {}
    return {"seed": config.run.seed, "num_samples": n, "sampling": config.sampling}


def ask(
    sampler: Sampler, prompt: str | Sequence[Message], n: int = 1, *, raw: bool = False
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
    done = complete(sampler, [example], **drawing(sampler.config, n))
    return sampler.texts(done)[0], has_ended(done, sampler.stops)[0].tolist()


def grade(
    sampler: Sampler,
    scorer: RewardScorer,
    examples: Sequence[Example],
    *,
    sampling: SamplingConfig = PLAIN,
    **how: Any,
) -> Graded:
    """Complete examples and score the texts. `how`: more arguments of `complete`."""
    completions = complete(sampler, examples, sampling=sampling, **how)
    texts = sampler.texts(completions)
    rewards = scorer.score(examples, texts, completions, sampling.temperature)
    return Graded(examples, texts, rewards, scorer.success)


def measure(
    sampler: Sampler, task: Task, scorer: RewardScorer, run: RunConfig
) -> tuple[dict[str, Estimate], Graded, Graded]:
    """Score the first `run.eval_size` held-out examples, or all if there are fewer.

    Returns:
        The measures (docs/tasks.md lists them), the greedy completions and the sampled ones. Shares
        and means have their 95 % interval, the task's summaries have none.
    """
    size, samples = size_of(task, run.eval_size), run.eval_samples
    examples = [task.held_out(i) for i in range(size)]
    greedy = grade(sampler, scorer, examples)
    drawn = grade(sampler, scorer, examples, seed=run.seed, num_samples=samples)
    success, found = greedy.success, {"n": Estimate(float(size))}
    for name, values in greedy.measures.items():  # first what GRPO raises: the sampled completions
        found |= {name + SAMPLED: estimate(drawn.measures[name]), name: estimate(values)}
    for graded, ending in ((greedy, ""), (drawn, SAMPLED)):
        parts = {name: values.flatten() for name, values in graded.rewards.parts.items()}
        found |= {name + ending: Estimate(float(x)) for name, x in task.summaries(parts).items()}
    found |= passes(drawn.right)
    kinds = np.array([example.kind for example in examples])
    for kind in filter(None, map(str, np.unique(kinds))):
        found[f"{success}/{kind}"] = estimate(greedy.measures[success][kinds == kind])
        found[f"count/{kind}"] = Estimate(float((kinds == kind).sum()))
    stay = (success, success + SAMPLED)  # the headline, whatever it is
    found = {name: x for name, x in found.items() if name in stay or not math.isnan(x.value)}
    return found, greedy, drawn


def size_of(task: Task, size: int) -> int:
    """The number of held-out examples that an evaluation of `size` has."""
    return min(size, task.num_held_out or size)
