"""Write a model as a folder that transformers loads, with the files of its tokenizer.

minigrpo export RUN_OR_MODEL --out FOLDER

The adapters of a run with --lora-rank are merged into the weights; the run's own folder has them as
PEFT loads them. The folder must be new.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from ..config import OnePath
from ..parts import Parts
from ..run.console import Console
from ..run.run_dir import TRAINED_ON
from .common import ModelArguments, config_of, parse


class Arguments(ModelArguments):
    out: OnePath
    """The folder to write."""


def main(argv: Sequence[str], prog: str) -> None:
    arguments, given = parse(Arguments, argv, prog, __doc__)
    console = Console()
    out = arguments.out
    parts = Parts(config_of(arguments, given), console=console)
    model = parts.model  # before the folder is made: it may be refused
    out.mkdir(parents=True)  # an error if it is there
    model.export(out)
    parts.tokenizer.save(out)
    trained_on = Path(arguments.run) / TRAINED_ON  # for honest evaluations of the exported model
    if trained_on.is_file():
        shutil.copyfile(trained_on, out / TRAINED_ON)
    args = parts.config.model.chat_args
    note = f"; give its chat template what it was trained with: {args}" if args else ""
    console.say(f"{arguments.run} -> {out}{note}")
