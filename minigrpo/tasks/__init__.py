"""What is asked and how answers are judged: the task that ships, pairs from a file, or a task of one's own.

The protocol is `minigrpo.types.Task`. A file of one's own is imported as it is: only run files that you trust.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from ..rewards import RewardFunction
from ..types import Example, Task
from .chess_env import ChessEnv
from .pairs import Pairs

CHESS = "chess-env"


def load_task(name: str, *, seed: int, history: int = 0, data: str = "") -> Task:
    """The task of --task and --data. Raises ValueError in one line that names the flag.

    Args:
        name: chess-env, or a Python file with one class that has `parts`, `train`, `held_out` and `score`; it is called with
            the seed.
        data: a .jsonl file of prompts and answers, which make a task by themselves; "" for none.
    """
    if data:
        if name != CHESS:
            raise ValueError(f"--data goes with the default --task, got --task {name}")
        if not data.endswith(".jsonl"):
            raise ValueError(f"--data must be a .jsonl file of objects with prompt and answer, got {data}")
        return Pairs(Path(data), seed)
    if name == CHESS:
        return ChessEnv(seed, history)
    if not name.endswith(".py"):
        raise ValueError(f"--task must be {CHESS} or a Python file (FILE.py), got {name}")
    module = _load(name, "--task")
    found = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__ and _is_task(x)]
    if len(found) != 1:
        raise ValueError(
            f"--task {name}: must have one class with parts, train, held_out and score, "
            f"has {', '.join(x.__name__ for x in found) or 'none'}"
        )
    try:
        task: Task = found[0](seed)
        for ask in (task.train, task.held_out):
            if not isinstance(example := ask(0), Example):
                raise TypeError(f"{ask.__name__}(0) must return a minigrpo.types.Example, got {example!r:.60}")
    except (Exception, SystemExit) as error:
        raise ValueError(f"--task {name}: {found[0].__name__}: {type(error).__name__}: {error}") from error
    return task


def load_rewards(path: str) -> list[RewardFunction]:
    """The functions that a file has decorated with `@minigrpo.reward`; none for "". Raises ValueError."""
    if not path:
        return []
    found = [x for x in vars(_load(path, "--rewards")).values() if isinstance(x, RewardFunction)]
    if not found:
        raise ValueError(f"--rewards {path}: has no function decorated with @minigrpo.reward()")
    return found


def _is_task(kind: type) -> bool:
    return all(hasattr(kind, name) for name in ("parts", "train", "held_out", "score"))


def _load(path: str, flag: str) -> ModuleType:
    """A Python file as a module. Raises ValueError if it cannot be read or fails."""
    spec = importlib.util.spec_from_file_location(f"minigrpo_{Path(path).stem}", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ValueError(f"{flag} {path}: must be a Python file that is there")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{flag} {path}: {type(error).__name__}: {error}") from error
    return module
