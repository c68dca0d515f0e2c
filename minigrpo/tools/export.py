"""Write a run's or a file's model as a folder that transformers loads:
`GPT2LMHeadModel.from_pretrained(FOLDER)`.

python -m minigrpo.tools.export RUN_OR_MODEL --out FOLDER
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..model.weights import export_gpt2
from ..runtime.flags import exit_with, parse
from ..runtime.logging import Screen
from .loading import load_model


@dataclass(frozen=True)
class Arguments:
    run: Annotated[Path, tyro.conf.Positional]
    """A run's folder, a model (GPT-2 safetensors or their folder), or shipped."""
    out: Path
    """The folder to write."""


def main() -> None:
    screen = Screen()
    try:
        arguments = parse(Arguments, description=__doc__, prog="python -m minigrpo.tools.export")
        name, model = load_model(arguments.run, screen.warn)
        # the last token is the end of text in every tokenizer here, and a run has no padding in its
        # vocabulary
        export_gpt2(
            model.state_dict(),
            arguments.out,
            shape=asdict(model.shape),
            eos=model.shape.vocab_size - 1,
        )
    except ValueError as error:
        exit_with(error)
    except OSError as error:
        exit_with(ValueError(f"--out {arguments.out}: cannot be written ({error.strerror})"))
    screen.say(f"{name} -> {arguments.out}")


if __name__ == "__main__":
    main()
