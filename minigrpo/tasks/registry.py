"""What is asked and how answers are judged: the tasks that ship, on self-play or on files, or a
task of one's own.

The protocol is `minigrpo.types.Task`. A file of one's own is imported as it is: only run files that
you trust.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from ..rewards import RewardFunction
from ..types import Example, Task
from .best_move import Policy
from .chess_env import ChessEnv
from .files import Listener, Silent, Source, check_readable
from .games import Games
from .lines import Lines, json_line, text_line
from .mixed import Judge, Mixed
from .pairs import Pairs

CHESS, POLICY, BOTH = "chess-env", "policy", "chess-env+policy"
HEADS = {
    CHESS: "AP",
    POLICY: "P",
    BOTH: "AP",
}  # first letters of the prompts that a task takes from files; a file decides
ADVISING = (".txt", ".jsonl")  # endings of files that may tell what to play
ANNOTATE = "python -m minigrpo.tools.annotate"

Reader = Callable[[Path, int, int, str, Listener], Source]
READERS: dict[str, Reader] = {  # by what a file's name ends with
    ".pgn": lambda path, seed, history, heads, listener: Games(path, seed, history, listener),
    ".pgn.gz": lambda path, seed, history, heads, listener: Games(path, seed, history, listener),
    ".txt": lambda path, seed, history, heads, listener: Lines(
        path, seed, text_line, heads, listener
    ),
    ".jsonl": lambda path, seed, history, heads, listener: Lines(
        path, seed, json_line, heads, listener
    ),
}


def load_task(
    name: str, *, seed: int, history: int = 0, data: str = "", listener: Listener | None = None
) -> Task:
    """The task of --task and --data. Raises ValueError in one line that names the flag.

    Args:
        name: chess-env, policy, chess-env+policy, or a Python file with one class that has `parts`,
            `train`, `held_out` and `score`; it is called with the seed.
        data: files of questions, with commas between them, which take turns; "" for self-play. A
            .jsonl file by itself makes a task of its own with chess-env: prompts and answers.
        listener: is told what is skipped in a file, and how far the reading is.
    """
    if name not in HEADS and not name.endswith(".py"):
        raise ValueError(
            f"--task must be {', '.join(HEADS)} or a Python file (FILE.py), got {name}"
        )
    if name not in HEADS:
        if data:
            raise ValueError(f"--data goes with {', '.join(HEADS)}, got --task {name}")
        return _own_task(name, seed)
    if not data and name == CHESS:
        return ChessEnv(seed, history)
    if name == CHESS and data.endswith(".jsonl") and "," not in data:
        pairs = Pairs(Path(data), seed)
        if pairs.train(0).prompt.startswith("P: ") and listener:
            listener.warn(
                f"--data {data}: looks annotated; with --task policy its moves are judged one by "
                "one"
            )
        return pairs
    paths = [path for path in data.split(",") if path]
    try:
        return _of_files(name, paths, seed, history, listener)
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith("--") else f"--data {error}") from None


def _of_files(
    name: str, paths: list[str], seed: int, history: int, listener: Listener | None
) -> Task:
    for path in paths:  # before any is read, which may take minutes
        reader_of(path)
        check_readable(Path(path))
    no_advice = ValueError(
        f"--task {name} needs annotated positions, --data FILE.jsonl or FILE.txt with P lines, got "
        f"{','.join(paths) or 'none'}; "
        f"`{ANNOTATE} --out "
        f"FILE.jsonl{' --positions FILE.pgn' if '.pgn' in ' '.join(paths) else ''}` makes them"
    )
    if name != CHESS and not any(path.endswith(ADVISING) for path in paths):
        raise no_advice
    sources = [read_file(path, seed, history, HEADS[name], listener) for path in paths]
    judges: dict[str, Judge] = {"A: ": ChessEnv(seed), "P: ": Policy()}
    heads = {head for source in sources for head in source.heads}
    if name != CHESS and "P: " not in heads:
        raise no_advice
    if name == BOTH and "A: " not in heads:
        sources, heads = [ChessEnv(seed, history), *sources], heads | {"A: "}
    return Mixed(sources, {head: judges[head] for head in sorted(heads)})


def reader_of(path: str) -> Reader:
    """Raises ValueError for an ending that is not in the table."""
    for suffix, reader in READERS.items():
        if path.endswith(suffix):
            return reader
    raise ValueError(f"a file of questions must end with {', '.join(READERS)}, got {path}")


def read_file(
    path: str, seed: int, history: int = 0, heads: str = "AP", listener: Listener | None = None
) -> Source:
    """A file of --data as its name's ending says. Raises ValueError in one line that names it."""
    return reader_of(path)(Path(path), seed, history, heads, listener or Silent())


def _own_task(name: str, seed: int) -> Task:
    """The task in a Python file."""
    module = _load(name, "--task")
    found = [
        x
        for x in vars(module).values()
        if isinstance(x, type) and x.__module__ == module.__name__ and _is_task(x)
    ]
    if len(found) != 1:
        raise ValueError(
            f"--task {name}: must have one class with parts, train, held_out and score, "
            f"has {', '.join(x.__name__ for x in found) or 'none'}"
        )
    try:
        task: Task = found[0](seed)
        for ask in (task.train, task.held_out):
            if not isinstance(example := ask(0), Example):
                raise TypeError(
                    f"{ask.__name__}(0) must return a minigrpo.types.Example, got {example!r:.60}"
                )
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"--task {name}: {found[0].__name__}: {type(error).__name__}: {error}"
        ) from error
    return task


def load_rewards(path: str) -> list[RewardFunction]:
    """The functions that a file has decorated with `@minigrpo.reward`; none for "". Raises
    ValueError.
    """
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
