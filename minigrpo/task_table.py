"""The built-in tasks, as data: their classes, the models that ship for them, and their settings.

This module imports nothing, so that settings are read before torch is. `tasks/base.py` makes a task
of a row.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class TaskRow(NamedTuple):
    path: str  # "module:Class" in minigrpo.tasks
    shipped: str = ""  # --model shipped is minigrpo/assets/<shipped>.safetensors; "": refused
    # flat name -> value: settings that differ from the defaults, unless somebody gives them. Those
    # of every model, and those of a model that ships or has random weights: defaults.py has the
    # rates and lengths of published ones
    own: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}


DIALOGUE = {"loss": "dapo", "tokenizer": "dialogue"}


TASKS = {
    "chess-env": TaskRow("chess_env:ChessEnv", "chess"),
    "prompts": TaskRow("prompts:Prompts"),
    "math": TaskRow(
        "math:Math",
        "math",
        settings={
            "max_new_tokens": 32,
            "learning_rate": 1.5e-4,
            "max_steps": 200,
            "eval_every": 50,
        },
    ),
    "countdown": TaskRow(
        "countdown:Countdown",
        "countdown",
        settings={"loss": "dapo", "learning_rate": 5e-4, "max_new_tokens": 72, "eval_every": 50},
    ),
    "guess": TaskRow(
        "guess:Guess",
        "guess",
        settings={
            **DIALOGUE,
            "prompts_per_step": 31,  # each secret
            "max_new_tokens": 20,
            "learning_rate": 3e-3,
            "num_iterations": 4,
            # With neither of these, some seeds settle on a search that misses three numbers. The
            # start guesses at random, so the KL keeps guesses apart, and keeps them numbers.
            "scale": "mean",
            "kl_coef": 0.003,
            "max_steps": 600,
            "eval_size": 496,
        },
    ),
    "countdown-tool": TaskRow(
        "countdown:CountdownTool",
        "countdown-tool",
        settings={
            **DIALOGUE,
            "learning_rate": 1e-3,
            "num_iterations": 2,
            "max_turns": 5,
            "max_new_tokens": 72,
            "max_steps": 500,
        },
    ),
    "code": TaskRow(
        "code:Code",
        "code",
        settings={"max_new_tokens": 24, "learning_rate": 1e-3, "max_steps": 250, "eval_every": 50},
    ),
    "calibration": TaskRow(
        "calibration:Calibration",
        "hidden-digit",
        {"scale": "none"},
        {
            "max_new_tokens": 32,
            "learning_rate": 1e-3,
            # keeps several confidences in use; without it all questions soon get the same one, and
            # no comparison is left to learn from
            "kl_coef": 0.01,
            "max_steps": 400,
        },
    ),
    "rlt": TaskRow(
        "rlt:RLT",
        "teacher",
        {"temperature": 0.7},
        {"max_new_tokens": 24, "learning_rate": 5e-4, "max_steps": 60, "eval_every": 20},
    ),
}
