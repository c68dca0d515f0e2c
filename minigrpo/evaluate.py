"""How good a model is: greedy and sampled completions of held-out examples, scored."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from .metrics import SAMPLED, Graded
from .rewards.scorer import RewardScorer
from .rng import uniforms
from .runtime.distributed import DistContext
from .runtime.signals import Stopped
from .sampling.sampler import Sampled, Sampler
from .settings import SamplingConfig
from .statistics import Estimate, estimate, passes
from .statistics import calibration as calibration
from .statistics import pass_at_k as pass_at_k
from .task import Task
from .tasks.rows import as_json, parse_any
from .text.chat import Message
from .turns.environments import TurnTask
from .types import Completion, Example

PLAIN = SamplingConfig()  # samples from the model's own distribution
ALONE = DistContext()
BATCH = 256  # completions decoded together, unless --rollout-batch-size bounds them


def complete_examples(
    sampler: Sampler,
    examples: Sequence[Example],
    n: int = 0,
    sampling: SamplingConfig = PLAIN,
) -> Sampled:
    """n completions of each example, or for 0 the greedy one.

    Random numbers depend on the run's seed and the example: all evaluations of a run are paired.
    """
    config = sampler.config
    numbers = None
    if n:
        indices = np.array([example.index for example in examples])
        longest = config.sampling.max_new_tokens
        numbers = uniforms(config.run.seed, "evaluate", 0, indices, n, longest)
    num_samples = max(1, n)
    most = config.memory.rollout_batch_size * config.sampling.group_size or BATCH
    return sampler.complete(
        examples,
        num_samples=num_samples,
        uniforms=numbers,
        sampling=sampling,
        batch_size=max(1, min(most, BATCH) // num_samples),
    )


def complete_prompt(
    sampler: Sampler,
    prompt: str | Sequence[Message],
    n: int,
    raw: bool,
    task: Task | None = None,
) -> Sequence[Completion]:
    """n completions of a prompt, or for 0 the greedy one; a `raw` text is no user's message.

    The environments and tools of a `task` answer it as a row that has no more than the prompt.
    """
    if isinstance(prompt, str) and sampler.tokenizer.chat and not raw:
        prompt = [{"role": "user", "content": prompt}]
    row = as_json({"prompt": prompt})
    example = parse_any(row).example
    if isinstance(task, TurnTask):
        example = task.ask(example, 0, "prompt")
    return complete_examples(sampler, [example], n, sampler.config.sampling).texts[0]


def grade(
    sampler: Sampler,
    scorer: RewardScorer,
    examples: Sequence[Example],
    n: int = 0,
    sampling: SamplingConfig = PLAIN,
) -> Graded:
    """Complete examples as `complete_examples` does, and score the texts."""
    sampled = complete_examples(sampler, examples, n, sampling)
    rewards = scorer.score(examples, sampled.texts, sampled.completions, sampling.temperature)
    return Graded(examples, sampled.texts, rewards, scorer.success)


@dataclass(frozen=True)
class Evaluation:
    measures: dict[str, Estimate]  # listed in docs/tasks.md; a task's summary has no interval
    greedy: Graded
    sampled: Graded


def measure(
    sampler: Sampler,
    scorer: RewardScorer,
    dist: DistContext = ALONE,
    breaking_off: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Evaluation:
    """Score the first --eval-size held-out examples, or all if there are fewer.

    Each process scores a share, `breaking_off` when it is asked to stop: all then raise Stopped.
    Measures that no example has are left out, except the headline, which may be NaN.
    """
    run = sampler.config.run
    examples = held_out_examples(scorer.task, run.eval_size)
    own = [examples[number] for number in dist.share(len(examples))]

    def grade_own() -> list[tuple[Graded, Graded]] | None:
        try:
            with breaking_off():
                if not own:
                    return []
                greedy = grade(sampler, scorer, own)
                sampled = grade(sampler, scorer, own, run.eval_samples)
                return [(greedy, sampled)]
        except Stopped:
            return None

    pairs: list[tuple[Graded, Graded]] = []
    with sampler.current_model:
        shares = dist.on_all(grade_own)
    for share in shares:
        if share is None:
            raise Stopped
        pairs += share
    greedy, sampled = map(Graded.join, zip(*pairs, strict=True))
    success = greedy.success
    measures = {"n": Estimate(sampled.measures[success].known_values.size)}

    # 1. Means, and first those of the sampled completions, which GRPO raises.
    for name in greedy.measures:
        for graded, ending in ((sampled, SAMPLED), (greedy, "")):
            of_examples = graded.measures[name]
            if of_examples.known.any() or name == success:
                measures[name + ending] = estimate(of_examples.known_values)

    # 2. The task's summaries.
    for graded, ending in ((greedy, ""), (sampled, SAMPLED)):
        values = dict[str, np.ndarray]()
        for name, scores in graded.rewards.scores.items():
            values[name] = np.where(scores.known, scores.values, np.nan).ravel()
        for name, value in scorer.task.summaries(values).items():
            if not math.isnan(value):
                measures[name + ending] = Estimate(float(value))

    # 3. pass@k, and the success by kind of question.
    measures |= passes(sampled.right)
    of_examples = greedy.measures[success]
    kinds = np.array([example.kind for example in examples])
    for kind in np.unique(kinds).tolist():
        chosen = of_examples.known & (kinds == kind)
        if kind and chosen.any():
            measures[f"{success}/{kind}"] = estimate(of_examples.values[chosen])
    return Evaluation(measures, greedy, sampled)


def held_out_examples(task: Task, number: int) -> list[Example]:
    if task.num_held_out is not None:
        number = min(number, task.num_held_out)
    return [task.held_out(i) for i in range(number)]
