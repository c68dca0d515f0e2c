"""Write a model as a folder that transformers loads, with the files of its tokenizer.

minigrpo export RUN_OR_MODEL --out FOLDER

The adapters of a run with --lora-rank are merged into the weights. With --adapters they are written
alone, as a folder that PEFT loads with `PeftModel.from_pretrained(base, FOLDER)`.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from safetensors import SafetensorError

from ..model.hub import cached_folder, local_folder
from ..model.lora import PEFT_CONFIG, PEFT_WEIGHTS, adapters, merge_adapters, peft_files
from ..model.shape import ModelShape
from ..model.tokenizer import Tokenizer, load_tokenizer
from ..model.tokenizer_files import (
    CHAT_TEMPLATE,
    FILES,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    copy_tokenizer_files,
    end_numbers,
    has_tokenizer,
    read_chat_template,
)
from ..model.transformer import Transformer
from ..model.weight_files import CONFIG, INDEX, WEIGHTS, WeightFiles, read_json
from ..model.weights import export_model
from ..runtime.base_model import loadable_base
from ..runtime.build import is_padded
from ..runtime.flags import ConfigError, parse
from ..runtime.folder import OF_A_RUN
from ..runtime.logging import Screen
from ..runtime.outputs import check_output_folder, one_line, write_output
from ..runtime.settings import is_run
from ..runtime.text import check_file_name
from ..runtime.tokenizers import warn_of_other_tokenizer
from ..runtime.trained import load_model
from .loading import ModelSelection, config_of
from .loading import tokenizer_of as tokenizer_of_selection
from .messages import one_line_errors

MARK, WRITER = "written_by", "minigrpo export"  # in config.json, or in the file of adapters


@dataclass(frozen=True)
class Arguments:
    run: Annotated[str, tyro.conf.Positional]  # no Path, which would lose its ./
    """A run's folder, a model's folder or file, ORG/NAME on the Hub, or shipped."""
    out: str
    """The folder to write."""
    adapters: bool = False
    """Write the adapters of a run alone, as PEFT stores them."""
    tokenizer: str = ""
    """chess, gpt2, a path or ORG/NAME; empty: the run's, or the one in the model's folder."""

    def check(self) -> None:
        """Raises ConfigError, in one line, for a folder that cannot or must not be written."""
        check_file_name(self.run)
        check_output_folder("--out", self.out)
        folder = Path(self.out)
        own = [name for name in (*OF_A_RUN, "checkpoints") if not name.endswith(".safetensors")]
        if left := [name for name in own if (folder / name).exists()]:
            raise ConfigError(
                f"--out {folder}: holds a run, which an export would overwrite (found: {left[0]})"
            )
        for name in (WEIGHTS, CONFIG, PEFT_WEIGHTS, PEFT_CONFIG, *FILES):
            if (folder / name).is_dir():
                raise ConfigError(f"--out {folder}: {name} in it is a folder, not a file")
        others = (WEIGHTS, INDEX) if self.adapters else (PEFT_WEIGHTS,)
        if found := [name for name in others if (folder / name).exists()]:
            # transformers would load both as one model
            raise ConfigError(f"--out {folder}: holds {found[0]}; take another folder")
        self._check_that_no_model_is_lost(folder)
        if self.adapters and not is_run(Path(self.run)):
            raise ConfigError(f"--adapters: {self.run} is no run, so it has no adapters")

    def _check_that_no_model_is_lost(self, folder: Path) -> None:
        """Raise ConfigError if the export would overwrite a model that is no export, or needed."""
        for name in (self.run, *bases(self.run)):
            source = cached_folder(name) or Path(name)
            target = folder / WEIGHTS if source.is_file() else folder
            if source.exists() and target.exists() and source.samefile(target):
                what = "the model to export" if name == self.run else f"the base of {self.run}"
                raise ConfigError(f"--out {folder}: is {what}; take another folder")
        of_a_model = (WEIGHTS, CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG)
        of_adapters = (PEFT_WEIGHTS, PEFT_CONFIG)
        names = of_adapters if self.adapters else of_a_model
        there = [name for name in names if (folder / name).exists()]
        if there and not is_export(folder, adapters=self.adapters):
            raise ConfigError(
                f"--out {folder}: has {there[0]}, which this command did not write; take another "
                "folder"
            )


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors("stopped; nothing was written"):
        arguments = parse(Arguments, argv, description=__doc__, prog=prog or "minigrpo export")
        arguments.check()
        screen, tokenizer = Screen(), tokenizer_of(arguments)
        name, model = load_model(arguments.run, screen.warn)
        if arguments.adapters:
            write_adapters(arguments.run, model, Path(arguments.out), screen)
            screen.say(f"{name} -> {arguments.out}")
            return
        if tokenizer:
            ends = ends_of(tokenizer, model.shape.vocab_size, name)
            warn_of_other_tokenizer(arguments.run, tokenizer, screen.warn)
        else:
            ends = ends_without_tokenizer(arguments.run, model.shape, screen.warn)
        write(merge_adapters(model), Path(arguments.out), ends, tokenizer)
        screen.say(f"{name} -> {arguments.out}")


def is_export(folder: Path, *, adapters: bool) -> bool:
    """Whether this command wrote the model, or the adapters, in a folder."""
    if not adapters:
        return MARK in read_json(folder / CONFIG)
    with contextlib.suppress(ValueError):  # no adapters, or damaged ones
        return MARK in WeightFiles.open(folder / PEFT_WEIGHTS).header
    return False


def bases(model: str) -> Iterator[str]:
    """--init-from of a run; if that is a run, its --init-from, too, and so on."""
    seen = set[str]()
    with contextlib.suppress(ConfigError):  # settings of another version
        while is_run(Path(model)) and model not in seen:
            seen.add(model)
            model = config_of(ModelSelection(model)).model.init_from
            yield model


def write_adapters(run: str, model: Transformer, folder: Path, screen: Screen) -> None:
    """Write the adapters of a run's model. Raises ConfigError in one line."""
    if not adapters(model):
        raise ConfigError(f"--adapters: {run} was trained without --lora-rank")
    init_from = config_of(ModelSelection(run)).model.init_from
    if not (base := loadable_base(init_from)):
        screen.warn(
            f"PEFT cannot load the base of these adapters, --init-from {init_from}: export that "
            "model too, and give its folder to PeftModel.from_pretrained"
        )
    try:
        for name, write_file in peft_files(model, base=base, **{MARK: WRITER}).items():
            write_output("--out", folder / name, write_file)
    except SafetensorError as error:  # what it raises for a full disk
        raise ConfigError(f"--out {folder}: cannot be written ({error})") from None


