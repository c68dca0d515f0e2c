"""The built-in tasks, as data: their classes, the models that ship for them, and their settings.

This module imports nothing, so that settings are read before torch is. `tasks/base.py` makes a task
of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TaskRow:
    """A built-in task."""

    path: str  # "module:Class" in minigrpo.tasks
    shipped: str = ""  # --model shipped is minigrpo/assets/<shipped>.safetensors; "": refused
    # flat name -> value: settings that differ from the defaults, unless somebody gives them. Those
    # of a model that ships or has random weights, without --data and with it
    settings: Mapping[str, Any] = field(default_factory=dict)
    data_settings: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)  # those of every model


LONG = {"max_new_tokens": 512, "learning_rate": 1e-6}
DIALOGUE = {"loss": "dapo", "tokenizer": "dialogue"}


TASKS = {
    "chess-env": TaskRow("chess_env:ChessEnv", "chess"),
    "prompts": TaskRow("prompts:Prompts"),
    "math": TaskRow(
        "math:Math",
        "math",
        {"max_new_tokens": 32, "learning_rate": 1.5e-4, "max_steps": 200, "eval_every": 50},
        LONG,
    ),
    "countdown": TaskRow(
        "countdown:Countdown",
        "countdown",
        {"loss": "dapo", "learning_rate": 5e-4, "max_new_tokens": 72, "eval_every": 50},
        LONG | {"max_new_tokens": 1024},
    ),
    "guess": TaskRow(
        "guess:Guess",
        "guess",
        {
            **DIALOGUE,
            "prompts_per_step": 31,  # each secret
            "max_new_tokens": 20,
            "learning_rate": 2e-3,
            "max_steps": 900,
            "eval_size": 496,
        },
    ),
    "countdown-tool": TaskRow(
        "countdown:CountdownTool",
        "countdown-tool",
        {**DIALOGUE, "learning_rate": 5e-4, "max_turns": 6, "max_new_tokens": 72, "eval_every": 50},
        LONG | {"max_new_tokens": 1024},
    ),
    "code": TaskRow(
        "code:Code",
        "code",
        {"max_new_tokens": 24, "learning_rate": 1e-3, "max_steps": 250, "eval_every": 50},
        LONG,
    ),
    "calibration": TaskRow(
        "calibration:Calibration",
        "hidden-digit",
        {
            "max_new_tokens": 32,
            "learning_rate": 1e-3,
            # keeps several confidences in use; without it all questions soon get the same one, and
            # no comparison is left to learn from
            "kl_coef": 0.01,
            "max_steps": 400,
        },
        LONG,
        {"scale": "none"},
    ),
    "rlt": TaskRow(
        "rlt:RLT",
        "teacher",
        {"max_new_tokens": 24, "learning_rate": 5e-4, "max_steps": 60, "eval_every": 20},
        LONG,
        {"temperature": 0.7},
    ),
}


def settings_of_task(task: str, has_data: bool, published: bool) -> dict[str, Any]:
    """What a task changes from the defaults, by flat name; nothing for a task of your own.

    Args:
        published: whether the model is; then defaults.py has its rate and lengths.
    """
    row = TASKS.get(task, TaskRow(""))
    of_small_model = row.data_settings if has_data else row.settings
    return {**row.own, **({} if published else of_small_model)}
