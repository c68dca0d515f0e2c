"""Prompt a model with a text of your own, or show its answers to held-out examples.

minigrpo sample MODEL --prompt "Why is the sky blue?" [flags of minigrpo train]
minigrpo sample RUN --examples 5 --n 4

It samples with the settings of the run unless flags change them, such as --temperature 0.7.
"""

from collections.abc import Sequence

from pydantic import NonNegativeInt, PositiveInt

from ..evaluate import complete_prompt, grade, held_out
from ..metrics import Graded
from ..run.console import Console
from ..sampling.sampler import Sampler
from ..types import EXACT
from .cli import printable
from .common import ModelArguments, config_of, open_parts, parse


class Arguments(ModelArguments):
    prompt: str = ""
    """A text for the model: a user's message if the model has a chat template, else as it is."""
    raw: bool = False
    """Send --prompt as it is, without the chat template."""
    examples: PositiveInt = 3
    """Without --prompt: the number of held-out examples."""
    n: NonNegativeInt = 1
    """Completions to sample per prompt; 0: the greedy one."""


def show(console: Console, graded: Graded) -> None:
    """Print prompts, answers, and each completion or dialogue with its reward."""
    # only an answer that a right completion equals is certainly the known one
    name = "answer" if graded.success == EXACT else "reference"
    rows = zip(graded.examples, graded.texts, graded.right, graded.rewards.total, strict=True)
    for example, *completions in rows:
        lines = [f"prompt      {example.prompt}"]
        lines += [f"{name:<10}  {example.answer}"] if example.answer else []
        for text, right, reward in zip(*completions, strict=True):
            verdict = {1: "right, ", 0: "wrong, "}.get(right, "")  # NaN: not known
            said = getattr(text, "messages", [{"role": "completion", "content": text}])
            lines += [f"{x['role']:<10}  {x['content']}" for x in said]
            lines[-1] += f"   {verdict}reward {reward:.3g}"
        console.say(printable("\n".join([*lines, ""])))


def main(argv: Sequence[str], prog: str) -> None:
    arguments, given = parse(Arguments, argv, prog, __doc__)
    config = config_of(arguments, given | ({"system": ""} if arguments.raw else {}))
    console = Console()
    parts = open_parts(config, console)
    if arguments.prompt:  # the run's task is of no interest, and its files may be gone
        sampler = Sampler(
            config,
            parts.model,
            parts.tokenizer,
            autocast=parts.precision.autocast,
            warn=console.warn,
        )
        texts, whole = complete_prompt(sampler, arguments.prompt, arguments.n, raw=arguments.raw)
        for number, (text, is_whole) in enumerate(zip(texts, whole, strict=True), 1):
            label = f"[{number}] " if len(texts) > 1 else ""
            ending = "" if is_whole else " ... (cut off: --max-new-tokens)"
            console.say(f"{label}{printable(text)}{ending}")
        return
    examples = held_out(parts.task, arguments.examples)
    graded = grade(parts.sampler, parts.scorer, examples, arguments.n, config.sampling)
    show(console, graded)
