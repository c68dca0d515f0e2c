"""Write a model as a folder that transformers loads with `GPT2LMHeadModel.from_pretrained`.

minigrpo export RUN_OR_MODEL --out FOLDER
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..model.weights import export_model
from ..runtime.flags import exit_with, parse
from ..runtime.logging import Screen
from .loading import load_model


@dataclass(frozen=True)
class Arguments:
    run: Annotated[Path, tyro.conf.Positional]
    """A run's folder, a model (GPT-2 safetensors or their folder), or shipped."""
    out: Path
    """The folder to write."""


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    screen = Screen()
    try:
        arguments = parse(Arguments, argv, description=__doc__, prog=prog or "minigrpo export")
        name, model = load_model(arguments.run, screen.warn)
        # In every tokenizer here the last token is the end of text, and the vocabulary of a run
        # has no padding after it.
        end_of_text = model.shape.vocab_size - 1
        export_model(model.state_dict(), arguments.out, shape=model.shape, eos=end_of_text)
    except ValueError as error:
        exit_with(error)
    except OSError as error:
        exit_with(ValueError(f"--out {arguments.out}: cannot be written ({error.strerror})"))
    screen.say(f"{name} -> {arguments.out}")


if __name__ == "__main__":
    main()
