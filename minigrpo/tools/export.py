"""Write a model as a folder that transformers loads, with the files of its tokenizer.

minigrpo export RUN_OR_MODEL --out FOLDER

The adapters of a run with --lora-rank are merged into the weights. With --adapters they are written
alone, as a folder that PEFT loads with `PeftModel.from_pretrained(base, FOLDER)`. Nothing is ever
overwritten: the folder must be new or empty, and is there only once it is whole.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from ..build import RECORD, add_lora, config_of_run, fit_vocab, load_model, make_tokenizer
from ..config import Group
from ..model.hf import save_model_folder
from ..model.lora import load_trained, save_peft_folder
from ..model.tokenizer import CHAT_TEMPLATE, GENERATION_CONFIG, Tokenizer, copy_tokenizer_files
from ..model.transformer import ModelShape, Transformer
from ..runtime.checkpoint import load_checkpoint, newest
from ..runtime.console import Console
from ..types import ConfigError
from .evaluate import ModelArguments


class Arguments(Group):
    run: Annotated[str, tyro.conf.Positional]
    """A run's folder, a model's folder or file, ORG/NAME on the Hub, or shipped."""
    out: Path
    """The folder to write."""
    adapters: bool = False
    """Write the adapters of a run alone, as PEFT stores them."""
    task: str | None = None
    """Whose model `shipped` is."""
    tokenizer: str | None = None
    """chess, gpt2, a folder or ORG/NAME; by default that of the run or the model."""


def write_model(arguments: Arguments, folder: Path, console: Console) -> None:
    """Write the model, its tokenizer, and where `generate` has to stop. Raises ConfigError."""
    named = ModelArguments(run=arguments.run, task=arguments.task, tokenizer=arguments.tokenizer)
    config = named.config()
    tokenizer = make_tokenizer(config)
    model = load_model(arguments.run, task=config.task.name, say=console.warn)
    fit_vocab(model, arguments.run, tokenizer)
    save_model_folder(model, folder)
    write_tokenizer(tokenizer, folder)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    if tokenizer.source:
        copy_tokenizer_files(tokenizer.source, folder)
    if tokenizer.chat:
        (folder / CHAT_TEMPLATE).write_text(tokenizer.chat.source, encoding="utf-8")
    file = folder / GENERATION_CONFIG
    published = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    ends = [tokenizer.eot, *sorted(tokenizer.stops - {tokenizer.eot})]
    file.write_text(json.dumps({"pad_token_id": ends[0], **published, "eos_token_id": ends}))


def write_adapters(run: str, folder: Path, console: Console) -> None:
    """Write the adapters of a run. Raises ConfigError."""
    if not (Path(run) / RECORD).is_file() or not config_of_run(run).model.lora_rank:
        raise ConfigError(f"--adapters: {run} is no run with --lora-rank, so it has none")
    settings = config_of_run(run).model
    state = load_checkpoint(newest(Path(run) / "checkpoints", console.warn))
    # the base weights are not written
    model = Transformer.empty(ModelShape(**state["run"]["shape"]))
    add_lora(model, settings)
    load_trained(model, state["model"])
    save_peft_folder(model, folder, base=settings.name)


def main(argv: Sequence[str], prog: str) -> None:
    arguments = tyro.cli(Arguments, args=argv, prog=prog, description=__doc__)
    console, out = Console(), arguments.out
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"--out {out}: is there already; an export overwrites nothing")
    aside = out.with_name(f"{out.name}.partial-{os.getpid()}")
    aside.mkdir(parents=True)
    try:
        if arguments.adapters:
            write_adapters(arguments.run, aside, console)
        else:
            write_model(arguments, aside, console)
        os.rename(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    console.say(f"{arguments.run} -> {out}")
