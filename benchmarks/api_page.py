"""Print docs/api.md, made from docstrings: `python benchmarks/api_page.py > docs/api.md`."""

import inspect
import re
from pkgutil import resolve_name
from typing import Any

HEAD = """# Python API

What your script may import. This page is made from the docstrings of the code, which say more:
`help(minigrpo.losses.policy_loss)`. P are prompts, G completions per prompt, and S tokens of the
longest completion.
"""
# what has a section, by the name that imports it, with the members that are shown
SECTIONS = {
    "minigrpo.train": (),
    "minigrpo.reward": (),
    "minigrpo.Task": ("train", "held_out", "known", "score", "score_tokens", "summaries"),
    "minigrpo.api.TrainedRun": ("metrics", "evaluations", "sample"),
}
FURTHER = (
    "minigrpo.Trainer",
    "minigrpo.Trainer.one_step",
    "minigrpo.Transformer.from_pretrained",
    "minigrpo.Transformer.logits",
    "minigrpo.task.TokenBatch",
    "minigrpo.losses.policy_loss",
    "minigrpo.losses.LossInputs",
    "minigrpo.losses.LossSpec",
    "minigrpo.advantages.advantages",
    "minigrpo.tasks.code.run_tests",
    "minigrpo.tasks.countdown.solves",
    "minigrpo.turns.tools.calls_of",
    "minigrpo.rewards.is_valid_fen",
    "minigrpo.evaluate.pass_at_k",
    "minigrpo.evaluate.calibration",
)
ARGUMENTS = re.compile(r"\nArgs:\n((?: {4}.*\n?)+)")


def page() -> str:
    sections = [section(name, members) for name, members in SECTIONS.items()]
    further = [line(name, resolve_name(name)) for name in FURTHER]
    return "\n".join([HEAD, *sections, "## Parts to use alone\n", *further, ""])


def section(name: str, members: tuple[str, ...]) -> str:
    value = resolve_name(name)
    text = inspect.getdoc(value) or ""
    described = ARGUMENTS.sub(lambda found: "\n" + as_list(found[1]), text)
    lines = [line(call(member, value), getattr(value, member)) for member in members]
    parts = [f"## {name}\n", f"`{call(name)}`\n", described, "", *lines]
    return "\n".join(parts).rstrip() + "\n"


def as_list(arguments: str) -> str:
    """The arguments in a docstring of Google's style, as a list."""
    return re.sub(r"^ {4}(?! )", "- ", arguments, flags=re.MULTILINE).replace("\n     ", "\n ")


def line(called: str, value: Any) -> str:
    first_paragraph = (inspect.getdoc(value) or "").split("\n\n")[0]
    return f"- `{called}`: {' '.join(first_paragraph.split())}"


def call(name: str, owner: Any = None) -> str:
    """A call with the names of all arguments, and those defaults that are short."""
    value = getattr(owner, name) if owner else resolve_name(name)
    last = name.rpartition(".")[2]
    if not callable(value):  # a property
        return last
    arguments = []
    for argument in inspect.signature(value).parameters.values():
        stars = "**" if argument.kind is argument.VAR_KEYWORD else ""
        default = "" if argument.default is argument.empty else f"={argument.default!r}"
        arguments.append(stars + argument.name + (default if len(default) < 20 else ""))
    return f"{last}({', '.join(name for name in arguments if name != 'self')})"


if __name__ == "__main__":
    print(page(), end="")