def tokenizer_of(arguments: Arguments) -> Tokenizer | None:
    """The tokenizer of --tokenizer, else of the run, else in the model's folder, if any."""
    folder = folder_of(arguments.run)
    if is_run(folder) or arguments.run == "shipped":
        selection = ModelSelection(str(folder), tokenizer=arguments.tokenizer or None)
        return tokenizer_of_selection(selection, config_of(selection))
    if arguments.tokenizer:
        return load_tokenizer(arguments.tokenizer)
    return load_tokenizer(str(folder)) if has_tokenizer(folder) else None


def folder_of(model: str) -> Path:
    """The folder of a run or of a model in Hugging Face's layout; another file is by itself."""
    path = local_folder(model)
    return path.parent if path.name == WEIGHTS else path


def ends_of(tokenizer: Tokenizer, size: int, name: str) -> list[int]:
    """The tokens that end a text; the first one ends an answer.

    Raises ConfigError unless `size`, of the model `name`, is the tokenizer's, perhaps with padding.
    """
    if not is_padded(size, tokenizer.n_vocab):
        raise ConfigError(
            f"{name}: has {size} tokens, but the tokenizer {tokenizer.name} has "
            f"{tokenizer.n_vocab}; give the model's own as --tokenizer"
        )
    return [tokenizer.eot, *sorted(tokenizer.stops - {tokenizer.eot})]


