"""Which tokenizer a model has: that of its own folder, or of the run that it comes from.

`--tokenizer auto` stands for it. A run writes into its config.toml what that was: so a run that was
made from another run still has its tokenizer when the other one is deleted.
"""

import os
from collections.abc import Callable
from pathlib import Path

from ..config import Config
from ..model.hub import HubModel
from ..model.tokenizer import Tokenizer, load_tokenizer
from ..model.tokenizer_files import has_tokenizer
from .flags import ConfigError
from .settings import is_run, read_record
from .text import check_file_name

AUTO, CHESS = "auto", "chess"


def with_own_tokenizer(config: Config, model: str = "") -> Config:
    """The config with the tokenizer, and the chat template, that --tokenizer auto stands for.

    Args:
        model: the model's path; empty: --init-from.

    Raises ConfigError, in one line, for a run whose settings or tokenizer cannot be found.
    """
    if config.model.tokenizer != AUTO:
        return config
    name, template = own_tokenizer(model or config.model.init_from)
    template = config.model.chat_template or template
    return config.derived(tokenizer=name or CHESS, chat_template=template)


def warn_of_other_tokenizer(
    model: str, tokenizer: Tokenizer, warn: Callable[[str], object]
) -> None:
    """Say that a model's own tokenizer has other tokens than this one.

    Their numbers may fit the model all the same, because vocabularies are padded. An own tokenizer
    that cannot be read is not compared.
    """
    try:
        name, _ = own_tokenizer(model)
        if name in ("", tokenizer.name):
            return
        own = load_tokenizer(name)
    except ValueError:
        return
    if own.fingerprint["vocabulary"] != tokenizer.fingerprint["vocabulary"]:
        warn(
            f"--tokenizer {tokenizer.name} has other tokens than {name}, which belongs to "
            f"{model}: the same numbers mean other texts to the model"
        )


def own_tokenizer(model: str) -> tuple[str, str]:
    """--tokenizer and --chat-template of a model; the second is empty if the model's own counts.

    Both are empty for a model without a tokenizer of its own.

    Args:
        model: scratch, shipped, or the path of a run, of a model's folder or of a file in one.

    Raises ConfigError.
    """
    if model in ("scratch", "shipped"):
        return CHESS if model == "shipped" else "", ""
    try:
        check_file_name(model)
    except ValueError as error:
        raise ConfigError(f"--init-from {error}") from None
    if HubModel.of(model):
        return model, ""
    if not os.path.lexists(model):
        return "", ""  # whoever loads the model says that it is not there
    folder = Path(model) if os.path.isdir(model) else Path(model).parent
    if is_run(folder):
        settings = read_record(Config, folder)
        name, template = settings.get("tokenizer", CHESS), settings.get("chat_template", "")
        if name != AUTO:
            return _found(name, "tokenizer", folder), _found(template, "chat-template", folder)
    return (str(folder) if has_tokenizer(folder) else ""), ""


def is_path(tokenizer: str) -> bool:
    """Whether a value of --tokenizer is a path."""
    return tokenizer not in (AUTO, CHESS, "gpt2") and HubModel.of(tokenizer) is None


def _found(path: str, flag: str, run: Path) -> str:
    """A path in a run's settings. Raises ConfigError if nothing is there."""
    if path and is_path(path) and not os.path.lexists(path):
        raise ConfigError(
            f"{run}: was trained with --{flag} {path}, which is not found from this folder; give "
            f"--{flag} with the path that it has here"
        )
    return path
