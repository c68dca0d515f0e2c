"""What names in a config stand for now, so that a resumed run gets the same files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .config import Config
from .model.hf import hub_folder
from .parts import NOTHING_GIVEN, Given, Parts, own_tokenizer

CHESS_FILES = (".pgn", ".pgn.gz", ".txt")  # --task auto: what only chess-env reads
MODELS = "model", "reference", "teacher"  # the settings that name models


def resolve(config: Config, given: Given = NOTHING_GIVEN, models: Sequence[str] = MODELS) -> Config:
    """The config with names that do not change.

    ORG/NAME gets the commit on the Hub; --tokenizer auto becomes the model's own tokenizer and chat
    template; --task auto becomes a task. Objects get a text that stands for them.

    Args:
        models: the settings whose models are needed.
    """
    settings = config.flat() | given.as_settings()
    if settings["task"] == "auto":
        settings |= task_of(Parts(config, given=given))
    for name in models:
        settings[name] = pinned(settings[name])
    if settings["tokenizer"] == "auto":
        tokenizer, template = own_tokenizer(settings["model"])
        settings["tokenizer"] = tokenizer
        settings["chat_template"] = settings["chat_template"] or template
    return config.replace(**settings)


def task_of(parts: Parts) -> dict[str, Any]:
    """The settings that --task auto stands for: `prompts` for rows, else `chess-env`.

    With reward functions of the caller's, nothing that is built in is paid.
    """
    settings = parts.config.task
    functions = parts.functions
    environments = parts.own_environments
    has_rows = parts.given.data is not None or parts.given.eval_data is not None
    files = settings.data or settings.eval_data
    if environments or has_rows or (files and not files.endswith(CHESS_FILES)):
        is_paid = functions or (environments and environments.parts)
        judge = {"judge": "none"} if is_paid else {}
        return {"task": "prompts", "task_args": {**judge, **settings.task_args}}
    weights = {function.name: function.weight for function in functions}
    return {"task": "chess-env", "reward_weights": settings.reward_weights or weights}


def pinned(model: str) -> str:
    """The name of a model, of one on the Hub with its commit."""
    folder = hub_folder(model, weights=False)
    return model if folder == Path(model) else f"{model.partition('@')[0]}@{folder.name}"
