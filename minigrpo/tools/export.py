"""Write a model as a folder that transformers loads with `AutoModelForCausalLM.from_pretrained`.

minigrpo export RUN_OR_MODEL --out FOLDER

The adapters of a run with --lora-rank are merged into the weights. With --adapters they are written
alone, as a folder that PEFT loads with `PeftModel.from_pretrained(base, FOLDER)`.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from safetensors import SafetensorError

from ..config import Config
from ..model.lora import PEFT_CONFIG, PEFT_WEIGHTS, adapters, merge_adapters, save_peft
from ..model.transformer import Transformer
from ..model.weight_files import CONFIG, WEIGHTS
from ..model.weights import export_model
from ..runtime.flags import ConfigError, parse
from ..runtime.logging import Screen
from ..runtime.outputs import check_output_folder, one_line
from ..runtime.settings import RECORD, read_settings
from ..runtime.trained import is_run, load_model
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
        ours, others = (WEIGHTS, CONFIG), (PEFT_WEIGHTS, PEFT_CONFIG)
        if self.adapters:
            ours, others = others, ours
            if not is_run(self.run):
                raise ConfigError(f"--adapters: {self.run} is no run, so it has no adapters")
        for name in ours:
            if (folder / name).is_dir():
                raise ConfigError(f"--out {folder}: {name} in it is a folder, not a file")
        for name in others:  # transformers would load both as one model
            if (folder / name).exists():
                raise ConfigError(f"--out {folder}: holds {name}; take another folder")


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors("stopped; nothing was written"):
        arguments = parse(Arguments, argv, description=__doc__, prog=prog or "minigrpo export")
        arguments.check()
        screen = Screen()
        name, model = load_model(arguments.run, screen.warn)
        if not arguments.adapters:
            write(Path(arguments.out), lambda partial: write_model(merge_adapters(model), partial))
        elif adapters(model):
            base = read_settings(Config, arguments.run / RECORD)["init_from"]
            write(Path(arguments.out), lambda partial: save_peft(model, partial, base=base))
        else:
            raise ConfigError(f"--adapters: {arguments.run} was trained without --lora-rank")
        screen.say(f"{name} -> {arguments.out}")


def write_model(model: Transformer, folder: Path) -> None:
    # In every tokenizer here the last token is the end of text, and the vocabulary of a run has no
    # padding after it.
    end_of_text = model.shape.vocab_size - 1
    export_model(model.state_dict(), folder, shape=model.shape, eos=end_of_text)


def write(folder: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write all files aside, then move them to their places: a full disk leaves an older
    export whole. Raises ConfigError in one line.
    """
    partial = folder / f".partial-{os.getpid()}"
    made = [above for above in (folder, *folder.parents) if not above.exists()]
    with one_line("--out", folder):
        try:
            partial.mkdir(parents=True)
            fill(partial)
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
