"""minigrpo: Group Relative Policy Optimization. Start with trainer.py.

The modules at this level are the algorithm, its settings and what all packages use. The packages
are model/, text/ (tokenizers and chat templates), sampling/, rewards/, tasks/, turns/ (tools and
environments), sandbox/ (other people's code), runtime/ (device and processes), run/ (the folder of
a run and what it prints) and tools/ (the commands).
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["Config", "Example", "Task", "Trainer", "Transformer", "reward", "train"]

if TYPE_CHECKING:
    from .api import train
    from .config import Config
    from .model.transformer import Transformer
    from .rewards.functions import reward
    from .task import Task
    from .trainer import Trainer
    from .types import Example
else:
    _MODULES = {
        "Config": "config",
        "Trainer": "trainer",
        "Transformer": "model.transformer",
        "reward": "rewards.functions",
        "Task": "task",
        "Example": "types",
        "train": "api",
    }

    def __getattr__(name: str) -> object:
        """Import a name on first use, so that `minigrpo --help` does not wait for torch."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
