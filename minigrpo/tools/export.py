"""Write a model as a folder that transformers loads, with the files of its tokenizer.

minigrpo export RUN_OR_MODEL --out FOLDER

The adapters of a run with --lora-rank are merged into the weights; the run's own folder has them as
PEFT loads them. The folder must be new.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..build import Parts
from ..model.hf import read_json, save_model_folder
from ..model.tokenizer import CHAT_TEMPLATE, FILES, GENERATION_CONFIG
from ..run.console import Console
from ..run.run_dir import TRAINED_ON
from .evaluate import ModelArguments, parse


class Arguments(ModelArguments):
    out: Path
    """The folder to write."""


def main(argv: Sequence[str], prog: str) -> None:
    arguments, config = parse(Arguments, argv, prog, __doc__)
    console, out = Console(), arguments.out
    parts = Parts(config, console=console)
    model, tokenizer = parts.model, parts.tokenizer
    out.mkdir(parents=True)  # an error if it is there
    save_model_folder(model, out)
    copied = [tokenizer.source / name for name in FILES]
    copied.append(Path(arguments.run) / TRAINED_ON)  # for honest evaluations of the exported model
    for file in filter(Path.is_file, copied):
        shutil.copyfile(file, out / file.name)
    if tokenizer.chat:
        (out / CHAT_TEMPLATE).write_text(tokenizer.chat.source, "utf-8")
    file = out / GENERATION_CONFIG  # says where `generate` has to stop
    ends = [tokenizer.eot, *sorted(tokenizer.stops - {tokenizer.eot})]
    settings = {"pad_token_id": ends[0], **read_json(file), "eos_token_id": ends}
    file.write_text(json.dumps(settings))
    console.say(f"{arguments.run} -> {out}")
