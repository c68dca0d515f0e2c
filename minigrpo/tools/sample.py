"""Prompt a model with a text of your own, or show its answers to held-out examples.

minigrpo sample MODEL --prompt "Why is the sky blue?" --temperature 0.7
minigrpo sample RUN --examples 5 --n 4
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import tyro
from pydantic import Field

from ..build import make_scorer
from ..config import SamplingConfig
from ..evaluate import size_of
from ..model.encoding import decode
from ..runtime.console import Console
from ..runtime.rng import uniforms
from ..runtime.stats import has_ended
from ..sampling.generate import Sampler
from ..types import Completions, Example, Graded, Task
from .cli import printable
from .evaluate import ModelArguments, load_sampler

PROMPTS_AT_ONCE = 32


class Arguments(ModelArguments):
    prompt: str = ""
    """A text for the model: a user's message if the model has a chat template, else as it is."""
    raw: bool = False
    """Send --prompt as it is, without the chat template."""
    examples: Annotated[int, Field(ge=1)] = 3
    """Without --prompt: the number of held-out examples."""
    n: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Completions to sample per prompt; 0: a single greedy one."""
    temperature: float | None = None
    """As for minigrpo train, as are the next; each of them makes --n at least 1."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    @property
    def num_samples(self) -> int:
        """Completions to sample per prompt; 0: a single greedy one."""
        distribution = (self.temperature, self.top_k, self.top_p, self.min_p)
        return self.n or int(any(x is not None for x in distribution))


def complete(
    sampler: Sampler, examples: Sequence[Example], num_samples: int, *, drafts: bool
) -> Completions:
    """Greedy completions, or `num_samples` sampled ones per example."""
    config, u, sampling = sampler.config, None, SamplingConfig()
    if num_samples:
        rows = np.array([example.index for example in examples])
        longest = config.sampling.max_new_tokens
        u = uniforms(config.run.seed, "tools/sample", 0, rows, num_samples, longest)
        sampling = config.sampling
    each = max(1, num_samples)
    size = max(1, PROMPTS_AT_ONCE // each)
    parts = sampler.complete(
        examples, num_samples=each, u=u, sampling=sampling, batch_size=size, drafts=drafts
    )
    return Completions.join(list(parts))


def answer(console: Console, sampler: Sampler, arguments: Arguments) -> None:
    """Print the completions of --prompt."""
    is_chat = sampler.tokenizer.chat is not None and not arguments.raw
    messages = ({"role": "user", "content": arguments.prompt},) if is_chat else ()
    example = Example(arguments.prompt, messages=messages)
    completions = complete(sampler, [example], arguments.num_samples, drafts=False)
    ended = has_ended(completions, sampler.stops)[0].tolist()
    for text, is_whole in zip(decode(sampler.tokenizer, completions)[0], ended, strict=True):
        console.say(printable(text) + ("" if is_whole else " ... (cut off: --max-new-tokens)"))


def show(console: Console, task: Task, graded: Graded) -> None:
    """Print prompts, their answers in the data, and each distinct completion with its count."""
    rows = zip(graded.examples, graded.texts, graded.right, graded.rewards.total, strict=True)
    for example, texts, right, rewards in rows:
        lines = [f"prompt      {example.prompt}", f"answer      {example.answer}"]
        for text, count in Counter(texts).most_common():
            place = texts.index(text)
            verdict = "right" if right[place] == 1 else "wrong"
            times = f", {count} of {len(texts)}" if len(texts) > 1 else ""
            lines.append(f"completion  {text}   {verdict}, reward {rewards[place]:.3g}{times}")
            if verdict == "wrong" and (why := task.explain(example, text)):
                lines.append(f"            {why}")
        console.say(printable("\n".join([*lines, ""])))


def main(argv: Sequence[str], prog: str) -> None:
    arguments = tyro.cli(Arguments, args=argv, prog=prog, description=__doc__)
    console, config = Console(), arguments.config()
    if arguments.prompt:  # the task is of no interest, and its files may be gone
        config = config.replace(system="") if arguments.raw else config
        answer(console, load_sampler(config, console.warn, speculate=False), arguments)
        return
    task = arguments.load_task(config)
    sampler = load_sampler(config, console.warn, speculate=task.speculate)
    examples = [task.held_out(i) for i in range(size_of(task, arguments.examples))]
    completions = complete(sampler, examples, arguments.num_samples, drafts=True)
    texts = decode(sampler.tokenizer, completions)
    temperature = config.sampling.temperature if arguments.num_samples else 1.0
    scorer = make_scorer(config, task, sampler.tokenizer, sampler.model.device, console.warn)
    rewards = scorer.score_completions(examples, texts, completions, temperature)
    show(console, task, Graded(examples, texts, rewards, scorer.success))