def ends_without_tokenizer(
    model: str, shape: ModelShape, warn: Callable[[str], object]
) -> list[int]:
    """The tokens that end a text, as the model's own settings say; else the last one."""
    found = dict.fromkeys(end_numbers(folder_of(model)))
    ends = [number for number in found if 0 <= number < shape.vocab_size]
    if not ends and shape.family != "gpt2":  # all tokenizers of GPT-2's kind end with it
        warn("the last token is taken for the end of a text; --tokenizer would say which it is")
    return ends or [shape.vocab_size - 1]


def add_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Add the files of a tokenizer, and of its chat template if that came from elsewhere."""
    if tokenizer.source:
        copy_tokenizer_files(tokenizer.source, folder)
    own, chat = read_chat_template(folder), tokenizer.chat
    if chat and (own is None or own.source != chat.source):
        (folder / CHAT_TEMPLATE).write_text(chat.source, encoding="utf-8")


def bos_of(tokenizer: Tokenizer | None, default: int) -> int:
    """The token that a text begins with, as the tokenizer names it."""
    named = tokenizer.chat.tokens.get("bos_token") if tokenizer and tokenizer.chat else None
    return tokenizer.special.get(named, default) if tokenizer and named else default


def write_ends(folder: Path, ends: Sequence[int], bos: int) -> None:
    """Say in generation_config.json where transformers' `generate` stops."""
    file = folder / GENERATION_CONFIG
    settings = {
        "bos_token_id": bos,
        "pad_token_id": ends[0],
        **read_json(file),
        "eos_token_id": list(ends) if len(ends) > 1 else ends[0],
    }
    file.write_text(json.dumps(settings, indent=1) + "\n")


def write_mark(folder: Path) -> None:
    """Say in config.json who wrote this model, so that the next export may replace it."""
    settings = {**read_json(folder / CONFIG), MARK: WRITER}
    (folder / CONFIG).write_text(json.dumps(settings, indent=1) + "\n")


def check_nothing_stale(folder: Path, new: Path) -> None:
    """Raise ConfigError for a file of another model that would be read with the `new` ones."""
    names = (INDEX, *FILES)
    stale = [name for name in names if (folder / name).exists() and not (new / name).exists()]
    if stale:
        raise ConfigError(
            f"--out {folder}: has {stale[0]} of another model, which this one does not have; take "
            "another folder"
        )


def write(
    model: Transformer, folder: Path, ends: Sequence[int], tokenizer: Tokenizer | None
) -> None:
    """Write all files aside, then move them to their places: a full disk leaves an older export
    whole. Raises ConfigError in one line.
    """
    partial = folder / f".partial-{os.getpid()}"
    made = [above for above in (folder, *folder.parents) if not above.exists()]
    with one_line("--out", folder):
        try:
            partial.mkdir(parents=True)
            bos = bos_of(tokenizer, ends[0])
            export_model(model.state_dict(), partial, shape=model.shape, eos=ends[0], bos=bos)
            if tokenizer:
                add_tokenizer(partial, tokenizer)
            write_ends(partial, ends, bos)
            write_mark(partial)
            check_nothing_stale(folder, partial)
            # the weights go first and come last: whoever is killed leaves no mix of two models
            (folder / WEIGHTS).unlink(missing_ok=True)
            for file in sorted(partial.iterdir(), key=lambda file: file.name == WEIGHTS):
                os.replace(file, folder / file.name)
            made = []
        except SafetensorError as error:  # what it raises for a full disk
            raise OSError(None, str(error)) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            with contextlib.suppress(OSError):  # leave no empty folder behind
                for above in made:
                    above.rmdir()


if __name__ == "__main__":
    main()
