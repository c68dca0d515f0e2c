"""Write a model as a folder that transformers loads with `GPT2LMHeadModel.from_pretrained`.

minigrpo export RUN_OR_MODEL --out FOLDER
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

from ..model.transformer import Transformer
from ..model.weight_files import CONFIG, WEIGHTS
from ..model.weights import export_model
from ..runtime.flags import ConfigError, parse
from ..runtime.logging import Screen
from ..runtime.outputs import check_output_folder, one_line
from ..runtime.trained import is_run, load_model
from .messages import one_line_errors


@dataclass(frozen=True)
class Arguments:
    run: Annotated[Path, tyro.conf.Positional]
    """A run's folder, a model (GPT-2 safetensors or their folder), or shipped."""
    out: str
    """The folder to write."""

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


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors("stopped; nothing was written"):
        arguments = parse(Arguments, argv, description=__doc__, prog=prog or "minigrpo export")
        arguments.check()
        screen = Screen()
        name, model = load_model(arguments.run, screen.warn)
        write(model, Path(arguments.out))
        screen.say(f"{name} -> {arguments.out}")


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
