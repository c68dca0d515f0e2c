"""Turns --task and --data into a task: a built-in one on self-play or files, or one of your own.

The protocol that a task implements is `minigrpo.types.Task`. A Python file given as --task or
--rewards is imported, which runs it: use only files that you trust.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from ..rewards import RewardFunction
from ..runtime.renamed import modern
from ..types import Example, Task
from . import best_move, transitions
from .best_move import BestMove
from .chess_env import ChessEnv
from .files import ExampleSource, Listener, SilentListener, check_readable
from .games import Games
from .lines import Lines, json_line, text_line
from .mixed import Mixed
from .pairs import Pairs

CHESS_ENV, BEST_MOVE, BOTH = "chess-env", "best-move", "chess-env+best-move"
NEXT_POSITION, WHAT_TO_PLAY = transitions.PROMPT_PREFIX, best_move.PROMPT_PREFIX
ALL_PREFIXES = (NEXT_POSITION, WHAT_TO_PLAY)
# which questions a task takes from a file; the kinds that are found decide the reward parts
WANTED = {CHESS_ENV: ALL_PREFIXES, BEST_MOVE: (WHAT_TO_PLAY,), BOTH: ALL_PREFIXES}
MAY_HAVE_BEST_MOVES = (".txt", ".jsonl")  # files that may hold best-move questions
ANNOTATE = "python -m minigrpo.tools.annotate"

# (path, seed, history, wanted prompt prefixes, listener) -> the examples of a file
Reader = Callable[[Path, int, int, Sequence[str], Listener], ExampleSource]
READERS: dict[str, Reader] = {  # by how the file's name ends
    ".pgn": lambda path, seed, history, wanted, told: Games(path, seed, history, told),
    ".pgn.gz": lambda path, seed, history, wanted, told: Games(path, seed, history, told),
    ".txt": lambda path, seed, history, wanted, told: Lines(path, seed, text_line, wanted, told),
    ".jsonl": lambda path, seed, history, wanted, told: Lines(path, seed, json_line, wanted, told),
}
TASK_MEMBERS = ("parts", "train", "held_out", "score")


def load_task(
    name: str, *, seed: int, history: int = 0, data: str = "", listener: Listener | None = None
) -> Task:
    """Return the task of --task and --data.

    Args:
        name: chess-env, best-move, chess-env+best-move (or one of their earlier names), or a Python
            file with one class that has `parts`, `train`, `held_out` and `score`; the class is
            called with the seed.
        history: how many earlier moves a chess-env prompt contains.
        data: files of questions, separated by commas, which take turns; "" for self-play. With
            chess-env, a single .jsonl file holds prompts and answers of any kind (`Pairs`).
        listener: receives reading progress and skipped records.

    Raises:
        ValueError: in one line that names the flag.
    """
    name = modern({"task": name})["task"]
    if name not in WANTED:
        if not name.endswith(".py"):
            allowed = ", ".join(WANTED)
            raise ValueError(f"--task must be {allowed} or a Python file (FILE.py), got {name}")
        if data:
            raise ValueError(f"--data goes with {', '.join(WANTED)}, got --task {name}")
        return _own_task(name, seed)
    if not data and name == CHESS_ENV:
        return ChessEnv(seed, history)
    if name == CHESS_ENV and data.endswith(".jsonl") and "," not in data:
        return _pairs(data, seed, listener)
    paths = [path for path in data.split(",") if path]
    try:
        return _task_of_files(name, paths, seed, history, listener)
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith("--") else f"--data {error}") from None


def _pairs(data: str, seed: int, listener: Listener | None) -> Pairs:
    pairs = Pairs(Path(data), seed)
    if pairs.train(0).prompt.startswith(WHAT_TO_PLAY) and listener:
        listener.warn(
            f"--data {data}: looks annotated; --task {BEST_MOVE} scores its moves one by one"
        )
    return pairs


def _task_of_files(
    name: str, paths: Sequence[str], seed: int, history: int, listener: Listener | None
) -> Task:
    for path in paths:  # check all paths first: reading one file may take minutes
        reader_of(path)
        check_readable(Path(path))
    if name != CHESS_ENV and not any(path.endswith(MAY_HAVE_BEST_MOVES) for path in paths):
        raise _not_annotated(name, paths)
    sources = [read_file(path, seed, history, WANTED[name], listener) for path in paths]
    found = {prefix for source in sources for prefix in source.prompt_prefixes}
    if name != CHESS_ENV and WHAT_TO_PLAY not in found:
        raise _not_annotated(name, paths)
    if name == BOTH and NEXT_POSITION not in found:
        sources, found = [ChessEnv(seed, history), *sources], {*found, NEXT_POSITION}
    scorers = {NEXT_POSITION: ChessEnv(seed), WHAT_TO_PLAY: BestMove()}
    return Mixed(sources, {prefix: scorers[prefix] for prefix in sorted(found)})


def _not_annotated(name: str, paths: Sequence[str]) -> ValueError:
    positions = " --positions FILE.pgn" if any(".pgn" in path for path in paths) else ""
    return ValueError(
        f"--task {name} needs annotated positions, --data FILE.jsonl or FILE.txt with P lines, got "
        f"{','.join(paths) or 'none'}; `{ANNOTATE} --out FILE.jsonl{positions}` makes them"
    )


def reader_of(path: str) -> Reader:
    """Return the reader for a file's name. Raises ValueError for an ending not in READERS."""
    for suffix, reader in READERS.items():
        if path.endswith(suffix):
            return reader
    raise ValueError(f"a file of questions must end with {', '.join(READERS)}, got {path}")


def read_file(
    path: str,
    seed: int,
    history: int = 0,
    prompt_prefixes: Sequence[str] = ALL_PREFIXES,
    listener: Listener | None = None,
) -> ExampleSource:
    """Return the examples of a file; its extension determines the format.

    Args:
        prompt_prefixes: how the wanted prompts begin; other questions in the file are ignored.

    Raises:
        ValueError: in one line that names the file.
    """
    reader = reader_of(path)
    return reader(Path(path), seed, history, prompt_prefixes, listener or SilentListener())


def _own_task(name: str, seed: int) -> Task:
    """The task in a Python file, after checking one example of each split."""
    module = _load(name, "--task")
    found = [
        x
        for x in vars(module).values()
        if isinstance(x, type)
        and x.__module__ == module.__name__  # not a task that the file imports
        and all(hasattr(x, member) for member in TASK_MEMBERS)
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
    """Return the functions that a Python file decorates with `@minigrpo.reward`; none for "".

    Raises:
        ValueError: in one line, for a file that cannot be imported or has no such function.
    """
    if not path:
        return []
    found = [x for x in vars(_load(path, "--rewards")).values() if isinstance(x, RewardFunction)]
    if not found:
        raise ValueError(f"--rewards {path}: has no function decorated with @minigrpo.reward()")
    return found


def _load(path: str, flag: str) -> ModuleType:
    """Import a Python file. Raises ValueError, which names the flag, if that fails."""
    spec = importlib.util.spec_from_file_location(f"minigrpo_{Path(path).stem}", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ValueError(f"{flag} {path}: must be a Python file that exists")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their own module there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{flag} {path}: {type(error).__name__}: {error}") from error
    return module
