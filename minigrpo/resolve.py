"""What names in a config stand for now, so that a resumed run gets the same files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .config import Config
from .model.hf import hub_folder
from .parts import Given, Parts, own_tokenizer

CHESS_FILES = (".pgn", ".pgn.gz")  # --task auto: what only chess-env reads
MODELS = "model", "reference", "teacher"  # the settings that name models


def resolve(config: Config, given: Given | None = None, models: Sequence[str] = MODELS) -> Config:
    """The config with names that do not change; `models`: the settings whose models are needed.

    ORG/NAME gets the commit on the Hub; --tokenizer auto becomes the model's own tokenizer and chat
    template; --task auto becomes a task. Objects get a text that stands for them.
    """
    settings = config.flat() | (given or Given()).as_settings()
    if settings["task"] == "auto":
        settings |= task_of(Parts(config, given=given))
    for name in models:
        model = settings[name]
        folder = hub_folder(model, weights=False)
        if folder != Path(model):  # on the Hub, where the folder is named by the commit
            settings[name] = f"{model.partition('@')[0]}@{folder.name}"
    if settings["tokenizer"] == "auto":
        own = own_tokenizer(settings["model"])
        settings |= {name: settings[name] or value for name, value in own.items()}
        settings["tokenizer"] = own["tokenizer"]
    return config.replace(**settings)


def task_of(parts: Parts) -> dict[str, Any]:
    """--task auto: `prompts` for rows, else `chess-env`; the caller's rewards alone are paid."""
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
