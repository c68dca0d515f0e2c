"""Write a model as a folder that transformers loads with `GPT2LMHeadModel.from_pretrained`.

minigrpo export RUN_OR_MODEL --out FOLDER

The adapters of a run with --lora-rank are merged into the weights. With --adapters they are written
alone, as a folder that PEFT loads with `PeftModel.from_pretrained(base, FOLDER)`.
"""

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from safetensors import SafetensorError

from ..model.lora import PEFT_WEIGHTS, adapters, merge_adapters, peft_files
from ..model.transformer import Transformer
from ..model.weight_files import CONFIG, WEIGHTS
from ..model.weights import export_model
from ..runtime.flags import ConfigError, parse
from ..runtime.logging import Screen
from ..runtime.outputs import check_output_folder, one_line, write_output
from ..runtime.trained import is_run, load_model
from .loading import ModelSelection, config_of
from .messages import one_line_errors


@dataclass(frozen=True)
class Arguments:
    run: Annotated[Path, tyro.conf.Positional]
    """A run's folder, a model (GPT-2 safetensors or their folder), or shipped."""
    out: str
    """The folder to write."""
    adapters: bool = False
    """Write the adapters of a run alone, as PEFT stores them."""

    def check(self) -> None:
        """Raises ConfigError, in one line, for a folder that cannot or must not be written."""
        check_output_folder("--out", self.out)
        folder = Path(self.out)
        if is_run(folder) or (folder / "checkpoints").exists():
            raise ConfigError(f"--out {folder}: holds a run, which an export would overwrite")
        if self.run.exists() and folder.exists() and self.run.samefile(folder):
            raise ConfigError(f"--out {folder}: is the model to export; take another folder")
        for name in (WEIGHTS, CONFIG):
            if (folder / name).is_dir():
                raise ConfigError(f"--out {folder}: {name} in it is a folder, not a file")
        other = WEIGHTS if self.adapters else PEFT_WEIGHTS
        if (folder / other).exists():  # transformers would load both as one model
            raise ConfigError(f"--out {folder}: holds {other}; take another folder")
        if self.adapters and not is_run(self.run):
            raise ConfigError(f"--adapters: {self.run} is no run, so it has no adapters")


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors("stopped; nothing was written"):
        arguments = parse(Arguments, argv, description=__doc__, prog=prog or "minigrpo export")
        arguments.check()
        screen = Screen()
        name, model = load_model(arguments.run, screen.warn)
        if arguments.adapters:
            write_adapters(arguments.run, model, Path(arguments.out))
        else:
            write(merge_adapters(model), Path(arguments.out))
        screen.say(f"{name} -> {arguments.out}")


def write_adapters(run: Path, model: Transformer, folder: Path) -> None:
    """Write the adapters of a run's model. Raises ConfigError in one line."""
    if not adapters(model):
        raise ConfigError(f"--adapters: {run} was trained without --lora-rank")
    base = config_of(ModelSelection(run)).model.init_from
    try:
        for name, write_file in peft_files(model, base=base).items():
            write_output("--out", folder / name, write_file)
    except SafetensorError as error:  # what it raises for a full disk
        raise ConfigError(f"--out {folder}: cannot be written ({error})") from None


def write(model: Transformer, folder: Path) -> None:
    """Write all files aside, then move them to their places: a full disk leaves an older export
    whole. Raises ConfigError in one line.
    """
    # In every tokenizer here the last token is the end of text, and the vocabulary of a run has no
    # padding after it.
    end_of_text = model.shape.vocab_size - 1
    partial = folder / f".partial-{os.getpid()}"
    made = [above for above in (folder, *folder.parents) if not above.exists()]
    with one_line("--out", folder):
        try:
            partial.mkdir(parents=True)
            export_model(model.state_dict(), partial, shape=model.shape, eos=end_of_text)
            for file in partial.iterdir():
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
